"""A stand-in for SGLang's scheduler with just the fields that the engine driver touches.

It is a fake: that the real scheduler has these fields, and uses them as here, is checked by the end-to-end tests. It is
for states that a real server gets into too rarely to test, such as an exception in the middle of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.host.requests import extend_end, set_extend
from pla_sglang.plugin.engine.scheduler_adapter import PrefillAdapter
from support.request_fields import RequestFields

CHUNK_TOKENS = 256
TEMPORAL = PlaConfig(prefill_disagg="temporal", boundary_tokens=100, mixing="never")  # so that chunks are parked


class FakeReq(RequestFields):
    def __init__(self, rid: str, tokens: int, *, new_tokens: int = 8, lora_id: str | None = None) -> None:
        self.rid = rid
        self.origin_input_ids = [1] * tokens
        self.full_untruncated_fill_ids = self.origin_input_ids
        self.output_ids: list[int] = []
        self.sampling_params = SimpleNamespace(max_new_tokens=new_tokens, custom_params=None, ignore_eos=False)
        self.num_matched_prefix_tokens = 0
        self.retracted_stain = self.is_retracted = False
        self.ended = self.return_logprob = False
        self.input_embeds: object = None
        self.kv_committed_len = tokens
        self.lora_id = lora_id
        self.priority = 0
        set_extend(self, 0, 0)

    def finished(self) -> bool:
        return self.ended

    def __repr__(self) -> str:
        return self.rid


class FakeBatch:
    """Both the running batch and a new one."""

    def __init__(self, reqs: Sequence[FakeReq] = (), extend_lens: Sequence[int] = ()) -> None:
        self.reqs = list(reqs)
        self.extend_lens = list(extend_lens)
        self.batch_is_full = False
        self.prefill_stats = SimpleNamespace(num_pending_tokens=0)
        self.decoding_reqs: list[FakeReq] | None = None
        self.forward_mode = SimpleNamespace(is_mixed=lambda: self.decoding_reqs is not None)
        self.return_logprob = self.is_prefill_only = False

    def is_empty(self) -> bool:
        return not self.reqs


class FakeAdder:
    """Of requests to a pass: what is withheld from its budgets, by each version's name."""

    rem_chunk_tokens: int | None = None

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size
        self.rem_total_token_offset = self.cur_rem_token_offset = 0
        self.memory_budget = SimpleNamespace(total_offset=0, current_offset=0)

    @property
    def withheld_tokens(self) -> tuple[float, float]:
        """Of what requests take until they end, and of what the pass may take."""
        budget = self.memory_budget
        return (
            self.rem_total_token_offset + budget.total_offset,
            self.cur_rem_token_offset + budget.current_offset,
        )


class FakeScheduler:
    def __init__(self, queue: Sequence[FakeReq] = (), chunk: FakeReq | None = None, **fields: Any) -> None:
        self.waiting_queue = list(queue)
        self.chunked_req = chunk
        self.chunked_prefill_size: int | None = CHUNK_TOKENS
        self.max_prefill_tokens = 16_384
        self.max_running_requests = 64
        self.max_total_num_tokens = 100_000
        self.page_size = 1
        self.truncation_align_size: int | None = None
        self.device = "cpu"
        self.server_args = SimpleNamespace()
        self.enable_priority_scheduling = self.enable_priority_preemption = False
        self.schedule_low_priority_values_first = False
        self.enable_hierarchical_cache = self.enable_overlap = self.is_mixed_chunk = False
        self.new_token_ratio_tracker = SimpleNamespace(current=0.5)
        self.tree_cache = SimpleNamespace(disable=True, evictable_size=lambda: 0, protected_size=lambda: 0)
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: 100_000)
        self.grammar_manager = SimpleNamespace(grammar_queue=[], has_waiting_grammars=lambda: False)
        self.running = FakeBatch()
        self.published = 0
        vars(self).update(fields)
        self.pla = PrefillAdapter(self, TEMPORAL)
        self.seen: list[dict[str, Any]] = []  # what the host saw in each pass

    def get_num_allocatable_reqs(self, running: int) -> int:
        return self.max_running_requests - running

    def publish_load_snapshot(self, force: bool = False) -> None:
        self.published += 1

    # -- the host's prefill function ---------------------------------------------------------------------------------

    def run_pass(self, during: Callable[[FakeScheduler], None] | None = None, *, fits: int = 1000) -> FakeBatch | None:
        """One pass through the adapter. ``during`` runs in its middle; ``fits`` requests find memory."""

        def original(scheduler: FakeScheduler, running_batch: FakeBatch) -> tuple[FakeBatch | None, FakeBatch]:
            if not scheduler.waiting_queue and scheduler.chunked_req is None:
                return None, running_batch
            scheduler.pla.on_ordered(scheduler.waiting_queue)
            scheduler.seen.append(
                {
                    "queue": list(scheduler.waiting_queue),
                    "chunk": scheduler.chunked_req,
                    "size": scheduler.chunked_prefill_size,
                    "mixes": scheduler.is_mixed_chunk,
                    "context": scheduler.pla.context,
                }
            )
            if during is not None:
                during(scheduler)
            return scheduler._admit(fits), running_batch

        batch: FakeBatch | None = self.pla.run_pass(original, (), {"running_batch": self.running})[0]
        return batch

    def _admit(self, fits: int) -> FakeBatch | None:
        chosen: list[FakeReq] = []
        lengths: list[int] = []
        size = self.chunked_prefill_size or 1 << 30
        if self.chunked_req is not None:
            lengths.append(self._extend(self.chunked_req, size))
            chosen.append(self.chunked_req)
            if extend_end(self.chunked_req) == len(self.chunked_req.origin_input_ids):
                self.chunked_req = None
        for req in self.waiting_queue[:fits]:
            lengths.append(self._extend(req, size))
            chosen.append(req)
            if extend_end(req) < len(req.origin_input_ids):
                assert self.chunked_req is None
                self.chunked_req = req
        if not chosen:
            self.running.batch_is_full = bool(self.waiting_queue)
            return None
        self.waiting_queue = [req for req in self.waiting_queue if req not in chosen]
        return FakeBatch(chosen, lengths)

    @staticmethod
    def _extend(req: FakeReq, size: int) -> int:
        start = extend_end(req) or 0
        end = min(len(req.origin_input_ids), start + size)
        set_extend(req, start, end)
        return end - start


def short_prompts(count: int, tokens: int = 20) -> list[FakeReq]:
    return [FakeReq(f"short-{index}", tokens) for index in range(count)]


def long(name: str = "long", tokens: int = 3000, **fields: Any) -> FakeReq:
    return FakeReq(name, tokens, **fields)


def started(tokens: int = 3000, done: int = CHUNK_TOKENS, **fields: Any) -> FakeReq:
    """A long whose prefill is under way."""
    req = long("chunk", tokens, **fields)
    set_extend(req, 0, done)
    return req
