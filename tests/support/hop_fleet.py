"""A relay in front of token instances (``token_streams``), and what its clients must get whatever happens to these."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.relay.server import Relay
from pla_sglang.fleet.router.wire import messages as m
from support.relays import Answer, Setting, TurnControl
from support.token_streams import Conduct, TokenInstance, content_of, make_answer, tokens_of

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "stream": True, "max_new_tokens": 6}
USAGE = CHAT | {"stream_options": {"include_usage": True}}
GENERATE: dict[str, Any] = {"text": "q", "stream": True, "sampling_params": {"max_new_tokens": 5}}
REQUESTS = {"chat": (CHAT, "/v1/chat/completions"), "usage": (USAGE, "/v1/chat/completions")}
REQUESTS["generate"] = (GENERATE, "/generate")
MARKS = {"custom_params": {"pla_movable": 1}}


class Here(Setting):
    """A relay in front of token instances."""

    instances: list[TokenInstance]  # type: ignore[assignment]

    def check_balance(self) -> None:
        """Ids are used again: each question has one end, and nothing is left."""
        asked = sorted(ask.rid for ask in self.control.of(m.Ask) if ask.attempt == 1)
        assert sorted(ended.rid for ended in self.ended()) == asked
        gauges = self.relay.read_gauges()
        assert [gauges[name] for name in ("open_requests", "buffered_bytes", "kept_bytes")] == [0, 0, 0]

    def counted(self, name: str) -> float:
        return self.relay.context.counters.values.get(name, 0)


@contextlib.asynccontextmanager
async def fleet(
    *conducts: Conduct, config: RelayConfig | None = None, hops: Sequence[bool] = (), **control: Any
) -> AsyncIterator[Here]:
    async with contextlib.AsyncExitStack() as stack:
        instances = [await stack.enter_async_context(TokenInstance(*pair)) for pair in enumerate(conducts)]
        workers = tuple(one.worker(hops=not hops or hops[one.number]) for one in instances)
        plane = TurnControl(workers, **{"migration": True, "answer": assign_first} | control)
        listening = config or RelayConfig(port=0)
        relay = Relay(listening, number=0, send_to_control=plane.on_message, rng=random.Random(5))
        plane.attach_relay(0, relay)
        await relay.start_serving()
        try:
            yield Here(relay, plane, instances)  # type: ignore[arg-type]
        finally:
            await relay.stop_serving()


def assign_first(ask: m.Ask) -> m.Assign:
    """The first instance that the request has not left."""
    return m.Assign(ask.rid, ask.attempt, min({0, 1, 2} - {*ask.excluded, *ask.refused_by}), reason="first")


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
