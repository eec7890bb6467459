"""The chart of examples/helm: Helm itself lints and renders it; with its own values it is examples/kubernetes.

``lookup`` finds nothing here, as with ``helm template``: that a later install keeps the number of servers is not shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tool_environment import ToolEnvironment
from test_kubernetes_examples import assert_flags_are_known, check_schema, load_objects

import pla_sglang

ROOT = Path(__file__).parents[1]
CHART = ROOT / "examples/helm/pla-sglang"
# The same code as Helm's command has, by way of its library.
LINT = "import helm_python, json, sys; print(json.dumps(helm_python.lint(sys.argv[1], strict=True)))"
RENDER = """
import helm_python, json, sys
try:
    answer = helm_python.Chart.load(sys.argv[1]).render(json.load(sys.stdin), name="release", namespace="space")
except helm_python.errors.HelmError as error:
    answer = str(error)
print(json.dumps(answer))
"""
INFO = 1  # of Helm's severities; 2 and 3: warning, error
ALL_VALUES: dict[str, Any] = {
    "name": "other",
    "server": {
        "image": "registry.example/engine:1",
        "replicas": 0,
        "model": "/a folder: with #",
        "args": ["--pla-stateless", "--tp-size=2"],
        "resources": {"limits": {"nvidia.com/gpu": "2"}, "requests": {"memory": "64Gi"}},
        "startSeconds": 60,
        "gracePeriodSeconds": 10,
        "volumes": [{"name": "models", "hostPath": {"path": "/models"}}],
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"operator": "Exists"}],
    },
    "router": {
        "replicas": 1,
        "args": ["--policy=pla"],
        "planner": {"name": ""},
        "drainPauseSeconds": 0,
        "drainTimeoutSeconds": 60,
        "resources": {"limits": {"cpu": "4"}},
        "volumes": [{"name": "memory", "emptyDir": {}}],
        "volumeMounts": [{"name": "memory", "mountPath": "/var/lib/router"}],
        "nodeSelector": {"router": "yes"},
        "tolerations": [{"operator": "Exists"}],
    },
    "keys": {"clients": "of-clients", "operators": "of-operators", "workers": "w", "workersAdmin": "w-admin"},
    "monitoring": {"serviceMonitor": True, "prometheusRule": True, "labels": {"release": "prometheus"}},
}


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> ToolEnvironment:
    return ToolEnvironment(tmp_path_factory.mktemp("helm"), "helm-python-sdk")


def render(helm: ToolEnvironment, values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects by kind and name. Raises ValueError with Helm's message."""
    answer = json.loads(helm.run("python", "-c", RENDER, CHART, text=json.dumps(values)))
    if isinstance(answer, str):
        raise ValueError(answer)
    return by_name([one for text in answer.values() for one in yaml.safe_load_all(text) if one])


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    found = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(found) == len(objects)
    return found


@pytest.mark.e2e  # pip fetches Helm
def test_helm_lints_it(helm: ToolEnvironment) -> None:
    report = json.loads(helm.run("python", "-c", LINT, CHART))
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > INFO] == []


@pytest.mark.e2e
def test_with_its_own_values_it_is_the_plain_manifests(helm: ToolEnvironment) -> None:
    assert render(helm, {}) == by_name(load_objects())


@pytest.mark.e2e
def test_with_every_other_value_its_objects_fit_the_schemas(helm: ToolEnvironment) -> None:
    models = pytest.importorskip("kubernetes.aio.client.models", reason="needs pla-sglang[kubernetes]")
    objects = render(helm, ALL_VALUES)
    assert all(name.startswith("other") for _, name in objects)
    for (kind, name), one in objects.items():
        if "coreos" not in one["apiVersion"]:
            check_schema(models, one["apiVersion"].rsplit("/", 1)[-1].capitalize() + kind, one, f"{kind} {name}")
    server, router = (objects["Deployment", name]["spec"]["template"]["spec"] for name in ("other", "other-router"))
    for pod, kind in ((server, "server"), (router, "router")):
        (container,) = pod["containers"]
        assert_flags_are_known(container["args"], router=kind == "router")
        for field in ("nodeSelector", "tolerations"):
            assert pod[field] == ALL_VALUES[kind][field]
        assert container["resources"] == ALL_VALUES[kind]["resources"]
        assert ALL_VALUES[kind]["volumes"][0] in pod["volumes"]
        assert ALL_VALUES[kind]["volumeMounts"][0] in container["volumeMounts"]
    assert f"--model-path={ALL_VALUES['server']['model']}" in server["containers"][0]["args"]
    assert router["terminationGracePeriodSeconds"] == 75


