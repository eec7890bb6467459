"""What a cluster is made of: arguments, ports, commands, states, log lines. No engine is started here."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from pla_sglang.common.cli import EXIT_BAD_ARGUMENTS
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.actuators.cluster_socket import send_command
from pla_sglang.fleet.actuators.interface import ActuatorError
from pla_sglang.fleet.cluster.children import Children
from pla_sglang.fleet.cluster.instance import Instance, State
from pla_sglang.fleet.cluster.lean import DISABLED_ENV, lean_environment
from pla_sglang.fleet.cluster.logs import LONGEST_LINE, LineReader
from pla_sglang.fleet.cluster.memory import pss_bytes, tree_pss_bytes
from pla_sglang.fleet.cluster.spec import (
    ClusterConfig,
    at_new_bootstrap_port,
    instances,
    router_arguments,
    with_own_rendezvous,
)
from pla_sglang.fleet.cluster.supervisor import FORGOTTEN_S, Supervisor
from pla_sglang.fleet.cluster.zygote import Zygote
from pla_sglang.launch_cluster import EXIT_FAILED, main, read_config
from pla_sglang.sim.chain import model_path


def ports() -> Any:
    return itertools.count(20_000).__next__


def test_instances_get_names_ports_and_roles() -> None:
    config = ClusterConfig({"prefill": 2, "decode": 1}, common=("--x",), own={"decode": ("--y", "1")})
    first, second, decode = instances(config, ports())
    assert [one.name for one in (first, second, decode)] == ["prefill-0", "prefill-1", "decode-0"]
    assert (first.port, first.bootstrap_port, second.port) == (20_000, 20_001, 20_002)
    assert first.argv[4:] == (
        "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl",
        "--disaggregation-bootstrap-port", "20001", "--x",
    )  # fmt: skip
    assert decode.bootstrap_port is None
    assert decode.argv[-3:] == ("--x", "--y", "1")
    assert decode.url == "http://127.0.0.1:20004"


def test_routers_are_told_who_does_what() -> None:
    pair = ClusterConfig({"prefill": 1, "decode": 1}, policy="bucket", router_extra=("--z",))
    command = router_arguments(pair, instances(pair, ports()), 30_000, 30_001)
    assert command[:4] == ["--host", "127.0.0.1", "--port", "30000"]
    assert command[command.index("--prefill-policy") + 1] == "bucket"
    assert command[command.index("--policy") + 1] == "round_robin"
    assert command[-7:] == [
        "--pd-disaggregation",
        *("--prefill", "http://127.0.0.1:20000", "20001"),
        *("--decode", "http://127.0.0.1:20002"),
        "--z",
    ]
    unified = ClusterConfig({"unified": 2}, router="mini-lb")
    command = router_arguments(unified, instances(unified, ports()), 30_000, 30_001)
    assert "--mini-lb" in command
    assert command[-3:] == ["--worker-urls", "http://127.0.0.1:20000", "http://127.0.0.1:20001"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"counts": {"unified": 0}}, "a cluster needs an instance"),
        ({"counts": {"unified": -1}}, "--unified -1 is out of range"),
        ({"counts": {"unified": 65}}, "--unified 65 is out of range; allowed: 0 to 64"),
        ({"counts": {"fast": 1}}, "kind 'fast' is not known"),
        ({"counts": {"prefill": 1}}, "--prefill 1 --decode 0: a router needs at least one of each"),
        ({"counts": {"unified": 1, "prefill": 1, "decode": 1}}, "cannot mix unified instances with others"),
        ({"counts": {"unified": 1}, "router": "nginx"}, "--router 'nginx' is not known"),
        ({"counts": {"unified": 1}, "policy": "best"}, "--policy 'best' is not known; allowed: random"),
        ({"counts": {"unified": 1}, "common": ("--port=1",)}, "--port=1 is set for each instance"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**arguments)


def test_a_router_is_optional() -> None:
    assert len(instances(ClusterConfig({"prefill": 1}, router="none"), ports())) == 1


def test_unknown_arguments_go_to_the_engines() -> None:
    config = read_config(
        ["--unified", "1", "--unified-args", "--a 'b c'", "--pla-emulate", "linear", "--log-level", "warning"]
    ).config.to_cluster()
    assert config.own["unified"] == ("--a", "b c")
    assert config.common[-4:] == ("--pla-emulate", "linear", "--log-level", "warning")
    assert str(model_path()) in config.common


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--unified", "1", "--pla-emulate", "gpu9"], EXIT_BAD_ARGUMENTS, "unknown profile 'gpu9'; known:"),
        (["--unified", "many"], EXIT_BAD_ARGUMENTS, "--unified 'many' is not a whole number"),
        (["--unified", "1", "--start-timeout-s", "0"], EXIT_BAD_ARGUMENTS, "allowed: above 0 s"),
        ([], EXIT_BAD_ARGUMENTS, "a cluster needs an instance"),
        (["--stop"], EXIT_BAD_ARGUMENTS, "needs --state-file"),
        (["--start-instance", "unified"], EXIT_BAD_ARGUMENTS, "needs --state-file"),
        (["--stop", "--restart", "a"], EXIT_BAD_ARGUMENTS, "--restart: not allowed with argument --stop"),
        (
            ["--restart", "", "--state-file", "/nonexistent/state.json"],
            EXIT_FAILED,
            "'' cannot be a name; allowed: one",
        ),
        (["--restart", "a", "--state-file", "/nonexistent/state.json"], EXIT_FAILED, "restart a: no cluster answers"),
        (["--remove-instance", "a", "--state-file", "/nonexistent/state.json"], EXIT_FAILED, "remove a: no cluster"),
        (["--unified", "1", "--state-file", "state.planner"], EXIT_BAD_ARGUMENTS, "name of a file beside a state file"),
        (["--unified", "1", "--most-instances", "0"], EXIT_BAD_ARGUMENTS, "--most-instances 0 is out of range"),
    ],
)
def test_exit_codes(argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == code
    assert message in capsys.readouterr().err


def test_a_printed_configuration_starts_the_same_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--unified", "2", "--unified-args", "--a 'b c'", "--pla-boundary", "9", "--config", "engine.yaml"]
    with pytest.raises(SystemExit, match="0"):
        read_config([*arguments, "--print-config"])
    file = tmp_path / "cluster.yaml"
    file.write_text(capsys.readouterr().out)
    again = read_config(["--cluster-config", str(file), "--log-level", "warning"]).config.to_cluster()
    assert again.counts["unified"] == 2
    assert again.own["unified"] == ("--a", "b c")
    assert again.common == ("--pla-boundary", "9", "--config", "engine.yaml", "--log-level", "warning")


def test_control_without_a_cluster_says_so(tmp_path: Path) -> None:
    with pytest.raises(ActuatorError, match="stop: no cluster answers"):
        send_command(tmp_path / "state.json", ["stop"])


@pytest.mark.parametrize(
    ("counts", "router", "name", "wait_s"),
    [
        ({"prefill": 1, "decode": 1}, "none", "prefill-0", FORGOTTEN_S),
        ({"prefill": 1, "decode": 1}, "pla", "prefill-0", None),  # it gets a new bootstrap port
        ({"prefill": 1, "decode": 1}, "none", "decode-0", None),
        ({"prefill": 1, "unified": 1}, "none", "prefill-0", None),
        ({"unified": 1}, "none", "unified-0", None),
    ],
)
def test_decode_instances_forget_a_prefill_instance_before_it_comes_back(
    counts: dict[str, int], router: str, name: str, wait_s: float | None
) -> None:
    config = ClusterConfig(counts, router=router)
    made = Supervisor(config, free_port=ports(), sink=lambda *_: None, environment={})
    member = next(one for one in made.members if one.name == name)
    assert made.may_start_s(member) == 0.0, "it has not run yet"
    member.ended_s = 7.0
    assert made.may_start_s(member) == (0.0 if wait_s is None else 7.0 + wait_s)


def test_a_new_bootstrap_port_is_all_that_changes() -> None:
    config = ClusterConfig({"prefill": 1, "decode": 1}, router="pla", common=("--x",), own={"prefill": ("--y", "1")})
    [prefill, _] = instances(config, ports())
    again = at_new_bootstrap_port(prefill, config, 1234)
    assert (again.name, again.url, again.kind, again.bootstrap_port) == (prefill.name, prefill.url, "prefill", 1234)
    assert again.argv == tuple("1234" if part == str(prefill.bootstrap_port) else part for part in prefill.argv)
    assert again.argv != prefill.argv


def test_each_start_has_a_rendezvous_of_its_own() -> None:
    free_port = ports()
    starts = [with_own_rendezvous(("--port", "1"), free_port) for _ in range(2)]
    assert starts == [("--port", "1", "--nccl-port", str(port)) for port in (20_000, 20_001)]


@pytest.mark.parametrize(
    "flag",
    ["--dp-size=2", "--dp", "--data-parallel-size", "--nccl-port", "--nccl-port=9", "--dist-init-addr", "--config"],
)
def test_ranks_cannot_share_a_rendezvous_and_an_operator_may_name_one(flag: str) -> None:
    assert with_own_rendezvous((flag, "2"), ports()) == (flag, "2")


def test_one_that_has_ended_must_start_before_it_is_ready() -> None:
    member = Instance("a", "http://x", state=State.DEAD)
    with pytest.raises(ValueError, match="a: dead cannot become ready"):
        member.move_to(State.READY)
    member.move_to(State.STARTING)
    member.move_to(State.READY)


def test_log_lines_are_whole_and_named() -> None:
    seen: list[tuple[str, str]] = []

    async def run() -> None:
        reading, writing = os.pipe()
        reader = LineReader("one", reading, lambda name, line: seen.append((name, line)))
        for part in (b"hel", b"lo\nwor", b"ld\n\nlast"):
            os.write(writing, part)
            await asyncio.sleep(0)
        os.close(writing)
        while len(seen) < 3:
            await asyncio.sleep(0)
        reader.close_reader()

    asyncio.run(run())
    assert seen == [("one", "hello"), ("one", "world"), ("one", "last")]


@pytest.mark.parametrize("unread", [False, True])
def test_a_launcher_that_is_gone_ends_the_fork_server(unread: bool) -> None:
    """The kernel says "connection reset" instead of "end" where the launcher had not read everything."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if unread:
        theirs.send(b"an event")
    ours.close()
    with theirs:
        assert Zygote(theirs)._handle_request() is False


