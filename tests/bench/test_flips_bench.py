"""``bench flips`` through a real router process, before fakes of stateless instances with the chain model's answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_stand_ins import ChainInstance
from support.router_process import fake_instances

from bench.check import flips as bench
from bench.check.consistency import AGAIN
from bench.check.flips import FlipOrder
from bench.harness import servers
from bench.harness.catalogue import BENCHES

FLAGS = ["--instances", "2", "--time-scale", "1", "--gap-s", "0.3", "--rate", "25", "--json"]
A, B = "a:1", "b:2"
FIGURES = {"requests": 10, "failed": 0, "altered": 0, "host_overhead_share": 0.1, "client_lag_p99_ms": 1.0}


class Fleet:
    """Fakes that stand for a cluster. ``starts``: flags of each."""

    def __init__(self, fakes: list[ChainInstance]) -> None:
        self.fakes, self.starts = fakes, list[list[str]]()

    @contextlib.contextmanager
    def run_cluster(self, flags: list[str], folder: Path, name: str) -> Iterator[dict[str, Any]]:
        self.starts.append(flags)
        instances = [
            {"name": f"stateless-{place}", "kind": "stateless", "url": fake.url, "bootstrap_port": None}
            for place, fake in enumerate(self.fakes)
        ]
        yield {"instances": instances}


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    fakes = [ChainInstance(time_scale=1.0) for _ in range(2)]
    with fake_instances(fakes):
        made = Fleet(fakes)
        monkeypatch.setattr(servers, "running_cluster", made.run_cluster)
        yield made


def run_bench(out: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = BENCHES["flips"].main([*FLAGS, *flags, "--out", str(out)])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_flips_under_load(fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run_bench(tmp_path, capsys, "--flips", "4", "--part", "4")
    assert status == (0 if result["valid"] else 1)  # the machine of the test may be busy
    assert (result["flips"], result["failed"], result["altered"], result["requests"]) == (4, 0, 0, 30)
    assert result["label_p50_ms"] > 0
    assert 1 <= result["p_to_d"] + result["not_timed"] <= 2
    assert 1 <= result["d_to_p"] <= 2
    assert result["p_to_d"] == 0 or result["p_to_d_p50_ms"] >= 0
    assert result["d_to_p_p50_ms"] >= 0
    assert result["cache_kept"] == 1.0
    assert result["hit_rate_before"] == pytest.approx(1.0, abs=0.01)
    assert {"prefill", "decode"} <= set(fleet.fakes[0].legs) & set(fleet.fakes[1].legs), "both had both roles"
    assert result == result | dict(AGAIN["flips"](result))
    assert "`cache_kept` | 1 |" in bench.page(result)
    assert "--json-model-override-args" in fleet.starts[0]
    _, again = run_bench(tmp_path, capsys, "--flips", "4", "--part", "4")
    assert len(fleet.starts) == 1, "finished parts are kept"
    assert again == result


def test_an_altered_answer_is_counted(fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.fakes[0].wrong = True
    status, result = run_bench(tmp_path, capsys, "--flips", "2", "--part", "2")
    assert (status, result["failed"]) == (1, 0)
    assert 0 < result["altered"] < result["requests"]


def story(rid: str, decided_s: float, prefill: str, decode: str, **fields: Any) -> dict[str, Any]:
    told = {"rid": rid, "decided_s": decided_s, "prefill": prefill, "decode": decode, "done_s": decided_s + 1}
    return told | {"stages": {"prefill_wait_s": 0.25}} | fields


def order(instance: str, role: str, answered_s: float) -> FlipOrder:
    return FlipOrder(instance, role, answered_s - 0.002, answered_s, 1000, 1000)


def test_the_first_work_of_a_role() -> None:
    orders = [order(A, "decode", 10.0), order(B, "prefill", 20.0), order(A, "prefill", 30.0), order(B, "decode", 40.0)]
    stories = [
        story("a-late", 12.0, B, A),
        story("b-early", 9.0, B, A),
        story("a-first", 11.0, B, A),
        story("in-place", 20.5, B, B),
        story("b-first", 21.0, B, A),
        story("a-next", 41.0, A, B, done_s=39.0),
    ]
    second_s = {told["rid"]: told["decided_s"] + 1.5 for told in stories}
    rows = bench.time_flips(orders, stories, second_s, 2.0)
    assert [row["work_ms"] for row in rows] == pytest.approx([250.0, 125.0, 125.0, 1250.0])
    assert [row["label_ms"] for row in rows] == pytest.approx([2.0] * 4)
    del second_s["a-next"]  # failed, or one token only
    assert bench.time_flips(orders, [*stories, {}], second_s, 2.0)[3]["work_ms"] is None
    assert (
        bench.time_flips([order(A, "decode", 13.0), order(A, "prefill", 14.0)], stories, second_s, 2.0)[0]["work_ms"]
        is None
    ), "none came before its next flip"


def test_a_prefill_that_ends_after_the_second_token_times_nothing() -> None:
    stories = [story("early", 11.0, B, A), story("next", 12.0, B, A)]
    [row] = bench.time_flips([order(A, "decode", 10.0)], stories, {"early": 11.9, "next": 14.0}, 2.0)
    assert (row["work_ms"], row["not_timed"]) == (None, True)
    figures = bench.figures_of([row, row | {"work_ms": 8.0, "not_timed": False}])
    assert (figures["not_timed"], figures["p_to_d"], figures["p_to_d_p50_ms"]) == (1, 1, 8.0)
    old = {name: value for name, value in row.items() if name != "not_timed"}
    assert "not_timed" not in bench.figures_of([old]), "what was published before says nothing of it"


def test_a_lost_cache_and_a_busy_host_are_seen() -> None:
    lost = {"role": "decode", "label_ms": 2.0, "work_ms": None, "before_tokens": 1000, "after_tokens": 0}
    kept = lost | {"role": "prefill", "work_ms": 30.0, "after_tokens": 1000}
    row = FIGURES | {"orders": [lost, kept], "plugin_commit": "abc"}
    result = bench.sum_up([row, row | {"host_overhead_share": 0.3}], 0.2)
    assert (result["flips"], result["cache_kept"], result["valid"]) == (4, 0.5, False)
    assert (result["p_to_d_p50_ms"], result["d_to_p_p50_ms"]) == (None, 30.0)
    assert bench.sum_up([row], 0.2)["valid"]
