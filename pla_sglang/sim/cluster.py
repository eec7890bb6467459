"""The life of requests in a fleet: arrival, prefill, hand-off, decode, end; and what faults do to it.

Asks the dispatcher and the controllers, carries out their answers, and tells them what happened. Decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pla_sglang.policy.decisions import (
    FleetAction,
    Hold,
    Migrate,
    PrefillSample,
    ScaleTo,
    SetLengthClass,
    SetRole,
)
from pla_sglang.policy.fleet import InstanceState, Role
from pla_sglang.sim.config import InstanceSpec, Policies, SimConfig
from pla_sglang.sim.errors import SimError
from pla_sglang.sim.fleet import Fleet
from pla_sglang.sim.instance import Instance
from pla_sglang.sim.kernel import Kernel, Priority
from pla_sglang.sim.ledger import Ledger
from pla_sglang.sim.network import Network
from pla_sglang.sim.request import ENDS, SimRequest, Stage


class Cluster:
    """Requests, instances and the network between them. It is the ``Host`` of its instances."""

    def __init__(self, kernel: Kernel, config: SimConfig, policies: Policies, *, expected: int, block_tokens: int):
        self.ledger = Ledger(expected)
        self.network = Network(config.network)
        self.reasons: Counter[str] = Counter()  # fleet decisions
        self.pass_reasons: Counter[str] = Counter()  # engine decisions
        self.counts: Counter[str] = Counter()
        self.on_closed: Callable[[SimRequest], None] | None = None  # told of every end, after all observers
        self._kernel = kernel
        self._config = config
        self._policies = policies
        self._observers = policies.observers()
        self._pending: list[SimRequest] = []  # no instance was ready for their prefill
        self._unplaced: list[SimRequest] = []  # none was ready for their decode
        self._moving: dict[SimRequest, tuple[Instance, Instance]] = {}  # transfers under way
        self.fleet = Fleet(kernel, config, policies, self, block_tokens=block_tokens, on_change=self.place_waiting)
        self._largest = min(spec.capacity_tokens for spec in config.fleet)

    # -- arrival and placement ---------------------------------------------------------------------------------------

    def arrive(self, request: SimRequest) -> None:
        self.ledger.open(request)
        for observer in self._observers:
            observer.on_arrival(request.fleet, self._kernel.now_s)
        if request.input_tokens + request.output_tokens > self._largest:
            self._end(request, Stage.REFUSED)
            return
        self._dispatch(request)

    def _dispatch(self, request: SimRequest) -> None:
        view = request.fleet
        if request.hash_ids:
            view.cached = self.fleet.cache.lookup(request.hash_ids)
        answer = self._policies.dispatcher.dispatch(view, self.fleet.view, self._kernel.now_s)
        self.reasons[answer.reason.value] += 1
        self._apply(answer.actions)
        if answer.prefill is None:
            if request.stage is not Stage.PENDING:
                request.move(Stage.PENDING)
            self._pending.append(request)
            return
        instance = self.fleet.of(answer.prefill)
        if not self.fleet.is_ready(instance):
            raise SimError(f"{request.rid} was sent to {answer.prefill}, which is {answer.prefill.state.value}")
        view.predicted_ttft_s = answer.predicted_ttft_s
        view.prefilled_on = None
        request.move(Stage.PREFILL)
        request.planned = None if answer.decode is None else self.fleet.of(answer.decode)
        instance.submit(request)

    def place_waiting(self) -> None:
        """Asks again for requests that found nobody ready."""
        pending, self._pending = self._pending, []
        for request in pending:
            self._dispatch(request)
        unplaced, self._unplaced = self._unplaced, []
        for request in unplaced:
            self._place(request)

    def _place(self, request: SimRequest) -> None:
        """Where a prefilled request decodes: as planned, or where the dispatcher says now."""
        target, request.planned = request.planned, None
        if target is None or not self.fleet.is_ready(target):
            answer = self._policies.dispatcher.place_decode(request.fleet, self.fleet.view, self._kernel.now_s)
            self.reasons[answer.reason.value] += 1
            self._apply(answer.actions)
            target = None if answer.decode is None else self.fleet.of(answer.decode)
        if target is None:
            if request.stage is not Stage.HANDOFF:
                request.move(Stage.HANDOFF)
            self._unplaced.append(request)
        elif target is request.home:
            target.join(request)
        else:
            if request.stage is not Stage.HANDOFF:
                request.move(Stage.HANDOFF)
            self._send_to(request, target)

    def _send_to(self, request: SimRequest, target: Instance) -> None:
        request.target = target
        request.reserved = False
        target.reserve(request)
        if not request.reserved:
            request.epoch += 1
            at_s = self._kernel.now_s + self._config.handoff_wait_s
            self._kernel.at(at_s, Priority.END, self._waited, (request, request.epoch))

    def _waited(self, event: tuple[SimRequest, int]) -> None:
        """No room came in time. The KV is given up and computed anew at the target: two engines that wait for each
        other's memory would wait for ever."""
        request, epoch = event
        if request.epoch != epoch:
            return
        source, target = request.home, request.target
        assert source is not None and target is not None
        self._detach_from_target(request)
        source.release(request)
        request.restart()
        self.counts["handoffs_redone"] += 1
        request.move(Stage.PENDING)
        if not self.fleet.is_ready(target):
            self._dispatch(request)
            return
        request.move(Stage.PREFILL)
        request.planned = target
        target.submit(request)

    # -- what instances report (Host) --------------------------------------------------------------------------------

    def on_first_token(self, request: SimRequest, instance: Instance) -> None:
        now_s, slo_s = self._kernel.now_s, request.fleet.ttft_slo_s
        if slo_s is not None:
            ratio, view = (now_s - request.arrival_s) / slo_s, instance.view
            view.ttft_ratio = ratio if view.ttft_ratio is None else 0.9 * view.ttft_ratio + 0.1 * ratio
        for observer in self._observers:
            observer.on_first_token(request.fleet, instance.view, now_s)

    def on_prefilled(self, request: SimRequest, instance: Instance) -> None:
        request.fleet.prefilled_on = instance.view
        self._place(request)

    def on_finished(self, request: SimRequest, instance: Instance) -> None:
        self._closed(request, request.output_tokens)

    def on_prefill_pass(self, sample: PrefillSample) -> None:
        for observer in self._observers:
            observer.on_prefill(sample, self._kernel.now_s)

    def on_pass_reason(self, reason: str) -> None:
        self.pass_reasons[reason] += 1

    def on_reserved(self, request: SimRequest, instance: Instance) -> None:
        request.reserved = True
        self._transfer(request)

    def on_left(self, request: SimRequest, instance: Instance) -> None:
        target = request.target
        request.move(Stage.HANDOFF)
        if target is None or not self.fleet.is_ready(target):
            request.target = None
            self.counts["migrations_back"] += 1
            instance.join(request)
            return
        request.migrations += 1
        self.counts["migrations"] += 1
        self._send_to(request, target)

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _transfer(self, request: SimRequest) -> None:
        source, target = request.home, request.target
        assert source is not None and target is not None
        size = request.context_tokens * source.costs.profile.kv_bytes_per_token
        end_s = self.network.send(source.view.index, target.view.index, size, self._kernel.now_s)
        self._moving[request] = (source, target)
        request.epoch += 1
        self._kernel.at(end_s, Priority.END, self._transferred, (request, request.epoch))

    def _transferred(self, event: tuple[SimRequest, int]) -> None:
        request, epoch = event
        if request.epoch != epoch:
            return
        source, target = self._moving.pop(request)
        request.target = None
        source.release(request)
        target.arrived(request)
        self.fleet.check_drained()

    def cut_link(self, source: int, target: int, down_s: float) -> None:
        """Transfers on this way break off and start again when it is back."""
        self.network.cut(source, target, self._kernel.now_s + down_s)
        for request, (one, other) in list(self._moving.items()):
            if (one.view.index, other.view.index) == (source, target):
                self.counts["transfers_repeated"] += 1
                self._transfer(request)

    # -- ends --------------------------------------------------------------------------------------------------------

    def cancel(self, request: SimRequest) -> None:
        """Its user has gone; nothing happens when it has ended already."""
        if request.stage in ENDS:
            return
        if request.stage is Stage.NEW:
            raise SimError(f"{request.rid} was cancelled before it arrived")
        self._pending = [one for one in self._pending if one is not request]
        self._unplaced = [one for one in self._unplaced if one is not request]
        self._detach_from_target(request)
        home, stage = request.home, request.stage
        given = request.done_tokens if home is None else home.given_tokens(request)
        request.move(Stage.CANCELLED)
        if home is not None:
            home.drop(request, stage)
        self._closed(request, given)

    def _detach_from_target(self, request: SimRequest) -> None:
        self._moving.pop(request, None)
        request.epoch += 1
        target, request.target = request.target, None
        if target is not None and target.alive and request.stage is Stage.HANDOFF:
            target.unreserve(request, reserved=request.reserved)

    def _end(self, request: SimRequest, stage: Stage) -> None:
        request.move(stage)
        self._closed(request, request.done_tokens)

    def _closed(self, request: SimRequest, output_tokens: int) -> None:
        self.ledger.close(request)
        for observer in self._observers:
            observer.on_finish(request.fleet, output_tokens, self._kernel.now_s)
        self.fleet.check_drained()
        if self.on_closed is not None:
            self.on_closed(request)

    def kill(self, index: int, down_s: float | None) -> None:
        """An instance dies. Requests whose KV was there start anew; those on their way to it are placed again."""
        instance = self.fleet.instances[index]
        if instance.view.state is InstanceState.DEAD:
            return
        here = [one for one in self.ledger.live.values() if one.home is instance]
        coming = [one for one in self.ledger.live.values() if one.target is instance and one.home is not instance]
        for request in here:
            request.done_tokens = instance.given_tokens(request)
        spec, role = self.fleet.spec_of(instance), instance.view.role
        self.fleet.end(instance)
        for request in coming:
            self._moving.pop(request, None)
            request.epoch += 1
            request.target = None
            if request.stage is Stage.HANDOFF:
                self._place(request)
        for request in here:
            self._lost(request)
        if down_s is not None:
            at_s = self._kernel.now_s + down_s
            self._kernel.at(at_s, Priority.FAULT, self._replace, (spec, role))

    def _replace(self, lost: tuple[InstanceSpec, Role]) -> None:
        self.fleet.add(*lost, InstanceState.STARTING)

    def _lost(self, request: SimRequest) -> None:
        self._unplaced = [one for one in self._unplaced if one is not request]
        self._detach_from_target(request)
        request.restart()
        if request.retries >= self._config.retries:
            self._end(request, Stage.FAILED)
            return
        request.retries += 1
        self.counts["restarts"] += 1
        request.waiting.seen = False
        request.move(Stage.PENDING)
        self._dispatch(request)

    # -- actions -----------------------------------------------------------------------------------------------------

    def tick(self, actions: list[FleetAction]) -> None:
        """Carries out what a controller wants."""
        self._apply(tuple(actions))

    def _apply(self, actions: tuple[FleetAction, ...]) -> None:
        for action in actions:
            self.reasons[action.reason.value] += 1
            match action:
                case Hold():
                    pass
                case SetRole():
                    self.fleet.set_role(action.instance, action.role)
                case SetLengthClass():
                    action.instance.length_class = action.length_class
                case Migrate():
                    self._migrate(action)
                case ScaleTo():
                    self.fleet.start(action.role, action.start, action.tensor_parallel)
                    for view in action.drain:
                        self.fleet.stop(view)

    def _migrate(self, action: Migrate) -> None:
        request = self.ledger.live.get(action.rid)
        source, target = self.fleet.of(action.source), self.fleet.of(action.target)
        movable = (
            request is not None
            and request.stage is Stage.DECODE
            and request.target is None
            and request in source.running.members
            and target is not source
            and self.fleet.is_ready(target)
        )
        if request is None or not movable or not target.has_room(action.tokens):
            self.counts["migrations_refused"] += 1
            return
        request.target = target
        request.reserved = False
        source.part_with(request)

    def check_integrity(self) -> None:
        """Asserts that no request and no token of KV is lost or counted twice."""
        self.ledger.check_integrity()
        self.fleet.check_integrity()
        if not self.ledger.live:
            for instance in self.fleet.instances:
                instance.pool.check_integrity(empty=True)
                assert instance.view.requests() == 0, f"{instance.view} still counts requests"
