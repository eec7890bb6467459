"""Losses of instances that are no SIGKILL: frozen processes, a scheduler that raises, and a proxy before each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.check.faults import fleet as fleets
from bench.check.faults.bodies import make_ids
from bench.check.faults.client import Stream, find_silence, find_silences, longest_pass_s
from bench.check.faults.fleet import Fleet, Kill, find_processes, find_schedulers
from bench.check.faults.proxy import HOST, Proxy, running_proxies
from bench.check.faults.table import FAULTS, KILL, OTHER_KILLS, choose_kills, describe_silence, judge
from pla_sglang.common.errors import PlaError
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.sim import chain

# As an engine's processes look from outside: one named as SGLang names a scheduler.
ENGINE = """
import os, subprocess, sys, time
subprocess.Popen(["sglang::scheduler", "-c", "import time; time.sleep(600)"], executable=sys.executable)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def engine(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Its process, and the file of a cluster that has it."""
    command = [sys.executable, "-c", ENGINE]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        state = tmp_path / "cluster.state.json"
        url = "http://127.0.0.1:9"
        state.write_text(json.dumps({"instances": [{"name": "a", "url": url, "kind": "unified", "pid": process.pid}]}))
        yield process.pid, state
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_half_of_the_losses_are_kills() -> None:
    for seed in range(20):
        chosen = choose_kills(12, seed)
        counts = Counter(chosen)
        assert counts[KILL] == 6
        assert {1, 2} == {counts[name] for name in OTHER_KILLS}, "in turn"
        assert chosen == choose_kills(12, seed)
    assert len({tuple(choose_kills(12, seed)) for seed in range(20)}) > 10
    assert choose_kills(1, 0) == [KILL]
    assert choose_kills(0, 0) == []
    assert {choose_kills(2, seed)[0] for seed in range(40)} >= {KILL, "crash", "blackhole"}


@pytest.mark.parametrize(("fault", "stopped"), [("freeze", 1), ("freeze_all", 3)])
def test_a_frozen_instance_goes_on(fault: str, stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[list[str]]()

    async def freeze(fleet: Fleet, pid: int) -> None:
        act = FAULTS[fault].act
        assert act is not None
        freezing = asyncio.ensure_future(act(fleet, "a"))
        while sum(is_stopped(one) for one in find_processes(pid)) < stopped:
            await asyncio.sleep(0.01)
        seen.append([str(one) for one in find_processes(pid) if is_stopped(one)])
        freezing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await freezing

    monkeypatch.setattr(fleets, "STILL_S", 600.0)  # and it goes on, however that ends
    with engine(tmp_path) as (pid, state):
        fleet = Fleet({"url": "", "instances": [{"name": "a", "url": "http://127.0.0.1:8", "kind": "unified"}]}, state)
        assert fleet.instance("http://127.0.0.1:8")["pid"] == pid, "by the address of its proxy"
        schedulers = find_schedulers(pid)
        asyncio.run(freeze(fleet, pid))
        assert seen == [[str(one) for one in (schedulers if fault == "freeze" else find_processes(pid))]]
        assert not any(is_stopped(one) for one in find_processes(pid))
        assert [(still.fault, still.name) for still in fleet.standstills] == [(fault, "a")]
    with pytest.raises(PlaError, match="no scheduler"):
        find_schedulers(os.getpid())


def is_stopped(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


# -- the proxy ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def proxy_to(port: int) -> AsyncIterator[int]:
    mine = free_port()
    running = asyncio.create_task(Proxy(mine, port).run())
    try:
        yield mine
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def until_accepted(port: int, accepted: bool) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection(HOST, port)
        except OSError:
            if not accepted:
                return
        else:
            writer.transport.abort()
            if accepted:
                return
        await asyncio.sleep(0.01)


def test_bytes_and_ends_go_through_both_ways() -> None:
    got = list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.read())  # to the end of that way
        writer.write(got[-1][::-1])
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, HOST, 0)
        async with server, proxy_to(server.sockets[0].getsockname()[1]) as port:
            await until_accepted(port, True)
            got.clear()
            reader, writer = await asyncio.open_connection(HOST, port)
            data = os.urandom(1 << 20)
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == data[::-1]
            assert data in got
            writer.close()

    asyncio.run(run())


def test_a_proxy_listens_only_while_its_instance_does() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As the kernel does for a process that is killed."""
        await reader.read(1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def run() -> None:
        target = free_port()
        async with proxy_to(target) as port:
            await until_accepted(port, False)
            for _ in range(2):
                async with await asyncio.start_server(reset, HOST, target) as server:
                    await until_accepted(port, True)
                    reader, writer = await asyncio.open_connection(HOST, port)
                    server.close()
                    writer.write(b"x")
                    with pytest.raises(ConnectionResetError):
                        await reader.read()
                    writer.close()
                await until_accepted(port, False)

    asyncio.run(run())


def test_a_proxy_that_stands_still_closes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent meanwhile comes when it goes on, on old connections and new ones."""
    monkeypatch.setattr(fleets, "STILL_S", 600.0)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async def run(described: dict[str, Any], state: Path) -> None:
        port = int(described["instances"][0]["url"].rpartition(":")[2])
        old, to_old = await asyncio.open_connection(HOST, port)
        to_old.write(b"1")
        assert await old.readexactly(1) == b"1"
        cut = asyncio.ensure_future(Fleet(described, state).cut_off("a"))
        while not is_stopped(described["instances"][0]["proxy_pid"]):
            await asyncio.sleep(0.01)
        new, to_new = await asyncio.open_connection(HOST, port)
        for writer in (to_old, to_new):
            writer.write(b"2")
        cut.cancel()
        assert await asyncio.gather(old.readexactly(1), new.readexactly(1)) == [b"2", b"2"]
        assert not is_stopped(described["instances"][0]["proxy_pid"])
        for writer in (to_old, to_new):
            writer.close()
        assert cut.cancelled()

    async def serve() -> None:
        server = await asyncio.start_server(echo, HOST, 0)
        url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
        cluster = {"instances": [{"name": "a", "url": url, "kind": "unified", "pid": 1}]}
        state = tmp_path / "cluster.state.json"
        state.write_text(json.dumps(cluster))
        stack = contextlib.ExitStack()
        async with server:
            described = await asyncio.to_thread(stack.enter_context, running_proxies(cluster, tmp_path))
            try:
                await run(described, state)
            finally:
                await asyncio.to_thread(stack.close)

    asyncio.run(serve())


# -- the verdict -------------------------------------------------------------------------------------------------------


def failed(number: int, error: str, *, token_s: list[float], ended_s: float) -> Stream:
    stream = Stream(rid=f"r{number}", body=make_ids(chain.prompt_of(20, 4, random.Random(0)), 4))
    stream.sent_s, stream.token_s, stream.ended_s, stream.error = 9.0, token_s, ended_s, error
    return stream


ALONE = "while it ran nothing else"


def test_what_a_scheduler_may_have_died_of_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    blamed = "status 502: its instance has died in what may have been its first pass, so no other one gets it"
    streams = [
        failed(0, blamed, token_s=[], ended_s=16.0),
        failed(1, blamed.replace("in what may have been its first pass", ALONE), token_s=[9.5], ended_s=16.0),
        failed(2, blamed, token_s=[], ended_s=9.5),
        failed(3, "status 502", token_s=[], ended_s=16.0),
    ]
    monkeypatch.setattr(fleets, "explain_request", lambda url, rid: {})
    fleet = Fleet({"url": "", "instances": [{"name": "a", "url": "http://a:1"}]}, streams=streams)
    fleet.kills = [Kill("a", 10.0, 15.0, crashed=True)]
    verdict = judge(fleet, streams)
    assert (verdict["failed_to_blame"], verdict["failed_wrongly"], verdict["failed"]) == (2, 2, 4)
    fleet.kills = [Kill("a", 10.0, 15.0)]
    assert judge(fleet, streams)["failed_to_blame"] == 0


def test_the_longest_silence_is_beyond_a_pass() -> None:
    still = failed(0, "", token_s=[10.0, 10.5, 14.0], ended_s=14.1)
    ends_late = failed(1, "", token_s=[9.2], ended_s=13.0)
    late = failed(2, "", token_s=[11.0], ended_s=11.1)
    never = failed(3, "status 502", token_s=[], ended_s=75.0)
    streams = [still, ends_late, late]
    assert find_silences(streams, 1.0) == {"longest_silence_s": 2.8, "longest_wait_s": 1.0}
    assert find_silence(still) == (3.5, 10.5)
    assert find_silences([*streams, never], 1.0) == {"longest_silence_s": 2.8, "longest_wait_s": 65.0}
    assert find_silences([], 1.0) == {"longest_silence_s": 0.0, "longest_wait_s": 0.0}
    assert longest_pass_s("h100-llama3.1-8b-tp1", 4.0) == 4.0 * longest_pass_s("h100-llama3.1-8b-tp1", 1.0) > 0.5


def test_whose_silence_was_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def explain(url: str, rid: str) -> dict[str, Any]:
        asked.append(rid)
        return {"attempts": [{"decode": "a:1", "cause": "dispatch", "over": "lost"}]}

    monkeypatch.setattr(fleets, "explain_request", explain)
    streams = [failed(0, "", token_s=[9.5], ended_s=10.0), failed(1, "", token_s=[9.5, 14.0], ended_s=14.5)]
    said = describe_silence(Fleet({"url": "http://r", "instances": []}), streams)
    assert said.startswith("r1: 4.50 s from 9.50 on")
    assert "'over': 'lost'" in said
    assert asked == ["r1"]
