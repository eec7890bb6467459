"""From records to figures: tokens against the oracle, latencies in device time, attainment, the client's own lag."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.replaying.client import Record
from pla_sglang import chain
from pla_sglang.metrics.goodput import Served, Slo, goodput, quantile

COLUMNS = ("index", "due_s", "sent_s", "ttft_s", "tpot_s", "e2e_s", "input_tokens", "output_tokens", "status", "error")


def count_wrong(record: Record) -> int:
    """Tokens that differ from the oracle's, or are missing or too many; 0 for an answer that is right."""
    wanted = chain.expected(record.prompt_ids, record.planned.output_tokens + 1).tokens
    pairs = zip(wanted, record.output_ids, strict=False)
    return sum(a != b for a, b in pairs) + abs(len(wanted) - len(record.output_ids))


def served(records: Sequence[Record], time_scale: float) -> Served:
    """Columns for the metrics, in device time. Failed requests have no finish."""

    def column(values: Sequence[float | None]) -> np.ndarray:
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64) / time_scale

    return Served(
        arrival_s=column([record.due_s for record in records]),
        first_token_s=column([record.token_s[0] if record.token_s else None for record in records]),
        finish_s=column([record.done_s if record.error is None else None for record in records]),
        output_tokens=np.array([record.planned.output_tokens for record in records], dtype=np.int64),
    )


def lag_s(records: Sequence[Record]) -> np.ndarray:
    """How late the client sent each request, in real seconds."""
    return np.array([record.sent_s - record.due_s for record in records if record.sent_s is not None])


def figures(
    records: Sequence[Record], slo: Slo, *, time_scale: float, verify: bool, max_lag_ms: float
) -> dict[str, Any]:
    """The JSON figures of one run. ``valid`` is false when the client was late or tokens were wrong."""
    ordered = sorted(records, key=lambda record: record.due_s)
    columns = served(ordered, time_scale)
    met = goodput(columns, slo)
    finished = [record for record in ordered if record.error is None]
    wrong = [count_wrong(record) for record in finished] if verify else []
    lag_p99_ms = quantile(lag_s(ordered) * 1e3, 99)
    return {
        "requests": len(ordered),
        "completed": len(finished),
        "tokens_verified": sum(len(record.output_ids) for record in finished) if verify else 0,
        "tokens_wrong": sum(wrong),
        "requests_wrong": sum(count > 0 for count in wrong),
        "slo_ttft_s": slo.ttft_s,
        "slo_tpot_s": slo.tpot_s,
        "slo_attainment": met.attainment,
        "goodput_rps": met.goodput_per_s,
        "throughput_rps": met.throughput_per_s,
        "output_tokens_per_s": met.output_tokens_per_s,
        "ttft_p50_s": met.ttft_p50_s,
        "ttft_p90_s": met.ttft_p90_s,
        "ttft_p99_s": met.ttft_p99_s,
        "tpot_p50_s": met.tpot_p50_s,
        "tpot_p99_s": met.tpot_p99_s,
        "client_lag_p99_ms": lag_p99_ms,
        "events": sum(len(record.token_s) for record in ordered),
        "valid": bool(lag_p99_ms <= max_lag_ms and sum(wrong) == 0),
    }


def write_requests(records: Sequence[Record], path: Path, time_scale: float) -> None:
    """One row per request in device time: CSV, or parquet with every token's time where the name ends so."""
    columns = served(records, time_scale)
    ttft, tpot, e2e = columns.ttft_s(), columns.tpot_s(), columns.e2e_s()
    rows = [
        (
            record.planned.index,
            record.due_s / time_scale,
            None if record.sent_s is None else record.sent_s / time_scale,
            *(None if math.isnan(value) else float(value) for value in (ttft[row], tpot[row], e2e[row])),
            len(record.prompt_ids),
            len(record.output_ids),
            record.status,
            record.error,
        )
        for row, record in enumerate(records)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pandas as pd

        table = pd.DataFrame(rows, columns=list(COLUMNS))
        table["token_s"] = [[at / time_scale for at in record.token_s] for record in records]
        table.to_parquet(path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)
