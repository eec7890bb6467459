"""Kubernetes as an actuator: orders to an API server, and what comes of them there.

The server is a stand-in (``support/kube_api.py``). ``PLA_TEST_KUBECONFIG=FILE`` has the same tests meet a real one, and
leaves out those that inject faults. It needs no scheduler, controllers or kubelets: tests play them. Its admission
plugin ServiceAccount is to be off.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytest.importorskip("kubernetes.aio", reason="needs pla-sglang[kubernetes]")

from support.kube_api import Request
from support.kube_cluster import FLEET
from support.kube_scene import KubeScene, kube_scene, stand_in_only, write_kubeconfig
from support.serving import wait_until

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.actuators import kubernetes_actuator, open_actuator
from pla_sglang.fleet.actuators.interface import ActuatorError, StartedInstance
from pla_sglang.fleet.actuators.kubernetes_actuator import TRIES, KubernetesActuator
from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.state_file import StateFile
from pla_sglang.fleet.router.control.workers.table import WorkerTable
from pla_sglang.fleet.router.control.workers.worker_service import WorkerService

ROUTER = Path(__file__).parents[3] / "examples/kubernetes/router.yaml"


Kube = Callable[[], contextlib.AbstractAsyncContextManager[KubeScene]]


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kube:
    return functools.partial(kube_scene, tmp_path, monkeypatch)


async def list_by_plan(one: KubeScene, actuator: KubernetesActuator) -> dict[int | None, StartedInstance]:
    one.later()
    return {row.plan: row for row in await actuator.list_instances()}


async def test_a_start_is_one_more_pod_and_the_next_that_comes_is_its_instance(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        actuator = one.open_actuator()
        started = await actuator.start_instance("stateless", 7)
        assert started == StartedInstance("stateless-7", "", "stateless", "starting", 7)
        assert await actuator.start_instance("stateless", 7) == started, "the same number starts nothing"
        assert await one.cluster.count("stateless") == 2
        one.cluster.starts = False
        await one.cluster.step()
        rows = await list_by_plan(one, actuator)
        assert rows[None].state == "ready"
        assert (rows[7].url, rows[7].state) == ("", "starting")
        (new,) = [pod for pod in await one.cluster.list_pods() if pod["status"]["phase"] == "Pending"]
        await one.cluster.run(new["metadata"]["name"], ready=False)
        rows = await list_by_plan(one, actuator)
        assert rows[7].url.startswith("http://10.0.0.")
        assert rows[7].state == "starting"
        await one.cluster.run(new["metadata"]["name"])
        assert (await list_by_plan(one, actuator))[7].state == "ready"
        assert [row.plan for row in await one.open_actuator("another").list_instances()].count(7) == 1


async def test_the_one_that_was_chosen_leaves_however_old_it_is(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 3)
        actuator = one.open_actuator()
        for row in await actuator.list_instances():
            await actuator.stop_instance(row.name)
            await actuator.stop_instance(row.name)
            assert {each.name: each.state for each in await actuator.list_instances()}[row.name] == "stopping"
            await one.cluster.step()
            one.later()
            assert {each.name: each.state for each in await actuator.list_instances()}[row.name] == "stopping"
            await actuator.stop_instance(row.name)
            await one.cluster.finish()
            one.later()
            assert row.name not in [each.name for each in await actuator.list_instances()]
            await actuator.stop_instance(row.name)
        assert await one.cluster.count("stateless") == 0


async def test_a_plan_that_is_over_starts_nothing_and_its_instance_is_gone(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        actuator = one.open_actuator()
        await actuator.start_instance("stateless", 7)
        await one.cluster.step()
        await list_by_plan(one, actuator)
        await actuator.stop_instance("stateless-7")
        await one.cluster.step()
        await one.cluster.finish()
        assert list(await list_by_plan(one, actuator)) == [None]
        assert (await one.open_actuator("another").start_instance("stateless", 7)).state == "dead"
        assert await one.cluster.count("stateless") == 1


async def test_a_start_without_a_pod_can_be_taken_back(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        actuator = one.open_actuator()
        await actuator.start_instance("stateless", 7)
        await actuator.stop_instance("stateless-7")
        await actuator.stop_instance("stateless-7")
        assert await one.cluster.count("stateless") == 1
        assert list(await list_by_plan(one, actuator)) == [None]


async def test_nobody_leaves_while_kubernetes_would_remove_another(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        actuator = one.open_actuator()
        (old,) = await actuator.list_instances()
        one.cluster.starts = False
        await actuator.start_instance("stateless", 7)
        await one.cluster.step()
        with pytest.raises(ActuatorError, match="is not ready, and Kubernetes would remove that one first"):
            await actuator.stop_instance(old.name)
        assert await one.cluster.count("stateless") == 2
        await list_by_plan(one, actuator)
        await actuator.stop_instance("stateless-7")  # a pod that never got ready
        await one.cluster.step()
        await one.cluster.finish()
        assert [row.name for row in (await list_by_plan(one, actuator)).values()] == [old.name]


async def test_a_start_waits_until_who_leaves_has_left(kube: Kube) -> None:
    """Both changes together would be none, and nobody would leave."""
    async with kube() as one:
        await one.cluster.create("stateless", 2)
        actuator = one.open_actuator()
        leaves, stays = await actuator.list_instances()
        await actuator.stop_instance(leaves.name)
        start = asyncio.create_task(actuator.start_instance("stateless", 7))
        await asyncio.sleep(0.1)
        assert await one.cluster.count("stateless") == 1
        await one.cluster.step()
        assert (await start).state == "starting"
        await one.cluster.step()
        rows = {row.name: row.state for row in (await list_by_plan(one, actuator)).values()}
        assert rows["stateless-7"] == "ready"
        await one.cluster.finish()
        one.later()
        assert sorted(row.name for row in await actuator.list_instances()) == sorted([stays.name, "stateless-7"])


async def test_a_pod_that_replaces_another_has_its_plan(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        actuator = one.open_actuator()
        assert not actuator.lease.held
        assert await one.acquire(actuator)
        await actuator.start_instance("stateless", 7)
        await one.cluster.step()
        before = (await list_by_plan(one, actuator))[7]
        (lost,) = [
            pod for pod in await one.cluster.list_pods() if before.url.endswith(pod["status"]["podIP"] + ":30000")
        ]
        await one.cluster.end(lost["metadata"]["name"])
        assert (await list_by_plan(one, actuator))[7].url == ""
        await one.cluster.step()
        after = (await list_by_plan(one, actuator))[7]
        assert after.name == before.name
        assert after.url not in ("", before.url)


async def test_what_somebody_else_scales_is_seen(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        await one.cluster.create("decode", 1)
        actuator = one.open_actuator()
        await actuator.start_instance("stateless", 7)
        await one.cluster.step()
        await one.cluster.scale("stateless", 4)
        await one.cluster.step()
        rows = await list_by_plan(one, actuator)
        assert rows[7].state == "ready"
        one.later()
        assert sorted(row.kind for row in await actuator.list_instances()) == ["decode"] + ["stateless"] * 4
        await one.cluster.scale("stateless", 0)
        await one.cluster.step()
        await one.cluster.finish()
        one.later()
        assert [row.kind for row in await actuator.list_instances()] == ["decode"]


async def test_orders_at_once_are_each_carried_out_once(kube: Kube) -> None:
    """Of two routers even, whose leases have failed them."""
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        actuators = [one.open_actuator(f"router-{number}") for number in range(2)]
        plans = range(1, 7)
        await asyncio.gather(*(actuators[plan % 2].start_instance("stateless", plan) for plan in plans))
        await asyncio.gather(*(actuators[plan % 2 - 1].start_instance("stateless", plan) for plan in plans))
        assert await one.cluster.count("stateless") == 7
        await one.cluster.step()
        for actuator in actuators:
            rows = await list_by_plan(one, actuator)
            assert {plan for plan in rows if plan is not None} == set(plans)
            assert len({row.url for row in rows.values()}) == 7


@pytest.mark.parametrize("kind", ["prefill", "nonsense"])
async def test_kinds_that_do_not_exist_are_refused(kube: Kube, kind: str) -> None:
    async with kube() as one:
        actuator = one.open_actuator()
        with pytest.raises(ActuatorError, match="there is no Deployment in namespace"):
            await actuator.list_instances()
        await one.cluster.create("stateless", 1)
        with pytest.raises(ActuatorError, match=f"start {kind}: no Deployments in namespace") as caught:
            await actuator.start_instance(kind, 1)
        assert f"pla-sglang/fleet={FLEET},pla-sglang/kind={kind}; allowed: one" in str(caught.value)
        await actuator.stop_instance("nobody")


async def test_pods_whose_port_is_named_https_are_reached_so(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1, port_name="https", port=30443)
        (row,) = await one.open_actuator().list_instances()
        assert row.url == "https://10.0.0.1:30443"


async def test_a_deployment_without_our_port_is_said(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1, port_name="metrics")
        with pytest.raises(ActuatorError, match="sglang-stateless has no container port named http or https"):
            await one.open_actuator().list_instances()


# -- the lease ---------------------------------------------------------------------------------------------------------


async def test_one_lease_of_two_and_it_is_taken_over(kube: Kube) -> None:
    async with kube() as one:
        first, second = one.open_actuator("first"), one.open_actuator("second")
        assert not first.lease.acquire(), "the server has not answered yet"
        assert await one.acquire(first)
        assert not await one.acquire(second)
        assert second.lease.owner == first.lease.owner == "first"
        for _ in range(5):
            one.later(6.0)
            assert await one.acquire(first)
            assert not await one.acquire(second), "it is renewed"
        one.later(14.0)
        assert not await one.acquire(second)
        one.later(2.0)
        assert not first.lease.held, "it knows that it may have lost it"
        one.later(4.0)
        assert await one.acquire(second)
        assert not await one.acquire(first)
        second.lease.release()
        assert not second.lease.held
        await second.lease.close()
        one.later(6.0)
        assert await one.acquire(first)


async def test_two_that_find_no_lease_at_once(kube: Kube) -> None:
    async with kube() as one:
        both = [one.open_actuator(name) for name in ("first", "second")]
        for _ in range(3):
            assert sum(await asyncio.gather(*(one.acquire(each) for each in both))) <= 1
            one.later(6.0)
        assert sum(await asyncio.gather(*(one.acquire(each) for each in both))) == 1


@stand_in_only
async def test_the_server_is_not_asked_more_often_than_it_must_be(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        actuator = one.open_actuator()
        await one.acquire(actuator)
        one.api.requests.clear()
        for _ in range(120):  # a minute of the router's looks
            await one.acquire(actuator)
            await actuator.list_instances()
            one.later(0.5)
        asked = [request.path.rsplit("/", 1)[-1] for request in one.api.requests]
        assert asked.count("deployments") == asked.count("pods") == 30
        assert asked.count(f"{FLEET}-planner") <= 26


@stand_in_only
async def test_the_role_of_the_example_allows_what_is_asked_and_no_more(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1, name=FLEET)
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "router", one.api.url, token="router")))
        service = WorkerService(f"{one.namespace}/{FLEET}", WorkerTable(BreakerKnobs()), StateFile(None), one.clock)
        following = asyncio.create_task(service.follow())
        actuator = one.open_actuator()
        assert await one.acquire(actuator)
        await actuator.start_instance("stateless", 7)
        await one.cluster.step()
        await list_by_plan(one, actuator)
        await actuator.stop_instance("stateless-7")
        one.later()
        assert await one.acquire(actuator)
        await wait_until(lambda: one.api.watches)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        asked = {read_right(request) for request in one.api.requests if request.token == "Bearer router"}
    (role,) = [each for each in yaml.safe_load_all(ROUTER.read_text(encoding="utf-8")) if each["kind"] == "Role"]
    allowed = {
        (verb, resource, name)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
    }
    assert {(verb, what, "" if what == "pods" else name) for verb, what, name in asked} == allowed


def read_right(request: Request) -> tuple[str, str, str]:
    """Verb, resource and name, as a rule of a Role has them."""
    _, _, rest = request.path.partition("/namespaces/")
    _, resource, *name = rest.split("/")
    verb = {"get": "get" if name else "list", "post": "create"}.get(request.verb, request.verb)
    return verb, resource, name[0] if name else ""


# -- faults ------------------------------------------------------------------------------------------------------------


@stand_in_only
async def test_a_scale_that_is_refused_is_one_line(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        actuator = one.open_actuator()
        one.api.fail("PATCH", "/sglang-stateless", 403, "exceeded quota:\n gpus, limited: 8")
        with pytest.raises(ActuatorError, match="403 exceeded quota: gpus, limited: 8") as caught:
            await actuator.start_instance("stateless", 1)
        assert "\n" not in str(caught.value)
        assert await one.cluster.count("stateless") == 1
        assert (await actuator.start_instance("stateless", 2)).state == "starting"


@stand_in_only
@pytest.mark.parametrize("times", [3, TRIES])
async def test_conflicts_are_tried_again_but_not_for_ever(
    kube: Kube, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_actuator, "PAUSE_S", 0.0)
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        actuator = one.open_actuator()
        one.api.fail("PATCH", "/sglang-stateless", 409, "the object has been modified", times)
        if times < TRIES:
            await actuator.start_instance("stateless", 1)
            assert await one.cluster.count("stateless") == 2
            return
        with pytest.raises(ActuatorError, match=f"start stateless: given up after {TRIES} tries: .* has been modified"):
            await actuator.start_instance("stateless", 1)


@stand_in_only
async def test_a_server_that_is_away_is_said_and_the_lease_runs_out(kube: Kube) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        actuator = one.open_actuator()
        assert await one.acquire(actuator)
        one.api.fail("GET", "", 503, "etcd is away", times=1000)
        one.later(6.0)
        assert await one.acquire(actuator), "nobody can have taken it over yet"
        with pytest.raises(ActuatorError, match="503 etcd is away"):
            await actuator.list_instances()
        one.later(12.0)
        with pytest.raises(ActuatorError, match=r"lease of the planner: GET .*: 503 etcd is away"):
            await one.acquire(actuator)
        one.api.faults.clear()
        one.later(6.0)
        assert await one.acquire(actuator)
        await one.api.stop()
        with pytest.raises(ActuatorError, match="no answer of Kubernetes"):
            await actuator.list_instances()


@stand_in_only
@pytest.mark.parametrize("orders", ["[]", "{", '{"started": {"x": 1}}'])
async def test_an_annotation_that_is_not_ours_is_refused(kube: Kube, orders: str) -> None:
    async with kube() as one:
        await one.cluster.create("stateless", 1)
        body = {"metadata": {"annotations": {"pla-sglang/orders": orders}}}
        await one.client.ask("PATCH", one.cluster.deployments.path("sglang-stateless"), body)
        with pytest.raises(ActuatorError, match="a Deployment or a pod is not as expected"):
            await one.open_actuator().list_instances()


# -- what it is opened with --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["llm", "llm/", "/sglang", "LLM/sglang", "a/b/c", "a b/c"])
def test_a_place_is_a_namespace_and_a_name(place: str) -> None:
    with pytest.raises(ConfigError, match="allowed: NAMESPACE/NAME, of small letters, digits and hyphens"):
        open_actuator(f"kubernetes:{place}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "Invalid kube-config"),
        ("", "not a kubeconfig"),
        ("token: 'hunter2", "not a kubeconfig"),
        ("[hunter2]", "not a kubeconfig"),
        ("clusters: []\ncontexts: []\ncurrent-context: x\nusers: []", "Invalid kube-config"),
    ],
)
def test_credentials_that_cannot_be_read_are_refused(
    text: str | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kubeconfig"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(ConfigError, match=line) as caught:
        open_actuator("kubernetes:llm/sglang")
    assert str(caught.value).startswith(f"--actuator kubernetes: credentials {file}: ")
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_pod_without_its_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ConfigError, match="credentials of the pod: Service token file does not exist"):
        open_actuator("kubernetes:llm/sglang")


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.aio", None)
    with pytest.raises(ConfigError, match=r"needs the package kubernetes .*pip install 'pla-sglang\[kubernetes\]'"):
        open_actuator("kubernetes:llm/sglang")


@stand_in_only
async def test_the_token_is_sent_and_never_told(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with kube() as one:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "other", one.api.url, token="hunter2")))
        actuator = one.open_actuator()
        one.api.fail("GET", "deployments", 401, "Unauthorized")
        with pytest.raises(ActuatorError) as caught:
            await actuator.list_instances()
        assert one.api.requests[-1].token == "Bearer hunter2"
        assert "hunter2" not in str(caught.value) + caplog.text
