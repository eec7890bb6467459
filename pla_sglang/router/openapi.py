"""``GET /openapi.json``: what the router serves, for people and for generated tests (OpenAPI 3.1).

A test compares its paths with the tables that requests are served by. Of request bodies it names the members that the
router reads; all others go to the instances as they are, and SGLang's own document describes them.
"""

from __future__ import annotations

import functools
from typing import Any

import orjson

Json = dict[str, Any]

USERS, OPERATORS = "user_key", "operator_key"
LABEL = {"type": "string", "pattern": "^[!-~]{1,64}$"}
MILLISECONDS = {"type": "number", "minimum": 1, "maximum": 3_600_000}
RID = {"type": "string", "pattern": "^(?!pla-)[!-~]{1,128}$"}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}, "minItems": 1}
TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
COUNT = {"type": "integer", "minimum": 1, "maximum": 1_000_000}
SAMPLES = {"type": "integer", "minimum": 1, "maximum": 128, "description": "above 1: by a unified instance only"}
COMMON: Json = {
    "rid": RID | {"description": "the request's id, for /pla/explain; long and random, as ids are aborted by prefix"},
    "stream": {"type": "boolean"},
    "priority": {"type": "integer", "minimum": -999_999, "maximum": 999_999},
}
OPENAI: Json = COMMON | {"model": {"type": "string"}, "n": SAMPLES, "max_tokens": COUNT}
STATUS = {
    400: "the request is not as it should be, or sets what only the router may set",
    401: "the key is missing or wrong",
    404: "there is no such thing",
    409: "it does not fit what is there: a request with this id is open, or the instance's state forbids it",
    415: "compressed bodies are not supported",
    429: "a hard limit of admission; retry-after says when to come back",
    500: "the ledger does not balance, or an instance failed",
    502: "the instance that worked on it is lost, or the prefill failed",
    503: "no instance is ready, or the router is shutting down",
    504: "a time limit",
}
HEADERS = (
    ("x-slo-ttft-ms", MILLISECONDS, "target for the time to the first token"),
    ("x-slo-tpot-ms", MILLISECONDS, "target for the time between tokens"),
    ("x-priority", {"type": "integer", "minimum": -999_999, "maximum": 999_999}, "unless the body has one"),
    ("x-tenant-id", LABEL, "for fairness between tenants"),
    ("x-session-id", LABEL, "for affinity"),
)


@functools.cache
def text() -> bytes:
    return orjson.dumps(document())


def document() -> Json:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pla_sglang router",
            "version": "0.1.0",
            "description": "One address in front of SGLang instances. Keys are asked for where they are set.",
        },
        "paths": generation() | about_models() | about_the_router() | for_operators(),
        "components": {
            "securitySchemes": {
                USERS: {"type": "http", "scheme": "bearer", "description": "--api-key"},
                OPERATORS: {"type": "http", "scheme": "bearer", "description": "--admin-key"},
            },
            "schemas": {"Error": ERROR, "Worker": WORKER},
        },
    }


ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "integer", "description": "the status"},
            },
        }
    },
}
WORKER: Json = {
    "type": "object",
    "required": ["number", "url", "state"],
    "properties": {"number": {"type": "integer"}, "url": {"type": "string"}, "state": {"type": "string"}},
}
OBJECT: Json = {"type": "object"}


def generation() -> Json:
    prompt = {"anyOf": [{"type": "string"}, IDS, TEXTS]}
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
    }
    params = {"type": "object", "properties": {"max_new_tokens": COUNT, "n": SAMPLES}}
    native = COMMON | {"text": {"anyOf": [{"type": "string"}, TEXTS]}, "input_ids": IDS, "sampling_params": params}
    chat = OPENAI | {"messages": {"type": "array", "items": message, "minItems": 1}}
    return {
        "/generate": {"post": generates("Generate, SGLang's own interface", native, [])},
        "/v1/completions": {"post": generates("Complete a prompt", OPENAI | {"prompt": prompt}, ["prompt"])},
        "/v1/chat/completions": {"post": generates("Continue a conversation", chat, ["messages"])},
    }


