"""The GPU bench without a GPU: parts that end, fail and are cut off; what is kept of them; its figures."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from bench.gpu import chats, device_time, moves
from bench.gpu import gpu as run
from bench.gpu.models import SIZES, make_model
from bench.gpu.parts import Part, run_part
from bench.harness.catalogue import BENCHES
from bench.harness.load_client import Outcome, Request
from bench.harness.talks import load_tokenizer


def part_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Part:
    """A part that runs ``text``, a module in which ``out`` is the file of its result."""
    output = tmp_path / "result.json"
    (tmp_path / "part_under_test.py").write_text(f"import pathlib, time; out = pathlib.Path({str(output)!r})\n{text}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Part("steps 7b eager", ("part_under_test",), 30.0, output)


@pytest.mark.parametrize(
    ("text", "limit_s", "expected"),
    [
        ("out.write_text('{\"a\": 1}')", 30.0, {"a": 1}),
        ("out.write_text('{\"a\": 1}'); raise SystemExit(3)", 30.0, {"a": 1, "failed": "exit 3"}),
        ("print('no result')", 30.0, {}),
        ("out.write_text('{\"a\": 1}'); time.sleep(60)", 1.0, {"a": 1, "failed": "stopped after 1 s"}),
        ("out.write_text('{\"a\":'); time.sleep(60)", 1.0, {"failed": "stopped after 1 s"}),
    ],
)
def test_a_part_never_takes_the_run_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, limit_s: float, expected: dict[str, Any]
) -> None:
    part = part_of(tmp_path, monkeypatch, text)
    result = run_part(part, limit_s=limit_s, log=tmp_path / "log")
    assert result.pop("seconds") >= 0
    assert result == expected


def test_a_part_that_is_stopped_takes_its_servers_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not listen, and its server in a session of its own: it would keep the memory of the GPU."""
    monkeypatch.setattr("bench.gpu.parts.STOP_S", 1.0)
    lines = (
        "import json, signal, subprocess, sys",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "command = [sys.executable, '-c', 'import time; time.sleep(90)']",
        "server = subprocess.Popen(command, start_new_session=True)",
        "out.write_text(json.dumps({'pid': server.pid}))",
        "time.sleep(90)",
    )
    result = run_part(part_of(tmp_path, monkeypatch, "; ".join(lines)), limit_s=6.0, log=tmp_path / "log")
    assert result["failed"] == "stopped after 6 s"
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(result["pid"]).status() == psutil.STATUS_ZOMBIE


def test_a_result_of_an_earlier_run_is_not_that_of_a_part_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_of(tmp_path, monkeypatch, "raise SystemExit(3)")
    part.output.write_text('{"a": 1}')
    result = run_part(part, limit_s=30.0, log=tmp_path / "log")
    assert result == {"failed": "exit 3", "seconds": result["seconds"]}


def test_a_part_is_a_function_of_this_folder(tmp_path: Path) -> None:
    command = ("bench.gpu.parts", "parts.write_result", json.dumps({"result": {"a": 1}, "out": str(tmp_path / "x")}))
    result = run_part(Part("kernels", command, 30.0, tmp_path / "x"), limit_s=30.0, log=tmp_path / "log")
    assert result == {"a": 1, "seconds": result["seconds"]}


def of_arm(*tokens: int, median_ms: float) -> dict[str, Any]:
    return {"shapes": {"s": {"median_ms": median_ms, "first_tokens": [list(tokens)]}}}


def test_summary() -> None:
    arms = {
        "eager": of_arm(1, 2, 3, median_ms=20.0),
        "breakable": of_arm(1, 2, 3, median_ms=10.0),
        "varlen": of_arm(1, 2, 4, median_ms=5.0),
    }
    found = run.summarise(arms)
    assert found["to_eager"]["varlen"] == 0.25
    assert found["to_breakable"]["varlen"] == 0.5
    assert found["first_tokens_differ"] == {"breakable": {"s": [0, 3]}, "varlen": {"s": [1, 3]}}
    assert run.summarise({})["median_ms"] == {}


