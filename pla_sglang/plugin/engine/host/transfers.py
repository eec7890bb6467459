"""KV managers: what they keep of a room that no transfer reads or writes for, beside what all versions keep; the
metadata that goes with KV; and what both ends of a transfer must have in common."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.environ import envs

from pla_sglang.plugin.engine.host.arguments import resolve

_MASK = inspect.signature(MetadataBuffers).parameters["max_sampling_mask_tokens"]


@functools.cache
def name_protocol() -> str:
    """How both ends of a transfer speak to each other here; peers of another name are never pulled from.

    In it are what a bootstrap server answers, what a receiver says of itself and of a room, and how it hears that its
    KV is there: by a message of the sender, or by the transfer library. Who waits for the other word waits in vain.
    """
    from sglang.srt.disaggregation.nixl import conn

    says_status = getattr(conn.NixlKVManager, "kv_status_msg_tag", None) is not None
    said = [_bootstrap_fields(), *(_wire_fields(kind) for kind in (conn.KVArgsRegisterInfo, conn.TransferInfo))]
    digest = hashlib.blake2b(repr(said).encode(), digest_size=4).hexdigest()
    return f"nixl-{'status' if says_status else 'notification'}-{digest}"


def is_bootstrap_answer(answer: Mapping[str, Any]) -> bool:
    """Tells whether a bootstrap server that answers so is of this protocol, as far as that can be seen by its answer.

    A host may leave out what is None.
    """
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo

    always = {field.name for field in dataclasses.fields(PrefillServerInfo) if field.default is not None}
    return always <= set(answer) <= set(_bootstrap_fields())


def _bootstrap_fields() -> list[str]:
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo

    return _wire_fields(PrefillServerInfo)


def _wire_fields(kind: Any) -> list[str]:
    return sorted(field.name for field in dataclasses.fields(kind))


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
    """Tells whether a receiver that has said where it listens takes KV itself; else another rank of its does."""
    dummy = info.is_dummy
    return not (dummy() if callable(dummy) else dummy)


def forget_sent(manager: Any, room: int) -> None:
    """Drops what the host keeps of a failed send."""
    getattr(manager, "exceptions", {}).pop(room, None)


def forget_received(manager: Any, room: int) -> None:
    """Drops what the host keeps of a failed receive."""
    getattr(manager, "transfer_statuses", {}).pop(room, None)
    if hasattr(manager, "clear_deferred_abort_state"):  # what the receiver's abort has armed
        manager.clear_deferred_abort_state(room)


def acknowledges(manager: Any, message: list[bytes]) -> bool:
    """Tells whether the host of the sender ``manager`` itself answers this abort of a receiver, once nothing writes to
    it.

    It does where the receiver waits for that: such a one counts its aborts of a room, in a fifth frame.
    """
    return len(message) > 4 and getattr(manager, "enable_deferred_decode_kv_release", False)


def is_acknowledged(receiver: Any) -> bool:
    """Tells whether the hosts of all senders to ``receiver`` have answered its abort so."""
    manager: Any = getattr(receiver, "kv_mgr", None)
    if not getattr(manager, "enable_deferred_decode_kv_release", False):
        return False
    senders = getattr(receiver, "required_prefill_response_num", 1)
    return bool(manager.is_abort_release_safe(receiver.bootstrap_room, senders))
