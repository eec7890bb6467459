"""Requests that no server should serve, and what a server answers to them.

Two are missing because stock SGLang 0.5.17 has no answer to them: a token beyond the vocabulary ends its scheduler, and
an unknown sampling parameter is a status 500 with a traceback.
"""

from __future__ import annotations

import json
from typing import Any

from support.load import prompt_of
from support.serving import Client

_GREEDY = {"temperature": 0, "max_new_tokens": 4}
_CHAT = [{"role": "user", "content": "hello"}]
TOO_LONG = prompt_of(8300)  # the model's context is 8192


def _generate(**body: Any) -> tuple[str, Any]:
    return "/generate", {"input_ids": [5, 6, 7], "sampling_params": _GREEDY} | body


def _complete(**body: Any) -> tuple[str, Any]:
    return "/v1/completions", {"model": "default", "prompt": "hello", "max_tokens": 4} | body


def _chat(**body: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"model": "default", "messages": _CHAT, "max_tokens": 4} | body


# name -> path and body; bytes are sent as they are
BAD: dict[str, tuple[str, Any]] = {
    "generate: prompt over the context": _generate(input_ids=TOO_LONG),
    "generate: prompt over the context, streaming": _generate(input_ids=TOO_LONG, stream=True),
    "generate: prompt and output over the context": _generate(
        sampling_params={"temperature": 0, "max_new_tokens": 1 << 40}
    ),
    "generate: negative output": _generate(sampling_params={"max_new_tokens": -5}),
    "generate: negative temperature": _generate(sampling_params={"temperature": -1}),
    "generate: top_p": _generate(sampling_params={"top_p": 2}),
    "generate: sampling parameters of another type": _generate(sampling_params=3),
    "generate: prompt of another type": _generate(input_ids={"a": 1}),
    "generate: no prompt": ("/generate", {"sampling_params": _GREEDY}),
    "generate: empty prompt": _generate(input_ids=[]),
    "generate: text and ids": _generate(text="hello"),
    "generate: broken JSON": ("/generate", b'{"input_ids": [1, 2'),
    "generate: no object": ("/generate", b"[1, 2]"),
    "completions: prompt over the context": _complete(prompt=TOO_LONG),
    "completions: prompt over the context, streaming": _complete(prompt=TOO_LONG, stream=True),
    "completions: negative output": _complete(max_tokens=-5),
    "completions: no prompt": ("/v1/completions", {"model": "default"}),
    "completions: output of another type": _complete(max_tokens="many"),
    "completions: unknown model": _complete(model="no-such-model"),
    "completions: broken JSON": ("/v1/completions", b"{"),
    "chat: prompt over the context": _chat(messages=[{"role": "user", "content": "x" * 9000}]),
    "chat: prompt over the context, streaming": _chat(messages=[{"role": "user", "content": "x" * 9000}], stream=True),
    "chat: no messages": _chat(messages=[]),
    "chat: messages of another type": _chat(messages="hello"),
    "chat: negative output": _chat(max_tokens=-5),
    "chat: unknown model": _chat(model="no-such-model"),
    "chat: broken JSON": ("/v1/chat/completions", b"{]"),
}


def refusal(client: Client, name: str) -> tuple[int, str]:
    """Status and error message; a served request gives its status only."""
    path, body = BAD[name]
    raw = body if isinstance(body, bytes) else None
    status, answer = client.status(path, body, raw=raw)
    return status, _message(answer)


def _message(answer: Any) -> str:
    if isinstance(answer, str):  # server-sent events
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        return " ".join(_message(event) for event in events)
    if isinstance(answer, dict) and answer.get("object") == "error":
        return str(answer.get("message"))
    if isinstance(answer, dict) and "error" in answer:
        return json.dumps(answer["error"], sort_keys=True)
    return json.dumps(answer["detail"], sort_keys=True) if isinstance(answer, dict) and "detail" in answer else ""
