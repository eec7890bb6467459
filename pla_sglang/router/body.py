"""Request bodies: a few fields are read, members are put in front; the rest stays as the client wrote it.

The scan validates JSON and builds no object but the fields asked for. A long array of token ids is cut out before it,
so its cost does not grow with the prompt.
"""

from __future__ import annotations

import math
import re

import msgspec

RESERVED_FIELDS = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "http_worker_ipc",
)
RESERVED_PARAMS = "pla_"  # members of custom_params that start so steer instances; only the router sets them
PARAMS_OF_USERS = frozenset({"pla_slo_ttft_ms"})
RID_PREFIX = "pla-"  # of the router's own request ids
MAX_RID_CHARS = 128
# A rid travels in headers too, so nothing that could end a header's line.
_RID = re.compile(rf"[\x21-\x7e]{{1,{MAX_RID_CHARS}}}")
LONG_BYTES = 16_384  # from here on it pays to look for a long array
SAMPLE_BYTES = 4096
BYTES_PER_TOKEN = 4.0  # of text; an estimate for policies that need no better one
_EMPTY = msgspec.Raw(b"")
_IDS = re.compile(rb'"input_ids"[ \t\r\n]*:[ \t\r\n]*\[')
_BLANK = b" \t\r\n"


class BadBody(Exception):
    """The client is told, with status 400. ``code`` is a word for counters and the answer's type."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class _Params(msgspec.Struct, gc=False):
    custom_params: msgspec.Raw = _EMPTY
    max_new_tokens: msgspec.Raw = _EMPTY
    n: msgspec.Raw = _EMPTY


class _Members(msgspec.Struct, gc=False):
    rid: msgspec.Raw = _EMPTY
    stream: msgspec.Raw = _EMPTY
    n: msgspec.Raw = _EMPTY
    max_tokens: msgspec.Raw = _EMPTY
    max_completion_tokens: msgspec.Raw = _EMPTY
    priority: msgspec.Raw = _EMPTY
    sampling_params: msgspec.Raw = _EMPTY
    custom_params: msgspec.Raw = _EMPTY
    text: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    input_ids: msgspec.Raw = _EMPTY
    messages: msgspec.Raw = _EMPTY
    bootstrap_host: msgspec.Raw = _EMPTY
    bootstrap_port: msgspec.Raw = _EMPTY
    bootstrap_room: msgspec.Raw = _EMPTY
    bootstrap_pair_key: msgspec.Raw = _EMPTY
    decode_tp_size: msgspec.Raw = _EMPTY
    routed_dp_rank: msgspec.Raw = _EMPTY
    data_parallel_rank: msgspec.Raw = _EMPTY
    disagg_prefill_dp_rank: msgspec.Raw = _EMPTY
    http_worker_ipc: msgspec.Raw = _EMPTY


class Body(msgspec.Struct, gc=False, frozen=True):
    """What a dispatcher may want to know of a request body.

    Attributes:
        rid: the client's own; None: none, or a list of them.
        rids: that list.
        null_rid: there is a rid, and it is null: as if there were none.
        input_tokens: over all prompts; an estimate unless ``exact_tokens``.
        prompts: at least 1.
        samples: ``n``, at least 1.
    """

    rid: str | None
    rids: tuple[str, ...]
    stream: bool
    input_tokens: int
    exact_tokens: bool
    prompts: int = 1
    samples: int = 1
    output_tokens: int | None = None
    priority: int | None = None
    null_rid: bool = False


_NO_PARAMS = _Params()
_NONE_RESERVED = (_EMPTY,) * len(RESERVED_FIELDS)  # the last of _Members
_decode_members = msgspec.json.Decoder(_Members).decode
_decode_params = msgspec.json.Decoder(_Params).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read(body: bytes) -> Body:
    """Raises BadBody where the body is no JSON object, or sets what only the router may set."""
    short, ids_cut = cut_ids(body)
    try:
        members = _decode_members(short)
        params = [] if members.sampling_params is _EMPTY else _params_of(members.sampling_params)
        reserved = msgspec.structs.astuple(members)[-len(RESERVED_FIELDS) :]
        if reserved != _NONE_RESERVED:
            name = next(name for name, raw in zip(RESERVED_FIELDS, reserved, strict=True) if raw is not _EMPTY)
            raise BadBody("reserved_field", f"{name} is set by the router and may not be sent")
        for raw in (members.custom_params, *[part.custom_params for part in params]):
            if raw is not _EMPTY:
                _check_custom(raw)
        return _summary(members, params, ids_cut)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody("bad_json", f"the body is not a JSON object: {error}") from None


def _params_of(raw: msgspec.Raw) -> list[_Params]:
    """``sampling_params`` is an object, or a list of them for a batch; anything else is left to the instance."""
    kind = _first(raw)
    if kind == b"{":
        return [_decode_params(raw)]
    if kind == b"[":
        return [_decode_params(part) for part in _decode_list(raw) if _first(part) == b"{"]
    return []


def _check_custom(raw: msgspec.Raw) -> None:
    if _first(raw) != b"{":
        return
    for name in _decode_names(raw):
        if name.startswith(RESERVED_PARAMS) and name not in PARAMS_OF_USERS:
            raise BadBody("reserved_field", f"custom_params.{name} is set by the router and may not be sent")


def _summary(members: _Members, params: list[_Params], ids_cut: int | None) -> Body:
    rid, rids = (None, ()) if members.rid is _EMPTY else _rids(members.rid)
    tokens, exact, prompts = _prompt(members, ids_cut)
    first = params[0] if params else _NO_PARAMS
    return Body(
        rid=rid,
        rids=rids,
        stream=members.stream is not _EMPTY and bytes(members.stream) == b"true",
        input_tokens=max(1, tokens),
        exact_tokens=exact,
        prompts=prompts,
        samples=1 if members.n is _EMPTY and first.n is _EMPTY else max(_samples(members.n), _samples(first.n)),
        output_tokens=_integer(members.max_completion_tokens)
        or _integer(members.max_tokens)
        or _integer(first.max_new_tokens),
        priority=None if members.priority is _EMPTY else _priority(members.priority),
        null_rid=rid is None and not rids and members.rid is not _EMPTY,
    )


def _rids(raw: msgspec.Raw) -> tuple[str | None, tuple[str, ...]]:
    """The client's name for its request, or its names for the prompts of a batch."""
    given = _decode_any(raw)
    if given is None:
        return None, ()
    for rid in given if isinstance(given, list) else [given]:
        if not isinstance(rid, str) or _RID.fullmatch(rid) is None:
            raise BadBody("bad_rid", f"rid must have 1 to {MAX_RID_CHARS} visible ASCII characters, got {rid!r:.60}")
        # Nor be the beginning of it: an abort of "p" would end every request that the router has named.
        if rid.startswith(RID_PREFIX) or RID_PREFIX.startswith(rid):
            raise BadBody("reserved_field", f"rid may not start with {RID_PREFIX!r}, nor be its beginning")
    return (None, tuple(given)) if isinstance(given, list) else (given, ())


