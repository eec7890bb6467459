"""What operators do to a running control plane, what outlives its restart, and what it records."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSglang
from fleet.router.control.test_router_labels import STATELESS
from support.router_scene import Scene, beginning_scene, scene

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.succession import Lease
from pla_sglang.fleet.router.control.workers.table import WorkerState
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.parity import replay_file
from pla_sglang.policy.registry import live_policy_names


async def test_workers_come_and_go() -> None:
    async with scene(["null"]) as one:
        other = await FakeSglang().start()
        assert one.admin("POST", "/workers", {"url": other.url})[0] == 202
        assert one.admin("POST", "/workers", {"url": other.url})[0] == 409
        assert one.admin("POST", "/workers", {"url": "ftp://x"})[0] == 400
        assert one.admin("POST", "/workers", {"link": other.url})[0] == 400
        await one.ready(2)
        assert one.admin("POST", "/workers/0/drain")[0] == 202
        answer = one.assign("r")
        assert answer.decode == 1
        assert one.admin("POST", "/workers/0/undrain")[0] == 202
        assert one.admin("DELETE", "/workers/1")[0] == 202
        await asyncio.sleep(0.4)
        assert len(one.admin("GET", "/workers")[1]["workers"]) == 2  # it still serves r
        one.ended("r")
        await one.until(lambda: len(one.admin("GET", "/workers")[1]["workers"]) == 1)
        missing = {"message": "no worker '1'", "type": "not_found", "code": 404}
        assert one.admin("GET", "/workers/1") == (404, {"error": missing})
        status, body = one.admin("PUT", "/workers")
        assert (status, body["error"]["type"], body["error"]["code"]) == (405, "method", 405)
        await other.stop()


@pytest.mark.parametrize("body", [b"", b"\xff", b'{"url": "\xff"}', b'{"url": [3]}', b'{"x":' + b"[" * 100_000])
async def test_a_body_that_is_none_is_the_operators_mistake(body: bytes) -> None:
    async with scene(["null"]) as one:
        one.plane.on_message(m.AdminAsk(7, 0, "POST", "/workers", body))
        answer = one.relay.last(m.AdminResponse)
        assert (answer.number, answer.status) == (7, 400)


@pytest.mark.parametrize("key", ["boss", ""])
async def test_instances_with_an_admin_key_take_aborts_and_roles(key: str) -> None:
    keys = {"worker_api_key": "users", "worker_admin_key": key}
    async with scene(["prefill", "decode"], has_role=True, policy="pla", **keys) as one:
        await one.until(lambda: one.instances[0].roles == ["mixed"])
        for fake in one.instances:
            fake.admin_key = "boss"
        one.ask("r")
        one.plane.detach_relay(0)  # the relay is gone, so the aborts are ours
        one.plane.attach_relay(0, one.relay)
        if key:
            await one.until(lambda: not one.plane.dispatcher.ledger.records)
            assert all("r" in fake.aborted for fake in one.instances)
        else:  # an operator sees why
            await one.until(lambda: "--worker-admin-key" in one.admin("GET", "/workers/0")[1]["detail"])
        other = await FakeSglang("prefill", has_role=True).start()
        one.admin("POST", "/workers", {"url": other.url})  # so the first one gets a pool
        await one.until(lambda: other.roles)
        await one.until(lambda: (one.instances[0].roles[-1] == "long") is bool(key))
        await other.stop()


async def test_the_worker_file_is_read_again(tmp_path: Path) -> None:
    first, second = await FakeSglang().start(), await FakeSglang().start()
    path = tmp_path / "workers.json"
    path.write_text(json.dumps({"workers": [{"url": first.url}]}))
    async with beginning_scene(first, second, worker_file=path) as one:
        await one.ready(1)
        path.write_text(json.dumps({"workers": [{"url": second.url}, {"url": first.url, "drain": True}]}))
        status, told = one.admin("POST", "/pla/reload")
        assert (status, told["added"]) == (200, [second.url])
        await one.until(lambda: [view.name for view in one.plane.table.fleet.ready] == [f"127.0.0.1:{second.port}"])
        path.write_text("{")
        assert one.admin("POST", "/pla/reload")[0] == 400
        path.write_text(json.dumps({"workers": [{"url": second.url}]}))
        await one.until(lambda: len(list(one.plane.table)) == 1)  # found by itself


async def test_a_worker_that_the_file_wants_drained_never_serves(tmp_path: Path) -> None:
    """Also where the file says so before it has answered for the first time."""
    first, second = await FakeSglang().start(), await FakeSglang().start()
    path = tmp_path / "workers.json"

    def say(drain: bool) -> None:
        path.write_text(json.dumps({"workers": [{"url": first.url, "drain": drain}, {"url": second.url}]}))

    say(True)
    async with beginning_scene(first, second, worker_file=path) as one:
        await one.until(
            lambda: [worker.state for worker in one.plane.table] == [WorkerState.DRAINING, WorkerState.READY]
        )
        say(False)
        assert one.admin("POST", "/pla/reload")[0] == 200
        await one.ready(2)


async def test_a_memory_file_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    async with scene(["null"], memory_file=folder / "memory.json", pending_s=0.5) as one:
        await one.until((folder / "memory.json").exists)
        shutil.rmtree(folder)
        one.admin("POST", "/workers/0/drain")
        await one.until(lambda: "memory file" in caplog.text)
        assert one.ask("waits") is None
        await one.until(lambda: isinstance(one.relay.told[-1], m.Refuse))  # told by the timer that also writes
        one.ended("waits", m.Outcome.REFUSED)
        folder.mkdir()
        await one.until((folder / "memory.json").exists)
        assert caplog.text.count("memory file") == 1


@pytest.mark.parametrize("knobs", [{"record": Path("/no/such/folder/run.jsonl")}, {"profile": "no-such-gpu"}])
async def test_what_cannot_work_is_refused_at_the_start(knobs: dict[str, Any]) -> None:
    plane = ControlPlane(ControlKnobs(**knobs))
    with pytest.raises(ConfigError, match="no"):
        await plane.start()


async def test_an_instance_whose_policy_cannot_be_made_says_why() -> None:
    """Known once the first instance has said what it is: this one, that it has no KV cache."""
    instance = await FakeSglang(max_total_num_tokens=0).start()
    async with beginning_scene(instance, workers=(instance.url,)) as one:
        await one.until(lambda: "kv_capacity_tokens" in one.admin("GET", "/workers/0")[1]["detail"])
        assert one.admin("GET", "/workers/0")[1]["state"] == "starting"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
async def test_a_recording_that_cannot_go_on_costs_no_request() -> None:
    async with scene(["null"], record=Path("/dev/full")) as one:
        for number in range(300):
            one.assign(f"r{number}")
            one.ended(f"r{number}")
        assert "space" in one.admin("GET", "/pla/state")[1]["record_error"]
        one.assert_at_rest()


async def test_another_life_does_not_write_over_a_recording(tmp_path: Path) -> None:
    record, memory = tmp_path / "run.jsonl.gz", tmp_path / "memory.json"
    for life in ("first", "second"):
        async with scene(["null"], record=record, memory_file=memory) as one:
            one.assign(life)
            one.ended(life)
    assert [replay_file(tmp_path / name)[1].count for name in ("run.jsonl.gz", "life2.run.jsonl.gz")] == [1, 1]


async def test_another_life_takes_over_what_is_open(tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    async with scene(["prefill", "decode"], memory_file=memory) as one:
        assign = one.ask("kept")
        one.ask("gone")
        assert isinstance(assign, m.Assign)
        asked = m.Ask("kept", 0, m.Endpoint.CHAT, True, time.monotonic(), 30, 50)
        done = m.Progress("kept", m.Milestone.PREFILL_DONE, time.monotonic())
        await one.plane.stop()
        knobs = one.plane.knobs
        second = ControlPlane(knobs, lease=Lease(epoch=2))
        await second.start()
        two = Scene(second, one.instances)
        assert (one.relay.last(m.Table).epoch, two.relay.last(m.Table).epoch) == (1, 2)
        second.on_message(m.Hello(0, m.PROTOCOL, (m.OpenRequest(asked, assign, (done,)),)))
        assert second.dispatcher.ledger.rooms == {assign.bootstrap_room: "kept"}
        assert second.table.by_number[assign.decode].view.waiting_decodes == 1
        await two.ready(2)
        assert {worker.number for worker in second.table} == {0, 1}
        two.reach("kept", m.Milestone.FIRST_TOKEN)
        two.ended("kept")
        two.assert_at_rest()
        second.on_message(m.Hello(0, m.PROTOCOL, ()))  # nothing new
        two.assert_at_rest()
        await second.stop()


async def test_what_is_taken_over_before_the_time_scale_is_known_enters_no_window(tmp_path: Path) -> None:
    """On slowed devices its time would lie in the future of the device's clock, and nothing would leave the window."""
    async with scene(["null"], memory_file=tmp_path / "memory.json") as one:
        assign = one.assign("kept")
        await one.plane.stop()
        second = ControlPlane(one.plane.knobs)
        await second.start()
        taken = opened("kept", assign)
        token = m.Progress("kept", m.Milestone.FIRST_TOKEN, time.monotonic())
        second.on_message(m.Hello(0, m.PROTOCOL, (m.OpenRequest(taken.ask, taken.assign, (token,)),)))
        assert second.policy.runner is None
        second.policy.clock.set_scale(2.0)
        worker = second.table.by_number[assign.decode]
        worker.load.age_ttft_ratio(time.monotonic() + 60)
        assert worker.view.ttft_ratio is None
        await second.stop()


