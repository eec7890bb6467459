"""Starts a cluster and watches it; restarts, adds and removes members on request; leaves no process behind.

One event loop, one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from pla_sglang.common.connection_errors import describe_connection_error
from pla_sglang.common.errors import PlaError
from pla_sglang.fleet.actuators.cluster_socket import ERROR, TEMPORARY, encode_instance, socket_path
from pla_sglang.fleet.cluster.children import Children, ClusterError
from pla_sglang.fleet.cluster.instance import ROUTER, Instance, State
from pla_sglang.fleet.cluster.lean import serves_chain
from pla_sglang.fleet.cluster.logs import LastErrors, LineReader
from pla_sglang.fleet.cluster.memory import tree_pss_bytes
from pla_sglang.fleet.cluster.spec import (
    ROUTER_MODULES,
    WHOLE,
    ClusterConfig,
    at_new_bootstrap_port,
    instances,
    new_instance,
    router_arguments,
    with_own_rendezvous,
)
from pla_sglang.launch_server import request_line

HEALTH_INTERVAL_S = 0.25
HEALTH_TIMEOUT_S = 10.0
STOP_GRACE_S = 3.0
ANSWER_S = 1.0  # at the end, for those who have ordered it
# A stateless instance that is removed has it to finish what it does. SGLang looks every 5 s whether it may end, then
# waits for its scheduler, so that an idle one needs some seconds too.
REMOVAL_DRAIN_S = 60.0
# SGLang's decode instances keep the addresses of a prefill instance until two of their heartbeats, one in 5 s, have
# found it dead. One that comes back sooner at the same bootstrap port is never paired again: they go on writing to
# ports that nobody listens on. Our router asks instances for that port; SGLang's has it on its command line.
FORGOTTEN_S = 12.0
# What makes the host's device a CPU, before anything asks; and one thread of torch a process, as engines share cores.
ENVIRONMENT = {
    "SGLANG_PLA_PLATFORM": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
CLIENT_KEY = ("PLA_WORKER_API_KEY", "PLA_ROUTER_API_KEY")  # variables with the key of clients: of engines, of a router
_KEY_FLAGS = frozenset({"--api-key", "--api-key-file"})
CHAIN_ANSWERS = "the chain model answers with made-up words: they are there to be checked, not to be read"
KNOWN_COMMANDS = "restart NAME, stop, list, start KIND [PLAN], remove NAME"
Sink = Callable[[str, str], None]


class Supervisor:
    """One cluster. ``run`` is its whole life; ``stop`` ends it from a signal handler or another task.

    Args:
        drain_s: time that a stateless instance has to finish, or hand over, what it does before it is restarted; 0: as
            any other, none.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        free_port: Callable[[], int],
        sink: Sink,
        environment: dict[str, str],
        state_file: Path | None = None,
        drain_s: float = 0.0,
    ) -> None:
        self.config = config
        self._drain_s = drain_s
        self._free_port = free_port
        self.engines = [Instance(spec.name, spec.url, spec) for spec in instances(config, free_port)]
        self._given = Counter(config.counts)  # names by kind, those of members that are gone included
        self._by_plan: dict[int, Instance] = {}  # likewise: a number starts one instance, once
        self._starts: dict[str, asyncio.Task[None]] = {}  # added members until they are ready, by name
        self._removals: dict[str, asyncio.Task[None]] = {}  # members on their way out, by name
        self.router = self._make_router()
        self.ready = asyncio.Event()
        self._sink = sink
        self._http: aiohttp.ClientSession | None = None  # for questions to members
        self._errors = LastErrors()
        self._environment = ENVIRONMENT | environment
        self._state_file = state_file
        self._stopping = False
        self._ended = asyncio.Event()  # nothing is left running
        self._orders: set[asyncio.Task[Any]] = set()  # of the control socket, under way
        self._changed = asyncio.Event()
        self._children: Children | None = None
        self._readers: list[LineReader] = []
        self._failure: str | None = None
        self._forked = False  # the zygote can fork
        self._measured: dict[str, Any] = {}  # what the state file says about the start, once all are ready
        self._started_s = 0.0

    def _make_router(self) -> Instance | None:
        if self.config.router == "none":
            return None
        port = self.config.router_port or self._free_port()
        specs = [engine.spec for engine in self.engines if engine.spec is not None]
        command = router_arguments(self.config, specs, port, self._free_port())
        return Instance(ROUTER, f"{self.config.tls.scheme}://{self.config.host}:{port}", command=tuple(command))

    @property
    def members(self) -> list[Instance]:
        """Engines first: the router starts once they answer."""
        return [*self.engines, *([self.router] if self.router is not None else [])]

    @property
    def listed(self) -> list[Instance]:
        """Engines, as others are told of them: who was removed and has ended is gone, not dead."""
        return [one for one in self.engines if one.name not in self._removals or one.state is not State.DEAD]

    def stop(self) -> None:
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Start everything, serve until ``stop``, end everything.

        Raises:
            ClusterError: something ended, or was not ready in time, during the start; or the zygote ended.
        """
        self._started_s = time.monotonic()
        loop = asyncio.get_running_loop()
        tls = self.config.tls.client_context()
        connector = None if tls is None else aiohttp.TCPConnector(ssl=tls)
        self._http = aiohttp.ClientSession(connector=connector, trust_env=False)
        self._children = children = Children(self._environment)
        self._readers.append(LineReader("zygote", os.dup(children.output), self._sink))
        loop.add_reader(children.fileno(), self._on_event)
        control = await self._open_control()
        try:
            await self._start_members()
            self.ready.set()
            await self._until_stopped()
        finally:
            loop.remove_reader(children.fileno())
            if control is not None:
                control.close()
            for task in (*self._starts.values(), *self._removals.values()):
                task.cancel()
            await self._http.close()
            await self._end_members(children)
            self._ended.set()
            await self._answer_stops()

    async def _answer_stops(self) -> None:
        """Those who have ordered the end hear of it; any other order has come to nothing."""
        if self._orders:
            _, others = await asyncio.wait(self._orders, timeout=ANSWER_S)
            for order in others:
                order.cancel()

    # -- start -----------------------------------------------------------------------------------------------------

    async def _start_members(self) -> None:
        self._write_state()
        self._log_line(f"importing SGLang once, for {len(self.engines)} engine(s)")
        await self._wait_for(lambda: self._forked, "the fork server")
        for engine in self.engines:
            self._launch_member(engine)
        await asyncio.gather(*map(self._wait_ready, self.engines))
        if self.router is not None:
            self._launch_member(self.router)
            await self._wait_ready(self.router)
        pss_bytes = tree_pss_bytes(os.getpid())
        self._log_line(
            f"all {len(self.members)} ready after {self._elapsed_s():.1f} s, memory (PSS) {pss_bytes / 2**30:.2f} GiB"
        )
        self._log_request()
        self._measured = {"ready_s": round(self._elapsed_s(), 3), "pss_bytes": pss_bytes}
        self._write_state()

    def _log_request(self) -> None:
        """A request to try, where anybody answers whole ones."""
        front = self.router or next((engine for engine in self.engines if engine.kind in WHOLE), None)
        if front is None:
            return
        arguments = [*self.config.common, *self.config.router_extra]
        has_key = any(word.split("=")[0] in _KEY_FLAGS for word in arguments) or bool(
            self._environment.get(CLIENT_KEY[self.router is not None])
        )
        url = front.url.replace("//0.0.0.0:", "//127.0.0.1:")
        self._log_line(f"try: {request_line(url, has_key=has_key, ca=self.config.tls.ca)}")
        if any(engine.spec is not None and serves_chain(engine.spec.argv) for engine in self.engines):
            self._log_line(CHAIN_ANSWERS)

    async def _wait_for(self, done: Callable[[], bool], what: str) -> None:
        while not done():
            self._changed.clear()
            self._check_start(what)
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(HEALTH_INTERVAL_S):
                    await self._changed.wait()

    async def _wait_ready(self, member: Instance) -> None:
        assert self._http is not None
        while not await is_healthy(member.url, self._http):
            self._check_start(member.name)
            if member.state is State.DEAD:
                raise ClusterError(self._describe_end(member, " while starting"))
            await asyncio.sleep(HEALTH_INTERVAL_S)
        if member.state is State.STARTING:
            member.move_to(State.READY)
        count = sum(member.state is State.READY for member in self.members)
        taken_s = time.monotonic() - member.launched_s
        self._log_line(f"{count}/{len(self.members)} ready: {member.name} at {member.url} (after {taken_s:.1f} s)")
        self._write_state()

    def _check_start(self, what: str) -> None:
        if self._failure is not None:
            raise ClusterError(self._failure)
        if self._stopping:
            raise asyncio.CancelledError
        if not self.ready.is_set() and self._elapsed_s() > self.config.start_timeout_s:
            raise ClusterError(f"{what} is not ready {self.config.start_timeout_s:g} s after the start")

    def _launch_member(self, member: Instance) -> None:
        assert self._children is not None
        reading, writing = os.pipe()
        try:
            if member.spec is not None:
                argv, module = with_own_rendezvous(member.spec.argv, self._free_port), None
            else:
                argv, module = member.command, ROUTER_MODULES[self.config.router]
            self._children.fork_process(member.name, argv, writing, module=module)
        finally:
            os.close(writing)
        member.launched_s = time.monotonic()
        self._errors.forget_member(member.name)
        self._readers.append(LineReader(member.name, reading, self._on_line))

    def _on_line(self, name: str, line: str) -> None:
        self._errors.note_line(name, line)
        self._sink(name, line)

    # -- life ------------------------------------------------------------------------------------------------------

    async def _until_stopped(self) -> None:
        while True:
            self._changed.clear()
            if self._stopping:
                return
            if self._failure is not None:
                raise ClusterError(self._failure)
            await self._changed.wait()

    def _on_event(self) -> None:
        assert self._children is not None
        try:
            event = self._children.read_event()
        except (ClusterError, OSError) as error:
            asyncio.get_running_loop().remove_reader(self._children.fileno())
            self._failure = str(error)
            self._changed.set()
            return
        if event["event"] == "ready":
            self._forked = True
        else:
            member = next(member for member in self.members if member.name == event["name"])
            if event["event"] == "started":
                member.pid = event["pid"]
            elif event["pid"] == member.pid:
                self._on_exit(member, event["status"])
        self._changed.set()
        self._write_state()

    def _on_exit(self, member: Instance, status: int) -> None:
        expected = member.state is State.STOPPING
        member.move_to(State.DEAD)
        member.exit_status, member.pid, member.ended_s = status, None, time.monotonic()
        if not expected and not self._stopping:
            self._log_line(f"{self._describe_end(member)}{self._describe_restart(member)}")

    def _describe_end(self, member: Instance, when: str = "") -> str:
        """How it ended, and behind a colon its last error; what it has printed may still be on its way."""
        for reader in self._readers:
            if reader.name == member.name:
                reader.read_rest()
        status = member.exit_status or 0
        how = f"was killed by {_name_signal(-status)}" if status < 0 else f"ended with status {status}"
        return f"{member.name} {how}{when}{self._errors.describe_error(member.name, errors_only=status < 0)}"

    def _describe_restart(self, member: Instance) -> str:
        """The command, where there is a state file by which it finds this cluster."""
        if self._state_file is None or not self.ready.is_set():
            return ""
        command = ["pla-sglang", "cluster", "--restart", member.name, "--state-file", str(self._state_file)]
        return f"; restart: {shlex.join(command)}"

    async def restart_member(self, name: str) -> None:
        """End one member and start it again on the same port; returns once it is ready.

        A prefill instance before decode instances gets a new bootstrap port where our router asks for it; else it stays
        down for ``FORGOTTEN_S``. A stateless one may drain first. Raises ClusterError.
        """
        member = self._find_member(name)
        await self._await_end(member, self._order_end(member, self._drain_s))
        await asyncio.sleep(max(0.0, self.may_start_s(member) - time.monotonic()))
        self._check_start(name)
        if name in self._removals or member not in self.members:
            raise ClusterError(f"{name} was removed meanwhile")
        if member.state is State.DEAD:  # else somebody else has ordered the same meanwhile
            member.restarts += 1
            if member.spec is not None and self._must_be_forgotten(member) and self.config.router == "pla":
                member.spec = at_new_bootstrap_port(member.spec, self.config, self._free_port())
            member.move_to(State.STARTING)
            self._launch_member(member)
        await self._wait_ready(member)

    def _order_end(self, member: Instance, drain_s: float) -> float:
        """A stateless one that is ready has ``drain_s`` to finish what it does; 0: as any other, no time.

        Returns when it is to be killed, by ``time.monotonic``.
        """
        assert self._children is not None
        if (start := self._starts.pop(member.name, None)) is not None:
            start.cancel()
        if member.state not in (State.STARTING, State.READY):
            return math.inf  # it has ended, or whoever has ordered its end kills it
        drains = drain_s > 0 and member.state is State.READY and member.kind == "stateless"
        member.move_to(State.STOPPING)
        # The process that serves HTTP waits for its requests; its scheduler would end at once.
        (self._children.kill_first if drains else self._children.kill_group)(member.name, signal.SIGTERM)
        return time.monotonic() + (drain_s if drains else STOP_GRACE_S)

    async def _await_end(self, member: Instance, kill_s: float) -> None:
        assert self._children is not None
        while member.state is State.STOPPING:
            if time.monotonic() >= kill_s:
                self._children.kill_group(member.name, signal.SIGKILL)
                kill_s = math.inf
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def may_start_s(self, member: Instance) -> float:
        """When a member that has ended may be started again, by ``time.monotonic``."""
        if member.ended_s is None or not self._must_be_forgotten(member) or self.config.router == "pla":
            return 0.0
        return member.ended_s + FORGOTTEN_S

    def _must_be_forgotten(self, member: Instance) -> bool:
        """True if decode instances know addresses of ``member``."""
        return member.kind in ("prefill", "stateless") and any(engine.kind == "decode" for engine in self.engines)

    # -- members that come and go ----------------------------------------------------------------------------------

    def add_member(self, kind: str, plan: int | None) -> Instance:
        """Start one more instance of a kind that is there; returns at once. Its failure does not end the cluster.

        The same ``plan`` again gives the same instance, starting or not. Raises PlaError.
        """
        known = None if plan is None else self._by_plan.get(plan)
        if known is not None:
            if known.kind != kind:
                raise ClusterError(f"plan {plan} has started {known.name}, which is not of kind {kind!r}")
            return known
        self._check_addition(kind)
        spec = new_instance(self.config, kind, self._given[kind], self._free_port)
        member = Instance(spec.name, spec.url, spec, plan=plan)
        self._launch_member(member)
        self._given[kind] += 1
        self.engines.append(member)
        if plan is not None:
            self._by_plan[plan] = member
        self._starts[member.name] = asyncio.create_task(self._await_added(member))
        self._log_line(f"{member.name} is added at {member.url}" + (f", plan {plan}" if plan is not None else ""))
        self._write_state()
        return member

    def _check_addition(self, kind: str) -> None:
        kinds = [name for name, count in self.config.counts.items() if count > 0]
        if kind not in kinds:
            raise ClusterError(f"no kind {kind!r} in this cluster; there are: {', '.join(kinds)}")
        self._check_ready()
        alive = sum(engine.state is not State.DEAD for engine in self.engines)
        if alive >= self.config.most_instances:
            raise ClusterError(f"{alive} instances are there; allowed: --most-instances {self.config.most_instances}")

    async def _await_added(self, member: Instance) -> None:
        with contextlib.suppress(ClusterError):  # its end is in the log
            await self._wait_ready(member)
        self._starts.pop(member.name, None)

    def remove_member(self, name: str) -> Instance | None:
        """End an instance and forget it; returns at once. None: it is gone by now.

        A stateless one has ``REMOVAL_DRAIN_S`` to finish. Raises ClusterError for what never was an instance.
        """
        if self._is_gone(name):
            return None
        member = self._find_member(name)
        if member is self.router:
            raise ClusterError(f"{name} cannot be removed; allowed: {', '.join(one.name for one in self.engines)}")
        self._check_ready()
        if name not in self._removals:
            kill_s = self._order_end(member, REMOVAL_DRAIN_S)
            self._removals[name] = asyncio.create_task(self._forget_member(member, kill_s))
            self._log_line(f"{name} is removed")
            self._write_state()
        return member

    async def _forget_member(self, member: Instance, kill_s: float) -> None:
        """Once it has ended."""
        await self._await_end(member, kill_s)
        for reader in [reader for reader in self._readers if reader.name == member.name]:
            reader.read_rest()
            reader.close_reader()
            self._readers.remove(reader)
        self._errors.forget_member(member.name)
        self.engines.remove(member)
        del self._removals[member.name]
        self._log_line(f"{member.name} is gone")
        self._write_state()

    def _is_gone(self, name: str) -> bool:
        """True if an instance had this name: they count on within their kind."""
        kind, _, index = name.rpartition("-")
        given = index.isdecimal() and name == f"{kind}-{int(index)}" and int(index) < self._given[kind]
        return given and all(engine.name != name for engine in self.engines)

    def _find_member(self, name: str) -> Instance:
        for member in self.members:
            if member.name == name:
                return member
        raise ClusterError(f"no instance {name!r}; there are: {', '.join(member.name for member in self.members)}")

    def _check_ready(self) -> None:
        if not self.ready.is_set():
            raise ClusterError("the cluster is starting; members come and go once all are ready")

    # -- control and state -----------------------------------------------------------------------------------------

    async def _open_control(self) -> asyncio.AbstractServer | None:
        if self._state_file is None:
            return None
        path = socket_path(self._state_file)
        path.unlink(missing_ok=True)
        return await asyncio.start_unix_server(self._on_control, path=str(path))

    async def _on_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One line in, one line out; see ``cluster_socket``."""
        words = (await reader.readline()).decode(errors="replace").split()
        order = asyncio.current_task()
        assert order is not None
        self._orders.add(order)
        try:
            answer = await self._obey(words)
        except PlaError as error:
            answer = f"{ERROR}{error}"
        finally:
            self._orders.discard(order)
        writer.write(answer.encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async def _obey(self, words: Sequence[str]) -> str:
        """The answer to a command. Raises PlaError."""
        match words:
            case ["restart", name]:
                await self.restart_member(name)
                return "ok"
            case ["stop"]:
                self.stop()
                await self._ended.wait()
                return "ok"
            case ["list"]:
                return json.dumps([encode_instance(engine.to_started()) for engine in self.listed])
            case ["start", kind, *plan] if len(plan) <= 1:
                added = self.add_member(kind, _read_plan(plan[0]) if plan else None)
                return json.dumps(encode_instance(added.to_started()))
            case ["remove", name]:
                removed = self.remove_member(name)
                return json.dumps(None if removed is None else encode_instance(removed.to_started()))
        raise ClusterError(f"unknown command {' '.join(words)!r}; known: {KNOWN_COMMANDS}")

    def _write_state(self) -> None:
        if self._state_file is None:
            return
        state = {
            "pid": os.getpid(),
            "ready": bool(self._measured),
            "url": self.router.url if self.router is not None else next((one.url for one in self.listed), None),
            "router": None if self.router is None else self.router.to_dict() | {"policy": self.config.policy},
            "instances": [engine.to_dict() for engine in self.listed],
        }
        write_state_file(self._state_file, self._measured | state)

    # -- end -------------------------------------------------------------------------------------------------------

    async def _end_members(self, children: Children) -> None:
        for member in reversed(self.members):
            if member.pid is not None and self._failure is None:
                with contextlib.suppress(OSError):
                    children.kill_group(member.name, signal.SIGTERM)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(children.close_zygote)
        for reader in self._readers:
            reader.close_reader()
        if self._state_file is not None:
            self._state_file.unlink(missing_ok=True)
            socket_path(self._state_file).unlink(missing_ok=True)
        self._log_line("stopped, nothing left running")

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _log_line(self, text: str) -> None:
        self._sink("cluster", text)


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _read_plan(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ClusterError(f"plan {text!r} is no number of a plan; allowed: 0 and above")
    return int(text)


def write_state_file(path: Path, state: dict[str, Any]) -> None:
    """As a whole: who reads sees the old one or the new one."""
    temporary = path.with_suffix(TEMPORARY)
    temporary.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


async def is_healthy(url: str, http: aiohttp.ClientSession) -> bool:
    """Raises ClusterError for a certificate that will not do: waiting would not mend it."""
    try:
        async with http.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)) as answer:
            return answer.status == 200
    except aiohttp.ClientConnectorCertificateError as error:
        raise ClusterError(f"{url}: {describe_connection_error(error)}; see --ssl-certfile, --ssl-ca-certs") from None
    except (TimeoutError, aiohttp.ClientError, OSError):
        return False
