"""One run: a trace through a fleet, from the first arrival to the last end."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.plan_log import PlanLog
from pla_sglang.policy.interface.decisions import PolicySet
from pla_sglang.policy.interface.remaining_length import NoPrediction, RemainingPredictor
from pla_sglang.sim.core.closed import ClosedLoop, session_loop
from pla_sglang.sim.core.cluster import Cluster
from pla_sglang.sim.core.config import MakeEngine, SimConfig
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.idle import IdleTime
from pla_sglang.sim.core.kernel import Kernel, Priority
from pla_sglang.sim.core.plan_watch import PlanWatch
from pla_sglang.sim.core.request import SimRequest
from pla_sglang.sim.core.samples import FleetSamples, Sampler
from pla_sglang.sim.metrics.goodput import Served
from pla_sglang.sim.workload.trace import Trace

STALL_S = 3600.0  # virtual time without anything but ticks, with requests open: nothing will ever come
Progress = Callable[[int, int], None]  # requests ended, requests in all


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run has to tell.

    Attributes:
        served: times of every request, rows as in the trace.
        prefill_start_s, decode_start_s: [n] float64, when its first pass began and when it first joined a running
            batch; NaN: never.
        stage: [n] how each ended, as ``Stage`` values.
        prefill_instance, decode_instance: [n] int64, where it was last; -1: nowhere.
        retractions, migrations: [n] int64.
        hit_tokens: [n] int64, of the prompt in its instance's prefix cache as its first pass began.
        predicted_hit_tokens: [n] int64, the same as the router saw it when it chose the instance.
        reasons, pass_reasons: decisions of the fleet's and of the engines' policies, by reason.
        counts: migrations, restarts and the like; ``scale_outs``, ``scale_ins``: instances that a policy or a planner
            has started and told to leave.
        lengths: what was learned of answers to come, and how far it was off; see ``JudgedPredictor.to_dict``.
        plans: what a planner saw and wanted over time, and the fleet beside it; empty without one.
        gpu_hours: of all GPUs, from the start of their instance to ``end_s``. A policy's timer that runs on is no work.
        end_s: virtual time at which the last request ended.
        events: handled by the kernel; wall_s, cpu_s: how long that took.
    """

    served: Served
    prefill_start_s: npt.NDArray[np.float64]
    decode_start_s: npt.NDArray[np.float64]
    stage: list[str]
    prefill_instance: npt.NDArray[np.int64]
    decode_instance: npt.NDArray[np.int64]
    retractions: npt.NDArray[np.int64]
    migrations: npt.NDArray[np.int64]
    hit_tokens: npt.NDArray[np.int64]
    predicted_hit_tokens: npt.NDArray[np.int64]
    reasons: dict[str, int]
    pass_reasons: dict[str, int]
    counts: dict[str, int]
    lengths: dict[str, Any]
    samples: FleetSamples
    plans: PlanLog
    gpu_hours: float
    end_s: float
    events: int
    wall_s: float
    cpu_s: float

    def digest(self) -> str:
        """A hash over what happened to every request: equal for equal runs, on any machine with IEEE doubles."""
        hashed = hashlib.sha256()
        columns = (self.served.first_token_s, self.served.finish_s, self.prefill_instance, self.decode_instance)
        for column in columns:
            hashed.update(np.ascontiguousarray(column).tobytes())
        hashed.update(",".join(self.stage).encode())
        hashed.update(repr(sorted(self.reasons.items())).encode())
        return hashed.hexdigest()


