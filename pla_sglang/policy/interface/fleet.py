"""What a router or planner policy sees of a fleet. What it answers is in ``decisions.py``.

Drivers (router, simulator) own the views and keep them up to date in place; policies read them and never write. A view
includes what was dispatched since the instance's last report, so that a burst between two reports is seen.

Views are mutable and slotted: with 1,024 instances and thousands of requests a second no object may be built per
instance and decision. An instance is named by its ``InstanceView`` object; its ``index`` is stable and never reused.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt

from pla_sglang.policy.interface.fast_enum import FastEnum
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.step_times import StepTimes

# Device seconds: SGLang's first passes of each size take up to several seconds, later ones do not. Too short is dear:
# what a few of those teach is believed of all instances. Too long only has a newcomer taken for what the others are.
COLD_S = 10.0


class InstanceKind(FastEnum):
    """What an instance is able to run."""

    UNIFIED = "unified"  # both phases of a request, always on the same instance
    PREFILL = "prefill"
    DECODE = "decode"
    STATELESS = "stateless"  # either phase of any request (Arrow)


class Role(FastEnum):
    """What an instance is used for now; the last four are Arrow's pools (section 5.2)."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_TO_DECODE = "prefill_to_decode"  # gets decodes, still finishes prefills
    DECODE_TO_PREFILL = "decode_to_prefill"  # gets prefills, still finishes decodes


class InstanceState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, gets nothing new
    DEAD = "dead"


LEGAL_STATES: Mapping[InstanceState, frozenset[InstanceState]] = {
    InstanceState.STARTING: frozenset({InstanceState.READY, InstanceState.DEAD}),
    InstanceState.READY: frozenset({InstanceState.DRAINING, InstanceState.DEAD}),
    InstanceState.DRAINING: frozenset({InstanceState.READY, InstanceState.DEAD}),
    InstanceState.DEAD: frozenset(),
}


