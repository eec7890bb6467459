"""All benches in one table, in the order of their folders: ``python -m bench`` lists it without loading any of them."""

from __future__ import annotations

from bench.harness.bench import Bench

_ALL = (
    Bench("check.abort_storm", "2 min", "engines"),
    Bench("check.chaos.bench", "16 min", "engines"),
    Bench("check.consistency", "seconds", "nothing"),
    Bench("check.emulation", "6 min", "engines", results="emulated"),
    Bench("check.fidelity", "35 min", "engines, traces", results="emulated"),
    Bench("check.find_instances_live", "35 min", "engines, traces", results="emulated"),
    Bench("check.flips", "30 min", "engines", results="emulated"),
    Bench("check.hops.bench", "35 min", "engines", results="emulated"),
    Bench("check.overload_router", "5 min", "engines", results="emulated"),
    Bench("check.parity", "6 min", "engines"),
    Bench("check.poison.bench", "40 min", "engines"),
    Bench("check.router_clients", "3 min", "engines"),
    Bench("check.survive", "20 min", "engines", results="emulated"),
    Bench("check.upgrade", "10 min", "engines, 2 SGLangs", results="emulated"),
    Bench("check.verified", "5 min/trace", "engines, traces"),
    Bench("compare.chat", "5 min", "engines"),
    Bench("compare.hol", "15 min", "engines"),
    Bench("compare.low_load", "10 min", "engines"),
    Bench("compare.overload", "8 min", "engines"),
    Bench("compare.replay", "the trace", "server, trace"),
    Bench("compare.router", "8 min", "engines, sglang_router"),
    Bench("compare.spatial", "2 h", "engines, sglang_router"),
    Bench("compare.stock_client", "3 min", "engines"),
    Bench("cost.client_load", "1 min", "nothing", results="emulated"),
    Bench("cost.cluster_start", "3 min", "engines"),
    Bench("cost.padding", "10 s", "nothing"),
    Bench("cost.router_cost.bench", "6 min", "sglang_router"),
    Bench("cost.sched_pass", "1 min", "nothing"),
    Bench("cost.sim_speed", "1 min", "nothing"),
    Bench("cost.stateless", "35 min", "engines", results="emulated"),
    Bench("gpu.gpu", "7 min", "a GPU"),
    Bench("harness.publish", "seconds", "results"),
    # the lab: papers, fleets and the search for baselines; with tests, pages and results of its own
    Bench("lab.agentic", "2 h", "traces", results="simulated"),
    Bench("lab.arrow", "35 min", "engines, traces", results="emulated"),
    Bench("lab.baselines", "35 min", "engines, traces", results="emulated"),
    Bench("lab.best_stock", "30 min", "traces", results="simulated"),
    Bench("lab.best_stock_live", "35 min", "engines, traces", results="emulated"),
    Bench("lab.fig6", "35 min", "engines", results="emulated"),
    Bench("lab.fleets.__main__", "hours", "nothing"),
    Bench("lab.frontier", "8 min", "engines", results="emulated"),
    Bench("lab.pass_sharing", "2 min", "nothing", results="simulated"),
    Bench("lab.papers.__main__", "27 min", "nothing"),
    Bench("lab.star", "35 min", "engines", results="emulated"),
    Bench("lab.star_decision", "1 min", "nothing"),
)
BENCHES = {bench.name: bench for bench in _ALL}
