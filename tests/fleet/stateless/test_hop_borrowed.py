"""Objects of SGLang that are made without their constructor have all that the methods we call of them read."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from pla_sglang.fleet.stateless.host.detokenize import Detokenizer, PieceEnds

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
    host: Any = Detokenizer(MANAGER, [1, 2], SamplingParams())._host
    read = find_fields(DetokenizerManager, "_decode_batch_token_id_output")
    assert "decode_status" in read
    assert read <= vars(host).keys()


def test_of_a_request() -> None:
    req = PieceEnds(MANAGER, SamplingParams())._req
    read = find_fields(Req, "check_match_stop_str_prefix")
    assert "sampling_params" in read
    assert read <= vars(req).keys()
