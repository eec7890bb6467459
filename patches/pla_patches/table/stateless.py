"""Seams of stateless instances. ``next_host`` is from the bodies in SGLang 0.5.23; None: nothing of concern."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, subscribe

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch."
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_HOOKS = "pla_sglang.engine.hooks.stateless"
_E2E = "tests/e2e/test_stateless_pair.py"

_subscribe = functools.partial(subscribe, module=_HOOKS, group=Group.STATELESS)
_on_front = functools.partial(subscribe, module=_HOOKS, group=Group.STATELESS_FRONT)

STATELESS = (
    _subscribe(
        id="less.ends",
        target=_SCHEDULER + "init_disaggregation",
        why="A sending and a receiving KV manager on one pool, each with metadata buffers of its own.",
        verify=_E2E + ": legs in both directions at once",
        next_host=(
            "The queues lost their ranks, sizes and group, which build.py leaves out by itself. The rest of it has to "
            "change: scheduler.ps is gone, PrefillBootstrapQueue wants scheduler_stage_metrics, and MetadataBuffers "
            "cannot be made without max_sampling_mask_tokens."
        ),
    ),
    _subscribe(
        id="less.dispatch",
        target=_SCHEDULER + "init_request_dispatcher",
        why="Handlers of the messages that tell the peers and that hold requests, in one order on all ranks.",
        verify=_E2E + ": told and untold peers; held requests",
    ),
    _subscribe(
        id="less.enqueue",
        target=_SCHEDULER + "_add_request_to_queue",
        hook=Hook.AROUND,
        why="Prefill legs wait for their handshake, decode legs for their KV; whole and retracted requests as before.",
        verify=_E2E,
        next_host="The host releases a request that it refuses for priority or for the length of the queue.",
    ),
    _subscribe(
        id="less.pump",
        target=_SCHEDULER + "get_next_batch_to_run",
        hook=Hook.AROUND,
        why=(
            "The one place of each turn of the loop: both ends advance, received and resumed requests join, sent and "
            "held ones leave."
        ),
        verify=_E2E + "; tests/stateless/test_stateless_sending.py",
        next_host="The host calls filter_batch with reqs_to_exclude and filters in every turn.",
    ),
    _subscribe(
        id="less.result",
        target=_SCHEDULER + "process_batch_result",
        why="KV of finished chunks goes out while later ones compute.",
        verify=_E2E + ": chunked prefill leg",
    ),
    _subscribe(
        id="less.idle",
        target=_SCHEDULER + "is_fully_idle",
        why=(
            "Legs and held requests keep KV that the host does not count: no leak check, no flush, no release of "
            "memory beside them."
        ),
        verify=_E2E + ": flush refused while a leg holds KV, clean afterwards",
        next_host="after_is_fully_idle takes no ignore_waiting.",
    ),
    _subscribe(
        id="less.abort",
        target=_SCHEDULER + "abort_request",
        why="Aborts reach legs and held requests in every state, by prefix as the host's do.",
        verify=_E2E + ": aborts; tests/hops/test_hop_holding.py",
    ),
    _subscribe(
        id="less.pause",
        target=_SCHEDULER + "pause_generation",
        hook=Hook.BEFORE,
        why="A pause that retracts ends legs, and takes held requests along: their KV is of the old weights.",
        verify="tests/stateless/test_stateless_receiving.py; tests/hops/test_hop_holding.py",
    ),
    _subscribe(
        id="less.reserve",
        target="sglang.srt.managers.schedule_policy.PrefillAdder.__init__",
        handler="after_adder_init",
        why="Keep the growth of requests that are received, ready or held out of what prefills may take.",
        verify="tests/stateless/test_stateless_receiving.py",
    ),
    _subscribe(
        id="less.lora",
        target=_SCHEDULER + "_can_schedule_lora_req",
        hook=Hook.BEFORE,
        handler="before_can_schedule_lora",
        why="A request that was received or held waits for a place for its adapter; prefills leave it one.",
        verify="tests/stateless/test_stateless_adapters.py; tests/e2e/test_stateless_ranks.py",
        next_host="Receiving queues ask it as well, before they reserve memory.",
    ),
    _subscribe(
        id="less.lora_turn",
        target=_SCHEDULER + "_can_schedule_lora_req",
        handler="after_can_schedule_lora",
        why="Such a request is not kept out for ever by prefills of the adapters that are in use.",
        verify="tests/stateless/test_stateless_adapters.py",
    ),
    _subscribe(
        id="less.ride",
        target=_BATCH + "mix_with_running",
        why="As sched.ride, for a request that was admitted with its KV; setting the prefixes twice changes nothing.",
        verify="tests/test_riders.py",
        exit="SGLang 0.5.23 takes a rider's prefix from its sequence length.",
        next_host="Fixed there: leave this row out.",
    ),
    _subscribe(
        id="less.meet",
        target="sglang.srt.distributed.bootstrap._resolve_dist_init_method",
        why="torch's store of the ranks listens at every address of the machine: with one --host, at that one.",
        verify="tests/stateless/test_stateless_rendezvous.py; tests/e2e/test_stateless_ports.py",
        exit="When torch's TCPStore listens where it is told.",
    ),
    _subscribe(
        id="less.inbox",
        target="sglang.srt.disaggregation.nixl.conn.NixlKVManager._start_bootstrap_thread",
        hook=Hook.BEFORE,
        why="A message that the host cannot read ends its thread, and with it every hand-over of KV: none reaches it.",
        verify="tests/stateless/test_stateless_side_channel.py; tests/e2e/test_stateless_ports.py",
        exit="When SGLang drops what it cannot read there.",
    ),
    _subscribe(
        id="less.register",
        target="sglang.srt.disaggregation.nixl.conn.NixlKVManager._add_remote_peer",
        hook=Hook.AROUND,
        why="A receiver whose description NIXL refuses ends the same thread.",
        verify="tests/stateless/test_stateless_side_channel.py; tests/e2e/test_stateless_ports.py",
        exit="When SGLang drops what it cannot read there.",
    ),
    _subscribe(
        id="less.abort_ack",
        target="sglang.srt.disaggregation.nixl.conn.NixlKVManager._handle_abort_notification",
        hook=Hook.AROUND,
        handler="around_handle_abort",
        why=(
            "A receiver frees its pages only when the sender says that no transfer writes to them any more; and a "
            "receiver that asks for a held request says so, to be refused where it is not held. One that asks for the "
            "room of another, or gives it up, is not listened to."
        ),
        verify=(
            "tests/stateless/test_stateless_fence.py; tests/hops/test_hop_pulling.py; " + _E2E + ": quarantine "
            "empties; rooms that nobody holds"
        ),
        next_host=(
            "The host can answer aborts itself when nothing is written any more "
            "(supports_deferred_decode_kv_release, of NIXL too): compare before porting."
        ),
    ),
    _subscribe(
        id="less.info",
        target=_SCHEDULER + "get_init_info",
        why="Tell the front process that the scheduler is stateless.",
        verify=_E2E,
    ),
    _subscribe(
        id="less.state",
        target=_SCHEDULER + "get_internal_state",
        why="Incarnation, peers, legs and KV of each end in /server_info and /pla/state.",
        verify=_E2E,
        next_host="It only calls the scheduler's internal_state component.",
    ),
    _on_front(
        id="less.bootstrap",
        target=_MANAGER + "init_disaggregation",
        handler="after_init_bootstrap",
        why="The bootstrap server in the main process, where all ranks find it and no pass holds it up.",
        verify=_E2E,
    ),
    _on_front(
        id="less.request",
        target=_MANAGER + "generate_request",
        hook=Hook.BEFORE,
        why="A request that names an address which was not told is refused with 409.",
        verify=_E2E + ": an untold peer",
    ),
    _on_front(
        id="less.status",
        target=_MANAGER + "_handle_abort_finish_reason",
        hook=Hook.AROUND,
        handler="around_abort_reason",
        why="A leg that a scheduler refuses with 409 or 410 gets that status; the host knows 400, 500 and 503 only.",
        verify=_E2E + ": a prefill leg that comes after its decode leg has given up",
        next_host="The host passes any status of 400 to 599 on: leave this row out.",
    ),
    _on_front(
        id="less.serve",
        target="sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        hook=Hook.BEFORE,
        handler="before_run_http_server",
        why="The routes /pla/peers and /pla/hops, and /pla/state where scheduling is off.",
        verify=_E2E,
    ),
)
