"""A fleet that is four times as slow decides as a fast one to which the same happens four times as fast.

Each live policy lives through one made-up history twice, by the dispatcher and the trackers of a real control plane, on
a clock that the test moves.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.router_scene import FakeRelay, enter_worker, hear_report

from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.gauges import gauges, name_pool
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.workers.peering import READY
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerReason, WorkerState
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.load.report import Backlog, PassTiming, PassTotals, Report
from pla_sglang.policy.interface.fleet import InstanceKind
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.registry import live_policy_names

PREFILLS, DECODES = 4, 2
TICK_S, STEPS = 0.05, 500
SLOW = 4.0  # a power of two, so that no rounding differs


class History:
    """``scale``: wall seconds of one device second. All times here are the device's unless they end in ``wall_s``."""

    def __init__(self, policy: str, scale: float, seed: int, *, kind: InstanceKind | None = None) -> None:
        self.kind = kind  # of all; None: prefill and decode instances
        self.scale, self.rng, self.now_s = scale, Random(seed), 0.0
        knobs = ControlKnobs(policy=policy, slo_ttft_s=0.4 * scale, slo_tpot_s=0.05 * scale, settle_s=0.05 * scale)
        self.plane = ControlPlane(knobs, clock=lambda: self.now_s * scale)
        self.relay = FakeRelay()
        self.plane.attach_relay(0, self.relay)
        self.early = self.ask("early", 700)  # before any instance has said what it is
        self.workers = [self.start(number) for number in range(PREFILLS + DECODES)]
        self.received = [0] * len(self.workers)
        self.seen: list[Any] = []

    def start(self, number: int) -> Worker:
        kind = self.kind or (InstanceKind.PREFILL if number < PREFILLS else InstanceKind.DECODE)
        worker = enter_worker(
            *(self.plane, number, kind, self.now_s * self.scale),
            instances=PREFILLS + DECODES,
            profile="h100-llama3.1-8b-tp1",
            time_scale=self.scale,
        )
        worker.peers = dict.fromkeys(range(PREFILLS + DECODES), READY)
        return worker

    def ask(self, rid: str, tokens: int, slo_ms: float | None = None) -> None:
        slo_wall_ms = None if slo_ms is None else slo_ms * self.scale
        self.plane.on_message(
            m.Ask(
                *(rid, 0, m.Endpoint.GENERATE, True, self.now_s * self.scale, 4 * tokens, tokens),
                exact_tokens=True,
                ttft_slo_ms=slo_wall_ms,
            )
        )

    def live(self) -> list[Any]:
        """What was decided and predicted, with times in device seconds; the same for each ``scale``."""
        runner = self.plane.policy.runner
        assert runner is not None
        for step in range(STEPS):
            self.now_s = step * TICK_S
            self.arrive(step)
            for number in range(len(self.workers)):
                self.report(number, step)
            for number, controller in enumerate(runner.policy.controllers):
                if step % max(1, round(controller.interval_s / TICK_S)) == 0:
                    self.plane._tick_controller(number)
            self.note()
        self.seen += [dict(runner.actions), dict(runner.decisions), dict(runner.placements)]
        self.seen += [(move.instance.name, move.role, move.at_s / self.scale) for move in runner.moves]
        return self.seen

    def arrive(self, step: int) -> None:
        """Longs at first, then shorts: pools have a reason to change."""
        for number in range(self.rng.randrange(5)):
            long = self.rng.random() < (0.5 if step < STEPS / 2 else 0.02)
            tokens = self.rng.randrange(2000, 8000) if long else self.rng.randrange(10, 250)
            self.ask(f"r{step}-{number}", tokens, self.rng.choice((None, 250.0)))

    def report(self, number: int, step: int) -> None:
        worker, rng = self.workers[number], self.rng
        queued = rng.randrange(6)
        pressed = PrefillClass.LONG if step < STEPS / 2 else PrefillClass.SHORT
        tokens = queued * rng.randrange(10, 3000) * (8 if worker.view.length_class is pressed else 1)
        passes = [PassTiming(500, 250_000, 0, 1, rng.uniform(0.01, 0.2) * self.scale) for _ in range(rng.randrange(3))]
        interval_s = rng.uniform(0.005, 0.08)
        report = Report(
            instance=worker.view.name,
            sequence=step + 1,
            received=worker.load._sent,
            backlog=Backlog(queued, tokens, tokens * tokens // max(1, queued), 0),
            prefill_age_s=rng.uniform(0, 1) * self.scale if queued else 0.0,
            running=rng.randrange(9),
            context_tokens=rng.randrange(9000),
            kv_capacity_tokens=100_000,
            passes=PassTotals.of(passes),
            steps=tuple(passes),
            token_interval_s=None if number < PREFILLS else interval_s * self.scale,
            utilisation=rng.uniform(0, 0.6),
        )
        hear_report(self.plane, report)

    def note(self) -> None:
        """Answers since the last time; the requests get their first token and end, some of them much later."""
        told, self.relay.told = self.relay.told, []
        for message in told:
            if isinstance(message, m.Refuse):
                self.seen.append((message.rid, message.code))
            if not isinstance(message, m.Assign):
                continue
            placement = self.plane.dispatcher.ledger.records[message.rid].present.placement
            assert placement is not None
            times = (placement.predicted_ttft_s, placement.own_prefill_s, placement.token_interval_s)
            device_s = [None if wall_s is None else wall_s / self.scale for wall_s in times]
            self.seen.append((message.rid, message.prefill, message.decode, message.reason, *device_s))
            at_wall_s = (self.now_s + self.rng.uniform(0, 0.04)) * self.scale
            for milestone in (m.Milestone.SENT, m.Milestone.FIRST_TOKEN):
                self.plane.on_message(m.Progress(message.rid, milestone, at_wall_s))
            self.plane.on_message(m.Completed(message.rid, m.Outcome.OK, 200, at_wall_s, output_tokens=20))


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        *((name, None) for name in live_policy_names()),
        ("combined", InstanceKind.UNIFIED),
        *((name, InstanceKind.STATELESS) for name in ("arrow", "dopd", "combined", "combined-roles")),
    ],
)
async def test_a_slow_fleet_decides_as_a_fast_one(policy: str, kind: InstanceKind | None) -> None:
    """On a loop that does not turn: what instances would be told waits for ever."""
    fast, slow = (History(policy, scale, seed=3, kind=kind) for scale in (1.0, SLOW))
    assert fast.live() == slow.live()
    answers = [entry for entry in fast.seen if isinstance(entry, tuple) and len(entry) == 7]
    assert len(answers) > STEPS
    assert answers[0][0] == "early"
    if kind is InstanceKind.UNIFIED:
        assert {entry[3] for entry in answers} == {"combined.united"}
    if policy == "pla" or (policy in ("arrow", "combined-roles") and kind is InstanceKind.STATELESS):
        assert slow.plane.policy.runner.moved.total() > 0, "no pool or role has changed: the history shows nothing"  # type: ignore[union-attr]


