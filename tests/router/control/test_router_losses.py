"""What is known of an instance when a request is lost with it, and who gets the request then, if anybody."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from support.router_scene import QUICK, Scene, run, scene

from pla_sglang.policy.arrow.curve import PrefillCurve
from pla_sglang.policy.arrow.predictor import TtftPredictor
from pla_sglang.policy.device_clock import DeviceClock
from pla_sglang.router.control import survival
from pla_sglang.router.control.workers.breaker import BreakerKnobs, BreakerState
from pla_sglang.router.control.workers.health import HealthKnobs
from pla_sglang.router.control.workers.silence import longest_pass_s, silent_for_s
from pla_sglang.router.control.workers.table import Worker, WorkerReason, WorkerState, WorkerTable
from pla_sglang.router.wire import messages as m

THREE = ["stateless", "stateless", "stateless"]
ON: dict[str, Any] = {"policy": "least-tokens", "migration": "on", "hops": True}
SENT = (m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
DEAD, BROKEN, ABORTED = m.LossReason.DEAD, m.LossReason.BROKEN, m.LossReason.ABORTED
PATIENT = dataclasses.replace(QUICK, misses=1000, refused=1000, silence_s=0.5)


def lose(one: Scene, worker: int, why: m.LossReason, *, tokens: int = 0, rid: str = "r", at_s: float = 0.0) -> Any:
    """The answer, if there is one at once."""
    told = len(one.relay.told)
    at_s = at_s or time.monotonic()
    one.plane.on_message(m.Lost(rid, 1, tokens, why, at_s, tokens > 0, (worker,)))
    return next((said for said in one.relay.told[told:] if isinstance(said, m.Continue | m.End)), None)


def answers(one: Scene) -> list[Any]:
    return [said for said in one.relay.told if isinstance(said, m.Continue | m.End)]


def start(one: Scene, rid: str = "r", *milestones: m.Milestone) -> Worker:
    assign = one.ask(rid)
    assert isinstance(assign, m.Assign)
    one.reach(rid, *milestones)
    return one.plane.table.by_number[assign.decode]


async def settle(one: Scene, rid: str = "r") -> None:
    one.ended(rid, m.Outcome.UPSTREAM_LOST)
    await one.until(lambda: not one.plane.dispatcher.ledger.records)
    one.assert_at_rest()


# -- who may be what an instance has died of ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "silent_s", "sent_ago_s", "tokens", "why", "goes_on"),
    [
        ("all of it was killed at once, nothing was shown", 0.1, 0.2, 0, DEAD, True),
        ("its scheduler died first, with the request there", 5.5, 6.0, 0, DEAD, False),
        ("... or just about to come", 5.5, 5.0, 0, DEAD, False),
        ("... which came when it was silent already", 5.5, 2.0, 0, DEAD, True),
        ("... and the request had shown tokens, so had survived its passes", 5.5, 6.0, 3, DEAD, True),
        ("its connection broke behind the head, and its scheduler had died", 5.5, 6.0, 0, BROKEN, False),
        ("a stream that has begun goes on at once however it broke", 0.1, 0.2, 3, BROKEN, True),
        ("it was given up before anything was shown: the instance lives", 0.1, 0.2, 0, ABORTED, True),
        ("... and after", 0.1, 0.2, 3, ABORTED, True),
    ],
)
def test_who_may_be_what_an_instance_has_died_of_is_not_sent_to_another(
    name: str, silent_s: float, sent_ago_s: float, tokens: int, why: m.LossReason, goes_on: bool
) -> None:
    async def work() -> None:
        async with scene(THREE, **ON, health=PATIENT) as one:
            worker = start(one, "r", *SENT[: 2 if tokens else 1])
            now_s = time.monotonic()
            worker.heard_s = now_s - silent_s
            one.plane.dispatcher.ledger.records["r"].hop.assigned_s = now_s - sent_ago_s
            answer = lose(one, worker.number, why, tokens=tokens)
            if goes_on:
                assert isinstance(answer, m.Continue), name
                assert answer.target != worker.number
                assert answer.reason == ("aborted" if why is ABORTED else "survive")
            else:
                assert isinstance(answer, m.End), name
                assert "no other one gets it" in answer.message
                assert 'move_failures_total{reason="to_blame"} 1.0' in one.admin("GET", "/metrics")[1]
            await settle(one)

    run(work)


# -- answers that break off ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["well", "ill", "gone"])
def test_an_answer_that_broke_off_before_anything_was_shown_waits_for_a_check(found: str) -> None:
    """Where the instance is well it was the request, which no other one gets."""

    async def work() -> None:
        async with scene(THREE, **ON) as one:
            worker = start(one, "r", m.Milestone.SENT)
            instance = one.instances[worker.number]
            if found == "ill":
                instance.healthy = False
            elif found == "gone":
                await instance.stop()
            one.plane.on_message(m.Failure(worker.number, m.FailureKind.BROKEN, "", "r"))
            assert lose(one, worker.number, BROKEN) is None
            await one.until(lambda: answers(one))
            [answer] = answers(one)
            if found == "well":
                assert isinstance(answer, m.End)
                assert "is well" in answer.message
                assert 'move_failures_total{reason="is_well"} 1.0' in one.admin("GET", "/metrics")[1]
            else:
                assert isinstance(answer, m.Continue)
                assert answer.target != worker.number
            if found == "gone":
                await instance.start()
            await settle(one)

    run(work)


def test_a_request_that_ends_while_its_instance_is_checked_is_forgotten() -> None:
    async def work() -> None:
        async with scene(THREE, **ON) as one:
            worker = start(one, "r", m.Milestone.SENT)
            assert lose(one, worker.number, BROKEN) is None
            await settle(one)
            await asyncio.sleep(2 * 0.25)
            assert not answers(one)

    run(work)


def test_nobody_who_checks_it_is_no_reason_to_wait_for_ever() -> None:
    async def work() -> None:
        health = dataclasses.replace(PATIENT, timeout_s=0.2)
        async with scene(THREE, **ON, health=health) as one:
            worker = start(one, "r", m.Milestone.SENT)
            assert lose(one, worker.number, BROKEN) is None  # the report of it is lost, so nobody asks for a check
            await one.until(lambda: answers(one))
            assert isinstance(answers(one)[0], m.Continue)
            await settle(one)

    run(work)


def test_clients_mistakes_in_streams_open_no_breaker() -> None:
    """Ten streams in a row that the instance breaks off, and it is well."""

    async def work() -> None:
        async with scene(["null", "null"], breaker=BreakerKnobs(consecutive=3)) as one:
            for turn in range(10):
                for number in (0, 1):
                    one.plane.on_message(m.Failure(number, m.FailureKind.BROKEN, "broke off", f"r{turn}"))
                await asyncio.sleep(0.02)
            await one.until(lambda: all(worker.verified for worker in one.plane.table))
            assert [(worker.state, worker.breaker.state) for worker in one.plane.table] == [
                (WorkerState.READY, BreakerState.CLOSED)
            ] * 2
            metrics = one.admin("GET", "/metrics")[1]
            assert 'pla_router_instance_failures_total{kind="broken"} 20.0' in metrics
            assert 'kind="lost"' not in metrics

    run(work)


def test_answers_that_break_off_at_an_ill_instance_open_its_breaker() -> None:
    async def work() -> None:
        async with scene(["null", "null"], breaker=BreakerKnobs(consecutive=2), health=PATIENT) as one:
            one.instances[0].healthy = False
            worker = one.plane.table.by_number[0]
            for turn in range(20):
                one.plane.on_message(m.Failure(0, m.FailureKind.BROKEN, "broke off", f"r{turn}"))
                await asyncio.sleep(0.06)
                if worker.state is WorkerState.SUSPECT:
                    break
            assert (worker.state, worker.reason) == (WorkerState.SUSPECT, WorkerReason.BREAKER)

    run(work)


# -- silence -------------------------------------------------------------------------------------------------------------


def test_what_a_long_pass_explains_is_no_silence() -> None:
    """The time of the device counts: an emulated one may be twenty times slower than its profile."""
    curve = PrefillCurve(c0_s=0.01, c1_s=1e-4, c2_s=0.0, c3_s=1e-6)
    predictor = TtftPredictor({"": curve})
    table = WorkerTable(BreakerKnobs())
    cases = [  # queued tokens, history, chunk, token interval, time scale -> longest pass, by the device
        (0, 0, 8192, None, 1.0, 0.0),
        (0, 0, 8192, 0.02, 1.0, 0.02),
        (1000, 0, 8192, 0.02, 1.0, 0.11),
        (8192, 0, 8192, None, 20.0, 0.8292),
        (100_000, 0, 8192, None, 1.0, 0.8292 + 41_808e-6),  # behind no more than its KV memory holds
        (100_000, 0, None, None, 1.0, 10.01),
    ]
    for number, (tokens, history, chunk, interval_s, scale, wanted_s) in enumerate(cases):
        worker = table.add(_address(number), 100.0)
        assert longest_pass_s(worker, predictor) == 0.0  # it has not said what it is
        worker.description = _describe(chunk)
        view = worker.view
        view.queued_tokens, view.queued_history_tokens, view.token_interval_s = tokens, history, interval_s
        view.kv_capacity_tokens = 50_000
        assert longest_pass_s(worker, predictor) == pytest.approx(wanted_s)
        assert longest_pass_s(worker, None) == 0.0
        silent_s = silent_for_s(worker, predictor, DeviceClock(scale), 110.0)
        assert silent_s == pytest.approx(10.0 - 2 * scale * wanted_s)


def _address(number: int) -> Any:
    from pla_sglang.router.control.workers.discovery import Address

    return Address("127.0.0.1", 9000 + number)


def _describe(chunk: int | None) -> Any:
    from pla_sglang.policy.interface.fleet import InstanceKind
    from pla_sglang.router.control.workers.discovery import Description

    said = {"identity": "a", "report_key": "k", "kv_capacity_tokens": 50_000, "page_size": 1, "tensor_parallel": 1}
    return Description(kind=InstanceKind.STATELESS, model="", tokenizer="", version="", chunk_tokens=chunk, **said)


def silenced(one: Scene) -> set[str]:
    return {said.rid for said in one.relay.told if isinstance(said, m.Abort) and said.silent}


def test_streams_of_an_instance_that_says_nothing_are_told_to_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port is open all the time. What has not begun stays, but for what came when it was silent already. It is
    ready again when it speaks."""
    monkeypatch.setattr(survival, "DIED_FIRST_S", 0.2)
    monkeypatch.setattr(survival, "SETTLE_S", 0.1)

    async def work() -> None:
        async with scene(["stateless", "stateless"], **ON, health=PATIENT) as one:
            numbers = {
                rid: start(one, rid, *SENT[:count]).number for rid, count in (("a", 2), ("b", 2), ("c", 1), ("d", 1))
            }
            frozen = one.instances[0].info_gate = asyncio.Event()
            worker = one.plane.table.by_number[0]
            await one.until(lambda: time.monotonic() - worker.heard_s > 0.3)
            assert worker.is_ready()
            late = [rid for rid in ("e", "f") if start(one, rid, m.Milestone.SENT) is worker]
            await one.until(lambda: silenced(one))
            assert (worker.state, worker.reason) == (WorkerState.SUSPECT, WorkerReason.HEALTH)
            assert "has said nothing for" in worker.detail
            assert silenced(one) == {rid for rid in ("a", "b") if numbers[rid] == 0} | set(late)
            assert {said.worker for said in one.relay.told if isinstance(said, m.Abort)} == {0}
            frozen.set()
            one.instances[0].info_gate = None
            await one.until(worker.is_ready)
            for rid in "abcdef":
                one.ended(rid)
            one.assert_at_rest()

    run(work)


