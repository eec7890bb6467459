"""What operators read of workers in the router's log: a line for each change, once, with its reason."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from support.router_process import router_process
from support.router_scene import scene
from support.serving import until

from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.discovery import Address, Description
from pla_sglang.fleet.router.control.workers.health import Health, HealthKnobs, ProbeResult
from pla_sglang.fleet.router.control.workers.table import LEGAL, WorkerReason, WorkerState, WorkerTable
from pla_sglang.fleet.router.control.workers.worker_log import LINES, NO_WORKERS, WorkerLog
from pla_sglang.policy.interface.fleet import InstanceKind

UNIFIED = Description(InstanceKind.UNIFIED, "p1", "h:1", 431_316, 1, 1, "/models/llama-8b/", "t", "0.5.17")


class Watched:
    """A table with one worker at ``http://h:1``, its health, and a journal that hears of all changes."""

    def __init__(self) -> None:
        self.journal = WorkerLog()
        self.table = WorkerTable(BreakerKnobs(consecutive=2), on_change=self.journal.note_change)
        self.health = Health(self.table, HealthKnobs(misses=2, refused=2))
        self.worker = self.table.add(Address("h", 1), 0.0)

    def make_ready(self) -> None:
        self.table.describe(self.worker, UNIFIED, 0.0)
        self.health.on_probe(self.worker, ProbeResult.OK, 0.0)

    def note_waits(self) -> None:
        self.journal.note_waits(self.table)


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
    assert lines == [
        "INFO worker 0 (http://h:1) added; it gets requests once it answers",
        "INFO worker 0 (http://h:1) ready: unified, llama-8b, 431,316 KV tokens",
        "WARNING worker 0 (http://h:1) suspect, gets no new requests: it has missed health checks (no answer in 5 s)",
        "INFO worker 0 (http://h:1) ready again: it answers",
        "WARNING worker 0 (http://h:1) suspect, gets no new requests: requests have failed there (it was lost)",
        "WARNING worker 0 (http://h:1) lost: nobody listens there any more (refused)",
        "INFO worker 1 (http://h:1) added; it gets requests once it answers",
    ]


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
    starts = ["INFO worker 0 (http://h:1) " + text for text in ("draining", "drained: it", "ready again: an operator")]
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
        await one.until(lambda: any("drained" in line for line in lines))
    ready = [line for line in lines if " ready: " in line]
    assert sorted(line.partition(" ready: ")[2].partition(",")[0] for line in ready) == ["decode", "prefill"]


@pytest.mark.parametrize("relays", ["0", "1"])
def test_the_log_of_a_router_has_them(relays: str, tmp_path: Path) -> None:
    with router_process(["null"], ["--relay-workers", relays], tmp_path) as router:
        until(lambda: " INFO worker 0 " in router.log and "ready: unified" in router.log, what="its line")
