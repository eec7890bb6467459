"""Which requests may be what their instance has died of: those are sent to no other one. Pure but for the table.

A request that ends an engine does so in its first passes, or runs there alone. So what has shown tokens beside others
is no more likely to blame than they are. Of the rest it is asked how the instance ended. Where all of it was killed at
once, its scheduler was heard of until then; where the scheduler has died by itself, it had been silent before. An
instance that only says nothing may be frozen, and one that is heard of again has not ended at all.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from pla_sglang.fleet.router.control.policy_setup import LivePolicy
from pla_sglang.fleet.router.control.requests.request_record import Attempt, RequestRecord
from pla_sglang.fleet.router.control.workers.health import HealthKnobs
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState
from pla_sglang.fleet.router.wire.messages import Cause, Over
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.predictor import TtftPredictor

# Silence of its scheduler before an instance was lost that says that it died by itself. Where all of it is killed its
# last word is fresh. When a scheduler has raised, SGLang 0.5.17 waits for 5 s at least before it ends
# (SGLANG_PYSPY_DUMP_BEFORE_CRASH, on by default).
DIED_FIRST_S = 3.0
PASSES = 2.0  # of the predicted longest pass: a prediction may be wrong, and a word may have been missed between two
SETTLE_S = 1.0  # what is sent to an instance so long after its scheduler's last word has never begun there


class Suspicion(enum.Enum):
    """Why a request does not go on. The value is the reason in metrics, the text is for people."""

    text: str

    def __new__(cls, value: str, text: str) -> Suspicion:
        member = object.__new__(cls)
        member._value_, member.text = value, text
        return member

    TO_BLAME = "to_blame", "its instance has died in what may have been its first pass, so no other one gets it"
    ALONE = "ran_alone", "its instance has died while it ran nothing else, so no other one gets it"
    IS_WELL = "is_well", "its instance is well, so no other one gets it"


class Suspects:
    """Judges requests whose instance is lost, or has broken their answer off."""

    def __init__(self, policy: LivePolicy, knobs: HealthKnobs) -> None:
        self._policy, self._knobs = policy, knobs

    def judge(
        self, record: RequestRecord, over: Over, worker: Worker, others: Iterable[RequestRecord]
    ) -> Suspicion | None:
        """Why a request whose present attempt is ``over`` with ``worker`` goes nowhere else; None: it may.

        ``others``: requests that are open.
        """
        if not self.died_by_itself(worker, over.at_s):
            return None
        if not over.shown:
            return Suspicion.TO_BLAME if self._began_there(record.present, worker) else None
        beside = (other for other in others if other is not record)
        return None if any(_was_there(other, worker) for other in beside) else Suspicion.ALONE

    def may_be_to_blame(self, attempt: Attempt, worker: Worker, at_s: float) -> bool:
        """True if a request of which nothing was shown may be what ``worker`` has fallen silent of, by ``at_s``."""
        return self.died_by_itself(worker, at_s) and self._began_there(attempt, worker)

    def died_by_itself(self, worker: Worker, at_s: float) -> bool:
        """True if its scheduler fell silent long before all of it was gone."""
        return silent_for_s(worker, self._policy.predictor, self._policy.clock, at_s) > DIED_FIRST_S

    def is_silent(self, worker: Worker, now_s: float) -> bool:
        limit_s = self._knobs.silence_s
        return limit_s > 0 and silent_for_s(worker, self._policy.predictor, self._policy.clock, now_s) > limit_s

    def is_well(self, worker: Worker, over: Over, now_s: float) -> bool | None:
        """True if the instance at which an attempt is over is well. None: not known yet.

        Where an answer has broken off, a health check says so: then it was the request. Where a connection was lost
        before the head, any word of the scheduler does: then it was the connection.
        """
        limit_s = self._knobs.timeout_s + 2 * self._knobs.interval_s
        if worker.state is WorkerState.DEAD or now_s - over.at_s > limit_s:
            return False
        if over.cause is Cause.LOST:
            return True if worker.heard_s > over.at_s else None
        verified = worker.verified
        return verified[1] if verified is not None and verified[0] >= over.at_s else None

    def _began_there(self, attempt: Attempt, worker: Worker) -> bool:
        """What came after the scheduler's last word has never run there."""
        return attempt.assigned_s is None or attempt.assigned_s <= worker.silent_since_s() + SETTLE_S


def needs_check(over: Over) -> bool:
    """True if only a health check of its instance tells whether the request may go on."""
    return over.cause is Cause.BROKEN and not over.shown


def _was_there(record: RequestRecord, worker: Worker) -> bool:
    """True if an attempt of the request ran there when ``worker`` was lost."""
    for attempt in record.attempts:
        here = worker in attempt.workers()
        # Others leave it when it falls silent, which is before its connections end.
        if here and (attempt.ended_s is None or attempt.ended_s >= worker.silent_since_s()):
            return True
    return False


def silent_for_s(worker: Worker, predictor: TtftPredictor | None, clock: DeviceClock, at_s: float) -> float:
    """For how long at ``at_s``, by the wall, beyond what the pass under way explains; not above 0: it may be in one."""
    return at_s - worker.silent_since_s() - PASSES * clock.wall_s(longest_pass_s(worker, predictor))


def longest_pass_s(worker: Worker, predictor: TtftPredictor | None) -> float:
    """Device seconds: a prefill of what is queued there, no more than one pass takes, behind all that is before it; or
    a decode step."""
    view, said = worker.view, worker.description
    if predictor is None or said is None:
        return 0.0
    tokens = view.queued_tokens
    new = tokens if said.chunk_tokens is None else min(tokens, said.chunk_tokens)
    before = min(tokens - new + view.queued_history_tokens, max(0, view.kv_capacity_tokens - new))
    prefill_s = predictor.curve(view).time_s(new, before) * predictor.factor(view) if new else 0.0
    return max(prefill_s, view.token_interval_s or 0.0)
