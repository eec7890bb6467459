"""Every file format: a good file, its bad rows refused and skipped, and how formats are told apart."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from support.traces import write_plain

from pla_sglang.sim.workload import Arrivals, TraceError, load_trace
from pla_sglang.sim.workload.csv_formats import load_plain
from pla_sglang.sim.workload.load import guess_kind

PLAIN = "arrival_s,input_tokens,output_tokens\n0.0,374,44\n4.5,396,109\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST = BURST_HEADER + "5,ChatGPT,472,18,490,x\n45,GPT-4,10,0,10,x\n118,GPT-4,20,7,27,x\n"
MOONCAKE = [
    {"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 7319, "output_length": 490, "hash_ids": [0, 14]},
]
SHAREGPT = [
    {
        "conversations": [
            {"from": "human", "value": "x" * 41},
            {"from": "gpt", "value": "y" * 82},
            {"from": "human", "value": "z" * 4},
            {"from": "gpt", "value": "w" * 41},
        ]
    },
    {"conversations": [{"from": "gpt", "value": "an answer to nothing"}]},
]


def test_plain(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(PLAIN.encode()))
    trace = load_trace(path)
    assert trace.arrival_s.tolist() == [0.0, 4.5]
    assert trace.input_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]


def test_plain_with_sessions_and_block_ids_beside(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text(
        "arrival_s,input_tokens,output_tokens,session_id,turn,reusable_prefix_tokens\n0,1100,5,3,0,0\n1,1200,5,3,1,512\n"
    )
    (tmp_path / "m.hashes.txt.gz").write_bytes(gzip.compress(b"0 1\n0 1\n"))
    trace = load_trace(tmp_path / "m.csv")
    assert trace.hash_ids == ((0, 1), (0, 1))
    assert trace.turn is not None
    assert trace.turn.tolist() == [0, 1]
    (tmp_path / "m.hashes.txt.gz").write_bytes(gzip.compress(b"0 1\n"))
    with pytest.raises(TraceError, match="fewer lines"):
        load_trace(tmp_path / "m.csv")
    (tmp_path / "m.hashes.txt.gz").write_bytes(gzip.compress(b"0\n1\n2\n"))
    with pytest.raises(TraceError, match="more lines"):
        load_trace(tmp_path / "m.csv")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(PLAIN)
    write_plain(load_plain(path), tmp_path / "b.csv")
    assert load_plain(tmp_path / "b.csv").arrival_s.tolist() == [0.0, 4.5]


def test_azure_times_count_from_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    assert load_trace(path).arrival_s.tolist() == pytest.approx([0.0, 4.314579], abs=1e-6)


def test_burstgpt_leaves_failed_requests_out_and_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(BURST)
    trace = load_trace(path)
    assert trace.arrival_s.tolist() == [0.0, 113.0]
    assert [(row.line, row.reason) for row in trace.skipped] == [(3, "failed request: no response token")]


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    trace = load_trace(path)
    assert trace.arrival_s.tolist() == [0.0, 3.0]
    assert trace.hash_ids == ((0, 1, 2), (0, 14))
    assert trace.block_tokens == 512


def test_sharegpt_turns_hold_their_context(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(SHAREGPT))
    arrivals = Arrivals(1.0, random.Random(1))
    with pytest.raises(TraceError, match="line 2: no question with an answer"):
        load_trace(path, arrivals=arrivals)
    trace = load_trace(path, arrivals=arrivals, bad_rows="skip")
    assert trace.input_tokens.tolist() == [10, 31]  # 10 asked; then 10 + 20 answered + 1
    assert trace.output_tokens.tolist() == [20, 10]
    assert [row.line for row in trace.skipped] == [2]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_lmsys(tmp_path: Path, suffix: str) -> None:
    talk = [{"role": "user", "content": "q" * 41}, {"role": "assistant", "content": "a" * 41}]
    path = tmp_path / f"lmsys{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pa.table({"conversation_id": ["x"], "conversation": [talk]}), path)
    else:
        path.write_text(json.dumps({"conversation_id": "x", "conversation": talk}) + "\n")
    trace = load_trace(path)
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([10], [10])


BAD_ROWS = [
    ("-1,5,5", "arrival -1.0 s; allowed"),
    ("nan,5,5", "arrival nan s"),
    ("x,5,5", "arrival_s is 'x'; allowed: a number"),
    ("2,0,5", "input tokens 0; allowed: 1 to"),
    ("2,5,0", "output tokens 0"),
    ("2,5.5,5", "input_tokens is '5.5'; allowed: a whole number"),
    ("2,5", "output_tokens is None"),
    ("0.5,5,5", "before 1 s in an earlier row"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_bad_rows_are_refused_by_name_or_skipped_and_counted(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"arrival_s,input_tokens,output_tokens\n1,5,5\n{row}\n3,5,5\n")
    with pytest.raises(TraceError, match=r"bad\.csv, line 3: ") as caught:
        load_trace(path)
    assert message in str(caught.value)
    trace = load_trace(path, bad_rows="skip")
    assert trace.arrival_s.tolist() == [0.0, 2.0]  # from the first request
    assert [skipped.line for skipped in trace.skipped] == [3]


def test_sorting_is_a_choice(tmp_path: Path) -> None:
    path = tmp_path / "u.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n3,1,1\n1,2,2\n")
    assert load_trace(path, sort=True).input_tokens.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n", "is empty; allowed: at least one request"),
        ("a.csv", "a,b\n1,2\n", "format not recognised"),
        ("a.json", "{nonsense", "format not recognised"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=message):
        load_trace(tmp_path / name)


def test_missing_file_and_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        load_trace(tmp_path / "none.csv")
    (tmp_path / "a.csv").write_text(PLAIN)
    with pytest.raises(TraceError, match="kind 'wrong' is not known; allowed: plain"):
        load_trace(tmp_path / "a.csv", kind="wrong")
    with pytest.raises(TraceError, match="bad_rows is 'maybe'"):
        load_trace(tmp_path / "a.csv", bad_rows="maybe")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="no column TIMESTAMP"):
        load_trace(tmp_path / "a.csv", kind="azure")


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    texts = {
        "plain": PLAIN,
        "azure": AZURE,
        "burstgpt": BURST,
        "mooncake": json.dumps(MOONCAKE[0]),
        "sharegpt": json.dumps(SHAREGPT),
    }
    for kind, text in texts.items():
        (tmp_path / "f").write_text(text)
        assert guess_kind(tmp_path / "f") == kind