@pytest.mark.e2e
def test_keys_come_from_secrets_alone(helm: ToolEnvironment) -> None:
    objects = render(helm, ALL_VALUES)
    keys = ALL_VALUES["keys"]
    for name, wanted in (
        ("other", {"PLA_WORKER_API_KEY": keys["workers"], "PLA_WORKER_ADMIN_KEY": keys["workersAdmin"]}),
        (
            "other-router",
            {
                "PLA_ROUTER_API_KEY": keys["clients"],
                "PLA_ROUTER_ADMIN_KEY": keys["operators"],
                "PLA_WORKER_API_KEY": keys["workers"],
                "PLA_WORKER_ADMIN_KEY": keys["workersAdmin"],
            },
        ),
    ):
        (container,) = objects["Deployment", name]["spec"]["template"]["spec"]["containers"]
        secrets = {one["name"]: one["valueFrom"].get("secretKeyRef") for one in container["env"]}
        assert {name: secret["name"] for name, secret in secrets.items() if secret} == wanted
        assert not any("key" in flag for flag in container["args"])
        assert "lifecycle" not in container, "its curl has no key; our servers tell the router by themselves"


@pytest.mark.e2e
def test_without_a_planner_the_router_may_only_look(helm: ToolEnvironment) -> None:
    objects = render(helm, ALL_VALUES)
    (rule,) = objects["Role", "other-router"]["rules"]
    assert rule["verbs"] == ["list", "watch"]
    arguments = objects["Deployment", "other-router"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert not any(flag.startswith(("--planner", "--actuator", "--instances")) for flag in arguments)


@pytest.mark.e2e
def test_monitoring_is_of_both_services_and_has_the_alerts(helm: ToolEnvironment) -> None:
    objects = render(helm, ALL_VALUES)
    chosen = objects["ServiceMonitor", "other"]["spec"]["selector"]["matchLabels"]
    for name in ("other", "other-router"):
        assert chosen.items() <= objects["Service", name]["metadata"]["labels"].items()
    alerts = yaml.safe_load((ROOT / "examples/grafana/alerts.yaml").read_text(encoding="utf-8"))
    assert objects["PrometheusRule", "other"]["spec"] == alerts


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"servers": {}}, "additional properties 'servers' not allowed"),
        ({"server": {"replica": 2}}, "at '/server': additional properties 'replica' not allowed"),
        ({"router": {"planner": {"min": 1}}}, "additional properties 'min' not allowed"),
        ({"router": {"planner": {"name": "hpa"}}}, "at '/router/planner/name': value must be one of"),
        ({"router": {"image": "router:latest"}}, "at '/router/image'"),
        ({"keys": {"clients": "Not A Name"}}, "at '/keys/clients'"),
        ({"server": {"args": ["pla-stateless"]}}, "at '/server/args/0'"),
    ],
)
def test_a_value_that_is_not_in_the_schema_is_refused(helm: ToolEnvironment, values: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        render(helm, values)


def test_schema_and_values_have_the_same_names() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert set(names_of_schema(schema)) - {"global"} == set(names_of_values(values))
    assert set(names_of_values(ALL_VALUES)) <= set(names_of_values(values))


def names_of_schema(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, one in schema.get("properties", {}).items():
        yield f"{path}{name}"
        assert "properties" not in one or one["additionalProperties"] is False, path + name
        yield from names_of_schema(one, f"{path}{name}.")


def names_of_values(values: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, one in values.items():
        yield f"{path}{name}"
        if isinstance(one, dict) and f"{path}{name}" not in ("server.resources", "router.resources"):
            free = name in ("nodeSelector", "labels")
            yield from () if free else names_of_values(one, f"{path}{name}.")


def test_its_version_is_that_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == pla_sglang.__version__