def test_endless_lines_do_not_fill_the_memory() -> None:
    seen: list[str] = []

    async def run() -> None:
        reading, writing = os.pipe()
        reader = LineReader("one", reading, lambda name, line: seen.append(line))
        os.write(writing, b"x" * (LONGEST_LINE + 10))
        while not seen:
            await asyncio.sleep(0)
        reader.close_reader()
        os.close(writing)

    asyncio.run(run())
    assert len(seen[0]) < LONGEST_LINE + 10


def test_only_a_cluster_of_chain_models_leaves_the_others_out() -> None:
    chain_engine = ["--model-path", str(model_path())]
    disabled = lean_environment([chain_engine])[DISABLED_ENV].split(",")
    assert "llama" in disabled
    assert "registry" not in disabled
    assert lean_environment([chain_engine, ["--model-path", "other"]]) == {}


def test_memory_of_this_process_and_of_none() -> None:
    assert pss_bytes(os.getpid()) > 10 << 20
    assert tree_pss_bytes(os.getpid()) >= pss_bytes(os.getpid()) * 0.9
    assert pss_bytes(2**22 + 1) == tree_pss_bytes(2**22 + 1) == 0


class Signals:
    """In place of the processes of a cluster: what they are sent. They end by the first signal that is not ignored."""

    def __init__(self, made: Supervisor, ignored: set[tuple[str, int]]) -> None:
        self.sent: list[tuple[str, int]] = []
        self._made, self._ignored = made, ignored

    def kill_first(self, name: str, number: int) -> None:
        self._send("first", name, number)

    def kill_group(self, name: str, number: int) -> None:
        self._send("group", name, number)

    def _send(self, to: str, name: str, number: int) -> None:
        self.sent.append((to, number))
        if (to, number) not in self._ignored:
            next(one for one in self._made.members if one.name == name).move_to(State.DEAD)


