"""What is taken for a secret, and that none gets through where a server or a router speaks of itself."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pla_sglang.common.secret_names import HIDDEN, hide_arguments, hide_in_text, hide_secrets, is_secret_name
from pla_sglang.fleet.router.control.workers.discovery import describe
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.control.workers.instance_client import quote_response
from pla_sglang.fleet.router.http import instance_facts
from pla_sglang.fleet.router.http.instance_facts import FACTS, answer_about_instance

MARK = "MARK0f1e2d3c"
SECRET_NAMES = (
    *(
        "api_key",
        "admin_api_key",
        "apikey",
        "apiKey",
        "X-Api-Key",
        "key",
        "ssl_keyfile_password",
        "HF_TOKEN",
        "hfToken",
    ),
    *(
        "token",
        "auth_token",
        "access_tokens",
        "client_secret",
        "secretKey",
        "AWS_SECRET_ACCESS_KEY",
        "password",
        "passwd",
    ),
    *("credentials", "Authorization", "basic_auth", "api_key_2", "aws_access_key_id", "session_cookie", "api_keys"),
)
HARMLESS = (
    *(
        "model_path",
        "tokenizer_path",
        "max_total_num_tokens",
        "tokenizer_mode",
        "skip_tokenizer_init",
        "token_capacity",
    ),
    *("bucket_time_to_first_token", "kt_max_deferred_experts_per_token", "num_reserved_decode_tokens", "ssl_keyfile"),
    *("decrypted_config_file", "speculative_num_draft_tokens", "keep_mm_feature_on_device", "api_key_file", "version"),
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", HARMLESS)
def test_other_names(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        f'{{"hf": {{"auth_token": "{MARK}"}}}}',
        f'{{"auth_token": "{MARK}"',  # damaged
        f"https://user:{MARK}@host/path",
        f"https://host/path?X-Amz-Signature={MARK}&a=1",
        f"serve --api-key {MARK} --port 1",
        f"serve --admin-api-key={MARK}",
        f"A=1 HF_TOKEN={MARK}",
        f"Authorization: Bearer {MARK}",
        f"api_key: {MARK}",
    ],
)
def test_texts_that_hold_a_secret(text: str) -> None:
    shown = hide_in_text(text)
    assert MARK not in shown
    assert HIDDEN in shown
    assert hide_in_text(shown) == shown


@pytest.mark.parametrize(
    "text", ["/models/a", "https://host:80/path?a=1", '{"a": 1,  "b": [2]}', "a = b", "--port 1", ""]
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert hide_in_text(text) == text


def test_arguments() -> None:
    given_ = ["--port", "1", "--api-key", MARK, "--admin-api-k", MARK, "--ssl-keyfile", "f", f"--api-key={MARK}"]
    shown = hide_arguments([*given_, "--api-key-file", "/run/key"])
    assert MARK not in " ".join(shown)
    assert shown[:2] + shown[6:8] + shown[9:] == ["--port", "1", "--ssl-keyfile", "f", "--api-key-file", "/run/key"]


def test_what_is_unset_or_a_figure_stays() -> None:
    unset = {"api_key": None, "admin_api_key": "", "is_secret": False, "bucket_time_to_first_token": [0.1], "n": 3}
    assert hide_secrets(unset) == unset


names = st.sampled_from(SECRET_NAMES)
plain = st.none() | st.booleans() | st.integers() | st.text("abc {}[]\"':=-/@", max_size=9)
anything = st.recursive(
    plain | names.map(lambda name: {name: MARK}) | names.map(lambda name: json.dumps({"x": {name: [MARK]}})),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(HARMLESS), inner, max_size=3)
        | st.dictionaries(names, st.just(MARK) | st.just([MARK]) | st.just({"x": MARK}), max_size=2)
    ),
    max_leaves=12,
)
# Members that the lists allow, others, and secrets, at every depth that the lists know.
every_name = st.sampled_from(
    sorted({*instance_facts.SERVER_INFO, *instance_facts.MODEL_INFO, *HARMLESS, *SECRET_NAMES})
)


@st.composite
def infos(draw: st.DrawFn) -> dict[str, Any]:
    info = draw(st.dictionaries(every_name, anything, max_size=6))
    info = {name: MARK if is_secret_name(name) else value for name, value in info.items()}
    if draw(st.booleans()):
        info["internal_states"] = [draw(infos())]
    return info


@settings(max_examples=100, deadline=None)
@given(infos())
def test_no_secret_of_an_engine_gets_out(info: dict[str, Any]) -> None:
    assert MARK not in json.dumps(hide_secrets(info))


@settings(max_examples=100, deadline=None)
@given(infos(), st.sampled_from([*FACTS, "/v1/models/x"]), st.sampled_from([200, 400, 404, 422, 500, 503]))
def test_no_secret_gets_through_the_router(info: dict[str, Any], path: str, status: int) -> None:
    body = msgspec.json.encode({**info, "data": [info], "error": info})
    answered, shown = answer_about_instance(path, status, body)
    assert MARK not in shown.decode()
    assert answered == status
    assert isinstance(json.loads(shown), dict)


def test_lists_of_allowed_members_have_no_secrets_name() -> None:
    def names_in(allowed: instance_facts.Allowed) -> list[str]:
        return [*allowed, *(name for inner in allowed.values() if inner for name in names_in(inner))]

    every = [name for allowed in (*FACTS.values(), instance_facts.ERROR) for name in names_in(allowed)]
    assert [name for name in every if is_secret_name(name)] == []


def test_a_secrets_name_on_the_list_is_left_out_all_the_same() -> None:
    allowed: instance_facts.Allowed = {"api_key": None, "hf_token": {"x": None}, "version": None}
    assert instance_facts.keep_allowed({"api_key": MARK, "hf_token": {"x": 1}, "version": "1"}, allowed) == {
        "version": "1"
    }


def test_tools_of_sglang_find_what_they_read() -> None:
    """bench_serving, bench_one_batch_server: these members, as an instance has them."""
    state = {"avg_spec_accept_length": 2.5, "last_gen_throughput": 9.5, "effective_max_running_requests_per_dp": 8}
    state |= {"dp_size": 1, "memory_usage": {"token_capacity": 100}}
    info = {"tokenizer_path": "/m", "model_path": "/m", "version": "0.5.17", "internal_states": [state]}
    status, shown = answer_about_instance("/server_info", 200, msgspec.json.encode({**info, "api_key": MARK}))
    assert (status, json.loads(shown)) == (200, info)


@pytest.mark.parametrize("body", [b"", b"<html>" + MARK.encode(), b"[1]", b'{"a": NaN}', b"[" * 5000, b"\xff"])
@pytest.mark.parametrize("status", [200, 500, 299, 302])
def test_answers_that_are_no_json_object_are_not_passed_on(body: bytes, status: int) -> None:
    answered, shown = answer_about_instance("/server_info", status, body)
    assert answered == (500 if status == 500 else 502)
    assert json.loads(shown)["error"]["type"] == "upstream_answer"
    assert MARK not in shown.decode()


def test_what_the_control_plane_says_of_a_strange_answer_does_not_quote_it() -> None:
    with pytest.raises(WorkerError, match="not as expected: ValueError") as raised:
        describe({"disaggregation_mode": "null", "host": "h", "port": 1, "max_total_num_tokens": MARK})
    assert MARK not in str(raised.value)


@pytest.mark.parametrize("body", [f'{{"input":{{"router_key":"{MARK}"}}}}', f"no such user: {MARK}"])
def test_an_instance_that_repeats_a_key_is_quoted_without(body: str) -> None:
    assert MARK not in quote_response(body.encode(), "", MARK)
