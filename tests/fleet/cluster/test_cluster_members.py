"""A cluster that runs gets and loses members. Its fork server is a stand-in; supervisor and control socket are real."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pla_sglang.fleet.actuators import open_actuator
from pla_sglang.fleet.actuators.cluster_socket import send_command, socket_path
from pla_sglang.fleet.actuators.interface import Actuator, ActuatorError
from pla_sglang.fleet.cluster import supervisor
from pla_sglang.fleet.cluster.spec import ClusterConfig
from pla_sglang.fleet.cluster.supervisor import Supervisor

FIRST, GROUP, KILL = ("first", signal.SIGTERM), ("group", signal.SIGTERM), ("group", signal.SIGKILL)
LIMIT_S = 20.0


class Forks:
    """In place of the fork server: whoever is started runs until a signal that is not ignored."""

    def __init__(self, env: dict[str, str]) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.output, self._printed = os.pipe()
        self._pids = itertools.count(2**22 + 1)  # of nobody
        self.running: dict[str, int] = {}
        self.arguments: dict[str, tuple[str, ...]] = {}
        self.sent: list[tuple[str, str, int]] = []
        self.ignored: set[tuple[str, int]] = set()
        self._tell({"event": "ready"})

    def fileno(self) -> int:
        return self._ours.fileno()

    def read_event(self) -> Any:
        return json.loads(self._ours.recv(1 << 16))

    def fork_process(self, name: str, argv: Any, output: int, *, module: str | None = None) -> None:
        assert name not in self.running
        self.arguments[name] = tuple(argv)
        self.running[name] = next(self._pids)
        self._tell({"event": "started", "name": name, "pid": self.running[name]})

    def kill_first(self, name: str, number: int) -> None:
        self._kill("first", name, number)

    def kill_group(self, name: str, number: int) -> None:
        self._kill("group", name, number)

    def end(self, name: str, status: int) -> None:
        self._tell({"event": "exited", "name": name, "pid": self.running.pop(name), "status": status})

    def close_zygote(self) -> None:
        for channel in (self._ours, self._theirs):
            channel.close()
        for pipe in (self.output, self._printed):
            os.close(pipe)

    def _kill(self, to: str, name: str, number: int) -> None:
        self.sent.append((name, to, number))
        if name in self.running and (to, number) not in self.ignored:
            self.end(name, -number)

    def _tell(self, event: dict[str, Any]) -> None:
        self._theirs.send(json.dumps(event).encode())


class Scene:
    """A cluster that runs, and its actuator. ``unhealthy``: members that do not answer yet, by name."""

    def __init__(self, folder: Path, config: ClusterConfig) -> None:
        self.state_file = folder / "state.json"
        self.log: list[str] = []
        self.unhealthy: set[str] = set()
        self.made = Supervisor(
            config,
            free_port=itertools.count(20_000).__next__,
            sink=lambda name, line: self.log.append(line),
            environment={},
            state_file=self.state_file,
        )
        self.actuator: Actuator = open_actuator(f"local:{self.state_file}")

    @property
    def forks(self) -> Forks:
        assert isinstance(self.made._children, Forks)
        return self.made._children

    async def is_healthy(self, url: str, http: Any) -> bool:
        return all(member.name not in self.unhealthy for member in self.made.members if member.url == url)

    def states(self) -> dict[str, str]:
        """By name, as the state file has them."""
        return {row["name"]: row["state"] for row in json.loads(self.state_file.read_text())["instances"]}

    async def until(self, states: dict[str, str]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.states() != states:
                await asyncio.sleep(0.005)

    async def send(self, *words: str) -> Any:
        return await asyncio.to_thread(send_command, self.state_file, words)


@contextlib.asynccontextmanager
async def serving(scene: Scene, *, is_ready: bool = True) -> AsyncIterator[None]:
    """``is_ready``: from when all are ready; else from when orders are taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "Children", Forks)
        patch.setattr(supervisor, "is_healthy", scene.is_healthy)
        patch.setattr(supervisor, "HEALTH_INTERVAL_S", 0.005)
        patch.setattr(supervisor, "REMOVAL_DRAIN_S", 0.05)
        run = asyncio.create_task(scene.made.run())
        try:
            async with asyncio.timeout(LIMIT_S):
                while not (scene.made.ready.is_set() if is_ready else socket_path(scene.state_file).exists()):
                    assert not run.done()
                    await asyncio.sleep(0.005)
            yield
        finally:
            scene.made.stop()
            await run


