"""Stand-ins for what the two ends of a stateless instance touch of SGLang. The end-to-end test has the real thing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.request_fields import RequestFields

from pla_sglang.fleet.stateless.host.calls import SendPoll
from pla_sglang.fleet.stateless.transfer.rooms import UsedRooms
from pla_sglang.plugin.engine.host.requests import set_extend


class FakeSender:
    """Of one request; ``outcome`` is what its transfer has come to."""

    def __init__(self) -> None:
        self.outcome = SendPoll.OPEN
        self.aborted = self.cleared = False
        self.forget: Callable[[], object] = lambda: None  # who has asked for its KV

    def abort(self) -> None:
        self.aborted, self.outcome = True, SendPoll.FAILED

    def clear(self) -> None:
        self.cleared = True
        self.forget()

    def failure_exception(self) -> None:
        self.clear()
        raise ConnectionError("the link is down")


class FakeRequest(RequestFields):
    def __init__(self, rid: str, tokens: int = 100, room: int = 1) -> None:
        self.rid = rid
        self.origin_input_ids = list(range(tokens))
        self.output_ids: list[int] = []
        self.bootstrap_host: str | None = None
        self.bootstrap_port: int | None = None
        self.bootstrap_room: int | None = room
        self.disagg_kv_sender = FakeSender()
        set_extend(self, 0, 0)
        self.to_finish: Any = None
        self.finished_reason: Any = None
        self.retracted_stain = self.is_retracted = False
        self.metadata_buffer_index = -1
        self.stream = True
        self.sampling_params = SimpleNamespace(max_new_tokens=100, custom_params=None, ignore_eos=False)
        self.vocab_size = 1000
        nothing = lambda: None  # noqa: E731
        self.time_stats = SimpleNamespace(
            set_prefill_bootstrap_queue_entry_time=nothing,
            set_prefill_transfer_queue_entry_time=nothing,
            set_wait_queue_entry_time=nothing,
        )

    def finished(self) -> bool:
        return self.finished_reason is not None

    def __repr__(self) -> str:
        return self.rid


class FakeSendQueue:
    """The sending end's queue and manager. ``marks``: fences behind what its worker has taken."""

    def __init__(self, buffers: int = 1000) -> None:
        self.buffers = buffers
        self.queue: list[Any] = []
        self.rooms = UsedRooms()
        self.marks: deque[Any] = deque()
        self.kv_manager = SimpleNamespace(
            failure_records={},
            exceptions={},
            request_status={},
            transfer_infos={},
            decode_kv_args_table={"receiver": SimpleNamespace(endpoint="10.0.0.9", dst_port=40)},
            req_to_decode_prefix_len={},
            transfer_queues=[SimpleNamespace(put=self.marks.append)],
        )

    def pass_marks(self) -> None:
        """The worker comes to what was queued so far."""
        while self.marks:
            assert self.marks.popleft().room < 0

    def add(self, req: Any, heads: int) -> None:
        self.queue.append(req)

    def ensure_metadata_buffer(self, req: Any) -> bool:
        if self.buffers == 0:
            return False
        self.buffers -= 1
        req.metadata_buffer_index = 0
        return True

    def create_sender(self, export_request: Any, heads: int) -> bool:
        export_request.disagg_kv_sender = FakeSender()
        export_request.sampling_params.max_new_tokens = 1  # as the host does
        return True

    def finalize_bootstrap(self, req: Any) -> bool:
        return True


class FakeScheduler:
    def __init__(self, *, overlap: bool = True) -> None:
        self.enable_overlap = overlap
        self.waiting_queue: list[FakeRequest] = []
        self.chunked_req: FakeRequest | None = None
        self._pending_chunked_abort_req: FakeRequest | None = None
        self.model_config = SimpleNamespace(num_key_value_heads=1)
        self.pla_fleet = SimpleNamespace(now_s=lambda: 0.0)
        self.sent: list[tuple[str, int | None]] = []

    def _abort_on_queued_limit(self, req: FakeRequest) -> bool:
        return False

    def send_kv_chunk(self, req: FakeRequest, *, last_chunk: bool, end_idx: int | None) -> None:
        assert last_chunk == (end_idx is None)
        self.sent.append((req.rid, end_idx))


class FakeBatch:
    def __init__(self, *reqs: FakeRequest) -> None:
        self.reqs = list(reqs)
        self.batch_is_full = True
        self.forward_mode = SimpleNamespace(is_extend=lambda: True)

    def filter_batch(self, *, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[index] for index in keep_indices]


def fail_for(patch: pytest.MonkeyPatch, owner: Any, name: str, rid: str) -> None:
    """``owner.name`` raises for one request."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(getattr(arg, "rid", None) == rid for arg in args):
            raise RuntimeError(f"broken for {rid}")
        return original(*args, **kwargs)

    patch.setattr(owner, name, call)
