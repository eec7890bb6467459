"""SGLang's detokenizer keeps what it knows of a text by the id of its request. An id may come again."""

from __future__ import annotations

import dataclasses
from array import array
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from hops.splice_scene import load_tokenizer
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components import output_streamer
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from pla_sglang.chain import model_path
from pla_sglang.engine.host.text import find_tool_close_ids
from pla_sglang.engine.stateless import host

pytestmark = pytest.mark.usefixtures("published")

PROMPT, ANSWER = "what was asked", "an answer"


class Instance:
    """SGLang's streamer and detokenizer around requests that a test lets generate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(output_streamer, "get_serving", lambda: SimpleNamespace(stream_interval=1))
        off = SimpleNamespace(enable_request_time_stats_logging=False)
        monkeypatch.setattr(output_streamer, "get_observability", lambda: off)
        self.texts: dict[str, str] = {}
        self.ends: list[tuple[str, Any]] = []
        self.tokenizer = load_tokenizer(model_path())
        self.detokenizer = DetokenizerManager.__new__(DetokenizerManager)
        self.detokenizer.tokenizer, self.detokenizer.vocab_size = self.tokenizer, len(self.tokenizer)
        self.detokenizer.decode_status = {}
        self.detokenizer.disable_tokenizer_batch_decode = self.detokenizer.is_tool_call_parser_gpt_oss = False
        vars(self.detokenizer)["tool_close_token_ids"] = find_tool_close_ids(None, self.tokenizer)
        to_tokenizer = SimpleNamespace(send_output=lambda message, req: self._take_abort(message))
        parts = {
            "send_to_detokenizer": SimpleNamespace(send_output=self._take_output),
            "tree_cache": None,
            "ps": SimpleNamespace(dp_rank=0, attn_tp_rank=0),
            "server_args": SimpleNamespace(),
            "is_generation": True,
            "spec_algorithm": SpeculativeAlgorithm.NONE,
            "disaggregation_mode": DisaggregationMode.NULL,
            "enable_hicache_storage": lambda: False,
        }
        make = output_streamer.SchedulerOutputStreamer
        asked = [field.name for field in dataclasses.fields(make)]  # not every version asks for ranks
        streamer = make(**{name: part for name, part in parts.items() if name in asked})
        self.scheduler = SimpleNamespace(
            output_streamer=streamer, ipc_channels=SimpleNamespace(send_to_tokenizer=to_tokenizer)
        )

    def _take_output(self, output: BatchTokenIDOutput) -> None:
        said = self.detokenizer.handle_batch_token_id_out(output)
        for rid, text, reason in zip(said.rids, said.output_strs, said.finished_reasons, strict=True):
            self.texts[rid] += text
            if reason is not None:
                self.ends.append((rid, reason["type"]))

    def _take_abort(self, message: AbortReq) -> None:
        self.ends.append((message.rid, "abort"))

    def begin(self, rid: str, answer: str) -> Req:
        """A request whose client has all of ``answer``."""
        req = Req(
            rid,
            PROMPT,
            array("q", self.tokenizer.encode(PROMPT)),
            SamplingParams(),
            stream=True,
            vocab_size=len(self.tokenizer),
        )
        req.sampling_params.normalize(self.tokenizer)
        req.tokenizer = self.tokenizer
        self.texts[rid] = ""
        for token in self.tokenizer.encode(answer):
            req.output_ids.append(token)
            host.show_all_tokens(self.scheduler, req)
        return req

    def end(self, how: str, req: Req) -> None:
        if how == "aborted":
            host.end_aborted(self.scheduler, req, "Dropped")
        elif how == "moved":
            host.end_moved(self.scheduler, req)
        else:
            host.end_with_error(self.scheduler, req, "late", HTTPStatus.SERVICE_UNAVAILABLE)


@pytest.mark.parametrize("how", ["aborted", "moved", "late"])
@pytest.mark.parametrize("streamed", [0, 1, 2, len(ANSWER)])
def test_the_text_of_an_id_that_comes_again(monkeypatch: pytest.MonkeyPatch, how: str, streamed: int) -> None:
    """Else the second text would begin with the end of its prompt, as if the first request had generated that."""
    instance = Instance(monkeypatch)
    for again in (False, True):
        req = instance.begin("r", ANSWER[:streamed])
        assert instance.texts["r"] == ANSWER[:streamed]
        instance.end(how, req)
        assert instance.texts["r"] == ANSWER[:streamed], again
        if streamed and how != "late":
            assert req.time_stats.completion_time > 0
    assert [rid for rid, _ in instance.ends] == ["r", "r"], "each is answered once"
    assert instance.detokenizer.decode_status == {}
