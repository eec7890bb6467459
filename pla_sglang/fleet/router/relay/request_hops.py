"""What a relay knows of one request's hops: whether there may be another one, and what has become of those before."""

from __future__ import annotations

import msgspec

from pla_sglang.fleet.router.http.json_body import Body
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.marked_stream import MarkedStreamReader
from pla_sglang.fleet.router.relay.movability import Movable, Tags, Unmovable, judge_request
from pla_sglang.fleet.router.relay.next_hop import tags_of_rest
from pla_sglang.fleet.router.relay.upstream_leg import DETAIL_CHARS
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.rids import rid_at_instance

MAX_KILLED = 2  # what has killed as many instances is not sent to another one
_KILLED = frozenset({m.LossReason.DEAD, m.LossReason.BROKEN, m.LossReason.ABORTED})


class RequestHops:
    """The hops of one request. It can go on elsewhere while its body is kept, and its client has seen nothing or the
    stream says its token ids.

    Attributes:
        number: of the present hop, from 1.
        stream: the answer, where it says its token ids; None also before it was sent.
        assign: where the present hop is, or the last one was.
        question: the report of the last hop's loss, until the control plane has answered it.
    """

    __slots__ = ("_answer_id", "_avoided", "_context", "_killed", "_movable", "assign", "number", "question", "stream")

    def __init__(self, context: RelayContext) -> None:
        self._context = context
        self._movable: Movable | Unmovable | None = None  # None: not judged yet
        self._answer_id = ""
        self._killed: tuple[int, ...] = ()
        self._avoided: tuple[int, ...] = ()
        self.number = 1
        self.stream: MarkedStreamReader | None = None
        self.assign: m.Assign | None = None
        self.question: m.Lost | None = None

    def judge(self, ask: m.Ask, body: Body, raw: bytes) -> bool:
        """Decides whether the body is kept for another hop."""
        if not self._context.workers.migration:
            return False
        if self._movable is None:
            self._movable = judge_request(ask, body, raw)
            if isinstance(self._movable, Unmovable):
                self.count_unmovable(self._movable)
        return isinstance(self._movable, Movable)

    def count_unmovable(self, reason: Unmovable) -> None:
        self._movable = reason
        self._context.counters.count_event("unmovable_total", reason=reason.value)

    def begin_stream(self, ask: m.Ask, assign: m.Assign) -> Tags | None:
        """Its first event may come from the instances of ``assign``. Returns the tags that mark the stream; None: it is
        none, or they cannot."""
        self.assign = assign
        self.end_stream()
        movable = self._movable
        if not isinstance(movable, Movable) or not ask.stream:
            return None
        find, pair = self._context.workers.find_worker, (assign.decode, assign.prefill)
        workers = [find(number) for number in pair if number is not None]
        if not all(worker is not None and worker.hops for worker in workers):
            self._context.counters.count_event("unmovable_total", reason=Unmovable.INSTANCE.value)
            return None
        self.stream = MarkedStreamReader(self._context.kept, wants_usage=movable.wants_usage)
        self._answer_id = rid_at_instance(ask.rid, ask.reached)
        return movable.tags

    def end_stream(self) -> None:
        """The request has ended, or another attempt begins."""
        self.question = None
        if self.stream is not None:
            self.stream.free_ids()
            self.stream = None

    def note_first_events(self, stream: MarkedStreamReader | None) -> None:
        """The client is about to get the answer. ``stream``: None where it is none that says its token ids."""
        if stream is None:
            self.end_stream()
        elif not stream.prompt:  # the instance was asked for them, and cannot say them of this request
            self.count_unmovable(Unmovable.INSTANCE)

    def note_loss(self, why: m.LossReason, worker: int) -> None:
        if why in _KILLED:
            self._killed += (worker,)
        else:
            self._avoided += (worker,)

    def may_go_on(self, *, shown: bool, losses: int = 0) -> bool:
        """``shown``: the client has got something. ``losses``: that are to come on top. The body is kept."""
        if not isinstance(self._movable, Movable) or len(self._killed) + losses >= MAX_KILLED:
            return False
        return not shown or (self.stream is not None and self.stream.can_go_on)

    def ask_where(self, rid: str, why: m.LossReason, at_s: float, *, shown: bool, detail: str) -> m.Lost:
        """The question to the control plane; the arguments are as in ``Lost``."""
        tokens = len(self.stream.ids) if self.stream is not None and shown else 0
        detail = detail[:DETAIL_CHARS]
        self.question = m.Lost(rid, self.number, tokens, why, at_s, shown, self._killed, self._avoided, detail)
        return self.question

    def begin_hop(self, order: m.Continue) -> None:
        self.number, self.question = order.hop, None

    def say_failed(self, rid: str, order: m.Continue, why: m.LossReason, at_s: float, detail: str) -> m.Lost:
        """A hop that should have followed the present one comes to nothing."""
        tokens = 0 if self.stream is None else len(self.stream.ids)
        return m.Lost(rid, order.hop, tokens, why, at_s, shown=True, detail=detail[:DETAIL_CHARS])

    def make_tags(self) -> Tags:
        """For the instance that goes on with the stream."""
        assert isinstance(self._movable, Movable) and self.stream is not None
        return tags_of_rest(self._movable.tags, self.stream, self._answer_id)


def ask_of_hop(ask: m.Ask, order: m.Continue) -> m.Ask:
    """``ask`` as it is for this hop: another attempt, under another id at its instance."""
    return msgspec.structs.replace(ask, attempt=order.reached + 1, reached=order.reached, body=None)
