"""A control plane that has restarted takes over what its relays have open, and learns what has ended meanwhile."""

from __future__ import annotations

from pla_sglang.router import messages as m
from pla_sglang.router.control.answers import Open
from pla_sglang.router.control.desk import Desk
from pla_sglang.router.control.entries import End
from pla_sglang.router.control.explain import Story


def on_hello(desk: Desk, hello: m.Hello, now_s: float) -> None:
    """What a relay has open. What is unknown here is from an earlier life; what it does not name has ended."""
    named = {one.ask.rid for one in hello.open}
    for request in [one for one in desk.open.values() if one.ask.relay == hello.relay]:
        if request.ask.rid not in named and request.dispatched_s is not None:
            for order in desk.close(request, End.RELAY_LOST, now_s, at_s=now_s):
                desk.abort(order)
    for one in hello.open:
        if desk.ledger.get(one.ask.rid) is None:
            _adopt(desk, one, now_s)
        elif one.ask.rid not in desk.open:  # given up while its relay was not heard; its instances were told to abort
            desk.give_up(one.ask, End.RELAY_LOST, "the router has given this request up")


def _adopt(desk: Desk, one: m.OpenRequest, now_s: float) -> None:
    """An instance that is not known here, as it came just before the end of the last life, stays the relay's matter."""
    ask, assign = one.ask, one.assign
    decode = desk.table.by_number.get(assign.decode)
    prefill = decode if assign.prefill is None else desk.table.by_number.get(assign.prefill)
    prompt = desk.prompts.look(ask)
    story = Story(ask.rid, ask.arrived_s, ask.tenant or "", prompt.tokens, prompt.exact, admission="adopted")
    request = Open(ask, desk.view_of(ask, prompt), prompt, story, prefill=prefill, decode=decode)
    about = {"tenant": ask.tenant or "", "relay": str(ask.relay)}
    entry = desk.ledger.open(ask.rid, now_s, prompts=ask.prompts, rids=ask.rids, **about)
    entry.reached = ask.reached
    sides = [(worker.number, side) for worker, side in desk.legs_of(request)]
    if sides:
        desk.ledger.assign(ask.rid, [(side, number) for number, side in sides], now_s, room=assign.bootstrap_room)
    desk.open[ask.rid] = request
    request.dispatched_s = now_s
    desk.stories.open(story)
    if prefill is not None and decode is not None:
        desk.track(request, now_s)
    for step in one.steps:
        desk.on_stage(step, now_s)
