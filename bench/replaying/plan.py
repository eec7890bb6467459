"""A trace as prompts: which tokens, when, after which earlier answer. Deterministic for a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from pla_sglang import chain
from pla_sglang.chain.vocab import VOCAB_SIZE, WORD_BASE
from pla_sglang.workload import Trace

LEAST_PROMPT = 3  # a word and the two tokens that ask for a length
WORDS = range(WORD_BASE, VOCAB_SIZE)


@dataclasses.dataclass(slots=True)
class Planned:
    """One request. ``after`` is the index of the earlier turn whose answer the prompt continues, if any.

    ``own_ids`` is the whole prompt of a first turn; of a later one it is what follows the earlier prompt and answer.
    """

    index: int
    at_s: float
    own_ids: list[int]
    output_tokens: int
    after: int | None = None


def plan(trace: Trace, *, seed: int, time_scale: float = 1.0, sessions: bool = False) -> list[Planned]:
    """Requests of ``trace`` in order, arrivals stretched by ``time_scale``.

    Prompts share prefixes as the trace's block ids say. With ``sessions`` a later turn continues the earlier turn's
    prompt and answer instead, and is not sent before that answer is complete. Prompts shorter than three tokens become
    three tokens long, outputs longer than 65,535 are cut to that.
    """
    rng = random.Random(seed)
    blocks = Blocks(trace.block_tokens, seed)
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
            body = blocks.prompt(trace.hash_ids[index], tokens - len(ask), rng)
        else:
            body = rng.choices(WORDS, k=tokens - len(ask))
        if session is not None:
            latest[session] = (index, tokens + wanted)
        planned.append(Planned(index, float(trace.arrival_s[index]) * time_scale, body + ask, wanted, after))
    return planned


class Blocks:
    """Tokens of a prefix block, by its id: the same id gives the same tokens."""

    def __init__(self, block_tokens: int, seed: int) -> None:
        self._tokens = block_tokens
        self._seed = seed

    def prompt(self, ids: Sequence[int], tokens: int, rng: random.Random) -> list[int]:
        """``tokens`` ids that begin with the whole blocks of ``ids``; what is left over is nobody else's."""
        whole = min(len(ids), tokens // self._tokens)
        made: list[int] = []
        for block in ids[:whole]:
            made += random.Random(f"{self._seed}:{block}").choices(WORDS, k=self._tokens)
        return made + rng.choices(WORDS, k=tokens - len(made))
