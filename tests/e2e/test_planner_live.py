"""A planner beside a policy, live: a cluster of one instance grows under load, and shrinks when that is over."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.test_cluster_scaling import LIMIT_S, ready_workers
from e2e.test_router_control import call
from support.serving import until

pytestmark = pytest.mark.e2e

PLANNER = (
    "--planner threshold --instances-max 2 --slo-ttft-ms 200 --migration on"
    " --policy-knob threshold.interval_s=0.2 --policy-knob threshold.cool_down_s=1 --policy-knob threshold.high=0.4"
)
ARGUMENTS = ("--stateless", "1", "--policy", "combined", "--pla-emulate", "h100-llama3.1-8b-tp1")
PROMPT_TOKENS, THREADS = 2000, 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, forked_cluster: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    pytest.importorskip("nixl", reason="stateless instances need NIXL")
    with forked_cluster(tmp_path_factory.mktemp("planner"), *ARGUMENTS, f"--router-args={PLANNER}") as described:
        yield described


def planner(url: str) -> dict[str, Any]:
    state: dict[str, Any] = call(f"{url}/pla/state")[1]["planner"]
    return state


def test_a_fleet_grows_under_load_and_shrinks_after_it(cluster: dict[str, Any]) -> None:
    url, over, statuses = cluster["router"]["url"], threading.Event(), []

    def send(number: int) -> None:
        """Prompts that share nothing, one after the other."""
        turn = 0
        while not over.is_set():
            ids = [3 + (number * 7 + turn * 13 + place) % 200 for place in range(PROMPT_TOKENS)]
            statuses.append(call(f"{url}/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}})[0])
            turn += 1

    def has_stopped_what_it_started() -> bool:
        state = planner(url)
        return bool(state["stopped"] == state["starts"]["ready"])

    until(lambda: planner(url)["leads"], what="the router has the lease")
    senders = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(THREADS)]
    for sender in senders:
        sender.start()
    try:
        until(lambda: planner(url)["starts"].get("ready"), patience_s=LIMIT_S, what="a second instance was ready")
        assert planner(url)["startup_s"] > 0
    finally:
        over.set()
        for sender in senders:
            sender.join()
    until(lambda: len(ready_workers(url)) == 1, patience_s=LIMIT_S, what="one has left")
    until(lambda: len(listed(cluster)) == 1, patience_s=LIMIT_S, what="and was stopped")
    until(has_stopped_what_it_started, what="which is counted")
    assert set(planner(url)["starts"]) == {"ready"}, "a busy machine may make it grow more than once"
    assert set(statuses) == {200}, "nothing fails while the fleet grows and shrinks"
    assert call(f"{url}/generate", {"text": "q", "sampling_params": {"max_new_tokens": 2}})[0] == 200
    assert {one["url"] for one in listed(cluster)} == set(ready_workers(url))
    assert "Traceback" not in Path(cluster["log"]).read_text(errors="replace")


def listed(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """The engines that the state file of the cluster has."""
    rows: list[dict[str, Any]] = json.loads(Path(cluster["state_file"]).read_text())["instances"]
    return rows
