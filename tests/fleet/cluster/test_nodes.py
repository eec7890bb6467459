"""How many nodes and GPUs an instance takes, and what it may not say of them itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.cluster.nodes import NodeNeeds, check_local_nodes, read_ray_needs

MODEL = ("--model-path", "m")


@pytest.mark.parametrize(
    ("arguments", "nodes", "gpus"),
    [
        ((), 1, 0),  # the demo model
        (("--tp", "2", "--nnodes", "2"), 2, 0),
        (MODEL, 1, 1),
        ((*MODEL, "--device", "cpu", "--tp-size", "8", "--nnodes", "4"), 4, 0),
        ((*MODEL, "--pla-emulate", "h100-llama3.1-8b-tp1"), 1, 0),
        ((*MODEL, "--tp", "4", "--pp-size=2"), 1, 8),
        ((*MODEL, "--tp", "4", "--pp-size=2", "--nnodes", "2"), 2, 4),
        ((*MODEL, "--tensor-parallel-size", "16", "--nnodes=2"), 2, 8),
        ((*MODEL, "--pp-size", "2", "--nnodes", "2"), 2, 1),
        ((*MODEL, "--pp-size", "2", "--tp-size", "2", "--nnodes", "4"), 4, 1),
        ((*MODEL, "--tp-size", "4", "--nnode", "4"), 4, 1),  # SGLang takes the beginning of a flag
    ],
)
def test_gpus_of_a_node_are_those_of_its_ranks(arguments: tuple[str, ...], nodes: int, gpus: int) -> None:
    assert read_ray_needs(arguments) == NodeNeeds(nodes, gpus)


def test_needs_are_said() -> None:
    assert str(NodeNeeds(1, 2)) == "1 CPU and 2 GPUs of one node"
    assert str(NodeNeeds(3, 8)) == "1 CPU and 8 GPUs of each of 3 nodes"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--nnodes", "2"), "--nnodes 2 does not divide the ranks of --tp-size 1 and --pp-size 1; allowed: 1"),
        (("--tp", "4", "--nnodes", "3"), "--nnodes 3 .* --tp-size 4 and --pp-size 1; allowed: 1, 2, 4"),
        # SGLang would give two stages to two nodes, and the third to nobody.
        (("--tp", "4", "--pp-size", "3", "--nnodes", "2"), "--nnodes 2 .*; allowed: 1, 3, 6, 12"),
        (("--tp", "2", "--nnodes", "0"), "--nnodes '0' is no count; allowed: 1 and above"),
        (("--tp", "two"), "--tp-size 'two' is no count"),
        (("--tp", "2", "--nnodes", "2", "--node-rank", "0"), "--node-rank 0 is not for --on ray, which sets it"),
        (("--dist-init-addr=h:1",), "--dist-init-addr h:1 is not for --on ray"),
        (("--dist-init", "h:1"), "--dist-init-addr h:1 is not for --on ray"),
        (("--nccl-init-addr", "h:1"), "--nccl-init-addr h:1 is not for --on ray"),
        (("--use-ray",), "--use-ray is not for --on ray"),
    ],
)
def test_what_ray_cannot_place_is_refused(arguments: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        read_ray_needs(arguments)
    assert "\n" not in str(caught.value)


def test_a_file_of_flags_counts(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("tp_size: 8\nnnodes: 2\nmodel-path: m\n")
    assert read_ray_needs(("--config", str(file))) == NodeNeeds(2, 4)
    assert read_ray_needs(("--config", str(file), "--nnodes", "4")) == NodeNeeds(4, 2)
    file.write_text("node-rank: 1\n")
    with pytest.raises(ConfigError, match="--node-rank 1 is not for --on ray"):
        read_ray_needs(("--config", str(file)))
    file.write_text("use-ray: false\n")
    assert read_ray_needs(("--config", str(file))) == NodeNeeds(1, 0)
    file.write_text("use_ray: true\n")
    with pytest.raises(ConfigError, match="--use-ray is not for --on ray"):
        read_ray_needs(("--config", str(file)))


def test_a_cluster_on_one_machine_waits_for_no_other() -> None:
    """Who says where the nodes meet starts the others by hand."""
    check_local_nodes(("--tp", "2"))
    check_local_nodes(("--tp", "2", "--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "h:1"))
    with pytest.raises(ConfigError, match="--nnodes 2 needs nodes beside this machine; allowed: 1, or --on ray"):
        check_local_nodes(("--tp", "2", "--nnodes", "2"))
