"""The router and the simulator, each installed by its extra alone: without torch and SGLang, and small."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
from support.bare_environment import UNPRIVILEGED, BareEnvironment
from support.router_process import router_process

pytestmark = pytest.mark.e2e  # pip fetches what its cache does not have
MAX_ROUTER_MB = 200
ENGINE = ("torch", "sglang", "transformers", "triton")


@pytest.fixture(scope="module")
def with_router(tmp_path_factory: pytest.TempPathFactory) -> BareEnvironment:
    return BareEnvironment(tmp_path_factory.mktemp("router"), "router")


def test_the_router_installs_and_serves(with_router: BareEnvironment, tmp_path: Path) -> None:
    bare = with_router
    assert bare.missing(*ENGINE, "scipy", "pandas", "matplotlib") == [*ENGINE, "scipy", "pandas", "matplotlib"]
    assert bare.size_mb() < MAX_ROUTER_MB
    assert "--slo-ttft-ms" in bare.run("-m", "pla_sglang.launch_router", "--help")
    assert "--slo-ttft-ms" in bare.run("-m", "pla_sglang", "router", "--help")
    lacks = json.loads(bare.run("-m", "pla_sglang.doctor", "--json"))["checks"]
    assert {name for name, row in lacks.items() if row["status"] == "lacking"} >= {"packages of sim", "SGLang", "NIXL"}
    assert lacks["packages of router"]["status"] == "works"
    assert "pip install 'pla-sglang[engine]'" in bare.run("-m", "pla_sglang.doctor")  # without rich
    arguments = ["--policy", "minimal-load"]  # predicts times, so it fits a curve
    with router_process(["null"], arguments, tmp_path, python=bare.python) as router:
        body = b'{"text": "hello", "sampling_params": {"max_new_tokens": 4}}'
        status, answer = router.ask("/generate", body, {"content-type": "application/json"})
        assert status == 200, answer
        state = json.loads(router.ask("/pla/state")[1])
        assert state["policy"] == "minimal-load"
        assert router.stop() == 0


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="makes mounts of its own: needs root")
@pytest.mark.parametrize("relays", [0, 2])
def test_the_router_needs_no_rights_and_a_folder_for_sockets_alone(
    relays: int, with_router: BareEnvironment, tmp_path: Path
) -> None:
    """As the image of examples/deploy runs in compose.yaml."""
    python = with_router.without_rights(tmp_path)
    look = "import os; print(os.getuid(), *[n for n in os.listdir('/') if not os.statvfs('/' + n).f_flag & 1])"
    seen = subprocess.run([python, "-c", look], check=True, capture_output=True, text=True).stdout.split()
    assert sorted(seen) == [str(UNPRIVILEGED), "proc", "tmp"]
    with router_process(["null"], ["--relay-workers", str(relays)], tmp_path, python=python) as router:
        assert {psutil.Process(number).uids().effective for number in router.processes()} == {UNPRIVILEGED}
        body = b'{"text": "hello", "sampling_params": {"max_new_tokens": 4}}'
        assert router.ask("/generate", body, {"content-type": "application/json"})[0] == 200
        assert router.ask("/livez")[0] == 200
        assert router.stop() == 0, router.log


def test_the_simulator_installs_and_runs(tmp_path: Path) -> None:
    bare = BareEnvironment(tmp_path, "sim", "--no-compile")
    assert bare.missing(*ENGINE, "matplotlib") == [*ENGINE, "matplotlib"]
    rows = "".join(f"{second},{500 + second},20\n" for second in range(40))
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    arguments = ["--trace", "trace.csv", "--slo-ttft-ms", "1000", "--slo-tpot-ms", "100", "--instances", "2"]
    lines = bare.run("-m", "pla_sglang.simulate", *arguments, "--policy", "combined").splitlines()
    assert json.loads(lines[-1])["workload"]["requests"] == 40
