"""``GET /openapi.json``: what the router serves, for people and for generated tests (OpenAPI 3.1).

A test compares its paths with the tables that requests are served by. Of request bodies it names the members that the
router reads; all others go to the instances as they are, and SGLang's own document describes them.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from pla_sglang import __version__
from pla_sglang.fleet.router.http.bodies import ROLES, ErrorBody, NewWorker, RoleOrder, WorkerRow

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
    403: "a browser sends it for a page of another address",
    404: "there is no such thing",
    409: "it does not fit what is there: a request with this id is open, or the instance's state forbids it",
    413: "the body is too long",
    415: "the body is compressed, or of a type that is not taken",
    429: "a hard limit of admission; retry-after says when to come back",
    500: "the ledger does not balance, or an instance failed",
    501: "an instance that can answer this is not among those of the router",
    502: "the instance that worked on it is lost, or the prefill failed",
    503: "no instance is ready, or the router is shutting down",
    504: "a time limit",
}
HEADERS = (
    ("x-slo-ttft-ms", MILLISECONDS, "target for the time to the first token"),
    ("x-slo-tpot-ms", MILLISECONDS, "target for the time between tokens"),
    ("x-priority", {"type": "integer", "minimum": -999_999, "maximum": 999_999}, "unless the body has one"),
    ("x-tenant-id", LABEL, "for fairness between tenants, and a label of metrics"),
    ("x-session-id", LABEL, "for affinity"),
    ("x-answer-tokens", COUNT, "length of the answer, of benches; see --lengths"),
)


@functools.cache
def document_text() -> bytes:
    return msgspec.json.encode(whole_document())


def whole_document() -> Json:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pla_sglang router",
            "version": __version__,
            "description": "One address in front of SGLang instances. Keys are asked for where they are set. Bodies "
            "and answers of generation are SGLang's: here stands of them what the router itself reads, and all of them "
            "in the /openapi.json of any instance.",
        },
        "paths": generation_paths() | model_paths() | router_paths() | operator_paths(),
        "components": {
            "securitySchemes": {
                USERS: {"type": "http", "scheme": "bearer", "description": "--api-key"},
                OPERATORS: {"type": "http", "scheme": "bearer", "description": "--admin-key"},
            },
            "schemas": body_schemas(),
        },
    }


URL_PATTERN = "^http://[A-Za-z][A-Za-z0-9]{0,60}:[1-9][0-9]{0,3}$"  # narrower than what is taken


def body_schemas() -> Json:
    """The schemas of the structs that requests are read into and answers written from."""
    template = "#/components/schemas/{name}"
    _, schemas = msgspec.json.schema_components([ErrorBody, NewWorker, RoleOrder, WorkerRow], ref_template=template)
    schemas["NewWorker"]["properties"]["url"]["pattern"] = URL_PATTERN
    schemas["RoleOrder"]["properties"]["role"]["enum"] = list(ROLES)
    return schemas


WORKER: Json = {"$ref": "#/components/schemas/WorkerRow"}
OBJECT: Json = {"type": "object"}
NUMBER: Json = {"type": "number"}


def generation_paths() -> Json:
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
        "/generate": {"post": for_users("Generate, SGLang's own interface", native, [])},
        "/v1/completions": {"post": for_users("Complete a prompt", OPENAI | {"prompt": prompt}, ["prompt"])},
        "/v1/chat/completions": {"post": for_users("Continue a conversation", chat, ["messages"])},
        "/invocations": {"post": for_users("Continue a conversation, SageMaker's name", chat, ["messages"])},
    } | unified_paths(native, message)


def unified_paths(native: Json, message: Json) -> Json:
    """Served by unified instances only."""
    model, text = {"model": {"type": "string"}}, {"type": "string"}
    some = {"anyOf": [text, IDS, TEXTS]}
    messages = {"type": "array", "items": message, "minItems": 1}
    streams = model | {"stream": {"type": "boolean"}}
    claude = streams | {"messages": messages, "max_tokens": COUNT, "system": text}
    responses = streams | {"input": {"anyOf": [text, messages]}, "instructions": text, "max_output_tokens": COUNT}
    encoded = {name: native[name] for name in ("rid", "priority", "text", "input_ids")}
    pairs = model | {"query": text}
    described: dict[str, tuple[str, Json, list[str]]] = {
        "/v1/responses": ("Continue a conversation; nothing is stored", responses, ["input"]),
        "/v1/messages": ("Continue a conversation, Anthropic's interface", claude, ["model", "messages", "max_tokens"]),
        "/api/chat": ("Continue a conversation, Ollama's interface", streams | {"messages": messages}, ["messages"]),
        "/api/generate": ("Complete a prompt, Ollama's interface", streams | {"prompt": text}, ["prompt"]),
        "/v1/embeddings": ("Embeddings of texts", model | {"input": some}, ["input"]),
        "/v1/classify": ("Classes of texts", model | {"input": some}, ["input"]),
        "/encode": ("Embeddings, SGLang's own interface", encoded, []),
        "/classify": ("Classes or rewards, SGLang's own interface", encoded, []),
        "/v1/score": ("Probabilities of labels", pairs | {"items": some}, ["query", "items"]),
        "/v1/rerank": ("Order documents by a query", pairs | {"documents": TEXTS}, ["query", "documents"]),
    }
    return {path: {"post": for_users(*what, 501)} for path, what in described.items()}


def for_users(summary: str, members: Json, required: list[str], *statuses: int) -> Json:
    response = {"application/json": {"schema": {"type": ["object", "array"]}}, "text/event-stream": {"schema": {}}}
    schema = {"type": "object", "properties": members, "required": required}
    return {
        "summary": summary,
        "security": [{USERS: []}],
        "parameters": [
            {"name": name, "in": "header", "schema": schema, "description": what} for name, schema, what in HEADERS
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "the instance's answer", "content": response}}
        | failing_with(400, 401, 409, 415, 429, 500, 502, 503, 504, *statuses),
    }


def model_paths() -> Json:
    """Answered by any instance."""
    found: Json = {
        "/v1/models": {"get": for_any("The models")},
        "/v1/models/{model}": {"get": for_any("One model", path_parameter("model"))},
        "/tokenize": {"post": for_any("Tokens of a text", body=OBJECT)},
        "/v1/tokenize": {"post": for_any("Tokens of a text", body=OBJECT)},
        "/detokenize": {"post": for_any("Text of tokens", body=OBJECT)},
        "/v1/detokenize": {"post": for_any("Text of tokens", body=OBJECT)},
        "/v1/messages/count_tokens": {"post": for_any("How long a conversation is", body=OBJECT)},
        "/parse_function_call": {"post": for_any("Calls of functions in a text", body=OBJECT)},
        "/separate_reasoning": {"post": for_any("Reasoning and answer of a text", body=OBJECT)},
    }
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        found[path] = {"get": for_any("An instance about itself" + (", old name" if "get" in path else ""))}
    return found


def for_any(summary: str, *parameters: Json, body: Json | None = None) -> Json:
    found: Json = {"summary": summary, "security": [{USERS: []}], "parameters": list(parameters)}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found | {
        "responses": json_response("the instance's answer", OBJECT) | failing_with(400, 401, 404, 500, 502, 503)
    }


def router_paths() -> Json:
    ready = {"200": {"description": "yes"}} | failing_with(503)
    metrics = {"200": {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    return {
        "/health": {"get": {"summary": "Whether a request could be dispatched now", "responses": ready}},
        "/health_generate": {"get": {"summary": "The same, and each kind of instance generates", "responses": ready}},
        "/livez": {"get": {"summary": "Whether the process is well", "responses": ready}},
        "/readyz": {"get": {"summary": "Whether to send requests here; no from SIGTERM on", "responses": ready}},
        "/startupz": {"get": {"summary": "Whether the start is over, with instances or without", "responses": ready}},
        "/metrics": {"get": {"summary": "Metrics, for Prometheus", "responses": metrics | failing_with(503)}},
        "/openapi.json": {"get": {"summary": "This document", "responses": json_response("OpenAPI 3.1", OBJECT)}},
    }


def operator_paths() -> Json:
    worker, rid = path_parameter("worker", "its number or its URL"), path_parameter("rid")
    new = {"$ref": "#/components/schemas/NewWorker"}
    every = {"type": "object", "required": ["workers"], "properties": {"workers": {"type": "array", "items": WORKER}}}
    add = for_operators("Add an instance", 202, WORKER, 400, 409, 415)
    page = for_operators("A page that draws the fleet, live; a browser's user gives the key as password", 200, OBJECT)
    page["responses"]["200"]["content"] = {"text/html": {"schema": {"type": "string"}}}
    add["requestBody"] = {"required": True, "content": {"application/json": {"schema": new}}}
    order = {"$ref": "#/components/schemas/RoleOrder"}
    label = for_operators("Give a stateless instance another role", 200, WORKER, 400, 404, 409)
    label["requestBody"] = {"required": True, "content": {"application/json": {"schema": order}}}
    return {
        "/workers": {"get": for_operators("All instances", 200, every), "post": add},
        "/workers/{worker}": {
            "parameters": [worker],
            "get": for_operators("One instance", 200, WORKER, 404),
            "delete": for_operators("Finish what it has, then let it go", 202, WORKER, 404, 409),
        },
        "/workers/{worker}/drain": {
            "parameters": [worker],
            "post": for_operators("Give it nothing new", 202, WORKER, 404, 409),
        },
        "/workers/{worker}/undrain": {
            "parameters": [worker],
            "post": for_operators("Use it again", 202, WORKER, 404, 409),
        },
        "/workers/{worker}/role": {"parameters": [worker], "post": label},
        "/pla/state": {"get": for_operators("Policy, pools, predictor, telemetry, queue", 200, OBJECT)},
        "/pla/view": {"get": page},
        "/pla/view/since/{seconds}": {
            "parameters": [path_parameter("seconds", "samples of load after this time; 0: all", schema=NUMBER)],
            "get": for_operators("The fleet over the last ten minutes, as the page draws it", 200, OBJECT, 400),
        },
        "/pla/ledger": {
            "get": for_operators("Count all requests anew; 500 where it does not balance", 200, OBJECT, 500)
        },
        "/pla/explain/{rid}": {
            "parameters": [rid],
            "get": for_operators("Why a request went where it went, and what its TTFT was made of", 200, OBJECT, 404),
        },
        "/pla/reload": {"post": for_operators("Read the worker file again", 200, OBJECT, 400)},
    }


def for_operators(summary: str, status: int, response: Json, *statuses: int) -> Json:
    return {
        "summary": summary,
        "security": [{OPERATORS: []}],
        "responses": json_response("done", response, status) | failing_with(401, 403, 413, 503, *statuses),
    }


def path_parameter(name: str, what: str = "", *, schema: Json | None = None) -> Json:
    """``schema``: of its values; any text unless given."""
    schema = schema or {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": what}


def json_response(what: str, schema: Json, status: int = 200) -> Json:
    return {str(status): {"description": what, "content": {"application/json": {"schema": schema}}}}


def failing_with(*statuses: int) -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    return {str(status): {"description": STATUS[status], "content": content} for status in sorted(statuses)}
