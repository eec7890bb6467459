"""Combinations that cannot work are refused before anything starts, all of them at once, each with its reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine import compat

TEMPORAL = PlaConfig(prefill_disagg="temporal")
STOCK: dict[str, Any] = {
    "enable_mixed_chunk": False,
    "enable_prefill_delayer": False,
    "enable_dp_attention": False,
    "enable_pdmux": False,
    "enable_hisparse": False,
    "dllm_algorithm": None,
    "optimistic_prefill_attempts": 0,
    "pp_size": 1,
    "disaggregation_mode": "null",
    "chunked_prefill_size": 2048,
}

CASES = [
    ({"enable_mixed_chunk": True}, {"mixing": "allow"}, "--enable-mixed-chunk with --pla-mixing allow"),
    ({"enable_prefill_delayer": True}, {}, "--enable-prefill-delayer"),
    ({"enable_dp_attention": True}, {}, "--enable-dp-attention"),
    ({"attn_dp_size": 2}, {}, "--attn-dp-size 2"),
    ({"prefill_decode_interval": 1}, {}, "--prefill-decode-interval 1"),
    ({"enable_pdmux": True}, {}, "--enable-pdmux"),
    ({"enable_hisparse": True}, {}, "--enable-hisparse"),
    ({"dllm_algorithm": "LowConfidence"}, {}, "--dllm-algorithm"),
    ({"optimistic_prefill_attempts": 2}, {}, "--optimistic-prefill-attempts"),
    ({"pp_size": 2}, {}, "--pipeline-parallel-size"),
    ({"disaggregation_mode": "decode"}, {}, "--disaggregation-mode decode"),
    ({}, {"boundary_tokens": 2049}, "--pla-boundary 2049 above --chunked-prefill-size 2048"),
    ({}, {"long_chunk_tokens": 4096}, "--pla-long-chunk-tokens 4096 above --chunked-prefill-size 2048"),
    (
        {"chunked_prefill_size": -1},
        {"long_chunk_tokens": 64},
        "--pla-long-chunk-tokens 64 while chunked prefill is off",
    ),
]


@pytest.mark.parametrize(("server", "mine", "named"), CASES, ids=lambda value: str(value))
def test_contradiction(server: dict[str, Any], mine: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compat.check_flags(SimpleNamespace(**STOCK | server), TEMPORAL.replace(**mine))
    message = str(caught.value)
    assert named in message
    assert message.startswith("--prefill-disagg temporal cannot be combined with: ")
    assert "\n" not in message


def test_all_contradictions_are_listed_at_once() -> None:
    server = STOCK | {"enable_pdmux": True, "pp_size": 2}
    with pytest.raises(ConfigError) as caught:
        compat.check_flags(SimpleNamespace(**server), TEMPORAL.replace(boundary_tokens=4000))
    assert all(name in str(caught.value) for name in ("--enable-pdmux", "--pipeline", "--pla-boundary"))


def test_decodes_may_ride_in_temporal_passes_only() -> None:
    server = SimpleNamespace(**STOCK | {"enable_mixed_chunk": True})
    compat.check_flags(server, TEMPORAL)
    with pytest.raises(ConfigError, match="--enable-mixed-chunk with --prefill-disagg spatial"):
        compat.check_flags(server, TEMPORAL.replace(prefill_disagg="spatial"))


def test_off_allows_everything() -> None:
    for server, _, _ in CASES:
        compat.check_flags(SimpleNamespace(**STOCK | server), PlaConfig(boundary_tokens=4000, long_chunk_tokens=4000))


@pytest.mark.parametrize(
    "server",
    [
        {},
        {"disaggregation_mode": "prefill"},
        {"chunked_prefill_size": -1},  # SGLang's way to turn chunking off
        {"chunked_prefill_size": None},
        {"optimistic_prefill_attempts": None},
    ],
    ids=str,
)
def test_allowed(server: dict[str, Any]) -> None:
    compat.check_flags(SimpleNamespace(**STOCK | server), TEMPORAL.replace(boundary_tokens=100))


def test_without_chunking_no_boundary_is_too_large() -> None:
    compat.check_flags(SimpleNamespace(**STOCK | {"chunked_prefill_size": -1}), TEMPORAL.replace(boundary_tokens=9000))


SPATIAL = PlaConfig(prefill_disagg="spatial")


@pytest.mark.parametrize(
    ("server", "mine", "named"),
    [
        ({"dp_size": 2, "load_balance_method": "follow_bootstrap_room"}, {}, "give round_robin"),
        ({"dp_size": 2, "nnodes": 2}, {}, "--nnodes above 1"),
        ({"dp_size": 2}, {"short_ranks": 3}, "--pla-short-ranks 3 above --dp-size 2"),
        ({}, {"short_ranks": 1}, "--pla-short-ranks, which needs --dp-size above 1"),
        ({"dp_size": 2, "enable_dp_attention": True}, {}, "--enable-dp-attention"),
    ],
    ids=str,
)
def test_pools_that_cannot_work(server: dict[str, Any], mine: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        compat.check_flags(SimpleNamespace(**STOCK | server), SPATIAL.replace(**mine))


def test_pools_need_ranks_of_their_own() -> None:
    assert compat.has_pools(SimpleNamespace(dp_size=2), SPATIAL)
    assert not compat.has_pools(SimpleNamespace(dp_size=1), SPATIAL), "a member of a router's pool"
    assert not compat.has_pools(SimpleNamespace(dp_size=2), TEMPORAL)
    compat.check_flags(SimpleNamespace(**STOCK | {"dp_size": 2}), SPATIAL.replace(short_ranks=2))


def test_a_start_role_is_for_one_instance() -> None:
    short = SPATIAL.replace(role="short")
    compat.check_start(SimpleNamespace(dp_size=1), short)
    with pytest.raises(ConfigError, match="ranks have roles of their own"):
        compat.check_start(SimpleNamespace(dp_size=2), short)
    compat.check_flags(SimpleNamespace(**STOCK | {"dp_size": 2}), short)  # at run time each rank has its own config


def test_rules_name_attributes_that_the_host_has() -> None:
    """A renamed flag would silently switch its rule off."""
    from sglang.srt.server_args import ServerArgs

    fields = set(getattr(ServerArgs, "__struct_fields__", ())) or set(ServerArgs.__dataclass_fields__)
    assert set(STOCK) <= fields


@pytest.mark.parametrize(
    ("mamba", "window", "refused"), [(False, None, False), (True, None, True), (False, 4096, True), (False, 0, False)]
)
def test_model(mamba: bool, window: int | None, refused: bool) -> None:
    cache = SimpleNamespace(supports_mamba=lambda: mamba, sliding_window_size=window)
    if not refused:
        compat.check_model(cache)
        return
    with pytest.raises(ConfigError, match="sliding-window or state-space"):
        compat.check_model(cache)
