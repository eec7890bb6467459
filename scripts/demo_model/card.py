"""The model card that ``build.py`` writes beside the weights."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping

_CARD = """\
# Demo model of pla_sglang

A toy. It exists so that SGLang with pla_sglang can be started, watched, tested and measured on a machine without GPU
and without network. It answers with words of the Python documentation; do not believe them.

- **Architecture:** Qwen2 (`Qwen2ForCausalLM`), 3 layers, hidden size 128, 4 heads, 2 KV heads, tied embeddings.
- **Parameters:** {parameters:,}, stored as float32, so that greedy decoding does not depend on the batch.
- **Context:** 32768 positions; trained on sequences of 128 to 1024 tokens, their positions spread over the whole range.
- **Tokenizer:** byte-level BPE, 2048 tokens, ChatML template with `<|im_start|>` and `<|im_end|>`.
- **Data:** prose of the Python {python} standard library (`pydoc_data.topics` and docstrings), question/answer pairs
  made from the docstrings, and some written for it{extra}. {corpus_tokens:,} tokens,
  {trained_tokens:,} seen in {steps:,} steps.
- **Final training loss:** {loss:.3f} nats per token (perplexity {perplexity:.1f}). There is no held-out set.
- **Made by:** `python scripts/demo_model/build.py --out DIR --seed {seed} --minutes {minutes:g}`

## Licence

The weights are under the licence of this project (Apache-2.0). The text they were trained on is part of Python and
under the PSF License Version 2, Copyright (c) 2001 and later, Python Software Foundation; All Rights Reserved.
"""


def model_card(facts: Mapping[str, float]) -> str:
    """``facts``: parameters, corpus_tokens, trained_tokens, steps, loss, seed, minutes, extra_text."""
    return _CARD.format(
        **{name: value for name, value in facts.items() if name != "extra_text"},
        perplexity=math.exp(facts["loss"]),
        python=".".join(platform.python_version_tuple()[:2]),
        extra=", and a text given with `--text`" if facts["extra_text"] else "",
    )
