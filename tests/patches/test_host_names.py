"""Names that versions of SGLang do not share stand in ``plugin/engine/host/``, and where its schedulers are read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = (
    "pla_sglang/plugin/engine",
    "pla_sglang/fleet/stateless",
    "pla_sglang/testing",
    "pla_sglang/sim/emulate",
    "graphs/pla_graphs",
)
ADAPTERS = Path("pla_sglang/plugin/engine/host")
SNAPSHOTS = {Path("pla_sglang/plugin/engine/snapshot.py"), Path("pla_sglang/fleet/stateless/host/calls.py")}

# Of a request, a scheduler, an adder of prefills, a batch, a KV manager and the arguments.
UNSHARED = {
    "extend_range", "set_extend_range", "extend_end", "prefix_indices", "prefix_len",
    "kv_committed_len", "req_pool_idx", "_refresh_fill_ids", "refresh_fill_ids",
    "ps", "_can_schedule_lora_req", "can_schedule_lora_req",
    "rem_total_token_offset", "cur_rem_token_offset", "memory_budget",
    "match_prefix_for_req", "match_kv_cache", "release_kv_cache", "process_prebuilt",
    "transfer_statuses", "exceptions", "is_dummy", "tool_close_token_ids",
    "get_model_config", "resolve_once", "resolved_view", "enable_dp_attention", "attn_dp_size",
    "tp_group", "num_token_non_padded_cpu", "kv_loc_plan",
}  # fmt: skip


def find_names(source: str) -> Iterator[tuple[int, str]]:
    """Attributes that ``source`` reads or sets, names that it imports from SGLang, and keywords that it gives.

    Less those of ``get_parallel()``, a word of all versions.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "get_parallel()":
            continue
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
            yield from ((node.lineno, alias.name) for alias in node.names)


def modules() -> Iterator[Path]:
    for folder in OURS:
        yield from (path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py")))


def test_only_adapters_and_snapshots_know_names_that_versions_do_not_share() -> None:
    strangers = [
        f"{path}:{line} {name}"
        for path in modules()
        if not path.is_relative_to(ADAPTERS) and path not in SNAPSHOTS
        for line, name in find_names((ROOT / path).read_text(encoding="utf-8"))
        if name in UNSHARED
    ]
    assert strangers == []


def test_each_adapter_is_used() -> None:
    sources = [(ROOT / path).read_text(encoding="utf-8") for path in modules() if not path.is_relative_to(ADAPTERS)]
    used = {name for source in sources for node in ast.walk(ast.parse(source)) for name in _used(node)}
    for path in sorted((ROOT / ADAPTERS).glob("*.py")):
        body = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        offered = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        assert {name for name in offered if not name.startswith("_")} <= used, path.name


def _used(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pla_sglang.plugin.engine.host"):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield node.attr
