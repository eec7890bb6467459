"""A real SGLang scheduler inside this process, without its event loop.

Everything is the host's own (policy, radix cache, allocator, admission); only the loop that calls it is ours.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from pla_sglang.plugin import config as pla_config
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.host.arguments import resolve


def build_scheduler(arguments: Sequence[str], config: PlaConfig) -> Any:
    """A ``Scheduler`` for launcher ``arguments``, with the seams that ``config`` needs in place. One per process.

    Raises HostMismatchError if one of these does not fit.
    """
    from sglang.srt.plugins import load_plugins

    from pla_patches.install import install_here
    from pla_patches.seam import Group

    load_plugins()
    from sglang.srt import runtime_context
    from sglang.srt.server_args import PortArgs, prepare_server_args

    server_args = prepare_server_args([*arguments, "--disable-overlap-schedule"])
    config = config.for_device(str(resolve(server_args).device))
    scheduling = (Group.SCHEDULER, Group.RUNNING) if config.enabled else ()
    install_here(*scheduling, *((Group.GRAPHS,) if config.graphs else ()))
    from sglang.srt.managers.scheduler import Scheduler

    pla_config.publish(config)  # parsing the arguments published what they say, and they do not name our flags
    port_args = PortArgs.init_new(server_args)
    if hasattr(runtime_context, "SpawnRanks"):
        ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        runtime_context.publish(server_args, role="scheduler", ranks=ranks)
        return Scheduler(server_args, port_args)
    runtime_context.publish(server_args, role="scheduler")
    return Scheduler(server_args, port_args, 0, 0, 0, 0, 0, 0, None)


def make_request(scheduler: Any, rid: str, prompt: Sequence[int], new_tokens: int) -> Any:
    """A request as the tokenizer process would send it, for exactly ``new_tokens`` greedy tokens."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    params.normalize(None)
    return Req(rid, "", array("q", prompt), params, vocab_size=scheduler.model_config.vocab_size)


def empty_batch() -> Any:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    return ScheduleBatch(reqs=[], batch_is_full=False)


def keep_decodes_out() -> None:
    """From here on the host joins no running request to a pass in this process."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    ScheduleBatch.mix_with_running = lambda self, others: None


def undo(scheduler: Any, batch: Any) -> None:
    """Undo the admission of a batch: its KV is freed and its requests return to the queue."""
    from pla_sglang.plugin.engine.host.memory import release_kv

    if batch is None:
        return
    for req in batch.reqs:
        release_kv(req, scheduler.tree_cache, keep_prefix=False)
        req.reset_for_retract()
        req.retracted_stain = req.is_retracted = False
        req.inflight_middle_chunks = 0
        if scheduler.chunked_req is req:
            scheduler.chunked_req = None
        scheduler.waiting_queue.append(req)
