"""One instance in Ray: an actor on each of its nodes, most often one. Imported in Ray's processes alone.

    Instance ─► launch_server                    of node 0: the server that the router knows
       ├─ Part ─► launch_server --node-rank 1    on another node, with further ranks; only with ``--nnodes``
       └─ Part ─► launch_server --node-rank 2

A server ends with its actor, whatever ends that (``tied``). The instance owns its parts: Ray ends them with it. An
instance that loses one ends, as no rank can go on without the others. Ray starts it again, and it makes new parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pla_sglang.fleet.cluster.logs import LastErrors
from pla_sglang.fleet.cluster.nodes import MEETING, RANK, NodeNeeds
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.fleet.cluster.spec import (
    ClusterConfig,
    EngineSpec,
    at_new_bootstrap_port,
    new_instance,
    with_own_rendezvous,
)
from pla_sglang.fleet.cluster.supervisor import (
    ENVIRONMENT,
    HEALTH_INTERVAL_S,
    HEALTH_TIMEOUT_S,
    REMOVAL_DRAIN_S,
    STOP_GRACE_S,
)
from pla_sglang.fleet.cluster.tied import ENGINE, start_tied
from pla_sglang.fleet.cluster.zygote import die_with_parent

DESCRIBE_S = 5.0  # for an actor to say how it is
LIVES = frozenset({"starting", "ready"})


@dataclasses.dataclass(frozen=True)
class Order:
    """What the actors of an instance run, on whichever nodes.

    Attributes:
        needs: what it takes of them.
        environment: further variables.
        engine: the module.
    """

    config: ClusterConfig
    kind: str
    needs: NodeNeeds
    environment: Mapping[str, str]
    engine: str

    def make_spec(self, host: str) -> EngineSpec:
        """On a node at ``host``, with free ports of it."""
        return new_instance(dataclasses.replace(self.config, host=host), self.kind, 0, free_port)


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where an instance's nodes meet, at the first of them.

    Attributes:
        address: where ranks find each other.
        bootstrap_port: where all of them say how to ask them for KV; None: nobody asks this kind.
    """

    address: str
    bootstrap_port: int | None

    def arguments_of(self, rank: int) -> tuple[str, ...]:
        """For the server of the node ``rank``."""
        return (RANK, str(rank), MEETING, self.address)


