"""Does our router serve what full instances serve without it, and do malformed requests harm others?

Requests at twice the capacity. Two mock instances serve 4 requests at a time in 0.4 s and else refuse as SGLang does.
Two emulated engines have ``--max-queued-requests 4``. Both forms of request are offered to each, whole and streamed:
first to the instances in turn, then to our router before them. Then six malformed requests are sent beside good ones,
and six malformed streams, whose head an instance has sent before it finds the mistake and breaks off. Last, ten clients
send nothing but mistakes of 30 kinds beside good requests, at three fleets (``mistakes.py``).
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.check import mistakes
from bench.harness.bench import Result, measuring
from bench.harness.cli import add_emulated_device, add_output, add_quick, device_flags
from bench.harness.report import device_conditions, emit, environment, markdown, say, show
from bench.harness.servers import Router, running_cluster, running_router
from pla_sglang.common.errors import ConfigError
from pla_sglang.testing.mock_instance import running_mocks
from pla_sglang.testing.server import open_url

GOAL = 0.97
OVERLOAD, MISTAKES = PARTS = ("overload", "mistakes")
MALFORMED = {"text": "a", "sampling_params": {"temperature": "x"}}
MALFORMED_COUNT = 6
REQUEST_TIMEOUT_S = 120.0
PROMPT_TOKENS = 8000
_OPENED = re.compile(r'^pla_router_worker_state_changes_total\{reason="breaker",state="suspect"\} (\S+)', re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--duration-s", type=float, default=15.0, help="of one run")
    parser.add_argument("--mock-rate", type=float, default=40.0, help="requests/s to both mocks together")
    parser.add_argument("--engine-rate", type=float, default=20.0, help="the same to engines, divided by --time-scale")
    parser.add_argument("--rounds", type=int, default=2, help="straight and through the router, at engines")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--fleets", default=",".join(mistakes.FLEETS), help="comma-separated, for the mistakes")
    parser.add_argument("--mistake-rounds", type=int, default=3, help="good requests alone, and beside mistakes")
    parser.add_argument("--good", type=int, default=mistakes.GOOD_REQUESTS, help="requests beside mistakes, a round")
    add_emulated_device(parser, time_scale=2.0)
    add_output(parser, seed=1)
    add_quick(parser)


@dataclass
class Load:
    """Requests at a steady rate, each with a prompt of its own where it has token ids."""

    rate: float
    count: int
    tokens: int
    rng: random.Random

    def body(self, stream: bool) -> dict[str, Any]:
        ids = [self.rng.randrange(100, 2000) for _ in range(self.tokens)]
        params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        return {**({"input_ids": ids} if ids else {"text": "hello"}), "sampling_params": params, "stream": stream}


async def send_request(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    """How it has ended: served, refused (for load), or the status or error otherwise."""
    try:
        async with session.post(f"{url}/generate", json=body) as answer:
            text = await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__
    if answer.status in (429, 503) or '"status_code":503' in text:
        return "refused"
    return "served" if answer.status == 200 and '"error"' not in text else str(answer.status)


async def offer(urls: Sequence[str], load: Load, *, stream: bool, beside: Sequence[str] = ()) -> Counter[str]:
    """Open loop, to ``urls`` in turn. ``beside``: malformed requests go there meanwhile, and are counted apart; streams
    where these are."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        loop = asyncio.get_running_loop()
        start_s, tasks, malformed = loop.time(), [], []
        bodies = [load.body(stream) for _ in range(load.count)]
        for number, body in enumerate(bodies):
            await asyncio.sleep(start_s + number / load.rate - loop.time())
            tasks.append(loop.create_task(send_request(session, urls[number % len(urls)], body)))
            if number < len(beside):
                malformed.append(
                    loop.create_task(send_request(session, beside[number], {**MALFORMED, "stream": stream}))
                )
        ends = Counter(await asyncio.gather(*tasks))
        return ends + Counter(f"malformed: {ended}" for ended in await asyncio.gather(*malformed))


@dataclass
class Findings:
    """What was counted, by form of request: ``mocks, whole`` and so on."""

    direct: dict[str, Counter[str]] = field(default_factory=dict)
    router: dict[str, Counter[str]] = field(default_factory=dict)
    malformed: dict[str, Counter[str]] = field(default_factory=dict)
    opened: float = 0.0
    mistakes: dict[str, dict[str, Any]] = field(default_factory=dict)  # by fleet

    def others_failed(self) -> int:
        """Good requests that were not served beside malformed ones."""
        counts = [(ended, count) for ends in self.malformed.values() for ended, count in ends.items()]
        return sum(count for ended, count in counts if ended != "served" and not ended.startswith("malformed"))


