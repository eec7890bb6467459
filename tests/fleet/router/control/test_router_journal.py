"""What operators read of workers in the router's log: a line for each change, once, with its reason."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from support.records import make_record
from support.router_process import router_process
from support.router_scene import scene
from support.serving import until

from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.fates import find_fates
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.requests.request_record import Attempt, End, RequestRecord
from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.discovery import Address, Description
from pla_sglang.fleet.router.control.workers.health import Health, HealthKnobs, ProbeResult
from pla_sglang.fleet.router.control.workers.table import LEGAL, Worker, WorkerReason, WorkerState, WorkerTable
from pla_sglang.fleet.router.control.workers.worker_log import LINES, NO_WORKERS, TOLD_S, WorkerLog
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.interface.fleet import InstanceKind

UNIFIED = Description(InstanceKind.UNIFIED, "p1", "h:1", 431_316, 1, 1, "/models/llama-8b/", "t", "0.5.17")


class Watched:
    """A table with one worker at ``http://h:1``, its health, and a journal that hears of all changes."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.journal = WorkerLog(lambda worker, since_s: find_fates(worker, self.records, since_s))
        self.table = WorkerTable(BreakerKnobs(consecutive=2), on_change=self.journal.note_change)
        self.health = Health(self.table, HealthKnobs(misses=2, refused=2))
        self.worker = self.table.add(Address("h", 1), 0.0)

    def make_ready(self) -> None:
        self.table.describe(self.worker, UNIFIED, 0.0)
        self.health.on_probe(self.worker, ProbeResult.OK, 0.0)

    def note_waits(self, now_s: float = 0.0) -> None:
        self.journal.note_waits(self.table, now_s)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Level and text of what is logged; it grows."""
    caplog.set_level(logging.INFO, "pla_sglang")
    seen: list[str] = []
    monkeypatch.setattr(caplog.handler, "emit", lambda record: seen.append(f"{record.levelname} {record.getMessage()}"))
    return seen


def test_a_worker_that_fails_and_recovers(lines: list[str]) -> None:
    watched = Watched()
    watched.make_ready()
    for _ in range(3):
        watched.health.on_probe(watched.worker, ProbeResult.FAILED, 1.0, "no answer in 5 s")
        watched.note_waits()
    watched.health.on_probe(watched.worker, ProbeResult.OK, 2.0)
    for _ in range(2):
        watched.health.on_failure(watched.worker, 3.0, "rid", refused=False, detail="it was lost")
    for _ in range(2):
        watched.health.on_probe(watched.worker, ProbeResult.REFUSED, 4.0, "refused")
    for _ in range(2):
        watched.note_waits(4.2)
    assert lines == [
        "INFO worker 0 (http://h:1) added; it gets requests once it answers",
        "INFO worker 0 (http://h:1) ready: unified, llama-8b, 431,316 KV tokens",
        "WARNING worker 0 (http://h:1) suspect, gets no new requests: it has missed health checks (no answer in 5 s)",
        "INFO worker 0 (http://h:1) ready again: it answers",
        "WARNING worker 0 (http://h:1) suspect, gets no new requests: requests have failed there (it was lost)",
        "WARNING worker 0 (http://h:1) lost: nobody listens there any more; no requests were there (refused); "
        "who starts there next is worker 1",
    ]


def make_request(rid: str, *stays: tuple[Worker, float | None], outcome: m.Outcome | None = None) -> RequestRecord:
    """One that was at some workers, one after the other, until then; ``outcome``: it has ended."""
    record = make_record(rid)
    record.attempts = [
        Attempt(number, prefill=worker, decode=worker, ended_s=ended_s)
        for number, (worker, ended_s) in enumerate(stays, 1)
    ]
    record.present = record.attempts[-1]
    record.end = None if outcome is None else End(outcome)
    return record


def test_a_lost_worker_is_one_line_with_what_became_of_its_requests(lines: list[str]) -> None:
    """It is refused first, which its loss explains; and it waits for those of which it is not known yet."""
    watched = Watched()
    watched.make_ready()
    lost, others = watched.worker, [watched.table.add(Address("h", port), 0.0) for port in (2, 3)]
    lost.heard_s = 9.5
    watched.records = [
        make_request("a", (lost, 10.0), (others[0], None)),
        make_request("b", (lost, 10.0), (others[1], 12.0), outcome=m.Outcome.OK),
        make_request("c", (lost, 10.0), (others[0], None)),
        make_request("d", (lost, 10.0), outcome=m.Outcome.UPSTREAM_LOST),
        make_request("e", (lost, 4.0), (others[0], 5.0), outcome=m.Outcome.OK),  # it had moved before
        make_request("f", (others[0], None)),
        make_request("g", (lost, None)),
    ]
    del lines[:]
    watched.health.on_failure(lost, 10.0, "a", refused=True, detail="connection refused")
    for _ in range(2):
        watched.health.on_probe(lost, ProbeResult.REFUSED, 10.1, "connection refused")
    watched.note_waits(10.3)
    assert lines == []
    watched.records[-1].attempts.append(Attempt(2, prefill=others[1], decode=others[1]))
    for _ in range(2):
        watched.note_waits(10.6)
    assert lines == [
        "WARNING worker 0 (http://h:1) lost: nobody listens there any more; requests: 4 moved to workers 1 and 2, "
        "1 failed (connection refused); who starts there next is worker 3"
    ]


def test_what_is_not_known_in_time_waits(lines: list[str]) -> None:
    watched = Watched()
    watched.make_ready()
    watched.records = [make_request("a", (watched.worker, None))]
    del lines[:]
    for _ in range(2):
        watched.health.on_probe(watched.worker, ProbeResult.REFUSED, 10.0)
    watched.note_waits(10.0 + TOLD_S)
    assert [line.partition("; ")[2].partition(";")[0] for line in lines] == ["requests: 1 wait for an instance"]


@pytest.mark.parametrize("recovers", [False, True])
def test_a_worker_whose_connections_are_refused_and_that_is_not_lost(recovers: bool, lines: list[str]) -> None:
    watched = Watched()
    watched.make_ready()
    del lines[:]
    watched.health.on_failure(watched.worker, 10.0, refused=True, detail="connection refused")
    if recovers:
        watched.worker.breaker.tick(20.0)
        watched.health.on_probe(watched.worker, ProbeResult.OK, 20.0)
    watched.note_waits(10.0 + TOLD_S)
    said = (
        "WARNING worker 0 (http://h:1) suspect, gets no new requests: requests have failed there (connection refused)"
    )
    assert lines == [said, *(["INFO worker 0 (http://h:1) ready again: it answers"] if recovers else [])]


def test_a_drain_is_told_to_its_end(lines: list[str]) -> None:
    watched = Watched()
    watched.make_ready()
    for _ in range(2):
        watched.table.drain(watched.worker, 1.0)
        watched.note_waits()
        watched.note_waits()
        watched.table.undrain(watched.worker, 2.0)
    watched.table.drain(watched.worker, 3.0, then_remove=True)
    watched.table.remove_drained(4.0)
    starts = ["INFO worker 0 (http://h:1) " + text for text in ("draining", "drained; ", "ready again: an operator")]
    assert [line.startswith(start) for line, start in zip(lines[2:8], starts * 2, strict=True)] == [True] * 6
    assert lines[-1] == "INFO worker 0 (http://h:1) removed"


def test_why_a_worker_is_not_ready_is_said_once(lines: list[str]) -> None:
    watched = Watched()
    for detail in ("nobody listens", "nobody listens", "status 503", "nobody listens"):
        watched.health.on_probe(watched.worker, ProbeResult.REFUSED, 1.0, detail)
        watched.note_waits()
    assert lines[1:] == [
        "WARNING worker 0 (http://h:1) not ready yet: nobody listens",
        "WARNING worker 0 (http://h:1) not ready yet: status 503",
    ]


def test_a_model_without_a_name(lines: list[str]) -> None:
    watched = Watched()
    watched.table.describe(watched.worker, dataclasses.replace(UNIFIED, model=""), 0.0)
    watched.health.on_probe(watched.worker, ProbeResult.OK, 0.0)
    assert lines[-1].endswith("ready: unified, model without a name, 431,316 KV tokens")


@pytest.mark.parametrize(
    ("small_first", "chunk_max_tokens", "said"),
    [(True, None, "; it does not say its chunk, 4,096 tokens are assumed"), (True, 1024, ""), (False, None, "")],
)
def test_what_is_assumed_of_a_worker_is_said(
    small_first: bool, chunk_max_tokens: int | None, said: str, lines: list[str]
) -> None:
    """Only where the choice of an instance depends on it."""
    watched = Watched()
    description = dataclasses.replace(UNIFIED, small_first=small_first, chunk_max_tokens=chunk_max_tokens)
    watched.table.describe(watched.worker, description, 0.0)
    watched.health.on_probe(watched.worker, ProbeResult.OK, 0.0)
    assert lines[-1].endswith(f"431,316 KV tokens{said}")


def test_lines_are_of_states_that_can_be_reached() -> None:
    reachable = {WorkerState.STARTING, *(state for states in LEGAL.values() for state in states)}
    assert {state for state, _ in LINES} == reachable
    assert {reason for _, reason in LINES} == set(WorkerReason) - {WorkerReason.ANSWERS}  # that one introduces itself


async def test_a_router_without_workers_warns(lines: list[str]) -> None:
    plane = ControlPlane(ControlKnobs())
    await plane.start()
    await plane.stop()
    assert lines == [f"WARNING {NO_WORKERS}"]


async def test_a_plane_tells_of_its_workers(lines: list[str]) -> None:
    async with scene(["prefill", "decode"]) as one:
        one.admin("POST", "/workers/1/drain")
        await one.until(lambda: any("drained; no requests were there" in line for line in lines))
        row = one.admin("GET", "/workers")[1]["workers"][1]
        assert (row["state"], row["drained"]) == ("drained", True)
        assert one.admin("GET", "/pla/state")[1]["workers"][1]["state"] == "drained"
    ready = [line for line in lines if " ready: " in line]
    assert sorted(line.partition(" ready: ")[2].partition(",")[0] for line in ready) == ["decode", "prefill"]


@pytest.mark.parametrize("relays", ["0", "1"])
def test_the_log_of_a_router_has_them(relays: str, tmp_path: Path) -> None:
    with router_process(["null"], ["--relay-workers", relays], tmp_path) as router:
        until(lambda: " INFO worker 0 " in router.log and "ready: unified" in router.log, what="its line")
