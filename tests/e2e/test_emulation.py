"""One cluster of real engines on an emulated device: every token, KV transfer, restarts, an end without leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.clusters import family, wait_ready

from bench.harness.replay import Planned, Replay, count_wrong
from pla_sglang.profiles import load_profile
from pla_sglang.sim import chain
from pla_sglang.testing.server import ServerError, fetch

pytestmark = pytest.mark.e2e

PROFILE = "h100-llama3.1-8b-tp1"
SCALE = 4


def launch(state: Path, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pla_sglang.launch_cluster", "--state-file", str(state), *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def gone(processes: list[psutil.Process], ports: list[int]) -> None:
    """No process and no listening port is left."""
    _, alive = psutil.wait_procs(processes, timeout=25)
    assert alive == []
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert listening.isdisjoint(ports)


def ports_of(described: dict[str, Any]) -> list[int]:
    members = [*described["instances"], *([described["router"]] if described["router"] else [])]
    bootstrap = [one["bootstrap_port"] for one in described["instances"] if one["bootstrap_port"]]
    return [int(one["url"].rsplit(":", 1)[1]) for one in members] + bootstrap


def get(url: str, *, timeout_s: float = 60.0) -> Any:
    return fetch(url, timeout_s=timeout_s)


def ask(url: str, count: int, *, seed: int, gap_s: float = 0.05, timeout_s: float = 200.0) -> None:
    """``count`` requests of mixed lengths; every token must be the oracle's."""
    import asyncio

    rng = random.Random(seed)
    shared = chain.prompt_of(700, 1, rng)[:600]
    planned = []
    for index in range(count):
        answer = rng.randint(1, 40)
        prompt = chain.prompt_of(rng.choice((5, 60, 900, 3000, 9000)), answer, rng)
        planned.append(Planned(index, index * gap_s, shared + prompt if index % 3 == 0 else prompt, answer))
    records = asyncio.run(Replay(url, timeout_s=timeout_s).run(planned))
    assert [record.error for record in records if record.error] == []
    assert sum(map(count_wrong, records)) == 0
    assert all(record.finish == "stop" for record in records)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    pytest.importorskip("nixl", reason="PD disaggregation needs NIXL")
    pytest.importorskip("sglang_router", reason="the bench extra")
    folder = tmp_path_factory.mktemp("cluster")
    state, log = folder / "state.json", folder / "log"
    process = launch(
        *(state, log, "--prefill", "1", "--decode", "1", "--pla-emulate", PROFILE, "--pla-time-scale", str(SCALE)),
        *("--incremental-streaming-output", "--enable-metrics", "--decode-args", "--pla-emulate-kv-gbps 100"),
    )
    try:
        yield wait_ready(process, state, log) | {"process": process, "state_file": state, "log": log}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()


def test_every_token_of_a_pd_pair_is_right(cluster: dict[str, Any]) -> None:
    ask(cluster["url"], 30, seed=1)


def test_engines_say_that_they_are_no_gpu(cluster: dict[str, Any]) -> None:
    for one in cluster["instances"]:
        state = get(one["url"] + "/server_info")["internal_states"][0]["pla_emulation"]
        assert (state["profile"], state["time_scale"]) == (PROFILE, SCALE)
        assert state["steps"] > 0
        assert 0 <= state["host_overhead_share"] < 1
        series = fetch(one["url"] + "/metrics")
        assert f'profile="{PROFILE}"' in series
        assert "pla_emulated_busy_seconds_total" in series
    assert "EMULATED device, not a GPU" in cluster["log"].read_text()


