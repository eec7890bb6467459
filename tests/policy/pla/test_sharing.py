"""Who shares a pass: by the seconds that it adds and saves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.views import long, short, waiting

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.pla.sharing import PassContents, Sharing, contents_of

# A pass costs 10 ms beside 0.1 ms a token: 200 tokens add 20 ms to a pass that they join, and save one of 10 ms.
PASS = StepModel(g0_s=0.0, gw_s=0.0, gr_s=0.0, k0_s=0.0, b_s=1e-4, a_s=0.0, pass_s=0.010)


@pytest.mark.parametrize(
    ("name", "first", "others", "concerned", "together"),
    [
        ("few wait: alone is soonest", [200], [200], 2, []),
        ("10 ms for each of five, half of it, are more than 20 ms for one", [200], [200], 6, [0]),
        ("a third adds 20 ms to two, and a third of what it saves is less", [200], [200, 200], 13, [0]),
        ("of fifteen: 130 ms, and a third of them are 43", [200], [200, 200], 15, [0, 1]),
        ("a tiny one is cheap to take along", [200], [10], 2, [0]),
        ("one of 300 and one of 30 share a pass", [300], [30], 2, [0]),
        ("a long does not join shorts", [30, 30], [900], 20, []),
        ("but one behind it that is small does", [30, 30], [900, 30], 30, [1]),
        ("what does not fit stays out", [200], [900, 30], 40, [1]),
        ("nothing fits a full pass", [1000], [1], 40, []),
        ("many wait: the pass is filled", [200], [200] * 9, 200, [0, 1, 2, 3]),
    ],
)
def test_who_joins(name: str, first: list[int], others: list[int], concerned: float, together: list[int]) -> None:
    candidates = [waiting(tokens) for tokens in others]
    taken = Sharing(concerned, PASS).take_companions(
        contents_of(waiting(tokens) for tokens in first), candidates, budget_tokens=1000, slots=64
    )
    assert taken == [candidates[index] for index in together]


def test_slots_are_the_limit() -> None:
    taken = Sharing(1000, PASS).take_companions(
        contents_of([short()]), [short() for _ in range(9)], budget_tokens=1000, slots=3
    )
    assert len(taken) == 2


@pytest.mark.parametrize("waiting_count", [2, 5, 14, 50, 200])
def test_passes_have_the_size_at_which_the_mean_time_is_least(waiting_count: int) -> None:
    """Among requests of one size: about sqrt(N * c / b) of them, c the cost of a pass and b that of a request."""
    others = [waiting(200) for _ in range(waiting_count - 1)]
    taken = Sharing(waiting_count, PASS).take_companions(
        contents_of([waiting(200)]), others, budget_tokens=1 << 20, slots=1 << 10
    )

    def mean_s(size: int) -> float:
        passes = [index // size + 1 for index in range(waiting_count)]
        ends_s = [number * PASS.pass_s + min(number * size, waiting_count) * 0.02 for number in passes]
        return sum(ends_s) / waiting_count

    best_s = min(mean_s(size) for size in range(1, waiting_count + 1))
    assert mean_s(1 + len(taken)) <= 1.06 * best_s


@given(tokens=st.integers(1, 2000), count=st.integers(0, 30), few=st.floats(0, 100), more=st.floats(0, 100))
def test_more_that_wait_never_make_passes_smaller(tokens: int, count: int, few: float, more: float) -> None:
    first, *others = (waiting(tokens) for _ in range(count + 1))

    def joined(concerned: float) -> int:
        sharing = Sharing(concerned, PASS)
        return len(sharing.take_companions(contents_of([first]), others, budget_tokens=8192, slots=64))

    assert joined(few) <= joined(few + more)


@pytest.mark.parametrize(
    ("name", "short_prompts", "tokens", "usual", "concerned", "joins"),
    [
        ("a whole pass saved for few", 1, 900, 900, 3, False),
        ("for many", 1, 900, 900, 20, True),
        ("many shorts would wait for it", 9, 900, 900, 20, False),
        ("a small piece saves a small part of a pass", 1, 90, 900, 3, False),
        ("its last tokens save a whole one", 1, 90, 90, 3, True),
    ],
)
def test_a_chunk_joins_shorts(
    name: str, short_prompts: int, tokens: int, usual: int, concerned: float, joins: bool
) -> None:
    contents = contents_of([short() for _ in range(short_prompts)])
    assert Sharing(concerned, PASS).takes_chunk(contents, long(0.0, 4000), tokens, usual) is joins


def test_contents() -> None:
    contents = PassContents().with_part(100, 50).with_part(10, 0)
    assert contents == PassContents((100, 10), 50, 100 * 200 + 10 * 10)
    assert contents.step_s(PASS) == pytest.approx(0.010 + 0.011)
