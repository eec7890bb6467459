"""Reports: the wire, the socket, and what a receiver makes of them."""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.common.errors import TelemetryError
from pla_sglang.load.instance_load import prefill_sample
from pla_sglang.load.report import (
    LARGEST_BYTES,
    VERSION,
    Backlog,
    ClassQueue,
    FittedPasses,
    PassTiming,
    PassTotals,
    Report,
    decode,
    encode,
)
from pla_sglang.load.sockets import UNSENT_MOST, Puller, Pusher
from pla_sglang.load.tracker import LoadTracker, Phase, ReportEffect, TrackedRequest
from pla_sglang.load.window import BusyShare, WindowMean
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.decisions import MeasuredPass
from pla_sglang.policy.interface.fleet import InstanceView


def report(sequence: int = 1, **fields: object) -> Report:
    return msgspec.structs.replace(Report(instance="a", sequence=sequence, started_s=1.0), **fields)


NUMBERS = itertools.count()
STEPS = (PassTiming(500, 250_000, 0, 1, 0.03), PassTiming(12, 50_000, 40, 2, 0.01))
FULL = report(
    dp_rank=1,
    dp_size=2,
    role="long",
    draining=True,
    boundary_tokens=256,
    step_model=(0.005, 0.0, 1e-8, 0.001, 2e-5, 4e-10, 1e-8),
    decode_model=(6e-3, 1e-5, 4e-8, 1e-3, 2e-5, 0.1),
    fitted=FittedPasses(40, 64, 3),
    received=17,
    backlog=Backlog(3, 700, 250_000, 1200),
    short=ClassQueue(2, 100),
    long=ClassQueue(1, 600),
    prefill_age_s=0.25,
    running=4,
    context_tokens=4000,
    waiting_decodes=1,
    waiting_decode_tokens=90,
    kv_used_tokens=5000,
    kv_capacity_tokens=100_000,
    passes=PassTotals.of(STEPS),
    steps=STEPS,
    decode_step_s=0.01,
    token_interval_s=0.012,
    ttft_ratio=1.5,
    utilisation=0.75,
    errors={"aborted": 2},
)


# -- the wire ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [report(), FULL], ids=["empty", "full"])
def test_what_is_sent_arrives(sent: Report) -> None:
    assert decode(encode(sent)) == sent


class FormerReport(msgspec.Struct):
    """What a receiver needed of a report when each had the time of its sender."""

    instance: str
    sequence: int
    clock_s: float
    running: int = 0


@pytest.mark.parametrize("sent", [report(), FULL], ids=["empty", "full"])
def test_receivers_of_former_versions_read_a_report(sent: Report) -> None:
    read = msgspec.msgpack.decode(encode(sent), type=FormerReport)
    assert read == FormerReport("a", sent.sequence, 0.0, sent.running)


@pytest.mark.parametrize("more", [{}, {"clock_s": 12.5}, {"clock_s": 1.0, "of_a_later_version": [1, 2]}])
def test_reports_of_other_versions_are_read(more: dict[str, object]) -> None:
    received = decode(msgspec.msgpack.encode({"instance": "a", "sequence": 3, "running": 2, **more}))
    assert (received.sequence, received.running) == (3, 2)


def test_a_report_is_small() -> None:
    assert len(encode(report())) < 64
    assert len(encode(FULL)) < 700


def test_a_rank_has_a_name_of_its_own() -> None:
    assert report().key == "a"
    assert FULL.key == "a#1"


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xc1",
        b"hello",
        msgspec.msgpack.encode({"instance": "a"}),
        msgspec.msgpack.encode({"instance": "a", "sequence": 0}),
        msgspec.msgpack.encode({"instance": "a", "sequence": 1, "running": -1}),
        msgspec.msgpack.encode({"instance": "a", "sequence": 1, "utilisation": 1.5}),
        msgspec.msgpack.encode({"instance": "a", "sequence": 1, "version": VERSION + 1}),
        b"\0" * (LARGEST_BYTES + 1),
    ],
    ids=["empty", "reserved", "text", "missing", "sequence", "negative", "share", "version", "size"],
)
def test_what_is_no_report_is_refused(bad: bytes) -> None:
    with pytest.raises(TelemetryError):
        decode(bad)


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(TelemetryError):
        decode(data)


def test_fields_of_a_later_version_are_ignored() -> None:
    fields = msgspec.msgpack.decode(encode(FULL)) | {"something_new": [1, 2]}
    assert decode(msgspec.msgpack.encode(fields)) == FULL


