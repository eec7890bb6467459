"""What the router shows of the legs of its stateless instances, from their answers and from their load reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_sglang import INFO
from support.router_scene import Scene, scene

from pla_sglang.fleet.router.control.workers.discovery import describe
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.load.legs import LegLoad
from pla_sglang.load.report import Report
from pla_sglang.load.sockets import Pusher

STATE: dict[str, Any] = {
    "sending": {"legs": {"prefill": 2}, "kv_tokens": 70, "sent": 5, "failed": 1},
    "receiving": {"legs": {"connecting": 0, "ready": 3}, "kv_tokens": 90, "received": 4, "failed": 2},
    "quarantine": {"requests": 1, "kv_tokens": 30, "timeouts": 1},
    "refused": 8,
    "faults": 4,
}


def lines_of(one: Scene) -> set[str]:
    """Of the first worker's legs, without its name."""
    name = one.plane.table.workers[0].view.name
    text: str = one.admin("GET", "/metrics")[1]
    lines = [line for line in text.splitlines() if f'worker="{name}"' in line]
    short = (line.removeprefix("pla_router_worker_").replace(f'worker="{name}"', "") for line in lines)
    return {line for line in short if line.startswith(("leg", "quarantined"))}


SHOWN = {
    'legs{end="sending",state="prefill",} 2.0',
    'legs{end="receiving",state="connecting",} 0.0',
    'legs{end="receiving",state="ready",} 3.0',
    'leg_kv_tokens{holder="sending",} 70.0',
    'leg_kv_tokens{holder="receiving",} 90.0',
    'leg_kv_tokens{holder="quarantine",} 30.0',
    "quarantined_requests{} 1.0",
    "legs_refused{} 8.0",
    "leg_faults{} 4.0",
    "leg_ready{} 1.0",
}


async def test_legs_come_with_the_answers_of_instances_that_report_nothing() -> None:
    async with scene(["stateless", "null"], policy="round-robin") as one:
        assert lines_of(one) == set(), "a server that says nothing of them"
        said = one.instances[0].says_stateless()
        one.instances[0].says_stateless = lambda: said | STATE  # type: ignore[method-assign]
        await one.until(lambda: lines_of(one) == SHOWN)
        ours, stock = one.admin("GET", "/pla/state")[1]["workers"]
        assert ours["legs"] == {"sending": {"prefill": 2}, "receiving": {"connecting": 0, "ready": 3}}
        assert ours["leg_kv_tokens"] == {"sending": 70, "receiving": 90, "quarantine": 30}
        assert ours["quarantined_requests"] == 1
        assert (stock["legs"], stock["leg_kv_tokens"], stock["quarantined_requests"]) == (None, None, None)
        assert one.plane.table.workers[1].legs is None


async def test_legs_come_with_load_reports(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/reports"
    async with scene(["stateless"], policy="round-robin", telemetry=address) as one:
        worker, pusher = one.plane.table.workers[0], Pusher(address)
        assert worker.description is not None
        name = worker.description.report_key
        report = Report(instance=name, sequence=1, legs=LegLoad.of_state(STATE))
        await one.until(lambda: pusher.send(report))
        await one.until(lambda: worker.legs == report.legs)
        assert lines_of(one) == SHOWN
        pusher.close()


@pytest.mark.parametrize(
    "changes", [{"refused": -1}, {"sending": {"legs": "many", "kv_tokens": 1}}, {"quarantine": {}}]
)
def test_an_answer_of_another_shape_is_no_answer(changes: dict[str, Any]) -> None:
    stateless = {"bootstrap_port": 7001, "incarnation": "a", **STATE, **changes}
    with pytest.raises(WorkerError, match="server_info"):
        describe({**INFO, "internal_states": [{"pla": {"stateless": stateless}}]})