def generates(summary: str, members: Json, required: list[str]) -> Json:
    answer = {"application/json": {"schema": {"type": ["object", "array"]}}, "text/event-stream": {"schema": {}}}
    schema = {"type": "object", "properties": members, "required": required}
    return {
        "summary": summary,
        "security": [{USERS: []}],
        "parameters": [
            {"name": name, "in": "header", "schema": schema, "description": what} for name, schema, what in HEADERS
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "the instance's answer", "content": answer}}
        | errors(400, 401, 409, 415, 429, 500, 502, 503, 504),
    }


def about_models() -> Json:
    """Answered by any instance."""
    found: Json = {
        "/v1/models": {"get": asked("The models")},
        "/v1/models/{model}": {"get": asked("One model", path_parameter("model"))},
        "/tokenize": {"post": asked("Tokens of a text", body=OBJECT)},
        "/detokenize": {"post": asked("Text of tokens", body=OBJECT)},
    }
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        found[path] = {"get": asked("An instance about itself" + (", old name" if "get" in path else ""))}
    return found


def asked(summary: str, *parameters: Json, body: Json | None = None) -> Json:
    found: Json = {"summary": summary, "security": [{USERS: []}], "parameters": list(parameters)}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found | {"responses": says("the instance's answer", OBJECT) | errors(400, 401, 404, 500, 502, 503)}


def about_the_router() -> Json:
    ready = {"200": {"description": "yes"}} | errors(503)
    metrics = {"200": {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    return {
        "/health": {"get": {"summary": "Whether a request could be dispatched now", "responses": ready}},
        "/health_generate": {"get": {"summary": "The same, and each kind of instance generates", "responses": ready}},
        "/metrics": {"get": {"summary": "Metrics, for Prometheus", "responses": metrics | errors(503)}},
        "/openapi.json": {"get": {"summary": "This document", "responses": says("OpenAPI 3.1", OBJECT)}},
    }


def for_operators() -> Json:
    worker, rid = path_parameter("worker", "its number or its URL"), path_parameter("rid")
    url = {"type": "string", "pattern": "^http://[A-Za-z0-9.-]{1,60}:[1-9][0-9]{0,3}$"}
    new = {"type": "object", "required": ["url"], "properties": {"url": url}, "additionalProperties": False}
    every = {"type": "object", "required": ["workers"], "properties": {"workers": {"type": "array", "items": WORKER}}}
    add = operates("Add an instance", 202, WORKER, 400, 409)
    add["requestBody"] = {"required": True, "content": {"application/json": {"schema": new}}}
    return {
        "/workers": {"get": operates("All instances", 200, every), "post": add},
        "/workers/{worker}": {
            "parameters": [worker],
            "get": operates("One instance", 200, WORKER, 404),
            "delete": operates("Finish what it has, then let it go", 202, WORKER, 404, 409),
        },
        "/workers/{worker}/drain": {
            "parameters": [worker],
            "post": operates("Give it nothing new", 202, WORKER, 404, 409),
        },
        "/workers/{worker}/undrain": {"parameters": [worker], "post": operates("Use it again", 202, WORKER, 404, 409)},
        "/pla/state": {"get": operates("Policy, pools, predictor, telemetry, queue", 200, OBJECT)},
        "/pla/ledger": {"get": operates("Count all requests anew; 500 where it does not balance", 200, OBJECT, 500)},
        "/pla/explain/{rid}": {
            "parameters": [rid],
            "get": operates("Why a request went where it went, and what its TTFT was made of", 200, OBJECT, 404),
        },
        "/pla/reload": {"post": operates("Read the worker file again", 200, OBJECT, 400)},
    }


def operates(summary: str, status: int, answer: Json, *statuses: int) -> Json:
    return {
        "summary": summary,
        "security": [{OPERATORS: []}],
        "responses": says("done", answer, status) | errors(401, 503, *statuses),
    }


def path_parameter(name: str, what: str = "") -> Json:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": what}


def says(what: str, schema: Json, status: int = 200) -> Json:
    return {str(status): {"description": what, "content": {"application/json": {"schema": schema}}}}


def errors(*statuses: int) -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": STATUS[status], "content": content} for status in sorted(statuses)}
