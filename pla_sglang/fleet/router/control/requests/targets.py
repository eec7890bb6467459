"""The targets of a request, and where each came from.

The body counts before the headers, as at an instance (``custom_params.slo_ttft_ms`` and ``slo_tpot_ms``), and both
before the router's own default. The body is known here only to policies that look at prompts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from pla_sglang.common.checks import SLO_RANGE_MS

TTFT_MEMBER, TPOT_MEMBER = "slo_ttft_ms", "slo_tpot_ms"


class Target(NamedTuple):
    """``source``: header, body or default."""

    slo_s: float
    source: str


def find_target(body: bytes | None, member: str, header_ms: float | None, default_s: float) -> Target:
    """``member``: of the body; ``header_ms``: as the header says."""
    if body is not None and b'"%s"' % member.encode() in body:
        asked_ms = _target_of_body(body, member)
        if asked_ms is not None:
            return Target(asked_ms / 1000, "body")
    return Target(default_s, "default") if header_ms is None else Target(header_ms / 1000, "header")


def _target_of_body(body: bytes, member: str) -> float | None:
    """None: there is none, or one that an instance refuses."""
    try:
        members = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(members, dict):
        return None
    sampling = members.get("sampling_params")
    for holder in (members, sampling if isinstance(sampling, dict) else {}):
        params: Any = holder.get("custom_params")
        asked = params.get(member) if isinstance(params, dict) else None
        if isinstance(asked, (int, float)) and not isinstance(asked, bool):
            low_ms, high_ms = SLO_RANGE_MS
            return float(asked) if low_ms <= asked <= high_ms else None
    return None
