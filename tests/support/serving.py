"""Talking to a real server in end-to-end tests: requests in parallel, states waited for, and that nothing is left over.

Nothing sleeps for a fixed time; what a test needs is asked for until it is so.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil

from pla_sglang.testing.server import HttpError, Server, fetch, greedy_body, open_url

T = TypeVar("T")
Prompt = list[int]
POLL_S = 0.005
PATIENCE_S = 60.0
# Gauges that count requests somewhere in the server. SGLang refreshes its own every 30 s when idle.
_GAUGES = re.compile(r"^(?:sglang:num_(?:queue|running)_reqs|pla_queue_(?:reqs|tokens))(?:\{[^}]*\})? (\S+)$", re.M)


def until(ask: Callable[[], T], *, what: str, patience_s: float = PATIENCE_S, poll_s: float = POLL_S) -> T:
    """The first true answer of ``ask``."""
    end_s = time.monotonic() + patience_s
    while not (answer := ask()):
        assert time.monotonic() < end_s, f"not within {patience_s:g} s: {what}"
        time.sleep(poll_s)
    return answer


def until_ended(pid: int) -> None:
    """A process that is nobody's any more: it may stay a zombie for as long as process 1 likes."""

    def has_ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(has_ended, what=f"process {pid} has ended")


async def wait_until(ask: Callable[[], T], *, patience_s: float = 20.0) -> T:
    """As ``until``, on an event loop."""
    async with asyncio.timeout(patience_s):
        while not (answer := ask()):
            await asyncio.sleep(POLL_S)
        return answer


@dataclass
class Client:
    """One server and the admin key it wants, if any."""

    server: Server
    admin_key: str | None = None
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(128))

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.admin_key is None else {"Authorization": f"Bearer {self.admin_key}"}

    # -- requests ----------------------------------------------------------------------------------------------------

    def ask(self, prompt: Prompt, new_tokens: int, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.server.post("/generate", greedy_body(prompt, new_tokens) | body)
        return answer

    def submit(self, prompt: Prompt, new_tokens: int, **body: Any) -> Future[dict[str, Any]]:
        return self.pool.submit(self.ask, prompt, new_tokens, **body)

    def status(
        self, path: str, body: Any, *, headers: dict[str, str] | None = None, raw: bytes | None = None
    ) -> tuple[int, Any]:
        """Status code and JSON (or text) of a POST, whatever the status."""
        content = json.dumps(body).encode() if raw is None else raw
        try:
            with open_url(self.server.url + path, content, headers=headers, timeout_s=PATIENCE_S) as answer:
                code, text = answer.status, answer.read().decode()
        except HttpError as error:
            code, text = error.status, error.body
        try:
            return code, json.loads(text)
        except json.JSONDecodeError:
            return code, text

    def abort(self, rid: str) -> None:
        self.server.post("/abort_request", {"rid": rid}, headers=self.headers)

    def configure(self, **knobs: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.server.post("/pla/config", knobs, headers=self.headers)
        config: dict[str, Any] = answer["schedulers"][0]["config"]
        return config

    # -- states ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        answer = fetch(self.server.url + "/pla/state", headers=self.headers, timeout_s=PATIENCE_S)
        state: dict[str, Any] = answer["schedulers"][0]
        return state

    def chunk_left(self) -> int:
        return int(self.state()["chunk_remaining_tokens"])

    def wait_for_chunk(self) -> int:
        """A long is between two of its chunks."""
        return until(self.chunk_left, what="a long prefill under way")

    def wait_for_chunk_or(self, requests: list[Future[dict[str, Any]]]) -> None:
        """As ``wait_for_chunk``, but no longer than ``requests`` run."""
        until(
            lambda: self.chunk_left() or all(request.done() for request in requests),
            what="a long prefill under way, or all of them done",
        )

    def wait_until_idle(self) -> None:
        def idle() -> bool:
            state = self.state()
            queued = sum(entry["reqs"] for entry in state["queue"].values())
            return not queued and not state["chunk_remaining_tokens"]

        until(idle, what="an empty queue")

    def flush(self) -> None:
        """Works only when no request holds anything, so it is a check too."""
        self.server.post("/flush_cache?timeout=20", {}, headers=self.headers)

    def metrics(self) -> str:
        text: str = self.server.get("/metrics/")
        return text

    def assert_at_rest(self) -> None:
        """No request, no KV, no gauge, no error is left over."""
        self.wait_until_idle()
        self.flush()
        self.ask([5, 6, 7], 1)  # something for the host to count, so that it counts anew
        gauges: list[str] = []

        def zero() -> bool:
            gauges[:] = [match[0] for match in _GAUGES.finditer(self.metrics()) if float(match[1])]
            return not gauges

        try:
            until(zero, what="gauges back at zero", poll_s=0.2)
        except AssertionError:
            raise AssertionError(f"gauges that do not return to zero: {gauges}") from None
        assert len(_GAUGES.findall(self.metrics())) >= 2, "no gauges to check"
        assert self.server.is_alive()
        log = self.server.log_text()
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:6000]


def outputs(answers: Iterable[Future[dict[str, Any]]]) -> list[list[int]]:
    return [answer.result(timeout=180)["output_ids"] for answer in answers]


def finish(answer: dict[str, Any]) -> str:
    kind: str = answer["meta_info"]["finish_reason"]["type"]
    return kind


def aborted(request: Future[dict[str, Any]]) -> bool:
    """How SGLang answers an aborted request depends on where it was: an error status, or a finish reason."""
    try:
        return finish(request.result(timeout=60)) == "abort"
    except HttpError as error:
        return "abort" in error.body.lower()
