"""A fleet in Ray: an actor for each instance, and one that knows them all. Imported in Ray's processes alone.

    Fleet ─► Instance ─► launch_server       the server ends with its actor, whatever ends that (``tied``)

Ray itself starts an actor again whose process or node has ended, somewhere: the instance comes back with its name at
another address. One that has never been ready in this life does not come back; it stays, as dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.actuators.ray_actuator import LEASE_S, PLACED_S
from pla_sglang.fleet.actuators.ray_names import FLEET, RayFleetName, describe_error, listens
from pla_sglang.fleet.cluster.children import ClusterError
from pla_sglang.fleet.cluster.logs import LastErrors
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.fleet.cluster.spec import ClusterConfig, new_instance, with_own_rendezvous
from pla_sglang.fleet.cluster.supervisor import (
    ENVIRONMENT,
    HEALTH_INTERVAL_S,
    HEALTH_TIMEOUT_S,
    REMOVAL_DRAIN_S,
    STOP_GRACE_S,
)
from pla_sglang.fleet.cluster.tied import ENGINE, start_tied
from pla_sglang.fleet.cluster.zygote import die_with_parent
from pla_sglang.plugin.platform import value_of
from pla_sglang.sim.emulate.arguments import FLAG as EMULATE
from pla_sglang.sim.emulate.arguments import names_model

DESCRIBE_S = 5.0  # for an instance's actor to say how it is
HEAD = "node:__internal_head__"  # a resource that Ray gives to the head's node alone
LIVES = frozenset({"starting", "ready"})


def count_gpus(arguments: Sequence[str]) -> int:
    """How many an instance with these arguments has. Raises ConfigError for one that one node cannot hold."""
    nodes = value_of(arguments, "--nnodes")
    if nodes not in (None, "1"):
        raise ConfigError(f"--nnodes {nodes} is not for --on ray: an instance has GPUs of one node; allowed: 1")
    if "--use-ray" in arguments:
        raise ConfigError("--use-ray is not for --on ray: actors start SGLang's usual processes; leave it out")
    if value_of(arguments, EMULATE) is not None or value_of(arguments, "--device") == "cpu":
        return 0
    if not names_model(arguments):
        return 0  # the demo model
    ranks = 1
    for names in (("--tp-size", "--tensor-parallel-size", "--tp"), ("--pp-size", "--pipeline-parallel-size")):
        ranks *= next((int(text) for text in (value_of(arguments, name) for name in names) if text), 1)
    return ranks


# -- one instance ------------------------------------------------------------------------------------------------------


class Instance:
    """Runs one engine. Calls come one at a time; a thread looks after the process."""

    def __init__(
        self, config: ClusterConfig, kind: str, name: str, plan: int | None, environment: dict[str, str], engine: str
    ) -> None:
        die_with_parent(os.getppid())  # the node's raylet: all its instances end at once, not one after the other
        host = ray.util.get_node_ip_address()
        spec = new_instance(dataclasses.replace(config, host=host), kind, 0, free_port)
        on_cpu = not count_gpus(spec.argv)
        self._named = {"name": name, "url": spec.url, "kind": kind, "plan": plan, "node": host}
        self._state = "starting"
        self._drains = kind == "stateless"
        self._kill_s = math.inf  # when it is to be killed, by time.monotonic
        self._errors = LastErrors()
        self._process = start_tied(
            engine,
            with_own_rendezvous(spec.argv, free_port),
            (ENVIRONMENT if on_cpu else {}) | environment,
            forks_workers=on_cpu and engine == ENGINE,
        )
        threading.Thread(target=self._read_lines, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """What ``list_instances`` gives of it."""
        more = {"pid": self._process.pid, "actor_pid": os.getpid(), "detail": self._errors.describe_error("engine")}
        return self._named | {"state": self._state} | more

    def stop(self) -> None:
        """Order its end; it has a while to finish what it does. Twice does no harm."""
        if self._state not in LIVES:
            if self._state == "dead":
                self._state = "gone"
            return
        drains = self._drains and self._state == "ready"
        self._state = "stopping"
        self._kill_s = time.monotonic() + (REMOVAL_DRAIN_S if drains else STOP_GRACE_S)
        self._process.terminate()

    def _read_lines(self) -> None:
        """Output of the engine into that of this actor, which Ray keeps in a file."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._errors.note_line("engine", text)
            print(text, flush=True)

    def _watch(self) -> None:
        while self._process.poll() is None:
            if self._state == "starting" and _is_healthy(self._named["url"]) and self._state == "starting":
                self._state = "ready"
            if time.monotonic() >= self._kill_s:
                self._kill_group()
            time.sleep(HEALTH_INTERVAL_S)
        self._kill_group()  # what the engine left in its session
        if self._state == "ready":
            os._exit(1)  # Ray starts this actor again
        self._state = "gone" if self._state == "stopping" else "dead"

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _is_healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=HEALTH_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# -- the fleet ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Member:
    """An instance as the fleet knows it.

    Attributes:
        row: what its actor said last; without an address until it has said anything.
        task: follows it, until it is gone.
    """

    handle: Any
    row: dict[str, Any]
    task: asyncio.Task[None] | None = None
    is_stopped: bool = False
    restarts: int = 0
    placed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def describe(self) -> dict[str, Any]:
        return self.row | {"restarts": self.restarts}


