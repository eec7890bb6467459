"""Request bodies: what is read of them, what is refused, and that putting members in front changes nothing else."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.fleet.router.http import json_body as b
from pla_sglang.fleet.router.http.head import BadMessage
from pla_sglang.fleet.router.wire.inference import PATHS
from pla_sglang.fleet.router.wire.rids import rid_at_instance

BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": ({"text": "x" * 78}, {"input_tokens": 20, "exact_tokens": False}),
    "ids": ({"input_ids": [1, 2, 3]}, {"input_tokens": 3, "exact_tokens": True, "prompts": 1}),
    "ids in a batch": ({"input_ids": [[1, 2], [3]]}, {"input_tokens": 3, "exact_tokens": True, "prompts": 2}),
    "texts": ({"text": ["a" * 38, "b" * 38]}, {"input_tokens": 20, "prompts": 2}),
    "prompt": ({"prompt": [5] * 7, "max_tokens": 9}, {"input_tokens": 7, "output_tokens": 9}),
    "chat": ({"messages": [], "max_completion_tokens": 5, "n": 3}, {"output_tokens": 5, "samples": 3}),
    "stream": ({"text": "", "stream": True, "priority": 4}, {"stream": True, "priority": 4}),
    "params": ({"sampling_params": {"n": 2, "max_new_tokens": 8}}, {"samples": 2, "output_tokens": 8}),
    "rid": ({"rid": "mine"}, {"rid": "mine", "rids": ()}),
    "rids": ({"rid": ["a", "b"], "text": ["x", "y"]}, {"rid": None, "rids": ("a", "b"), "prompts": 2}),
    "a rid that is null": ({"rid": None}, {"rid": None, "rids": (), "null_rid": True}),
    "a priority below 0": ({"priority": -3}, {"priority": -3}),
    "a priority that is none": ({"priority": "-"}, {"priority": None}),
    "nothing": ({}, {"null_rid": False, "input_tokens": 1, "rid": None, "rids": (), "stream": False}),
    "odd types are the instance's matter": (
        {"stream": "yes", "n": [2], "max_tokens": -1},
        {"stream": False, "samples": 1},
    ),
    "n as a text": ({"n": " 2"}, {"samples": 2}),
    "n as a float": ({"sampling_params": {"n": 2.0}}, {"samples": 2}),
    "n that is none": ({"n": None, "sampling_params": {"n": "many"}}, {"samples": 1}),
    "n that is endless": ({"n": "inf"}, {"samples": 1}),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_read(name: str) -> None:
    fields, expected = BODIES[name]
    found = b.read_body(json.dumps(fields, indent=1).encode())
    assert {key: getattr(found, key) for key in expected} == expected


RESERVED = [
    *({name: 1} for name in b.RESERVED_FIELDS),
    {"custom_params": {"pla_recv": [1]}},
    {"sampling_params": {"custom_params": {"pla_tokens": [1]}}},
    {"sampling_params": [{}, {"custom_params": {"pla_attach": 1}}]},
    {"rid": "pla-123"},
    {"rid": "pl"},
    {"rid": ["longer", "pla-"]},
]


@pytest.mark.parametrize("fields", RESERVED, ids=json.dumps)
@pytest.mark.parametrize("escaped", [False, True])
def test_what_only_the_router_sets(fields: Any, escaped: bool) -> None:
    text = json.dumps({"text": "x", **fields})
    if escaped:  # the same names in other bytes
        text = text.replace("_", "\\u005f").replace('"pl', '"\\u0070l')
        assert json.loads(text) == {"text": "x", **fields}
    with pytest.raises(BadMessage) as caught:
        b.read_body(text.encode())
    assert caught.value.reason == "reserved_field"


@pytest.mark.parametrize(
    "fields", [{"text": '"bootstrap_host": 1'}, {"x": {"bootstrap_host": 1}}, {"custom_params": {"a": 1}}]
)
def test_the_same_words_elsewhere_are_allowed(fields: Any) -> None:
    b.read_body(json.dumps(fields).encode())


@pytest.mark.parametrize("rid", ["", "a b", "a\r\nx-pla-evil: 1", "\u00e9", "x" * 129, 7, ["ok", "no\n"]])
def test_a_rid_that_could_end_a_header_is_refused(rid: Any) -> None:
    with pytest.raises(BadMessage, match="visible ASCII"):
        b.read_body(json.dumps({"rid": rid}).encode())


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("name", ["x", "rid", "n", "sampling_params", "priority", "prompt"])
def test_what_is_nested_too_deeply(name: str) -> None:
    with pytest.raises(BadMessage, match="nested too deeply"):
        b.read_body(b'{"%s":%s}' % (name.encode(), DEEP))


@pytest.mark.parametrize("raw", [b"", b"[]", b"3", b"{", b'{"a":}', b'{"a":1}x', b'{"rid":""}'])
def test_what_is_no_json_object(raw: bytes) -> None:
    with pytest.raises(BadMessage):
        b.read_body(raw)


def test_long_arrays_are_cut_out_and_nothing_else() -> None:
    rng = random.Random(1)
    ids = [rng.randrange(150_000) for _ in range(6_000)]
    raw = json.dumps({"input_ids": ids, "stream": True, "max_tokens": 3}).encode()
    short, cut = b.cut_ids(raw)
    assert len(short) < 100
    assert cut == b.CutIds(len(ids), exact=True)
    found = b.read_body(raw)
    assert (found.input_tokens, found.exact_tokens) == (len(ids), True)
    assert (found.stream, found.output_tokens) == (True, 3)
    nested = json.dumps({"input_ids": [ids, [1, 2]], "bootstrap_room": 3}).encode()
    with pytest.raises(BadMessage, match="bootstrap_room"):
        b.read_body(nested)
    batch = b.read_body(json.dumps({"input_ids": [ids, [1, 2]]}).encode())
    assert (batch.prompts, batch.input_tokens, batch.exact_tokens) == (2, len(ids) + 2, True)


@pytest.mark.parametrize("name", ["input_ids", "prompt"])
@pytest.mark.parametrize("prompts", [[[]], [[1, 2], []], [[], [1]], [[1], [], [2]]])
def test_an_empty_prompt_in_a_batch_is_refused(name: str, prompts: list[list[int]]) -> None:
    with pytest.raises(BadMessage, match="has no token"):
        b.read_body(json.dumps({name: prompts}).encode(), PATHS["/v1/completions"])


def test_adapters_and_sessions_are_read() -> None:
    def read(**fields: Any) -> tuple[str | None, bool]:
        found = b.read_body(json.dumps({"text": "a", **fields}).encode())
        return found.adapter, found.continues_session

    assert read() == (None, False)
    assert read(lora_path="a", session_params={"id": "s"}) == ("a", True)
    assert read(lora_path=[None, "b"], session_params=None) == ("b", False)
    assert read(lora_path=5, session_params={}) == (None, False)


def test_very_long_arrays_are_estimated_by_their_beginning() -> None:
    rng = random.Random(1)
    ids = [rng.randrange(150_000) for _ in range(60_000)]
    found = b.read_body(json.dumps({"input_ids": ids}).encode())
    assert not found.exact_tokens
    assert abs(found.input_tokens - len(ids)) < 0.01 * len(ids)


@given(st.text(st.sampled_from('"[]{}\\:, input_ids1'), max_size=60), st.sampled_from(["bootstrap_room", "x"]))
def test_no_prompt_hides_a_member(text: str, name: str) -> None:
    """Whatever a text says, what is behind it is seen."""
    pad = "1," * b.LONG_BYTES
    for fields in ({"text": text + pad, name: 1}, {"text": text, "input_ids": text + pad, name: 1}):
        raw = json.dumps(fields).encode()
        if name == "x":
            b.read_body(raw)
        else:
            with pytest.raises(BadMessage):
                b.read_body(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(min_size=1, max_size=6), JSON, max_size=4),
    st.sampled_from([None, 1]),
    st.sampled_from(["", " \r\n\t"]),
)
def test_members_in_front_change_nothing_else(fields: dict[str, Any], indent: int | None, blank: str) -> None:
    raw = (blank + json.dumps(fields, indent=indent) + blank).encode()
    front, rest = b.with_members(raw, b'"bootstrap_room":7')
    assert json.loads(front + bytes(rest)) == {"bootstrap_room": 7, **fields}


@given(
    st.dictionaries(st.text(min_size=1, max_size=6), JSON, min_size=1, max_size=4),
    st.sampled_from(["", " \r\n\t"]),
    st.integers(1, 4),
)
def test_another_rid_changes_nothing_else(fields: dict[str, Any], blank: str, attempt: int) -> None:
    raw = (blank + json.dumps({"rid": "r", **fields}) + blank).encode()
    rid = rid_at_instance("r", attempt)
    assert json.loads(b.with_rid(raw, rid)) == {**json.loads(raw), "rid": rid}
    assert (rid == "r") is (attempt == 1)
    assert not rid.startswith("r") or attempt == 1, "SGLang aborts every id that starts with the one named"


def test_members_need_an_object() -> None:
    with pytest.raises(BadMessage):
        b.with_members(b"  [1]", b'"a":1')


MEMBERS = b.MAX_MEMBERS
TOO_MANY = {
    "texts": {"text": ["a"] * (MEMBERS + 1)},
    "prompts of ids": {"input_ids": [[0]] * (MEMBERS + 1)},
    "parameters": {"text": "x", "sampling_params": [{}] * (MEMBERS + 1)},
    "rids": {"text": "x", "rid": ["a"] * (MEMBERS + 1)},
    "custom parameters": {"text": "x", "custom_params": {str(number): 0 for number in range(MEMBERS + 1)}},
    "more strings than are looked through": {"text": ["a"] * (b.MAX_QUOTES + 1)},
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_lists_of_too_many_members_are_refused_before_objects_are_made_of_them(name: str) -> None:
    raw = json.dumps(TOO_MANY[name]).encode()
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage) as caught:
            b.read_body(raw)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (caught.value.reason, caught.value.status) == ("too_many_members", 413)
    assert peak_bytes < 16 * MEMBERS * 50, "pieces of the search, and no object for each member"


@pytest.mark.parametrize(
    ("body", "tokens", "prompts"),
    [
        ({"prompt": [7] * 200_000}, 200_000, 1),
        ({"prompt": [[7] * 70_000, [7] * 80_000]}, 150_000, 2),
        ({"text": ["a, " * 70_000, "b"], "sampling_params": [{"stop": ["a", "b"], "n": 1}] * 20_000}, 52_500, 2),
    ],
    ids=["ids", "batch of ids", "commas in strings and in members"],
)
def test_long_lists_of_few_members_are_read(body: Any, tokens: int, prompts: int) -> None:
    raw = json.dumps(body).encode()
    tracemalloc.start()
    try:
        read = b.read_body(raw)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (read.input_tokens, read.prompts) == (tokens, prompts)
    if "prompt" in body:
        assert peak_bytes < 4 * len(raw), "numbers are counted, not kept"


def test_a_number_of_samples_that_is_no_number_is_not_decoded() -> None:
    with pytest.raises(BadMessage) as caught:
        b.read_body(json.dumps({"text": "x", "n": [[]] * 100}).encode())
    assert caught.value.reason == "bad_n"
