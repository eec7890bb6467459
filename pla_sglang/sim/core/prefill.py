"""The prefill side of one engine: its queue, what a pass may hold, and what a pass does.

Follows what a ``PassDecision`` may ask for (``policy.interface.prefill``): one chunked request at a time; a request is
admitted whole or not at all, and refusal changes nothing.
"""

from __future__ import annotations

import dataclasses
import math

from pla_sglang.policy.interface.fleet import InstanceView
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassView, WaitingView
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.growth import AnswerLimits
from pla_sglang.sim.core.pool import KvPool
from pla_sglang.sim.core.request import SimRequest

MATCH_WINDOW = 64  # waiting requests, from the head, whose prefix match is kept fresh


@dataclasses.dataclass(slots=True)
class PrefillPass:
    """A pass under way. ``parts`` are requests and the new tokens they take in it; the sums are over the parts."""

    parts: list[tuple[SimRequest, int]]
    new_tokens: int
    attention: int
    history_tokens: int
    started_s: float
    mixed: bool = False


def request_of(view: WaitingView) -> SimRequest:
    """The request behind a view that this simulator made."""
    assert isinstance(view.handle, SimRequest)
    return view.handle


class PrefillQueue:
    """Waiting requests of one instance and the one whose prefill is under way.

    Keeps the backlog sums of the instance's ``InstanceView``: they count what is not computed yet.

    Args:
        share_later: blocks of a pass are shareable from ``share_ended`` on, not from its end.
    """

    def __init__(
        self, view: InstanceView, pool: KvPool, knobs: EngineKnobs, limits: AnswerLimits, *, share_later: bool = False
    ) -> None:
        self.waiting: list[WaitingView] = []
        self.chunk: SimRequest | None = None
        self.under_way: PrefillPass | None = None
        self.arriving: dict[SimRequest, float] = {}  # counted, but not in the queue before that time
        self._unshared: list[SimRequest] = []
        self._view = view
        self._pool = pool
        self._knobs = knobs
        self._limits = limits
        self._share_later = share_later

    def __bool__(self) -> bool:
        return bool(self.waiting) or self.chunk is not None

    @property
    def chunk_rest_tokens(self) -> int:
        """Tokens that the chunked request still needs memory for; nobody else may have it."""
        return 0 if self.chunk is None else self.chunk.waiting.new_tokens

    # -- queue -------------------------------------------------------------------------------------------------------

    def push(self, request: SimRequest, *, first: bool = False, seen: bool = True) -> None:
        """``request`` waits here; ``first``: at the head, as a retracted one does.

        Not ``seen``: it is on its way to the queue; ``arriving`` says when it is there, infinity: that is not known.
        """
        waiting = request.waiting
        room_tokens = self._pool.capacity_tokens - waiting.new_tokens - waiting.history_tokens
        waiting.output_tokens = min(self._limits.of_next(request), room_tokens)
        if request.hash_ids:
            self._match(request)
        if not seen:
            self.arriving[request] = math.inf
        elif first:
            self.waiting.insert(0, request.waiting)
        else:
            self.waiting.append(request.waiting)
        self._count(request.waiting, 1)

    def take_seen(self, until_s: float) -> list[SimRequest]:
        """Those that have arrived by ``until_s`` join the queue, in the order of their times."""
        seen = [request for request, at_s in self.arriving.items() if at_s <= until_s]
        seen.sort(key=self.arriving.__getitem__)
        for request in seen:
            del self.arriving[request]
            self.waiting.append(request.waiting)
        return seen

    def free(self, request: SimRequest) -> None:
        """What ``request`` holds in the pool."""
        if request in self._unshared:
            self._unshared.remove(request)
            self._share(request)
        self._pool.give(request.private_tokens)
        self._pool.unlock(request.hash_ids[: request.shared_blocks])
        request.private_tokens = request.shared_blocks = 0

    def refresh(self) -> None:
        """Prefix matches of the queue's head, where blocks have come or gone since."""
        version = self._pool.version
        for view in self.waiting[:MATCH_WINDOW]:
            request = request_of(view)
            if request.hash_ids and request.match_version != version:
                self._match_again(request)

    def _match_again(self, request: SimRequest) -> None:
        """Matches the prompt of a counted request again."""
        self._count(request.waiting, -1)
        self._match(request)
        self._count(request.waiting, 1)

    def _match(self, request: SimRequest) -> None:
        blocks = self._pool.match(request.hash_ids)
        # At least one token of a prompt is computed, because its output is the answer's first token.
        most = (request.waiting.new_tokens + request.waiting.history_tokens - 1) // self._pool.block_tokens
        request.waiting.set_history(min(blocks, most) * self._pool.block_tokens)
        request.match_version = self._pool.version

    def _count(self, waiting: WaitingView, sign: int) -> None:
        view, new, history = self._view, waiting.new_tokens, waiting.history_tokens
        view.queued_prefills += sign
        view.queued_tokens += sign * new
        view.queued_attention += sign * new * (new + 2 * history)
        view.queued_history_tokens += sign * history

    # -- a pass ------------------------------------------------------------------------------------------------------

    def admit(self, decision: PassDecision, view: PassView) -> list[tuple[SimRequest, int]]:
        """Requests and tokens of the pass, taken out of the queue, their memory taken. May be empty.

        Admission counts a request's limit in full, and that of running ones by ``GrowthRatio``, as SGLang's does.
        Raises SimError when the decision asks for what ``PassDecision`` does not allow.
        """
        check_decision(decision, self.chunk)
        parts: list[tuple[SimRequest, int]] = []
        continued = self.chunk if self._continues(decision) else None
        if continued is not None:
            tokens = self._chunk_part(continued, decision)
            self._pool.take(tokens)
            continued.private_tokens += tokens
            parts.append((continued, tokens))
        budget = view.pass_budget_tokens - sum(tokens for _, tokens in parts)
        # The host holds one chunk: another request may be cut only when the one under way completes in this pass.
        may_cut = self.chunk is None or (continued is not None and tokens == continued.waiting.new_tokens)
        admitted = self._fitting(decision, view, budget, may_cut=may_cut)
        self._take_out([request for request, _ in admitted])
        parts += admitted
        for request, tokens in admitted:
            if tokens < request.waiting.new_tokens:
                self.chunk = request
        return parts

    def _continues(self, decision: PassDecision) -> bool:
        if decision.action is Action.LONG:
            return not decision.selected
        return self.chunk is not None and not decision.park  # SHORT with mixing: the chunk shares the pass

    def _chunk_part(self, chunk: SimRequest, decision: PassDecision) -> int:
        """What the request under way takes; beside short prompts, what they leave of ``chunk_tokens``."""
        most = self._knobs.chunk_tokens
        if decision.chunk_tokens is not None:
            beside = sum(view.new_tokens for view in decision.selected)
            most = min(most, max(1, decision.chunk_tokens - beside))
        return min(chunk.waiting.new_tokens, most)

    def _fitting(
        self, decision: PassDecision, view: PassView, budget: int, *, may_cut: bool
    ) -> list[tuple[SimRequest, int]]:
        slots, free = view.slots, view.kv_free_tokens - self.chunk_rest_tokens
        most = self._knobs.chunk_tokens
        if decision.action is Action.LONG and decision.chunk_tokens is not None:
            most = min(most, decision.chunk_tokens)
        fitting: list[tuple[SimRequest, int]] = []
        for waiting in decision.selected:
            request = request_of(waiting)
            if request.hash_ids and request.match_version != self._pool.version:
                self._match_again(request)  # as the host does when it adds a request: blocks have come or gone since
            blocks = request.hash_ids[: waiting.history_tokens // self._pool.block_tokens]
            locked = self._pool.available_tokens - self._pool.room_after_lock(blocks)
            needed = waiting.new_tokens + locked + waiting.output_tokens
            tokens = min(waiting.new_tokens, budget, most)
            cut = tokens < waiting.new_tokens
            if slots <= len(fitting) or needed > free or tokens <= 0 or (cut and not may_cut):
                break
            free -= needed
            budget -= tokens
            self._pool.lock(blocks)
            request.shared_blocks = len(blocks)
            self._pool.take(tokens)
            request.private_tokens = tokens
            fitting.append((request, tokens))
            if cut:
                break  # the host holds one chunk
        return fitting

    def _take_out(self, requests: list[SimRequest]) -> None:
        waiting = self.waiting
        if all(one.waiting is head for one, head in zip(requests, waiting, strict=False)):
            del waiting[: len(requests)]
        else:
            gone = {id(one.waiting) for one in requests}
            self.waiting = [view for view in waiting if id(view) not in gone]

    def start(self, parts: list[tuple[SimRequest, int]], now_s: float, *, mixed: bool) -> PrefillPass:
        """The pass that holds these parts; it is under way until ``end``."""
        new = attention = history = 0
        for request, tokens in parts:
            past = request.waiting.history_tokens
            if request.prefill_start_s is None:
                request.prefill_start_s, request.hit_tokens = now_s, past
            new += tokens
            attention += tokens * (tokens + 2 * past)
            history += past
        self.under_way = PrefillPass(parts, new, attention, history, now_s, mixed)
        return self.under_way

    def end(self, done: PrefillPass) -> list[SimRequest]:
        """Brings views up to date after a pass; returns the requests whose prompt is complete."""
        complete: list[SimRequest] = []
        for request, tokens in done.parts:
            waiting = request.waiting
            self._count(waiting, -1)
            waiting.new_tokens -= tokens
            waiting.history_tokens += tokens
            if waiting.new_tokens:
                self._count(waiting, 1)
                continue
            if request is self.chunk:
                self.chunk = None
            complete.append(request)
            if self._share_later:
                self._unshared.append(request)
            else:
                self._share(request)
        return complete

    def share_ended(self) -> None:
        """Blocks of passes that have ended become shareable, with ``share_later``."""
        unshared, self._unshared = self._unshared, []
        for request in unshared:
            self._share(request)

    def _share(self, request: SimRequest) -> None:
        """Whole blocks of the prompt become shareable."""
        ids = request.hash_ids
        whole = min(len(ids), request.input_tokens // self._pool.block_tokens)
        if whole > request.shared_blocks:
            fresh = ids[request.shared_blocks : whole]
            self._pool.share(fresh)
            request.private_tokens -= len(fresh) * self._pool.block_tokens
            request.shared_blocks = whole

    def check_integrity(self) -> None:
        """Asserts that the backlog sums are those of the queue; holds between passes."""
        views = [
            *self.waiting,
            *(request.waiting for request in self.arriving),
            *([] if self.chunk is None else [self.chunk.waiting]),
        ]
        assert self._view.queued_prefills == len(views)
        assert self._view.queued_tokens == sum(view.new_tokens for view in views)
        assert self._view.queued_attention == sum(
            view.new_tokens * (view.new_tokens + 2 * view.history_tokens) for view in views
        )
        assert self._view.queued_history_tokens == sum(view.history_tokens for view in views)


def check_decision(decision: PassDecision, chunk: SimRequest | None) -> None:
    """Raises SimError when ``decision`` breaks the contract of ``PassDecision`` towards the host."""
    problem = None
    if decision.action is Action.SHORT and not decision.selected:
        problem = "a SHORT pass without requests"
    elif decision.action is Action.LONG and not decision.selected and chunk is None:
        problem = "a LONG pass that continues a chunk, and there is none"
    elif decision.action is Action.LONG and decision.selected and decision.park != (chunk is not None):
        problem = "a LONG pass that starts a request while a chunk is under way must park it"
    if problem is not None:
        raise SimError(f"the engine policy asked for {problem}: {decision.action.value}, {decision.reason.value}")
