"""SGLang's detokenizer keeps what it knows of a text by the id of its request. An id may come again."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from fleet.stateless.splice_scene import load_tokenizer
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components import output_streamer
from sglang.srt.runtime_context import ParallelContext, get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.plugin.engine.host.text import find_tool_close_ids
from pla_sglang.sim.chain import model_path

pytestmark = pytest.mark.usefixtures("published")

PROMPT, ANSWER = "what was asked", "an answer"


@pytest.fixture(autouse=True)
def only_rank() -> Iterator[None]:
    """This process's place among those of a server; some versions say it elsewhere."""
    places = ("dp_rank", "attn_tp_rank")
    with get_parallel().override(**{name: 0 for name in places if hasattr(ParallelContext, name)}):
        yield


class Instance:
    """SGLang's streamer and detokenizer around requests that a test lets generate."""

    def __init__(self) -> None:
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
            calls.show_all_tokens(self.scheduler, req)
        return req

    def end(self, how: str, req: Req) -> None:
        if how == "aborted":
            calls.end_aborted(self.scheduler, req, "Dropped")
        elif how == "moved":
            calls.end_moved(self.scheduler, req)
        else:
            calls.end_with_error(self.scheduler, req, "late", HTTPStatus.SERVICE_UNAVAILABLE)


@pytest.mark.parametrize("how", ["aborted", "moved", "late"])
@pytest.mark.parametrize("streamed", [0, 1, 2, len(ANSWER)])
def test_the_text_of_an_id_that_comes_again(how: str, streamed: int) -> None:
    """Else the second text would begin with the end of its prompt, as if the first request had generated that."""
    instance = Instance()
    for again in (False, True):
        req = instance.begin("r", ANSWER[:streamed])
        assert instance.texts["r"] == ANSWER[:streamed]
        instance.end(how, req)
        assert instance.texts["r"] == ANSWER[:streamed], again
        if streamed and how != "late":
            assert req.time_stats.completion_time > 0
    assert [rid for rid, _ in instance.ends] == ["r", "r"], "each is answered once"
    assert instance.detokenizer.decode_status == {}
