"""What an instance reports of itself: ``/server_info`` describes it, ``/v1/loads`` has its load if it pushes none.

Pure: JSON objects in, checked values out. Field names are those of SGLang 0.5.17.
"""

from __future__ import annotations

import dataclasses
import hashlib
import urllib.parse
from collections.abc import Mapping
from typing import Any

import msgspec

from pla_sglang.common.checks import read_host
from pla_sglang.common.errors import ConfigError
from pla_sglang.common.secret_names import hide_in_text
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.load.instance_load import InstanceLoad
from pla_sglang.load.legs import LegLoad
from pla_sglang.load.step_times import FittedModels
from pla_sglang.plugin.config import DOPD
from pla_sglang.policy.interface.fleet import InstanceKind, LoadAmounts
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.recording.rows import RecordedEngine

KINDS = {"null": InstanceKind.UNIFIED, "prefill": InstanceKind.PREFILL, "decode": InstanceKind.DECODE}
HANDS_OVER = frozenset({InstanceKind.PREFILL, InstanceKind.STATELESS})
SMALL_FIRST = frozenset({"temporal", "spatial"})  # of ``--prefill-disagg``
CLASSES = {"short": PrefillClass.SHORT, "long": PrefillClass.LONG, "mixed": None}
SCHEMES = ("http", "https")
ALLOWED = "allowed: http://HOST:PORT or https://HOST:PORT"
MOST_PORT = 65_535
MOST_RANKS = 64  # of which loads are read as they are published, a connection each