class Fleet:
    """The instances of one fleet, by name and by plan, and who may scale it.

    Ray starts it again where it has ended: it finds the instances by their names then. It has forgotten the plans of
    those that are gone, and gives no lease until the last one has run out.
    """

    def __init__(self, config: ClusterConfig, environment: dict[str, str], engine: str) -> None:
        self._config, self._environment, self._engine = config, environment, engine
        self._members: dict[str, Member] = {}
        self._by_plan: dict[int, Member] = {}
        self._owner, self._token, self._until_s = "", "", 0.0
        self._found: asyncio.Task[None] | None = None  # looks for what was there before this life
        self._lives_again = ray.get_runtime_context().was_current_actor_reconstructed  # Ray's head is asked, once
        if self._lives_again:
            self._token, self._until_s = "of the life before", time.monotonic() + LEASE_S

    async def start_instance(self, kind: str, plan: int | None) -> dict[str, Any]:
        """See ``Actuator``. Returns once a node has taken it."""
        await self._recover()
        member = None if plan is None else self._by_plan.get(plan)
        if member is None:
            error = self._find_refusal(kind)
            if error:
                return {"error": error}
            member = self._create_instance(kind, plan)
        elif member.row["kind"] != kind:
            return {"error": f"plan {plan} has started {member.row['name']}, which is not of kind {kind!r}"}
        try:
            await asyncio.wait_for(member.placed.wait(), PLACED_S)
        except TimeoutError:
            self._give_up(member)
            return {"error": f"no node of Ray has taken {member.row['name']} for {PLACED_S:g} s: {self._needs(kind)}"}
        if not member.row["url"]:
            self._give_up(member)
            return {"error": f"{member.row['name']}: {member.row['detail']}"}
        return member.describe()

    async def stop_instance(self, name: str) -> dict[str, Any] | None:
        """See ``Actuator``."""
        await self._recover()
        member = self._members.get(name)
        if member is None:
            known = _read_name(name)[0] in self._config.counts
            return None if known else {"error": f"no instance {name!r}; there are: {', '.join(self._members)}"}
        member.is_stopped = True
        with contextlib.suppress(RayError, TimeoutError):  # its follower ends it then
            await asyncio.wait_for(member.handle.stop.remote(), DESCRIBE_S)
        member.row["state"] = "stopping"
        return member.describe()

    async def list_instances(self, token: str, holder: str, wants_lease: bool) -> dict[str, Any]:
        """See ``Actuator``; and the lease, which is kept by asking for it again."""
        await self._recover()
        leads = self._lease_to(token, holder) if wants_lease else self._take_back(token)
        rows = [member.describe() for member in self._members.values() if member.row["url"]]
        return {"instances": rows, "leads": leads, "owner": self._owner}

    async def end_fleet(self) -> None:
        """All instances, without time to finish."""
        for member in self._members.values():
            member.is_stopped = True
            if member.task is not None:
                member.task.cancel()
            ray.kill(member.handle)
        self._members.clear()

    # -- instances -----------------------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        """In another life than the first: find those that are there."""
        if self._lives_again:
            self._found = self._found or asyncio.create_task(self._find_instances())
            await asyncio.shield(self._found)

    async def _find_instances(self) -> None:
        for name in await asyncio.to_thread(ray.util.list_named_actors):
            if name != FLEET:
                self._add_member(await asyncio.to_thread(ray.get_actor, name), *_read_name(name), name)
        waits = [member.placed.wait() for member in self._members.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), DESCRIBE_S)

    def _find_refusal(self, kind: str) -> str:
        kinds = [name for name, count in self._config.counts.items() if count > 0]
        if kind not in kinds:
            return f"no kind {kind!r} in this fleet; there are: {', '.join(kinds)}"
        alive = sum(member.row["state"] != "dead" for member in self._members.values())
        if alive >= max(self._config.most_instances, sum(self._config.counts.values())):
            return f"{alive} instances are there; allowed: --most-instances {self._config.most_instances}"
        return ""

    def _create_instance(self, kind: str, plan: int | None) -> Member:
        number = 0
        while plan is None and f"{kind}-{number}" in self._members:
            number += 1
        name = f"{kind}-{number}" if plan is None else f"{kind}-plan-{plan}"
        gpus = count_gpus(self._arguments_of(kind))
        handle = (
            ray.remote(Instance)
            .options(
                name=name,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=1,
                num_gpus=gpus,
                max_restarts=-1,
                scheduling_strategy="DEFAULT" if gpus else "SPREAD",
            )
            .remote(self._config, kind, name, plan, self._environment, self._engine)
        )
        return self._add_member(handle, kind, plan, name)

    def _arguments_of(self, kind: str) -> list[str]:
        return [*self._config.common, *self._config.own.get(kind, ())]

    def _needs(self, kind: str) -> str:
        return f"it needs 1 CPU and {count_gpus(self._arguments_of(kind))} GPUs of one node"

    def _add_member(self, handle: Any, kind: str, plan: int | None, name: str) -> Member:
        row = {"name": name, "kind": kind, "plan": plan, "url": "", "state": "starting", "detail": ""}
        member = self._members[name] = Member(handle, row)
        if plan is not None:
            self._by_plan[plan] = member
        member.task = asyncio.get_running_loop().create_task(self._follow(member))
        return member

    async def _follow(self, member: Member) -> None:
        """Until it is gone. Between two lives it is starting, at its last address."""
        while member.row["state"] != "gone":
            try:
                row = await asyncio.wait_for(_call(member.handle.describe), DESCRIBE_S)
            except ActorDiedError as error:  # killed by hand, or it could not begin: Ray does not start it again
                member.row["state"] = "gone" if member.is_stopped else "dead"
                member.row["detail"] = describe_error(error)
                member.placed.set()
            except (RayError, TimeoutError):
                if member.is_stopped:
                    break
                if member.row["state"] == "ready":
                    member.row["state"] = "starting"
            else:
                member.restarts += member.row["url"] not in ("", row["url"])
                member.row = row
                member.placed.set()
            if member.is_stopped and member.row["state"] in (*LIVES, "dead"):
                break  # it has not heard of its end, or lives again
            await asyncio.sleep(HEALTH_INTERVAL_S)
        self._forget(member)

    def _give_up(self, member: Member) -> None:
        if member.task is not None:
            member.task.cancel()
        self._by_plan.pop(member.row["plan"], None)
        self._forget(member)

    def _forget(self, member: Member) -> None:
        ray.kill(member.handle)
        member.row["state"] = "dead"
        self._members.pop(member.row["name"], None)

    # -- the lease -----------------------------------------------------------------------------------------------------

    def _lease_to(self, token: str, holder: str) -> bool:
        now_s = time.monotonic()
        if self._token != token and now_s < self._until_s:
            return False
        self._token, self._owner, self._until_s = token, holder, now_s + LEASE_S
        return True

    def _take_back(self, token: str) -> bool:
        if self._token == token:
            self._token, self._owner, self._until_s = "", "", 0.0
        return False


