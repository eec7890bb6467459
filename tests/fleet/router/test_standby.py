"""A control process that ends or stands still, and the next one: who leads, whom relays follow, what is known then."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_sglang import FakeSglang
from fleet.router.test_launch import Running, Stream, started
from fleet.router.test_together import Here, together
from fleet.router.test_wire import control_end, relay_end
from support.relays import Setting, TurnControl
from support.router_scene import scene
from support.serving import until, wait_until

from pla_sglang.common.cli import EXIT_BAD_ARGUMENTS
from pla_sglang.fleet.router.control import succession
from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.requests.request_record import ENDED
from pla_sglang.fleet.router.control.succession import EXIT_DEPOSED, Lease, Preparation
from pla_sglang.fleet.router.control.workers.table import WorkerState
from pla_sglang.fleet.router.process.leadership import FRESH_S, SILENT_S, Leadership
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.launch_cluster import main as cluster_main
from pla_sglang.launch_router import main
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.testing.mock_instance import running_mocks

# -- who leads ---------------------------------------------------------------------------------------------------------


class FakeChild:
    """A control process as the launcher sees it."""

    def __init__(self, name: str) -> None:
        self.name, self.killed = name, False
        self.lines: list[dict[str, Any]] = []

    def send_line(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def kill(self) -> None:
        self.killed = True


class Launcher:
    """Leadership over two fakes, with a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.lead: Any = Leadership(lambda: self.now_s)
        self.one, self.two = FakeChild("one"), FakeChild("two")

    def pass_time(self, seconds: float, *beating: FakeChild) -> None:
        """In steps of a beat."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            for child in beating:
                self.lead.on_beat(child)
            self.lead.check_silence()
            self.now_s += m.HEARTBEAT_INTERVAL_S

    def epochs(self) -> list[list[int]]:
        return [[line["epoch"] for line in child.lines if "epoch" in line] for child in (self.one, self.two)]


@pytest.fixture
def launcher() -> Launcher:
    made = Launcher()
    made.lead.on_start(made.one)
    made.lead.on_start(made.two)
    return made


def test_the_next_one_leads_at_the_end_of_the_former(launcher: Launcher) -> None:
    assert launcher.epochs() == [[1], []]
    launcher.pass_time(1.0, launcher.one, launcher.two)
    launcher.lead.on_end(launcher.one)
    assert launcher.epochs() == [[1], [2]]
    assert launcher.two.lines[-1] == {"epoch": 2, "lost_s": launcher.now_s}
    launcher.lead.on_start(launcher.one)
    assert launcher.epochs() == [[1], [2]]
    launcher.lead.on_end(launcher.one)  # a standby ends: nobody else leads
    assert launcher.epochs() == [[1], [2]]


def test_one_that_stands_still_is_ended_before_the_next_one_leads(launcher: Launcher) -> None:
    launcher.pass_time(1.0, launcher.one, launcher.two)
    heard_s = launcher.now_s - m.HEARTBEAT_INTERVAL_S
    launcher.pass_time(SILENT_S, launcher.two)
    assert not launcher.one.killed
    launcher.pass_time(0.5, launcher.two)
    assert launcher.one.killed
    assert launcher.epochs() == [[1], []]
    launcher.lead.on_end(launcher.one)
    assert launcher.epochs() == [[1], [2]]
    assert launcher.two.lines[-1]["lost_s"] == heard_s


def test_nobody_is_ended_where_all_stand_still(launcher: Launcher) -> None:
    """The machine was suspended, or the launcher was: what comes first after that may be a beat of the standby."""
    launcher.pass_time(1.0, launcher.one, launcher.two)
    launcher.pass_time(2.0)
    assert not launcher.one.killed
    launcher.now_s += 60.0
    launcher.lead.on_beat(launcher.two)
    launcher.lead.check_silence()
    launcher.pass_time(3.0, launcher.one, launcher.two)
    assert not launcher.one.killed


def test_nobody_is_ended_before_there_is_another_one(launcher: Launcher) -> None:
    launcher.pass_time(1.0, launcher.one)
    launcher.pass_time(10.0)
    assert not launcher.one.killed
    assert [line["standby"] for line in launcher.one.lines if "standby" in line] == [False]
    launcher.pass_time(1.0, launcher.one, launcher.two)
    assert [line["standby"] for line in launcher.one.lines if "standby" in line] == [False, True]
    launcher.pass_time(2 * FRESH_S, launcher.one)
    assert launcher.one.lines[-1] == {"standby": False}


def test_whoever_comes_leads_where_all_have_ended(launcher: Launcher) -> None:
    launcher.lead.on_end(launcher.two)
    launcher.lead.on_end(launcher.one)
    launcher.now_s += 0.5
    launcher.lead.on_start(launcher.two)
    assert launcher.two.lines == [{"epoch": 2, "lost_s": 100.0}]
    launcher.lead.end_leadership()
    launcher.lead.on_end(launcher.two)
    launcher.lead.on_start(launcher.one)
    assert launcher.epochs() == [[1], [2]]


# -- whom relays follow ------------------------------------------------------------------------------------------------


async def test_relays_speak_to_one_epoch_only(tmp_path: Path) -> None:
    """One that led before comes back: nothing of it is heard, and it is told so."""
    address = str(tmp_path / "c")
    async with FakeSglang() as one, relay_end(address) as relay:
        async with control_end(address, second := TurnControl((one.worker(),), epoch=2)):
            here = Setting(relay, second, [one])
            await here.until(lambda: relay.context.workers.serving)
        async with control_end(address, first := TurnControl((), epoch=1)):
            waiting = asyncio.ensure_future(here.ask({"text": "for the third"}))
            await here.until(lambda: len(first.of(m.Hello)) > 1)
            assert {(hello.epoch, hello.open, hello.asking) for hello in first.of(m.Hello)} == {(2, (), ())}
            assert not first.of(m.Ask)
            assert relay.context.workers.find_worker(one.worker().number) is not None  # its table was not taken
        async with control_end(address, third := TurnControl((one.worker(),), epoch=3)):
            assert (await waiting).status == 200
            assert {hello.epoch for hello in third.of(m.Hello)} == {0}


async def test_a_control_plane_that_is_deposed_ends_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(succession.os, "_exit", statuses.append)
    async with scene(["null"]) as one:
        one.assign("r")
        one.plane.on_message(m.Hello(0, m.PROTOCOL, epoch=1))
        assert not statuses
        one.assign("s")
        one.plane.on_message(m.Hello(0, m.PROTOCOL, epoch=2))
        assert statuses == [EXIT_DEPOSED]
        assert one.plane.dispatcher.ledger.live == 1  # it does nothing more, not even end what the relay did not name
        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
            "epoch 1 is over: relays follow epoch 2; this control process ends"
        ]
        one.ended("s")
        await one.at_rest()


# -- what is known then ------------------------------------------------------------------------------------------------


def describe_ledger(plane: ControlPlane) -> dict[str, Any]:
    """What is open, where, under which transfer ids, and what each instance is taken to have. What has ended and is not
    confirmed to be aborted is its relay's matter, which says the same to the instance."""
    ledger = plane.dispatcher.ledger
    records = [record for record in ledger.records.values() if record.state is not ENDED]
    return {
        "requests": {
            record.rid: (
                *(record.state, record.present.number, record.last_number, record.tenant),
                {(leg.worker, leg.state, leg.room) for leg in record.present.open_legs()},
            )
            for record in records
        },
        "rooms": {room: rid for room, rid in ledger.rooms.items() if rid in {record.rid for record in records}},
        "live": ledger.live,
        "at": {worker.number: worker.load.open_requests() for worker in plane.table},
        "problems": ledger.audit(time.monotonic()).problems,
    }


