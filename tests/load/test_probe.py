"""The probe of one scheduler, against a fake scheduler and a clock that stands still until it is moved."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_scheduler import FakeReq, FakeScheduler

from pla_sglang.load.report import Backlog, ClassQueue, FittedPasses, PassTiming, Report, RequestRow
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.fleet_part import join
from pla_sglang.plugin.engine.hooks.load_report import name_of
from pla_sglang.plugin.engine.host.requests import set_extend
from pla_sglang.plugin.engine.probe import HEARTBEAT_S, LEAST_INTERVAL_S, Identity, Probe
from pla_sglang.plugin.engine.request_rows import RowsWanted
from pla_sglang.plugin.engine.roles import RoleState
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.slo.mixed_batches import MixedBatchModel


class Sink:
    """A pusher that keeps what it gets."""

    address = "nowhere"
    dropped = 0

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def send(self, report: Report) -> bool:
        self.reports.append(report)
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Batch:
    """``riders``: decodes behind the prefills of a mixed batch."""

    def __init__(
        self,
        reqs: list[FakeReq],
        news: list[int] | None = None,
        histories: list[int] | None = None,
        *,
        riders: Sequence[FakeReq] = (),
    ) -> None:
        extend, mixed = news is not None, bool(riders)
        self.reqs = [*reqs, *riders]
        self.decoding_reqs = list(riders) or None
        self.extend_lens = None if news is None else [*news, *[1] * len(riders)]
        contexts = [len(req.origin_input_ids) + len(req.output_ids) for req in riders]
        self.prefix_lens = [*(histories or [0] * len(news or ())), *contexts]
        self.forward_mode = SimpleNamespace(
            is_extend=lambda: extend, is_decode=lambda: not extend, is_mixed=lambda: mixed
        )


def waiting(rid: str, tokens: int, arrival_s: float = 100.0) -> FakeReq:
    req = FakeReq(rid, tokens)
    req.pla_arrival_s = arrival_s  # type: ignore[attr-defined]
    return req


def made(
    *queue: FakeReq, plain: bool = False, emulate: bool = True, disaggregation: str = "null", **fields: Any
) -> tuple[Probe, Sink, Clock]:
    scheduler = FakeScheduler(queue, max_total_num_tokens=120_000, **fields)
    scheduler.running_batch = scheduler.running  # type: ignore[attr-defined]
    scheduler.pla_roles = RoleState("mixed")  # type: ignore[attr-defined]
    if plain:
        del scheduler.pla
    config = PlaConfig(emulate="x" if emulate else None, slo_ttft_ms=1000.0)
    if not plain:
        scheduler.pla.config = scheduler.pla.config.replace(slo_ttft_ms=1000.0)
    sink, clock = Sink(), Clock()
    named = Identity("here", 1, 2, disaggregation)
    return Probe(scheduler, config, named, [sink], clock), sink, clock  # type: ignore[list-item]


def test_what_waits_is_summed_up() -> None:
    probe, _, clock = made(waiting("a", 50), waiting("b", 300, arrival_s=98.5))
    probe.on_received(2)
    report = probe.report(clock())
    assert report.backlog == Backlog(2, 350, 50 * 50 + 300 * 300, 0)
    assert (report.short, report.long) == (ClassQueue(1, 50), ClassQueue(1, 300))
    assert (report.prefill_age_s, report.received, report.key) == (1.5, 2, "here#1")
    assert (report.boundary_tokens, report.role) == (100, "mixed")
    assert StepModel.from_floats(report.step_model) == probe.scheduler.pla.policy.prefills.model
    assert MixedBatchModel(*report.decode_model) == probe.scheduler.pla.steps.fits.decodes.model
    assert report.fitted == FittedPasses(), "start values, and it says so"
    assert (report.kv_used_tokens, report.kv_capacity_tokens) == (20_000, 120_000)


def test_without_our_scheduling_the_hosts_matches_count() -> None:
    req = waiting("a", 300)
    req.num_matched_prefix_tokens = 200
    del req.pla_arrival_s  # type: ignore[attr-defined]
    req.time_stats = SimpleNamespace(scheduler_recv_time=99.0)  # type: ignore[attr-defined]
    probe, _, clock = made(req, plain=True)
    report = probe.report(clock())
    assert report.backlog == Backlog(1, 100, 100 * 500, 200)
    assert (report.short, report.boundary_tokens) == (ClassQueue(), 0)
    assert report.fitted == FittedPasses()
    assert report.prefill_age_s == 1.0


def test_without_our_scheduling_the_probe_fits_step_times() -> None:
    probe, _, clock = made(plain=True)
    for number in range(16):
        new = 100 * (number + 1)
        probe.on_launch(Batch([], [new]))
        clock.now_s += 0.010 + 1e-4 * new
        probe.on_result(Batch([], [new]))
    report = probe.report(clock())
    assert report.fitted == FittedPasses(16, 0, 0)
    assert StepModel.from_floats(report.step_model).step_s(1000, 0) == pytest.approx(0.110, rel=0.05)


def test_the_rest_of_a_chunk_and_what_is_in_flight_count() -> None:
    chunk = waiting("long", 1000)
    set_extend(chunk, 0, 400)
    probe, _, clock = made(chunk=chunk)
    probe.on_launch(Batch([chunk], [300], [100]))
    report = probe.report(clock())
    assert report.backlog == Backlog(1, 900, 600 * (600 + 800) + 300 * (300 + 200), 500), "one prefill"


def test_a_pass_is_timed_from_the_one_before() -> None:
    """As on a GPU: the second was launched while the first ran."""
    probe, sink, clock = made()
    probe.on_launch(Batch([], [100]))
    probe.on_launched(None)
    clock.now_s += 0.010
    probe.on_launch(Batch([], [200], [50]))
    probe.on_launched(None)
    clock.now_s += 0.090
    probe.on_result(Batch([], [100]))
    clock.now_s += 0.300
    probe.on_result(Batch([], [200], [50]))
    passes = [one for report in sink.reports for one in report.steps]
    assert [one.duration_s for one in passes] == pytest.approx([0.1, 0.3])
    assert passes[1] == PassTiming(200, 200 * 300, 50, 1, passes[1].duration_s)
    assert sum(report.passes.passes for report in sink.reports) == 2
    assert sink.reports[-1].utilisation == pytest.approx(0.4 / 5)
    assert sink.reports[-1].backlog.prefills == 0


def test_a_cpu_computes_in_the_launch() -> None:
    probe, sink, clock = made(emulate=False)
    probe.on_launch(Batch([], [100]))
    clock.now_s += 0.2
    probe.on_launched(None)
    clock.now_s += 0.5
    probe.on_result(Batch([], [100]))
    assert sink.reports[-1].passes.duration_s == pytest.approx(0.2)
    assert sink.reports[-1].utilisation == pytest.approx(0.2 / 5)


def test_token_intervals_and_decode_steps() -> None:
    probe, _, clock = made()
    for _ in range(3):
        probe.on_launch(Batch([waiting("a", 5)]))
        clock.now_s += 0.02
        probe.on_result(Batch([waiting("a", 5)]))
        clock.now_s += 0.01
    report = probe.report(clock())
    assert report.decode_step_s == pytest.approx(0.02)
    assert report.token_interval_s == pytest.approx(0.03)
    probe.on_idle()
    clock.now_s += 3.0
    probe.on_launch(Batch([waiting("a", 5)]))
    probe.on_result(Batch([waiting("a", 5)]))
    assert probe.report(clock()).token_interval_s == pytest.approx(0.03), "an idle time is no interval"
    clock.now_s += 10.0
    assert probe.report(clock()).token_interval_s is None


def running(rid: str, tokens: int, given: int) -> FakeReq:
    req = waiting(rid, tokens)
    req.output_ids = [1] * given
    return req


def test_decodes_that_ride_in_a_mixed_pass_are_running_and_no_prefills() -> None:
    """The host's running batch is empty while a mixed pass is under way."""
    long, riders = waiting("long", 400), [running("a", 100, 5), running("b", 50, 2)]
    set_extend(long, 0, 300)
    probe, sink, clock = made(chunk=long)
    batch = Batch([long], [300], riders=riders)
    probe.on_launch(batch)
    report = probe.report(clock())
    assert (report.running, report.context_tokens) == (2, 157)
    assert report.backlog == Backlog(1, 400, 300 * 300 + 100 * (100 + 600), 300), "the chunk in flight and its rest"
    clock.now_s += 0.5
    probe.on_result(batch)
    report = sink.reports[-1]
    assert report.steps == (PassTiming(300, 300 * 300, 0, 1, 0.5, riders=2),)
    assert (report.passes.requests, report.running, report.context_tokens) == (1, 2, 157)
    assert report.decode_step_s is None, "a mixed pass is no decode step"


