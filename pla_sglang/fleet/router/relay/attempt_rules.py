"""Which requests get another attempt, and what the next question to the control plane says. Pure."""

from __future__ import annotations

import msgspec

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.wire.messages import Ask, RetryReason


def may_leave_full(ask: Ask, config: RelayConfig) -> bool:
    """True if another instance may be asked if the present one refuses the request for load. A batch may run on in
    part, so it is not sent again."""
    return ask.prompts == 1 and ask.samples == 1 and len(ask.refused_by) + 1 < config.full_attempts


def may_repeat_transfer(ask: Ask, config: RelayConfig) -> bool:
    """True if another attempt may follow if the present one's KV transfer fails."""
    return ask.reached - len(ask.refused_by) + 1 < config.transfer_attempts


def next_ask(
    ask: Ask,
    reason: RetryReason,
    detail: str,
    *,
    body: bytes | None,
    excluded: tuple[int, ...] = (),
    refused_by: tuple[int, ...] = (),
) -> Ask:
    """The question about the next attempt; ``excluded`` and ``refused_by`` come on top of those that ``ask`` names."""
    return msgspec.structs.replace(
        ask,
        attempt=ask.attempt + 1,
        excluded=ask.excluded + excluded,
        refused_by=ask.refused_by + refused_by,
        body=body,
        retry_reason=reason,
        detail=detail,
        reached=ask.reached + (reason is not RetryReason.NOT_SENT),
    )
