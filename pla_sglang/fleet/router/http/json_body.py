"""Request bodies: a few fields are read, members are put in front; the rest stays as the client wrote it.

The scan validates JSON and builds no object but the fields asked for. A long array of token ids is cut out before it,
so its cost does not grow with the prompt.
"""

from __future__ import annotations

import dataclasses
import math
import re

import msgspec

from pla_sglang.fleet.reserved import describe_reserved, is_reserved_param
from pla_sglang.fleet.router.http.head import BadMessage
from pla_sglang.fleet.router.wire.inference import PATHS, InferencePath
from pla_sglang.fleet.router.wire.messages import Endpoint
from pla_sglang.fleet.router.wire.rids import RID_PREFIX

MAX_RID_CHARS = 128
# A rid travels in headers too, so nothing that could end a header's line.
_RID = re.compile(rf"[\x21-\x7e]{{1,{MAX_RID_CHARS}}}")
LONG_BYTES = 16_384  # from here on it pays to look for a long array
SEARCHED_BYTES = 4096  # for its name
COUNTED_BYTES = 65_536  # of it, in less than a tenth of a millisecond; a longer one is estimated by its beginning
BYTES_PER_TOKEN = 4.0  # of text; an estimate for policies that need no better one
EMPTY = msgspec.Raw(b"")
_IDS = re.compile(rb'"input_ids"[ \t\r\n]*:[ \t\r\n]*\[')
BLANKS = b" \t\r\n"
# Objects of a list cost far more memory than its text: longer ones are refused. Lists of numbers are only counted.
MAX_MEMBERS = 65_536
MAX_NUMBER_BYTES = 64
MAX_MODEL_BYTES = 512
MAX_QUOTES = 16 * MAX_MEMBERS
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_INNER = re.compile(rb"\[[^][{}]*\]|\{[^][{}]*\}")
_FIRST = re.compile(rb"[ \t\r\n]*[^ \t\r\n]").match  # up to the first byte that is no blank


class _Params(msgspec.Struct, gc=False):
    custom_params: msgspec.Raw = EMPTY
    max_new_tokens: msgspec.Raw = EMPTY
    n: msgspec.Raw = EMPTY


class _Reserved(msgspec.Struct, gc=False):
    """Members that only the router sets, for its instances."""

    bootstrap_host: msgspec.Raw = EMPTY
    bootstrap_port: msgspec.Raw = EMPTY
    bootstrap_room: msgspec.Raw = EMPTY
    bootstrap_pair_key: msgspec.Raw = EMPTY
    decode_tp_size: msgspec.Raw = EMPTY
    routed_dp_rank: msgspec.Raw = EMPTY
    data_parallel_rank: msgspec.Raw = EMPTY
    disagg_prefill_dp_rank: msgspec.Raw = EMPTY
    http_worker_ipc: msgspec.Raw = EMPTY
    encoder_urls: msgspec.Raw = EMPTY
    mm_data_mooncake: msgspec.Raw = EMPTY
    need_wait_for_mm_inputs: msgspec.Raw = EMPTY
    num_items_assigned: msgspec.Raw = EMPTY


class _Members(_Reserved, gc=False):
    rid: msgspec.Raw = EMPTY
    stream: msgspec.Raw = EMPTY
    n: msgspec.Raw = EMPTY
    max_tokens: msgspec.Raw = EMPTY
    max_completion_tokens: msgspec.Raw = EMPTY
    priority: msgspec.Raw = EMPTY
    sampling_params: msgspec.Raw = EMPTY
    custom_params: msgspec.Raw = EMPTY
    text: msgspec.Raw = EMPTY
    prompt: msgspec.Raw = EMPTY
    input_ids: msgspec.Raw = EMPTY
    messages: msgspec.Raw = EMPTY
    # Of other paths than /generate, /v1/completions and /v1/chat/completions:
    system: msgspec.Raw = EMPTY
    instructions: msgspec.Raw = EMPTY
    input: msgspec.Raw = EMPTY
    query: msgspec.Raw = EMPTY
    items: msgspec.Raw = EMPTY
    documents: msgspec.Raw = EMPTY
    request_id: msgspec.Raw = EMPTY
    max_output_tokens: msgspec.Raw = EMPTY
    background: msgspec.Raw = EMPTY
    lora_path: msgspec.Raw = EMPTY
    model: msgspec.Raw = EMPTY
    session_params: msgspec.Raw = EMPTY
    previous_response_id: msgspec.Raw = EMPTY


