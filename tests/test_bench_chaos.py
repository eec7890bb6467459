"""The judge of the chaos bench: who had a right to fail."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.chaos import result_of
from bench.chaotic import judge as judging
from bench.chaotic.after import Freed, Leftover
from bench.chaotic.faults import Done, Fault, Faults
from bench.replaying.client import Record
from bench.replaying.plan import Planned
from bench.replaying.rough import GONE
from pla_sglang import chain

KILL = Done(Fault.KILL, "prefill-0", at_s=10.0, since_start_s=1.0, over_s=10.3)
HOSTS = {"prefill": "a:1", "decode": "b:2"}


@pytest.mark.parametrize(
    ("name", "story", "there"),
    [
        ("in prefill", {"decided_s": 9.0, "ended_s": 10.1}, True),
        ("it has not ended for the router yet", {"decided_s": 9.0}, True),
        ("sent to a process that was dead and had its sockets", {"decided_s": 10.2, "ended_s": 10.3}, True),
        ("dispatched after it was gone", {"decided_s": 10.4, "ended_s": 10.5}, False),
        ("ended before", {"decided_s": 9.0, "ended_s": 9.9}, False),
        ("its KV was with decode already", {"decided_s": 9.0, "done_s": 9.8, "ended_s": 11.0}, False),
        ("its KV came to decode meanwhile", {"decided_s": 9.0, "done_s": 10.1, "ended_s": 11.0}, True),
        ("elsewhere", {"decided_s": 9.0, "ended_s": 11.0, "prefill": "c:3"}, False),
        ("never dispatched", {"decided_s": None, "ended_s": 11.0}, False),
        ("unknown to the router", {"prefill": None, "decode": None}, False),
    ],
)
def test_who_was_in_flight_at_a_killed_prefill_instance(name: str, story: dict[str, Any], there: bool) -> None:
    assert judging.was_there(HOSTS | story, KILL, "a:1") is there, name


def test_a_decode_instance_has_a_request_until_its_end() -> None:
    story = HOSTS | {"decided_s": 9.0, "done_s": 9.5, "ended_s": 10.1}
    assert judging.was_there(story, KILL, "b:2")
    assert not judging.was_there(story | {"ended_s": 9.9}, KILL, "b:2")


def record(index: int, error: str | None, *, wrong: bool = False) -> Record:
    prompt = chain.prompt_of(20, 4, random.Random(index))
    tokens = chain.expected(prompt, 5).tokens
    made = Record(Planned(index, 0.0, prompt, 4), 0.0, prompt_ids=prompt, error=error)
    made.output_ids = tuple(tokens[:-1]) if wrong else tuple(tokens)
    made.finish = "stop"
    return made


def test_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    at_kill = HOSTS | {"decided_s": 9.0, "ended_s": 10.1}
    elsewhere = {"prefill": "c:3", "decode": "d:4", "decided_s": 9.0, "ended_s": 10.1, "detail": "KVTransferError"}
    stories = {"x-000004": at_kill, "x-000005": elsewhere, "x-000006": {}}
    monkeypatch.setattr(judging, "told", lambda url, rid: stories[rid])
    described = {"url": "", "instances": [{"name": "prefill-0", "url": "http://a:1"}]}
    faults = Faults(described, None)  # type: ignore[arg-type]
    faults.done += [KILL, Done(Fault.ABORT, "x-000003", 9.0, 1.0, 9.0)]
    errors = [None, None, GONE, "status 502", "status 502", "status 502", "reset"]
    records = [record(index, error, wrong=index == 1) for index, error in enumerate(errors)]
    verdict = judging.judge(records, faults, described, prefix="x")
    assert (verdict.completed, verdict.gone, verdict.aborted, verdict.failed) == (2, 1, 1, 3)
    assert (verdict.at_kill, verdict.by_transfer, verdict.unexplained, verdict.wrongly_failed) == (1, 1, 1, 2)
    assert verdict.tokens_wrong == 1
    assert len(verdict.examples) == 2
    retries = {"dispatches": 100.0, "retried_after_transfer": 4.0, "retried_unsent": 1.0}
    rest = Leftover(ledger_balanced=True, gauges_zero=True, kv_free=True, details=[])
    result = result_of(verdict, rest, retries, [Freed(0.25, 0.5)], requests=7)
    assert result["failed_not_in_flight_at_kill"] == 2
    assert result["transfer_failure_share"] == 0.05
    assert (result["decode_free_after_abort_p99_s"], result["decode_free_after_order_p99_s"]) == (0.25, 0.5)
