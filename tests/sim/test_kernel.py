"""Order of events, and what the kernel refuses."""

from __future__ import annotations

import math

import pytest

from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.kernel import Kernel, Priority


def test_time_then_priority_then_sequence() -> None:
    kernel, seen = Kernel(), []
    kernel.at(2.0, Priority.END, seen.append, "later")
    kernel.at(1.0, Priority.TICK, seen.append, "tick")
    kernel.at(1.0, Priority.ARRIVAL, seen.append, "first arrival")
    kernel.at(1.0, Priority.ARRIVAL, seen.append, "second arrival")
    kernel.at(1.0, Priority.END, seen.append, "end")
    kernel.run()
    assert seen == ["end", "first arrival", "second arrival", "tick", "later"]
    assert kernel.events == 5


def test_an_event_may_schedule_for_the_same_instant() -> None:
    kernel, seen = Kernel(), []
    kernel.at(1.0, Priority.TICK, lambda _: kernel.at(1.0, Priority.END, seen.append, "urgent"))
    kernel.at(1.0, Priority.TICK, seen.append, "other tick")
    kernel.run()
    assert seen == ["urgent", "other tick"]


@pytest.mark.parametrize("time_s", [-1.0, math.nan])
def test_the_past_is_refused(time_s: float) -> None:
    with pytest.raises(SimError, match="allowed: now or later"):
        Kernel().at(time_s, Priority.END, print)


def test_quiet_tells_whether_this_instant_is_over() -> None:
    kernel, seen = Kernel(), []
    kernel.at(1.0, Priority.END, lambda _: seen.append(kernel.quiet()))
    kernel.at(1.0, Priority.END, lambda _: seen.append(kernel.quiet()))
    kernel.run()
    assert seen == [False, True]
