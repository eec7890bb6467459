from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from bench.harness.workload import (
    HolShape,
    Vocabulary,
    gapped_arrivals,
    hol_arrivals,
    hol_requests,
    overload_requests,
    poisson_arrivals,
)

WORDS = Vocabulary(tuple(range(3, 500)))


def test_scale_shrinks_lengths_and_chunk_but_not_counts() -> None:
    shape = HolShape.of_issue(5)
    assert (shape.long_tokens, shape.short_tokens, shape.chunk_tokens) == (4800, 400, 1638)
    assert (shape.long_count, shape.short_count) == (18, 11)


def test_same_seed_same_requests_and_other_round_other_prompts() -> None:
    shape = HolShape.of_issue(50)
    first, again = (hol_requests(shape, WORDS, seed=3, round_index=0) for _ in range(2))
    other = hol_requests(shape, WORDS, seed=3, round_index=1)
    assert first == again
    assert not {r.input_ids for r in first} & {r.input_ids for r in other}
    assert not {r.rid for r in first} & {r.rid for r in other}


def test_stream_pattern_spreads_shorts_over_the_longs() -> None:
    shape = HolShape.of_issue(50)
    arrivals = hol_arrivals(shape, random.Random(0), pattern="stream", burst_s=1.0, spread_s=20.0)
    longs = [at_s for at_s, kind in arrivals if kind == "long"]
    shorts = [at_s for at_s, kind in arrivals if kind == "short"]
    assert (len(longs), len(shorts)) == (18, 11)
    assert max(longs) <= 1.0
    assert min(shorts) >= 1.0
    assert max(shorts) <= 17.0
    assert arrivals == sorted(arrivals)


def test_burst_pattern_mixes_everything() -> None:
    arrivals = hol_arrivals(HolShape.of_issue(50), random.Random(0), pattern="burst", burst_s=1.0, spread_s=20.0)
    assert max(at_s for at_s, _ in arrivals) <= 1.0
    kinds = [kind for _, kind in arrivals]
    assert kinds not in (sorted(kinds), sorted(kinds, reverse=True))


def test_unknown_pattern_is_named() -> None:
    with pytest.raises(ValueError, match=r"'storm'.*stream, burst"):
        hol_arrivals(HolShape.of_issue(50), random.Random(0), pattern="storm", burst_s=1, spread_s=1)


def test_poisson_rate() -> None:
    times = poisson_arrivals(random.Random(0), rate_per_s=50, duration_s=100)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert times == sorted(times)
    assert times[-1] < 100


def test_gapped_arrivals_never_meet() -> None:
    times = gapped_arrivals(random.Random(0), count=50, gap_low_s=0.2, gap_high_s=0.5)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(times) == 50
    assert min(gaps) >= 0.2
    assert max(gaps) <= 0.5


def test_overload_places_its_longs() -> None:
    requests = overload_requests(
        HolShape.of_issue(50),
        WORDS,
        seed=0,
        round_index=0,
        rate_per_s=20,
        duration_s=10,
        long_at_shares=(0.2, 0.5),
    )
    assert [r.at_s for r in requests if r.kind == "long"] == [2.0, 5.0]
    assert sum(r.kind == "short" for r in requests) == pytest.approx(200, rel=0.3)


def test_vocabulary_leaves_out_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 6}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 0}, {"id": 4}]}')
    assert Vocabulary.of_model(tmp_path).ids == (1, 2, 3, 5)


def test_vocabulary_without_tokenizer_file_takes_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 3}}')
    assert Vocabulary.of_model(tmp_path).ids == (0, 1, 2)
