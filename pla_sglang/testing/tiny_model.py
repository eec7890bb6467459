"""A tiny random model with its tokenizer, made on the spot and always the same for the same seed."""

from __future__ import annotations

from pathlib import Path

VOCABULARY_SIZE = 512
DTYPES = ("float32", "bfloat16", "float16")


def make_tiny_model(
    path: str | Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 2,
    context_tokens: int = 8192,
) -> Path:
    """Write a random Qwen2 model and a byte-level tokenizer to the folder ``path``; returns that folder.

    The weights are spread wider than a usual initialisation, so that greedy output varies from token to token and
    depends on the whole context. Raises ValueError for an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; allowed: {', '.join(DTYPES)}")
    folder = Path(path)
    _make_tokenizer(folder)
    _make_weights(folder, dtype, seed, hidden_size, layers, context_tokens)
    return folder


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)


def _make_weights(folder: Path, dtype: str, seed: int, hidden_size: int, layers: int, context_tokens: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_tokens,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Made in float32 and then rounded, so that every dtype of one seed is the same model.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