def test_a_run_without_time_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["gpu"].main(["--device", "cpu", "--minutes", "0.01", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["completed"] == []
    assert set(result["not_run"].values()) == {"no time left", "SGLang captures prefill graphs on a GPU only"}
    assert set(run.SECTIONS) <= set(result)
    assert (tmp_path / "results.json").exists()


def test_kernels_say_that_they_need_a_gpu(tmp_path: Path) -> None:
    from bench.gpu import kernels

    if kernels.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    kernels.measure(tmp_path / "kernels.json")
    assert "need a GPU" in json.loads((tmp_path / "kernels.json").read_text())["not_run"]


@pytest.mark.parametrize("size", SIZES)
def test_models_have_the_published_shape(tmp_path: Path, size: str) -> None:
    config = json.loads((make_model(size, tmp_path / size) / "config.json").read_text(encoding="utf-8"))
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    attention = hidden * hidden * 2 + 2 * hidden * hidden * groups // heads
    weights = layers * (attention + 3 * hidden * inner) + 2 * config["vocab_size"] * hidden
    assert weights / 1e9 == pytest.approx({"7b": 7.6, "14b": 14.8, "32b": 32.8}[size], rel=0.02)
    assert (tmp_path / size / "tokenizer.json").exists()


def test_sessions_are_the_same_in_every_arm_and_only_grow() -> None:
    prompts = chats.make_sessions(0, 3, 8)
    assert prompts == chats.make_sessions(0, 3, 8)
    assert prompts != chats.make_sessions(0, 4, 8)
    for before, after in itertools.pairwise(prompts):
        if len(after) > len(before):
            assert after[: len(before)] == before
            assert len(after) - len(before) <= chats.LONGEST_TOKENS + 8


TALK = [("user", "one two three"), ("assistant", "four five"), ("user", "six"), ("assistant", "seven")]


def write_lmsys(path: Path) -> None:
    messages = [[{"role": role, "content": text} for role, text in TALK]]
    columns = {"conversation_id": ["a"], "model": ["vicuna-13b"], "conversation": messages, "turn": [2]}
    parquet.write_table(pa.table(columns | {"language": ["English"], "redacted": [False]}), path)


def test_prompts_of_a_data_set_reach_the_servers(tmp_path: Path) -> None:
    """In the published schema, by the tokenizer of the model that is measured; turns keep their recorded lengths."""
    name = "chat.parquet"
    write_lmsys(tmp_path / name)
    flags = ("--dataset", str(tmp_path / name), "--sizes", "7b", "--parts", "chats", "--out", str(tmp_path))
    [part] = run.list_parts(BENCHES["gpu"].parse(*flags))
    settings = json.loads(part.command[2])
    model = settings["model"]
    make_prompts, lengths = chats.choose_prompts(model, "cuda", settings["answer_tokens"], 64, settings["dataset"])
    encode = load_tokenizer(Path(model))
    first, answer, later = (encode(TALK[at][1]) for at in range(3))
    prompts = [list(prompt) for prompt in make_prompts(3)]
    assert [len(prompt) for prompt in prompts[:2]] == [len(first), len(first) + len(answer) + len(later)]
    assert (prompts[0], prompts[1][-len(later) :]) == (first, later)
    assert lengths.startswith(f"{name}, tokens of ")


def ended(sent_s: float, first_s: float, done_s: float, tokens: int = 1, error: str | None = None) -> Outcome:
    outcome = Outcome(Request("r", "chat", sent_s, (1,), tokens))
    outcome.token_s, outcome.done_s, outcome.output_ids, outcome.error = [first_s], done_s, (7,) * tokens, error
    return outcome


def test_figures_are_of_what_ended_once_it_had_settled() -> None:
    settling, late = ended(-0.5, -0.2, -0.1), ended(4.0, 5.5, 5.6)
    outcomes = [settling, ended(0.0, 0.1, 0.1), ended(1.0, 1.3, 1.3), late, ended(2.0, 2.1, 2.1, error="aborted")]
    found = chats.figures(outcomes, 5.0, clients=4)
    assert (found["requests"], found["failed"], found["ttft_p50_ms"]) == (2, 1, 200.0)
    assert found["rps"] == 20.0, "four clients, 0.2 s each"
    assert "tpot_p50_ms" not in found
    assert chats.figures([settling], 5.0, clients=4) == {"requests": 0, "failed": 0}


def test_ratios_are_taken_within_a_round() -> None:
    rounds = {"stock": [{"rps": 10.0, "failed": 0}, {"rps": 40.0, "failed": 0}]}
    rounds["ours"] = [{"rps": 12.0, "failed": 0}, {"rps": 40.0, "failed": 1}]
    assert chats.compare(rounds)["ours"] == {"rps": 26.0, "failed": 1, "rps_to_stock": [1.1, 1.0, 1.2]}


def test_each_round_begins_with_another_arm() -> None:
    sent: list[tuple[str, int]] = []

    def send(arm: str, clients: int) -> list[Outcome]:
        sent.append((arm, clients))
        return [ended(0.0, 0.1, 0.1)]

    [_, runs] = chats.take_turns(chats.Turns(("a", "b"), (1, 4), rounds=2, seconds=1.0), send)
    assert sent == [("a", 1), ("b", 1), ("a", 4), ("b", 4), ("b", 1), ("a", 1), ("b", 4), ("a", 4)]
    assert [row["rps"] for row in runs["4"]["b"]] == [40.0, 40.0]


def test_a_trace_says_busy_and_idle_times() -> None:
    def event(category: str, name: str, begin_us: float, taken_us: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": begin_us, "dur": taken_us}

    kernels = [event("kernel", "gemm", 0, 100), event("kernel", "norm", 50, 100), event("gpu_memcpy", "copy", 450, 50)]
    trace = {"traceEvents": [*kernels, event("cuda_runtime", "cudaGraphLaunch", 0, 5), {"ph": "M", "name": "x"}]}
    found = device_time.describe_trace(trace, passes=2)
    assert (found["span_us_a_pass"], found["busy_us_a_pass"], found["idle_us_a_pass"]) == (250.0, 100.0, 150.0)
    assert (found["gaps_above_200_us"], found["calls_a_pass"]) == (1, {"cudaGraphLaunch": 0.5})
    assert device_time.describe_trace({"traceEvents": []}, passes=2) == {"kernels": 0, "passes": 2}


def test_a_move_is_judged_by_what_agrees_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, moved = ended(0, 1, 2, tokens=20), ended(0, 1, 2, tokens=20)
    moved.output_ids = (*alone.output_ids[:12], 8, *alone.output_ids[13:])
    story = {"attempts": [{"delivered_tokens": 0}, {"delivered_tokens": 10}, {"delivered_tokens": 15}]}
    monkeypatch.setattr(moves, "explain_request", lambda url, rid: story)
    found = moves.agree_behind_moves([moved], [alone], "http://router")
    assert found == {"moves_judged": 1, "differ_within_8_tokens": 1, "tokens_agreeing_behind_p50": 2}
    assert moves.share_the_same([moved], [alone]) == {"same_prefix_share": 0.6, "whole": 0}
    assert moves.share_the_same([alone], [alone]) == {"same_prefix_share": 1.0, "whole": 1}
