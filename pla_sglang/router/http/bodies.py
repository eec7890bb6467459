"""JSON bodies that the router itself reads and writes; the OpenAPI document takes their schemas from here."""

from __future__ import annotations

from typing import Any

import msgspec

ROLES = ("prefill", "decode", "mixed")  # that an operator may give a stateless instance


class ErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """As in the OpenAI API. ``code``: the status."""

    message: str
    type: str
    code: int | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /workers."""

    url: str


class RoleOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /workers/NUMBER/role. ``epoch``: nothing changes if the role was set since it was that."""

    role: str
    epoch: int | None = None


class WorkerRow(msgspec.Struct, frozen=True):
    """An instance in /workers and /pla/state.

    Attributes:
        since_s, report_age_s: seconds since its last change of state, and since its last load report.
        drained: it drains, and has finished everything.
        full: it has just refused a request for load, and gets nothing that others can take.
        peers: of a stateless instance, what it says of each peer, by number; null: it has not been told of any.
        role_epoch: how often its role was set.
        ranks: what the last load report of each data-parallel rank says.
    """

    number: int
    url: str
    kind: str
    role: str
    length_class: str | None
    state: str
    reason: str
    detail: str
    since_s: float
    drained: bool
    full: bool
    breaker: dict[str, str]
    open_requests: int
    report_age_s: float | None
    queued_prefills: int
    queued_tokens: int
    running: int
    waiting_decodes: int
    kv_used_tokens: int
    kv_capacity_tokens: int | None
    model: str | None
    version: str | None
    peers: dict[int, str] | None
    role_epoch: int
    ranks: dict[int, dict[str, Any]]
