"""Files as people's tools write them, damaged ones and endless ones: rows, or one error of the reader's own kind."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench.harness.talks import read_talks
from pla_sglang import parity, simulate, view_recording
from pla_sglang.common import cli, reading
from pla_sglang.common.errors import ConfigError, PlaError
from pla_sglang.profiles.load import FOLDER, load_profile
from pla_sglang.recording.file import read
from pla_sglang.sim.workload import TraceError, load_trace

HEADER = "arrival_s,input_tokens,output_tokens"
PLAIN = f"{HEADER},session_id,client_id\n0,100,5,7,a\n1.5,200,6,8,b\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,396,109\n"
BURST = "Timestamp,Model,Request tokens,Response tokens\n5,x,472,18\n45,y,10,7\n"
MOONCAKE = "".join(
    json.dumps({"timestamp": ms, "input_length": 1024, "output_length": 5, "hash_ids": [1, ms]}) + "\n" for ms in (0, 9)
)
SHAREGPT = json.dumps([{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "you"}]}])
LMSYS = json.dumps({"conversation": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]})
RECORDING = '{"type":"header","policy":"arrow","profile":"x","setup":{},"version":4}\n' + (
    '{"type":"views","now_s":1.0,"changed":{"0":{"name":"a"}}}\n{"type":"finish","now_s":2.0,"rid":"r","output_tokens":3}\n'
)
PROFILE = next(FOLDER.glob("*.json")).read_text(encoding="utf-8")
VALID = (PLAIN, AZURE, BURST, MOONCAKE, SHAREGPT, LMSYS, RECORDING, PROFILE)
READERS: dict[str, Callable[[Path], object]] = {
    "trace": load_trace,
    "trace, skipping": lambda path: load_trace(path, bad_rows="skip", sort=True),
    **{
        kind: lambda path, kind=kind: load_trace(path, kind=kind) for kind in ("plain", "azure", "burstgpt", "mooncake")
    },
    **{kind: lambda path, kind=kind: load_trace(path, kind=kind) for kind in ("sharegpt", "lmsys")},
    "recording": lambda path: list(read(path)),
    "replay": parity.replay_file,
    "page": view_recording.make_document,
    "profile": load_profile,
    "settings": lambda path: cli.load_yaml(str(path)),
    "dataset": lambda path: read_talks(path, lambda text: list(text.encode()), limit=5),
}


def read_everywhere(path: Path) -> None:
    """Whatever is in the file: each reader gives something, or raises an error of ours, in one line."""
    for reader in READERS.values():
        try:
            reader(path)
        except PlaError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017
            assert len(str(error)) < 2000  # noqa: PT017


VALUES = st.one_of(
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["", "-1", "1e300", "1e999999999", "1_0", "nan", "snan", "-inf", "0x10", "1" + "0" * 5000, "\0", '"']
    ),
).map(str)
EDITS = st.tuples(st.integers(0, 2000), st.integers(0, 40), st.binary(max_size=12))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.sampled_from(VALID), edits=st.lists(EDITS, max_size=4), packed=st.booleans(), cut=st.integers(0, 400))
@example(text=PLAIN, edits=[(40, 0, b'"')], packed=False, cut=0)
def test_edited_files(tmp_path: Path, text: str, edits: list[tuple[int, int, bytes]], packed: bool, cut: int) -> None:
    data = bytearray(text.encode())
    for place, length, new in edits:
        data[place % len(data) : place % len(data) + length] = new
        data = data or bytearray(b"x")
    content = gzip.compress(bytes(data), mtime=0) if packed else bytes(data)
    for name in ("f.json", "f.jsonl", "f.parquet"):
        path = tmp_path / name
        path.write_bytes(content[: len(content) - cut] if cut < len(content) and cut % 2 else content)
        read_everywhere(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=st.lists(VALUES, min_size=5, max_size=6), skip=st.booleans())
def test_every_column_of_every_type(tmp_path: Path, row: list[str], skip: bool) -> None:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    texts = {
        "p.csv": PLAIN + ",".join(row) + "\n",
        "a.csv": AZURE + ",".join(row[:3]) + "\n",
        "b.csv": BURST + ",".join(row[:4]) + "\n",
        "m.jsonl": MOONCAKE + json.dumps(dict(zip(names, [*row[:3], row[3:]], strict=True))) + "\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            trace = load_trace(tmp_path / name, bad_rows="skip" if skip else "refuse")
        except TraceError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017
        else:
            assert len(trace) >= 2
            assert trace.arrival_s[0] == 0


@pytest.mark.parametrize(
    "data",
    [
        PLAIN.encode("utf-16"),
        PLAIN.encode("utf-8-sig"),
        PLAIN.encode("utf-32"),
        PLAIN.replace("\n", "\r\n").encode(),
        PLAIN.replace("\n", "\r").encode(),
        b"\n \n" + PLAIN.encode(),
        gzip.compress(PLAIN.encode()),
        PLAIN.replace("0,100", '"0","100"').replace("arrival_s", '"arrival_s"').encode(),
        PLAIN.replace(",a\n", ',"' + "x" * 200_000 + '"\n').encode(),
    ],
    ids=["utf-16", "utf-8-sig", "utf-32", "crlf", "cr", "blank first", "gzip", "quoted", "long field"],
)
@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_what_tools_write_is_read(tmp_path: Path, data: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(data)
    trace = load_trace(tmp_path / name)
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert trace.input_tokens.tolist() == [100, 200]


TRUNCATED = gzip.compress(PLAIN.encode() * 50)[:-20]
DAMAGED = {
    "latin1": (PLAIN + "2,1,1,9,caf\xe9\n").encode("latin1"),
    "truncated": TRUNCATED,
    "unclosed quote": (PLAIN + '2,1,1,9,"x\n3,1,1,9,y\n').encode(),
    "two columns": (HEADER + ",input_tokens\n0,1,1,2\n").encode(),
    "ragged": (PLAIN + "2,1,1,9,a,b\n").encode(),
    "deep": b'{"input_length":' + b"[" * 100_000,
    "many digits": b'{"timestamp":0,"input_length":1' + b"0" * 5000 + b',"output_length":5,"hash_ids":[1]}',
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_one_line_and_status_2(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t"
    path.write_bytes(DAMAGED[kind])
    for command in (["--trace", str(path), "--slo-ttft-ms", "100", "--slo-tpot-ms", "50"],):
        assert simulate.main(command) == 2
    assert parity.main([str(path)]) == 2
    assert view_recording.main([str(path), "--out", str(tmp_path / "o.html")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 3
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", ["latin1", "ragged", "unclosed quote"])
def test_single_bad_rows_can_be_skipped(tmp_path: Path, kind: str) -> None:
    (tmp_path / "t.csv").write_bytes(DAMAGED[kind])
    trace = load_trace(tmp_path / "t.csv", bad_rows="skip")
    assert (len(trace), len(trace.skipped)) == (2, 1)


@pytest.mark.parametrize("byte", [b"\0", b"\n", b"a", b"[", b'"', b",", b'"\n'])
def test_endless_files_end_within_a_bound(tmp_path: Path, byte: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE", 1 << 14)
    monkeypatch.setattr(reading, "UNPACKED_LEAST_BYTES", 1 << 18)
    path = tmp_path / "bomb.jsonl"
    path.write_bytes(gzip.compress((HEADER + "\n0,1,1,").encode() + byte * (4_000_000 // len(byte)), 1))
    monkeypatch.setattr(reading, "UNPACKED_TIMES", 2)
    tracemalloc.start()
    read_everywhere(path)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 20_000_000


def test_a_deep_file_of_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 20_000)
    with pytest.raises(ConfigError, match="nested too deep"):
        cli.load_yaml(str(tmp_path / "deep.yaml"))


@pytest.mark.parametrize("first", ["1700000000", "1700000000000.125", "100000", "1700000000123456789.5"])
def test_absolute_times_count_exactly_from_the_first(tmp_path: Path, first: str) -> None:
    whole, _, fraction = first.partition(".")
    rows = [f"{int(whole) + late}.{fraction or 0},1,1" for late in (0, 1, 5)]
    (tmp_path / "t.csv").write_text("\n".join([HEADER, *rows[:2], f"{int(whole) + 5}.{fraction}001,1,1"]))
    expected = 5.0 + (0.001 if not fraction else float(f"0.{'0' * len(fraction)}001"))
    assert load_trace(tmp_path / "t.csv").arrival_s.tolist() == pytest.approx([0.0, 1.0, expected], abs=1e-12)


@pytest.mark.parametrize(
    ("ids", "same"),
    [
        (["18446744073709551615", "18446744073709551614", "18446744073709551615"], (0, 2)),
        (["9007199254740993", "9007199254740992", "9007199254740993.0"], (0, 2)),
        (["a", "b", "a"], (0, 2)),
        (["007", "7", "7.0"], (1, 2)),
        (["1.5", "1", "1.5"], (0, 2)),
    ],
)
def test_ids_of_any_kind_stay_apart(tmp_path: Path, ids: list[str], same: tuple[int, int]) -> None:
    rows = [f"{at_s},512,1,{one},{one}" for at_s, one in enumerate(ids)]
    (tmp_path / "t.csv").write_text("\n".join([HEADER + ",session_id,client_id", *rows]))
    trace = load_trace(tmp_path / "t.csv")
    assert trace.session is not None
    sessions = trace.session.tolist()
    assert len(set(sessions)) == 2
    assert sessions[same[0]] == sessions[same[1]]
    lines = [{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [one]} for one in ids]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    blocks = load_trace(tmp_path / "m.jsonl").hash_ids
    assert blocks is not None
    assert len(set(blocks)) == 2
    assert blocks[same[0]] == blocks[same[1]]


def test_small_ids_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"{HEADER},session_id\n0,1,1,48\n1,1,1,3\n")
    trace = load_trace(tmp_path / "t.csv")
    assert trace.session is not None
    assert trace.session.tolist() == [48, 3]
