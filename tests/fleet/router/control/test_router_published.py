"""Loads that stock engines publish: over real sockets, as SGLang sends them, and as it does not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from fake_sglang import INFO
from support.router_scene import scene
from support.serving import until

from pla_sglang.fleet.router.control.workers import published_load
from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.discovery import Address, describe
from pla_sglang.fleet.router.control.workers.published_load import PublishedLoads, decode_message, endpoints_of
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerTable
from pla_sglang.load.report import Report
from pla_sglang.policy.interface.fleet import InstanceKind


class Publisher:
    """The socket of one rank."""

    def __init__(self, rank: int = 0, port: int | None = None) -> None:
        self.rank = rank
        self.socket = zmq.Context.instance().socket(zmq.PUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.port = port or self.socket.bind_to_random_port("tcp://127.0.0.1")
        if port is not None:
            self.socket.bind(f"tcp://127.0.0.1:{port}")
        self._sequence = itertools.count()

    def send(self, payload: bytes | None = None, *, topic: bytes = b"load", **figures: int) -> None:
        frames = [topic, next(self._sequence).to_bytes(8, "big"), payload or encode(rank=self.rank, **figures)]
        self.socket.send_multipart(frames)


def publishers_of_two_ranks() -> tuple[Publisher, Publisher]:
    """At two ports that follow each other; the second may be somebody else's."""
    while True:
        first = Publisher()
        try:
            return first, Publisher(1, first.port + 1)
        except zmq.ZMQError:
            first.socket.close()


def encode(
    *, running: int = 0, waiting: int = 0, used: int = 0, capacity: int = 50_000, rank: int = 0, uncached: int = 0
) -> bytes:
    """As SGLang 0.5.23 does, with the figures that we do not read at the end."""
    rest = [used, 256, 12_345, 678]
    return msgspec.msgpack.encode(["LoadStat", running, waiting, used, capacity, rank, uncached, *rest])


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.socket.close()


def described(port: int, ranks: int = 1) -> dict[str, Any]:
    """As in ``/server_info``."""
    return {"endpoint_host": "*", "endpoint_port_base": 5557, "load_endpoint_port_base": port, "dp_size": ranks}


def worker_at(host: str, port: int, table: WorkerTable | None = None, **info: Any) -> Worker:
    table = table or WorkerTable(BreakerKnobs())
    worker = table.add(Address(host, port), 0.0)
    table.describe(worker, describe({**INFO, "port": port, **info}), 0.0)
    return worker


def read(loads: PublishedLoads, publisher: Publisher, now_s: float = 0.0, **figures: int) -> list[Any]:
    """Sends until something comes: a subscription takes a moment to arrive."""

    def heard() -> list[Any]:
        publisher.send(**figures)
        return list(loads.drain(now_s))

    return until(heard, what="a load")


@pytest.mark.parametrize(
    ("kv_events", "ports"),
    [
        (described(6000), range(6000, 6001)),
        (described(6000, 4), range(6000, 6004)),
        (described(65_535), range(65_535, 65_536)),
        (described(65_535, 2), range(0)),
        (described(0), range(0)),
        (described(6000, 65), range(0)),
        (described(6000, 0), range(0)),
        ({"load_endpoint_port_base": "6000", "dp_size": 1}, range(0)),
        ({"endpoint_port_base": 5557, "dp_size": 1}, range(0)),  # KV events without loads
        (None, range(0)),
        ("tcp://elsewhere:1", range(0)),
    ],
)
def test_an_instance_says_where_it_publishes(kv_events: Any, ports: range) -> None:
    assert describe({**INFO, "kv_events": kv_events}).load_ports == ports


def test_only_the_host_of_its_own_address_is_connected_to() -> None:
    """Whatever host ``/server_info`` names."""
    events = described(6000, 2) | {"endpoint_host": "10.9.9.9"}
    assert endpoints_of(worker_at("127.0.0.1", 7, kv_events=events)) == ("tcp://127.0.0.1:6000", "tcp://127.0.0.1:6001")
    assert endpoints_of(worker_at("::1", 7, kv_events=described(6000))) == ("tcp://[::1]:6000",)
    assert endpoints_of(worker_at("127.0.0.1", 7)) == ()
    decode = worker_at("127.0.0.1", 7, kv_events=described(6000), disaggregation_mode="decode")
    assert decode.view.kind is InstanceKind.DECODE
    assert endpoints_of(decode) == ()
    ours = worker_at("127.0.0.1", 7, kv_events=described(6000))
    ours.load.reports[0] = Report(instance="ours", sequence=1)
    assert endpoints_of(ours) == ()


GOOD = [b"load", bytes(8), encode(running=3)]


@pytest.mark.parametrize(
    "frames",
    [
        GOOD[:2],
        [*GOOD, b""],
        [b"kv", *GOOD[1:]],
        [*GOOD[:2], b""],
        [*GOOD[:2], b"\xc1" * 9],
        [*GOOD[:2], encode(running=-1)],
        [*GOOD[:2], encode(running=1 << 40)],
        [*GOOD[:2], encode(rank=1)],  # of another rank, or of another engine on the port that this one names
        [*GOOD[:2], msgspec.msgpack.encode(["LoadStat", 1, 2, 3, 4, 0])],  # before there were uncached tokens
        [*GOOD[:2], msgspec.msgpack.encode(["BlockStored", 1, 2, 3, 4, 0, 5, 6])],
        [*GOOD[:2], msgspec.msgpack.encode({"num_running_reqs": 1})],
    ],
)
def test_what_is_no_load_of_this_rank(frames: list[bytes]) -> None:
    assert decode_message(frames, 0) is None
    stat = decode_message(GOOD, 0)
    assert stat is not None
    assert stat.num_running_reqs == 3


