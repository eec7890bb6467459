"""A relay in front of token instances (``token_streams``), and what its clients must get whatever happens to these."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import islice
from typing import Any

from fake_sglang import FakeSglang, Script

from pla_sglang.fleet.router.config import RelayConfig
from support.relays import Answer, Setting, serving
from support.token_streams import (
    DONE,
    Event,
    chat_event,
    content_of,
    dump,
    make_answer,
    make_events,
    tags_of,
    text_of,
    tokens_of,
)

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "stream": True, "max_new_tokens": 6}
USAGE = CHAT | {"stream_options": {"include_usage": True}}
GENERATE: dict[str, Any] = {"text": "q", "stream": True, "sampling_params": {"max_new_tokens": 5}}
REQUESTS = {"chat": (CHAT, "/v1/chat/completions"), "usage": (USAGE, "/v1/chat/completions")}
REQUESTS["generate"] = (GENERATE, "/generate")
MARKS = {"custom_params": {"pla_movable": 1}}


class TokenInstance(FakeSglang):
    """A stateless one whose answers are those of ``token_streams``."""

    def __init__(self, number: int, script: Script | None = None, *, hops: bool = True) -> None:
        super().__init__("stateless", number=number, script=script)
        self.hops = hops
        self.script.deaf = True  # ``TurnControl`` uses the ids of hops again

    @property
    def kind(self) -> str:
        return "stateless" if self.hops else "unified"

    async def say(self, fields: dict[str, Any], leg: str) -> tuple[dict[str, Any], Iterable[Event]]:
        whole = {"text": text_of(tokens_of(fields)), "meta_info": {"id": fields.get("rid")}}
        if self.script.mute:
            fields = {name: value for name, value in fields.items() if name != "custom_params"}
        if not fields.get("stream"):
            return whole, ()
        events: Iterable[Event] = make_events(fields, interval=self.script.interval)
        if self.script.aborts:
            events = give_up(events, self.script.aborts.pop(0), fields, self.script.abort_code)
        return whole, events


def give_up(events: Iterable[Event], count: int, fields: dict[str, Any], code: int | None) -> Iterable[Event]:
    """The first ones that show something, and then an abort as SGLang 0.5.17 says it."""
    marked = bool(tags_of(fields).get("pla_movable"))
    yield from islice((event for event in events if event.data or (marked and event.seen)), count)
    reason: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": code, "err_type": None}
    if "messages" in fields:
        error = {"error": {"message": "Aborted", "code": code}}
        data = b"data: " + dump(error) + b"\n\n" if code else chat_event(fields.get("rid"), {}, reason="abort")
    else:
        data = b"data: " + dump({"text": "", "output_ids": [], "meta_info": {"finish_reason": reason}}) + b"\n\n"
    yield Event(data, (), "c0.r0.f1.u0")
    yield Event(DONE)


class Here(Setting):
    """A relay in front of token instances."""

    def counted(self, name: str) -> float:
        return self.relay.context.counters.values.get(name, 0)


@contextlib.asynccontextmanager
async def fleet(
    *scripts: Script, config: RelayConfig | None = None, hops: Sequence[bool] = (), **control: Any
) -> AsyncIterator[Here]:
    instances = [TokenInstance(number, script, hops=not hops or hops[number]) for number, script in enumerate(scripts)]
    async with serving(Here, instances, {"migration": True, "in_turn": False} | control, config) as here:
        yield here


def whole_of(fields: dict[str, Any], rid: str = "r", *, interval: int = 1) -> bytes:
    """What a client gets of an instance that is not lost."""
    return content_of(make_answer(fields | {"rid": rid}, interval=interval))


def check_text(answer: Answer, fields: dict[str, Any]) -> None:
    """As ``whole_of``, for events of any size: each token once, in order, one role, one reason, one end."""
    parsed = [json.loads(event) for event in answer.events if event != "[DONE]"]
    assert answer.events[-1] == "[DONE]"
    assert answer.events.count("[DONE]") == 1
    if "text" in fields:
        assert parsed[-1]["output_ids"] == tokens_of(fields)
        lengths = [len(event["output_ids"]) for event in parsed]
        assert lengths == sorted(set(lengths))
        return
    choices = [choice for event in parsed for choice in event["choices"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert [int(line.split()[0]) for line in text.splitlines()] == tokens_of(fields)
    assert sum("role" in choice["delta"] for choice in choices) == 1
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert len({event["id"] for event in parsed}) == 1
    assert sum("usage" in event for event in parsed) == ("stream_options" in fields)
