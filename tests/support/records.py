"""Records of requests for tests of the control plane."""

from __future__ import annotations

from typing import Any

import msgspec

from pla_sglang.fleet.router.control.requests.prompts import Prompt
from pla_sglang.fleet.router.control.requests.request_record import Hop, RequestRecord
from pla_sglang.fleet.router.wire.messages import Ask, Endpoint
from pla_sglang.policy.interface.fleet import InstanceView, RequestView
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.pairs import Choice

_OF_ASK = set(Ask.__struct_fields__) - set(RequestRecord.__struct_fields__)


def make_record(
    rid: str, arrived_s: float = 0.0, *, instances: tuple[str, str] | None = None, tokens: int = 1, **fields: Any
) -> RequestRecord:
    """``instances``: names of the prefill and the decode instance that were chosen. Other fields go to the record,
    its hop or its ask."""
    hop = Hop(choice=None if instances is None else choice_of(*instances))
    ask = Ask(rid, 0, Endpoint.CHAT, stream=True, arrived_s=arrived_s, body_bytes=0, input_tokens=tokens)
    ask = msgspec.structs.replace(ask, **{name: fields.pop(name) for name in list(fields) if name in _OF_ASK})
    view, prompt = RequestView(rid, tokens, arrived_s), Prompt(tokens, exact=True)
    record = RequestRecord(rid, 0, ask, view, prompt, 1.0, 0.1, hops=[hop])
    for name, value in fields.items():
        setattr(hop if name in Hop.__struct_fields__ else record, name, value)
    return record


def choice_of(prefill: str, decode: str) -> Choice:
    """A choice of one instance, or of two if their names differ."""
    view = InstanceView(0, prefill)
    other = view if prefill == decode else InstanceView(1, decode)
    return Choice(view, other, FleetReason.NO_INSTANCE, FleetReason.NO_INSTANCE, None)
