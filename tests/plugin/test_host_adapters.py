"""What versions of SGLang name otherwise, on the real classes of the one that is installed."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from support.fake_scheduler import FakeAdder

from pla_sglang.plugin.engine import snapshot
from pla_sglang.plugin.engine.host import batches, memory, ranks, requests, transfers
from pla_sglang.plugin.engine.host.arguments import (
    find_bootstrap_host,
    find_split_attention,
    read_fields,
    resolve,
)
from pla_sglang.testing.scheduler import make_request


@pytest.fixture
def req() -> Any:
    return make_request(SimpleNamespace(model_config=SimpleNamespace(vocab_size=100)), "a", [1, 2, 3], 4)


def test_a_new_request_holds_nothing_and_was_never_extended(req: Any) -> None:
    assert requests.extend_end(req) is None
    assert requests.prefix_len(req) == 0
    assert requests.kv_committed_len(req) == 0
    assert requests.pool_row(req) is None


def test_the_next_pass_ends_where_it_is_told(req: Any) -> None:
    req.output_ids.append(9)
    requests.refresh_fill_ids(req)
    requests.set_extend(req, 0, 2)
    assert list(req.full_untruncated_fill_ids) == [1, 2, 3, 9]
    assert requests.extend_end(req) == 2
    assert list(req.get_fill_ids()) == [1, 2]


def test_an_adapter_is_asked_for_by_the_hosts_own_name() -> None:
    for name in ("can_schedule_lora_req", "_can_schedule_lora_req"):
        scheduler = SimpleNamespace(**{name: lambda req, in_use: req in in_use})
        assert requests.may_load_adapter(scheduler, "a", {"a"})
        assert not requests.may_load_adapter(scheduler, "b", {"a"})


def test_kv_is_withheld_from_what_a_pass_may_promise_and_take() -> None:
    adder = FakeAdder()
    memory.reserve_kv(adder, 10, 20)
    memory.reserve_kv(adder, 100)
    assert adder.withheld_tokens == (110, 20)


def make_batch(runner: Any, slots: Any) -> Any:
    return batches.make_forward_batch(
        runner, 4, forward_mode=ForwardMode.EXTEND, batch_size=1, input_ids=None, req_pool_indices=torch.tensor([5]),
        seq_lens=torch.tensor([4]), out_cache_loc=slots, seq_lens_sum=4,
    )  # fmt: skip


def test_a_forward_batch_can_be_made() -> None:
    slots = torch.tensor([3, 1, 2, 0])
    batch = make_batch(
        SimpleNamespace(kv_index_translator=SimpleNamespace(bind_runner_slots=lambda batch: None)), slots
    )
    assert (batch.out_cache_loc is slots, batch.seq_lens_sum) == (True, 4)


def test_a_forward_batch_is_planned_over_its_own_buffers() -> None:
    """Captured kernels read them."""
    translators = pytest.importorskip("sglang.srt.mem_cache.kv_index_translator", reason="nothing is planned there")
    translator = translators.KVIndexTranslator(
        req_to_token=torch.zeros(8, 4, dtype=torch.int32), token_to_kv_pool_allocator=None, token_to_kv_pool=None,
        page_size=1, device="cpu",
    )  # fmt: skip
    slots = torch.tensor([3, 1, 2, 0])
    batch = make_batch(SimpleNamespace(kv_index_translator=translator), slots)
    assert (batch.out_cache_loc is slots, batch.out_cache_loc_is_physical) == (True, True)
    assert batch.kv_loc_plan.req_pool_indices is batch.req_pool_indices
    assert translator.write_ids(batch) is slots


def test_ranks_of_a_server_without_replicas() -> None:
    with get_parallel().override(**({"dp_rank": None} if hasattr(type(get_parallel()), "dp_rank") else {})):
        assert ranks.dp_rank(SimpleNamespace(ps=SimpleNamespace(dp_rank=None))) == 0


def test_what_a_manager_keeps_of_a_room_is_forgotten_where_it_keeps_it() -> None:
    manager = SimpleNamespace(exceptions={1: "", 2: ""}, transfer_statuses={1: "", 2: ""})
    transfers.forget_sent(manager, 1)
    transfers.forget_received(manager, 2)
    assert (list(manager.exceptions), list(manager.transfer_statuses)) == ([2], [1])
    told: list[int] = []
    later = SimpleNamespace(clear_deferred_abort_state=told.append)
    transfers.forget_sent(later, 1)
    transfers.forget_received(later, 2)
    assert told == [2]


def test_the_host_answers_an_abort_where_it_can_and_the_receiver_counts_them() -> None:
    counted = [b"ABORT", b"7", b"10.0.0.2", b"40", b"1"]
    later = SimpleNamespace(enable_deferred_decode_kv_release=True)
    assert transfers.acknowledges(later, counted)
    assert not transfers.acknowledges(later, counted[:4]), "a receiver of a version without"
    assert not transfers.acknowledges(SimpleNamespace(enable_deferred_decode_kv_release=False), counted)
    assert not transfers.acknowledges(SimpleNamespace(), counted), "a sender of a version without"


def test_an_abort_is_over_when_all_senders_have_answered() -> None:
    manager = SimpleNamespace(
        enable_deferred_decode_kv_release=True, is_abort_release_safe=lambda room, senders: (room, senders) == (7, 2)
    )
    receiver = SimpleNamespace(kv_mgr=manager, bootstrap_room=7, required_prefill_response_num=2)
    assert transfers.is_acknowledged(receiver)
    receiver.required_prefill_response_num = 3
    assert not transfers.is_acknowledged(receiver)
    assert not transfers.is_acknowledged(SimpleNamespace(kv_mgr=SimpleNamespace(), bootstrap_room=7))
    assert not transfers.is_acknowledged(None), "a leg that has failed before it was connected"


def test_sampling_masks_have_no_room_beside_kv_until_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(sampling_mask_max_tokens=7)
    assert transfers.most_mask_tokens(args) == 0
    monkeypatch.setenv("SGLANG_ENABLE_DISAGG_SAMPLING_MASK", "1")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS", "7")
    assert transfers.most_mask_tokens(args) == 7


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_growth_is_what_the_host_expects_of_a_running_request(ignore_eos: bool) -> None:
    params = SimpleNamespace(max_new_tokens=10, ignore_eos=ignore_eos)
    req = SimpleNamespace(sampling_params=params, output_ids=[1, 2])
    adder = SimpleNamespace(new_token_ratio=0.25)
    expected = PrefillAdder._get_running_request_total_token_offset(adder, req)
    assert 8 * memory.growth_ratio(req, 0.25) == expected
    scheduler = SimpleNamespace(new_token_ratio_tracker=SimpleNamespace(current=0.25))
    assert snapshot.expected_growth_tokens(scheduler, SimpleNamespace(reqs=[req])) == expected


def test_arguments_that_are_resolved_in_place_stay_as_they_are() -> None:
    args = SimpleNamespace(device="cpu")
    assert resolve(args) is args
    assert read_fields(args) == {"device": "cpu"}


def test_arguments_that_are_resolved_apart_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Record(msgspec.Struct, dict=True):
        device: str | None = None

        def resolve_once(self) -> None:
            self.decided = {"device": "cpu"}

    module: Any = ModuleType("sglang.srt.arg_groups.model_override_base")
    module.resolved_view = lambda record: SimpleNamespace(**record.decided)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    record = Record()
    assert resolve(record).device == "cpu"
    assert read_fields(record) == {"device": None}


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({}, None),
        ({"enable_dp_attention": False, "attn_dp_size": 1}, None),
        ({"attn_dp_size": None}, None),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"attn_dp_size": 2}, "--attn-dp-size 2"),
    ],
)
def test_which_flag_splits_the_requests_of_a_replica(given: dict[str, Any], flag: str | None) -> None:
    assert find_split_attention(SimpleNamespace(**given)) == flag


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ({"nnodes": 1, "dist_init_addr": None}, "10.0.0.2"),
        ({"nnodes": 1, "dist_init_addr": "10.0.0.1:5000"}, "10.0.0.2"),
        ({"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}, "10.0.0.1"),
        ({"nnodes": 2, "dist_init_addr": "[fd00::1]:5000"}, "fd00::1"),
        ({"nnodes": 2, "dist_init_addr": "node-0:5000"}, "node-0"),
        ({"nnodes": 2, "dist_init_addr": None}, "10.0.0.2"),
    ],
)
def test_all_nodes_of_an_instance_give_one_host(given: dict[str, Any], host: str) -> None:
    """That of the first, which the others do not listen at."""
    assert find_bootstrap_host(SimpleNamespace(host="10.0.0.2", **given)) == host


def test_a_transfer_protocol_is_named_by_what_both_ends_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.common import conn as common
    from sglang.srt.disaggregation.nixl import conn

    name = transfers.name_protocol.__wrapped__
    here = name()
    assert transfers.name_protocol() == here
    says_status = getattr(conn.NixlKVManager, "kv_status_msg_tag", None) is not None
    assert here.startswith("nixl-status-" if says_status else "nixl-notification-")
    monkeypatch.setattr(conn.NixlKVManager, "kv_status_msg_tag", None if says_status else b"KV_STATUS", raising=False)
    other = name()
    longer = dataclasses.make_dataclass("Longer", ["more"], bases=(common.PrefillServerInfo,), kw_only=True)
    monkeypatch.setattr(common, "PrefillServerInfo", longer)
    assert len({here, other, name()}) == 3


def test_which_answers_of_a_bootstrap_server_are_understood() -> None:
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo

    answer = {field.name: 0 for field in dataclasses.fields(PrefillServerInfo)}
    assert transfers.is_bootstrap_answer(answer)
    optional = {field.name for field in dataclasses.fields(PrefillServerInfo) if field.default is None}
    assert transfers.is_bootstrap_answer({name: value for name, value in answer.items() if name not in optional})
    assert not transfers.is_bootstrap_answer(answer | {"of_a_later_version": 0})
    assert not transfers.is_bootstrap_answer(dict(list(answer.items())[1:]))
