"""What the engine driver reads of a request: TTFT targets given by clients, and the view made of it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine import snapshot
from pla_sglang.plugin.engine.pass_timer import PassTime
from pla_sglang.plugin.engine.step_measurement import StepMeasurement
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.step_fit import StepSample
from pla_sglang.policy.common.step_model import GPU_START


@pytest.mark.parametrize("value", [1, 250, 3_600_000, 99.5, "250", "1e3", " 20 "], ids=repr)
def test_good_target(value: Any) -> None:
    assert snapshot.check_slo_ms(value, "header x") == float(value)


@pytest.mark.parametrize(
    "value",
    [0, -5, 0.5, 3_600_001, "fast", "", "12ms", math.nan, "nan", math.inf, "-inf", 10**400, True, None, [], {}, "0x10"],
    ids=lambda value: repr(value)[:20],
)
def test_bad_target_is_named_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        snapshot.check_slo_ms(value, "header x")
    message = str(caught.value)
    assert message.startswith("header x must be a number of milliseconds from 1 to 3600000, got ")
    assert repr(value) in message


def request(**changes: Any) -> Any:
    sampling = {"max_new_tokens": 16, "custom_params": None} | changes.pop("sampling", {})
    fields = {"rid": "a", "origin_input_ids": [1] * 10, "output_ids": [], "retracted_stain": False}
    return SimpleNamespace(**fields | changes, sampling_params=SimpleNamespace(**sampling))


@pytest.mark.parametrize(
    ("custom", "default_ms", "expected"),
    [
        (None, None, None),
        (None, 200.0, 0.2),
        ({}, 200.0, 0.2),
        ({"slo_ttft_ms": 50}, 200.0, 0.05),
        ({"slo_ttft_ms": 50}, None, 0.05),
        ({"other": 1}, None, None),
        ("text", 200.0, 0.2),
        ({"slo_ttft_ms": "nonsense"}, 200.0, None),  # refused at the front; a worker without plugins lets it through
    ],
)
def test_target_of_a_request(custom: Any, default_ms: float | None, expected: float | None) -> None:
    assert snapshot.slo_s(request(sampling={"custom_params": custom}), default_ms) == expected


def test_view_of_a_new_request() -> None:
    req = request()
    view = snapshot.make_view(req, 5.0, 100.0, DeviceClock())
    assert (view.new_tokens, view.history_tokens, view.output_tokens) == (10, 0, 16)
    assert (view.arrival_s, view.deadline_s, view.resumed) == (5.0, pytest.approx(5.1), False)
    assert view.handle is req


@pytest.mark.parametrize(
    ("age", "age_s"),
    [
        (None, 0.0),
        (30, 0.03),
        (0, 0.0),
        ("30", 0.03),
        (500, 0.5),  # it is late already
        *[(bad, 0.0) for bad in (-1, math.nan, math.inf, 10**400, 3_600_001, True, [], "old")],
    ],
)
def test_the_target_counts_from_the_arrival_at_the_router(age: Any, age_s: float) -> None:
    """The age moves the deadline alone, so a client that makes one up gets no more than by a smaller target."""
    req = request(sampling={"custom_params": {"pla_age_ms": age}})
    view = snapshot.make_view(req, 5.0, 100.0, DeviceClock())
    assert (view.arrival_s, view.deadline_s) == (5.0, pytest.approx(5.1 - age_s))
    assert snapshot.make_view(req, 5.0, None, DeviceClock()).deadline_s is None


def test_view_of_a_request_whose_kv_is_elsewhere() -> None:
    config = PlaConfig(prefill_disagg="temporal", slo_ttft_ms=100.0, slo_tpot_ms=20.0)
    req = request(sampling={"custom_params": {"pla_age_ms": 40}}, output_ids=[1, 2])
    new = snapshot.make_reservation_view(req, 5.0, config, DeviceClock(), begun=False)
    assert (new.new_tokens + new.history_tokens, new.deadline_s) == (12, pytest.approx(5.06))
    begun = snapshot.make_reservation_view(req, 9.0, config, DeviceClock(2.0), begun=True)
    assert (begun.arrival_s, begun.deadline_s, begun.resumed) == (2.5, pytest.approx(2.51), True)


def test_on_a_slowed_device_view_and_target_are_in_its_seconds() -> None:
    req, clock = request(), DeviceClock(4.0)
    view = snapshot.make_view(req, 5.0, 100.0, clock)
    assert (view.arrival_s, view.deadline_s) == (5.0, pytest.approx(5.025))
    assert getattr(req, snapshot.ARRIVAL_ATTRIBUTE) == 20.0, "the request itself bears wall time"


def test_a_retracted_request_keeps_its_arrival() -> None:
    req = request()
    snapshot.make_view(req, 5.0, 100.0, DeviceClock())
    req.output_ids, req.retracted_stain = [1, 2, 3], True
    view = snapshot.make_view(req, 9.0, 100.0, DeviceClock())
    assert (view.new_tokens, view.output_tokens, view.arrival_s, view.resumed) == (13, 13, 5.0, True)
    assert view.deadline_s == pytest.approx(5.1)


def test_output_is_counted_as_the_host_counts_it() -> None:
    assert snapshot.output_tokens(request(sampling={"max_new_tokens": 1 << 30})) == snapshot.CLIP_MAX_NEW_TOKENS
    assert snapshot.output_tokens(request(sampling={"max_new_tokens": 2}, output_ids=[1, 2, 3])) == 0


@pytest.mark.parametrize(("low_first", "ranks"), [(False, [1, 0, 2, 1]), (True, [1, 2, 0, 1])])
def test_priority_ranks(low_first: bool, ranks: list[int]) -> None:
    views = [snapshot.make_view(request(priority=value), 0.0, None, DeviceClock()) for value in (5, 9, -1, 5)]
    snapshot.set_priority_ranks(views, [view.handle for view in views], low_first=low_first)
    assert [view.priority_rank for view in views] == ranks


def test_a_measured_pass_sums_over_the_batch() -> None:
    mode = SimpleNamespace(is_extend=lambda: True, is_mixed=lambda: False)
    batch = SimpleNamespace(extend_lens=[2, 3], prefix_lens=[10, 0], forward_mode=mode)
    measured = PassTime(note=1.0, launched_s=1.25, end_s=1.75, device_s=0.5, processing_s=0.0)
    timer: Any = SimpleNamespace(synchronous=False, end_pass=lambda now_s: measured)
    steps = StepMeasurement(SimpleNamespace(enable_overlap=False), GPU_START, timer, DeviceClock())
    samples: list[StepSample] = []
    steps.fits.prefills.observe = lambda sample: bool(samples.append(sample))  # type: ignore[func-returns-value,method-assign]
    steps.on_result(batch)
    [sample] = samples
    assert (sample.new_tokens, sample.history_tokens) == (5, 10)
    assert (sample.step_s, sample.host_s) == (0.75, 0.25)
    assert sample.attention == 2 * (2 + 20) + 3 * 3
