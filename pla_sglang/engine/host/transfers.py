"""KV managers: what they keep of a room that no transfer reads or writes for, beside what all versions keep; and the
metadata that goes with KV."""

from __future__ import annotations

import inspect
from typing import Any

from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.environ import envs

from pla_sglang.engine.host.arguments import resolve

_MASK = inspect.signature(MetadataBuffers).parameters["max_sampling_mask_tokens"]


def metadata_options(scheduler: Any) -> dict[str, Any]:
    """What metadata buffers must be told and have no default for."""
    if _MASK.default is not inspect.Parameter.empty:
        return {}
    return {_MASK.name: resolve(scheduler.server_args).sampling_mask_max_tokens}


if hasattr(envs, "SGLANG_ENABLE_DISAGG_SAMPLING_MASK"):
    MASK_SETTING = "SGLANG_ENABLE_DISAGG_SAMPLING_MASK=1 and --sampling-mask-max-tokens"

    def most_mask_tokens(server_args: Any) -> int:
        """Tokens of a sampling mask that metadata have room for; 0: they have none for masks."""
        enabled = envs.SGLANG_ENABLE_DISAGG_SAMPLING_MASK.get()
        return int(resolve(server_args).sampling_mask_max_tokens) if enabled else 0

else:
    MASK_SETTING = "SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS"

    def most_mask_tokens(server_args: Any) -> int:
        return int(envs.SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS.get())


def wants_kv(info: Any) -> bool:
    """Whether a receiver that has said where it listens takes KV itself; else another rank of its does."""
    dummy = info.is_dummy
    return not (dummy() if callable(dummy) else dummy)


def forget_sent(manager: Any, room: int) -> None:
    """Of a sender."""
    getattr(manager, "exceptions", {}).pop(room, None)


def forget_received(manager: Any, room: int) -> None:
    """Of a receiver."""
    getattr(manager, "transfer_statuses", {}).pop(room, None)
    if hasattr(manager, "clear_deferred_abort_state"):  # what the receiver's abort has armed
        manager.clear_deferred_abort_state(room)


def acknowledges(manager: Any, message: list[bytes]) -> bool:
    """Whether the host of the sender ``manager`` itself answers this abort of a receiver, once nothing writes to it.

    It does where the receiver waits for that: such a one counts its aborts of a room, in a fifth frame.
    """
    return len(message) > 4 and getattr(manager, "enable_deferred_decode_kv_release", False)


def is_acknowledged(receiver: Any) -> bool:
    """Whether the hosts of all senders to ``receiver`` have answered its abort so."""
    manager: Any = getattr(receiver, "kv_mgr", None)
    if not getattr(manager, "enable_deferred_decode_kv_release", False):
        return False
    senders = getattr(receiver, "required_prefill_response_num", 1)
    return bool(manager.is_abort_release_safe(receiver.bootstrap_room, senders))
