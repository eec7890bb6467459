"""What we override of the host's three PD queues. Objects of these classes are made by ``less.ends``."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, Subscriber

_OURS = "pla_sglang.fleet.stateless.transfer.queues:"
_TESTS = "tests/fleet/stateless/test_stateless_queues.py"
_PRINTS = "tests/fleet/stateless/test_stateless_fingerprints.py"
_PAIR = "tests/e2e/test_stateless_pair.py"

_override = functools.partial(Subscriber, group=Group.STATELESS, hook=Hook.OVERRIDE)

QUEUES = (
    _override(
        id="queue.prefix",
        key="bootstrap_queue.finalize_bootstrap",
        handler=_OURS + "SendQueue.finalize_bootstrap",
        why="A target that has more of its prompt than there is here gets what says so. The host sends it nothing.",
        verify=_PRINTS,
    ),
    _override(
        id="queue.said",
        key="metadata_buffers.set_buf",
        handler=_OURS + "SendBuffers.set_buf",
        why="KV goes out with its length and a hash of its tokens, adapter, cache salt and layout.",
        verify=_PRINTS,
    ),
    _override(
        id="queue.pop",
        key="prealloc_queue.pop_preallocated",
        handler=_OURS + "ReceiveQueue.pop_preallocated",
        why=(
            "Reserve by slack, and let others pass who has no room; count what one call reserves, and since when each "
            "leg waits; with whom it raises, that leg alone ends."
        ),
        verify="tests/fleet/stateless/test_stateless_queues.py, tests/fleet/stateless/test_stateless_reservations.py",
    ),
    _override(
        id="queue.handshake",
        key="prealloc_queue.update_handshake_waiters",
        handler=_OURS + "ReceiveQueue._update_handshake_waiters",
        why="A leg whose peer is unknown ends with its own status; a failure that one rank knows of is seen by all.",
        verify=_TESTS,
    ),
    _override(
        id="queue.alloc",
        key="prealloc_queue.pre_alloc",
        handler=_OURS + "ReceiveQueue._pre_alloc",
        why="Count the memory and the rows that the present call has given.",
        verify=_PAIR,
    ),
    _override(
        id="queue.active",
        key="prealloc_queue.active_req_count",
        handler=_OURS + "ReceiveQueue._active_req_count",
        why="The host counts the waiting queue as requests that grow; here prefills wait in it.",
        verify=_TESTS,
    ),
    _override(
        id="queue.budget",
        key="prealloc_queue.allocatable_token_budgets",
        handler=_OURS + "ReceiveQueue._allocatable_token_budgets",
        why="Memory less what a prefill under way still needs, within the share of this end.",
        verify=_TESTS,
    ),
    _override(
        id="queue.dp_rank",
        key="prealloc_queue.resolve_prefill_dp_rank",
        handler=_OURS + "ReceiveQueue._resolve_prefill_dp_rank",
        why="A receiver asks nobody: the peer is connected to already, or the leg waits.",
        verify=_TESTS,
    ),
    _override(
        id="queue.peers",
        key="prealloc_queue.ensure_prefill_info",
        handler=_OURS + "ReceiveQueue._ensure_prefill_info",
        why="Never asks the network in the scheduler's thread; legs of failed peers end.",
        verify=_TESTS,
    ),
    _override(
        id="queue.poll",
        key="transfer_queue.poll_with_metadata_gate",
        handler=_OURS + "TransferQueue._poll_with_metadata_gate",
        why="Transfers that failed are handed out with their pages, and not freed while a source may still write. What "
        "came beside the room is read before the host clears it.",
        verify=_PAIR + ": a lost transfer",
    ),
    _override(
        id="queue.commit",
        key="transfer_queue.commit_transfer_to_req",
        handler=_OURS + "TransferQueue._commit_transfer_to_req",
        why="A leg whose KV cannot be taken over ends; the host would leave a queue with entries that it cannot poll.",
        verify=_TESTS,
    ),
)
