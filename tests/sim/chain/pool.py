"""A KV pool and a driver for the chain model's forward pass, without SGLang."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from pla_sglang.sim.chain.batch import Batch, ChainTables
from pla_sglang.sim.chain.slots import forward

CONTEXT = 512
TABLES = ChainTables(CONTEXT)


class Pool:
    """``requests`` rows of a request-to-slot table, slots given out in random order."""

    def __init__(self, requests: int, *, width: int = 4, seed: int = 0, repeats: bool = False) -> None:
        count = requests * CONTEXT
        order = list(range(count))
        random.Random(seed).shuffle(order)
        self.keys = torch.zeros(count, width, dtype=torch.int32)
        self.values = torch.zeros(count, width, dtype=torch.int32)
        self.table = torch.tensor(order).view(requests, CONTEXT)
        self.lengths = [0] * requests
        self.repeats = repeats

    def run(
        self,
        chunks: Sequence[tuple[int, Sequence[int]]],
        *,
        audit_tokens: int = 1 << 20,
        shift: int = 0,
        said_shift: int | None = None,
    ) -> list[int]:
        """One pass over (request, new ids); the next token of each. ``shift`` is added to the last one's position,
        ``said_shift`` to what is said of the last one's prefix; None: nothing is said of prefixes."""
        rows = [request for request, _ in chunks]
        prefix = [self.lengths[request] for request in rows]
        slots = [
            self.table[request, start : start + len(ids)] for (request, ids), start in zip(chunks, prefix, strict=True)
        ]
        places = [start + place for (_, ids), start in zip(chunks, prefix, strict=True) for place in range(len(ids))]
        places[-1] += shift
        batch = Batch(
            ids=torch.tensor([token for _, ids in chunks for token in ids]),
            slots=torch.cat(slots),
            prefix=torch.tensor(prefix),
            lengths=torch.tensor([len(ids) for _, ids in chunks]),
            table=self.table,
            rows=torch.tensor(rows),
            positions=torch.tensor(places),
            said_prefix=None if said_shift is None else torch.tensor([*prefix[:-1], prefix[-1] + said_shift]),
        )
        tokens = forward(TABLES, self.keys, self.values, batch, audit_tokens, repeats=self.repeats)
        for request, ids in chunks:
            self.lengths[request] += len(ids)
        return [int(token) for token in tokens]

    def generate(self, request: int, prompt: Sequence[int], count: int, *, audit_tokens: int = 1 << 20) -> list[int]:
        """Prefill ``prompt`` in one pass and decode until ``count`` tokens."""
        tokens = self.run([(request, prompt)], audit_tokens=audit_tokens)
        return self.decode(request, tokens, count, audit_tokens=audit_tokens)

    def decode(self, request: int, tokens: list[int], count: int, *, audit_tokens: int = 1 << 20) -> list[int]:
        while len(tokens) < count:
            tokens += self.run([(request, tokens[-1:])], audit_tokens=audit_tokens)
        return tokens

    def slots_of(self, request: int, start: int, stop: int) -> torch.Tensor:
        return self.table[request, start:stop]