@dataclasses.dataclass(slots=True, kw_only=True)
class LoadAmounts:
    """The load of an instance. Sums over requests, so they can be added and subtracted.

    L and H below are new and history tokens of one request. The prefill backlog counts what is not computed yet, queued
    or running: with these four sums a quadratic predictor needs O(1) per instance.

    Attributes:
        queued_prefills, queued_tokens, queued_attention, queued_history_tokens: backlog: requests, sum of L, sum of
            L*(L+2H), sum of H.
        running: decoding requests.
        context_tokens: KV tokens of the running requests.
        waiting_decodes, waiting_decode_tokens: decodes that are to run here and do not yet, and their KV tokens: in
            transfer, waiting for memory, or named for here while they are still to be prefilled elsewhere.
        prefilling_decode_tokens: the part of ``waiting_decode_tokens`` whose prefill is not done, as far as the driver
            knows; a decode of another router counts as arriving.
    """

    queued_prefills: int = 0
    queued_tokens: int = 0
    queued_attention: int = 0
    queued_history_tokens: int = 0
    running: int = 0
    context_tokens: int = 0
    waiting_decodes: int = 0
    waiting_decode_tokens: int = 0
    prefilling_decode_tokens: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class InstanceView(LoadAmounts):
    """The driver's current view of one instance.

    Attributes:
        index: position in ``FleetView.instances``.
        kind, role, state: see the enums; ``role`` and ``state`` are changed through ``FleetView`` only.
        length_class: pool of spatial disaggregation (PLA-Serve section 3.2); None: takes both classes.
        kv_used_tokens, kv_capacity_tokens: used counts everything that is not evictable.
        kv_cached_tokens: of prefixes that nobody uses now, and that are evicted where there is need.
        evicted_next_s: since when nobody has used the prefix that is evicted next; None without one.
        token_interval_s: mean time between two tokens of a request over a recent window; None without tokens.
        ttft_ratio: recent mean of TTFT / target (PLA-Serve's SLO deviation is this minus 1); None without data.
        utilisation: busy share of a recent window, in [0, 1].
        prefill_age_s: how long the oldest unfinished prefill has waited; 0 without one.
        tensor_parallel: GPUs of the instance.
        chunk_max_tokens: its largest chunk: a prompt with more new tokens takes several passes. None: it does not say.
        profile: name of its step profile; instances of one profile share a predictor.
        steps: its step times, where they are known to be others than those that the policy was made with; None: those.
            Another object where they have changed.
        since_s: when ``role`` last changed.
        ready_s: when it became ready, where it was started beside others that served already; see ``is_cold``.
        full_until_s: it has refused a request for load, and is avoided until then; by the driver's own clock.
        fixed_role: nothing can change its role; set by drivers.
        role_epoch: how often its role was set.
    """

    index: int
    name: str
    kind: InstanceKind = InstanceKind.STATELESS
    role: Role = Role.MIXED
    state: InstanceState = InstanceState.READY
    length_class: PrefillClass | None = None
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 1 << 60
    kv_cached_tokens: int = 0
    evicted_next_s: float | None = None
    token_interval_s: float | None = None
    ttft_ratio: float | None = None
    utilisation: float = 0.0
    prefill_age_s: float = 0.0
    tensor_parallel: int = 1
    chunk_max_tokens: int | None = None
    profile: str = ""
    steps: StepTimes | None = None
    since_s: float = float("-inf")
    full_until_s: float = float("-inf")
    fixed_role: bool = False
    role_epoch: int = 0
    ready_s: float = float("-inf")

    # By identity, and not by the sums as ``LoadAmounts``.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def decode_tokens(self) -> int:
        """Arrow's decode load: KV tokens of decodes that run or arrive, so whose prefill is done.

        A prompt in a queue for its prefill is load of that queue, wherever its decode was named.
        """
        return self.context_tokens + self.waiting_decode_tokens - self.prefilling_decode_tokens

    def assigned_decode_tokens(self) -> int:
        """KV tokens of all decodes that run here or will: what a choice between decode instances compares."""
        return self.context_tokens + self.waiting_decode_tokens

    def requests(self) -> int:
        return self.queued_prefills + self.running + self.waiting_decodes

    def is_cold(self, now_s: float) -> bool:
        """Its passes say nothing yet of how fast it will be: they compile kernels, capture graphs and fill caches."""
        return now_s < self.ready_s + COLD_S

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(slots=True, eq=False)
class RequestView:
    """One request for a dispatcher.

    Attributes:
        input_tokens: the whole prompt.
        cached: instance index -> estimated leading prompt tokens in its prefix cache; absent: none.
        ttft_slo_s, tpot_slo_s: targets; None: the policy's own.
        output_tokens: estimate of the output length; None: unknown.
        session: requests of one conversation share it.
        prefilled_on: set once the prefill is done.
        predicted_ttft_s: the driver copies it from ``Dispatch``, so that ``on_first_token`` can compare.
        handle: the driver's own object, not used by policies.
    """

    rid: str
    input_tokens: int
    arrival_s: float
    cached: Mapping[int, int] = dataclasses.field(default_factory=dict)
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    output_tokens: float | None = None
    session: str | None = None
    prefilled_on: InstanceView | None = None
    predicted_ttft_s: float | None = None
    handle: object = None

    def history_tokens(self, instance: InstanceView) -> int:
        """H there; at least one token of a prompt is always computed."""
        return min(self.cached.get(instance.index, 0), self.input_tokens - 1)

    def new_tokens(self, instance: InstanceView) -> int:
        """L there."""
        return self.input_tokens - self.history_tokens(instance)


@dataclasses.dataclass(slots=True, eq=False)
class DecodeBatch:
    """The running requests of one instance, as columns of equal length.

    Attributes:
        rids: request ids.
        tokens: KV tokens now, N(r); shape [requests] int64.
        remaining: estimate of the tokens still to come, nan where unknown; shape [requests] float64.
        movable: False during a migration or if not allowed; shape [requests] bool.
        unlisted_requests, unlisted_tokens: further requests that run there, and their KV tokens. Their lengths are not
            known, so this is all that a sum over them can say of the future: each adds a token a step.
    """

    rids: Sequence[str]
    tokens: npt.NDArray[np.int64]
    remaining: npt.NDArray[np.float64]
    movable: npt.NDArray[np.bool_]
    unlisted_requests: int = 0
    unlisted_tokens: int = 0

    @classmethod
    def of(cls, rows: Sequence[tuple[str, int, float | None]]) -> DecodeBatch:
        """From (rid, tokens, remaining or None), all movable."""
        return cls(
            rids=[row[0] for row in rows],
            tokens=np.array([row[1] for row in rows], dtype=np.int64),
            remaining=np.array([np.nan if row[2] is None else row[2] for row in rows], dtype=np.float64),
            movable=np.ones(len(rows), dtype=np.bool_),
        )


# Named once: see ``fast_enum``.
_MIXED, _PREFILL, _DECODE, _PREFILL_TO_DECODE, _DECODE_TO_PREFILL = Role
_READY, _UNIFIED = InstanceState.READY, InstanceKind.UNIFIED


