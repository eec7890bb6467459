"""Profiles: the step-time model against hand-computed values, the files in the package, and bad input."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from pla_sglang.profiles import ProfileError, StepProfile, load_profile, parse_profile, profile_names, write_profile
from pla_sglang.profiles.fit import DecodePoint, PrefillPoint, fit_decode, fit_prefill, fit_profile
from pla_sglang.profiles.load import list_sizes
from pla_sglang.profiles.step import Coverage, Curve, DecodeTerms, Grid, LaunchFloor, PrefillTerms

# DOPD Table I, milliseconds
DOPD_PREFILL = {100: 36, 200: 46, 700: 125, 1200: 193, 1700: 269}
DOPD_DECODE = {
    (104, 100): 28, (104, 700): 33, (104, 1700): 37, (200, 200): 46, (200, 1200): 50, (248, 100): 47, (248, 1700): 61,
}  # fmt: skip


def plain(**changes: Any) -> StepProfile:
    values: dict[str, Any] = {
        "name": "plain",
        "source": "test",
        "prefill": PrefillTerms(floor_s=8e-3, base_s=2e-3, token_s=1e-5, attention_s=1e-9, read_s=1e-7, request_s=1e-4),
        "decode": DecodeTerms(base_s=5e-3, request_s=1e-5, read_s=4e-8),
        "kv_bytes_per_token": 128,
        "kv_capacity_tokens": 1000,
        "weights_bytes": 0,
    }
    return StepProfile(**(values | changes))


@pytest.mark.parametrize(
    ("new", "attention", "history", "requests", "expected_s"),
    [
        (0, 0.0, 1000, 1, 0.0),
        (100, 1e4, 0, 1, 8e-3),  # 2 + 1 + 0.01 + 0.1 ms: the floor
        (2000, 4e6, 0, 1, 2e-3 + 20e-3 + 4e-3 + 1e-4),
        (2000, 2e6, 0, 2, 2e-3 + 20e-3 + 2e-3 + 2e-4),
        (100, 100 * (100 + 2 * 5000), 5000, 1, 8e-3 + 5e-4),
    ],
)
def test_prefill(new: int, attention: float, history: int, requests: int, expected_s: float) -> None:
    assert plain().prefill_s(new, attention, history, requests) == pytest.approx(expected_s)


def test_decode() -> None:
    assert plain().decode_s(0, 0) == 0.0
    assert plain().decode_s(10, 20_000) == pytest.approx(5e-3 + 1e-4 + 8e-4)


def test_a_mixed_pass_costs_more_than_either_part() -> None:
    profile = plain()
    mixed = profile.step_s(new_tokens=500, attention=250_000, requests=1, batch=20, context_tokens=40_000)
    assert mixed == pytest.approx(max(8e-3, 2e-3 + 520e-5 + 0.25e-3 + 1e-4) + 40_000 * 4e-8)
    assert mixed > profile.prefill_s(500, 250_000)
    assert mixed > profile.decode_s(20, 40_000)


def test_the_eager_floor_goes_with_a_graph() -> None:
    profile = plain(launch_floor=LaunchFloor(eager_s=12e-3, graph_s=1e-3))
    assert profile.decode_s(1, 10, graph=False) == 12e-3
    assert profile.decode_s(1, 10) == pytest.approx(5e-3 + 1e-5 + 4e-7)
    assert profile.prefill_s(10, 100, graph=False) == 12e-3
    assert profile.step_s(batch=1, context_tokens=10, graph=False) == 12e-3


def test_what_a_served_pass_costs_is_in_each_pass_with_new_tokens() -> None:
    bare, served = (
        plain(launch_floor=LaunchFloor(eager_s=12e-3)),
        plain(launch_floor=LaunchFloor(eager_s=12e-3), pass_s=5e-3),
    )
    assert served.prefill_s(10, 100, graph=False) == pytest.approx(17e-3)
    mixed = {"new_tokens": 500, "attention": 250_000, "requests": 1, "batch": 20, "context_tokens": 40_000}
    assert served.step_s(**mixed) == pytest.approx(5e-3 + bare.step_s(**mixed))
    assert served.step_s(batch=20, context_tokens=40_000) == bare.decode_s(20, 40_000)
    assert served.prefill_s(0, 0) == 0.0


def test_a_mixed_pass_may_have_a_floor_of_its_own() -> None:
    profile = plain(mixed_floor_s=30e-3, pass_s=1e-3)
    assert profile.step_s(new_tokens=10, attention=100, requests=1, batch=2, context_tokens=50) == pytest.approx(31e-3)
    assert profile.prefill_s(10, 100) == pytest.approx(9e-3)
    assert profile.decode_s(2, 50) < 6e-3
    long = {"new_tokens": 5000, "attention": 25e6, "requests": 1, "batch": 2, "context_tokens": 50}
    assert profile.step_s(**long) == plain(pass_s=1e-3).step_s(**long) > 50e-3


def test_corrections_are_linear_between_points_and_constant_outside() -> None:
    curve = Curve((10.0, 20.0), (1.0, 2.0))
    assert [curve(x) for x in (0, 10, 15, 20, 99)] == [1.0, 1.0, 1.5, 2.0, 2.0]
    grid = Grid((1.0, 3.0), (10.0, 30.0), ((1.0, 2.0), (3.0, 4.0)))
    assert grid(2, 20) == pytest.approx(2.5)
    assert grid(0, 0) == 1.0
    assert grid(9, 99) == 4.0


@pytest.mark.parametrize("name", profile_names())
def test_packaged_profiles_are_sane(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.source
    assert profile.fit_error.prefill_mean < 0.03
    assert profile.fit_error.decode_mean < 0.06
    lengths = (1, 16, 64, 256, 512, 700, 1024, 2048, 8192, 24_000, 100_000)
    times = [profile.prefill_s(n, n * n) for n in lengths]
    # measured neighbours near the floor differ by noise
    assert all(later >= 0.98 * earlier for earlier, later in itertools.pairwise(times))
    assert profile.decode_s(64, 64_000) > profile.decode_s(1, 1000) > 0


def test_known_names_are_in_the_package() -> None:
    wanted = {"h100-llama3.1-8b-tp1", "h200-qwen2.5-14b-tp1", "h100-llama70b-fp8-dopd", "linear"}
    assert wanted <= set(profile_names())


def test_sizes_of_a_model_on_a_gpu() -> None:
    known = [f"h100-llama3.1-8b-tp{size}" for size in (1, 2, 4)]
    assert list_sizes(known[1]) == known
    assert list_sizes("h200-qwen2.5-14b-tp1") == ["h200-qwen2.5-14b-tp1"]
    assert list_sizes("linear") == ["linear"]
    assert list_sizes("own/h100-llama3.1-8b-tp1") == ["own/h100-llama3.1-8b-tp1"]


@pytest.mark.parametrize("name", profile_names())
def test_packaged_profiles_say_what_they_were_made_from(name: str) -> None:
    profile = load_profile(name)
    coverage = dataclasses.astuple(profile.coverage)
    assert all(coverage) is (name != "linear"), "the one that is made up"
    assert profile.gpus == (int(name[-1]) if name[-4:-1] == "-tp" else 2 if name.endswith("dopd") else 1)
    if profile.prefill_correction.at:
        at = profile.prefill_correction.at
        assert profile.coverage.pass_tokens == (at[0], at[-1])


@pytest.mark.parametrize("bounds", [(5,), (0, 3), (4, 3)])
def test_coverage_is_the_least_and_the_most(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ProfileError, match=r"coverage: decode_batch .* is not valid; allowed: least and most"):
        Coverage(decode_batch=bounds)


def test_dopd_profile_reproduces_its_table() -> None:
    profile = load_profile("h100-llama70b-fp8-dopd")
    for tokens, ms in DOPD_PREFILL.items():
        assert profile.prefill_s(tokens, tokens**2) == pytest.approx(ms / 1e3, rel=1e-3)
    for (batch, context), ms in DOPD_DECODE.items():
        assert profile.decode_s(batch, batch * context) == pytest.approx(ms / 1e3, rel=1e-3)


def test_linear_profile_counts_every_new_token() -> None:
    profile = load_profile("linear")
    assert profile.prefill_s(820, 820**2) == pytest.approx(0.840)
    assert profile.step_s(new_tokens=200, attention=4e4, requests=1, batch=5, context_tokens=900) == pytest.approx(
        0.225
    )


def test_fit_finds_the_terms_that_made_the_points() -> None:
    truth = plain(prefill=PrefillTerms(floor_s=8e-3, base_s=2e-3, token_s=1e-5, attention_s=1e-9))
    prefill = [
        PrefillPoint(n, r, truth.prefill_s(n * r, r * n * n)) for n in (16, 64, 1024, 4096, 16384) for r in (1, 4)
    ]
    decode = [DecodePoint(b, c, truth.decode_s(b, b * c)) for b in (1, 16, 128) for c in (128, 2048)]
    terms = fit_prefill(prefill, read_s=0.0)
    assert dataclasses.astuple(terms)[:4] == pytest.approx((8e-3, 2e-3, 1e-5, 1e-9), rel=1e-3)
    assert dataclasses.astuple(fit_decode(decode)) == pytest.approx((5e-3, 1e-5, 4e-8), rel=1e-3)


def test_fit_refuses_too_few_points_and_holes() -> None:
    base = {"name": "x", "source": "t", "kv_bytes_per_token": 1, "kv_capacity_tokens": 1, "weights_bytes": 0}
    prefill = [PrefillPoint(n, 1, n * 1e-3) for n in (1, 2, 3, 4)]
    decode = [DecodePoint(1, 10, 1e-2), DecodePoint(2, 10, 1e-2), DecodePoint(2, 20, 1e-2)]
    with pytest.raises(ProfileError, match="3 prefill points; needed: 4"):
        fit_profile(base, prefill[:3], decode)
    with pytest.raises(ProfileError, match="2 decode points; needed: 3"):
        fit_profile(base, prefill, decode[:2])
    with pytest.raises(ProfileError, match="no point at batch 1, context 20"):
        fit_profile(base, prefill, decode, grid=True)
    with pytest.raises(ProfileError, match="finite and above 0"):
        fit_profile(base, [*prefill, PrefillPoint(5, 1, 0.0)], decode)


def test_written_profiles_come_back(tmp_path: Path) -> None:
    profile = load_profile("h100-llama70b-fp8-dopd")
    write_profile(profile, tmp_path / "copy.json")
    assert load_profile(tmp_path / "copy.json") == profile


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"unknown profile 'h900'; known: .*h100-llama3\.1-8b-tp1"):
        load_profile("h900")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_capacity_tokens": 0}, "kv_capacity_tokens 0 is out of range"),
        ({"kv_bytes_per_token": 1.5}, "kv_bytes_per_token 1.5 is out of range"),
        ({"name": ""}, "needs a name"),
        ({"pass_s": -0.001}, "pass_s -0.001 is out of range; allowed: finite numbers from 0"),
        ({"mixed_floor_s": -1}, "mixed_floor_s -1 is out of range"),
        ({"pass_s": "5 ms"}, "pass_s '5 ms' is out of range"),
        ({"pass_s": float("inf")}, "pass_s inf is out of range"),
        ({"speed": 1}, "unknown field 'speed'"),
        ({"prefill": {"floor_s": -1, "base_s": 0, "token_s": 1, "attention_s": 0}}, "floor_s -1 is out of range"),
        ({"prefill": {"floor_s": 0, "base_s": 0, "token_s": 0, "attention_s": 0}}, "prefill takes no time"),
        ({"prefill": {"floor_s": 1}}, "prefill: missing base_s, token_s, attention_s; needed: floor_s, base_s"),
        ({"prefill": 3}, "expected a JSON object"),
        ({"decode": {"base_s": "fast", "request_s": 1, "read_s": 1}}, "base_s 'fast' is out of range"),
        ({"decode": {"base_s": float("nan"), "request_s": 1, "read_s": 1}}, "base_s nan is out of range"),
        ({"decode": {"base_s": 0, "request_s": 0, "read_s": 1}}, "decode takes no time"),
        ({"launch_floor": {"eager_s": 1, "graph_s": 2}}, "graph_s 2 is above eager_s 1"),
        ({"prefill_correction": {"at": [2, 1], "factor": [1, 1]}}, "must be finite and rise"),
        ({"prefill_correction": {"at": [1, 2], "factor": [1]}}, "1 factors for 2 points"),
        ({"prefill_correction": {"at": [1], "factor": [99]}}, "factor 99 is out of range"),
        ({"decode_correction": {"batch": [1], "context": [1], "factor": []}}, "has 0 rows; allowed: 1"),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], message: str) -> None:
    values = dataclasses.asdict(plain()) | change
    with pytest.raises(ProfileError, match=message):
        parse_profile(values)


def test_files_that_are_no_profile_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(ProfileError, match=r"bad\.json"):
        load_profile(path)
    path.write_text(json.dumps([1]))
    with pytest.raises(ProfileError, match="expected a JSON object"):
        load_profile(path)
