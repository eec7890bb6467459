"""A request's tokens are those that it has alone, whatever runs beside it and however often it sits out a pass.

On the chain model's close logits, where each token depends on every penalty, bias, mask and processor so far. The
references come from the same engine, one request at a time; those with penalties only are also the oracle's.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.logit_processors import fewer_repeats
from support.serving import Client

from pla_sglang.sim import chain
from pla_sglang.sim.chain.spread import CANDIDATES
from pla_sglang.sim.chain.vocab import WORD_BASE
from pla_sglang.testing.server import Server, fetch

pytestmark = pytest.mark.e2e

REQUESTS, LONGS, LONG_TOKENS = 28, 5, 1500
SMALL_POOL_TOKENS = 700  # half of the requests fill it before they end; a long fits
MOST_ROUNDS = 6  # what happens beside what is up to the machine
SCHEDULED = ("--prefill-disagg", "temporal", "--pla-boundary", "100")
MIXED = (*SCHEDULED, "--enable-mixed-chunk")
SETTINGS = {
    "mixed": MIXED,
    "not mixed": SCHEDULED,
    "retracted": (*MIXED, "--max-total-tokens", str(SMALL_POOL_TOKENS)),
    "no overlap": (*MIXED, "--disable-overlap-schedule"),
}
# SGLang's guess of how long answers get; far too low, so that the pool runs out while decoding.
LOW_GUESS = {"SGLANG_INIT_NEW_TOKEN_RATIO": "0.05", "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0.1"}
COMMON = (
    *("--pla-emulate", "linear", "--pla-time-scale", "0.1", "--chunked-prefill-size", "256"),
    *("--json-model-override-args", json.dumps({"chain_answers": "spread"}), "--log-level", "warning"),
    "--enable-custom-logit-processor",
)
Asked = dict[str, Any]


def draw_request(number: int, rng: random.Random) -> Asked:
    """One of each kind in turn, alone or with a penalty."""
    tokens = rng.randrange(20, 70)
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens}
    body: Asked = {"input_ids": chain.prompt_of(rng.randrange(8, 60), rng.choice((tokens, 15)), rng)}
    kind = number % 8
    if kind in (0, 1, 2) or rng.random() < 0.4:
        params |= rng.choice(
            (
                {"frequency_penalty": rng.choice((0.3, 0.9))},
                {"presence_penalty": rng.choice((0.5, 1.3))},
                {"repetition_penalty": 1.2},
                {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1},
            )
        )
    if kind == 3:
        params["min_new_tokens"] = rng.randrange(10, tokens)
    if kind == 4:
        params["logit_bias"] = {str(_word(rng)): rng.choice((-3.0, 1.5)) for _ in range(4)}
    if kind == 5:
        params["regex"] = "( w00(0[0-9]|1[0-4])){8,40}"
    if kind == 6:
        body["custom_logit_processor"] = fewer_repeats()
        params["custom_params"] = {"slo_tpot_ms": 1000.0}
    if kind == 7:
        params["stop"] = [f" w{place:04d} w{place + 1:04d}" for place in range(0, 8, 2)]
        params["stop_token_ids"] = [_word(rng)]
    if number % 11 == 10:
        body["return_logprob"] = True  # nobody rides beside it
    return body | {"sampling_params": params}


def _word(rng: random.Random) -> int:
    """One of those that answers are made of."""
    return WORD_BASE + rng.randrange(CANDIDATES)


def draw_long(rng: random.Random, tokens: int) -> Asked:
    params = {"temperature": 0, "max_new_tokens": 4, "frequency_penalty": 0.5}
    return {"input_ids": chain.prompt_of(tokens, 4, rng), "sampling_params": params}


def answer(server: Server, body: Asked) -> tuple[list[int], str, int]:
    """Tokens, why they end, and how often the request was retracted."""
    got = fetch(server.url + "/generate", body, timeout_s=120.0)
    meta = got["meta_info"]
    return got["output_ids"], meta["finish_reason"]["type"], meta["num_retractions"]


def answer_together(server: Server, bodies: list[Asked], rng: random.Random) -> list[tuple[list[int], str, int]]:
    """In an order and at times by chance, with nothing cached; in the order of ``bodies``."""
    Client(server).flush()
    order = rng.sample(range(len(bodies)), len(bodies))
    got: dict[int, Any] = {}
    with ThreadPoolExecutor(len(bodies)) as pool:
        for index in order:
            got[index] = pool.submit(answer, server, bodies[index])
            time.sleep(rng.choice((0.0, 0.0, 0.03)))
        return [got[index].result() for index in range(len(bodies))]


@pytest.fixture(params=SETTINGS, ids=[name.replace(" ", "-") for name in SETTINGS])
def engine(
    request: pytest.FixtureRequest, forked: Callable[..., Server], serving: Callable[..., Any]
) -> Iterator[tuple[str, Server]]:
    name = request.param
    env = LOW_GUESS if name == "retracted" else {}
    flags = (*COMMON, *SETTINGS[name])
    server = forked(None, flags, module="pla_sglang.launch_server", env=env)
    with serving(server):
        yield name, server


def test_tokens_are_those_of_a_request_that_is_alone(engine: tuple[str, Server]) -> None:
    name, server = engine
    rng = random.Random(11)
    bodies = [draw_request(number, rng) for number in range(REQUESTS)]
    bodies += [draw_long(rng, SMALL_POOL_TOKENS // 2 if name == "retracted" else LONG_TOKENS) for _ in range(LONGS)]
    alone = [answer(server, body)[:2] for body in bodies]
    check_by_oracle(bodies, alone, overlap=name != "no overlap")
    retractions = 0
    for _ in range(MOST_ROUNDS):
        together = answer_together(server, bodies, rng)
        retractions += sum(retracted for *_, retracted in together)
        wrong = [
            (body["sampling_params"], was, now[:2])
            for body, was, now in zip(bodies, alone, together, strict=True)
            if now[:2] != was
        ]
        assert not wrong, f"{len(wrong)} of {len(bodies)} differ, the first: {wrong[0]}"
        state = fetch(server.url + "/pla/state")["schedulers"][0]
        if has_happened(name, state, retractions):
            break
    assert has_happened(name, state, retractions), (state["rides"], retractions)
    Client(server).flush()  # works only where nothing is left


def has_happened(name: str, state: dict[str, Any], retractions: int) -> bool:
    """Tells whether decodes sat out passes in the way that ``name`` is about."""
    if name == "retracted":
        return retractions > 0
    return name == "not mixed" or state["riders"] > 0


def check_by_oracle(bodies: list[Asked], alone: list[Any], *, overlap: bool) -> None:
    plain = {"temperature", "max_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty"}
    known = 0
    for body, (tokens, _) in zip(bodies, alone, strict=True):
        params = body["sampling_params"]
        if not params.keys() <= plain:  # a logit processor has custom parameters
            continue
        named = {name.removesuffix("_penalty"): value for name, value in params.items() if name.endswith("_penalty")}
        penalties = chain.Penalties(**named, overlap=overlap)
        wanted = chain.expected_spread(body["input_ids"], params["max_new_tokens"], penalties)
        assert tuple(tokens) == wanted.tokens, params
        known += 1
    assert known >= LONGS
