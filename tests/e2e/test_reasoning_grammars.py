"""Grammars with ``--reasoning-parser`` on the CPU platform: nothing is forced while a model thinks, all of it after."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.hop_commands import redo

from pla_sglang.sim import chain
from pla_sglang.testing.server import Server

pytestmark = pytest.mark.e2e

# The chain model repeats the end of its prompt: a thought, and a text that the grammar does not allow.
THOUGHT, REST, TOKENS = "Zmh, let me see </think>", "zzzz", 60
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
GRAMMARS = {
    "regex": ({"regex": "(ab|cd){2,3}"}, "(ab|cd){2,3}"),
    "schema": ({"json_schema": json.dumps(SCHEMA)}, r'\{"a": ?[12]\}'),
}
FLAGS = (
    *("--pla-emulate", "linear", "--pla-time-scale", "0.1", "--prefill-disagg", "temporal", "--enable-mixed-chunk"),
    *("--reasoning-parser", "qwen3", "--tool-call-parser", "glm45", "--log-level", "warning"),
    *("--json-model-override-args", json.dumps({"chain_answers": "text"}), "--constrained-json-disable-any-whitespace"),
)
STATELESS = ("--pla-stateless", "--disaggregation-transfer-backend", "nixl")


@pytest.fixture(scope="module", params=["temporal", "stateless"])
def server(
    request: pytest.FixtureRequest, forked: Callable[..., Server], serving: Callable[..., Any]
) -> Iterator[Server]:
    if request.param == "stateless":
        pytest.importorskip("nixl", reason="KV transfer needs NIXL")
    flags = FLAGS + (STATELESS if request.param == "stateless" else ())
    made = forked(None, flags, module="pla_sglang.launch_server")
    with serving(made):
        yield made


def wish() -> str:
    said = THOUGHT + REST
    return said + chain.ask_text(len(said.encode()) + 1)


def thinking(grammar: dict[str, str]) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": TOKENS, **grammar}
    return {"text": wish(), "sampling_params": params, "require_reasoning": True}


@pytest.mark.parametrize(("grammar", "wanted"), GRAMMARS.values(), ids=GRAMMARS)
def test_a_grammar_begins_behind_the_thought(server: Server, grammar: dict[str, str], wanted: str) -> None:
    body = thinking(grammar)
    text = server.post("/generate", body)["text"]
    assert text.startswith(THOUGHT)
    assert re.fullmatch(wanted, text.removeprefix(THOUGHT)), text
    assert list(server.stream("/generate", body))[-1]["text"] == text
    text = server.post("/generate", body | {"require_reasoning": False})["text"]
    assert re.fullmatch(wanted, text), text


@pytest.mark.parametrize(("grammar", "wanted"), GRAMMARS.values(), ids=GRAMMARS)
def test_an_answer_that_is_computed_again_is_where_it_was(server: Server, grammar: dict[str, str], wanted: str) -> None:
    """In its thought, at its end, and in what the grammar forces: the tokens so far come with the request."""
    if "--pla-stateless" not in server._command:
        pytest.skip("only a stateless instance takes an answer that began elsewhere")
    body = thinking(grammar)
    whole = server.post("/generate", body)["output_ids"]
    cuts = (1, 5, len(THOUGHT) - 1, len(THOUGHT), len(THOUGHT) + 1, len(whole) - 1)
    for cut in cuts:
        params = redo(whole[:cut], TOKENS, ignore_eos=False, **grammar)
        assert server.post("/generate", body | {"sampling_params": params})["output_ids"] == whole, cut


def test_chats(server: Server) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": wish()}], "temperature": 0, "max_tokens": TOKENS}
    response = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    [choice] = server.post("/v1/chat/completions", body | {"response_format": response})["choices"]
    message = choice["message"]
    assert message["reasoning_content"].strip() == THOUGHT.removesuffix("</think>").strip()
    assert json.loads(message["content"]) in ({"a": 1}, {"a": 2})
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    [choice] = server.post("/v1/chat/completions", body | {"tools": [tool], "tool_choice": "required"})["choices"]
    message = choice["message"]
    assert message["reasoning_content"].strip() == THOUGHT.removesuffix("</think>").strip()
    # SGLang's grammar for tools allows members behind these, and this model goes on with them to its last token.
    assert re.match(r'\[\{"name":"f","parameters":\{"a":[12]\}', message["content"]), message
    deltas = [
        event["choices"][0]["delta"]
        for event in server.stream("/v1/chat/completions", body | {"response_format": response})
        if event["choices"]
    ]
    assert json.loads("".join(delta.get("content") or "" for delta in deltas)) in ({"a": 1}, {"a": 2})
