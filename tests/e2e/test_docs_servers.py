"""Commands on the pages that start real SGLang servers: each is run as it stands, with a small model and free ports."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.doc_commands import RUNNABLE, Command, commands_of, run_curl
from support.serving import until

from pla_sglang.testing.server import Server

pytestmark = pytest.mark.e2e

LAUNCH_SERVER, LAUNCH_CLUSTER = "pla_sglang.launch_server", "pla_sglang.launch_cluster"
# Several ranks, PD pairs and stateless instances have end-to-end tests of their own; here their arguments are checked.
CHECKED_ONLY = ("--dp-size", "--disaggregation-mode", "--pla-stateless")
STARTED = [command for command in commands_of(LAUNCH_SERVER) if not set(CHECKED_ONLY) & set(command.words)]
BODY = {"text": "What is a list?", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


def server_of(command: Command, forked: Callable[..., Server], fresh: Callable[..., Server]) -> Server:
    """Temporal scheduling has a true start, of the same launcher, in ``test_temporal_server.py``: what a page has
    besides are flags, which a fork reads too."""
    from pla_sglang.plugin.demo import demo_model_path

    words = list(command.arguments)
    model = None
    if "--model-path" in words:
        place = words.index("--model-path")
        model, words[place : place + 2] = demo_model_path(), []
    make_server = forked if "temporal" in words else fresh
    return make_server(model, [*words, "--device", "cpu"], module=LAUNCH_SERVER)


@pytest.mark.parametrize("command", STARTED, ids=str)
def test_servers_and_their_curl_lines(
    command: Command, forked: Callable[..., Server], fresh: Callable[..., Server], serving: Callable[..., Any]
) -> None:
    with serving(server_of(command, forked, fresh)) as (server,):
        assert server.post("/generate", BODY)["meta_info"]["completion_tokens"] == 4
        if "--prefill-disagg" in command.words:
            for line in curl_lines():
                assert json.loads(run_curl(line, server.port, {})), line


def curl_lines() -> list[Command]:
    """In the order of the pages; the router's are in test_docs_commands.py."""
    lines = [command for block in RUNNABLE for command in block.commands if command.program == "curl"]
    return [command for command in lines if not any("/workers" in word for word in command.words)]


@pytest.mark.parametrize("command", commands_of(LAUNCH_CLUSTER), ids=str)
def test_clusters(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("nixl", reason="PD disaggregation needs NIXL")
    pytest.importorskip("sglang_router", reason="the bench extra")
    state, log = tmp_path / "state.json", tmp_path / "log"
    launch = [sys.executable, "-m", LAUNCH_CLUSTER, "--state-file", str(state)]
    with log.open("wb") as output:
        process = subprocess.Popen([*launch, *command.arguments], stdout=output, stderr=subprocess.STDOUT)
    try:
        until(lambda: process.poll() is not None or is_ready(state), what="a cluster", patience_s=280, poll_s=0.3)
        assert process.poll() is None, log.read_text()[-3000:]
        url = json.loads(state.read_text())["url"]
        answer = until(lambda: post(f"{url}/generate", BODY), what="a router that has found its instances", poll_s=0.3)
        assert answer["meta_info"]["completion_tokens"] == 4
        assert subprocess.run([*launch, "--stop"], capture_output=True, timeout=60).returncode == 0
        assert process.wait(timeout=60) == 0
    finally:
        process.terminate()
        process.wait()


def is_ready(state: Path) -> bool:
    return state.exists() and bool(json.loads(state.read_text())["ready"])


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer; empty while the router has no instances (status 503)."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return dict(json.loads(answer.read()))
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return {}
