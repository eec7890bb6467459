"""The whole control plane against local fakes of instances: real HTTP and ZMQ, relays that are lists of messages."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSglang
from support.router_scene import beginning_scene, scene

from pla_sglang.fleet.router.control.workers.table import WorkerState
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.load import tracker
from pla_sglang.load.report import Backlog, ClassQueue, PassTiming, PassTotals, Report
from pla_sglang.load.sockets import Pusher
from pla_sglang.policy.admission import AdmissionKnobs


async def test_policies_and_metrics_learn_the_tokens_that_an_instance_has_counted() -> None:
    """Events say little: none for an answer in one piece, and too few where tokens were joined in one."""
    async with scene(["null"], policy="least-tokens") as one:
        runner, finished = one.plane.policy.runner, []
        assert runner is not None
        runner._on_finish.append(lambda view, tokens, now_s: finished.append((view.rid, tokens)))
        for rid, ended in {
            "whole": {"events": 0, "output_tokens": 300, "exact_tokens": True},
            "streamed": {"events": 12, "output_tokens": 40, "exact_tokens": True},
            "unsaid": {"events": 7, "output_tokens": 7},
        }.items():
            one.assign(rid)
            one.reach(rid, m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
            one.ended(rid, **ended)
        assert finished == [("whole", 300), ("streamed", 40), ("unsaid", 7)]
        told = one.admin("GET", "/pla/explain/whole")[1]
        assert (told["output_tokens"], told["exact_output"]) == (300, True)
        told = one.admin("GET", "/pla/explain/unsaid")[1]
        assert (told["output_tokens"], told["exact_output"]) == (7, False)
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_output_tokens_total{by="instance",model="chain",tenant=""} 340.0' in metrics
        assert 'pla_router_output_tokens_total{by="events",model="chain",tenant=""} 7.0' in metrics
        one.assert_at_rest()


async def test_a_pair_serves_a_request_and_explains_it() -> None:
    async with scene(["prefill", "decode"], policy="minimal-load") as one:
        table = one.relay.last(m.Table)
        assert table.serving
        assert [worker.kind for worker in table.workers] == ["prefill", "decode"]
        assign = one.assign("r1")
        assert (assign.prefill, assign.decode) == (0, 1)
        assert (assign.bootstrap_host, assign.bootstrap_port) == ("127.0.0.1", 8998)
        assert one.plane.dispatcher.ledger.rooms == {assign.bootstrap_room: "r1"}
        assert one.plane.table.by_number[0].view.queued_prefills == 1
        decode = one.plane.table.by_number[1].view
        assert decode.waiting_decodes == 1
        assert decode.decode_tokens() == 0 < decode.assigned_decode_tokens()
        one.reach("r1", m.Milestone.SENT, m.Milestone.PREFILL_DONE)
        assert decode.decode_tokens() == decode.assigned_decode_tokens() > 0
        assert one.plane.table.by_number[0].view.queued_prefills == 0
        one.reach("r1", m.Milestone.FIRST_TOKEN)
        assert one.plane.table.by_number[1].view.running == 1
        one.ended("r1")
        one.assert_at_rest()
        status, told = one.admin("GET", "/pla/explain/r1")
        assert status == 200
        assert (told["prefill"], told["reason"], told["end"]) == (
            one.plane.table.by_number[0].view.name,
            "baseline.minimal_load",
            "finished",
        )
        assert sum(told["stages"].values()) == pytest.approx(told["ttft_s"], rel=1e-9)
        assert one.admin("GET", "/pla/explain/nobody")[0] == 404
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_requests_total{end="finished",model="chain",tenant=""} 1.0' in metrics
        assert 'pla_router_dispatches_total{reason="baseline.minimal_load"} 1.0' in metrics
        assert "pla_router_open_requests 0.0" in metrics


async def test_who_is_not_served_yet_waits_and_goes_when_an_instance_is_ready() -> None:
    late = FakeSglang()
    await late.start()
    await late.stop()  # its port is known, nobody listens
    async with beginning_scene(late, workers=(late.url,), pending_s=20.0) as one:
        assert one.ask("r1") is None
        assert not one.relay.last(m.Table).serving
        await late.start()
        await one.until(lambda: any(isinstance(told, m.Assign) for told in one.relay.told))
        one.ended("r1")
        one.assert_at_rest()


async def test_who_waits_too_long_is_refused() -> None:
    async with beginning_scene(workers=("http://127.0.0.1:9",), pending_s=0.1) as one:
        assert one.ask("r1") is None
        await one.until(lambda: any(isinstance(told, m.Refuse) for told in one.relay.told))
        refuse = one.relay.last(m.Refuse)
        assert (refuse.status, refuse.code, refuse.retry_after_s) == (503, "no_instance", 5.0)
        one.ended("r1", m.Outcome.REFUSED)
        assert one.plane.dispatcher.ledger.ended.total() == 1
        one.assert_at_rest()


async def test_limits_and_duplicates() -> None:
    async with scene(["null"], admission=AdmissionKnobs(open_requests=2)) as one:
        one.assign("a")
        one.assign("b")
        over = one.be_refused("c")
        assert (over.status, over.code, over.retry_after_s) == (429, "open_limit", 1.0)
        one.ended("c", m.Outcome.REFUSED)
        assert one.ask("a") is None, "repeated by its relay, as to a control plane that is new"
        other = type(one.relay)()
        one.plane.attach_relay(1, other)
        one.ask("a", relay=1)
        twin = other.last(m.Refuse)
        assert (twin.status, twin.code) == (409, "duplicate")
        one.ended("a", m.Outcome.REFUSED)  # the twin's end, not that of the first
        assert "a" in one.plane.dispatcher.ledger.records
        one.ended("a")
        one.ended("b")
        one.assert_at_rest()


async def test_several_samples_of_a_prompt_need_a_unified_instance() -> None:
    """All of them would have one room, so a pair cannot serve them; a batch of prompts has a room for each."""
    async with scene(["prefill", "decode"]) as one:
        refused = one.be_refused("n3", samples=3)
        assert (refused.status, refused.code) == (400, "several_samples")
        one.ended("n3", m.Outcome.REFUSED)
        one.assign("batch", prompts=3)
        one.ended("batch")
        one.assert_at_rest()
    async with scene(["prefill", "null", "decode"], policy="round-robin") as one:
        for number in range(6):
            assign = one.assign(f"n{number}", samples=2)
            assert (assign.prefill, assign.decode) == (None, 1)
            one.ended(f"n{number}")
        one.assert_at_rest()


async def test_what_a_relay_has_not_aborted_is_aborted_here() -> None:
    async with scene(["prefill", "decode"]) as one:
        prefill, decode = one.instances
        one.ask("told")
        one.ended("told", m.Outcome.CLIENT_GONE, aborted=(0, 1))
        assert (prefill.aborted, decode.aborted) == ([], [])
        decode.abort_status = 500
        one.ask("untold")
        one.ended("untold", m.Outcome.PREFILL_FAILED, aborted=(0,))
        await asyncio.sleep(0.2)
        again = one.ask("untold")  # its name is not free yet
        assert isinstance(again, m.Refuse)
        assert again.status == 409
        one.ended("untold", m.Outcome.REFUSED)
        audit = one.plane.dispatcher.ledger.audit(time.monotonic())
        assert (audit.legs_aborting, audit.rooms) == (1, 1)  # not confirmed: the room is not free
        decode.abort_status = 200
        await one.until(lambda: set(decode.aborted) == {"untold"})
        await one.until(lambda: not one.plane.dispatcher.ledger.records)
        one.ask("lost", prompts=2)
        one.plane.detach_relay(0)
        lost = {"lost_0", "lost_1"}  # as SGLang names the prompts of a batch
        await one.until(lambda: set(prefill.aborted) == lost and set(decode.aborted) == {"untold", *lost})
        await one.at_rest()


async def test_a_failed_connection_is_tried_elsewhere() -> None:
    async with scene(["null", "null"]) as one:
        first = one.assign("r")
        await one.instances[first.decode].stop()
        one.plane.on_message(m.Failure(first.decode, m.FailureKind.CONNECT))
        second = one.ask_again("r", 1, m.Cause.NOT_SENT, over={"avoid": (first.decode,)})
        assert isinstance(second, m.Assign)
        assert second.decode != first.decode
        assert second.attempt == 2
        await one.until(lambda: one.plane.table.by_number[first.decode].state is WorkerState.DEAD)
        assert [worker.number for worker in one.relay.last(m.Table).workers] == [1 - first.decode, 2]
        one.ended("r")
        one.assert_at_rest()
        await one.instances[first.decode].start()
        await one.ready(2)  # another process, another number


async def test_requests_of_a_dead_instance_are_ended() -> None:
    async with scene(["null", "null"]) as one:
        assigned = {rid: one.ask(rid) for rid in ("a", "b")}
        victim = assigned["a"].decode  # type: ignore[union-attr]
        await one.instances[victim].stop()
        await one.until(lambda: any(isinstance(told, m.Abort) for told in one.relay.told))
        abort = one.relay.last(m.Abort)
        assert (abort.rid, abort.status, abort.code) == ("a", 502, "instance_dead")
        one.ended("a", m.Outcome.ABORTED)
        assert one.admin("GET", "/pla/explain/a")[1]["end"] == "instance_dead"
        one.ended("b")
        one.assert_at_rest()
        await one.instances[victim].start()


async def test_telemetry_makes_polls_needless_and_tells_of_restarts(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/reports"
    async with scene(["null"], telemetry=address, policy="minimal-load", poll_interval_s=5.0) as one:
        pusher = Pusher(address)
        name = f"127.0.0.1:{one.instances[0].port}"
        worker = one.plane.table.by_number[0]
        backlog = Backlog(2, 300, 45_000, 10)
        passes = PassTotals(1000, 1_000_000, 0, 1, 1, 5.0)
        report = Report(
            instance=name,
            sequence=1,
            backlog=backlog,
            running=3,
            passes=passes,
            steps=(PassTiming(1000, 1_000_000, 0, 1, 5.0),),
            short=ClassQueue(2, 30),
            role="short",
            errors={"aborted": 2},
        )

        def sent() -> bool:
            return pusher.send(report)

        await one.until(sent)
        await one.until(lambda: worker.view.queued_tokens == 300)
        assert (worker.view.queued_attention, worker.view.running) == (45_000, 3)
        (told,) = one.admin("GET", "/workers/0")[1]["ranks"].values()
        assert (told["role"], told["short"]["tokens"], told["errors"]) == ("short", 30, {"aborted": 2})
        line = f'pla_router_worker_errors{{kind="aborted",worker="{name}"}} 2.0'
        assert line in one.admin("GET", "/metrics")[1]
        assert one.plane.policy.predictor is not None
        assert one.plane.policy.predictor.factor(worker.view) > 1  # five seconds for a thousand tokens
        again = Report(instance=name, sequence=1, started_s=99.0)
        pusher.send(again)
        await one.until(lambda: worker.state is WorkerState.DEAD)
        assert worker.reason.value == "restarted"
        pusher.send(Report(instance="somebody else", sequence=1))
        await one.until(lambda: one.admin("GET", "/pla/state")[1]["telemetry"]["reports_of_nobody"] == 1)
        pusher.close()


async def test_pools_are_told_to_instances_and_moved_under_pressure() -> None:
    modes = ["prefill", "prefill", "prefill", "decode"]
    async with scene(modes, has_role=True, policy="pla", slo_ttft_s=0.05, boundary_tokens=100) as one:
        state = one.admin("GET", "/pla/state")[1]
        assert {pool: len(names) for pool, names in state["pools"].items()} == {"short": 1, "long": 2, "both": 0}
        await one.until(lambda: all(fake.roles for fake in one.instances[:3]))
        # Also the first of them, which was alone at first and took both classes.
        await one.until(lambda: sorted(fake.roles[-1] for fake in one.instances[:3]) == ["long", "long", "short"])
        for number in range(12):  # a burst of shorts: the short pool has a backlog, the long one none
            one.assign(f"s{number}", input_tokens=99, exact_tokens=True)
        loaded = [fake for fake in one.instances[:3] if fake.roles[-1] == "short"]
        for fake in loaded:
            fake.load |= {"num_waiting_reqs": 50, "num_waiting_uncached_tokens": 100_000}
        await one.until(lambda: one.plane.policy.runner.moved.total() == 1, 8.0)  # type: ignore[union-attr]
        state = one.admin("GET", "/pla/state")[1]
        assert {pool: len(names) for pool, names in state["pools"].items()} == {"short": 2, "long": 1, "both": 0}
        (move,) = state["last_moves"]
        assert (move["role"], move["reason"]) == ("short", "pla.pressure_short")
        assert 0 <= move["ago_s"] < 5
        assert state["pressure"]["short"] > 1.5 * state["pressure"]["long"]
        assert state["pressure"]["knobs"]["tau"] == 0.5
        assert state["boundary"] == {
            "boundary_tokens": 100,
            "boundary_tokens_at_8k_history": 100,
            "step_model": None,
        }
        await one.until(lambda: sorted(fake.roles[-1] for fake in one.instances[:3]) == ["long", "short", "short"])
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_actions_total{action="SetLengthClass",reason="pla.pressure_short"} 1.0' in metrics
        assert 'pla_router_pool_instances{pool="short"} 2.0' in metrics
        check_signals(state, metrics)
        for number in range(12):
            one.ended(f"s{number}")
        one.assert_at_rest()


async def test_an_instance_that_did_not_hear_its_pool_is_told_again() -> None:
    async with scene(["prefill", "decode"], has_role=True, policy="pla") as one:
        await one.until(lambda: one.instances[0].roles == ["mixed"])
        one.instances[0].role_status = 503
        other = await FakeSglang("prefill", has_role=True).start()
        one.admin("POST", "/workers", {"url": other.url})  # so the first one gets a pool
        await one.until(lambda: "does not know its class" in one.admin("GET", "/workers/0")[1]["detail"])
        one.instances[0].role_status = 200
        await one.until(lambda: one.instances[0].roles == ["mixed", "long"])
        await one.until(lambda: one.admin("GET", "/workers/0")[1]["detail"] == "")
        await other.stop()


def check_signals(state: dict[str, Any], metrics: str) -> None:
    """Of each instance, psi is the sum of its parts, and its pool's pressure is the largest one (of fewer than ten)."""
    told = {
        tuple(re.findall(r'"([^"]*)"', line)): float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("pla_router_pool_")
    }
    pressure, knobs = state["pressure"], state["pressure"]["knobs"]
    assert {labels[0] for labels in told if len(labels) == 2} == {"q", "e", "u", "psi"}
    for name, one in pressure["by_instance"].items():
        for parts in (one, {labels[0]: value for labels, value in told.items() if labels[1:] == (name,)}):
            psi = knobs["alpha"] * parts["q"] + knobs["beta"] * parts["e"] - knobs["gamma"] * parts["u"]
            assert parts["psi"] == pytest.approx(psi)
    for pool, names in state["pools"].items():
        if pool != "both":
            assert pressure[pool] == pytest.approx(max(0, *(pressure["by_instance"][one]["psi"] for one in names)))


async def test_a_pool_that_was_late_is_forgiven_once_it_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its deviation would ask for instances for ever."""
    monkeypatch.setattr(tracker, "SIGNAL_WINDOW_S", 0.6)
    async with scene(["null"], slo_ttft_s=0.01) as one:
        one.ask("late", ago_s=0.1)
        one.reach("late", m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
        view = one.plane.table.by_number[0].view
        assert view.ttft_ratio is not None
        assert view.ttft_ratio >= 5
        one.ended("late")
        await one.until(lambda: view.ttft_ratio is None)


async def test_an_instance_that_is_not_well_is_not_let_in() -> None:
    fake = FakeSglang()
    fake.healthy = False
    await fake.start()
    async with beginning_scene(fake, workers=(fake.url,)) as one:
        worker = one.plane.table.by_number[0]
        await one.until(lambda: worker.misses >= 2)
        assert worker.state is WorkerState.STARTING
        assert "503" in worker.detail
        fake.healthy = True
        await one.ready(1)
        fake.healthy = False  # one that serves is asked for less than a token
        await asyncio.sleep(0.3)
        assert worker.is_ready()