class Body(msgspec.Struct, gc=False, frozen=True):
    """What a dispatcher may want to know of a request body.

    Attributes:
        rid: the client's own; None: none, or a list of them.
        rids: that list.
        null_rid: there is a rid, and it is null: as if there were none.
        input_tokens: over all prompts; an estimate unless ``exact_tokens``.
        prompts: at least 1.
        samples: ``n``, at least 1.
        adapter: the LoRA adapter that it names; of a batch the first one.
        continues_session: it has ``session_params``.
        model: the model that it names; "": none, or by a name of more than ``MAX_MODEL_BYTES``.
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
    adapter: str | None = None
    continues_session: bool = False
    model: str = ""


_NO_PARAMS = _Params()
RESERVED_FIELDS = _Reserved.__struct_fields__
_NOTHING = (b"null", b"{}")
_NONE_RESERVED = (EMPTY,) * len(RESERVED_FIELDS)  # the first of _Members
_decode_members = msgspec.json.Decoder(_Members).decode
_decode_params = msgspec.json.Decoder(_Params).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read_body(body: bytes, path: InferencePath = PATHS["/generate"]) -> Body:
    """``path``: where it was sent to.

    Raises BadMessage: the body is no JSON object, sets what only the router may set, or needs what an instance keeps.
    """
    short, ids_cut = cut_ids(body)
    try:
        members = _decode_members(short)
        params = [] if members.sampling_params is EMPTY else _read_params(members.sampling_params)
        reserved = msgspec.structs.astuple(members)[: len(RESERVED_FIELDS)]
        if reserved != _NONE_RESERVED:
            name = next(name for name, raw in zip(RESERVED_FIELDS, reserved, strict=True) if raw is not EMPTY)
            raise BadMessage("reserved_field", describe_reserved(name))
        for raw in (members.custom_params, *[part.custom_params for part in params]):
            if raw is not EMPTY:
                _check_custom_params(raw)
        if path.endpoint is Endpoint.RESPONSES:
            _check_stored(members)
        return _summarize_body(members, params, ids_cut, path)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage("bad_json", f"the body is not a JSON object: {error}") from None
    except RecursionError:
        raise BadMessage("bad_json", "the body is nested too deeply") from None


def _read_params(raw: msgspec.Raw) -> list[_Params]:
    """``sampling_params`` is an object, or a list of them for a batch; anything else is left to the instance."""
    kind = first_byte(raw)
    if kind == b"{":
        return [_decode_params(raw)]
    if kind == b"[":
        return [_decode_params(part) for part in _split_list(raw) if first_byte(part) == b"{"]
    return []


def _check_custom_params(raw: msgspec.Raw) -> None:
    if first_byte(raw) != b"{":
        return
    _check_members(raw)
    for name in _decode_names(raw):
        if is_reserved_param(name):
            raise BadMessage("reserved_field", describe_reserved(f"custom_params.{name}"))


def _check_stored(members: _Members) -> None:
    """Answers are kept by the instance that gave them, and the next request may go to another one."""
    for name, raw in (("previous_response_id", members.previous_response_id), ("background", members.background)):
        if raw is not EMPTY and bytes(raw) not in (b"null", b"false"):
            text = f"{name} needs an answer that one instance keeps, which is not served; send the whole conversation"
            raise BadMessage("stored_response", text, 501)


def _summarize_body(members: _Members, params: list[_Params], ids_cut: CutIds | None, path: InferencePath) -> Body:
    named = members.request_id if path.rid_member == "request_id" else members.rid
    rid, rids = (None, ()) if named is EMPTY else _read_rids(named)
    usual = path.pairs or ("input_ids" in path.prompt and members.input_ids is not EMPTY)
    tokens, exact, prompts = _measure_prompt(members, ids_cut) if usual else _measure_members(members, path)
    first = params[0] if params else _NO_PARAMS
    return Body(
        rid=rid,
        rids=rids,
        stream=members.stream is not EMPTY and bytes(members.stream) == b"true",
        input_tokens=max(1, tokens),
        exact_tokens=exact,
        prompts=prompts,
        samples=1 if members.n is EMPTY and first.n is EMPTY else max(_read_samples(members.n), _read_samples(first.n)),
        output_tokens=_read_integer(members.max_completion_tokens)
        or _read_integer(members.max_tokens)
        or _read_integer(members.max_output_tokens)
        or _read_integer(first.max_new_tokens),
        priority=None if members.priority is EMPTY else _read_priority(members.priority),
        null_rid=rid is None and not rids and named is not EMPTY,
        adapter=None if members.lora_path is EMPTY else _read_adapter(members.lora_path),
        continues_session=members.session_params is not EMPTY and bytes(members.session_params) not in _NOTHING,
        model="" if members.model is EMPTY else _read_model(members.model),
    )


def _read_rids(raw: msgspec.Raw) -> tuple[str | None, tuple[str, ...]]:
    """The client's name for its request, or its names for the prompts of a batch."""
    _check_members(raw)
    given = _decode_any(raw)
    if given is None:
        return None, ()
    for rid in given if isinstance(given, list) else [given]:
        if not isinstance(rid, str) or _RID.fullmatch(rid) is None:
            raise BadMessage("bad_rid", f"rid must have 1 to {MAX_RID_CHARS} visible ASCII characters, got {rid!r:.60}")
        # Nor be the beginning of it: an abort of "p" would end every request that the router has named.
        if rid.startswith(RID_PREFIX) or RID_PREFIX.startswith(rid):
            raise BadMessage("reserved_field", f"rid may not start with {RID_PREFIX!r}, nor be its beginning")
    return (None, tuple(given)) if isinstance(given, list) else (given, ())


