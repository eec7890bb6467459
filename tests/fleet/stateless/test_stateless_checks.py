"""What cannot go with ``--pla-stateless`` is refused before anything starts, all of it at once."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.stateless.checks import (
    VARIABLES,
    around_from_cli_args,
    check_model,
    check_port,
    check_stateless,
)
from pla_sglang.plugin.config import PlaConfig

CONFIG = PlaConfig(stateless=True)
GOOD: dict[str, Any] = {"disaggregation_mode": "null", "disaggregation_transfer_backend": "nixl", "pp_size": 1}
CASES = [
    ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
    ({"disaggregation_transfer_backend": "mooncake"}, "--disaggregation-transfer-backend mooncake"),
    ({"pp_size": 2}, "--pipeline-parallel-size 2"),
    ({"dp_size": 2}, "--dp-size 2"),
    ({"dcp_size": 2}, "--dcp-size 2"),
    ({"enable_dp_attention": True}, "--enable-dp-attention"),
    ({"attn_dp_size": 2}, "--attn-dp-size 2"),
    ({"prefill_decode_interval": 1}, "--prefill-decode-interval 1"),
    (
        {"disaggregation_decode_allocation_policy": "prefill_complete"},
        "--disaggregation-decode-allocation-policy prefill_complete",
    ),
    ({"disaggregation_decode_host_receive_threshold": 0.5}, "--disaggregation-decode-host-receive-threshold 0.5"),
    ({"enable_prefill_context_parallel": True}, "--enable-prefill-context-parallel"),
    ({"enable_prefill_cp": True}, "--enable-prefill-cp"),
    ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 2"),
    ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
    ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
    ({"enable_hisparse": True}, "--enable-hisparse"),
    ({"enable_unified_memory": True}, "--enable-unified-memory"),
    ({"enable_pdmux": True}, "--enable-pdmux"),
    ({"dllm_algorithm": "x"}, "--dllm-algorithm"),
    ({"is_embedding": True}, "--is-embedding"),
    ({"language_only": True}, "--language-only"),
    ({"optimistic_prefill_attempts": 1}, "--optimistic-prefill-attempts"),
    ({"disaggregation_decode_enable_offload_kvcache": True}, "--disaggregation-decode-enable-offload-kvcache"),
]
NOT_IN_EVERY_VERSION = {
    "attn_dp_size",
    "prefill_decode_interval",
    "disaggregation_decode_allocation_policy",
    "disaggregation_decode_host_receive_threshold",
    "enable_prefill_context_parallel",
}


@pytest.mark.parametrize(("given", "named"), CASES, ids=[named for _, named in CASES])
def test_each_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_stateless(SimpleNamespace(**GOOD | given), CONFIG, {})
    assert str(caught.value).startswith(f"--pla-stateless cannot be combined with: {named} ")
    check_stateless(SimpleNamespace(**GOOD | given), PlaConfig(), {})


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_the_environment(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check_stateless(SimpleNamespace(**GOOD), CONFIG, {name: "1"})
    check_stateless(SimpleNamespace(**GOOD), CONFIG, {name: "0"})


def test_all_reasons_at_once_and_none_where_all_is_well() -> None:
    args = SimpleNamespace(**GOOD | {"dp_size": 2, "enable_pdmux": True})
    with pytest.raises(ConfigError) as caught:
        check_stateless(args, CONFIG, {"SGLANG_RUST_SERVER": "true"})
    assert all(name in str(caught.value) for name in ("--dp-size 2", "--enable-pdmux", "SGLANG_RUST_SERVER"))
    check_stateless(SimpleNamespace(**GOOD), CONFIG, {})


def test_the_names_are_sglangs() -> None:
    """A misspelt argument would never be refused."""
    from sglang.srt.server_args import ServerArgs

    fields = set(getattr(ServerArgs, "__struct_fields__", ())) or set(ServerArgs.__dataclass_fields__)
    assert {name for given, _ in CASES for name in given} <= fields | NOT_IN_EVERY_VERSION


def test_models_with_other_state() -> None:
    plain = SimpleNamespace(supports_mamba=lambda: False, sliding_window_size=None)
    check_model(plain)
    for other in (
        SimpleNamespace(supports_mamba=lambda: True),
        SimpleNamespace(supports_mamba=lambda: False, sliding_window_size=128),
    ):
        with pytest.raises(ConfigError, match="sliding-window or state-space"):
            check_model(other)


def test_a_bootstrap_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        args = SimpleNamespace(host="127.0.0.1", node_rank=0, disaggregation_bootstrap_port=taken.getsockname()[1])
        with pytest.raises(
            ConfigError, match=f"--disaggregation-bootstrap-port {taken.getsockname()[1]} cannot be used"
        ):
            check_port(args, CONFIG)
        check_port(args, PlaConfig())
        check_port(SimpleNamespace(**vars(args) | {"node_rank": 1}), CONFIG)  # its first node listens there
    check_port(args, CONFIG)


@pytest.mark.parametrize("share", [0.0, 0.04, 0.96, 2])
def test_shares_are_checked(share: float) -> None:
    with pytest.raises(ConfigError, match="--pla-receive-share"):
        PlaConfig(stateless=True, receive_share=share)
    with pytest.raises(ConfigError, match="--pla-hold-share"):
        PlaConfig(stateless=True, hold_share=share)
    for field in ("send_share", "hold_share"):
        with pytest.raises(ConfigError, match="need --pla-stateless"):
            PlaConfig(**{field: 0.4})


@pytest.mark.parametrize("stateless", [True, False])
def test_the_command_line_of_a_stateless_instance_is_checked_and_no_other(*, stateless: bool) -> None:
    """The host's receiving queue matches prefixes only where that argument says so."""
    args = SimpleNamespace(
        **GOOD | {"pp_size": 2}, config_of_pla=PlaConfig(stateless=stateless), disable_radix_cache=False
    )
    parsed: list[Any] = []

    def parse(cls: Any, given: Any) -> Any:
        parsed.append(getattr(given, "disaggregation_decode_enable_radix_cache", None))
        return given

    if stateless:
        with pytest.raises(ConfigError, match="--pipeline-parallel-size 2"):
            around_from_cli_args(parse, object, args)  # type: ignore[arg-type]
    else:
        assert around_from_cli_args(parse, object, args) is args  # type: ignore[arg-type]
    assert parsed == [True if stateless else None]
