"""What we override of the host's three PD queues. Objects of these classes are made by ``less.ends``."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, Subscriber

_PREALLOC = "sglang.srt.disaggregation.decode.DecodePreallocQueue."
_OURS = "pla_sglang.engine.stateless.queues:"
_TESTS = "tests/stateless/test_stateless_queues.py"
_PRINTS = "tests/stateless/test_stateless_fingerprints.py"
_PAIR = "tests/e2e/test_stateless_pair.py"

_override = functools.partial(Subscriber, group=Group.STATELESS, hook=Hook.OVERRIDE)

QUEUES = (
    _override(
        id="queue.buffer",
        target="sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.ensure_metadata_buffer",
        handler=_OURS + "SendQueue.ensure_metadata_buffer",
        why="A prefill leg waits here until its end may hold more KV.",
        verify=_PAIR,
        next_host="Same body.",
    ),
    _override(
        id="queue.prefix",
        target="sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.finalize_bootstrap",
        handler=_OURS + "SendQueue.finalize_bootstrap",
        why="A target that has more of its prompt than there is here gets what says so. The host sends it nothing.",
        verify=_PRINTS,
        next_host="Same body.",
    ),
    _override(
        id="queue.said",
        target="sglang.srt.disaggregation.utils.MetadataBuffers.set_buf",
        handler=_OURS + "SendBuffers.set_buf",
        why="KV goes out with its length and a hash of its tokens, adapter, cache salt and layout.",
        verify=_PRINTS,
        next_host="The row of a room is alike. Its kv_checksum is of the bytes that travel, not of what they are of.",
    ),
    _override(
        id="queue.pop",
        target=_PREALLOC + "pop_preallocated",
        handler=_OURS + "ReceiveQueue.pop_preallocated",
        why="Count what one call reserves, and since when each leg waits; with whom it raises, that leg alone ends.",
        verify="tests/stateless/test_stateless_queues.py",
        next_host="It asks can_schedule_lora_req, less.lora's target, before it reserves memory.",
    ),
    _override(
        id="queue.handshake",
        target=_PREALLOC + "_update_handshake_waiters",
        handler=_OURS + "ReceiveQueue._update_handshake_waiters",
        why="A leg whose peer is unknown ends with its own status; a failure that one rank knows of is seen by all.",
        verify=_TESTS,
        next_host="It polls all legs in every call: a failure of one rank is seen by all without us.",
    ),
    _override(
        id="queue.alloc",
        target=_PREALLOC + "_pre_alloc",
        handler=_OURS + "ReceiveQueue._pre_alloc",
        why="Count the memory and the rows that the present call has given.",
        verify=_PAIR,
    ),
    _override(
        id="queue.active",
        target=_PREALLOC + "_active_req_count",
        handler=_OURS + "ReceiveQueue._active_req_count",
        why="The host counts the waiting queue as requests that grow; here prefills wait in it.",
        verify=_TESTS,
        next_host="Transfers that are staged on the host do not count.",
    ),
    _override(
        id="queue.budget",
        target=_PREALLOC + "_allocatable_token_budgets",
        handler=_OURS + "ReceiveQueue._allocatable_token_budgets",
        why="Memory less what a prefill under way still needs, within the share of this end.",
        verify=_TESTS,
        next_host="The chunk's extend_range.end, which we read, is extend_end.",
    ),
    _override(
        id="queue.dp_rank",
        target=_PREALLOC + "_resolve_prefill_dp_rank",
        handler=_OURS + "ReceiveQueue._resolve_prefill_dp_rank",
        why="A receiver asks nobody: the peer is connected to already, or the leg waits.",
        verify=_TESTS,
        next_host="Same body.",
    ),
    _override(
        id="queue.peers",
        target=_PREALLOC + "_ensure_prefill_info",
        handler=_OURS + "ReceiveQueue._ensure_prefill_info",
        why="Never asks the network in the scheduler's thread; legs of failed peers end.",
        verify=_TESTS,
        next_host="Same body.",
    ),
    _override(
        id="queue.poll",
        target="sglang.srt.disaggregation.decode.DecodeTransferQueue._poll_with_metadata_gate",
        handler=_OURS + "TransferQueue._poll_with_metadata_gate",
        why="Transfers that failed are handed out with their pages, and not freed while a source may still write. What "
        "came beside the room is read before the host clears it.",
        verify=_PAIR + ": a lost transfer",
        next_host="SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE keeps such pages there: compare.",
    ),
    _override(
        id="queue.commit",
        target="sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
        handler=_OURS + "TransferQueue._commit_transfer_to_req",
        why="A leg whose KV cannot be taken over ends; the host would leave a queue with entries that it cannot poll.",
        verify=_TESTS,
    ),
)
