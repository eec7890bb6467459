"""Objects of SGLang that are made without their constructor have all that the methods we call of them read."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from pla_patches import host
from pla_sglang.fleet.stateless.host import detokenize
from pla_sglang.fleet.stateless.host.detokenize import PROMPT_TAIL, Detokenizer

ARGS = SimpleNamespace(disable_tokenizer_batch_decode=False, tool_call_parser=None, stream_interval=1)
MANAGER = SimpleNamespace(tokenizer="", server_args=ARGS)


def find_fields(owner: type, method: str) -> set[str]:
    """Fields that ``method`` reads of its object, also in the methods that it calls."""
    fields, seen, open_ = set[str](), set[str](), [method]
    while open_:
        name = open_.pop()
        if name in seen:
            continue
        seen.add(name)
        found = inspect.getattr_static(owner, name)
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(found, "fget", None) or getattr(owner, name))))
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"):
                continue
            is_code = callable(getattr(owner, node.attr, None)) or isinstance(getattr(owner, node.attr, None), property)
            (open_.append if is_code else fields.add)(node.attr)
    return fields


def test_of_the_detokenizer() -> None:
    made: Any = Detokenizer(MANAGER, [1, 2], SamplingParams())._host
    read = find_fields(DetokenizerManager, "_decode_batch_token_id_output")
    assert "decode_status" in read
    assert read <= vars(made).keys()


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def __len__(self) -> int:
        return 256

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")

    def batch_decode(self, batch: list[list[int]], **_: Any) -> list[str]:
        return [self.decode(ids) for ids in batch]


def decode_in_pieces(text: str, tokens: int) -> str:
    """``text`` as a stream shows it whose pieces have that many tokens."""
    params = SamplingParams()
    params.stop_strs = []
    detokenizer = Detokenizer(SimpleNamespace(tokenizer=Bytes(), server_args=ARGS), [65] * PROMPT_TAIL, params)
    ids = list(text.encode())
    pieces = [ids[place : place + tokens] for place in range(0, len(ids), tokens)]
    shown = [detokenizer.add_tokens(piece) for piece in pieces[:-1]]
    return "".join([*shown, detokenizer.add_tokens(pieces[-1], {"type": "length"})])


def test_the_host_alone_shows_text_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it does not any more, the seam can go."""
    monkeypatch.setattr(detokenize, "has_our_seam", lambda: False)
    text = ' f漢b }"字]漢€字}€ 🙂'
    assert len(decode_in_pieces(text, 3)) > len(text)


@given(st.text(' f漢b}"字]€🙂\n', min_size=1, max_size=40), st.integers(1, 8))
def test_no_text_is_shown_twice(text: str, tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detokenize, "has_our_seam", lambda: True)
        assert decode_in_pieces(text, tokens) == text


def test_the_seam_is_where_the_host_loads_plugins() -> None:
    assert detokenize.has_our_seam() == ("less.text" not in host.recorded().absent)


def test_of_a_request() -> None:
    req = Detokenizer(MANAGER, [1, 2], SamplingParams())._req
    read = find_fields(Req, "check_match_stop_str_prefix")
    assert "sampling_params" in read
    assert read <= vars(req).keys()
