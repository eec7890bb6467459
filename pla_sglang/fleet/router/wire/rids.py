"""Under which ids instances know a request: relays send and abort by them, and so does the control plane."""

from __future__ import annotations

from collections.abc import Sequence

RID_PREFIX = "pla-"  # of the router's own request ids


def rid_at_instance(rid: str, attempt: int) -> str:
    """The id under which the instances of an attempt know a request.

    Each attempt has a new one, and none is the beginning of another: 2 s after a stream has ended, SGLang 0.5.17 aborts
    whatever has its id then (TokenizerManager.create_abort_task). Clients cannot use these ids.
    """
    return rid if attempt == 1 else f"{RID_PREFIX}{attempt}~{rid}"


def find_rid(rid_there: str) -> tuple[str, int]:
    """What ``rid_at_instance`` made it from: the request's id, and the number of the attempt."""
    number, made, rid = rid_there.removeprefix(RID_PREFIX).partition("~")
    if not made or not rid_there.startswith(RID_PREFIX) or not number.isdecimal():
        return rid_there, 1
    return rid, int(number)


def rids_at_instances(rid: str, rids: Sequence[str], *, prompts: int, attempt: int) -> tuple[str, ...]:
    """The ids of all prompts of a request. ``rids``: the client's own ids for the prompts of a batch."""
    if rids:
        return tuple(rid_at_instance(named, attempt) for named in rids)
    whole = rid_at_instance(rid, attempt)
    return (whole,) if prompts == 1 else tuple(f"{whole}_{index}" for index in range(prompts))