def _prompt(members: _Members, ids_cut: int | None) -> tuple[int, bool, int]:
    """Tokens, whether that is exact, prompts."""
    for raw in (members.input_ids, members.prompt, members.text):
        if raw is _EMPTY:
            continue
        if _first(raw) != b"[":
            return _text_tokens(raw), False, 1
        parts = _decode_list(raw)
        if parts and _first(parts[0]) in (b"[", b'"'):
            text = _first(parts[0]) == b'"'
            inner = sum(_text_tokens(p) if text else _items(p) for p in parts)
            return (ids_cut or 0) + inner, ids_cut is None and not text, len(parts)
        return (len(parts), True, 1) if ids_cut is None else (ids_cut, False, 1)
    return _text_tokens(members.messages), False, 1


def _text_tokens(raw: msgspec.Raw) -> int:
    return int(len(memoryview(raw)) / BYTES_PER_TOKEN)


def _items(raw: msgspec.Raw) -> int:
    return len(_decode_list(raw)) if _first(raw) == b"[" else 1


def _integer(raw: msgspec.Raw) -> int | None:
    """None where there is no whole number; what is wrong with it the instance says."""
    if raw is _EMPTY:
        return None
    digits = bytes(raw)
    return int(digits) if digits.isdigit() and len(digits) < 10 else None


def _priority(raw: msgspec.Raw) -> int | None:
    """As ``_integer``; it may be below 0."""
    sign, digits = (-1, msgspec.Raw(bytes(raw)[1:])) if _first(raw) == b"-" else (1, raw)
    value = _integer(digits)
    return None if value is None else sign * value


def _samples(raw: msgspec.Raw) -> int:
    """At least 1. Read as leniently as instances do ("2" and 2.0 are 2): a pair must not get more than one."""
    if raw is _EMPTY:
        return 1
    value = _decode_any(raw)
    if not isinstance(value, int | float | str):
        return 1
    try:
        return max(1, math.ceil(float(value)))
    except (ValueError, OverflowError):  # no number, which the instance says better
        return 1


def _first(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def cut_ids(body: bytes) -> tuple[bytes, int | None]:
    """``body`` without the numbers of its first array of ``input_ids``, and about how many those were.

    Only where the body is long and starts with that array's name: what is cut out holds neither quotes nor brackets,
    and so no member. Short bodies come back as they are, with None.
    """
    if len(body) < LONG_BYTES:
        return body, None
    found = _IDS.search(body, 0, SAMPLE_BYTES)
    if found is None:
        return body, None
    end = body.find(b"]", found.end())
    start = body.rfind(b"[", found.start(), end) + 1
    if end < 0 or body.find(b'"', start, end) >= 0 or body.find(b"{", start, end) >= 0:
        return body, None
    sample = body[start : min(end, start + SAMPLE_BYTES)]
    commas = sample.count(b",")
    tokens = commas + 1 if len(sample) == end - start else round(commas / len(sample) * (end - start)) + 1
    return body[:start] + body[end:], tokens


def rid_there(rid: str, reached: int) -> str:
    """Under which id instances know a request of which they got ``reached`` attempts before.

    A new one for each, and none the beginning of another: 2 s after a stream has ended, SGLang 0.5.17 aborts whatever
    has its id then (TokenizerManager.create_abort_task). Clients cannot use these ids.
    """
    return f"{RID_PREFIX}{reached + 1}~{rid}" if reached else rid


def with_rid(body: bytes, rid: str | list[str]) -> bytes:
    """``body``, a JSON object that is not empty, with another rid. The last of two members of a name counts."""
    return body.rstrip(_BLANK)[:-1] + b',"rid":' + msgspec.json.encode(rid) + b"}"


def with_members(body: bytes, members: bytes) -> tuple[bytes, memoryview]:
    """``body`` with ``members`` (no outer commas) in front of its own, as two pieces; the long one is not copied.

    Raises:
        BadBody: ``body`` does not start as a JSON object.
    """
    start = len(body) - len(body.lstrip(_BLANK)) if body[:1] in _BLANKS else 0
    if body[start : start + 1] != b"{":
        raise BadBody("bad_json", "the body is not a JSON object")
    rest = memoryview(body)[start + 1 :]
    empty = body[start + 1 : start + 65].lstrip(_BLANK)[:1] == b"}"
    return (b"{" + members if empty else b"{" + members + b","), rest


_BLANKS = (b" ", b"\t", b"\r", b"\n")
