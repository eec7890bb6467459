"""Defaults of the other command-line flags under ``--pla-emulate``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from pla_sglang.common import cli
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.plugin.platform import value_of
from pla_sglang.plugin.start_checks import FILE_FLAG
from pla_sglang.profiles import load_profile
from pla_sglang.sim.chain import model_path

FLAG = "--pla-emulate"
MODEL_FLAGS = ("--model-path", "--model")
MAX_RUNNING_REQUESTS = 512
CHUNKED_PREFILL_TOKENS = 8192  # SGLang's own choice on an 80 GB GPU


def with_emulation(arguments: list[str]) -> list[str]:
    """``arguments`` with the defaults of an emulated engine for flags that are not given; unchanged without the flag.

    The chain model as model, the CPU as device, the profile's KV capacity, and SGLang's values for an 80 GB GPU.

    Raises:
        ConfigError: unknown or invalid profile, or a ``--config`` file that cannot be read.
    """
    name = value_of(arguments, FLAG)
    if name is None:
        return arguments
    profile = load_profile(name)
    wanted = {
        "--device": "cpu",
        "--max-total-tokens": str(profile.kv_capacity_tokens),
        "--max-running-requests": str(MAX_RUNNING_REQUESTS),
        "--chunked-prefill-size": str(CHUNKED_PREFILL_TOKENS),
    }
    if not names_model(arguments):
        wanted["--model-path"] = str(model_path())
    added = [part for flag, value in wanted.items() if value_of(arguments, flag) is None for part in (flag, value)]
    return [*added, *arguments]


def names_model(arguments: Sequence[str]) -> bool:
    """True if the command line, or the file of its ``--config``, names a model. Raises ConfigError for the file."""
    file = value_of(arguments, FILE_FLAG)
    keys = cli.load_yaml(file) if file is not None else {}
    in_file = any(f"--{cli.key_of(key)}" in MODEL_FLAGS for key in keys)
    return in_file or value_of(arguments, *MODEL_FLAGS) is not None


def around_from_cli_args(original: Callable[..., Any], cls: Any, args: argparse.Namespace) -> Any:
    """Within the plugin's own hook, which says what is raised here and ends the start."""
    server_args = original(cls, args)
    check(resolve(server_args), args.config_of_pla)
    return server_args


def check(server_args: Any, config: PlaConfig) -> None:
    """Raises ConfigError for a profile that cannot be loaded, and for an engine that has a real device."""
    if config.emulate is None:
        return
    load_profile(config.emulate)
    if str(server_args.device).split(":")[0] != "cpu":
        raise ConfigError(f"{FLAG} needs --device cpu, got {server_args.device!r}: a GPU needs no emulation")
    for name, flag in (("speculative_algorithm", "--speculative-algorithm"), ("enable_pdmux", "--enable-pdmux")):
        if getattr(server_args, name, None):
            raise ConfigError(f"{FLAG} cannot be combined with {flag}: its passes are not emulated")
