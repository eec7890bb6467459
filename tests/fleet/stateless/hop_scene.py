"""A scheduler's hops against a fake host: batches of requests that generate 100, 101, ... a step at a time."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from fleet.stateless.fakes import FakeSendQueue
from support.request_fields import RequestFields

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.calls import SendPoll
from pla_sglang.fleet.stateless.requests import migration
from pla_sglang.fleet.stateless.requests.commands import Command
from pla_sglang.fleet.stateless.requests.migration import MigrationSide
from pla_sglang.fleet.stateless.transfer.deferred_free import DeferredFree
from pla_sglang.fleet.stateless.transfer.legs import Caps
from pla_sglang.plugin.engine.faults import Faults

FIRST_TOKEN = 100


class HopRequest(RequestFields):
    def __init__(self, rid: str, prompt_tokens: int = 10, new_tokens: int = 50) -> None:
        self.rid = rid
        self.origin_input_ids = list(range(prompt_tokens))
        self.output_ids: list[int] = []
        self.sampling_params = SimpleNamespace(
            max_new_tokens=new_tokens, custom_params=None, ignore_eos=False, stream_interval=None
        )
        self.return_logprob = self.return_sampling_mask = self.return_hidden_states = False
        self.return_routed_experts = self.return_indexer_topk = self.is_retracted = False
        self.session = self.session_id = self.multimodal_inputs = self.input_embeds = None
        self.positional_embed_overrides = self.custom_logit_processor = self.disagg_kv_sender = None
        self.bootstrap_room: int | None = None
        self.stream, self.send_token_offset = True, 0
        self.stop_begins_with: set[int] = set()  # tokens whose text may begin a stop string
        self.finished_reason: Any = None
        self.to_finish: Any = None
        self.time_stats = SimpleNamespace(forward_entry_time=1.0, set_completion_time=lambda: None)

    def finished(self) -> bool:
        return self.finished_reason is not None

    def check_match_stop_str_prefix(self) -> bool:
        return self.output_ids[-1] in self.stop_begins_with

    def commit(self, tokens: int) -> None:
        self.kv_committed_len += tokens
        self.kv_allocated_len += tokens

    def __repr__(self) -> str:
        return self.rid


class FakeBatch:
    def __init__(self, *reqs: HopRequest, extend: bool = False) -> None:
        self.reqs = list(reqs)
        self.batch_is_full = True
        self.chunked_req: HopRequest | None = None
        self.forward_mode = SimpleNamespace(is_extend=lambda: extend)
        self.needed_tokens = 0

    def filter_batch(self, *, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[index] for index in keep_indices]

    def new_tokens_required_next_decode(self) -> int:
        return self.needed_tokens


class HopScene:
    """One scheduler, one turn of its loop at a time; ``overlap``: a step's result is processed in the next turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, overlap: bool = True, share: float = 0.5) -> None:
        self.overlap = overlap
        self.now_s = 0.0
        self.running, self.last = FakeBatch(), None
        self.results: deque[tuple[FakeBatch, None]] = deque()
        self.waiting: list[HopRequest] = []
        self.queue = FakeSendQueue(buffers=4)
        self.answered: list[tuple[str, str]] = []
        self.freed: list[str] = []
        self.sent: list[tuple[str, int, list[int]]] = []
        self.answers: dict[int, list[Any]] = {}
        self.free_tokens, self.overdue = 10_000, set[str]()
        self.shown: list[tuple[str, int | None, int]] = []
        self.scheduler = SimpleNamespace(
            output_streamer=SimpleNamespace(stream_output=self._show),
            chunked_req=None,
            result_queue=self.results,
            max_total_num_tokens=100,
            req_to_token_pool=SimpleNamespace(size=8),
            model_config=SimpleNamespace(num_key_value_heads=1),
            pla_fleet=SimpleNamespace(now_s=lambda: self.now_s),
            send_kv_chunk=self._send,
            _engine_paused=False,
        )
        self.faults = Faults()
        self.deferred = DeferredFree(lambda flags: flags, self.faults)
        self.migration = MigrationSide(
            self.scheduler,
            self.queue,
            self.deferred,
            faults=self.faults,
            agree=lambda flags: flags,
            list_waiting=lambda: self.waiting,
            caps=Caps.of_share(self.scheduler, share),
        )
        self._tickets = 0
        self._fake_host(monkeypatch)

    def _fake_host(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(calls, "poll_senders", lambda scheduler, senders: [sender.outcome for sender in senders])
        patch.setattr(calls, "free_metadata", self._free_metadata)
        patch.setattr(calls, "release_kv", lambda scheduler, req, keep_prefix=True: self.freed.append(req.rid))
        patch.setattr(calls, "end_aborted", lambda scheduler, req, reason: self._answer(req, reason))
        patch.setattr(calls, "end_moved", lambda scheduler, req: self._answer(req, "moved"))
        patch.setattr(calls, "end_with_error", lambda scheduler, req, reason, status: self._answer(req, f"{status:d}"))
        patch.setattr(calls, "finish_with_next_step", lambda req: setattr(req, "to_finish", "Aborted"))
        patch.setattr(calls, "has_run_too_long", lambda req: req.rid in self.overdue)
        patch.setattr(
            calls, "lacks_memory", lambda scheduler, batch: batch.new_tokens_required_next_decode() > self.free_tokens
        )
        patch.setattr(
            migration, "send_answers", lambda scheduler, ticket, answers: self.answers.update({ticket: answers})
        )
        patch.setattr(
            "pla_sglang.fleet.stateless.transfer.rooms.tcp_address", lambda name, port: (f"tcp://{name}:{port}", False)
        )
        self.refused: list[tuple[str, list[bytes]]] = []
        self.queue.kv_manager._send_multipart_locked = lambda endpoint, message, is_ipv6: self.refused.append(
            (endpoint, message)
        )

    def _show(self, reqs: list[HopRequest], logprob: bool) -> None:
        for req in reqs:
            self.shown.append((req.rid, req.sampling_params.stream_interval, len(req.output_ids)))
            req.send_token_offset = len(req.output_ids)

    def _free_metadata(self, scheduler: Any, export_request: Any) -> None:
        assert export_request.metadata_buffer_index == 0, "freed twice"
        export_request.metadata_buffer_index = -1
        self.queue.buffers += 1

    def _answer(self, req: HopRequest, what: str) -> None:
        assert not req.finished(), "answered twice"
        req.finished_reason = what
        self.answered.append((req.rid, what))

    def _send(self, export_request: HopRequest, *, last_chunk: bool, end_idx: int | None) -> None:
        assert last_chunk
        assert end_idx is None
        assert export_request.bootstrap_room is not None
        self.sent.append(
            (
                export_request.rid,
                export_request.bootstrap_room,
                [len(export_request.origin_input_ids), *export_request.output_ids],
            )
        )

    # -- turns of the loop ---------------------------------------------------------------------------------------------

    def prefill(self, *reqs: HopRequest) -> None:
        """A pass that computes the prompts of ``reqs``."""
        self._launch(FakeBatch(*reqs, extend=True), *(len(req.origin_input_ids) for req in reqs))

    def turn(self) -> None:
        """A whole turn: commands, then a decode step of what runs."""
        self.before()
        self.decode()

    def before(self) -> None:
        """What comes before the host chooses a batch; then, as the host does, the prefilled join those that run."""
        self.migration.before_batches(self.running, self.last, self.now_s)
        self.deferred.sweep(self.now_s)
        if self.last is not None and self.last.forward_mode.is_extend():
            joining = [req for req in self.last.reqs if not req.finished() and req is not self.scheduler.chunked_req]
            self.running.reqs += joining
            self.last = None
        self.running.reqs += self.migration.holder.take_returning(4, lambda req: True)
        self.running.reqs = [req for req in self.running.reqs if not req.finished()]

    def decode(self) -> None:
        if self.running.reqs:
            self._launch(self.running, *(1 for _ in self.running.reqs))
        else:
            self.process()
            self.last = None

    def _launch(self, batch: FakeBatch, *tokens: int) -> None:
        for req, count in zip(batch.reqs, tokens, strict=True):
            req.commit(count)
        copied = FakeBatch(*batch.reqs)
        if not self.overlap:
            self.results.append((copied, None))
            self.process()
        else:
            self.process()
            self.results.append((copied, None))
        self.last = batch

    def process(self) -> None:
        """The result of the step under way."""
        while self.results:
            batch, _ = self.results.popleft()
            for req in batch.reqs:
                if req.finished() or req is self.scheduler.chunked_req:
                    continue
                req.output_ids.append(FIRST_TOKEN + len(req.output_ids))
                if req.to_finish or len(req.output_ids) >= req.sampling_params.max_new_tokens:
                    self._answer(req, req.to_finish or "length")
                    self.freed.append(req.rid)

    # -- commands ------------------------------------------------------------------------------------------------------

    def order(self, *commands: Command) -> int:
        """Send a message; its ticket."""
        self._tickets += 1
        self.migration.take_message(SimpleNamespace(ticket=self._tickets, commands=commands))
        return self._tickets

    def hold(self, req: HopRequest, room: int = 7, for_s: float = 10.0) -> Any:
        """Hold a running request; the answer."""
        ticket = self.order(Command("hold", room, req.rid, for_s))
        for _ in range(3):
            if ticket not in self.answers:
                self.turn()
        [answer] = self.answers[ticket]
        return answer

    def command(self, do: str, room: int = 7) -> Any:
        """Another command; the answer."""
        ticket = self.order(Command(do, room))
        self.before()
        [answer] = self.answers[ticket]
        return answer

    def start(self, rid: str = "r", **fields: Any) -> HopRequest:
        """A request that has run for some steps."""
        req = HopRequest(rid, **fields)
        self.prefill(req)
        self.turn()
        self.turn()
        return req

    def ask(self, room: int = 7) -> Any:
        """An instance says where the KV of a room goes; its sender."""
        sender = self.migration.holder.holds[room].export_request.disagg_kv_sender
        sender.outcome = SendPoll.ASKED
        self.before()
        return sender

    def assert_at_rest(self) -> None:
        totals = self.migration.holder.totals
        ways = ("committed", "aborted", "timed_out", "ended_by_pause", "ended_by_fault")
        ended = sum(totals[way] for way in ways)
        resumed = sum(count for way, count in totals.items() if way.startswith("resumed_by_"))
        assert totals["held"] == ended + resumed, "each hold that was made ends once"
        assert not self.migration.holder.holds
        assert self.queue.buffers == 4
        assert len(self.deferred) == 0