def test_the_message_is_that_of_the_installed_sglang() -> None:
    name = "sglang.srt.managers.scheduler_components.load_publisher"
    publisher = pytest.importorskip(name, reason="SGLang publishes loads from 0.5.19 on")
    sent = publisher.LoadStat(1, 2, 3, 4, 0, 5, 6, 7, 8, 9)
    assert publisher.LOAD_TOPIC.encode() == published_load.TOPIC
    assert published_load.SILENCE_S >= 2 * publisher.LOAD_PUBLISH_HEARTBEAT_S
    stat = decode_message([b"load", bytes(8), publisher._encoder.encode(sent)], 0)
    assert stat is not None
    shown = ("num_running_reqs", "num_waiting_reqs", "num_tokens", "max_total_num_tokens", "num_total_tokens")
    for field in (*shown, "num_waiting_uncached_tokens"):
        assert getattr(stat, field) == getattr(sent, field)


def test_the_last_message_counts_and_bad_ones_do_not(publisher: Publisher) -> None:
    loads = PublishedLoads()
    worker = worker_at("127.0.0.1", 7, kv_events=described(publisher.port))
    loads.follow([worker])
    read(loads, publisher)
    publisher.send(uncached=7)
    publisher.send(b"no message")
    publisher.send(topic=b"loads of another kind", uncached=9)
    publisher.send(uncached=11)
    said, number = list[int](), worker.number

    def last_has_come() -> bool:
        for whose, answer in loads.drain(1.0):
            assert whose == number
            said.append(answer["loads"][0]["num_waiting_uncached_tokens"])
        return said[-1:] == [11]

    until(last_has_come, what="the last message")
    assert 9 not in said
    assert loads.malformed == 2
    assert loads.is_heard(number, 1.0 + published_load.SILENCE_S)
    assert not loads.is_heard(number, 1.1 + published_load.SILENCE_S)
    assert read(loads, publisher, 9.0, uncached=8)[0][1]["loads"][0]["num_waiting_uncached_tokens"] == 8
    publisher.send(bytes(2000))  # more than a frame may have: ZMQ gives this connection up, and polls say the rest
    publisher.send(uncached=9)
    time.sleep(0.1)
    assert 9 not in [answer["loads"][0]["num_waiting_uncached_tokens"] for _, answer in loads.drain(10.0)]
    loads.follow([])
    assert not loads.is_following()
    assert not loads.is_heard(number, 1.0)
    loads.close()


def test_ranks_are_added_up_and_a_silent_one_is_missed() -> None:
    first, second = publishers_of_two_ranks()
    loads = PublishedLoads()
    loads.follow([worker_at("127.0.0.1", 7, kv_events=described(first.port, 2))])

    def heard() -> list[int]:
        return [rank["num_running_reqs"] for _, answer in loads.drain(0.0) for rank in answer["loads"]]

    def are_connected() -> bool:
        first.send(running=3)
        second.send(running=4)
        return bool(heard())

    until(are_connected, what="loads of both ranks")
    first.send(running=1)
    second.send(running=2)
    until(lambda: heard() == [1, 2], what="the last message of both")
    first.send(running=5)
    time.sleep(0.05)
    assert list(loads.drain(published_load.SILENCE_S + 0.1)) == []
    loads.close()
    first.socket.close()
    second.socket.close()


def test_an_endpoint_that_two_workers_name_is_nobodys(publisher: Publisher) -> None:
    table = WorkerTable(BreakerKnobs())
    workers = [worker_at("127.0.0.1", port, table, kv_events=described(publisher.port)) for port in (7, 8)]
    loads = PublishedLoads()
    loads.follow(workers)
    assert not loads.is_following()
    loads.follow(workers[:1])
    assert read(loads, publisher)[0][0] == workers[0].number
    loads.close()


async def test_a_router_takes_published_loads_in_place_of_polls(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INFO, "kv_events", described(publisher.port))
    monkeypatch.setattr(published_load, "SILENCE_S", 0.3)
    async with scene(["null"]) as one:
        view, monitor = one.plane.table.by_number[0].view, one.plane._monitor

        def has_heard() -> bool:
            publisher.send(waiting=2, uncached=600, running=1, used=40)
            return view.queued_tokens == 600

        await one.until(has_heard)
        assert (view.queued_prefills, view.queued_attention, view.running, view.context_tokens) == (
            *(2, 180_000),
            *(1, 40),
        )
        assert one.admin("GET", "/pla/state")[1]["telemetry"]["published"] >= 1
        one.instances[0].load |= {"num_waiting_uncached_tokens": 70}  # what polls would say
        polls = monitor.polls
        for _ in range(30):
            await one.until(has_heard)
        assert monitor.polls <= polls + 1, "one may have been under way"
        await one.until(lambda: view.queued_tokens == 70)  # the stream has stopped: polled again
        assert monitor.polls > polls
