"""The manifests of examples/kubernetes: they can be read, and their queries ask for series that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_metric_names import router_names, series_of

FOLDER = Path(__file__).parents[1] / "examples/kubernetes"


def triggers() -> list[dict[str, Any]]:
    return list(yaml.safe_load((FOLDER / "keda.yaml").read_text(encoding="utf-8"))["spec"]["triggers"])


def test_the_scaled_object_has_what_keda_wants() -> None:
    manifest = yaml.safe_load((FOLDER / "keda.yaml").read_text(encoding="utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = manifest["spec"]
    assert spec["scaleTargetRef"]["name"]
    assert 0 < spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
    for trigger in triggers():
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")  # a fallback needs the latter
        metadata = trigger["metadata"]
        assert all(isinstance(value, str) for value in metadata.values()), "KEDA takes strings only"
        assert float(metadata["threshold"]) > 0
        assert metadata["serverAddress"].startswith("http")


@pytest.mark.parametrize("query", [one["metadata"]["query"] for one in triggers()])
def test_a_query_asks_for_series_of_the_router(query: str) -> None:
    patterns = series_of(query)
    assert patterns
    for pattern in patterns:
        assert any(pattern.fullmatch(name) for name in router_names()), pattern.pattern
    assert query.count("(") == query.count(")")


def test_the_page_names_each_manifest() -> None:
    linked = re.findall(r"\]\((\w+\.yaml)\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(path.name for path in FOLDER.glob("*.yaml"))
