"""The paths of SGLang 0.5.17 at which a model computes, and what a router must know of each.

From ``sglang.srt.entrypoints.http_server`` and the request models behind it. A pair of prefill and decode takes only
those whose requests carry ``bootstrap_*``; all others need a unified instance.
"""

from __future__ import annotations

from typing import NamedTuple

from pla_sglang.fleet.router.wire.messages import Endpoint


class InferencePath(NamedTuple):
    """One path.

    Attributes:
        prompt: members that hold the prompt, in the order in which the model reads them.
        rid_member: member that names the request, set by the router where the client does not. Empty: the router sets
            none, as SGLang takes none or wants a list of them for a batch; such a request ends with its connection.
        pairs: whether a prefill and decode pair can serve it.
        generates: False: its answer is read off the prefill.
        embeds: only an embedding model serves it. Those that neither generate nor embed, either model may serve.
        each_item: the first member of ``prompt`` is read again with each item of the second.
    """

    name: str
    endpoint: Endpoint
    prompt: tuple[str, ...]
    rid_member: str = ""
    pairs: bool = False
    generates: bool = False
    embeds: bool = False
    each_item: bool = False


PATHS: dict[str, InferencePath] = {
    path.name: path
    for path in (
        InferencePath("/generate", Endpoint.GENERATE, ("input_ids", "text"), "rid", pairs=True, generates=True),
        InferencePath("/v1/completions", Endpoint.COMPLETIONS, ("prompt",), "rid", pairs=True, generates=True),
        InferencePath("/v1/chat/completions", Endpoint.CHAT, ("messages",), "rid", pairs=True, generates=True),
        InferencePath("/invocations", Endpoint.INVOCATIONS, ("messages",), "rid", pairs=True, generates=True),
        InferencePath("/v1/responses", Endpoint.RESPONSES, ("instructions", "input"), "request_id", generates=True),
        InferencePath("/v1/messages", Endpoint.MESSAGES, ("system", "messages"), generates=True),
        InferencePath("/api/chat", Endpoint.OLLAMA_CHAT, ("messages",), generates=True),
        InferencePath("/api/generate", Endpoint.OLLAMA_GENERATE, ("system", "prompt"), generates=True),
        InferencePath("/v1/embeddings", Endpoint.EMBEDDINGS, ("input",), embeds=True),
        InferencePath("/encode", Endpoint.ENCODE, ("input_ids", "text"), embeds=True),
        InferencePath("/classify", Endpoint.CLASSIFY, ("input_ids", "text"), embeds=True),
        InferencePath("/v1/classify", Endpoint.CLASSIFICATIONS, ("input",), embeds=True),
        InferencePath("/v1/score", Endpoint.SCORE, ("query", "items"), each_item=True),
        InferencePath("/v1/rerank", Endpoint.RERANK, ("query", "documents"), each_item=True),
    )
}
BY_ENDPOINT: dict[Endpoint, InferencePath] = {path.endpoint: path for path in PATHS.values()}
# Why other paths of inference are not served; a path that ends with a slash stands for all behind it.
NOT_SERVED = {
    "/v1/responses/": "an answer is kept by the instance that gave it; ask with the whole conversation instead",
    "/v1/audio/transcriptions": "its body is a form with a recording, whose length in tokens the router cannot tell",
    "/v1/decisions": "its questions become prompts in the instance, whose length the router cannot tell",
    "/v1/systemone": "its questions become prompts in the instance, whose length the router cannot tell",
    "/v1/realtime": "it is a WebSocket",
    "/vertex_generate": "its parameters may steer an instance; send them to /generate",
}


def find_refusal(path: str) -> str | None:
    """Why a path at which a model would compute is not served; None for all other paths."""
    for name, why in NOT_SERVED.items():
        if path == name or (name.endswith("/") and path.startswith(name)):
            return why
    return None