async def take_over(here: Here) -> tuple[ControlPlane, ControlPlane]:
    """A planned take-over: the former and the next control plane, before anything else happens."""
    former, relay = here.plane, here.relay
    await former.stop()
    prepared = Preparation(former.knobs)
    prepared.described |= {one.url: one.description for one in former.table if one.description is not None}
    lease = Lease(former.succession.lease.epoch + 1, time.monotonic(), 1)
    here.plane = plane = ControlPlane(former.knobs, lease=lease, prepared=prepared)
    await plane.start()
    relay.context.send_to_control = plane.on_message
    plane.attach_relay(0, relay)
    return former, plane


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("modes", "policy"),
    [
        (["null"] * 3, "least-requests"),
        (["prefill", "prefill", "decode"], "static-pd-round-robin"),
        (["stateless"] * 3, "arrow"),
    ],
)
async def test_the_ledger_is_that_of_one_that_saw_all_events(
    modes: list[str], policy: str, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    async with together(modes, policy=policy, memory_file=tmp_path / "memory.json") as here:
        asking, gone, sizes, attempts = [], set(), [], []
        here.fakes[0].script.refusals = [503] * 12 if "decode" not in modes else []  # others take them
        for take in range(3):
            for number in range(20):
                rid = f"{take}-{number}-x"
                give_up_s = rng.uniform(0.01, 0.05) if rng.random() < 0.2 else None
                gone |= {rid} if give_up_s is not None else set()
                asking.append(asyncio.ensure_future(here.ask(rid, rng.randint(1, 400), give_up_s=give_up_s)))
                await asyncio.sleep(rng.uniform(0.0, 0.004))
            former, plane = await take_over(here)
            before, after = describe_ledger(former), describe_ledger(plane)
            assert after == before
            assert plane.succession.takeover_s is not None
            sizes.append(after["live"])
            attempts += [request[1] for request in after["requests"].values()]
        answers = await asyncio.gather(*asking)
        assert all(answer == (200, 5) for answer in answers if answer[0])
        assert sum(answer[0] == 0 for answer in answers) <= len(gone)
        assert max(sizes) > 3
        assert "decode" in modes or max(attempts) > 1
        ledger = await here.at_rest()
        assert ledger["opened"] == sum(ledger["ended"].values())
        await here.plane.stop()


async def test_instances_that_were_ready_serve_at_once(tmp_path: Path) -> None:
    """With their roles and numbers. One that was drained is not asked, and one that is another process is checked."""
    memory = tmp_path / "memory.json"
    modes = ["stateless"] * 4
    async with scene(modes, policy="arrow", memory_file=memory) as one:
        first, drained, _, replaced = one.plane.table.workers
        role, epoch = first.view.role.value, first.view.role_epoch
        other = "decode" if role == "prefill" else "prefill"
        assert one.admin("POST", f"/workers/{first.number}/role", {"role": other, "epoch": epoch})[0] == 200
        one.plane.table.drain(drained, time.monotonic())
        await one.plane.stop()
        preparation = Preparation(one.plane.knobs)
        following = asyncio.ensure_future(preparation.follow_workers())
        await wait_until(lambda: len(preparation.described) == 3)
        following.cancel()
        assert drained.url not in preparation.described
        one.instances[3].info["random_seed"] = 2
        del preparation.described[replaced.url]
        plane = ControlPlane(one.plane.knobs, lease=Lease(2, time.monotonic(), 0), prepared=preparation)
        await plane.start()
        try:
            states = {worker.number: worker.state for worker in plane.table}
            assert list(states.values()) == [
                *(WorkerState.READY, WorkerState.STARTING, WorkerState.READY, WorkerState.STARTING)
            ]
            view = plane.table.by_number[first.number].view
            assert (view.role.value, view.role_epoch) == (other, epoch + 1)
        finally:
            await plane.stop()


async def test_pools_are_those_of_the_former_one(tmp_path: Path) -> None:
    """Not those that the instances were in when the standby asked them."""
    async with scene(["prefill", "prefill", "decode"], policy="pla", memory_file=tmp_path / "memory.json") as one:
        prepared = Preparation(one.plane.knobs)
        prepared.described |= {row.url: row.description for row in one.plane.table if row.description is not None}
        views = [worker.view for worker in one.plane.table.workers[:2]]
        views[0].length_class, views[1].length_class = views[1].length_class, views[0].length_class
        one.plane._state_file.mark_changed()
        await one.plane.stop()
        plane = ControlPlane(one.plane.knobs, lease=Lease(2, time.monotonic(), 0), prepared=prepared)
        await plane.start()
        classes = [worker.view.length_class for worker in plane.table.workers[:2]]
        await plane.stop()
        assert classes == [view.length_class for view in views]
        assert set(classes) == set(PrefillClass)


# -- the processes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def router() -> Iterator[Running]:
    arguments = ["--relay-workers", "2", "--standby", "--policy", "least-tokens"]
    with running_mocks("unified", "unified") as mocks:
        for url in mocks.urls:
            arguments += ["--worker", url]
        with started(*arguments) as running:
            until(running.healthy, what="a router that serves")
            yield running


def read_control(router: Running) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(router.get("/pla/state"))["control"]
    return told


def test_streams_and_requests_outlive_control_processes(router: Running) -> None:
    """Killed, killed and frozen while streams run, and ended in order: the standby takes over each time."""
    until(lambda: read_control(router)["standby"], what="a standby")
    streams = [Stream(router.port, 700) for _ in range(10)]
    until(lambda: all(stream.events > 2 for stream in streams), what="streams under way")
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        before = read_control(router)
        os.kill(before["pid"], number)
        assert router.asks()
        until(lambda: read_control(router)["takeover_s"] is not None, what="the end of the take-over")
        after = read_control(router)
        assert (after["epoch"], after["takeovers"]) == (before["epoch"] + 1, before["takeovers"] + 1)
        assert not psutil.pid_exists(before["pid"])
        ledger = json.loads(router.get("/pla/ledger"))
        assert ledger["balanced"]
        until(lambda: read_control(router)["standby"], what="the next standby")
    series = router.get("/metrics").decode()
    assert f"pla_router_control_epoch {float(after['epoch'])}" in series
    assert f"pla_router_takeovers_total {float(after['takeovers'])}" in series
    for stream in streams:
        stream.join(40)
    assert [stream.events for stream in streams] == [700] * len(streams)
    until(lambda: json.loads(router.get("/pla/state"))["open_requests"] == 0, what="no open request")


def test_a_standby_has_imported_what_it_needs_to_lead(tmp_path: Path) -> None:
    """Before its first beat: imports would be the longest part of a take-over."""
    command = [sys.executable, "-X", "importtime", "-m", "pla_sglang.fleet.router.process.process_main", "control"]
    settings = {"address": str(tmp_path / "c"), "given": {}, "router_key": "k", "relays": 1, "standby": True}
    ours, theirs = socket.socketpair()
    with ours, (tmp_path / "imports").open("wb") as imports:
        with theirs:
            process = subprocess.Popen(command, stdin=theirs, stderr=imports)
        try:
            ours.settimeout(60)
            ours.sendall(json.dumps(settings).encode() + b"\n")
            assert ours.recv(1) == b"."
        finally:
            process.kill()
            process.wait()
    modules = {line.rpartition("|")[2].strip() for line in (tmp_path / "imports").read_text().splitlines()}
    assert {f"pla_sglang.fleet.router.{name}" for name in ("control.control_plane", "wire.endpoints")} <= modules


def test_a_standby_that_ends_changes_nothing(router: Running) -> None:
    until(lambda: read_control(router)["standby"], what="a standby")
    before = read_control(router)
    [standby] = [one for one in router.children("control") if one.pid != before["pid"]]
    standby.kill()
    until(lambda: not read_control(router)["standby"], what="word of the loss")
    until(lambda: read_control(router)["standby"], what="the next standby")
    assert {**before, "standby": True} == read_control(router)


def test_a_router_whose_control_cannot_start_again_goes_on_trying(tmp_path: Path) -> None:
    """The worker file is broken at that moment: the stream ends well, and later the router serves again."""
    file = tmp_path / "workers.json"
    with running_mocks("unified") as mocks:
        listed = json.dumps({"workers": [{"url": url} for url in mocks.urls]})
        file.write_text(listed)
        with started("--relay-workers", "1", "--worker-file", str(file)) as router:
            until(router.healthy, what="a router that serves")
            stream = Stream(router.port, 100)
            until(lambda: stream.events > 2, what="a stream under way")
            file.write_text("{")
            [control] = router.children("control")
            control.kill()
            stream.join(20)
            assert stream.events == 100
            assert router.process.poll() is None
            file.write_text(listed)
            until(router.healthy, what="a router that serves again")


def test_the_end_leaves_no_process(router: Running) -> None:
    family = psutil.Process(router.process.pid).children(recursive=True)
    assert len(family) == 4
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(20) == 0
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


# -- bad input ---------------------------------------------------------------------------------------------------------


NEEDS = "--standby needs --relay-workers: control is a process of its own then; allowed with it: 1 to 64"


@pytest.mark.parametrize(
    ("start", "arguments", "line"),
    [
        (main, ["--standby"], NEEDS),
        (main, ["--standby", "--relay-workers", "0"], NEEDS),
        (cluster_main, ["--stateless", "2", "--standby"], f"router: {NEEDS}"),
        (
            cluster_main,
            ["--unified", "2", "--standby", "--router", "none"],
            "--standby is not for --router none; allowed: --router pla",
        ),
    ],
)
def test_a_standby_needs_processes(
    start: Callable[[list[str]], int], arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(arguments) == EXIT_BAD_ARGUMENTS
    assert capsys.readouterr().err.strip() == f"error: {line}"
