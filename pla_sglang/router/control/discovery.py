"""What an instance says about itself: ``/server_info`` for what it is, ``/v1/loads`` for its load where nothing pushes.

Pure: JSON objects in, checked values out. Field names are those of SGLang 0.5.17.
"""

from __future__ import annotations

import dataclasses
import hashlib
import urllib.parse
from collections.abc import Mapping
from typing import Any

from pla_sglang.policy.fleet import InstanceKind
from pla_sglang.policy.types import PrefillClass
from pla_sglang.router.control.errors import WorkerError
from pla_sglang.router.control.loads import Amounts, Report

KINDS = {"null": InstanceKind.UNIFIED, "prefill": InstanceKind.PREFILL, "decode": InstanceKind.DECODE}
CLASSES = {"short": PrefillClass.SHORT, "long": PrefillClass.LONG, "mixed": None}
SCHEMES = ("http",)


@dataclasses.dataclass(frozen=True)
class Address:
    """Where an instance listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def parse_url(url: str) -> Address:
    """Raises WorkerError unless ``url`` is http, with a host, a port, and nothing behind them."""
    allowed = "allowed: http://HOST:PORT"
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise WorkerError(f"worker {url!r}: {error}; {allowed}") from None
    if parts.scheme not in SCHEMES or not host or port is None or not 1 <= port <= 65_535:
        raise WorkerError(f"worker {url!r} is no address; {allowed}")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise WorkerError(f"worker {url!r} has more than host and port; {allowed}")
    return Address(host, port)


@dataclasses.dataclass(frozen=True)
class Description:
    """One instance by its own account.

    Attributes:
        identity: another value means another process.
        report_key: how it signs its load reports.
        length_class: pool that it says it belongs to; None: both classes.
        has_role: whether it knows ``/pla/role``.
        profile, time_scale: of an emulated device; empty and 1 on real ones.
        tokenizer: path or name.
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
    length_class: PrefillClass | None = None
    has_role: bool = False
    profile: str = ""
    time_scale: float = 1.0


def describe(info: Mapping[str, Any]) -> Description:
    """From ``/server_info``. Raises WorkerError where it is not that of an SGLang server as this router knows it."""
    try:
        mode = info["disaggregation_mode"]
        states = info.get("internal_states") or [{}]
        pla, emulation = states[0].get("pla") or {}, states[0].get("pla_emulation") or {}
        config, reports = pla.get("config") or {}, pla.get("telemetry") or {}
        role = pla.get("role", config.get("role"))
        role = role.get("role") if isinstance(role, Mapping) else role
        return Description(
            kind=KINDS[mode],
            identity=_identity(info),
            report_key=reports.get("instance") or config.get("instance") or f"{info['host']}:{info['port']}",
            kv_capacity_tokens=int(info["max_total_num_tokens"]),
            page_size=int(info.get("page_size") or 1),
            tensor_parallel=int(info.get("tp_size") or 1),
            model=str(info.get("served_model_name") or info.get("model_path") or ""),
            tokenizer=str(info.get("tokenizer_path") or info.get("model_path") or ""),
            version=str(info.get("version") or ""),
            bootstrap_port=int(info["disaggregation_bootstrap_port"]) if mode == "prefill" else None,
            length_class=CLASSES.get(str(role)),
            has_role=role is not None,
            profile=str(emulation.get("profile") or ""),
            time_scale=float(emulation.get("time_scale") or 1.0),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise WorkerError(f"/server_info is not as expected: {error!r}", status=502) from None


def _identity(info: Mapping[str, Any]) -> str:
    """Durations of the start-up phases to the nanosecond, and the seed: no two processes share them."""
    text = repr((info.get("startup_time"), info.get("random_seed"), info["host"], info["port"]))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def polled_report(answer: Mapping[str, Any], kind: InstanceKind) -> Report:
    """A report from ``/v1/loads?include=core``, summed over ranks.

    It knows sums of tokens, but not how they spread over requests. The waiting ones are taken to be of equal length,
    which is the least attention that they can cost. Raises WorkerError for an answer of another shape.
    """
    try:
        ranks = [{name: int(rank.get(name) or 0) for name in _CORE} for rank in answer["loads"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WorkerError(f"/v1/loads is not as expected: {error!r}", status=502) from None
    total = {name: sum(rank[name] for rank in ranks) for name in _CORE}
    waiting, running = total["num_waiting_reqs"], total["num_running_reqs"]
    amounts = Amounts()
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
    return Report(
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
