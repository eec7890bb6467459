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
        state: of ``WorkerState``, or drained: it drains, and has nothing left.
        drained: the same, as older clients read it; it goes with the next release.
        full: it has just refused a request for load, and gets nothing that others can take.
        peers: of a stateless instance, what it says of each peer, by number; null: it has not been told of any.
        role_epoch: how often its role was set.
        first_tokens: requests with a prediction that have had their first token there.
        ttft_s, predicted_ttft_s, ttft_error_s: of these, from dispatch to the first token, what was predicted, and the
            absolute differences, all summed.
        legs: of a stateless instance, by end (sending, receiving) and state; null, as the next two: it says nothing.
        leg_kv_tokens: that legs hold there beside the batches, by holder: sending, receiving, quarantine.
        quarantined_requests: given up; a transfer may touch their pages.
        step_times: where the step times are from by which the policy plans for it: measured by how many passes, or a
            profile; null: it has not told its load yet.
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
    first_tokens: int
    ttft_s: float
    predicted_ttft_s: float
    ttft_error_s: float
    legs: dict[str, dict[str, int]] | None
    leg_kv_tokens: dict[str, int] | None
    quarantined_requests: int | None
    step_times: str | None
    ranks: dict[int, dict[str, Any]]
