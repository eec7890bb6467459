"""What is known of an instance when a request is lost with it, and who gets the request then, if anybody."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from support.router_scene import QUICK, Scene, scene

from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs, BreakerState
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerReason, WorkerState
from pla_sglang.fleet.router.wire import messages as m

THREE = ["stateless", "stateless", "stateless"]
ON: dict[str, Any] = {"policy": "least-tokens", "migration": "on", "hops": True}
SENT = (m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
LOST, BROKEN, ABORTED = m.Cause.LOST, m.Cause.BROKEN, m.Cause.ABORTED
PATIENT = dataclasses.replace(QUICK, misses=1000, refused=1000, silence_s=0.5)
BRIEF = dataclasses.replace(PATIENT, timeout_s=0.2)  # to wait for a word of an instance


def lose(one: Scene, worker: int, cause: m.Cause, *, tokens: int = 0, rid: str = "r") -> Any:
    """The answer, if there is one at once."""
    return one.ask_again(rid, 1, cause, tokens=tokens, over={"lost_with": (worker,)})


def answers(one: Scene) -> list[Any]:
    """Those to questions about attempts that are over."""
    said = [said for said in one.relay.told if isinstance(said, m.Assign | m.Refuse)]
    return [one for one in said if isinstance(one, m.Refuse) or one.attempt > 1]


async def wait_for_answer(one: Scene) -> Any:
    await one.until(lambda: answers(one))
    [answer] = answers(one)
    return answer


def assert_goes_elsewhere(answer: Any, worker: Worker) -> None:
    assert isinstance(answer, m.Assign)
    assert answer.decode != worker.number


async def settle(one: Scene, rid: str = "r") -> None:
    one.ended(rid, m.Outcome.UPSTREAM_LOST)
    await one.at_rest()


# -- who may be what an instance has died of -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "silent_s", "sent_ago_s", "tokens", "cause", "goes_on"),
    [
        ("all of it was killed at once, nothing was shown", 0.1, 0.2, 0, LOST, True),
        ("its scheduler died first, with the request there", 5.5, 6.0, 0, LOST, False),
        ("... or just about to come", 5.5, 5.0, 0, LOST, False),
        ("... which came when it was silent already", 5.5, 2.0, 0, LOST, True),
        ("its connection broke behind the head, and its scheduler had died", 5.5, 6.0, 0, BROKEN, False),
        ("a stream that has begun goes on at once however it broke", 0.1, 0.2, 3, BROKEN, True),
        ("it was given up before anything was shown: the instance lives", 0.1, 0.2, 0, ABORTED, True),
        ("... and after", 0.1, 0.2, 3, ABORTED, True),
    ],
)
async def test_who_may_be_what_an_instance_has_died_of_is_not_sent_to_another(
    name: str, silent_s: float, sent_ago_s: float, tokens: int, cause: m.Cause, goes_on: bool
) -> None:
    async with scene(THREE, **ON, health=BRIEF) as one:
        worker = one.start("r", *SENT[: 2 if tokens else 1])
        if not goes_on:
            await one.instances[worker.number].stop()
        now_s = time.monotonic()
        worker.heard_s = now_s - silent_s
        one.plane.dispatcher.ledger.records["r"].present.assigned_s = now_s - sent_ago_s
        answer = lose(one, worker.number, cause, tokens=tokens)
        early = not tokens and cause is not ABORTED
        if early and (goes_on or cause is LOST):  # it, or the others, may be heard of again
            assert answer is None
            answer = await wait_for_answer(one)
        if goes_on:
            assert isinstance(answer, m.Assign), name
            assert answer.decode != worker.number
            assert one.admin("GET", "/pla/explain/r")[1]["attempts"][1]["cause"] == cause.label
        else:
            assert isinstance(answer, m.Refuse), name
            assert (answer.status, answer.code, answer.over) == (502, "to_blame", 1)
            assert "no other one gets it" in answer.message
            assert 'move_failures_total{reason="to_blame"} 1.0' in one.admin("GET", "/metrics")[1]
            await one.instances[worker.number].start()
        await settle(one)


@pytest.mark.parametrize(
    ("why", "cause", "tokens", "retry"),
    [
        ("it is heard of again: its network was away, say", LOST, 0, False),
        ("... also where a stream was alone there", LOST, 3, False),
        ("it may be frozen: nothing has ended there", m.Cause.SILENT, 3, False),
        ("it may be to blame, and operators want it tried", LOST, 0, True),
    ],
)
async def test_what_was_at_a_silent_instance_goes_elsewhere(why: str, cause: m.Cause, tokens: int, retry: bool) -> None:
    async with scene(THREE, **ON, health=PATIENT, retry_suspects=retry) as one:
        worker = one.start("r", *SENT[: 2 if tokens else 1])
        die_first(one, worker, "r")
        answer = lose(one, worker.number, cause, tokens=tokens)
        assert (answer is None) is (cause is LOST), why
        assert_goes_elsewhere(answer or await wait_for_answer(one), worker)
        await settle(one)


@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.parametrize(
    ("name", "silent_s", "beside", "code"),
    [
        ("its scheduler died first, and it ran nothing else", 5.5, "", "ran_alone"),
        ("all of it was killed at once", 0.1, "", None),
        ("... beside one that runs", 5.5, "runs", None),
        ("... beside one that has just left it, as it was silent", 5.5, "has left", None),
        ("... beside one that had left it long before", 5.5, "had left", "ran_alone"),
        ("... and one that has ended", 5.5, "has ended", "ran_alone"),
        ("... and one at another instance", 5.5, "elsewhere", "ran_alone"),
    ],
)
async def test_a_stream_that_ran_alone_where_the_scheduler_died_by_itself(
    name: str, silent_s: float, beside: str, code: str | None, retry: bool
) -> None:
    """It has shown tokens, and nothing else can be to blame."""
    ends = code is not None and not retry
    async with scene(THREE, **ON, health=BRIEF, retry_suspects=retry) as one:
        worker = one.start("r", *SENT)
        if beside:
            await start_beside(one, worker, beside)
        if ends:
            await one.instances[worker.number].stop()
        die_first(one, worker, *(["r", "s"] if beside else ["r"]), silent_s=silent_s)
        if beside == "has left":  # a moment ago
            lose(one, worker.number, LOST, rid="s", tokens=3)
        elif beside == "had left":
            one.plane.dispatcher.ledger.records["s"].attempts[0].ended_s = time.monotonic() - silent_s - 1.0
        answer = lose(one, worker.number, LOST, tokens=3)
        if not ends:
            assert isinstance(answer, m.Assign), name
            assert answer.decode != worker.number
        else:
            assert answer is None, name
            await one.until(lambda: any(said.rid == "r" for said in answers(one)))
            answer = next(said for said in answers(one) if said.rid == "r")
            assert (answer.status, answer.code, answer.over) == (502, code, 1), name
            assert "ran nothing else" in answer.message
            await one.instances[worker.number].start()
            assert f'move_failures_total{{reason="{code}"}} 1.0' in one.admin("GET", "/metrics")[1]
        one.ended("s")
        await settle(one)


async def start_beside(one: Scene, worker: Worker, what: str) -> None:
    """Another stream, "s", at ``worker`` but where ``what`` says otherwise."""
    there = one.plane.table.by_number[(worker.number + 1) % 3] if what == "elsewhere" else worker
    others = [other for other in one.plane.table if other is not there]
    for other in others:
        one.admin("POST", f"/workers/{other.number}/drain")
    assert one.start("s", *SENT) is there
    for other in others:
        one.admin("POST", f"/workers/{other.number}/undrain")
    if what == "has ended":
        one.ended("s")
    elif what == "had left":
        lose(one, worker.number, ABORTED, rid="s", tokens=3)


def die_first(one: Scene, worker: Worker, *rids: str, silent_s: float = 5.5) -> None:
    """Its scheduler has said nothing for so long; ``rids`` were there before."""
    now_s = time.monotonic()
    worker.heard_s = now_s - silent_s
    for rid in rids:
        if (record := one.plane.dispatcher.ledger.records.get(rid)) is not None:
            record.attempts[0].assigned_s = now_s - silent_s - 0.5


# -- instances that end at one moment --------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("cause", [LOST, m.Cause.NOT_SENT, m.Cause.SILENT])
async def test_what_got_nothing_from_an_instance_goes_to_one_that_was_heard_of_since(
    tokens: int, cause: m.Cause
) -> None:
    """All but one of five end at once. A stream is sent to a second one before that is known, and to no other of
    them."""
    async with scene(["stateless"] * 5, **ON, health=PATIENT) as one:
        first = one.start("r", *SENT[: 2 if tokens else 1])
        others = [worker for worker in one.plane.table if worker is not first]
        for worker in others[:-1]:
            await one.instances[worker.number].stop()
        lose(one, first.number, LOST, tokens=tokens)
        at_once = [said for said in answers(one) if isinstance(said, m.Assign)]
        assert bool(at_once) is bool(tokens), "a stream that has begun waits for nothing"
        if at_once:
            [second] = at_once
            one.reach("r", m.Milestone.SENT, attempt=2)
            gone = {"lost_with": (first.number, second.decode)}
            if cause is m.Cause.NOT_SENT:
                gone = {"lost_with": (first.number,), "avoid": (second.decode,)}
            assert one.ask_again("r", 2, cause, tokens=tokens, over=gone) is None
        await one.until(lambda: len(answers(one)) > len(at_once))
        assert answers(one)[-1].decode == others[-1].number
        assert 'pla_router_exclusions_total{reason="not_heard_since"}' in one.admin("GET", "/metrics")[1]
        for worker in others[:-1]:
            await one.instances[worker.number].start()
        await settle(one)


async def test_where_nobody_is_heard_of_in_time_it_ends() -> None:
    async with scene(THREE, **ON, health=PATIENT, pending_s=0.3) as one:
        worker = one.start("r", m.Milestone.SENT)
        for other in one.instances:
            await other.stop()
        assert lose(one, worker.number, LOST) is None
        answer = await wait_for_answer(one)
        assert (answer.status, answer.code) == (502, "no_instance")
        for other in one.instances:
            await other.start()
        await settle(one)


# -- answers that break off ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["well", "ill", "gone"])
async def test_an_answer_that_broke_off_before_anything_was_shown_waits_for_a_check(found: str) -> None:
    """Where the instance is well it was the request, which no other one gets."""
    async with scene(THREE, **ON) as one:
        worker = one.start("r", m.Milestone.SENT)
        instance = one.instances[worker.number]
        if found == "ill":
            instance.healthy = False
        elif found == "gone":
            await instance.stop()
        one.plane.on_message(m.Failure(worker.number, m.FailureKind.BROKEN, "", "r"))
        assert lose(one, worker.number, BROKEN) is None
        answer = await wait_for_answer(one)
        if found == "well":
            assert isinstance(answer, m.Refuse)
            assert "is well" in answer.message
            assert 'move_failures_total{reason="is_well"} 1.0' in one.admin("GET", "/metrics")[1]
        else:
            assert_goes_elsewhere(answer, worker)
        if found == "gone":
            await instance.start()
        await settle(one)


@pytest.mark.parametrize("lost_with", [(), (99,)])
async def test_an_answer_that_broke_off_where_nobody_knows_the_instance_goes_on(lost_with: tuple[int, ...]) -> None:
    """As after a restart of the control process."""
    async with scene(THREE, **ON) as one:
        one.start("r", m.Milestone.SENT)
        one.ask_again("r", 1, BROKEN, over={"lost_with": lost_with})
        assert isinstance(await wait_for_answer(one), m.Assign)
        await settle(one)


async def test_with_retry_suspects_an_answer_that_broke_off_waits_for_no_check() -> None:
    async with scene(THREE, **ON, retry_suspects=True) as one:
        worker = one.start("r", m.Milestone.SENT)
        assert lose(one, worker.number, BROKEN) is None  # but for a word of another
        answer = await wait_for_answer(one)
        assert_goes_elsewhere(answer, worker)
        await settle(one)


async def test_a_request_that_ends_while_its_instance_is_checked_is_forgotten() -> None:
    async with scene(THREE, **ON) as one:
        worker = one.start("r", m.Milestone.SENT)
        assert lose(one, worker.number, BROKEN) is None
        await settle(one)
        await asyncio.sleep(2 * 0.25)
        assert not answers(one)


async def test_nobody_who_checks_it_is_no_reason_to_wait_for_ever() -> None:
    health = dataclasses.replace(PATIENT, timeout_s=0.2)
    async with scene(THREE, **ON, health=health) as one:
        worker = one.start("r", m.Milestone.SENT)
        assert lose(one, worker.number, BROKEN) is None  # the report of it is lost, so nobody asks for a check
        assert isinstance(await wait_for_answer(one), m.Assign)
        await settle(one)


async def test_clients_mistakes_in_streams_open_no_breaker() -> None:
    """Ten streams in a row that the instance breaks off, and it is well."""
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
        assert 'pla_router_instance_failures_total{kind="lost"} 0.0' in metrics


async def test_answers_that_break_off_at_an_ill_instance_open_its_breaker() -> None:
    async with scene(["null", "null"], breaker=BreakerKnobs(consecutive=2), health=PATIENT) as one:
        one.instances[0].healthy = False
        worker = one.plane.table.by_number[0]

        def has_broken_off_again() -> bool:
            one.plane.on_message(m.Failure(0, m.FailureKind.BROKEN, "broke off", "r"))
            return worker.state is WorkerState.SUSPECT

        await one.until(has_broken_off_again)
        assert worker.reason is WorkerReason.BREAKER


# -- nobody is left but ... ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 3])
async def test_an_instance_that_drains_is_the_last_resort(tokens: int) -> None:
    async with scene(["stateless", "stateless"], **ON) as one:
        worker = one.start("r", *SENT[: 2 if tokens else 1])
        other = one.plane.table.by_number[1 - worker.number]
        assert one.admin("POST", f"/workers/{other.number}/drain")[0] == 202
        lose(one, worker.number, LOST, tokens=tokens)
        answer = await wait_for_answer(one)
        assert isinstance(answer, m.Assign)
        assert answer.decode == other.number
        story = one.admin("GET", "/pla/explain/r")[1]["attempts"][1]
        assert (story["decode"], story["cause"]) == (other.view.name, "lost")
        one.reach("r", m.Milestone.FIRST_TOKEN, attempt=2, gap_s=0.1)
        assert one.admin("POST", f"/workers/{other.number}/undrain")[0] == 202
        one.ended("r")
        await one.at_rest()


async def test_one_that_is_ready_is_preferred_to_one_that_drains() -> None:
    async with scene(THREE, **ON) as one:
        worker = one.start("r", *SENT)
        drained, ready = (number for number in range(3) if number != worker.number)
        one.admin("POST", f"/workers/{drained}/drain")
        assert lose(one, worker.number, LOST, tokens=3).decode == ready
        await settle(one)


async def test_a_stream_waits_for_the_successor_that_the_table_does_not_know_yet() -> None:
    """It was lost before anybody had noticed that its instance is gone."""
    async with scene(["stateless"], **ON) as one:
        worker = one.start("r", *SENT)
        await one.instances[0].stop()
        assert lose(one, worker.number, LOST, tokens=3) is None
        await asyncio.sleep(0.2)
        await one.instances[0].start()
        answer = await wait_for_answer(one)
        assert_goes_elsewhere(answer, worker)
        one.reach("r", m.Milestone.FIRST_TOKEN, attempt=2, gap_s=0.1)
        one.ended("r")
        await one.at_rest()


async def test_a_stream_goes_back_to_its_only_instance_if_that_is_well() -> None:
    """Only its connection was lost. What had not begun does not."""
    async with scene(["stateless"], **ON) as one:
        one.start("r", *SENT)
        one.start("s", m.Milestone.SENT)
        assert lose(one, 0, LOST, tokens=3) is None
        assert lose(one, 0, LOST, rid="s") is None
        await one.until(lambda: len(answers(one)) == 2)
        by_rid = {said.rid: said for said in answers(one)}
        assert isinstance(by_rid["r"], m.Assign)
        assert isinstance(by_rid["s"], m.Refuse)
        one.ended("s", m.Outcome.UPSTREAM_LOST)
        await settle(one)


async def test_the_address_of_a_drained_instance_that_dies_is_given_up_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with scene(["stateless", "stateless"], **ON) as one:
        worker = one.start("r", *SENT)
        one.admin("POST", f"/workers/{worker.number}/drain")
        await one.instances[worker.number].stop()
        answer = lose(one, worker.number, LOST, tokens=3)
        assert isinstance(answer, m.Assign)
        await one.until(lambda: any("lost: nobody listens" in line for line in caplog.messages))
        assert worker.state is WorkerState.DEAD
        [line] = [line for line in caplog.messages if "lost: nobody listens" in line]
        assert "given up" in line
        assert "POST /workers" in line
        assert one.plane.table.at(worker.address) is None
        await one.instances[worker.number].start()
        one.ended("r")


# -- drains behind a restart of the control process ------------------------------------------------------------------


@pytest.mark.parametrize("path", ["drain", "drain undrain"])
async def test_a_known_instance_that_starts_again_here_can_be_drained(path: str, tmp_path: Path) -> None:
    """A second after a restart of the control process: the order is carried out once it has answered."""
    memory = tmp_path / "memory.json"
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


def _saved(memory: Path) -> bool:
    from pla_sglang.fleet.router.control.workers.state_file import load_state

    return load_state(memory).workers[0].draining


async def test_a_stranger_that_starts_cannot_be_drained() -> None:
    async with scene(["stateless"], **ON) as one:
        one.admin("POST", "/workers", {"url": "http://127.0.0.1:9"})
        for word in ("drain", "undrain"):
            assert one.admin("POST", f"/workers/1/{word}")[0] == 409
