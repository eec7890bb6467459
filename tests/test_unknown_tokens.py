"""Prompts with token ids that the model does not have are refused before they reach a scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.engine.hooks.http_server import refuse_unknown_tokens
from pla_sglang.errors import ConfigError

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=512), mm_processor=None)
SEES_IMAGES = SimpleNamespace(model_config=MANAGER.model_config, mm_processor=object())


class Request:
    """Of the host's request only what the hook looks at."""

    def __init__(self, input_ids: Any, *, images: bool = False) -> None:
        self.input_ids, self._images = input_ids, images
        self.normalized = False
        self.is_single = True

    def contains_mm_input(self) -> bool:
        return self._images

    def normalize_batch_and_arguments(self) -> None:
        self.normalized = True


@pytest.mark.parametrize(
    ("input_ids", "token"),
    [([512], 512), ([1, 2, 99_999_999], 99_999_999), ([3, -1], -1), ([[1, 2], [3, 512]], 512), ([[], [-7]], -7)],
)
def test_ids_outside_the_vocabulary_are_refused(input_ids: Any, token: int) -> None:
    request = Request(input_ids)
    with pytest.raises(ConfigError, match=f"token id {token}; allowed: 0 to 511"):
        refuse_unknown_tokens(MANAGER, request, None)
    assert request.normalized, "the host aborts what a refused stream may have started, and must know its ids"
    assert issubclass(ConfigError, ValueError), "which the host answers with 400"


@pytest.mark.parametrize("input_ids", [None, [], [[]], [0, 511], [[0], [511, 5]]])
def test_others_pass(input_ids: Any) -> None:
    refuse_unknown_tokens(MANAGER, Request(input_ids), None)


def test_placeholders_beside_images_are_the_hosts_matter() -> None:
    refuse_unknown_tokens(SEES_IMAGES, Request([1, -200], images=True), None)


def test_images_open_no_way_past_a_model_of_text() -> None:
    """Its host has no processor that would replace placeholders, and sends the ids to the scheduler as they are."""
    with pytest.raises(ConfigError, match="token id 99999999"):
        refuse_unknown_tokens(MANAGER, Request([99_999_999], images=True), None)


def test_a_request_without_token_ids() -> None:
    refuse_unknown_tokens(MANAGER, SimpleNamespace(text="hello"), None)


def test_an_image_in_a_batch_opens_no_way_for_the_prompts_beside_it() -> None:
    """With the host's own request, which says which prompt has which image; it is not normalized here."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    def batch(*prompts: list[int]) -> GenerateReqInput:
        images = [["image"], *([None] * (len(prompts) - 1))]
        return GenerateReqInput(input_ids=list(prompts), image_data=images, sampling_params={"n": 1})

    with pytest.raises(ConfigError, match="token id 99999999"):
        refuse_unknown_tokens(SEES_IMAGES, batch([1, -200], [99_999_999]), None)
    kept = batch([1, -200], [5])
    refuse_unknown_tokens(SEES_IMAGES, kept, None)
    assert kept.rid is None
