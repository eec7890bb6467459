"""PLA-Serve Figure 6: throughput, mean and P90 latency by concurrency, one and eight instances, three models."""

from __future__ import annotations

import dataclasses

from bench.papers.charts import draw, lines
from bench.papers.context import Context
from bench.papers.finding import Claim, Finding, Point, Row, number
from bench.papers.measure import Steady, steady
from bench.papers.pla_cases import MODELS, MODES, TTFT_SLO_S, conversations, world
from pla_sglang.metrics.goodput import Slo

SETTINGS = {1: "temporal", 8: "spatial"}
WHY = (
    "The model knows the launches that a graph saves and the wait behind longs, not what a GPU loses when both share a"
    " batch. The paper's baseline has no prefill graphs; today's SGLang has them (docs/architecture.md)."
)


@dataclasses.dataclass(frozen=True)
class Job:
    model: str
    instances: int
    mode: str
    users: int
    requests: int
    seed: int


def measure(job: Job) -> Steady:
    """A closed loop of ShareGPT-4 conversations' prompts; ``users`` an instance, as the paper's load per instance."""
    users = job.users * job.instances
    trace = conversations(max(job.requests, 4 * users), job.seed, "sharegpt")
    made = world(MODES[job.mode], model=job.model, instances=job.instances, users={0: users})
    return steady(made.run(trace).served, users, Slo(TTFT_SLO_S, 1.0))


Key = tuple[str, int, str, int]


def run(context: Context) -> Finding:
    models = context.pick(["14B"], ["14B", "32B"], list(MODELS))
    users = context.pick([4, 16], [1, 4, 16, 64], [1, 2, 4, 8, 16, 32, 64])
    requests = context.pick(200, 800, 6000)
    keys = [(model, count, mode, each) for model in models for count in SETTINGS for mode in MODES for each in users]
    found = dict(zip(keys, context.map(measure, [Job(*key, requests, context.seed) for key in keys]), strict=True))
    rows, claims = [], []
    for instances, name, gain in ((1, "one instance", 0.20), (8, "eight instances", 0.33)):
        best = max(over(found, model, instances, each, "requests_per_s") - 1 for model in models for each in users)
        less = max(1 - over(found, model, instances, each, "ttft_mean_s") for model in models for each in users)
        rows += [
            Row(f"{name}: largest gain in requests/s over SGLang", gain, best, "", WHY),
            Row(f"{name}: largest fall of the mean latency", 0.20, less, "", WHY),
        ]
        claims.append(Claim(f"{name}: PLA serves more requests/s somewhere", best > 0, f"{number(100 * best)} %"))
    return Finding(
        "pla_fig6",
        "PLA-Serve, Figure 6",
        "prefill instances alone, H200 step times (7B: H100), ShareGPT-4 lengths, closed loop; concurrency is per"
        " instance",
        rows,
        claims,
        [point(key, one) for key, one in found.items()],
        picture(found, models[0], users),
    )


def over(found: dict[Key, Steady], model: str, instances: int, users: int, field: str) -> float:
    """PLA's figure over SGLang's."""
    ours, stock = found[model, instances, "PLA", users], found[model, instances, "SGLang", users]
    ratio: float = getattr(ours, field) / getattr(stock, field)
    return ratio


def point(key: Key, one: Steady) -> Point:
    model, instances, mode, users = key
    return {"model": model, "instances": instances, "mode": mode, "users": users, **dataclasses.asdict(one)}


def picture(found: dict[Key, Steady], model: str, users: list[int]) -> bytes:
    panels = []
    for instances, name in SETTINGS.items():
        for label, field in (("requests/s", "requests_per_s"), ("mean, s", "ttft_mean_s"), ("P90, s", "ttft_p90_s")):
            shown = {
                mode: (users, [getattr(found[model, instances, mode, each], field) for each in users]) for mode in MODES
            }
            panels.append(lines(shown, x=f"users an instance ({name})", y=label, log_x=True))
    return draw(panels, f"PLA-Serve Fig. 6: {model}")
