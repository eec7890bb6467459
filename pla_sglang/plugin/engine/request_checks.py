"""What a request must be before a scheduler gets it. One that is not would end the scheduler, and all that runs there.

SGLang's HTTP process passes most values on as JSON had them, and its schedulers trust them. Here each message that is
made for a scheduler is compared with the types that SGLang itself declares for it, so that fields of a new version are
covered too, and with the ranges that its tensors have. There is one message for each prompt, whatever the form of the
request was. A refusal is a ConfigError: SGLang answers a ValueError with status 400.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from re import _parser  # type: ignore[attr-defined]  # no other way to a pattern's parts; SGLang's way, too
from typing import Annotated, Any

import msgspec
import numpy as np

from pla_sglang.common.errors import ConfigError

MOST_SAMPLES = 128  # ``n``; SGLang copies the prompt so often before anything else looks at it
ROOMS_KEPT = 65_536
NO_PEER = "2.2.2.2"  # SGLang's health requests name this host; they move no KV, all in one room
INT32 = (0, 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
# Of what the sampler divides or adds: beyond these, logits in float32 become infinite, and the draw among them raises.
MOST_BIAS = 1e30
LEAST_REPETITION_PENALTY = 1e-6
_INTEGER = Annotated[int, msgspec.Meta(ge=INT64[0], le=INT64[1])]
# Made by SGLang itself, checked by themselves below, or opaque to it.
_UNCHECKED = frozenset(
    {
        *("input_text", "input_ids", "input_embeds", "mm_inputs", "token_type_ids", "sampling_params", "time_stats"),
        *("session_params", "positional_embed_overrides", "mm_data_mooncake", "num_items_assigned", "custom_params"),
        *("stop_token_ids", "stop_strs", "stop_regex_strs"),
    }
)
_INDEX = re.compile(r"\$\[(\d+)\]")  # of a field, in what msgspec says
_BAD_VALUE = (TypeError, AttributeError, KeyError, OverflowError, RecursionError, UnicodeError, re.error)


# -- as the client sent it ---------------------------------------------------------------------------------------------


def check_request(manager: Any, obj: Any) -> None:
    """What SGLang needs before it makes messages of ``obj``. Raises ConfigError."""
    ids = getattr(obj, "input_ids", None)
    if isinstance(ids, Mapping) and "input_ids" in ids:
        # What chat templates of transformers 5 give; SGLang's /api/chat passes it on as if it were the ids alone.
        obj.input_ids = ids["input_ids"]
    try:
        params = getattr(obj, "sampling_params", None)
        for each in params if isinstance(params, list) else [] if params is None else [params]:
            if not isinstance(each, dict):
                raise ConfigError(f"sampling_params has {each!r:.60}; allowed: an object, or a list of them")
            _check_integer("n", each.get("n", 1), (1, MOST_SAMPLES if _is_whole(manager) else 1))
            if (most := each.get("max_new_tokens")) is not None:
                _check_integer("max_new_tokens", most, (0, INT64[1]))
        if params == [] or getattr(obj, "text", None) == [] or getattr(obj, "input_ids", None) == [[]]:
            raise ConfigError("the request has no prompt; allowed: at least one token")
    except ConfigError:
        # SGLang aborts what a refused stream may have started, and for that it has to know whether it was a batch.
        obj.is_single = not isinstance(getattr(obj, "rid", None), list)
        raise


def _is_whole(manager: Any) -> bool:
    """Not an instance of a prefill and decode pair, where all samples of a prompt would have one KV room."""
    return bool(manager.disaggregation_mode.value == "null")


# -- as a scheduler would get it ---------------------------------------------------------------------------------------


def make_message(original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """The message for one prompt, made by ``original`` and checked.

    Raises ConfigError, also where a value is of a type that ``original`` itself cannot take.
    """
    try:
        message = original(manager, obj, *args, **kwargs)
    except _BAD_VALUE as error:
        raise ConfigError(f"the request has a value that SGLang cannot take: {error!s:.200}") from error
    check_message(manager, message)
    return message


def check_message(manager: Any, message: Any) -> None:
    """Raises ConfigError."""
    vocabulary: int = manager.model_config.vocab_size
    _check_kind(manager, message)
    _check_types(message)
    _check_prompt(message, vocabulary, manager.model_config.hidden_size)
    _check_sampling(message.sampling_params, vocabulary)
    if hasattr(message, "top_logprobs_num"):
        _check_integer("top_logprobs_num", message.top_logprobs_num, (0, vocabulary))
        _check_integer("logprob_start_len", message.logprob_start_len, (-1, INT32[1]))
        for token in message.token_ids_logprob or ():
            _check_integer("token_ids_logprob", token, (0, vocabulary - 1))
        if message.bootstrap_host != NO_PEER and (message.bootstrap_host is not None or not _is_whole(manager)):
            _check_handed_over(manager, message)
        if not _is_whole(manager) and message.bootstrap_host != NO_PEER:
            _check_leg(manager, message)


def _check_kind(manager: Any, message: Any) -> None:
    """Tells whether this engine can do what is asked of it at all."""
    overrides = getattr(message, "positional_embed_overrides", None)
    if overrides is not None and not isinstance(overrides, msgspec.Struct):
        raise ConfigError("positional_embed_overrides is made by SGLang itself, and may not be sent")
    if not hasattr(message, "session_params"):
        return  # an embedding; SGLang refuses it where the model generates
    if not manager.is_generation:
        raise ConfigError("this engine serves an embedding model, which generates nothing; allowed: embeddings")
    if message.session_params is not None:
        if not _is_whole(manager):
            raise ConfigError("session_params are not served by a prefill and decode pair; send the whole conversation")
        _check_types(message.session_params, "session_params.")


def _check_handed_over(manager: Any, message: Any) -> None:
    """What goes beside the KV to a decode instance has places of a fixed number; more of it ends a scheduler."""
    from pla_sglang.plugin.engine.host.transfers import MASK_SETTING, most_mask_tokens

    _check_integer("top_logprobs_num", message.top_logprobs_num, (0, _most_top_logprobs()))
    most = most_mask_tokens(manager.server_args)
    if message.return_sampling_mask and not 0 < message.sampling_params.top_k <= most:
        raise ConfigError(
            f"return_sampling_mask with top_k {message.sampling_params.top_k} is not served by a prefill and decode "
            f"pair; allowed: a top_k of 1 to {most} ({MASK_SETTING})"
        )


@functools.cache
def _most_top_logprobs() -> int:
    from sglang.srt.disaggregation.utils import MetadataBuffers

    most: int = inspect.signature(MetadataBuffers).parameters["max_top_logprobs_num"].default
    return most


def _check_leg(manager: Any, message: Any) -> None:
    """Checks a part of a prefill and decode pair. A decode instance that does not know where the KV is ends."""
    moves_kv = manager.server_args.disaggregation_transfer_backend != "fake"
    decodes = manager.disaggregation_mode.value == "decode"
    if moves_kv and decodes and message.bootstrap_room is not None and not message.bootstrap_host:
        raise ConfigError("bootstrap_host is missing; allowed: the host of the prefill instance")
    note_room(manager, message.bootstrap_room)


def note_room(manager: Any, room: int | None) -> None:
    """A second request of a KV room finds it in a state that ends the scheduler of a prefill instance."""
    if room is None:
        return  # the scheduler refuses it
    rooms: dict[int, None] = vars(manager).setdefault("pla_rooms", {})
    if room in rooms:
        raise ConfigError(f"bootstrap_room {room} was used here before; allowed: another one for each request")
    rooms[room] = None
    if len(rooms) > ROOMS_KEPT:
        del rooms[next(iter(rooms))]


def _check_embeds(embeds: Any, width: int) -> None:
    try:
        rows = np.asarray(embeds, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        rows = np.empty(0)
    if rows.ndim != 2 or not len(rows) or rows.shape[1] != width or not np.isfinite(rows).all():
        raise ConfigError(f"input_embeds has the shape {rows.shape}; allowed: rows of {width} finite numbers")


def _check_prompt(message: Any, vocabulary: int, width: int) -> None:
    """Images stand as placeholders in it, which need not be in the vocabulary: their processor has seen to them."""
    ids, embeds = message.input_ids, getattr(message, "input_embeds", None)
    if message.mm_inputs is not None:
        return
    if embeds is not None:
        _check_embeds(embeds, width)
        return
    if not ids:
        raise ConfigError("a prompt has no token; allowed: at least one")
    tokens = np.frombuffer(ids, dtype=np.int64)
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocabulary:
        raise ConfigError(f"input_ids has token id {least if least < 0 else most}; allowed: 0 to {vocabulary - 1}")
    for place in message.multi_item_delimiter_indices or ():
        _check_integer("multi_item_delimiter_indices", place, (0, len(ids) - 1))


def _check_sampling(params: Any, vocabulary: int) -> None:
    _check_types(params, "sampling_params.")
    if not isinstance(params.custom_params, dict | None):
        raise ConfigError(f"sampling_params.custom_params has {params.custom_params!r:.60}; allowed: an object")
    _check_integer("top_k", params.top_k, (-1, INT32[1]))
    _check_integer("min_new_tokens", params.min_new_tokens, INT32)
    if params.repetition_penalty < LEAST_REPETITION_PENALTY:
        allowed = f"allowed: {LEAST_REPETITION_PENALTY} to 2"
        raise ConfigError(f"repetition_penalty is {params.repetition_penalty}; {allowed}")
    for token, bias in (params.logit_bias or {}).items():
        if not -MOST_BIAS <= bias <= MOST_BIAS:
            raise ConfigError(f"logit_bias of token {token} is {bias}; allowed: {-MOST_BIAS:g} to {MOST_BIAS:g}")
    for token in params.stop_token_ids or ():
        _check_integer("stop_token_ids", token, (0, vocabulary - 1))
    for pattern in params.stop_regex_strs or ():
        _check_pattern(pattern)


def _check_pattern(pattern: str) -> None:
    """A scheduler searches for it after each token, with nothing that would end a search. A repeat of a repeat, as in
    ``(a+)+b``, can take longer than any answer."""
    try:
        re.compile(pattern)  # SGLang has parsed it only, which accepts more
        repeats = _repeats_repeat(_parser.parse(pattern), inside=False)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"stop_regex {pattern!r:.60} is no regular expression: {error}") from None
    if repeats:
        raise ConfigError(
            f"stop_regex {pattern!r:.60} repeats what repeats without a limit; allowed: one level of that"
        )


def _repeats_repeat(tree: Any, *, inside: bool) -> bool:
    """``tree``: a pattern or a part of it, as Python parses it. ``inside``: of what is repeated more than once."""
    if isinstance(tree, _parser.SubPattern):
        return any(_repeats_repeat(part, inside=inside) for part in tree)
    if not isinstance(tree, list | tuple):
        return False
    if len(tree) == 2 and tree[0] in (_parser.MAX_REPEAT, _parser.MIN_REPEAT):
        _, most, body = tree[1]
        if inside and most is _parser.MAXREPEAT:
            return True
        return _repeats_repeat(body, inside=inside or most > 1)
    return any(_repeats_repeat(part, inside=inside) for part in tree)


def _check_integer(name: str, value: Any, allowed: tuple[int, int]) -> None:
    if type(value) is not int or not allowed[0] <= value <= allowed[1]:
        raise ConfigError(f"{name} has {value!r:.60}; allowed: whole numbers, {allowed[0]} to {allowed[1]}")


def _check_types(message: Any, path: str = "") -> None:
    """Each field has a type that SGLang declares for it."""
    kind: type[msgspec.Struct] = type(message)
    names, read, declared = _fields_of(kind)
    try:
        msgspec.convert(read(message), declared)
    except msgspec.ValidationError as error:
        text = _INDEX.sub(lambda found: path + names[int(found[1])], str(error))
        raise ConfigError(f"the request has a value of a type that is not allowed: {text}") from None


@functools.cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[Sequence[str], Callable[[Any], tuple[Any, ...]], Any]:
    """Names of the fields of ``kind`` that are compared, what reads them, and their declared types."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [name for name in kind.__struct_fields__ if name not in _UNCHECKED]
    fields = [(name, _bound(hints[name])) for name in names]
    return names, operator.attrgetter(*names), msgspec.defstruct("Declared", fields, array_like=True)


def _bound(annotation: Any) -> Any:
    """The same with every ``int`` in it as one that fits a tensor."""
    if annotation is int:
        return _INTEGER
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is None or origin in (typing.Literal, Annotated):
        return annotation
    bounded = tuple(_bound(argument) for argument in arguments)
    return functools.reduce(operator.or_, bounded) if origin in (typing.Union, types.UnionType) else origin[bounded]
