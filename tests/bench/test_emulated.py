"""The benches on emulated engines: workloads, arms, layouts and figures. No engine is started here."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from bench.check import emulation, verified
from bench.compare import hol_emulated
from bench.cost import cluster_start
from bench.harness import engines
from bench.harness.arms import MIXED, SPF, Arm, ArmError
from bench.harness.catalogue import BENCHES
from bench.harness.cli import Layout, numbers_of, part, read_traces
from bench.harness.engines import Setup
from bench.harness.replay import Planned, Record
from bench.harness.workload import HolShape
from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles import load_profile
from pla_sglang.sim import chain
from pla_sglang.testing.server import ServerError

# -- one engine per arm ----------------------------------------------------------------------------------------------

ARMS = {"stock": Arm("stock", ()), "peer": Arm("peer", ("--x-y",), peer=True)}
BEFORE = {"busy_s": 10.0, "host_gap_s": 1.0, "steps": 100, "pass_gap_s": 0.5}
AFTER = {"busy_s": 19.0, "host_gap_s": 2.0, "steps": 150, "pass_gap_s": 0.9}
AFTER |= {"step_error_p50": 0.001, "step_error_p99": 0.02, "version": "0.5.17"}


def record(tokens: int, due_s: float, first_s: float, *, error: str | None = None) -> Record:
    prompt = [800] * (tokens - 2) + chain.ask_ids(1)
    made = Record(Planned(0, due_s, prompt, 1), due_s, sent_s=due_s, token_s=[first_s], done_s=first_s + 1, status=200)
    made.prompt_ids, made.output_ids, made.error = prompt, chain.expected(prompt, 2).tokens, error
    return made


def row(*requests: tuple[int, float], **other: Any) -> dict[str, Any]:
    """A kept step whose requests have these prompt tokens and TTFTs."""
    fields = {"output_tokens": 8 * len(requests), "span_s": 10.0, "tokens_wrong": 0, "client_lag_p99_ms": 5.0}
    fields |= {"host_overhead_share": 0.01, "step_error_p99": 0.02, "sglang": "0.5.17", "plugin_commit": "abc"}
    return {"requests": [[tokens, first_s, first_s + 1] for tokens, first_s in requests]} | fields | other


def test_a_step_is_kept_in_device_time() -> None:
    kept = engines.row_of([record(200, 0.0, 1.0), record(2400, 2.0, 10.0)], BEFORE, AFTER, 2.0)
    assert kept["requests"] == [[200, 0.5, 1.0], [2400, 4.0, 4.5]]
    assert kept["span_s"] == pytest.approx(5.5)
    assert kept["host_overhead_share"] == pytest.approx(0.1)
    assert (kept["passes"], kept["gap_ms_a_pass"]) == (50, pytest.approx(4.0))
    assert (kept["tokens_wrong"], kept["output_tokens"], kept["sglang"]) == (0, 2, "0.5.17")
    with pytest.raises(ServerError, match="a request failed: gone"):
        engines.row_of([record(200, 0.0, 1.0, error="gone")], BEFORE, AFTER, 1.0)


def test_a_late_client_or_a_wrong_token_makes_an_arm_invalid() -> None:
    assert engines.quality([row((1, 1.0)), row((1, 1.0))])["valid"]
    assert not engines.quality([row((1, 1.0)), row((1, 1.0), client_lag_p99_ms=60.0)])["valid"]
    assert not engines.quality([row((1, 1.0), tokens_wrong=1)])["valid"]


def test_arms_are_chosen_by_name_and_by_what_can_run() -> None:
    assert engines.choose(None, ARMS, None) == [ARMS["stock"]]
    assert engines.choose(None, ARMS, "python") == list(ARMS.values())
    assert engines.choose("peer,stock", ARMS, "python") == [ARMS["peer"], ARMS["stock"]]
    for named, message in (("peer", "give --peer-python"), ("best", "'best' is not known"), ("", "names no arm")):
        with pytest.raises(ConfigError, match=message):
            engines.choose(named, ARMS, None)


def test_a_peer_gets_our_emulation_and_nothing_is_installed(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\n")
    interpreter.chmod(0o755)
    setup = Setup("linear", 2.0, ("--chunked-prefill-size", "820"), tmp_path, "test", str(interpreter))
    server = engines.server_of(ARMS["peer"], setup, tmp_path)
    assert server.command[:3] == [str(interpreter), "-m", "pla_sglang.launch_server"]
    assert server.command[-1] == "--x-y", "an arm's own flags come last and win"
    entry_points = (tmp_path / "peer" / "pla_sglang-0.1.0.dist-info" / "entry_points.txt").read_text()
    assert "pla_sglang.plugin.entry:register" in entry_points
    assert (tmp_path / "peer" / "pla_patches" / "install.py").is_file()
    with pytest.raises(ConfigError, match="--peer-python 'nowhere' is not an executable"):
        Setup("linear", 1.0, (), tmp_path, "test", "nowhere")
    with pytest.raises(ConfigError, match="--time-scale 0 is out of range"):
        Setup("linear", 0, (), tmp_path, "test")


# -- head-of-line blocking at full size ------------------------------------------------------------------------------

HOL = HolShape.of_issue(1.0)
HOL_KEY = {"seed": 0, "round": 0, "pattern": "stream", "time_scale": 2.0}


def test_hol_rounds_have_the_issues_sizes_and_meet() -> None:
    work_s = hol_emulated.long_work_s(HOL, "h200-qwen2.5-14b-tp1")
    assert 20 < work_s < 40
    requests = hol_emulated.planned(HOL, HOL_KEY, work_s)
    assert sorted(len(one.own_ids) for one in requests) == [2000] * 11 + [24000] * 18
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    longs = [one.at_s for one in requests if len(one.own_ids) == 24000]
    shorts = [one.at_s for one in requests if len(one.own_ids) == 2000]
    assert max(longs) <= 2.0, "within a second of device time"
    assert min(shorts) > 0.05 * work_s
    assert max(shorts) < 2 * work_s
    again = hol_emulated.planned(HOL, HOL_KEY | {"round": 1}, work_s)
    alone = hol_emulated.planned_alone(HOL, HOL_KEY | {"alone": 3}, 5.0)
    assert [(request.at_s, len(request.own_ids)) for request in alone] == [
        (index * 10.0 * HOL_KEY["time_scale"], HOL.long_tokens) for index in range(3)
    ]
    assert [one.own_ids for one in again] != [one.own_ids for one in requests]


def test_hol_ratios_are_taken_within_a_round(tmp_path: Path) -> None:
    stock = [row((2000, 10.0), (24000, 20.0)), row((2000, 20.0), (24000, 20.0))]
    ours = [row((2000, 1.0), (24000, 22.0)), row((2000, 1.0), (24000, 18.0), span_s=8.0)]
    rows = {"stock": stock, "ours": ours}
    found = hol_emulated.ratios(rows, HOL)["ours"]
    assert found["short_ttft_p99_gain"]["low"] == pytest.approx(10)
    assert found["short_ttft_p99_gain"]["high"] == pytest.approx(20)
    assert found["long_ttft_p90_ratio"]["median"] == pytest.approx(1.0)
    assert found["throughput_ratio"]["high"] == pytest.approx(10 / 8)
    assert hol_emulated.ratios({"ours": ours}, HOL) == {}
    arms = {arm: {"short_last_token_p50_s": {"median": last_s}} for arm, last_s in (("ours", 4.0), ("ride", 1.0))}
    assert hol_emulated.last_token_vs_pure(arms) == 0.25
    assert hol_emulated.last_token_vs_pure({"ours": arms["ours"]}) is None
    alone = {"stock": [row((24_000, 4.0), (24_000, 6.0), (24_000, 5.0))], "ours": [row((24_000, 5.5), (24_000, 5.5))]}
    assert hol_emulated.alone_ratios(alone) == {"stock": 1.0, "ours": pytest.approx(1.1)}
    assert hol_emulated.alone_ratios({"ours": alone["ours"]}) == {}
    lasts = {kind: hol_emulated.ttfts_s(ours[0], HOL, kind, last=True) for kind in ("short", "long")}
    assert lasts == {"short": [ours[0]["requests"][0][2]], "long": [ours[0]["requests"][1][2]]}
    figures = hol_emulated.arm_figures(ours, HOL)
    assert figures["tokens_per_s"]["low"] == pytest.approx((26_000 + 16) / 10)
    hol_emulated.plot(rows, HOL, tmp_path / "hol.png", "title")
    assert (tmp_path / "hol.png").stat().st_size > 10_000


# -- clusters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{index * 0.5},{20 + index},{1 + index % 3}" for index in range(10)]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def test_layouts() -> None:
    assert Layout.parse("unified-2").arguments == ("--unified", "2")
    assert Layout.parse("2+1").arguments == ("--prefill", "2", "--decode", "1")
    assert Layout.parse("2+1").engines == 3
    assert "bucket" not in Layout.parse("unified-2").policies
    assert Layout.parse("unified-2:spf-mix-1024").arguments[2:] == (*SPF, *MIXED, "--chunked-prefill-size", "1024")
    assert Layout.parse("1+1:spf").arguments[4:] == ("--prefill-args", " ".join(SPF))
    for text in ("unified-2:best", "1+1:spf-mix", "unified-2:spf-x", "unified-2:"):
        with pytest.raises(ArmError, match="is not known; allowed"):
            Layout.parse(text)
    for text in ("unified-x", "unified-0", "0+1", "3"):
        with pytest.raises(ConfigError, match=f"layout '{text}' is not known".replace("+", r"\+")):
            Layout.parse(text)


def test_rates_are_the_same_for_all_or_by_workload() -> None:
    assert numbers_of(["2,4"], "azure_code", "--rates") == [2.0, 4.0]
    by_name = ["azure_code=8,16", "mooncake=1"]
    assert numbers_of(by_name, "azure_code", "--rates") == [8.0, 16.0]
    assert numbers_of(by_name, "mooncake", "--rates") == [1.0]
    assert numbers_of(by_name, "other", "--rates") == []


def test_parts_of_a_trace_begin_at_zero_and_cover_it(trace_file: Path) -> None:
    trace = read_traces([f"mine={trace_file}"])["mine"]
    middle = part(trace, 4, 3)
    assert list(middle.input_tokens) == [24, 25, 26]
    assert list(middle.arrival_s) == [0.0, 0.5, 1.0]
    with pytest.raises(ConfigError, match="is empty"):
        part(trace, 10, 3)
    assert len(read_traces([f"mine={trace_file}"], max_input_tokens=23)["mine"]) == 4
    given = BENCHES["verified"].parse("--traces", "a=b", "--requests", "9", "--part-requests", "4")
    keys = verified.keys_of(given, Layout.parse("1+1"), {"mine": trace, "other": trace})
    assert [(key["workload"], key["first"], key["count"]) for key in keys] == [
        *itertools.product(("mine", "other"), (0,), (4,)),
        *itertools.product(("mine", "other"), (4,), (4,)),
        *itertools.product(("mine", "other"), (8,), (1,)),
    ]


def test_verified_counts_are_summed_by_layout_and_workload(tmp_path: Path) -> None:
    counts = dict.fromkeys(verified.COUNTS, 2)
    rows = [({"layout": "1+1", "workload": name}, counts) for name in ("a", "a", "b")]
    groups = verified.summed(rows)
    assert [(group["workload"], group["parts"], group["requests"]) for group in groups] == [("a", 2, 4), ("b", 1, 2)]
    verified.plot(groups, tmp_path / "verified.png")
    assert (tmp_path / "verified.png").stat().st_size > 5_000


def test_memory_is_told_apart_by_what_holds_it() -> None:
    parts = cluster_start.memory_by_kind(os.getpid(), [{"pid": os.getpid()}])
    assert parts["http"] > 10 << 20
    assert parts["scheduler"] == parts["detokenizer"] == 0
    assert cluster_start.memory_by_kind(os.getpid(), [{"pid": 2**22 + 1}])["launcher, fork server, router"] > 10 << 20


def test_what_a_start_missed_is_said(tmp_path: Path) -> None:
    rows = [
        {"layout": "2+2", "engines": 4, "ready_s": 61.0, "pss_gib": 3.0, "pss_by_part_gib": {"http": 3.0}},
        {"layout": "4+4", "engines": 8, "ready_s": 99.0, "pss_gib": 14.5, "pss_by_part_gib": {"http": 9.0}},
        {"layout": "1+1", "engines": 2, "ready_s": 99.0, "pss_gib": 99.0, "pss_by_part_gib": {}},
    ]
    assert cluster_start.missed(rows) == [
        "2+2: ready_s 61.0 is above 60",
        "4+4: pss_gib 14.5 is above 14",
    ]
    cluster_start.plot(rows, tmp_path / "start.png")
    assert (tmp_path / "start.png").stat().st_size > 5_000


def test_the_checked_table_is_the_one_of_the_profile() -> None:
    profile = load_profile("h100-llama70b-fp8-dopd")
    for tokens, ms in emulation.DOPD_PREFILL_MS.items():
        assert profile.prefill_s(tokens, tokens**2) * 1e3 == pytest.approx(ms, rel=1e-3)
    for batch, by_context in emulation.DOPD_DECODE_MS.items():
        for context, ms in by_context.items():
            assert profile.decode_s(batch, batch * context) * 1e3 == pytest.approx(ms, rel=1e-3)
