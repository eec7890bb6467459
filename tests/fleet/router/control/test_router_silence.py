"""Instances whose scheduler says nothing while their port is open, and what a long pass explains."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest
from support.router_scene import QUICK, Scene, scene

from pla_sglang.fleet.router.control import suspects
from pla_sglang.fleet.router.control.suspects import longest_pass_s, silent_for_s
from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.discovery import Address, Description
from pla_sglang.fleet.router.control.workers.table import WorkerReason, WorkerState, WorkerTable
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.common.curve import PrefillCurve
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.interface.fleet import InstanceKind

ON: dict[str, Any] = {"policy": "least-tokens", "migration": "on", "hops": True}
SENT = (m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
PATIENT = dataclasses.replace(QUICK, misses=1000, refused=1000, silence_s=0.5)


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
        worker = table.add(Address("127.0.0.1", 9000 + number), 100.0)
        assert longest_pass_s(worker, predictor) == 0.0  # it has not said what it is
        worker.description = _describe(chunk)
        view = worker.view
        view.queued_tokens, view.queued_history_tokens, view.token_interval_s = tokens, history, interval_s
        view.kv_capacity_tokens = 50_000
        assert longest_pass_s(worker, predictor) == pytest.approx(wanted_s)
        assert longest_pass_s(worker, None) == 0.0
        silent_s = silent_for_s(worker, predictor, DeviceClock(scale), 110.0)
        assert silent_s == pytest.approx(10.0 - 2 * scale * wanted_s)


def _describe(chunk: int | None) -> Description:
    said: dict[str, Any] = {
        "identity": "a",
        "report_key": "k",
        "kv_capacity_tokens": 50_000,
        "page_size": 1,
        "tensor_parallel": 1,
    }
    return Description(kind=InstanceKind.STATELESS, model="", tokenizer="", version="", chunk_tokens=chunk, **said)


def silenced(one: Scene) -> set[str]:
    return {said.rid for said in one.relay.told if isinstance(said, m.Abort) and said.silent}


@pytest.mark.parametrize("retry", [False, True])
async def test_streams_of_an_instance_that_says_nothing_are_told_to_leave_it(
    retry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is open all the time. What has not begun stays, but for what came when it was silent already, and where
    suspects are retried. It is ready again when it speaks."""
    monkeypatch.setattr(suspects, "DIED_FIRST_S", 0.2)
    monkeypatch.setattr(suspects, "SETTLE_S", 0.5)  # a busy machine must not make the first ones late,
    health = dataclasses.replace(PATIENT, silence_s=3.0)  # nor the instance silent early
    async with scene(["stateless", "stateless"], **ON, health=health, retry_suspects=retry) as one:
        numbers = {rid: one.start(rid, *SENT[:count]).number for rid, count in (("a", 2), ("b", 2), ("c", 1), ("d", 1))}
        frozen = one.instances[0].info_gate = asyncio.Event()
        worker = one.plane.table.by_number[0]
        await one.until(lambda: time.monotonic() - worker.heard_s > 0.8)
        assert worker.is_ready()
        late = [rid for rid in ("e", "f") if one.start(rid, m.Milestone.SENT) is worker]
        await one.until(lambda: silenced(one))
        assert (worker.state, worker.reason) == (WorkerState.SUSPECT, WorkerReason.HEALTH)
        assert "has said nothing for" in worker.detail
        assert silenced(one) == {rid for rid in ("abcd" if retry else "ab") if numbers[rid] == 0} | set(late)
        assert {said.worker for said in one.relay.told if isinstance(said, m.Abort)} == {0}
        frozen.set()
        one.instances[0].info_gate = None
        await one.until(worker.is_ready)
        for rid in "abcdef":
            one.ended(rid)
        one.assert_at_rest()


@pytest.mark.parametrize("why", ["nobody else", "off", "no migration"])
async def test_nobody_is_told_to_leave_for_nothing(why: str) -> None:
    knobs = dict(ON)
    modes = ["stateless"] if why == "nobody else" else ["stateless", "stateless"]
    health = dataclasses.replace(PATIENT, silence_s=0.0) if why == "off" else PATIENT
    if why == "no migration":
        knobs["migration"] = "off"
    async with scene(modes, **knobs, health=health) as one:
        worker = one.start("r", *SENT)
        one.instances[worker.number].info_gate = asyncio.Event()
        await one.until(lambda: time.monotonic() - worker.heard_s > 1.2)
        assert not silenced(one)
        await one.until(lambda: worker.is_ready() is (why == "off"))
        assert not silenced(one)
        one.instances[worker.number].info_gate.set()  # type: ignore[union-attr]
        one.ended("r")
        one.assert_at_rest()


async def test_a_control_plane_that_stood_still_takes_nobody_for_silent() -> None:
    async with scene(["stateless", "stateless"], **ON, health=PATIENT) as one:
        one.start("r", *SENT)
        await asyncio.sleep(0.6)  # it has looked at least once
        for worker in one.plane.table:
            worker.heard_s -= 60.0
        time.sleep(1.2)  # as if stopped: the loop with it
        await asyncio.sleep(0.3)
        assert not silenced(one)
        assert all(worker.is_ready() for worker in one.plane.table)
        one.ended("r")


async def test_an_idle_stock_instance_is_asked_nothing_and_is_not_silent() -> None:
    """Its silence counts from its first request on, not from its start."""
    health = dataclasses.replace(PATIENT, silence_s=0.4)
    async with scene(["null"], policy="least-requests", health=health) as one:
        await asyncio.sleep(1.0)
        worker = one.start("r", *SENT)
        for _ in range(10):
            await asyncio.sleep(0.1)
            assert worker.is_ready()
        one.ended("r")
        await asyncio.sleep(1.0)
        assert worker.is_ready()


async def test_stock_instances_are_asked_while_they_work() -> None:
    """Their polls are answered without their scheduler."""
    health = dataclasses.replace(PATIENT, silence_s=0.4)
    async with scene(["null", "null"], policy="least-requests", health=health) as one:
        worker = one.start("r", *SENT)
        one.instances[worker.number].info_gate = asyncio.Event()
        await one.until(lambda: worker.state is WorkerState.SUSPECT)
        one.instances[worker.number].info_gate.set()  # type: ignore[union-attr]
        one.ended("r")
