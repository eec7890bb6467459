"""Token ids of the chain model.

===========  =====================================================================================
0 .. 15      special: padding, begin, end of sequence, unknown; the rest unused
16 .. 271    the 256 bytes, so any text can be a prompt
272 .. 527   "ask high": first half of a wish for an output length
528 .. 783   "ask low": second half
784 .. 2047  words; the model answers in words, and random prompts are made of them
===========  =====================================================================================

The pair (ask high h, ask low l) anywhere in a prompt asks for ``256*h + l`` output tokens, counted from the pair's
end, the last of which is EOS. The last pair counts. So a recorded trace replays with its own output lengths.
"""

from __future__ import annotations

import random

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
BYTE_BASE = 16
ASK_HIGH = 272
ASK_LOW = 528
WORD_BASE = 784
VOCAB_SIZE = 2048
WORDS = VOCAB_SIZE - WORD_BASE
MAX_ASK = 0xFFFF


def ask_ids(output_tokens: int) -> list[int]:
    """The two tokens that end a prompt which wants ``output_tokens`` tokens, EOS included.

    Raises ValueError outside 1 to 65,535.
    """
    if not 1 <= output_tokens <= MAX_ASK:
        raise ValueError(f"output_tokens {output_tokens} is out of range; allowed: 1 to {MAX_ASK}")
    return [ASK_HIGH + output_tokens // 256, ASK_LOW + output_tokens % 256]


def ask_text(output_tokens: int) -> str:
    """As ``ask_ids``, for prompts given as text."""
    return "".join(token_text(token) for token in ask_ids(output_tokens))


def token_text(token: int) -> str:
    """How the tokenizer writes a token that is no byte. Raises ValueError for a byte or an unused id."""
    if token in (PAD, BOS, EOS, UNKNOWN):
        return ("<pad>", "<bos>", "<eos>", "<unk>")[token]
    if ASK_HIGH <= token < ASK_LOW:
        return f"<h{token - ASK_HIGH}>"
    if ASK_LOW <= token < WORD_BASE:
        return f"<l{token - ASK_LOW}>"
    if WORD_BASE <= token < VOCAB_SIZE:
        return f" w{token - WORD_BASE:04d}"  # one width, so that no word is the beginning of another
    raise ValueError(f"token {token} has no text of its own")


def prompt_of(tokens: int, output_tokens: int, rng: random.Random) -> list[int]:
    """A random prompt of exactly ``tokens`` ids that asks for ``output_tokens``.

    Raises ValueError for fewer than three tokens: two are the wish.
    """
    if tokens < 3:
        raise ValueError(f"tokens {tokens} is out of range; allowed: 3 and more")
    words = rng.choices(range(WORD_BASE, VOCAB_SIZE), k=tokens - 2)
    return words + ask_ids(output_tokens)