def _measure_prompt(members: _Members, ids_cut: CutIds | None) -> tuple[int, bool, int]:
    """Tokens, whether that is exact, prompts."""
    for raw in (members.input_ids, members.prompt, members.text):
        if raw is EMPTY:
            continue
        if first_byte(raw) != b"[":
            return _estimate_tokens(raw), False, 1
        text = first_item(raw) == b'"'
        if text or first_item(raw) == b"[":
            parts = _split_list(raw)
            if not text and any(_is_empty(part) for part in (parts if ids_cut is None else parts[1:])):
                # It would end the scheduler of an instance without the plugin.
                raise BadMessage("empty_prompt", "a prompt of the batch has no token; allowed: at least one")
            inner = sum(_estimate_tokens(p) if text else _count_items(p) for p in parts)
            cut = ids_cut or CutIds(0, exact=True)
            return cut.tokens + inner, cut.exact and not text, len(parts)
        if ids_cut is not None and first_item(raw) == b"]":
            return ids_cut.tokens, ids_cut.exact, 1
        return _count_items(raw), True, 1
    return _estimate_tokens(members.messages), False, 1


def _measure_members(members: _Members, path: InferencePath) -> tuple[int, bool, int]:
    """As ``_measure_prompt``, over the members that ``path`` names."""
    raws = [getattr(members, name) for name in path.prompt]
    if path.each_item:
        (shared, _, _), (rest, _, items) = map(_measure_texts, raws)
        return items * shared + rest, False, items
    parts = [_measure_texts(raw) for raw in raws if raw is not EMPTY]
    exact = len(parts) == 1 and parts[0][1]
    return sum(part[0] for part in parts), exact, max((part[2] for part in parts), default=1)


def _measure_texts(raw: msgspec.Raw, *, inner: bool = False) -> tuple[int, bool, int]:
    """Measures one text or a list of them, as text or as token ids; what has members is one prompt, estimated by size.

    ``inner``: a list in a list. No path takes more, and each level would be scanned anew.
    """
    if first_byte(raw) != b"[":
        return _estimate_tokens(raw), False, 1
    first = first_item(raw)
    if first.isdigit():
        return _count_items(raw), True, 1
    parts = _split_list(raw)
    if first == b"[" and not inner:
        measured = [_measure_texts(part, inner=True) for part in parts]
        return sum(tokens for tokens, _, _ in measured), all(exact for _, exact, _ in measured), len(parts)
    return _estimate_tokens(raw), False, len(parts) if first == b'"' else 1


def _estimate_tokens(raw: msgspec.Raw) -> int:
    return int(len(memoryview(raw)) / BYTES_PER_TOKEN)


def _is_empty(raw: msgspec.Raw) -> bool:
    return first_byte(raw) == b"[" and first_item(raw) == b"]"


def _count_items(raw: msgspec.Raw) -> int:
    """Counts a list of numbers; anything else in it the instance refuses. What is no list counts as 1."""
    if first_byte(raw) != b"[":
        return 1
    return bytes(raw).count(b",") + 1 if first_item(raw) != b"]" else 0


def first_item(raw: msgspec.Raw) -> bytes:
    """The first byte of the first item of a list, ``]`` of an empty one."""
    first = _FIRST(memoryview(raw), 1)
    assert first is not None, "a list has an end"
    return bytes(memoryview(raw)[first.end() - 1 : first.end()])


