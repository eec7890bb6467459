"""The OpenAPI document: it lists what is served, and requests that schemathesis generates from it find it true."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from support.router_process import RouterProcess, router_process
from support.serving import until

from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.workers.discovery import parse_url
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.http import openapi
from pla_sglang.fleet.router.relay import routes
from pla_sglang.fleet.router.wire.inference import PATHS

USER, OPERATOR = "user-key", "operator-key"
BUDGET_S = 180.0  # for all generated requests together; they take half a minute where the machine does nothing else
EXAMPLES = 12  # random ones of each kind for an operation; those at its limits come in addition
NEVER = (500, 502, 504)  # described, but the instances are well; 503 where an operator has taken them away
FORWARDED = {*PATHS, *routes.PASSED_POST}  # instances judge what is in such a body
schema = schemathesis.openapi.from_dict(openapi.whole_document())


def described() -> set[tuple[str, str]]:
    methods = ("get", "post", "put", "delete")
    return {
        (method.upper(), path)
        for path, item in openapi.whole_document()["paths"].items()
        for method in item
        if method in methods
    }


def test_it_lists_what_is_served_and_nothing_else() -> None:
    control = ControlPlane(ControlKnobs())._routes.table
    served = {(route.method, path) for path, route in routes.ROUTES.items()}
    served |= {(method, path) for path, acts in control.items() for method in acts}
    assert described() == served | {("GET", f"{routes.PASSED_GET_PREFIX}{{model}}")}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """A pair and a unified instance behind a relay and a control process."""
    arguments = ["--relay-workers", "1", "--api-key", USER, "--admin-key", OPERATOR, "--policy", "minimal-load"]
    arguments += ["--pending-timeout-ms", "200", "--dispatch-timeout-s", "2"]
    folder = tmp_path_factory.mktemp("described")
    listed = folder / "workers.json"
    listed.write_text('{"workers": []}')
    with router_process(["prefill", "decode", "null"], [*arguments, "--worker-file", str(listed)], folder) as running:
        yield running


@pytest.fixture(scope="module")
def processes(router: RouterProcess) -> set[int]:
    """Those that the router began with."""
    return router.processes()


@pytest.fixture(scope="module")
def began_s() -> float:
    return time.monotonic()


def operators(path: str) -> bool:
    return path.startswith(("/workers", "/pla/"))


@schema.auth(cache_by_key=lambda case, _: str(operators(case.operation.path)))
class Keys:
    """Which key goes with a request; one check takes it away again, and wants a 401."""

    def get(self, case: Any, _: Any) -> str:
        return OPERATOR if operators(case.operation.path) else USER

    def set(self, case: Any, key: str, _: Any) -> None:
        case.headers = {**(case.headers or {}), "Authorization": f"Bearer {key}"}


def harmless(case: Any) -> None:
    """A new instance is looked for where nobody listens on this machine, and nowhere else."""
    url = case.body.get("url") if case.operation.label == "POST /workers" and isinstance(case.body, dict) else None
    if isinstance(url, str):
        with contextlib.suppress(WorkerError):
            case.body["url"] = f"http://127.0.1.{1 + len(parse_url(url).host) % 200}:1"


@schema.parametrize()
@settings(
    max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
@pytest.mark.usefixtures("processes")
def test_answers_are_as_described(case: Any, router: RouterProcess, began_s: float) -> None:
    if time.monotonic() - began_s > BUDGET_S:
        pytest.skip(f"{BUDGET_S:g} s are over")
    harmless(case)
    excluded = [schemathesis.checks.not_a_server_error]
    if case.operation.path in FORWARDED:
        excluded.append(schemathesis.checks.negative_data_rejection)
    answer = case.call_and_validate(router.url, excluded_checks=excluded)
    assert answer.status_code not in NEVER


def test_the_router_is_well_afterwards(router: RouterProcess, processes: set[int]) -> None:
    """Runs last. Operators' requests may have taken its instances away; they come back, and all is as before."""
    key = {"authorization": f"Bearer {OPERATOR}"}
    there = {one["url"]: one for one in json.loads(router.ask("/workers", headers=key)[1])["workers"]}
    for one in router.fakes:
        if one.url not in there:
            assert router.ask("/workers", json.dumps({"url": one.url}).encode(), key)[0] == 202
        elif there[one.url]["state"] == "draining":
            assert router.ask(f"/workers/{there[one.url]['number']}/undrain", b"", key)[0] == 202
    until(router.healthy, what="a router that serves")
    user = {"authorization": f"Bearer {USER}"}
    until(lambda: router.ask("/generate", b'{"text": "hello"}', user)[0] == 200, what="an answer")

    def balanced() -> bool:
        told = json.loads(router.ask("/pla/ledger", headers=key)[1])
        return bool(told["balanced"] and told["rooms"] == 0)

    until(balanced, what="a ledger that balances")
    assert router.processes() == processes
    assert "Traceback" not in router.log
