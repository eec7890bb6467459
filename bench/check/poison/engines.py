"""The kinds of engine that the search is run at, and whether one still lives."""

from __future__ import annotations

import http.client
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.check.poison.values import Sent
from bench.harness.cli import emulation_flags
from pla_sglang.plugin.demo import demo_model_path
from pla_sglang.testing.server import HttpError, Server, ServerError, open_url

STARTS_S = 600.0
WAITS_S = 40.0  # for the answer to one request of the search, and to one of the neighbour
ROOMS_APART = 1000  # each prompt of a batch has the next room
NEIGHBOUR_TOKENS = 24
NEIGHBOUR = [7, 11, 13, 17, 19, 23]
CONTEXT_TOKENS = 512  # an answer without a limit ends soon
COMMON = (
    *("--context-length", str(CONTEXT_TOKENS), "--max-total-tokens", "8192", "--max-running-requests", "16"),
    *(
        "--chunked-prefill-size",
        "64",
        "--random-seed",
        "1",
        "--enable-metrics",
        "--stream-interval",
        "1",
        "--log-level",
        "warning",
    ),
)
TEMPORAL = ("--prefill-disagg", "temporal")
SENDS_KV = ("--disaggregation-transfer-backend", "nixl")
PAIR_PATHS = ("/generate", "/v1/completions", "/v1/chat/completions", "/invocations")  # those with bootstrap_*
OURS = "pla_sglang.launch_server"
# What ended it, in the log of a scheduler, a detokenizer or the tokenizer process.
_LAST_ERROR = re.compile(r"^(?:[A-Za-z_.]+(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
_DEATH = re.compile(r"hit an exception|Received sigquit|SIGQUIT received|Child process unexpectedly failed")


@dataclass(frozen=True)
class Kind:
    """``servers``: the arguments of each; answers come from the last. ``stock``: SGLang with our CPU platform alone."""

    name: str
    servers: tuple[tuple[str, ...], ...]
    stock: bool = False
    embeds: bool = False
    emulated: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("temporal", (TEMPORAL,)),
        Kind("mixed", ((*TEMPORAL, "--enable-mixed-chunk", "--enable-priority-scheduling"),)),
        Kind("emulated", ((*TEMPORAL, "--enable-mixed-chunk"),), emulated=True),
        Kind("stateless", ((*TEMPORAL, "--enable-mixed-chunk", "--pla-stateless", *SENDS_KV),)),
        Kind(
            "pair",
            (
                (*TEMPORAL, *SENDS_KV, "--disaggregation-mode", "prefill"),
                (*SENDS_KV, "--disaggregation-mode", "decode"),
            ),
        ),
        Kind("embedding", ((*TEMPORAL, "--is-embedding"),), embeds=True),
        Kind("stock", ((),), stock=True),
        Kind("stock-embedding", (("--is-embedding",),), stock=True, embeds=True),
    )
}


