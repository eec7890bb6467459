"""What is measured at a start, in which order and for how long; and what is kept of it for the next start."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig, profile_folder
from pla_sglang.plugin.engine.hooks.http_server import measure_after
from pla_sglang.plugin.engine.launch_profile import (
    BATCHES,
    FIRST_ROUNDS,
    LAST_ROUNDS,
    PROMPT_TOKENS,
    Shape,
    list_shapes,
    measure,
    why_not,
)
from pla_sglang.plugin.engine.step_cache import ENOUGH, StepCache, describe_engine
from pla_sglang.policy.common.step_fit import StepSample
from pla_sglang.policy.common.step_model import GPU_START
from pla_sglang.policy.slo.decode_fit import MixedBatchSample
from pla_sglang.policy.slo.pass_fits import PassFits


def shapes(**fields: Any) -> list[Shape]:
    wide = {"chunk_tokens": 8192, "room_tokens": 32_768, "cache_tokens": 400_000, "slots": 256, "mixes": True}
    return list(list_shapes(**(wide | fields)))


@pytest.mark.parametrize("chunk_tokens", [512, 8192])
def test_what_is_measured_tells_of_both_phases_and_of_both_together(chunk_tokens: int) -> None:
    found = shapes(chunk_tokens=chunk_tokens)
    lengths = [tokens for tokens in PROMPT_TOKENS if tokens <= chunk_tokens]
    alone = [shape.prompt_tokens for shape in found if shape.output_tokens == 1]
    assert alone == lengths * (FIRST_ROUNDS + LAST_ROUNDS)
    assert {shape.batch for shape in found if shape.output_tokens > 1 and not shape.beside} == set(BATCHES)
    assert sum(bool(shape.beside) for shape in found) == 1
    passes = sum(shape.output_tokens == 1 or bool(shape.beside) for shape in found) + 2 * len(BATCHES)
    steps = sum(shape.output_tokens for shape in found if shape.output_tokens > 1)
    assert min(passes, steps) >= ENOUGH, "enough to be kept, and to count as measured"


@pytest.mark.parametrize(
    ("fields", "largest", "batches", "beside"),
    [
        ({"chunk_tokens": 512}, 512, {1, 8, 32}, True),
        ({"room_tokens": 1024}, 512, {1, 8, 32}, True),
        ({"cache_tokens": 3000}, 8192, {1, 8}, False),
        ({"slots": 8}, 8192, {1, 8}, True),
        ({"slots": 1}, 8192, {1}, False),
        ({"mixes": False}, 8192, {1, 8, 32}, False),
    ],
    ids=["chunk", "context", "cache", "slots", "one", "unmixed"],
)
def test_nothing_is_larger_than_the_engine(
    fields: dict[str, Any], largest: int, batches: set[int], beside: bool
) -> None:
    found = shapes(**fields)
    assert max(shape.prompt_tokens for shape in found if shape.batch == 1 and shape.output_tokens == 1) == largest
    assert {shape.batch for shape in found if shape.output_tokens > 1 and not shape.beside} == batches
    assert any(shape.beside for shape in found) is beside


def test_it_ends_with_its_time() -> None:
    now_s, sent = 0.0, []

    def send(prompts: list[list[int]], tokens: int) -> None:
        nonlocal now_s
        now_s += 1.0
        sent.append((len(prompts), len(prompts[0]), tokens))

    work = [Shape(1, 16, 1), Shape(8, 32, 5), Shape(1, 64, 1)]
    assert measure(work, send, random.Random(1), lambda: now_s, 2.0) == 2
    assert sent == [(1, 16, 1), (8, 32, 5)]


def test_prompts_are_sent_while_the_batch_decodes() -> None:
    decoding, sent = threading.Event(), []

    def send(prompts: list[list[int]], tokens: int) -> None:
        if tokens > 1:
            assert decoding.wait(10)
        sent.append(len(prompts[0]))
        if len(sent) == 2:
            decoding.set()

    assert measure([Shape(4, 100, 50, beside=(10, 20))], send, random.Random(1), lambda: 0.0, 1.0) == 1
    assert sent == [10, 20, 100]


def test_prompts_share_no_prefix() -> None:
    prompts: list[tuple[int, ...]] = []
    send = lambda batch, tokens: prompts.extend(map(tuple, batch))  # noqa: E731
    measure([Shape(8, 16, 2)] * 3, send, random.Random(1), lambda: 0.0, 1.0)
    assert len({prompt[:4] for prompt in prompts}) == 24


@pytest.mark.parametrize(("works", "measured"), [(True, 1), (False, 0)])
def test_a_server_that_does_not_work_is_not_measured(works: bool, measured: int) -> None:
    calls: list[None] = []
    assert measure_after(lambda args: works, lambda: calls.append(None))("args") is works
    assert len(calls) == measured


def test_whom_it_cannot_measure() -> None:
    def args(**fields: object) -> SimpleNamespace:
        return SimpleNamespace(**({"dp_size": 1, "disaggregation_mode": "null"} | fields))

    assert why_not(args()) is None
    assert "dp-size 2" in (why_not(args(dp_size=2)) or "")
    assert "decode" in (why_not(args(disaggregation_mode="decode")) or "")


# -- when --------------------------------------------------------------------------------------------------------------

REPORTING = {"prefill_disagg": "temporal", "telemetry": "tcp://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("fields", "device", "expected"),
    [
        (REPORTING, "cuda", "on"),
        ({"prefill_disagg": "temporal", "stateless": True}, "cuda", "on"),
        ({"prefill_disagg": "temporal"}, "cuda", "off"),
        ({"telemetry": "tcp://127.0.0.1:1"}, "cuda", "off"),
        (REPORTING, "cpu", "off"),
        (REPORTING | {"profile_at_launch": "off"}, "cuda", "off"),
        (REPORTING | {"profile_at_launch": "on"}, "cpu", "on"),
    ],
    ids=["reports", "stateless", "alone", "unscheduled", "cpu", "off", "on"],
)
def test_by_default_where_a_router_plans_by_it(fields: dict[str, Any], device: str, expected: str) -> None:
    assert PlaConfig(**fields).for_device(device).profile_at_launch == expected


def test_it_needs_our_scheduling() -> None:
    with pytest.raises(ConfigError, match="--pla-profile-at-launch on needs --prefill-disagg"):
        PlaConfig(profile_at_launch="on")


def test_where_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_folder(PlaConfig()) == tmp_path / "pla_sglang" / "step_times"
    assert profile_folder(PlaConfig(profile_cache="/elsewhere")) == Path("/elsewhere")


# -- what is kept ------------------------------------------------------------------------------------------------------

ENGINE = describe_engine(SimpleNamespace(model_path="m", tp_size=2), "H100", None)


def measured(passes: int = 40) -> PassFits:
    fits = PassFits(GPU_START)
    for number in range(passes):
        new, batch = 50 * (number + 1), number % 30 + 1
        fits.observe_prefill(StepSample(new, 0, float(new * new), 0.02 + 5e-5 * new))
        fits.observe_decode(batch, 500 * batch, 0.02 + 1e-4 * batch)
        fits.observe_mixed(MixedBatchSample(new, 0, float(new * new), batch, 500 * batch, 0.02 + 5e-5 * (new + batch)))
    return fits


def test_the_next_start_knows_what_this_one_has_measured(tmp_path: Path) -> None:
    before, after = measured(), PassFits(GPU_START)
    StepCache(tmp_path / "new", ENGINE).save_news(before)
    assert StepCache(tmp_path / "new", ENGINE).load(after)
    assert after.prefills.passes >= ENOUGH
    assert after.decodes.decodes == before.decodes.decodes
    for new in (200, 1000):
        assert after.prefills.model.step_s(new, 0) == pytest.approx(before.prefills.model.step_s(new, 0), rel=0.02)
    assert after.decodes.model.decode_s(8, 4000) == pytest.approx(before.decodes.model.decode_s(8, 4000), rel=0.02)


@pytest.mark.parametrize(
    "change",
    [{"model_path": "'n'"}, {"device_name": "A100"}, {"sglang": "0"}, {"tp_size": "1"}, {"emulate": "linear"}],
    ids=lambda change: next(iter(change)),
)
def test_another_engine_measures_anew(change: dict[str, str], tmp_path: Path) -> None:
    StepCache(tmp_path, ENGINE).save_news(measured())
    assert change.keys() <= ENGINE.keys()
    assert not StepCache(tmp_path, ENGINE | change).load(PassFits(GPU_START))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"engine": {}}', "passes"], ids=["empty", "cut", "list", "other", "rows"]
)
def test_a_file_that_cannot_be_read_is_as_none(text: str, tmp_path: Path) -> None:
    cache = StepCache(tmp_path, ENGINE)
    rows = json.dumps({"engine": ENGINE, "passes": {"prefills": [[1]], "decodes": [], "mixed": []}})
    cache.path.write_text(rows if text == "passes" else text)
    fits = PassFits(GPU_START)
    assert not cache.load(fits)
    assert fits.prefills.model == GPU_START


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    StepCache(tmp_path / "file", ENGINE).save_news(measured())


def test_it_is_written_when_enough_is_known_and_seldom_after(tmp_path: Path) -> None:
    cache = StepCache(tmp_path, ENGINE)
    cache.save_news(measured(ENOUGH // 2))
    assert not cache.path.exists()
    cache.save_news(measured(ENOUGH + 8))
    cache.path.unlink()
    cache.save_news(measured(ENOUGH + 24))
    assert not cache.path.exists(), "hardly more is known"
    cache.save_news(measured(4 * ENOUGH))
    assert cache.path.exists()
