"""The optimal P/D ratio and the tensor-parallel size in closed form (DOPD section IV-B and IV-C, eq. 11 to 16)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from pla_sglang.errors import ConfigError
from pla_sglang.policy.checks import require

BANDWIDTH_SHARE = 0.6  # alpha of eq. 12: "empirically, alpha = 0.6 is considered excellent"
GRAPH_SHARE = 0.9  # "choose TP so that an instance can support up to 0.9 x cc_g concurrency"


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU and the model on it.

    Attributes:
        memory_bytes: M_gpu.
        reserved_bytes: M', peak activations and everything else that is neither weights nor KV cache.
        bandwidth_bytes_per_s: BW.
        weights_bytes: M_model, all GPUs of an instance together.
        token_bytes: M_token, KV cache of one token.
    """

    memory_bytes: float
    reserved_bytes: float
    bandwidth_bytes_per_s: float
    weights_bytes: float
    token_bytes: float

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bandwidth_bytes_per_s", "token_bytes"):
            require(f"device {name}", getattr(self, name), 0, above=True)
        require("device weights_bytes", self.weights_bytes, 0)
        require("device reserved_bytes", self.reserved_bytes, 0, self.memory_bytes)


def memory_kv_bytes(device: Device, tensor_parallel: int) -> float:
    """V_mem of eq. 11; negative where the weights do not fit."""
    return (device.memory_bytes - device.reserved_bytes) * tensor_parallel - device.weights_bytes


def bandwidth_kv_bytes(
    device: Device, tensor_parallel: int, tpot_slo_s: float, share: float = BANDWIDTH_SHARE
) -> float:
    """V_BW of eq. 12: KV cache that can be read within one decode step of ``tpot_slo_s``."""
    require("tpot_slo_s", tpot_slo_s, 0, above=True)
    require("bandwidth share", share, 0, 1, above=True)
    return tpot_slo_s * share * tensor_parallel * device.bandwidth_bytes_per_s


def decode_concurrency(
    device: Device,
    tensor_parallel: int,
    *,
    tpot_slo_s: float,
    input_tokens: float,
    output_tokens: float,
    graph_batch: int | None = None,
) -> int:
    """cc_d of eq. 13, capped by the largest decode graph cc_g (eq. 14). 0 where the weights do not fit."""
    require("input_tokens", input_tokens, 0)
    require("output_tokens", output_tokens, 0)
    request_bytes = (input_tokens + output_tokens / 2) * device.token_bytes
    require("bytes of a request", request_bytes, 0, above=True)
    room = min(memory_kv_bytes(device, tensor_parallel), bandwidth_kv_bytes(device, tensor_parallel, tpot_slo_s))
    found = max(0, math.floor(room / request_bytes))
    return found if graph_batch is None else min(found, graph_batch)


def optimal_ratio(*, prefill_s: float, step_s: float, output_tokens: float, concurrency: float) -> float:
    """n_p / n_d of eq. 15: n_p / t_p = n_d * cc_d / (t_d * OSL).

    ``prefill_s`` is t_p of one request, ``step_s`` t_d of one decode step at ``concurrency``. Raises ConfigError unless
    all are above 0.
    """
    require("prefill_s", prefill_s, 0, above=True)
    require("step_s", step_s, 0, above=True)
    require("output_tokens", output_tokens, 0, above=True)
    require("concurrency", concurrency, 0, above=True)
    return concurrency * prefill_s / (step_s * output_tokens)


def prefill_latency_s(work_s: float, speedup: float, communication_s: float) -> float:
    """Eq. 16: T(ISL, TP) = C(ISL) / S(TP) + tau(TP), C in seconds of one GPU."""
    require("speedup", speedup, 0, above=True)
    return work_s / speedup + communication_s


def choose_decode_parallel(
    device: Device,
    sizes: Sequence[int],
    *,
    tpot_slo_s: float,
    input_tokens: float,
    output_tokens: float,
    graph_batch: int,
) -> int:
    """Smallest TP whose concurrency reaches 0.9 cc_g, else the one with most concurrency per GPU.

    Raises ConfigError where the weights fit none of ``sizes``.
    """
    found = {
        size: decode_concurrency(
            device,
            size,
            tpot_slo_s=tpot_slo_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            graph_batch=graph_batch,
        )
        for size in sorted(sizes)
    }
    able = {size: concurrency for size, concurrency in found.items() if concurrency > 0}
    if not able:
        raise ConfigError(f"no tensor-parallel size of {sorted(sizes)} holds the weights and one request")
    for size, concurrency in able.items():
        if concurrency >= GRAPH_SHARE * graph_batch:
            return size
    return max(able, key=lambda size: (able[size] / size, -size))


def choose_prefill_parallel(device: Device, sizes: Sequence[int], *, max_sequence_tokens: int) -> int:
    """Section IV-C: "just the right value to support the maximum model sequence length".

    Raises ConfigError where none of ``sizes`` does.
    """
    for size in sorted(sizes):
        if memory_kv_bytes(device, size) >= max_sequence_tokens * device.token_bytes:
            return size
    raise ConfigError(f"no tensor-parallel size of {sorted(sizes)} holds {max_sequence_tokens} tokens")


def fastest_prefill_parallel(work_s: float, speedups: Mapping[int, float], communication_s: Mapping[int, float]) -> int:
    """The TP with the least latency by eq. 16, the smaller of equals."""
    latency_s = {size: prefill_latency_s(work_s, speedups[size], communication_s[size]) for size in speedups}
    return min(sorted(latency_s), key=lambda size: latency_s[size])