async def _call(method: Any) -> dict[str, Any]:
    answer: dict[str, Any] = await method.remote()
    return answer


def _read_name(name: str) -> tuple[str, int | None]:
    """Kind and plan of an instance."""
    kind, _, number = name.rpartition("-")
    if kind.endswith("-plan"):
        return kind.removesuffix("-plan"), int(number)
    return kind, None


# -- from outside Ray --------------------------------------------------------------------------------------------------


def find_own_address() -> str:
    """That of this machine which Ray's other nodes reach."""
    return str(ray.util.get_node_ip_address())


def create_fleet(
    where: RayFleetName, config: ClusterConfig, environment: dict[str, str], *, engine: str = ENGINE
) -> None:
    """Make its actor, on the head's node: without the head it is of no use.

    ``engine``: the module that each instance runs. Raises ClusterError.
    """
    if not listens(where.address):
        raise ClusterError(f"{where}: no head of Ray listens at {where.address}")
    try:
        ray.init(address=where.address, namespace=where.name, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ClusterError(f"{where}: {describe_error(error)}") from None
    try:
        fleet = (
            ray.remote(Fleet)
            .options(name=FLEET, lifetime="detached", num_cpus=0, max_restarts=-1, resources={HEAD: 0.001})
            .remote(config, environment, engine)
        )
        ray.get(fleet.list_instances.remote("", "", False), timeout=PLACED_S)
    except ValueError:
        raise ClusterError(f"{where} is there already; it ends with: launch_cluster --on ray --stop") from None
    except RayError as error:
        raise ClusterError(f"{where}: {describe_error(error)}") from None
    finally:
        ray.shutdown()
