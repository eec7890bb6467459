"""KV says of what it is, and a request that it does not belong to never has it: on SGLang's own metadata buffers."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from receive_scene import PEER, ReceiveScene
from support.request_fields import RequestFields

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.transfer.exports import make_export_request
from pla_sglang.fleet.stateless.transfer.fingerprints import (
    UNSAID,
    Fingerprint,
    Fingerprints,
    read_fingerprint,
    write_fingerprint,
)
from pla_sglang.fleet.stateless.transfer.legs import SOURCE_ATTRIBUTE
from pla_sglang.fleet.stateless.transfer.peers import Peer
from pla_sglang.plugin.engine.host.transfers import metadata_options

PROMPT = list(range(10, 72))
STOCK = Peer("b", "10.0.0.2", 9001)  # told without an incarnation


def make_scheduler(*, adapters: dict[str, str] | None = None, page_tokens: int = 1, dtype: str = "bfloat16") -> Any:
    pool = SimpleNamespace(
        page_size=page_tokens, dtype=dtype, get_contiguous_buf_infos=lambda: ([1, 2], [100, 100], [64, 64])
    )
    refs = {lora_id: SimpleNamespace(lora_name=name) for lora_id, name in (adapters or {}).items()}
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(lora_manager=SimpleNamespace(lora_refs=refs))),
    )


def make_request(prompt: list[int] = PROMPT, *, salt: str | None = None, lora_id: str | None = None) -> Any:
    return RequestFields(
        rid="r",
        origin_input_ids=array("q", prompt),
        output_ids=array("q"),
        multimodal_inputs=None,
        input_embeds=None,
        lora_id=lora_id,
        extra_key=salt if lora_id is None else (salt or "") + lora_id,  # as the host makes it
        bootstrap_room=5,
        metadata_buffer_index=1,
    )


def print_of(req: Any, scheduler: Any = None) -> Fingerprint:
    return Fingerprints(scheduler or make_scheduler()).of_kv(req, req.origin_input_ids)


def test_the_same_request_has_the_same_fingerprint_at_each_instance() -> None:
    """An adapter has an id of its own at each, and one name."""
    one, other = make_scheduler(adapters={"5f": "sql"}), make_scheduler(adapters={"c0": "sql"})
    for salt in (None, "tenant"):
        mine = print_of(make_request(salt=salt, lora_id="5f"), one)
        assert mine == print_of(make_request(salt=salt, lora_id="c0"), other)
        assert mine.tokens == len(PROMPT)
        assert 0 < mine.digest < 1 << 63


@pytest.mark.parametrize(
    "other",
    [
        print_of(make_request([7, *PROMPT[1:]])),
        print_of(make_request(PROMPT[::-1])),
        print_of(make_request(salt="tenant")),
        print_of(make_request(), make_scheduler(page_tokens=16)),
        print_of(make_request(), make_scheduler(dtype="float8_e4m3fn")),
        print_of(make_request(lora_id="5f"), make_scheduler(adapters={"5f": "sql"})),
    ],
    ids=["prompt", "order", "salt", "page", "dtype", "adapter"],
)
def test_what_kv_depends_on_is_in_its_fingerprint(other: Fingerprint) -> None:
    mine = print_of(make_request())
    assert (mine.tokens, mine.digest != other.digest) == (other.tokens, True)


def test_salts_and_adapters_are_told_apart() -> None:
    scheduler = make_scheduler(adapters={"a1": "one", "b2": "two"})
    kinds = [(None, None), ("one", None), ("s", None), (None, "a1"), ("s", "a1"), (None, "b2"), ("s", "b2")]
    prints = {print_of(make_request(salt=salt, lora_id=lora_id), scheduler) for salt, lora_id in kinds}
    assert len(prints) == len(kinds)


# -- on the host's buffers ---------------------------------------------------------------------------------------------


def make_buffers(fingerprints: Fingerprints | None = None) -> Any:
    import torch
    from sglang.srt.disaggregation.utils import MetadataBuffers

    from pla_sglang.fleet.stateless.transfer.queues import SendBuffers

    options = metadata_options(SimpleNamespace(server_args=SimpleNamespace(sampling_mask_max_tokens=0)))
    options |= {"hidden_size": 16, "hidden_states_dtype": torch.float32}
    if fingerprints is None:
        return MetadataBuffers(4, **options)
    return SendBuffers(fingerprints, 4, **options)


def make_sendable(prompt: list[int] = PROMPT, answer: tuple[int, ...] = (7,)) -> Any:
    req = make_request(prompt)
    req.output_ids = array("q", answer)
    req.cached_tokens = req.cached_tokens_device = req.cached_tokens_host = req.cached_tokens_storage = 0
    req.return_logprob = req.return_sampling_mask = False
    req.hidden_states_tensor, req.get_mm_token_counts = None, lambda: (0, 0, 0)
    req.sampling_params = SimpleNamespace(max_new_tokens=9)
    return req


def test_a_source_says_of_what_its_kv_is_and_the_room_stays_the_hosts() -> None:
    buffers, req = make_buffers(Fingerprints(make_scheduler())), make_sendable()
    assert read_fingerprint(buffers, 1) == UNSAID, "as with a stock source"
    buffers.set_buf(req)
    assert buffers.bootstrap_room[1, 0].item() == 5
    assert read_fingerprint(buffers, 1) == print_of(req)
    pointers, _, row_bytes = buffers.get_buf_infos()
    place = pointers.index(buffers.bootstrap_room.data_ptr())
    assert row_bytes[place] == buffers.bootstrap_room[0].nbytes, "all of the row travels"


def test_a_held_request_is_sent_as_prompt_and_answer() -> None:
    """Without the last token of the answer, whose KV is not there yet."""
    buffers, held = make_buffers(Fingerprints(make_scheduler())), make_sendable(answer=(7, 8, 9))
    export_request = make_export_request(held, 6)
    export_request.metadata_buffer_index = 2
    buffers.set_buf(export_request)
    assert read_fingerprint(buffers, 2) == print_of(make_request([*PROMPT, 7, 8]))


def make_transfers() -> Any:
    from pla_sglang.fleet.stateless.transfer.queues import TransferQueue

    queue: Any = object.__new__(TransferQueue)
    queue.metadata_buffers, queue.fingerprints = make_buffers(), Fingerprints(make_scheduler())
    return queue


@pytest.mark.parametrize(
    ("wanted", "misfit"),
    [
        (PROMPT, None),
        (PROMPT[:-3], "of 62 tokens, and 59"),
        ([*PROMPT, 7, 8, 9], "of 62 tokens, and 65"),
        (PROMPT + [7] * 500, "of 62 tokens, and 562"),
        ([token * 7 % 2000 for token in PROMPT], "another prompt"),
    ],
    ids=["its own", "3 shorter", "3 longer", "500 longer", "another of its length"],
)
@pytest.mark.parametrize("answer", [(), (7, 8)], ids=["leg", "pull"])
def test_a_target_sees_whose_kv_has_come(
    monkeypatch: pytest.MonkeyPatch, wanted: list[int], answer: tuple[int, ...], misfit: str | None
) -> None:
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.decode import DecodeTransferQueue

    monkeypatch.setattr(
        DecodeTransferQueue, "_poll_with_metadata_gate", lambda queue: [int(KVPoll.Success), int(KVPoll.Transferring)]
    )
    queue, req, other = make_transfers(), make_request(wanted), make_request()
    setattr(req, SOURCE_ATTRIBUTE, PEER)
    req.output_ids = array("q", answer)
    queue.queue = [SimpleNamespace(req=leg, metadata_buffer_index=slot) for slot, leg in enumerate((req, other))]
    sent = Fingerprints(make_scheduler()).of_kv(make_request(), array("q", [*PROMPT, *answer]))
    write_fingerprint(queue.metadata_buffers, 0, sent)
    queue._poll_with_metadata_gate()
    queue.metadata_buffers.bootstrap_room[0] = 0  # the host takes the KV over: it clears the row, and adds a token
    req.output_ids.append(100)
    found = queue.find_misfit(req)
    if misfit is None:
        assert found is None
    elif "another" in misfit:
        assert misfit in found
    else:
        assert "tokens, and" in found


@pytest.mark.parametrize(("source", "fits"), [(PEER, False), (STOCK, True)])
def test_only_a_source_that_is_none_of_ours_may_say_nothing(source: Peer, *, fits: bool) -> None:
    queue, req = make_transfers(), make_request()
    setattr(req, SOURCE_ATTRIBUTE, source)
    req.output_ids.append(100)
    assert (queue.find_misfit(req) is None) == fits


@pytest.mark.parametrize(
    ("prefix_tokens", "pages", "kept"),
    [(0, 62, 0), (60, 2, 60), (62, 0, 62), (63, 1, 62), (500, 0, 62), (59, 0, 62), (0, 59, 0)],
    ids=["all", "a part", "none", "more", "much more", "shorter and there", "shorter"],
)
def test_a_target_that_can_be_sent_nothing_gets_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, prefix_tokens: int, pages: int, kept: int
) -> None:
    """It has more than there is, or all of a shorter prompt: the host would send it nothing, ever."""
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    from pla_sglang.fleet.stateless.transfer.queues import SendQueue

    monkeypatch.setattr(PrefillBootstrapQueue, "finalize_bootstrap", lambda queue, req: True)
    queue: Any = object.__new__(SendQueue)
    info = SimpleNamespace(dst_kv_indices=range(pages), is_dummy=lambda: False)
    queue.kv_manager = SimpleNamespace(
        req_to_decode_prefix_len={5: prefix_tokens} if prefix_tokens else {}, transfer_infos={5: {"agent": info}}
    )
    assert queue.finalize_bootstrap(make_request())
    assert queue.kv_manager.req_to_decode_prefix_len.get(5, 0) == kept


# -- at the receiving end ----------------------------------------------------------------------------------------------


def test_kv_that_does_not_fit_ends_its_request_and_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ReceiveScene(monkeypatch)
    cached: list[bool] = []
    statuses: list[int] = []
    monkeypatch.setattr(calls, "release_kv", lambda scheduler, req, keep_prefix: cached.append(keep_prefix))
    monkeypatch.setattr(calls, "end_with_error", lambda scheduler, req, reason, status: statuses.append(int(status)))
    for rid in ("good", "foreign"):
        bench.add(rid)
    bench.transfers.arrived, bench.transfers.misfits = {"good", "foreign"}, {"foreign": "it is of another prompt"}
    bench.receiver.pump()
    assert [req.rid for req in bench.receiver.ready] == ["good"]
    assert (cached, statuses, bench.receiver.failed, bench.receiver.received) == ([False], [409], 1, 1)


def test_kv_that_does_not_fit_on_another_rank_fits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's part comes from another rank, by a transfer of its own."""
    bench = ReceiveScene(monkeypatch)
    others = (True, True, True, False)  # what could be taken over, and whose KV it is
    bench.receiver._agree = lambda flags: [mine and theirs for mine, theirs in zip(flags, others, strict=True)]
    for rid in ("good", "foreign there"):
        bench.add(rid)
    bench.transfers.arrived = {"good", "foreign there"}
    bench.receiver.pump()
    assert [req.rid for req in bench.receiver.ready] == ["good"]
    assert bench.answers == [("foreign there", "the KV of room 1 does not fit: another rank says so")]
    assert bench.freed == ["foreign there"]


def test_kv_that_cannot_be_compared_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ReceiveScene(monkeypatch)
    bench.add("a")
    bench.transfers.arrived, bench.transfers.find_misfit = {"a"}, None  # type: ignore[assignment]
    bench.receiver.pump()
    assert (bench.receiver.ready, bench.freed, bench.faults.count) == ([], ["a"], 1)
