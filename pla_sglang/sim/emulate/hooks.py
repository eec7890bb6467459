"""Handlers of the seam table for scheduler processes whose device is emulated. Thin: see ``device``."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import zmq

from pla_sglang.common.series import LabelledSeries
from pla_sglang.plugin import config as pla_config
from pla_sglang.sim.emulate.batch import shape_of
from pla_sglang.sim.emulate.device import EmulatedDevice, KvLink, ResultReady, build
from pla_sglang.sim.emulate.losses import FailingEnd, lost_at
from pla_sglang.sim.emulate.metrics import DeviceSeries

logger = logging.getLogger(__name__)

NAP_S = 5e-4  # of device time: small against any step
MAX_NAP_S = 4e-3
LOST = "lost by the emulated link (--pla-emulate-kv-failures)"
REST_S = 0.05  # with no request at all; a message ends it at once

_device: EmulatedDevice | None = None
_link: KvLink | None = None
_poller: zmq.Poller | None = None


def device() -> EmulatedDevice:
    """This process's device, created at the first use."""
    global _device
    if _device is None:
        _device = build(pla_config.current())
    return _device


def around_forward(original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Run the pass and set when its result is ready. Time counts from the launch, so host computation is included."""
    if batch is None:  # a batch that the host has prepared itself; none on this platform
        return original(worker, batch, *args, **kwargs)
    launched_s, shape = time.perf_counter(), shape_of(batch)
    result = original(worker, batch, *args, **kwargs)
    mine = device()
    result.pla_ready = ResultReady(mine.launch(shape, launched_s), mine.log)
    result.copy_done = result.pla_ready  # where the host does not overlap, it waits for this one
    if (left_s := launched_s + mine.host_s(shape) - time.perf_counter()) > 0:
        time.sleep(left_s)
    return result


def after_copy_to_cpu(result: Any, batch_result: Any, *args: Any, **kwargs: Any) -> None:
    """With overlap the host has set its own event there, which fires at once on a CPU."""
    ready = getattr(batch_result, "pla_ready", None)
    if ready is not None:
        batch_result.copy_done = ready


def after_on_idle(result: Any, scheduler: Any) -> None:
    """Nothing to launch. The host's loops spin then, on a core that other engines of a cluster need: sleep a little.

    A message ends the sleep. KV transfers and paused requests send no message when they are ready, so with any of
    them the sleep is short, as on a rank that gets its messages from another rank.
    """
    mine, inbox = device(), _inbox(scheduler)
    mine.require_whole()
    mine.timeline.rest()
    nap_s = min(MAX_NAP_S, NAP_S * mine.time_scale)
    if not inbox.sockets:
        time.sleep(nap_s)
        return
    inbox.poll(max(1, round(1e3 * (REST_S if scheduler.is_fully_idle() else nap_s))))


def _inbox(scheduler: Any) -> zmq.Poller:
    """The socket of this process's messages, if they come from another process."""
    global _poller
    if _poller is None:
        _poller = zmq.Poller()
        channels = scheduler.ipc_channels
        for socket in (channels.recv_from_tokenizer, channels.recv_from_rpc):
            if isinstance(socket, zmq.Socket):
                _poller.register(socket, zmq.POLLIN)
    return _poller


def after_send_metadata(result: Any, receiver: Any, kv_indices: Any, *args: Any, **kwargs: Any) -> None:
    receiver.pla_tokens = len(kv_indices) * receiver.kv_mgr.kv_args.page_size


def around_receiver_poll(original: Callable[..., Any], receiver: Any) -> Any:
    """Delay "success" until the link has transferred the KV, or turn it into a failure if the link loses it."""
    status = original(receiver)
    link, share = kv_link(), pla_config.current().emulate_kv_failures
    if link is None and not share:
        return status
    from sglang.srt.disaggregation.base import KVPoll

    if status != KVPoll.Success:
        return status
    if lost_at(receiver.bootstrap_room, share) is FailingEnd.DECODE:
        receiver.kv_mgr.record_failure(receiver.bootstrap_room, LOST)
        receiver.conclude_state = KVPoll.Failed  # what the next poll says
        return KVPoll.Failed
    if link is None:
        return status
    done_s = getattr(receiver, "pla_done_s", None)
    if done_s is None:
        done_s = receiver.pla_done_s = link.done_s(getattr(receiver, "pla_tokens", 0), time.perf_counter())
    return status if time.perf_counter() >= done_s else KVPoll.Transferring


def around_sender_poll(original: Callable[..., Any], sender: Any) -> Any:
    """A transfer that the link loses at this end fails as soon as both ends are connected."""
    status = original(sender)
    share = pla_config.current().emulate_kv_failures
    if not share:
        return status
    from sglang.srt.disaggregation.base import KVPoll

    if (
        status in (KVPoll.Failed, KVPoll.Bootstrapping)
        or lost_at(sender.bootstrap_room, share) is not FailingEnd.PREFILL
    ):
        return status
    sender.kv_mgr.record_failure(sender.bootstrap_room, LOST)
    return KVPoll.Failed


def kv_link() -> KvLink | None:
    """This process's link; None without a bandwidth."""
    global _link
    knobs = pla_config.current()
    if _link is None and knobs.emulate_kv_gbps is not None:
        _link = KvLink(device().profile.kv_bytes_per_token, knobs.emulate_kv_gbps, knobs.time_scale)
    return _link


def after_get_init_info(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """The scheduler is ready: log the emulated device, and start the series if metrics are on.

    Raises HostMismatchError if a seam of this process is not in effect: such an engine would not be timed.
    """
    from pla_patches.install import verify_this_process

    verify_this_process()
    lighten(scheduler.req_to_token_pool)
    mine = device()
    # Not raised where the signal finds the scheduler, which might be within what catches mistakes of one request.
    signal.signal(signal.SIGUSR1, lambda number, frame: mine.break_down())
    profile = mine.profile
    logger.warning(
        "pla_sglang: EMULATED device, not a GPU: profile %s, time scale %g (%s)",
        profile.name,
        mine.time_scale,
        profile.source,
    )
    if scheduler.metrics_collector_context.enable_metrics:
        labels = dict(scheduler.metrics_collector.labels)
        series = LabelledSeries(labels)
        mine.series = DeviceSeries(series, profile.name, mine.time_scale)
    info["pla_emulation"] = {"profile": profile.name, "time_scale": mine.time_scale, "source": profile.source}
    return info


def lighten(pool: Any) -> None:
    """Give the pool's table, [requests, context] int32, memory whose pages are allocated when written.

    SGLang's is filled with zeros: half a gigabyte for 512 requests of 262,144 tokens, of which few are used.
    It is still empty. The tensor itself stays, for whoever has it beside the pool.
    """
    table = pool.req_to_token
    table.set_(torch.from_numpy(np.zeros(tuple(table.shape), dtype=np.int32)))


def after_get_internal_state(output: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    output.internal_state["pla_emulation"] = device().state()
    return output
