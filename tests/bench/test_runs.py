"""Whole benches, command line to JSON, against the fake server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.compare import hol
from bench.harness import arms
from bench.harness.catalogue import BENCHES
from bench.harness.fleet import SOLO_COUNTS

LONE = sum(SOLO_COUNTS.values())
TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


@pytest.fixture(autouse=True)
def fake_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "STOCK_MODULE", "fake_sglang")
    monkeypatch.setattr(arms, "OUR_MODULE", "fake_sglang")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 500}')
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 0}, {"id": 1}]}')
    return folder


def common(model: Path, out: Path, *more: str) -> list[str]:
    return ["--quick", "--device", "cpu", "--model-path", str(model), "--out", str(out), *more]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return result


def test_hol_shows_the_gain_of_shortest_first(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["hol"].main(common(model, tmp_path / "out")) == 0
    result = last_json(capsys)
    assert result["valid"] is True
    assert result["outputs_identical"] is True
    assert result["outputs_by_arm"]["ours"]["compared"] == 2 * 10 + LONE  # two rounds and the solo requests
    assert result["short_ttft_p99_gain"] > 1
    assert result["hooks"] == "3 seams verified"
    assert result["sglang"] == "0.5.17"
    assert result["figures_of"] == "ours"
    assert set(result["workload"]) >= {"pattern", "scale", "burst_s", "spread_s", "chunk_tokens"}
    for picture in ("hol.png", "hol-queue.png"):
        assert (tmp_path / "out" / picture).stat().st_size > 10_000
    assert list(result["figures"]) == [*arms.startable(arms.BEST_STOCK), "ours"]
    assert len((tmp_path / "out" / "hol.requests.jsonl").read_text().splitlines()) == 20 * len(result["figures"])
    assert "p99 of shorts: " in hol.page(result)
    shown = hol.headline_page(result)
    if result.get("best_stock", "stock") != "stock":
        assert f"| its `{result['best_stock']}` | pla_sglang |" in shown
        assert f"than `{result['best_stock']}` |" in shown
    assert json.loads((tmp_path / "out" / "hol.json").read_text()) == result


def request_line(arm: str, round_: int = 1, ttft_s: float | None = 0.5) -> str:
    return json.dumps({"arm": arm, "round": round_, "kind": "short", "at_s": 0.1, "ttft_s": ttft_s}) + "\n"


@pytest.mark.parametrize(
    ("lines", "is_drawn"),
    [
        ([request_line("stock"), request_line("ours")], True),
        ([request_line("ours"), request_line("ours", ttft_s=None)], True),
        ([request_line("hrrn")], False),
        ([request_line("stock", ttft_s=None), request_line("ours", round_=2)], False),
        ([], False),
    ],
)
def test_the_queue_is_drawn_where_an_arm_has_answers(tmp_path: Path, lines: list[str], is_drawn: bool) -> None:
    requests, target = tmp_path / "requests.jsonl", tmp_path / "queue.png"
    requests.write_text("".join(lines))
    hol.plot_queue(requests, target, {"stock": "stock", "ours": "ours"})
    assert target.exists() is is_drawn


def test_hol_over_several_starts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--arms", "stock,ours", "--starts", "2", "--rounds", "1"]
    assert BENCHES["hol"].main(common(model, tmp_path / "out", *flags)) == 0
    result = last_json(capsys)
    assert result["rounds"] == 2
    assert len(result["by_start"]) == 2
    assert result["outputs_by_arm"]["ours"]["compared"] == 2 * 10 + LONE  # each start has requests of its own
    gains = [of_start["ours"]["short_ttft_p99_gain"] for of_start in result["by_start"]]
    assert min(gains) - 0.01 <= result["short_ttft_p99_gain"] <= max(gains) + 0.01
    assert hol.starts_text(result).count(" ms") == 2


def test_different_answers_of_a_peer_are_reported(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = f"odd={sys.executable}:--fake-other-answers 1"
    assert BENCHES["hol"].main(common(model, tmp_path / "out", "--arms", "stock", "--peer", peer)) == 0
    result = last_json(capsys)
    assert result["outputs_identical"] is False
    assert result["outputs_by_arm"]["odd"]["different"] == 2 * 10 + LONE
    assert result["figures_of"] == "odd"


def test_failed_requests_make_the_run_invalid(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--arms", "stock,ours", "--server-flags=--fake-fail-every 30"]
    code = BENCHES["hol"].main(common(model, tmp_path / "out", *flags))
    result = last_json(capsys)
    assert code == 1
    assert result["valid"] is False
    assert any("scripted" in problem for problem in result["problems"])


def test_a_dying_server_is_an_error_with_its_log(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert BENCHES["hol"].main(common(model, tmp_path / "out", "--server-flags=--fake-die-after 20")) == 1
    assert "told to die" in capsys.readouterr().err


def test_chat_compares_sessions(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--sessions", "6", "--rate", "50", "--think-mean-s", "0.01", "--turns-mean", "2"]
    assert BENCHES["chat"].main(common(model, tmp_path / "out", *flags)) == 0
    result = last_json(capsys)
    assert result["outputs_identical"] is True
    assert result["workload"]["requests"] >= 12
    assert result["bench"] == "chat"


def test_low_load_reports_the_off_arm(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["low_load"].main(common(model, tmp_path / "out", "--requests", "5")) == 0
    result = last_json(capsys)
    assert result["off_ratio"] > 0
    assert result["long_ttft_p90_ratio"] is None


def test_overload_shows_starvation(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A busy machine may serve less while the capacity is measured than later on: twice that is overload all the same.
    flags = [
        "--arms",
        "stock,ours",
        "--long-max-age-s",
        "0.05",
        "--load",
        "2",
        "--server-flags=--fake-us-per-token 200",
    ]
    assert BENCHES["overload"].main(common(model, tmp_path / "out", *flags)) == 0
    result = last_json(capsys)
    assert set(result["long_ttft_s"]) == {"1", "2"}
    # The fake knows no ageing: its longs wait for the end of the stream, and the bench says so.
    assert result["long_within_bound"] is False
    assert result["long_ttft_s"]["2"] > result["long_ttft_s"]["1"]
    assert set(result["short_ttft_mean_ratio_to_fcfs"]) == {"1", "2"}


def test_kv_pressure_reports_every_arm(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["overload"].main(common(model, tmp_path / "out", "--kv-pressure", "--kv-max-new-tokens", "4")) == 0
    result = last_json(capsys)
    assert result["crashed"] is False
    expected = [*arms.startable(arms.BEST_STOCK), "ours"]
    assert set(result["worst_short_ttft_s"]) == set(expected)
    assert result["retractions"] == dict.fromkeys(expected, 0)


def test_kv_pressure_reports_a_crash(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--kv-pressure", "--kv-max-new-tokens", "4", "--server-flags=--fake-die-after 18"]
    assert BENCHES["overload"].main(common(model, tmp_path / "out", *flags)) == 1
    assert last_json(capsys)["crashed"] is True


def test_abort_storm_leaves_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["abort_storm"].main(common(model, tmp_path / "out", "--requests", "60", "--rate", "60")) == 0
    result = last_json(capsys)
    assert result["requests"] == 60
    assert result["gauges_zero"] is True
    assert result["kv_restored"] is True
    assert result["errors_logged"] == 0
    assert result["finished"] + result["aborted"] == 60


def test_an_interrupt_stops_every_server(model: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from bench.harness import arms; arms.STOCK_MODULE = arms.OUR_MODULE = 'fake_sglang'; "
        "from bench.harness.catalogue import BENCHES; sys.exit(BENCHES['hol'].main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, *common(model, tmp_path / "out", "--spread-s", "60")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
    bench = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    assert bench.stderr is not None
    for line in bench.stderr:
        if "alone" in line and "ours" in line:
            break
    children = _children(bench.pid)
    assert len(children) >= 2
    bench.send_signal(signal.SIGINT)
    assert bench.wait(30) == 130
    bench.stderr.close()
    end_s = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(part) for part in text.split()]
