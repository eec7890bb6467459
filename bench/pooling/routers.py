"""A router before running engines, as a process of its own: several arms share engines one after the other."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.lib.child import running_child
from bench.pooling.arms import Router
from pla_sglang.cluster.spec import ROUTER_MODULES, ClusterConfig, InstanceSpec, router_arguments
from pla_sglang.testing.server import ServerError, free_port

READY_S, STOP_S, TAIL = 120.0, 20.0, 3000
FIRST_TOKEN_S = 10.0


def command_of(router: Router, described: Mapping[str, Any], port: int) -> list[str]:
    """How the router of a cluster is started; ``described`` is the state file of one without. Raises ConfigError."""
    engines = [
        InstanceSpec(one["name"], one["kind"], "127.0.0.1", _port_of(one["url"]), one.get("bootstrap_port"), ())
        for one in described["instances"]
    ]
    counts = {kind: sum(one.kind == kind for one in engines) for kind in ("unified", "prefill", "decode")}
    config = ClusterConfig(counts=counts, router=router.kind, policy=router.policy, router_extra=router.flags)
    arguments = router_arguments(config, engines, port, free_port())
    return [sys.executable, "-m", ROUTER_MODULES[router.kind], *arguments]


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@contextlib.contextmanager
def running_router(router: Router, described: Mapping[str, Any], log: Path) -> Iterator[str]:
    """Starts it and yields its URL once a request goes through. Raises ServerError, ConfigError."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running_child(command_of(router, described, port), log, stop_s=STOP_S) as process:
        _wait(process, url, log)
        yield url


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Healthy is not enough: SGLang's router says so before it knows its instances."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    body = json.dumps({"text": "ready?", "sampling_params": {"temperature": 0, "max_new_tokens": 1}}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    end_s = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end_s:
        with contextlib.suppress(urllib.error.URLError, OSError):
            opener.open(request, timeout=FIRST_TOKEN_S).read()
            return
        time.sleep(0.2)
    raise ServerError(f"the router did not get ready:\n{log.read_text(errors='replace')[-TAIL:]}")
