"""Which tensor-parallel sizes DOPD would take (eq. 11 to 16), where profiles of several are known: a note of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pla_sglang.policy.dopd.tensor_parallel import MeasuredSize, SizeChoice, SizeLoad, SizeReason, choose_sizes
from pla_sglang.profiles.load import list_sizes, load_profile
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload.trace import Trace

# cc_g of eq. 14: SGLang's largest decode graph on GPUs of 80 GB and more, below a tensor-parallel size of 4.
GRAPH_BATCH = 256
WORDS = {
    SizeReason.GRAPH_FULL: f"the smallest that serves 0.9 of a decode graph of {GRAPH_BATCH}",
    SizeReason.MOST_A_GPU: "the one that serves most a GPU",
    SizeReason.LONGEST_FITS: "the smallest that holds the longest request and keeps half of the TTFT target",
    SizeReason.FASTEST: "the fastest; none keeps half of the TTFT target",
}


def recommend_sizes(profile: str, trace: Trace, slo: Slo) -> tuple[list[int], SizeChoice | None]:
    """Sizes that are known of the model and GPU of ``profile``, and what DOPD would choose of them for the requests of
    ``trace``. None: no choice, or none is possible. Raises ProfileError for a profile that is not known."""
    sizes = [MeasuredSize(one.gpus, one, one.kv_capacity_tokens) for one in map(load_profile, list_sizes(profile))]
    known = [size.tensor_parallel for size in sizes]
    if len(sizes) < 2:
        return known, None
    load = SizeLoad(
        input_tokens=float(trace.input_tokens.mean()),
        output_tokens=float(trace.output_tokens.mean()),
        longest_tokens=float((trace.input_tokens + trace.output_tokens).max()),
        ttft_slo_s=slo.ttft_s,
        tpot_slo_s=slo.tpot_s,
        graph_batch=GRAPH_BATCH,
    )
    return known, choose_sizes(sizes, load)


def describe_sizes(profiles: Sequence[str], trace: Trace, slo: Slo) -> Iterator[str]:
    """A sentence for each model and GPU of ``profiles`` of which several sizes are known."""
    for name, profile in {name.rpartition("-tp")[0]: name for name in profiles}.items():
        known, choice = recommend_sizes(profile, trace, slo)
        if len(known) < 2:
            continue
        start = f"tensor parallelism of {name}, of {', '.join(map(str, known))} by DOPD's eq. 11 to 16"
        if choice is None:
            yield f"{start}: none holds the longest request and serves within the TPOT target"
            continue
        yield (
            f"{start}: prefill {choice.prefill} ({WORDS[choice.prefill_reason]}), decode {choice.decode} "
            f"({WORDS[choice.decode_reason]}: {choice.concurrency} at once), {choice.ratio:.3g} prefill instances for "
            "each decode instance; a recommendation from formulas, no fleet of two sizes was simulated"
        )
