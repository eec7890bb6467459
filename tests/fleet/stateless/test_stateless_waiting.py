"""A hold finds a request wherever it waits, on SGLang's own way into its queue; else it would be called unknown.

And only what waits for a prefill here has a view for the policies.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fleet.stateless.hop_scene import HopRequest, HopScene

from pla_sglang.fleet.stateless import scheduler_hooks as hooks
from pla_sglang.fleet.stateless.engine import StatelessEngine
from pla_sglang.fleet.stateless.transfer.legs import KIND_ATTRIBUTE, LegKind
from pla_sglang.fleet.stateless.transfer.receiving import Receiver
from pla_sglang.plugin.engine.hooks import scheduler as scheduler_hooks


def engine_of(scheduler: Any) -> Any:
    engine: Any = object.__new__(StatelessEngine)
    receiver: Any = object.__new__(Receiver)
    receiver._queue, receiver._transfers, receiver.ready = SimpleNamespace(queue=[]), SimpleNamespace(queue=[]), []
    engine._scheduler, engine.sender, engine.receiver = scheduler, SimpleNamespace(legs={}), receiver
    return engine


def put(engine: Any, place: str, req: HopRequest) -> None:
    entry = SimpleNamespace(req=req)
    if place == "retracted":
        from sglang.srt.managers.scheduler import Scheduler

        req.time_stats = SimpleNamespace(set_wait_queue_entry_time=lambda: None)
        hooks.around_add_request_to_queue(Scheduler._add_request_to_queue, engine._scheduler, req, is_retracted=True)
    elif place == "grammar":
        engine._scheduler.grammar_manager.grammar_queue.append(req)
    elif place == "sending":
        engine.sender.legs[req.rid] = entry
    elif place == "ready":
        engine.receiver.ready.append(req)
    else:
        getattr(engine.receiver, place).queue.append(entry)


@pytest.mark.parametrize("place", ["retracted", "grammar", "sending", "ready", "_queue", "_transfers"])
def test_a_hold_of_a_request_that_waits(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    from sglang.srt.disaggregation.utils import DisaggregationMode

    scheduler = SimpleNamespace(
        waiting_queue=[],
        processed_tokens_counter=0,
        grammar_manager=SimpleNamespace(grammar_queue=[]),
        disaggregation_mode=DisaggregationMode.NULL,
        _set_or_validate_priority=lambda req: True,
        _abort_on_queued_limit=lambda req: False,
        _prefetch_kvcache=lambda req: None,
    )
    engine, scene, req = engine_of(scheduler), HopScene(monkeypatch), HopRequest("r")
    scene.migration._list_waiting = engine._list_waiting
    assert scene.hold(req, room=1) == {"status": "unknown"}
    put(engine, place, req)
    assert scene.hold(req, room=2) == {"status": "waiting"}


@pytest.mark.parametrize(
    ("kind", "finished", "retracted", "seen"),
    [
        (LegKind.WHOLE, False, False, True),
        (LegKind.PREFILL, False, False, True),
        (LegKind.DECODE, False, False, False),  # its KV comes from elsewhere
        (LegKind.DECODE, False, True, True),  # computed again here
        (LegKind.WHOLE, True, False, False),  # refused
        (None, False, False, True),
    ],
)
def test_only_what_waits_for_a_prefill_is_seen_by_policies(
    kind: LegKind | None, *, finished: bool, retracted: bool, seen: bool
) -> None:
    """A view of what never waits would never be let go."""
    queued: list[Any] = []
    engine = object.__new__(StatelessEngine)
    scheduler = SimpleNamespace(pla=SimpleNamespace(on_queued=queued.append), pla_fleet=engine)
    req = SimpleNamespace(finished=lambda: finished, retracted_stain=retracted)
    if kind is not None:
        setattr(req, KIND_ATTRIBUTE, kind)
    scheduler_hooks.after_add_request_to_queue(None, scheduler, req)
    assert queued == ([req] if seen else [])
    del scheduler.pla_fleet
    scheduler_hooks.after_add_request_to_queue(None, scheduler, req)
    assert queued[-1:] == [req], "an instance that is not stateless has no legs"
