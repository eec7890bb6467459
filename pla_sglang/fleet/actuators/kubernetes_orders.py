"""What was ordered of one Deployment, and which pods have come of it. Pure.

A Deployment has a number of pods. Who they are, and which of them leaves, is Kubernetes' choice. So the orders are kept
in an annotation of the Deployment, written together with the number. A plan has one place among the pods: whichever pod
appears next takes it, and so does the one that replaces that pod later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

import msgspec

KEPT_PLANS = 100  # numbers of plans that are over; an annotation is to stay small
_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a Deployment. ``address``: IP address, empty until it has one; ``ends``: Kubernetes is removing it.

    ``template``: the same for all pods, except while a rollout is under way.
    """

    name: str
    created: str
    address: str = ""
    phase: str = "Running"
    scheduled: bool = True
    ready: bool = True
    ends: bool = False
    template: str = ""

    def removal_rank(self) -> tuple[bool, int, bool]:
        """What a ReplicaSet looks at before the cost of a deletion: the least goes first."""
        return self.scheduled, _PHASES.get(self.phase, 1), self.ready


class Orders(msgspec.Struct):
    """The annotation.

    Attributes:
        started: plan -> its pod; empty: not there yet.
        ended: plans that are over, oldest first.
        stopping: pods that are to leave, until they are gone -> the plan that had started them.
        known: pods that no plan has started, when the last one was ordered.
    """

    started: dict[int, str] = {}
    ended: list[int] = []
    stopping: dict[str, int | None] = {}
    known: list[str] = []

    def order_start(self, plan: int, pods: Sequence[Pod]) -> None:
        taken = {*self.started.values(), *self.stopping.keys()}
        self.known = [pod.name for pod in pods if not pod.ends and pod.name not in taken]
        self.started[plan] = ""

    def order_stop(self, pod: str) -> None:
        plan = self.stopping[pod] = self.find_plan(pod)
        if plan is not None:
            self.end(plan)

    def end(self, plan: int) -> None:
        del self.started[plan]
        self.ended = [*self.ended, plan][-KEPT_PLANS:]

    def settle(self, replicas: int, pods: Sequence[Pod]) -> None:
        """Brings it up to date with the pods there are now."""
        live = [pod.name for pod in sorted(pods, key=lambda pod: (pod.created, pod.name)) if not pod.ends]
        for plan, name in self.started.items():
            if name not in live:
                self.started[plan] = ""
        self.known = [name for name in self.known if name in live]
        taken = {*self.started.values(), *self.known, *self.stopping}
        waiting = sorted(plan for plan, name in self.started.items() if not name)
        for plan, name in zip(waiting, [name for name in live if name not in taken], strict=False):
            self.started[plan] = name
        # Where the Deployment has all its pods, nobody else comes: somebody has lowered the number.
        waiting = [plan for plan in waiting if not self.started[plan]]
        for plan in waiting[max(0, replicas - len(live)) :]:
            self.end(plan)
        # There, too, nobody leaves any more: if one is still here, Kubernetes has removed another.
        leaving = {pod.name for pod in pods if pod.ends}.union(live if len(live) > replicas else ())
        self.stopping = {name: plan for name, plan in self.stopping.items() if name in leaving}

    def find_plan(self, pod: str) -> int | None:
        """The plan that has started it; None: none has."""
        started = (plan for plan, name in self.started.items() if name == pod)
        return next(started, self.stopping.get(pod))

    def find_pod(self, plan: int) -> str | None:
        """Empty: it has not come yet. None: the plan is over, or there was none, and so is its pod."""
        leaving = (name for name, one in self.stopping.items() if one == plan)
        return self.started.get(plan, next(leaving, None))


def find_obstacle(chosen: Pod, pods: Sequence[Pod], stopping: Container[str]) -> str | None:
    """Why Kubernetes would remove another pod than ``chosen`` if the Deployment had one fewer; None: it would not."""
    others = [pod for pod in pods if not pod.ends and pod.name != chosen.name and pod.name not in stopping]
    if any(pod.template != chosen.template for pod in others):
        return "a rollout is under way"
    first = next((pod for pod in others if pod.removal_rank() < chosen.removal_rank()), None)
    return None if first is None else f"{first.name} is not ready, and Kubernetes would remove that one first"
