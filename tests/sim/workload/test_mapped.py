"""Tables whose columns a mapping names, and the files of tools that are read by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.relay.access_log import log_entry
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.sim.workload import TraceError, load_trace
from pla_sglang.sim.workload.mapped import parse_columns

MAPPING = "arrival=timestamp,input=prompt_tokens,output=completion_tokens"
AIPERF = {
    "metadata": {
        "request_start_ns": 1_700_000_000_000_000_000,
        "conversation_id": "c1",
        "benchmark_phase": "profiling",
    },
    "metrics": {
        "input_sequence_length": {"value": 550, "unit": "tokens"},
        "output_sequence_length": {"value": 30, "unit": "tokens"},
    },
    "error": None,
}
PERF = {"start_time": 12.5, "end_time": 14.0, "request": "{}", "response": "x", "error": None}


@pytest.mark.parametrize(
    ("times", "unit"),
    [
        (("0", "1.5"), ""),
        (("2026-11-28T10:00:00Z", "2026-11-28T10:00:01.5Z"), ""),
        (("2026-11-28 12:00:00+02:00", "2026-11-28 10:00:01.5"), ":iso"),
        (("1700000000", "1700000001.5"), ""),
        (("1700000000000", "1700000001500"), ""),
        (("1700000000000000000", "1700000001500000000"), ""),
        (("0", "1500"), ":ms"),
        (("0", "1500000"), ":us"),
    ],
)
def test_units_are_told_by_the_value_or_by_the_flag(tmp_path: Path, times: tuple[str, str], unit: str) -> None:
    rows = [dict(zip(("timestamp", "prompt_tokens", "completion_tokens"), (at, 7, 3), strict=True)) for at in times]
    mapping = parse_columns(MAPPING.replace("timestamp", f"timestamp{unit}"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text(
        "prompt_tokens,timestamp,completion_tokens\n" + "".join(f"7,{at},3\n" for at in times)
    )
    for name in ("a.csv", "a.jsonl"):
        trace = load_trace(tmp_path / name, columns=mapping)
        assert trace.arrival_s.tolist() == [0.0, 1.5]
        assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([7, 7], [3, 3])


def test_fields_inside_objects_sessions_and_times_of_the_end(tmp_path: Path) -> None:
    rows = [
        {"end": 10.0 + at, "took_ms": 2000 * at, "usage": {"in": 5, "out": 2}, "chat": f"u{at % 2}"} for at in (0, 1, 2)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mapping = parse_columns("arrival=end,duration=took_ms:ms,input=usage.in,output=usage.out,session=chat")
    trace = load_trace(tmp_path / "a.jsonl", columns=mapping, sort=True)
    assert trace.arrival_s.tolist() == [0.0, 1.0, 2.0]  # 8, 9 and 10 s
    assert trace.session is not None
    assert trace.session[0] == trace.session[2] != trace.session[1]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ("arrival=timestamp,input=prompt_tokens", "lacks output"),
        ("arrival=a,input=b,output=c,colour=d", "'colour=d'"),
        ("arrival=a,arrival=b,input=b,output=c", "'arrival=b'"),
        ("arrival=a,input=b:ms,output=c", "only times have a unit"),
        ("arrival=,input=b,output=c", "'arrival='"),
    ],
)
def test_mappings_that_are_refused(mapping: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_columns(mapping)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_column_that_is_not_there_is_told_with_those_that_are(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.csv").write_text("when,tokens\n1,2\n")
    (tmp_path / "a.jsonl").write_text('{"when": 1, "tokens": 2}\n')
    with pytest.raises(TraceError, match=r"no column .*; found: .when, tokens") as refused:
        load_trace(tmp_path / name, columns=parse_columns(MAPPING))
    assert "\n" not in str(refused.value)


def test_negative_times_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("timestamp,prompt_tokens,completion_tokens\n-1,2,3\n0,2,3\n")
    with pytest.raises(TraceError, match="line 2: arrival -1"):
        load_trace(tmp_path / "a.csv", columns=parse_columns(MAPPING))
    assert len(load_trace(tmp_path / "a.csv", columns=parse_columns(MAPPING), bad_rows="skip")) == 1


def test_records_of_aiperf(tmp_path: Path) -> None:
    later = json.loads(json.dumps(AIPERF))
    later["metadata"]["request_start_ns"] += 250_000_000
    warm = AIPERF | {"metadata": AIPERF["metadata"] | {"benchmark_phase": "warmup"}}
    failed = {"metadata": AIPERF["metadata"], "error": {"code": 500}}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (later, warm, failed, AIPERF)))
    trace = load_trace(tmp_path / "a.jsonl")
    assert (trace.arrival_s.tolist(), trace.input_tokens.tolist()) == ([0.0, 0.25], [550, 550])
    assert [row.line for row in trace.skipped] == [2, 3]


@pytest.mark.parametrize(
    "info",
    [
        {"input_tokens": 9, "output_tokens": 4},
        {"request_metrics": {"text": {"input_tokens": 9}}, "response_metrics": {"output_tokens": 4}},
    ],
)
def test_requests_of_inference_perf(tmp_path: Path, info: dict[str, object]) -> None:
    rows = [PERF | {"info": info}, PERF | {"info": info, "start_time": 12.0}, PERF | {"error": {"error_type": "x"}}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    trace = load_trace(tmp_path / "a.json")
    assert (trace.arrival_s.tolist(), trace.input_tokens.tolist()) == ([0.0, 0.5], [9, 9])
    assert trace.output_tokens.tolist() == [4, 4]


def test_the_access_log_of_the_router(tmp_path: Path) -> None:
    """Prompts as the router counts them, or as the instance says; times are those of arrivals."""
    ask = m.Ask("a", 0, m.Endpoint.GENERATE, True, 100.0, 5, 40)
    ended = m.Completed("a", m.Outcome.OK, 200, 103.0, output_tokens=6, exact_tokens=True)
    log = [
        log_entry(ask, None, ended, 1_700_000_003.0, attempts=1),
        log_entry(
            ask,
            None,
            m.Completed("a", m.Outcome.OK, 200, 101.0, output_tokens=6, input_tokens=42),
            1.7e9 + 2,
            attempts=1,
        ),
        log_entry(ask, None, m.Completed("a", m.Outcome.CLIENT_GONE, 0, 101.0), 1.7e9 + 4, attempts=1),
    ]
    (tmp_path / "access.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    trace = load_trace(tmp_path / "access.jsonl")
    assert (trace.arrival_s.tolist(), trace.input_tokens.tolist()) == ([0.0, 1.0], [ask.input_tokens, 42])
    assert [row.line for row in trace.skipped] == [3]
    assert [line["exact_input"] for line in log[:2]] == [False, True]
