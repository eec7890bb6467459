"""Relay and control plane in one process, with real sockets to clients and to fakes of instances."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.fake_instance import FakeInstance
from support.router_scene import QUICK, run

from pla_sglang.parity import replay_file
from pla_sglang.router.config import RelayConfig
from pla_sglang.router.control import ControlKnobs, Plane
from pla_sglang.router.relay import Relay

PAIRS = ["prefill", "prefill", "decode", "decode"]


class Here:
    """A router that serves, and a client."""

    def __init__(self, plane: Plane, relay: Relay, fakes: list[FakeInstance], http: aiohttp.ClientSession) -> None:
        self.plane, self.relay, self.fakes = plane, relay, fakes
        self._http = http
        self._url = f"http://127.0.0.1:{relay.port}"

    async def ask(self, rid: str, tokens: int, *, give_up_s: float | None = None) -> tuple[int, int]:
        """Status and events; (0, 0) for a client that gave up."""
        body = {"rid": rid, "input_ids": [7] * tokens, "stream": True}
        with suppress(TimeoutError):
            async with asyncio.timeout(give_up_s):
                try:
                    async with self._http.post(f"{self._url}/generate", json=body) as answer:
                        return answer.status, (await answer.read()).count(b'data: {"text"')
                except aiohttp.ClientError:
                    return -1, 0
        return 0, 0

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._http.get(self._url + path) as answer:
            return answer.status, await (answer.json() if "json" in answer.content_type else answer.text())

    async def at_rest(self) -> dict[str, Any]:
        """The ledger, once nothing is left in it."""
        end_s = time.monotonic() + 5
        while self.plane.desk.ledger.entries or self.relay.open:
            assert time.monotonic() < end_s, self.plane.desk.ledger.audit(time.monotonic())
            await asyncio.sleep(0.02)
        status, ledger = await self.get("/pla/ledger")
        assert (status, ledger["balanced"], ledger["rooms"]) == (200, True, 0)
        assert all(worker.book.open_requests() == 0 for worker in self.plane.table)
        told: dict[str, Any] = ledger
        return told


@asynccontextmanager
async def together(modes: list[str], **knobs: Any) -> AsyncIterator[Here]:
    fakes = [await FakeInstance(mode).start() for mode in modes]
    values = {"health": QUICK, "poll_interval_s": 0.1, "workers": tuple(one.url for one in fakes)} | knobs
    plane = Plane(ControlKnobs(**values))
    await plane.start()
    relay = Relay(RelayConfig(), number=0, say=plane.hear, rng=random.Random(1))
    await relay.start()
    plane.attach(0, relay)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as http:
        here = Here(plane, relay, fakes, http)
        while len(plane.table.fleet.ready) < len(fakes):
            await asyncio.sleep(0.01)
        yield here
    await relay.stop()
    await plane.stop()
    for one in fakes:
        await one.stop()


def test_many_requests_some_of_whose_clients_go(tmp_path: Path) -> None:
    async def work() -> None:
        record = tmp_path / "run.jsonl"
        async with together(PAIRS, policy="pla", record=record) as here:
            rng = random.Random(2)
            for one in here.fakes:
                one.prefill_s = 0.3
            asked = [
                here.ask(f"r{number:03d}", rng.choice([10, 2000]), give_up_s=0.25 if number % 6 == 0 else None)
                for number in range(60)
            ]
            answers = await asyncio.gather(*asked)
            assert answers[1::6] + answers[2::6] == [(200, 5)] * 20
            assert sum(answer == (0, 0) for answer in answers) == 10
            ledger = await here.at_rest()
            gone = ledger["opened"] - 50  # on a slow machine some go before they are heard
            assert 1 <= gone <= 10
            assert ledger["ended"] == {"finished": 50, "client_gone": gone}
            rooms = [sorted(one.rooms) for one in here.fakes]
            assert sorted(rooms[0] + rooms[1]) == sorted(rooms[2] + rooms[3])
            assert len(set(rooms[0] + rooms[1])) == len(rooms[0] + rooms[1])
            _, told = await here.get("/pla/explain/r001")
            assert sum(told["stages"].values()) == pytest.approx(told["ttft_s"], rel=1e-9)
            assert told["sent_s"] <= told["done_s"] <= told["ended_s"]
            metrics = (await here.get("/metrics"))[1]
            assert 'pla_router_requests_total{end="finished"} 50.0' in metrics
            assert "pla_router_open_requests 0.0" in metrics
        _, result = replay_file(record)
        assert result.decisions["dispatched"] == 50 + gone
        assert result.identical_share == 1.0, result.differences

    run(work)


def test_a_prefill_instance_that_dies_takes_only_its_own_requests_with_it() -> None:
    async def work() -> None:
        async with together(PAIRS, policy="round-robin") as here:
            for one in here.fakes:
                one.prefill_s = 0.5
            waiting = [asyncio.create_task(here.ask(f"r{number}", 10)) for number in range(8)]
            await asyncio.sleep(0.2)
            await here.fakes[0].stop()
            answers = await asyncio.gather(*waiting)
            served = {worker.number: worker.view.name for worker in here.plane.table.workers}
            for number, (status, events) in enumerate(answers):
                _, told = await here.get(f"/pla/explain/r{number}")
                if told["prefill"] == served[0]:
                    assert status >= 500
                    assert told["end"] in ("prefill_aborted", "instance_dead")
                else:
                    assert (status, events) == (200, 5)
            assert sum(status == 200 for status, _ in answers) == 4
            ended_s = time.monotonic()
            await here.at_rest()
            assert time.monotonic() - ended_s < 1.0
            later = await asyncio.gather(*(here.ask(f"later{number}", 10) for number in range(4)))
            assert later == [(200, 5)] * 4
            await here.fakes[0].start()

    run(work)


def test_an_instance_that_cannot_be_reached_costs_nobody_anything() -> None:
    async def work() -> None:
        async with together(["null", "null"], policy="round-robin", poll_interval_s=5.0) as here:
            await here.fakes[0].stop()
            answers = await asyncio.gather(*(here.ask(f"r{number}", 10) for number in range(10)))
            assert answers == [(200, 5)] * 10
            ledger = await here.at_rest()
            assert ledger["ended"] == {"finished": 10}
            await here.fakes[0].start()

    run(work)
