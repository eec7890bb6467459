"""Requests at and beyond every bound of SGLang's own schema, at each kind of engine: none may end one.

Every path that a client may use, every field that ``/openapi.json`` and the sampling parameters have, values of all
types; one to three unusual fields a request, several requests at once, and a plain neighbour whose answer must stay
right. Where an engine ends, the requests of that moment are tried again one by one, and what ended it is named.

    python -m bench poison --kinds temporal,pair --requests 2000
    python -m bench poison --kinds stock           # what ends SGLang alone on the same CPU platform; not judged

The exit status is 1 where an engine of ours ended, or none was asked, or a request was never answered, or a
neighbour's answer was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.check.poison.engines import KINDS, Engines
from bench.check.poison.values import Generator, Schema, Sent, read_declared
from bench.harness import report
from bench.harness.bench import Result, is_complete, measuring
from bench.harness.cli import DEFAULT_PROFILE, add_budget, add_output, add_quick
from pla_sglang.common.errors import ConfigError
from pla_sglang.testing.server import ServerError

AT_ONCE = 8
QUICK_REQUESTS = 64
# SGLang's usual paths have most of the fields; the others share what is left.
WEIGHTS = {"/generate": 12, "/v1/chat/completions": 4, "/v1/completions": 4, "/v1/embeddings": 2, "/v1/score": 2}
SHOWN_CHARS = 600


@dataclass
class Found:
    """Of one kind of engine."""

    requests: int = 0
    engines_ended: int = 0
    hung: int = 0
    neighbours: int = 0
    neighbours_wrong: int = 0
    unfinished: str = ""
    statuses: Counter[str] = field(default_factory=Counter)
    killers: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    stuck: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "statuses": dict(self.statuses.most_common())}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ours = ",".join(name for name, kind in KINDS.items() if not kind.stock)
    parser.add_argument("--kinds", default=ours, help=f"comma-separated, from: {', '.join(KINDS)}")
    parser.add_argument("--requests", type=int, default=600, help="at each kind of engine")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="requests that run beside each other")
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help="of the emulated device")
    add_quick(parser)
    add_budget(parser)
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    names = [name for name in options.kinds.split(",") if name]
    for name in names:
        if name not in KINDS:
            raise ConfigError(f"--kinds {name!r} is not known; allowed: {', '.join(KINDS)}")
    count = min(options.requests, QUICK_REQUESTS) if options.quick else options.requests
    end_s = float("inf") if options.budget_s is None else time.monotonic() + options.budget_s
    declared = read_declared()
    found: dict[str, Found] = {}
    with measuring():
        for name in names:
            engines = Engines(KINDS[name], options.out, options.profile)
            found[name] = Found()
            try:
                Search(engines, declared, found[name], options).run(count, end_s)
            except ServerError as error:  # one that does not start on a busy machine costs no figures of others
                found[name].unfinished = str(error)[:SHOWN_CHARS]
                report.say(found[name].unfinished)
            finally:
                engines.close()
    return show_and_emit(options, found)


class Search:
    """At one kind of engine; what is found stands in ``found``, also after an interruption."""

    def __init__(self, engines: Engines, declared: Any, found: Found, options: argparse.Namespace) -> None:
        self._engines, self._declared, self._found, self._options = engines, declared, found, options

    def run(self, count: int, end_s: float) -> None:
        engines, found = self._engines, self._found
        engines.start()
        schema = Schema(engines.servers[-1].get("/openapi.json"), self._declared)
        generator = Generator(schema, self._options.seed)
        weighted = [path for path in sorted(schema.fields) for _ in range(WEIGHTS.get(path, 1))]
        rng = random.Random(self._options.seed)
        report.say(f"{engines.kind.name}: ready; {schema.describe()}")
        with ThreadPoolExecutor(self._options.at_once + 1) as pool:
            while found.requests < count and time.monotonic() < end_s and is_complete():
                wave = [generator.make_request(rng.choice(weighted)) for _ in range(self._options.at_once)]
                if not self._send(wave, pool):
                    self._name_killers(wave, pool)
                if found.requests % (20 * self._options.at_once) == 0:
                    report.say(f"{engines.kind.name}: {found.requests} requests, {found.engines_ended} engines ended")

    def _send(self, wave: Sequence[Sent], pool: ThreadPoolExecutor) -> bool:
        """Tells whether the engine lives."""
        engines, found = self._engines, self._found
        answers = [pool.submit(engines.send, sent) for sent in wave]
        beside = engines.ask_neighbour()
        statuses = [answer.result() for answer in answers]
        found.requests += len(wave)
        found.statuses.update(statuses)
        if engines.why_ended() is not None:
            return False
        found.neighbours += 1
        after = beside if engines.is_right(beside) else engines.ask_neighbour()
        if not engines.is_right(beside):
            found.neighbours_wrong += 1
            found.wrong.append({"got": str(beside)[:200], "right_after": engines.is_right(after), **_shown(wave)})
        if engines.why_ended() is not None:
            return False
        hung = [sent for sent, status in zip(wave, statuses, strict=True) if status == "hung"]
        found.hung += len(hung)
        found.stuck += [_shown([sent]) for sent in hung]
        return engines.is_right(after)

    def _name_killers(self, wave: Sequence[Sent], pool: ThreadPoolExecutor) -> None:
        """The engine has ended, or serves nobody: which request alone does that to a fresh one?"""
        engines, found = self._engines, self._found
        why = engines.why_ended() or "serves nobody"
        found.engines_ended += 1
        report.say(f"{engines.kind.name}: an engine ended: {why}")
        named = False
        self._restart()
        for sent in wave:
            engines.send(sent)
            right = engines.is_right(engines.ask_neighbour())
            if (alone := engines.why_ended()) is not None or not right:
                found.killers.append({"why": alone or "serves nobody", "alone": True, **_shown([sent])})
                report.say(json.dumps(found.killers[-1])[:SHOWN_CHARS])
                named = True
                self._restart()
        if not named:
            found.killers.append({"why": why, "alone": False, **_shown(wave)})

    def _restart(self) -> None:
        self._engines.stop()
        self._engines.start()


def _shown(wave: Sequence[Sent]) -> dict[str, Any]:
    return {"sent": [{"path": sent.path, "fields": sent.fields, "body": json.dumps(sent.body)[:900]} for sent in wave]}


def show_and_emit(options: argparse.Namespace, found: dict[str, Found]) -> int:
    columns = ("requests", "engines_ended", "hung", "neighbours", "neighbours_wrong")
    rows = [[name, *(getattr(each, column) for column in columns)] for name, each in found.items()]
    report.show("requests at and beyond the bounds of each field", ["engine", *columns], rows)
    ours = [each for name, each in found.items() if not KINDS[name].stock]
    result: dict[str, Any] = {"bench": "poison", "seed": options.seed}
    result |= {column: sum(getattr(each, column) for each in ours) for column in columns}
    result["kinds"] = {name: each.as_json() for name, each in found.items()}
    report.emit(result | report.environment(), "poison", options.out)
    bad = any(result[column] for column in ("engines_ended", "hung", "neighbours_wrong"))
    return int(bad or any(each.unfinished or not each.requests for each in ours))


def page(result: Result) -> str:
    header = ["engine", "requests", "engines ended", "hung", "neighbours wrong"]
    rows = [
        [name, *(str(of[column]) for column in ("requests", "engines_ended", "hung", "neighbours_wrong"))]
        for name, of in result["kinds"].items()
    ]
    return report.markdown(header, rows)


PAGES = {"poison": page}