def test_a_former_version_s_report_says_that_nothing_was_measured() -> None:
    fields = msgspec.msgpack.decode(encode(FULL))
    del fields["decode_model"], fields["fitted"]
    found = decode(msgspec.msgpack.encode(fields))
    assert (found.decode_model, found.fitted) == ((), FittedPasses(0, 0, 0))
    assert found.step_model == FULL.step_model


# -- sockets -----------------------------------------------------------------------------------------------------------


def arrived(puller: Puller, count: int) -> list[Report]:
    found: list[Report] = []
    end_s = time.monotonic() + 10
    while len(found) < count and time.monotonic() < end_s:
        puller.socket.poll(100)
        found += puller.drain()
    return found


def test_reports_of_two_instances_arrive_in_order(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/t"
    puller, pushers = Puller(address), [Pusher(address), Pusher(address)]
    try:
        sent = 0
        for sequence in range(1, 6):
            for name, pusher in zip("ab", pushers, strict=True):
                while not pusher.send(report(sequence, instance=name)):
                    time.sleep(0.01)  # not connected yet
                sent += 1
        pushers[0]._socket.send(b"garbage")
        found = arrived(puller, sent)
        puller.drain()
        for name in "ab":
            assert [one.sequence for one in found if one.instance == name] == [1, 2, 3, 4, 5]
    finally:
        for pusher in pushers:
            pusher.close()
        puller.close()
    assert puller.malformed <= 1  # the garbage, if it has come


def test_nobody_waits_for_a_receiver_that_is_not_there(tmp_path: Path) -> None:
    """A busy machine only adds to the time, so the shortest of three counts."""

    def send_all_s() -> float:
        pusher = Pusher(f"ipc://{tmp_path}/nobody")
        started_s = time.monotonic()
        for sequence in range(1, 3 * UNSENT_MOST):
            assert not pusher.send(report(sequence))
        pusher.close()
        assert pusher.dropped == 3 * UNSENT_MOST - 1
        return time.monotonic() - started_s

    assert min(send_all_s() for _ in range(3)) < 1.0


# -- what a receiver makes of them -------------------------------------------------------------------------------------


def tracker() -> LoadTracker:
    return LoadTracker(InstanceView(0, "a"), follows_requests=False)


def add(load: LoadTracker, new: int, history: int, now_s: float) -> None:
    """Another request is sent to the instance."""
    tracked = TrackedRequest(new, history, now_s, Phase.QUEUED, decodes_here=False)
    load.add_request((f"at {now_s}", next(NUMBERS)), tracked)


def sums(view: InstanceView) -> tuple[int, int, int, int]:
    return view.queued_prefills, view.queued_tokens, view.queued_attention, view.queued_history_tokens


def test_a_report_fills_the_view() -> None:
    load = tracker()
    assert load.on_report(FULL, now_s=5.0) is ReportEffect.APPLIED
    view = load.view
    assert sums(view) == (3, 700, 250_000, 1200)
    assert (view.running, view.context_tokens, view.waiting_decodes, view.waiting_decode_tokens) == (4, 4000, 1, 90)
    assert (view.kv_used_tokens, view.kv_capacity_tokens) == (5000, 100_000)
    assert (view.token_interval_s, view.ttft_ratio, view.utilisation, view.prefill_age_s) == (0.012, 1.5, 0.75, 0.25)
    assert load.reported_s == 5.0
    sample = prefill_sample(view, FULL, DeviceClock())
    assert sample is not None
    assert (sample.new_tokens, sample.attention, sample.history_tokens, sample.requests) == (512, 300_000, 40, 3)
    assert sample.duration_s == pytest.approx(0.04)
    assert sample.instance is view
    assert sample.steps == (MeasuredPass(500, 250_000, 0, 0.03, 1), MeasuredPass(12, 50_000, 40, 0.01, 2))
    assert prefill_sample(view, report(2), DeviceClock()) is None


def test_passes_with_riding_decodes_teach_no_boundary() -> None:
    """Their tokens count; how long one of them took says nothing of prefills alone."""
    mixed = (*STEPS, PassTiming(300, 90_000, 0, 1, 0.5, riders=2))
    loaded = msgspec.structs.replace(FULL, steps=mixed, passes=PassTotals.of(mixed))
    sample = prefill_sample(tracker().view, decode(encode(loaded)), DeviceClock(2.0))
    assert sample is not None
    assert (sample.new_tokens, sample.duration_s) == (812, pytest.approx(0.27))
    assert [(step.new_tokens, step.duration_s) for step in sample.steps] == [(500, 0.015), (12, 0.005)]


def test_what_was_dispatched_since_counts_until_a_report_includes_it() -> None:
    load = tracker()
    load.on_report(report(1), 0.0)
    add(load, 100, 10, 0.0)
    add(load, 50, 0, 0.0)
    assert sums(load.view) == (2, 150, 100 * 120 + 2500, 10)
    load.on_report(report(2, received=1, backlog=Backlog(1, 100, 12_000, 10)), 0.1)
    assert sums(load.view) == (2, 150, 14_500, 10)
    assert load.open_requests() == 1
    load.on_report(report(3, received=2), 0.2)  # both came, and both are done
    assert sums(load.view) == (0, 0, 0, 0)


def test_a_request_that_never_arrives_counts_no_longer() -> None:
    load = tracker()
    load.on_report(FULL, 0.0)
    add(load, 100, 0, 0.0)
    load.on_report(msgspec.structs.replace(FULL, sequence=2), 1.9)
    assert sums(load.view) == (4, 800, 260_000, 1200)
    load.on_report(msgspec.structs.replace(FULL, sequence=3), 2.0)
    assert sums(load.view) == (3, 700, 250_000, 1200)
    assert load.open_requests() == 0


@pytest.mark.parametrize(("received", "left"), [(40, 0), (39, 0)])
def test_requests_from_before_the_first_report_are_not_ours(received: int, left: int) -> None:
    """Somebody else has sent 37 requests, or 36; ours are the last three."""
    load = tracker()
    for _ in range(3):
        add(load, 10, 0, 0.0)
    load.on_report(report(1, received=received), 0.1)
    assert load.open_requests() == left
    add(load, 10, 0, 0.2)
    load.on_report(report(2, received=received), 0.3)
    assert load.open_requests() == 1
    load.on_report(report(3, received=received + 1), 0.4)
    assert load.open_requests() == 0


def test_a_late_report_changes_nothing_and_a_gap_is_counted() -> None:
    load = tracker()
    load.on_report(report(5, running=5), 0.0)
    assert load.on_report(report(4, running=4), 0.1) is ReportEffect.OUTDATED
    assert (load.view.running, load.lost_reports) == (5, 0)
    load.on_report(report(8, running=8), 0.2)
    assert (load.view.running, load.lost_reports) == (8, 2)


def test_a_new_process_under_the_same_name_starts_anew() -> None:
    load = tracker()
    load.on_report(report(9, received=100), 0.0)
    add(load, 10, 0, 0.5)
    newcomer = report(1, started_s=2.0)
    assert load.on_report(newcomer, 1.0) is ReportEffect.RESTARTED
    assert load.open_requests() == 1, "the caller decides"
    load.restart()
    assert load.on_report(newcomer, 1.0) is ReportEffect.APPLIED
    assert load.on_report(report(10, received=101), 1.0) is ReportEffect.OUTDATED, "the old process is gone"
    assert (load.open_requests(), load.lost_reports) == (0, 0)
    add(load, 10, 0, 1.0)
    load.on_report(report(2, started_s=2.0, received=1), 1.1)
    assert load.open_requests() == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000), st.integers(0, 5000)), max_size=60))