def test_a_completed_prefill_runs_before_the_host_has_merged_it() -> None:
    """Without overlap the host puts it into the running batch only before its next pass."""
    done, over, unfinished = waiting("done", 40), waiting("over", 40), waiting("chunk", 400)
    rider, gone = running("rider", 10, 3), running("gone", 10, 9)
    probe, _, clock = made(chunk=unfinished)
    batch = Batch([done, over, unfinished], [40, 40, 100], riders=[rider, gone])
    probe.on_launch(batch)
    assert probe.report(clock()).running == 2
    done.output_ids, over.output_ids = [1], [1]
    over.ended = gone.ended = True
    probe.on_result(batch)
    report = probe.report(clock())
    assert (report.running, report.context_tokens) == (2, 41 + 13)
    probe.scheduler.running_batch = SimpleNamespace(reqs=[rider, done])  # as the host has it now
    assert probe.report(clock()).running == 2, "nobody counts twice"
    probe.on_launch(Batch([rider, done]))
    assert probe.report(clock()).running == 2


def test_a_retracted_request_does_not_run() -> None:
    stays, leaves = running("a", 10, 1), running("b", 10, 1)
    leaves.is_retracted = True
    probe, _, clock = made()
    probe.scheduler.running_batch = SimpleNamespace(reqs=[stays, leaves])
    assert probe.report(clock()).running == 1


