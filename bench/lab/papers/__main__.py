"""Figures and tables of the four papers on our policies, in the simulator.

    python -m bench papers all                 every script at reduced size
    python -m bench papers arrow_fig8 --full   one of them, as large as in the paper
    python -m bench papers publish             results in --out into bench/lab/docs/papers.md

Prints paper value, our value, their ratio, and why they differ; writes JSON, parquet and PNG. The last stdout line is
one JSON object: of ``all`` the keys of every script, of one script its rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.harness.bench import measuring
from bench.harness.cli import add_dataset, dataset_of
from bench.harness.publish import fill_page
from bench.harness.report import emit, environment, say
from bench.harness.steps import NoStepError, Row, Steps
from bench.lab.cells import DATA_VARIABLE, data_folder
from bench.lab.papers.context import Context
from bench.lab.papers.finding import Finding, sections, show, summary, write
from bench.lab.papers.points import Point, PointsError
from pla_sglang.common.errors import ConfigError

# In the order of the papers. ``MODULE_FUNCTION`` is a function ``(Context) -> Finding``; of ``MODULE`` alone, ``run``.
FIGURES = {
    "arrow_fig4": "Arrow, Figure 4",
    "arrow_fig7": "Arrow, Figure 7",
    "arrow_fig8": "Arrow, Figure 8",
    "arrow_fig9": "Arrow, Figure 9",
    "star_fig10": "STAR, Figure 10",
    "star_fig11": "STAR, Figures 11 and 12",
    "star_fig13": "STAR, Figure 13",
    "star_goodput": "STAR, goodput of the abstract",
    "star_table3": "STAR, Table 3",
    "star_table4": "STAR, Table 4",
    "ratios": "DOPD, Figure 3",
    "dopd_fig6": "DOPD, Figure 6",
    "dopd_fig7": "DOPD, Figure 7",
    "dopd_fig8": "DOPD, Figure 8",
    "dopd_fig9": "DOPD, Figures 9 and 10",
    "pla_fig1": "PLA-Serve, Figures 1 and 3",
    "pla_fig5": "PLA-Serve, Figure 5",
    "pla_fig6": "PLA-Serve, Figure 6",
    "pla_fig7": "PLA-Serve, Figure 7",
    "pla_fig8": "PLA-Serve, Figure 8",
    "pla_table2": "PLA-Serve, Table 2",
}
ALL, PUBLISH = "all", "publish"


def named(names: list[str]) -> list[str]:
    """The scripts that are meant, in their order. Raises ConfigError for one that is not known."""
    for name in names:
        if name not in (ALL, *FIGURES):
            raise ConfigError(f"figure {name!r} is not known; allowed: {ALL}, {', '.join(FIGURES)}")
    return [name for name in FIGURES if name in names or ALL in names]


def script(name: str) -> Callable[[Context], Finding]:
    """Its module is imported when it is needed: some take a second to import."""
    module, _, function = name.partition("_")
    measure: Callable[[Context], Finding] = getattr(
        importlib.import_module(f"bench.lab.papers.{module}"), function or "run"
    )
    return lambda context: dataclasses.replace(measure(context), name=name, title=FIGURES[name])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"{ALL}, {PUBLISH}, or of: {', '.join(FIGURES)}")
    parser.add_argument("--data", type=Path, help=f"folder with traces (default: ${DATA_VARIABLE}, else generated)")
    add_dataset(parser, with_model=True)
    parser.add_argument("--full", action="store_true", help="the sizes of the papers; hours")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run has left in --out")
    parser.add_argument("--out", type=Path, default=Path("bench_out/papers"), help="folder of the results")


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """What decides a result, apart from the code."""
    traces = "generated" if options.data is None else "recorded"
    lengths = {"conversations": dataset.label} if (dataset := dataset_of(options)) else {}  # else a model of lengths
    return {"seed": options.seed, "size": "full" if options.full else "reduced", "traces": traces} | lengths


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, NoStepError."""
    if options.names == [PUBLISH]:
        fill_page("papers_summary", summary(options.out, list(FIGURES)))
        fill_page("papers", sections(options.out, list(FIGURES)))
        return 0
    options.data = data_folder(options.data)
    names = named(options.names)
    say(f"{len(names)} scripts, {'full' if options.full else 'reduced'} size, results in {options.out}")
    if options.data is None:
        say(f"no --data and no ${DATA_VARIABLE}: workloads are generated, figures of recorded traces differ")
    steps = Steps(options.out / "papers.steps.jsonl")
    records: list[Row] = []
    with measuring():
        for name in names:
            key = {"script": name, **setting(options)}
            kept = steps.get(key) if options.resume else None  # of an earlier run, at any commit
            if kept is None:
                steps.add(key, kept := measure(name, options))
            else:
                say(f"{name}: measured before, at commit {kept['about']['environment']['plugin_commit']}")
            records.append(kept)
    if not records:
        raise NoStepError("no script came to its end")
    picture = options.out / f"{records[0]['name']}.png" if len(records) == 1 else None
    emit(last_line(records, options), "papers", picture=picture)
    return 0


def measure(name: str, options: argparse.Namespace) -> Row:
    """The record of a script: runs it, prints and writes what it found."""

    def say_progress(done: int, total: int) -> None:
        if (4 * done) // total != (4 * (done - 1)) // total:  # a line a quarter
            say(f"{name}: {done} of {total} runs")

    started_s = time.monotonic()
    context = Context(
        options.data,
        size=2 if options.full else 1,
        seed=options.seed,
        jobs=options.jobs,
        dataset=dataset_of(options),
        progress=say_progress,
    )
    finding = script(name)(context)
    spent_s = time.monotonic() - started_s
    about = {
        **setting(options),
        "seconds": round(spent_s, 1),
        "environment": environment(),
        "versions": {"python": platform.python_version()} | {of: metadata.version(of) for of in ("numpy", "scipy")},
    }
    record = write(finding, options.out, about, context.points)
    show(record)
    say(f"{name}: {spent_s:.0f} s")
    return dict(record)


def recompute(name: str, points: Sequence[Point], about: Mapping[str, Any]) -> Finding:
    """The finding again, from the points of a run and the size and seed of it. Raises PointsError."""
    sizes = {"test": 0, "reduced": 1, "full": 2}
    context = Context(size=sizes[about["size"]], seed=about["seed"], kept=iter(points))
    finding = script(name)(context)
    if len(context.points) != len(points):
        raise PointsError(f"{len(points)} points, {len(context.points)} are used")
    return finding


def last_line(records: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The keys of all scripts; of a single one also its rows and claims."""
    keys = {key: value for record in records for key, value in record["keys"].items()}
    fails = [
        f"{record['name']}: {claim['text']}"
        for record in records
        for claim in record["claims"]
        if claim["holds"] is False
    ]
    commits = sorted({str(record["about"]["environment"]["plugin_commit"]) for record in records})
    last: dict[str, Any] = {**keys, **setting(options), "commits": commits, "claims_that_fail": fails}
    single = {key: records[0][key] for key in ("title", "setting", "rows", "claims")} if len(records) == 1 else {}
    return last | single
