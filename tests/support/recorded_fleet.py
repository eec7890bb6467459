"""A recording of a small fleet in which something of everything happens."""

from __future__ import annotations

from pathlib import Path
from random import Random

from pla_sglang.fleet.router.control.observability.recorder import DecisionRecorder
from pla_sglang.policy.interface.decisions import Dispatch, SetLengthClass, SetRole
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceState, InstanceView, RequestView, Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.registry import Setup
from pla_sglang.profiles.load import load_profile
from pla_sglang.recording import rows
from pla_sglang.recording.file import RecordWriter
from pla_sglang.recording.setup import header_of

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`&"


def record_run(path: Path, time_scale: float = 1.0) -> None:
    """20 s of three stateless instances: a flip, a flip that was refused, a move of a pool, one that is suspect, a
    plan; 40 requests, of which a quarter miss TTFT."""
    setup = Setup(load_profile("linear"), kv_capacity_tokens=1000, ttft_slo_s=1.0, tpot_slo_s=0.1, instances=3)
    views = [
        InstanceView(index, f"h{index}{EVIL}", InstanceKind.STATELESS, Role.PREFILL, kv_capacity_tokens=1000)
        for index in range(3)
    ]
    fleet, rng = FleetView(views), Random(3)
    header = header_of("arrow", "linear", time_scale, setup)
    header.clock_start_s = 1_700_000_000.0
    recorder = DecisionRecorder(RecordWriter(path), header, fleet)
    for number in range(40):
        now_s = 100.0 + number / 2
        request = RequestView(f"r{number}", 100, now_s, predicted_ttft_s=0.2)
        recorder.write_arrival(request, now_s)
        if number % 10 == 9:
            continue  # it waits for ever
        recorder.write_dispatch(request, Dispatch(views[1], None, FleetReason.NO_INSTANCE), now_s, hidden=set())
        views[1].queued_tokens = rng.randrange(1000)
        if number == 10:
            action = SetRole(views[2], Role.DECODE, FleetReason.NO_DATA)
            recorder.write_tick(0, [action, SetRole(views[0], Role.DECODE, FleetReason.COOL_DOWN)], now_s)
            fleet.set_role(views[2], Role.DECODE, now_s)  # the other one was refused
        if number == 20:
            recorder.write_tick(0, [SetLengthClass(views[0], PrefillClass.SHORT, FleetReason.OTHER_PAIR)], now_s)
            views[0].length_class = PrefillClass.SHORT
        if number == 25:
            recorder.write_fact(rows.Moved(now_s, request.rid, 1, 0, "pull", "star.migrate", 1 << 20, 0.05))
        if number == 30:
            recorder.write_fact(rows.WorkerChanged(now_s, 1, "suspect", "health"))
            fleet.set_state(views[1], InstanceState.DRAINING)
        if number == 35:
            look = {"requests": (5.0, 8.0, "peak")}
            recorder.write_fact(
                rows.Planned(now_s, ((now_s, 4, look),), ((now_s, 3, 0, 0, 0.5),), ((now_s - 2.0, now_s, "ready"),))
            )
        recorder.write_views(now_s)
        recorder.write_first_token(request, views[1], now_s + 0.3)
        recorder.write_finish(request, 5, now_s + 0.4)
        met = number % 4 > 0
        recorder.write_fact(rows.Ended(now_s + 0.4, request.rid, "finished", False, 5, 0.3, 0.025, met, True))
    recorder.close_recorder()
