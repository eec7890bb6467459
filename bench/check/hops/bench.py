"""Requests that move at random: is every token and every byte right, and is nothing left behind?

    python -m bench hops
    python -m bench hops --settings small,page16 --requests 200

Two stateless engines, whose requests are held, resumed, pulled, computed again, aborted and left by their clients at
random, 0 to 4 times each, over /generate, completions and chats, with stop strings, penalties and grammars. Half of the
requests go to the chain model on an emulated device, whose tokens an oracle knows, half to the demo model. What a
client was shown is compared, field by field, with the answer that the same body gets where nothing befalls it. Then
legs, holds, pages, gauges and totals of the engines have to be back at zero, and their leak checks silent.

Settings (``--settings``; 3,000 requests for the first, 500 for each other): small KV pools with forced retraction,
mixed passes under the temporal schedule, no overlap schedule, pages of 16, two tensor ranks, and a router, whose ledger
has to balance. It drains one instance after the other; then the schedulers of one are frozen for a while.

``pause_*``: from the last token before a move to the first behind it, of one request that moves there and back beside
others that stay, by its context; ``bound_s`` is the link's time, two decode steps and 150 ms.
``bystander_tpot_ratio``: time per token of the others during moves over that between them, of the worst context.
Finished parts are kept in ``--out``. Exit status 1: something was wrong, failed or was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.check.hops import pauses, storm
from bench.check.hops.judge import Row
from bench.check.hops.settings import CHAIN, MODELS, PROFILE, Setting, choose_settings
from bench.check.leftovers import errors_in
from bench.harness import cli, report, servers
from bench.harness.bench import Result, measuring
from bench.harness.steps import Steps
from pla_sglang.common.errors import ConfigError

START_S, PER_REQUEST_S = 60.0, 0.5  # of real time, for the budget
COUNTS = ("requests", "whole", "aborted", "left", "failed", "tokens", "hops", "redos", "resumes")
WRONG = ("tokens_wrong", "bytes_wrong", "references_wrong")
QUICK_REQUESTS = 24
PAUSES = "pauses"
Options = argparse.Namespace
Key = dict[str, Any]


def keys_of(options: Options, settings: Sequence[Setting]) -> list[Key]:
    """One for each part: the same number of requests to each model; then one for each context of the pauses."""
    keys: list[Key] = []
    for setting in settings:
        wanted = setting.requests if options.requests is None else options.requests
        for model in options.models:
            half = wanted // len(options.models)
            for number, first in enumerate(range(0, half, options.part)):
                requests = min(options.part, half - first)
                key = {"setting": setting.name, "model": model, "number": number, "requests": requests}
                keys.append(key | {"seed": options.seed})
    contexts = pauses.CONTEXTS_TOKENS[: options.contexts]
    return keys + [{"setting": PAUSES, "context_tokens": context, "seed": options.seed} for context in contexts]


def run_setting(setting: Setting, model: str, keys: Sequence[Key], steps: Steps, options: Options) -> None:
    """Its open parts with one model, as far as the time goes. Raises ServerError."""
    missing = steps.open(list(keys))
    needed_s = options.part * PER_REQUEST_S
    if not missing or not steps.has_time(START_S + needed_s):
        return
    name = f"hops-{setting.name}-{model}"
    log = options.out / f"{name}.log"
    with (
        storm.environment(setting.env),
        servers.running_cluster(setting.engine_flags(model), options.out, name) as described,
    ):
        for key in missing:
            if not steps.has_time(needed_s):
                return
            part = storm.Part(setting, model, key["number"], key["requests"], key["seed"])
            report.say(f"{part.name}: {part.requests} requests")
            start_s = time.monotonic()
            logged = len(find_errors(log))
            with report.progress_bar(part.name, part.requests) as advance:
                row = run_part(part, described, options, advance)
            row |= {"errors_logged": find_errors(log)[logged:][:5], "took_s": round(time.monotonic() - start_s, 1)}
            row |= {"plugin_commit": report.environment()["plugin_commit"]}
            steps.add(key, row)
            report.say(f"{part.name}: {describe_row(row)}")


def run_part(part: storm.Part, described: dict[str, Any], options: Options, advance: Any) -> Row:
    if not part.setting.router:
        return asyncio.run(storm.run_part(part, described, advance))
    log = options.out / f"hops-router-{part.name}.log"
    with servers.running_router(storm.ROUTER, described, log) as url:
        servers.wait_until_paired(url)
        state = options.out / f"hops-{part.setting.name}-{part.model}.state.json"
        row = asyncio.run(storm.run_routed_part(part, described, url, state, advance))
    row["leftovers"] += [f"router: {line}" for line in find_errors(log)[:5]]
    return row


def find_errors(log: Path) -> list[str]:
    return errors_in(log.read_text(encoding="utf-8", errors="replace"))


def run_pauses(keys: Sequence[Key], steps: Steps, options: Options) -> None:
    """Raises ServerError."""
    missing = steps.open(list(keys))
    if not missing or not steps.has_time(2 * START_S):
        return
    flags = Setting(PAUSES, 0, (*pauses.FLAGS, "--pla-time-scale", f"{pauses.TIME_SCALE:g}")).engine_flags(CHAIN)
    with servers.running_cluster(flags, options.out, "hops-pauses") as described:
        for key in missing:
            if not steps.has_time(START_S):
                return
            context = key["context_tokens"]
            row = asyncio.run(pauses.measure_context(described, context, key["seed"]))
            steps.add(key, row | {"plugin_commit": report.environment()["plugin_commit"]})
            report.say(f"pauses at {context} tokens: {row}")


def describe_row(row: Row) -> str:
    counts = " ".join(f"{name} {row[name]}" for name in (*COUNTS, *WRONG) if row.get(name))
    return "; ".join([counts, *row["errors"], *row["reference_errors"], *row["leftovers"], *row["errors_logged"]])


def sum_up(pairs: Sequence[tuple[Key, Row]]) -> Row:
    """Of finished parts, pauses among them."""
    parts = [(key, row) for key, row in pairs if key["setting"] != PAUSES]
    timed = [row for key, row in pairs if key["setting"] == PAUSES]
    totals: Row = {name: sum(row[name] for _, row in parts) for name in (*COUNTS, *WRONG)}
    totals["tokens_wrong"] += sum(row["tokens_wrong"] for row in timed)
    totals["failed"] += sum(row["failed"] for row in timed)
    events: Counter[str] = Counter()
    for _, row in parts:
        events.update(row["events"])
    rows = [row for _, row in pairs]
    routed = [row["ledger_balanced"] for _, row in parts if "ledger_balanced" in row]
    return {
        **totals,
        "leaks": sum(len(row["leftovers"]) + len(row.get("errors_logged", ())) for row in rows),
        "ledger_balanced": all(routed) if routed else None,
        **pauses.sum_pauses(timed),
        "events": dict(sorted(events.items())),
        "groups": group_rows(parts),
        "errors": [text for row in rows for text in (*row["errors"], *row["leftovers"], *row.get("errors_logged", ()))][
            :20
        ],
        "commits": sorted({row["plugin_commit"] for row in rows}),
    }


def group_rows(parts: Sequence[tuple[Key, Row]]) -> list[Row]:
    """Sums by setting and model."""
    groups: dict[tuple[str, str], Row] = {}
    for key, row in parts:
        name = (key["setting"], key["model"])
        group = groups.setdefault(name, {"setting": name[0], "model": name[1]} | dict.fromkeys((*COUNTS, *WRONG), 0))
        for count in (*COUNTS, *WRONG):
            group[count] += row[count]
    return list(groups.values())


def is_good(result: Result) -> bool:
    return not any(result[name] for name in (*WRONG, "failed", "leaks")) and result["ledger_balanced"] is not False


def table(result: Result) -> report.Cells:
    names = (
        "requests",
        "hops",
        "redos",
        "resumes",
        "aborted",
        "left",
        "failed",
        "tokens",
        "tokens_wrong",
        "bytes_wrong",
    )
    everything = {"setting": "all", "model": "", **{name: result[name] for name in names}}
    rows = [
        [group["setting"], group["model"], *(f"{group[name]:,}" for name in names)]
        for group in (*result["groups"], everything)
    ]
    return ["setting", "model", *(name.replace("_", " ") for name in names)], rows


def page(result: Result) -> str:
    timed = [
        [
            f"{int(context):,}",
            str(row["moves"]),
            *(report.number(row[name]) for name in ("p50_s", "bound_s", "bystander_tpot_ratio")),
        ]
        for context, row in result["pause_by_context"].items()
    ]
    header = ["context, tokens", "moves", "pause p50, s", "bound, s", "bystanders' TPOT"]
    ledger = {None: "not looked at", True: "balanced", False: "NOT BALANCED"}[result["ledger_balanced"]]
    said = f"Left behind: {result['leaks']}. Ledger: {ledger}."
    header_of_all, (*_, everything) = table(result)
    tables = [report.markdown(header_of_all[2:], [everything[2:]], right=range(10)), said]
    tables += [report.markdown(header, timed, right=True)] if timed else []
    return "\n\n".join([*tables, report.emulated_conditions(result, PROFILE, seed="seed")])


PAGES = {"hops": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", metavar="NAMES", help="comma-separated; default: all")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--requests", type=int, help="of each setting; default: its own number")
    parser.add_argument("--part", type=int, default=250, help="requests of a step")
    parser.add_argument(
        "--contexts", type=int, default=len(pauses.CONTEXTS_TOKENS), help="at how many pauses are measured"
    )
    cli.add_output(parser)
    cli.add_budget(parser)
    cli.add_quick(parser)
    parser.set_defaults(budget_s=2000.0)


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    if options.quick:
        options.requests, options.contexts = options.requests or QUICK_REQUESTS, min(options.contexts, 1)
    options.models = [name for name in options.models.split(",") if name]
    if unknown := [name for name in options.models if name not in MODELS]:
        raise ConfigError(f"--models {unknown[0]!r} is not known; allowed: {', '.join(MODELS)}")
    if (
        options.part < 1
        or not options.models
        or (options.requests is not None and options.requests < len(options.models))
    ):
        given = f"--part {options.part} --requests {options.requests}"
        raise ConfigError(f"{given}: allowed are parts of 1 and more, and a request for each model")
    settings = choose_settings(options.settings)
    steps = Steps(options.out / "hops.steps.jsonl", options.budget_s)
    keys = keys_of(options, settings)
    with measuring():
        for setting in settings:
            for model in options.models:
                own = [key for key in keys if (key["setting"], key.get("model")) == (setting.name, model)]
                run_setting(setting, model, own, steps, options)
        run_pauses([key for key in keys if key["setting"] == PAUSES], steps, options)
    result: Row = {"bench": "hops", **sum_up(steps.finished(keys)), "seed": options.seed}
    result |= {"steps_open": len(steps.open(keys)), "environment": report.environment()}
    report.show("Requests that move", *table(result))
    report.print_lines("wrong", result["errors"])
    report.emit(result, "hops", options.out)
    return 0 if is_good(result) else 1
