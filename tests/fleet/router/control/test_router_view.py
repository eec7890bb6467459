"""What /pla/view and its data say of a live fleet, and the series beside them."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.router_scene import Scene, scene

from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.viewer.page import CONTENT_TYPE, live_headers, render_live
from pla_sglang.policy.interface.decisions import SetRole
from pla_sglang.policy.interface.fleet import InstanceKind, Role
from pla_sglang.policy.interface.reasons import FleetReason


def read_view(one: Scene, since_s: float = 0.0) -> dict[str, Any]:
    status, document = one.admin("GET", f"/pla/view/since/{since_s}")
    assert status == 200
    return dict(document)


def changes_of(one: Scene, index: int) -> list[tuple[str, str, str, str]]:
    return [tuple(change[2:6]) for change in read_view(one)["changes"] if change[1] == index]


async def test_the_page_comes_with_its_headers() -> None:
    async with scene(["null"]) as one:
        one.plane.on_message(m.AdminAsk(7, 0, "GET", "/pla/view", b""))
        answer = one.relay.last(m.AdminResponse)
        assert (answer.status, answer.content_type, answer.body) == (200, CONTENT_TYPE, render_live())
        assert answer.headers == live_headers()
        assert one.admin("POST", "/pla/view")[0] == 405
        for text in ("x", "nan", "inf", "1e999"):
            assert one.admin("GET", f"/pla/view/since/{text}")[0] == 400


async def test_states_come_with_their_reasons() -> None:
    async with scene(["prefill", "decode"], policy="minimal-load") as one:
        await one.until(lambda: len(read_view(one)["instances"]) == 2)
        assert changes_of(one, 1)[-1] == ("ready", "decode", "", "worker.answers")
        one.admin("POST", "/workers/1/drain")
        await one.until(lambda: changes_of(one, 1)[-1] == ("drained", "decode", "", "worker.operator"))
        one.admin("DELETE", "/workers/1")
        await one.until(lambda: changes_of(one, 1)[-1] == ("dead", "decode", "", "worker.removed"))
        document = read_view(one)
        assert document["head"]["policy"] == "minimal-load"
        assert document["head"]["ready"] == "1"
        assert [row["name"] for row in document["instances"]] == [f"127.0.0.1:{fake.port}" for fake in one.instances]


async def test_a_move_has_its_own_time_and_reason() -> None:
    async with scene(["null", "null"], policy="minimal-load") as one:
        runner, view = one.plane.policy.runner, one.plane.table.fleet.instances[1]
        assert runner is not None
        await one.until(lambda: len(read_view(one)["instances"]) == 2)
        view.kind, view.fixed_role = InstanceKind.STATELESS, False
        for role, reason in ((Role.PREFILL, FleetReason.NO_DATA), (Role.DECODE, FleetReason.COOL_DOWN)):
            runner._apply([SetRole(view, role, reason)], runner._device_s(time.monotonic()))
        await one.until(lambda: len(changes_of(one, 1)) >= 3)
        assert changes_of(one, 1)[-2:] == [
            ("ready", "prefill", "", "any.no_data"),  # between two looks at the table
            ("ready", "decode", "", "any.cool_down"),
        ]
        epochs = [change[6] for change in read_view(one)["changes"] if change[1] == 1]
        assert epochs[-2:] == [view.role_epoch - 1, view.role_epoch]


async def test_predicted_and_measured_ttft_by_instance() -> None:
    async with scene(["null"], policy="minimal-load") as one:
        for number in range(3):
            one.ask(f"r{number}")
            one.reach(f"r{number}", m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
            one.ended(f"r{number}")
        name = one.plane.table.workers[0].view.name
        sums = one.plane.series.worker_ttft[name]
        assert sums.count == 3
        text = one.admin("GET", "/metrics")[1]
        samples = {
            sample.name: sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels.get("worker") == name
        }
        assert samples["pla_router_worker_first_tokens_total"].value == 3
        exact = {"ttft": sums.measured_s, "predicted_ttft": sums.predicted_s, "ttft_error": sums.error_s}
        [row] = one.admin("GET", "/pla/state")[1]["workers"]
        assert row["first_tokens"] == one.admin("GET", "/workers/0")[1]["first_tokens"] == 3
        for series, value in exact.items():
            assert samples[f"pla_router_worker_{series}_seconds_total"].value == value
            assert row[f"{series}_s"] == pytest.approx(value, abs=1e-3)
        assert sums.predicted_s > 0
        role = samples["pla_router_worker_role"]
        assert (role.labels["role"], role.labels["pool"], role.labels["state"]) == ("mixed", "both", "ready")
        assert samples["pla_router_worker_kv_capacity_tokens"].value == 50_000


async def test_samples_come_with_the_load() -> None:
    async with scene(["null"], policy="minimal-load") as one:
        await one.until(lambda: read_view(one)["samples"])
        document = read_view(one)
        at_s, _, waiting, [row], lengths, figures = document["samples"][0]
        assert dict(zip(document["figure_fields"], figures, strict=True))["ended"] == 0
        assert (row[0], waiting, lengths) == (0, 0, None)
        assert len(row) == 1 + len(document["load_fields"])
        assert read_view(one, at_s)["samples"] == [sample for sample in read_view(one)["samples"] if sample[0] > at_s]
        msgspec.json.encode(document)
