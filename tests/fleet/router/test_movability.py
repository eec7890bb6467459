"""Which requests can go on elsewhere, and how the router's tags get into their bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pla_sglang.fleet.router.http.json_body import LONG_BYTES, read_body
from pla_sglang.fleet.router.relay.movability import Tags, Unmovable, judge_request
from pla_sglang.fleet.router.wire.inference import PATHS
from pla_sglang.fleet.router.wire.messages import Ask, Endpoint

TEXT = {"role": "user", "content": "hello"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}
SAID = {"role": "user", "content": 'an "image_url" in words'}


def judge(path: str, raw: bytes) -> Tags | Unmovable:
    body = read_body(raw, PATHS[path])
    ask = Ask(
        *("r", 0, PATHS[path].endpoint, body.stream, 0.0, len(raw), body.input_tokens),
        prompts=body.prompts,
        samples=body.samples,
    )
    return judge_request(ask, body, raw)


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("/generate", {"text": ["a"]}, Unmovable.BATCH),
        ("/generate", {"input_ids": [[1, 2]]}, Unmovable.BATCH),
        ("/generate", {"text": ["a", "b"]}, Unmovable.BATCH),
        ("/generate", {"text": "a", "rid": ["x"]}, Unmovable.BATCH),
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}, Unmovable.SAMPLES),
        ("/generate", {"text": "a", "image_data": "x"}, Unmovable.MULTIMODAL),
        ("/generate", {"text": "a", "session_params": {"id": "s"}}, Unmovable.SESSION),
        ("/generate", {"text": "a", "return_logprob": True}, Unmovable.LOGPROBS),
        ("/generate", {"text": "a", "return_hidden_states": True}, Unmovable.HIDDEN_STATES),
        ("/generate", {"input_embeds": [[0.5]]}, Unmovable.EMBEDDINGS),
        ("/generate", {"text": "a", "sampling_params": "x"}, Unmovable.BODY),
        ("/generate", {"text": "a", "sampling_params": {"custom_params": [1]}}, Unmovable.BODY),
        ("/v1/completions", {"prompt": ["a"]}, Unmovable.BATCH),
        ("/v1/completions", {"prompt": "a", "logprobs": 2}, Unmovable.LOGPROBS),
        ("/v1/chat/completions", {"messages": [TEXT], "logprobs": True}, Unmovable.LOGPROBS),
        ("/v1/chat/completions", {"messages": [TEXT], "n": 3}, Unmovable.SAMPLES),
        ("/v1/chat/completions", {"messages": [IMAGE]}, Unmovable.MULTIMODAL),
        ("/v1/chat/completions", {"messages": [{"content": "x" * (1 << 20)}]}, Unmovable.SIZE),
        ("/v1/messages", {"messages": [TEXT]}, Unmovable.ENDPOINT),
        ("/v1/embeddings", {"input": "x"}, Unmovable.ENDPOINT),
    ],
)
def test_what_cannot_move(path: str, fields: dict[str, Any], reason: Unmovable) -> None:
    assert judge(path, json.dumps(fields).encode()) is reason


MOVABLE: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "a"}),
    ("/generate", {"input_ids": [1, 2, 3], "stream": True}),
    ("/generate", {"input_ids": list(range(LONG_BYTES)), "sampling_params": {"max_new_tokens": 3}}),
    ("/generate", {"text": "a", "sampling_params": {}}),
    ("/generate", {"text": "a", "sampling_params": None}),
    ("/generate", {"text": "a", "sampling_params": {"custom_params": None, "top_k": 1}}),
    ("/generate", {"sampling_params": {"custom_params": {"mine": 1}, "top_k": 1}, "text": "a"}),
    ("/generate", {"text": "a", "return_logprob": False, "image_data": None}),
    ("/v1/completions", {"prompt": [5, 6], "logprobs": None}),
    ("/v1/chat/completions", {"messages": [SAID]}),
    ("/v1/chat/completions", {"messages": [TEXT], "custom_params": {"pla_slo_ttft_ms": 5}, "tail": 1}),
    ("/v1/chat/completions", {"messages": [TEXT], "custom_params": {}}),
    ("/v1/chat/completions", {}),
]


@pytest.mark.parametrize(("path", "fields"), MOVABLE)
@pytest.mark.parametrize("indent", [None, 2])
def test_tags_come_on_top_of_what_the_client_has_written(path: str, fields: dict[str, Any], indent: int | None) -> None:
    raw = json.dumps(fields, indent=indent).encode() + b"\n"
    judged = judge(path, raw)
    assert isinstance(judged, Tags)
    tags = {"pla_movable": 1, "pla_seen": 'c"1', "pla_tokens": [1, 2]}
    front, body = judged._replace(members=json.dumps(tags)[1:-1].encode()).put_into(raw)
    text = body.lstrip()
    sent = json.loads(b"{" + front + (b"," if front and fields else b"") + text[1:])  # of two alike the last one counts
    wanted = json.loads(raw)
    if path == "/generate":
        params = wanted["sampling_params"] = wanted.get("sampling_params") or {}
        params["custom_params"] = (params.get("custom_params") or {}) | tags
    else:
        wanted["custom_params"] = (wanted.get("custom_params") or {}) | tags
    assert sent == wanted


@pytest.mark.parametrize(
    ("options", "wants"),
    [(None, False), ({}, False), ({"include_usage": True}, True), ({"include_usage": False}, False)],
)
def test_whether_usage_comes_at_the_end(options: dict[str, Any] | None, wants: bool) -> None:
    judged = judge("/v1/chat/completions", json.dumps({"messages": [TEXT], "stream_options": options}).encode())
    assert isinstance(judged, Tags)
    assert judged.wants_usage is wants


def test_every_path_that_generates_was_thought_of() -> None:
    movable = {Endpoint.GENERATE, Endpoint.COMPLETIONS, Endpoint.CHAT}
    for path, known in PATHS.items():
        raw = json.dumps({known.prompt[0]: "x", **({"items": ["y"]} if known.each_item else {})}).encode()
        if known.each_item:
            raw = json.dumps({name: ["x"] if name == known.prompt[1] else "x" for name in known.prompt}).encode()
        assert isinstance(judge(path, raw), Tags) == (known.endpoint in movable), path
