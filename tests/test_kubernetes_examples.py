"""The manifests of examples/kubernetes: they fit Kubernetes' schemas, and what they name of ours is there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_metric_names import router_names, series_of

from pla_sglang.common.cli import flags_of
from pla_sglang.fleet.actuators.kubernetes_actuator import FLEET_LABEL, KIND_LABEL
from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.launch_router import RouterConfig
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.policy.interface.fleet import InstanceKind

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


# -- servers.yaml, router.yaml ---------------------------------------------------------------------------------------


def load_objects() -> list[dict[str, Any]]:
    files = [FOLDER / "servers.yaml", FOLDER / "router.yaml"]
    return [one for file in files for one in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def find_object(kind: str, name: str) -> dict[str, Any]:
    return next(one for one in load_objects() if (one["kind"], one["metadata"]["name"]) == (kind, name))


def check_schema(models: Any, type_name: str, value: Any, path: str) -> None:
    """Asserts that ``value`` is of a type of Kubernetes' published OpenAPI schema, as its client's classes have it."""
    if value is None or type_name == "object":
        return
    if type_name.startswith("list["):
        assert isinstance(value, list), path
        for number, one in enumerate(value):
            check_schema(models, type_name[5:-1], one, f"{path}[{number}]")
    elif type_name.startswith("dict["):
        assert isinstance(value, dict), path
        for name, one in value.items():
            assert isinstance(name, str), path
            check_schema(models, type_name.removeprefix("dict[str, ")[:-1], one, f"{path}.{name}")
    elif type_name in PLAIN:
        assert type(value) in PLAIN[type_name], f"{path}: {value!r} is no {type_name}"
    else:
        model = getattr(models, type_name)
        assert isinstance(value, dict), path
        fields = {sent: name for name, sent in model.attribute_map.items()}
        assert set(value) <= set(fields), f"{path}: {type_name} has no {sorted(set(value) - set(fields))}"
        for sent, one in value.items():
            check_schema(models, model.openapi_types[fields[sent]], one, f"{path}.{sent}")
        model(**{fields[sent]: one for sent, one in value.items()})  # refuses what lacks a field that must be there


PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}


@pytest.mark.parametrize("one", load_objects(), ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_a_manifest_fits_the_published_schema(one: dict[str, Any]) -> None:
    models = pytest.importorskip("kubernetes.aio.client.models", reason="needs pla-sglang[kubernetes]")
    version = one["apiVersion"].rsplit("/", 1)[-1]
    check_schema(models, version.capitalize() + one["kind"], one, one["kind"])


def assert_flags_are_known(words: Sequence[str], *, router: bool) -> None:
    """Of a router: all are ours. Of a server: those that are not SGLang's."""
    known = {flag.knob.name for flag in flags_of(RouterConfig if router else PlaConfig)}
    flags = {word.partition("=")[0] for word in words}
    ours = flags if router else {flag for flag in flags if flag.startswith(("--pla", "--prefill"))}
    assert ours <= known, ours - known


@pytest.mark.parametrize(("name", "launcher"), [("sglang", "launch_server"), ("sglang-router", "launch_router")])
def test_a_container_starts_one_of_our_commands_with_flags_that_there_are(name: str, launcher: str) -> None:
    pod = find_object("Deployment", name)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", f"pla_sglang.{launcher}"]
    assert_flags_are_known(container["args"], router=launcher == "launch_router")
    probes = [container[f"{which}Probe"]["httpGet"] for which in ("startup", "readiness", "liveness")]
    assert {probe["port"] for probe in probes} == {"http"} == {port["name"] for port in container["ports"]}


def test_labels_say_whom_the_planner_may_scale() -> None:
    servers, router = find_object("Deployment", "sglang"), find_object("Deployment", "sglang-router")
    labels = servers["metadata"]["labels"]
    assert labels[FLEET_LABEL] == "sglang"
    assert labels[KIND_LABEL] in {kind.value for kind in InstanceKind}
    template = servers["spec"]["template"]["metadata"]["labels"]
    assert labels.items() <= template.items()
    assert find_object("Service", "sglang")["spec"]["selector"].items() <= template.items()
    arguments = router["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--actuator=kubernetes:$(NAMESPACE)/{labels[FLEET_LABEL]}" in arguments


def test_the_router_ends_within_its_grace_period() -> None:
    pod = find_object("Deployment", "sglang-router")["spec"]["template"]["spec"]
    drain_s = next(field.default for field in dataclasses.fields(RelayConfig) if field.name == "drain_timeout_s")
    pause_s = next(int(flag.partition("=")[2]) for flag in pod["containers"][0]["args"] if "--drain-pause-s" in flag)
    assert pod["terminationGracePeriodSeconds"] == pause_s + drain_s + 15
