"""Requests that would end a scheduler are refused before it gets them, and others pass."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import (
    EmbeddingReqInput,
    GenerateReqInput,
    SessionParams,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from pla_patches.host import recorded
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.engine.hooks.guards import after_compute_logprobs
from pla_sglang.plugin.engine.request_checks import ROOMS_KEPT, check_message, check_request, make_message, note_room

VOCABULARY = 512
NULL = DisaggregationMode.NULL


def manager(*, generates: bool = True, mode: DisaggregationMode = NULL) -> SimpleNamespace:
    config = SimpleNamespace(vocab_size=VOCABULARY, hidden_size=4)
    args = SimpleNamespace(disaggregation_transfer_backend="nixl")
    return SimpleNamespace(model_config=config, is_generation=generates, disaggregation_mode=mode, server_args=args)


def make(*_: Any, sampling: dict[str, Any] | None = None, **fields: Any) -> TokenizedGenerateReqInput:
    """As SGLang makes it of a request with these values."""
    params = SamplingParams(**({"max_new_tokens": 4} | (sampling or {})))
    params.normalize(SimpleNamespace(encode=lambda text, **_: [0] * len(text)))
    params.verify(VOCABULARY)
    usual: dict[str, Any] = {
        "input_text": "",
        "input_ids": array("q", [1, 2, 3]),
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": False,
        "rid": "a",
    }
    none = dict.fromkeys(("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
    return TokenizedGenerateReqInput(sampling_params=params, **(none | usual | fields))


GOOD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "first and last token": ({"input_ids": array("q", [0, VOCABULARY - 1])}, {}),
    "logprobs": ({"return_logprob": True, "top_logprobs_num": VOCABULARY, "token_ids_logprob": [0, 511]}, {}),
    "bias": ({}, {"logit_bias": {"5": 1, "6": -100.5, "7": 1e9}}),
    "stops": ({}, {"stop": ["a", "é"], "stop_token_ids": [0, 511], "stop_regex": ["a+b", r"\d{3}"]}),
    "a whole number for a float": ({}, {"temperature": 1, "top_p": 1}),
    "no limit of tokens": ({}, {"max_new_tokens": None, "min_new_tokens": 3}),
    "custom params": ({}, {"custom_params": {"slo_ttft_ms": 5, "anything": [{"at": "all"}]}}),
    "a session": ({"session_params": SessionParams(id="s", offset=3)}, {}),
    "names": ({"extra_key": "k", "priority": -5, "lora_id": "x", "bootstrap_room": 2**62}, {}),
    "embeddings as prompt": ({"input_ids": None, "input_embeds": [[0.5, 1, 2, 3]]}, {}),
    "images stand for themselves": ({"input_ids": array("q", [-200]), "mm_inputs": object()}, {}),
}


@pytest.mark.parametrize(("fields", "sampling"), GOOD.values(), ids=GOOD)
def test_what_an_engine_serves_passes(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    check_message(manager(), make(sampling=sampling, **fields))


# name -> fields, sampling parameters, words of the refusal
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no token": ({"input_ids": array("q")}, {}, "a prompt has no token"),
    "token beyond": ({"input_ids": array("q", [3, 512])}, {}, "input_ids has token id 512; allowed: 0 to 511"),
    "token below": ({"input_ids": array("q", [3, -1])}, {}, "input_ids has token id -1; allowed: 0 to 511"),
    "top logprobs": ({"top_logprobs_num": 513}, {}, "top_logprobs_num has 513; allowed: whole numbers, 0 to 512"),
    "top logprobs below 0": ({"top_logprobs_num": -1}, {}, "top_logprobs_num has -1"),
    "top logprobs as text": ({"top_logprobs_num": "5"}, {}, "got `str` - at `top_logprobs_num`"),
    "logprob tokens": (
        {"token_ids_logprob": [1, 512]},
        {},
        "token_ids_logprob has 512; allowed: whole numbers, 0 to 511",
    ),
    "logprobs from before": ({"logprob_start_len": -2}, {}, "logprob_start_len has -2"),
    "logprobs from a bool": ({"logprob_start_len": True}, {}, "got `bool` - at `logprob_start_len`"),
    "bias as list": ({}, {"logit_bias": []}, "got `array` - at `sampling_params.logit_bias`"),
    "bias as text": ({}, {"logit_bias": {"5": "x"}}, "got `str` - at `sampling_params.logit_bias"),
    "bias not a number": ({}, {"logit_bias": {"5": math.nan}}, "logit_bias of token 5 is nan; allowed: -1e"),
    "bias without end": ({}, {"logit_bias": {"5": -math.inf}}, "logit_bias of token 5 is -inf"),
    "bias beyond float32": ({}, {"logit_bias": {"5": 1e39}}, r"logit_bias of token 5 is 1e\+39"),
    "top_k beyond int32": ({}, {"top_k": 2**31}, "top_k has 2147483648; allowed"),
    "min_new_tokens beyond int32": (
        *({}, {"min_new_tokens": 2**31, "max_new_tokens": None}, "min_new_tokens has 2147483648; allowed"),
    ),
    "repetition penalty of almost 0": (
        {},
        {"repetition_penalty": 1e-310},
        "repetition_penalty is 1e-310; allowed: 1e-06",
    ),
    "stop tokens": ({}, {"stop_token_ids": [512]}, "stop_token_ids has 512; allowed: whole numbers, 0 to 511"),
    "stop pattern": ({}, {"stop_regex": "(?<=a+)b"}, "no regular expression: look-behind"),
    "stop pattern that never ends": ({}, {"stop_regex": "(.*)*x"}, "repeats what repeats"),
    "a number for a bool": ({}, {"skip_special_tokens": 0}, "got `int` - at `sampling_params.skip_special_tokens`"),
    "grammar as list": ({}, {"regex": [5]}, "got `array` - at `sampling_params.regex`"),
    "grammar as object": ({}, {"json_schema": {"type": "object"}}, "got `object` - at `sampling_params.json_schema`"),
    "custom params as list": ({}, {"custom_params": [1]}, r"custom_params has \[1\]; allowed: an object"),
    "key as list": ({"extra_key": ["a"]}, {}, "got `array` - at `extra_key`"),
    "priority": ({"priority": 2**64}, {}, "at `priority`"),
    "room": ({"bootstrap_room": 2**63}, {}, "at `bootstrap_room`"),
    "session": ({"session_params": SessionParams(id=5)}, {}, "got `int` - at `session_params.id`"),
    "embeddings of another width": ({"input_embeds": [[1.0, 2.0]]}, {}, r"shape \(1, 2\); allowed: rows of 4 finite"),
    "embeddings of no shape": ({"input_embeds": [[1.0] * 4, [2.0]]}, {}, "input_embeds has the shape"),
    "embeddings without end": ({"input_embeds": [[math.inf] * 4]}, {}, "input_embeds has the shape"),
    "what SGLang makes itself": ({"positional_embed_overrides": 5.0}, {}, "made by SGLang itself"),
    "delimiters of no list": ({"multi_item_delimiter_indices": 3}, {}, "got `int` - at `multi_item_delimiter_indices`"),
    "delimiters beyond the prompt": ({"multi_item_delimiter_indices": [3]}, {}, "multi_item_delimiter_indices has 3"),
}


@pytest.mark.parametrize(("fields", "sampling", "words"), BAD.values(), ids=BAD)
def test_what_would_end_an_engine_is_refused(fields: dict[str, Any], sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_message(lambda *_: make(sampling=sampling, **fields), manager(), None)
    assert issubclass(ConfigError, ValueError), "which the host answers with 400"


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_beyond_int64_is_refused(seed: int) -> None:
    """By SGLang itself, where it looks at it."""
    with pytest.raises(ValueError, match="sampling_seed"):
        make_message(lambda *_: make(sampling={"sampling_seed": seed}), manager(), None)


def test_an_embedding_model_generates_nothing() -> None:
    with pytest.raises(ConfigError, match="serves an embedding model"):
        check_message(manager(generates=False), make())
    params = SamplingParams(max_new_tokens=0)
    embedding = TokenizedEmbeddingReqInput(
        input_text="", input_ids=array("q", [5]), mm_inputs=None, token_type_ids=None, sampling_params=params
    )
    check_message(manager(generates=False), embedding)
    embedding.input_ids = array("q")
    with pytest.raises(ConfigError, match="no token"):
        check_message(manager(generates=False), embedding)


@pytest.mark.parametrize("mode", [DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
def test_a_pair_has_no_sessions(mode: DisaggregationMode) -> None:
    check_message(manager(mode=mode), make())
    with pytest.raises(ConfigError, match="session_params are not served by a prefill and decode pair"):
        check_message(manager(mode=mode), make(session_params=SessionParams(id="s")))


@pytest.mark.parametrize("n", [0, -1, 129, 10**9, 1.5, True, "2", None, [1]])
def test_a_number_of_samples_that_would_fill_the_memory(n: Any) -> None:
    for params in ({"n": n}, [{"n": 1}, {"n": n}]):
        request = GenerateReqInput(text="a", sampling_params=params)
        with pytest.raises(ConfigError, match=r"n has .*; allowed: whole numbers, 1 to 128"):
            check_request(manager(), request)
        assert request.is_single, "the host aborts what a refused stream may have started, and asks for this"


def test_a_pair_makes_one_sample() -> None:
    """All samples of a prompt would have its room, and the second leg of a room ends a prefill instance."""
    request = GenerateReqInput(text="a", sampling_params={"n": 2}, bootstrap_room=7)
    with pytest.raises(ConfigError, match="n has 2; allowed: whole numbers, 1 to 1"):
        check_request(manager(mode=DisaggregationMode.PREFILL), request)


def test_a_room_is_used_once_at_an_instance_of_a_pair() -> None:
    one = manager(mode=DisaggregationMode.PREFILL)
    check_message(one, make(bootstrap_room=7))
    check_message(one, make(bootstrap_room=8))
    with pytest.raises(ConfigError, match="bootstrap_room 7 was used here before"):
        check_message(one, make(bootstrap_room=7))
    other = manager(mode=DisaggregationMode.DECODE)
    check_message(other, make(bootstrap_room=7, bootstrap_host="a"))


def test_a_decode_instance_is_told_where_the_kv_is() -> None:
    one = manager(mode=DisaggregationMode.DECODE)
    check_message(one, make())  # without a room the scheduler itself refuses it
    for host in (None, ""):
        with pytest.raises(ConfigError, match="bootstrap_host is missing"):
            check_message(one, make(bootstrap_room=9, bootstrap_host=host))


def test_old_rooms_are_forgotten() -> None:
    one = manager(mode=DisaggregationMode.DECODE)
    for room in range(ROOMS_KEPT + 1):
        note_room(one, room)
    note_room(one, 0)
    with pytest.raises(ConfigError):
        note_room(one, ROOMS_KEPT)


@pytest.mark.parametrize("params", [3, "a", [3], [None]])
def test_sampling_parameters_of_another_type(params: Any) -> None:
    with pytest.raises(ConfigError, match="allowed: an object, or a list of them"):
        check_request(manager(), GenerateReqInput(text="a", sampling_params=params))


@pytest.mark.parametrize(
    "request_", [GenerateReqInput(text="a"), GenerateReqInput(input_ids=[[1], [2]]), EmbeddingReqInput(text=["a"])]
)
def test_usual_requests_are_not_touched(request_: Any) -> None:
    before = dict(vars(request_))
    check_request(manager(), request_)
    assert vars(request_) == before


def test_the_ids_in_a_batch_encoding() -> None:
    """Chat templates of transformers 5 give one in place of ids, as SGLang's /api/chat passes it on."""
    from transformers import BatchEncoding

    encoded = BatchEncoding({"input_ids": [1, 2], "attention_mask": [1, 1]})
    request = GenerateReqInput(input_ids=encoded, sampling_params={})
    check_request(manager(), request)
    assert request.input_ids == [1, 2]


