"""The bench ``survive``: that its checks find what is wrong in a stream, its steps, and what it makes of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.check.survive import acts, streams
from bench.check.survive import bench as survive
from bench.check.survive.streams import CHAT, SAMPLED, TOP_K, Stream, count_impossible, make_stream
from bench.harness.catalogue import BENCHES
from pla_sglang import launch_cluster
from pla_sglang.sim import chain
from pla_sglang.sim.chain.algebra import step
from pla_sglang.sim.chain.oracle import asked_end, check_prompt, state_after
from pla_sglang.sim.chain.spread import spread_logits
from pla_sglang.sim.chain.vocab import EOS


def sample(prompt: list[int], rng: random.Random) -> list[int]:
    """An answer as the model gives it at top-k, drawn evenly."""
    ids = check_prompt(prompt)
    state, end, place, answer = state_after(ids), asked_end(ids), len(ids) - 1, list[int]()
    while not answer or answer[-1] != EOS:
        best = np.argsort(spread_logits(state))[-TOP_K:].tolist()
        answer.append(EOS if place == end else rng.choice(best))
        state, place = step(state, answer[-1]), place + 1
    return answer


@pytest.mark.parametrize(
    ("name", "damage", "least"),
    [
        ("nothing", lambda answer: answer, 0),
        ("lost", lambda answer: [*answer[:20], *answer[21:]], 5),
        ("doubled", lambda answer: [*answer[:20], *answer[19:]], 5),
        ("altered", lambda answer: [*answer[:20], answer[20] ^ 1, *answer[21:]], 5),
        ("cut short", lambda answer: answer[:-7], 7),
        ("too long", lambda answer: [*answer, answer[3]], 1),
    ],
)
def test_a_sampled_answer_is_checked(name: str, damage: Callable[[list[int]], list[int]], least: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        stream = make_stream(SAMPLED, "r", 0, rng)
        answer = sample(stream.prompt_ids, rng)
        assert len(answer) == stream.tokens
        wrong = count_impossible(stream.prompt_ids, damage(answer))
        assert wrong == 0 if least == 0 else wrong >= least, (name, seed)


def test_the_events_of_a_sampled_answer() -> None:
    stream = make_stream(SAMPLED, "r", 0, random.Random(1))
    answer = sample(stream.prompt_ids, random.Random(2))
    events: list[Any] = [{"output_ids": [token], "meta_info": {"finish_reason": None}} for token in answer]
    stream.events = [json.dumps(event).encode() for event in events]
    with pytest.raises(ValueError, match="ended with None"):
        stream.count_wrong()
    events[-1]["meta_info"]["finish_reason"] = {"type": "stop"}
    stream.events = [*(json.dumps(event).encode() for event in events), b"[DONE]"]
    assert stream.count_wrong() == 0
    del stream.events[10]
    assert stream.count_wrong() > 1


def chat_events(stream: Stream, **changes: Any) -> list[dict[str, Any]]:
    """As SGLang streams them, a letter each."""
    field: Callable[[str], dict[str, Any]] = lambda text: {"content": text}  # noqa: E731
    if stream.calls_tool:
        field = lambda text: {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}  # noqa: E731
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if stream.calls_tool:
        deltas.append({"tool_calls": [{"index": 0, "function": {"name": "look_up", "arguments": ""}}]})
    deltas += [field(letter) for letter in stream.wanted]
    chunks = [{"id": "a", "choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    finish = changes.get("finish", "tool_calls" if stream.calls_tool else "stop")
    chunks.append({"id": changes.get("id", "a"), "choices": [{"delta": {}, "finish_reason": finish}]})
    return [*chunks, {"id": "a", "choices": [], "usage": {"completion_tokens": stream.tokens}}]


def told(events: list[dict[str, Any]]) -> list[bytes]:
    return [*(json.dumps(event).encode() for event in events), b"[DONE]"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_chat_is_checked(number: int) -> None:
    stream = make_stream(CHAT, "r", number, random.Random(number))
    prompt = stream.body["messages"][0]["content"]
    assert prompt.isascii()
    assert stream.wanted in prompt
    assert ("tools" in stream.body, "response_format" in stream.body) == (number == 1, number == 0)
    events = chat_events(stream)
    stream.events = told(events)
    assert stream.count_wrong() == 0
    for bad in ({"id": "b"}, {"finish": "length"}):
        stream.events = told(chat_events(stream, **bad))
        with pytest.raises(ValueError, match="not the stream of one answer"):
            stream.count_wrong()
    stream.events = told([events[0], *events])
    with pytest.raises(ValueError, match="not the stream of one answer"):
        stream.count_wrong()
    altered = json.loads(json.dumps(events).replace('"z"', '"y"'))
    stream.events = told(altered)
    assert stream.count_wrong() == stream.wanted.count("z") > 0
    stream.events = told([*events[:30], *events[31:]])
    assert stream.count_wrong() > 0


@pytest.mark.parametrize(
    ("events", "failed"),
    [
        ([], True),
        ([b'{"text":"error"}', b"[DONE]"], False),
        ([b'{"error":{"code":502}}'], True),
        ([b'{"meta_info":{"finish_reason":{"type": "abort"}}}'], True),
    ],
)
def test_a_failure_that_the_stream_itself_says(events: list[bytes], failed: bool) -> None:
    assert (streams.find_error(events) is not None) is failed


def test_failed_and_wrong_streams_are_counted() -> None:
    rng = random.Random(4)
    good, wrong, broken, failed = (make_stream(SAMPLED, f"r{number}", number, rng) for number in range(4))
    for stream in (good, wrong, broken):
        answer = sample(stream.prompt_ids, rng)
        finish = None if stream is broken else {"type": "stop"}
        ids = answer[:-1] if stream is wrong else answer
        stream.events = told([{"output_ids": ids, "meta_info": {"finish_reason": finish}}])
    failed.error = "reset"
    stories = [{"hops": [{"why": ""}, {"why": "survive", "tokens": 9, "gap_s": 0.5, "more": 1}]}, {}]
    row = acts.describe_streams([good, wrong, broken, failed], stories)
    assert (row["streams"], row["completed"], row["tokens_wrong"]) == (4, 3, 1 + broken.tokens)
    assert row["hops"] == [{"why": "survive", "tokens": 9, "gap_s": 0.5}]
    assert [error[:3] for error in row["errors"]] == ["r3:", "r2:"]


KILL = {"streams": 8, "completed": 8, "tokens": 900, "tokens_wrong": 0, "killed": 1, "errors": [], "plugin_commit": "c"}
EMPTY = KILL | {"hops": [], "streams_here": 8, "streams_left": 8, "empty_s": 6.0, "ended_s": None, "aborted": 0.0}


def pairs_of(**changes: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    hops = [{"why": "survive", "tokens": 1, "gap_s": gap_s} for gap_s in (0.5, 0.25, None)]
    steps = [({"act": "kill"}, KILL | {"hops": hops}), ({"act": "kill"}, KILL | {"hops": []})]
    return [*steps, ({"act": "drain"}, EMPTY), ({"act": "sigterm"}, EMPTY | {"ended_s": 11.0} | changes)]


def test_figures_of_the_steps() -> None:
    result = survive.sum_up(pairs_of(), 3.0)
    assert (result["streams"], result["killed"], result["completed"], result["streams_hit"]) == (16, 2, 16, 3)
    assert (result["gap_p50_s"], result["drain_s"], result["sigterm_s"], result["ended_s"]) == (0.375, 2.0, 2.0, 11.0)
    assert result["drain_aborted"] == 0
    assert survive.is_right(result)
    assert not survive.is_right(survive.sum_up(pairs_of(completed=7), 3.0))
    assert not survive.is_right(survive.sum_up(pairs_of(aborted=1.0), 3.0))
    assert not survive.is_right(survive.sum_up(pairs_of(tokens_wrong=1), 3.0))
    some = survive.sum_up(pairs_of()[1:2], 3.0)
    assert (some["gap_p99_s"], some["drain_s"], some["sigterm_s"], some["drain_aborted"]) == (None, None, None, 0)
    about = {"instances": 3, "policy": "p", "wave": 8, "profile": "x", "time_scale": 3.0, "seed": 0}
    page = survive.page(about | result | {"environment": {"hardware": "a cpu", "plugin_commit": "c"}})
    assert "`drain_s` | 2 |" in page


def test_steps_and_flags() -> None:
    options = BENCHES["survive"].parse("--streams", "60", "--wave", "20")
    keys = survive.keys_of(options)
    models = [(key["model"], key["act"]) for key in keys]
    kills = [(SAMPLED, "kill"), (SAMPLED, "kill")]
    assert models == [*kills, (SAMPLED, "drain"), (SAMPLED, "sigterm"), (CHAT, "kill")]
    for model in (SAMPLED, CHAT):
        config = launch_cluster.read_config(survive.cluster_flags(model, options)).config.to_cluster()
        launch_cluster.check_members(config)
        assert launch_cluster.read_router_knobs(config).migrates


@pytest.mark.parametrize("flags", [["--instances", "1"], ["--streams", "30"], ["--streams", "25"], ["--wave", "0"]])
def test_bad_values(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["survive"].main([*flags, "--out", str(tmp_path)]) == 2
    assert " ".join(flags) in capsys.readouterr().err


def test_the_wish_of_a_chat_is_read_behind_its_text() -> None:
    stream = make_stream(CHAT, "r", 1, random.Random(9))
    assert stream.body["messages"][0]["content"].endswith(chain.ask_text(stream.tokens))
    assert stream.body["max_tokens"] > stream.tokens
