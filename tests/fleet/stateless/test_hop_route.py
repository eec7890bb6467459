"""The route ``/generate`` around SGLang's own, through its real app."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from fleet.stateless.splice_scene import GENERATE, Instance, Received, Script, body_of, load_tokenizer, read_answer
from sglang.srt.entrypoints import http_server

from pla_sglang.fleet.stateless.requests.streams import replace_generate_route
from pla_sglang.sim.chain import model_path

pytestmark = pytest.mark.usefixtures("published")

TEXT = "ab 🚲 é"


@pytest.fixture
def instance(monkeypatch: pytest.MonkeyPatch) -> Instance:
    tokenizer = load_tokenizer(model_path())
    made = Instance(model_path(), Script(answer=[*tokenizer.encode(TEXT), tokenizer.eos_token_id]))
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=made.manager))
    monkeypatch.setattr(made.manager, "create_abort_task", lambda obj: None)
    return made


@pytest.fixture
def client(instance: Instance) -> TestClient:
    app = FastAPI()
    app.router.routes = copy.copy(http_server.app.router.routes)
    count = len(app.router.routes)
    replace_generate_route(app)
    assert len(app.router.routes) == count
    return TestClient(app)


def test_streams_are_marked_and_whole_answers_are_the_hosts(client: TestClient) -> None:
    for method in (client.post, client.put):
        whole = method("/generate", json={**body_of(GENERATE, "w"), "stream": False})
        assert (whole.status_code, whole.json()["text"]) == (200, TEXT)
    marked = client.post("/generate", json=body_of(GENERATE, "r", {"pla_movable": 1})).text
    plain = client.post("/generate", json=body_of(GENERATE, "r")).text
    assert ": pla" not in plain
    assert "".join(line for line in marked.splitlines(keepends=True) if not line.startswith(": pla")) == plain


def test_a_continuation_is_answered_with_its_first_token_or_with_a_status(client: TestClient) -> None:
    received = Received()
    for part in client.post("/generate", json=body_of(GENERATE, "r", {"pla_movable": 1})).text.split("\n\n")[:3]:
        received.take(part + "\n\n")
    tags = received.continuation("r")
    answer = client.post("/generate", json=body_of(GENERATE, "pla-2~r", tags))
    assert answer.status_code == 200
    for part in answer.text.split("\n\n")[:-1]:
        received.take(part + "\n\n")
    got = read_answer(GENERATE, received.events, incremental=False)
    assert (got.text, got.ids, got.done) == (TEXT, {"r"}, 1)
    refused = client.post("/generate", json=body_of(GENERATE, "pla-3~r", {**tags, "pla_prompt": "1:0"}))
    assert refused.status_code == 409
    assert "differ" in refused.text


@pytest.mark.parametrize(
    ("custom", "named"), [({"pla_tokens": [1], "pla_seen": 7}, "pla_seen"), ({"pla_tokens": "1"}, "pla_tokens")]
)
def test_bad_tags_are_400(client: TestClient, instance: Instance, custom: dict[str, object], named: str) -> None:
    answer = client.post("/generate", json=body_of(GENERATE, "r", custom))
    assert (answer.status_code, named in answer.text, instance.manager.dispatched) == (400, True, [])
