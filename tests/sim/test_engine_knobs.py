"""Constants of a simulated engine's policy that are set by name."""

from __future__ import annotations

import re

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.temporal_knobs import PARTS, tune
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs
from pla_sglang.sim.core.experiment import Experiment
from pla_sglang.sim.metrics.goodput import Slo

SLO = Slo(1.0, 0.1)


def test_each_part_takes_its_own() -> None:
    texts = ("temporal.decode_share=0.1", "awd.depth_max=8", "long_prompts.stretch=5", "slo.short_steps=3")
    tuned = tune(EnginePolicyKnobs(), texts)
    assert (tuned.decode_share, tuned.awd.depth_max, tuned.long_prompts.stretch, tuned.slo.short_steps) == (
        0.1,
        8,
        5.0,
        3,
    )
    assert tune(EnginePolicyKnobs(), ()) == EnginePolicyKnobs()
    assert {text.partition(".")[0] for text in texts} == set(PARTS)


@pytest.mark.parametrize(
    ("engine", "texts", "said"),
    [
        ("temporal", ["slo.none=1"], "--engine-knob 'slo.none' is not known; allowed: temporal.headroom_requests, "),
        ("temporal", ["slo.token_share=1.5"], "--engine-knob slo.token_share 1.5 is out of range; allowed: above 0"),
        ("temporal", ["slo.short_steps=1.5"], "--engine-knob slo.short_steps 1.5 is not a whole number"),
        ("temporal", ["slo.slower"], "--engine-knob slo.slower '' is no number; allowed: above 0"),
        ("temporal", ["slo.slower=1", "slo.slower=2"], "--engine-knob slo.slower is given twice"),
        ("temporal", ["awd.wait_min_s=1"], "awd wait_min_s 1 is above wait_max_s 0.01"),
        ("fcfs", ["slo.slower=2"], "--engine-knob is given with --engine fcfs; allowed: with temporal"),
    ],
)
def test_bad_ones_are_refused_in_a_line(engine: str, texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        Experiment("round-robin", SLO, engine=engine, engine_knobs=tuple(texts))
    assert "\n" not in str(raised.value)
