"""The fitter of profiles meets a real engine on an emulated device, whose launcher is killed in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.test_emulation import ask, gone, launch, ports_of
from support.clusters import family, wait_ready

from pla_sglang import profile
from pla_sglang.profiles import load_profile

pytestmark = pytest.mark.e2e


def measure_times(url: str, out: Path) -> dict[str, float]:
    """Seconds of each prefill and decode step, as the profile says that was fitted to that server."""
    sizes = ["--prefill-tokens", "50,200,400,800", "--decode-batches", "1,4", "--decode-contexts", "20,200"]
    assert profile.main(["--url", url, "--name", "fitted", "--out", str(out), *sizes]) == 0
    return state_times(load_profile(out))


def state_times(known: Any) -> dict[str, float]:
    prefill = {f"prefill {tokens}": known.prefill_s(tokens, tokens**2) for tokens in (50, 200, 400, 800)}
    return prefill | {f"decode {batch}": known.decode_s(batch, batch * 20) for batch in (1, 4)}


def find_deviations(measured: dict[str, float]) -> list[str]:
    """What the measurement says otherwise than the profile that the device was told to keep."""
    deviations = []
    for step, stated_s in state_times(load_profile("linear")).items():
        # HTTP and a busy machine add to each request, but nothing makes the device faster.
        added_s = 0.06 if step.startswith("prefill") else 0.02
        if not 0.97 * stated_s < measured[step] < stated_s + added_s:
            deviations.append(f"{step}: {measured[step]:.4f} s, stated {stated_s:.4f} s")
    slope_s = (measured["prefill 800"] - measured["prefill 50"]) / 750
    if slope_s != pytest.approx(1e-3, rel=0.06):
        deviations.append(f"each token costs {slope_s} s, whatever a request costs besides; stated 0.001 s")
    return deviations


def assert_fitted(url: str, out: Path) -> None:
    """A shared machine only ever adds time: of up to four measurements the shortest of each step counts."""
    shortest = measure_times(url, out)
    for _ in range(3):
        if not find_deviations(shortest):
            return
        again = measure_times(url, out)
        shortest = {step: min(seconds, again[step]) for step, seconds in shortest.items()}
    assert find_deviations(shortest) == []


def test_a_profile_is_fitted_and_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    """The fitter meets a real engine, and finds the times that its device was told to take."""
    state, log = tmp_path / "state.json", tmp_path / "log"
    process = launch(state, log, "--unified", "1", "--router", "none", "--pla-emulate", "linear")
    try:
        described = wait_ready(process, state, log)
        processes, ports = family(process.pid), ports_of(described)
        ask(described["url"], 5, seed=3)
        assert_fitted(described["url"], tmp_path / "fitted.json")
    finally:  # a failure above must not leave an engine behind either
        process.kill()
        process.wait()
    gone(processes, ports)
