"""Two stateless instances behind our router, with marked keys from files and from the environment: the marks are in no
answer, log, file or command line. Spans: ``tests/fleet/router/test_tracing.py``."""

from __future__ import annotations

import gzip
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.clusters import end_cluster

from pla_sglang.common.secret_names import HIDDEN

pytestmark = pytest.mark.e2e

ENGINE = ("--pla-emulate", "h100-llama3.1-8b-tp1", "--chunked-prefill-size", "256")
MARK = "mark7d1f"  # in every key
WORKER, WORKER_ADMIN = f"{MARK}-worker", f"{MARK}-worker-admin"
CLIENT, OPERATOR = f"{MARK}-client", f"{MARK}-operator"
# They change something, or take a body.
LEFT_OUT = re.compile(r"profile|flush|freeze|clear|dump|expert|weights|hicache|sleep|wake|throttle|shutdown")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxies this machine has
PATH_VALUES = {"worker": "0", "rid": "r1", "seconds": "1", "model": "chain", "response_id": "r1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, forked_cluster: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    pytest.importorskip("nixl", reason="stateless instances need NIXL")
    folder = tmp_path_factory.mktemp("secrets")
    files = {name: folder / name for name in ("memory.json", "access", "run.jsonl.gz")}
    kept = tmp_path_factory.mktemp("keys")  # apart from what is searched
    for name, key in (("worker", WORKER), ("operator", OPERATOR)):
        (kept / name).write_text(f"{key}\n")
        (kept / name).chmod(0o600)
    router = f"--record {files['run.jsonl.gz']} --access-log {files['access']} --memory-file {files['memory.json']}"
    arguments = ["--stateless", "2", *ENGINE, "--migration", "on", "--router-args", f"{router} --relay-workers 1"]
    arguments += ["--api-key-file", str(kept / "worker"), "--router-admin-key-file", str(kept / "operator")]
    variables = {"PLA_WORKER_ADMIN_KEY": WORKER_ADMIN, "PLA_ROUTER_API_KEY": CLIENT, "HF_TOKEN": f"{MARK}-hf"}
    with forked_cluster(folder, *arguments, env=variables) as described:
        yield described | {"folder": folder}


def ask(url: str, key: str = "", body: Any = None) -> tuple[int, str]:
    """Status and all that came, headers included."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with DIRECT.open(urllib.request.Request(url, data, headers), timeout=30) as answer:
            return answer.status, f"{answer.headers}\n{answer.read().decode()}"
    except urllib.error.HTTPError as error:
        return error.code, f"{error.headers}\n{error.read().decode()}"


def body_of(text: str) -> Any:
    return json.loads(text.partition("\n\n")[2])


def routes_of(url: str) -> list[str]:
    """Paths that it says it has, with a value for each parameter, but for those of ``LEFT_OUT``."""
    status, text = ask(f"{url}/openapi.json", WORKER)  # an engine with a key asks for it here too
    assert status == 200
    paths = [path for path, methods in body_of(text)["paths"].items() if "get" in methods]
    return [
        re.sub(r"{(\w+)[^}]*}", lambda match: PATH_VALUES[match[1]], path)
        for path in paths
        if not LEFT_OUT.search(path) and {*re.findall(r"{(\w+)", path)} <= PATH_VALUES.keys()
    ]


def test_each_key_opens_what_it_should(cluster: dict[str, Any]) -> None:
    router, engine = cluster["router"]["url"], cluster["instances"][0]["url"]
    body = {"rid": "r1", "text": "a", "sampling_params": {"max_new_tokens": 2}}
    assert [ask(f"{router}/generate", key, body)[0] for key in ("", WORKER, CLIENT)] == [401, 401, 200]
    assert [ask(f"{router}/workers", key)[0] for key in ("", CLIENT, OPERATOR)] == [401, 401, 200]
    assert [ask(f"{engine}/server_info", key)[0] for key in ("", CLIENT, WORKER)] == [401, 401, 200]
    assert [ask(f"{engine}/pla/state", key)[0] for key in ("", WORKER, WORKER_ADMIN)] == [401, 401, 200]
    assert all(row["state"] == "ready" for row in body_of(ask(f"{router}/workers", OPERATOR)[1])["workers"])


def test_an_engine_hides_its_keys_and_shows_the_rest(cluster: dict[str, Any]) -> None:
    info = body_of(ask(f"{cluster['instances'][0]['url']}/server_info", WORKER)[1])
    for arguments in (info, info["internal_states"][0]):
        assert (arguments["api_key"], arguments["admin_api_key"]) == (HIDDEN, HIDDEN)
        assert (arguments["ssl_keyfile_password"], arguments["chunked_prefill_size"]) == (None, 256)
    [line, *_] = re.findall(r"server_args=.*", (cluster["folder"] / "log").read_text())
    shown = f"admin_api_key='{HIDDEN}'", f"'admin_api_key': '{HIDDEN}'"  # the arguments given, or as resolved
    assert any(each in line for each in shown)


def test_the_router_says_what_tools_read(cluster: dict[str, Any]) -> None:
    info = body_of(ask(f"{cluster['router']['url']}/server_info", CLIENT)[1])
    assert "api_key" not in info
    assert info["internal_states"][0]["memory_usage"]["token_capacity"] > 0
    assert info["internal_states"][0]["pla_emulation"]["profile"] == "h100-llama3.1-8b-tp1"
    assert {"model_path", "tokenizer_path", "served_model_name", "version", "tp_size"} <= info.keys()


def test_no_mark_is_in_an_answer(cluster: dict[str, Any]) -> None:
    questions: list[tuple[str, str, Any]] = []
    for member in (cluster["router"], *cluster["instances"]):
        routes = routes_of(member["url"])
        assert {"/server_info", "/model_info", "/v1/models"} <= {*routes}
        for path in (*routes, "/workers/9", "/pla/nothing", "/nothing", "/pla/view"):
            keys = ("", "wrong", WORKER, WORKER_ADMIN, CLIENT, OPERATOR)
            questions += [(member["url"] + path, key, None) for key in keys]
        for body in ({"text": 5}, [], {"text": "a", "sampling_params": {"top_p": 9}}):
            questions += [(f"{member['url']}/generate", key, body) for key in ("", WORKER, CLIENT)]
    assert len(questions) > 200
    with ThreadPoolExecutor(8) as pool:  # some answers take a second
        answers = pool.map(lambda question: ask(*question)[1], questions)
        leaks = [(question, text[:300]) for question, text in zip(questions, answers, strict=True) if MARK in text]
    assert leaks == []


def test_no_mark_is_in_a_command_line(cluster: dict[str, Any]) -> None:
    root = psutil.Process(cluster["process"].pid)
    lines = [process.cmdline() for process in (root, *root.children(recursive=True))]
    assert len(lines) > 6
    assert [line for line in lines if MARK in " ".join(line)] == []


def read_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".json", "")}


def test_no_mark_is_in_a_file(cluster: dict[str, Any]) -> None:
    """The last one: it ends the cluster, so that its files are whole."""
    found = cluster.setdefault("running", read_files(cluster["folder"]))  # of the first run of this test
    end_cluster(cluster["process"])
    found = found | read_files(cluster["folder"])
    found["recording"] = gzip.decompress((cluster["folder"] / "run.jsonl.gz").read_bytes()).decode()
    assert {"state.json", "log", "memory.json", "access", "recording"} <= found.keys()
    assert all(found.values())
    assert [name for name, text in found.items() if MARK in text] == []
