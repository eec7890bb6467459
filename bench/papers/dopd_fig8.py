"""DOPD Figure 8 and section V-E: static 1P/1D against DistServe and Dynamo, and halves of 100 and 1,900 tokens."""

from __future__ import annotations

from bench.papers.charts import draw
from bench.papers.context import Context
from bench.papers.dopd_fig7 import Deployment, best_goodput, largest, panels, points, sweep, workload
from bench.papers.finding import Claim, Finding, Row, number
from bench.papers.traces import described

SYSTEMS = ("DistServe", "Dynamo", "DOPD")
WHY_MODEL = (
    "The paper ran OPT-30B on 1 P and TP 4 decodes, for which no step times are published; ours is Llama-70B-FP8, whose"
    " one prefill GPU gives out far earlier."
)


def run(context: Context) -> Finding:
    users = context.pick([8, 24], [4, 8, 12, 16, 20, 24, 32, 40], [*range(4, 64, 4)])
    deployments = [Deployment(system, 1, 1) for system in SYSTEMS]
    azure = sweep(context, deployments, users, "azure")
    mixed = sweep(context, deployments, users, "mixed")
    distserve, dopd = largest(azure, "DistServe"), largest(azure, "DOPD")
    top = users[-1]
    gain = best_goodput(azure, "DOPD") / best_goodput(azure, "DistServe") - 1
    mixed_gain = best_goodput(mixed, "DOPD") / best_goodput(mixed, "Dynamo")
    return Finding(
        "dopd_fig8",
        "DOPD, Figure 8",
        "step times of DOPD's Table I (not OPT-30B), 1 P (TP 1) and 1 D (TP 2); "
        + "; ".join(described(workload(context, name)) for name in ("azure", "mixed")),
        [
            Row("largest concurrency with < 5 % violations, DistServe", 88, distserve, "", WHY_MODEL),
            Row("largest concurrency with < 5 % violations, DOPD", 104, dopd, "", WHY_MODEL),
            Row(
                "P90 TTFT at the highest concurrency, DistServe",
                7.10,
                azure["DistServe", top].ttft_p90_s,
                "s",
                WHY_MODEL,
            ),
            Row("P90 TTFT at the highest concurrency, DOPD", 2.31, azure["DOPD", top].ttft_p90_s, "s", WHY_MODEL),
            Row("goodput, DOPD over DistServe", 0.27, gain, "", WHY_MODEL),
            Row("halves of 100 and 1,900: goodput, DOPD / Dynamo", None, mixed_gain, "", "the paper prints no figure"),
        ],
        [
            Claim("DOPD holds at least DistServe's concurrency", (dopd or 0) >= (distserve or 0), f"{number(dopd)}"),
            Claim("DOPD's goodput is above DistServe's", gain > 0, f"{gain:+.3f}"),
            Claim("with mixed lengths DOPD's goodput is not below Dynamo's", mixed_gain > 0.99, number(mixed_gain)),
        ],
        points(azure, "azure") + points(mixed, "mixed"),
        draw(
            [*panels(azure, users), *panels(mixed, users)], "DOPD Fig. 8: 1P/1D (first row: azure_conv, second: mixed)"
        ),
    )
