"""Results as files: a page that needs nothing else, pictures, JSON, and one parquet table per run."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pla_sglang.sim import plots
from pla_sglang.sim.experiment import Outcome

COLUMNS = (
    ("policy", lambda one: one.experiment.policy),
    ("rate, 1/s", lambda one: f"{one.rate_per_s:.3g}"),
    ("attainment", lambda one: f"{one.figures.attainment:.3f}"),
    ("TTFT ok", lambda one: f"{one.figures.ttft_attainment:.3f}"),
    ("TPOT ok", lambda one: f"{one.figures.tpot_attainment:.3f}"),
    ("goodput, 1/s", lambda one: f"{one.figures.goodput_per_s:.3g}"),
    ("TTFT p50 / p90 / p99, s", lambda one: _three(one, "ttft")),
    ("TPOT p50 / p90 / p99, ms", lambda one: _three(one, "tpot", 1e3)),
    ("flips", lambda one: str(one.result.counts["flips"])),
    ("moves", lambda one: str(one.result.counts.get("migrations", 0))),
    ("retracted", lambda one: str(one.result.counts["retractions"])),
    ("GPU h", lambda one: f"{one.result.gpu_hours:.2f}"),
    ("sim req/s", lambda one: f"{len(one.result.stage) / one.result.cpu_s:,.0f}"),
)


def _three(one: Outcome, name: str, scale: float = 1.0) -> str:
    values = [getattr(one.figures, f"{name}_{q}_s") * scale for q in ("p50", "p90", "p99")]
    return " / ".join(f"{value:.3g}" for value in values)


def row(one: Outcome) -> list[str]:
    """One line of the table for people."""
    return [make(one) for _, make in COLUMNS]


def as_json(one: Outcome) -> dict[str, Any]:
    """Everything about a run but its requests, JSON-ready; numbers that are none are null."""
    result = one.result
    found = {
        "policy": one.experiment.policy,
        "rate_per_s": one.rate_per_s,
        **dataclasses.asdict(one.figures),
        "counts": result.counts,
        "reasons": result.reasons,
        "pass_reasons": result.pass_reasons,
        "gpu_hours": result.gpu_hours,
        "simulated_s": result.end_s,
        "events": result.events,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "digest": result.digest(),
    }
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()
    }


def write_requests(one: Outcome, path: Path) -> None:
    """One row per request, as parquet."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    result, served = one.result, one.result.served
    table = {
        "arrival_s": served.arrival_s,
        "first_token_s": served.first_token_s,
        "finish_s": served.finish_s,
        "output_tokens": served.output_tokens,
        "ttft_s": served.ttft_s(),
        "tpot_s": served.tpot_s(),
        "met": served.met(one.experiment.slo),
        "stage": result.stage,
        "prefill_instance": result.prefill_instance,
        "decode_instance": result.decode_instance,
        "retractions": result.retractions,
        "migrations": result.migrations,
        "retries": result.retries,
    }
    parquet.write_table(pa.table(table), path)


def write_results(outcomes: Sequence[Outcome], summary: dict[str, Any], folder: Path) -> None:
    """``summary.json`` and a parquet file per run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for one in outcomes:
        write_requests(one, folder / f"{stem(one)}.parquet")


def stem(one: Outcome) -> str:
    """File name of a run."""
    return f"{one.experiment.policy}_{one.rate_per_s:.4g}".replace("/", "-")


def pictures(outcomes: Sequence[Outcome]) -> dict[str, bytes]:
    """Name -> PNG. Those against the rate need two rates or more; those over time are of each policy's last run."""
    found: dict[str, bytes] = {}
    slo = outcomes[0].experiment.slo
    if len({one.rate_per_s for one in outcomes}) > 1:
        found["attainment"] = _draw(
            1, lambda axes: plots.against_rate(axes[0], outcomes, "attainment", "share that met both targets")
        )
        found["goodput"] = _draw(
            1, lambda axes: plots.against_rate(axes[0], outcomes, "goodput_per_s", "goodput, requests/s")
        )
    last = list({one.experiment.policy: one for one in outcomes}.values())
    found["latency"] = _draw(2, lambda axes: _latency(axes, last, slo.ttft_s, slo.tpot_s))
    for one in last:
        found[f"{one.experiment.policy}-fleet"] = _draw(4, lambda axes, one=one: _over_time(axes, one))  # type: ignore[misc]
    return found


def _latency(axes: Sequence[Any], outcomes: Sequence[Outcome], ttft_s: float, tpot_s: float) -> None:
    plots.distribution(axes[0], outcomes, "TTFT", ttft_s)
    plots.distribution(axes[1], outcomes, "TPOT", tpot_s)


def _over_time(axes: Sequence[Any], one: Outcome) -> None:
    plots.load(axes[0], one.result, "queued prefill tokens")
    plots.load(axes[1], one.result, "decode context tokens")
    plots.membership(axes[2], one.result)
    plots.reasons(axes[3], one.result)


def _draw(count: int, draw: Callable[[Sequence[Any]], None]) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    columns = min(count, 2)
    figure, grid = pyplot.subplots(-(-count // 2), columns, figsize=(6.5 * columns, 4 * -(-count // 2)), squeeze=False)
    draw(list(grid.flat))
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90, metadata={"Software": None})
    pyplot.close(figure)
    return out.getvalue()


def write_pictures(found: dict[str, bytes], folder: Path) -> None:
    """Each as a PNG file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, png in found.items():
        (folder / f"{name}.png").write_bytes(png)


def page(outcomes: Sequence[Outcome], summary: dict[str, Any], found: dict[str, bytes]) -> str:
    """One HTML page that holds its pictures."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in COLUMNS)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row(one)) + "</tr>" for one in outcomes)
    images = "".join(
        f'<h2>{html.escape(name)}</h2><img alt="{html.escape(name)}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        for name, png in found.items()
    )
    setting = {name: value for name, value in summary.items() if name != "runs"}
    return (
        "<!doctype html><meta charset=utf-8><title>pla_sglang simulation</title>"
        "<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}"
        "td,th{border:1px solid #ccc;padding:3px 8px;text-align:right}img{max-width:100%}</style>"
        f"<h1>Simulation of {html.escape(str(summary.get('workload', {}).get('name', '')))}</h1>"
        f"<table><tr>{head}</tr>{rows}</table>{images}"
        f"<h2>Setting</h2><pre>{html.escape(json.dumps(setting, indent=1))}</pre>"
    )
