"""A cluster that speaks TLS: real SGLang with ``--ssl-certfile`` behind our router, certificates of one authority."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority, client_context
from support.serving import until

from pla_sglang.fleet.actuators.cluster_socket import send_command
from pla_sglang.testing.server import HttpError, open_url

pytestmark = pytest.mark.e2e
EMULATED = ("--pla-emulate", "h100-llama3.1-8b-tp1", "--pla-time-scale", "1")


def test_engines_and_router_speak_https(tmp_path: Path, forked_cluster: Callable[..., Any]) -> None:
    """Requests, health checks, the printed request, and a member that starts again."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("cluster")
    tls = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--ssl-ca-certs", str(authority.ca))
    trusted = client_context(authority.ca)
    body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}

    with forked_cluster(tmp_path, "--unified", "1", "--router", "pla", *EMULATED, *tls) as cluster:
        engine, url = cluster["instances"][0]["url"], cluster["url"]
        assert [one.partition(":")[0] for one in (url, engine)] == ["https", "https"]
        for front in (url, engine):
            with open_url(f"{front}/generate", body, tls=trusted) as answer:
                assert json.loads(answer.read())["meta_info"]["completion_tokens"] == 4
        with open_url(f"{url}/workers", tls=trusted) as answer:
            rows = json.loads(answer.read())["workers"]
            assert [(row["url"], row["state"]) for row in rows] == [(engine, "ready")]
        with pytest.raises(HttpError) as refused:
            open_url(f"{url.replace('https', 'http')}/generate", body)
        assert (refused.value.status, json.loads(refused.value.body)["error"]["type"]) == (400, "plain_http")
        (printed,) = [line for line in cluster["log"].read_text().splitlines() if "try: " in line]
        tried = subprocess.run(printed.partition("try: ")[2], shell=True, capture_output=True, check=True, text=True)
        assert json.loads(tried.stdout)["choices"]

        assert send_command(cluster["state_file"], ["restart", "unified-0"]) == "ok"
        until(lambda: generates(url, body, trusted), what="a request that the new process has answered")


def generates(url: str, body: object, tls: Any) -> bool:
    try:
        with open_url(f"{url}/generate", body, tls=tls) as answer:
            return bool(answer.status == 200)
    except HttpError:
        return False


def test_a_certificate_that_nobody_vouches_for_ends_the_start(
    tmp_path: Path, forked_cluster: Callable[..., Any]
) -> None:
    cert, key = Authority(tmp_path).issue("cluster")
    other = Authority(tmp_path, "other")
    tls = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--ssl-ca-certs", str(other.ca))
    with (
        pytest.raises(pytest.fail.Exception, match=r"TLS: .*; see --ssl-certfile, --ssl-ca-certs"),
        forked_cluster(tmp_path, "--unified", "1", "--router", "pla", "--skip-server-warmup", *EMULATED, *tls),
    ):
        pass
