"""Takes a request to its next hop: asks the control plane where it goes on, and joins what comes from there."""

from __future__ import annotations

from pla_sglang.fleet.router.http.json_body import Body
from pla_sglang.fleet.router.relay.next_hop import NextHop
from pla_sglang.fleet.router.relay.pull import Pull, join_hop
from pla_sglang.fleet.router.relay.request_hops import ask_of_hop
from pla_sglang.fleet.router.relay.request_life import RequestLife
from pla_sglang.fleet.router.relay.request_state import FORWARDING, MOVING, WAITING
from pla_sglang.fleet.router.wire import messages as m

_DEAD, _REFUSED = m.LossReason.DEAD, m.LossReason.REFUSED
STILL_S = 1.0  # a stream that has got something within that time is not given up for its instance's silence


class RequestMoves:
    """The moves of one request (``HopOwner``)."""

    __slots__ = ("_body", "_life")

    def __init__(self, life: RequestLife, body: Body) -> None:
        self._life, self._body = life, body

    def go_on(self, why: m.LossReason, worker: int, detail: str) -> bool:
        """The present hop is over, because of ``worker``; asks where the request goes on. False: nowhere."""
        life = self._life
        hops, attempt = life.hops, life.attempt
        if attempt is None or life.state not in (WAITING, FORWARDING, MOVING):
            return False
        hops.note_loss(why, worker)
        shown = life.response.first_s is not None
        if not life.kept.is_kept or not hops.may_go_on(shown=shown):
            return False
        self.cancel_pull()
        now_s = life.context.now_s()
        attempt.end_attempt(life.current_rids, m.Outcome.UPSTREAM_LOST)
        hops.assign, life.attempt = attempt.assign, None
        if life.state is not MOVING:
            life.move_to(MOVING)
        life.deadline_s = now_s + life.context.config.dispatch_timeout_s
        life.context.send_to_control(hops.ask_where(life.ask.rid, why, now_s, shown=shown, detail=detail))
        return True

    def on_death(self, worker: int, detail: str) -> bool:
        """The control plane says that an instance is dead. False: the request ends with it."""
        life = self._life
        if life.state is FORWARDING and life.attempt is not None and worker not in _workers_of(life.attempt.assign):
            return True
        if life.state is MOVING and (life.attempt is None or life.attempt.assign.decode != worker):
            return True  # it has left that instance
        return self.go_on(_DEAD, worker, detail)

    def on_silence(self, worker: int, detail: str) -> None:
        """The control plane hears nothing of an instance, which may be alive. The request leaves it if its answer
        stands still too and it can go on elsewhere; else it stays."""
        life, last_s = self._life, self._life.response.last_s
        if life.attempt is None or worker not in _workers_of(life.attempt.assign):
            return
        stands = life.state is not FORWARDING or last_s is None or life.context.now_s() - last_s >= STILL_S
        if stands and life.kept.is_kept and life.hops.may_go_on(shown=life.response.first_s is not None, losses=1):
            self.on_death(worker, detail)

    def on_continue(self, order: m.Continue) -> m.Assign | None:
        """Returns an assignment where the client has seen nothing: then it is dispatched as for the first time."""
        life = self._life
        hops, response = life.hops, life.response
        if order.source is not None:  # it is held there: a move
            self._take_over(order)
            return None
        if hops.question is None or order.hop <= hops.number:
            return None  # too late
        hops.begin_hop(order)
        life.ask = ask_of_hop(life.ask, order)
        if response.first_s is None or response.last_s is None:
            life.forget_attempt()
            return m.Assign(life.ask.rid, life.ask.attempt, order.target, reason=order.reason)
        life.deadline_s = response.last_s + life.context.config.stall_timeout_s
        tags = hops.make_tags()
        hop = NextHop(life.context, order, life.ask, kept=life.kept, body=self._body, tags=tags, owner=self)
        life.attempt = hop.attempt
        hop.start()
        return None

    def _take_over(self, order: m.Continue) -> None:
        """Where the request is not what the control plane takes it for, nothing changes."""
        life = self._life
        hops, now_s = life.hops, life.context.now_s()
        if life.state is not FORWARDING or order.hop <= hops.number or life.trial is not None:
            return
        if not life.kept.is_kept or not hops.may_go_on(shown=True):
            text = "its stream cannot go on elsewhere any more"
            life.context.send_to_control(hops.say_failed(life.ask.rid, order, _REFUSED, now_s, text))
            return
        pull = Pull(life, order, self._body)
        life.trial = pull
        pull.check_tokens()

    def cancel_pull(self) -> None:
        """A pull that is under way comes to nothing; nobody is told."""
        if self._life.trial is not None:
            self._life.trial.cancel()

    def on_no_next_hop(self, end: m.NoNextHop) -> None:
        hops = self._life.hops
        if hops.question is not None and end.hop == hops.number:
            self._life.lose_request(f"{hops.question.detail}; {end.message}", hops.question.why)

    def check_response(self) -> None:
        """The control plane has not said in time where the request goes on, or the next instance has not begun."""
        life = self._life
        if life.hops.question is not None:
            life.lose_request(life.hops.question.detail, life.hops.question.why)
        else:
            life.time_out(f"the answer stood still for {life.context.config.stall_timeout_s:g} s")

    # -- HopOwner ----------------------------------------------------------------------------------------------------

    def on_hop_joined(self, hop: NextHop, events: bytes) -> None:
        life = self._life
        life.move_to(FORWARDING)
        join_hop(life, hop, events)

    def on_hop_failed(self, hop: NextHop, why: m.LossReason, kind: m.FailureKind | None, detail: str) -> None:
        life = self._life
        if kind is not None:
            life.report_failure(hop.attempt.response_leg, kind, detail)
        if why is _REFUSED or not self.go_on(why, hop.worker, detail):
            life.lose_request(detail, why)


def _workers_of(assign: m.Assign) -> tuple[int | None, int | None]:
    return assign.decode, assign.prefill
