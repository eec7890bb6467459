"""The host's detokenizer for one request, in the process that serves HTTP: for an answer that began elsewhere.

SGLang's detokenizer process sees such an answer in one piece. What a stream shows depends on where its pieces end: a
piece that ends inside a character, or in what may be a stop string, is held back; so old tokens are gone through here
in the pieces in which they were streamed, and new ones as they come.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.plugin.engine.host.text import find_tool_close_ids

DecodeBatch = Callable[[Any, Any], list[str]]
PROMPT_TAIL = 5  # tokens of the prompt before the answer, from which the host's detokenizer starts


class Detokenizer:
    """Turns the token ids of one answer into text, and knows after which of them the host streams what it has.

    Args:
        manager: the host's TokenizerManager.
        prompt_ids: token ids of the prompt.
        params: the host's sampling parameters of the request, normalized.
    """

    def __init__(self, manager: Any, prompt_ids: Sequence[int], params: Any) -> None:
        from sglang.srt.managers.detokenizer_manager import DetokenizerManager
        from sglang.srt.managers.schedule_batch import Req

        args = resolve(manager.server_args)
        self._params = params
        self._tail: list[int] = list(prompt_ids[-PROMPT_TAIL:])
        self._offset = len(self._tail)
        self._host = host = DetokenizerManager.__new__(DetokenizerManager)  # without its sockets
        host.tokenizer, host.vocab_size = manager.tokenizer, len(manager.tokenizer)
        host.decode_status = {}
        host.disable_tokenizer_batch_decode = args.disable_tokenizer_batch_decode
        host.is_tool_call_parser_gpt_oss = args.tool_call_parser == "gpt-oss"
        vars(host)["tool_close_token_ids"] = find_tool_close_ids(args.tool_call_parser, manager.tokenizer)
        original = DetokenizerManager._decode_batch_token_id_output
        self._decode = functools.partial(around_decode_batch, original) if has_our_seam() else original
        self._interval = params.stream_interval or args.stream_interval
        self._req = Req.__new__(Req)  # what its check for stop strings reads, and nothing else
        self._req.sampling_params, self._req.tokenizer = params, manager.tokenizer
        self._req.output_ids = array("q")

    def note_token(self, token: int) -> bool:
        """Tells whether a piece ends with ``token``, the next of the answer: as many are there as are streamed at once,
        and the end of the answer cannot become a stop string."""
        ids = self._req.output_ids
        ids.append(token)
        is_due = self._interval <= 1 or len(ids) % self._interval == 1
        return is_due and not (bool(self._params.stop_strs) and self._req.check_match_stop_str_prefix())

    def add_tokens(self, ids: Sequence[int], finish_reason: dict[str, Any] | None = None) -> str:
        """The text that ``ids`` add to what was returned before; ``finish_reason``: these are the last."""
        piece = SimpleNamespace(
            rids=["answer"],
            decoded_texts=[""],
            decode_ids=[[*self._tail, *ids]],
            read_offsets=[self._offset],
            finished_reasons=[finish_reason],
            no_stop_trim=[self._params.no_stop_trim],
            skip_special_tokens=[self._params.skip_special_tokens],
            spaces_between_special_tokens=[self._params.spaces_between_special_tokens],
        )
        self._tail = []
        [text] = self._decode(self._host, piece)
        return str(text)


def has_our_seam() -> bool:
    """Tells whether ``around_decode_batch`` is at work in the host's detokenizer process: that of SGLang 0.5.17 loads
    no plugins. What an answer's text is there, it has to be here."""
    from sglang.srt.managers import detokenizer_manager

    return hasattr(detokenizer_manager, "load_plugins")


def around_decode_batch(original: DecodeBatch, manager: Any, recv_obj: Any) -> list[str]:
    """Around ``DetokenizerManager._decode_batch_token_id_output``: no part of a text is returned twice.

    Where a piece ends inside a character, the host returns what is printable before it, and notes that much as sent. If
    less is printable with the next piece, which also ends inside one, it notes less. The difference comes again.
    """
    statuses = manager.decode_status
    sent = [(rid, statuses[rid].sent_offset) for rid in recv_obj.rids if rid in statuses]
    texts = original(manager, recv_obj)
    for rid, chars in sent:
        if rid in statuses:
            statuses[rid].sent_offset = max(statuses[rid].sent_offset, chars)
    return texts
