"""``python -m pla_sglang.parity FILE``: replay a router's recording through the simulator, compare every decision.

    launch_router ... --record run.jsonl.gz
    parity run.jsonl.gz [--require 0.99] [--report out.html]

Prints a table. Where stdout is no terminal, or with --json, the last line is one JSON object. Exit status 1 when fewer
decisions than required were identical, 2 for a file that cannot be replayed, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from pla_sglang.common import terminal
from pla_sglang.common.console import TableConsole
from pla_sglang.common.errors import PlaError
from pla_sglang.policy_packages import build, policy_names
from pla_sglang.recording.file import read
from pla_sglang.recording.rows import Header
from pla_sglang.recording.setup import setup_of
from pla_sglang.sim.core.parity import Parity, Replay, check_policy
from pla_sglang.sim.report.page import render_page, require_libraries
from pla_sglang.sim.report.parity_page import make_parity_page

EXIT_DIFFERENT = 1
EXIT_UNREADABLE = 2


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m pla_sglang.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("file", type=Path, help="recording of a router, .gz or not")
    made.add_argument("--require", type=float, default=0.0, metavar="SHARE", help="least share of identical decisions")
    made.add_argument("--report", type=Path, metavar="FILE.html", help="a page with figures that needs nothing else")
    made.add_argument("--json", action="store_true", help=terminal.JSON_HELP)
    return made


def replay_file(path: Path, *, show: bool = False) -> tuple[Header, Parity]:
    """Replays a recording. Raises RecordError, ConfigError."""
    console = Console(stderr=True)
    lines = list(track(read(path), "reading", console=console, disable=not show))
    header = lines[0]
    assert isinstance(header, Header), "the reader checks it"
    check_policy(header, policy_names())
    setup = setup_of(header)
    policy = build(header.policy, setup)
    with console.status(f"replaying {len(lines) - 1:,} lines"):
        return header, Replay(policy, lines[1:], steps=setup.steps).run()


def summary(header: Header, result: Parity, wall_s: float) -> dict[str, Any]:
    """The figures of the last line."""
    return {
        "policy": header.policy,
        "profile": header.profile,
        "decisions": result.count,
        "identical_share": result.identical_share,
        "by_kind": {
            kind: {"decisions": count, "identical": result.identical[kind]}
            for kind, count in sorted(result.decisions.items())
        },
        "reasons": dict(sorted(result.reasons.items())),
        "virtual_s": round(result.virtual_s, 3),
        "wall_s": round(wall_s, 3),
    }


def show(header: Header, result: Parity, console: Console) -> None:
    table = Table(title=f"policy {header.policy}: live against replayed")
    for column in ("decision", "count", "identical"):
        table.add_column(column, justify="left" if column == "decision" else "right")
    for kind, count in sorted(result.decisions.items()):
        table.add_row(kind, str(count), str(result.identical[kind]))
    console.print(table)
    for one in result.differences:
        console.print(f"line {one.line} {one.kind} at {one.now_s:.3f} s")
        console.print(f"  live     {one.live}\n  replayed {one.replayed}")


def main(argv: list[str] | None = None) -> int:
    return terminal.run_to_end("parity", functools.partial(run_command, argv))


def run_command(argv: list[str] | None) -> int:
    options = parser().parse_args(sys.argv[1:] if argv is None else argv)
    terminal.output.as_json = options.json
    started_s = time.perf_counter()
    try:
        terminal.require_file_path("--report", options.report)
        if options.report is not None:
            require_libraries("--report")
        header, result = replay_file(options.file, show=sys.stderr.isatty())
        figures = summary(header, result, time.perf_counter() - started_s)
        if options.report is not None:
            page = make_parity_page(options.file.name, header, result, figures)
            options.report.write_text(render_page(page), encoding="utf-8")
    except PlaError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_UNREADABLE
    show(header, result, TableConsole(120))
    if options.report is not None:
        print(f"report: {options.report}", flush=True)
    terminal.print_result(figures)
    return EXIT_DIFFERENT if figures["identical_share"] < options.require else 0


if __name__ == "__main__":
    sys.exit(main())
