"""Real servers for end-to-end tests: one model, one oracle, and the log of every live server where a test fails."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.bad_requests import BAD, refusal
from support.clusters import running_cluster
from support.forked_servers import ONE_MODEL, ForkedServer, ForkParent
from support.load import FLAGS, Reference, ask_all
from support.serving import Client
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

from pla_sglang.testing.server import Server, running

NEW_TOKENS = 24
STOP_S = 0.5  # SGLang waits for what still runs; a test that wants to see that waits itself
# A scheduler that has nothing to do polls without a pause, on a core that tests beside this one need.
RESTS = ("--sleep-on-idle",)
PROMPT_LENGTHS = (1, 5, 16, 17, 63, 200, 450, 700)

_live: list[Server] = []


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the tiny model in a dtype; made at the first call."""
    made: dict[str, Path] = {}

    def folder(dtype: str) -> Path:
        if dtype not in made:
            made[dtype] = make_tiny_model(tmp_path_factory.mktemp(f"tiny-{dtype}"), dtype=dtype)
        return made[dtype]

    return folder


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of random prompts. The last two share a prefix of 400 tokens."""
    rng = random.Random(7)
    made = [[rng.randrange(3, VOCABULARY_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    made.append(made[-1][:400] + [rng.randrange(3, VOCABULARY_SIZE) for _ in range(50)])
    return made


@pytest.fixture(scope="session")
def expected(tiny_model: Callable[[str], Path], prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuation of every prompt in float32, by transformers: no KV cache, no chunks, no batches.

    The gap between the two best logits must be far above float32 rounding, or equality would be luck.
    """
    import torch
    from transformers import AutoModelForCausalLM

    # Two threads on busy cores wait for each other: 60 s instead of 2 s.
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model("float32"), dtype=torch.float32).eval()
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(NEW_TOKENS):
                best = torch.topk(model(torch.tensor([tokens])).logits[0, -1], 2)
                assert best.values[0] - best.values[1] > 1e-3, "the model is too flat for exact comparison"
                tokens.append(int(best.indices[0]))
            outputs.append(tokens[len(prompt) :])
    return outputs


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[tuple[Server, ...]]]:
    """``with serving(Server(...), ...) as (...)``: as ``running``, and failing tests show the servers' logs."""

    @contextmanager
    def start(*servers: Server) -> Iterator[tuple[Server, ...]]:
        with running(*servers):
            _live.extend(servers)
            try:
                yield servers
            finally:
                for server in servers:
                    _live.remove(server)

    return start


@pytest.fixture(scope="session")
def forked(fork_parent: ForkParent) -> Callable[..., Server]:
    """``forked(model, args, ...)``: as ``Server``, without the import of SGLang, and it rests while it is idle.

    Tests of a start use ``fresh``.
    """

    def make(model: Path | None, args: Sequence[str] = (), **options: Any) -> Server:
        return ForkedServer(fork_parent, model, (*args, *RESTS), stop_timeout_s=STOP_S, **options)

    return make


@pytest.fixture(scope="session")
def fresh() -> Callable[..., Server]:
    """``fresh(model, args, ...)``: as ``Server``, a true command line. SGLang imports one of its model files only."""

    def make(*args: Any, env: Mapping[str, str] | None = None, **options: Any) -> Server:
        return Server(*args, env={**ONE_MODEL, **(env or {})}, stop_timeout_s=STOP_S, **options)

    return make


@pytest.fixture(scope="session")
def forked_cluster(fork_parent: ForkParent) -> Callable[..., AbstractContextManager[dict[str, Any]]]:
    """``with forked_cluster(folder, *arguments) as described``: ``launch_cluster``, without the import of SGLang."""
    return functools.partial(running_cluster, fork_parent)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        for server in _live:
            report.sections.append((f"log of the server on port {server.port}", server.log_tail()))


@pytest.fixture(scope="session")
def reference(
    tiny_model: Callable[[str], Path], forked: Callable[..., Server], serving: Callable[..., Any]
) -> Reference:
    """What stock SGLang answers, one request after the other. Its server is gone before any other starts."""
    server = forked(tiny_model("float32"), ("--device", "cpu", "--chunked-prefill-size", "256"))
    with serving(server):
        client = Client(server)
        answers = ask_all(client)
        answers.refusals = {name: refusal(client, name) for name in BAD}
    return answers


@pytest.fixture(scope="session")
def temporal(
    tiny_model: Callable[[str], Path],
    forked: Callable[..., Server],
    fresh: Callable[..., Server],
    serving: Callable[..., Any],
) -> Callable[..., AbstractContextManager]:
    """``with temporal("--flag", ...) as client``: a server with temporal disaggregation, checked for leftovers.

    ``is_fresh=True``: it is no fork, but imports SGLang itself, in each of its processes.
    """

    @contextmanager
    def start(*flags: str, **options: Any) -> Iterator[Client]:
        admin_key = options.pop("admin_key", None)
        keys = () if admin_key is None else ("--admin-api-key", admin_key)
        subcommand = options.pop("subcommand", None)
        make_server = fresh if options.pop("is_fresh", False) else forked
        options = {"module": "pla_sglang.launch_server"} | options
        server = make_server(tiny_model("float32"), (*FLAGS, *flags, *keys), **options)
        if subcommand is not None:  # the console script ``sglang``, whose module does nothing under ``python -m``
            server._command[1:3] = ["-c", "from sglang.cli.main import main; main()", subcommand]
        with serving(server):
            client = Client(server, admin_key)
            yield client
            client.assert_at_rest()

    return start
