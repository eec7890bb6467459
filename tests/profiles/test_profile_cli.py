"""The profile fitter against a small server in this process that takes known times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSglang, Script
from support.router_process import fake_instances
from support.token_streams import DONE, Event

from pla_sglang import profile
from pla_sglang.profiles import load_profile
from pla_sglang.profiles.step import Coverage

PREFILL_S = 0.04
STEP_S = 0.02


@pytest.fixture
def server() -> Iterator[str]:
    """Its address. The server runs on a thread of its own, as the fitter has an event loop of its own."""
    script = Script(first_s=PREFILL_S, token_s=1e-4, gap_s=STEP_S)
    with fake_instances([Counting(script=script, max_total_num_tokens=777, tp_size=2)]) as [fake]:
        yield fake.url


class Counting(FakeSglang):
    """As many events as are asked for, each with one token."""

    async def say(self, fields: dict[str, Any], leg: str) -> tuple[dict[str, Any], Iterable[Event]]:
        whole, _ = await super().say(fields, leg)
        event = Event(b'data: {"output_ids": [1]}\n\n', (1,))
        return whole, [*[event] * fields["sampling_params"]["max_new_tokens"], Event(DONE)]


def test_a_server_is_measured_and_fitted(server: str, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    arguments = ["--url", server, "--name", "mine", "--out", str(out), "--time-scale", "2"]
    sizes = ["--prefill-tokens", "10,200,400,800", "--decode-batches", "1,2", "--decode-contexts", "10,20"]
    assert profile.main([*arguments, *sizes]) == 0
    fitted = load_profile(out)
    assert fitted.name == "mine"
    assert fitted.kv_capacity_tokens == 777
    assert fitted.coverage == Coverage((10, 800), (10, 800), (1, 2), (10, 20), (10, 40))
    assert fitted.gpus == 2
    # Sleeps only ever take longer.
    assert PREFILL_S / 2 < fitted.prefill_s(10, 100) < PREFILL_S
    assert fitted.prefill_s(800, 640_000) > fitted.prefill_s(10, 100) + 0.03
    assert STEP_S / 2 < fitted.decode_s(1, 10) < STEP_S


def test_no_server_and_bad_lists_are_plain_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--name", "x", "--out", str(tmp_path / "x.json")]
    assert profile.main(["--url", "http://127.0.0.1:9", *out]) == 1
    assert "no SGLang server answers" in capsys.readouterr().err
    for bad, message in (
        (["--decode-batches", "1,x"], "--decode-batches 'x' is not a whole number; allowed: at least 1"),
        (["--decode-batches", "0"], "--decode-batches 0 is out of range; allowed: at least 1"),
        (["--time-scale", "0"], "--time-scale 0 is out of range; allowed: above 0"),
    ):
        assert profile.main(["--url", "http://127.0.0.1:9", *out, *bad]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"
    assert profile.main(out) == 2
    assert capsys.readouterr().err == "error: --url is needed\n"
