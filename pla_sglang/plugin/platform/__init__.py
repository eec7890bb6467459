"""CPU platform for stock SGLang: decides whether this process runs on it.

``activate`` is the entry point of SGLang's plugin group ``sglang.srt.platforms``. It is called in every process that
touches ``sglang.srt.platforms.current_platform``, so the first process makes the decision once and passes it to
every process that it starts, through the environment.

This module imports the standard library only; the platform class itself is loaded by SGLang, and only when chosen.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.metadata import entry_points

from pla_sglang.common.errors import ConfigError

PLATFORM_CLASS = "pla_sglang.plugin.platform.cpu.CpuPlatform"
PLATFORM_NAME = "pla_cpu"  # name of our entry point, as SGLANG_PLATFORM spells it
PLATFORM_ENV = "SGLANG_PLA_PLATFORM"
MODELS_PACKAGE = "pla_sglang.sim.chain.models"
PLATFORM_CHOICES = ("auto", "cpu", "off")

# Packages that bring a torch device of their own. Looking for the package is cheap; importing it may not be.
_ACCELERATOR_PACKAGES = ("torch_npu", "habana_frameworks", "torchada", "torch_musa")


def activate() -> str | None:
    """The class SGLang shall load as its platform, or None to leave the choice to SGLang.

    Raises:
        ConfigError: SGLANG_PLA_PLATFORM holds a value that is not allowed.
    """
    if not is_wanted(sys.argv, os.environ):
        return None
    publish(os.environ)
    return PLATFORM_CLASS


def is_wanted(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """True if the CPU platform shall run in a process with this command line and environment.

    In this order: an explicit value in the environment; SGLang's own CPU engine, which has precedence because its users
    give ``--device cpu`` too; the device on the command line; whether the machine has an accelerator.
    """
    choice = environ.get(PLATFORM_ENV, "auto")
    if choice not in PLATFORM_CHOICES:
        raise ConfigError(f"{PLATFORM_ENV} {choice!r} is not known; allowed: {', '.join(PLATFORM_CHOICES)}")
    if choice == "off":
        return False
    if choice == "cpu" or environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        return True
    if environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return False
    device = value_of(argv, "--device")
    if device is not None:
        return device.split(":")[0] == "cpu"
    return not _other_platform_installed() and not accelerator_found()


def value_of(arguments: Sequence[str], *flags: str) -> str | None:
    """Value of the last ``flag X`` or ``flag=X`` of any of ``flags``, as argparse would take it."""
    value = None
    for position, argument in enumerate(arguments):
        name, equals, text = argument.partition("=")
        if name in flags and equals:
            value = text
        elif name in flags and position + 1 < len(arguments):
            value = arguments[position + 1]
    return value


def accelerator_found() -> bool:
    """True if torch, or a package that extends it, offers a device other than the CPU."""
    if any(importlib.util.find_spec(name) is not None for name in _ACCELERATOR_PACKAGES):
        return True
    import torch  # SGLang has imported it long before it asks for a platform

    return torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available()


def _other_platform_installed() -> bool:
    # Two platforms that both activate make SGLang refuse to start, so without an explicit wish we yield.
    return any(entry.name != PLATFORM_NAME for entry in entry_points(group="sglang.srt.platforms"))


def publish(environ: MutableMapping[str, str]) -> None:
    """Set the decision for every process that this one will start, and variables that torch reads on import.

    GPUs are hidden: some parts of SGLang ask the platform for the device, others ask torch for CUDA.
    TorchDynamo is off unless the user enables it: SGLang decorates small functions with ``torch.compile``, and
    compiling them for a CPU takes minutes at their first use. SGLang gets the package of our model classes.
    """
    environ[PLATFORM_ENV] = "cpu"
    environ["CUDA_VISIBLE_DEVICES"] = environ["HIP_VISIBLE_DEVICES"] = ""
    environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODELS_PACKAGE)


def is_active() -> bool:
    """True if the platform of this process is ours. Makes the choice if it is not made yet."""
    from sglang.srt.platforms import current_platform

    platform = type(current_platform)
    return f"{platform.__module__}.{platform.__qualname__}" == PLATFORM_CLASS
