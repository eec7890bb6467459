"""The load generator's own limits: how many streams it can follow. No engine is started here."""

from __future__ import annotations

import random

import pytest

from bench.cost import client_load
from bench.harness.catalogue import BENCHES
from bench.harness.replay import Planned, Record
from pla_sglang.sim import chain


def streams(count: int, seconds: int, per_s: int) -> list[Record]:
    """``count`` streams over ``seconds``, each with ``per_s`` tokens a second."""
    answer = seconds * per_s
    times = [(index + 0.5) / per_s for index in range(answer)]
    made = []
    for index in range(count):
        prompt = chain.prompt_of(20, answer, random.Random(index))
        one = Record(Planned(index, 0.0, prompt, answer), 0.0, sent_s=0.001, token_s=times, done_s=float(seconds))
        one.prompt_ids, one.output_ids = prompt, chain.expected(prompt, answer + 1).tokens
        made.append(one)
    return made


def test_streams_and_events_are_counted_by_second() -> None:
    open_streams, events = client_load.streams_and_events(streams(7, 3, 4))
    assert list(open_streams) == [7, 7, 7]
    assert list(events) == [28, 28, 28]


@pytest.mark.parametrize(
    ("count", "per_s", "late_s", "reached", "valid"),
    [
        (300, 10, 0.001, True, True),
        (300, 9, 0.001, False, True),
        (299, 11, 0.001, False, True),
        (300, 10, 0.060, True, False),
    ],
)
def test_the_client_must_reach_the_load_in_time(
    count: int, per_s: int, late_s: float, *, reached: bool, valid: bool
) -> None:
    found = client_load.figures(streams(count, 2, per_s), [late_s] * 100, 0.5)
    assert (found["reached"], found["valid"]) == (reached, valid)
    assert found["peak_streams"] == count
    assert found["peak_events_per_s"] == count * per_s
    assert found["tokens_wrong"] == 0


def test_the_source_streams_what_the_oracle_expects() -> None:
    given = BENCHES["client_load"].parse(
        *["--groups", "2", "--group-requests", "3", "--gap-s", "0.1", "--answer-tokens", "5", "--event-gap-ms", "10"]
    )
    records, result = client_load.measure(given)
    assert [record.error for record in records] == [None] * 6
    assert (result["completed"], result["tokens_verified"], result["tokens_wrong"]) == (6, 30, 0)
    assert all(len(record.token_s) == 5 for record in records), "one token an event"
    assert not result["reached"]


def test_groups_arrive_together() -> None:
    given = BENCHES["client_load"].parse(*["--groups", "2", "--group-requests", "3", "--gap-s", "1.5"])
    assert [one.at_s for one in client_load.requests(given)] == [0, 0, 0, 1.5, 1.5, 1.5]
