"""What requests and both ends of a transfer ask of SGLang's functions. Imports are made when called."""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from pla_sglang.fleet.stateless.host.side_channel import REGISTERS, Drop, Inbox, SideChannel
from pla_sglang.plugin.engine.host import memory
from pla_sglang.plugin.engine.host.batches import process_prebuilt

logger = logging.getLogger(__name__)

Agree = Callable[[Sequence[bool]], Sequence[bool]]  # what all ranks say together about each flag


class SendPoll(enum.Enum):
    """How a transfer stands, as all ranks see it."""

    OPEN = "open"  # the receiver has not said where the KV goes
    ASKED = "asked"  # it has, and nothing was sent yet
    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"


def list_chunked(scheduler: Any, last_batch: Any) -> list[Any]:
    """Requests whose prompt is not computed whole yet. ``last_batch``: of the pass before; None: there was none.

    SGLang makes a prefill batch its running batch where nothing runs, and the name of a chunk stays in it: of a batch
    that decodes it says nothing.
    """
    chunks = [scheduler.chunked_req]
    if last_batch is not None and last_batch.forward_mode.is_extend():
        chunks.append(last_batch.chunked_req)
    return [req for req in chunks if req is not None]


def poll_senders(scheduler: Any, senders: Sequence[Any]) -> list[SendPoll]:
    """How far each sender is; every rank gets the same answer."""
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.utils import poll_and_all_reduce_attn_cp_tp_group

    meaning = {
        KVPoll.Failed: SendPoll.FAILED,
        KVPoll.Success: SendPoll.DONE,
        KVPoll.WaitingForInput: SendPoll.ASKED,
        KVPoll.Transferring: SendPoll.UNDER_WAY,
    }
    polls = poll_and_all_reduce_attn_cp_tp_group(senders, scheduler.attn_cp_cpu_group, scheduler.attn_tp_cpu_group)
    return [meaning.get(poll, SendPoll.OPEN) for poll in polls]


def mark_failed(manager: Any, room: int) -> None:
    """From now on workers of the sender ``manager`` skip chunks of ``room``."""
    from sglang.srt.disaggregation.base import KVPoll

    manager.request_status[room] = KVPoll.Failed


def has_failed(manager: Any, room: int) -> bool:
    """Tells whether the sender ``manager`` knows ``room`` as failed."""
    from sglang.srt.disaggregation.base import KVPoll

    return bool(manager.request_status.get(room) == KVPoll.Failed)


def is_past_asking(manager: Any, room: int) -> bool:
    """Tells whether the KV of ``room`` is on its way or sent, or was given up, as far as the sender ``manager``
    knows."""
    from sglang.srt.disaggregation.base import KVPoll

    status = manager.request_status.get(room, KVPoll.Bootstrapping)
    return bool(status not in (KVPoll.Bootstrapping, KVPoll.WaitingForInput))


def is_registered(manager: Any, host: str, port: int) -> bool:
    """Tells whether a receiver has said to the sender ``manager`` that it listens there: each does as it connects."""
    receivers = list(manager.decode_kv_args_table.values())  # filled by the thread that reads what receivers say
    return any((receiver.endpoint, receiver.dst_port) == (host, port) for receiver in receivers)


def explain_failure(end: Any, what: str) -> str:
    """``what``, and why the transfer of ``end``, a sender or a receiver, has failed. Asked for it, the host raises it,
    each transfer library an exception of its own; the end is cleared with that."""
    try:
        end.failure_exception()
    except Exception as error:
        return f"{what}: {error}"
    return what


def open_inbox(manager: Any, channel: SideChannel) -> Inbox:
    """The socket of the sender ``manager`` for its thread, which would end with the first message it cannot read."""
    from sglang.srt.disaggregation.nixl.conn import KVArgsRegisterInfo, TransferInfo

    def parse(fields: list[bytes]) -> None:
        kind = KVArgsRegisterInfo if fields[0] == REGISTERS else TransferInfo
        kind.from_zmq(fields)

    is_known = functools.partial(is_registered, manager)
    return Inbox(manager.server_socket, channel, parse=parse, is_known=is_known)


