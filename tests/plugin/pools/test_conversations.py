"""Conversations in the pools of one server, in virtual time: what ranks with real prefix caches compute of each turn.

Prefill takes 10 ms and 0.1 ms a new token, as in ``test_pools``; ranks serve first come, first served, report every
50 ms and cache all they have computed, in blocks of 64 tokens.
"""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest

from pla_sglang.load.prefix_index import token_block_keys
from pla_sglang.load.report import Backlog, Report
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.pools.driver import BLOCK_TOKENS, Pools
from pla_sglang.policy.common.step_model import StepModel

STEP = StepModel(g0_s=0.01, gw_s=0.0, gr_s=0.0, k0_s=0.0, b_s=1e-4, a_s=0.0)
TICK_S = 0.05


class CachingRank:
    """A queue of prefills, and the blocks that were computed."""

    def __init__(self, index: int, ranks: int) -> None:
        self.index = index
        self.computed: list[int] = []  # new tokens of each request
        self._ranks = ranks
        self._queue: deque[float] = deque()  # seconds left of each
        self._queued_tokens: deque[int] = deque()
        self._blocks: set[int] = set()
        self._sequence = 0

    def add_prompt(self, tokens: list[int]) -> int:
        """New tokens of the prompt here."""
        keys = token_block_keys(tokens, BLOCK_TOKENS)
        held = next((place for place, key in enumerate(keys) if key not in self._blocks), len(keys))
        new = len(tokens) - min(held * BLOCK_TOKENS, len(tokens) - 1)
        self._blocks.update(keys)
        self._queue.append(0.01 + 1e-4 * new)
        self._queued_tokens.append(new)
        self.computed.append(new)
        return new

    def serve(self, seconds: float) -> None:
        while self._queue and self._queue[0] <= seconds:
            seconds -= self._queue.popleft()
            self._queued_tokens.popleft()
        if self._queue:
            self._queue[0] -= seconds

    def report(self, now_s: float) -> Report:
        self._sequence += 1
        tokens = list(self._queued_tokens)
        return Report(
            instance="a",
            dp_rank=self.index,
            dp_size=self._ranks,
            sequence=self._sequence,
            received=len(self.computed),
            backlog=Backlog(len(tokens), sum(tokens), sum(n * n for n in tokens), 0),
            kv_capacity_tokens=1_000_000,
        )


class Server:
    """Pools and their ranks, at a time that tests set."""

    def __init__(self, ranks: int, short_ranks: int | None = None) -> None:
        config = PlaConfig(
            prefill_disagg="spatial", boundary_tokens=256, slo_ttft_ms=1000.0, pressure="off", short_ranks=short_ranks
        )
        self.pools = Pools(ranks, config, STEP, 2048, lambda rank, role: None)
        self.ranks = [CachingRank(index, ranks) for index in range(ranks)]
        self.now_s = 0.0
        self._send_reports()

    def send(self, name: str, tokens: list[int]) -> tuple[int, int]:
        """The rank that gets the prompt, and what it computes of it."""
        rank = self.pools.place_request(name, tokens, self.now_s)
        return rank, self.ranks[rank].add_prompt(tokens)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            for rank in self.ranks:
                rank.serve(TICK_S)
            self._send_reports()

    def keep_busy(self, rank: int, seconds: float) -> None:
        """A client that names its rank sends it work for ``seconds``."""
        tokens = [-1 - len(self.ranks[rank].computed)] * round((seconds - 0.01) / 1e-4)
        self.pools.note_external(rank, f"other-{self.now_s}", tokens, self.now_s)
        self.ranks[rank].add_prompt(tokens)
        self._send_reports()

    def _send_reports(self) -> None:
        for rank in self.ranks:
            self.pools.on_report(rank.report(self.now_s), self.now_s)


def prompt(talk: int, tokens: int) -> list[int]:
    """The first ``tokens`` of a conversation."""
    return list(range(talk * 1_000_000, talk * 1_000_000 + tokens))


def new_blocks(turns: list[int]) -> list[int]:
    """What each turn costs where all former ones were computed; ``turns``: tokens of each prompt."""
    return [turns[0], *[now - before // BLOCK_TOKENS * BLOCK_TOKENS for before, now in itertools.pairwise(turns)]]


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize(
    "turns",
    [
        pytest.param([2048, 2200, 2300, 2550, 2600], id="a long and short follow-ups"),
        pytest.param([100, 200, 290, 330, 400], id="shorts only"),
        pytest.param([200, 2500, 2600, 6000], id="a short and long follow-ups"),
    ],
)
def test_a_follow_up_computes_its_new_tokens_only(ranks: int, turns: list[int]) -> None:
    server = Server(ranks)
    sent = []
    for number, tokens in enumerate(turns):
        sent.append(server.send(f"turn-{number}", prompt(1, tokens)))
        server.pass_time(1.0)
    assert [computed for _, computed in sent] == new_blocks(turns)
    assert len({rank for rank, _ in sent}) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ranks", "short_ranks"), [(4, 2), (5, 2), (8, 4)])
def test_conversations_side_by_side_stay_where_they_are(ranks: int, short_ranks: int, seed: int) -> None:
    """24 conversations begin at once and are spread over all ranks; then each has four more turns, in any order."""
    rng = random.Random(seed)
    server = Server(ranks, short_ranks)
    lengths = {talk: [rng.choice((120, 1500, 3000))] for talk in range(24)}
    for turns in lengths.values():
        for _ in range(4):
            turns.append(turns[-1] + rng.randint(20, 300))
    homes = {talk: server.send(f"{talk}", prompt(talk, turns[0]))[0] for talk, turns in lengths.items()}
    assert set(homes.values()) == set(range(ranks))
    server.pass_time(5.0)
    order = [talk for talk in lengths for _ in range(4)]
    rng.shuffle(order)
    done = dict.fromkeys(lengths, 0)
    for talk in order:
        done[talk] += 1
        assert server.send(f"{talk}", prompt(talk, lengths[talk][done[talk]]))[0] == homes[talk]
        server.pass_time(TICK_S)
    assert sum(sum(rank.computed) for rank in server.ranks) == sum(sum(new_blocks(turns)) for turns in lengths.values())


@pytest.mark.parametrize("ranks", [4, 6])
def test_an_overloaded_holder_is_left_once(ranks: int) -> None:
    """Its queue of 3 s costs more than 2,200 tokens elsewhere, 0.23 s. The conversation then lives there."""
    server = Server(ranks)
    holder, _ = server.send("first", prompt(1, 2048))
    server.pass_time(1.0)
    server.keep_busy(holder, 3.0)
    other, computed = server.send("second", prompt(1, 2200))
    assert other != holder
    assert computed == 2200
    assert server.pools.count_decisions()["dispatched"]["pla.recompute"] == 1
    server.pass_time(1.0)
    assert server.send("third, the first holder still busy", prompt(1, 2300)) == (other, 2300 - 34 * BLOCK_TOKENS)
    server.pass_time(4.0)
    assert server.send("fourth, it is free again", prompt(1, 2400)) == (other, 2400 - 35 * BLOCK_TOKENS)


def test_a_holder_that_has_changed_pools_is_still_the_holder() -> None:
    server = Server(4)
    holder, _ = server.send("first", prompt(1, 2048))
    server.pass_time(1.0)
    server.pools.order_role(holder, "short", server.now_s)
    assert server.send("second", prompt(1, 2200)) == (holder, 152)
    server.pools.order_role(holder, "long", server.now_s)
    server.pass_time(1.0)
    assert server.send("third", prompt(1, 4000)) == (holder, 4000 - 34 * BLOCK_TOKENS)