class Engines:
    """The servers of one kind, as one thing that answers. ``stop`` it."""

    def __init__(self, kind: Kind, folder: Path, profile: str) -> None:
        self.kind = kind
        self.starts = 0
        self.servers: list[Server] = []
        self._folder, self._profile = folder, profile
        self._rooms = itertools.count(random.SystemRandom().getrandbits(40) + 1, ROOMS_APART)
        self._pool = ThreadPoolExecutor(48)
        self._expected: list[Any] | None = None

    def start(self) -> None:
        """Raises ServerError."""
        self.starts += 1
        device = emulation_flags(self._profile, 0.2) if self.kind.emulated else ["--device", "cpu"]
        self._folder.mkdir(parents=True, exist_ok=True)
        self.servers = []
        for place, own in enumerate(self.kind.servers):
            log = self._folder / f"poison-{self.kind.name}-{place}-{self.starts}.log"
            module, env = (OURS, {}) if not self.kind.stock else ("sglang.launch_server", {"SGLANG_PLUGINS": "pla_cpu"})
            model = demo_model_path() if self.kind.stock else None
            variables: dict[str, str | None] = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}
            arguments = [*device, *COMMON, *own]
            server = Server(
                model,
                arguments,
                module=module,
                env=variables,
                log_path=log,
                stop_timeout_s=1.0,
                start_timeout_s=STARTS_S,
            )
            server.start()
            self.servers.append(server)
        for server in self.servers:
            server.wait_ready()
        if self._expected is None:
            answer = self.ask_neighbour()
            if not isinstance(answer, list):
                raise ServerError(f"{self.kind.name}: a plain request to a fresh engine: {answer}")
            self._expected = answer

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def close(self) -> None:
        self.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- requests ----------------------------------------------------------------------------------------------------

    def send(self, sent: Sent) -> str:
        """A status, or ``hung``, ``broken`` for an answer that ended in no status."""
        body = sent.body
        if len(self.servers) == 1:
            return _post(self.servers[0], sent.path, sent.content())
        if sent.path not in PAIR_PATHS:
            return _post(random.choice(self.servers), sent.path, sent.content())
        room = self._next_room()
        content = json.dumps({**room, **body}).encode()
        first, last = (self._pool.submit(_post, server, sent.path, content) for server in self.servers)
        end_s = time.monotonic() + WAITS_S
        while not last.done() and time.monotonic() < end_s:
            if first.done() and first.result() not in ("200", "hung"):
                return first.result()  # the other one waits for KV that never comes; its client goes
            time.sleep(0.02)
        return last.result() if last.done() else "hung"

    def ask_neighbour(self) -> Any:
        """The answer to a plain request, or why there is none."""
        if self.kind.embeds:
            body: dict[str, Any] = {"input": "hello there", "model": "default"}
            return _answer(self.servers[-1], "/v1/embeddings", body, lambda answer: answer["data"][0]["embedding"][:4])
        params = {"temperature": 0, "max_new_tokens": NEIGHBOUR_TOKENS, "ignore_eos": True}
        body = {"input_ids": NEIGHBOUR, "sampling_params": params}
        if len(self.servers) == 1:
            return _answer(self.servers[0], "/generate", body, lambda answer: answer["output_ids"])
        body |= self._next_room()
        self._pool.submit(_post, self.servers[0], "/generate", json.dumps(body).encode())
        return _answer(self.servers[1], "/generate", body, lambda answer: answer["output_ids"])

    def is_right(self, answer: Any) -> bool:
        expected = self._expected
        if self.kind.embeds and isinstance(answer, list) and expected is not None:
            return all(abs(one - other) < 1e-5 for one, other in zip(answer, expected, strict=True))
        return bool(answer == expected)

    def _next_room(self) -> dict[str, Any]:
        port = self.servers[0].bootstrap_port
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": next(self._rooms)}

    # -- life --------------------------------------------------------------------------------------------------------

    def why_ended(self) -> str | None:
        """The last error of an engine that has ended; None: all live."""
        for server in self.servers:
            text = server.log_text()
            if not server.is_alive() or _DEATH.search(text):
                errors = [line for line in _LAST_ERROR.findall(text) if "sigquit" not in line.lower()]
                return (errors[-1] if errors else "ended without a word")[:240]
        return None


def _post(server: Server, path: str, content: bytes) -> str:
    try:
        with open_url(server.url + path, content, timeout_s=WAITS_S) as answer:
            answer.read()
            return str(answer.status)
    except HttpError as error:
        return str(error.status)
    except ServerError as error:
        return "hung" if "timed out" in str(error) else "broken"
    except TimeoutError:
        return "hung"
    except (OSError, ValueError, http.client.HTTPException):
        return "broken"


def _answer(server: Server, path: str, body: Mapping[str, Any], read: Callable[[Any], Any]) -> Any:
    try:
        with open_url(server.url + path, body, timeout_s=WAITS_S) as answer:
            return read(json.loads(answer.read()))
    except (ServerError, OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error!s:.200}"
