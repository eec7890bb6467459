"""One launch for all fields: programs divide the tokens, and the first one also writes the request fields."""

from __future__ import annotations

import triton
import triton.language as tl

from pla_kernels.pack_batch.buffers import BatchTensors, StaticBuffers

TOKENS_A_PROGRAM = 256


@triton.jit
def _copy(source, target, index, real, padded):  # type: ignore[no-untyped-def]  # Triton's types
    value = tl.load(source + index, mask=index < real, other=0)
    tl.store(target + index, value.to(tl.int64), mask=index < padded)


@triton.jit
def _add(left, right):  # type: ignore[no-untyped-def]
    return left + right


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    ids_from, positions_from, loc_from, seq_from, new_from, prefix_from, pool_from, orig_from,
    ids, positions, loc, seq, new, prefix, pool, orig, start,
    real_tokens, tokens, requests, slots,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token = program * TOKENS + tl.arange(0, TOKENS)
    _copy(ids_from, ids, token, real_tokens, tokens)
    _copy(positions_from, positions, token, real_tokens, tokens)
    _copy(loc_from, loc, token, real_tokens, tokens)
    if program == 0:
        slot = tl.arange(0, SLOTS)
        _copy(seq_from, seq, slot, requests, slots)
        _copy(prefix_from, prefix, slot, requests, slots)
        _copy(pool_from, pool, slot, requests, slots)
        _copy(orig_from, orig, slot, requests, slots)
        length = tl.load(new_from + slot, mask=slot < requests, other=0).to(tl.int64)
        tl.store(new + slot, length, mask=slot < slots)
        # Unused slots have no tokens, so their start comes out as the number of real tokens by itself.
        tl.store(start + slot, tl.associative_scan(length, 0, _add) - length, mask=slot < slots)


def pack_batch(batch: BatchTensors, into: StaticBuffers, tokens: int, slots: int) -> None:
    """As ``op.pack_batch``, without the checks."""
    grid = (triton.cdiv(tokens, TOKENS_A_PROGRAM),)
    _pack[grid](
        batch.input_ids,
        batch.positions,
        batch.out_cache_loc,
        batch.seq_lens,
        batch.extend_seq_lens,
        batch.extend_prefix_lens,
        batch.req_pool_indices,
        batch.orig_seq_lens,
        into.input_ids,
        into.positions,
        into.out_cache_loc,
        into.seq_lens,
        into.extend_seq_lens,
        into.extend_prefix_lens,
        into.req_pool_indices,
        into.orig_seq_lens,
        into.extend_start_loc,
        len(batch.input_ids),
        tokens,
        len(batch.seq_lens),
        slots,
        TOKENS=TOKENS_A_PROGRAM,
        SLOTS=triton.next_power_of_2(slots),
    )
