"""What ``bench.spatial`` computes, without any server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from bench import spatial
from bench.lib.emulated_pages import PAGES
from bench.pooling import measure
from bench.pooling.arms import DEFAULT_ARMS, Setting, engine_arguments, is_ours, router_of
from bench.pooling.figures import fewer, figures, flips, missed, rate, summary
from bench.pooling.picture import over_time, plot
from bench.pooling.routers import command_of
from bench.pooling.work import BOUNDARY_TOKENS, Work, warm_up
from bench.replaying.client import Record, text_body
from bench.replaying.plan import Planned
from bench.replaying.steps import Steps
from pla_sglang import chain, launch_cluster, launch_router
from pla_sglang.errors import ConfigError
from pla_sglang.router import control

TELEMETRY = "tcp://127.0.0.1:9"


def test_the_workload_is_the_same_each_time_and_changes_in_the_middle() -> None:
    work = Work(100.0, 20.0, (1.0, 5.0))
    first, again = (work.trace(3) for _ in range(2))
    assert (first.arrival_s == again.arrival_s).all()
    longs = first.arrival_s[first.input_tokens >= BOUNDARY_TOKENS]
    before, after = int((longs < 50).sum()), int((longs >= 50).sum())
    assert before == pytest.approx(50, abs=25)
    assert after == pytest.approx(250, abs=50)
    assert len(first) - len(longs) == pytest.approx(2000, abs=200)
    assert work.constant().long_rps == (3.0, 3.0)
    assert not {tuple(one.own_ids) for one in warm_up(3)} & {tuple(one.own_ids) for one in work.planned(3, 1.0)}


@pytest.mark.parametrize("bad", [(0.0, 1.0, (1.0, 1.0)), (1.0, -1.0, (1.0, 1.0)), (1.0, 0.0, (0.0, 0.0))])
def test_bad_workloads(bad: Any) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        Work(*bad)


def test_prompts_are_sent_as_text_that_means_the_same_tokens() -> None:
    from transformers import AutoTokenizer

    request = Work(5.0, 4.0, (1.0, 1.0)).planned(1, 1.0)[0]
    body = orjson.loads(text_body(request, request.own_ids))
    tokenizer = AutoTokenizer.from_pretrained(str(chain.model_path()))
    assert tokenizer(body["text"])["input_ids"] == request.own_ids
    assert body["sampling_params"]["max_new_tokens"] == request.output_tokens + 1


@pytest.mark.parametrize(
    ("layout", "arm", "has", "lacks"),
    [
        ("dp", "spatial", ["--prefill-disagg spatial", "--dp-size 4", "--pla-slo-ttft-ms 3200"], ["--prefill 4"]),
        ("dp", "temporal", ["--prefill-disagg temporal", "--dp-size 4"], ["--pla-pressure"]),
        ("dp", "dp", ["--dp-size 4"], ["--prefill-disagg", "--pla-slo"]),
        ("dp", "router:power_of_two", ["--unified 4"], ["--dp-size", "--prefill-disagg"]),
        (
            "pd",
            "spatial",
            [
                "--prefill 4 --decode 2",
                "--prefill-args --prefill-disagg temporal --pla-boundary 512 --pla-slo-ttft-ms 3200",
                f"--pla-telemetry {TELEMETRY}",
            ],
            ["--dp-size"],
        ),
        ("pd", "router:bucket", ["--prefill 4 --decode 2"], ["--prefill-disagg", "--pla-telemetry"]),
    ],
)
def test_engines_of_an_arm(layout: str, arm: str, has: list[str], lacks: list[str]) -> None:
    line = " ".join(engine_arguments(arm, Setting(layout=layout), TELEMETRY))
    assert all(part in line for part in has), line
    assert not any(part in line for part in lacks), line
    assert "--pla-time-scale 8" in line
    assert "--router none" in line


def test_arms_that_share_engines() -> None:
    pairs = Setting()
    stock = [arm for arm in DEFAULT_ARMS["pd"] if not is_ours(arm)]
    assert len(stock) == 4
    assert all(spatial.same_engines(arm, stock[0], pairs) for arm in stock)
    assert spatial.same_engines("spatial", "temporal", pairs)
    assert not spatial.same_engines("spatial", "dp", pairs)
    assert not spatial.same_engines("spatial", "temporal", Setting(layout="dp")), "pools are in the server there"


@pytest.mark.parametrize(
    ("layout", "arm", "kind", "policy"),
    [
        ("pd", "spatial", "pla", "pla"),
        ("pd", "temporal", "pla", "minimal-load"),
        ("pd", "dp", "sglang", "round_robin"),
        ("pd", "router:bucket", "sglang", "bucket"),
        ("dp", "router:power_of_two", "sglang", "power_of_two"),
    ],
)
def test_routers_of_an_arm(layout: str, arm: str, kind: str, policy: str) -> None:
    found = router_of(arm, Setting(layout=layout), TELEMETRY)
    assert found is not None
    assert (found.kind, found.policy) == (kind, policy)


def test_one_server_has_no_router() -> None:
    assert router_of("spatial", Setting(layout="dp"), TELEMETRY) is None


def test_the_cluster_and_our_router_know_their_arguments() -> None:
    """Flags of ours are read by who will read them."""
    for layout, arms in DEFAULT_ARMS.items():
        for arm in arms:
            options, rest = launch_cluster.parser().parse_known_args(
                engine_arguments(arm, Setting(layout=layout), TELEMETRY)
            )
            counts = launch_cluster.config_of(options, rest).counts
            assert sum(counts.values()) == (6 if layout == "pd" else 4 if arm.startswith("router:") else 1)
    for arm, period_s in (("spatial", 4.0), ("temporal", 1.0)):
        router = router_of(arm, Setting(), TELEMETRY)
        assert router is not None
        command = command_of(router, FLEET, 5)
        assert command[1:3] == ["-m", "pla_sglang.launch_router"]
        told = launch_router.parse(command[3:]).control_arguments
        flags = argparse.ArgumentParser()
        control.add_arguments(flags)
        knobs = control.knobs_of(flags.parse_args(told))
        assert (knobs.slo_ttft_s, knobs.boundary_tokens, knobs.pressure_interval_s) == (3.2, BOUNDARY_TOKENS, period_s)
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
    line = " ".join(command_of(router, FLEET, 5))
    assert "--policy round_robin --prefill-policy bucket" in line
    assert "--pd-disaggregation --prefill http://127.0.0.1:1 3 --decode http://127.0.0.1:2" in line


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: engine_arguments("fast", Setting(), TELEMETRY), "arm 'fast' is not known in layout pd"),
        (lambda: engine_arguments("router:bucket", Setting(layout="dp"), TELEMETRY), "not known in layout dp"),
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
    if first_s is not None:
        made.token_s, made.done_s = [first_s], first_s
        made.output_ids = tuple(chain.expected(prompt, 3).tokens)
    return made


def row(*records: Record, moves: list[float] | None = None) -> dict[str, Any]:
    device = {"busy_s": 1.0, "host_gap_s": 0.0, "version": "x"}
    made = measure.row_of(records, {"a": device}, {"a": device | {"busy_s": 10.0, "host_gap_s": 1.0}}, 10.0)
    pools = None if moves is None else {"moves": [{"at_s": at_s} for at_s in moves], "dispatched": {}, "ticks": {}}
    return made | {"hooks": None, "pools": pools}


def test_a_late_a_failed_and_a_missing_first_token_violate() -> None:
    """The target is 0.4 s of device time at scale 10."""
    made = row(record(0, 3.9), record(0, 4.1, tokens=600), record(0, 1.0, error="reset"), record(0, None, error="gone"))
    assert rate([made], 0.4) == 0.75
    assert (rate([made], 0.4, short=True), rate([made], 0.4, short=False)) == (pytest.approx(2 / 3), 1.0)
    assert (made["failed"], made["tokens_wrong"], made["tokens_verified"]) == (2, 0, 4)
    assert made["host_overhead_by_instance"] == {"a": pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({}, True),
        ({"client_lag_p99_s": 0.041}, False),
        ({"host_overhead_by_instance": {"prefill-0": 0.21, "decode-0": 0.1}}, False),
        ({"host_overhead_by_instance": {"prefill-0": 0.19, "decode-0": 0.9}}, True),
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
    found = measure.pools_of(told, 240.0, 8.0)
    assert [one["at_s"] for one in found["moves"]] == [0.12, 28.75]
    assert flips({"pools": found}, 30.0) == (1, 1)


def results(**rates: float) -> dict[str, Any]:
    arms: dict[str, Any] = {arm.replace("_of", ":"): {"violation_rate": value} for arm, value in rates.items()}
    if "spatial" in arms:
        arms["spatial"] |= {"flips_while_settling": 1, "flips": 1}
    return arms


def test_summary_has_the_keys_of_the_issue() -> None:
    found = summary(results(spatial=0.06, temporal=0.1, dp=0.12, router_ofrandom=0.2, router_ofpower_of_two=0.08))
    assert found["fewer_than_dp"] == pytest.approx(0.5)
    assert found["fewer_than_temporal"] == pytest.approx(0.4)
    assert found["fewer_than_bucket"] is None
    assert found["flips"] == 2
    assert fewer(0.1, 0.0) is None


def test_what_was_missed_is_named() -> None:
    assert missed({"fewer_than_dp": 0.28, "fewer_than_router": 0.12, "fewer_than_bucket": None}) == []
    told = missed(
        {"fewer_than_dp": 0.27, "fewer_than_router": 0.3, "fewer_than_bucket": -0.1, "flips_constant_load": 2}
    )
    assert len(told) == 3
    assert told[0] == "fewer_than_dp is 27.0%, wanted at least 28%"


def test_a_finished_run_is_shown_without_any_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step is kept, so nothing starts; the last line is the result, with its picture beside it."""
    flags = ["--arms", "spatial,dp", "--seeds", "1", "--out", str(tmp_path)]
    options = spatial.parser().parse_args(flags)
    setting, work = spatial.setting_of(options), Work(options.duration_s, options.short_rps, options.long_rps)
    keys = spatial.keys_of(["spatial", "dp"], options, setting, work)
    assert [(key["arm"], key["load"]) for key in keys] == [
        ("spatial", "changing"),
        ("dp", "changing"),
        ("spatial", "constant"),
    ]
    steps = Steps(tmp_path / "spatial-pd.steps.jsonl")
    good, late = record(0, 1.0), record(20, 30.0, tokens=600)
    steps.add(keys[0], row(good, good, good, late, moves=[20.0]))
    steps.add(keys[1], row(good, late, late, late))
    steps.add(keys[2], row(good, moves=[1.0]))
    assert spatial.main(flags) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["violation_rate"] == {"spatial": 0.25, "dp": 0.75}
    assert result["fewer_than_dp"] == pytest.approx(2 / 3)
    assert (result["flips"], result["flips_constant_load"], result["tokens_wrong"]) == (1, 0, 0)
    assert result["targets_missed"] == []
    assert (tmp_path / "spatial-pd.png").stat().st_size > 5000
    page = PAGES["spatial-pd"](result)
    assert "| `spatial` | 25.0% | 0.0% | 100.0% | 25.0% |" in page
    assert "plain round robin: 67%. At constant load 1 moves while the pools settle, 0 after. All measured" in page
    assert "Not measured: `fewer_than_router`, `fewer_than_bucket`." in page


def test_without_time_nothing_starts(tmp_path: Path) -> None:
    assert spatial.main(["--budget-s", "5", "--out", str(tmp_path)]) == 1
    assert spatial.main(["--arms", "fast", "--out", str(tmp_path)]) == 2


def test_late_shares_over_time() -> None:
    middles, shares = over_time([row(record(0, 1.0), record(5, 10.0), record(25, 26.0))], 0.4)
    assert list(middles[:2]) == [1.0, 3.0]
    assert list(shares[:2]) == [0.5, 0.0]


def test_picture(tmp_path: Path) -> None:
    rows = {"spatial": [row(record(0, 1.0), moves=[3.0])], "router:bucket": [row(record(0, 9.0, tokens=600))]}
    plot({arm: figures(own, 0.4, 30.0) for arm, own in rows.items()}, rows, 0.4, tmp_path / "made" / "x.png", "title")
    assert (tmp_path / "made" / "x.png").stat().st_size > 5000
