"""Writes what the live policy sees and decides, for ``python -m pla_sglang.parity``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from pathlib import Path

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.decisions import Dispatch, FleetAction, Placement, PrefillSample
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView, InstanceView, RequestView
from pla_sglang.recording import rows
from pla_sglang.recording.file import RecordWriter
from pla_sglang.recording.views import Differ, plain_batch

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


class DecisionRecorder:
    """One recording of one fleet. Views are written before every line that a policy's answer may depend on.

    Where it cannot be written any more it ends there, as ``error`` says; requests go on.
    """

    def __init__(self, writer: RecordWriter, header: rows.Header, fleet: FleetView) -> None:
        self.decisions = 0
        self.error: str | None = None
        self._writer = writer
        self._fleet = fleet
        self._differ = Differ()
        self._batches: dict[int, rows.RecordedBatch] = {}  # running requests by index of the instance, as written last
        self._read: dict[int, rows.RecordedBatch] = {}  # read by a controller, to be written before its answer
        self._write_row(header)

    def keep_decodes(self, decodes: Callable[[InstanceView], DecodeBatch]) -> Callable[[InstanceView], DecodeBatch]:
        """``decodes``, with all that is read of it recorded."""

        def keep(instance: InstanceView) -> DecodeBatch:
            batch = decodes(instance)
            plain = plain_batch(batch)
            if self._batches.get(instance.index) != plain:
                self._batches[instance.index] = self._read[instance.index] = plain
            return batch

        return keep

    def write_views(self, now_s: float) -> None:
        """Also called at each change of a role or a state: the order of such changes is the order of the lists."""
        changed = self._differ.changes(self._fleet)
        if changed:
            self._write_row(rows.Views(now_s=now_s, changed=changed, startup_s=self._fleet.startup_s))

    def write_arrival(self, request: RequestView, now_s: float) -> None:
        self.write_views(now_s)
        self._write_row(
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

    def write_dispatch(
        self, request: RequestView, answer: Dispatch, now_s: float, *, hidden: Set[InstanceView]
    ) -> None:
        self.write_views(now_s)
        self.decisions += 1
        self._write_row(
            rows.Dispatched(
                now_s=now_s,
                rid=request.rid,
                answer=rows.answer_of(answer),
                cached=dict(request.cached),
                hidden=_indices(hidden),
            )
        )

    def write_placement(
        self, request: RequestView, answer: Placement, now_s: float, *, hidden: Set[InstanceView]
    ) -> None:
        self.write_views(now_s)
        self.decisions += 1
        self._write_row(
            rows.Placed(
                now_s=now_s,
                rid=request.rid,
                prefilled_on=None if request.prefilled_on is None else request.prefilled_on.index,
                answer=rows.answer_of(answer),
                hidden=_indices(hidden),
            )
        )

    def write_tick(self, controller: int, answer: list[FleetAction], now_s: float) -> None:
        self.write_views(now_s)
        if self._read:
            self._write_row(rows.Running(now_s=now_s, batches=self._read))
            self._read = {}
        self.decisions += bool(answer)  # otherwise the controller has only looked
        self._write_row(rows.Ticked(now_s=now_s, controller=controller, answer=rows.answer_of(answer)))

    def write_fact(self, fact: rows.Ended | rows.Moved | rows.WorkerChanged | rows.Planned) -> None:
        """What no policy is told of."""
        self._write_row(fact)

    def write_prefill(self, sample: PrefillSample, now_s: float) -> None:
        self.write_views(now_s)
        self._write_row(
            rows.Prefilled(
                now_s=now_s,
                instance=sample.instance.index,
                new_tokens=sample.new_tokens,
                attention=sample.attention,
                history_tokens=sample.history_tokens,
                requests=sample.requests,
                duration_s=sample.duration_s,
                steps=sample.steps,
            )
        )

    def write_first_token(self, request: RequestView, instance: InstanceView, now_s: float) -> None:
        self.write_views(now_s)
        self._write_row(
            rows.FirstToken(
                now_s=now_s,
                rid=request.rid,
                instance=instance.index,
                predicted_ttft_s=request.predicted_ttft_s,
            )
        )

    def write_interval(self, instance: InstanceView, interval_s: float, now_s: float) -> None:
        self.write_views(now_s)
        self._write_row(rows.Interval(now_s=now_s, instance=instance.index, interval_s=interval_s))

    def write_finish(self, request: RequestView, output_tokens: int, now_s: float) -> None:
        self._write_row(rows.Finish(now_s=now_s, rid=request.rid, output_tokens=output_tokens))

    def close_recorder(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            self._stop_recording(error)

    def _write_row(self, row: rows.Row) -> None:
        if self.error is None:
            try:
                self._writer.write(row)
            except OSError as error:
                self._stop_recording(error)

    def _stop_recording(self, error: OSError) -> None:
        self.error = str(error)
        logger.error("the recording ends here: %s", error)


def _indices(instances: Set[InstanceView]) -> tuple[int, ...]:
    return tuple(sorted(instance.index for instance in instances))
