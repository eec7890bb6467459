"""Workloads made from length models: independent requests, conversations, and the head-of-line case."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pla_sglang.sim.workload.lengths import LengthModel, fixed, length_model
from pla_sglang.sim.workload.trace import BadRow, Trace, TraceError


@dataclass(frozen=True)
class Arrivals:
    """A renewal process of arrivals.

    Attributes:
        rate_per_s: mean rate.
        rng: source of randomness, seeded by the caller.
        cv: coefficient of variation of the gaps, which are gamma distributed: 0 is periodic, 1 Poisson, above 1 bursty.
        think_s: mean time from one turn of a conversation to the next (exponential); counted between arrivals, because
            a trace does not contain the end of an answer.
    """

    rate_per_s: float
    rng: random.Random
    cv: float = 1.0
    think_s: float = 30.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise TraceError(f"rate_per_s is {self.rate_per_s}; allowed: finite, above 0")
        if not (math.isfinite(self.cv) and self.cv >= 0):
            raise TraceError(f"cv is {self.cv}; allowed: finite, 0 and more")
        if not (math.isfinite(self.think_s) and self.think_s >= 0):
            raise TraceError(f"think_s is {self.think_s}; allowed: finite, 0 and more")

    def times(self) -> Iterator[float]:
        """Arrival times in seconds, an infinite sequence; the first after one gap."""
        now_s = 0.0
        while True:
            now_s += self._gap_s()
            yield now_s

    def _gap_s(self) -> float:
        mean_s = 1 / self.rate_per_s
        if self.cv == 0:
            return mean_s
        if self.cv == 1:
            return self.rng.expovariate(self.rate_per_s)
        shape = 1 / (self.cv * self.cv)
        return self.rng.gammavariate(shape, mean_s / shape)

    def think(self) -> float:
        """One pause between turns, in seconds."""
        return self.rng.expovariate(1 / self.think_s) if self.think_s else 0.0


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One question and its answer; the context before it is the sum of the earlier turns."""

    new_tokens: int
    output_tokens: int


def generated_trace(
    count: int, arrivals: Arrivals, inputs: LengthModel, outputs: LengthModel, *, name: str = "generated"
) -> Trace:
    """``count`` independent requests; input and output lengths are drawn independently of each other."""
    if count < 1:
        raise TraceError(f"{count} requests; allowed: 1 and more")
    rng = arrivals.rng
    times = list(itertools.islice(arrivals.times(), count))
    return Trace(
        name,
        np.array(times),
        np.array([inputs.draw(rng) for _ in times], dtype=np.int64),
        np.array([outputs.draw(rng) for _ in times], dtype=np.int64),
    )


def chat_trace(
    sessions: int,
    arrivals: Arrivals,
    *,
    first: LengthModel | None = None,
    later: LengthModel | None = None,
    outputs: LengthModel | None = None,
    mean_turns: float = 5.45,
    name: str = "chat",
) -> Trace:
    """Conversations that arrive at ``arrivals``; turns follow after a pause, and prompts hold the earlier turns.

    Default lengths: LMSYS-like prompts (PLA-Serve Fig. 2), ShareGPT-4 answers. The number of turns is geometric; 5.45
    is the mean of the ShareGPT-4 conversations.
    """
    if sessions < 1:
        raise TraceError(f"{sessions} sessions; allowed: 1 and more")
    if not mean_turns >= 1:
        raise TraceError(f"mean_turns is {mean_turns}; allowed: 1 and more")
    first = first or length_model("lmsys_first_turn_prompt")
    later = later or length_model("lmsys_later_turn_prompt")
    outputs = outputs or length_model("sharegpt4_output")
    rng = arrivals.rng
    talks = []
    for _ in range(sessions):
        turns = 1
        while rng.random() >= 1 / mean_turns:
            turns += 1
        models = [first, *itertools.repeat(later, turns - 1)]
        talks.append([ChatTurn(model.draw(rng), outputs.draw(rng)) for model in models])
    return conversation_trace(name, talks, arrivals)


def conversation_trace(
    name: str, talks: Sequence[Sequence[ChatTurn]], arrivals: Arrivals, *, skipped: tuple[BadRow, ...] = ()
) -> Trace:
    """One request per turn; sessions start at ``arrivals``, later turns after pauses; with block ids by session."""
    rows: list[tuple[float, int, int, int, int]] = []
    for session, (start_s, turns) in enumerate(zip(arrivals.times(), talks, strict=False)):
        at_s, context = start_s, 0
        for place, turn in enumerate(turns):
            at_s += arrivals.think() if place else 0.0
            rows.append((at_s, context + turn.new_tokens, turn.output_tokens, session, place))
            context += turn.new_tokens + turn.output_tokens
    rows.sort()
    columns = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    whole = columns[1:].astype(np.int64)  # lengths and counters are far below 2**53, so nothing is rounded
    trace = Trace(name, columns[0], whole[0], whole[1], session=whole[2], turn=whole[3], skipped=skipped)
    return trace.with_session_hashes()


def hol_trace(*, longs: int = 18, long_tokens: int = 24_000, shorts: int = 11, short_tokens: int = 2_000) -> Trace:
    """The head-of-line case of SGLang issue #22831: long prompts at once, short ones directly after them."""
    if longs < 0 or shorts < 0 or longs + shorts == 0:
        raise TraceError(f"{longs} longs and {shorts} shorts; allowed: 0 and more, not both 0")
    count = longs + shorts
    lengths = [long_tokens] * longs + [short_tokens] * shorts
    return Trace(
        "hol",
        np.arange(count, dtype=np.float64) * 1e-3,
        np.array(lengths, dtype=np.int64),
        np.full(count, 16, dtype=np.int64),
        client=np.array([0] * longs + [1] * shorts, dtype=np.int64),
    )


SHORT, LONG = 0, 1  # clients of ``short_and_long_trace``


def short_and_long_trace(shorts: int, longs: int, rng: random.Random) -> Trace:
    """Prompts under 64 tokens of one client and of 1,025 to 4,096 of another (PLA-Serve Figure 1), one token out.

    All at time 0, short prompts first: a closed loop takes each client's rows by themselves.
    """
    short = LengthModel((1.0,), (3.4,), (0.5,), least=8, most=63)
    long = LengthModel((1.0,), (7.6,), (0.3,), least=1025, most=4096)
    kinds = ((shorts, short), (longs, long))
    inputs = [generated_trace(count, Arrivals(1.0, rng), model, fixed(1)).input_tokens for count, model in kinds]
    clients = np.repeat([SHORT, LONG], [shorts, longs])
    zeros, ones = np.zeros(shorts + longs), np.ones(shorts + longs, dtype=np.int64)
    return Trace("short and long", zeros, np.concatenate(inputs), ones, client=clients)
