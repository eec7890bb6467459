"""Actuators: what names one, what a cluster may answer, and the lease, of which one process at a time has it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.actuators import open_actuator
from pla_sglang.fleet.actuators.cluster_socket import decode_instance, encode_instance, lease_path, socket_path
from pla_sglang.fleet.actuators.interface import Actuator, ActuatorError, StartedInstance
from pla_sglang.fleet.actuators.lease import FileLease

ONE = StartedInstance("stateless-1", "http://127.0.0.1:20000", "stateless", "starting", 7)
ROW = '{"name": "stateless-1", "url": "http://127.0.0.1:20000", "kind": "stateless", "state": "starting", "plan": 7}'
CHILD = """
import sys
from pathlib import Path
from pla_sglang.fleet.actuators.lease import FileLease
lease = FileLease(Path(sys.argv[1]))
print(lease.acquire(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("slurm:auto", "--actuator 'slurm:auto' is not known; allowed: local:STATE_FILE"),
        ("ray:auto", "ray:auto/ names no fleet in Ray; allowed: ray:HOST:PORT/NAME or ray:auto/NAME"),
        ("ray:/pla", "names no fleet in Ray"),
        ("ray:auto/a b", "ray:auto/a b names no fleet in Ray"),
        ("local", "--actuator 'local' is not known"),
        ("local:", "--actuator 'local:' is not known"),
        ("local:/nowhere/at/all/state.json", "there is no folder /nowhere/at/all; allowed: a path in one that exists"),
        ("local:{folder}", "is a folder; allowed: the name of a file"),
        ("local:{folder}/state.sock", "has the name of a file beside a state file; allowed: such as cluster.json"),
    ],
)
def test_what_names_no_actuator_is_refused(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_actuator(text.replace("{folder}", str(tmp_path)))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fleet_in_ray_needs_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        open_actuator("ray:auto/pla")
    assert "needs Ray, which is not installed; allowed after: pip install 'pla-sglang[ray]'" in str(caught.value)


def ask(folder: Path, answer: str, order: Callable[[Actuator], Any]) -> tuple[Any, list[str]]:
    """What an order gives to whom a cluster answers ``answer``; and the commands that the cluster got."""
    state_file = folder / "state.json"
    commands: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands.append((await reader.readline()).decode())
        writer.write(answer.encode())
        writer.close()

    async def run() -> Any:
        async with await asyncio.start_unix_server(serve, path=str(socket_path(state_file))):
            return await order(open_actuator(f"local:{state_file}"))

    return asyncio.run(run()), commands


def test_orders_are_lines(tmp_path: Path) -> None:
    assert ask(tmp_path, ROW + "\n", lambda one: one.start_instance("stateless", 7)) == (ONE, ["start stateless 7\n"])
    assert ask(tmp_path, f"[{ROW}]\n", lambda one: one.list_instances()) == ([ONE], ["list\n"])
    assert ask(tmp_path, "null\n", lambda one: one.stop_instance("stateless-1")) == (None, ["remove stateless-1\n"])


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ("error: 16 instances are there\n", "start stateless 7: 16 instances are there"),
        ("", "start stateless 7: the cluster at {folder}/state.sock ended before its answer"),
        ("ok\n", "start stateless 7: not an answer of a cluster: 'ok'"),
        ("[]\n", "not an answer of a cluster: [] is no instance"),
        ("{}\n", "not an answer of a cluster: {} is no instance"),
        (ROW.replace("7}", '"7"}') + "\n", 'plan": "7"} is no instance'),
        ("\udcff\n", "start stateless 7: no cluster answers at"),
    ],
)
def test_a_refusal_or_nonsense_is_one_line(answer: str, line: str, tmp_path: Path) -> None:
    class Raw(str):
        def encode(self, *_: Any) -> bytes:  # also what is no text
            return super().encode("utf-8", "surrogateescape")

    with pytest.raises(ActuatorError) as caught:
        ask(tmp_path, Raw(answer), lambda one: one.start_instance("stateless", 7))
    assert line.replace("{folder}", str(tmp_path)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "a\nstop", " a"])
def test_a_name_is_one_word(name: str, tmp_path: Path) -> None:
    with pytest.raises(ActuatorError, match="cannot be a name; allowed: one word"):
        asyncio.run(open_actuator(f"local:{tmp_path}/state.json").stop_instance(name))


def test_a_cluster_that_is_away_is_said(tmp_path: Path) -> None:
    with pytest.raises(ActuatorError, match=r"list: no cluster answers at .*/state.sock: "):
        asyncio.run(open_actuator(f"local:{tmp_path}/state.json").list_instances())


def test_instances_travel_whole_and_may_have_more_fields() -> None:
    by_hand = StartedInstance("unified-0", "http://h:1", "unified", "ready", None)
    for instance in (ONE, by_hand):
        assert decode_instance(encode_instance(instance) | {"region": "here"}) == instance


def test_one_lease_of_two(tmp_path: Path) -> None:
    first, second = (FileLease(tmp_path / "state.planner") for _ in range(2))
    assert first.owner == ""
    assert first.acquire()
    assert first.acquire(), "it has it already"
    assert not second.acquire()
    assert second.owner.startswith(f"{os.getpid()} ")
    second.release()  # has none
    assert not second.acquire()
    first.release()
    assert first.owner == ""
    assert second.acquire()


def test_the_lease_of_a_process_that_is_killed_is_free(tmp_path: Path) -> None:
    path = tmp_path / "state.planner"
    ours = FileLease(path)
    command = [sys.executable, "-c", CHILD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        assert not ours.acquire()
        assert ours.owner.startswith(f"{child.pid} ")
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert ours.acquire()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.communicate("")[0] == "False\n"


def test_a_lease_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ActuatorError, match=r"lease of the planner: .*: No such file or directory"):
        FileLease(tmp_path / "none" / "state.planner").acquire()


def test_an_actuator_that_is_closed_gives_its_lease_back(tmp_path: Path) -> None:
    first, second = (open_actuator(f"local:{tmp_path}/state.json") for _ in range(2))
    assert first.lease.acquire()
    assert lease_path(tmp_path / "state.json").exists()
    assert not second.lease.acquire()
    asyncio.run(first.close())
    assert second.lease.acquire()