def measure(findings: Findings, name: str, instances: Sequence[str], router: str, load: Load, rounds: int) -> None:
    """All runs at one kind of instances; who comes first changes from round to round."""
    for stream in (False, True):
        form = f"{name}, {'streamed' if stream else 'whole'}"
        arms = [(findings.direct.setdefault(form, Counter()), instances)]
        arms.append((findings.router.setdefault(form, Counter()), [router]))
        for turn in range(rounds):
            for counts, urls in arms[:: -1 if turn % 2 else 1]:
                counts.update(asyncio.run(offer(urls, load, stream=stream)))
        say(f"{form}: straight {dict(arms[0][0])}, through the router {dict(arms[1][0])}")
    small = Load(load.rate / 8, 3 * MALFORMED_COUNT, load.tokens // 8, load.rng)
    for stream in (False, True):
        beside = asyncio.run(offer([router], small, stream=stream, beside=[router] * MALFORMED_COUNT))
        findings.malformed[f"{name}, streamed" if stream else name] = beside
    with open_url(f"{router}/metrics") as answer:
        findings.opened += sum(map(float, _OPENED.findall(answer.read().decode())))


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError."""
    parts, fleets = ([name for name in text.split(",") if name] for text in (options.parts, options.fleets))
    for flag, names, known in (("--parts", parts, PARTS), ("--fleets", fleets, tuple(mistakes.FLEETS))):
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"{flag} {unknown[0]!r} is not known; allowed: {', '.join(known)}")
    if options.quick:
        options.duration_s, options.rounds, options.mistake_rounds, options.good = 3.0, 1, 1, 20
    options.out.mkdir(parents=True, exist_ok=True)
    findings = Findings()
    with measuring():
        if OVERLOAD in parts:
            measure_overload(findings, options)
        if MISTAKES in parts:
            findings.mistakes = mistakes.run_fleets(fleets, options.mistake_rounds, options)
    return report(findings, options)


def measure_overload(findings: Findings, options: argparse.Namespace) -> None:
    rng = random.Random(options.seed)
    with running_mocks("crowded", "crowded") as mocks:
        named: dict[str, Any] = {"instances": [{"name": url, "kind": "unified", "url": url} for url in mocks.urls]}
        load = Load(options.mock_rate, round(options.mock_rate * options.duration_s), 0, rng)
        log = options.out / "overload_router.mocks.log"
        with running_router(Router("pla", "round-robin"), named, log) as router:
            measure(findings, "mocks", mocks.urls, router, load, 1)
    fleet = ["--unified", "2", "--router", "pla", "--policy", "round-robin", "--max-queued-requests", "4"]
    flags = [*fleet, *device_flags(options.profile, options.time_scale)]
    with running_cluster(flags, options.out, "overload_router") as described:
        urls = [instance["url"] for instance in described["instances"]]
        rate = options.engine_rate / options.time_scale
        load = Load(rate, round(rate * options.duration_s), PROMPT_TOKENS, rng)
        measure(findings, "engines", urls, described["url"], load, options.rounds)


def report(findings: Findings, options: argparse.Namespace) -> int:
    shares = {form: findings.router[form]["served"] / direct["served"] for form, direct in findings.direct.items()}
    names = ("seed", "profile", "time_scale", "duration_s", "mock_rate", "engine_rate", "rounds", "mistake_rounds")
    summed = mistakes.sum_up(findings.mistakes)
    result = {
        "bench": "overload_router",
        **{name: getattr(options, name) for name in names},
        "served_share": min(shares.values(), default=None),
        "served_shares": shares,
        "others_failed": findings.others_failed(),
        **summed,
        "breaker_opened": findings.opened + summed["mistakes_opened"],
        "direct": findings.direct,
        "router": findings.router,
        "malformed": findings.malformed,
        "mistakes_by_fleet": findings.mistakes,
        "environment": environment(),
    }
    if shares:
        show("served at twice the capacity", HEADER, table_rows(result))
    if findings.mistakes:
        show("good requests beside mistakes", mistakes.HEADER, mistakes.table_rows(findings.mistakes))
    emit(result, "overload_router", options.out)
    good = all(share >= GOAL for share in shares.values()) and not result["others_failed"]
    right = not findings.mistakes or mistakes.is_right(summed)
    return 0 if good and right and not result["breaker_opened"] else 1


HEADER = ("instances, requests", "offered", "served straight", "served through the router", "share")


def table_rows(result: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for form, share in result["served_shares"].items():
        direct, router = result["direct"][form], result["router"][form]
        served = [f"{direct['served']:,}", f"{router['served']:,}"]
        rows.append([form, f"{sum(direct.values()):,}", *served, f"{share:.3f}"])
    return rows


def page(result: Result) -> str:
    malformed = sum(
        count for ends in result["malformed"].values() for ended, count in ends.items() if ended.startswith("malformed")
    )
    good = sum(sum(ends.values()) for ends in result["malformed"].values()) - malformed
    text = (
        f"Beside {malformed} malformed requests, {result['others_failed']} of {good:,} good ones were not served. "
        f"Breakers opened: {result['breaker_opened']:g}."
    )
    tables = [markdown(HEADER, table_rows(result)), text]
    if fleets := result.get("mistakes_by_fleet"):
        tables.append(markdown(mistakes.HEADER, mistakes.table_rows(fleets)))
    return "\n\n".join([*tables, device_conditions(result)])


PAGES = {"overload_router": page}
