"""What cannot be measured is refused by each bench in one line, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.catalogue import BENCHES

STATELESS = ["--stateless", "2"]
BAD_FLAGS: list[tuple[str, list[str], str]] = [
    ("alerts", ["--prometheus", "nowhere"], "nowhere"),
    ("alerts", ["--factor", "0"], "--factor 0"),
    ("alerts", ["--factor", "100"], "--factor 100"),
    ("alerts", ["--instances", "1"], "--instances 1"),
    ("chaos", ["--kills", "-1"], "--kills -1"),
    ("chaos", ["--moves"], "--moves --stateless 0"),
    ("chaos", [*STATELESS, "--routers", "2"], "--routers 2"),
    ("chaos", [*STATELESS, "--routers", "0"], "--routers 0"),
    ("chaos", [*STATELESS, "--restarts", "1"], "--restarts 1"),
    ("chaos", [*STATELESS, "--restarts", "-1"], "--restarts -1"),
    ("chat", ["--dataset", "none.parquet"], "none.parquet is not a file"),
    ("elastic", ["--arms", "combined+x"], "--planner 'x'"),
    ("elastic", ["--arms", "y"], "'y'"),
    ("elastic", ["--rate", "0"], "--rate 0"),
    ("elastic_live", ["--arms", "combined+x"], "'x'"),
    ("elastic_live", ["--day-s", "0"], "--day-s 0"),
    ("flips", ["--instances", "1"], "--instances 1"),
    ("flips", ["--flips", "7"], "--flips 7"),
    ("flips", ["--flips", "0"], "--flips 0"),
    ("gpu", ["--dataset", "none.parquet"], "none.parquet is not a file"),
    ("hol", ["--device", "emulated", "--scale", "0"], "--scale 0.0 is out of range"),
    ("hol", ["--model-path", "."], "holds no config.json"),
    ("hops", ["--settings", "big"], "'big' is not known"),
    ("hops", ["--models", "llama"], "llama"),
    ("hops", ["--part", "0"], "0"),
    ("hops", ["--requests", "1"], "1"),
    ("overload_router", ["--parts", "faults"], "--parts 'faults'"),
    ("overload_router", ["--fleets", "stock"], "--fleets 'stock'"),
    ("replay", ["--url", "http://127.0.0.1:9", "--trace", "trace.csv"], "no healthy server answers"),
    ("scaling", ["--actuators", "local,docker"], "'docker' is not known; allowed: local, ray"),
    ("spatial", ["--arms", "fast"], "'fast'"),
    ("spatial", ["--dataset", "none.parquet"], "none.parquet is not a file"),
    ("stateless", ["--engines", "3"], "--engines 3 is not allowed; allowed: even numbers"),
    ("stateless", ["--rate", "190"], "--rate 190"),
    ("stateless", ["--rounds", "0"], "--rounds 0"),
    ("survive", ["--instances", "1"], "--instances 1"),
    ("survive", ["--streams", "30"], "--streams 30"),
    ("survive", ["--streams", "25"], "--streams 25"),
    ("survive", ["--wave", "0"], "--wave 0"),
    ("verified", ["--traces", "a=/nonexistent.csv"], "nonexistent"),
]


@pytest.mark.parametrize(("bench", "flags", "says"), BAD_FLAGS)
def test_what_cannot_be_is_refused_in_one_line(
    bench: str,
    flags: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n0,10,1\n")
    out = [] if bench == "replay" else ["--out", str(tmp_path / "out")]
    assert BENCHES[bench].main([*flags, *out]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert says in last
