"""One simulated request: its place in its life, and what it holds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pla_sglang.policy.fleet import RequestView
from pla_sglang.policy.types import WaitingView
from pla_sglang.sim.errors import SimError

if TYPE_CHECKING:
    from pla_sglang.sim.instance import Instance


class Stage(enum.Enum):
    """Where a request is in its life; the last four are ends."""

    NEW = "new"  # has not arrived
    PENDING = "pending"  # arrived; no instance is ready for it
    PREFILL = "prefill"  # waits for its prefill, or is in it
    HANDOFF = "handoff"  # has its KV in one place and is to decode in another, or waits for a place
    DECODE = "decode"  # in a running batch
    FINISHED = "finished"
    CANCELLED = "cancelled"  # by its user
    REFUSED = "refused"  # can never fit an instance
    FAILED = "failed"  # its instance died and it may not be tried again


_ABORTS = frozenset({Stage.CANCELLED, Stage.FAILED})
LEGAL: Mapping[Stage, frozenset[Stage]] = {
    Stage.NEW: frozenset({Stage.PENDING, Stage.PREFILL, Stage.REFUSED, Stage.CANCELLED}),
    Stage.PENDING: frozenset({Stage.PREFILL}) | _ABORTS,
    Stage.PREFILL: frozenset({Stage.HANDOFF, Stage.DECODE, Stage.FINISHED, Stage.PENDING}) | _ABORTS,
    Stage.HANDOFF: frozenset({Stage.DECODE, Stage.PENDING}) | _ABORTS,
    Stage.DECODE: frozenset({Stage.FINISHED, Stage.PREFILL, Stage.HANDOFF, Stage.PENDING}) | _ABORTS,
    Stage.FINISHED: frozenset(),
    Stage.CANCELLED: frozenset(),
    Stage.REFUSED: frozenset(),
    Stage.FAILED: frozenset(),
}
ENDS = frozenset({Stage.FINISHED, Stage.CANCELLED, Stage.REFUSED, Stage.FAILED})


class SimRequest:
    """One request. Only ``move`` changes its stage.

    Attributes:
        row: row of the trace.
        output_tokens: tokens it gets; known to nobody who decides.
        limit_tokens: tokens it may get at most, which admission counts on.
        waiting: its view for engine policies. fleet: its view for router policies.
        home: the instance that holds its KV, or is to compute it; None while pending.
        target: the instance it is on its way to, or is to leave for; else None.
        reserved: the target has made room for it.
        planned: where it was said to decode when it arrived.
        private_tokens: KV tokens it holds at home that it shares with nobody (of a running request: as it joined).
        shared_blocks: leading blocks of its prompt that it has locked at home.
        done_tokens: tokens given to its user (of a running request: as it joined).
        join_step, finish_step: step counters of its running batch; None while not running.
        epoch: changes with every place; an event that carries an older one is stale.
    """

    __slots__ = (
        "arrival_s",
        "done_tokens",
        "epoch",
        "finish_s",
        "finish_step",
        "first_token_s",
        "fleet",
        "hash_ids",
        "home",
        "input_tokens",
        "join_step",
        "limit_tokens",
        "match_version",
        "migrations",
        "output_tokens",
        "planned",
        "prefilled_at",
        "private_tokens",
        "reserved",
        "retractions",
        "retries",
        "rid",
        "row",
        "shared_blocks",
        "stage",
        "target",
        "waiting",
    )

    def __init__(
        self,
        row: int,
        arrival_s: float,
        input_tokens: int,
        output_tokens: int,
        *,
        limit_tokens: int,
        hash_ids: tuple[int, ...] = (),
        slo_s: tuple[float | None, float | None] = (None, None),
    ) -> None:
        self.row = row
        self.rid = f"r{row}"
        self.arrival_s = arrival_s
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens
        self.limit_tokens = limit_tokens
        self.hash_ids = hash_ids
        ttft_slo_s, tpot_slo_s = slo_s
        deadline_s = None if ttft_slo_s is None else arrival_s + ttft_slo_s
        self.waiting = WaitingView(
            self.rid, input_tokens, 0, arrival_s, deadline_s=deadline_s, output_tokens=limit_tokens, handle=self
        )
        self.fleet = RequestView(
            self.rid,
            input_tokens,
            arrival_s,
            ttft_slo_s=ttft_slo_s,
            tpot_slo_s=tpot_slo_s,
            hash_ids=hash_ids,
            handle=self,
        )
        self.stage = Stage.NEW
        self.home: Instance | None = None
        self.target: Instance | None = None
        self.reserved = False
        self.planned: Instance | None = None
        self.private_tokens = 0
        self.shared_blocks = 0
        self.match_version = -1
        self.done_tokens = 0
        self.join_step: int | None = None
        self.finish_step: int | None = None
        self.prefilled_at = -1  # index of the instance that completed its prompt last
        self.first_token_s: float | None = None
        self.finish_s: float | None = None
        self.retries = 0
        self.retractions = 0
        self.migrations = 0
        self.epoch = 0

    def move(self, stage: Stage) -> None:
        """Raises SimError on a move that ``LEGAL`` does not have."""
        if stage not in LEGAL[self.stage]:
            raise SimError(f"request {self.rid}: {self.stage.value} -> {stage.value} is not allowed")
        self.stage = stage

    @property
    def context_tokens(self) -> int:
        """KV tokens it needs to go on decoding: the prompt and every answer token but the last."""
        return self.input_tokens + max(0, self.done_tokens - 1)

    @property
    def limit_left(self) -> int:
        """Tokens it may still get."""
        return max(1, self.limit_tokens - self.done_tokens)

    def restart(self) -> None:
        """Its KV is gone: everything so far, answer included, is to be prefilled again."""
        waiting = self.waiting
        waiting.new_tokens = self.input_tokens + self.done_tokens
        waiting.history_tokens = 0
        waiting.resumed = self.done_tokens > 0
        waiting.output_tokens = self.limit_left
        waiting.aged_stamp = -1
        self.private_tokens = self.shared_blocks = 0
        self.match_version = -1
        self.home = self.target = self.planned = None
        self.reserved = False
        self.join_step = self.finish_step = None
        self.epoch += 1

    def __repr__(self) -> str:
        return f"{self.rid}({self.stage.value})"
