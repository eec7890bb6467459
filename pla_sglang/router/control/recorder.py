"""Writes what the live policy sees and decides, for ``python -m pla_sglang.parity``."""

from __future__ import annotations

import logging
from pathlib import Path

from pla_sglang.errors import ConfigError
from pla_sglang.policy.decisions import Dispatch, FleetAction, Placement, PrefillSample
from pla_sglang.policy.fleet import FleetView, InstanceView, RequestView
from pla_sglang.recording import rows
from pla_sglang.recording.file import RecordWriter
from pla_sglang.recording.views import Differ

logger = logging.getLogger(__name__)


def open_record(path: Path, *, keep: bool) -> RecordWriter:
    """``keep``: what an earlier life of this router has recorded there stays, and this one gets a name beside it.

    Raises:
        ConfigError: the file cannot be written.
    """
    free, lives = path, 1
    while keep and free.exists():
        lives += 1
        free = path.with_name(f"life{lives}.{path.name}")
    try:
        return RecordWriter(free)
    except OSError as error:
        raise ConfigError(f"--record {free}: {error}") from None


class Recorder:
    """One recording of one fleet. Views are written before every line that a policy's answer may depend on.

    Where it cannot be written any more it ends there, as ``error`` says; requests go on.
    """

    def __init__(self, writer: RecordWriter, header: rows.Header, fleet: FleetView) -> None:
        self.decisions = 0
        self.error: str | None = None
        self._writer = writer
        self._fleet = fleet
        self._differ = Differ()
        self._write(header)

    def views(self, now_s: float) -> None:
        """Also called at each change of a role or a state: the order of such changes is the order of the lists."""
        changed = self._differ.changes(self._fleet)
        if changed:
            self._write(rows.Views(now_s=now_s, changed=changed))

    def arrival(self, request: RequestView, now_s: float) -> None:
        self._write(
            rows.Arrival(
                now_s=now_s,
                rid=request.rid,
                input_tokens=request.input_tokens,
                arrival_s=request.arrival_s,
                cached=dict(request.cached),
                ttft_slo_s=request.ttft_slo_s,
                tpot_slo_s=request.tpot_slo_s,
                output_tokens=request.output_tokens,
                session=request.session,
            )
        )

    def dispatched(self, request: RequestView, answer: Dispatch, now_s: float) -> None:
        self.decisions += 1
        plain = rows.answer_of(answer)
        self._write(rows.Dispatched(now_s=now_s, rid=request.rid, answer=plain, cached=dict(request.cached)))

    def placed(self, request: RequestView, answer: Placement, now_s: float) -> None:
        self.decisions += 1
        place = None if request.prefilled_on is None else request.prefilled_on.index
        self._write(rows.Placed(now_s=now_s, rid=request.rid, prefilled_on=place, answer=rows.answer_of(answer)))

    def ticked(self, controller: int, answer: list[FleetAction], now_s: float) -> None:
        self.decisions += bool(answer)  # otherwise the controller has only looked
        self._write(rows.Ticked(now_s=now_s, controller=controller, answer=rows.answer_of(answer)))

    def prefilled(self, sample: PrefillSample, now_s: float) -> None:
        self._write(
            rows.Prefilled(
                now_s=now_s,
                instance=sample.instance.index,
                new_tokens=sample.new_tokens,
                attention=sample.attention,
                history_tokens=sample.history_tokens,
                requests=sample.requests,
                duration_s=sample.duration_s,
            )
        )

    def first_token(self, request: RequestView, instance: InstanceView, now_s: float) -> None:
        self._write(
            rows.FirstToken(
                now_s=now_s,
                rid=request.rid,
                instance=instance.index,
                predicted_ttft_s=request.predicted_ttft_s,
            )
        )

    def interval(self, instance: InstanceView, interval_s: float, now_s: float) -> None:
        self._write(rows.Interval(now_s=now_s, instance=instance.index, interval_s=interval_s))

    def finish(self, request: RequestView, output_tokens: int, now_s: float) -> None:
        self._write(rows.Finish(now_s=now_s, rid=request.rid, output_tokens=output_tokens))

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            self._fail(error)

    def _write(self, row: rows.Row) -> None:
        if self.error is None:
            try:
                self._writer.write(row)
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.error = str(error)
        logger.error("the recording ends here: %s", error)
