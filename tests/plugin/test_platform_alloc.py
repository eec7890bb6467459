"""Page allocation equals the obvious loop; the allocator class keeps its pages; who gets the CPU platform."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import paged_alloc_reference as reference

from pla_kernels import paged_alloc
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin import platform

INT64 = torch.int64


@st.composite
def pools(draw: st.DrawFn, *, decode: bool = False) -> dict:
    """A page size, a batch of requests that hold pages already, and enough free pages in random order."""
    page_size = draw(st.integers(1, 64))
    border = st.sampled_from([0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size])
    lengths = st.one_of(border, st.integers(0, 5 * page_size))
    prefix_lens = draw(st.lists(lengths, max_size=8))
    extends = [1 if decode else draw(lengths) for _ in prefix_lens]
    pages = draw(
        st.permutations(range(1, 1 + sum(2 + (p + e) // page_size for p, e in zip(prefix_lens, extends, strict=True))))
    )
    last_loc = []
    for prefix in prefix_lens:  # each request's last page is one of its own
        last_loc.append(pages.pop() * page_size + (prefix - 1) % page_size if prefix else -1)
    seq_lens = [prefix + extend for prefix, extend in zip(prefix_lens, extends, strict=True)]
    return {
        "prefix_lens": prefix_lens,
        "seq_lens": seq_lens,
        "last_loc": last_loc,
        "free_pages": list(pages),
        "page_size": page_size,
        "dtype": draw(st.sampled_from([torch.int32, torch.int64])),
    }


@given(pools())
@settings(max_examples=300, deadline=None)
def test_alloc_extend_equals_reference(pool: dict) -> None:
    dtype = pool.pop("dtype")
    want, taken = reference.alloc_extend(**pool)
    got, got_taken = paged_alloc.alloc_extend(
        *(torch.tensor(pool[name], dtype=dtype) for name in ("prefix_lens", "seq_lens", "last_loc")),
        torch.tensor(pool["free_pages"], dtype=INT64),
        pool["page_size"],
    )
    assert got.dtype == INT64
    assert (got.tolist(), got_taken) == (want, taken)
    assert len(set(want)) == len(want)


@given(pools(decode=True))
@settings(max_examples=300, deadline=None)
def test_alloc_decode_equals_reference(pool: dict) -> None:
    dtype = pool.pop("dtype")
    del pool["prefix_lens"]
    want, taken = reference.alloc_decode(**pool)
    got, got_taken = paged_alloc.alloc_decode(
        *(torch.tensor(pool[name], dtype=dtype) for name in ("seq_lens", "last_loc")),
        torch.tensor(pool["free_pages"], dtype=INT64),
        pool["page_size"],
    )
    assert got.dtype == INT64
    assert (got.tolist(), got_taken) == (want, taken)


def test_alloc_extend_by_hand() -> None:
    """Page size 4: a request of 6 tokens in pages 3 and 5 grows to 10; a new one of 3 takes the next page."""
    slots, taken = paged_alloc.alloc_extend(
        torch.tensor([6, 0]), torch.tensor([10, 3]), torch.tensor([21, -1]), torch.tensor([9, 2, 7]), 4
    )
    assert slots.tolist() == [22, 23, 36, 37, 8, 9, 10]
    assert taken == 2


BATCH = torch.tensor([4])
FREE = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BATCH, torch.tensor([99]), BATCH, FREE, 4), "24 pages are needed, free_pages holds 2"),
        ((BATCH, torch.tensor([3]), BATCH, FREE, 4), "below its prefix_lens"),
        ((BATCH, BATCH, torch.tensor([1, 2]), FREE, 4), "all of one length"),
        ((BATCH, BATCH.float(), BATCH, FREE, 4), r"seq_lens is \[1\] float32"),
        ((BATCH[None], BATCH[None], BATCH[None], FREE, 4), r"expected \[batch\]"),
        ((BATCH, BATCH, BATCH, FREE.int(), 4), "free_pages is .* int32"),
        ((BATCH, BATCH, BATCH, FREE, 0), "page_size 0 is not allowed"),
    ],
)
def test_alloc_extend_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_alloc.alloc_extend(*arguments)


def test_alloc_decode_refuses() -> None:
    with pytest.raises(ValueError, match="below 1"):
        paged_alloc.alloc_decode(torch.tensor([0]), BATCH, FREE, 4)
    with pytest.raises(ValueError, match="1 pages are needed"):
        paged_alloc.alloc_decode(torch.tensor([5]), BATCH, FREE[:0], 4)


# The allocator class


def make_allocator(pages: int, page_size: int, *, need_sort: bool = False):
    from pla_sglang.plugin.platform.paged_allocator import build_kv_allocator

    return build_kv_allocator(pages * page_size, page_size, torch.float32, "cpu", SimpleNamespace(), need_sort)


def extend(allocator, prefix: list[int], end: list[int], last: list[int]) -> torch.Tensor | None:
    before, after = torch.tensor(prefix), torch.tensor(end)
    tokens = sum(end) - sum(prefix)
    return allocator.alloc_extend(before, before, after, after, torch.tensor(last), tokens)


def test_page_size_one_keeps_the_stock_allocator() -> None:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    assert type(make_allocator(8, 1)) is TokenToKVPoolAllocator
    assert isinstance(make_allocator(8, 2), PagedTokenToKVPoolAllocator)


@pytest.mark.parametrize("need_sort", [False, True])
def test_allocator_life_of_two_requests(need_sort: bool) -> None:
    allocator = make_allocator(6, 4, need_sort=need_sort)
    slots = extend(allocator, [0, 0], [5, 4], [-1, -1])
    assert slots.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 15]
    assert allocator.available_size() == 12
    lengths = torch.tensor([6, 5])
    assert allocator.alloc_decode(lengths, lengths, torch.tensor([8, 15])).tolist() == [9, 16]
    assert allocator.available_size() == 8
    allocator.free(torch.cat((slots, torch.tensor([9, 16]))))
    assert allocator.available_size() == 24


def test_allocator_answers_none_and_changes_nothing_when_full() -> None:
    allocator = make_allocator(2, 4)
    assert extend(allocator, [0], [9], [-1]) is None
    assert allocator.available_size() == 8
    assert extend(allocator, [0], [8], [-1]) is not None
    full = torch.tensor([9])
    assert allocator.alloc_decode(full, full, torch.tensor([11])) is None
    assert allocator.available_size() == 0


def test_allocator_finds_released_pages_again() -> None:
    """With need_sort freed pages wait aside; an allocation that needs them merges them in, sorted."""
    allocator = make_allocator(3, 4, need_sort=True)
    slots = extend(allocator, [0], [12], [-1])
    allocator.free(slots[4:])
    assert len(allocator.free_pages) == 0
    assert extend(allocator, [0], [5], [-1]).tolist() == slots[4:9].tolist()


# Who gets the platform

ON_CPU = ["server", "--device", "cpu"]
ON_GPU = ["server", "--device", "cuda:0"]
ENGINE = {"SGLANG_USE_CPU_ENGINE": "1"}


@pytest.mark.parametrize(
    ("argv", "environ", "accelerator", "other_platform", "wanted"),
    [
        pytest.param(["server"], {}, False, False, True, id="no accelerator"),
        pytest.param(["server"], {}, True, False, False, id="an accelerator"),
        pytest.param(["server"], {}, False, True, False, id="no accelerator, but another platform"),
        pytest.param(ON_CPU, {}, True, True, True, id="--device cpu"),
        pytest.param(["server", "--device=cpu"], {}, True, False, True, id="--device=cpu"),
        pytest.param(["server", "--device=cuda", "--device", "cpu"], {}, True, False, True, id="the last one counts"),
        pytest.param(ON_GPU, {}, False, False, False, id="--device cuda without one"),
        pytest.param(["server", "--device"], {}, True, False, False, id="--device without a value"),
        pytest.param(ON_CPU, ENGINE, False, False, False, id="SGLang's own CPU engine"),
        pytest.param(ON_CPU, ENGINE | {"SGLANG_PLA_PLATFORM": "cpu"}, False, False, True, id="asked in so many words"),
        pytest.param(["server"], {"SGLANG_PLATFORM": "pla_cpu"}, True, True, True, id="SGLang's own switch"),
        pytest.param(["server"], {"SGLANG_PLA_PLATFORM": "cpu"}, True, False, True, id="inherited"),
        pytest.param(ON_CPU, {"SGLANG_PLA_PLATFORM": "off"}, False, False, False, id="off"),
        pytest.param(ON_CPU, {"SGLANG_PLA_PLATFORM": "auto"}, True, False, True, id="auto is no wish"),
    ],
)
def test_activation(
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    environ: Mapping[str, str],
    accelerator: bool,
    other_platform: bool,
    wanted: bool,
) -> None:
    monkeypatch.setattr(platform, "accelerator_found", lambda: accelerator)
    monkeypatch.setattr(platform, "_other_platform_installed", lambda: other_platform)
    assert platform.is_wanted(argv, environ) is wanted


def test_activation_names_a_bad_value() -> None:
    with pytest.raises(ConfigError, match=r"SGLANG_PLA_PLATFORM 'gpu' is not known; allowed: auto, cpu, off"):
        platform.is_wanted(["server"], {"SGLANG_PLA_PLATFORM": "gpu"})


def test_decision_is_handed_to_children(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {"TORCHDYNAMO_DISABLE": "0"}
    monkeypatch.setattr(platform.os, "environ", environ)
    monkeypatch.setattr(platform.sys, "argv", ON_CPU)
    assert platform.activate() == platform.PLATFORM_CLASS
    assert platform.is_wanted(["child"], environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
    assert environ["TORCHDYNAMO_DISABLE"] == "0", "what the user set stays"
    monkeypatch.setattr(platform.os, "environ", {})
    monkeypatch.setattr(platform.sys, "argv", ON_GPU)
    assert platform.activate() is None
    assert platform.os.environ == {}


def test_platform_class_is_one_that_sglang_takes() -> None:
    from sglang.srt.platforms.interface import SRTPlatform

    cls = pkgutil.resolve_name(platform.PLATFORM_CLASS)
    assert issubclass(cls, SRTPlatform)
    assert cls().is_out_of_tree()
    assert cls().get_device() == "cpu"
    with pytest.raises(NotImplementedError, match="dense models"):
        cls().get_mla_kv_pool_cls()


# Defaults


def test_defaults_by_machine() -> None:
    from pla_sglang.plugin.platform import cpu

    assert [cpu.default_threads(cores) for cores in (1, 2, 4, 8, 64)] == [1, 1, 2, 4, 4]
    assert cpu.default_kv_tokens(1024, 64 << 30) == cpu.MAX_KV_TOKENS
    assert cpu.default_kv_tokens(1 << 20, 16 << 30) == 1024
    assert cpu.threads_bind([0, 1], 2) == "0|1"
    assert cpu.threads_bind([2, 3, 8, 9], 2) == "2,3|8,9"
    assert cpu.threads_bind([0, 1], 4) == "0|1|0|1"


def test_defaults_leave_the_user_alone() -> None:
    from pla_sglang.plugin.platform.cpu import CpuPlatform

    chosen = {
        "dtype": "float16",
        "attention_backend": "triton",
        "chunked_prefill_size": 7,
        "mem_fraction_static": 0.3,
        "max_total_tokens": None,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "sampling_backend": None,
        "grammar_backend": "xgrammar",
    }
    args = SimpleNamespace(**chosen)
    CpuPlatform().apply_server_args_defaults(args)
    assert vars(args) == chosen | {"sampling_backend": "pytorch"}


def test_retracted_kv_stays_out_of_memory_that_only_cuda_can_pin() -> None:
    from pla_sglang.plugin.platform import cpu

    def default(mode: str, given: str | None) -> object:
        sizes = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "mem_fraction_static": 0.3, "chunked_prefill_size": 7}
        names = {"dtype": "float32", "attention_backend": None, "grammar_backend": None, cpu.RETRACTED_KV: given}
        args = SimpleNamespace(**sizes, **names, disaggregation_mode=mode)
        cpu.CpuPlatform().apply_server_args_defaults(args)
        return getattr(args, cpu.RETRACTED_KV)

    assert default("decode", None) == "cpu_tensor"
    assert default("decode", "host_pool") == "host_pool"
    assert default("prefill", None) is None


# Seams


def test_seams_fit_the_host() -> None:
    from pla_patches import verify
    from pla_patches.seam import Group
    from pla_patches.table import seams_of

    assert verify.host_reasons(seams_of(Group.CPU)) == []


def test_all_communicators_of_the_host_that_need_cuda_are_known() -> None:
    import inspect

    from sglang.srt.distributed.parallel_state import GroupCoordinator

    from pla_sglang.plugin.platform.host_fixes import GPU_COMMUNICATORS, without_gpu_communicators

    flags = {name for name in inspect.signature(GroupCoordinator.__init__).parameters if name.startswith("use_")}
    others = {f"use_{device}_communicator" for device in ("hpu", "npu", "xpu")} | {"use_message_queue_broadcaster"}
    assert flags - others <= set(GPU_COMMUNICATORS)
    _, keywords = without_gpu_communicators(None, use_pynccl=True, local_rank=1)
    assert keywords == {"local_rank": 1, "use_pynccl": False}


def test_early_send_restores_the_overlap_flag() -> None:
    from pla_sglang.plugin.platform.host_fixes import early_send_without_event

    seen = []
    scheduler = SimpleNamespace(enable_overlap=True)

    def original(scheduler: SimpleNamespace, request: object, **keywords: bool) -> None:
        seen.append((scheduler.enable_overlap, keywords))
        raise RuntimeError

    for keywords in ({}, {"allow_send": False}):  # of 0.5.17, of 0.5.23
        with pytest.raises(RuntimeError):
            early_send_without_event(original, scheduler, None, **keywords)
        assert (seen.pop(), scheduler.enable_overlap) == ((False, keywords), True)


def test_kv_is_announced_as_host_memory() -> None:
    from pla_sglang.plugin.platform.host_fixes import announce_kv_as_dram

    args = SimpleNamespace(kv_data_ptrs=[1, 2], state_data_ptrs=[], kv_data_mem_kinds=["VRAM", "VRAM"])
    announce_kv_as_dram(None, args)
    assert args.kv_data_mem_kinds == ["DRAM", "DRAM"]
    with pytest.raises(NotImplementedError, match="state buffers"):
        announce_kv_as_dram(None, SimpleNamespace(kv_data_ptrs=[1], state_data_ptrs=[[3]]))
