"""The chain model as an SGLang model class; SGLang's KV pool, radix cache and PD transfer apply unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import nn

from pla_sglang.sim.chain.batch import Batch, ChainTables
from pla_sglang.sim.chain.slots import ROW, fold_batch, forward
from pla_sglang.sim.chain.spread_tensors import spread_logits
from pla_sglang.sim.chain.vocab import VOCAB_SIZE

ANSWERS = ("words", "text", "spread")
AUDIT_TOKENS = 16_384  # cached slots checked in one pass, over all requests
# A decode step is one of many over the same slots, and checks a part: else audits take as long as all else.
DECODE_SHARE = 4


class PlaChainForCausalLM(nn.Module):
    """Holds no weights. Reads and writes SGLang's KV pool as rows of integers.

    Members of the model's configuration, for ``--json-model-override-args``: ``chain_audit_tokens``; ``chain_answers``,
    one of ``ANSWERS`` (``repeat.py``, ``spread.py``); ``chain_check_prefixes``, whether the lengths of prefixes that
    SGLang gives attention are checked too.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        if config.vocab_size != VOCAB_SIZE or config.head_dim < ROW:
            raise ValueError(
                f"chain model: vocab_size {config.vocab_size} must be {VOCAB_SIZE}, head_dim {config.head_dim} >= {ROW}"
            )
        self.config = config
        self.layers = config.num_hidden_layers
        self.audit_tokens = int(getattr(config, "chain_audit_tokens", AUDIT_TOKENS))
        answers = getattr(config, "chain_answers", ANSWERS[0])
        if answers not in ANSWERS:
            raise ValueError(f"chain model: chain_answers {answers!r} is not known; allowed: {', '.join(ANSWERS)}")
        self.repeats, self.spreads = answers == "text", answers == "spread"
        if self.spreads and self.layers != 1:
            raise ValueError(f"chain model: chain_answers 'spread' needs one layer, not {self.layers}")
        self.checks_prefixes = bool(getattr(config, "chain_check_prefixes", False))
        self.tables = ChainTables(config.max_position_embeddings)
        self.placeholder = nn.Parameter(torch.zeros(1), requires_grad=False)  # SGLang asks a model for its dtype

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch, **unused: Any
    ) -> LogitsProcessorOutput:
        requests = len(forward_batch.req_pool_indices)
        logits = torch.zeros(requests, VOCAB_SIZE)
        if requests:
            batch = self._batch(input_ids, positions, forward_batch)
            share = DECODE_SHARE if forward_batch.forward_mode.is_decode() else 1
            pool = get_attn_backend().token_to_kv_pool  # of the torch_native backend
            for layer in range(self.layers):
                keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
                audit_tokens = self.audit_tokens // (self.layers * share)
                if self.spreads:
                    logits = spread_logits(*fold_batch(self.tables, _rows(keys), _rows(values), batch, audit_tokens))
                    continue
                tokens = forward(self.tables, _rows(keys), _rows(values), batch, audit_tokens, repeats=self.repeats)
                logits.scatter_add_(1, tokens[:, None], torch.ones(requests, 1))
        return LogitsProcessorOutput(next_token_logits=logits)

    def _batch(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch) -> Batch:
        seq_lens = forward_batch.seq_lens.long()
        if forward_batch.forward_mode.is_decode():
            lengths, said_prefix = torch.ones_like(seq_lens), None
        else:
            lengths = forward_batch.extend_seq_lens.long()
            said_prefix = forward_batch.extend_prefix_lens.long() if self.checks_prefixes else None
        pool = get_attn_backend().req_to_token_pool
        return Batch(
            ids=input_ids.long(),
            slots=forward_batch.out_cache_loc.long(),
            # Not extend_prefix_lens, from which SGLang makes the positions: here these are to be checked.
            prefix=seq_lens - lengths,
            lengths=lengths,
            table=pool.req_to_token,
            rows=forward_batch.req_pool_indices.long(),
            positions=positions.long(),
            said_prefix=said_prefix,
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
