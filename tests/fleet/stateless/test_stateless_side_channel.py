"""Messages of anybody on the side channel: what is dropped, what gets through, and what a thread that ends means."""

from __future__ import annotations

import logging
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.nixl.conn import GUARD, KVArgsRegisterInfo, NixlKVManager, TransferInfo
from support.serving import until

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.side_channel import (
    ABORT,
    ACKNOWLEDGED,
    LINE_S,
    NO_ROOM,
    PULL,
    REGISTERS,
    Drop,
    Inbox,
    SideChannel,
    read_receiver,
    read_room,
)
from pla_sglang.fleet.stateless.transfer import fence

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # as they are closed

RECEIVER = (b"10.0.0.2", b"5000")
HOSTS = (b"STAGING_RSP", b"WATERMARK")  # the host reads and drops them where staging is off, as it is here
WORDS = (GUARD, ABORT, PULL, ACKNOWLEDGED, NO_ROOM, *HOSTS)


def ask(room: bytes = b"7", agent: bytes = b"agent") -> list[bytes]:
    """A receiver says where the KV of a room goes."""
    return [GUARD, room, *RECEIVER, agent, struct.pack("2i", 1, 2), b"0", b"1", b"", b"0", b"0"]


def registration(agent: bytes = b"agent", metadata: bytes = b"good") -> list[bytes]:
    pointers = struct.pack("2Q", 4096, 8192)
    return [
        GUARD,
        REGISTERS,
        *RECEIVER,
        agent,
        metadata,
        pointers,
        pointers,
        b"",
        b"0",
        b"1",
        b"0",
        b"64",
        b"",
        b"",
        b"",
        b"",
        b"10",
        b"VRAM,VRAM",
    ]


class Socket:
    """Messages that come one after another; the thread that reads ends with it."""

    def __init__(self) -> None:
        self._messages: queue.Queue[list[bytes] | None] = queue.Queue()

    def send(self, *messages: list[bytes]) -> None:
        for message in messages:
            self._messages.put(message)

    def close(self) -> None:
        self._messages.put(None)

    def recv_multipart(self) -> list[bytes]:
        message = self._messages.get()
        if message is None:
            raise SystemExit
        return message


class Manager:
    """A sender's, with the host's own thread and handlers, in which NIXL refuses what is not called good."""

    _start_bootstrap_thread = NixlKVManager._start_bootstrap_thread
    _handle_abort_notification = NixlKVManager._handle_abort_notification
    _add_remote_peer = NixlKVManager._add_remote_peer
    enable_staging = False
    disaggregation_mode = None

    def __init__(self) -> None:
        self.socket = self.server_socket = Socket()
        self.transfer_infos: dict[int, Any] = {}
        self.request_status: dict[int, Any] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.decode_kv_args_table: dict[str, Any] = {}
        self.agent = SimpleNamespace(add_remote_agent=self._add_agent)

    def _add_agent(self, metadata: bytes) -> None:
        if metadata != b"good":
            raise RuntimeError("NIXL_ERR_MISMATCH")

    def requires_dcp_relayout(self, size: int, rank: int) -> bool:
        return False

    def resolve_kv_replica_factor(self, infos: Any) -> None:
        pass

    def update_status(self, room: int, status: Any) -> None:
        self.request_status[room] = status


@pytest.fixture
def channel() -> SideChannel:
    return SideChannel()


@pytest.fixture
def manager(channel: SideChannel) -> Iterator[Any]:
    """Its thread runs, with both seams in place."""
    made: Any = Manager()
    made._add_remote_peer = lambda receiver: calls.register_receiver(
        NixlKVManager._add_remote_peer, made, receiver, channel
    )
    made.server_socket = calls.open_inbox(made, channel)
    made._start_bootstrap_thread()
    yield made
    assert channel.find_dead() == "", "no message ends it"
    made.socket.close()


def count(channel: SideChannel) -> int:
    return sum(channel.count_dropped().values())


MALFORMED = [
    [GUARD],
    [GUARD, b"None"],
    [GUARD, b"7"],
    [GUARD, b"x", *RECEIVER, b"a", b"", b"0", b"1"],
    ask(b"-1"),
    ask(b"1_0"),
    ask(b"9" * 5000),
    [*ask()[:5], b"odd", *ask()[6:]],
    [*ask()[:3], b"port", *ask()[4:]],
    [*ask()[:4], b"\xff", *ask()[5:]],
    registration()[:9],
    [*registration()[:18], b"DISK,VRAM"],
    registration(metadata=b"bad"),
    [PULL],
    [PULL, b"x", b"h", b"1"],
    [PULL, b"5", b"\xff", b"1"],
    [PULL, b"5", b"127.0.0.1", b"99999999"],
    [PULL, b"-1", b"127.0.0.1", b"1"],
    [PULL, b"9" * 5000, b"127.0.0.1", b"1"],
    [ABORT],
    [ABORT, b"1"],
    [ABORT, b"x", *RECEIVER],
    [ABORT, b"5", b"\xff", b"1"],
    [ABORT, b"5", b"127.0.0.1", b"x"],
]
FOREIGN = [
    [b""],
    [b"hello"],
    [b"hello"] * 50,
    [ACKNOWLEDGED, b"5"],
    [NO_ROOM, b"5"],
    *([word] for word in HOSTS),
]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        *((message, Drop.MALFORMED) for message in MALFORMED),
        *((message, Drop.FOREIGN) for message in FOREIGN),
        ([PULL, b"5", b"10.0.0.9", b"1"], Drop.UNKNOWN),
    ],
)
def test_the_hosts_thread_goes_on_behind_a_message_that_is_none(
    manager: Any, channel: SideChannel, message: list[bytes], reason: Drop
) -> None:
    manager.socket.send(message, registration(), ask())
    until(lambda: 7 in manager.request_status, what="the room that was asked for behind it")
    assert channel.count_dropped() == {each.value: int(each is reason) for each in Drop}
    assert list(manager.decode_kv_args_table) == ["agent"], "a receiver that NIXL refuses is not known"


