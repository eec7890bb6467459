"""While a hold lasts, nothing is asked of the host again, until something changes. On a fake scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_scheduler import TEMPORAL, FakeBatch, FakeReq, FakeScheduler, short_prompts, started

from pla_sglang.plugin.engine import scheduler_adapter
from pla_sglang.plugin.engine.clock import PlaTick


def holding(**fields: Any) -> FakeScheduler:
    """A scheduler that holds two shorts back for a while."""
    scheduler = FakeScheduler(short_prompts(2), **fields)
    scheduler.pla.set_config(TEMPORAL.replace(wait_min_ms=5.0))
    scheduler.pla.on_tick(PlaTick(now_s=100.0))
    assert scheduler.run_pass() is None
    assert len(scheduler.seen) == 1
    return scheduler


def test_an_unchanged_hold_does_not_ask_the_host_again(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(scheduler_adapter.time, "sleep", naps.append)
    scheduler = holding()
    for _ in range(3):
        assert scheduler.run_pass() is None
    assert len(scheduler.seen) == 1
    assert scheduler.pla.telemetry.passes_skipped == 3
    assert naps == [scheduler_adapter.HOLD_NAP_S] * 3


def test_a_hold_naps_only_on_an_idle_device(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(scheduler_adapter.time, "sleep", naps.append)
    scheduler = holding(running=FakeBatch([FakeReq("decoding", 5)]))
    assert scheduler.run_pass() is None
    assert naps == []


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.pla.on_tick(PlaTick(now_s=100.006)),
        lambda it: it.waiting_queue.append(FakeReq("new", 20)),
        lambda it: it.waiting_queue.pop(),
        lambda it: it.waiting_queue.__setitem__(-1, FakeReq("another", 20)),
        lambda it: it.running.reqs.append(FakeReq("decoding", 5)),
        lambda it: it.pla.set_config(it.pla.config.replace(wait_max_ms=9.0)),
        lambda it: setattr(it, "chunked_req", started()),
        lambda it: setattr(it.grammar_manager, "has_waiting_grammars", lambda: True),
    ],
    ids=["its end", "arrival", "abort", "abort and arrival", "decode", "knobs", "chunk", "grammar"],
)
def test_a_hold_ends_when_something_changes(change: Any) -> None:
    scheduler = holding()
    change(scheduler)
    scheduler.run_pass()
    assert len(scheduler.seen) == 2


def test_a_hold_reports_the_load_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_adapter.time, "sleep", lambda seconds: None)
    scheduler = holding()
    for _ in range(5):
        scheduler.run_pass()
    assert scheduler.published == 1
