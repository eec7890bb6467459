"""The functions that the seam table names, for the scheduler processes of stateless instances.

No exception of ours may end a scheduler, or a thread of it, with requests in it. What the engine is asked for in each
pass it guards itself; the other hooks are guarded here, each with what is sound in its place.
"""

from __future__ import annotations

import functools
from typing import Any

from pla_sglang.common.series import LabelledSeries
from pla_sglang.fleet.stateless import checks
from pla_sglang.fleet.stateless.engine import StatelessEngine
from pla_sglang.fleet.stateless.host.calls import (
    all_ranks_agree,
    open_inbox,
    register_receiver,
)
from pla_sglang.fleet.stateless.host.rendezvous import keep_to_host
from pla_sglang.fleet.stateless.host.side_channel import PULL, SideChannel
from pla_sglang.fleet.stateless.requests.messages import PlaCommands, PlaPeers, register_messages
from pla_sglang.fleet.stateless.transfer.fence import ReceiverInbox, acknowledge_abort
from pla_sglang.fleet.stateless.transfer.peers import agree_on_states
from pla_sglang.fleet.stateless.transfer.rooms import aborts_of_another, refuses_receiver
from pla_sglang.plugin import config as pla_config
from pla_sglang.plugin.engine import piggybacked
from pla_sglang.plugin.engine.fleet_part import join
from pla_sglang.plugin.engine.hooks.running import faults as _faults
from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.plugin.engine.host.transfers import acknowledges

_channel = SideChannel()  # of this process
_engine: StatelessEngine | None = None  # of this process, for seams whose host object does not know its scheduler


def after_resolve_dist_init_method(method: str, *args: Any, **kwargs: Any) -> str | None:
    from sglang.srt.runtime_context import get_server_args

    return keep_to_host(method, resolve(get_server_args()))


def after_init_disaggregation(result: Any, scheduler: Any) -> None:
    global _engine
    from pla_patches.install import verify_this_process

    verify_this_process()
    checks.check_model(scheduler.tree_cache)
    config = pla_config.current()
    series = None
    if scheduler.metrics_collector_context.enable_metrics:
        series = LabelledSeries(dict(scheduler.metrics_collector.labels))
    _engine = StatelessEngine(scheduler, config, _faults, _channel, series)
    join(scheduler, _engine)


def after_init_request_dispatcher(result: Any, scheduler: Any) -> None:
    from sglang.utils import TypeBasedDispatcher

    register_messages()
    engine = scheduler.pla_fleet
    scheduler._request_dispatcher += TypeBasedDispatcher(
        [
            (PlaPeers, _faults.guard("taking over a list of peers")(engine.on_peers)),
            (PlaCommands, _faults.guard("taking orders for paused requests")(engine.migration.take_message)),
        ]
    )


def around_add_request_to_queue(
    original: Any, scheduler: Any, req: Any, is_retracted: bool = False, **kwargs: Any
) -> Any:
    if not is_retracted and scheduler.pla_fleet.takes(req):
        return None
    return original(scheduler, req, is_retracted, **kwargs)


