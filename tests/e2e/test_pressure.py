"""A server that is short of KV cache: retraction, pages, priorities, no overlap, admin key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.load import FEW, LONGS, MANY, MANY_TOKENS, SHORTS, Reference, prompt_of, run_mixed
from support.serving import Client, outputs, until

from pla_sglang.testing.server import HttpError, fetch

pytestmark = pytest.mark.e2e

KEY = "a-key-for-tests"
# Room for one long and some shorts; two longs need more than there is.
POOL_TOKENS = 4096
END = 2  # token that ends an answer of the small model


@pytest.fixture(scope="module")
def client(reference: Reference, temporal: Callable[..., Any]) -> Iterator[Client]:
    flags = (
        "--page-size",
        "16",
        "--disable-overlap-schedule",
        "--enable-priority-scheduling",
    )
    # SGLang's guess of how long outputs get; far too low, so that the pool runs out while decoding.
    env = {"SGLANG_INIT_NEW_TOKEN_RATIO": "0.05", "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0.1"}
    with temporal(*flags, "--max-total-tokens", str(POOL_TOKENS), admin_key=KEY, env=env) as client:
        yield client
        assert client.state()["mixed_batches"] == 0


def test_longs_and_decodes_that_do_not_fit_together(client: Client, reference: Reference) -> None:
    """Shorts that decode for long, beside longs that each take most of the pool, between chunks of which they run."""
    for _ in range(2):
        client.flush()
        decodes = [client.submit(prompt, MANY) for prompt in MANY_TOKENS]
        longs = [client.submit(prompt, FEW) for prompt in LONGS[:3]]
        shorts = []
        for start in range(0, len(SHORTS), 8):
            client.wait_for_chunk_or(longs)
            shorts += [client.submit(prompt, FEW) for prompt in SHORTS[start : start + 8]]
        assert outputs(decodes) == [reference(prompt) for prompt in MANY_TOKENS]
        assert outputs(longs) == [reference(prompt) for prompt in LONGS[:3]]
        assert outputs(shorts) == [reference(prompt) for prompt in SHORTS]


def up_to_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def test_requests_are_retracted_and_come_back(client: Client, reference: Reference) -> None:
    client.flush()
    # Later SGLang makes no guess of a request that ignores its end.
    sampling = {"temperature": 0, "max_new_tokens": MANY, "ignore_eos": False}
    crowd = [client.submit(prompt, MANY, sampling_params=sampling) for prompt in MANY_TOKENS * 3]
    assert outputs(crowd) == [up_to_end(reference(prompt)) for prompt in MANY_TOKENS * 3]
    retracted = sum(request.result()["meta_info"]["num_retractions"] for request in crowd)
    assert retracted > 0, "the pool was never full"
    assert client.state()["decisions"].get("short:resumed", 0) > 0


def test_mixed_load(client: Client, reference: Reference) -> None:
    run_mixed(client, reference)


def test_a_long_with_a_better_priority_goes_first(client: Client) -> None:
    client.flush()
    first = client.submit(prompt_of(2000), 1)
    client.wait_for_chunk()
    queued = [client.submit(prompt_of(100), 1, priority=1) for _ in range(40)]  # two fit a pass
    urgent = client.submit(prompt_of(200), 1, priority=9)  # one pass, so it may overtake
    outputs([first, urgent, *queued])
    assert client.state()["decisions"].get("long:priority", 0) > 0


def test_a_request_larger_than_the_pool_is_refused(client: Client, reference: Reference) -> None:
    neighbour = client.submit(LONGS[2], FEW)
    status, answer = client.status(
        "/generate", {"input_ids": prompt_of(5000), "sampling_params": {"max_new_tokens": 4}}
    )
    assert status == 400, answer
    assert outputs([neighbour]) == [reference(LONGS[2])]


def test_control_needs_the_admin_key(client: Client) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert client.status("/pla/config", {"wait_max_ms": 5}, headers=headers)[0] == 401
        assert client.status("/set_internal_state", {"server_args": {"pla.wait_max_ms": 5}}, headers=headers)[0] == 401
        with pytest.raises(HttpError) as refused:
            fetch(client.server.url + "/pla/state", headers=headers)
        assert refused.value.status == 401
    assert client.state()["config"]["wait_max_ms"] == 10
    assert client.configure(wait_max_ms=5)["wait_max_ms"] == 5
    client.configure(wait_max_ms=10)


def test_an_aged_long_gets_memory(client: Client, reference: Reference) -> None:
    """A permanent stream of decodes that fill the pool, and a long that ages at once."""
    client.flush()
    client.configure(long_max_age_ms=1)
    try:
        decodes = [client.submit(prompt, MANY) for prompt in MANY_TOKENS * 2]
        until(lambda: sum(client.state()["requests"].values()), what="decodes under way")
        long = client.submit(LONGS[0], FEW)
        decodes += [client.submit(prompt, MANY) for prompt in MANY_TOKENS]
        assert outputs([long]) == [reference(LONGS[0])]
        assert outputs(decodes) == [reference(prompt) for prompt in MANY_TOKENS * 3]
    finally:
        client.configure(long_max_age_ms=10_000)
