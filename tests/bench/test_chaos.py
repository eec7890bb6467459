"""The chaos bench: its figures, its flags, and a storm on stand-ins of stateless instances."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_stand_ins import ChainInstance
from support.router_process import fake_instances

from bench.check.chaos import bench as storm
from bench.check.chaos.probes import Freed
from bench.check.faults import fleet as fleets
from bench.check.faults.bodies import make_sampled
from bench.check.faults.client import Stream
from bench.check.faults.table import OTHER_KILLS
from bench.check.leftovers import ClusterLeftovers
from bench.harness import servers
from bench.harness.catalogue import BENCHES
from pla_sglang import launch_cluster

KILLED = ["stateless-0", "stateless-1", "stateless-2", "stateless-0"]


def test_figures() -> None:
    counts = ("disconnected", "aborted", "failed_in_flight_at_kill", "failed_no_instance", "failed_at_router_restart")
    verdict = dict.fromkeys(counts, 1) | {"completed": 7, "failed": 5, "failed_by_transfer": 1, "failed_unexplained": 1}
    retries = {"dispatches": 100.0, "retried_after_transfer": 4.0, "retried_unsent": 1.0}
    rest = ClusterLeftovers(ledger_balanced=True, gauges_zero=True, kv_free=True, details=[])
    result = storm.result_of(verdict, rest, retries, [Freed(0.25, 0.5)], requests=7)
    assert result["failed_not_in_flight_at_kill"] == 2
    assert result["transfer_failure_share"] == 0.05
    assert (result["decode_free_after_abort_p99_s"], result["decode_free_after_order_p99_s"]) == (0.25, 0.5)


def test_where_requests_move_the_router_stands_behind_proxies() -> None:
    options = BENCHES["chaos"].parse("--moves", "--stateless", "3", "--requests", "10")
    config = launch_cluster.read_config(storm.cluster_arguments(options)).config.to_cluster()
    assert config.router == "none", "it stands behind proxies"
    assert "--migration on" in storm.router_flags(options)
    assert storm.name_of(options) == "chaos_moves"
    counts = dict.fromkeys((*storm.CHAOS_ROWS, *storm.MOVE_ROWS), 3) | dict.fromkeys(storm.CHAOS_CHECKS, True)
    about: dict[str, Any] = {"killed": ["stateless-0"], "transfer_failure_share": 0.05, "abort_probes": 0}
    about |= {"longest_silence_s": 4.25, "longest_wait_s": 6.0}
    result = vars(options) | counts | about | {"environment": {"hardware": "a cpu", "plugin_commit": "c"}}
    page = storm.page(result)
    assert "hops to another instance | 3" in page
    assert "| 4.2 / 6.0 s |" in page


def test_half_of_the_kills_are_other_losses_where_requests_move() -> None:
    streams = [Stream(rid=f"r{place}", body=make_sampled(random.Random(0)), due_s=1.0 + place) for place in range(60)]
    flags = ("--stateless", "4", "--kills", "8", "--requests", "60")
    options = BENCHES["chaos"].parse("--moves", *flags)
    lost = [due for due in storm.plan_faults(streams, 1, options) if due.where.startswith("stateless")]
    assert [due.where for due in lost] == [f"stateless-{place}" for place in (0, 1, 2, 3)] * 2
    assert sorted(due.fault for due in lost) == sorted([*OTHER_KILLS, *["kill"] * 4])
    stay = storm.plan_faults(streams, 1, BENCHES["chaos"].parse(*flags))
    assert [due.fault for due in stay if due.where.startswith("stateless")] == ["kill"] * 8


class Mortal(ChainInstance):
    """Can be killed and started again from another thread."""

    async def start(self) -> Mortal:
        self.loop = asyncio.get_running_loop()
        await super().start()
        return self

    async def do(self, what: str) -> int:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(getattr(self, what)(), self.loop))
        return 0


class StandIns:
    """Fakes that stand for a cluster behind a real router."""

    def __init__(self, fakes: list[Mortal], monkeypatch: pytest.MonkeyPatch) -> None:
        self.fakes, self.starts = fakes, list[list[str]]()
        rest = ClusterLeftovers(ledger_balanced=True, gauges_zero=True, kv_free=True, details=[])
        monkeypatch.setattr(storm, "running_cluster", self.run_cluster)
        monkeypatch.setattr(storm, "wait_until_at_rest", lambda described: asyncio.sleep(0, rest))
        monkeypatch.setattr(fleets, "DOWN_S", 0.2)
        monkeypatch.setattr(fleets.os, "killpg", self.kill)
        monkeypatch.setattr(fleets, "restart_instance", self.restart)

    @contextlib.contextmanager
    def run_cluster(self, flags: list[str], folder: Path, name: str) -> Iterator[dict[str, Any]]:
        config = launch_cluster.read_config(flags).config.to_cluster()
        launch_cluster.check_members(config)
        self.starts.append(flags)
        instances = [
            {"name": f"stateless-{place}", "kind": "stateless", "url": fake.url, "pid": place, "bootstrap_port": None}
            for place, fake in enumerate(self.fakes)
        ]
        router = servers.Router("pla", config.policy, config.router_extra)
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.state.json").write_text(json.dumps({"instances": instances}))
        with servers.running_router(router, {"instances": instances}, folder / "router.log") as url:
            servers.wait_until_paired(url)
            yield {"url": url, "instances": instances}

    def kill(self, pid: int, number: int) -> None:
        self.killed = asyncio.ensure_future(self.fakes[pid].do("stop"))

    async def restart(self, name: str, state: Path) -> int:
        await self.killed
        return await self.fakes[int(name[-1])].do("start")


def test_a_storm_on_stateless_instances(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes = [Mortal(time_scale=1.0) for _ in range(3)]
    with fake_instances(fakes):
        made = StandIns(fakes, monkeypatch)
        flags = ["--stateless", "3", "--kills", "4", "--requests", "60", "--rate", "25", "--time-scale", "1"]
        status = BENCHES["chaos"].main([*flags, "--json", "--out", str(tmp_path)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0, result
    assert (result["failed_not_in_flight_at_kill"], result["tokens_wrong"], result["killed"]) == (0, 0, KILLED)
    assert result["requests"] == 60
    assert (result["cache_entries_wrong"], result["routers"], result["restarts"]) == (0, 1, 0)
    assert result["completed"] >= 20
    assert 0 < result["paired_s"]["stateless-0"] < 15
    assert any(fake.aborted for fake in fakes)
    assert {"prefill", "decode"} <= {leg for fake in fakes for leg in fake.legs}
    assert made.starts[0][:2] == ["--stateless", "3"]
    page = storm.page(result)
    assert "slowest pairing with all others after a restart (at most 15 s)" in page
    assert "decode free" not in page, "there were no probes"
    assert "3 stateless instances, 25 requests/s" in page
    assert "SIGKILL of `stateless-0` (2 times), `stateless-1` and `stateless-2`" in page
    assert (tmp_path / "chaos_stateless.json").is_file()


def test_an_instance_that_is_late_to_be_paired_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storm, "PAIRED_S", 0.0)
    fakes = [Mortal(time_scale=1.0) for _ in range(2)]
    with fake_instances(fakes):
        StandIns(fakes, monkeypatch)
        flags = ["--stateless", "2", "--kills", "1", "--requests", "20", "--rate", "25", "--time-scale", "1"]
        assert BENCHES["chaos"].main([*flags, "--json", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "failed: stateless-0 was not paired within 0 s" in shown.out + shown.err
    assert " s: NO |" in storm.page(json.loads(shown.out.splitlines()[-1]))
    assert storm.late_to_pair(["stateless-0", "stateless-1", "stateless-0"], {"stateless-0": 0.1}) == [
        "stateless-0",
        "stateless-1",
    ], "one did not come back"


def test_kills_go_round() -> None:
    parse = BENCHES["chaos"].parse
    assert storm.plan_kills(parse("--kills", "2"), 100.0) == [("prefill-0", 30.0), ("decode-0", 60.0)]
    named = [name for name, _ in storm.plan_kills(parse("--kills", "5", "--stateless", "2"), 100.0)]
    assert named == ["stateless-0", "stateless-1"] * 2 + ["stateless-0"]
    assert storm.plan_kills(parse("--kills", "0"), 100.0) == []
