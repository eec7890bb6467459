"""DOPD's concurrency of a decode instance from the data of its GPUs (eq. 11 to 13), as the paper computes it."""

from __future__ import annotations

import dataclasses
import math

from pla_sglang.common.checks import require

BANDWIDTH_SHARE = 0.6  # alpha of eq. 12: "empirically, alpha = 0.6 is considered excellent"


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


def bandwidth_kv_bytes(device: Device, tensor_parallel: int, tpot_slo_s: float) -> float:
    """V_BW of eq. 12: KV cache that can be read within one decode step of ``tpot_slo_s``."""
    require("tpot_slo_s", tpot_slo_s, 0, above=True)
    return tpot_slo_s * BANDWIDTH_SHARE * tensor_parallel * device.bandwidth_bytes_per_s


def decode_concurrency(
    device: Device,
    tensor_parallel: int,
    *,
    tpot_slo_s: float,
    input_tokens: float,
    output_tokens: float,
) -> int:
    """cc_d of eq. 13. 0 where the weights do not fit."""
    require("input_tokens", input_tokens, 0)
    require("output_tokens", output_tokens, 0)
    request_bytes = (input_tokens + output_tokens / 2) * device.token_bytes
    require("bytes of a request", request_bytes, 0, above=True)
    room = min(memory_kv_bytes(device, tensor_parallel), bandwidth_kv_bytes(device, tensor_parallel, tpot_slo_s))
    return max(0, math.floor(room / request_bytes))
