"""The life of requests in a fleet: arrival, prefill, hand-off or migration, decode, end.

Asks the dispatcher and the controllers, carries out their answers, and tells them what happened. Decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pla_sglang.policy.interface.decisions import (
    Migrate,
    PolicySet,
    PrefillSample,
    ScaleTo,
    SetLengthClass,
    SetRole,
)
from pla_sglang.policy.interface.remaining_length import RemainingPredictor
from pla_sglang.policy.runner import Effects, FleetRunner, Refusal
from pla_sglang.sim.core.config import MakeEngine, SimConfig
from pla_sglang.sim.core.engine_knobs import AnswerCaching
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.fleet import SimFleet
from pla_sglang.sim.core.instance import SimInstance
from pla_sglang.sim.core.kernel import Kernel, Priority
from pla_sglang.sim.core.ledger import RequestCounts
from pla_sglang.sim.core.network import Network
from pla_sglang.sim.core.request import SimRequest, SimStage
from pla_sglang.sim.workload.trace import Trace

# So long a request waits for room at its target; then its KV is given up and computed anew there.
HANDOFF_WAIT_S = 30.0


class Cluster(Effects):
    """Requests, instances and the network between them.

    It is the ``InstanceEvents`` of its instances, and what policies can do to it are its ``Effects``.

    Args:
        on_closed: told of every end, after all observers.
    """

    def __init__(
        self,
        kernel: Kernel,
        config: SimConfig,
        trace: Trace,
        policy: PolicySet,
        *,
        make_engine: MakeEngine,
        lengths: RemainingPredictor,
        on_closed: Callable[[SimRequest], None] | None = None,
    ) -> None:
        self.ledger = RequestCounts(len(trace))
        self.network = Network(config.bandwidth_bytes_per_s)
        self.pass_reasons: Counter[str] = Counter()  # engine decisions
        self.counts: Counter[str] = Counter()
        self._on_closed = on_closed
        self._kernel = kernel
        self._config = config
        self._pending: list[SimRequest] = []  # no instance was ready for their prefill
        self._unplaced: list[SimRequest] = []  # none was ready for their decode
        self.fleet = SimFleet(
            kernel,
            config,
            self,
            make_engine=make_engine,
            lengths=lengths,
            block_tokens=trace.block_tokens,
            on_change=self.place_waiting,
        )
        self.runner = FleetRunner(policy, self.fleet.view, self)
        self._largest = min(spec.capacity_tokens for spec in config.fleet)

    # -- arrival and placement ---------------------------------------------------------------------------------------

    def arrive(self, request: SimRequest) -> None:
        self.ledger.open(request)
        self.runner.arrive(request.fleet, self._kernel.now_s)
        if request.input_tokens + request.output_tokens <= self._largest:
            self._dispatch(request)
        else:
            request.move(SimStage.REFUSED)
            self._closed(request, 0)

    def _dispatch(self, request: SimRequest) -> None:
        """Sends ``request`` to an instance, or puts it where it waits for one."""
        view = request.fleet
        if request.hash_ids:
            view.cached = self.fleet.cache.lookup(request.hash_ids)
        answer = self.runner.dispatch(view, self._kernel.now_s)
        if answer.prefill is None:
            if request.stage is not SimStage.PENDING:
                request.move(SimStage.PENDING)
            self._pending.append(request)
            return
        instance = self.fleet.of(answer.prefill)
        if not self.fleet.is_ready(instance):
            raise SimError(f"{request.rid} was sent to {answer.prefill}, which is {answer.prefill.state.value}")
        request.move(SimStage.PREFILL)
        if request.prefill_start_s is None:
            request.predicted_hit_tokens = view.history_tokens(answer.prefill)
        request.planned = None if answer.decode is None else answer.decode.index
        if self._config.host.room_first:
            self._plan_pair(request, instance)
        elif self._config.host.place_first and self._name_decode(request, instance):
            assert request.planned is not None
            self.fleet.instances[request.planned].incoming.announce(request)
        instance.submit(request)
        self.fleet.note_prompt(request, instance.view.index)

    def _name_decode(self, request: SimRequest, instance: SimInstance) -> bool:
        """Where ``request`` decodes is said with its dispatch to ``instance``; True: on another one."""
        if request.planned is None:
            request.fleet.prefilled_on = instance.view
            answer = self.runner.place_decode(request.fleet, self._kernel.now_s)
            request.planned = None if answer.decode is None else self.fleet.of(answer.decode).view.index
        return request.planned is not None and request.planned != instance.view.index

    def _withdraw(self, request: SimRequest) -> None:
        """``request`` does not decode where it was said to."""
        planned, request.planned = request.planned, None
        if planned is not None:
            self.fleet.instances[planned].incoming.withdraw(request)

    def _plan_pair(self, request: SimRequest, instance: SimInstance) -> None:
        """There has to be room where ``request`` is said to decode before it is prefilled."""
        if not self._name_decode(request, instance):
            return
        request.target, request.planned = request.planned, None
        request.epoch += 1
        event, now_s = (request, request.epoch), self._kernel.now_s
        self._kernel.at(now_s + self._config.host.front_s, Priority.ARRIVAL, self._reserve, event)
        self._kernel.at(now_s + HANDOFF_WAIT_S, Priority.END, self._end_handshake, event)

    def _reserve(self, event: tuple[SimRequest, int]) -> None:
        request, epoch = event
        if request.epoch == epoch and request.target is not None:
            self.fleet.instances[request.target].reserve(request)

    def _end_handshake(self, event: tuple[SimRequest, int]) -> None:
        """A pair has not begun in time: the room is given back, and asked for again once the prefill is done.

        Engines whose room is kept for each other's prefills would wait for ever.
        """
        request, epoch = event
        if request.epoch != epoch or request.home is None or request.private_tokens or request.shared_blocks:
            return
        self._call_off(request)
        self.fleet.overlapped(request.home).admit(request, self._kernel.now_s)

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
        target = None if request.planned is None else self.fleet.instances[request.planned]
        self._withdraw(request)
        if target is None or not self.fleet.is_ready(target):
            answer = self.runner.place_decode(request.fleet, self._kernel.now_s)
            target = None if answer.decode is None else self.fleet.of(answer.decode)
        if target is not None and target.view.index == request.home:
            target.join(request)
            return
        if request.stage is not SimStage.HANDOFF:
            request.move(SimStage.HANDOFF)
        if target is None:
            self._unplaced.append(request)
        else:
            self._start_handoff(request, target)

    # -- KV on its way: room at the target first, then the transfer, then the request decodes there --------------------

    def _start_handoff(self, request: SimRequest, target: SimInstance) -> None:
        """``request`` is to decode at ``target``; the transfer begins as soon as there is room."""
        request.target = target.view.index
        request.reserved = False
        target.reserve(request)
        if not request.reserved:
            request.epoch += 1
            at_s = self._kernel.now_s + HANDOFF_WAIT_S
            self._kernel.at(at_s, Priority.END, self._waited, (request, request.epoch))

    def _waited(self, event: tuple[SimRequest, int]) -> None:
        """No room came in time. The KV is given up and computed anew at the target: two engines that wait for each
        other's memory would wait for ever."""
        request, epoch = event
        if request.epoch != epoch:
            return
        target = request.target
        assert target is not None
        assert request.home is not None
        self._call_off(request)
        self.fleet.instances[request.home].release(request)
        request.restart()
        self.counts["handoffs_redone"] += 1
        request.move(SimStage.PENDING)
        instance = self.fleet.instances[target]
        if not self.fleet.is_ready(instance):
            self._dispatch(request)
            return
        request.move(SimStage.PREFILL)
        request.planned = target
        instance.submit(request)

    def _transfer(self, request: SimRequest) -> None:
        """The target has made room: the KV is sent."""
        assert request.home is not None
        assert request.target is not None
        size = request.context_tokens * self.fleet.instances[request.home].costs.profile.kv_bytes_per_token
        end_s = self.network.send(request.home, request.target, size, self._kernel.now_s)
        request.epoch += 1
        self._kernel.at(end_s, Priority.END, self._transferred, request)

    def _transferred(self, request: SimRequest) -> None:
        assert request.home is not None
        assert request.target is not None
        source, target = self.fleet.instances[request.home], self.fleet.instances[request.target]
        request.target = None
        source.release(request)
        target.incoming.settle(request)
        target.join(request)
        self.fleet.check_drained()

    def _call_off(self, request: SimRequest) -> None:
        """``request``, whose KV is not on its way yet, does not go to its target; the target's room is free again."""
        assert request.target is not None
        request.epoch += 1
        target, request.target = self.fleet.instances[request.target], None
        if request.reserved or request in target.incoming.waiting:
            target.unreserve(request, reserved=request.reserved)
        request.reserved = False

    # -- what policies can do ----------------------------------------------------------------------------------------

    def set_role(self, action: SetRole, now_s: float) -> Refusal | None:
        self.fleet.set_role(action.instance, action.role)
        return None

    def set_length_class(self, action: SetLengthClass, now_s: float) -> Refusal | None:
        action.instance.length_class = action.length_class
        return None

    def scale(self, action: ScaleTo, now_s: float) -> Refusal | None:
        self.fleet.scale(action)
        return None

    def migrate(self, action: Migrate, now_s: float) -> Refusal | None:
        request = self.ledger.live.get(action.rid)
        source, target = self.fleet.of(action.source), self.fleet.of(action.target)
        movable = (
            request is not None
            and request.target is None
            and request in source.decoding.running.members
            and target is not source
            and self.fleet.is_ready(target)
        )
        if request is None or not movable or not target.incoming.has_room(action.tokens):
            self.counts["migrations_refused"] += 1
            return Refusal.NOT_MOVABLE
        request.target = target.view.index
        request.reserved = False
        source.part_with(request)
        return None

    # -- what instances report ---------------------------------------------------------------------------------------

    def on_first_token(self, request: SimRequest, instance: int) -> None:
        now_s, slo_s = self._kernel.now_s, request.fleet.ttft_slo_s
        at = self.fleet.instances[instance]
        if slo_s:
            at.report.note_ttft((now_s - request.arrival_s) / slo_s, now_s)
        self.runner.first_token(request.fleet, at.view, now_s)

    def on_prefilled(self, request: SimRequest, instance: int) -> None:
        request.fleet.prefilled_on = self.fleet.instances[instance].view
        if not request.reserved:
            self._place(request)
            return
        assert request.target is not None
        request.move(SimStage.HANDOFF)
        self.fleet.instances[request.target].incoming.note_prefilled(request)
        request.epoch += 1
        at_s = self._kernel.now_s + self._config.host.handoff_s
        self._kernel.at(at_s, Priority.END, self._offer, request)

    def _offer(self, request: SimRequest) -> None:
        """The KV of a prefilled request may be sent to where there is room for it."""
        assert request.target is not None
        self.fleet.overlapped(request.target).receive(request)

    def on_finished(self, request: SimRequest, instance: int) -> None:
        self._withdraw(request)  # its prefill gave the only token that it still lacked
        kept = self._config.engine.answers is not AnswerCaching.DROPPED and bool(request.answer_ids)
        if kept:
            self._keep_answer(request, instance)
        if self.fleet.instances[request.prefilled_at].alive:
            self.fleet.note_prompt(request, request.prefilled_at, request.output_tokens if kept else None)
        self._closed(request, request.output_tokens)

    def _keep_answer(self, request: SimRequest, instance: int) -> None:
        """``request`` has ended on ``instance``; blocks that it did not compute itself only come back when RETURNED."""
        at, ids = self.fleet.instances[request.prefilled_at], request.hash_ids + request.answer_ids
        if self._config.engine.answers is AnswerCaching.KEPT:
            ids = ids[: request.context_tokens // at.pool.block_tokens] if request.prefilled_at == instance else ()
        if at.alive:
            at.pool.keep(ids)

    def on_prefill_pass(self, sample: PrefillSample) -> None:
        self.runner.prefilled(sample, self._kernel.now_s)

    def on_pass_reason(self, reason: str) -> None:
        self.pass_reasons[reason] += 1

    def on_reserved(self, request: SimRequest, instance: int) -> None:
        request.reserved = True
        if request.stage is SimStage.PREFILL:
            assert request.home is not None
            at_s = self._kernel.now_s + self._config.host.handshake_s
            self.fleet.overlapped(request.home).admit(request, at_s)
        else:
            self._transfer(request)

    def on_left(self, request: SimRequest, instance: int) -> None:
        target = None if request.target is None else self.fleet.instances[request.target]
        request.move(SimStage.HANDOFF)
        if target is None or not self.fleet.is_ready(target):
            request.target = None
            self.counts["migrations_back"] += 1
            self.fleet.instances[instance].join(request)
            return
        request.migrations += 1
        self.counts["migrations"] += 1
        self._start_handoff(request, target)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _closed(self, request: SimRequest, output_tokens: int) -> None:
        self.ledger.close(request)
        self.runner.finish(request.fleet, output_tokens, self._kernel.now_s)
        self.fleet.note_end(request, output_tokens)
        self.fleet.check_drained()
        if self._on_closed is not None:
            self._on_closed(request)

    def check_integrity(self) -> None:
        """Asserts that no request and no token of KV is lost or counted twice."""
        self.ledger.check_integrity()
        self.fleet.check_integrity()
        if not self.ledger.live:
            for instance in self.fleet.instances:
                instance.pool.check_integrity(empty=True)
                view = instance.view
                counted = view.requests(), view.waiting_decode_tokens, view.prefilling_decode_tokens
                assert not any(counted), f"{view} still counts requests"
