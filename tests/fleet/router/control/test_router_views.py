"""What instances say of themselves, what requests tell of themselves, and files that operators edit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import INFO, LOAD
from hypothesis import given
from hypothesis import strategies as st
from support.loads import load_amounts
from support.records import make_record

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.observability.explain import STAGES, ExplainStore, stages
from pla_sglang.fleet.router.control.workers.discovery import Address, describe, polled_load
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.control.workers.worker_file import read_workers
from pla_sglang.fleet.router.control.workers.worker_list import ListChanges, compare
from pla_sglang.load.instance_load import combine_ranks
from pla_sglang.load.report import Backlog, Report
from pla_sglang.policy.interface.fleet import InstanceKind
from pla_sglang.policy.interface.prefill import PrefillClass


def test_a_prefill_instance_describes_itself() -> None:
    said = describe({**INFO, "disaggregation_mode": "prefill", "port": 7, "tp_size": 2})
    assert (said.kind, said.bootstrap_port, said.report_key) == (InstanceKind.PREFILL, 8998, "127.0.0.1:7")
    assert (said.kv_capacity_tokens, said.tensor_parallel, said.has_role) == (50_000, 2, False)


def test_an_instance_of_ours_describes_itself() -> None:
    pla = {"role": {"role": "short"}, "config": {"instance": "left"}}
    emulation = {"profile": "linear", "time_scale": 4}
    said = describe({**INFO, "internal_states": [{"pla": pla, "pla_emulation": emulation}]})
    assert (said.length_class, said.has_role, said.report_key) == (PrefillClass.SHORT, True, "left")
    assert (said.profile, said.time_scale) == ("linear", 4)
    named = {"config": {"instance": None}, "telemetry": {"instance": "machine-7:30000"}}  # what it signs with
    assert describe({**INFO, "internal_states": [{"pla": named}]}).report_key == "machine-7:30000"
    assert said.bootstrap_port is None


@pytest.mark.parametrize(
    ("flags", "config", "riding_tokens"),
    [
        ({}, {}, None),
        ({"enable_mixed_chunk": False, "chunked_prefill_size": 2048}, {"prefill_disagg": "temporal"}, None),
        ({"enable_mixed_chunk": True, "chunked_prefill_size": 2048}, {"prefill_disagg": "off"}, 2048),
        ({"enable_mixed_chunk": True, "chunked_prefill_size": 2048}, {"prefill_disagg": "temporal"}, 1),
        ({"enable_mixed_chunk": True, "chunked_prefill_size": -1}, {}, None),
    ],
)
def test_an_instance_says_whether_its_decodes_ride(
    flags: dict[str, object], config: dict[str, object], riding_tokens: int | None
) -> None:
    said = describe({**INFO, **flags, "internal_states": [{"pla": {"config": config}}]})
    assert said.riding_tokens == riding_tokens


@pytest.mark.parametrize(
    ("flags", "config", "chunk_max_tokens"),
    [
        ({}, {}, None),
        ({"chunked_prefill_size": 1024}, {}, 1024),
        ({"chunked_prefill_size": 1024}, {"long_chunk_tokens": 512}, 512),
        ({"chunked_prefill_size": 1024}, {"long_chunk_tokens": 2048}, 1024),
        ({"chunked_prefill_size": 1024}, {"long_chunk_tokens": None}, 1024),
        ({"chunked_prefill_size": -1}, {}, 50_000),  # not cut, and so whole in a pass if it fits
        ({"chunked_prefill_size": -1}, {"long_chunk_tokens": 512}, 512),
    ],
)
def test_an_instance_says_its_largest_chunk(
    flags: dict[str, object], config: dict[str, object], chunk_max_tokens: int | None
) -> None:
    said = describe({**INFO, **flags, "internal_states": [{"pla": {"config": config}}]})
    assert said.chunk_max_tokens == chunk_max_tokens


@pytest.mark.parametrize(
    ("mode", "small_first"), [("off", False), ("temporal", True), ("spatial", True), ("dopd", False)]
)
def test_an_instance_says_whether_it_runs_small_prefills_first(mode: str, small_first: bool) -> None:
    said = describe({**INFO, "internal_states": [{"pla": {"config": {"prefill_disagg": mode}}}]})
    assert said.small_first is small_first
    assert not describe(INFO).small_first


def test_another_process_has_another_identity() -> None:
    other = describe({**INFO, "startup_time": {"total": 1.6}})
    assert other.identity != describe(INFO).identity
    assert describe(dict(INFO)).identity == describe(INFO).identity


@pytest.mark.parametrize("broken", [{}, {"disaggregation_mode": "encode"}, {"max_total_num_tokens": None}])
def test_what_is_no_server_of_ours(broken: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match="server_info"):
        describe({**INFO, **broken} if broken else {})


def test_polled_loads_by_kind() -> None:
    load = LOAD | {
        "num_waiting_reqs": 3,
        "num_waiting_uncached_tokens": 90,
        "num_running_reqs": 2,
        "num_used_tokens": 70,
    }
    load |= {"num_total_tokens": 100, "num_active_tokens": 60}
    unified = polled_load({"loads": [load, load]}, InstanceKind.UNIFIED).amounts
    assert unified == load_amounts(6, 180, 180 * 180 // 6, 0, 4, 140)
    decode = polled_load({"loads": [load]}, InstanceKind.DECODE).amounts
    assert decode == load_amounts(running=2, context_tokens=70, waiting_decodes=3, waiting_decode_tokens=40)
    chunk = polled_load({"loads": [LOAD | {"num_waiting_uncached_tokens": 50}]}, InstanceKind.PREFILL).amounts
    assert (chunk.queued_prefills, chunk.queued_attention) == (1, 2500)
    for broken in ({}, {"loads": [3]}, {"loads": [{"num_running_reqs": "x"}]}):
        with pytest.raises(WorkerError, match="v1/loads"):
            polled_load(broken, InstanceKind.UNIFIED)


def test_ranks_of_one_server_are_added_up() -> None:
    ranks = [
        Report(instance="i", dp_rank=rank, dp_size=2, sequence=1, backlog=Backlog(1, 10, 100, 2)) for rank in range(2)
    ]
    busy = [(3, 0.01, 0.4), (1, 0.03, 0.8)]
    reports = [
        msg(rank, running=running, token_interval_s=interval_s, utilisation=share, received=5)
        for rank, (running, interval_s, share) in zip(ranks, busy, strict=True)
    ]
    total = combine_ranks(reports)
    assert total.amounts == load_amounts(2, 20, 200, 4, 4)
    assert (total.received, total.utilisation) == (10, pytest.approx(0.6))
    assert total.token_interval_s == pytest.approx((3 * 0.01 + 0.03) / 4)


def msg(report: Report, **fields: Any) -> Report:
    import msgspec

    return msgspec.structs.replace(report, **fields)


TIMES = st.none() | st.floats(0, 100)


@given(st.floats(0, 50), TIMES, TIMES, TIMES, st.floats(0, 100), TIMES, TIMES, st.booleans())
def test_stages_add_up_to_the_ttft_whatever_was_reported(
    arrived: float,
    decided: float | None,
    sent: float | None,
    done: float | None,
    first: float,
    own: float | None,
    interval: float | None,
    split: bool,
) -> None:
    record = make_record(
        "r",
        arrived,
        instances=("p", "d" if split else "p"),
        assigned_s=decided,
        sent_s=sent,
        prefill_done_s=done,
        first_token_s=first,
        own_prefill_s=own,
        token_interval_s=interval,
    )
    parts = stages(record)
    assert parts is not None
    assert tuple(parts) == STAGES
    assert all(seconds >= 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(max(first, arrived) - arrived, abs=1e-9)


def test_old_records_are_forgotten() -> None:
    store = ExplainStore(capacity=2)
    for rid in "abc":
        store.add(make_record(rid))
    assert store.explain("a") is None
    assert store.explain("c") is not None


A, B, C = Address("a", 1), Address("b", 2), Address("c", 3)


@pytest.mark.parametrize(
    ("before", "after", "present", "expected"),
    [
        ({}, {A: False}, [], ListChanges((A,), (), (), ())),
        ({}, {A: False}, [A], ListChanges((), (), (), ())),
        ({A: False}, {}, [A, B], ListChanges((), (A,), (), ())),  # b came in another way
        ({A: False}, {}, [], ListChanges((), (), (), ())),  # removed by an operator before
        ({A: False, B: True}, {A: True, B: False}, [A, B], ListChanges((), (), (A,), (B,))),
        ({}, {C: True}, [], ListChanges((C,), (), (C,), ())),
    ],
)
def test_what_a_new_version_of_the_file_changes(
    before: dict[Address, bool], after: dict[Address, bool], present: list[Address], expected: ListChanges
) -> None:
    assert compare(before, after, present) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "worker file"),
        ('{"workers": [{"url": "x"}]}', "no address"),
        ('{"workers": [{"url": "http://a:1"}, {"url": "http://a:1/"}]}', "twice"),
        ('{"workers": [{"url": "http://a:1", "drian": true}]}', "drian"),
    ],
)
def test_bad_worker_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_workers(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "magic"),
        ("workers", ("http://a:1", "http://a:1/")),
        ("slo_ttft_s", 0.0),
        ("boundary_tokens", 0),
        ("telemetry", "udp://x"),
        ("hold_tokens", 0),
        ("poll_interval_s", 0.0),
    ],
)
def test_bad_control_knobs(field: str, value: object) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(ControlKnobs(), **{field: value})
