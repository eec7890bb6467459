"""Loads all file formats, by name or by the content of the file."""

from __future__ import annotations

import random
from pathlib import Path

from pla_sglang.common.checks import describe_allowed
from pla_sglang.common.reading import open_text, refuse_unreadable, shorten
from pla_sglang.sim.workload.agentic import AgenticKnobs, load_agentic
from pla_sglang.sim.workload.csv_formats import (
    AZURE_HEADER,
    BURSTGPT_HEADER,
    PLAIN_HEADER,
    load_azure,
    load_burstgpt,
    load_plain,
    read_csv_rows,
)
from pla_sglang.sim.workload.generate import Arrivals
from pla_sglang.sim.workload.json_formats import load_lmsys, load_mooncake, load_sharegpt
from pla_sglang.sim.workload.mapped import TOOL_COLUMNS, ColumnMap, load_mapped
from pla_sglang.sim.workload.rows import BadRows
from pla_sglang.sim.workload.trace import Trace, TraceError

TRACE_KINDS = ("plain", "azure", "burstgpt", "mooncake", "sharegpt", "lmsys", "agentic", *TOOL_COLUMNS)
WITHOUT_TIMES = ("sharegpt", "lmsys", "agentic")
MARKS = (
    ("agentic", '"hash_id_scope"'),
    ("agentic", '"think_time"'),
    ("sharegpt", '"conversations"'),
    ("lmsys", '"conversation"'),
    ("mooncake", '"input_length"'),
    ("aiperf", '"request_start_ns"'),
    ("access-log", '"first_byte_ms"'),
    ("inference-perf", '"start_time"'),
)
HEAD_CHARACTERS = 1 << 16


def load_trace(
    path: str | Path,
    *,
    kind: str | None = None,
    columns: ColumnMap | None = None,
    bad_rows: BadRows = "refuse",
    sort: bool = False,
    arrivals: Arrivals | None = None,
    agentic: AgenticKnobs | None = None,
) -> Trace:
    """A trace from a file, compressed with gzip or not; its times count from its first request.

    Args:
        columns: what the columns of a table are called; instead of ``kind``.
        kind: one of ``TRACE_KINDS``; None: detected from the head of the file.
        bad_rows: "refuse" raises at the first bad row, "skip" skips such rows and lists them in ``skipped``.
        sort: sort rows by arrival instead of treating them as bad.
        arrivals: times for formats that have none; None: Poisson at one conversation a second, seed 0.
        agentic: what of recorded sessions becomes a trace; for other formats without meaning.

    Raises:
        TraceError: no such file, a format that is not recognised, a bad row, or no request at all.
    """
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"trace file {path} does not exist")
    if columns is not None:
        return load_mapped(path, columns, bad_rows=bad_rows, sort=sort).require_requests()
    kind = kind or guess_kind(path)
    if kind not in TRACE_KINDS:
        raise TraceError(f"trace kind {kind!r} is not known; {describe_allowed(kind, TRACE_KINDS)}")
    if kind in WITHOUT_TIMES:
        times = arrivals or Arrivals(1.0, random.Random(0))
        if kind == "agentic":
            return load_agentic(path, arrivals=times, bad_rows=bad_rows, knobs=agentic).require_requests()
        talks = load_sharegpt if kind == "sharegpt" else load_lmsys
        return talks(path, arrivals=times, bad_rows=bad_rows).require_requests()
    if kind in TOOL_COLUMNS:  # which write a line at the end of a request
        return load_mapped(path, TOOL_COLUMNS[kind], bad_rows=bad_rows, sort=True).require_requests()
    loader = {"plain": load_plain, "azure": load_azure, "burstgpt": load_burstgpt, "mooncake": load_mooncake}[kind]
    return loader(path, bad_rows=bad_rows, sort=sort).require_requests()


def guess_kind(path: Path) -> str:
    """The format, from the first characters of the file. Raises TraceError for an unknown format."""
    if path.suffix == ".parquet":
        return "lmsys"
    with refuse_unreadable(path, TraceError), open_text(path, TraceError) as text:
        head = text.read(HEAD_CHARACTERS)
    if not head.strip():
        raise TraceError(f"{path} is empty; allowed: at least one request")
    for kind, mark in MARKS:
        if mark in head and head.lstrip()[0] in "[{":
            return kind
    _, names = next(read_csv_rows(path), (0, []))
    for kind, header in (("plain", PLAIN_HEADER), ("azure", AZURE_HEADER), ("burstgpt", BURSTGPT_HEADER)):
        if set(names).issuperset(header):
            return kind
    raise TraceError(
        f"{path}: format not recognised (columns: {shorten(', '.join(names), 200)}); allowed: {', '.join(TRACE_KINDS)} "
        "(kind; --trace-kind), or a mapping of its columns (--columns)"
    )
