"""What a client was shown of an answer, field by field, and how much of it is wrong. Pure.

An answer is right where it is the one that is known, or what the same body gets where nothing befalls it. Of a sampled
one chance decides the tokens: each must be one that the model can have drawn behind those before it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from bench.check.faults.bodies import CHAT, FUNCTION, GENERATE, TOOL, TOP_K, Body
from bench.harness.replay import count_wrong_tokens
from pla_sglang.sim.chain.algebra import step
from pla_sglang.sim.chain.oracle import asked_end, check_prompt, state_after
from pla_sglang.sim.chain.spread import spread_logits
from pla_sglang.sim.chain.vocab import EOS

DATA, DONE = b"data: ", b"data: [DONE]"
TEXTS = ("text", "reasoning")  # fields of ``Shown`` that are compared byte by byte


@dataclasses.dataclass(frozen=True)
class Shown:
    """All that a client was shown of one answer; equal for one that moved and one that did not."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments of each tool call
    finish: Any = None
    matched: Any = None
    roles: int = 0
    tokens: tuple[int, int] | None = None  # of prompt and answer, by the usage
    output_ids: tuple[int, ...] = ()  # of /generate
    answer_ids: int = 0  # how many different ids the events have
    ends: int = 0  # marks of the end
    errors: tuple[str, ...] = ()


def read_shown(path: str, events: Iterable[bytes]) -> Shown:
    """``path``: of the endpoint. Cumulative and incremental streams of /generate give the same."""
    ends, said = 0, []
    for event in events:
        if event == DONE:
            ends += 1
        elif event.startswith(DATA):
            said.append(msgspec.json.decode(event[len(DATA) :]))
    errors = tuple(str(one["error"]) for one in said if one.get("error"))
    good = [one for one in said if not one.get("error")]
    shown = _read_generate(good) if path == GENERATE else _read_openai(good)
    return dataclasses.replace(shown, ends=ends, errors=errors)


def _read_generate(said: Sequence[dict[str, Any]]) -> Shown:
    if not said:
        return Shown()
    meta = said[-1]["meta_info"]
    last, finish = said[-1], meta["finish_reason"] or {}
    ids, text = last["output_ids"], last.get("text") or ""
    if len(ids) < meta.get("completion_tokens", 0):  # events hold what is new only
        ids = [token for one in said for token in one["output_ids"]]
        text = "".join(one.get("text") or "" for one in said)
    return Shown(
        text=text,
        finish=finish.get("type"),
        matched=finish.get("matched"),
        tokens=(meta.get("prompt_tokens", 0), meta.get("completion_tokens", 0)),
        output_ids=tuple(ids),
        answer_ids=len({one["meta_info"].get("id") for one in said}),
    )


def _read_openai(said: Sequence[dict[str, Any]]) -> Shown:
    text = reasoning = ""
    calls: dict[int, tuple[str, str]] = {}
    matched = tokens = None
    finishes: list[str] = []
    roles = 0
    for one in said:
        if usage := one.get("usage"):
            tokens = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in one["choices"]:
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            roles += delta.get("role") is not None and not any(delta.get(name) for name in ("content", "tool_calls"))
            for call in delta.get("tool_calls") or ():
                name, arguments = calls.get(call["index"], ("", ""))
                function = call["function"]
                calls[call["index"]] = (
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                )
            finishes += filter(None, [choice.get("finish_reason")])
            matched = choice.get("matched_stop") or matched
    names = tuple(calls[index] for index in sorted(calls))
    finish = ",".join(finishes) or None  # there has to be one
    return Shown(text, reasoning, names, finish, matched, roles, tokens, (), len({one["id"] for one in said}))


def count_wrong_bytes(wanted: Shown, got: Shown) -> int:
    """Bytes of texts that differ, are missing or are too many; one for each other field that is not the same."""
    wrong = 0
    for field in dataclasses.fields(Shown):
        ours, theirs = getattr(wanted, field.name), getattr(got, field.name)
        if field.name in TEXTS:
            a, b = ours.encode(errors="surrogatepass"), theirs.encode(errors="surrogatepass")
            wrong += count_wrong_tokens(a, b)
        else:
            wrong += ours != theirs
    return wrong


def describe_difference(wanted: Shown, got: Shown) -> str:
    """Of the first field that is not the same; of a text from a little before the place."""
    for field in dataclasses.fields(Shown):
        ours, theirs = getattr(wanted, field.name), getattr(got, field.name)
        if ours == theirs:
            continue
        if field.name in TEXTS:
            same = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            cut = slice(max(0, same - 10), same + 30)
            return f"{field.name} at {same}: {ours[cut]!r} came as {theirs[cut]!r}"
        return f"{field.name}: {ours!r:.150} came as {theirs!r:.150}"
    return ""


# -- answers that are known --------------------------------------------------------------------------------------------


def judge_known(body: Body, got: Shown) -> tuple[int, int]:
    """Tokens, and bytes of texts, that are wrong, missing or too many.

    Raises ValueError for what is not the stream of one answer.
    """
    if body.wanted is not None:
        return _judge_text(body, body.wanted, got)
    if got.finish != "stop":
        raise ValueError(f"not the stream of one answer: it ended with {got.finish}")
    if body.oracle is not None:
        return count_wrong_tokens(body.oracle, got.output_ids), 0
    return count_impossible(body.prompt_ids, got.output_ids), 0


def _judge_text(body: Body, wanted: str, got: Shown) -> tuple[int, int]:
    """Its tokens are letters."""
    calls = body.kind == TOOL
    names = [name for name, _ in got.calls]
    frame = (got.answer_ids, got.roles, got.finish, names)
    if frame != (1, int(body.path == CHAT), "tool_calls" if calls else "stop", [FUNCTION] * calls):
        raise ValueError(f"not the stream of one answer: {frame}")
    said = got.text
    if calls:  # its parser puts spaces in
        said, wanted = normalize(got.calls[0][1]), normalize(wanted)
    tokens = count_wrong_tokens(wanted, said)
    tokens += abs((got.tokens or (0, 0))[1] - body.tokens)
    return tokens, count_wrong_tokens(wanted.encode(), said.encode())


def normalize(text: str) -> str:
    """JSON, the same for the same content."""
    return json.dumps(json.loads(text), sort_keys=True)


def count_impossible(prompt_ids: Sequence[int], answer: Sequence[int]) -> int:
    """Tokens that the model cannot have sampled behind those before them, and those that are missing or too many."""
    ids = check_prompt(prompt_ids)
    state, end = state_after(ids), asked_end(ids)
    wrong = abs(end - (len(ids) - 1) + 1 - len(answer))
    for place, token in enumerate(answer, len(ids) - 1):
        is_end = place == end
        logits = spread_logits(state, is_end=is_end)
        allowed = {EOS} if is_end else set(np.argsort(logits)[-TOP_K:].tolist())
        wrong += token not in allowed
        state = step(state, token)
    return int(wrong)
