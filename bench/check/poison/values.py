"""Request bodies at and beyond the bounds of each field, from the schema that an engine publishes itself.

``/openapi.json`` describes every path of the host, so a new field or a new version of SGLang is covered without an edit
here. What it leaves open (``sampling_params``, ``session_params``) is read from the host's own declarations.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.bench import BenchError

Json = dict[str, Any]
_DECLARED = """
import json, typing, msgspec
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams
kinds = {"sampling_params": SamplingParams, "session_params": SessionParams}
made = {name: msgspec.defstruct(name, list(typing.get_type_hints(kind).items())) for name, kind in kinds.items()}
print(json.dumps({name: msgspec.json.schema(kind) for name, kind in made.items()}))
"""
# Internal to the host: filled in by it, never sent by a client.
INTERNAL = frozenset({"is_normalized", "stop_str_max_len", "stop_regex_max_len"})
# Paths that legitimately stop or change an engine, or need a form or a path's own name.
OPERATORS = re.compile(
    r"/(?:abort_request|(?:add|remove)_external_corpus|(?:open|close)_session|pause_generation|continue_generation|"
    r"(?:start|stop|dump)_.*|.*(?:weight|lora_adapter|hicache|elastic|flush_cache|freeze_gc|logging|memory_occupation).*|"
    r"set_.*|slow_down|v1/audio/.*|v1/responses/.*)"
)
VOCABULARY_EDGES = (2047, 2048, 511, 512, 151_935, 1_000_000)
INTEGERS = (0, 1, 2, -1, -2, 3, 127, 128, 129, 511, 512, 513, 2**15, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1)
HUGE = (2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**40, -(10**40))
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.0000001, 2.0, -2.0, 1e-7, 1e-6, 1e-45, 1e-310, 1e30, 3.4e38, 3.5e38, 1e308, 2.5, 5.0)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", " ", "a", "hello", "0", "1", "-1", "None", "null", "true", "\x00", "\ud800", "a\udfff", "é漢🙂", "\r\n\n"),
    *(
        "*",
        "(",
        "[a-",
        "(a+)+$",
        "(?<=a+)b",
        "(?<=a)b",
        "a{1,100000}",
        "^$",
        ".*",
        "(.*)*x",
        "\\d{3}",
        "a" * 5000,
        "{" * 2000,
    ),
    *("{}", '{"type": "object"}', '{"type": 5}', '{"$ref": "#"}', '{"type": "array", "items": {"$ref": "#"}}'),
    *("root ::= root", 'root ::= "a" | root', "root ::=", 'root ::= ("a")*', "last", "lora-x", "http://127.0.0.1:1/"),
)
_NESTED: Any = 1
for _ in range(400):
    _NESTED = [_NESTED]
STRUCTURES: tuple[Any, ...] = (
    *([], {}, [[]], [{}], [None], {"": None}, {"a": {"b": [1, {"c": None}]}}, [1, "a", None], [[1], []], [[1, 2], [3]]),
    *([0.5], [[0.5, 0.5]], [[[0.1] * 8]], {"1": 1.0}, {"1": "x"}, {"5": 1e39}, {"x": 1}, {"-1": 1}, {"99999": 1}),
    *({"5": float("nan")}, {str(token): -1e30 for token in range(600)}, _NESTED, {"type": "json_object"}),
    *({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}, {"id": "x"}),
)


@dataclass(frozen=True)
class Sent:
    """One request of the search. ``fields``: those that were set to something unusual."""

    path: str
    body: Json
    fields: tuple[str, ...]

    def content(self) -> bytes:
        return json.dumps(self.body).encode()


class Schema:
    """``fields``: those of the bodies of all paths of the engine that a client may use."""

    def __init__(self, document: Mapping[str, Any], declared: Mapping[str, Json]) -> None:
        self._schemas: dict[str, Json] = {**document.get("components", {}).get("schemas", {})}
        self.declared = declared
        self.fields: dict[str, Json] = {}
        for path, methods in document["paths"].items():
            if path.startswith("/pla/") or OPERATORS.fullmatch(path):
                continue
            for content in methods.get("post", {}).get("requestBody", {}).get("content", {}).values():
                members = self.resolve(content.get("schema", {})).get("properties", {})
                self.fields[path] = {**members, **self._opened(members)}

    def describe(self) -> str:
        return f"{sum(map(len, self.fields.values()))} fields of {len(self.fields)} paths"

    def _opened(self, members: Mapping[str, Any]) -> Json:
        """Members whose own fields the document does not name."""
        return {name: self.declared[name] for name in members if name in self.declared}

    def resolve(self, node: Mapping[str, Any]) -> Json:
        while "$ref" in node:
            name = str(node["$ref"]).rpartition("/")[2]
            node = self._schemas.get(name) or self._declared_part(name)
        return dict(node)

    def _declared_part(self, name: str) -> Json:
        for schema in self.declared.values():
            if name in schema.get("$defs", {}):
                return dict(schema["$defs"][name])
        return {}


def read_declared(python: str = sys.executable) -> dict[str, Json]:
    """Fields that the host declares for what its document leaves open. Raises BenchError."""
    done = subprocess.run([python, "-W", "ignore", "-c", _DECLARED], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the host's declarations cannot be read: {done.stderr[-300:]}")
    declared: dict[str, Json] = json.loads(done.stdout.splitlines()[-1])
    return declared


class Generator:
    """Bodies of one seed. Most have one unusual field, some two or three; most are small and end soon."""

    def __init__(self, schema: Schema, seed: int, *, new_tokens: int = 6) -> None:
        self._schema = schema
        self._rng = random.Random(seed)
        self._new_tokens = new_tokens

    def make_request(self, path: str) -> Sent:
        rng = self._rng
        body = self._usual_body(path)
        fields = self._schema.fields.get(path, {})
        changed: list[str] = []
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
            if isinstance(body.get("sampling_params"), dict) and rng.random() < 0.5:
                name = self._set_nested(body, "sampling_params")
            elif "session_params" in fields and rng.random() < 0.04:
                body["session_params"] = {"id": rng.choice(("x", "", None, 5))}
                name = self._set_nested(body, "session_params")
            elif fields:
                name = rng.choice(sorted(fields))
                body[name] = self._unusual(fields[name], name)
            else:
                break
            changed.append(name)
        return Sent(path, body, tuple(changed))

    def _set_nested(self, body: Json, outer: str) -> str:
        members = self._schema.resolve(self._schema.declared[outer]).get("properties", {})
        name: str = self._rng.choice(sorted(set(members) - INTERNAL))
        body[outer] = {**body[outer], name: self._unusual(members[name], name)}
        return f"{outer}.{name}"

    # -- bodies that any engine serves -------------------------------------------------------------------------------

    def _usual_body(self, path: str) -> Json:
        rng = self._rng
        ids = [rng.randrange(3, 500) for _ in range(rng.choice((1, 3, 20, 60)))]
        if path in ("/generate", "/encode", "/classify"):
            body: Json = rng.choice(
                ({"input_ids": ids}, {"text": "hello there"}, {"text": ["a b", "c"]}, {"input_ids": [ids, [5, 6]]})
            )
            body = {**body, "sampling_params": {"max_new_tokens": self._new_tokens}}
            if path == "/generate":
                body |= {"stream": True} if rng.random() < 0.3 else {}
                body |= {"return_logprob": True} if rng.random() < 0.4 else {}
            return body
        members = set(self._schema.fields.get(path, {}))
        wanted: Json = {
            "model": "default",
            "messages": [{"role": "user", "content": "hello"}],
            "prompt": rng.choice(("hello", ["a b", "c"], ids, [ids, [5, 6]])),
            "input": rng.choice(("hello", ["a b", "c"])),
            "query": "a b",
            "items": ["c", "d e"],
            "documents": ["c", "d e"],
            "label_token_ids": [1, 2],
            "max_tokens": self._new_tokens,
            "max_output_tokens": self._new_tokens,
            "options": {"num_predict": self._new_tokens},
            "tokens": ids,
        }
        body = {name: value for name, value in wanted.items() if name in members}
        if path == "/v1/tokenize":
            body.pop("messages", None)
        if "stream" in members and rng.random() < 0.3:
            body["stream"] = True
        if "logprobs" in members and rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 2} if "top_logprobs" in members else {"logprobs": 2}
        return body

    # -- values ------------------------------------------------------------------------------------------------------

    def _unusual(self, node: Mapping[str, Any], name: str) -> Any:
        rng = self._rng
        value = self._typed(node, name) if rng.random() < 0.65 else self._any()
        if rng.random() < 0.12:
            return [value] * rng.choice((1, 2, 3))
        return value

    def _any(self) -> Any:
        rng = self._rng
        pool: Sequence[Any] = rng.choice(
            (INTEGERS, HUGE, FLOATS, NOT_FINITE, TEXTS, STRUCTURES, (None, True, False), VOCABULARY_EDGES)
        )
        return rng.choice(pool)

    def _typed(self, node: Mapping[str, Any], name: str, depth: int = 0) -> Any:
        """A value of a type that ``node`` allows, at or beyond its bounds."""
        rng = self._rng
        node = self._schema.resolve(node)
        forms = node.get("anyOf") or node.get("oneOf") or node.get("allOf")
        if forms:
            return self._typed(rng.choice(forms), name, depth + 1)
        if "enum" in node or "const" in node:
            return rng.choice([*node.get("enum", []), *([node["const"]] if "const" in node else []), "other"])
        kind = node.get("type")
        if isinstance(kind, list):
            kind = rng.choice(kind)
        if kind == "integer":
            bounds = [int(node[key]) for key in ("minimum", "maximum") if key in node]
            near = [bound + step for bound in bounds for step in (-1, 0, 1)]
            pool: Sequence[Any] = rng.choice((INTEGERS, HUGE, VOCABULARY_EDGES, near or INTEGERS))
            return rng.choice(pool)
        if kind == "number":
            return rng.choice(rng.choice((FLOATS, FLOATS, NOT_FINITE)))
        if kind == "string":
            return rng.choice(TEXTS)
        if kind == "boolean":
            return rng.choice((True, False, 1, "true"))
        if kind == "array" and depth < 6:
            items = node.get("items") or {}
            return [self._typed(items, name, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        if kind == "object" and depth < 6:
            return self._object(node, name, depth)
        return None if kind == "null" else self._any()

    def _object(self, node: Mapping[str, Any], name: str, depth: int) -> Json:
        rng = self._rng
        members: Json = node.get("properties") or {}
        if not members:
            inner = node.get("additionalProperties")
            inner = inner if isinstance(inner, dict) else {}
            keys = rng.sample(("1", "5", "-1", "2048", "99999999", "x", ""), rng.choice((0, 1, 2)))
            return {key: self._typed(inner, name, depth + 1) for key in keys}
        required = set(node.get("required", ()))
        return {
            key: self._typed(members[key], key, depth + 1) for key in members if key in required or rng.random() < 0.3
        }
