"""The chaos bench: its judge of who had a right to fail, and a storm on stand-ins of stateless instances."""

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
from bench.check.chaos import faults as judging
from bench.check.chaos.bench import result_of
from bench.check.chaos.faults import GONE, Faults, Freed, Kill, is_paired
from bench.check.leftovers import ClusterLeftovers
from bench.harness import servers
from bench.harness.catalogue import BENCHES
from bench.harness.replay import Planned, Record
from pla_sglang import launch_cluster
from pla_sglang.sim import chain

KILL = Kill("prefill-0", at_s=10.0, since_start_s=1.0, over_s=10.3)
KILLED = ["stateless-0", "stateless-1", "stateless-2", "stateless-0"]
HOSTS = {"prefill": "a:1", "decode": "b:2"}


@pytest.mark.parametrize(
    ("name", "story", "there"),
    [
        ("in prefill", {"decided_s": 9.0, "ended_s": 10.1}, True),
        ("it has not ended for the router yet", {"decided_s": 9.0}, True),
        ("sent to a process that was dead and had its sockets", {"decided_s": 10.2, "ended_s": 10.3}, True),
        ("dispatched after it was gone", {"decided_s": 10.4, "ended_s": 10.5}, False),
        ("ended before", {"decided_s": 9.0, "ended_s": 9.9}, False),
        ("its KV was with decode already", {"decided_s": 9.0, "done_s": 9.8, "ended_s": 11.0}, False),
        ("its KV came to decode meanwhile", {"decided_s": 9.0, "done_s": 10.1, "ended_s": 11.0}, True),
        ("elsewhere", {"decided_s": 9.0, "ended_s": 11.0, "prefill": "c:3"}, False),
        ("never dispatched", {"decided_s": None, "ended_s": 11.0}, False),
        ("unknown to the router", {"prefill": None, "decode": None}, False),
    ],
)
def test_who_was_in_flight_at_a_killed_prefill_instance(name: str, story: dict[str, Any], there: bool) -> None:
    assert judging.was_there(HOSTS | story, KILL, "a:1") is there, name


def test_a_decode_instance_has_a_request_until_its_end() -> None:
    story = HOSTS | {"decided_s": 9.0, "done_s": 9.5, "ended_s": 10.1}
    assert judging.was_there(story, KILL, "b:2")
    assert not judging.was_there(story | {"ended_s": 9.9}, KILL, "b:2")


def record(index: int, error: str | None, *, wrong: bool = False) -> Record:
    prompt = chain.prompt_of(20, 4, random.Random(index))
    tokens = chain.expected(prompt, 5).tokens
    made = Record(Planned(index, 0.0, prompt, 4), 0.0, prompt_ids=prompt, error=error)
    made.output_ids = tuple(tokens[:-1]) if wrong else tuple(tokens)
    made.finish = "stop"
    return made


def test_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    at_kill = HOSTS | {"decided_s": 9.0, "ended_s": 10.1}
    elsewhere = {"prefill": "c:3", "decode": "d:4", "decided_s": 9.0, "ended_s": 10.1, "detail": "KVTransferError"}
    stories = {"chaos-000004": at_kill, "chaos-000005": elsewhere, "chaos-000006": {}}
    monkeypatch.setattr(judging, "explain_request", lambda url, rid: stories[rid])
    described = {"url": "", "instances": [{"name": "prefill-0", "url": "http://a:1"}]}
    faults = Faults(described, Path("unused"), aborts={}, kills=())
    faults.kills.append(KILL)
    faults.aborted.add("chaos-000003")
    errors = [None, None, GONE, "status 502", "status 502", "status 502", "reset"]
    records = [record(index, error, wrong=index == 1) for index, error in enumerate(errors)]
    verdict = judging.judge(records, faults, described)
    assert (verdict.completed, verdict.disconnected, verdict.aborted, verdict.failed) == (2, 1, 1, 3)
    assert (verdict.failed_in_flight_at_kill, verdict.failed_by_transfer) == (1, 1)
    assert (verdict.failed_unexplained, verdict.unexplained, verdict.wrongly_failed(moves=False)) == (1, 2, 2)
    assert verdict.tokens_wrong == 1
    assert len(verdict.errors) == 2
    retries = {"dispatches": 100.0, "retried_after_transfer": 4.0, "retried_unsent": 1.0}
    rest = ClusterLeftovers(ledger_balanced=True, gauges_zero=True, kv_free=True, details=[])
    result = result_of(verdict, rest, retries, [Freed(0.25, 0.5)], requests=7)
    assert result["failed_not_in_flight_at_kill"] == 2
    assert result["transfer_failure_share"] == 0.05
    assert (result["decode_free_after_abort_p99_s"], result["decode_free_after_order_p99_s"]) == (0.25, 0.5)


def test_where_requests_move_a_kill_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    at_kill = HOSTS | {"decided_s": 9.0, "ended_s": 10.1}
    alone = at_kill | {"detail": "the instance is lost: closed; no other instance can go on with it"}
    monkeypatch.setattr(judging, "explain_request", lambda url, rid: alone if rid == "chaos-000002" else at_kill)
    described = {"url": "", "instances": [{"name": "prefill-0", "url": "http://a:1"}]}
    faults = Faults(described, Path("unused"), aborts={}, kills=())
    faults.kills.append(KILL)
    records = [record(index, error) for index, error in enumerate([None, "status 502", "the stream broke"])]
    verdict = judging.judge(records, faults, described, moves=True)
    assert (verdict.failed, verdict.failed_in_flight_at_kill, verdict.failed_no_instance) == (2, 1, 1)
    assert verdict.wrongly_failed(moves=True) == 1
    assert len(verdict.errors) == 1


def test_moves_need_stateless_instances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["chaos"].main(["--moves", "--out", str(tmp_path)]) == 2
    assert "--moves --stateless 0" in capsys.readouterr().err
    options = BENCHES["chaos"].parse("--moves", "--stateless", "3", "--requests", "10")
    arguments = storm.cluster_arguments(options)
    config = launch_cluster.read_config(arguments).config.to_cluster()
    assert launch_cluster.read_router_knobs(config).migrates
    assert storm.name_of(options) == "chaos_moves"
    counts = dict.fromkeys((*storm.CHAOS_ROWS, *storm.MOVE_ROWS), 3) | dict.fromkeys(storm.CHAOS_CHECKS, True)
    about = {"killed": ["stateless-0"], "transfer_failure_share": 0.05, "abort_probes": 0}
    result = vars(options) | counts | about | {"environment": {"hardware": "a cpu", "plugin_commit": "c"}}
    assert "hops to another instance | 3" in storm.page(result)


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
        monkeypatch.setattr(judging, "DOWN_S", 0.2)
        monkeypatch.setattr(judging.os, "killpg", self.kill)
        monkeypatch.setattr(judging, "restart_instance", self.restart)

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
    assert "`stateless-0` paired with all others after the order to start it again (at most 15 s)" in page
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
    assert BENCHES["chaos"].main(["--kills", "-1"]) == 2


def test_paired_is_who_is_ready_and_knows_all_others() -> None:
    ready, other = {"kind": "stateless", "state": "ready"}, {"kind": "unified", "state": "ready", "peers": None}
    rows = [ready | {"peers": {"1": "ready"}}, ready | {"peers": {"0": "ready"}}, other]
    assert is_paired(rows, 2)
    assert not is_paired(rows, 3)
    assert not is_paired([rows[0], ready | {"peers": None}], 2)
    assert not is_paired([rows[0], ready | {"peers": {"0": "warming"}}], 2)
    assert not is_paired([rows[0], rows[1] | {"state": "starting"}], 2)
