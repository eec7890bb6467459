"""What KV is of: its tokens and all else that it depends on, in two numbers that travel with it.

The source writes them behind the room in the host's metadata buffer, which is sent with the last chunk: they are there
when the KV is. A stock source leaves zeros in their places, and a stock target does not look at them. Without them
nobody would see that the KV of a room is of another prompt: the host cuts a transfer to the pages that its target has
reserved, or leaves some of these unwritten, and says nothing.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.plugin.engine.host.transfers import name_protocol

TOKENS_PLACE, DIGEST_PLACE = 1, 2  # of the eight numbers that the host keeps with a room, which is the first
DIGEST_BYTES = 7  # some devices keep these numbers as signed 64-bit integers


class Fingerprint(NamedTuple):
    """Number of the tokens whose KV it is, and a hash of them with adapter, cache salt, layout and transfer protocol.

    For a request with images it covers the prompt without what stands for them, and not the answer.
    """

    tokens: int
    digest: int


UNSAID = Fingerprint(0, 0)  # by a source that is none of ours


class Fingerprints:
    """Makes those of one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @functools.cached_property
    def layout(self) -> str:
        """The layout of the KV here."""
        return calls.describe_kv_layout(self._scheduler)

    def of_kv(self, req: Any, ids: Sequence[int]) -> Fingerprint:
        """The fingerprint of the KV of ``ids``, which are tokens of ``req``."""
        if req.multimodal_inputs is not None:  # what stands for an image may be numbers that each instance draws anew
            ids = req.origin_input_ids_unpadded
        hashed = hashlib.blake2b(array("q", ids).tobytes(), digest_size=DIGEST_BYTES)
        hashed.update(repr((self._name_adapter(req), _salt_of(req), self.layout, name_protocol())).encode())
        if req.input_embeds is not None:
            hashed.update(np.asarray(req.input_embeds, dtype=np.float32).tobytes())
        return Fingerprint(len(ids), int.from_bytes(hashed.digest(), "big"))

    def _name_adapter(self, req: Any) -> str | None:
        """Its id differs from instance to instance, its name does not."""
        return None if req.lora_id is None else calls.name_adapter(self._scheduler, req.lora_id)


def _salt_of(req: Any) -> str:
    """The host puts the adapter's id behind what the client gave."""
    salt: str = req.extra_key or ""
    return salt.replace(req.lora_id, "") if req.lora_id else salt


def write_fingerprint(buffers: Any, slot: int, fingerprint: Fingerprint) -> None:
    """Beside the room in ``buffers``, the host's metadata buffers."""
    row = buffers.bootstrap_room[slot]
    row[TOKENS_PLACE], row[DIGEST_PLACE] = fingerprint


def read_fingerprint(buffers: Any, slot: int) -> Fingerprint:
    """What came with the KV."""
    row = buffers.bootstrap_room[slot].tolist()
    return Fingerprint(row[TOKENS_PLACE], row[DIGEST_PLACE])


def find_misfit(sent: Fingerprint, wanted: Fingerprint, *, ours: bool) -> str | None:
    """Why KV is not what is wanted; None: it is. ``ours``: its source is a stateless instance, so it has to say."""
    if sent == UNSAID:
        return "its source has not said of which prompt it is" if ours else None
    if sent.tokens != wanted.tokens:
        return f"it is of {sent.tokens} tokens, and {wanted.tokens} are wanted"
    if sent.digest != wanted.digest:
        return "it is of another prompt, adapter, cache salt, layout or transfer protocol"
    return None
