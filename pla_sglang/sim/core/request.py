"""One simulated request: its place in its life, and what it holds."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from pla_sglang.policy.interface.fleet import RequestView
from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.sim.core.errors import SimError


class SimStage(enum.Enum):
    """Where a request is in its life; the last two are ends."""

    NEW = "new"  # has not arrived
    PENDING = "pending"  # arrived; no instance is ready for it
    PREFILL = "prefill"  # waits for its prefill, or is in it
    HANDOFF = "handoff"  # has its KV in one place and is to decode in another, or waits for a place
    DECODE = "decode"  # in a running batch
    FINISHED = "finished"
    REFUSED = "refused"  # can never fit an instance


LEGAL: Mapping[SimStage, frozenset[SimStage]] = {
    SimStage.NEW: frozenset({SimStage.PENDING, SimStage.PREFILL, SimStage.REFUSED}),
    SimStage.PENDING: frozenset({SimStage.PREFILL}),
    SimStage.PREFILL: frozenset({SimStage.HANDOFF, SimStage.DECODE, SimStage.FINISHED}),
    SimStage.HANDOFF: frozenset({SimStage.DECODE, SimStage.PENDING}),
    SimStage.DECODE: frozenset({SimStage.FINISHED, SimStage.PREFILL, SimStage.HANDOFF}),
    SimStage.FINISHED: frozenset(),
    SimStage.REFUSED: frozenset(),
}
ENDS = frozenset({SimStage.FINISHED, SimStage.REFUSED})


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class SimRequest:
    """One request. Only ``move`` changes its stage.

    Attributes:
        row: row of the trace.
        output_tokens: tokens it gets; known to nobody who decides.
        limit_tokens: tokens it may get at most, which admission counts on.
        hash_ids, answer_ids: see ``Trace``.
        slo_s: targets for TTFT and TPOT, which ``fleet`` keeps.
        waiting: its view for engine policies; the queue that it joins sets what counts of its answer. fleet: its view
            for router policies.
        home: index of the instance that holds its KV, or is to compute it; None while pending.
        target: index of the instance it is on its way to, or is to leave for; else None.
        reserved: the target has made room for it.
        planned: index of the instance where it was said to decode when it arrived.
        private_tokens: KV tokens it holds at home that it shares with nobody (of a running request: as it joined).
        shared_blocks: leading blocks of its prompt that it has locked at home.
        done_tokens: tokens given to its user (of a running request: as it joined).
        join_step, finish_step: step counters of its running batch; None while not running.
        prefill_start_s, decode_start_s: when its first pass began, and when it first joined a running batch.
        predicted_hit_tokens: of its prompt in the cache of the instance that it is sent to, as the router sees it.
        hit_tokens: of its prompt in that cache when its first pass begins.
        prefilled_at: index of the instance that completed its prompt last; -1: none.
        epoch: changes with every place; an event that carries an older one is stale.
    """

    row: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    _: dataclasses.KW_ONLY
    limit_tokens: int
    hash_ids: tuple[int, ...] = ()
    answer_ids: tuple[int, ...] = ()
    slo_s: dataclasses.InitVar[tuple[float | None, float | None]] = (None, None)
    rid: str = dataclasses.field(init=False)
    waiting: WaitingView = dataclasses.field(init=False)
    fleet: RequestView = dataclasses.field(init=False)
    stage: SimStage = SimStage.NEW
    home: int | None = None
    target: int | None = None
    reserved: bool = False
    planned: int | None = None
    private_tokens: int = 0
    shared_blocks: int = 0
    match_version: int = -1
    done_tokens: int = 0
    join_step: int | None = None
    finish_step: int | None = None
    predicted_hit_tokens: int = 0
    hit_tokens: int = 0
    prefilled_at: int = -1
    prefill_start_s: float | None = None
    first_token_s: float | None = None
    decode_start_s: float | None = None
    finish_s: float | None = None
    retractions: int = 0
    migrations: int = 0
    epoch: int = 0

    def __post_init__(self, slo_s: tuple[float | None, float | None]) -> None:
        self.rid = f"r{self.row}"
        ttft_slo_s, tpot_slo_s = slo_s
        deadline_s = None if ttft_slo_s is None else self.arrival_s + ttft_slo_s
        self.waiting = WaitingView(
            self.rid,
            self.input_tokens,
            0,
            self.arrival_s,
            deadline_s=deadline_s,
            handle=self,
        )
        self.fleet = RequestView(
            self.rid,
            self.input_tokens,
            self.arrival_s,
            ttft_slo_s=ttft_slo_s,
            tpot_slo_s=tpot_slo_s,
            handle=self,
        )

    def move(self, stage: SimStage) -> None:
        """Raises SimError on a move that ``LEGAL`` does not have."""
        if stage not in LEGAL[self.stage]:
            raise SimError(f"request {self.rid}: {self.stage.value} -> {stage.value} is not allowed")
        self.stage = stage

    @property
    def context_tokens(self) -> int:
        """KV tokens it needs to go on decoding: the prompt and every answer token but the last."""
        return self.input_tokens + max(0, self.done_tokens - 1)

    @property
    def arriving_tokens(self) -> int:
        """KV tokens at its arrival where it is to decode; a prefill that is not done yet adds one to the answer."""
        return self.input_tokens + self.done_tokens if self.stage is SimStage.PREFILL else self.context_tokens

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
        waiting.aged_stamp = waiting.latest_stamp = -1
        waiting.rematched = True
        self.private_tokens = self.shared_blocks = 0
        self.match_version = -1
        self.home = self.target = self.planned = None
        self.reserved = False
        self.join_step = self.finish_step = None
        self.epoch += 1

    def __repr__(self) -> str:
        return f"{self.rid}({self.stage.value})"
