"""Running decodes are piggybacked on passes of either class: ``--prefill-disagg temporal --enable-mixed-chunk``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.load import FEW, LONGS, SHORTS, Reference, run_mixed
from support.serving import outputs

from pla_sglang.sim import chain
from pla_sglang.testing.server import Server, fetch

pytestmark = pytest.mark.e2e

CHUNK_TOKENS, LONG_TOKENS, RIDERS = 256, 2000, 4
MOST_LOADS = 8  # whether decodes are still under way when a prefill begins is up to the machine
EMULATED = (
    *("--pla-emulate", "linear", "--prefill-disagg", "temporal", "--pla-boundary", "100", "--enable-mixed-chunk"),
    *("--chunked-prefill-size", str(CHUNK_TOKENS), "--page-size", "16", "--log-level", "warning"),
)


def test_answers_are_those_of_stock(reference: Reference, temporal: Callable[..., Any]) -> None:
    """On a model that computes. Requests with logprobs let nobody ride, so riders sit out passes in between."""
    with temporal("--enable-mixed-chunk", "--pla-slo-tpot-ms", "1000") as client:
        for _ in range(MOST_LOADS):
            run_mixed(client, reference)
            piggybacked = [client.submit(prompt, 8 * FEW) for prompt in SHORTS[4:8]]
            answers = [client.submit(LONGS[0], FEW), client.submit(LONGS[1], FEW, return_logprob=True)]
            assert outputs(answers) == [reference(prompt) for prompt in LONGS[:2]]
            assert [output[:FEW] for output in outputs(piggybacked)] == [reference(prompt) for prompt in SHORTS[4:8]]
            state = client.state()
            if state["riders"] > 0 and state["step_model_fits"]["riding_samples"] > 0:
                break
        assert state["riders"] > 0
        assert state["mixed_batches"] == 0, "long and short prefills shared a pass"
        assert state["step_model_fits"]["riding_samples"] > 0


@pytest.fixture(params=["never", "auto"])
def emulated(
    request: pytest.FixtureRequest, forked: Callable[..., Server], serving: Callable[..., Any]
) -> Iterator[Server]:
    flags = (*EMULATED, "--pla-mixing", request.param)
    server = forked(None, flags, module="pla_sglang.launch_server")
    with serving(server):
        yield server


def generate(server: Server, prompt: list[int], tokens: int, **fields: Any) -> list[int]:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}, **fields}
    ids: list[int] = fetch(server.url + "/generate", body, timeout_s=120.0)["output_ids"]
    return ids


def test_positions_of_riders_are_right(emulated: Server) -> None:
    """The chain model checks the position of every token."""
    rng = random.Random(3)
    for _ in range(MOST_LOADS):
        answer_load(emulated, rng)
        state = fetch(emulated.url + "/pla/state")["schedulers"][0]
        if state["riders"] > 0:
            break
    assert state["riders"] > 0
    if state["config"]["mixing"] == "never":
        assert state["mixed_batches"] == 0


def answer_load(emulated: Server, rng: random.Random) -> None:
    """Shorts that decode for a while, and longs beside them; every answer is compared."""
    targets = {"temperature": 0, "max_new_tokens": 60, "custom_params": {"slo_tpot_ms": 100}}
    shorts = [chain.prompt_of(20, 60, rng) for _ in range(RIDERS)]
    longs = [chain.prompt_of(LONG_TOKENS, 2, rng) for _ in range(3)]
    with ThreadPoolExecutor(RIDERS + len(longs)) as pool:
        answers: list[Future[list[int]]] = [
            pool.submit(generate, emulated, prompt, 60, sampling_params=targets) for prompt in shorts
        ]
        # Nobody rides beside the second, so those that run are one pass behind when the third begins.
        for index, prompt in enumerate(longs):
            answers.append(pool.submit(generate, emulated, prompt, 2, return_logprob=index == 1))
        got = [answer.result() for answer in answers]
    wanted = [(prompt, 60) for prompt in shorts] + [(prompt, 2) for prompt in longs]
    assert got == [list(chain.expected(prompt, tokens).tokens) for prompt, tokens in wanted]