@dataclasses.dataclass(frozen=True)
class Address:
    """Where an instance listens."""

    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def parse_url(url: str) -> Address:
    """Raises WorkerError unless ``url`` is http or https, with a host, a port, and nothing behind them."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise WorkerError(f"worker {url!r}: {error}; {ALLOWED}") from None
    if parts.scheme not in SCHEMES or not host or port is None or not 1 <= port <= MOST_PORT:
        raise WorkerError(f"worker {url!r} is no address; {ALLOWED}")
    host = check_host(url, host)
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise WorkerError(f"worker {url!r} has more than host and port; {ALLOWED}")
    return Address(host, port, tls=parts.scheme == "https")


def check_host(url: str, host: str) -> str:
    """``host`` of ``url`` in its usual form. Raises WorkerError for what names no machine, or names one in disguise."""
    try:
        return read_host(host)
    except ConfigError as error:
        raise WorkerError(f"worker {url!r}: {error}; {ALLOWED}") from None


@dataclasses.dataclass(frozen=True)
class Description:
    """One instance, as it describes itself.

    Attributes:
        identity: another value means another process.
        report_key: its name in its load reports.
        bootstrap_port: where others ask it for the KV cache that it has computed; None: it hands none over.
        incarnation: of a stateless instance, another one for each process.
        transfer_protocol, kv_layout: of a stateless instance, what others must have in common with it that KV cache is
            to go to or come from; empty: it does not say.
        length_class: of the requests it asks for; None: both classes.
        has_role: whether it knows ``/pla/role``.
        profile, time_scale: of an emulated device; empty and 1 on real ones.
        tokenizer: path or name.
        chunk_tokens: of its prompts in one pass at most; None: it does not cut them.
        chunk_max_tokens: as in ``InstanceView``.
        riding_tokens, small_first: as in ``Setup``.
        hops: a stateless instance whose streams can carry their token ids, and that goes on with those of others.
        says_ending: it has ``/pla/ending``.
        batches: whether it gathers prompts by DOPD's Algorithm 1, whose knobs can be told.
        legs: of a stateless instance, at the time of the answer.
        fits: its step times, then; None: it does not say.
        generates: False: its model embeds, scores or classifies; None: it does not say.
        most_input_tokens: a prompt must be shorter; None: it does not say, or cuts longer ones.
        adapters: names of the LoRA adapters that it began with; None: it serves none.
        load_ports: at which its ranks publish their load, as stock SGLang can; empty: they do not.
        engine: how it was started, for recordings.
    """

    kind: InstanceKind
    identity: str
    report_key: str
    kv_capacity_tokens: int
    page_size: int
    tensor_parallel: int
    model: str
    tokenizer: str
    version: str
    bootstrap_port: int | None = None
    incarnation: str = ""
    transfer_protocol: str = ""
    kv_layout: str = ""
    length_class: PrefillClass | None = None
    has_role: bool = False
    profile: str = ""
    time_scale: float = 1.0
    chunk_tokens: int | None = None
    chunk_max_tokens: int | None = None
    riding_tokens: int | None = None
    small_first: bool = False
    hops: bool = False
    says_ending: bool = False
    batches: bool = False
    legs: LegLoad | None = None
    fits: FittedModels | None = None
    generates: bool | None = None
    most_input_tokens: int | None = None
    adapters: frozenset[str] | None = frozenset()
    load_ports: range = range(0)
    engine: RecordedEngine | None = None


def describe(info: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> Description:
    """From ``/server_info``, and ``/model_info`` where that is known.

    Raises WorkerError for an answer that lacks what the router needs.
    """
    try:
        mode = info["disaggregation_mode"]
        states = info.get("internal_states") or [{}]
        pla, emulation = states[0].get("pla") or {}, states[0].get("pla_emulation") or {}
        config, reports, stateless = (pla.get(name) or {} for name in ("config", "telemetry", "stateless"))
        kind, incarnation = _kind(mode, stateless)
        role = pla.get("role", config.get("role"))
        role = role.get("role") if isinstance(role, Mapping) else role
        return Description(
            kind=kind,
            identity=_identity(info, incarnation),
            report_key=reports.get("instance") or config.get("instance") or f"{info['host']}:{info['port']}",
            kv_capacity_tokens=int(info["max_total_num_tokens"]),
            page_size=int(info.get("page_size") or 1),
            tensor_parallel=int(info.get("tp_size") or 1),
            model=hide_in_text(str(info.get("served_model_name") or info.get("model_path") or "")),
            tokenizer=str(info.get("tokenizer_path") or info.get("model_path") or ""),
            version=str(info.get("version") or ""),
            bootstrap_port=_bootstrap_port(info, stateless) if kind in HANDS_OVER else None,
            incarnation=incarnation,
            transfer_protocol=str(stateless.get("transfer_protocol") or ""),
            kv_layout=str(stateless.get("kv_layout") or ""),
            length_class=CLASSES.get(str(role)),
            has_role=role is not None,
            profile=str(emulation.get("profile") or ""),
            time_scale=float(emulation.get("time_scale") or 1.0),
            hops=bool(stateless.get("hops")),
            chunk_tokens=_chunk_tokens(info),
            chunk_max_tokens=_chunk_max_tokens(info, config),
            riding_tokens=_riding_tokens(info, temporal=config.get("prefill_disagg") in ("temporal", DOPD)),
            small_first=config.get("prefill_disagg") in SMALL_FIRST,
            says_ending=bool(stateless) or bool(config),
            batches=config.get("prefill_disagg") == DOPD,
            legs=LegLoad.of_state(stateless) if "faults" in stateless else None,
            fits=FittedModels.of_state((pla.get("step_model_fits") or {}).get("told")),
            generates=_generates(info, model or {}),
            most_input_tokens=None if info.get("allow_auto_truncate") else _positive(info.get("max_req_input_len")),
            adapters=_adapters(info),
            load_ports=_load_ports(info),
            engine=_engine(info, config),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, msgspec.ValidationError) as error:
        # Its text may quote the instance's answer, which has secrets; that of a KeyError is the name that is missing.
        what = hide_in_text(repr(error)) if isinstance(error, KeyError) else type(error).__name__
        raise WorkerError(f"/server_info is not as expected: {what}", status=502) from None


def _engine(info: Mapping[str, Any], config: Mapping[str, Any]) -> RecordedEngine:
    return RecordedEngine(
        order="temporal" if config.get("prefill_disagg") == "temporal" else str(info.get("schedule_policy") or "fcfs"),
        chunk_tokens=_chunk_tokens(info),
        mixed=bool(info.get("enable_mixed_chunk")),
        slots=_positive(info.get("max_running_requests")),
        decode_interval=_positive(info.get("prefill_decode_interval")) or 0,
        deadlines=str(config.get("deadlines") or "advise"),
    )


def _chunk_tokens(info: Mapping[str, Any]) -> int | None:
    tokens = int(info.get("chunked_prefill_size") or 0)
    return tokens if tokens > 0 else None


def _chunk_max_tokens(info: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """What cuts no prompts has them whole in a pass, as long as they fit."""
    if info.get("chunked_prefill_size") is None:
        return None
    limits = _chunk_tokens(info), _positive(config.get("long_chunk_tokens"))
    return min([tokens for tokens in limits if tokens], default=int(info["max_total_num_tokens"]))


def _generates(info: Mapping[str, Any], model: Mapping[str, Any]) -> bool | None:
    """``is_embedding`` is a flag; a model may be one of embeddings without it, which only ``/model_info`` says."""
    if info.get("is_embedding") is True:
        return False
    said = model.get("is_generation")
    return said if isinstance(said, bool) else None


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _adapters(info: Mapping[str, Any]) -> frozenset[str] | None:
    """None: it serves none. Others may have been loaded since, so that a name which is not here is no reason to refuse.

    SGLang keeps ``enable_lora`` unset where it is off, and loads no ``lora_paths`` where it is False.
    """
    if "enable_lora" in info and not info["enable_lora"]:
        return None
    paths = info.get("lora_paths") or ()
    names = (path.get("lora_name") for path in paths if isinstance(path, Mapping)) if isinstance(paths, list) else paths
    return frozenset(str(name) for name in names if name)


def _load_ports(info: Mapping[str, Any]) -> range:
    """SGLang describes them beside its KV events. Those that cannot be are none: loads are polled then."""
    said = info.get("kv_events")
    said = said if isinstance(said, Mapping) else {}
    first, ranks = _positive(said.get("load_endpoint_port_base")), _positive(said.get("dp_size"))
    if first is None or ranks is None or ranks > MOST_RANKS or first + ranks > MOST_PORT + 1:
        return range(0)
    return range(first, first + ranks)


def _riding_tokens(info: Mapping[str, Any], *, temporal: bool) -> int | None:
    """Stock engines mix whole chunks with decodes; temporal ones cut the passes for the next token."""
    chunk_tokens = _chunk_tokens(info)
    if not info.get("enable_mixed_chunk") or chunk_tokens is None:
        return None
    return 1 if temporal else chunk_tokens


def _kind(mode: str, stateless: Mapping[str, Any]) -> tuple[InstanceKind, str]:
    """With the incarnation of a stateless instance, whose host runs in the mode of a unified one."""
    if mode == "null" and stateless:
        return InstanceKind.STATELESS, str(stateless["incarnation"])
    return KINDS[mode], ""


def _bootstrap_port(info: Mapping[str, Any], stateless: Mapping[str, Any]) -> int:
    return int(stateless["bootstrap_port"] if stateless else info["disaggregation_bootstrap_port"])


def _identity(info: Mapping[str, Any], incarnation: str) -> str:
    """Durations of the start-up phases to the nanosecond, and the seed: no two processes share them."""
    text = repr((info.get("startup_time"), info.get("random_seed"), info["host"], info["port"], incarnation))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def polled_load(response: Mapping[str, Any], kind: InstanceKind) -> InstanceLoad:
    """The load from ``/v1/loads?include=core``, summed over ranks.

    The answer has sums of tokens only. Waiting requests are assumed to be of equal length, which gives the least
    attention that they can cost. Raises WorkerError for an answer of another shape.
    """
    try:
        ranks = [{name: int(rank.get(name) or 0) for name in _CORE} for rank in response["loads"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WorkerError(f"/v1/loads is not as expected: {error!r}", status=502) from None
    total = {name: sum(rank[name] for rank in ranks) for name in _CORE}
    waiting, running = total["num_waiting_reqs"], total["num_running_reqs"]
    amounts = LoadAmounts()
    if kind is InstanceKind.DECODE:
        amounts.waiting_decodes = waiting
        amounts.waiting_decode_tokens = max(0, total["num_total_tokens"] - total["num_active_tokens"])
    else:
        tokens = total["num_waiting_uncached_tokens"]
        amounts.queued_tokens = tokens
        amounts.queued_prefills = max(waiting, 1 if tokens else 0)  # a chunk under way waits in no queue
        if tokens:
            amounts.queued_attention = round(tokens * tokens / amounts.queued_prefills)
    amounts.running = running
    amounts.context_tokens = total["num_used_tokens"] if running else 0  # without requests it is cache
    return InstanceLoad(
        amounts=amounts,
        kv_used_tokens=amounts.context_tokens,
        kv_capacity_tokens=total["max_total_num_tokens"] or None,
    )


_CORE = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_waiting_uncached_tokens",
    "num_used_tokens",
    "num_total_tokens",
    "num_active_tokens",
    "max_total_num_tokens",
)
