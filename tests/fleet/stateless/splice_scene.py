"""An instance without an engine: SGLang's own endpoints, TokenizerManager and detokenizer, and scripted tokens.

``Instance`` serves one stream after another. What its writes say is put together by ``receive``, as a router does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import Request
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.sampling.sampling_params import SamplingParams
from support.published import publish_arguments
from transformers import AutoTokenizer

from pla_sglang.fleet.stateless import front_hooks
from pla_sglang.fleet.stateless.host.detokenize import around_decode_batch, has_our_seam
from pla_sglang.fleet.stateless.requests import streams
from pla_sglang.plugin.engine.host.text import find_tool_close_ids

GENERATE, COMPLETIONS, CHAT = "generate", "completions", "chat"
CACHED_TOKENS = 3
PROMPT = "Say it: "


@functools.cache
def load_tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What an instance generates, and how it streams it.

    Attributes:
        answer: token ids; a request ends with the last of them, if nothing ends it before.
        interval: tokens a chunk of the scheduler.
        chunks_at_once: that the endpoint finds when it looks.
        moved_after: tokens after which another instance has the request; None: never.
        cached_tokens: of the prompt, as this instance says.
        fails: the host refuses the request with this reason; None: it does not.
    """

    answer: Sequence[int]
    interval: int = 1
    chunks_at_once: int = 1
    moved_after: int | None = None
    cached_tokens: int = CACHED_TOKENS
    fails: str | None = None


