"""Arms of a comparison: which server, on which Python, with which flags.

Everything that decides what "stock" and "ours" mean stands in this file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.bench import BenchError

STOCK = "stock"
OURS = "ours"
RIDE = "ride"

# SGLang's SGLANG_PLUGINS names the entry points that may load, of platforms and of plugins alike. A stock server loads
# no entry point of ours except, on a machine without GPU, the CPU platform: official SGLang cannot serve there alone.
# The platform knows nothing of our scheduler. An empty value means "all", so a GPU host names one that is not there.
STOCK_ENV = {"cpu": {"SGLANG_PLUGINS": "pla_cpu"}, "cuda": {"SGLANG_PLUGINS": "none"}}

# Flags of SGLang 0.5.23's own length-aware orders, for peers.
SPF = ("--schedule-policy", "shortest-prefill-first")
HRRN = ("--schedule-policy", "hrrn")  # highest response ratio next

STOCK_MODULE = "sglang.launch_server"
OUR_MODULE = "pla_sglang.launch_server"
_TEMPORAL = ("--prefill-disagg", "temporal")

# Our arms beyond the default one, so that one sees which part brings what.
OUR_PRESETS: dict[str, tuple[str, ...]] = {
    OURS: _TEMPORAL,  # all parts, default knobs
    "full": _TEMPORAL,
    RIDE: (*_TEMPORAL, "--enable-mixed-chunk"),  # running decodes join prefill passes
    "off": ("--prefill-disagg", "off"),  # our launcher and plugin, switched off
    # shorts pass between chunks and may share a long's pass
    "interleave-mix": (*_TEMPORAL, "--pla-mixing", "allow", "--pla-wait-max-ms", "0"),
    "no-window": (*_TEMPORAL, "--pla-wait-max-ms", "0"),  # never mixed, never waits for a fuller batch
    "fcfs-long": (*_TEMPORAL, "--pla-long-order", "fcfs"),  # longs first come, first served
}
ABLATION = ("interleave-mix", "no-window", "full", "fcfs-long")
ARM_NAMES = (STOCK, *OUR_PRESETS)


class ArmError(BenchError):
    """An arm that cannot be built. The message says which, and what is allowed."""


@dataclass(frozen=True)
class Arm:
    """One server of a comparison; ``peer``: in another environment, which does not have our package installed."""

    name: str
    flags: tuple[str, ...] = ()
    module: str = OUR_MODULE
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    peer: bool = False


def parse_peer(text: str, device: str) -> Arm:
    """``NAME=PYTHON:FLAGS``, for example ``spf=/opt/v23/bin/python:--schedule-policy shortest-prefill-first``.

    Raises ArmError: the text does not have this form, or there is no such Python.
    """
    name, equals, rest = text.partition("=")
    python, _, flags = rest.partition(":")
    if not equals or not name or not python:
        raise ArmError(f"--peer {text!r} is not of the form NAME=PYTHON:FLAGS")
    if name in ARM_NAMES:
        raise ArmError(f"--peer {name!r}: this name is taken; taken are {', '.join(ARM_NAMES)}")
    if not os.access(python, os.X_OK):
        raise ArmError(f"--peer {name}: {python!r} is not an executable file")
    elsewhere = Path(python).absolute() != Path(sys.executable).absolute()
    return Arm(name, tuple(shlex.split(flags)), STOCK_MODULE, python, STOCK_ENV[device], elsewhere)


def build_arms(
    names: Sequence[str], peers: Sequence[str], *, device: str, our_flags: Sequence[str] = (), ablation: bool = False
) -> list[Arm]:
    """The arms by name, the ablation presets if asked for, then the peers. Stock is always first.

    Raises ArmError: an arm is unknown or appears twice, or a peer cannot be parsed.
    """
    wanted = list(names) + [name for name in ABLATION if ablation and name not in names]
    if ablation and OURS in wanted and "full" in wanted:
        wanted.remove("full")  # the same server under another name
    arms = []
    for name in sorted(wanted, key=lambda name: name != STOCK):
        if name == STOCK:
            arms.append(Arm(STOCK, module=STOCK_MODULE, env=STOCK_ENV[device]))
        elif name in OUR_PRESETS:
            extra = () if name == "off" else tuple(our_flags)
            arms.append(Arm(name, (*OUR_PRESETS[name], *extra), module=OUR_MODULE))
        else:
            raise ArmError(f"arm {name!r} is not known; allowed: {', '.join(ARM_NAMES)}, or --peer")
    arms += [parse_peer(text, device) for text in peers]
    twice = sorted(name for name, count in Counter(arm.name for arm in arms).items() if count > 1)
    if twice:
        raise ArmError(f"arm given twice: {', '.join(twice)}")
    return arms


def shared_flags(
    *, model_path: Path, device: str, chunk_tokens: int, kv_tokens: int | None, extra: Sequence[str] = ()
) -> list[str]:
    """What every arm gets. On the CPU the best flags for stock too; ``extra`` comes last and wins."""
    flags = ["--model-path", str(model_path), "--device", device, "--chunked-prefill-size", str(chunk_tokens)]
    flags += ["--random-seed", "0", "--log-level-http", "warning"]
    if device == "cpu":
        # A CPU forward is synchronous, so overlapping only delays a first token. Best for stock too: its p99 of shorts
        # is 4 % lower than with the overlap schedule, its longs are 5 % faster (bench hol, 5 rounds, two cores).
        flags += ["--attention-backend", "torch_native", "--disable-cuda-graph", "--disable-overlap-schedule"]
        # The type of the weights, which older configs call torch_dtype. "auto" means float32 to one SGLang and float16
        # to the next, which a CPU computes three times slower.
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        flags += ["--dtype", str(config.get("dtype") or config.get("torch_dtype") or "auto")]
    if kv_tokens is not None:
        flags += ["--max-total-tokens", str(kv_tokens)]
    return [*flags, *extra]


def memory_flags(device: str, position: int, arms: int) -> list[str]:
    """On a GPU each server may take an equal share of what the earlier ones left; they start one after the other."""
    if device == "cpu" or arms == 1:
        return []
    return ["--mem-fraction-static", f"{0.88 / (arms - position):.3f}"]


def platform_overlay(folder: Path, *, plugin: bool = False) -> dict[str, str]:
    """Give another environment our CPU platform, and nothing else of ours, without installing anything there.

    Links the packages into ``folder`` beside a distribution record that names only the platform's entry point, and
    with ``plugin`` our plugin's too, for a peer whose device is emulated (its scheduling stays its own).
    Returns the environment variables to start such a server with.

    Raises ArmError: our packages are not installed in this environment.
    """
    record = folder / "pla_sglang-0.1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: pla-sglang\nVersion: 0.1.0\n", encoding="utf-8")
    entry_points = "[sglang.srt.platforms]\npla_cpu = pla_sglang.platform:activate\n"
    if plugin:
        entry_points += "[sglang.srt.plugins]\npla_sglang = pla_sglang.plugin:register\n"
    (record / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    for name in ("pla_sglang", "pla_kernels", *(["pla_patches"] if plugin else [])):
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ArmError(f"{name} is not installed here, so the peer cannot be given our CPU platform")
        (folder / name).symlink_to(Path(spec.submodule_search_locations[0]).absolute())
    return {"PYTHONPATH": str(folder)}
