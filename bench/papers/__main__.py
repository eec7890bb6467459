"""``python -m bench.papers``: the figures and tables of the papers on our policies and simulator.

    python -m bench.papers all                 every script at reduced size
    python -m bench.papers arrow_fig8 --full   one of them, as large as in the paper
    python -m bench.papers publish             results in --out into docs/papers.md

Prints paper value, our value, their ratio, and why they differ; writes JSON, parquet and PNG. The last stdout line is
one JSON object: of ``all`` the keys of every script, of one script its rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.fleets.workloads import DATA_VARIABLE, data_folder
from bench.lib.report import environment, say
from bench.papers.context import Context
from bench.papers.figures import ALL, FIGURES, named, script
from bench.papers.output import publish, show, write
from pla_sglang.errors import ConfigError

PUBLISH = "publish"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "papers.md"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("names", nargs="+", metavar="NAME", help=f"{ALL}, {PUBLISH}, or of: {', '.join(FIGURES)}")
    made.add_argument(
        "--data",
        type=Path,
        help=f"folder with traces (default: ${DATA_VARIABLE}; without one, workloads are generated)",
    )
    made.add_argument("--full", action="store_true", help="the sizes of the papers; hours")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--jobs", type=int, default=1, help="processes")
    made.add_argument("--resume", action="store_true", help="keep what an earlier run has left in --out")
    made.add_argument("--out", type=Path, default=Path("bench_out/papers"), help="folder of the results")
    return made


@contextmanager
def progress_of(name: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, a line a quarter elsewhere."""
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown:
        task = shown.add_task(name, total=None)

        def done(count: int, total: int) -> None:
            shown.update(task, completed=count, total=total)
            if not console.is_terminal and (4 * count) // total != (4 * (count - 1)) // total:
                say(f"{name}: {count} of {total} runs")

        yield done


def about(args: argparse.Namespace, spent_s: float) -> dict[str, Any]:
    """What a result states of itself."""
    versions = {name: metadata.version(name) for name in ("numpy", "scipy")}
    return {
        **setting(args),
        "seconds": round(spent_s, 1),
        "environment": environment(),
        "versions": {"python": platform.python_version(), **versions},
    }


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """What decides a result, apart from the code."""
    traces = "generated" if args.data is None else "recorded"
    return {"seed": args.seed, "size": "full" if args.full else "reduced", "traces": traces}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every script that was asked for; returns the last line."""
    names = named(args.names)
    say(f"{len(names)} scripts, {'full' if args.full else 'reduced'} size, results in {args.out}")
    if args.data is None:
        say(f"no --data and no ${DATA_VARIABLE}: workloads are generated, figures of recorded traces differ")
    records = []
    for name in names:
        found = earlier(args, name) if args.resume else None
        records.append(measured(args, name) if found is None else found)
    return last_line(args, records)


def earlier(args: argparse.Namespace, name: str) -> dict[str, Any] | None:
    """The result that a run of the same setting, at any commit, has left in the folder; None where there is none."""
    path = args.out / f"{name}.json"
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if any(record["about"][key] != value for key, value in setting(args).items()):
        return None
    say(f"{name}: taken from {path}, commit {record['about']['environment']['plugin_commit']}")
    return record


def measured(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Runs a script, prints and writes what it found."""
    started_s = time.monotonic()
    with progress_of(name, Console(stderr=True)) as done:
        scratch = args.out / "cells" if args.resume else None
        finding = script(name)(Context(args.data, 2 if args.full else 1, args.seed, args.jobs, scratch, done))
    spent_s = time.monotonic() - started_s
    told = about(args, spent_s)
    show(finding, Console(width=150))
    write(finding, args.out, told)
    say(f"{name}: {spent_s:.0f} s")
    return {**finding.as_json(), "about": told}


def last_line(args: argparse.Namespace, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of all scripts; of a single one also its rows."""
    keys = {key: value for record in records for key, value in record["keys"].items()}
    fails = [f"{one['name']}: {claim['text']}" for one in records for claim in one["claims"] if not claim["holds"]]
    commits = sorted({str(record["about"]["environment"]["plugin_commit"]) for record in records})
    last: dict[str, Any] = {**keys, **setting(args), "commits": commits, "claims_that_fail": fails}
    if len(records) == 1:
        last["rows"] = records[0]["rows"]
    return last


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 for a bad value."""
    args = parser().parse_args(argv)
    try:
        if args.names == [PUBLISH]:
            publish(args.out, PAGE, list(FIGURES))
            return 0
        args.data = data_folder(args.data)
        last = run(args)
    except ConfigError as error:
        print(f"papers: {error}", file=sys.stderr)
        return 2
    print(json.dumps(last, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
