"""Seams of the process that parses the command line and serves HTTP."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, Subscriber, subscribe

_HOOKS = "pla_sglang.plugin.engine.hooks.http_server"
_HIDDEN = "pla_sglang.plugin.engine.hooks.hidden_keys"

_subscribe = functools.partial(subscribe, module=_HOOKS)

CLI = (
    _subscribe(
        id="cli.add",
        group=Group.CLI,
        key="server_args.add_cli_args",
        why="Our flags in SGLang's own parser, so every launcher and --config file knows them.",
        verify="tests/plugin/test_config.py; e2e: flags through all three launchers",
    ),
    _subscribe(
        id="cli.parse",
        group=Group.CLI,
        key="server_args.from_cli_args",
        hook=Hook.AROUND,
        why="Check our values alone and against SGLang's resolved arguments; hand them to child processes.",
        verify="tests/plugin/test_config.py, tests/plugin/test_compat.py",
    ),
    _subscribe(
        id="guard.request",
        group=Group.GUARD,
        key="tokenizer_manager.generate_request",
        hook=Hook.BEFORE,
        handler="refuse_bad_request",
        why="n copies the prompt before anything looks at it; mistakes that SGLang answers with 500 break a stream.",
        verify="tests/plugin/test_request_checks.py",
    ),
    _subscribe(
        id="guard.message",
        group=Group.GUARD,
        key="tokenizer_manager.create_tokenized_object",
        hook=Hook.AROUND,
        why="A scheduler ends with one message of other types or ranges than it expects; it is refused with 400.",
        verify="tests/plugin/test_request_checks.py; tests/e2e/test_poison.py: such requests end nothing",
    ),
    Subscriber(
        id="guard.logprobs",
        group=Group.GUARD_SCHEDULER,
        key="logprob_processor.compute_logprobs",
        handler="pla_sglang.plugin.engine.hooks.guards:after_compute_logprobs",
        why="token_ids_logprob (/v1/score) beside a request without it ends the scheduler: a list has no tolist().",
        verify="tests/plugin/test_request_checks.py; tests/e2e/test_poison.py: /v1/score beside a stream",
        exit="When get_token_ids_logprobs_raw gives tensors for requests without ids.",
    ),
    _subscribe(
        id="guard.repr",
        group=Group.GUARD,
        key="server_args.repr",
        module=_HIDDEN,
        why="SGLang logs its arguments with every key in them; the line goes without.",
        verify="tests/test_secret_names.py; tests/e2e/test_secrets.py: the log",
        exit="When SGLang hides its keys itself.",
    ),
    _subscribe(
        id="guard.logged",
        group=Group.GUARD,
        key="engine.server_args_for_logging",
        handler="after_resolved_config_dict",
        module=_HIDDEN,
        why="Later versions log what they have resolved instead, again with every key.",
        verify="tests/test_keys.py; tests/e2e/test_secrets.py: the log",
        exit="When SGLang hides its keys itself.",
    ),
    _subscribe(
        id="guard.arguments",
        group=Group.GUARD,
        key="server_info.arguments",
        handler="after_resolved_config_dict",
        module=_HIDDEN,
        why="/server_info shows all arguments to whoever holds the key of clients; keys are hidden there.",
        verify="tests/test_secret_names.py; tests/e2e/test_secrets.py",
        exit="When SGLang hides its keys itself.",
    ),
    _subscribe(
        id="guard.states",
        group=Group.GUARD,
        key="tokenizer_control.get_internal_state",
        hook=Hook.AROUND,
        module=_HIDDEN,
        why="The schedulers' copies of the same arguments, in /server_info too.",
        verify="tests/test_secret_names.py; tests/e2e/test_secrets.py",
        exit="When SGLang hides its keys itself.",
    ),
    _subscribe(
        id="guard.end",
        group=Group.GUARD,
        key="tokenizer_manager.set_server_stop_hook",
        hook=Hook.AROUND,
        why="A server that was told to end waits for open requests, also for those that wait for its ended schedulers.",
        verify="tests/plugin/test_open_requests.py; e2e: a stateless instance that is told to end",
        exit="When SGLang answers who waits for its schedulers before it ends them.",
    ),
    _subscribe(
        id="front.request",
        group=Group.FRONTEND,
        key="tokenizer_manager.generate_request",
        hook=Hook.BEFORE,
        why="Targets and the age at the router from headers; a bad one is refused as SGLang refuses bad parameters.",
        verify="tests/plugin/test_request_headers.py; e2e: SLO header tests",
        exit="When SGLang carries a TTFT target per request.",
    ),
    _subscribe(
        id="front.serve",
        group=Group.FRONTEND,
        key="http_server.setup_and_run_http_server",
        hook=Hook.BEFORE,
        handler="before_run_http_server",
        why="Refuse to serve beside a scheduler without our seams; add /pla routes.",
        verify="tests/patches/test_patches.py; e2e: /pla/state, /pla/config",
        exit="When plugins may add routes and SGLang reports failed hooks.",
    ),
    Subscriber(
        id="launch.ready",
        group=Group.LAUNCHER,
        key="http_server.launch_server",
        hook=Hook.BEFORE,
        handler="pla_sglang.launch_server:before_launch",
        why="Print a request that works once the server is ready.",
        verify="e2e: make serve prints a curl line",
        exit="Cosmetic; whenever it is in the way.",
    ),
    Subscriber(
        id="launch.serve",
        group=Group.LAUNCHER,
        key="http_server.setup_and_run_http_server",
        hook=Hook.BEFORE,
        handler="pla_sglang.launch_server:before_serving",
        why="Ctrl-C while a server starts is one line and no traceback of its processes; from here on it is SGLang's.",
        verify="tests/plugin/test_start_watch.py; e2e: Ctrl-C while a server starts",
        exit="When SGLang ends quietly at Ctrl-C while it starts.",
    ),
)
