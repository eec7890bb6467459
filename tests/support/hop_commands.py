"""Stateless instances as a test talks to them: requests that are held, moved and computed again, by command."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Event
from typing import Any

from support.serving import Client, Prompt

ANSWER_TOKENS = 24
LONG_ANSWER = 150
_rooms = itertools.count(1)


def next_room() -> int:
    """A room that no test has used."""
    return next(_rooms)


def stateless(client: Client) -> dict[str, Any]:
    state: dict[str, Any] = client.state()["stateless"]
    return state


@dataclass
class Instance:
    name: str
    client: Client

    @property
    def address(self) -> dict[str, Any]:
        return {"name": self.name, "host": "127.0.0.1", "bootstrap_port": self.client.server.bootstrap_port}


@dataclass
class Held:
    """A stream that is read by a thread of its own, under way at ``instance``."""

    instance: Instance
    rid: str
    ended: Future[dict[str, Any]]

    def tell(self, do: str, room: int, **fields: Any) -> dict[str, Any]:
        [answer] = order(self.instance, {"do": do, "room": room, **fields})
        return answer


def order(instance: Instance, *commands: dict[str, Any]) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = instance.client.server.post("/pla/hops", {"commands": list(commands)})["answers"]
    return answers


def hops(instance: Instance) -> dict[str, Any]:
    state: dict[str, Any] = stateless(instance.client)["held"]
    return state


def start(
    instance: Instance,
    prompt: Prompt,
    *,
    new_tokens: int = LONG_ANSWER,
    body: dict[str, Any] | None = None,
    **sampling: Any,
) -> Held:
    """A request that runs: some of its tokens are there. ``body``: further fields of it."""
    rid = f"hop-{next_room()}x"
    seen = Event()
    body = {"input_ids": prompt, "rid": rid, "sampling_params": redo([], new_tokens, **sampling)} | (body or {})

    def read() -> dict[str, Any]:
        events = []
        for event in instance.client.server.stream("/generate", body):
            events.append(event)
            seen.set()
        return dict(events[-1])

    held = Held(instance, rid, instance.client.pool.submit(read))
    assert seen.wait(30)
    return held


def hold(instance: Instance, prompt: Prompt, *, for_s: float = 60, **options: Any) -> tuple[Held, int, dict[str, Any]]:
    """A request that is held in the middle of its answer; its room and what the command said. They race."""
    for _ in range(20):
        held, room = start(instance, prompt, **options), next_room()
        answer = held.tell("hold", room, rid=held.rid, for_s=for_s)
        if answer["status"] == "held":
            return held, room, answer
        held.ended.result()
    raise AssertionError(f"{prompt[:3]}... always ended before it was held")


def pull(
    source: Instance, room: int, answer: list[int], new_tokens: int = LONG_ANSWER, **sampling: Any
) -> dict[str, Any]:
    """Of a request whose KV is at ``source`` under ``room``, and whose answer so far is ``answer``."""
    address = {"bootstrap_host": "127.0.0.1", "bootstrap_port": source.client.server.bootstrap_port}
    return {**address, "bootstrap_room": room, "sampling_params": redo(answer, new_tokens, **sampling)}


def redo(answer: list[int], new_tokens: int = ANSWER_TOKENS, **sampling: Any) -> dict[str, Any]:
    """Sampling parameters of a request that has ``answer`` from elsewhere."""
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **sampling}
    return params | {"custom_params": {"pla_tokens": answer}} if answer else params