def test_the_view_never_drifts(steps: list[tuple[bool, int, int]]) -> None:
    """One sender, in order: the view is the report's sums plus what is not received, whatever comes when."""
    load, sequence, received = tracker(), 1, 0
    load.on_report(report(sequence), 0.0)
    under_way: list[tuple[int, int]] = []
    for arrives, new, history in steps:
        if arrives and under_way:
            under_way.pop(0)
            received, sequence = received + 1, sequence + 1
            load.on_report(report(sequence, received=received), 0.0)
        else:
            add(load, new, history, 0.0)
            under_way.append((new, history))
        expected = (
            len(under_way),
            sum(n for n, _ in under_way),
            sum(n * (n + 2 * h) for n, h in under_way),
            sum(h for _, h in under_way),
        )
        assert sums(load.view) == expected


# -- averages ----------------------------------------------------------------------------------------------------------


def test_mean_of_the_window() -> None:
    mean = WindowMean(10.0)
    assert mean.mean(0.0) is None
    mean.add(1.0, 0.0)
    mean.add(4.0, 5.0, weight=2.0)
    assert mean.mean(5.0) == 3.0
    assert mean.mean(10.0) == 4.0
    assert mean.mean(15.0) is None


def test_busy_share_counts_overlaps_once() -> None:
    busy = BusyShare(10.0)
    assert busy.share(0.0) == 0.0
    busy.add(0.0, 4.0)
    busy.add(2.0, 6.0)
    busy.add(3.0, 5.0)
    assert busy.share(10.0) == pytest.approx(0.6)
    assert busy.share(13.0) == pytest.approx(0.3)
    assert busy.share(16.0) == 0.0
