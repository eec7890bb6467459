"""Seams of stateless instances."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, subscribe

_SCHEDULER = "pla_sglang.fleet.stateless.scheduler_hooks"
_FRONT = "pla_sglang.fleet.stateless.front_hooks"
_E2E = "tests/e2e/test_stateless_pair.py"

_subscribe = functools.partial(subscribe, module=_SCHEDULER, group=Group.STATELESS)
_on_front = functools.partial(subscribe, module=_FRONT, group=Group.STATELESS_HTTP)

STATELESS = (
    subscribe(
        id="less.parse",
        group=Group.CLI,
        key="server_args.from_cli_args",
        module="pla_sglang.fleet.stateless.checks",
        hook=Hook.AROUND,
        why="What cannot go together with --pla-stateless, after cli.parse has read our flags.",
        verify="tests/fleet/stateless/test_stateless_checks.py",
        exit="With stateless instances.",
    ),
    _subscribe(
        id="less.ends",
        key="scheduler.init_disaggregation",
        why="A sending and a receiving KV manager on one pool, each with metadata buffers of its own.",
        verify=_E2E + ": legs in both directions at once",
    ),
    _subscribe(
        id="less.dispatch",
        key="scheduler.init_request_dispatcher",
        why="Handlers of the messages that tell the peers and that hold requests, in one order on all ranks.",
        verify=_E2E + ": told and unknown peers; paused requests",
    ),
    _subscribe(
        id="less.enqueue",
        key="scheduler.add_request_to_queue",
        hook=Hook.AROUND,
        why="Prefill parts await their handshake, decode parts their KV; whole and retracted requests as before.",
        verify=_E2E,
    ),
    _subscribe(
        id="less.pump",
        key="scheduler.get_next_batch_to_run",
        hook=Hook.AROUND,
        why=(
            "The one place of each turn of the loop: both ends advance, received and resumed requests join, sent and "
            "held ones leave."
        ),
        verify=_E2E + "; tests/fleet/stateless/test_stateless_sending.py",
    ),
    _subscribe(
        id="less.result",
        key="scheduler.process_batch_result",
        why="KV of finished chunks goes out while later ones compute.",
        verify=_E2E + ": chunked prefill part",
    ),
    _subscribe(
        id="less.idle",
        key="scheduler.is_fully_idle",
        why=(
            "Legs and paused requests keep KV that the host does not count: no leak check, no flush, no release of "
            "memory beside them."
        ),
        verify=_E2E + ": flush refused while a leg holds KV, clean afterwards",
    ),
    _subscribe(
        id="less.abort",
        key="scheduler.abort_request",
        why="Aborts reach legs and paused requests in every state, by prefix as the host's do.",
        verify=_E2E + ": aborts; tests/fleet/stateless/test_hop_holding.py",
    ),
    _subscribe(
        id="less.pause",
        key="scheduler.pause_generation",
        hook=Hook.BEFORE,
        why="A pause that retracts ends legs, and takes paused requests along: their KV is of the old weights.",
        verify="tests/fleet/stateless/test_stateless_receiving.py; tests/fleet/stateless/test_hop_holding.py",
    ),
    _subscribe(
        id="less.reserve",
        key="prefill_adder.init",
        handler="after_adder_init",
        why="Keep the growth of requests that are received, ready or held out of what prefills may take.",
        verify="tests/fleet/stateless/test_stateless_receiving.py",
    ),
    _subscribe(
        id="less.lora",
        key="scheduler.can_schedule_lora_req",
        hook=Hook.BEFORE,
        handler="before_can_schedule_lora",
        why="A request that was received or held waits for a place for its adapter; prefills leave it one.",
        verify="tests/fleet/stateless/test_stateless_adapters.py; tests/e2e/test_stateless_ranks.py",
    ),
    _subscribe(
        id="less.lora_turn",
        key="scheduler.can_schedule_lora_req",
        handler="after_can_schedule_lora",
        why="Such a request is not kept out for ever by prefills of the adapters that are in use.",
        verify="tests/fleet/stateless/test_stateless_adapters.py",
    ),
    _subscribe(
        id="less.ride",
        key="batch.mix_with_running",
        why="As sched.ride, for a request that was admitted with its KV; setting the prefixes twice changes nothing.",
        verify="tests/plugin/test_piggybacked.py",
        exit="With SGLang 0.5.17.",
    ),
    _subscribe(
        id="less.meet",
        key="distributed.resolve_dist_init_method",
        why="torch's store of the ranks listens at every address of the machine: with one --host, at that one.",
        verify="tests/fleet/stateless/test_stateless_rendezvous.py; tests/e2e/test_stateless_ports.py",
        exit="When torch's TCPStore listens where it is told.",
    ),
    _subscribe(
        id="less.inbox",
        key="kv_manager.start_bootstrap_thread",
        hook=Hook.BEFORE,
        why="A message that the host cannot read ends its thread, and with it every hand-over of KV: none reaches it.",
        verify="tests/fleet/stateless/test_stateless_side_channel.py; tests/e2e/test_stateless_ports.py",
        exit="When SGLang drops what it cannot read there.",
    ),
    _subscribe(
        id="less.answers",
        key="kv_manager.start_decode_listener_thread",
        hook=Hook.BEFORE,
        why="The host's thread reads what senders say to this receiver, and only one may read a socket: both do.",
        verify="tests/fleet/stateless/test_stateless_fence.py; tests/e2e/test_stateless_pair.py",
        exit="When SGLang says by itself that a room is not held, and that an abort is over.",
    ),
    _subscribe(
        id="less.register",
        key="kv_manager.add_remote_peer",
        hook=Hook.AROUND,
        why="A receiver whose description NIXL refuses ends the same thread.",
        verify="tests/fleet/stateless/test_stateless_side_channel.py; tests/e2e/test_stateless_ports.py",
        exit="When SGLang drops what it cannot read there.",
    ),
    _subscribe(
        id="less.abort_ack",
        key="kv_manager.handle_abort_notification",
        hook=Hook.AROUND,
        handler="around_handle_abort",
        why=(
            "A receiver frees its pages only when the sender says that no transfer writes to them any more: where the "
            "host does not say it (0.5.17), we do. A receiver that asks for a paused request says so, to be refused "
            "where it is not held. One that asks for the room of another, or gives it up, is not listened to."
        ),
        verify=(
            "tests/fleet/stateless/test_stateless_fence.py; tests/fleet/stateless/test_hop_pulling.py; "
            + _E2E
            + ": quarantine "
            "empties; rooms that nobody holds"
        ),
    ),
    _subscribe(
        id="less.info",
        key="scheduler.get_init_info",
        why="Tell the front process that the scheduler is stateless.",
        verify=_E2E,
    ),
    _subscribe(
        id="less.state",
        key="scheduler.get_internal_state",
        why="Incarnation, peers, legs and KV of each end in /server_info and /pla/state.",
        verify=_E2E,
    ),
    _on_front(
        id="less.bootstrap",
        key="tokenizer_manager.init_disaggregation",
        handler="after_init_bootstrap",
        why="The bootstrap server in the main process, where all ranks find it and no pass holds it up.",
        verify=_E2E,
    ),
    _on_front(
        id="less.request",
        key="tokenizer_manager.generate_request",
        hook=Hook.BEFORE,
        why="A request that names an address which was not told is refused with 409.",
        verify=_E2E + ": an unknown peer",
    ),
    _on_front(
        id="less.status",
        key="tokenizer_manager.handle_abort_finish_reason",
        hook=Hook.AROUND,
        handler="around_abort_reason",
        why="A leg that a scheduler refuses with 409 or 410 gets that status; the host knows 400, 500 and 503 only.",
        verify=_E2E + ": a prefill part that comes after its decode part has given up",
    ),
    _on_front(
        id="less.serve",
        key="http_server.setup_and_run_http_server",
        hook=Hook.BEFORE,
        handler="before_run_http_server",
        why="The routes /pla/peers and /pla/hops, and /pla/state where scheduling is off.",
        verify=_E2E,
    ),
    subscribe(
        id="less.text",
        group=Group.STATELESS,
        key="detokenizer.decode_batch_token_id_output",
        hook=Hook.AROUND,
        module="pla_sglang.fleet.stateless.host.detokenize",
        handler="around_decode_batch",
        why=(
            "In the detokenizer: where a piece of a stream ends inside a character, the host can show text twice. A "
            "request that moves goes on by how much was shown, and would lose as much."
        ),
        verify="tests/fleet/stateless/test_hop_borrowed.py: pieces of 1 to 8 tokens",
        exit="When DecodeStatus.sent_offset never falls.",
    ),
)
