"""A policy that makes mistakes."""

from __future__ import annotations

import time

import pytest
from support.router_scene import scene

from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.interface.decisions import Dispatch
from pla_sglang.policy.interface.fleet import FleetView, RequestView


async def test_a_policys_mistake_ends_one_request_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """At its arrival, and as the first of those that wait."""
    async with scene(["prefill", "decode"], policy="minimal-load") as one:
        driver = one.plane.policy.runner
        assert driver is not None
        choose = driver.policy.dispatcher.dispatch

        def dispatch(request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
            if request.rid.startswith("bad") and fleet.ready:
                raise ZeroDivisionError("a policy's mistake")
            return choose(request, fleet, now_s)

        driver.policy.dispatcher.dispatch = dispatch  # type: ignore[method-assign]
        one.assign("good")
        refused = one.be_refused("bad")
        assert (refused.status, refused.code) == (500, "fault")
        assert "ZeroDivisionError: a policy's mistake" in caplog.text
        one.assign("good too")
        for worker in one.plane.table:
            one.plane.table.drain(worker, time.monotonic())
        assert [one.ask("bad and early"), one.ask("good and late")] == [None, None]
        for worker in one.plane.table:
            one.plane.table.undrain(worker, time.monotonic())
        told = [message for message in one.relay.told if getattr(message, "rid", "").endswith(("early", "late"))]
        assert [type(message) for message in told] == [m.Refuse, m.Assign]
        for rid in ("bad", "bad and early"):
            one.ended(rid, m.Outcome.REFUSED)
        for rid in ("good", "good too", "good and late"):
            one.reach(rid, m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
            one.ended(rid)
        one.assert_at_rest()
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_requests_total{end="fault",model="chain",tenant=""} 2.0' in metrics
        assert 'pla_router_requests_total{end="finished",model="chain",tenant=""} 3.0' in metrics
        assert one.admin("GET", "/pla/explain/bad")[1]["end"] == "fault"
