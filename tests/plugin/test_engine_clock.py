"""The clock and the step model travel from rank 0 to all ranks with the requests. On a fake scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.runtime_context import get_parallel
from support.fake_scheduler import FakeReq, FakeScheduler, short_prompts, started

from pla_sglang.plugin.engine.clock import PlaTick
from pla_sglang.plugin.engine.hooks import scheduler as handlers
from pla_sglang.policy.common.step_model import CPU_START, GPU_START, StepModel


def pull(requests: list[Any] | None, *, pp_rank: int = 0) -> Any:
    """What the hook does in a process of this rank."""
    with get_parallel().override(pp_size=2, pp_rank=pp_rank):
        return handlers.after_pull_raw_reqs(requests, None)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    made = FakeScheduler()
    monkeypatch.setattr(handlers, "_adapter", made.pla)
    return made


def test_the_clock_rides_in_front_of_what_rank_0_received(scheduler: FakeScheduler) -> None:
    pulled = ["a request"]
    pull(pulled)
    assert isinstance(pulled[0], PlaTick)
    assert pulled[1:] == ["a request"]


def test_other_ranks_have_no_clock(scheduler: FakeScheduler) -> None:
    scheduler.waiting_queue = short_prompts(1)
    assert pull(None) is None  # a rank that receives by broadcast
    pulled: list[Any] = []
    pull(pulled, pp_rank=1)
    assert pulled == []


def test_no_clock_before_the_policy_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_adapter", None)
    pulled = ["a request"]
    pull(pulled)
    assert pulled == ["a request"]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda it: None, False),
        (lambda it: it.waiting_queue.append(FakeReq("a", 5)), True),
        (lambda it: setattr(it, "chunked_req", started()), True),
        (lambda it: it.grammar_manager.grammar_queue.append("a"), True),
        (lambda it: setattr(it, "disagg_prefill_bootstrap_queue", SimpleNamespace(queue=["a"])), True),
        (lambda it: setattr(it, "disagg_prefill_bootstrap_queue", SimpleNamespace(queue=[])), False),
    ],
    ids=["idle", "queue", "chunk", "grammar", "handshake", "no handshake"],
)
def test_an_idle_server_broadcasts_nothing(scheduler: FakeScheduler, change: Any, wanted: bool) -> None:
    change(scheduler)
    pulled: list[Any] = []
    pull(pulled)
    assert bool(pulled) is wanted


def test_the_clock_runs_forward(scheduler: FakeScheduler) -> None:
    first, second = scheduler.pla.make_tick(), scheduler.pla.make_tick()
    assert second.now_s > first.now_s
    scheduler.pla.on_tick(second)
    assert scheduler.pla.now_s == second.now_s


def test_a_model_travels_once(scheduler: FakeScheduler) -> None:
    scheduler.pla.steps.fits.prefills.model = GPU_START
    tick = scheduler.pla.make_tick()
    assert StepModel.from_floats(tick.model) == GPU_START
    assert scheduler.pla.make_tick().model == ()
    assert scheduler.pla.policy.prefills.model == CPU_START, "rank 0 changes its own model with everybody else"
    scheduler.pla.on_tick(tick)
    assert scheduler.pla.policy.prefills.model == GPU_START
    scheduler.pla.on_tick(PlaTick(now_s=1.0))
    assert scheduler.pla.policy.prefills.model == GPU_START


def test_arrivals_are_stamped_with_the_shared_clock(scheduler: FakeScheduler) -> None:
    scheduler.pla.on_tick(PlaTick(now_s=50.0))
    req = FakeReq("a", 20)
    handlers.after_add_request_to_queue(None, scheduler, req)
    scheduler.pla.on_tick(PlaTick(now_s=60.0))
    assert scheduler.pla.views.find_view(req).arrival_s == 50.0
