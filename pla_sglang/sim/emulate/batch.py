"""The properties of SGLang's batch that determine its duration. Reads attributes only, imports nothing of the host."""

from __future__ import annotations

from typing import Any, NamedTuple


class StepShape(NamedTuple):
    """Sums over one batch, as ``StepProfile.step_s`` takes them.

    ``requests`` counts prefills, ``attention`` sums L*(L + 2*H) over them, ``batch`` counts decodes.
    """

    new_tokens: int = 0
    attention: float = 0.0
    history_tokens: int = 0
    requests: int = 0
    batch: int = 0
    context_tokens: int = 0


def shape_of(batch: Any) -> StepShape:
    """The shape of a ScheduleBatch about to be launched."""
    mode = batch.forward_mode
    if mode.is_decode():
        return StepShape(batch=len(batch.reqs), context_tokens=int(batch.seq_lens_cpu.sum()))
    if not mode.is_extend():
        return StepShape()
    # In a mixed batch the decodes are appended to the prefills, one token each.
    decodes = len(batch.decoding_reqs or ()) if mode.is_mixed() else 0
    prefills = len(batch.extend_lens) - decodes
    lengths, history = batch.extend_lens[:prefills], batch.prefix_lens[:prefills]
    return StepShape(
        new_tokens=sum(lengths),
        attention=float(sum(new * (new + 2 * old) for new, old in zip(lengths, history, strict=True))),
        history_tokens=sum(history),
        requests=prefills,
        batch=decodes,
        context_tokens=int(batch.seq_lens_cpu[prefills:].sum()) if decodes else 0,
    )
