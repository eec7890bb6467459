"""One request ends no engine: known killers of each kind, alone and beside a stream whose answer must stay right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.serving import Client, Prompt, outputs

from pla_sglang.testing.server import Server

pytestmark = pytest.mark.e2e

PROMPT: Prompt = [5, 6, 7, 8, 9]
TOKENS = 40
_rooms = itertools.count(1)


def generate(**body: Any) -> tuple[str, dict[str, Any]]:
    prompt = {} if body.keys() & {"text", "input_ids"} else {"input_ids": PROMPT}
    return "/generate", {"sampling_params": {"max_new_tokens": 3}, **prompt, **body}


def sample(**params: Any) -> tuple[str, dict[str, Any]]:
    return generate(sampling_params={"max_new_tokens": 3, **params})


KILLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "empty prompt in a batch": generate(input_ids=[[]]),
    "empty prompt beside another": generate(input_ids=[PROMPT, []]),
    "bias as list": sample(logit_bias=[1]),
    "bias beyond float32": sample(logit_bias={"5": 1e39}),
    "top logprobs": generate(return_logprob=True, top_logprobs_num=1_000_000),
    "embeds of the host's": generate(positional_embed_overrides=2.5),
    "grammar as list": sample(regex=[5]),
    "top_k": sample(top_k=2**31),
    "min_new_tokens": sample(min_new_tokens=2**31, max_new_tokens=None),
    "stop tokens": sample(stop_token_ids=[10**6], min_new_tokens=2),
    "stop pattern": sample(stop_regex="(?<=a+)b"),
    "a number for a bool": sample(skip_special_tokens=0),
    "key": generate(extra_key={"a": 1}),
    "samples": sample(n=10**9),
    "completions: top logprobs": ("/v1/completions", {"model": "default", "prompt": "a", "logprobs": 10**6}),
}


@pytest.fixture(scope="module")
def client(
    tiny_model: Callable[[str], Path], forked: Callable[..., Server], serving: Callable[..., Any]
) -> Iterator[Client]:
    flags = ("--device", "cpu", "--prefill-disagg", "temporal", "--enable-mixed-chunk", "--chunked-prefill-size", "64")
    server = forked(tiny_model("float32"), flags, module="pla_sglang.launch_server")
    with serving(server):
        yield Client(server)


def test_killers_are_refused_alone_and_beside_a_stream(client: Client) -> None:
    alone = client.ask(PROMPT, TOKENS)["output_ids"]
    for beside in (False, True):
        for name, (path, body) in KILLERS.items():
            running: list[Future[dict[str, Any]]] = [client.submit(PROMPT, TOKENS)] if beside else []
            status, answer = client.status(path, body)
            assert status in (400, 422), (name, status, answer)
            assert outputs(running) == [alone] * len(running), name
    assert client.ask(PROMPT, TOKENS)["output_ids"] == alone
    assert client.server.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_chats_in_the_form_of_ollama(client: Client, stream: bool) -> None:
    """SGLang 0.5.17 alone cannot: transformers 5 gives it a mapping in place of the prompt's ids."""
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "default", "messages": messages, "options": {"num_predict": 4}, "stream": stream}
    status, answer = client.status("/api/chat", body)
    assert status == 200, answer
    assert "message" in (answer if isinstance(answer, dict) else str(answer))


def test_scores_beside_a_stream(client: Client) -> None:
    """SGLang alone ends here: its list for the stream, which asks for no token ids, has no ``tolist``."""
    alone = client.ask(PROMPT, TOKENS)["output_ids"]
    score = {"model": "default", "query": "a", "items": ["b"], "label_token_ids": [1, 2]}
    lone = client.status("/v1/score", score)
    assert lone[0] == 200
    for _ in range(3):
        running = client.submit(PROMPT, 200)
        beside = client.status("/v1/score", score)
        assert beside[0] == 200, beside
        assert beside[1]["scores"][0] == pytest.approx(lone[1]["scores"][0], abs=1e-4)
        asked = client.status(*generate(return_logprob=True, token_ids_logprob=[1, 2]))
        assert asked[0] == 200
        assert len(asked[1]["meta_info"]["output_token_ids_logprobs"][0]) == 2
        assert running.result(60)["output_ids"][:TOKENS] == alone


def test_an_embedding_engine_generates_nothing(
    tiny_model: Callable[[str], Path], forked: Callable[..., Server], serving: Callable[..., Any]
) -> None:
    flags = ("--device", "cpu", "--prefill-disagg", "temporal", "--is-embedding")
    server = forked(tiny_model("float32"), flags, module="pla_sglang.launch_server")
    embed = ("/v1/embeddings", {"model": "default", "input": "hello"})
    chat = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    with serving(server):
        one = Client(server)
        first = one.status(*embed)
        assert first[0] == 200
        for path, body in (("/v1/chat/completions", chat), generate(), generate(input_ids=[[5], [6]])):
            status, answer = one.status(path, body)
            assert status == 400, answer
            assert "serves an embedding model" in str(answer)
        assert one.status("/encode", {"input_ids": [[5], []]})[0] == 400
        assert one.status(*embed)[1]["data"][0]["embedding"] == pytest.approx(
            first[1]["data"][0]["embedding"], abs=1e-5
        )


def test_a_pair_lives_on(
    tiny_model: Callable[[str], Path], forked: Callable[..., Server], serving: Callable[..., Any]
) -> None:
    pytest.importorskip("nixl", reason="PD disaggregation needs NIXL")
    common = ("--device", "cpu", "--disaggregation-transfer-backend", "nixl")
    prefill, decode = (
        forked(
            tiny_model("float32"),
            (*common, "--disaggregation-mode", mode, *(("--prefill-disagg", "temporal") if mode == "prefill" else ())),
            module="pla_sglang.launch_server",
        )
        for mode in ("prefill", "decode")
    )
    with serving(prefill, decode):
        clients = (Client(prefill), Client(decode))

        def room() -> dict[str, Any]:
            named = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port}
            return {**named, "bootstrap_room": next(_rooms)}

        def ask() -> list[int]:
            members = room()
            legs = [one.submit(PROMPT, TOKENS, **members) for one in clients]
            return outputs(legs)[1]

        alone = ask()
        for path, body in (generate(session_params={"id": "s"}), sample(n=2), generate(input_ids=[[]])):
            statuses = [one.status(path, {**body, **room()})[0] for one in clients]
            assert statuses == [400, 400], body
            assert ask() == alone
        used = room()
        assert outputs([one.submit(PROMPT, TOKENS, **used) for one in clients])[1] == alone
        assert [one.status("/generate", {**generate()[1], **used})[0] for one in clients] == [400, 400]
        assert ask() == alone