def test_a_prefill_instance_runs_nothing() -> None:
    """Its requests decode elsewhere."""
    probe, _, clock = made(disaggregation="prefill")
    done = running("a", 10, 1)
    probe.on_launch(Batch([done], [10]))
    probe.on_result(Batch([done], [10]))
    assert probe.report(clock()).running == 0


def test_a_token_of_a_mixed_pass_ends_an_interval() -> None:
    probe, _, clock = made()
    riders = [running("a", 10, 3), running("b", 10, 3)]
    for seconds in (0.02, 0.3, 0.3):
        mixed = seconds > 0.1
        batch = Batch([waiting("long", 900)], [300], riders=riders) if mixed else Batch(riders)
        probe.on_launch(batch)
        clock.now_s += seconds
        probe.on_result(batch)
    assert probe.report(clock()).token_interval_s == pytest.approx(0.3)
    assert probe.report(clock()).decode_step_s == pytest.approx(0.02)


def test_a_newcomer_has_waited_since_its_first_token_only() -> None:
    """Two decode from 100.0; a prefill of 2 s ends at 102.0; the three get their next token at 102.1."""
    probe, _, clock = made()
    old, new = [running("a", 10, 3), running("b", 10, 3)], running("new", 500, 1)
    probe.on_launch(Batch(old))
    probe.on_result(Batch(old))
    probe.on_launch(Batch([new], [500]))
    clock.now_s += 2.0
    probe.on_result(Batch([new], [500]))
    new.output_ids = [1, 1]
    probe.on_launch(Batch([*old, new]))
    clock.now_s += 0.1
    probe.on_result(Batch([*old, new]))
    assert probe.report(clock()).token_interval_s == pytest.approx((2 * 2.1 + 0.1) / 3)


def test_a_first_token_is_counted_once_though_its_request_rides_on() -> None:
    """With overlap a request of one token may ride in the pass behind its prefill."""
    only = waiting("a", 5, arrival_s=99.5)
    only.output_ids, only.ended = [1], True
    probe, _, clock = made()
    probe.on_launch(Batch([only], [5]))
    probe.on_result(Batch([only], [5]))
    clock.now_s += 4.0
    probe.on_launch(Batch([waiting("b", 50)], [50], riders=[only]))
    probe.on_result(Batch([waiting("b", 50)], [50], riders=[only]))
    assert probe.report(clock()).ttft_ratio == pytest.approx(0.5)


def test_ttft_over_target() -> None:
    first, second = waiting("a", 5, arrival_s=99.5), waiting("b", 5, arrival_s=98.0)
    second.sampling_params.custom_params = {"slo_ttft_ms": 500}
    unfinished = waiting("c", 5, arrival_s=0.0)
    first.output_ids = second.output_ids = [1]
    probe, _, clock = made()
    probe.on_launch(Batch([first, second, unfinished], [5, 5, 5]))
    probe.on_result(Batch([first, second, unfinished], [5, 5, 5]))
    assert probe.report(clock()).ttft_ratio == pytest.approx((0.5 / 1.0 + 2.0 / 0.5) / 2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.5),
        ({"slo_ttft_ms": 2000.0}, 0.25),
        ({"slo_ttft_ms": None}, None),
        ({"slo_ttft_ms": None, "controller_folder": "/x"}, 0.5 / 0.4),
    ],
    ids=str,
)
def test_the_target_of_requests_that_bring_none(changes: dict[str, Any], expected: float | None) -> None:
    """A server with pools is steered by the paper's 0.4 s where nobody has set one."""
    probe, _, clock = made()
    probe.scheduler.pla.config = probe.scheduler.pla.config.replace(**changes)
    first = waiting("a", 5, arrival_s=99.5)
    first.output_ids = [1]
    probe.on_launch(Batch([first], [5]))
    probe.on_result(Batch([first], [5]))
    ratio = probe.report(clock()).ttft_ratio
    assert ratio == (None if expected is None else pytest.approx(expected))