def register_receiver(register: Callable[[Any, Any], None], manager: Any, receiver: Any, channel: SideChannel) -> None:
    """Have the host take over a receiver. One that its transfer library refuses is forgotten: the host has noted it
    before it asks, and ends the thread of all receivers."""
    try:
        register(manager, receiver)
    except Exception as error:
        manager.decode_kv_args_table.pop(receiver.agent_name, None)
        logger.warning("pla_sglang: %s:%s cannot be sent KV: %r", receiver.endpoint, receiver.dst_port, error)
        channel.drop(Drop.MALFORMED, REGISTERS)


def tcp_address(host: str, port: int) -> tuple[str, bool]:
    """Endpoint of a socket, and whether it is IPv6."""
    from sglang.srt.utils.network import NetworkAddress

    address = NetworkAddress(host, port)
    return address.to_tcp(), address.is_ipv6


def release_kv(scheduler: Any, req: Any, *, keep_prefix: bool = True) -> None:
    """Free the KV and the row of ``req``; with ``keep_prefix`` the radix cache keeps what it can."""
    memory.release_kv(req, scheduler.tree_cache, keep_prefix=keep_prefix)


def describe_kv_layout(scheduler: Any) -> str:
    """What must be alike where KV is copied byte by byte: pages, numbers, and the size of each layer's part."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    _, _, page_bytes = pool.get_contiguous_buf_infos()
    parts = " ".join(f"{len(list(alike))}x{size}" for size, alike in itertools.groupby(page_bytes))
    return f"pages of {pool.page_size}, {pool.dtype}, bytes {parts}"


def name_adapter(scheduler: Any, lora_id: str) -> str | None:
    """The name under which clients ask for it; None: it is not loaded."""
    adapter = scheduler.tp_worker.model_runner.lora_manager.lora_refs.get(lora_id)
    return None if adapter is None else adapter.lora_name


def free_metadata(scheduler: Any, req: Any) -> None:
    """Free the sending end's metadata buffer of ``req``, if it has one."""
    from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer

    maybe_release_metadata_buffer(req, scheduler.req_to_metadata_buffer_idx_allocator)


def end_sent(scheduler: Any, req: Any) -> None:
    """Answer a prefill part whose KV is gone, as a prefill instance does."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    req.finished_reason = FINISH_LENGTH(length=0)
    req.time_stats.set_prefill_kv_transfer_finish_time()
    req.time_stats.set_completion_time()
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def end_finished(scheduler: Any, req: Any) -> None:
    """Answer a request that holds nothing and has ended; it was in no queue."""
    now_s = time.perf_counter()
    req.time_stats.set_wait_queue_entry_time(now_s)  # the host takes the time in a queue from the one to the other
    req.time_stats.set_quick_finish_time(now_s)
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def note_receiving(req: Any) -> None:
    """Its KV is to come from another instance. The host tells by the mode of a request which times count for it."""
    from sglang.srt.disaggregation.utils import DisaggregationMode

    req.time_stats.disagg_mode = DisaggregationMode.DECODE
    req.time_stats.set_decode_prealloc_queue_entry_time()


def note_joining(reqs: Sequence[Any]) -> None:
    """Their KV is here, and they run from now on: their time in queues is over, their running time begins."""
    now_s = time.perf_counter()
    for req in reqs:
        req.time_stats.set_forward_entry_time(now_s)
        req.time_stats.set_decode_prebuilt_finish_time(now_s)


class EndMoved:
    """Why a request ends here that goes on at another instance; one of the host's finish reasons by its shape."""

    def to_json(self) -> dict[str, str]:
        return {"type": "pla_moved"}


def end_moved(scheduler: Any, req: Any) -> None:
    """End the stream of a request that goes on elsewhere."""
    req.finished_reason = EndMoved()
    req.time_stats.set_completion_time()
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def holds_back_text(req: Any) -> bool:
    """Tells whether the end of a stream's text is kept from its client, as it may be the beginning of a stop string."""
    return bool(req.stream and req.check_match_stop_str_prefix())


def show_all_tokens(scheduler: Any, req: Any) -> None:
    """Stream what the interval between two outputs of ``req`` has kept back."""
    if not req.stream or req.send_token_offset >= len(req.output_ids):
        return
    params = req.sampling_params
    interval, params.stream_interval = params.stream_interval, 1
    try:
        scheduler.output_streamer.stream_output([req], req.return_logprob)
    finally:
        params.stream_interval = interval


