"""A small model, trained here, whose answers' lengths are learnable from its hidden states.

A token is a level. After level n comes n again or, in one of ``STEPS_A_LEVEL`` cases, n - 1; after level 0 the end. So
from level n on an answer takes about n times that many tokens more, and the first level is the prompt's last token.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

LEVELS = 40
STEPS_A_LEVEL = 4
END = LEVELS  # the token
VOCABULARY_SIZE = 64
SEQUENCE = 64  # tokens of one row of training
TRAINING_STEPS = 250


def make_countdown_model(path: str | Path, seed: int = 0) -> Path:
    """Train the model and write it to the folder ``path``, without a tokenizer; returns that folder."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=END + 1,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(TRAINING_STEPS):
            tokens = draw_sequences(32)
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.save_pretrained(Path(path))
    return Path(path)


def draw_sequences(count: int) -> torch.Tensor:
    """[count, SEQUENCE]: levels that fall by chance from where they begin; behind the end a new answer begins."""
    columns = [torch.randint(0, LEVELS, (count,))]
    while len(columns) < SEQUENCE:
        last = columns[-1]
        falls = torch.rand(count) < 1 / STEPS_A_LEVEL
        following = torch.where(falls, last - 1, last)
        following = torch.where(following < 0, END, following)
        columns.append(torch.where(last == END, torch.randint(0, LEVELS, (count,)), following))
    return torch.stack(columns, dim=1)


def write_prompts(path: Path, count: int, seed: int = 0) -> Path:
    """Prompts whose levels, and so the lengths of their answers, are spread exponentially."""
    rng = random.Random(seed)
    levels = [min(1 + int(rng.expovariate(3 / LEVELS)), LEVELS - 1) for _ in range(count)]
    path.write_text("".join(f"{json.dumps({'input_ids': [END + 1, level]})}\n" for level in levels), encoding="utf-8")
    return path