def around_get_next_batch_to_run(original: Any, scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    engine = scheduler.pla_fleet
    running_batch = engine.before_pass(running_batch, last_batch)
    plan = original(scheduler, running_batch=running_batch, last_batch=last_batch)
    engine.after_pass()
    return plan


def after_process_batch_result(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    scheduler.pla_fleet.on_result(batch)


def after_is_fully_idle(
    idle: bool, scheduler: Any, for_health_check: bool = False, *args: Any, **kwargs: Any
) -> bool | None:
    """Legs hold KV, so nothing may be flushed or checked for leaks. A health check asks for passes, which they lack."""
    return None if for_health_check else idle and not scheduler.pla_fleet.busy


def after_abort_request(result: Any, scheduler: Any, recv_req: Any) -> None:
    every, prefix = recv_req.abort_all, recv_req.rid
    scheduler.pla_fleet.abort(lambda rid: every or rid.startswith(prefix))


def before_pause_generation(scheduler: Any, recv_req: Any) -> None:
    """A pause that retracts is for new weights: KV that is on its way would be of the old ones."""
    if recv_req.mode == "retract":
        scheduler.pla_fleet.end_all_legs()


@_faults.guard("keeping room for requests that will decode")
def after_adder_init(result: Any, adder: Any, *args: Any, **kwargs: Any) -> None:
    if _engine is not None:
        _engine.reserve_growth(adder)


@_faults.guard("keeping a place for an adapter")
def before_can_schedule_lora(scheduler: Any, req: Any, running_loras: set[str | None]) -> Any:
    """Prefills leave a place for the adapter of a request whose KV is here, and that waits for one."""
    return (scheduler, req, scheduler.pla_fleet.adapters.reserve(req, running_loras)), {}


@_faults.guard("waiting for a place for an adapter")
def after_can_schedule_lora(fits: bool, scheduler: Any, req: Any, running_loras: set[str | None]) -> bool:
    return fits and scheduler.pla_fleet.adapters.may_prefill(req)


@_faults.guard("placing running requests in a pass", otherwise=piggybacked.end_piggybacked)
def after_mix_with_running(result: Any, batch: Any, running_batch: Any) -> None:
    piggybacked.set_piggybacked_prefixes(batch, running_batch)


def before_start_bootstrap_thread(manager: Any) -> None:
    """The thread that reads what receivers say is about to start."""
    manager.server_socket = open_inbox(manager, _channel)


def before_start_decode_listener_thread(manager: Any) -> None:
    """The thread that reads what senders say is about to start, in versions that have one: we read with it."""
    from sglang.srt.disaggregation.common.conn import ABORT_ACK_TAG

    words = {ABORT_ACK_TAG, manager.kv_status_msg_tag}
    manager.server_socket = ReceiverInbox(manager.server_socket, _channel, words)


def around_add_remote_peer(original: Any, manager: Any, receiver: Any) -> None:
    """In the same thread a receiver registers, with what its transfer library says of itself."""
    register_receiver(original, manager, receiver, _channel)


def around_handle_abort(original: Any, manager: Any, message: list[bytes]) -> bool:
    """A receiver has given up: tell it when this sender is through with its room, unless the host will. Or it asks for
    a paused request.

    Of the thread that reads what receivers say; ``Inbox`` has let nothing in that nobody takes. What a receiver says of
    a room that is another's is not given to the host, which would not look who says it.
    """
    if _is_kept_from_host(manager, message):
        _acknowledge_abort(manager, message, has_host=False)
        return True
    if original(manager, message):
        _acknowledge_abort(manager, message, has_host=True)
        return True
    if message[:1] != [PULL]:  # the host has no such message
        return False
    _take_pull(message)
    return True


@_faults.guard("acknowledging an abort")
def _acknowledge_abort(manager: Any, message: list[bytes], *, has_host: bool) -> None:
    """``has_host``: the host has got the message."""
    if not (has_host and acknowledges(manager, message)):
        acknowledge_abort(manager, message, _channel)


@_faults.guard("looking whose room it is", otherwise=lambda manager, message: False)
def _is_kept_from_host(manager: Any, message: list[bytes]) -> bool:
    if _engine is None:
        return False
    return aborts_of_another(manager, message) or refuses_receiver(manager, _engine.used_rooms, message)


@_faults.guard("taking a pull")
def _take_pull(message: list[bytes]) -> None:
    if _engine is not None:  # else nothing can be held yet
        _engine.migration.on_pull(message)


def after_get_init_info(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    info["pla_stateless"] = True
    return info


@_faults.guard("telling the state")
def after_get_internal_state(output: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    block = output.internal_state.setdefault("pla", {})
    stateless = scheduler.pla_fleet
    # All ranks get this request, in one order with the lists of peers.
    agree = functools.partial(all_ranks_agree, scheduler)
    state = stateless.state()
    peers = agree_on_states(stateless.book.to_dict(), agree)
    if not all(agree([state["ready"]])) and state["ready"]:
        state |= {"ready": False, "reason": "a thread of another rank has ended"}
    block["stateless"] = {**state, "peers": peers}
    block.setdefault("config", pla_config.current().to_dict())
    return output