@pytest.mark.parametrize("why", ["nobody else", "off", "no migration"])
def test_nobody_is_told_to_leave_for_nothing(why: str) -> None:
    async def work() -> None:
        knobs = dict(ON)
        modes = ["stateless"] if why == "nobody else" else ["stateless", "stateless"]
        health = dataclasses.replace(PATIENT, silence_s=0.0) if why == "off" else PATIENT
        if why == "no migration":
            knobs["migration"] = "off"
        async with scene(modes, **knobs, health=health) as one:
            worker = start(one, "r", *SENT)
            one.instances[worker.number].info_gate = asyncio.Event()
            await one.until(lambda: time.monotonic() - worker.heard_s > 1.2)
            assert not silenced(one)
            assert worker.is_ready() is (why == "off")
            one.instances[worker.number].info_gate.set()  # type: ignore[union-attr]
            one.ended("r")
            one.assert_at_rest()

    run(work)


def test_a_control_plane_that_stood_still_takes_nobody_for_silent() -> None:
    async def work() -> None:
        async with scene(["stateless", "stateless"], **ON, health=PATIENT) as one:
            start(one, "r", *SENT)
            await asyncio.sleep(0.6)  # it has looked at least once
            for worker in one.plane.table:
                worker.heard_s -= 60.0
            time.sleep(1.2)  # as if stopped: the loop with it
            await asyncio.sleep(0.3)
            assert not silenced(one)
            assert all(worker.is_ready() for worker in one.plane.table)
            one.ended("r")

    run(work)


