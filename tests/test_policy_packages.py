"""A policy of another package runs in the simulator and in the router; a faulty one is refused with its package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.router_process import router_process

from pla_sglang import launch_router, simulate
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.policy.registry import policy_names
from pla_sglang.policy_packages import GROUP, find_live_policy, find_policy, installed_names, read_knobs

ROOT = Path(__file__).resolve().parent.parent
REASON = "example.most_free_kv"
BODY = b'{"text": "hello", "sampling_params": {"max_new_tokens": 4}}'
TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{second},{500 + second},20\n" for second in range(20))
TARGETS = ("--slo-ttft-ms", "1000", "--slo-tpot-ms", "100", "--instances", "2")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ``PYTHONPATH`` in which pip has installed the example package, without a network."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(ROOT / "examples" / "fleet_policy", folder / "sources")
    offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", folder / "site", folder / "sources"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "site"


def run_module(module: str, *arguments: str, folder: Path, site: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", f"pla_sglang.{module}", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_simulator_runs_the_example(site: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    arguments = ("--trace", "trace.csv", *TARGETS, "--policy", "most-free-kv")
    last = json.loads(run_module("simulate", *arguments, folder=tmp_path, site=site).splitlines()[-1])
    (run,) = last["runs"]
    assert run["reasons"][REASON] == 20
    assert run["attainment"] == 1.0


def test_the_router_runs_the_example_and_its_recording_replays(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    arguments = ["--policy", "most-free-kv", "--record", "run.jsonl"]
    with router_process(["null", "null"], arguments, tmp_path) as router:
        for _ in range(4):
            assert router.ask("/generate", BODY, {"content-type": "application/json"})[0] == 200
        state = json.loads(router.ask("/pla/state")[1])
        assert (state["policy"], state["decisions"]) == ("most-free-kv", {REASON: 4})
        assert router.stop() == 0
    replayed = run_module("parity", "run.jsonl", "--require", "1", folder=tmp_path, site=site)
    assert json.loads(replayed.splitlines()[-1])["reasons"] == {REASON: 4}


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, *, name: str, module: str) -> None:
    """A package ``pla-faulty`` with one module, as pip would leave it."""
    (folder / f"{module}.py").write_text(source)
    metadata = folder / f"pla_faulty_{module}-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pla-faulty\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {module}:POLICY\n")
    monkeypatch.syspath_prepend(folder)


IMPORTS = "from pla_sglang.policy.registry import FleetPolicy, on_mixed_instances\n"
ROUND_ROBIN = "from pla_sglang.policy.baselines.dispatch import RoundRobin\n"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import nowhere_at_all", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("POLICIES = {}", "cannot be loaded: AttributeError: module '{module}' has no attribute 'POLICY'"),
        ("POLICY = 1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("POLICY = 'round-robin'", "is a str; allowed: a registry.FleetPolicy"),
        (IMPORTS + "POLICY = FleetPolicy(lambda setup: {}[3], live=True)", "cannot be made: KeyError: 3"),
        (IMPORTS + "POLICY = FleetPolicy(lambda setup: 3, live=True)", "cannot be made: TypeError: "),
        (
            IMPORTS + "POLICY = FleetPolicy(on_mixed_instances(lambda setup: object()), live=True)",
            "has a dispatcher of type object, without dispatch()",
        ),
        (
            IMPORTS + ROUND_ROBIN + "POLICY = FleetPolicy(lambda setup: (RoundRobin(), ('x',), []), live=True)",
            "has a controller of type str, without tick() and interval_s",
        ),
        (
            IMPORTS + ROUND_ROBIN + "POLICY = FleetPolicy(lambda setup: (RoundRobin(), (), []), live=True)",
            "gives the roles []; allowed: one Role for each of",
        ),
    ],
    ids=range(9),
)
def test_a_faulty_package_is_refused_in_one_line(
    source: str,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    module = f"faulty_policy_{request.node.callspec.id}"
    install(tmp_path, monkeypatch, source, name="faulty", module=module)
    subject = f"policy 'faulty' of package pla-faulty 1.2 ({module}:POLICY) "
    said = subject + fault.replace("{module}", module)

    assert launch_router.main(["--policy", "faulty"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    assert simulate.main(["--trace", str(trace), *TARGETS, "--policy", "faulty"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_name_that_is_taken_belongs_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "", name="pla", module="pla_again")
    with pytest.raises(ConfigError, match=r"policy 'pla' is offered by pla_sglang itself and by package pla-faulty"):
        find_policy("pla")
    assert "pla" not in installed_names()  # listed once, by the registry
    assert find_policy("sla-scaler").live is False


def test_a_policy_for_the_simulator_alone_is_not_run_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = IMPORTS + ROUND_ROBIN + "POLICY = FleetPolicy(on_mixed_instances(lambda setup: RoundRobin()))"
    install(tmp_path, monkeypatch, source, name="offline", module="offline_policy")
    find_policy("offline")
    with pytest.raises(ConfigError, match="policy 'offline' is not for the router, as it is not marked live"):
        ControlKnobs(policy="offline")


def test_names_list_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "", name="extra", module="extra_policy")
    with pytest.raises(
        ConfigError, match=r"--policy 'arow' is not known; did you mean 'arrow'\? allowed: round-robin, .*, extra$"
    ):
        ControlKnobs(policy="arow")
    with pytest.raises(ConfigError, match=r"policy 'arow' is not known; did you mean 'arrow'\? .*, extra"):
        find_policy("arow")


@pytest.mark.parametrize(
    ("policy", "texts", "said"),
    [
        ("arrow", ["arrow.idle_s"], "--policy-knob arrow.idle_s '' is no number; allowed: at least 0"),
        ("arrow", ["arrow.idle_s=-1"], "--policy-knob arrow.idle_s -1 is out of range; allowed: at least 0"),
        ("arrow", ["arrow.idle_s=inf"], "--policy-knob arrow.idle_s 'inf' is out of range; allowed: at least 0"),
        ("arrow", ["arrow.idle_s=1", "arrow.idle_s=2"], "--policy-knob arrow.idle_s is given twice"),
        ("arrow", ["arrow.cool_down_s=4000"], "cool_down_s 4000 is above cool_down_max_s 3600"),
        ("dopd", ["dopd.down_intervals=1.5"], "--policy-knob dopd.down_intervals 1.5 is not a whole number"),
        ("dopd", ["arrow.idle_s=1"], "--policy-knob 'arrow.idle_s' is not known to the policy; allowed: dopd."),
        ("pla", ["dopd.headroom=2"], "allowed: none, as it has no knobs to set"),
    ],
)
def test_knobs_of_a_policy_are_checked_at_the_start(policy: str, texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        ControlKnobs(policy=policy, policy_knobs=tuple(texts))


def test_knobs_of_a_policy_are_flags() -> None:
    flags = ["--policy", "combined", "--policy-knob", "unite.rest_s=60", "--policy-knob", "arrow.low_load=0.5"]
    config, _ = launch_router.read_config(flags)
    assert config.control.policy_knobs == ("unite.rest_s=60", "arrow.low_load=0.5")
    assert read_knobs("combined", config.control.policy_knobs) == {"unite.rest_s": 60.0, "arrow.low_load": 0.5}


@pytest.mark.parametrize("name", policy_names())
def test_the_router_takes_just_the_policies_that_are_marked_live(name: str) -> None:
    if find_policy(name).live:
        assert find_live_policy(name) is find_policy(name)
        return
    with pytest.raises(ConfigError, match=f"--policy '{name}' is not known"):
        ControlKnobs(policy=name)
