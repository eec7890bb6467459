"""Records of requests for tests of the control plane."""

from __future__ import annotations

from typing import Any

import msgspec

from pla_sglang.fleet.router.control.requests.prompts import Prompt
from pla_sglang.fleet.router.control.requests.request_record import (
    Attempt,
    End,
    Placement,
    RequestRecord,
    record_of,
)
from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.discovery import Address
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerTable
from pla_sglang.fleet.router.wire.messages import Ask, Endpoint
from pla_sglang.policy.interface.fleet import RequestView
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.pairs import PairChoice


def make_record(
    rid: str, arrived_s: float = 0.0, *, instances: tuple[str, str] | None = None, tokens: int = 1, **fields: Any
) -> RequestRecord:
    """``instances``: hosts of the prefill and the decode instance that were chosen. Other fields go to the ask, the
    record, its present attempt, that one's placement, or its end."""
    ask = Ask(rid, 0, Endpoint.CHAT, stream=True, arrived_s=arrived_s, body_bytes=0, input_tokens=tokens)
    ask = msgspec.structs.replace(ask, **_take(fields, Ask, but=End))
    view, prompt = RequestView(rid, tokens, arrived_s), Prompt(tokens, exact=True)
    record = record_of(ask, view, prompt, default_ttft_slo_s=1.0, default_tpot_slo_s=0.1)
    if instances is not None:
        prefill, decode = (worker.view for worker in _place(record.present, instances))
        choice = PairChoice(prefill, decode, FleetReason.NO_INSTANCE, FleetReason.NO_INSTANCE, None)
        record.present.placement = Placement(choice, **_take(fields, Placement))
    if ended := _take(fields, End):
        record.end = End(**ended)
    for name, value in fields.items():
        setattr(record.present if name in Attempt.__struct_fields__ else record, name, value)
    return record


def _take(
    fields: dict[str, Any], kind: type[msgspec.Struct], *, but: type[msgspec.Struct] | None = None
) -> dict[str, Any]:
    """Out of ``fields``, those that ``kind`` has and ``but`` has not."""
    left_out = () if but is None else but.__struct_fields__
    names = [name for name in kind.__struct_fields__ if name in fields and name not in left_out]
    return {name: fields.pop(name) for name in names}


def _place(attempt: Attempt, hosts: tuple[str, str]) -> tuple[Worker, Worker]:
    """One instance, or two if their hosts differ."""
    table = WorkerTable(BreakerKnobs())
    workers = {host: table.add(Address(host, 1), 0.0) for host in dict.fromkeys(hosts)}
    attempt.prefill, attempt.decode = workers[hosts[0]], workers[hosts[1]]
    return attempt.prefill, attempt.decode
