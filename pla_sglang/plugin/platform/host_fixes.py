"""Handlers for places where SGLang assumes a GPU although the platform has none, and for its KV transfers on a host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Communicators of GroupCoordinator that need CUDA. Without them it uses its gloo group.
GPU_COMMUNICATORS = (
    "use_pynccl",
    "use_pymscclpp",
    "use_mscclpp",
    "use_custom_allreduce",
    "use_torch_symm_mem_all_reduce",
)
REST_US = 10_000  # of NIXL's progress thread: events end the wait; this is only how often it looks without one
ONE_WORKER = '{"num_threads": "0"}'  # of NIXL's UCX backend: none beside the one that its progress thread serves


def without_gpu_communicators(coordinator: Any, *args: Any, **keywords: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before ``GroupCoordinator.__init__``: request no CUDA communicator.

    SGLang passes these flags by keyword; only those that a caller passes are disabled, because host versions differ.
    """
    return (coordinator, *args), keywords | {name: False for name in GPU_COMMUNICATORS if name in keywords}


def early_send_without_event(original: Callable[..., None], scheduler: Any, *args: Any, **keywords: Any) -> None:
    """Around ``maybe_send_cached_prefix_chunk``: send the cached prefix without a CUDA event.

    With the overlap schedule SGLang records an event on the forward stream first, for a transfer engine that wants to
    wait until the previous pass has written these pages. On the CPU that pass has returned by then, so there is
    nothing to wait for; and a ``torch.cuda.Event`` cannot be recorded on a CPU stream, which stops the scheduler.
    """
    overlap = scheduler.enable_overlap
    scheduler.enable_overlap = False  # read here only to decide about the event
    try:
        original(scheduler, *args, **keywords)
    finally:
        scheduler.enable_overlap = overlap


def offer_mask_functions(reasoner: Any, grammar_backend: Any, *args: Any, **keywords: Any) -> None:
    """Before ``ReasonerGrammarBackend.__init__``: the backend that it wraps has the names that it will read.

    They are for masks without a grammar, of strict thinking, which SGLang refuses with every backend but xgrammar's.
    All other masks are made by the request's grammar.
    """
    for name in ("allocate_vocab_mask", "move_vocab_mask", "apply_vocab_mask"):
        if not hasattr(grammar_backend, name):
            setattr(grammar_backend, name, None)


def announce_kv_as_dram(manager: Any, args: Any, *rest: Any, **keywords: Any) -> None:
    """Before ``NixlKVManager.__init__``: declare every KV buffer as DRAM.

    ``KVArgs.kv_data_mem_kinds`` is SGLang's own field for KV buffers that live on the host. A decode server sets it
    to "VRAM", a prefill server leaves it empty and "VRAM" is assumed; UCX then refuses to register host memory. Both
    sides of a transfer run this, and each sends its peer the kind of its buffers, so registration, descriptors and
    transfers agree.

    Auxiliary buffers are DRAM already. State buffers (sliding window, Mamba, sparse attention) are always VRAM in
    SGLang; the CPU platform serves no model that has them; they are refused here too.
    """
    if any(pointer for component in args.state_data_ptrs or [] for pointer in component):
        raise NotImplementedError("PD disaggregation on the CPU platform moves KV only; this model has state buffers")
    args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)


def let_nixl_rest(manager: Any, *args: Any, **keywords: Any) -> None:
    """Before ``NixlKVManager.__init__``: NIXL agents of this process pause between two polls, and can.

    NIXL's Python API fixes ``pthrDelay`` at 0. Its progress thread then polls without a pause, in every prefill and
    decode engine: three quarters of a core each, measured with nothing to transfer. With a pause it waits on UCX's
    event descriptors, so the start of a transfer ends the pause.

    A sender's agent gets eight more UCX workers from SGLang, for several network cards. UCX connects each of them to
    the agent's first one, and nobody serves a worker that has nothing to send: what comes for it stays in its socket.
    UCX then waits for room to write on these connections, which is always there, and the progress thread spins: most of
    a core, for a minute and more at a time. So there is one worker, unless the operator's environment says otherwise.
    """
    from nixl import _api
    from sglang.srt.environ import envs

    params = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS
    if not params.is_set():
        params.set(ONE_WORKER)

    binding = _api.nixlBind
    if not getattr(binding.nixlAgentConfig, "pla_rests", False):
        binding.nixlAgentConfig = resting(binding.nixlAgentConfig)


def resting(config: type) -> type:
    """A subclass of the agent configuration ``config`` whose ``pthrDelay`` is always ``REST_US``."""
    delay: Any = config.__dict__["pthrDelay"]

    class Resting(config):
        pla_rests = True

        @property
        def pthrDelay(self) -> int:
            return int(delay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, wanted: int) -> None:
            delay.__set__(self, REST_US)

    return Resting