def test_stock_instances_are_asked_while_they_work() -> None:
    """Their polls are answered without their scheduler."""
    health = dataclasses.replace(PATIENT, silence_s=0.4)

    async def work() -> None:
        async with scene(["null", "null"], policy="least-requests", health=health) as one:
            worker = start(one, "r", *SENT)
            one.instances[worker.number].info_gate = asyncio.Event()
            await one.until(lambda: worker.state is WorkerState.SUSPECT)
            one.instances[worker.number].info_gate.set()  # type: ignore[union-attr]
            one.ended("r")

    run(work)


# -- nobody is left but ... ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 3])
def test_an_instance_that_drains_is_the_last_resort(tokens: int) -> None:
    async def work() -> None:
        async with scene(["stateless", "stateless"], **ON) as one:
            worker = start(one, "r", *SENT[: 2 if tokens else 1])
            other = one.plane.table.by_number[1 - worker.number]
            assert one.admin("POST", f"/workers/{other.number}/drain")[0] == 202
            answer = lose(one, worker.number, DEAD, tokens=tokens)
            assert isinstance(answer, m.Continue)
            assert answer.target == other.number
            story = one.admin("GET", "/pla/explain/r")[1]["hops"][1]
            assert (story["decode"], story["why"]) == (other.view.name, "survive")
            one.plane.on_message(m.Joined("r", 2, time.monotonic(), 0.1))
            assert one.admin("POST", f"/workers/{other.number}/undrain")[0] == 202
            one.ended("r")
            await one.until(lambda: not one.plane.dispatcher.ledger.records)
            one.assert_at_rest()

    run(work)


