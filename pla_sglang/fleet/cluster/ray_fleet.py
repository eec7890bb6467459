"""A fleet in Ray: an actor for each instance, and one that knows them all. Imported in Ray's processes alone.

    Fleet ─► Instance ─► launch_server             on one node (``ray_instance``)
       │
       └───► Instance ─► launch_server             on several, in a placement group of its name
                └─ Part ─► launch_server

Ray itself starts an actor again whose process or node has ended, somewhere: the instance comes back with its name at
another address. One that has never been ready in this life does not come back; it stays, as dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pla_sglang.fleet.actuators.ray_actuator import LEASE_S, PLACED_S
from pla_sglang.fleet.actuators.ray_names import FLEET, RayFleetName, describe_error, listens
from pla_sglang.fleet.cluster.children import ClusterError
from pla_sglang.fleet.cluster.nodes import NodeNeeds, read_ray_needs
from pla_sglang.fleet.cluster.ray_instance import DESCRIBE_S, LIVES, Instance, Order
from pla_sglang.fleet.cluster.spec import ClusterConfig
from pla_sglang.fleet.cluster.supervisor import HEALTH_INTERVAL_S
from pla_sglang.fleet.cluster.tied import ENGINE

HEAD = "node:__internal_head__"  # a resource that Ray gives to the head's node alone


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

    def __init__(self, config: ClusterConfig, environment: dict[str, str], engine: str, placed_s: float) -> None:
        self._config, self._environment, self._engine, self._placed_s = config, environment, engine, placed_s
        self._needs = {
            kind: read_ray_needs([*config.common, *config.own.get(kind, ())])
            for kind, count in config.counts.items()
            if count > 0
        }
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
            await asyncio.wait_for(member.placed.wait(), self._placed_s)
        except TimeoutError:
            self._give_up(member)
            error = f"no node of Ray has taken {member.row['name']} for {self._placed_s:g} s"
            return {"error": f"{error}: it needs {self._needs[member.row['kind']]}"}
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
        await self._recover()
        for member in self._members.values():
            member.is_stopped = True
            if member.task is not None:
                member.task.cancel()
            self._end_actors(member)
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
        await asyncio.to_thread(_remove_groups_but, set(self._members))
        waits = [member.placed.wait() for member in self._members.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), DESCRIBE_S)

    def _find_refusal(self, kind: str) -> str:
        if kind not in self._needs:
            return f"no kind {kind!r} in this fleet; there are: {', '.join(self._needs)}"
        alive = sum(member.row["state"] != "dead" for member in self._members.values())
        if alive >= max(self._config.most_instances, sum(self._config.counts.values())):
            return f"{alive} instances are there; allowed: --most-instances {self._config.most_instances}"
        return ""

    def _create_instance(self, kind: str, plan: int | None) -> Member:
        number = 0
        while plan is None and f"{kind}-{number}" in self._members:
            number += 1
        name = f"{kind}-{number}" if plan is None else f"{kind}-plan-{plan}"
        needs = self._needs[kind]
        handle = (
            ray.remote(Instance)
            .options(
                name=name,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=1,
                num_gpus=needs.gpus,
                max_restarts=-1,
                scheduling_strategy=_find_place(name, needs),
            )
            .remote(Order(self._config, kind, needs, self._environment, self._engine), name, plan)
        )
        return self._add_member(handle, kind, plan, name)

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
                if member.row["state"] != "dead":
                    self._end_actors(member)
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
        self._end_actors(member)
        member.row["state"] = "dead"
        self._members.pop(member.row["name"], None)

    def _end_actors(self, member: Member) -> None:
        """End those of all its nodes, at once. It may have none any more."""
        ray.kill(member.handle)
        needs = self._needs.get(member.row["kind"])
        if needs is not None and needs.nodes > 1:
            with contextlib.suppress(ValueError):  # there is no such group
                remove_placement_group(get_placement_group(member.row["name"]))

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


def _find_place(name: str, needs: NodeNeeds) -> Any:
    """Ray's strategy for the actor of an instance.

    Of several nodes: the first bundle of a placement group, whose bundles are placed together or not at all. Ray finds
    other nodes for those that are lost. It would remove a group that is not detached when the fleet's actor restarts.
    """
    if needs.nodes == 1:
        return "DEFAULT" if needs.gpus else "SPREAD"
    try:
        group = get_placement_group(name)
    except ValueError:  # there is none
        bundle = {"CPU": 1} | ({"GPU": needs.gpus} if needs.gpus else {})
        group = placement_group([bundle] * needs.nodes, strategy="STRICT_SPREAD", name=name, lifetime="detached")
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)


def _remove_groups_but(names: set[str]) -> None:
    """Those of this fleet whose instance was not there yet when the fleet's actor ended, or no more."""
    for group in placement_group_table().values():
        if group["state"] != "REMOVED" and group["name"] not in names:
            with contextlib.suppress(ValueError):  # another fleet's
                remove_placement_group(get_placement_group(group["name"]))


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
    where: RayFleetName,
    config: ClusterConfig,
    environment: dict[str, str],
    *,
    engine: str = ENGINE,
    placed_s: float = PLACED_S,
) -> None:
    """Make its actor, on the head's node: without the head it is of no use.

    ``engine``: the module that each instance runs. ``placed_s``: for nodes to take an instance. Raises ClusterError.
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
            .remote(config, environment, engine, placed_s)
        )
        ray.get(fleet.list_instances.remote("", "", False), timeout=PLACED_S)
    except ValueError:
        raise ClusterError(f"{where} is there already; it ends with: launch_cluster --on ray --stop") from None
    except RayError as error:
        raise ClusterError(f"{where}: {describe_error(error)}") from None
    finally:
        ray.shutdown()
