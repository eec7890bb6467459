"""One clock for all ranks.

Every rank of a tensor-parallel group decides for itself and all must decide alike, or their collectives hang. So no
decision reads a local clock: rank 0 stamps its own and sends it along with the requests it broadcasts anyway. A fitted
step model and the duration of decode steps travel the same way, since only rank 0's measurements count.
"""

from __future__ import annotations

from sglang.srt.managers.io_struct import BaseReq


class PlaTick(BaseReq, kw_only=True):  # type: ignore[call-arg]  # a msgspec class that mypy is told to skip
    """Rank 0's clock, how long its decode steps take, and the coefficients of new models of prefills and of
    piggybacked decodes (empty: unchanged).

    Never crosses a socket.
    """

    now_s: float
    decode_step_s: float = 0.0
    model: tuple[float, ...] = ()
    mixed_model: tuple[float, ...] = ()
