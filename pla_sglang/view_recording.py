"""``python -m pla_sglang.view_recording FILE``: a page that draws a router's recording over its whole span.

    launch_router ... --record run.jsonl.gz
    view_recording run.jsonl.gz --out run.html

The page is that of the router's /pla/view, as one file that needs nothing else. Nothing is decided again: for that,
there is ``parity``. Exit status 2 for a file that cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pla_sglang.common import terminal
from pla_sglang.common.cli import report_error
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.viewer.history import describe_scale
from pla_sglang.fleet.viewer.page import render_recorded
from pla_sglang.fleet.viewer.recorded import read_history
from pla_sglang.recording.file import read
from pla_sglang.recording.rows import Header, RecordError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m pla_sglang.view_recording",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("file", type=Path, help="recording of a router, .gz or not")
    made.add_argument("--out", type=Path, metavar="FILE.html", help="default: beside the recording")
    return made


def choose_target(file: Path, out: Path | None) -> Path:
    """``run.jsonl.gz`` becomes ``run.html``. Raises ConfigError where no file can be written."""
    target = out or file.with_name(f"{file.name.removesuffix('.gz').removesuffix('.jsonl')}.html")
    terminal.require_file_path("--out", target)
    return target


def make_document(file: Path) -> dict[str, Any]:
    """Everything that the page draws. Raises RecordError."""
    header, *lines = read(file)
    assert isinstance(header, Header), "the reader checks it"
    time_scale = header.time_scale if header.device_time else 1.0
    history, plan, end_s = read_history(lines, time_scale)
    return {
        **history.to_document(end_s),
        "title": f"Recording {file.name}",
        "life": file.name,
        "plan": None if plan is None else plan.to_document(),
        "clock_start_s": header.clock_start_s,
        "targets": {
            "ttft_s": _wall_s(header.setup.get("ttft_slo_s"), time_scale),
            "tpot_s": _wall_s(header.setup.get("tpot_slo_s"), time_scale),
        },
        "head": {"policy": header.policy, "profile": header.profile, **describe_scale(header.time_scale)},
    }


def _wall_s(device_s: float | None, time_scale: float) -> float | None:
    return None if device_s is None else device_s * time_scale


def run_command(argv: list[str] | None) -> int:
    options = parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        target = choose_target(options.file, options.out)
        target.write_text(render_recorded(make_document(options.file)), encoding="utf-8")
    except (ConfigError, RecordError) as error:
        return report_error(error)
    print(f"page: {target}", flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    return terminal.run_to_end("view", lambda: run_command(argv))


if __name__ == "__main__":
    sys.exit(main())
