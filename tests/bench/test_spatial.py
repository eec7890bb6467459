"""What the bench ``spatial`` computes, without any server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.compare import spatial
from bench.compare.spatial import figures, flips, missed, rate, summary
from bench.compare.spatial_arms import (
    BOUNDARY_TOKENS,
    DEFAULT_ARMS,
    OUTPUT_TOKENS,
    SHIFTING_WORK,
    Setting,
    Work,
    engine_arguments,
    is_ours,
    pools_of,
    router_of,
    row_of,
    warm_up,
)
from bench.harness.catalogue import BENCHES
from bench.harness.replay import Planned, Record, text_body
from bench.harness.servers import router_command
from bench.harness.steps import Steps
from pla_sglang import launch_cluster, launch_router
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim import chain

TELEMETRY = "tcp://127.0.0.1:9"


def width_of(png: Path) -> int:
    return int.from_bytes(png.read_bytes()[16:20], "big")


def test_the_workload_is_the_same_each_time_and_changes_in_the_middle() -> None:
    work = Work(100.0, (20.0,), (1.0, 5.0))
    first, again = (work.trace(3) for _ in range(2))
    assert (first.arrival_s == again.arrival_s).all()
    longs = first.arrival_s[first.input_tokens >= BOUNDARY_TOKENS]
    before, after = int((longs < 50).sum()), int((longs >= 50).sum())
    assert before == pytest.approx(50, abs=25)
    assert after == pytest.approx(250, abs=50)
    assert len(first) - len(longs) == pytest.approx(2000, abs=200)
    assert (work.constant().short_rps, work.constant().long_rps) == ((20.0,), (3.0,))
    assert not {tuple(one.own_ids) for one in warm_up(3)} & {tuple(one.own_ids) for one in work.planned(3, 1.0)}


def test_later_turns_of_a_conversation_carry_its_history() -> None:
    """Their new tokens are a short prompt, and nothing is due after the end."""
    planned = Work(50.0, (10.0,), (5.0,), turns=2.0).planned(3, 1.0)
    whole = {request.index: len(request.own_ids) for request in planned if request.after is None}
    later = [request for request in planned if request.after is not None]
    assert len(later) / len(whole) == pytest.approx(1.0, abs=0.2), "two turns on average"
    assert all(len(request.own_ids) < BOUNDARY_TOKENS for request in later)
    assert planned[-1].at_s < 50
    trace = Work(50.0, (10.0,), (5.0,), turns=2.0).trace(3)
    for request in later:
        before = trace.input_tokens[request.after]
        assert trace.input_tokens[request.index] == before + OUTPUT_TOKENS + len(request.own_ids)
    assert all(request.after is None for request in SHIFTING_WORK.planned(1, 1.0))


def test_tokens_from_a_prefix_cache_are_not_computed_and_later_turns_are_classed_by_what_is_new() -> None:
    later = record(0, 1.0, tokens=600)
    later.planned.own_ids, later.meta = later.prompt_ids[-10:], {"cached_tokens": 512}
    made = row(later, record(0, 1.0))
    assert (made["prompt_tokens"], made["computed_tokens"]) == (610, 98)
    assert [request[0] for request in made["requests"]] == [10, 10]
    assert rate([made], 0.4, short=False) is None


BAD_WORK = [
    (0.0, (1.0,), (1.0, 1.0)),
    (1.0, (-1.0,), (1.0, 1.0)),
    (1.0, (0.0,), (0.0, 0.0)),
    (1.0, (1.0,), (1.0,), 0.5),
    (1.0, (1.0,), (1.0,), 1.0, 0.0),
]


@pytest.mark.parametrize("bad", BAD_WORK)
def test_bad_workloads(bad: Any) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        Work(*bad)


def test_prompts_are_sent_as_text_that_means_the_same_tokens() -> None:
    from transformers import AutoTokenizer

    request = Work(5.0, (4.0,), (1.0, 1.0)).planned(1, 1.0)[0]
    body = msgspec.json.decode(text_body(request, request.own_ids))
    tokenizer = AutoTokenizer.from_pretrained(str(chain.model_path()))
    assert tokenizer(body["text"])["input_ids"] == request.own_ids
    assert body["sampling_params"]["max_new_tokens"] == request.output_tokens + 1


def test_arms_that_share_engines() -> None:
    pairs = Setting()
    stock = [arm for arm in DEFAULT_ARMS["pd"] if not is_ours(arm)]
    with_defaults = [arm for arm in stock if "/" not in arm]
    assert len(with_defaults) == 4
    assert all(spatial.same_engines(arm, stock[0], pairs) for arm in with_defaults)
    assert not any(spatial.same_engines(arm, stock[0], pairs) for arm in stock if "/" in arm)
    assert spatial.same_engines("dp/spf-640", "router:bucket/spf-640", pairs)
    assert spatial.same_engines("spatial", "temporal", pairs)
    assert not spatial.same_engines("spatial", "dp", pairs)
    assert not spatial.same_engines("spatial", "temporal", Setting(layout="dp")), "pools are in the server there"


def test_one_server_has_no_router() -> None:
    assert router_of("spatial", Setting(layout="dp"), TELEMETRY) is None


def test_the_cluster_and_our_router_know_their_arguments() -> None:
    """Flags of ours are read by who will read them."""
    for layout, arms in DEFAULT_ARMS.items():
        for arm in arms:
            arguments = engine_arguments(arm, Setting(layout=layout), TELEMETRY)
            counts = launch_cluster.read_config(arguments).config.to_cluster().counts
            assert sum(counts.values()) == (6 if layout == "pd" else 4 if arm.startswith("router:") else 1)
    for arm, boundary, period_s in (("spatial", BOUNDARY_TOKENS, 0.5), ("temporal", None, 1.0)):
        router = router_of(arm, Setting(), TELEMETRY)
        assert router is not None
        command = router_command(router, FLEET, 5)
        assert command[1:3] == ["-m", "pla_sglang.launch_router"]
        knobs = launch_router.read_config(command[3:])[0].control
        assert (knobs.slo_ttft_s, knobs.boundary_tokens, knobs.pressure_interval_s) == (3.2, boundary, period_s)
        assert knobs.workers == ("http://127.0.0.1:1", "http://127.0.0.1:2")


FLEET = {
    "instances": [
        {"name": "prefill-0", "kind": "prefill", "url": "http://127.0.0.1:1", "bootstrap_port": 3},
        {"name": "decode-0", "kind": "decode", "url": "http://127.0.0.1:2"},
    ]
}


def test_sglang_s_router_gets_the_pair_with_its_bootstrap_port() -> None:
    router = router_of("router:bucket", Setting(), TELEMETRY)
    assert router is not None
    line = " ".join(router_command(router, FLEET, 5))
    assert "--policy round_robin --prefill-policy bucket" in line
    assert "--pd-disaggregation --prefill http://127.0.0.1:1 3 --decode http://127.0.0.1:2" in line


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: engine_arguments("fast", Setting(), TELEMETRY), "arm 'fast' is not known in layout pd"),
        (lambda: engine_arguments("router:bucket", Setting(layout="dp"), TELEMETRY), "not known in layout dp"),
        (lambda: engine_arguments("spatial/hrrn", Setting(), TELEMETRY), "arm 'spatial/hrrn' is not known"),
        (lambda: Setting(layout="both"), "--layout 'both'"),
        (lambda: Setting(time_scale=0.0), "time_scale 0.0 is out of range"),
        (lambda: Setting(prefill=1), "--prefill 1"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def record(due_s: float, first_s: float | None, *, tokens: int = 10, error: str | None = None) -> Record:
    prompt = [chain.vocab.WORD_BASE] * (tokens - 2) + chain.ask_ids(2)
    made = Record(Planned(0, due_s, prompt, 2), due_s, sent_s=due_s, error=error, prompt_ids=prompt)
    made.meta = {"cached_tokens": 0}
    if first_s is not None:
        made.token_s, made.done_s = [first_s], first_s
        made.output_ids = tuple(chain.expected(prompt, 3).tokens)
    return made


def row(*records: Record, moves: list[float] | None = None) -> dict[str, Any]:
    device = {"busy_s": 1.0, "host_gap_s": 0.0, "version": "x"}
    made = row_of(records, {"a": device}, {"a": device | {"busy_s": 20.0, "host_gap_s": 1.0}}, 10.0)
    pools = (
        None
        if moves is None
        else {"moves": [{"at_s": at_s, "role": "long"} for at_s in moves], "dispatched": {}, "ticks": {}}
    )
    return made | {"hooks": None, "pools": pools}


def test_a_late_a_failed_and_a_missing_first_token_violate() -> None:
    """The target is 0.4 s of device time at scale 10."""
    made = row(record(0, 3.9), record(0, 4.1, tokens=600), record(0, 1.0, error="reset"), record(0, None, error="gone"))
    assert rate([made], 0.4) == 0.75
    assert (rate([made], 0.4, short=True), rate([made], 0.4, short=False)) == (pytest.approx(2 / 3), 1.0)
    assert (made["failed"], made["tokens_wrong"], made["tokens_verified"]) == (2, 0, 4)
    assert made["host_overhead_by_instance"] == {"a": pytest.approx(0.05)}


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({}, True),
        ({"client_lag_p99_s": 0.041}, False),
        ({"host_overhead_by_instance": {"prefill-0": 0.051, "decode-0": 0.01}}, False),
        ({"host_overhead_by_instance": {"prefill-0": 0.05, "decode-0": 0.9}}, True),
    ],
)
def test_a_disturbed_run_is_not_valid(changes: dict[str, Any], valid: bool) -> None:
    assert figures([row(record(0, 1.0)) | changes], 0.4, 30.0)["valid"] is valid


def test_a_wrong_token_makes_a_run_invalid() -> None:
    wrong = record(0, 1.0)
    wrong.output_ids = (wrong.output_ids[0] + 1, *wrong.output_ids[1:])
    found = figures([row(wrong)], 0.4, 30.0)
    assert (found["tokens_wrong"], found["valid"]) == (1, False)


def test_moves_of_the_warm_up_do_not_count_and_settling_is_told_apart() -> None:
    def move(ago_s: float) -> dict[str, Any]:
        return {"ago_s": ago_s, "rank": 1, "role": "long", "reason": "pla.pressure_long", "short_pressure": 0.1}

    told = {"last_moves": [move(500.0), move(239.0), move(10.0)], "dispatched": {}, "ticks": {}}
    found = pools_of(told, 240.0, 8.0)
    assert [one["at_s"] for one in found["moves"]] == [0.12, 28.75]
    assert flips({"pools": found}, 30.0) == (1, 1)


def results(**rates: float) -> dict[str, Any]:
    made = {"computed_tokens": 10}
    arms: dict[str, Any] = {arm.replace("_of", ":"): made | {"violation_rate": value} for arm, value in rates.items()}
    if "spatial" in arms:
        arms["spatial"] |= {"flips_while_settling": 1, "flips": 1, "computed_tokens": 9}
    return arms


def test_summary_has_the_keys_of_the_issue() -> None:
    made = summary(results(spatial=0.06, temporal=0.1, dp=0.12, router_ofcache_aware=0.2, router_ofpower_of_two=0.08))
    assert made["fewer_than_dp"] == pytest.approx(0.5)
    assert made["fewer_than_temporal"] == pytest.approx(0.4)
    assert made["fewer_than_bucket"] is None
    assert made["computed_tokens_ratio"] == pytest.approx(0.9)
    assert made["flips"] == 2
    assert summary(results(spatial=0.1, dp=0.0))["fewer_than_dp"] is None


def test_what_was_missed_is_named() -> None:
    met = {"fewer_than_dp": 0.28, "fewer_than_router": 0.12, "computed_tokens_ratio": 1.05, "late_vs_minimal_load": 1.0}
    assert missed(met | {"fewer_than_bucket": None, "moves_shifting_load": ["long", "short", "short", "long"]}) == []
    assert len(missed({"moves_shifting_load": []})) == 1
    short = missed(
        {"fewer_than_dp": 0.27, "fewer_than_router": 0.3, "fewer_than_bucket": -0.1, "flips_constant_load": 2}
        | {"computed_tokens_ratio": 1.06, "late_vs_minimal_load": 1.01, "moves_shifting_load": ["long", "short"]}
    )
    assert len(short) == 6
    assert short[0] == "fewer_than_dp is 0.27, wanted at least 0.28"


def test_a_finished_run_is_shown_without_any_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step is kept, so nothing starts; the last line is the result, with its picture beside it."""
    flags = ["--arms", "spatial,temporal,dp", "--seeds", "1", "--out", str(tmp_path)]
    options = BENCHES["spatial"].parse(*flags)
    keys = spatial.keys_of(
        ["spatial", "temporal", "dp"], spatial.works_of(options), spatial.setting_of(options), options
    )
    assert [(key["arm"], key["load"]) for key in keys] == [
        ("spatial", "changing"),
        ("temporal", "changing"),
        ("dp", "changing"),
        ("spatial", "constant"),
        ("spatial", "shifting"),
    ]
    steps = Steps(tmp_path / "spatial-pd.steps.jsonl")
    good, late = record(0, 1.0), record(20, 30.0, tokens=600)
    steps.add(keys[0], row(good, good, good, late, moves=[20.0]))
    steps.add(keys[1], row(good, good, late, late, moves=[]))
    steps.add(keys[2], row(good, late, late, late))
    steps.add(keys[3], row(good, moves=[1.0]))
    steps.add(keys[4], row(good, moves=[1.0]))
    assert BENCHES["spatial"].main(flags) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["violation_rate"] == {"spatial": 0.25, "temporal": 0.5, "dp": 0.75}
    assert result["fewer_than_dp"] == pytest.approx(2 / 3)
    assert (result["flips"], result["flips_constant_load"], result["tokens_wrong"]) == (1, 0, 0)
    assert result["late_vs_minimal_load"] == 0.5
    assert "computed_tokens_ratio" not in result, "nothing behind cache-aware routing was measured"
    assert result["moves_shifting_load"] == ["long"]
    assert result["targets_missed"] == ["the pools did not follow a shifting load to the short pool and back"]
    picture = tmp_path / "spatial-pd.png"
    spatial.plot({"arms": result["arms"]}, tmp_path / "one.png", "no shifting load")
    assert width_of(tmp_path / "one.png") < width_of(picture), "no panel without a load"
    page = spatial.page(result)
    assert "| `spatial` | 25.0% | 0.0% | 100.0% | 25.0% |" in page
    assert "\nAt constant load 1 moves while the pools settle, 0 after." in page
    assert "Moves under the shifting load: long at 1 s. Targets missed: the pools" in page
