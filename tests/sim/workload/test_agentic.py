"""Recorded agent sessions: what becomes of a session's requests, and what is counted, named or refused."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.workload import AgenticKnobs, Arrivals, Trace, TraceError, load_trace

Record = dict[str, Any]
BLOCK = 64


def request(at_s: float, runs: Sequence[Sequence[int]], out: int = 10, **extra: Any) -> Record:
    """With just the tokens of its blocks, and three more."""
    tokens = BLOCK * sum(count for _, count in runs) + 3
    times = {"think_time": 2.0, "api_time": 1.0}
    return {"t": at_s, "type": "n", "in": tokens, "out": out, "model": "m", "hash_runs": runs} | times | extra


def session(*requests: Record, **extra: Any) -> Record:
    head = {"id": "s", "block_size": BLOCK, "hash_id_scope": "local", "tool_tokens": 512, "system_tokens": 512}
    return head | extra | {"requests": list(requests)}


def load(folder: Path, *sessions: Record, packed: bool = False, bad_rows: Any = "refuse", **knobs: Any) -> Trace:
    text = "".join(json.dumps(one) + "\n" for one in sessions).encode()
    path = folder / ("s.jsonl.gz" if packed else "s.jsonl")
    path.write_bytes(gzip.compress(text) if packed else text)
    times = Arrivals(0.1, random.Random(3), cv=0)
    return load_trace(path, arrivals=times, bad_rows=bad_rows, agentic=AgenticKnobs(**knobs))


def reasons(trace: Trace) -> list[tuple[int, str]]:
    return [(row.line, row.reason) for row in trace.skipped]


TALK = (request(0, [[1, 16]], think_time=0), request(4, [[1, 24]]), request(50, [[1, 20], [40, 20]], think_time=44))


@pytest.mark.parametrize("packed", [False, True])
def test_a_session_is_a_chain_of_requests_with_think_times(tmp_path: Path, packed: bool) -> None:
    trace = load(tmp_path, session(*TALK), packed=packed)
    assert trace.input_tokens.tolist() == [16 * 64 + 3, 24 * 64 + 3, 40 * 64 + 3]
    assert trace.think_s is not None
    assert trace.think_s.tolist() == [0, 2, 34]  # the last one is cut, and so is its time
    assert trace.arrival_s.tolist() == [10, 14, 50]
    assert trace.hash_ids == ((0, 1), (0, 1, 2), (0, 1, 3, 4, 5))  # 8 blocks each; the third group is another one


def test_ids_may_stand_one_by_one(tmp_path: Path) -> None:
    plain = [
        {name: value for name, value in one.items() if name != "hash_runs"}
        | {"hash_ids": [first + more for first, count in one["hash_runs"] for more in range(count)]}
        for one in TALK
    ]
    assert load(tmp_path, session(*plain)).hash_ids == load(tmp_path, session(*TALK)).hash_ids


def test_sessions_share_no_id_but_what_one_model_has_in_common(tmp_path: Path) -> None:
    talks = [session(*TALK), session(*TALK), session(request(0, [[1, 24]], model="other"))]
    own = load(tmp_path, *talks)
    by_session: dict[int, set[int]] = {}
    assert own.session is not None
    assert own.hash_ids is not None
    for number, ids in zip(own.session.tolist(), own.hash_ids, strict=True):
        by_session.setdefault(number, set()).update(ids)
    assert len(set().union(*by_session.values())) == sum(map(len, by_session.values()))
    shared = load(tmp_path, *talks, shared_system=True).hash_ids
    assert shared is not None
    assert sorted(Counter(ids[:2] for ids in shared).values()) == [1, 6]  # 1,024 tokens of model m
    assert len({ids[2] for ids in shared if len(ids) > 2}) == 5  # beyond, none


def test_what_a_session_rewrites_within_its_system_prompt_is_its_own(tmp_path: Path) -> None:
    talk = session(request(0, [[1, 24]]), request(5, [[1, 8], [90, 16]]))
    ids = load(tmp_path, talk, talk, shared_system=True).hash_ids
    assert ids is not None
    assert len({one[0] for one in ids}) == 1
    assert len({one[1] for one in ids}) == 3


def test_a_subagent_is_part_of_its_session(tmp_path: Path) -> None:
    inner = [request(0, [[500, 8]], think_time=0), request(3, [[500, 16]])]
    agent = {"t": 6.0, "type": "subagent", "tool_tokens": 10, "system_tokens": 10, "requests": inner}
    trace = load(tmp_path, session(request(0, [[1, 8]], api_time=3), agent, request(12, [[1, 16]], think_time=9)))
    assert trace.arrival_s.tolist() == [10, 16, 19, 22]
    assert trace.session is not None
    assert trace.turn is not None
    assert set(trace.session.tolist()) == {0}
    assert trace.turn.tolist() == [0, 1, 2, 3]
    assert trace.think_s is not None
    # From one to the other it is the time since the answer before; a request of its own has what is recorded.
    assert trace.think_s.tolist() == [0, 3, 2, 2]
    assert trace.hash_ids == ((0,), (1,), (1, 2), (0, 3))


def test_longer_prompts_than_the_window_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = load(tmp_path, session(*TALK), window_tokens=2000)
    assert trace.input_tokens.tolist() == [16 * 64 + 3, 24 * 64 + 3]
    assert reasons(trace) == [(1, "a prompt of more than 2000 tokens")]


def test_a_cut_prompt_keeps_its_new_tokens_and_the_beginning(tmp_path: Path) -> None:
    trace = load(tmp_path, session(*TALK), window_tokens=32 * 64, too_long="cut")
    assert trace.input_tokens.tolist() == [16 * 64 + 3, 24 * 64 + 3, 32 * 64]
    assert trace.hash_ids is not None
    assert trace.hash_ids[2][:1] == trace.hash_ids[1][:1]  # 12 of the old blocks, and the 20 new ones
    assert len(trace.hash_ids[2]) == 4
    assert not trace.skipped


def test_sessions_of_few_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = load(tmp_path, session(*TALK), session(TALK[0]), requests_least=2)
    assert len(trace) == 3
    assert reasons(trace) == [(2, "a session of 1 requests; least 2")]


def test_a_request_without_an_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    trace = load(tmp_path, session(TALK[0] | {"out": 0}, *TALK[1:]))
    assert trace.arrival_s.tolist() == [10, 46]  # a session starts with its first request that stays
    assert reasons(trace) == [(1, "failed: no answer token")]


BAD_REQUESTS = [
    ({"think_time": -1}, "request 1: think_time is -1 s"),
    ({"think_time": "x"}, "request 1: think_time is 'x'"),
    ({"in": 0}, "request 1: in 0; allowed: 1 to"),
    ({"in": None}, "request 1: in is None"),
    ({"out": -4}, "request 1: out -4"),
    ({"hash_runs": [[1, 23]]}, "request 1: 23 block ids for 1539 tokens; allowed: 24 of 64 tokens"),
    ({"hash_runs": [[1, 1 << 60]]}, "request 1: 26 block ids"),
    ({"hash_runs": [[1, 12], [14, 12]]}, "request 1: block 14 is after 12, and after 13 earlier"),
    ({"hash_runs": [[1, 16], [100, 4], [100, 4]]}, "request 1: a block id twice"),
    ({"hash_runs": [[1, -2]]}, "request 1: count of hash_runs is -2"),
    ({"hash_runs": [[-1, 24]]}, "request 1: block id is -1"),
    ({"hash_runs": [7]}, "request 1: a run of hash_runs is no"),
    ({"hash_runs": None}, "request 1: no list hash_ids or hash_runs"),
]


@pytest.mark.parametrize(("change", "message"), BAD_REQUESTS)
def test_a_bad_request_is_refused_by_name_or_left_out(tmp_path: Path, change: Record, message: str) -> None:
    talk = session(TALK[0], TALK[1] | change, TALK[2])
    with pytest.raises(TraceError, match=r"s\.jsonl, line 1: ") as caught:
        load(tmp_path, talk)
    assert message in str(caught.value)
    trace = load(tmp_path, talk, bad_rows="skip")
    assert len(trace) == 2
    assert [row.line for row in trace.skipped] == [1]


BAD_SESSIONS = [
    ({"requests": []}, "no list 'requests'"),
    ({"requests": [TALK[1], TALK[0]]}, "request 1 is before the one above it"),
    ({"requests": [TALK[0], {"in": 3}]}, "request 1: t is None"),
    ({"requests": [TALK[0], 7]}, "request 1 is no object"),
    ({"requests": [TALK[0] | {"t": -1}]}, "request 0: t is -1 s"),
    ({"requests": [{"t": 0, "type": "subagent"}]}, "no list 'requests'"),
    ({"block_size": 100}, "block_size is 100; allowed: what divides 512"),
    ({"block_size": None}, "block_size is None"),
    ({"hash_id_scope": "global"}, "hash_id_scope is 'global'"),
    ({"system_tokens": -1}, "tool_tokens and system_tokens are"),
]


@pytest.mark.parametrize(("change", "message"), BAD_SESSIONS)
def test_a_session_whose_order_is_not_known_is_refused_or_left_out(
    tmp_path: Path, change: Record, message: str
) -> None:
    talks = (session(*TALK), session(*TALK) | change)
    with pytest.raises(TraceError, match=r"s\.jsonl, line 2: ") as caught:
        load(tmp_path, *talks)
    assert message in str(caught.value)
    trace = load(tmp_path, *talks, bad_rows="skip")
    assert len(trace) == 3
    assert [row.line for row in trace.skipped] == [2]


def test_knobs_are_checked() -> None:
    for wrong in ({"window_tokens": 0}, {"too_long": "fold"}, {"think_most_s": -1.0}, {"requests_least": 0}):
        with pytest.raises(ConfigError):
            AgenticKnobs(**wrong)  # type: ignore[arg-type]


def test_equal_ids_are_equal_prefixes(tmp_path: Path) -> None:
    """Whatever sessions do, an id is always after the same one, and prompts have as many as whole blocks."""
    draw = random.Random(5)
    for too_long in ("drop", "cut"):
        talks = []
        for _ in range(8):
            requests, runs, fresh, at_s = [], [[1, 20]], 1000, 0.0
            for _ in range(12):
                if draw.random() < 0.2 and len(runs) > 1:  # the session goes on from an earlier place
                    runs = [*runs[: draw.randrange(1, len(runs))]]
                runs = [*runs, [fresh, draw.randint(1, 30)]]
                fresh += 100
                requests.append(request(at_s, runs))
                at_s += draw.random() * 100
            talks.append(session(*requests))
        trace = load(tmp_path, *talks, too_long=too_long, window_tokens=8000, shared_system=draw.random() < 0.5)
        assert trace.hash_ids is not None
        before: dict[int, int | None] = {}
        for ids, tokens in zip(trace.hash_ids, trace.input_tokens.tolist(), strict=True):
            assert len(ids) == tokens // 512
            for one, last in zip(ids, [None, *ids], strict=False):
                assert before.setdefault(one, last) == last
        assert int(trace.input_tokens.max()) <= 8000
