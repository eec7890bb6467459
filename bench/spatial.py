"""``python -m bench.spatial``: a short and a long pool of prefills against stock SGLang and its router.

Emulated GPUs, the same requests for every arm, every token checked. Chat-like short prompts arrive all the time; the
rate of long prompts changes in the middle. A request violates its target when its first token comes later than
``--slo-ttft-s`` or it fails. ``--layout pd``: prefill and decode instances behind a router; ``--layout dp``: the ranks
of one server. Arms, see ``bench.pooling.arms``: ``spatial``, ``temporal``, ``dp`` (stock, round robin), and
``router:POLICY``, stock behind SGLang's router.

A second run of ``spatial`` has the same rates throughout: there no instance may change pools once they have settled.
All times given and shown are device time. Finished steps are kept in OUT, and ``--budget-s`` ends a run between two of
them; the same command goes on from there. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lib.report import emit, environment, stdout
from bench.lib.tables import show
from bench.pooling import arms as forms
from bench.pooling.arms import SPATIAL, Setting
from bench.pooling.figures import figures, missed, summary
from bench.pooling.measure import Step, running_engines
from bench.pooling.picture import plot
from bench.pooling.work import Work
from bench.replaying.steps import NoStepError, Row, Steps
from bench.replaying.stopping import exit_status

CHANGING, CONSTANT = "changing", "constant"
START_S, ROUTER_S, STOP_S = 60.0, 20.0, 15.0  # of engines and of a router before them, on two cores


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.spatial", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--layout", default=forms.PAIRS, help=f"one of: {', '.join(forms.LAYOUTS)}")
    made.add_argument("--arms", help="with commas between; default: all of the layout")
    made.add_argument("--prefill", type=int, default=4, help="prefill instances, or data-parallel ranks")
    made.add_argument("--decode", type=int, default=2, help="decode instances of layout pd")
    made.add_argument("--duration-s", type=float, default=30.0, help="of arrivals, device time")
    made.add_argument("--short-rps", type=float, default=40.0)
    made.add_argument("--long-rps", type=float, nargs=2, default=(12.0, 29.0), metavar=("BEFORE", "AFTER"))
    made.add_argument("--slo-ttft-s", type=float, default=0.4)
    made.add_argument("--time-scale", type=float, default=8.0, help="of the emulated devices")
    made.add_argument("--profile", default="h100-llama3.1-8b-tp1")
    made.add_argument("--seeds", type=int, default=2, help="runs of each arm, each with arrivals of its own")
    made.add_argument("--no-constant", action="store_true", help="leave out the run at constant load")
    made.add_argument("--budget-s", type=float, help="no step begins that would not end within this")
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def setting_of(options: argparse.Namespace) -> Setting:
    """Raises ConfigError."""
    shared = ("layout", "profile", "time_scale", "slo_ttft_s", "prefill", "decode")
    return Setting(**{name: getattr(options, name) for name in shared})


def keys_of(arms: Sequence[str], options: argparse.Namespace, setting: Setting, work: Work) -> list[dict[str, Any]]:
    """Steps in the order in which they run: all arms with one seed, then with the next."""
    about = dataclasses.asdict(setting) | dataclasses.asdict(work) | {"long_rps": list(work.long_rps)}
    found = []
    for seed in range(1, options.seeds + 1):
        found += [about | {"seed": seed, "load": CHANGING, "arm": arm} for arm in arms]
        if SPATIAL in arms and not options.no_constant:
            found.append(about | {"seed": seed, "load": CONSTANT, "arm": SPATIAL})
    return found


def measure(
    keys: Sequence[dict[str, Any]], steps: Steps, options: argparse.Namespace, setting: Setting, work: Work
) -> None:
    """Runs what is not finished, as far as the time goes. Raises ServerError, ConfigError."""
    step_s = ROUTER_S + work.duration_s * setting.time_scale
    while missing := steps.open(list(keys)):
        if not steps.has_time(START_S + step_s + STOP_S):
            return
        arm = missing[0]["arm"]
        alike = [key for key in missing if same_engines(key["arm"], arm, setting)]
        with running_engines(arm, setting, options.out / "spatial", f"{setting.layout}-{len(missing)}") as engines:
            for key in alike:
                if not steps.has_time(step_s + STOP_S):
                    return
                steps.add(key, engines.run(step_of(key, setting, work)))


def same_engines(arm: str, other: str, setting: Setting) -> bool:
    return forms.engine_arguments(arm, setting, "") == forms.engine_arguments(other, setting, "")


def step_of(key: Mapping[str, Any], setting: Setting, work: Work) -> Step:
    load = work.constant() if key["load"] == CONSTANT else work
    name = f"{setting.layout}-{key['load']}-{key['seed']}-{key['arm'].replace(':', '-')}"
    return Step(name, key["arm"], load.planned(key["seed"], setting.time_scale), key["seed"])


def print_table(by_arm: Mapping[str, Mapping[str, Any]], title: str) -> None:
    rows = []
    for arm, found in by_arm.items():
        shares = [found["violation_rate"], found["short"]["violation_rate"], found["long"]["violation_rate"]]
        times = [found[name][f"ttft_{share}_s"] for name in ("short", "long") for share in ("p50", "p99")]
        by_seed = ", ".join(f"{value:.1%}" for value in found["violation_rate_by_seed"])
        flips = found["flips_while_settling"] + found["flips"] if "moves" in found else "-"
        cells = [*("-" if share is None else f"{share:.1%}" for share in shares), by_seed, *times]
        rows.append([arm, *cells, f"{found['host_overhead_share']:.1%}", flips, found["valid"]])
    header = ("arm", "late", "of shorts", "of longs", "by seed", "short p50 s", "p99", "long p50 s", "p99")
    show(title, (*header, "overhead", "flips", "valid"), rows)


def outcome(rows: Mapping[tuple[str, str], Sequence[Row]], setting: Setting, work: Work) -> dict[str, Any]:
    """The result by the rows of each (load, arm)."""
    by_arm = {
        arm: figures(own, setting.slo_ttft_s, work.duration_s) for (load, arm), own in rows.items() if load == CHANGING
    }
    result = {"bench": "spatial", **summary(by_arm)}
    constant = rows.get((CONSTANT, SPATIAL))
    every = list(by_arm.values())
    if constant:
        found = figures(constant, setting.slo_ttft_s, work.duration_s)
        result["flips_constant_load"] = found["flips"]
        result["flips_constant_load_while_settling"] = found["flips_while_settling"]
        result["constant"] = found
        every.append(found)
    result["tokens_verified"] = sum(found["tokens_verified"] for found in every)
    result["tokens_wrong"] = sum(found["tokens_wrong"] for found in every)
    result["valid"] = all(found["valid"] for found in every)
    return result | {"targets_missed": missed(result), "arms": by_arm}


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    setting = setting_of(options)
    work = Work(options.duration_s, options.short_rps, tuple(options.long_rps))
    arms = options.arms.split(",") if options.arms else list(forms.DEFAULT_ARMS[setting.layout])
    for arm in arms:
        forms.check(arm, setting)
    keys = keys_of(arms, options, setting, work)
    steps = Steps(options.out / f"spatial-{setting.layout}.steps.jsonl", options.budget_s)
    measure(keys, steps, options, setting, work)
    rows: dict[tuple[str, str], list[Row]] = {}
    for key, row in steps.finished(keys):
        rows.setdefault((key["load"], key["arm"]), []).append(row)
    if not any(load == CHANGING for load, _ in rows):
        raise NoStepError("no arm was measured under a changing load")
    result = outcome(rows, setting, work)
    title = (
        f"{setting.layout}: {setting.prefill} prefill, {work.short_rps:g}/s shorts, {work.long_rps[0]:g} then "
        f"{work.long_rps[1]:g}/s longs, TTFT target {setting.slo_ttft_s:g} s, {setting.profile}, "
        f"time scale {setting.time_scale:g}"
    )
    print_table(result["arms"], title)
    for miss in result["targets_missed"]:
        stdout.print(f"MISSED: {miss}", markup=False)
    of_arms = {arm: rows[CHANGING, arm] for arm in result["arms"]}
    plot(result["arms"], of_arms, setting.slo_ttft_s, options.out / f"spatial-{setting.layout}.png", title)
    about = dataclasses.asdict(setting) | dataclasses.asdict(work) | {"seed": 1, "seeds_asked": options.seeds}
    emit({**result, **about, "environment": environment()}, options.out, f"spatial-{setting.layout}")
    return 0 if result["valid"] else 1


def main(argv: list[str] | None = None) -> int:
    return exit_status(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
