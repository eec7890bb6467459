"""A trace as prompts of the chain model, sent to one server or router, every token checked.

In open loop, or, where the trace has think times, as closed loops: each session sends its next request its think time
after the answer before it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import numpy as np
import uvloop

from bench.harness.bench import is_complete, measuring
from bench.harness.load_client import START_DELAY_S, Answer, StreamClient, sleep_until
from bench.harness.report import progress_bar, show
from pla_sglang.load.prefix_index import token_block_keys
from pla_sglang.sim import chain
from pla_sglang.sim.chain.vocab import VOCAB_SIZE, WORD_BASE, token_text
from pla_sglang.sim.metrics.goodput import Served, Slo, goodput, quantile
from pla_sglang.sim.workload import Trace
from pla_sglang.testing.server import ServerError

MAX_LAG_MS = 50.0  # by which the client may be late (99th percentile)
LEAST_PROMPT = 3  # a word and the two tokens that ask for a length
WORDS = range(WORD_BASE, VOCAB_SIZE)


@dataclass(slots=True)
class Planned:
    """One request. ``after`` is the index of the earlier turn whose answer it waits for, if any.

    ``own_ids`` is the whole prompt, but for a turn that continues the answer that came (``after`` without ``think_s``):
    then it is what follows the earlier prompt and answer. ``think_s``: real time from that answer to this request.
    """

    index: int
    at_s: float
    own_ids: list[int]
    output_tokens: int
    after: int | None = None
    think_s: float | None = None

    @property
    def is_whole(self) -> bool:
        """Tells whether ``own_ids`` is the whole prompt."""
        return self.after is None or self.think_s is not None


def plan(trace: Trace, *, seed: int, time_scale: float = 1.0, sessions: bool = False) -> list[Planned]:
    """Requests of ``trace`` in order, arrivals stretched by ``time_scale``.

    Prompts share prefixes as the trace's block ids say. With ``sessions`` a later turn continues the earlier turn's
    prompt and answer instead, and is not sent before that answer is complete. A trace with think times makes closed
    loops (``_plan_loops``). Prompts shorter than three tokens become three tokens long, outputs longer than 65,535 are
    cut to that.
    """
    if trace.think_s is not None:
        return _plan_loops(trace, seed=seed, time_scale=time_scale)
    rng = random.Random(seed)
    latest: dict[int, tuple[int, int]] = {}  # session -> index and length, answer included, of its last turn
    planned = []
    for index in range(len(trace)):
        tokens = max(LEAST_PROMPT, int(trace.input_tokens[index]))
        wanted = min(int(trace.output_tokens[index]), chain.MAX_ASK)
        session = int(trace.session[index]) if sessions and trace.session is not None else None
        before = latest.get(session) if session is not None else None
        ask = chain.ask_ids(wanted)
        after = None
        if before is not None and tokens >= before[1] + LEAST_PROMPT:
            after, body = before[0], rng.choices(WORDS, k=tokens - before[1] - len(ask))
        elif trace.hash_ids is not None and not sessions:
            body = _block_prompt(trace.hash_ids[index], tokens - len(ask), trace.block_tokens, seed, rng)
        else:
            body = rng.choices(WORDS, k=tokens - len(ask))
        if session is not None:
            latest[session] = (index, tokens + wanted)
        planned.append(Planned(index, float(trace.arrival_s[index]) * time_scale, body + ask, wanted, after))
    return planned


def _block_prompt(ids: Sequence[int], tokens: int, block_tokens: int, seed: int, rng: random.Random) -> list[int]:
    """``tokens`` ids that begin with the whole blocks of ``ids``; what is left over is nobody else's."""
    prompt: list[int] = []
    for block in ids[: tokens // block_tokens]:  # the same id gives the same tokens
        prompt += random.Random(f"{seed}:{block}").choices(WORDS, k=block_tokens)
    return prompt + rng.choices(WORDS, k=tokens - len(prompt))


def _plan_loops(trace: Trace, *, seed: int, time_scale: float) -> list[Planned]:
    """All but the first request of a session come their think time after the answer before them.

    A prompt begins with the blocks that earlier prompts have had too. Where an earlier prompt ends within the block
    that follows, this one goes on with that prompt's end and its answer, as far as its length allows. The rest is new.
    Answers in prompts are the oracle's: where one comes otherwise, the run counts for nothing. So all prompts are known
    before the first request is sent.
    """
    assert trace.session is not None
    assert trace.think_s is not None
    rng, size = random.Random(seed), trace.block_tokens
    block_ids: dict[int, list[int]] = {}  # block -> its tokens
    rests: dict[tuple[int, int | None], list[int]] = {}  # session and a prompt's last whole block -> what came behind
    latest: dict[int, int] = {}  # session -> index of its last request
    planned = []
    for index in range(len(trace)):
        session = int(trace.session[index])
        wanted = min(int(trace.output_tokens[index]), chain.MAX_ASK)
        ask = chain.ask_ids(wanted)
        room = max(LEAST_PROMPT, int(trace.input_tokens[index])) - len(ask)
        blocks = () if trace.hash_ids is None else trace.hash_ids[index][: room // size]
        known = list(itertools.takewhile(block_ids.__contains__, blocks))
        prompt = [token for block in known for token in block_ids[block]]
        prompt += rests.get((session, known[-1] if known else None), [])[: room - len(prompt)]
        prompt += rng.choices(WORDS, k=room - len(prompt))
        prompt += ask
        for place in range(len(known), len(blocks)):
            block_ids[blocks[place]] = prompt[place * size : (place + 1) * size]
        answer = chain.expected(prompt, wanted + 1).tokens
        rests[session, blocks[-1] if blocks else None] = [*prompt[len(blocks) * size :], *answer]
        after = latest.get(session)
        think_s = None if after is None else float(trace.think_s[index]) * time_scale
        planned.append(Planned(index, float(trace.arrival_s[index]) * time_scale, prompt, wanted, after, think_s))
        latest[session] = index
    return planned


def name_prefixes(trace: Trace, planned: Sequence[Planned], block_tokens: int) -> Trace:
    """``trace`` with ids for the blocks of the planned prompts and, beyond them, of their answers.

    For a simulator that is to find in prefix caches what engines find there. All prompts must be whole.
    """
    ids: dict[int, int] = {}
    prompts, answers = [], []
    for request in planned:
        assert request.is_whole
        answer = chain.expected(request.own_ids, request.output_tokens + 1).tokens[:-1]  # the last one is never read
        keys = token_block_keys([*request.own_ids, *answer], block_tokens)
        blocks = tuple(ids.setdefault(key, len(ids)) for key in keys)
        whole = len(request.own_ids) // block_tokens
        prompts.append(blocks[:whole])
        answers.append(blocks[whole:])
    return replace(trace, hash_ids=tuple(prompts), answer_ids=tuple(answers), block_tokens=block_tokens)


# -- sending -----------------------------------------------------------------------------------------------------------


BodyOf = Callable[[Planned, list[int]], bytes]  # of a request and its prompt


@dataclass(slots=True)
class Record(Answer):
    planned: Planned
    due_s: float
    prompt_ids: list[int] = field(default_factory=list, repr=False)


def generate_body(request: Planned, prompt_ids: list[int]) -> bytes:
    """SGLang's own endpoint, greedy, ended by the end-of-sequence token that the prompt asks for."""
    return encode_planned(request, input_ids=prompt_ids)


def text_body(request: Planned, prompt_ids: list[int]) -> bytes:
    """The prompt as text: SGLang's router sees neither length nor prefix of prompts that are given as ids."""
    return encode_planned(request, text="".join(map(token_text, prompt_ids)))


def encode_planned(request: Planned, **fields: Any) -> bytes:
    # Room for one token more, so that an answer ends because the model says so.
    sampling = {"temperature": 0, "max_new_tokens": request.output_tokens + 1}
    return msgspec.json.encode({**fields, "sampling_params": sampling, "stream": True})


class Replay(StreamClient):
    """One run against one server or router.

    Args:
        body: makes the body of a request from its prompt.
    """

    def __init__(self, base_url: str, *, timeout_s: float, body: BodyOf = generate_body) -> None:
        super().__init__(base_url, timeout_s=timeout_s)
        self._body = body
        self._done: dict[int, asyncio.Event] = {}
        self._records: dict[int, Record] = {}

    async def run(self, planned: Sequence[Planned], *, on_done: Callable[[], None] | None = None) -> list[Record]:
        """Send everything and wait for every answer. An interruption ends the run; the finished answers remain."""
        parents = {request.after for request in planned if request.after is not None}
        self._done = {index: asyncio.Event() for index in parents}
        bodies = {request.index: self._body(request, request.own_ids) for request in planned if request.is_whole}
        gc.collect()
        gc.freeze()  # a collection over all these prompts would stop the clock
        start_s = time.perf_counter() + START_DELAY_S

        async def send(request: Planned) -> None:
            if request.think_s is None:
                await sleep_until(start_s + request.at_s)
            await self._send_planned(request, bodies.pop(request.index, None), start_s)
            if on_done is not None:
                on_done()

        with measuring():
            async with self, asyncio.TaskGroup() as group:
                for request in planned:
                    group.create_task(send(request))
        records = [self._records[request.index] for request in planned if request.index in self._records]
        for record in records:
            record.settle()
        return records if is_complete() else [record for record in records if record.done_s is not None]

    async def _send_planned(self, request: Planned, body: bytes | None, start_s: float) -> None:
        record = self._records[request.index] = Record(request, request.at_s, prompt_ids=request.own_ids)
        try:
            if request.after is not None and not await self._wait_for_answer(record, start_s):
                return
            if not request.is_whole:
                body = self._body(request, record.prompt_ids)
            assert body is not None
            await self.send_body(record, body, start_s)
        finally:
            if request.index in self._done:
                self._done[request.index].set()

    async def _wait_for_answer(self, record: Record, start_s: float) -> bool:
        """Until a later turn may be sent; False: never, as the answer before it has failed.

        It is due its think time after that answer; without one when the answer is there, if that is after its arrival,
        and its prompt goes on with it.
        """
        request = record.planned
        assert request.after is not None
        await self._done[request.after].wait()
        earlier = self._records[request.after]
        earlier.settle()
        if earlier.error is not None:
            record.error = "the turn before failed"
            return False
        if request.think_s is None:
            record.due_s = max(record.due_s, time.perf_counter() - start_s)
            record.prompt_ids = [*earlier.prompt_ids, *earlier.output_ids, *request.own_ids]
        else:
            assert earlier.done_s is not None
            record.due_s = earlier.done_s + request.think_s
            await sleep_until(start_s + record.due_s)
        return True

    async def send_body(self, record: Record, body: bytes, start_s: float) -> None:
        """What a client that behaves in another way replaces."""
        await self.stream(record, body, start_s)


def replay(url: str, planned: list[Planned], *, timeout_s: float, body: BodyOf = generate_body) -> list[Record]:
    """Run the plan, on uvloop: it halves what an event costs the client."""
    with progress_bar("replay", len(planned)) as advance, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Replay(url, timeout_s=timeout_s, body=body).run(planned, on_done=advance))


# -- figures -----------------------------------------------------------------------------------------------------------


def require_answers(records: Sequence[Record]) -> None:
    """Raises ServerError where a request failed, KeyboardInterrupt where the run was cut short."""
    if not is_complete():
        raise KeyboardInterrupt
    if errors := [record.error for record in records if record.error is not None]:
        raise ServerError(f"a request failed: {errors[0]}")


def count_wrong(record: Record) -> int:
    """Tokens that differ from the oracle's, or are missing or too many; 0 for an answer that is right."""
    wanted = chain.expected(record.prompt_ids, record.planned.output_tokens + 1).tokens
    return count_wrong_tokens(wanted, record.output_ids)


def count_wrong_tokens(wanted: Sequence[object], got: Sequence[object]) -> int:
    """Those that differ, are missing or are too many."""
    return sum(a != b for a, b in zip(wanted, got, strict=False)) + abs(len(wanted) - len(got))


def served(records: Sequence[Record], time_scale: float) -> Served:
    """Columns for the metrics, in device time. Failed requests have no finish."""

    def column(values: Sequence[float | None]) -> np.ndarray:
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64) / time_scale

    return Served(
        arrival_s=column([record.due_s for record in records]),
        first_token_s=column([record.token_s[0] if record.token_s else None for record in records]),
        finish_s=column([record.done_s if record.error is None else None for record in records]),
        output_tokens=np.array([record.planned.output_tokens for record in records], dtype=np.int64),
    )


