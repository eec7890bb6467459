"""Which requests can go on at another instance, by their bodies, and how the router's tags get into these. Pure.

Tags are members of ``custom_params`` (protocol.md): on /generate inside ``sampling_params``, at OpenAI's paths beside
the other members. A client's own members stay as it wrote them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pla_sglang.fleet.router.http.json_body import BLANKS, EMPTY, Body, cut_ids, first_byte, first_item
from pla_sglang.fleet.router.wire.messages import Ask, Endpoint

_GENERATE = Endpoint.GENERATE
_ENDPOINTS = frozenset({Endpoint.GENERATE, Endpoint.COMPLETIONS, Endpoint.CHAT})
_OFF = (b"", b"null", b"false", b"0", b"[]", b"{}")
# Parts of a chat message that are no text. In a text, the quotes would be escaped.
_MEDIA = (b'"image_url"', b'"video_url"', b'"audio_url"', b'"input_audio"')
MAX_MESSAGE_BYTES = 1 << 20  # of messages that are searched for media


class Unmovable(enum.Enum):
    """Why a request cannot go on at another instance."""

    ENDPOINT = "endpoint"
    BATCH = "batch"  # several prompts, or one in a list
    SAMPLES = "samples"
    MULTIMODAL = "multimodal"
    SESSION = "session"
    LOGPROBS = "logprobs"
    HIDDEN_STATES = "hidden_states"
    EMBEDDINGS = "embeddings"  # the prompt has no token ids
    BODY = "body"  # a member that tags go into is no object
    SIZE = "size"  # the messages are too long to be searched
    KEPT_BYTES = "kept_bytes"  # no memory for its body
    INSTANCE = "instance"  # its instance does not say its token ids in the stream


class Tags(NamedTuple):
    """The router's members for the body of a request that can go on at another instance.

    Attributes:
        member: what holds them: ``sampling_params`` or ``custom_params``.
        value: of that member, as the client wrote it; empty without it.
        inner: ``custom_params`` within it, of /generate.
        wants_usage: as in ``MarkedStreamReader``.
        members: the tags themselves, without outer commas.
    """

    member: bytes
    value: bytes
    inner: bytes
    wants_usage: bool
    members: bytes = b'"pla_movable":1'

    def put_into(self, raw: bytes) -> tuple[bytes, bytes]:
        """A member to be written in front of those of the body ``raw``, and the body. Of two members of a name the last
        one counts, so where the client has written it, it is written again behind its own."""
        tagged = b"{" + self.members + b"}"
        if self.member == b"sampling_params":
            params = _extend_object(self.inner, self.members)
            tagged = _extend_object(self.value, b'"custom_params":' + params)
        elif self.value:
            tagged = _extend_object(self.value, self.members)
        written = b'"%s":%s' % (self.member, tagged)
        if not self.value:
            return written, raw
        return b"", _extend_object(raw, written)

    def for_rest(self, ids: Sequence[int], *, seen: str, prompt: str, answer_id: str) -> Tags:
        """What the instance is told that goes on with a stream: its token ids so far, and as ``MarkedStreamReader``
        knows them, what of it was shown and its prompt. ``answer_id``: the request's id at the first instance."""
        told: dict[str, int | str | Sequence[int]] = {"pla_movable": 1, "pla_answer_id": answer_id}
        if ids:
            told["pla_tokens"] = list(ids)
            told["pla_seen"] = seen
        if prompt:
            told["pla_prompt"] = prompt
        return self._replace(members=msgspec.json.encode(told)[1:-1])


class _MoveParams(msgspec.Struct, gc=False):
    custom_params: msgspec.Raw = EMPTY


class _Usage(msgspec.Struct, gc=False):
    include_usage: msgspec.Raw = EMPTY