class FleetView:
    """All instances, with lists of the ready ones by role. Only drivers modify it.

    Args:
        instances: in order of their ``index``.
        decodes: gives the running requests of an instance; asked by migration policies at their ticks.

    Attributes:
        startup_s: device seconds from the order to start an instance until it is ready, as measured lately
            (``start_times.py``); None: none was.
    """

    def __init__(
        self,
        instances: Sequence[InstanceView] = (),
        decodes: Callable[[InstanceView], DecodeBatch] | None = None,
    ) -> None:
        self.instances: list[InstanceView] = []
        self.ready: list[InstanceView] = []
        self.by_role: dict[Role, list[InstanceView]] = {role: [] for role in Role}
        self.starting: dict[Role, int] = dict.fromkeys(Role, 0)
        self.startup_s: float | None = None
        self._decodes = decodes
        self._hidden: Set[InstanceView] = frozenset()
        for instance in instances:
            self.add(instance)

    def add(self, instance: InstanceView) -> None:
        """Raises ValueError unless ``instance.index`` is the next free one."""
        if instance.index != len(self.instances):
            raise ValueError(f"instance {instance.name}: index {instance.index}, expected {len(self.instances)}")
        self.instances.append(instance)
        if instance.state is InstanceState.READY:
            self._list(instance)
        elif instance.state is InstanceState.STARTING:
            self.starting[instance.role] += 1

    def set_role(self, instance: InstanceView, role: Role, now_s: float) -> None:
        listed = instance.state is InstanceState.READY
        if listed:
            self.by_role[instance.role].remove(instance)
        if instance.state is InstanceState.STARTING:
            self.starting[instance.role] -= 1
            self.starting[role] += 1
        instance.role, instance.since_s = role, now_s
        instance.role_epoch += 1
        if listed:
            self.by_role[role].append(instance)

    def set_state(self, instance: InstanceView, state: InstanceState) -> None:
        """Raises ValueError on a transition that is not in ``LEGAL_STATES``."""
        if state not in LEGAL_STATES[instance.state]:
            raise ValueError(f"instance {instance.name}: {instance.state.value} -> {state.value} is not allowed")
        if instance.state is InstanceState.READY:
            self.ready.remove(instance)
            self.by_role[instance.role].remove(instance)
        elif instance.state is InstanceState.STARTING:
            self.starting[instance.role] -= 1
        instance.state = state
        if state is InstanceState.READY:
            self._list(instance)

    def is_ready(self, instance: InstanceView) -> bool:
        return instance.state is _READY and instance not in self._hidden

    def without(self, hidden: Set[InstanceView]) -> FleetView:
        """The same instances now, for one decision, with ``hidden`` in none of the lists of ready ones."""
        seen = FleetView(decodes=self._decodes)
        seen.instances, seen.starting, seen._hidden = self.instances, self.starting, hidden
        seen.startup_s = self.startup_s
        seen.ready = [instance for instance in self.ready if instance not in hidden]
        seen.by_role = {
            role: [instance for instance in members if instance not in hidden] for role, members in self.by_role.items()
        }
        return seen

    def read_decodes_from(self, decodes: Callable[[InstanceView], DecodeBatch]) -> None:
        """The driver lists running requests from now on."""
        self._decodes = decodes

    def decodes(self, instance: InstanceView) -> DecodeBatch:
        """Raises RuntimeError if the driver does not list running requests."""
        if self._decodes is None:
            raise RuntimeError("this driver does not list running requests, so nothing can be migrated")
        return self._decodes(instance)

    def prefill_capable(self) -> list[InstanceView]:
        """Ready instances that get prefills: a new list."""
        roles = self.by_role
        return roles[_PREFILL] + roles[_DECODE_TO_PREFILL] + roles[_MIXED]

    def decode_capable(self) -> list[InstanceView]:
        """Ready instances that take hand-offs: a new list. A unified one decodes only what it has prefilled."""
        roles = self.by_role
        mixed = [instance for instance in roles[_MIXED] if instance.kind is not _UNIFIED]
        return roles[_DECODE] + roles[_PREFILL_TO_DECODE] + mixed

    def check_integrity(self) -> None:
        """Asserts that the lists agree with the instances."""
        ready = [instance for instance in self.instances if instance.state is InstanceState.READY]
        assert sorted(self.ready, key=_index) == ready
        for role, members in self.by_role.items():
            assert sorted(members, key=_index) == [instance for instance in ready if instance.role is role]
            starting = [i for i in self.instances if i.state is InstanceState.STARTING and i.role is role]
            assert self.starting[role] == len(starting)

    def _list(self, instance: InstanceView) -> None:
        self.ready.append(instance)
        self.by_role[instance.role].append(instance)


def _index(instance: InstanceView) -> int:
    return instance.index
