"""A real SGLang scheduler inside this process, without its event loop: for microbenchmarks of single passes.

Everything is the host's own (policy, radix cache, allocator, admission); only the loop that calls it is ours.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

from pla_sglang import config as pla_config
from pla_sglang.config import PlaConfig


def build_scheduler(arguments: list[str], config: PlaConfig) -> Any:
    """A ``Scheduler`` for the given launcher arguments, with our seams in place. One per process."""
    from sglang.srt.plugins import load_plugins

    from pla_patches.install import install_scheduler

    load_plugins()
    pla_config.publish(config)
    install_scheduler()
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    server_args = prepare_server_args(arguments)
    pla_config.publish(config)  # parsing the arguments published what they say, and they do not name our flags
    port_args = PortArgs.init_new(server_args)
    publish(server_args, role="scheduler")
    return Scheduler(server_args, port_args, 0, 0, 0, 0, 0, 0, None)


def make_request(scheduler: Any, rid: str, tokens: int, rng: random.Random) -> Any:
    """A request as the tokenizer process would send it, of random token ids."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=16, temperature=0.0)
    params.normalize(None)
    vocabulary = scheduler.model_config.vocab_size
    prompt = array("q", (rng.randrange(3, vocabulary) for _ in range(tokens)))
    return Req(rid, "", prompt, params, vocab_size=vocabulary)


def empty_batch() -> Any:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    return ScheduleBatch(reqs=[], batch_is_full=False)


def undo(scheduler: Any, batch: Any) -> None:
    """Take an admitted batch back: its KV is freed and its requests stand in the queue again."""
    from sglang.srt.mem_cache.common import release_kv_cache

    if batch is None:
        return
    for req in batch.reqs:
        release_kv_cache(req, scheduler.tree_cache, is_insert=False)
        req.reset_for_retract()
        req.retracted_stain = req.is_retracted = False
        req.inflight_middle_chunks = 0
        if scheduler.chunked_req is req:
            scheduler.chunked_req = None
        scheduler.waiting_queue.append(req)
