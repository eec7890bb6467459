"""What versions of SGLang name otherwise, on the real classes of the one that is installed."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.runtime_context import get_parallel

from pla_sglang.engine.host import batches, memory, ranks, requests, transfers
from pla_sglang.engine.host.arguments import find_split_attention, read_fields, resolve
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
    budget = SimpleNamespace(total_offset=1, current_offset=2)
    adder = SimpleNamespace(memory_budget=budget, rem_total_token_offset=1, cur_rem_token_offset=2)
    memory.reserve_kv(adder, 10, 20)
    memory.reserve_kv(adder, 100)
    offsets = (budget.total_offset, budget.current_offset)
    assert (111, 22) in (offsets, (adder.rem_total_token_offset, adder.cur_rem_token_offset))


def test_a_forward_batch_can_be_made() -> None:
    batch = batches.make_forward_batch(
        4, forward_mode=None, batch_size=1, input_ids=None, req_pool_indices=None, seq_lens=None, out_cache_loc=None,
        seq_lens_sum=4,
    )  # fmt: skip
    assert batch.seq_lens_sum == 4


def test_ranks_of_a_server_without_replicas() -> None:
    with get_parallel().override(**({"dp_rank": None} if hasattr(type(get_parallel()), "dp_rank") else {})):
        assert ranks.dp_rank(SimpleNamespace(ps=SimpleNamespace(dp_rank=None))) == 0
    assert ranks.tp_group(SimpleNamespace(tp_group="group")) == "group"


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
