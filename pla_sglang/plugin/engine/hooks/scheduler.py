"""The functions that the seam table names, for scheduler processes. Each is a thin step into the adapter.

One scheduler lives in a process, so the adapter is held here for the seams whose host object does not know its
scheduler (``PrefillAdder``, ``SchedulerRequestReceiver``, ``SchedulePolicy``).
"""

from __future__ import annotations

import logging
import os
import platform
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.common.series import LabelledSeries
from pla_sglang.plugin import config as pla_config
from pla_sglang.plugin.engine import apply, backlog, compat, control, piggybacked
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.fleet_part import fleet_part
from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.plugin.engine.host.ranks import dp_rank
from pla_sglang.plugin.engine.host.requests import extend_end, prefix_len
from pla_sglang.plugin.engine.roles import RoleState
from pla_sglang.plugin.engine.scheduler_adapter import PrefillAdapter
from pla_sglang.plugin.engine.step_cache import StepCache, describe_engine
from pla_sglang.policy.interface.prefill import PrefillClass

logger = logging.getLogger(__name__)

_adapter: PrefillAdapter | None = None
_faults = Faults()


def after_init_schedule_policy(result: Any, scheduler: Any) -> None:
    global _adapter
    from pla_patches.install import verify_this_process

    hooks = verify_this_process()
    config = pla_config.current()
    compat.check_model(scheduler.tree_cache)
    _adapter = PrefillAdapter(scheduler, config)
    scheduler.pla = _adapter
    scheduler.pla_hooks = hooks
    scheduler.pla_roles = RoleState(config.role)
    _adapter.telemetry.set_role(config.role)
    if scheduler.metrics_collector_context.enable_metrics:
        labels = dict(scheduler.metrics_collector.labels)
        _adapter.telemetry.attach(LabelledSeries(labels))
    logger.info(
        "pla_sglang: prefill-disagg %s, %s, boundary %s tokens",
        config.prefill_disagg,
        hooks,
        config.boundary_tokens or f"auto (start {_adapter.policy.prefills.boundary.tokens(0)})",
    )


def after_init_request_dispatcher(result: Any, scheduler: Any) -> None:
    from sglang.utils import TypeBasedDispatcher

    from pla_sglang.plugin.engine.clock import PlaTick

    scheduler._request_dispatcher += TypeBasedDispatcher([(PlaTick, scheduler.pla.on_tick)])
    scheduler.pla.on_host_complete()


def after_pull_raw_reqs(requests: Any, receiver: Any) -> Any:
    """Rank 0 of the first pipeline stage puts its clock in front of what it is about to broadcast."""
    from sglang.srt.runtime_context import get_parallel

    if requests is None or _adapter is None or get_parallel().pp_rank != 0:
        return None
    if requests or _adapter.wants_tick():
        requests.insert(0, _adapter.make_tick())
    return requests