def play(scene: Scene, act: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving(scene):
            await act(scene)

    asyncio.run(run())


def stateless(folder: Path, **options: Any) -> Scene:
    return Scene(folder, ClusterConfig({"stateless": 1, "unified": 1, "prefill": 0}, router="pla", **options))


def test_an_instance_comes_and_goes(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.unhealthy.add("stateless-1")
        first = await scene.actuator.start_instance("stateless", 4)
        assert (first.name, first.kind, first.state, first.plan) == ("stateless-1", "stateless", "starting", 4)
        assert await scene.actuator.start_instance("stateless", 4) == first
        await scene.until({"unified-0": "ready", "stateless-0": "ready", "stateless-1": "starting"})
        scene.unhealthy.clear()
        await scene.until({"unified-0": "ready", "stateless-0": "ready", "stateless-1": "ready"})
        listed = {one.name: (one.state, one.plan) for one in await scene.actuator.list_instances()}
        assert listed == {"unified-0": ("ready", None), "stateless-0": ("ready", None), "stateless-1": ("ready", 4)}
        await scene.actuator.stop_instance("stateless-1")
        await scene.actuator.stop_instance("stateless-1")
        await scene.until({"unified-0": "ready", "stateless-0": "ready"})
        await scene.actuator.stop_instance("stateless-1")
        assert "stateless-1" not in scene.forks.running
        again = await scene.actuator.start_instance("stateless", 4)
        assert (again.name, again.state) == ("stateless-1", "dead"), "a number starts one instance, once"
        assert (await scene.actuator.start_instance("stateless", 5)).name == "stateless-2", "no name is used twice"
        assert json.loads(await scene.send("start", "stateless"))["plan"] is None

    play(stateless(tmp_path), act)


def test_an_added_instance_has_the_arguments_of_its_kind(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.actuator.start_instance("stateless", 1)
        of = scene.forks.arguments
        differing = [pair for pair in zip(of["stateless-0"], of["stateless-1"], strict=True) if pair[0] != pair[1]]
        assert len(differing) == 3, "its ports: HTTP, bootstrap, rendezvous"
        assert of["stateless-1"][-4:-2] == ("--x", "--y")

    play(stateless(tmp_path, common=("--x",), own={"stateless": ("--y",)}), act)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("start decode 2", "no kind 'decode' in this cluster; there are: stateless, unified"),
        ("start prefill 2", "no kind 'prefill' in this cluster"),
        ("start stateless -1", "plan '-1' is no number of a plan; allowed: 0 and above"),
        ("start stateless ²", "plan '²' is no number of a plan"),
        ("start unified 1", "plan 1 has started stateless-1, which is not of kind 'unified'"),
        ("start stateless 9", "3 instances are there; allowed: --most-instances 3"),
        ("start", "unknown command 'start'; known: restart NAME, stop, list, start KIND [PLAN], remove NAME"),
        ("start stateless 1 2", "unknown command 'start stateless 1 2'"),
        ("remove router", "router cannot be removed; allowed: unified-0, stateless-0, stateless-1"),
        ("remove stateless-9", "no instance 'stateless-9'; there are: unified-0"),
        ("remove stateless-01", "no instance 'stateless-01'"),
        ("remove stateless-", "no instance 'stateless-'"),
        ("remove all", "no instance 'all'"),
    ],
)
def test_what_cannot_be_ordered_is_one_line(words: str, line: str, tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.actuator.start_instance("stateless", 1)
        with pytest.raises(ActuatorError) as caught:
            await scene.send(*words.split())
        assert str(caught.value).startswith(f"{words}: {line}")
        assert "\n" not in str(caught.value)
        assert len(scene.forks.running) == 4

    play(stateless(tmp_path, most_instances=3), act)


def test_nobody_comes_or_goes_before_all_are_ready(tmp_path: Path) -> None:
    """A start of the whole is one thing: it fails if a member fails."""
    scene = stateless(tmp_path)
    scene.unhealthy.add("unified-0")

    async def run() -> None:
        async with serving(scene, is_ready=False):
            for words in (["start", "stateless"], ["remove", "stateless-0"]):
                with pytest.raises(ActuatorError, match="the cluster is starting; members come and go once all are"):
                    await scene.send(*words)
            assert len(await scene.actuator.list_instances()) == 2
            scene.unhealthy.clear()
            await scene.until({"unified-0": "ready", "stateless-0": "ready"})

    asyncio.run(run())


def test_an_added_instance_that_fails_does_not_end_the_cluster(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.unhealthy.add("stateless-1")
        await scene.actuator.start_instance("stateless", 1)
        scene.forks.end("stateless-1", 3)
        await scene.until({"unified-0": "ready", "stateless-0": "ready", "stateless-1": "dead"})
        restart = f"pla-sglang cluster --restart stateless-1 --state-file {scene.state_file}"
        said = [line for line in scene.log if "stateless-1" in line]
        assert said[1:] == [f"stateless-1 ended with status 3; restart: {restart}"]
        assert (await scene.actuator.start_instance("stateless", 2)).name == "stateless-2", "it does not count"
        await scene.actuator.stop_instance("stateless-1")
        await scene.until({"unified-0": "ready", "stateless-0": "ready", "stateless-2": "ready"})

    play(stateless(tmp_path, most_instances=3), act)


@pytest.mark.parametrize(
    ("name", "ignored", "sent"),
    [
        ("stateless-0", set(), [FIRST]),  # its HTTP process alone, which finishes what it has
        ("stateless-0", {FIRST}, [FIRST, KILL]),
        ("unified-0", set(), [GROUP]),
        ("stateless-1", set(), [GROUP]),  # it starts, and has nothing to finish
    ],
)
def test_a_stateless_instance_that_is_removed_drains(
    name: str, ignored: set[tuple[str, int]], sent: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Also where none drains before a restart (``drain_s`` of 0)."""

    async def act(scene: Scene) -> None:
        scene.unhealthy.add("stateless-1")
        await scene.actuator.start_instance("stateless", 1)
        scene.forks.ignored |= ignored
        assert json.loads(await scene.send("remove", name))["state"] == "stopping"
        await scene.until({key: state for key, state in scene.states().items() if key != name})
        assert [of for who, *of in scene.forks.sent if who == name] == [list(one) for one in sent]
        scene.forks.ignored.clear()

    play(stateless(tmp_path), act)


def test_who_is_removed_is_not_restarted(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.forks.ignored |= {FIRST, GROUP}
        restart = asyncio.create_task(scene.send("restart", "stateless-0"))
        while not scene.forks.sent:
            await asyncio.sleep(0.005)
        await scene.actuator.stop_instance("stateless-0")
        scene.forks.kill_group("stateless-0", signal.SIGKILL)
        with pytest.raises(ActuatorError, match="restart stateless-0: stateless-0 was removed meanwhile"):
            await restart
        await scene.until({"unified-0": "ready"})
        assert "stateless-0" not in scene.forks.running
        scene.forks.ignored.clear()

    play(stateless(tmp_path), act)


def test_an_empty_cluster_without_router_can_grow_again(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.actuator.stop_instance("unified-0")
        await scene.until({})
        assert json.loads(scene.state_file.read_text())["url"] is None
        await scene.actuator.start_instance("unified", 1)
        await scene.until({"unified-1": "ready"})

    play(Scene(tmp_path, ClusterConfig({"unified": 1}, router="none")), act)


@pytest.mark.parametrize(
    ("printed", "why"),
    [("Decode batch, #running-req: 8", ""), ("RuntimeError: no memory", ": RuntimeError: no memory")],
)
def test_a_signal_that_ends_an_instance_is_named(printed: str, why: str, tmp_path: Path) -> None:
    """Its last line says nothing of it, but an error may have led to the signal."""

    async def act(scene: Scene) -> None:
        scene.made._on_line("unified-0", printed)
        scene.forks.end("unified-0", -signal.SIGKILL)
        await scene.until({"unified-0": "dead", "stateless-0": "ready"})
        said = next(line for line in scene.log if "killed" in line)
        assert said.startswith(
            f"unified-0 was killed by SIGKILL{why}; restart: pla-sglang cluster --restart unified-0 "
        )

    play(stateless(tmp_path), act)


def test_a_stop_is_answered_when_all_has_ended(tmp_path: Path) -> None:
    scene = stateless(tmp_path)

    async def run() -> None:
        async with serving(scene):
            assert await scene.send("stop") == "ok"
            assert scene.log[-1] == "stopped, nothing left running"
            assert not scene.state_file.exists()

    asyncio.run(run())
