"""What forward passes of one scheduler cost, for its policy: the step model and the duration of decode steps."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from pla_sglang.plugin.engine.pass_timer import PassTime, PassTimer
from pla_sglang.plugin.engine.snapshot import attention_of, context_tokens, prefill_count
from pla_sglang.plugin.engine.step_cache import StepCache
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.step_fit import StepSample
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.slo.decode_fit import MixedBatchSample
from pla_sglang.policy.slo.pass_fits import PassFits

DECODE_WEIGHT = 0.3  # of the latest decode step in the running mean
# Where decodes cannot be piggybacked only load reports ask what a step costs: later on each eighth is enough.
UNMIXED_FIRST, UNMIXED_STRIDE = 256, 8


class StepMeasurement:
    """This rank's own measurements, by the clock of the device; those of rank 0 are broadcast and count."""

    def __init__(self, scheduler: Any, start: StepModel, timer: PassTimer, clock: DeviceClock) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self.fits = PassFits(start)
        self.decode_step_s = 0.0
        self.cached = False  # what is known was kept from an earlier start
        self._cache: StepCache | None = None
        self._timer = timer
        self._scheduling_began_s = 0.0
        self._decode_steps = 0
        self._taken_model = self.fits.prefills.model
        self._taken_mixed_model = self.fits.decodes.model

    def use_cache(self, cache: StepCache) -> None:
        """Begins with what it has kept, and keeps what is measured."""
        self._cache = cache
        self.cached = cache.load(self.fits)

    def begin_scheduling(self) -> None:
        self._scheduling_began_s = time.perf_counter()

    def launch(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Around the host's launch of a batch."""
        self._timer.begin_launch(self._scheduling_began_s)
        result = original(self._scheduler, *args, **kwargs)
        self._timer.end_launch(result)
        return result

    def on_result(self, batch: Any) -> float:
        """A batch's result has been processed: derive what the pass cost.

        Returns the wall seconds for which the device waited before the pass although it had it to do.
        """
        measured = self._timer.end_pass(time.perf_counter())
        if measured is None:
            return 0.0
        host_s = self._clock.device_s(self.host_s(measured))
        pass_s = self._clock.device_s(measured.device_s) + host_s
        if batch.forward_mode.is_extend() and batch.extend_lens and not batch.forward_mode.is_mixed():
            waited_s = host_s + self._clock.device_s(measured.gap_s)
            sample = StepSample(
                sum(batch.extend_lens), sum(batch.prefix_lens), float(attention_of(batch)), pass_s, waited_s
            )
            self.fits.observe_prefill(sample)
        elif batch.forward_mode.is_mixed():
            self._on_mixed(batch, pass_s)
        elif batch.forward_mode.is_decode():
            self._on_decode(batch, pass_s)
            self.decode_step_s += DECODE_WEIGHT * (self._clock.device_s(measured.device_s) - self.decode_step_s)
        if self._cache is not None:
            self._cache.save_news(self.fits)
        return measured.gap_s

    def _on_mixed(self, batch: Any, pass_s: float) -> None:
        count = prefill_count(batch)
        piggybacked = len(batch.extend_lens) - count
        sample = MixedBatchSample(
            sum(batch.extend_lens[:count]),
            sum(batch.prefix_lens[:count]),
            float(attention_of(batch)),
            piggybacked,
            sum(batch.prefix_lens[count:]) + piggybacked,
            pass_s,
        )
        if piggybacked:
            self.fits.observe_mixed(sample)

    def _on_decode(self, batch: Any, step_s: float) -> None:
        """Where decodes cannot be piggybacked, only load reports ask."""
        self._decode_steps += 1
        first = self._decode_steps <= UNMIXED_FIRST
        if first or self._scheduler.is_mixed_chunk or self._decode_steps % UNMIXED_STRIDE == 0:
            self.fits.observe_decode(len(batch.reqs), context_tokens(batch), step_s)

    def host_s(self, measured: PassTime) -> float:
        """Wall time beside ``device_s`` in which the device waited for its host: while it scheduled and, on a CPU,
        processed the result."""
        scheduling_s: float = measured.launched_s - measured.note
        overlap = self._scheduler.enable_overlap  # the host prepares a pass while the device computes the one before
        if self._timer.synchronous:
            return scheduling_s + (0.0 if overlap else measured.processing_s)
        return 0.0 if overlap else scheduling_s

    def take_new_model(self) -> tuple[float, ...]:
        """Coefficients of a model that was fitted since the last call; empty: unchanged."""
        model = self.fits.prefills.model
        if model == self._taken_model:
            return ()
        self._taken_model = model
        return model.to_floats()

    def take_new_mixed_model(self) -> tuple[float, ...]:
        """Likewise of a new model of piggybacked decodes, where there can be any."""
        model = self.fits.decodes.model
        if model == self._taken_mixed_model or not self._scheduler.is_mixed_chunk:
            return ()
        self._taken_mixed_model = model
        return dataclasses.astuple(model)

    def to_dict(self) -> dict[str, Any]:
        prefills, decodes = self.fits.prefills, self.fits.decodes
        return {
            "fits": prefills.fits,
            "samples": len(prefills),
            "mean_relative_error": prefills.error,
            "riding_samples": len(decodes),
            "told": [
                list(prefills.model.to_floats()),
                list(dataclasses.astuple(decodes.model)),
                [prefills.passes, decodes.decodes, decodes.mixed],
            ],
            "cached": self.cached,
            "decode_steps": decodes.decodes,
            "decode_model": dataclasses.asdict(decodes.model),
            "passes": self._timer.passes,
            "pass_gap_s": self._clock.device_s(self._timer.gap_s),
        }
