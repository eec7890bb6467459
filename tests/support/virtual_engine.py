"""A tiny engine in virtual time that carries out a policy's decisions as SGLang's scheduler does.

One chunked request at a time, a pool of KV tokens, slots, decode passes whenever no prefill ran, retraction when decode
outgrows the pool. Time passes only by the step model. What a decision may not ask for is asserted here, so every test
that runs this engine checks the contract of ``PassDecision`` as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, PassView, WaitingView
from pla_sglang.policy.pla.temporal import TemporalPolicy

DECODE_STEP_S = 0.012
MAX_FRUITLESS_PASSES = 4  # at one instant, with nothing running: more of them is a livelock


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request of a workload. It may stop before it has its ``limit_tokens``, which admission has to count on."""

    at_s: float
    new_tokens: int
    output_tokens: int = 1
    limit_tokens: int | None = None  # None: as many as it gets
    history_tokens: int = 0
    slo_s: float | None = None
    priority: int = 0

    @property
    def limit(self) -> int:
        return self.output_tokens if self.limit_tokens is None else self.limit_tokens


@dataclasses.dataclass
class Request:
    rid: str
    arrival: Arrival
    view: WaitingView
    kv_tokens: int = 0  # held in the pool
    done_tokens: int = 0  # tokens given to its user
    first_token_s: float | None = None
    finished_s: float | None = None
    retractions: int = 0

    @property
    def growth_tokens(self) -> int:
        return self.arrival.limit - self.done_tokens


@dataclasses.dataclass(frozen=True)
class Pass:
    """One line of the log: what was decided in which state, and what ran (nothing, if nothing fitted)."""

    now_s: float
    action: Action
    reason: PassReason
    release_s: float | None
    device_idle: bool
    head_arrival_s: float | None  # of the first short that waits
    chunk: str | None
    ran: tuple[Ran, ...]


@dataclasses.dataclass(frozen=True)
class Ran:
    """A request of a pass as it was before it."""

    rid: str
    new_tokens: int
    boundary_tokens: int