def test_operators_see_wall_time() -> None:
    slow = History("pla", SLOW, seed=3)
    slow.live()
    plane, record = slow.plane, next(iter(slow.plane.dispatcher.explained._records.values()))
    assert (record.rid, record.ttft.slo_s, record.view.ttft_slo_s) == ("early", 0.4 * SLOW, 0.4)
    told = plane.dispatcher.explained.explain("early")
    assert told is not None
    assert told["slo_ttft_s"] == 0.4 * SLOW
    assert told["predicted_ttft_s"] == record.view.predicted_ttft_s * SLOW
    last = plane.policy.runner.moves[-1]  # type: ignore[union-attr]
    assert last.to_dict(slow.now_s * SLOW)["ago_s"] == slow.now_s * SLOW - last.at_s
    assert 0 <= last.at_s <= slow.now_s * SLOW


def read_backlogs(history: History) -> dict[str, dict[tuple[str, str], float]]:
    """By name, and by role and pool."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for name, _, labels, value in gauges(history.plane.dispatcher, history.plane.scaling, 0.0):
        if name.startswith("prefill_backlog"):
            found.setdefault(name, {})[labels["role"], labels["pool"]] = value
    return found


def test_the_backlog_of_prefills_is_in_wall_seconds() -> None:
    history = History("pla", SLOW, 1)
    predictor, fleet = history.plane.policy.predictor, history.plane.table.fleet
    assert predictor is not None
    backlogs: dict[tuple[str, str], list[float]] = {}
    for number, worker in enumerate(history.workers[:PREFILLS]):
        worker.view.queued_prefills, worker.view.queued_tokens = number + 1, 1000 * number
        seconds = SLOW * predictor.delay_s(worker.view)
        backlogs.setdefault(("prefill", name_pool(worker.view)), []).append(seconds)
    assert read_backlogs(history) == {
        "prefill_backlog_seconds": {where: pytest.approx(sum(of)) for where, of in backlogs.items()},
        "prefill_backlog_max_seconds": {where: max(of) for where, of in backlogs.items()},
    }
    for worker in history.workers[:PREFILLS]:
        history.plane.table.move(worker, WorkerState.SUSPECT, WorkerReason.HEALTH, 0.0)
    assert not fleet.prefill_capable()
    assert read_backlogs(history) == {}