def test_reports_are_not_sent_too_often_nor_too_seldom() -> None:
    probe, sink, clock = made()
    for _ in range(100):
        probe.on_received(1)
        probe.on_idle()
        clock.now_s += LEAST_INTERVAL_S / 10
    assert len(sink.reports) in range(9, 12)
    quiet = len(sink.reports)
    clock.now_s += LEAST_INTERVAL_S
    probe.on_idle()
    for _ in range(50):
        clock.now_s += HEARTBEAT_S / 10
        probe.on_idle()
    assert len(sink.reports) - quiet in range(4, 7)
    assert [report.sequence for report in sink.reports] == list(range(1, len(sink.reports) + 1))


def test_errors_by_kind() -> None:
    probe, _, clock = made()
    for kind in ("aborted", "http_500", "aborted"):
        probe.on_error(kind)
    assert probe.report(clock()).errors == {"aborted": 2, "http_500": 1}


# -- roles -------------------------------------------------------------------------------------------------------------


def view(rid: str) -> Any:
    return SimpleNamespace(rid=rid)


def test_a_switch_drains_the_other_class_only() -> None:
    roles = RoleState("mixed")
    roles.switch("long", [view("s1"), view("s2")], [view("l1")])
    assert roles.draining(["s1", "s2", "l1"]) == 2
    assert roles.draining(["s2", "l1", "s3"]) == 1, "what came since does not count"
    assert roles.to_dict([])["draining"] == 0
    assert roles.draining(["s2"]) == 0, "gone is gone"


def test_the_same_role_again_is_no_switch() -> None:
    roles = RoleState("short")
    roles.switch("short", [], [view("l1")])
    assert (roles.switches, roles.draining(["l1"]), roles.switched_s) == (0, 0, None)
    roles.switch("mixed", [view("s1")], [view("l1")])
    assert (roles.switches, roles.draining(["s1", "l1"])) == (1, 0), "a mixed instance takes both"


def test_a_server_that_listens_everywhere_is_named_after_its_machine() -> None:
    """Else all of a fleet would sign their reports with 0.0.0.0:30000."""
    assert name_of("10.0.0.7", 30000) == "10.0.0.7:30000"
    for host in ("0.0.0.0", "::"):
        assert name_of(host, 30000) == f"{socket.gethostname()}:30000"


def test_rows_of_running_requests_come_in_the_reports_of_their_cadence() -> None:
    probe, sink, clock = made()
    first, second = FakeReq("a", 40), FakeReq("b", 7)
    first.output_ids = [1] * 3
    probe.scheduler.running_batch.reqs = [first, second]
    assert probe.report(clock()).requests is None, "nobody has asked for them"
    probe.rows.ask_rows(RowsWanted(0.1, 5))
    for _ in range(8):
        clock.now_s += 0.03
        probe.on_launch(Batch([first, second]))
        probe.on_launched(None)
    listed = [report.requests for report in sink.reports]
    assert [rows is not None for rows in listed] == [True, False, False, False, True, False, False, False]
    assert listed[0] == (RequestRow("a", 40, 3), RequestRow("b", 7, 0))
    assert probe.state()["rows"] == {"every_s": 0.1, "most": 5, "sent": 4}


def test_a_fleets_part_of_the_scheduler_is_asked_for_what_it_keeps() -> None:
    probe, _, clock = made()
    held, joining, leg = FakeReq("held", 9), FakeReq("joining", 20), FakeReq("leg", 5)

    class Part:
        def decodes_here(self, req: Any) -> bool:
            return req is not leg

        def list_paused(self) -> list[FakeReq]:
            return [held]

        def list_joining(self) -> list[FakeReq]:
            return [joining]

        def describe_load(self) -> None:
            return None

    join(probe.scheduler, Part())  # type: ignore[arg-type]
    probe.scheduler.running_batch.reqs = [leg]
    probe.rows.ask_rows(RowsWanted(0.1, 5))
    report = probe.report(clock())
    assert (report.running, report.waiting_decodes, report.waiting_decode_tokens) == (0, 1, 20)
    assert report.requests == (RequestRow("held", 9, 0, True),)