def test_a_kv_transfer_takes_its_bandwidth(cluster: dict[str, Any]) -> None:
    """A long prompt's second token comes after prefill, transfer and one step."""
    import asyncio

    tokens = 20_000
    prompt = chain.prompt_of(tokens, 3, random.Random(9))
    [record] = asyncio.run(Replay(cluster["url"], timeout_s=200).run([Planned(0, 0.0, prompt, 3)]))
    assert record.error is None
    profile = load_profile(PROFILE)
    transfer_s = tokens * profile.kv_bytes_per_token * 8 / 100e9
    sizes = [8192, 8192, tokens - 2 * 8192]
    prefill_s = sum(profile.prefill_s(n, n * (n + 2 * h), h) for n, h in zip(sizes, (0, 8192, 16384), strict=True))
    assert record.done_s is not None
    assert record.sent_s is not None
    assert record.done_s - record.sent_s >= SCALE * (transfer_s + prefill_s)


def restart(cluster: dict[str, Any], name: str) -> None:
    arguments = ["--restart", name, "--state-file", str(cluster["state_file"])]
    done = subprocess.run(
        [sys.executable, "-m", "pla_sglang.launch_cluster", *arguments], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stdout + done.stderr


def instance(cluster: dict[str, Any], name: str) -> dict[str, Any]:
    """As the state file has it now."""
    state = json.loads(cluster["state_file"].read_text())
    found: dict[str, Any] = next(one for one in state["instances"] if one["name"] == name)
    return found


def test_a_restarted_instance_serves_again(cluster: dict[str, Any]) -> None:
    restart(cluster, "decode-0")
    assert (instance(cluster, "prefill-0")["restarts"], instance(cluster, "decode-0")["restarts"]) == (0, 1)
    wait_for_the_router(cluster)
    ask(cluster["url"], 5, seed=2)


@pytest.mark.parametrize(
    ("victim", "name", "other"), [("engine", "prefill-0", "decode-0"), ("scheduler", "decode-0", "prefill-0")]
)
def test_a_killed_instance_leaves_nothing_and_can_be_restarted(
    cluster: dict[str, Any], victim: str, name: str, other: str
) -> None:
    """Killed as a whole, or only its scheduler, which makes the engine end by itself; the others go on."""
    killed = instance(cluster, name)
    engine = psutil.Process(killed["pid"])
    processes, ports = [engine, *engine.children(recursive=True)], [int(killed["url"].rsplit(":", 1)[1])]
    ports += [killed["bootstrap_port"]] if killed["bootstrap_port"] else []
    schedulers = [one for one in processes[1:] if "scheduler" in " ".join(one.cmdline())]
    assert len(schedulers) == 1
    (engine if victim == "engine" else schedulers[0]).kill()
    gone(processes, ports)
    wait_for_state(cluster, name, "dead")
    assert instance(cluster, other)["state"] == "ready"
    restart(cluster, name)
    assert int(instance(cluster, name)["url"].rsplit(":", 1)[1]) == ports[0]
    wait_for_the_router(cluster)
    ask(cluster["url"], 5, seed=4, timeout_s=30)


def wait_for_the_router(cluster: dict[str, Any]) -> None:
    """SGLang's router looks at its workers every few seconds, and does not say what it has found."""
    deadline_s = time.monotonic() + 120
    prompt = chain.prompt_of(9, 3, random.Random(1))
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 3}}
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ServerError, OSError):  # refused, answered with an error, or not within the time
            fetch(cluster["url"] + "/generate", body, timeout_s=10)
            return
        time.sleep(1)
    pytest.fail("the router does not serve again")


def wait_for_state(cluster: dict[str, Any], name: str, state: str) -> None:
    deadline_s = time.monotonic() + 60
    while instance(cluster, name)["state"] != state:
        assert time.monotonic() < deadline_s, f"{name} is {instance(cluster, name)['state']}, not {state}"
        time.sleep(0.2)


def test_ctrl_c_leaves_nothing(cluster: dict[str, Any]) -> None:
    processes, ports = family(cluster["pid"]), ports_of(cluster)
    assert len(processes) >= 8
    os.kill(cluster["pid"], signal.SIGINT)
    assert cluster["process"].wait(timeout=40) == 0
    gone(processes, ports)
    assert not cluster["state_file"].exists()
