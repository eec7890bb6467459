"""Two relays and a control process in front of a real PD pair: real clients, every token, aborts, a restart."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.test_emulation import ask, get, launch, wait_ready
from support.relays import request_bytes
from support.serving import until

from pla_sglang import chain
from pla_sglang.chain.vocab import EOS, token_text

pytestmark = pytest.mark.e2e

SCALE = 4
LONG_ANSWER = 3000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    pytest.importorskip("nixl", reason="PD disaggregation needs NIXL")
    folder = tmp_path_factory.mktemp("relays")
    state, log = folder / "state.json", folder / "log"
    process = launch(
        *(state, log, "--prefill", "1", "--decode", "1", "--pla-emulate", "h100-llama3.1-8b-tp1"),
        *("--pla-time-scale", str(SCALE), "--incremental-streaming-output", "--router", "pla"),
        *("--policy", "static-pd-round-robin", "--router-args", "--relay-workers 2"),
    )
    try:
        yield wait_ready(process, state, log) | {"process": process, "log": log}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()


def held(cluster: dict[str, Any], kind: str) -> int:
    """Requests that an instance runs or has waiting, in any of its queues."""
    [one] = [one for one in cluster["instances"] if one["kind"] == kind]
    loads = get(one["url"] + "/v1/loads?include=core")["loads"]
    return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in loads)


def idle(cluster: dict[str, Any]) -> bool:
    state = get(cluster["url"] + "/pla/state")
    return state["open_requests"] == 0 and held(cluster, "prefill") == held(cluster, "decode") == 0


def test_every_token_is_right(cluster: dict[str, Any]) -> None:
    ask(cluster["url"], 40, seed=11, gap_s=0.03)


def test_the_openai_client_works_unmodified(cluster: dict[str, Any]) -> None:
    from openai import OpenAI

    with OpenAI(base_url=cluster["url"] + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        model = client.models.list().data[0].id
        prompt = chain.prompt_of(50, 8, random.Random(3))
        words = "".join(token_text(token) for token in chain.expected(prompt, 20).tokens if token != EOS)
        whole = client.completions.create(model=model, prompt=prompt, max_tokens=20, temperature=0, logprobs=1)
        assert whole.choices[0].text == words
        assert whole.choices[0].logprobs is not None
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 50
        several = client.completions.create(model=model, prompt=prompt, max_tokens=20, temperature=0, n=3)
        assert [choice.text for choice in several.choices] == [words] * 3
        batch = client.completions.create(model=model, prompt=[prompt, prompt], max_tokens=20, temperature=0)
        assert [choice.text for choice in batch.choices] == [words] * 2
        stream = client.completions.create(model=model, prompt=prompt, max_tokens=20, temperature=0, stream=True)
        assert "".join(part.choices[0].text for part in stream if part.choices) == words
        chat = [{"role": "user", "content": "hello" + chain.ask_text(6)}]
        answer = client.chat.completions.create(model=model, messages=chat, max_tokens=20, temperature=0)  # type: ignore[call-overload]
        assert len(answer.choices[0].message.content.split()) == 5
    until(lambda: idle(cluster), what="an idle cluster")


def test_clients_that_go_leave_nothing_behind(cluster: dict[str, Any]) -> None:
    """At four points of a request's life: at once, in prefill, in decode, and half closed."""
    port = int(cluster["url"].rsplit(":", 1)[1])
    rng = random.Random(4)
    for number in range(24):
        prompt = chain.prompt_of(rng.choice((20, 2000, 12_000)), LONG_ANSWER, rng)
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": LONG_ANSWER}, "stream": number % 2 == 0}
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request_bytes(body))
            if number % 4 == 3:
                connection.shutdown(socket.SHUT_WR)
            time.sleep(0.15 * (number % 4))
    until(lambda: idle(cluster), what="an idle cluster", patience_s=15, poll_s=0.1)
    ask(cluster["url"], 5, seed=12)


def test_streams_outlive_the_control_plane(cluster: dict[str, Any]) -> None:
    """The control process is killed in the middle of a stream: the stream goes on, and new requests find a new one."""
    [control] = [one for one in psutil.Process(cluster["pid"]).children(recursive=True) if is_control(one)]
    prompt = chain.prompt_of(40, 200, random.Random(5))
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 200, "temperature": 0}, "stream": True}
    port = int(cluster["url"].rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request_bytes(body, headers={"connection": "close"}))
        raw = connection.recv(1 << 16)
        while raw.count(b"data: ") < 5:
            raw += connection.recv(1 << 16)
        control.kill()
        while part := connection.recv(1 << 16):
            raw += part
    assert tokens_of(raw) == list(chain.expected(prompt, 200).tokens)
    ask(cluster["url"], 5, seed=13)
    until(lambda: idle(cluster), what="an idle cluster")


def is_control(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()[-2:] == ["pla_sglang.router.children", "control"]
    return False


def tokens_of(raw: bytes) -> list[int]:
    lines = [line[6:] for line in raw.split(b"\r\n") if line.startswith(b"data: {")]
    return [token for line in lines for token in json.loads(line)["output_ids"]]


def test_the_end_leaves_no_process(cluster: dict[str, Any]) -> None:
    processes = psutil.Process(cluster["process"].pid).children(recursive=True)
    assert sum(is_control(one) for one in processes) == 1
    os.kill(cluster["process"].pid, signal.SIGINT)
    assert cluster["process"].wait(40) == 0
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    assert "Traceback" not in Path(cluster["log"]).read_text()