def _split_list(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """Raises BadMessage for a list of too many items."""
    _check_members(raw)
    return _decode_list(raw)


def _check_members(raw: msgspec.Raw) -> None:
    """Before objects are made of the members of a list or an object; there is one comma between two of them.

    Commas in strings do not count, nor those in what its members hold, three levels deep; the search for these takes
    memory for each string too. Raises BadMessage for too many.
    """
    text = bytes(raw)
    if text.count(b",") < MAX_MEMBERS:
        return
    if text.count(b'"') <= MAX_QUOTES:
        text = _STRINGS.sub(b"0", text)
        for _ in range(3):
            if text.count(b",") < MAX_MEMBERS:
                return
            if text.count(b"[") + text.count(b"{") > MAX_MEMBERS:
                break
            text = text[:1] + _INNER.sub(b"0", text[1:])
        if text.count(b",") < MAX_MEMBERS:
            return
    raise BadMessage("too_many_members", f"a list or object in the body has more than {MAX_MEMBERS:,} members", 413)


def _read_integer(raw: msgspec.Raw) -> int | None:
    """None where there is no whole number; what is wrong with it the instance says."""
    if raw is EMPTY:
        return None
    digits = bytes(raw)
    return int(digits) if digits.isdigit() and len(digits) < 10 else None


def _read_priority(raw: msgspec.Raw) -> int | None:
    """As ``_integer``; it may be below 0."""
    sign, digits = (-1, msgspec.Raw(bytes(raw)[1:])) if first_byte(raw) == b"-" else (1, raw)
    value = _read_integer(digits)
    return None if value is None else sign * value


def _read_adapter(raw: msgspec.Raw) -> str | None:
    """None where it names none; what is wrong with it the instance says."""
    if first_byte(raw) not in (b'"', b"["):
        return None
    _check_members(raw)
    given = _decode_any(raw)
    names = given if isinstance(given, list) else [given]
    return next((name for name in names if isinstance(name, str) and name), None)


def _read_model(raw: msgspec.Raw) -> str:
    """What is wrong with it the instance says."""
    text = bytes(raw)
    return _decode_text(text) if text[:1] == b'"' and len(text) <= MAX_MODEL_BYTES else ""


def _read_samples(raw: msgspec.Raw) -> int:
    """At least 1. Read as leniently as instances do ("2" and 2.0 are 2): a pair must not get more than one."""
    if raw is EMPTY:
        return 1
    if len(memoryview(raw)) > MAX_NUMBER_BYTES:
        raise BadMessage("bad_n", f"n has more than {MAX_NUMBER_BYTES} bytes")
    value = _decode_any(raw)
    if not isinstance(value, int | float | str):
        return 1
    try:
        return max(1, math.ceil(float(value)))
    except (ValueError, OverflowError):  # no number, which the instance says better
        return 1


def first_byte(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


@dataclasses.dataclass(frozen=True, slots=True)
class CutIds:
    """Token ids that were cut out of a long body: how many, and whether all of them were counted."""

    tokens: int
    exact: bool


def has_long_ids(body: bytes) -> bool:
    """True if the relay has counted the token ids of ``body`` apart from the rest, exactly or not."""
    return len(body) >= LONG_BYTES and _IDS.search(body, 0, SEARCHED_BYTES) is not None


def cut_ids(body: bytes) -> tuple[bytes, CutIds | None]:
    """``body`` without the numbers of its first array of ``input_ids``, and how many those were.

    Only where the body is long and starts with that array's name: what is cut out holds neither quotes nor brackets,
    and so no member. Short bodies come back as they are, with None.
    """
    if len(body) < LONG_BYTES:
        return body, None
    found = _IDS.search(body, 0, SEARCHED_BYTES)
    if found is None:
        return body, None
    end = body.find(b"]", found.end())
    start = body.rfind(b"[", found.start(), end) + 1
    if end < 0 or body.find(b'"', start, end) >= 0 or body.find(b"{", start, end) >= 0:
        return body, None
    counted = min(end, start + COUNTED_BYTES) - start
    commas = body.count(b",", start, start + counted)
    tokens = round(commas / counted * (end - start)) + 1 if counted else 0
    return body[:start] + body[end:], CutIds(tokens, exact=counted == end - start)


def with_rid(body: bytes, rid: str | list[str], member: str = "rid") -> bytes:
    """``body``, a JSON object that is not empty, with another rid. The last of two members of a name counts."""
    return body.rstrip(BLANKS)[:-1] + b',"%s":' % member.encode() + msgspec.json.encode(rid) + b"}"


def with_members(body: bytes, members: bytes) -> tuple[bytes, memoryview]:
    """``body`` with ``members`` (no outer commas) in front of its own, as two pieces; the long one is not copied.

    Raises:
        BadMessage: ``body`` does not start as a JSON object.
    """
    start = len(body) - len(body.lstrip(BLANKS)) if body[:1] in BLANKS else 0
    if body[start : start + 1] != b"{":
        raise BadMessage("bad_json", "the body is not a JSON object")
    rest = memoryview(body)[start + 1 :]
    first = _FIRST(body, start + 1)
    empty = first is not None and body[first.end() - 1] == ord("}")
    return (b"{" + members if empty else b"{" + members + b","), rest