@pytest.mark.parametrize("ids", [{"a": 1}, "abc", 5, [{"a": 1}], [["a"]]])
def test_ids_of_other_types_are_left_to_the_host(ids: Any) -> None:
    check_request(manager(), GenerateReqInput(input_ids=ids, sampling_params={}))


def test_what_the_host_itself_cannot_take() -> None:
    def make_with(error: Exception) -> Any:
        def original(*_: Any) -> Any:
            raise error

        return original

    for error in (TypeError("'<' not supported"), AttributeError("x"), OverflowError("too large"), KeyError("a")):
        with pytest.raises(ConfigError, match="a value that SGLang cannot take"):
            make_message(make_with(error), manager(), None)
    with pytest.raises(MemoryError):
        make_message(make_with(MemoryError()), manager(), None)


NUMBERS = st.integers() | st.floats() | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(
    set(TokenizedGenerateReqInput.__struct_fields__) - {"sampling_params", "session_params", "mm_inputs", "input_ids"}
)
PARAMS = sorted(set(SamplingParams.__struct_fields__) - {"is_normalized", "stop_str_max_len", "stop_regex_max_len"})


@settings(max_examples=400)
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2),
    sampling=st.dictionaries(st.sampled_from(PARAMS), VALUES, max_size=2),
)
def test_any_value_is_refused_or_passes_and_raises_nothing_else(
    fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    try:
        check_request(manager(), GenerateReqInput(text="a", sampling_params=sampling))
        make_message(lambda *_: make(sampling=sampling, **fields), manager(), None)
    except ValueError:
        return  # of ours, or the host's own words


def test_a_request_without_token_ids_beside_one_with_them_has_a_tensor_too() -> None:
    logprobs = torch.zeros(2, 8)
    result = SimpleNamespace(token_ids_logprobs_val=[[], logprobs[1, :2]])
    after_compute_logprobs(result, None, logprobs)
    assert [value.tolist() for value in result.token_ids_logprobs_val] == [[], [0.0, 0.0]]
    nothing = SimpleNamespace(token_ids_logprobs_val=None)
    after_compute_logprobs(nothing, None, logprobs)
    assert nothing.token_ids_logprobs_val is None


def test_the_host_gives_a_list_there_where_it_has_our_seam() -> None:
    from sglang.srt.layers.logprob_processor import OutputLogprobProcessor

    original = OutputLogprobProcessor.compute_logprobs
    original = getattr(original, "__wrapped__", original)
    result = original(OutputLogprobProcessor(), torch.zeros(2, 8), [0, 0], [None, [1, 2]], torch.tensor([0, 1]))
    without, beside = result.token_ids_logprobs_val
    assert isinstance(without, list) == ("guard.logprobs" not in recorded().absent)
    assert isinstance(beside, torch.Tensor)


@pytest.mark.parametrize("mode", [NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
@pytest.mark.parametrize(
    ("sampling", "fields", "problem"),
    [
        ({}, {"top_logprobs_num": 128, "return_logprob": True}, None),
        ({}, {"top_logprobs_num": 129, "return_logprob": True}, "top_logprobs_num has 129; allowed: .* 0 to 128"),
        ({"top_k": 4}, {"return_sampling_mask": True}, "return_sampling_mask with top_k 4 is not served"),
    ],
)
def test_what_goes_beside_the_kv_has_room_there(
    mode: DisaggregationMode, sampling: dict[str, Any], fields: dict[str, Any], problem: str | None
) -> None:
    """A leg of a stateless instance, too; a request that is served whole may have more."""
    one = manager(mode=mode)
    message = make(sampling=sampling, bootstrap_room=1, bootstrap_host="10.0.0.1", **fields)
    if problem is None:
        check_message(one, message)
        return
    with pytest.raises(ConfigError, match=problem):
        check_message(one, message)
    check_message(manager(), make(sampling=sampling, **fields))
