"""The inference paths of SGLang: which are served, how long their requests are, and what reaches an instance."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import Script
from support.relays import request_bytes, setting

from pla_sglang.fleet.router.http import json_body
from pla_sglang.fleet.router.relay.routes import PASSED_GET, PASSED_POST, ROUTES
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.inference import BY_ENDPOINT, NOT_SERVED, PATHS, find_refusal

TEXT = "x" * 78  # with quotes 80 bytes: 20 tokens by estimate
BODIES: dict[str, tuple[dict[str, Any], int, int]] = {  # body, tokens, prompts
    "/generate": ({"text": TEXT}, 20, 1),
    "/v1/completions": ({"prompt": [TEXT, TEXT]}, 40, 2),
    "/v1/chat/completions": ({"messages": [TEXT]}, 20, 1),
    "/invocations": ({"messages": [TEXT]}, 20, 1),
    "/v1/responses": ({"input": TEXT, "instructions": TEXT}, 40, 1),
    "/v1/messages": ({"system": TEXT, "messages": [TEXT], "max_tokens": 3}, 40, 1),
    "/api/chat": ({"messages": [TEXT]}, 20, 1),
    "/api/generate": ({"prompt": TEXT}, 20, 1),
    "/v1/embeddings": ({"input": [TEXT, TEXT, TEXT]}, 61, 3),
    "/encode": ({"text": [[TEXT, TEXT]]}, 40, 1),
    "/classify": ({"input_ids": [[1, 2], [3]]}, 3, 2),
    "/v1/classify": ({"input": [5, 6, 7]}, 3, 1),
    "/v1/score": ({"query": TEXT, "items": [TEXT, TEXT]}, 2 * 20 + 40, 2),
    "/v1/rerank": ({"query": TEXT, "documents": [TEXT, TEXT, TEXT]}, 3 * 20 + 61, 3),
}


def test_every_path_has_an_endpoint_of_its_own() -> None:
    assert len(BY_ENDPOINT) == len(PATHS) == len(m.Endpoint) == len(BODIES)


@pytest.mark.parametrize("path", BODIES)
def test_a_request_is_as_long_as_what_the_model_reads(path: str) -> None:
    fields, tokens, prompts = BODIES[path]
    body = json_body.read_body(json.dumps(fields).encode(), PATHS[path])
    assert abs(body.input_tokens - tokens) <= 1
    assert body.prompts == prompts
    assert body.exact_tokens is (path in ("/classify", "/v1/classify"))


def test_odd_prompts_are_measured_too() -> None:
    for value in ([], None, {"a": 1}, [{"text": "a"}], [[]], 7):
        assert json_body.read_body(json.dumps({"input": value}).encode(), PATHS["/v1/embeddings"]).prompts >= 1
    for fields in ({}, {"query": "a"}, {"items": []}, {"query": [1, 2], "items": [[3], [4]]}):
        assert json_body.read_body(json.dumps(fields).encode(), PATHS["/v1/score"]).input_tokens >= 1


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages", "/v1/score", "/encode"])
def test_nested_lists_are_not_scanned_level_by_level(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 levels around 64 MiB would hold up a relay for many seconds."""
    decode, scans = json_body._decode_list, 0

    def count(raw: Any) -> Any:
        nonlocal scans
        scans += 1
        return decode(raw)

    monkeypatch.setattr(json_body, "_decode_list", count)
    for member in PATHS[path].prompt:
        scans = 0
        nested = b'{"%s": %s"x"%s}' % (member.encode(), b"[" * 400, b"]" * 400)
        assert json_body.read_body(nested, PATHS[path]).input_tokens >= 1
        assert scans <= 2


@pytest.mark.parametrize("path", BODIES)
async def test_the_body_reaches_an_instance_as_it_is(path: str) -> None:
    """But for the request's id, where SGLang takes one under this name."""
    fields = BODIES[path][0]
    async with setting("unified") as here:
        answer = await here.ask(fields, path)
        assert answer.status == 200
        [ask] = here.control.of(m.Ask)
        assert ask.endpoint is PATHS[path].endpoint
        member = PATHS[path].rid_member
        assert here.instances[0].bodies == [fields | ({member: ask.rid} if member else {})]
        assert here.instances[0].requests[0][0].target == path.encode()
        assert answer.headers["x-request-id"] == ask.rid


async def test_a_client_that_goes_frees_the_instance() -> None:
    """By the request's id, where it has one there; else by the end of the connection."""
    for path in ("/v1/responses", "/v1/embeddings"):
        async with setting("unified", scripts={0: Script(first_s=30)}) as here:
            _, writer = await here.connect()
            writer.write(request_bytes(BODIES[path][0], path))
            await here.until(lambda: here.instances[0].held)
            writer.close()
            await here.until(lambda: not here.instances[0].held)
            [ended] = here.ended()
            assert ended.outcome is m.Outcome.CLIENT_GONE


@pytest.mark.parametrize("fields", [{"previous_response_id": "resp_1"}, {"background": True}])
async def test_what_one_instance_keeps_is_not_asked_of_another(fields: dict[str, Any]) -> None:
    async with setting("unified") as here:
        refused = await here.ask({"input": "a", **fields}, "/v1/responses")
        assert (refused.status, refused.error["type"]) == (501, "stored_response")
        assert (await here.ask({"input": "a", **dict.fromkeys(fields)}, "/v1/responses")).status == 200
        assert (await here.ask({"text": "a", **fields}, "/generate")).status == 200  # only words there


@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/v1/responses/x/cancel", *NOT_SERVED])
async def test_what_is_not_served_says_why(path: str) -> None:
    async with setting("unified") as here:
        for method in ("GET", "POST"):
            refused = await here.ask(None, path, method=method)
            assert (refused.status, refused.error["type"]) == (501, "not_served")
            assert path in refused.error["message"]
        assert here.instances[0].requests == []


@pytest.mark.parametrize("path", PASSED_POST)
async def test_the_tokenizers_work_is_any_instances(path: str) -> None:
    """Pairs do it as well, and it is no request of the policy."""
    async with setting("prefill", "decode") as here:
        await here.ask({"bootstrap_room": 1, "rid": "r", "prompt": "a"}, path)
        assert [len(one.requests) for one in here.instances] in ([1, 0], [0, 1])
        assert here.control.of(m.Ask) == []


# Of the instance's operators, or of nobody's use behind a router.
CLOSED = re.compile(
    r"/(get_|set_|dumper|flush|add_ext|remove_ext|list_ext|clear_|hicache|start_|stop_|freeze|dump_|update_|init_|send_"
    r"|remote_|destroy_|release_|resume_|weights_|weight_|slow_|load_|unload_|open_session|close_session|configure_"
    r"|abort_|pause_|continue_|begin_|end_|pd_role_switch|ping|api/tags|api/show|health|ready|$)"
)


def test_no_path_of_sglang_is_forgotten() -> None:
    """Each is served, refused with a reason, or an operator's."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("reads SGLang's source")
    source = Path(next(iter(spec.submodule_search_locations)), "srt/entrypoints/http_server.py").read_text()
    route = r'@app\.(?:get|post|api_route|websocket)\(\s*(?:os\.environ\.get\("\w+", )?"(/[^"]*)"'
    found = set(re.findall(route, source))
    assert len(found) > 80
    served = {*ROUTES, *PASSED_GET, "/v1/models/{model:path}"}
    forgotten = {path for path in found - served if not CLOSED.match(path) and find_refusal(path) is None}
    assert forgotten == set()
    assert not {path for path in served & found if CLOSED.match(path)} - {
        *("/get_model_info", "/get_server_info", "/health", "/health_generate"),
    }
