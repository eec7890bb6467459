"""The instances of a simulation: start, roles, draining, end, and the time they cost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from pla_sglang.load.prefix_index import PrefixIndex, even_block_ends
from pla_sglang.policy.common.joining import join_role
from pla_sglang.policy.common.length_errors import JudgedPredictor
from pla_sglang.policy.common.start_times import StartTimes
from pla_sglang.policy.interface.decisions import ScaleTo
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView, InstanceKind, InstanceState, InstanceView, Role
from pla_sglang.policy.interface.remaining_length import (
    EndedAnswer,
    Floats,
    RemainingPredictor,
    RunningAnswer,
    RunningAnswers,
)
from pla_sglang.policy.measured_steps import InstanceSteps
from pla_sglang.sim.core.config import InstanceSpec, KnownSteps, MakeEngine, PrefixKnowledge, RoleSwitch, SimConfig
from pla_sglang.sim.core.decoding import Decoding
from pla_sglang.sim.core.growth import AnswerLimits
from pla_sglang.sim.core.instance import InstanceEvents, SimInstance
from pla_sglang.sim.core.kernel import Kernel, Priority
from pla_sglang.sim.core.overlap import OverlappedInstance
from pla_sglang.sim.core.pool import KvPool, ignore_block
from pla_sglang.sim.core.prefill import PrefillQueue
from pla_sglang.sim.core.request import SimRequest, SimStage

_ROLE_SWITCH_END = {InstanceKind.PREFILL: InstanceKind.DECODE, InstanceKind.DECODE: InstanceKind.PREFILL}


@dataclasses.dataclass(slots=True)
class Life:
    """When an instance was there and paid for. ``end_s`` None: it still is."""

    spec: InstanceSpec
    start_s: float
    end_s: float | None = None

    def gpu_s(self, until_s: float) -> float:
        """GPU seconds up to ``until_s``."""
        end_s = until_s if self.end_s is None else min(self.end_s, until_s)
        return max(0.0, end_s - self.start_s) * self.spec.profile.gpus


class SimFleet:
    """Makes, flips, drains and ends instances. Tells ``on_change`` when an instance has become ready."""

    def __init__(
        self,
        kernel: Kernel,
        config: SimConfig,
        host: InstanceEvents,
        *,
        make_engine: MakeEngine,
        lengths: RemainingPredictor,
        block_tokens: int,
        on_change: Callable[[], None],
    ) -> None:
        self.instances: list[SimInstance] = []
        self.lives: list[Life] = []
        self.cache = PrefixIndex(even_block_ends(block_tokens))
        self.view = FleetView((), self._decodes)
        self.flips = 0
        self.scale_outs = self.scale_ins = 0  # instances that were started, and told to leave
        self.lengths = JudgedPredictor(lengths)
        self._reserves = config.engine.reserve_by_lengths and not self.lengths.is_blind
        self._kernel = kernel
        self._config = config
        self._make_engine = make_engine
        self._host = host
        self._block_tokens = block_tokens
        self._on_change = on_change
        self._start_times = StartTimes()
        self._roles = [spec.role for spec in config.fleet for _ in range(spec.count)]  # at the start
        self._draining: dict[int, Role | None] = {}  # index -> role afterwards; None: it ends
        for spec in config.fleet:
            for _ in range(spec.count):
                self.add(spec, spec.role, InstanceState.READY)
                self._note_start(config.startup_of(spec))  # they have started, too, before the first request

    def add(self, spec: InstanceSpec, role: Role, state: InstanceState) -> SimInstance:
        """A new instance; one that is STARTING becomes ready after its start-up time."""
        index = len(self.instances)
        view = InstanceView(
            index=index,
            name=f"i{index}",
            kind=spec.kind,
            role=role,
            state=state,
            length_class=spec.length_class,
            kv_capacity_tokens=spec.capacity_tokens,
            tensor_parallel=spec.profile.gpus,
            chunk_max_tokens=self._config.engine.chunk_tokens,
            profile=spec.profile.name,
            since_s=self._kernel.now_s,
        )
        exact, clock = self._config.prefix_knowledge is PrefixKnowledge.EXACT, lambda: self._kernel.now_s
        watcher = functools.partial(self._change_block, index) if exact else ignore_block
        pool = KvPool(spec.capacity_tokens, self._block_tokens, watcher, clock)
        # Who is to come has no token yet, so it is not among those of the place that are at risk.
        predict = (lambda rows, running: self._predict(rows, view.name if running else "")) if self._reserves else None
        knobs, overhead = self._config.engine, self._config.host
        limits = AnswerLimits(knobs.limit_clip_tokens, predict)
        made: Callable[..., SimInstance] = SimInstance
        if overhead.overlap:
            made = functools.partial(OverlappedInstance, overhead=overhead)
        instance = made(
            self._kernel,
            view,
            queue=PrefillQueue(view, pool, knobs, limits, share_later=overhead.overlap),
            decoding=Decoding(pool, self._config.costs_of(spec), knobs, limits),
            knobs=knobs,
            policy=self._make_engine(spec.profile, knobs),
            host=self._host,
        )
        if not exact:
            instance.report.know_cache_by(self.cache)
        self._tell_steps(instance, spec)
        self.instances.append(instance)
        self.lives.append(Life(spec, self._kernel.now_s))
        self.view.add(view)
        if state is InstanceState.STARTING:
            ready_s = self._kernel.now_s + self._config.startup_of(spec)
            self._kernel.at(ready_s, Priority.END, self._started, instance)
        return instance

    def _tell_steps(self, instance: SimInstance, spec: InstanceSpec) -> None:
        """What policies know of the step times of a new instance."""
        told = self._config.told_profile or self._config.fleet[0].profile
        if self._config.known_steps is KnownSteps.EXACT and spec.profile != told:
            instance.view.steps = spec.profile
        elif self._config.known_steps is KnownSteps.MEASURED:
            instance.measure_passes(InstanceSteps(instance.view, told, told.name, peers=self.view.instances))

    def report_steps(self) -> None:
        """Instances that measure their passes tell what these take."""
        for instance in self.instances:
            if instance.alive and instance.measured is not None:
                instance.measured.report()

    def note_prompt(self, request: SimRequest, instance: int, answer_tokens: int | None = None) -> None:
        """``request`` was sent to an instance, or has ended there: what a router would know of its cache now."""
        if self._config.prefix_knowledge is not PrefixKnowledge.INDEX or not request.hash_ids:
            return
        view = self.instances[instance].view
        self.cache.insert_prompt(
            instance,
            request.hash_ids,
            request.input_tokens,
            size=request.input_tokens,
            now_s=self._kernel.now_s,
            capacity_tokens=view.kv_capacity_tokens,
            answer_tokens=answer_tokens,
        )
        self.cache.show_cache(view)

    def _change_block(self, index: int, block: int, came: bool) -> None:
        if came:
            self.cache.add_block(index, block)
        else:
            self.cache.remove_block(index, block)

    def _started(self, instance: SimInstance) -> None:
        if instance.view.state is InstanceState.STARTING:
            self._note_start(self._kernel.now_s - self.lives[instance.view.index].start_s)
            instance.view.ready_s = self._kernel.now_s
            self.view.set_state(instance.view, InstanceState.READY)
            self._on_change()

    def _note_start(self, seconds: float) -> None:
        self._start_times.add(seconds)
        self.view.startup_s = self._start_times.estimate_s()

    def of(self, view: InstanceView) -> SimInstance:
        """The instance behind a view."""
        return self.instances[view.index]

    def overlapped(self, index: int) -> OverlappedInstance:
        """An instance of a fleet whose hosts work ahead."""
        instance = self.instances[index]
        assert isinstance(instance, OverlappedInstance)
        return instance

    def spec_of(self, instance: SimInstance) -> InstanceSpec:
        return self.lives[instance.view.index].spec

    def is_ready(self, instance: SimInstance) -> bool:
        return instance.view.state is InstanceState.READY

    # -- roles and scaling -------------------------------------------------------------------------------------------

    def set_role(self, view: InstanceView, role: Role) -> None:
        """A role change as the fleet's way of flipping has it; a stateless instance only changes its label."""
        if view.role is role or view.state is InstanceState.DEAD:
            return
        self.flips += 1
        at_once = view.kind in (InstanceKind.STATELESS, InstanceKind.UNIFIED) or self._config.flip is RoleSwitch.LABEL
        if at_once or view.state is InstanceState.STARTING:
            self.view.set_role(view, role, self._kernel.now_s)
        elif view.state is InstanceState.READY:
            self._drain(view, role)

    def stop(self, view: InstanceView) -> None:
        """Finishes what it has, then ends."""
        if view.state is InstanceState.READY:
            self._drain(view, None)
        elif view.state is InstanceState.STARTING:
            self.end(self.of(view))

    def _drain(self, view: InstanceView, role: Role | None) -> None:
        self.view.set_state(view, InstanceState.DRAINING)
        self._draining[view.index] = role
        self.check_drained()

    def check_drained(self) -> None:
        """Drained instances go where they were to go."""
        for index, role in list(self._draining.items()):
            instance = self.instances[index]
            if instance.empty:
                del self._draining[index]
                self._drained(instance, role)

    def _drained(self, instance: SimInstance, role: Role | None) -> None:
        view = instance.view
        if role is None:
            self.end(instance)
            return
        spec = self.spec_of(instance)
        kind = _ROLE_SWITCH_END.get(view.kind, view.kind)
        if self._config.flip is RoleSwitch.RESTART:
            self.end(instance)
            self.add(dataclasses.replace(spec, count=1, kind=kind, role=role), role, InstanceState.STARTING)
            return
        view.kind = kind
        self.view.set_role(view, role, self._kernel.now_s)
        self.view.set_state(view, InstanceState.READY)
        self._on_change()

    def scale(self, action: ScaleTo) -> None:
        """New instances are like those that started with their role, else like the first.

        MIXED says that the role is the fleet's to choose: the one of which it lacks most, by its roles at the start.
        """
        for _ in range(action.start):
            role = join_role(self._roles, self._living_roles()) if action.role is Role.MIXED else action.role
            like = next((life.spec for life in self.lives if life.spec.role is role), self.lives[0].spec)
            self.add(dataclasses.replace(like, count=1, role=role), role, InstanceState.STARTING)
        for view in action.drain:
            self.stop(view)
        self.scale_outs += action.start
        self.scale_ins += len(action.drain)

    def _living_roles(self) -> list[Role]:
        living = (InstanceState.STARTING, InstanceState.READY)
        return [view.role for view in self.view.instances if view.state in living]

    def end(self, instance: SimInstance) -> None:
        """An instance without requests is dead from now on."""
        index = instance.view.index
        self._draining.pop(index, None)
        self.lives[index].end_s = self._kernel.now_s
        self.view.set_state(instance.view, InstanceState.DEAD)
        instance.end()
        if self._config.prefix_knowledge is PrefixKnowledge.INDEX:
            self.cache.forget_instance(index)

    def changes(self) -> dict[str, int]:
        """How often roles were changed, and how many instances were started and told to leave."""
        return {"flips": self.flips, "scale_outs": self.scale_outs, "scale_ins": self.scale_ins}

    def gpu_hours(self, until_s: float) -> float:
        """GPU hours of all instances, from their start (not from being ready) to their end or ``until_s``."""
        return sum(life.gpu_s(until_s) for life in self.lives) / 3600

    # -- views -------------------------------------------------------------------------------------------------------

    def _decodes(self, view: InstanceView) -> DecodeBatch:
        rows = self.of(view).report.rows(self._kernel.now_s)
        batch = DecodeBatch.of([(request.rid, tokens, None) for request, tokens, _ in rows])
        batch.movable = np.array([request.target is None for request, _, _ in rows], dtype=np.bool_)
        if not self.lengths.is_blind:
            batch.remaining = self._predict([(request, done) for request, _, done in rows], view.name)
        return batch

    def _predict(self, rows: Sequence[tuple[SimRequest, int]], place: str) -> Floats:
        """What is said of requests that have come to so many tokens; the predictor is given the truth."""
        limit_tokens = self._config.output_limit_tokens or np.inf
        answers = (
            RunningAnswer(
                request.rid,
                done,
                known=request.output_tokens - done,
                prompt_tokens=request.input_tokens,
                limit_tokens=limit_tokens,
                started_s=_started_s_of(request),
            )
            for request, done in rows
        )
        return self.lengths.predict(RunningAnswers.of(answers, place, self._kernel.now_s))

    def note_end(self, request: SimRequest, output_tokens: int) -> None:
        """The request has ended, after so many tokens of its answer."""
        limit_tokens = self._config.output_limit_tokens or np.inf
        ended = EndedAnswer(
            request.rid,
            output_tokens,
            whole=request.stage is SimStage.FINISHED and output_tokens < limit_tokens,
            prompt_tokens=request.input_tokens,
            limit_tokens=limit_tokens,
            started_s=_started_s_of(request),
            ended_s=self._kernel.now_s,
        )
        self.lengths.observe_end(ended)

    def check_integrity(self) -> None:
        self.view.check_integrity()
        for instance in self.instances:
            if instance.alive:
                instance.check_integrity()


def _started_s_of(request: SimRequest) -> float:
    """When its user saw the first token; before that, when it came."""
    return request.arrival_s if request.first_token_s is None else request.first_token_s
