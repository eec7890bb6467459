"""SGLang's own scheduler on the CPU platform: pages, chunks, overlap, radix cache, streaming, both dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import NEW_TOKENS

from pla_sglang.testing.server import Server, greedy_body

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Variant:
    """One way to run the server. Together the variants hold both values of every switch."""

    name: str
    dtype: str
    page_size: int
    args: tuple[str, ...]
    is_fresh: bool = False  # it chooses the platform by itself; the others are forked where it is chosen already


CPU = ("--device", "cpu")
VARIANTS = (
    Variant("page 1, whole prompts, overlap", "float32", 1, CPU, is_fresh=True),
    # The pool holds two long prompts at most, so pages are evicted and requests wait for pages.
    Variant(
        "page 16, chunks of 64, overlap, small pool",
        "float32",
        16,
        (*CPU, "--page-size", "16", "--chunked-prefill-size", "64", "--max-total-tokens", "1536"),
    ),
    Variant(
        "page 1, chunks of 64, no overlap",
        "float32",
        1,
        (*CPU, "--chunked-prefill-size", "64", "--disable-overlap-schedule"),
    ),
    Variant(
        "two ranks, page 16, chunks of 64",
        "float32",
        16,
        (*CPU, "--tp-size", "2", "--page-size", "16", "--chunked-prefill-size", "64"),
    ),
    # Chosen by the environment that it is forked in, instead of the command line.
    Variant("bfloat16, page 16", "bfloat16", 16, ("--page-size", "16")),
)


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param


@pytest.fixture(scope="module")
def server(
    variant: Variant,
    tiny_model: Callable[[str], Path],
    forked: Callable[..., Server],
    fresh: Callable[..., Server],
    serving: Callable,
) -> Iterator[Server]:
    make_server = fresh if variant.is_fresh else forked
    with serving(make_server(tiny_model(variant.dtype), variant.args)) as (server,):
        yield server


@pytest.fixture
def empty_cache(server: Server) -> None:
    flush(server)


def flush(server: Server) -> None:
    # The answer of a request leaves before the scheduler has let go of it, so flushing may have to wait a moment.
    server.post("/flush_cache?timeout=10", {})


def ask(server: Server, prompt: list[int], **sampling: object) -> list[int]:
    return server.post("/generate", greedy_body(prompt, NEW_TOKENS, **sampling))["output_ids"]


def test_runs_as_asked(server: Server, variant: Variant) -> None:
    info = server.get("/server_info")
    assert info["device"] == "cpu"
    assert info["attention_backend"] == "torch_native"
    assert info["page_size"] == variant.page_size
    assert info["dtype"] in ("auto", variant.dtype)
    assert f"dtype: torch.{variant.dtype}" in server.log_text(), "the KV pool has another dtype"


@pytest.mark.usefixtures("empty_cache")
def test_greedy_output_one_by_one(
    server: Server, variant: Variant, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    got = [ask(server, prompt) for prompt in prompts]
    if variant.dtype == "float32":
        assert got == expected
    else:  # rounding of bfloat16 may turn a close decision, so the first token is what must agree
        assert [output[0] for output in got] == [output[0] for output in expected]


@pytest.mark.usefixtures("empty_cache")
def test_greedy_output_in_batches(
    server: Server, variant: Variant, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda prompt: ask(server, prompt), prompts))
    assert [len(output) for output in got] == [NEW_TOKENS] * len(prompts)
    if variant.dtype == "float32":
        assert got == expected


@pytest.mark.usefixtures("empty_cache")
def test_radix_hit_gives_the_same_output(server: Server, variant: Variant, prompts: list[list[int]]) -> None:
    first = server.post("/generate", greedy_body(prompts[-2], NEW_TOKENS))
    again = server.post("/generate", greedy_body(prompts[-2], NEW_TOKENS))
    sibling = server.post("/generate", greedy_body(prompts[-1], NEW_TOKENS))
    assert first["meta_info"]["cached_tokens"] == 0
    # A match is in whole pages and leaves at least one token to compute.
    assert again["meta_info"]["cached_tokens"] == (len(prompts[-2]) - 1) // variant.page_size * variant.page_size
    assert sibling["meta_info"]["cached_tokens"] == 400
    assert again["output_ids"] == first["output_ids"]


def test_penalties_do_not_compile(server: Server, prompts: list[list[int]]) -> None:
    """SGLang decorates the repetition penalty with torch.compile, which takes minutes on a CPU."""
    body = greedy_body(prompts[1], NEW_TOKENS, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5)
    assert len(server.post("/generate", body, timeout_s=20.0)["output_ids"]) == NEW_TOKENS


def test_healthy_after_all(server: Server) -> None:
    """Runs last: a leak in the pool stops the scheduler when it is idle."""
    assert server.get("/health_generate") == ""
    assert server.is_alive()
    assert "leak" not in server.log_text()