def test_without_the_seams_the_hosts_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """So long as this is so, the seams are needed."""
    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.set())
    bare: Any = Manager()
    bare._start_bootstrap_thread()
    bare.socket.send([b"hello"])
    assert ended.wait(10)


FRAMES = st.lists(st.binary(max_size=80) | st.sampled_from([*WORDS, b"None", b"7", *RECEIVER]), max_size=24)
PREFIXED = st.tuples(st.sampled_from([*([word] for word in WORDS), ask(), registration()]), FRAMES).map(
    lambda parts: [*parts[0], *parts[1]]
)


def changed(message: list[bytes]) -> st.SearchStrategy[list[bytes]]:
    """``message`` with some frame replaced."""
    places = st.tuples(st.integers(0, len(message) - 1), st.binary(max_size=40))
    return places.map(lambda change: [*message[: change[0]], change[1], *message[change[0] + 1 :]])


ANY_MESSAGE = FRAMES.filter(bool) | PREFIXED | changed(ask()) | changed(registration())


@settings(max_examples=200, deadline=None)
@given(messages=st.lists(ANY_MESSAGE, min_size=1, max_size=6))
def test_whatever_comes_is_dropped_and_counted_or_can_be_read_by_the_host(messages: list[list[bytes]]) -> None:
    channel, socket = SideChannel(), Socket()

    def parse(fields: list[bytes]) -> None:
        (KVArgsRegisterInfo if fields[0] == REGISTERS else TransferInfo).from_zmq(fields)

    inbox = Inbox(socket, channel, parse=parse, is_known=lambda *receiver: receiver == ("10.0.0.2", 5000))
    socket.send(*messages, ask())
    let_in = []
    while (message := inbox.recv_multipart()) != ask() or socket._messages.qsize():
        let_in.append(message)
    for message in let_in:
        if message[0] == GUARD:
            parse(message[1:])
        else:
            assert message[0] in (ABORT, PULL)
            assert read_receiver(message) is not None
    assert count(channel) == len(messages) - len(let_in)


@settings(max_examples=60, deadline=None)
@given(messages=st.lists(ANY_MESSAGE, max_size=10))
def test_the_receiving_end_counts_what_is_none_and_reads_on(messages: list[list[bytes]]) -> None:
    channel, socket = SideChannel(), Socket()
    said = fence.hear_senders(SimpleNamespace(server_socket=socket), channel)
    socket.send(*messages, [ACKNOWLEDGED, b"123456789"])
    until(lambda: said.has(123456789), what="the last word")
    words = [message for message in messages if message[0] in (ACKNOWLEDGED, NO_ROOM)]
    good = [message for message in words if len(message) == 2 and message[1].isdigit() and len(message[1]) < 20]
    assert count(channel) == len(messages) - len(good)
    assert channel.find_dead() == ""
    socket.close()
    until(lambda: channel.find_dead() != "", what="its end")


@settings(max_examples=60, deadline=None)
@given(messages=st.lists(ANY_MESSAGE, max_size=10))
def test_a_thread_of_the_host_at_the_receiving_end_gets_its_own_words(messages: list[list[bytes]]) -> None:
    channel, socket = SideChannel(), Socket()
    inbox = fence.ReceiverInbox(socket, channel, {b"KV_STATUS"})
    said = fence.hear_senders(SimpleNamespace(server_socket=inbox), channel)
    socket.send(*messages, [ACKNOWLEDGED, b"123456789"], [b"KV_STATUS", b"7"])
    while (message := inbox.recv_multipart()) != [b"KV_STATUS", b"7"]:
        assert message[0] == b"KV_STATUS"
    assert said.has(123456789)
    assert channel.find_dead() == ""


def test_a_receiver_may_count_its_aborts_of_a_room() -> None:
    assert read_receiver([ABORT, b"5", *RECEIVER, b"12"]) == read_receiver([ABORT, b"5", *RECEIVER])
    assert read_receiver([ABORT, b"5", *RECEIVER, b"x"]) is None
    assert read_receiver([ABORT, b"5", *RECEIVER, b"1", b"2"]) is None


@pytest.mark.parametrize("text", [b"", b" 5", b"+5", b"-5", b"1_0", b"5\n", b"0x5", "٥".encode(), b"9" * 20])
def test_a_room_is_digits_only(text: bytes) -> None:
    assert read_room(text) is None
    assert read_receiver([ABORT, text, *RECEIVER]) is None
    assert read_receiver([ABORT, b"5", RECEIVER[0], text]) is None


def test_a_flood_is_one_line_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    channel = SideChannel(lambda: now_s[0])
    with caplog.at_level(logging.WARNING):
        for second in range(30):
            now_s[0] = float(second)
            for _ in range(1000):
                channel.drop(Drop.FOREIGN, b"a\nb\x1b[31m" + b"x" * 5000)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 30 // LINE_S
    assert all(len(line) < 200 and "\n" not in line and "\x1b" not in line for line in lines)
    assert count(channel) == 30_000


def test_a_thread_that_has_ended_is_named() -> None:
    channel = SideChannel()
    assert channel.find_dead() == "", "before any has begun"

    def run(body: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    stop = threading.Event()

    def read_on() -> None:
        channel.note_reader("first")
        stop.wait()

    run(read_on)
    run(lambda: channel.note_reader("second")).join()
    assert channel.find_dead() == "second"
    stop.set()
