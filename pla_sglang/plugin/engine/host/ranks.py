"""What ``get_parallel()`` does not say in every version of this process among those of the server."""

from __future__ import annotations

from typing import Any

from sglang.srt import runtime_context

if hasattr(runtime_context.ParallelContext, "dp_rank"):

    def dp_rank(scheduler: Any) -> int:
        """The replica of this server that ``scheduler`` belongs to; 0 where there is one."""
        return runtime_context.get_parallel().dp_rank or 0

    def gpu_id(scheduler: Any) -> int:
        return int(runtime_context.get_device().gpu_id)

else:

    def dp_rank(scheduler: Any) -> int:
        return scheduler.ps.dp_rank or 0

    def gpu_id(scheduler: Any) -> int:
        return int(scheduler.ps.gpu_id)
