"""Write the chain model's folder: ``python scripts/make_chain_model.py OUT [--kv-bytes-per-token N] [--layers N]``.

The folder in the package is this script's output with the defaults.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.chain.vocab import (
    ASK_HIGH,
    BOS,
    BYTE_BASE,
    EOS,
    PAD,
    UNKNOWN,
    VOCAB_SIZE,
    WORD_BASE,
    token_text,
)

CONTEXT_TOKENS = 262_144
MIN_KV_BYTES = 32  # four int32 columns in K and in V
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def config_json(kv_bytes_per_token: int, layers: int) -> dict[str, object]:
    """The model's config. Raises ConfigError for a number of KV bytes that does not fit its rows."""
    width, rest = divmod(kv_bytes_per_token, 8 * max(1, layers))
    if layers < 1 or rest or width * 8 < MIN_KV_BYTES:
        raise ConfigError(
            f"kv-bytes-per-token {kv_bytes_per_token} is not allowed with {layers} layer(s); "
            f"allowed: multiples of {8 * max(1, layers)} from {MIN_KV_BYTES * max(1, layers)}"
        )
    return {
        "architectures": ["PlaChainForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": width,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def build_tokenizer(folder: Path) -> None:
    """Bytes for any text; length requests and words as single tokens. Text of words encodes to the same ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = {token: token_text(token) for token in (PAD, BOS, EOS, UNKNOWN)}
    vocab = {special.get(token, f"<unused{token}>"): token for token in range(BYTE_BASE)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab |= {symbol: BYTE_BASE + index for index, symbol in enumerate(alphabet)}
    vocab |= {token_text(token): token for token in range(ASK_HIGH, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=token_text(UNKNOWN)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    asks = [AddedToken(token_text(t), normalized=False) for t in range(ASK_HIGH, WORD_BASE)]
    words = [AddedToken(token_text(t), normalized=False) for t in range(WORD_BASE, VOCAB_SIZE)]
    tokenizer.add_tokens(asks + words)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT_TOKENS,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def build(folder: Path, *, kv_bytes_per_token: int = MIN_KV_BYTES, layers: int = 1) -> None:
    """Write config, tokenizer and an almost empty weights file. Raises ConfigError."""
    config = config_json(kv_bytes_per_token, layers)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD})
    build_tokenizer(folder)
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"placeholder": np.zeros(1, dtype=np.float32)}, str(folder / "model.safetensors"), {"format": "pt"})


def _write_json(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv-bytes-per-token", type=int, default=MIN_KV_BYTES)
    parser.add_argument("--layers", type=int, default=1)
    options = parser.parse_args(arguments)
    try:
        build(options.out, kv_bytes_per_token=options.kv_bytes_per_token, layers=options.layers)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
