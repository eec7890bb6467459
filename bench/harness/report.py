"""What a bench says: progress on stderr, tables on stdout and on pages, one JSON object as the last line."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.harness.bench import Result, is_complete, wanted_page
from pla_sglang.common import terminal
from pla_sglang.common.console import TableConsole

Cells = tuple[list[str], list[list[str]]]  # of a table, for the terminal and for the page: header, rows

UNNAMED_SGLANG = "0.5.17"  # of every result without the key "sglang": none was kept that was measured on another one

_STARTED_S = time.monotonic()
_stderr = Console(stderr=True, highlight=False)
stdout = TableConsole()


def say(text: str) -> None:
    """One progress line on stderr."""
    _stderr.print(f"[dim]{time.monotonic() - _STARTED_S:6.1f} s[/dim]  {text}", soft_wrap=True)


@contextlib.contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar for one run, on a terminal only. Yields what to call after each request."""
    columns = (TextColumn("         {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_stderr, transient=True, disable=not _stderr.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def say_errors(answers: Iterable[Any], shown: int = 5) -> None:
    """The first few errors of answers that have one."""
    for error in [answer.error for answer in answers if answer.error is not None][:shown]:
        say(f"failed: {error}")


def print_lines(label: str, texts: Sequence[str]) -> None:
    """``LABEL: text`` for each, without markup."""
    for text in texts:
        stdout.print(f"{label}: {text}", markup=False)


def environment() -> dict[str, Any]:
    """The machine and the code that ran."""
    return {
        "hardware": _hardware(),
        "python": platform.python_version(),
        "plugin_commit": output_of(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]),
    }


def installed_version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def installed_sglang() -> str | None:
    """Version of the SGLang beside this Python, which engines of a bench run on, those of peers apart."""
    return installed_version("sglang")


def say_left_out(arm: str, lacking: Sequence[str]) -> None:
    """That the installed SGLang cannot be started as ``arm``."""
    say(f"without {arm}: SGLang {installed_sglang()} has no {', '.join(lacking)}")


def _hardware() -> str:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        cpu = f"{len(names)} x {names[0]}" if names else cpu
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    gpu = output_of(query) if shutil.which("nvidia-smi") else None
    return f"{', '.join(gpu.splitlines())}; {cpu}" if gpu else cpu


def output_of(command: list[str]) -> str | None:
    """What a command prints; None where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def emit(result: Mapping[str, Any], name: str, out: Path | None = None, *, picture: Path | None = None) -> None:
    """Write the result to ``out`` beside the pictures, and print it as the last line of stdout unless people read it.

    ``complete`` is false where the measuring was interrupted. ``sglang``: the version that was measured; a bench whose
    servers have said it has it in its result. ``picture``: for the page; None: that of ``name`` in ``out``.
    """
    result = {"sglang": installed_sglang(), **result, "complete": is_complete()}
    line = json.dumps(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(line + "\n", encoding="utf-8")
        stdout.print(f"result: {out / name}.json", soft_wrap=True)
    if wanted_page.path is not None:
        from bench.harness.bench_page import write_bench_page  # numpy and the simulator, for pages only

        drawn = picture or (out or Path()) / f"{name}.png"
        write_bench_page(wanted_page.path, name, result, bench=wanted_page.bench, picture=drawn)
        stdout.print(f"page: {wanted_page.path}", soft_wrap=True)
        wanted_page.path = None
    if terminal.output.wants_json():
        print(line, flush=True)


# -- tables, on the screen and as Markdown -----------------------------------------------------------------------------


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str | None = None) -> None:
    """A table on stdout. Whole numbers get thousands separators, other numbers three digits."""
    table = Table(*header, title=title, title_justify="left", caption=caption)
    for row in rows:
        table.add_row(*map(cell_text, row))
    stdout.print(table)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool | Container[int] = False) -> str:
    """Cells are taken as they are; a ``|`` in one would begin another.

    ``right``: the columns that are aligned to the right, by index; True: all but the first.
    """
    columns = range(1, len(header)) if right is True else right or ()
    rules = ["---:" if column in columns else "---" for column in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rules, *rows))


def keep_rows(cells: Cells, names: Container[str]) -> Cells:
    """Those whose first cell is one of ``names``, without its marks: for pages, where the whole table is too long."""
    header, rows = cells
    return header, [row for row in rows if row[0].strip("`") in names]


def keep_columns(cells: Cells, names: Container[str]) -> Cells:
    """Those with a heading of ``names``."""
    kept = [at for at, name in enumerate(cells[0]) if name in names]
    return [cells[0][at] for at in kept], [[row[at] for at in kept] for row in cells[1]]


def cell_text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def number(value: float | None, unit: str = "") -> str:
    """For people: three significant digits."""
    if value is None:
        return "-"
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown} {unit}".rstrip()


def list_figures(result: Result, names: Iterable[str]) -> list[list[str]]:
    """A row a figure, by its key; one that the result does not have has none."""
    return [[f"`{name}`", number(result[name])] for name in names if name in result]


def device_page(cells: Cells, where: str, result: Result) -> str:
    """A table, its columns of figures to the right, and under it what stood on the emulated device, and when."""
    return f"{markdown(*cells, right=True)}\n\n{where} · {device_conditions(result)}"


# -- what stands around the tables of pages ----------------------------------------------------------------------------


def spread_text(value: Mapping[str, float] | None, unit: str = "", digits: int = 3) -> str:
    """Median and range over rounds; a dash for a figure that is not there."""
    if value is None:
        return "-"
    low, high = f"{value['low']:.{digits}g}", f"{value['high']:.{digits}g}"
    return f"{value['median']:.{digits}g}{unit} ({low} .. {high})"


def inverse(ratio: Mapping[str, float]) -> dict[str, float]:
    return {"median": 1 / ratio["median"], "low": 1 / ratio["high"], "high": 1 / ratio["low"]}


def yes_no(value: bool) -> str:
    return "yes" if value else "NO"


def describe_rounds(count: int) -> str:
    return f"{count} round" if count == 1 else f"{count} rounds"


def conditions(result: Result) -> str:
    """Of a comparison of whole servers."""
    return (
        f"{describe_rounds(result['rounds'])}, median (lowest .. highest) · {result['hardware']}, {result['device']} · "
        f"{result['model']} · SGLang {result.get('sglang', UNNAMED_SGLANG)} · commit {result['plugin_commit']} · "
        f"seed {result['seed']} · greedy outputs token-identical: {str(result['outputs_identical']).lower()}"
    )


def emulated_conditions(result: Result, *further: str, seed: str = "first seed") -> str:
    """Of a bench on emulated engines: hardware, SGLang, every commit that measured (by arm, row or run), seed."""
    by_arm = {commit for of_arm in result.get("arms", {}).values() for commit in of_arm["commits"]}
    by_row = {row["plugin_commit"] for row in result.get("rows", ()) if "plugin_commit" in row}
    commits = sorted(by_arm | by_row | set(result.get("commits", ()))) or [result["environment"]["plugin_commit"]]
    host = [f"SGLang {result['sglang']}"] if "sglang" in result else []  # else docs/benchmarks.md says it once for all
    where = [result["environment"]["hardware"], *host, f"commit {', '.join(commits)}"]
    return " · ".join([*further, *where, f"{seed} {result.get('seed', 1)}"])


def device_conditions(result: Result) -> str:
    """Of a bench of the router on emulated engines."""
    return emulated_conditions(result, f"{result['profile']}, {scale_text(result)}", seed="seed")


def scale_text(result: Result) -> str:
    return f"time scale {result['time_scale']:g}"
