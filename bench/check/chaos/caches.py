"""Prefix caches against the oracle: each instance goes on, as for anybody, with what it may have kept of a run.

Its KV is what the next tokens are computed from, and in the chain model each token depends on all before it. So one
entry under a prompt that is not its own shows in the first token.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import aiohttp

from bench.check.faults.client import Stream
from pla_sglang.sim import chain

MOST_PROMPTS = 400  # the latest of a run
ASKED_TOKENS = 4
AT_ONCE = 8  # requests, at each instance
SHOWN = 5


@dataclasses.dataclass
class CacheAudit:
    """``cache_tokens``: prompt tokens that were in the caches, of all that were asked for."""

    cache_entries: int = 0  # answers that had a part of their prompt in the cache
    cache_entries_wrong: int = 0
    cache_tokens: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)  # the first few


async def audit_caches(described: dict[str, Any], streams: Sequence[Stream]) -> CacheAudit:
    """While the caches are as the run has left them: before anybody flushes one."""
    audit, at_once = CacheAudit(), {one["url"]: asyncio.Semaphore(AT_ONCE) for one in described["instances"]}

    async def ask(http: aiohttp.ClientSession, url: str, prompt_ids: list[int]) -> None:
        sampling = {"temperature": 0, "max_new_tokens": ASKED_TOKENS}
        async with at_once[url]:
            try:
                async with http.post(f"{url}/generate", json=body_of(prompt_ids, sampling)) as answer:
                    status, said = answer.status, await answer.json()
            except (
                aiohttp.ClientError,
                OSError,
                ValueError,
            ) as error:  # one that is gone shows below, others are asked
                status, said = 0, f"{type(error).__name__}: {error}"
            _note_answer(audit, url, prompt_ids, status, said)

    async with aiohttp.ClientSession(trust_env=False) as http, asyncio.TaskGroup() as group:
        for stream in streams[-MOST_PROMPTS:]:
            for url in at_once:
                group.create_task(ask(http, url, prompt_of(stream)))
    return audit


def body_of(prompt_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": prompt_ids, "sampling_params": sampling}


def prompt_of(stream: Stream) -> list[int]:
    """The longest that an instance may have kept: prompt and answer, and what asks for more. Of one without an answer
    the prompt as it was."""
    if stream.error is not None or not stream.output_ids:
        return stream.body.prompt_ids
    return [*stream.body.prompt_ids, *stream.output_ids, *chain.ask_ids(ASKED_TOKENS)]


def _note_answer(audit: CacheAudit, url: str, prompt_ids: list[int], status: int, answer: Any) -> None:
    wanted = list(chain.expected(prompt_ids, ASKED_TOKENS).tokens)
    ids = answer.get("output_ids") if status == 200 else None
    cached = answer["meta_info"]["cached_tokens"] if status == 200 else 0
    audit.cache_entries += cached > 0
    audit.cache_tokens += cached
    if ids != wanted:
        audit.cache_entries_wrong += 1
        if len(audit.wrong) < SHOWN:
            text = answer if status != 200 else f"{ids}, not {wanted}"
            audit.wrong.append(f"{url}: {len(prompt_ids)} tokens, {cached} cached: {text}"[:300])
