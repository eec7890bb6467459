"""The benches on emulated engines: workloads, layouts and figures. No engine is started here."""

from __future__ import annotations

import pytest

from bench import baselines, emulation_check, frontier
from bench.replaying.client import Record
from bench.replaying.plan import Planned
from pla_sglang import chain
from pla_sglang.errors import ConfigError
from pla_sglang.profiles import load_profile
from pla_sglang.testing.server import ServerError


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_frontier_load_is_as_published(seed: int) -> None:
    drawn = frontier.arrivals(0.9, 60.0, seed)
    assert drawn == sorted(drawn) == frontier.arrivals(0.9, 60.0, seed)
    offered_s = sum(frontier.work_s(tokens) for _, tokens in drawn)
    assert offered_s / 60 == pytest.approx(0.9, rel=0.03)
    shorts = [tokens for _, tokens in drawn if tokens < 1000]
    assert all(180 <= tokens <= 220 for tokens in shorts)
    assert 0.15 < sum(map(frontier.work_s, shorts)) / offered_s < 0.35


def test_frontier_solo_times_are_the_published_ones() -> None:
    assert frontier.work_s(200) == pytest.approx(0.22)
    assert frontier.work_s(2400) == pytest.approx(2.46)


def record(tokens: int, due_s: float, first_s: float, *, error: str | None = None) -> Record:
    prompt = [800] * (tokens - 2) + chain.ask_ids(1)
    made = Record(Planned(0, due_s, prompt, 1), due_s, sent_s=due_s, token_s=[first_s], done_s=first_s, status=200)
    made.prompt_ids, made.output_ids, made.error = prompt, chain.expected(prompt, 2).tokens, error
    return made


def test_frontier_figures_are_in_device_time_by_class() -> None:
    records = [record(200, 0.0, 1.0), record(210, 0.0, 3.0), record(2400, 2.0, 10.0)]
    found = frontier.figures(records, 2.0)
    assert found["short_mean_s"] == pytest.approx(1.0)
    assert found["long_mean_s"] == found["long_max_s"] == pytest.approx(4.0)
    assert found["tokens_wrong"] == 0
    with pytest.raises(ServerError, match="a request failed: gone"):
        frontier.figures([record(200, 0.0, 1.0, error="gone")], 1.0)


def test_unknown_arms_and_layouts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert frontier.main(["--arms", "best"]) == 2
    assert "--arms 'best' is not known" in capsys.readouterr().err
    assert baselines.main(["--traces", "a=/nonexistent.csv", "--layouts", "3"]) == 2
    assert "layout '3' is not known" in capsys.readouterr().err


def test_layouts() -> None:
    assert baselines.Layout.parse("unified-2").arguments == ("--unified", "2")
    assert baselines.Layout.parse("2+1").arguments == ("--prefill", "2", "--decode", "1")
    with pytest.raises(ConfigError, match="layout 'unified-x' is not known"):
        baselines.Layout.parse("unified-x")


def test_targets_by_workload() -> None:
    assert baselines.slo_of("azure_code_2x").ttft_s == 3.0
    assert baselines.slo_of("mooncake_conv").ttft_s == 30.0
    assert baselines.slo_of("mine") == baselines.DEFAULT_SLO


def test_the_checked_table_is_the_one_of_the_profile() -> None:
    profile = load_profile("h100-llama70b-fp8-dopd")
    for tokens, ms in emulation_check.DOPD_PREFILL_MS.items():
        assert profile.prefill_s(tokens, tokens**2) * 1e3 == pytest.approx(ms, rel=1e-3)
    for batch, by_context in emulation_check.DOPD_DECODE_MS.items():
        for context, ms in by_context.items():
            assert profile.decode_s(batch, batch * context) * 1e3 == pytest.approx(ms, rel=1e-3)