def test_one_that_is_ready_is_preferred_to_one_that_drains() -> None:
    async def work() -> None:
        async with scene(THREE, **ON) as one:
            worker = start(one, "r", *SENT)
            drained, ready = (number for number in range(3) if number != worker.number)
            one.admin("POST", f"/workers/{drained}/drain")
            assert lose(one, worker.number, DEAD, tokens=3).target == ready
            await settle(one)

    run(work)


def test_a_stream_waits_for_the_successor_that_the_table_does_not_know_yet() -> None:
    """It was lost before anybody had noticed that its instance is gone."""

    async def work() -> None:
        async with scene(["stateless"], **ON) as one:
            worker = start(one, "r", *SENT)
            await one.instances[0].stop()
            assert lose(one, worker.number, DEAD, tokens=3) is None
            await asyncio.sleep(0.2)
            await one.instances[0].start()
            await one.until(lambda: answers(one))
            [answer] = answers(one)
            assert isinstance(answer, m.Continue)
            assert answer.target != worker.number
            one.plane.on_message(m.Joined("r", 2, time.monotonic(), 0.1))
            one.ended("r")
            await one.until(lambda: not one.plane.dispatcher.ledger.records)
            one.assert_at_rest()

    run(work)


def test_a_stream_goes_back_to_its_only_instance_if_that_is_well() -> None:
    """Only its connection was lost. What had not begun does not: it may be the request."""

    async def work() -> None:
        async with scene(["stateless"], **ON) as one:
            start(one, "r", *SENT)
            start(one, "s", m.Milestone.SENT)
            assert lose(one, 0, DEAD, tokens=3) is None
            assert lose(one, 0, DEAD, rid="s") is None
            await one.until(lambda: len(answers(one)) == 2)
            by_rid = {said.rid: said for said in answers(one)}
            assert isinstance(by_rid["r"], m.Continue)
            assert isinstance(by_rid["s"], m.End)
            one.ended("s", m.Outcome.UPSTREAM_LOST)
            await settle(one)

    run(work)


