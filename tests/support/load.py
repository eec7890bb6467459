"""The prompts of the end-to-end tests, made from one seed. Whatever runs them must give the same greedy tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from support.serving import Client, Prompt, outputs

VOCABULARY = range(3, 512)
CHUNK_TOKENS = 256
BOUNDARY_TOKENS = 128
FLAGS = (
    "--device",
    "cpu",
    "--prefill-disagg",
    "temporal",
    "--enable-metrics",
    "--chunked-prefill-size",
    str(CHUNK_TOKENS),
    "--pla-boundary",
    str(BOUNDARY_TOKENS),
    "--pla-mixing",  # classes apart: so that chunks are parked
    "never",
)

_rng = random.Random(20)


def prompt_of(tokens: int) -> Prompt:
    return [_rng.choice(VOCABULARY) for _ in range(tokens)]


# The first two are several chunks long and end inside one; one is exactly as long as the boundary.
LONGS = [prompt_of(tokens) for tokens in (3000, 2500, 1030, 600, 256, BOUNDARY_TOKENS)]
SHORTS = [prompt_of(tokens) for tokens in [1, 2, BOUNDARY_TOKENS - 1, 100, *range(5, 77, 2)]]
# New tokens make the class: behind a long prefix that is cached these are short.
SIBLINGS = [LONGS[1] + prompt_of(20), LONGS[1][:2000] + prompt_of(90)]
MANY_TOKENS = [prompt_of(40 + tokens) for tokens in range(14)]
FEW, MANY = 5, 110  # output tokens

# Every (prompt, number of output tokens) of which tests want to know the answer.
QUESTIONS = [(prompt, FEW) for prompt in (*LONGS, *SHORTS, *SIBLINGS)] + [(prompt, MANY) for prompt in MANY_TOKENS]


@dataclass
class Reference:
    """Answers of stock SGLang, asked one by one, and what it says to bad requests."""

    answers: dict[tuple[int, ...], list[int]]
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)

    def __call__(self, prompt: Prompt) -> list[int]:
        return self.answers[tuple(prompt)]


def ask_all(client: Client) -> Reference:
    return Reference({tuple(prompt): client.ask(prompt, count)["output_ids"] for prompt, count in QUESTIONS})


def run_mixed(client: Client, reference: Reference) -> None:
    """Longs that must be chunked, and shorts that arrive while they are; every answer is compared."""
    client.flush()
    long_prompts = [client.submit(prompt, FEW) for prompt in LONGS]
    short_prompts = []
    for start in range(0, len(SHORTS), 8):
        client.wait_for_chunk_or(long_prompts)
        short_prompts += [client.submit(prompt, FEW) for prompt in SHORTS[start : start + 8]]
    assert outputs(short_prompts) == [reference(prompt) for prompt in SHORTS]
    assert outputs(long_prompts) == [reference(prompt) for prompt in LONGS]
