"""The chain model as an SGLang model class; SGLang's KV pool, radix cache and PD transfer apply unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import nn

from pla_sglang.chain.slots import ROW, Batch, ChainTables, forward
from pla_sglang.chain.vocab import VOCAB_SIZE

AUDIT_TOKENS = 16_384  # cached slots checked in one pass, over all requests


class PlaChainForCausalLM(nn.Module):
    """Holds no weights. Reads and writes SGLang's KV pool as rows of integers."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        if config.vocab_size != VOCAB_SIZE or config.head_dim < ROW:
            raise ValueError(
                f"chain model: vocab_size {config.vocab_size} must be {VOCAB_SIZE}, head_dim {config.head_dim} >= {ROW}"
            )
        self.config = config
        self.layers = config.num_hidden_layers
        self.audit_tokens = int(getattr(config, "chain_audit_tokens", AUDIT_TOKENS))
        self.tables = ChainTables(config.max_position_embeddings)
        self.placeholder = nn.Parameter(torch.zeros(1), requires_grad=False)  # SGLang asks a model for its dtype

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch, **unused: Any
    ) -> LogitsProcessorOutput:
        requests = len(forward_batch.req_pool_indices)
        logits = torch.zeros(requests, VOCAB_SIZE)
        if requests:
            batch = self._batch(input_ids, forward_batch)
            pool = get_attn_backend().token_to_kv_pool  # of the torch_native backend
            for layer in range(self.layers):
                keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
                tokens = forward(self.tables, _rows(keys), _rows(values), batch, self.audit_tokens // self.layers)
                logits.scatter_add_(1, tokens[:, None], torch.ones(requests, 1))
        return LogitsProcessorOutput(next_token_logits=logits)

    def _batch(self, input_ids: torch.Tensor, forward_batch: ForwardBatch) -> Batch:
        seq_lens = forward_batch.seq_lens.long()
        if forward_batch.forward_mode.is_decode():
            lengths = torch.ones_like(seq_lens)
        else:
            lengths = forward_batch.extend_seq_lens.long()
        pool = get_attn_backend().req_to_token_pool
        return Batch(
            ids=input_ids.long(),
            slots=forward_batch.out_cache_loc.long(),
            # Not extend_prefix_lens: in mixed batches that counts a decoding request's prefix one short or long.
            prefix=seq_lens - lengths,
            lengths=lengths,
            table=pool.req_to_token,
            rows=forward_batch.req_pool_indices.long(),
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _ in weights:  # the loader checks that the file is read
            pass


def _rows(buffer: torch.Tensor) -> torch.Tensor:
    """[slots, heads, head size] float32 as [slots, width] int32 over the same memory."""
    if buffer.dtype != torch.float32:
        raise ValueError(f"chain model: KV dtype {buffer.dtype} must be torch.float32 (--kv-cache-dtype auto)")
    return buffer.view(torch.int32).view(buffer.shape[0], -1)


EntryClass = PlaChainForCausalLM
