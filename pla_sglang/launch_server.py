"""``python -m pla_sglang.launch_server``: SGLang's launcher with our plugin loaded for sure.

Takes every flag of ``python -m sglang.launch_server`` and passes it on. Without ``--model-path`` on a machine without
an accelerator it serves the embedded demo model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from pla_sglang.emulate.arguments import MODEL_FLAGS, with_emulation
from pla_sglang.errors import ConfigError


def main(argv: list[str] | None = None) -> None:
    from sglang.srt.plugins import load_plugins

    try:
        arguments = with_model(with_emulation(list(sys.argv[1:] if argv is None else argv)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    load_plugins()
    _require_plugin()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(arguments)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def with_model(arguments: list[str]) -> list[str]:
    """``arguments``, with the demo model added where no model is named and no accelerator is at hand."""
    if any(part.split("=")[0] in (*MODEL_FLAGS, "-h", "--help") for part in arguments):
        return arguments
    from pla_sglang.demo import demo_model_path
    from pla_sglang.platform import is_active

    if not is_active():
        return arguments
    path = demo_model_path()
    print("pla_sglang: no --model-path and no accelerator: serving the embedded demo model", flush=True)
    return ["--model-path", str(path), *arguments]


def _require_plugin() -> None:
    """The plugin must be installed, not merely importable: child processes find it by its entry point."""
    from pla_patches.install import install_launcher, installed
    from pla_sglang.errors import HostMismatchError

    try:
        if not installed():
            raise HostMismatchError(
                ["the plugin did not load: install pla-sglang with pip; SGLANG_PLUGINS, if set, must name pla_sglang"]
            )
        install_launcher()
    except HostMismatchError as error:
        raise SystemExit(f"error: {error}") from None


def before_launch(server_args: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Print a request that works once the server is up."""
    then: Callable[[], None] | None = kwargs.get("launch_callback")

    def ready() -> None:
        print(f"pla_sglang: ready, try:\n  {curl_line(server_args)}", flush=True)
        if then is not None:
            then()

    return (server_args, *args), {**kwargs, "launch_callback": ready}


def curl_line(server_args: Any) -> str:
    key = ' -H "Authorization: Bearer $API_KEY"' if server_args.api_key else ""
    body = '{"model": "default", "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 48}'
    return f"curl -s {server_args.url()}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


if __name__ == "__main__":
    main()