class _Pieces:
    """The host's message to its detokenizer, with None for what it lacks."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> None:
        return None


class _Times(APIServerReqTimeStats):
    """A client is told the same ones of each stream: streams are compared."""

    def get_e2e_latency(self) -> float:
        return 1.0


def _fail_reader(reader: asyncio.Task[Any] | None, pump: asyncio.Task[None]) -> None:
    """Else one whose script has raised would wait for ever."""
    if reader is not None and not pump.cancelled() and (error := pump.exception()) is not None:
        reader.cancel(f"a script has raised {error!r}")


class ScriptedManager(TokenizerManager):
    """The host's, without sockets; what it dispatches is answered by a script."""

    def __init__(self, tokenizer: Any, script: Script, **args: Any) -> None:
        self.script, self.tokenizer = script, tokenizer
        self.incremental_streaming_output = args["incremental_streaming_output"]
        self.server_args = publish_arguments(
            enable_cache_report=True, batch_notify_size=16, stream_interval=script.interval, **args
        )
        self.model_config = SimpleNamespace(
            is_multimodal=False,
            get_default_sampling_params=dict,
            hf_config=SimpleNamespace(model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
            context_len=4096,
            vocab_size=len(tokenizer),
        )
        self.rid_to_state = {}
        self.child_rid_to_logical_rid, self.logical_rid_to_child_rids = {}, {}
        self.enable_metrics = self.enable_lora = self.skip_tokenizer_init = False
        self.dump_requests_folder = self.crash_dump_folder = ""
        self.request_logger = SimpleNamespace(log_finished_request=lambda *args, **kwargs: None, log_requests=False)
        self.request_metrics_exporter_manager = SimpleNamespace(exporter_enabled=lambda: False)
        self._config_updates = []
        self.dispatched: list[str] = []
        self.closed: list[str] = []
        self._detokenizer = host = DetokenizerManager.__new__(DetokenizerManager)
        host.tokenizer, host.vocab_size = tokenizer, len(tokenizer)
        host.decode_status = {}
        host.disable_tokenizer_batch_decode, host.is_tool_call_parser_gpt_oss = False, False
        vars(host)["tool_close_token_ids"] = find_tool_close_ids(args.get("tool_call_parser"), tokenizer)
        if has_our_seam():
            decode = functools.partial(around_decode_batch, DetokenizerManager._decode_batch_token_id_output, host)
            vars(host)["_decode_batch_token_id_output"] = decode

    def generate_request(self, obj: Any, request: Any = None) -> Any:
        return front_hooks.around_generate_request(ScriptedManager._generate, self, obj, request)

    async def _generate(self, obj: Any, request: Any) -> Any:
        obj.normalize_batch_and_arguments()
        if self.script.fails is not None:
            raise ValueError(self.script.fails)
        ids = obj.input_ids or self.tokenizer.encode(obj.text, add_special_tokens=False)
        params = SamplingParams(**obj.sampling_params)
        params.normalize(self.tokenizer)
        self.rid_to_state[obj.rid] = state = ReqState(
            [], False, asyncio.Event(), obj, _Times(response_sent_to_client_time=1.0)
        )
        tokenized = SimpleNamespace(rid=obj.rid, input_ids=array("q", ids), sampling_params=params)
        front_hooks.before_send_one_request(self, tokenized)
        self.dispatched.append(obj.rid)
        reader = asyncio.current_task()
        pump = asyncio.ensure_future(self._run_script(tokenized, state))
        pump.add_done_callback(lambda pump: _fail_reader(reader, pump))
        try:
            async for out in self._wait_one_response(obj, request):
                yield out
        finally:
            pump.cancel()
            self.closed.append(obj.rid)

    async def _run_script(self, tokenized: Any, state: ReqState) -> None:
        """As the host's scheduler streams a request; one that goes on begins with all old tokens."""
        script, params = self.script, tokenized.sampling_params
        req = Req.__new__(Req)
        req.sampling_params, req.tokenizer = params, self.tokenizer
        req.output_ids = array("q", (params.custom_params or {}).get("pla_tokens") or ())
        sent = chunks = 0
        reason = self._find_end(req) if req.output_ids else None
        while True:
            if reason is None:
                req.output_ids.append(script.answer[len(req.output_ids)])
                reason = self._find_end(req)
            if reason is None and script.moved_after == len(req.output_ids):
                reason = {"type": "pla_moved"}
            due = script.interval == 1 or len(req.output_ids) % script.interval == 1
            if reason is None and (not due or req.check_match_stop_str_prefix()):
                continue
            new, sent = list(req.output_ids[sent:]), len(req.output_ids)
            await self._send(tokenized, new, reason, is_first=chunks == 0)
            chunks += 1
            while chunks % script.chunks_at_once == 0 and (state.out_list or state.event.is_set()):
                await asyncio.sleep(0)
            if reason is not None:
                return

    def _find_end(self, req: Req) -> dict[str, Any] | None:
        params, last = req.sampling_params, req.output_ids[-1]
        if last == self.tokenizer.eos_token_id or last in (params.stop_token_ids or ()):
            return {"type": "stop", "matched": last}
        tail = req.tail_str()
        for stop in params.stop_strs:
            if stop in tail:
                return {"type": "stop", "matched": stop}
        if len(req.output_ids) >= min(params.max_new_tokens, len(self.script.answer)):
            return {"type": "length", "length": len(req.output_ids)}
        return None

    async def _send(self, tokenized: Any, new: list[int], reason: Any, *, is_first: bool) -> None:
        params, tail = tokenized.sampling_params, list(tokenized.input_ids[-5:])
        state = self.rid_to_state[tokenized.rid]
        pieces = _Pieces(
            rids=[tokenized.rid],
            decoded_texts=[""],
            decode_ids=[[*tail, *new] if is_first else new],
            read_offsets=[len(tail)],
            finished_reasons=[reason],
            no_stop_trim=[params.no_stop_trim],
            skip_special_tokens=[params.skip_special_tokens],
            spaces_between_special_tokens=[params.spaces_between_special_tokens],
            output_ids=[new],
            prompt_tokens=[len(tokenized.input_ids)],
            completion_tokens=[len(state.output_ids) + len(new)],
            reasoning_tokens=[0],
            cached_tokens=[self.script.cached_tokens],
            retraction_counts=[0],
        )
        await self._handle_batch_output(self._detokenizer.handle_batch_token_id_out(pieces))


class Instance:
    """One that serves streams. ``args``: the host's server arguments that matter here."""

    def __init__(self, model: Path, script: Script, *, incremental: bool = False, **args: Any) -> None:
        tokenizer = load_tokenizer(model)
        self.manager = ScriptedManager(tokenizer, script, incremental_streaming_output=incremental, **args)
        templates = TemplateManager()
        templates._jinja_template_content_format = "string"
        self.chat = OpenAIServingChat(self.manager, templates)
        self.completions = OpenAIServingCompletion(self.manager, templates)

    async def read_writes(self, kind: str, body: dict[str, Any], *, hooked: bool = True) -> list[str]:
        """All writes of a stream. ``hooked``: through our seams, else as stock serves it."""
        events = await self.open_stream(kind, body, hooked=hooked)
        return [write.decode() if isinstance(write, bytes) else write async for write in events]

    async def open_stream(self, kind: str, body: dict[str, Any], *, hooked: bool = True) -> Any:
        if kind == GENERATE:
            http_server._global_state = SimpleNamespace(tokenizer_manager=self.manager)
            obj = GenerateReqInput(**body)
            request = make_request(body)
            if not hooked:
                return (await http_server.generate_request(obj, request)).body_iterator
            return (
                await streams.answer_generate(http_server.generate_request, self.manager, obj, request)
            ).body_iterator
        if kind == CHAT:
            request = ChatCompletionRequest(**body)
            serving, around = self.chat, front_hooks.around_generate_chat_stream
            original = OpenAIServingChat._generate_chat_stream
        else:
            request = CompletionRequest(**body)
            serving, around = self.completions, front_hooks.around_generate_completion_stream
            original = OpenAIServingCompletion._generate_completion_stream
        adapted, request = serving._convert_to_internal_request(request, None)
        if not hooked:
            return original(serving, adapted, request, None)
        return around(original, serving, adapted, request, None)


def make_request(body: dict[str, Any]) -> Request:
    """As a client has sent it."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    return Request({"type": "http", "headers": []}, receive)


def body_of(kind: str, rid: str, custom: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Of a streamed request. ``fields``: sampling parameters for ``/generate``, members of the body elsewhere."""
    if kind == GENERATE:
        most = {"max_new_tokens": fields.pop("max_tokens", 500)}
        params = {**most, **fields, **({} if custom is None else {"custom_params": custom})}
        return {"text": PROMPT, "rid": rid, "stream": True, "sampling_params": params}
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if kind == CHAT else {"prompt": PROMPT}
    body = {"model": "m", "max_tokens": 500, "stream": True, "rid": rid, "stream_options": {"include_usage": True}}
    return {**body, **prompt, **fields, **({} if custom is None else {"custom_params": custom})}


@dataclasses.dataclass(slots=True)
class Received:
    """What a router knows of a stream's first writes, over all hops."""

    events: list[str] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    seen: str = ""
    prompt: str = ""

    def take(self, write: str) -> None:
        while write.startswith(": "):
            line, _, write = write.partition("\n")
            words = line.split(" ")
            if words[1] == "pla-prompt":
                self.prompt = words[2]
                continue
            _, name, ids, self.seen = words
            assert name == "pla"
            self.tokens += [] if ids == "-" else [int(token) for token in ids.split(",")]
        if write != "\n":
            assert write.startswith("data: ")
            assert write.endswith("\n\n")
            assert write.count("\n") == 2
            self.events.append(write)

    def continuation(self, answer_id: str) -> dict[str, Any]:
        """Tags of the request that goes on."""
        tags = {"pla_movable": 1, "pla_tokens": list(self.tokens), "pla_seen": self.seen, "pla_answer_id": answer_id}
        return {**tags, "pla_prompt": self.prompt} if self.prompt else tags


@dataclasses.dataclass(slots=True)
class Answer:
    """What a client makes of a stream."""

    text: str = ""
    reasoning: str = ""
    tools: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    tool_ids: int = 0
    roles: int = 0
    finishes: list[Any] = dataclasses.field(default_factory=list)
    usages: list[Any] = dataclasses.field(default_factory=list)
    ids: set[str] = dataclasses.field(default_factory=set)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    done: int = 0


def read_answer(kind: str, events: Iterable[str], *, incremental: bool) -> Answer:
    answer = Answer()
    for event in events:
        if event.startswith("data: [DONE]"):
            answer.done += 1
            continue
        data = json.loads(event[len("data: ") :])
        assert "error" not in data, data
        if kind == GENERATE:
            _read_generate(answer, data, incremental=incremental)
        else:
            _read_openai(answer, data)
    return answer


def _read_generate(answer: Answer, data: dict[str, Any], *, incremental: bool) -> None:
    meta = data["meta_info"]
    if incremental:
        answer.text += data["text"]
        answer.token_ids += data["output_ids"]
    else:
        assert data["text"].startswith(answer.text), "text that was shown is taken back"
        assert data["output_ids"][: len(answer.token_ids)] == answer.token_ids
        answer.text, answer.token_ids = data["text"], data["output_ids"]
    answer.ids.add(meta["id"])
    assert meta["completion_tokens"] == len(answer.token_ids)
    if meta["finish_reason"] is not None:
        answer.finishes.append(meta["finish_reason"])
        answer.usages.append([meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]])


def _read_openai(answer: Answer, data: dict[str, Any]) -> None:
    answer.ids.add(data["id"])
    if not data["choices"]:
        answer.usages.append(data["usage"])
    for choice in data["choices"]:
        delta = choice.get("delta") or {"content": choice.get("text")}
        answer.roles += delta.get("role") is not None
        answer.text += delta.get("content") or ""
        answer.reasoning += delta.get("reasoning_content") or ""
        answer.token_ids += choice.get("token_ids") or []
        for call in delta.get("tool_calls") or ():
            name, arguments = answer.tools.setdefault(call["index"], ["", ""])
            function = call["function"]
            answer.tools[call["index"]] = [
                name + (function.get("name") or ""),
                arguments + (function.get("arguments") or ""),
            ]
            answer.tool_ids += call.get("id") is not None
        if choice.get("finish_reason") is not None:
            answer.finishes.append([choice["finish_reason"], choice.get("matched_stop")])