class Sent(Protocol):
    """A request that was to be sent at a time, and when it was."""

    sent_s: float | None
    due_s: float


def lag_s(records: Sequence[Sent]) -> np.ndarray:
    """How late the client sent each request, in real seconds."""
    return np.array([record.sent_s - record.due_s for record in records if record.sent_s is not None])


def figures(
    records: Sequence[Record], slo: Slo, *, time_scale: float, max_lag_ms: float = MAX_LAG_MS
) -> dict[str, Any]:
    """The JSON figures of one run. ``valid`` is false when the client was late or tokens were wrong."""
    ordered = sorted(records, key=lambda record: record.due_s)
    columns = served(ordered, time_scale)
    met = goodput(columns, slo)
    finished = [record for record in ordered if record.error is None]
    wrong = [count_wrong(record) for record in finished]
    lag_p99_ms = quantile(lag_s(ordered) * 1e3, 99)
    return {
        "requests": len(ordered),
        "completed": len(finished),
        "tokens_verified": sum(len(record.output_ids) for record in finished),
        "tokens_wrong": sum(wrong),
        "requests_wrong": sum(count > 0 for count in wrong),
        "slo_ttft_s": slo.ttft_s,
        "slo_tpot_s": slo.tpot_s,
        "slo_attainment": met.attainment,
        "goodput_rps": met.goodput_per_s,
        "throughput_rps": met.throughput_per_s,
        "output_tokens_per_s": met.output_tokens_per_s,
        **{name: getattr(met, name) for name in ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")},
        "client_lag_p99_ms": lag_p99_ms,
        "events": sum(len(record.token_s) for record in ordered),
        "valid": bool(lag_p99_ms <= max_lag_ms and sum(wrong) == 0),
    }


def print_figures(result: dict[str, Any], title: str) -> None:
    rows = [(key, f"{value:.4g}" if isinstance(value, float) else str(value)) for key, value in result.items()]
    show(title, ("figure", "value"), rows)
