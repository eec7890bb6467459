"""What ``bench.spatial`` computes, without any server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import spatial
from bench.replaying.client import Record
from bench.replaying.plan import Planned
from pla_sglang.errors import ConfigError


def options(**changes: Any) -> Any:
    return SimpleNamespace(**(vars(spatial.parser().parse_args([])) | changes))


def test_the_workload_is_the_same_each_time_and_changes_in_the_middle() -> None:
    given = options(duration_s=100.0, short_rps=20.0)
    first, again = (spatial.trace_of(given, (1.0, 5.0)) for _ in range(2))
    assert (first.arrival_s == again.arrival_s).all()
    longs = first.arrival_s[first.input_tokens >= spatial.BOUNDARY_TOKENS]
    before, after = int((longs < 50).sum()), int((longs >= 50).sum())
    assert before == pytest.approx(50, abs=25)
    assert after == pytest.approx(250, abs=50)
    assert len(first) - len(longs) == pytest.approx(2000, abs=200)


@pytest.mark.parametrize(
    ("arm", "has", "lacks"),
    [
        ("spatial", ["--prefill-disagg spatial", "--dp-size 4", "--pla-slo-ttft-ms 3200"], ["--policy"]),
        ("temporal", ["--prefill-disagg temporal", "--dp-size 4"], ["--policy", "--pla-pressure"]),
        ("dp", ["--dp-size 4", "--router none"], ["--prefill-disagg", "--pla-slo"]),
        ("router:power_of_two", ["--unified 4", "--policy power_of_two"], ["--dp-size", "--prefill-disagg"]),
    ],
)
def test_arguments_of_an_arm(arm: str, has: list[str], lacks: list[str]) -> None:
    line = " ".join(spatial.cluster_arguments(arm, options(time_scale=8.0)))
    assert all(part in line for part in has)
    assert not any(part in line for part in lacks)
    assert "--pla-time-scale 8" in line


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(ConfigError, match="arm 'fast' is not known; allowed: spatial"):
        spatial.cluster_arguments("fast", options())


def record(due_s: float, first_s: float | None, *, tokens: int = 10, error: str | None = None) -> Record:
    made = Record(Planned(0, due_s, [1] * tokens, 2), due_s, sent_s=due_s, error=error, prompt_ids=[1] * tokens)
    if first_s is not None:
        made.token_s = [first_s]
        made.done_s = first_s
    return made


def test_a_late_a_failed_and_a_missing_first_token_violate() -> None:
    """The target is 0.4 s of device time at scale 10."""
    records = [record(0, 3.9), record(0, 4.1), record(0, 1.0, error="reset"), record(0, None)]
    assert spatial.violation_rate(records, 0.4, 10.0) == 0.75


def test_classes_by_prompt_length() -> None:
    records = [record(0, 1, tokens=511), record(0, 1, tokens=512)]
    assert spatial.of_class(records, short=True) == records[:1]
    assert spatial.of_class(records, short=False) == records[1:]


def test_moves_of_the_warm_up_do_not_count_and_settling_is_told_apart() -> None:
    def move(ago_s: float) -> dict[str, Any]:
        return {
            "ago_s": ago_s,
            "rank": 1,
            "role": "long",
            "reason": "pla.pressure_long",
            "short_pressure": 0.1,
            "long_pressure": 1.0,
        }

    state = {"pools": {"last_moves": [move(500.0), move(239.0), move(10.0)], "dispatched": {}, "ticks": {}}}
    found = spatial.pools_figures(state, 240.0, options(duration_s=30.0, time_scale=8.0))
    assert (found["flips"], found["flips_settled"]) == (2, 1)
    assert [one["at_s"] for one in found["moves"]] == [0.12, 28.75]


def test_summary_has_the_keys_of_the_issue() -> None:
    rates = {"spatial": 0.06, "temporal": 0.1, "dp": 0.12, "router:random": 0.2, "router:power_of_two": 0.08}
    arms: dict[str, Any] = {arm: {"violation_rate": rate} for arm, rate in rates.items()}
    arms["spatial"]["pools"] = {"flips": 2}
    found = spatial.summary(arms)
    assert found["violation_rate"] == rates
    assert found["fewer_than_dp"] == pytest.approx(0.5)
    assert found["fewer_than_router"] == pytest.approx(0.25)
    assert found["fewer_than_temporal"] == pytest.approx(0.4)
    assert found["fewer_than_bucket"] is None
    assert found["flips"] == 2
    assert spatial.fewer(0.1, 0.0) is None


def test_picture(tmp_path: Path) -> None:
    arms = {
        "spatial": {"violation_rate": 0.1, "short": {"violation_rate": 0.05}, "long": {"violation_rate": 0.2}},
        "dp": {"violation_rate": 0.2, "short": {"violation_rate": 0.2}, "long": {"violation_rate": 0.2}},
    }
    spatial.plot(arms, tmp_path / "made" / "x.png", "title")
    assert (tmp_path / "made" / "x.png").stat().st_size > 5000
