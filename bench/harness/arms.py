"""Arms of a comparison: which server, on which Python, with which flags.

Everything that decides what "stock" and "ours" mean stands in this file.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.bench import BenchError
from bench.harness.report import installed_sglang, say_left_out
from pla_sglang.plugin.start_checks import flags_of_sglang, read_argument_sources

STOCK = "stock"
OURS = "ours"
RIDE = "ride"

# SGLang's SGLANG_PLUGINS names the entry points that may load, of platforms and of plugins alike. A stock server loads
# no entry point of ours except, on a machine without GPU, the CPU platform: official SGLang cannot serve there alone.
# The platform knows nothing of our scheduler. An empty value means "all", so a GPU host names one that is not there.
STOCK_ENV = {"cpu": {"SGLANG_PLUGINS": "pla_cpu"}, "cuda": {"SGLANG_PLUGINS": "none"}}

# What stock has since 0.5.19 to 0.5.23. Whether it is there is asked of the installed one: see ``find_lacking``.
ORDER = "--schedule-policy"
SPF = (ORDER, "shortest-prefill-first")
HRRN = (ORDER, "hrrn")  # highest response ratio next
MIXED = ("--enable-mixed-chunk",)
# Decode steps after each prefill pass while at least so many requests decode: for a TPOT target.
INTERVAL = ("--prefill-decode-interval", "2", "--prefill-decode-interval-min-bs", "8")

# Arms of stock beyond its defaults.
STOCK_PRESETS: dict[str, tuple[str, ...]] = {
    "hrrn": HRRN,
    "spf": SPF,
    "spf-mix": (*SPF, *MIXED),
    "interval": INTERVAL,
    "spf-mix-interval": (*SPF, *MIXED, *INTERVAL),
}
# Of pairs: flags of the prefill instances. ``prefill_complete`` (0.5.22) is none of them: SGLang takes it with Mooncake
# only, and emulated pairs send over NIXL.
PAIR_PRESETS: dict[str, tuple[str, ...]] = {"spf": SPF, "hrrn": HRRN}
# Chunks just above the shorts, where the bench knows them: smaller ones cut the shorts, and with larger ones they wait
# for longer passes of longs.
TUNED = frozenset({"spf", "spf-mix", "spf-mix-interval"})
BEST_STOCK = (STOCK, "hrrn", "spf", "spf-mix")  # without a TPOT target

STOCK_MODULE = "sglang.launch_server"
OUR_MODULE = "pla_sglang.launch_server"
_TEMPORAL = ("--prefill-disagg", "temporal")
OUR_FLAGS = ("--prefill-disagg", "--pla-")  # how they begin

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
ARM_NAMES = (STOCK, *STOCK_PRESETS, *OUR_PRESETS)


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
    """``NAME=PYTHON:FLAGS``, for example ``spf9=/opt/new/bin/python:--schedule-policy shortest-prefill-first``.

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


def has_order(name: str) -> bool:
    """Tells whether the installed SGLang has this ``--schedule-policy``; it is not imported for that."""
    return f'"{name}"' in read_argument_sources()


def find_lacking(flags: Sequence[str]) -> list[str]:
    """Those of ``flags`` that the installed SGLang does not have, an order of prefills with its name. Ours count as
    there: ``--prefill-disagg``, ``--pla-...``.
    """
    known = flags_of_sglang()
    theirs = [flag for flag in flags if flag.startswith("--") and not flag.startswith(OUR_FLAGS)]
    lacking = [flag for flag in theirs if flag not in known]
    orders = [value for flag, value in itertools.pairwise(flags) if flag == ORDER]
    return [*lacking, *(f"{ORDER} {name}" for name in orders if not has_order(name))]


def preset_arguments(preset: str, *, pairs: bool) -> tuple[str, ...]:
    """Of ``launch_cluster``, so that its stock engines are of this preset; a chunk may follow, as in ``spf-mix-1024``.

    ``pairs``: of prefill and decode instances. Raises ArmError for a preset that is not known.
    """
    presets = PAIR_PRESETS if pairs else STOCK_PRESETS
    name, _, chunk = preset.rpartition("-") if preset not in presets else (preset, "", "")
    if name not in presets or not (name == preset or chunk.isdigit()):
        raise ArmError(f"stock {preset!r} is not known; allowed: {', '.join(presets)}, or such as spf-1024")
    flags = (*presets[name], *(("--chunked-prefill-size", chunk) if chunk else ()))
    return ("--prefill-args", shlex.join(flags)) if pairs else flags


def find_lacking_of_preset(preset: str, *, pairs: bool) -> list[str]:
    """``find_lacking`` of the engines that ``preset_arguments`` starts. Raises ArmError."""
    arguments = preset_arguments(preset, pairs=pairs)
    flags = [part for argument in arguments for part in argument.split() if argument != "--prefill-args"]
    return find_lacking(flags)


def startable(names: Sequence[str]) -> list[str]:
    """Without the arms of stock that the installed SGLang cannot be started as, which are said."""
    left_out = {name: lacking for name in names if (lacking := find_lacking(STOCK_PRESETS.get(name, ())))}
    for name, lacking in left_out.items():
        say_left_out(name, lacking)
    return [name for name in names if name not in left_out]


def build_arms(
    names: Sequence[str],
    peers: Sequence[str],
    *,
    device: str,
    our_flags: Sequence[str] = (),
    ablation: bool = False,
    tuned_chunk_tokens: int | None = None,
) -> list[Arm]:
    """The arms by name, the ablation presets if asked for, then the peers. Stock is always first.

    ``tuned_chunk_tokens``: chunk of the arms in ``TUNED``; None: that of all. Raises ArmError: an arm is unknown,
    appears twice or cannot be started on the installed SGLang, or a peer cannot be parsed.
    """
    wanted = list(names) + [name for name in ABLATION if ablation and name not in names]
    if ablation and OURS in wanted and "full" in wanted:
        wanted.remove("full")  # the same server under another name
    arms = []
    for name in sorted(wanted, key=lambda name: name != STOCK):
        if name == STOCK:
            arms.append(Arm(STOCK, module=STOCK_MODULE, env=STOCK_ENV[device]))
        elif name in STOCK_PRESETS:
            if lacking := find_lacking(STOCK_PRESETS[name]):
                raise ArmError(f"arm {name!r}: SGLang {installed_sglang()} has no {', '.join(lacking)}; give a --peer")
            tuned = tuned_chunk_tokens is not None and name in TUNED
            chunk = ("--chunked-prefill-size", str(tuned_chunk_tokens)) if tuned else ()
            arms.append(Arm(name, (*STOCK_PRESETS[name], *chunk), STOCK_MODULE, env=STOCK_ENV[device]))
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
    entry_points = "[sglang.srt.platforms]\npla_cpu = pla_sglang.plugin.platform:activate\n"
    if plugin:
        entry_points += "[sglang.srt.plugins]\npla_sglang = pla_sglang.plugin.entry:register\n"
    (record / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    for name in ("pla_sglang", "pla_kernels", *(["pla_patches"] if plugin else [])):
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ArmError(f"{name} is not installed here, so the peer cannot be given our CPU platform")
        (folder / name).symlink_to(Path(spec.submodule_search_locations[0]).absolute())
    return {"PYTHONPATH": str(folder)}
