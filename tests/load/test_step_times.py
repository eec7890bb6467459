"""What a receiver of load reports makes of the step times in them."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from support.fleets import LinearSteps, instance

from pla_sglang.load.report import FittedPasses
from pla_sglang.load.step_times import FittedModels, ReportedSteps, read_step_models
from pla_sglang.policy.common.step_model import BEND_TOKENS, GPU_START
from pla_sglang.policy.measured_steps import InstanceSteps
from pla_sglang.policy.slo.mixed_batches import START

TOLD = FittedModels(GPU_START.to_floats(), dataclasses.astuple(START), FittedPasses(40, 64, 8))
TABLE = tuple([1.5] * len(BEND_TOKENS))


@pytest.mark.parametrize("table", [(), TABLE, (*TABLE, *TABLE)], ids=["none", "bend", "edges"])
def test_models_come_back(table: tuple[float, ...]) -> None:
    found = read_step_models(TOLD._replace(step_model=(*GPU_START.to_floats(), *table)))
    assert found is not None
    assert found[0].to_floats() == (*GPU_START.to_floats(), *table)
    assert found[1] == START


@pytest.mark.parametrize(
    "fields",
    [
        {"step_model": (), "decode_model": ()},
        {"decode_model": ()},
        {"decode_model": (1.0, 1.0)},
        {"step_model": (1.0, 1.0)},
        {"step_model": (*GPU_START.to_floats(), 1.0)},
    ],
    ids=["none", "earlier", "few", "few of prefills", "part of a table"],
)
def test_another_form_says_nothing(fields: dict[str, tuple[float, ...]]) -> None:
    view = instance(0)
    steps = ReportedSteps(InstanceSteps(view, LinearSteps(), "linear"))
    steps.on_models(TOLD._replace(**fields))
    assert view.steps is None
    assert steps.describe() == "profile linear, not measured"


def test_coefficients_of_a_later_version_are_left_out() -> None:
    assert read_step_models(TOLD._replace(decode_model=(*TOLD.decode_model, 7.0))) is not None


def test_it_says_where_step_times_are_from_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    view = instance(0)
    steps = ReportedSteps(InstanceSteps(view, LinearSteps(), "linear"))
    for times in (1.0, 1.0, 2.0, 4.0, 1.0):  # on a busy host they change with each report
        decode = tuple(times * value for value in TOLD.decode_model)
        steps.on_models(TOLD._replace(decode_model=decode))
    assert view.steps is not None
    assert view.steps.decode_s(1, 1000) == START.decode_s(1, 1000)
    assert [record.getMessage() for record in caplog.records] == [
        "step times of i0: profile linear, not measured",
        "step times of i0: measured (40 prefill passes, 64 decode steps)",
    ]


def test_a_state_says_the_same_as_a_report() -> None:
    plain = [list(TOLD.step_model), list(TOLD.decode_model), [40, 64, 8]]
    assert FittedModels.of_state(plain) == TOLD
    for other in (None, {}, [], [1, 2, 3], [[], ["x"], [1, 2, 3]], [[], [], [-1, 0, 0]]):
        assert FittedModels.of_state(other) is None
