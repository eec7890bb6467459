"""The inference paths besides /generate on a real engine behind our router."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2e.test_router_relays import FLAGS, PATIENCE_S, words_of

from pla_sglang.sim import chain
from pla_sglang.testing.server import HttpError, open_url

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, forked_cluster: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    router = ("--router", "pla", "--policy", "minimal-load")
    with forked_cluster(tmp_path_factory.mktemp("paths"), *FLAGS, "--unified", "1", *router) as described:
        yield described


def post(cluster: dict[str, Any], path: str, body: dict[str, Any]) -> tuple[int, str, str]:
    """Status, the request's id at the router, and the body."""
    headers = {"content-type": "application/json"}
    try:
        with open_url(
            cluster["url"] + path, json.dumps(body).encode(), headers=headers, timeout_s=PATIENCE_S
        ) as answer:
            return answer.status, answer.headers["x-request-id"], answer.read().decode()
    except HttpError as error:
        return error.status, "", error.body


MODEL = {"model": "chain"}
TURN = [{"role": "user", "content": "a b c"}]


def test_responses_and_messages(cluster: dict[str, Any]) -> None:
    with open_url(f"{cluster['url']}/v1/models", timeout_s=PATIENCE_S) as answered:
        [model] = json.loads(answered.read())["data"]
    for stream in (False, True):
        # Later versions answer at this path, and only here, with 404 to another name than the model's.
        body = {"model": model["id"], "input": "a b c", "max_output_tokens": 4, "stream": stream}
        status, rid, answer = post(cluster, "/v1/responses", body)
        assert status == 200, answer
        assert rid in answer, "the answer has the id that the router has given"
        # An answer that ends at max_output_tokens is "incomplete" for later versions.
        assert any(f'"response.{how}"' in answer for how in ("completed", "incomplete")) is stream
        body = MODEL | {"messages": TURN, "max_tokens": 4, "stream": stream}
        status, _, answer = post(cluster, "/v1/messages", body)
        assert status == 200, answer
        assert ("message_stop" in answer) is stream


def test_scores_are_read_off_the_prefill(cluster: dict[str, Any]) -> None:
    body = {"query": [5, 6, 7], "items": [[8], [9]], "label_token_ids": [10, 11], "apply_softmax": True}
    status, rid, answer = post(cluster, "/v1/score", MODEL | body)
    assert status == 200, answer
    assert len(json.loads(answer)["scores"]) == 2
    with open_url(f"{cluster['url']}/pla/explain/{rid}", timeout_s=PATIENCE_S) as explained:
        assert json.loads(explained.read())["end"] == "finished"


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/tokenize", {"prompt": "a b"}), ("/v1/detokenize", {"tokens": [5, 6]})]
)
def test_the_tokenizer(cluster: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    status, _, answer = post(cluster, path, MODEL | body)
    assert status == 200, answer


def test_what_the_model_cannot_do_the_instance_says(cluster: dict[str, Any]) -> None:
    """The model generates: its server refuses embeddings, and the next request is served."""
    status, _, answer = post(cluster, "/v1/embeddings", MODEL | {"input": "a b"})
    assert 400 <= status < 600
    assert "not_found" not in answer
    assert post(cluster, "/v1/chat/completions", MODEL | {"messages": TURN, "max_tokens": 2})[0] == 200


def test_a_unified_instance_gives_several_samples(cluster: dict[str, Any]) -> None:
    from openai import OpenAI

    prompt = chain.prompt_of(50, 8, random.Random(3))
    words = words_of(prompt, 20)
    with OpenAI(base_url=cluster["url"] + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        model = client.models.list().data[0].id
        whole = client.completions.create(model=model, prompt=prompt, max_tokens=20, temperature=0, n=3)
        assert [choice.text for choice in whole.choices] == [words] * 3
        texts = ["", ""]
        for part in client.completions.create(
            model=model, prompt=prompt, max_tokens=20, temperature=0, n=2, stream=True
        ):
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts == [words] * 2
