"""Which requests run where, for policies that move them: rows of load reports, joined with the router's own records.

An instance sends rows of its running requests every ``MoveKnobs.interval_s``, as the router asks it to. Since then some
have ended and others have come, and requests of other senders have no record here. So a row counts only while the
router's record says that the request runs there, and the rest of the instance's load (its view is up to date) counts as
requests that are not listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pla_sglang.fleet.router.control.requests.moves import LENGTHS, MoveKnobs, MoveOrders
from pla_sglang.fleet.router.control.requests.request_record import ENDED, STREAMING, RequestRecord
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerTable
from pla_sglang.fleet.router.wire.rids import find_rid
from pla_sglang.load.report import MOST_ROWS, RequestRow
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.length_errors import JudgedPredictor
from pla_sglang.policy.interface.fleet import DecodeBatch, InstanceKind, InstanceView
from pla_sglang.policy.interface.remaining_length import EndedAnswer, Floats, RunningAnswer, RunningAnswers

ROWS_IN_ALL = 8192  # of all instances in an interval: what the control plane reads and joins in some 20 ms
LEAST_ROWS = 16  # of one instance
STALE_INTERVALS = 4  # rows that are older than so many are no ground for a move
LEAST_INTERVAL_S = 0.02  # of wall time; instances refuse less


class RunningRequests:
    """Joins the rows of load reports with the router's own records.

    Args:
        orders: knows which requests rest.
        clock: wall seconds.
        device_clock: in whose seconds the knobs are.

    Attributes:
        lengths: what is known of answers to come, and how far that was off.
    """

    def __init__(
        self,
        knobs: MoveKnobs,
        table: WorkerTable,
        orders: MoveOrders,
        *,
        clock: Callable[[], float],
        device_clock: DeviceClock,
    ) -> None:
        self._knobs = knobs
        self._table = table
        self.orders = orders
        self._clock = clock
        self._device_clock = device_clock
        self.lengths = JudgedPredictor(LENGTHS[knobs.lengths]())

    def wanted_rows(self) -> Mapping[str, Any]:
        """What each instance is asked for: ``rows`` of ``POST /pla/peers``."""
        instances = max(1, sum(1 for _ in self._table))
        return {"every_s": self._interval_s(), "most": min(MOST_ROWS, max(LEAST_ROWS, ROWS_IN_ALL // instances))}

    def list_decodes(self, view: InstanceView) -> DecodeBatch:
        """The running requests of one instance now, under the ids by which policies know them."""
        worker = self._table.of(view)
        age_s = self.rows_age_s(worker)
        fresh = age_s is not None and age_s <= STALE_INTERVALS * self._interval_s()
        joined = list(self._join_rows(worker))
        batch = DecodeBatch.of(
            [(record.view.rid, row.prompt_tokens + row.output_tokens, None) for row, record in joined]
        )
        if not self.lengths.is_blind:
            batch.remaining = self._predict(joined, view)
        movable = [fresh and self._may_move(record, row, view) for row, record in joined]
        batch.movable = np.array(movable, dtype=np.bool_)
        batch.unlisted_requests = max(0, view.running - len(joined))
        batch.unlisted_tokens = max(0, view.context_tokens - int(batch.tokens.sum()))
        return batch

    def rows_age_s(self, worker: Worker) -> float | None:
        """How old its rows are; None: there are none yet."""
        if not worker.rows:
            return None
        return self._clock() - min(at_s for at_s, _ in worker.rows.values())

    def to_dict(self) -> dict[str, Any]:
        """For /pla/state: by instance, how many rows there are of it and how old they are."""
        aged = ((worker, self.rows_age_s(worker)) for worker in self._table)
        return {
            worker.view.name: {"rows": sum(len(rows) for _, rows in worker.rows.values()), "age_s": round(age_s, 3)}
            for worker, age_s in aged
            if age_s is not None
        }

    def _interval_s(self) -> float:
        return max(LEAST_INTERVAL_S, self._device_clock.wall_s(self._knobs.interval_s))

    def _join_rows(self, worker: Worker) -> Iterator[tuple[RequestRow, RequestRecord]]:
        """Rows of the router's requests that run there now, as far as it knows."""
        for _, rows in worker.rows.values():
            for row in rows:
                rid, number = find_rid(row.rid)
                record = self.orders.records.get(rid)
                if record is None or record.state is ENDED or record.present.number != number:
                    continue
                if record.present.decode is worker:
                    yield row, record

    def _may_move(self, record: RequestRecord, row: RequestRow, view: InstanceView) -> bool:
        """Only a stream of one answer from a stateless instance can move. Where moves are carried out its relay must
        say so, too; what else forbids it, ``Migration`` knows."""
        if self.orders.move_request is not None and not record.movable:
            return False
        if (
            row.held
            or record.candidate is not None
            or view.kind is not InstanceKind.STATELESS
            or record.state is not STREAMING
        ):
            return False
        return record.ask.is_single and record.ask.stream and not self.orders.is_cooling_down(record)

    def _predict(self, joined: Sequence[tuple[RequestRow, RequestRecord]], view: InstanceView) -> Floats:
        answers = (
            RunningAnswer(
                record.rid,
                row.output_tokens,
                known=math.nan if (stated := record.ask.answer_tokens) is None else max(1, stated - row.output_tokens),
                prompt_tokens=record.prompt.tokens,
                limit_tokens=limit_of(record),
                streamed=record.ask.stream,
                started_s=started_s_of(record),
                predicted=math.nan if row.rest_tokens is None else row.rest_tokens,
            )
            for row, record in joined
        )
        models = [model_of(record) for _, record in joined]
        seen = RunningAnswers.of(answers, view.name, self._clock(), models if any(models) else ())
        return self.lengths.predict(seen)

    def note_end(self, record: RequestRecord, tokens: int, *, whole: bool, at_s: float) -> None:
        """A request has ended after so many tokens of its answer; ``whole``: the model has ended it, or its limit."""
        if self.lengths.is_blind or not record.ask.is_single:  # of several answers only the sum of the tokens is known
            return
        limit_tokens = limit_of(record)
        ended = EndedAnswer(
            record.rid,
            tokens,
            whole=whole and tokens < limit_tokens,
            prompt_tokens=record.prompt.tokens,
            limit_tokens=limit_tokens,
            streamed=record.ask.stream,
            started_s=started_s_of(record),
            ended_s=at_s,
            model=model_of(record),
        )
        self.lengths.observe_end(ended)


def limit_of(record: RequestRecord) -> float:
    """Its ``max_tokens``."""
    return math.inf if record.ask.output_tokens is None else float(record.ask.output_tokens)


def started_s_of(record: RequestRecord) -> float:
    """When its client saw the first token; before that, when it came."""
    first_s = record.shown_attempt.first_token_s
    return record.ask.arrived_s if first_s is None else first_s


def model_of(record: RequestRecord) -> str:
    """A fleet serves one model; an adapter may make it another."""
    return record.ask.adapter or ""
