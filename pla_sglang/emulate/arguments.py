"""What ``--pla-emulate`` means for the rest of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pla_sglang.chain import model_path
from pla_sglang.config import PlaConfig
from pla_sglang.errors import ConfigError
from pla_sglang.profiles import load_profile

FLAG = "--pla-emulate"
MODEL_FLAGS = ("--model-path", "--model", "--config")
MAX_RUNNING_REQUESTS = 512
CHUNKED_PREFILL_TOKENS = 8192  # SGLang's own choice on an 80 GB GPU


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """Value of the last ``flag X`` or ``flag=X``."""
    found = None
    for position, argument in enumerate(arguments):
        if argument == flag and position + 1 < len(arguments):
            found = arguments[position + 1]
        elif argument.startswith(flag + "="):
            found = argument.partition("=")[2]
    return found


def with_emulation(arguments: list[str]) -> list[str]:
    """``arguments``, with what an emulated engine needs where the user left it open; unchanged without the flag.

    The chain model as model, the CPU as device, the profile's KV capacity, and SGLang's values for an 80 GB GPU.

    Raises:
        ProfileError: unknown or broken profile.
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
    if all(value_of(arguments, flag) is None for flag in MODEL_FLAGS):
        wanted["--model-path"] = str(model_path())
    added = [part for flag, value in wanted.items() if value_of(arguments, flag) is None for part in (flag, value)]
    return [*added, *arguments]


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