class VirtualEngine:
    """Runs a workload to its end.

    Args:
        policies: the first decides; the others are ranks that are asked the same and must answer the same.
        growth: share of the expected output that admission counts, as SGLang's new-token ratio. Below 1 the pool may
            run out during decode, and requests are retracted.
    """

    def __init__(
        self,
        policies: Sequence[TemporalPolicy],
        arrivals: Sequence[Arrival],
        model: StepModel,
        *,
        kv_tokens: int = 1 << 20,
        slots: int = 64,
        budget_tokens: int = 1000,
        growth: float = 1.0,
    ) -> None:
        self.policies = list(policies)
        self.model = model
        self.kv_tokens, self.slots, self.budget_tokens, self.growth = kv_tokens, slots, budget_tokens, growth
        self.now_s = 0.0
        self.requests = [self._request(index, one) for index, one in enumerate(arrivals)]
        self._coming = sorted(self.requests, key=lambda request: request.arrival.at_s)
        self.waiting: list[Request] = []
        self.chunk: Request | None = None
        self.running: list[Request] = []
        self.log: list[Pass] = []
        self._fruitless = 0
        self._decoded_s = 0.0
        self.longest_decode_wait_s = 0.0

    @staticmethod
    def _request(index: int, arrival: Arrival) -> Request:
        deadline_s = None if arrival.slo_s is None else arrival.at_s + arrival.slo_s
        view = WaitingView(
            f"r{index}",
            arrival.new_tokens,
            arrival.history_tokens,
            arrival.at_s,
            deadline_s=deadline_s,
            output_tokens=arrival.limit,
        )
        return Request(view.rid, arrival, view)

    # -- the loop --------------------------------------------------------------------------------------------------

    def run(self, *, until_s: float = float("inf")) -> list[Request]:
        while self.now_s < until_s:
            self._receive()
            if not (self.waiting or self.chunk or self.running):
                if not self._coming:
                    break
                self.now_s = self._coming[0].arrival.at_s
                continue
            if (self.waiting or self.chunk) and self._prefill():
                continue
            if self.running:
                self._decode()
        return self.requests

    def _receive(self) -> None:
        while self._coming and self._coming[0].arrival.at_s <= self.now_s:
            self.waiting.append(self._coming.pop(0))
        self.waiting.sort(key=lambda request: request.arrival.priority)  # stable: first come first served within

    def _prefill(self) -> bool:
        """One scheduling pass; True when time has passed or a batch ran."""
        view = self._view()
        for request in self.waiting:
            if not request.view.seen:
                request.view.seen = True
                for policy in self.policies:
                    policy.on_arrival(request.view, self.now_s)
        decisions = [policy.decide(view, self.now_s) for policy in self.policies]
        decision = decisions[0]
        assert all(other == decision for other in decisions), "ranks decide differently"
        if decision.action is Action.HOLD:
            self._log(decision, view, [])
            return self._hold(decision)
        batch = self._admit(decision)
        self._log(decision, view, batch)
        for policy in self.policies:
            policy.on_pass(decision, view, [request.view for request, _ in batch], self.now_s)
        if not batch:
            self._fruitless += 1
            assert self.running or self._fruitless < MAX_FRUITLESS_PASSES, f"livelock at {self.now_s}: {decision}"
            return not self.running
        self._fruitless = 0
        self._execute(decision, batch)
        return True

    def _view(self) -> PassView:
        ranks = sorted({request.arrival.priority for request in [*self.waiting, *filter(None, [self.chunk])]})
        for request in [*self.waiting, *filter(None, [self.chunk])]:
            request.view.priority_rank = ranks.index(request.arrival.priority)
        return PassView(
            waiting=[request.view for request in self.waiting],
            chunk=None if self.chunk is None else self.chunk.view,
            pass_budget_tokens=self.budget_tokens,
            slots=self.slots - len(self.running) - (self.chunk is not None),
            kv_free_tokens=self._kv_free(),
            kv_room_tokens=self.kv_tokens - self._held(),
            kv_capacity_tokens=self.kv_tokens,
            running=len(self.running),
            decode_wait_s=self.now_s - self._decoded_s if self.running else 0.0,
        )

    def _kv_free(self) -> int:
        growth = sum(request.growth_tokens for request in self.running) * self.growth
        return int(self.kv_tokens - self._held() - growth)

    def _held(self) -> int:
        return sum(request.kv_tokens for request in [*self.running, *filter(None, [self.chunk])])

    def _hold(self, decision: PassDecision) -> bool:
        if self.running:
            return False  # decode runs
        times = [request.arrival.at_s for request in self._coming[:1]]
        if decision.release_s is not None:
            times.append(decision.release_s)
        assert times, f"idle for ever at {self.now_s}: {decision}"
        assert min(times) > self.now_s, "a hold that ends in the past"
        self.now_s = min(times)
        return True

    # -- what a decision does ----------------------------------------------------------------------------------------

    def _admit(self, decision: PassDecision) -> list[tuple[Request, int]]:
        """Requests and new tokens of the pass, within memory and slots; refusal changes nothing."""
        by_view = {id(request.view): request for request in self.waiting}
        selected = [by_view[id(view)] for view in decision.selected]
        if decision.shares_with_chunk:
            assert self.chunk is not None, "a chunk shares the pass"
            assert selected
            assert not decision.park
            assert decision.chunk_tokens is not None
            piece = decision.chunk_tokens - sum(request.view.new_tokens for request in selected)
            assert 0 < piece <= self.chunk.view.new_tokens, "the chunk gets what the others leave"
            assert decision.chunk_tokens <= self.budget_tokens
            whole = [(request, request.view.new_tokens) for request in self._fitting(selected)]
            return [*whole, (self.chunk, piece)]
        if decision.action is Action.SHORT:
            assert selected, "a SHORT pass has requests"
            assert decision.park == (self.chunk is not None), "a chunk is parked exactly beside a SHORT pass"
            assert len(selected) == 1 or sum(request.view.new_tokens for request in selected) <= self.budget_tokens
            return [(request, request.view.new_tokens) for request in self._fitting(selected)]
        if not selected:
            assert self.chunk is not None, "a LONG pass has a long"
            assert not decision.park
            return [(self.chunk, self._part(self.chunk, decision))]
        assert decision.park == (self.chunk is not None), "the host holds one chunk"
        if decision.park:
            assert decision.chunk_tokens is None, "what overtakes is not cut"
        if len(selected) > 1:
            tokens = sum(request.view.new_tokens for request in selected)
            assert min(tokens, decision.chunk_tokens or tokens) <= self.budget_tokens
        return self._cut_last(self._fitting(selected), decision.chunk_tokens)

    @staticmethod
    def _cut_last(fitting: list[Request], most_tokens: int | None) -> list[tuple[Request, int]]:
        """The host takes them in order, and cuts the one at which ``most_tokens`` of the pass are used up."""
        parts: list[tuple[Request, int]] = []
        left = sum(request.view.new_tokens for request in fitting) if most_tokens is None else most_tokens
        for request in fitting:
            part = min(request.view.new_tokens, left)
            if part <= 0:
                break
            parts.append((request, part))
            left -= part
        return parts

    @staticmethod
    def _part(request: Request, decision: PassDecision) -> int:
        return min(request.view.new_tokens, decision.chunk_tokens or request.view.new_tokens)

    def _fitting(self, selected: list[Request]) -> list[Request]:
        free = self._kv_free()
        if self.chunk is not None:  # it was admitted whole, so its share is taken already
            free -= self.chunk.view.new_tokens + int(self.chunk.growth_tokens * self.growth)
        slots = self.slots - len(self.running) - (self.chunk is not None)
        fitting: list[Request] = []
        for request in selected:
            needed = request.view.history_tokens + request.view.new_tokens
            needed += int(request.growth_tokens * self.growth)
            if len(fitting) >= slots or needed > free:
                break
            free -= needed
            fitting.append(request)
        return fitting

    def _execute(self, decision: PassDecision, batch: list[tuple[Request, int]]) -> None:
        attention = sum(tokens * (tokens + 2 * request.view.history_tokens) for request, tokens in batch)
        history = sum(request.view.history_tokens for request, _ in batch)
        taken = sum(tokens for _, tokens in batch)
        assert taken <= self.kv_tokens - self._held(), f"the host fails to allocate {taken} tokens: {decision}"
        self.now_s += self.model.step_s(sum(tokens for _, tokens in batch), history, attention)
        for request, tokens in batch:
            if request is self.chunk:
                self.chunk = None
            else:
                self.waiting.remove(request)
            request.view.new_tokens -= tokens
            request.view.history_tokens += tokens
            request.kv_tokens = request.view.history_tokens
            if request.view.new_tokens:
                assert decision.action is Action.LONG or decision.shares_with_chunk
                assert self.chunk is None, "a second chunk was born"
                self.chunk = request
            else:
                self._emit(request)

    def _emit(self, request: Request) -> None:
        request.done_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = self.now_s
        if request in self.running:
            self.running.remove(request)
        assert request.finished_s is None, "finished twice"
        if request.done_tokens < request.arrival.output_tokens:
            if not self.running:
                self._decoded_s = self.now_s
            self.running.append(request)
        else:
            request.finished_s = self.now_s
            request.kv_tokens = 0

    def _decode(self) -> None:
        """As the host, which leaves no room for what the chunk under way still has to compute."""
        held = self._held()
        while held + len(self.running) > self.kv_tokens and len(self.running) > 1:
            held -= self._retract(self.running.pop())
        self.longest_decode_wait_s = max(self.longest_decode_wait_s, self.now_s - self._decoded_s)
        self.now_s += DECODE_STEP_S
        for request in list(self.running):
            request.kv_tokens += 1
            self._emit(request)
        self._decoded_s = self.now_s

    def _retract(self, request: Request) -> int:
        held, request.kv_tokens = request.kv_tokens, 0
        request.retractions += 1
        view = request.view
        view.new_tokens = request.arrival.new_tokens + request.arrival.history_tokens + request.done_tokens
        view.history_tokens, view.resumed = 0, True
        view.output_tokens = request.growth_tokens
        self.waiting.insert(0, request)
        return held

    def _log(self, decision: PassDecision, view: PassView, batch: list[tuple[Request, int]]) -> None:
        bound = self.policies[0].boundary.tokens
        heads = (one.arrival_s for one in view.waiting if one.new_tokens < bound(one.history_tokens))
        self.log.append(
            Pass(
                now_s=self.now_s,
                action=decision.action,
                reason=decision.reason,
                release_s=decision.release_s,
                device_idle=not self.running,
                head_arrival_s=next(heads, None),
                chunk=None if view.chunk is None else view.chunk.rid,
                ran=tuple(
                    Ran(request.rid, request.view.new_tokens, bound(request.view.history_tokens))
                    for request, _ in batch
                ),
            )
        )