def finish_with_next_step(req: Any) -> None:
    """Abort a request whose last step is under way: the host ends it when it processes that."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.to_finish = FINISH_ABORT()


def end_with_error(scheduler: Any, req: Any, reason: str, status: HTTPStatus) -> None:
    """Answer a request that has not ended with an error."""
    from sglang.srt.disaggregation.utils import prepare_abort

    prepare_abort(req, reason, status_code=status)
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def answer_unjoined(scheduler: Any, req: Any) -> None:
    """Answer a request that was to join the running batch and could not. It may have ended by itself before."""
    if not req.finished():
        end_with_error(scheduler, req, "it could not join the running batch", HTTPStatus.INTERNAL_SERVER_ERROR)
    else:
        scheduler.output_streamer.stream_output([req], req.return_logprob)  # nothing, where its end was shown


def end_aborted(scheduler: Any, req: Any, reason: str) -> None:
    """Answer a request that its client has aborted, as the host does for one in its queue.

    One of which something was streamed is answered through the detokenizer, as one that runs: by the id it would keep
    what it knows of the text, and put the end of the prompt before the text of the next request with that id.
    """
    from sglang.srt.disaggregation.utils import prepare_abort
    from sglang.srt.managers.io_struct import AbortReq

    prepare_abort(req, reason)
    if req.send_token_offset:
        req.time_stats.set_completion_time()
        scheduler.output_streamer.stream_output([req], req.return_logprob)
        return
    scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)


def end_as_ordered(scheduler: Any, req: Any) -> None:
    """Answer a request that was to end with its next step, and has none: as its client, or a fault, has ordered."""
    status = getattr(req.to_finish, "status_code", None)
    if status is None:
        end_aborted(scheduler, req, "Aborted")
    else:
        end_with_error(scheduler, req, req.to_finish.message, status)


def has_run_too_long(req: Any) -> bool:
    """By SGLang's time-out of running requests, and this rank's clock."""
    _, running_s = timeouts_s()
    return running_s is not None and 0 < req.time_stats.forward_entry_time < time.perf_counter() - running_s


def lacks_memory(scheduler: Any, running_batch: Any) -> bool:
    """Tells whether the next step of ``running_batch`` needs more pages than are free or can be evicted."""
    free_tokens = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    return bool(running_batch.new_tokens_required_next_decode() > free_tokens)


def build_received_batch(scheduler: Any, reqs: Sequence[Any]) -> Any:
    """A batch of requests whose KV and first token are here, ready to be merged into the running one."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    batch = ScheduleBatch.init_new(
        list(reqs),
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.prepare_for_prebuilt()
    process_prebuilt(scheduler, batch)
    return batch


def all_ranks_agree(scheduler: Any, flags: Sequence[bool]) -> Sequence[bool]:
    """True where every rank of this instance says so; ``flags`` is as long on each."""
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_size == 1:
        return flags
    import torch
    import torch.distributed as dist

    votes = torch.tensor([int(flag) for flag in flags], dtype=torch.uint8)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=scheduler.attn_tp_cpu_group)
    return [bool(vote) for vote in votes.tolist()]


def timeouts_s() -> tuple[float | None, float | None]:
    """SGLang's time-outs of requests that wait and that run; None: there is none."""
    from sglang.srt.environ import envs

    waiting_s, running_s = envs.SGLANG_REQ_WAITING_TIMEOUT.get(), envs.SGLANG_REQ_RUNNING_TIMEOUT.get()
    return (waiting_s if waiting_s > 0 else None), (running_s if running_s > 0 else None)


def class_of_receivers(scheduler: Any) -> Any:
    """The host's receiver of the transfer backend in use."""
    from sglang.srt.disaggregation.utils import KVClassType, get_kv_class

    return get_kv_class(scheduler.transfer_backend, KVClassType.RECEIVER)


def start_bootstrap_server(server_args: Any) -> Any:
    """In the main process, where a prefill instance has it."""
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    backend = TransferBackend(server_args.disaggregation_transfer_backend)
    server_class = get_kv_class(backend, KVClassType.BOOTSTRAP_SERVER)
    return server_class(host=server_args.host, port=server_args.disaggregation_bootstrap_port)
