"""The GPU bench without a GPU: parts that end, fail and are cut off; what is kept of them; its figures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import fig6, run, steps
from bench.gpu.models import SIZES, make_model
from bench.gpu.parts import Part, run_part


def script(folder: Path, text: str) -> str:
    """A module that a part can run. Its folder is on the path of the part's process."""
    (folder / "part_under_test.py").write_text(text, encoding="utf-8")
    return "part_under_test"


def part_of(tmp_path: Path, text: str, output: Path | None = None) -> Part:
    module = script(tmp_path, text)
    return Part("steps", "7b eager", module, (), 30.0, output, env={"PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("text", "limit_s", "expected"),
    [
        ("print('hello'); print('{\"a\": 1}')", 30.0, {"a": 1}),
        ("print('{\"a\": 1}'); raise SystemExit(3)", 30.0, {"a": 1, "failed": "exit 3"}),
        ("print('no result')", 30.0, {}),
        ("import time; print('{\"a\": 1}', flush=True); time.sleep(60)", 1.0, {"a": 1, "failed": "stopped after 1 s"}),
    ],
)
def test_a_part_never_takes_the_run_down(tmp_path: Path, text: str, limit_s: float, expected: dict[str, Any]) -> None:
    result = run_part(part_of(tmp_path, text), limit_s=limit_s, log=tmp_path / "log")
    assert result.pop("seconds") >= 0
    assert result == expected


def test_what_a_part_has_written_is_kept_when_it_is_cut_off(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    text = f"import time, pathlib; pathlib.Path({str(output)!r}).write_text('{{\"shapes\": {{}}}}'); time.sleep(60)"
    result = run_part(part_of(tmp_path, text, output), limit_s=1.0, log=tmp_path / "log")
    assert result["shapes"] == {}
    assert result["failed"] == "stopped after 1 s"


def of_arm(*tokens: int, median_ms: float) -> dict[str, Any]:
    return {"shapes": {"s": {"median_ms": median_ms, "first_tokens": [list(tokens)]}}}


def test_summary() -> None:
    arms = {
        "eager": of_arm(1, 2, 3, median_ms=20.0),
        "breakable": of_arm(1, 2, 3, median_ms=10.0),
        "varlen": of_arm(1, 2, 4, median_ms=5.0),
    }
    found = run.summary(arms)
    assert found["to_eager"]["varlen"] == 0.25
    assert found["to_breakable"]["varlen"] == 0.5
    assert found["first_tokens_differ"] == {"breakable": {"s": [0, 3]}, "varlen": {"s": [1, 3]}}
    assert run.summary({})["median_ms"] == {}


def test_a_run_without_time_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--device", "cpu", "--minutes", "0.01", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["completed"] == []
    assert set(result["not_run"].values()) == {"no time left", "SGLang captures prefill graphs on a GPU only"}
    assert set(run.SECTIONS) <= set(result)
    assert (tmp_path / "results.json").exists()


def test_kernels_say_that_they_need_a_gpu(tmp_path: Path) -> None:
    from bench.gpu import kernels

    if kernels.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "need a GPU" in kernels.measure(tmp_path / "kernels.json")["not_run"]


def test_parts_come_in_the_order_of_their_worth(tmp_path: Path) -> None:
    args = run.argparse.Namespace(device="cuda", sizes=["7b", "14b"], parts=list(run.SECTIONS), out=tmp_path, rounds=2)
    titles = [part.title for part in run.parts_of(args)]
    assert titles[:5] == [f"steps 7b {arm}" for arm in steps.ARMS]
    assert titles[5:9] == ["kernels", "fig6", "hol", "profile"]
    assert titles[9:] == [f"steps 14b {arm}" for arm in steps.ARMS]


@pytest.mark.parametrize("size", SIZES)
def test_models_have_the_published_shape(tmp_path: Path, size: str) -> None:
    config = json.loads((make_model(size, tmp_path / size) / "config.json").read_text(encoding="utf-8"))
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    attention = hidden * hidden * 2 + 2 * hidden * hidden * groups // heads
    weights = layers * (attention + 3 * hidden * inner) + 2 * config["vocab_size"] * hidden
    assert weights / 1e9 == pytest.approx({"7b": 7.6, "14b": 14.8, "32b": 32.8}[size], rel=0.02)
    assert (tmp_path / size / "tokenizer.json").exists()


def test_steps_name_every_arm_s_backend(tmp_path: Path) -> None:
    for arm in steps.ARMS:
        flags = steps.launcher_flags(arm, tmp_path, "cuda")
        config = json.loads(flags[flags.index("--cuda-graph-config") + 1])
        assert config["prefill"]["backend"] == steps.BACKEND[arm]
        assert ("bs" in config["prefill"]) == (arm != "eager")


def test_the_shape_that_was_promised() -> None:
    assert len(steps.TARGET.new_tokens) == 16
    assert (min(steps.TARGET.new_tokens), max(steps.TARGET.new_tokens)) == (8, 64)
    assert steps.TARGET.history_tokens == 2048


def test_sessions_are_the_same_in_every_arm_and_only_grow() -> None:
    prompts = fig6.sessions(0, 3, 8)
    assert prompts == fig6.sessions(0, 3, 8)
    assert prompts != fig6.sessions(0, 4, 8)
    for before, after in itertools.pairwise(prompts):
        if len(after) > len(before):
            assert after[: len(before)] == before
            assert len(after) - len(before) <= fig6.LONGEST_TOKENS + 8


def test_figures() -> None:
    latencies_s = [index / 1000 for index in range(1, 11)]
    assert fig6.figures(latencies_s, 5.0) == {"rps": 2.0, "mean_ms": 5.5, "p90_ms": 10.0, "requests": 10}
    arms = {"stock": {"concurrency": {"4": fig6.figures(latencies_s, 5.0)}}}
    arms["full"] = {"concurrency": {"4": fig6.figures([0.005] * 20, 5.0)}}
    assert fig6.ratios(arms)["full"] == {"rps": 2.0, "mean": 0.9091, "p90": 0.5, "clients": 4}
