"""The chain model: a language model whose every token proves that the KV cache is right.

Its state is a rolling hash of all tokens so far. The state of position t lives in KV slot t and nowhere else, so a slot
that is lost, stale, swapped or delivered to the wrong request changes the output. ``expected`` computes the output of a
prompt without an engine; a test or a load generator compares every token with it.

This package (without ``models``) needs numpy only.
"""

from pathlib import Path

from pla_sglang.sim.chain.oracle import Expected, expected
from pla_sglang.sim.chain.spread import Penalties, expected_spread
from pla_sglang.sim.chain.vocab import EOS, MAX_ASK, VOCAB_SIZE, ask_ids, ask_text, prompt_of

__all__ = [
    "EOS",
    "MAX_ASK",
    "VOCAB_SIZE",
    "Expected",
    "Penalties",
    "ask_ids",
    "ask_text",
    "expected",
    "expected_spread",
    "model_path",
    "prompt_of",
]


def model_path() -> Path:
    """Folder of the packaged chain model: config, tokenizer, an empty weights file."""
    return Path(__file__).parent / "model"