def test_the_address_of_a_drained_instance_that_dies_is_given_up_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def work() -> None:
        async with scene(["stateless", "stateless"], **ON) as one:
            worker = start(one, "r", *SENT)
            one.admin("POST", f"/workers/{worker.number}/drain")
            await one.instances[worker.number].stop()
            answer = lose(one, worker.number, DEAD, tokens=3)
            assert isinstance(answer, m.Continue)
            await one.until(lambda: worker.state is WorkerState.DEAD)
            [line] = [line for line in caplog.messages if "lost: nobody listens" in line]
            assert "given up" in line
            assert "POST /workers" in line
            assert one.plane.table.at(worker.address) is None
            await one.instances[worker.number].start()
            one.ended("r")

    run(work)


# -- drains behind a restart of the control process ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["drain", "drain undrain"])
def test_a_known_instance_that_starts_again_here_can_be_drained(path: str, tmp_path: Path) -> None:
    """A second after a restart of the control process: the order is carried out once it has answered."""
    memory = tmp_path / "memory.json"

    async def work() -> None:
        async with scene(["stateless", "stateless"], **ON, memory_file=memory) as one:
            urls = tuple(instance.url for instance in one.instances)
            await one.plane.stop()
            gates = [asyncio.Event(), asyncio.Event()]
            for instance, gate in zip(one.instances, gates, strict=True):
                instance.info_gate = gate
            plane = type(one.plane)(dataclasses.replace(one.plane.knobs, workers=urls))
            await plane.start()
            again = Scene(plane, one.instances)
            try:
                assert [worker.state for worker in plane.table] == [WorkerState.STARTING] * 2
                for word in path.split():
                    assert again.admin("POST", f"/workers/0/{word}")[0] == 202
                assert again.admin("POST", "/workers/1/undrain")[0] == 409
                await again.until(lambda: _saved(memory) == ("undrain" not in path))
                for gate in gates:
                    gate.set()
                wanted = WorkerState.READY if "undrain" in path else WorkerState.DRAINING
                await again.until(lambda: plane.table.by_number[0].state is wanted)
                await again.until(plane.table.by_number[1].is_ready)
            finally:
                await plane.stop()

    run(work)


def _saved(memory: Path) -> bool:
    from pla_sglang.router.control.state_file import load_state

    return load_state(memory).workers[0].draining


def test_a_stranger_that_starts_cannot_be_drained() -> None:
    async def work() -> None:
        async with scene(["stateless"], **ON) as one:
            one.admin("POST", "/workers", {"url": "http://127.0.0.1:9"})
            for word in ("drain", "undrain"):
                assert one.admin("POST", f"/workers/1/{word}")[0] == 409

    run(work)


def test_the_limit_of_silence_is_a_knob() -> None:
    assert HealthKnobs().silence_s == 4.0