class _MoveMembers(msgspec.Struct, gc=False):
    text: msgspec.Raw = EMPTY
    input_ids: msgspec.Raw = EMPTY
    input_embeds: msgspec.Raw = EMPTY
    prompt: msgspec.Raw = EMPTY
    messages: msgspec.Raw = EMPTY
    rid: msgspec.Raw = EMPTY
    sampling_params: msgspec.Raw = EMPTY
    custom_params: msgspec.Raw = EMPTY
    stream_options: msgspec.Raw = EMPTY
    image_data: msgspec.Raw = EMPTY
    video_data: msgspec.Raw = EMPTY
    audio_data: msgspec.Raw = EMPTY
    session_params: msgspec.Raw = EMPTY
    return_logprob: msgspec.Raw = EMPTY
    logprobs: msgspec.Raw = EMPTY
    return_hidden_states: msgspec.Raw = EMPTY


_decode_members = msgspec.json.Decoder(_MoveMembers).decode
_decode_params = msgspec.json.Decoder(_MoveParams).decode
_decode_usage = msgspec.json.Decoder(_Usage).decode


def judge_request(ask: Ask, body: Body, raw: bytes) -> Tags | Unmovable:
    """``raw``: the request's body, which ``body`` was read from."""
    if ask.endpoint not in _ENDPOINTS:
        return Unmovable.ENDPOINT
    if ask.prompts > 1 or body.rids:
        return Unmovable.BATCH
    if ask.samples > 1:
        return Unmovable.SAMPLES
    members = _decode_members(cut_ids(raw)[0])
    for reason, values in _refused_members(members):
        if any(bytes(value) not in _OFF for value in values):
            return reason
    if _is_batch(ask.endpoint, members):
        return Unmovable.BATCH
    if ask.endpoint is Endpoint.CHAT:
        messages = bytes(members.messages)
        if len(messages) > MAX_MESSAGE_BYTES:
            return Unmovable.SIZE
        if any(part in messages for part in _MEDIA):
            return Unmovable.MULTIMODAL
    generate = ask.endpoint is _GENERATE
    value = bytes(members.sampling_params if generate else members.custom_params)
    inner = b""
    if generate and value[:1] == b"{":
        inner = bytes(_decode_params(value).custom_params)
    if any(part[:1] not in (b"", b"{", b"n") for part in (value, inner)):
        return Unmovable.BODY
    options = bytes(members.stream_options)
    wants_usage = options[:1] == b"{" and bytes(_decode_usage(options).include_usage) == b"true"
    return Tags(b"sampling_params" if generate else b"custom_params", value, inner, wants_usage)


def _refused_members(members: _MoveMembers) -> Sequence[tuple[Unmovable, Sequence[msgspec.Raw]]]:
    return (
        (Unmovable.MULTIMODAL, (members.image_data, members.video_data, members.audio_data)),
        (Unmovable.SESSION, (members.session_params,)),
        (Unmovable.LOGPROBS, (members.return_logprob, members.logprobs)),
        (Unmovable.HIDDEN_STATES, (members.return_hidden_states,)),
        (Unmovable.EMBEDDINGS, (members.input_embeds,)),
    )


def _is_batch(endpoint: Endpoint, members: _MoveMembers) -> bool:
    """True if the prompt is a list of prompts, even of one: its answers have another form."""
    if endpoint is Endpoint.CHAT:
        return False
    for raw in (members.text, members.input_ids, members.prompt, members.rid):
        if first_byte(raw) == b"[" and (raw is members.rid or first_item(raw) in (b'"', b"[")):
            return True
    return False


def _extend_object(value: bytes, members: bytes) -> bytes:
    """The JSON object ``value`` with ``members`` behind its own; of null, or nothing, one with these alone. One copy: a
    body may be long."""
    value = value.strip(BLANKS)
    end = len(value) - 1
    while end > 0 and value[end - 1] in BLANKS:
        end -= 1
    if value[:1] != b"{" or end == 1:
        return b"{" + members + b"}"
    return b"".join((memoryview(value)[:end], b",", members, b"}"))
