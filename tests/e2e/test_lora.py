"""LoRA adapters: a parked long keeps its own while shorts of others run, and every answer is that of a lone request.

The server runs without pinned memory (``support/unpinned``), which SGLang's LoRA code asks for and a
machine without a GPU does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.load import LONGS, SHORTS
from support.lora import TARGETS, make_adapter
from support.serving import Client, outputs

pytestmark = pytest.mark.e2e
UNPINNED = Path(__file__).parent.parent / "support" / "unpinned"
NAMES = ("red", "blue", "green")
NEW_TOKENS = 8


def adapter_flags(folder: Path, model: Path) -> tuple[str, ...]:
    paths = [f"{name}={make_adapter(folder / name, model, seed=seed)}" for seed, name in enumerate(NAMES)]
    flags = ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "4")
    return (*flags, "--max-loras-per-batch", "2", "--lora-target-modules", *TARGETS, "--lora-paths", *paths)


def test_adapters_in_mixed_load(
    tmp_path: Path, tiny_model: Callable[[str], Path], temporal: Callable[..., Any]
) -> None:
    """Two adapters fit a batch, three are asked for: a pass must leave room for the parked long's."""
    flags = adapter_flags(tmp_path, tiny_model("float32"))
    questions = [(prompt, {"lora_path": name}) for name in NAMES for prompt in SHORTS[4:8]]
    questions += [(prompt, {}) for prompt in SHORTS[4:8]]
    longs = [(LONGS[0], {"lora_path": "red"}), (LONGS[1], {"lora_path": "green"}), (LONGS[0], {})]
    with temporal(*flags, env={"PYTHONPATH": str(UNPINNED)}) as client:
        alone = [client.ask(prompt, NEW_TOKENS, **body)["output_ids"] for prompt, body in [*longs, *questions]]
        per_adapter = [tuple(map(tuple, alone[3 + 4 * index : 7 + 4 * index])) for index in range(4)]
        assert len(set(per_adapter)) == 4, "an adapter changes nothing"
        for _ in range(2):
            assert together(client, longs, questions) == alone
        state = client.state()
        assert state["parks"] > 0
        assert state["mixed_batches"] == 0


def together(client: Client, longs: list[Any], questions: list[Any]) -> list[list[int]]:
    client.flush()
    asked = [client.submit(prompt, NEW_TOKENS, **body) for prompt, body in longs]
    client.wait_for_chunk_or(asked)
    asked += [client.submit(prompt, NEW_TOKENS, **body) for prompt, body in questions]
    return outputs(asked)
