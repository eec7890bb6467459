"""Relay and control plane in one process, with real sockets to clients and to fakes of instances."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_sglang import FakeSglang, HeldStream, Script, Wire
from prometheus_client.parser import text_string_to_metric_families
from support.hop_fleet import GENERATE, TokenInstance
from support.loop_time import LoopTime
from support.router_scene import QUICK, count_moves
from support.scrapes import ACCEPT, documented_names, sample_names, stored_name
from support.serving import wait_until
from support.token_streams import Event, chunk, mark_events, tags_of, tokens_of

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.control.admin import METRICS
from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.server import Relay
from pla_sglang.parity import replay_file

ANSWER_TOKENS = 60
PAIRS = ["prefill", "prefill", "decode", "decode"]
PAGE = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text(encoding="utf-8")
# Nothing of the kind happens in the test of names, and nobody reports errors: see ``test_router_plane``.
QUIET = {
    "actions_total",
    "retries_total",
    "migrations_total",
    "migration_failures_total",
    *("judged_migrations_total", "migration_expected_seconds_total", "migration_measured_seconds_total"),
    *("length_predictions_total", "length_error_tokens_total", "length_constant_error_tokens_total"),
    *("instance_failures_total", "instance_refusals_total"),
    "aborts_total",
    "peer_lists_total",
    "cooling_down_requests",
    *("planned_instances", "planned_requests", "plan_load", "plan_forecast", "gpu_hours"),  # of a planner
    *("instance_starts_total", "instance_start_seconds"),
    *("takeover_seconds", "standby_ready"),  # of a control process of its own
    *("tenant_limit_left_seconds", "relay_certificate_expires_seconds"),  # neither limits nor TLS
} | {
    "worker_errors",
    *("prefix_predicted_tokens_total", "prefix_hit_tokens_total", "prefix_prompt_tokens_total"),  # no answer says
    "worker_peers",
    *("worker_transfers", "worker_transfer_kv_tokens", "worker_transfer_ready", "worker_pinned_requests"),
    *("worker_transfers_refused", "worker_transfer_faults"),
    *("worker_request_rows", "worker_request_rows_age_seconds"),
    # the first requests of a pair are left out
    *("worker_first_tokens_total", "worker_ttft_seconds_total"),
    *("worker_predicted_ttft_seconds_total", "worker_ttft_error_seconds_total"),
}

UNCOUNTED = {"pla_router_relay_tls_failures_total"}  # relays tell of counts that are above 0


class Here:
    """A router that serves, and a client."""

    def __init__(self, plane: ControlPlane, relay: Relay, fakes: list[FakeSglang], http: aiohttp.ClientSession) -> None:
        self.plane, self.relay, self.fakes = plane, relay, fakes
        self._http = http
        self._url = f"http://127.0.0.1:{relay.listener.port}"

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

    async def read(self, rid: str) -> bytes:
        """The body of a stream."""
        body = {"rid": rid, "input_ids": [7] * 20, "stream": True}
        async with self._http.post(f"{self._url}/generate", json=body) as answer:
            return await answer.read()

    async def read_tokens(self, rid: str) -> tuple[list[int], str]:
        """Of an answer of 60 tokens, and what is said behind them."""
        fields = GENERATE | {"rid": rid, "text": rid, "sampling_params": {"max_new_tokens": ANSWER_TOKENS}}
        async with self._http.post(f"{self._url}/generate", json=fields) as answer:
            body = await answer.read()
            if answer.status != 200:
                return [], json.loads(body)["error"]["type"]
        events = [event for event in body.decode().split("\n\n") if event.strip()]
        said = [json.loads(event.strip().removeprefix("data: ")) for event in events if event != "data: [DONE]"]
        tokens = next((one["output_ids"] for one in reversed(said) if "output_ids" in one), [])
        return tokens, events[-1] if "error" not in said[-1] else said[-1]["error"]["type"]

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._http.get(self._url + path) as answer:
            return answer.status, await (answer.json() if "json" in answer.content_type else answer.text())

    async def scrape(self, accept: str) -> str:
        async with self._http.get(f"{self._url}/metrics", headers={"accept": accept}) as answer:
            assert (answer.status, answer.headers["content-type"]) == (200, METRICS)
            return await answer.text()

    async def at_rest(self) -> dict[str, Any]:
        """The ledger, once nothing is left in it."""
        await wait_until(lambda: not self.plane.dispatcher.ledger.records and not self.relay.requests)
        status, ledger = await self.get("/pla/ledger")
        assert (status, ledger["balanced"], ledger["rooms"]) == (200, True, 0)
        assert all(worker.load.open_requests() == 0 for worker in self.plane.table)
        told: dict[str, Any] = ledger
        return told


@asynccontextmanager
async def together(modes: Sequence[str | FakeSglang], *, hops: bool = False, **knobs: Any) -> AsyncIterator[Here]:
    """Fakes of these modes, or made already."""
    brief = Script(first_s=0.02, gap_s=0.01, events=5)
    fakes = [FakeSglang(one, script=copy.deepcopy(brief)) if isinstance(one, str) else one for one in modes]
    for number, one in enumerate(fakes):
        await one.start()
        one.hops = hops
        one.info["disaggregation_bootstrap_port"] = 8998 + number
    values = {"health": QUICK, "poll_interval_s": 0.1, "workers": tuple(one.url for one in fakes)} | knobs
    plane = ControlPlane(ControlKnobs(**values))
    await plane.start()
    relay = Relay(RelayContext(RelayConfig(port=0), number=0, send_to_control=plane.on_message, rng=random.Random(1)))
    await relay.start_serving()
    plane.attach_relay(0, relay)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as http:
        here = Here(plane, relay, fakes, http)
        await wait_until(lambda: len(plane.table.fleet.ready) == len(fakes))
        yield here
    await relay.stop_serving()
    await plane.stop()
    for one in fakes:
        await one.stop()


@pytest.mark.parametrize("apart_s", [0.0, 0.03])
@pytest.mark.parametrize("lost", [2, 3])
async def test_streams_of_instances_that_are_lost_together(lost: int, apart_s: float) -> None:
    """Two or three of five, at one moment or in turn: streams that have begun, and some that have not."""
    instances = [TokenInstance(number, Script(first_s=0.02, gap_s=0.01)) for number in range(5)]
    async with together(instances, hops=True, policy="least-tokens", migration="on") as here:
        rids = [f"r{number}" for number in range(90)]
        asked = [asyncio.ensure_future(here.read_tokens(rid)) for rid in rids[:60]]
        await wait_until(lambda: sum(len(one.bodies) for one in instances) == 60)
        asked += [asyncio.ensure_future(here.read_tokens(rid)) for rid in rids[60:]]
        await asyncio.sleep(0.02)
        for one in instances[:lost]:
            await one.stop()
            await asyncio.sleep(apart_s)
        answers = await asyncio.gather(*asked)
        for rid, answer in zip(rids, answers, strict=True):
            fields = GENERATE | {"text": rid, "sampling_params": {"max_new_tokens": ANSWER_TOKENS}}
            assert answer == (tokens_of(fields), "data: [DONE]"), rid
        ledger = await here.at_rest()
        assert ledger["ended"] == {"finished": 90}


class Mortal(TokenInstance):
    """Ends of the prompt "poison", behind as many tokens of its answer."""

    last_words = 0

    async def _stream(self, wire: Wire, fields: dict[str, Any], events: Iterable[Event], stream: HeldStream) -> bool:
        if fields.get("text") == "poison":
            for data, _ in mark_events(islice(events, self.last_words), marked=True):
                await wire.send(chunk(data))
            stopping = asyncio.ensure_future(self.stop())
            await asyncio.shield(stopping)
        return await super()._stream(wire, fields, events, stream)


@pytest.mark.parametrize(("last_words", "most"), [(0, 2), (3, 4)])
async def test_a_request_that_ends_its_instances_is_stopped(last_words: int, most: int) -> None:
    """All of each is gone at once, so that nothing else tells of it."""
    instances = [Mortal(number, Script()) for number in range(6)]
    async with together(instances, hops=True, policy="least-tokens", migration="on") as here:
        for one in instances:
            one.last_words = last_words
        tokens, said = await here.read_tokens("poison")
        assert sum(bool(one.bodies) for one in instances) == most
        assert len(tokens) == last_words * most
        assert said.startswith("upstream_")
        assert (await here.read_tokens("after"))[1] == "data: [DONE]"


async def test_many_requests_some_of_whose_clients_go(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    async with together(PAIRS, policy="pla", record=record) as here:
        rng = random.Random(2)
        for one in here.fakes:
            one.script.first_s = 0.3
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
        rooms = [sorted(body["bootstrap_room"] for body in one.bodies) for one in here.fakes]
        assert sorted(rooms[0] + rooms[1]) == sorted(rooms[2] + rooms[3])
        assert len(set(rooms[0] + rooms[1])) == len(rooms[0] + rooms[1])
        _, told = await here.get("/pla/explain/r001")
        assert sum(told["stages"].values()) == pytest.approx(told["ttft_s"], rel=1e-9)
        assert told["sent_s"] <= told["done_s"] <= told["ended_s"]
        metrics = (await here.get("/metrics"))[1]
        assert 'pla_router_requests_total{end="finished",model="chain",tenant=""} 50.0' in metrics
        assert "pla_router_open_requests 0.0" in metrics
    _, result = replay_file(record)
    assert result.decisions["dispatched"] == 50 + gone
    assert result.identical_share == 1.0, result.differences


async def test_a_prefill_instance_that_dies_takes_only_its_own_requests_with_it() -> None:
    async with together(PAIRS, policy="round-robin") as here:
        for one in here.fakes:
            one.script.first_s = 0.5
        waiting = [asyncio.create_task(here.ask(f"r{number}", 10)) for number in range(8)]
        await wait_until(lambda: sum(len(one.bodies) for one in here.fakes[:2]) == 8)  # prefills that have begun
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
        async with LoopTime() as ran:
            await here.at_rest()
        assert ran.seconds < 1.0
        later = await asyncio.gather(*(here.ask(f"later{number}", 10) for number in range(4)))
        assert later == [(200, 5)] * 4
        await here.fakes[0].start()


async def test_streams_of_instances_that_die_go_on_elsewhere_and_the_recording_replays(tmp_path: Path) -> None:
    """Each instance loses its streams of one kind of moment; the client gets five events all the same."""
    record = tmp_path / "run.jsonl"
    modes = ["stateless"] * 4
    async with together(modes, hops=True, policy="least-tokens", record=record, migration="on") as here:
        here.fakes[0].script.die_after, here.fakes[1].script.die_after = 1, 3
        answers = await asyncio.gather(*(here.ask(f"r{number:02d}", 10 + number) for number in range(40)))
        served = [answer == (200, 5) for answer in answers]
        ledger = await here.at_rest()
        assert ledger["ended"].get("upstream_error", 0) == served.count(False)  # those that both have lost
        assert served.count(True) > 20
        moved = sum([len((await here.get(f"/pla/explain/r{rid:02d}"))[1]["attempts"]) - 1 for rid in range(40)])
        assert moved
        metrics = (await here.get("/metrics"))[1]
        assert 'pla_router_migrations_total{how="redo",reason="broken"}' in metrics
        tags = [tags for fake in here.fakes for tags in map(tags_of, fake.bodies) if "pla_tokens" in tags]
        assert tags
        assert all(tags["pla_tokens"] in ([0], [0, 1, 2]) for tags in tags)
        assert all(tags["pla_seen"] == f"c{len(tags['pla_tokens']) - 1}" for tags in tags)
    _, result = replay_file(record)
    assert result.decisions["dispatched"] == 40 + moved
    assert result.identical_share == 1.0, result.differences


async def test_streams_that_are_moved_at_random_lose_nothing() -> None:
    """Moves to anywhere at any time, an instance that dies and one that drains meanwhile: each client gets each event
    once, in order, and nothing is left anywhere."""
    rng = random.Random(6)
    async with together(["stateless"] * 4, hops=True, policy="round-robin", migration="on") as here:
        for one in here.fakes:
            one.streams_are_held, one.script.events = True, 50
        table, migration = here.plane.table, here.plane.migration
        await wait_until(lambda: all(list((one.peers or {}).values()).count("ready") == 3 for one in table))
        asked = [asyncio.create_task(here.read(f"r{number:02d}")) for number in range(40)]
        ordered = 0
        for turn in range(120):
            await asyncio.sleep(0.005)
            rid, target = f"r{rng.randrange(40):02d}", table.by_number[rng.randrange(4)]
            ordered += migration.move_request(rid, target, "random") is None
            if turn == 30:
                await here.fakes[0].stop()
            elif turn == 60:
                here.plane.table.drain(table.by_number[1], time.monotonic())
        wanted = b"".join(b'data: {"text": "w%d"}\n\n' % number for number in range(50)) + b"data: [DONE]\n\n"
        answers = await asyncio.gather(*asked)
        assert [answer for answer in answers if answer != wanted] == []
        assert ordered > 10
        await here.at_rest()
        assert not any(one.streams for one in here.fakes)
        migration.sweep_moves()
        assert count_moves(here.plane) == 0
        metrics = (await here.get("/metrics"))[1]
        assert 'pla_router_migrations_total{how="pull",reason="random"}' in metrics
        assert 'pla_router_migrations_total{how="redo",reason="broken"}' in metrics
        await here.fakes[0].start()


async def test_every_scraper_finds_the_series_that_the_page_names() -> None:
    documented = documented_names(PAGE, "pla_router_")
    assert len(documented) > 25
    quiet = {f"pla_router_{name}" for name in QUIET}
    wanted = {stored_name(name, kind) for name, kind in documented.items()} - quiet - UNCOUNTED
    async with together(PAIRS, policy="pla", migration="on") as here:
        await asyncio.gather(*(here.ask(f"r{number:02d}", 2000 if number % 2 else 10) for number in range(8)))
        await here.at_rest()
        while "pla_router_relay_unmovable_total" not in await here.scrape("*/*"):  # a relay reports now and then
            await asyncio.sleep(0.02)
        for scraper, accept in ACCEPT.items():
            text = await here.scrape(accept)
            assert wanted - sample_names(text) == set(), scraper
            declared = {family.name for family in text_string_to_metric_families(text)}
            assert {name.removesuffix("_total") for name in quiet if name.endswith("_total")} <= declared