def after_add_request_to_queue(result: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    if not fleet_part(scheduler).keeps_from_prefill(req):  # a view of one that is kept would never be let go
        scheduler.pla.on_queued(req)


def around_prefill_pass(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    return scheduler.pla.run_pass(original, args, kwargs)


def after_calc_priority(result: Any, policy: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any) -> None:
    if _adapter is not None:
        _adapter.on_ordered(waiting_queue)


def after_adder_init(result: Any, adder: Any, *args: Any, **kwargs: Any) -> None:
    if _adapter is not None and _adapter.context is not None:
        apply.reserve_for_parked(_adapter.context, adder)


def around_add_chunked_req(original: Any, adder: Any, req: Any) -> Any:
    return apply.add_chunk(original, None if _adapter is None else _adapter.context, adder, req)


@_faults.guard("placing running requests in a pass", otherwise=piggybacked.end_piggybacked)
def after_mix_with_running(result: Any, batch: Any, running_batch: Any) -> None:
    piggybacked.set_piggybacked_prefixes(batch, running_batch)


def around_can_schedule_lora(original: Any, scheduler: Any, req: Any, running_loras: set[str | None]) -> bool:
    """A parked chunk's adapter counts as running: it will be needed again beside whatever is admitted now."""
    context = scheduler.pla.context
    if context is not None and context.parked is not None:
        running_loras.add(context.lora_id)
    return bool(original(scheduler, req, running_loras))


def around_process_prefill_chunk(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """PD prefill: a chunk that has been parked since its last result was cached and sent needs neither again."""
    chunk = scheduler.chunked_req
    if chunk is None or (extend_end(chunk) or 0) > prefix_len(chunk):
        return original(scheduler, *args, **kwargs)
    scheduler.chunked_req = None  # hidden, the host only tidies up the batch before
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        scheduler.chunked_req = chunk


def around_run_batch(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    return scheduler.pla.steps.launch(original, args, kwargs)


def after_process_batch_result(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    scheduler.pla.telemetry.on_gap(scheduler.pla.steps.on_result(batch))


def after_publish_load(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    scheduler.pla.publish_queue()


def after_get_init_info(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    steps, config = scheduler.pla.steps, scheduler.pla.config
    if config.profile_at_launch == "on" and _is_first_rank(scheduler):
        engine = describe_engine(resolve(scheduler.server_args), _name_device(scheduler.device), config.emulate)
        steps.use_cache(StepCache(pla_config.profile_folder(config), engine))
    info["pla"] = {"config": config.to_dict(), "hooks": scheduler.pla_hooks, "step_times_cached": steps.cached}
    return info


def _is_first_rank(scheduler: Any) -> bool:
    """Its measurements are those that count, and that reports tell."""
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel()
    return not (ranks.pp_rank or ranks.attn_tp_rank or ranks.attn_cp_rank or dp_rank(scheduler))


def _name_device(device: str) -> str:
    if device != "cuda":
        return f"{platform.machine()} {os.cpu_count()} {device}"
    import torch

    return str(torch.cuda.get_device_name())


def after_get_internal_state(output: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    rids = [req.rid for req in backlog.iterate_unfinished(scheduler)]
    output.internal_state.setdefault("pla", {}).update(
        scheduler.pla.state(),
        hooks=scheduler.pla_hooks,
        dp_rank=dp_rank(scheduler),
        role=scheduler.pla_roles.to_dict(rids),
    )
    return output


def around_set_internal_state(original: Any, scheduler: Any, recv_req: Any) -> Any:
    knobs = control.split_knobs(recv_req.server_args)
    if not knobs:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    rank, quiet = knobs.pop(control.RANK, None), knobs.pop(control.QUIET, 0)
    updated = rank not in (None, dp_rank(scheduler)) or change_knobs(scheduler, knobs)
    if quiet and pla_config.current().controller_folder is not None:
        return None  # the controller of this server's pools has asked; the front waits for nothing
    if updated and recv_req.server_args:
        return original(scheduler, recv_req)
    return SetInternalStateReqOutput(updated=updated)


def change_knobs(scheduler: Any, wire: dict[str, float]) -> bool:
    """Take over run-time knobs, a role among them; False when they are refused, then nothing changes."""
    try:
        config = control.decode_knobs(wire, scheduler.pla.config)
        compat.check_flags(resolve(scheduler.server_args), config)
        scheduler.pla.set_config(config)
    except ConfigError as error:
        logger.warning("pla_sglang: run-time change refused: %s", error)
        return False
    classes = backlog.group_by_class(scheduler)
    if scheduler.chunked_req is not None:  # a long that is under way stays one to its end
        classes[PrefillClass.LONG].append(scheduler.pla.views.find_view(scheduler.chunked_req))
    scheduler.pla_roles.switch(config.role, classes[PrefillClass.SHORT], classes[PrefillClass.LONG])
    scheduler.pla.telemetry.set_role(config.role)
    logger.info("pla_sglang: knobs now %s", config.to_dict())
    return True
