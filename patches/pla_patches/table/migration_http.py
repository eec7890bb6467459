"""Seams of streams whose request may move, in the process that serves HTTP."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, subscribe

_TESTS = "tests/fleet/stateless/test_hop_splices.py"

_subscribe = functools.partial(
    subscribe,
    module="pla_sglang.fleet.stateless.front_hooks",
    group=Group.STATELESS_HTTP,
    exit="When SGLang gives token ids in every stream, and goes on with answers that began elsewhere.",
)

MIGRATION_HTTP = (
    _subscribe(
        id="hop.chat",
        key="serving_chat.generate_chat_stream",
        hook=Hook.AROUND,
        why="Token ids before each event of a marked chat; old tokens run through its parsers where it goes on.",
        verify=_TESTS,
    ),
    _subscribe(
        id="hop.completions",
        key="serving_completion.generate_completion_stream",
        hook=Hook.AROUND,
        why="The same for completions.",
        verify=_TESTS,
    ),
    _subscribe(
        id="hop.chunks",
        key="tokenizer_manager.generate_request",
        hook=Hook.AROUND,
        why="The endpoint of a marked stream reads its chunks from us, so each event is known to be of certain tokens.",
        verify=_TESTS,
    ),
    _subscribe(
        id="hop.prompt",
        key="tokenizer_manager.send_one_request",
        hook=Hook.BEFORE,
        why="After tokenization and before dispatch: the prompt must have the ids that it had where the answer began.",
        verify="tests/fleet/stateless/test_hop_front_refusals.py: a chat template with the date",
    ),
    _subscribe(
        id="hop.serve",
        key="http_server.setup_and_run_http_server",
        hook=Hook.BEFORE,
        handler="stand_around_generate",
        why="Stand around the route /generate, whose events are made in a closure.",
        verify=_TESTS + "; tests/fleet/stateless/test_hop_route.py",
    ),
)
