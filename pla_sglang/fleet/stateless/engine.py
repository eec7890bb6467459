"""The stateless engine of one scheduler: it routes what comes, and moves both ends one step before each pass."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from pla_sglang.common.errors import RefusedRequestError
from pla_sglang.common.series import LabelledSeries
from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.adapters import AdapterPlaces
from pla_sglang.fleet.stateless.host.side_channel import SideChannel
from pla_sglang.fleet.stateless.requests.admission import admit_received
from pla_sglang.fleet.stateless.requests.arrival import Begun, begin
from pla_sglang.fleet.stateless.requests.messages import PlaPeers
from pla_sglang.fleet.stateless.requests.migration import MigrationSide
from pla_sglang.fleet.stateless.requests.pausing import PausedRequests
from pla_sglang.fleet.stateless.transfer.build import build_ends
from pla_sglang.fleet.stateless.transfer.deferred_free import DeferredFree
from pla_sglang.fleet.stateless.transfer.fence import hear_senders
from pla_sglang.fleet.stateless.transfer.legs import KIND_ATTRIBUTE, Caps, LegKind, kind_of
from pla_sglang.fleet.stateless.transfer.peers import PeerBook, UnknownPeerError
from pla_sglang.fleet.stateless.transfer.receiving import Receiver
from pla_sglang.fleet.stateless.transfer.rooms import KEPT_S, UnclaimedRooms
from pla_sglang.fleet.stateless.transfer.sending import GivenUpError, Sender
from pla_sglang.fleet.stateless.transfer.series import LegSeries
from pla_sglang.load.legs import LegLoad
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.host.arguments import find_bootstrap_host
from pla_sglang.plugin.engine.host.memory import growth_ratio, reserve_kv
from pla_sglang.plugin.engine.host.transfers import name_protocol
from pla_sglang.plugin.engine.snapshot import output_tokens

logger = logging.getLogger(__name__)

TICK_S = 1.0  # between two looks at time-outs, connections and rooms
PULL_KEPT_S = 60.0  # that a pull waits for its KV at most; a hold lasts 10 s where nobody says otherwise


class StatelessEngine:
    """Everything runs on the scheduler's thread but connecting to peers and the reading of acknowledgements.

    Args:
        faults, channel: of this process.
        series: makes those that are exported; None: the host has no metrics.
    """

    def __init__(
        self,
        scheduler: Any,
        config: PlaConfig,
        faults: Faults,
        channel: SideChannel,
        series: LabelledSeries | None = None,
    ) -> None:
        self._scheduler = scheduler
        self.faults, self._channel = faults, channel
        self.incarnation = secrets.token_hex(8)
        args = scheduler.server_args
        self.bootstrap_port = args.disaggregation_bootstrap_port
        self.book = PeerBook(find_bootstrap_host(args), self.bootstrap_port)
        agree = self._agree = functools.partial(calls.all_ranks_agree, scheduler)
        receive_caps = Caps.of_share(scheduler, config.receive_share)
        sending, receiving, transfers = build_ends(
            scheduler, book=self.book, receive_caps=receive_caps, agree=agree, faults=faults
        )
        self._sending, self._fingerprints = sending, transfers.fingerprints
        self.connector = receiving.connector
        self.adapters = AdapterPlaces(scheduler)
        self.deferred = DeferredFree(agree, faults)
        send_caps, hold_caps = (Caps.of_share(scheduler, share) for share in (config.send_share, config.hold_share))
        self.sender = Sender(scheduler, sending, self.deferred, faults=faults, caps=send_caps)
        self.receiver = Receiver(
            scheduler,
            receiving,
            transfers,
            deferred=self.deferred,
            book=self.book,
            acknowledged=hear_senders(receiving.kv_manager, channel),
            faults=faults,
        )
        self.migration = MigrationSide(
            scheduler,
            sending,
            self.deferred,
            faults=faults,
            agree=agree,
            list_waiting=self._list_waiting,
            caps=hold_caps,
        )
        self.holder = self.migration.holder
        self.used_rooms = sending.rooms
        self._rooms, self._tick_s = UnclaimedRooms(), 0.0
        self._series = None if series is None else LegSeries(series)
        self.refused = self.redone = 0

    @staticmethod
    def now_s() -> float:
        return time.monotonic()

    # -- requests ----------------------------------------------------------------------------------------------------

    def on_peers(self, message: PlaPeers) -> None:
        """The router has told who this instance and its peers are."""
        replaced, new = self.book.tell(message.told)
        for peer in replaced:
            self._attempt(functools.partial(self.connector.drop, peer), f"forgetting peer {peer.name}")
        for peer in new:
            self.connector.connect(peer)
        probe = getattr(self._scheduler, "pla_probe", None)  # of the one rank that reports
        if probe is not None:
            probe.rows.ask_rows(message.told.rows)

    def takes(self, req: Any) -> bool:
        """Tells whether ``req`` was taken over as a leg (or refused); else the host queues it."""
        if kind_of(req) is not None:
            return False  # it comes back: retracted (a decode part is a whole request by then), or its grammar is ready
        taken, sound, wanted = True, True, True
        try:
            taken = self._route(req)
        except GivenUpError:
            wanted = False
        except Exception:
            logger.exception("pla_sglang: taking over request %s", req.rid)
            sound = False
        if req.bootstrap_host is not None:
            # All ranks act on a failure of any: a part that some have and others not would delay every later pass.
            sound, wanted = self._agree([sound, wanted])
        if not sound:
            self.faults.count += 1
            self._let_go(req, "the leg could not be taken over", HTTPStatus.INTERNAL_SERVER_ERROR)
        elif not wanted:
            reason = f"room {req.bootstrap_room} is not known any more: its decode part has given up"
            self._let_go(req, reason, HTTPStatus.GONE)
        return taken

    def _let_go(self, req: Any, reason: str, status: HTTPStatus) -> None:
        """Ends a request that some rank could not take over."""
        ends: tuple[Sender | Receiver, ...] = (self.sender, self.receiver)
        self.faults.for_each(ends, lambda end: end.forget(req), "forgetting a leg")
        if not req.finished():
            self.faults.for_each([req], lambda req: self._refuse(req, reason, status), "refusing a leg")

    def _route(self, req: Any) -> bool:
        """Raises GivenUpError."""
        try:
            kind = self.book.kind_of(req.bootstrap_host, req.bootstrap_port)
        except UnknownPeerError as error:
            self._refuse(req, str(error), HTTPStatus.CONFLICT)
            return True
        setattr(req, KIND_ATTRIBUTE, kind)
        if kind is not LegKind.WHOLE and (req.bootstrap_room is None or req.bootstrap_room < 0):
            self._refuse(req, "its part needs a bootstrap_room that is not negative", HTTPStatus.BAD_REQUEST)
            return True
        if self._is_taken(kind, req.bootstrap_room):
            self._refuse(req, f"room {req.bootstrap_room} is used here, or was", HTTPStatus.CONFLICT)
            return True
        try:
            begun = begin(req, kind, self._scheduler.model_config.think_end_ids)
        except RefusedRequestError as error:
            self._refuse(req, str(error), error.status)
            return True
        self.redone += begun in (Begun.REDONE, Begun.COMPLETE)
        if begun is Begun.COMPLETE:
            calls.end_finished(self._scheduler, req)
        if kind is LegKind.WHOLE:
            return begun is Begun.COMPLETE
        if not self._scheduler._set_or_validate_priority(req):
            return True
        if kind is LegKind.PREFILL:
            self.sender.add(req, self.now_s())
        else:
            self.receiver.add(req)
        return True

    def _is_taken(self, kind: LegKind, room: int) -> bool:
        """Tells whether another leg or paused request has the room of one that comes: all ranks know as much."""
        if kind is LegKind.PREFILL:
            return room in self.used_rooms or room in self.holder.holds
        return kind is LegKind.DECODE and self.receiver.waits_for(room)

    def _refuse(self, req: Any, reason: str, status: HTTPStatus) -> None:
        self.refused += 1
        calls.end_with_error(self._scheduler, req, reason, status)

    # -- what the plugin asks (``fleet_part.FleetPart``) ---------------------------------------------------------------

    def keeps_from_prefill(self, req: Any) -> bool:
        """Tells whether ``req`` was refused or waits for KV: it does not wait for a prefill here."""
        if req.finished():
            return True
        return kind_of(req) is LegKind.DECODE and not req.retracted_stain

    def decodes_here(self, req: Any) -> bool:
        """All but prefill parts do."""
        return kind_of(req) is not LegKind.PREFILL

    def list_paused(self) -> list[Any]:
        return [hold.req for hold in self.holder.holds.values()]

    def list_joining(self) -> list[Any]:
        return [*self.receiver.ready, *self.holder.list_returning()]

    def describe_load(self) -> LegLoad:
        return LegLoad.of_state(self.state())

    # -- what the host's hooks ask -------------------------------------------------------------------------------------

    def abort(self, matches: Callable[[str], bool]) -> None:
        """After the host has aborted what it knows of."""
        self._abort_legs(matches)
        self._attempt(lambda: self.holder.abort(matches), "an abort of paused requests", self.holder)

    def _abort_legs(self, matches: Callable[[str], bool]) -> None:
        self._attempt(lambda: self.sender.abort(matches), "an abort at the sending end", self.sender)
        self._attempt(lambda: self.receiver.abort(matches), "an abort at the receiving end", self.receiver)

    def end_all_legs(self) -> None:
        """Before the host takes its batches apart: it must not free what a transfer may still read.

        Paused requests are no legs: the host takes them apart with its running batch, and computes them again.
        """
        scheduler = self._scheduler
        self._attempt(self._return_held, "returning paused requests", self.holder)
        self._abort_legs(lambda rid: True)
        leave = functools.partial(self.sender.before_pass, scheduler.running_batch, scheduler.last_batch)
        self._attempt(leave, "leaving the host's batches", self.sender)

    def _return_held(self) -> None:
        running_batch = self._scheduler.running_batch
        # Of the running batch only its requests are looked at.
        running_batch.reqs = [*running_batch.reqs, *self.holder.return_all()]

    def _list_waiting(self) -> list[Any]:
        """Requests that are here and do not run."""
        queued = [*self._scheduler.waiting_queue, *self._scheduler.grammar_manager.grammar_queue]
        return [*queued, *(leg.req for leg in self.sender.legs.values()), *self.receiver.list_here()]

    # -- passes ------------------------------------------------------------------------------------------------------

    def before_pass(self, running_batch: Any, last_batch: Any) -> Any:
        """Moves everything one step; the running batch with those whose KV has arrived."""
        sender, receiver, holder = self.sender, self.receiver, self.holder
        self._attempt(lambda: sender.before_pass(running_batch, last_batch), "leaving the last batch", sender)
        now_s = self.now_s()
        self._attempt(
            lambda: self.migration.before_batches(running_batch, last_batch, now_s), "holding requests", holder
        )
        self._attempt(sender.poll, "watching what is sent", sender)
        self._attempt(lambda: receiver.pump(len(holder.list_growing())), "receiving", receiver)
        self._attempt(lambda: self.deferred.sweep(now_s), "freeing pages")
        if now_s >= self._tick_s:
            self._tick_s = now_s + TICK_S
            self._attempt(self._forget_peers, "forgetting peers")
            self._attempt(self.connector.reconnect, "keeping peers connected")
            self._attempt(lambda: self._expire(now_s), "time-outs")
            self._attempt(lambda: self._forget_rooms(now_s), "forgetting rooms")
            self._attempt(self.receiver.forget_said, "forgetting what senders have said")
            self._attempt(self._show_series, "showing series")
        try:
            self.adapters.count_used(running_batch, last_batch)
            for take in (holder.take_returning, receiver.take_ready):
                places = self._scheduler.max_running_requests - len(running_batch.reqs)
                joining = take(places, self.adapters.take)
                if joining:
                    running_batch = admit_received(self._scheduler, joining, running_batch, self.faults, self._agree)
            return running_batch
        except Exception:
            self._on_fault("admitting received requests", receiver, holder)
            return running_batch

    def after_pass(self) -> None:
        self._attempt(self.sender.after_pass, "following prefill parts", self.sender)

    def on_result(self, batch: Any) -> None:
        self._attempt(lambda: self.sender.on_result(batch), "sending KV", self.sender)

    def _show_series(self) -> None:
        if self._series is not None:
            self._series.show(self._count_legs(), self.book.count_states())

    def _expire(self, now_s: float) -> None:
        """The host's time-outs, for requests that it does not know of. No wait of theirs is without one."""
        told_waiting_s, told_running_s = calls.timeouts_s()
        legs_s = KEPT_S if told_waiting_s is None else min(told_waiting_s, KEPT_S)
        sending_s = KEPT_S if told_running_s is None else min(told_running_s, KEPT_S)
        self.sender.expire(waiting_s=now_s - legs_s, sending_s=now_s - sending_s)
        self.receiver.expire(legs_s=now_s - legs_s, pulls_s=now_s - min(legs_s, PULL_KEPT_S))

    def _forget_peers(self) -> None:
        """Those that are told no more, once no leg here needs their connection."""
        for peer in self.book.forget_unlisted(self.receiver.list_sources()):
            self.connector.drop(peer)

    def _forget_rooms(self, now_s: float) -> None:
        claimed = {leg.req.bootstrap_room for leg in self.sender.legs.values()} | set(self.holder.holds)
        self._rooms.sweep(self._sending.kv_manager, claimed, now_s)

    def _attempt(self, step: Callable[[], Any], what: str, *ends: Sender | Receiver | PausedRequests) -> None:
        try:
            step()
        except Exception:
            self._on_fault(what, *ends)

    def _on_fault(self, what: str, *ends: Sender | Receiver | PausedRequests) -> None:
        """An exception of ours must not end the scheduler, nor leave requests in it that nobody sees.

        With one leg or paused request each end deals itself. Here nobody can tell which it was: all of ``ends`` end.
        """
        self.faults.note(what + ("; all that it may concern end" if ends else ""))
        reason = f"an exception in its instance: {what}"
        self.faults.for_each(ends, lambda end: end.abort(lambda rid: True, reason), "ending what is here")

    # -- budgets and state -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Tells whether anything is here that the host does not count."""
        return bool(self.sender.legs or self.receiver.list_here() or self.deferred or self.holder.holds)

    def reserve_growth(self, adder: Any) -> None:
        """Take the growth of requests that will soon decode off what a prefill pass may admit."""
        for req in (*self.receiver.requests_with_memory(), *self.holder.list_growing()):
            reserve_kv(adder, output_tokens(req) * growth_ratio(req, adder.new_token_ratio))

    def state(self) -> dict[str, Any]:
        """Plain values only (it travels as msgpack). The first three are agreed with the router."""
        return {
            "bootstrap_port": self.bootstrap_port,
            "incarnation": self.incarnation,
            "transfer_backend": self._scheduler.transfer_backend.value,
            "transfer_protocol": name_protocol(),
            "kv_layout": self._fingerprints.layout,
            "peers": self.book.to_dict(),
            **self._count_legs(),
        }

    def _count_legs(self) -> dict[str, Any]:
        """The part of the state that changes with each leg."""
        dead = self._channel.find_dead()
        return {
            "ready": not dead,  # to hand over KV, either way
            "reason": f"the thread that reads {dead} has ended; start this instance again" if dead else "",
            "dropped": self._channel.count_dropped(),
            "sending": self.sender.state(),
            "receiving": self.receiver.state(),
            "quarantine": self.deferred.state(),
            "hops": True,  # requests can go on here; the router asks for that
            "held": {"redone": self.redone, "pulled": self.receiver.pulled, **self.holder.state()},
            "unclaimed_rooms": len(self._rooms),
            "refused": self.refused,
            "faults": self.faults.count,
        }
