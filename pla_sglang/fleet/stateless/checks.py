"""What cannot go together with ``--pla-stateless``: refused at the start, with every reason."""

from __future__ import annotations

import argparse
import dataclasses
import socket
from collections.abc import Callable, Mapping
from typing import Any

from pla_sglang.common.checks import Choice, Range
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig, read_variables
from pla_sglang.plugin.engine.host.arguments import resolve


@dataclasses.dataclass(frozen=True)
class Limit:
    """What an argument of SGLang may be, and why nothing else.

    Attributes:
        flags: of the argument, in whichever version has it; the first is shown, the shortest has the argument's name.
        default: SGLang's.
        allowed: None: a switch, which is to be off.
    """

    flags: tuple[str, ...]
    why: str
    default: Any = False
    allowed: Choice | Range | None = None

    @property
    def argument(self) -> str:
        return min(self.flags, key=len).removeprefix("--").replace("-", "_")

    def find_refusal(self, args: Any) -> str | None:
        """None: ``args`` keep to it."""
        value = getattr(args, self.argument, None)
        if self.allowed is None:
            return f"{self.flags[0]} ({self.why})" if value else None
        value = self.default if value is None else value
        return None if self.allowed.allows(value) else f"{self.flags[0]} {value} ({self.why})"


NO_NAME, ONE, ZERO = Choice(("",)), Range(high=1), Range(high=0)
SPLIT = "ranks would receive different requests"
LIMITS = (
    # How ranks, roles and transfers are laid out.
    Limit(("--disaggregation-mode",), "a stateless instance has both phases", "null", Choice(("null",))),
    Limit(
        ("--disaggregation-transfer-backend",),
        "give nixl; other backends are not tested",
        "mooncake",
        Choice(("nixl",)),
    ),
    Limit(("--pipeline-parallel-size", "--pp-size"), "not tested", 1, ONE),
    Limit(("--dp-size", "--data-parallel-size"), "each rank would need peers of its own", 1, ONE),
    Limit(("--dcp-size", "--decode-context-parallel-size"), "not tested", 1, ONE),
    Limit(("--enable-dp-attention",), SPLIT),
    Limit(("--attn-dp-size",), SPLIT, 1, ONE),
    Limit(("--enable-prefill-context-parallel",), "not tested"),
    Limit(("--enable-prefill-cp",), "not tested"),
    Limit(("--tokenizer-worker-num",), "each would know other peers", 1, ONE),
    # What holds KV or runs passes in another way.
    Limit(("--speculative-algorithm",), "a draft's state does not travel", "", NO_NAME),
    Limit(("--enable-hierarchical-cache",), "received KV would be written through to the host"),
    Limit(("--enable-hisparse",), "it hands prefills to decode in its own way"),
    Limit(("--enable-unified-memory",), "it moves pages under a transfer"),
    Limit(("--enable-pdmux",), "it has a prefill loop of its own"),
    Limit(("--dllm-algorithm",), "diffusion models have no decode to hand over to", "", NO_NAME),
    Limit(("--is-embedding",), "there is no decode"),
    Limit(("--language-only",), "its encoder sends embeddings in its own way"),
    Limit(("--optimistic-prefill-attempts",), "a prefill part waits for its decode part", 0, ZERO),
    Limit(("--disaggregation-decode-enable-offload-kvcache",), "a decode instance's"),
    Limit(
        ("--disaggregation-decode-allocation-policy",),
        "a leg says where its KV goes before the prefill, and both ends count on that",
        "early",
        Choice(("early",)),
    ),
    Limit(
        ("--disaggregation-decode-host-receive-threshold",),
        "received KV would not be on the device",
        1.0,
        Range(low=1),
    ),
    Limit(("--prefill-decode-interval",), "it skips passes in which legs are prefilled", 0, ZERO),
)

# What SGLang reads of the environment and does not work here, and why.
VARIABLES = {
    "SGLANG_DISAGG_STAGING_BUFFER": "staging belongs to one end of a pair",
    "SGLANG_RUST_SERVER": "its front has no place for the bootstrap server",
    "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK": "it asks peers from the scheduler thread",
}
OFF = frozenset({"", "0", "false", "no"})


def around_from_cli_args(original: Callable[..., Any], cls: Any, args: argparse.Namespace) -> Any:
    """Within the plugin's own hook, which says what is raised here and ends the start."""
    config: PlaConfig = args.config_of_pla
    if not config.stateless:
        return original(cls, args)
    # The host's receiving queue matches prefixes only where this says so; it has no other effect here.
    args.disaggregation_decode_enable_radix_cache = not args.disable_radix_cache
    server_args = original(cls, args)
    known = resolve(server_args)
    check_stateless(known, config, read_variables(VARIABLES))
    check_port(known, config)
    return server_args


def check_stateless(args: Any, config: PlaConfig, environment: Mapping[str, str]) -> None:
    """Raises ConfigError with every contradiction. ``args``: SGLang's resolved arguments."""
    if not config.stateless:
        return
    reasons = [refusal for limit in LIMITS if (refusal := limit.find_refusal(args)) is not None]
    reasons += [f"{name} ({why})" for name, why in VARIABLES.items() if environment.get(name, "").lower() not in OFF]
    if reasons:
        raise ConfigError("--pla-stateless cannot be combined with: " + "; ".join(reasons))


def check_port(args: Any, config: PlaConfig) -> None:
    """Raises ConfigError where the bootstrap port is taken: the host would only log it, and nobody could be sent KV.

    The first of an instance's nodes listens there, for the ranks of all.
    """
    if not config.stateless or args.node_rank > 0:
        return
    host, port = args.host, args.disaggregation_bootstrap_port
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise ConfigError(
            f"--disaggregation-bootstrap-port {port} cannot be used on {host}: {error.strerror}"
        ) from None


def check_model(tree_cache: Any) -> None:
    """Raises ConfigError for models whose cache keeps more than plain KV; known only once the cache is built."""
    if tree_cache.supports_mamba() or getattr(tree_cache, "sliding_window_size", None):
        raise ConfigError(
            "--pla-stateless does not support models with sliding-window or state-space layers yet (their state on "
            "both ends of a transfer is not tested); start without it"
        )