def opened(rid: str, assign: m.Assign) -> m.OpenRequest:
    return m.OpenRequest(m.Ask(rid, 0, m.Endpoint.CHAT, True, time.monotonic(), 30, 50), assign, ())


async def test_a_request_at_an_instance_that_is_not_known_stays_its_relays() -> None:
    """The last life ended before it had written down who has this number."""
    async with scene(["prefill", "decode"]) as one:
        for rid, assign in (("one", m.Assign("one", 1, 77)), ("two", m.Assign("two", 1, 1, 78, "h", 1, 5))):
            one.plane.on_message(m.Hello(0, m.PROTOCOL, (opened(rid, assign),)))
            assert one.plane.dispatcher.ledger.live == 1
            one.reach(rid, m.Milestone.FIRST_TOKEN)
            one.ended(rid)
            one.assert_at_rest()


async def test_a_request_that_was_given_up_by_mistake_is_ended_by_its_relay() -> None:
    """Its relay was not heard for a while, so its instances were told to abort it; they have not confirmed yet."""
    async with scene(["null"]) as one:
        assign = one.assign("r")
        one.instances[0].abort_status = 500
        one.plane.detach_relay(0)
        one.plane.attach_relay(0, one.relay)
        one.plane.on_message(m.Hello(0, m.PROTOCOL, (opened("r", assign),)))
        assert (one.relay.last(m.Abort).rid, one.relay.last(m.Abort).code) == ("r", "relay_lost")
        one.ended("r", m.Outcome.ABORTED)
        one.instances[0].abort_status = 200
        await one.at_rest()


