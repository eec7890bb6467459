"""What an engine's passes take, measured at its start (Arrow section 5.3, DOPD V-D).

Plain requests with random tokens, sent through this server's own front after SGLang's warm-up. Nothing is timed here:
the scheduler measures these passes as it measures all others, and its fits learn from them. So what is known afterwards
holds for this device, this model and these flags, and every later request refines it.

1. Prompts alone, from small ones to a whole chunk: the step model of prefills.
2. Batches of decodes, short and long contexts: decode steps.
3. Prompts beside running decodes: what decodes add to a pass, where they may join it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pla_sglang.plugin.config import current
from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.profiles.fit import PLAIN_IDS

logger = logging.getLogger(__name__)

BUDGET_S = 10.0  # of device time; what is left then is learned while serving
FIRST_ROUNDS, LAST_ROUNDS = 2, 3  # of prompts alone, before and after all else: a slow device has no time for the last
PROMPT_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 8, 32)
CONTEXT_TOKENS = (128, 2048)
STEPS = 24  # decode steps of a batch
BESIDE_TOKENS = (64, 256, 512, 1024, 2048)
BESIDE_BATCH = 8
BESIDE_STEPS = 64
REQUEST_TIMEOUT_S = 600.0  # as SGLang waits for its warm-up

Prompt = list[int]
Send = Callable[[list[Prompt], int], None]  # prompts of one batch, and tokens to generate for each


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal requests. ``beside``: prompts that are sent one by one while it decodes."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    beside: tuple[int, ...] = ()


def list_shapes(*, chunk_tokens: int, room_tokens: int, cache_tokens: int, slots: int, mixes: bool) -> Iterator[Shape]:
    """What to measure, most important first.

    Args:
        chunk_tokens: of a prefill pass at most.
        room_tokens: of one request at most.
        cache_tokens: of all together at most.
        slots: requests that run at once.
        mixes: decodes may join prefill passes.
    """
    longest = min(chunk_tokens, room_tokens - STEPS)
    prompts = [Shape(1, tokens, 1) for tokens in PROMPT_TOKENS if tokens <= longest]
    yield from prompts * FIRST_ROUNDS
    for context in CONTEXT_TOKENS:
        for batch in BATCHES:
            fits = context + STEPS <= room_tokens and batch * (context + STEPS) <= cache_tokens
            if batch <= slots and fits:
                yield Shape(batch, context, STEPS)
    batch = min(BESIDE_BATCH, slots - 1)
    beside = tuple(tokens for tokens in BESIDE_TOKENS if tokens <= longest)
    if mixes and batch > 0 and batch * (CONTEXT_TOKENS[0] + BESIDE_STEPS) + sum(beside) <= cache_tokens:
        yield Shape(batch, CONTEXT_TOKENS[0], BESIDE_STEPS, beside)
    yield from prompts * LAST_ROUNDS


def measure(
    shapes: Sequence[Shape], send: Send, rng: random.Random, clock: Callable[[], float], budget_s: float
) -> int:
    """Sends ``shapes`` until the time is over; how many were sent. ``send`` returns when all answers are complete."""
    ends_s = clock() + budget_s
    for number, shape in enumerate(shapes):
        if clock() >= ends_s:
            return number
        batch = [_make_prompt(shape.prompt_tokens, rng) for _ in range(shape.batch)]
        if not shape.beside:
            send(batch, shape.output_tokens)
            continue
        decodes = threading.Thread(target=send, args=(batch, shape.output_tokens))
        decodes.start()
        try:
            for tokens in shape.beside:
                send([_make_prompt(tokens, rng)], 1)
        finally:
            decodes.join()
    return len(shapes)


def why_not(args: Any) -> str | None:
    """Why such a server cannot be measured; None: it can. ``args``: SGLang's, resolved."""
    if args.dp_size > 1:
        return f"--dp-size {args.dp_size}: one rank cannot be asked alone"
    if args.disaggregation_mode != "null":
        return f"--disaggregation-mode {args.disaggregation_mode}: a part of a request needs the other part"
    return None


def measure_passes(manager: Any, room_tokens: int) -> None:
    """Measures this server, which does not say meanwhile that it is ready. What fails is left to later requests.

    ``manager``: the host's, which has served its warm-up; ``room_tokens``: of its KV cache. Called in a thread of its
    process, beside its event loop.
    """
    args = resolve(manager.server_args)
    shapes = list_shapes(
        chunk_tokens=args.chunked_prefill_size if (args.chunked_prefill_size or 0) > 0 else PROMPT_TOKENS[-1],
        room_tokens=min(room_tokens, int(manager.context_len)),
        cache_tokens=room_tokens,
        slots=args.max_running_requests or max(BATCHES),
        mixes=bool(args.enable_mixed_chunk),
    )
    status = manager.server_status
    manager.server_status = type(status).Starting
    began_s, time_scale = time.monotonic(), current().time_scale
    try:
        sent = measure(
            list(shapes), functools.partial(_send, manager), random.Random(1), time.monotonic, BUDGET_S * time_scale
        )
        logger.info("pla_sglang: passes measured in %.1f s, by %d batches", time.monotonic() - began_s, sent)
    except (RuntimeError, ValueError, TimeoutError, asyncio.CancelledError) as error:
        logger.warning("pla_sglang: not all passes could be measured at this start: %r", error)
    finally:
        manager.server_status = status


def _send(manager: Any, prompts: list[Prompt], output_tokens: int) -> None:
    """Raises what the host does, and TimeoutError."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=prompts,
        sampling_params={"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True},
        log_metrics=False,
    )

    async def read() -> None:
        async for _ in manager.generate_request(request, None):
            pass

    asyncio.run_coroutine_threadsafe(read(), manager.event_loop).result(timeout=REQUEST_TIMEOUT_S)


def _make_prompt(tokens: int, rng: random.Random) -> Prompt:
    return rng.choices(PLAIN_IDS, k=tokens)
