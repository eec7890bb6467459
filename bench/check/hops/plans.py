"""Requests, and what befalls each: drawn from a seed. Pure."""

from __future__ import annotations

import dataclasses
import enum
import random

from bench.check.faults.bodies import Body, make_chain_body, make_demo_body
from bench.check.hops.settings import CHAIN

LIVES_OF_A_BODY = 4
HOPS_WEIGHTS = (2, 4, 3, 2, 1)  # of 0 to 4 events in a life


class Event(enum.Enum):
    """What befalls a request that runs. The first two take it to another instance."""

    MOVE = "move"  # held, pulled from elsewhere, committed
    LOSE = "lose"  # its connection breaks at any byte, and its answer is computed again elsewhere
    RESUME = "resume"  # held, and told to go on
    FORGET = "forget"  # held, and goes on by itself
    CUT_PULL = "cut_pull"  # held, its pull is broken off, and it is told to go on
    ABORT = "abort"
    ABORT_HELD = "abort_held"
    LEAVE = "leave"  # its client goes away
    LEAVE_HELD = "leave_held"


ENDS = (Event.ABORT, Event.ABORT_HELD, Event.LEAVE, Event.LEAVE_HELD)
_WEIGHTS = {Event.MOVE: 8, Event.LOSE: 3, Event.RESUME: 3, Event.FORGET: 1, Event.CUT_PULL: 2}


@dataclasses.dataclass(frozen=True)
class Life:
    """``events``: with the number of tokens after which each is due, in order; only the last may be an end.
    ``marked``: its stream says its tokens; nothing befalls one without."""

    index: int
    body: Body
    events: tuple[tuple[int, Event], ...]
    first: int  # the instance where it begins
    marked: bool = True

    @property
    def ends_early(self) -> bool:
        return bool(self.events) and self.events[-1][1] in ENDS


def plan_lives(count: int, model: str, *, instances: int, seed: str) -> list[Life]:
    """The same for the same seed."""
    rng = random.Random(seed)
    make = make_chain_body if model == CHAIN else make_demo_body
    bodies = [make(rng) for _ in range(max(8, count // LIVES_OF_A_BODY))]
    return [plan_life(index, rng, bodies, instances=instances) for index in range(count)]


def plan_life(index: int, rng: random.Random, bodies: list[Body], *, instances: int) -> Life:
    """Of the body with this index, or of any where there are fewer."""
    body = bodies[index] if index < len(bodies) else rng.choice(bodies)
    count = rng.choices(range(len(HOPS_WEIGHTS)), HOPS_WEIGHTS)[0]
    cuts = sorted(rng.sample(range(1, max(2, body.tokens)), min(count, max(1, body.tokens - 1))))
    events = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=len(cuts))
    if events and rng.random() < 0.08:
        events[-1] = rng.choice(ENDS)
    return Life(index, body, tuple(zip(cuts, events, strict=True)), rng.randrange(instances))