async def test_a_router_that_stops_ends_requests_as_such() -> None:
    async with scene(["null"]) as one:
        one.ask("r")
        one.ended("r", m.Outcome.DRAINED, aborted=(0,))
        assert one.admin("GET", "/pla/ledger")[1]["ended"] == {"router_drain": 1}
        one.assert_at_rest()


async def test_a_relay_of_another_version_is_not_served() -> None:
    async with scene(["null"]) as one:
        one.plane.on_message(m.Hello(0, m.PROTOCOL - 1, ()))
        assert one.ask("r") is None
        one.ended("r", m.Outcome.NO_CONTROL)
        await one.at_rest()


async def test_an_operators_wishes_outlive_a_restart(tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    async with scene(["null", "null", "null"], memory_file=memory) as one:
        one.admin("POST", "/workers/1/drain")
        one.admin("DELETE", "/workers/2")
        await one.until(lambda: len(list(one.plane.table)) == 2)
        await one.plane.stop()
        second = ControlPlane(one.plane.knobs)
        await second.start()
        two = Scene(second, one.instances)
        await two.until(lambda: second.table.by_number[1].state is WorkerState.DRAINING)
        assert [worker.number for worker in second.table] == [0, 1]
        await second.stop()
    memory.write_text("{")
    with pytest.raises(ConfigError, match="memory file"):
        ControlPlane(ControlKnobs(memory_file=memory))


PAIRS = ("prefill", "prefill", "decode", "decode")


@pytest.mark.parametrize(
    ("policy", "modes"),
    [
        *((name, PAIRS) for name in live_policy_names()),
        *((name, STATELESS) for name in live_policy_names()),
        ("combined", ("null",) * 4),
    ],
)
async def test_a_recorded_run_replays_to_the_same_decisions(
    policy: str, modes: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl.gz"
    async with scene(list(modes), policy=policy, record=path, slo_ttft_s=0.3) as one:
        if modes is STATELESS:
            await one.connected()
        system = "s" * 4000
        for number in range(60):
            body = {"messages": [{"role": "system", "content": system[: 400 * (number % 9)]}]}
            one.assign(f"r{number}", body, input_tokens=100 * (1 + number % 7))
            if number >= 5:
                one.reach(f"r{number - 5}", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
            if number >= 9:
                one.ended(f"r{number - 9}")
            if number % 20 == 0:
                one.instances[number // 20].load |= {"num_waiting_uncached_tokens": 3000 * number}
                await asyncio.sleep(0.3)
            if number in (30, 45):
                one.admin("POST", f"/workers/3/{'drain' if number == 30 else 'undrain'}")
    header, result = replay_file(path)
    assert header.policy == policy
    placed_apart = modes is PAIRS and policy != "dopd"  # DOPD names both instances on arrival
    assert result.count >= (120 if placed_apart else 60)
    assert result.identical_share == 1.0, result.differences
    if modes[0] == "null":
        assert set(result.reasons) >= {"combined.united", "arrow.steady"}


async def test_moves_between_pools_replay(tmp_path: Path) -> None:
    """The controller's inner state too: averages, period, pause after a move."""
    path = tmp_path / "run.jsonl.gz"
    quick = {"pressure_interval_s": 0.1, "pressure_cool_down_s": 0.3, "slo_ttft_s": 0.05, "boundary_tokens": 100}
    modes = [*["prefill"] * 4, "decode"]
    async with scene(modes, has_role=True, policy="pla", record=path, **quick) as one:
        driver = one.plane.policy.runner
        assert driver is not None
        for turn, busy in enumerate(("short", "long")):
            for number in range(12):
                one.ask(f"r{turn}-{number}", input_tokens=90 if busy == "short" else 900, exact_tokens=True)
            for worker, fake in zip(one.plane.table, one.instances, strict=True):
                wanted = worker.view.length_class is not None and worker.view.length_class.value == busy
                fake.load |= {"num_waiting_uncached_tokens": 100_000 if wanted else 0}
            await one.until(lambda turn=turn: driver.moved.total() > turn, 8.0)  # type: ignore[misc]
            for number in range(12):
                one.reach(f"r{turn}-{number}", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
                one.ended(f"r{turn}-{number}")
    _, result = replay_file(path)
    assert {"pla.pressure_short", "pla.pressure_long"} <= set(result.reasons)
    assert result.identical_share == 1.0, result.differences