class Simulation:
    """A trace, a fleet and the policies that drive it; ``run`` once, as it changes their state.

    Args:
        policy: the same objects serve the real router.
        lengths: remaining answer tokens that migration policies see; it is handed the truth. None: nothing is known.

    Raises:
        TraceError: the trace is empty.
        ConfigError: the trace has not as many rows as pauses.
    """

    def __init__(
        self,
        trace: Trace,
        config: SimConfig,
        policy: PolicySet,
        make_engine: MakeEngine,
        lengths: RemainingPredictor | None = None,
    ) -> None:
        trace.require_requests()
        if config.pauses_s is not None and len(config.pauses_s) != len(trace):
            raise ConfigError(f"{len(config.pauses_s)} pauses; allowed: one for each of the {len(trace)} rows")
        self.kernel = Kernel()
        self.config = config
        self._loop, self._pauses_s = None, config.pauses_s
        if config.users is not None:
            self._loop = ClosedLoop(trace, config.users)
        elif trace.think_s is not None:
            self._loop, self._pauses_s = session_loop(trace)
        self.cluster = Cluster(
            self.kernel,
            config,
            trace,
            policy,
            make_engine=make_engine,
            lengths=NoPrediction() if lengths is None else lengths,
            on_closed=None if self._loop is None else self._next_of_user,
        )
        self._controllers = policy.controllers
        self._trace = trace
        self._arrivals = trace.arrival_s.tolist()
        self._inputs = trace.input_tokens.tolist()
        self._outputs = trace.output_tokens.tolist()
        self._requests: list[SimRequest] = []
        self._sampler = Sampler()
        self._sampled_s = -math.inf
        self._ticks = 0
        self._idle = IdleTime(controller.interval_s for controller in policy.controllers)
        self._idle_gpu_s = 0.0  # in the time that was left out
        self._plans = PlanWatch(
            self.cluster.fleet,
            policy.controllers,
            clock=lambda: self.kernel.now_s + self._idle.left_out_s,
            gpu_hours=lambda: self._count_gpus(self.kernel.now_s),
        )
        self._left_out_s = [0.0] * len(trace)  # before the arrival of each request; none is open while time is left out
        self._active = (0, 0.0)  # events that were no ticks, and when they last grew
        self._progress: Progress | None = None
        self._schedule()

    def _schedule(self) -> None:
        kernel = self.kernel
        if self._loop is None:
            kernel.at(self._arrivals[0], Priority.ARRIVAL, self._arrive_as_recorded, 0)
        else:
            for row in self._loop.first():
                kernel.at(self._pause_s(row), Priority.ARRIVAL, self._arrive, row)
        kernel.at(0.0, Priority.TICK, self._report, 0)
        for number, controller in enumerate(self._controllers):
            if not controller.interval_s > 0:
                raise ConfigError(f"interval_s of {type(controller).__name__} is {controller.interval_s}; above 0")
            kernel.at(controller.interval_s, Priority.TICK, self._control, number)

    def run(self, progress: Progress | None = None) -> RunResult:
        """To the end of all requests. Raises SimError when requests stop making progress."""
        self._progress = progress
        started_s, started_cpu_s = time.perf_counter(), time.process_time()  # for the report; nothing depends on them
        self.kernel.run()
        if not self.cluster.ledger.complete:
            raise SimError(self._stuck())
        result = self._result(time.perf_counter() - started_s, time.process_time() - started_cpu_s)
        self._plans.note_end(result.gpu_hours, result.end_s)
        return result

    # -- events ------------------------------------------------------------------------------------------------------

    def _arrive_as_recorded(self, row: int) -> None:
        if row + 1 < len(self._arrivals):
            at_s = max(self.kernel.now_s, self._arrivals[row + 1] - self._idle.left_out_s)
            self.kernel.at(at_s, Priority.ARRIVAL, self._arrive_as_recorded, row + 1)
        self._arrive(row)

    def _next_of_user(self, ended: SimRequest) -> None:
        """In a closed loop: the user of ``ended`` sends its next request, at once or after a pause."""
        assert self._loop is not None
        row = self._loop.after(ended.row)
        if row is not None:
            self.kernel.at(self.kernel.now_s + self._pause_s(row), Priority.ARRIVAL, self._arrive, row)

    def _pause_s(self, row: int) -> float:
        return 0.0 if self._pauses_s is None else self._pauses_s[row]

    def _arrive(self, row: int) -> None:
        self._left_out_s[row] = self._idle.left_out_s
        if self._loop is not None:
            self._arrivals[row] = self.kernel.now_s + self._idle.left_out_s
        request = self._request(row)
        self._requests.append(request)
        self.cluster.arrive(request)

    def _request(self, row: int) -> SimRequest:
        config, ids, answers = self.config, self._trace.hash_ids, self._trace.answer_ids
        output = self._outputs[row]
        return SimRequest(
            row,
            self.kernel.now_s,
            self._inputs[row],
            output,
            limit_tokens=max(output, config.output_limit_tokens or 0),
            hash_ids=() if ids is None else ids[row],
            answer_ids=() if answers is None else answers[row],
            slo_s=(config.ttft_slo_s, config.tpot_slo_s),
        )

    def _report(self, _: int) -> None:
        """Instances report, the router's numbers are fresh, and samples are taken."""
        now_s, fleet = self.kernel.now_s, self.cluster.fleet
        for instance in fleet.instances:
            if not instance.alive:
                continue
            instance.report.sync(now_s)
            interval_s = instance.report.interval_s(now_s)
            instance.view.token_interval_s = interval_s
            if interval_s is not None:
                self.cluster.runner.token_interval(instance.view, interval_s, now_s)
        fleet.report_steps()
        if now_s >= self._sampled_s + self.config.sample_s:
            self._sampled_s = now_s
            self._sampler.take(fleet.view, now_s + self._idle.left_out_s)
        if not self.cluster.ledger.complete:
            self._plans.note_fleet()
        if self._progress is not None:
            self._progress(sum(self.cluster.ledger.ended.values()), len(self._trace))
        fleet.check_drained()
        self.cluster.place_waiting()
        if not self.cluster.ledger.live:
            self._leave_out_idle_time()
        self._again(self.config.report_interval_s, self._report, 0)

    def _leave_out_idle_time(self) -> None:
        now_s, lives = self.kernel.now_s, self.cluster.fleet.lives
        by_s = self._idle.leave_out(now_s, now_s - self._active[1], self.kernel.next_s(Priority.TICK) - now_s)
        if by_s:
            self.kernel.hasten(Priority.TICK, by_s)
            self._idle_gpu_s += by_s * sum(life.spec.profile.gpus for life in lives if life.end_s is None)

    def _control(self, number: int) -> None:
        before = self._plans.count()
        actions = self.cluster.runner.tick(number, self.kernel.now_s)
        self._idle.note_answer(actions)
        if not self.cluster.ledger.complete:
            self._plans.note_tick(actions, before)
        self.cluster.place_waiting()
        self._again(self._controllers[number].interval_s, self._control, number)

    def _count_gpus(self, until_s: float) -> float:
        """GPU-hours up to this time of the kernel, those of the time that was left out as well."""
        return self.cluster.fleet.gpu_hours(until_s) + self._idle_gpu_s / 3600

    def _again(self, after_s: float, call: Callable[[int], None], what: int) -> None:
        """The next tick of a kind, as long as there are requests to come or to serve."""
        self._ticks += 1
        now_s, others = self.kernel.now_s, self.kernel.events - self._ticks
        if others != self._active[0]:
            self._active = (others, now_s)
        if self.cluster.ledger.complete:
            return
        if now_s > self._active[1] + STALL_S and self._all_have_come():
            raise SimError(self._stuck())
        self.kernel.at(now_s + after_s, Priority.TICK, call, what)

    def _all_have_come(self) -> bool:
        """In a closed loop: or wait for the answer to another."""
        if self._loop is None:
            return len(self._requests) == len(self._trace)
        return math.isinf(self.kernel.next_s(Priority.TICK))

    def _stuck(self) -> str:
        live = list(self.cluster.ledger.live.values())
        stages = sorted({request.stage.value for request in live})
        names = ", ".join(request.rid for request in live[:5])
        return f"{len(live)} requests can never end ({', '.join(stages)}; {names}): no policy moves them on"

    # -- result ------------------------------------------------------------------------------------------------------

    def _result(self, wall_s: float, cpu_s: float) -> RunResult:
        requests, cluster = sorted(self._requests, key=lambda request: request.row), self.cluster

        def column(name: str) -> npt.NDArray[np.int64]:
            return np.array([getattr(one, name) for one in requests], dtype=np.int64)

        def times(name: str) -> npt.NDArray[np.float64]:
            at_s = np.array([getattr(one, name) for one in requests], dtype=np.float64)  # None becomes nan
            return at_s + np.array([self._left_out_s[one.row] for one in requests])

        counts = {stage.value: count for stage, count in cluster.ledger.ended.items()}
        counts |= dict(cluster.counts)
        counts |= {
            **cluster.fleet.changes(),
            "transfers": cluster.network.transfers,
            "retractions": sum(request.retractions for request in requests),
        }
        end_s = max((one.finish_s for one in requests if one.finish_s is not None), default=self._active[1])
        return RunResult(
            served=Served(
                np.array(self._arrivals, dtype=np.float64),
                times("first_token_s"),
                times("finish_s"),
                self._trace.output_tokens,
            ),
            prefill_start_s=times("prefill_start_s"),
            decode_start_s=times("decode_start_s"),
            stage=[one.stage.value for one in requests],
            prefill_instance=column("prefilled_at"),
            decode_instance=np.array([-1 if one.home is None else one.home for one in requests], dtype=np.int64),
            retractions=column("retractions"),
            migrations=column("migrations"),
            hit_tokens=column("hit_tokens"),
            predicted_hit_tokens=column("predicted_hit_tokens"),
            reasons=dict(sorted((cluster.runner.reasons() + self._idle.reasons).items())),
            pass_reasons=dict(sorted(cluster.pass_reasons.items())),
            counts=counts,
            lengths=cluster.fleet.lengths.to_dict(),
            samples=self._sampler.result(),
            plans=self._plans.log,
            gpu_hours=self._count_gpus(end_s),
            end_s=end_s + self._idle.left_out_s,
            events=self.kernel.events,
            wall_s=wall_s,
            cpu_s=cpu_s,
        )