class Part:
    """Runs the server of one node. Calls come one at a time; a thread looks after the process."""

    def __init__(self, order: Order, rank: int, meeting: Meeting) -> None:
        self._tie_to_node()
        spec = order.make_spec(self._node)
        if meeting.bootstrap_port is not None:
            own_config = dataclasses.replace(order.config, host=self._node)
            spec = at_new_bootstrap_port(spec, own_config, meeting.bootstrap_port)
        self._start_server(order, spec, meeting.arguments_of(rank))

    def describe(self) -> dict[str, Any]:
        """What the instance hears of it."""
        where = {"node": self._node, "pid": self._process.pid, "actor_pid": os.getpid()}
        return where | {"state": self._state, "detail": self._errors.describe_error("engine")}

    def _tie_to_node(self) -> None:
        die_with_parent(os.getppid())  # the node's raylet: all its actors end at once, not one after the other
        self._node = str(ray.util.get_node_ip_address())

    def _start_server(self, order: Order, spec: EngineSpec, place: Sequence[str] = ()) -> None:
        """In the actor's main thread (``start_tied``)."""
        on_cpu = not order.needs.gpus
        self._url = spec.url
        self._state = "starting"
        self._errors = LastErrors()
        self._process = start_tied(
            order.engine,
            with_own_rendezvous((*spec.argv, *place), free_port),
            {**(ENVIRONMENT if on_cpu else {}), **order.environment},
            forks_workers=on_cpu and order.engine == ENGINE,
        )
        threading.Thread(target=self._read_lines, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _read_lines(self) -> None:
        """Output of the server into that of this actor, which Ray keeps in a file."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._errors.note_line("engine", text)
            print(text, flush=True)

    def _watch(self) -> None:
        """In a thread, from the server's start to its end."""
        while self._process.poll() is None:
            self._look()
            time.sleep(HEALTH_INTERVAL_S)
        self._kill_group()  # what the server left in its session
        if self._comes_back():
            os._exit(1)  # Ray starts an instance again; a part is missed by its instance
        self._state = "gone" if self._state == "stopping" else "dead"

    def _look(self) -> None:
        if self._state == "starting" and self._is_ready() and self._state == "starting":
            self._state = "ready"

    def _is_ready(self) -> bool:
        return _is_healthy(self._url)

    def _comes_back(self) -> bool:
        """Once the server has ended."""
        return self._state == "ready"

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Instance(Part):
    """Runs the server of the first node, the whole instance with it, and has further nodes run theirs."""

    def __init__(self, order: Order, name: str, plan: int | None) -> None:
        self._tie_to_node()
        self._row = {"name": name, "kind": order.kind, "plan": plan}
        self._drains = order.kind == "stateless"
        self._kill_s = math.inf  # when it is to be killed, by time.monotonic
        self._parts: list[Any] = []
        self._part_rows: list[dict[str, Any]] = []  # what each said last
        spec = order.make_spec(self._node)
        place: tuple[str, ...] = ()
        if order.needs.nodes > 1:
            meeting = Meeting(f"{self._node}:{free_port()}", spec.bootstrap_port)
            self._start_parts(order, meeting)
            place = meeting.arguments_of(0)
        self._start_server(order, spec, place)

    def describe(self) -> dict[str, Any]:
        """What ``list_instances`` gives of it."""
        own, parts = super().describe(), self._part_rows
        failed = [f" on {part['node']}{part['detail']}" for part in parts if part["state"] == "dead"]
        nodes = [{key: row[key] for key in ("node", "pid", "actor_pid")} for row in (own, *parts)]
        return self._row | own | {"url": self._url, "detail": (*failed, own["detail"])[0], "nodes": nodes}

    def stop(self) -> None:
        """Order its end; it has a while to finish what it does. Twice does no harm.

        SGLang's first node has the others end too, once it has finished.
        """
        if self._state not in LIVES:
            if self._state == "dead":
                self._state = "gone"
            return
        drains = self._drains and self._state == "ready"
        self._state = "stopping"
        self._kill_s = time.monotonic() + (REMOVAL_DRAIN_S if drains else STOP_GRACE_S)
        self._process.terminate()

    def _start_parts(self, order: Order, meeting: Meeting) -> None:
        """One in each further bundle of this actor's placement group. Returns once all nodes have taken theirs.

        That may be long where a node has been lost, and nobody is to wait for its ranks meanwhile.
        """
        group, needs = ray.util.get_current_placement_group(), order.needs
        self._parts = [
            ray.remote(Part)
            .options(num_cpus=1, num_gpus=needs.gpus, scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank))
            .remote(order, rank, meeting)
            for rank in range(1, needs.nodes)
        ]
        try:
            self._ask_parts(None)
        except RayError as error:
            if isinstance(error, ActorDiedError) and error.actor_init_failed:
                raise
            os._exit(1)  # it was taken, and lost: as in ``_look_at_parts``

    def _ask_parts(self, timeout_s: float | None) -> None:
        """Raises RayError."""
        self._part_rows = ray.get([part.describe.remote() for part in self._parts], timeout=timeout_s)

    def _watch(self) -> None:
        super()._watch()
        for part in self._parts:
            with contextlib.suppress(RayError):
                ray.kill(part)

    def _look(self) -> None:
        if time.monotonic() >= self._kill_s:
            self._kill_group()
        if self._parts and self._state in LIVES:
            self._look_at_parts()
        super()._look()

    def _is_ready(self) -> bool:
        return all(part["state"] == "ready" for part in self._part_rows) and super()._is_ready()

    def _look_at_parts(self) -> None:
        """One that is lost ends the instance, which comes back. One whose server has failed leaves it dead."""
        try:
            self._ask_parts(DESCRIBE_S)
        except ActorDiedError:
            if self._state in LIVES:
                self._kill_group()
                os._exit(1)
        except RayError:
            return  # it does not answer, which is no end: its node or Ray's head may be away for a while
        if any(row["state"] == "dead" for row in self._part_rows):
            self._kill_group()

    def _comes_back(self) -> bool:
        """A start that fails may be the first sign of a lost part: Ray takes a while to notice that a node is gone."""
        if self._state == "starting" and self._parts:
            try:
                self._ask_parts(DESCRIBE_S)
            except RayError:
                return True
        return super()._comes_back()


def _is_healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=HEALTH_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