FIRST, GROUP, KILL = ("first", signal.SIGTERM), ("group", signal.SIGTERM), ("group", signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "drain_s", "ignored", "sent"),
    [
        ("stateless", 60.0, set(), [FIRST]),
        ("stateless", 0.3, {FIRST}, [FIRST, KILL]),
        ("stateless", 0.0, set(), [GROUP]),
        ("unified", 60.0, set(), [GROUP]),
    ],
)
def test_a_stateless_instance_may_hand_over_before_it_is_restarted(
    kind: str, drain_s: float, ignored: set[tuple[str, int]], sent: list[tuple[str, int]]
) -> None:
    """Its HTTP process alone is told: its scheduler would end at once."""
    config = ClusterConfig({kind: 1}, router="none")
    made = Supervisor(config, free_port=ports(), sink=lambda *_: None, environment={})
    children = Signals(made, ignored)
    made._children = children  # type: ignore[assignment]
    [member] = made.engines
    member.move_to(State.READY)
    asyncio.run(made._await_end(member, made._order_end(member, drain_s)))
    assert children.sent == sent
    assert member.state is State.DEAD


def test_a_signal_to_the_first_process_or_to_all() -> None:
    sent: list[tuple[str, int, int]] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: sent.append(("first", pid, number)))
        patch.setattr(os, "killpg", lambda pid, number: sent.append(("group", pid, number)))
        zygote = Zygote(theirs)
        zygote._children = {11: "a", 12: "b"}
        children = Children.__new__(Children)
        children._channel = ours
        children.kill_first("a", signal.SIGTERM)
        children.kill_group("b", signal.SIGKILL)
        assert zygote._handle_request()
        assert zygote._handle_request()
    assert sent == [("first", 11, signal.SIGTERM), ("group", 12, signal.SIGKILL)]
