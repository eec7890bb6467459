"""Commands on the pages work: each is run, or checked by its program's own parser, or names a reason why not.

Commands that start real SGLang servers are in e2e/test_docs_servers.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.doc_commands import BLOCKS, PAGES, ROOT, RUNNABLE, Block, Command, commands_of, run_curl
from support.forked_servers import ForkParent
from support.router_process import fake_instances, router_process
from support.served_recording import load_of, record, serve
from support.serving import until

from bench.__main__ import main as run_bench
from pla_sglang.predictor.__main__ import main as run_predictor
from pla_sglang.sim.workload.mapped import parse_columns

TAGS = {"bash", "text", "python", "json", "promql"}
SERVER, ROUTER = "pla_sglang.launch_server", "pla_sglang.launch_router"
CLUSTER, SIMULATE = "pla_sglang.launch_cluster", "pla_sglang.simulate"
PREDICTOR = "pla_sglang.predictor"
KNOWN = {"make", "curl", "bench", SERVER, ROUTER, CLUSTER, SIMULATE, PREDICTOR}


class Parsed(BaseException):
    """The arguments were accepted; nothing after that is of interest."""


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_run_checked_or_has_a_reason(block: Block) -> None:
    assert block.tag in TAGS, f"tag the block with one of {sorted(TAGS)}"
    assert block.reason is None or block.tag == "bash"
    if block.reason is None and block.tag == "bash":
        unknown = [str(command) for command in block.commands if command.program not in KNOWN]
        assert unknown == [], "no test runs these; add one, or '<!-- not run: REASON -->' before the block"


def test_every_fence_is_read() -> None:
    fences = sum(len(re.findall("^```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(BLOCKS)


@pytest.mark.parametrize("command", commands_of("make"), ids=str)
def test_make_has_the_target(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{re.escape(command.arguments[0])}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("command", commands_of("bench"), ids=str)
def test_the_bench_takes_the_arguments(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        parse_args(parser, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(Parsed):
        run_bench(list(command.arguments))


def test_the_list_of_benches_and_the_pages_agree() -> None:
    shown = subprocess.run([sys.executable, "-m", "bench"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = [line.split()[0] for line in shown.splitlines() if line and not line.startswith("python")]
    listed = {word for word in words if not word.endswith(":")}
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"-m bench ([a-z]\w*)", text)) <= listed
    assert {name for name in listed if f"`{name}`" not in text and f"-m bench {name}" not in text} == set()


def test_servers_take_the_arguments(fork_parent: ForkParent, tmp_path: Path) -> None:
    from pla_sglang.plugin.demo import demo_model_path

    model = str(demo_model_path())
    given = [
        [*(model if word == "MODEL" else word for word in command.arguments), "--device", "cpu"]
        for command in commands_of(SERVER)
    ]
    done = fork_parent.run_program("support.parse_servers", [json.dumps(arguments) for arguments in given], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("command", commands_of(ROUTER), ids=str)
def test_the_router_starts(command: Command, tmp_path: Path) -> None:
    with router_process(("prefill", "decode"), router_arguments(command), tmp_path) as router:
        assert router.stop() == 0, router.log


def test_the_example_of_a_router_file_is_valid() -> None:
    command = [sys.executable, "-m", ROUTER, "--config", "examples/router_config.yaml", "--print-config"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def router_arguments(command: Command) -> list[str]:
    """Without the instances and the port, which the test chooses."""
    kept: list[str] = []
    words = iter(command.arguments)
    for word in words:
        if word in ("--worker", "--port"):
            next(words)
        else:
            kept.append("tcp://127.0.0.1:*" if word.startswith("tcp://") else word)
    return kept


def test_curl_lines_for_the_router(tmp_path: Path) -> None:
    blocks = [block for block in RUNNABLE if "localhost:30000/workers" in block.text]
    assert blocks != []
    for number, block in enumerate(blocks):  # each with a router of its own: some remove an instance
        (folder := tmp_path / str(number)).mkdir()
        modes = ["null", "null", "stateless"]  # number 2 is the one whose role changes
        with fake_instances(["null"]) as (newcomer,), router_process(modes, (), folder) as router:
            until(lambda: router.ask("/workers")[1].count(b'"ready"') == 3, what="three instances that are ready")
            for command in block.commands:
                run_curl(command, router.port, {"http://10.0.0.3:30000": newcomer.url})


@pytest.mark.parametrize("command", commands_of(PREDICTOR), ids=str)
def test_the_predictor_takes_the_arguments(command: Command) -> None:
    with pytest.raises(SystemExit) as ended:
        run_predictor([*command.arguments, "--print-config"])
    assert ended.value.code == 0


@pytest.mark.parametrize("command", commands_of(SIMULATE), ids=str)
def test_the_simulator_runs(command: Command, tmp_path: Path) -> None:
    rows = [f"{number / 8},{200 + 37 * number % 900},{4 + number % 9}" for number in range(40)]
    trace, header = tmp_path / "small.csv", ("arrival_s", "input_tokens", "output_tokens")
    if "--columns" in command.arguments:
        mapping = parse_columns(command.arguments[command.arguments.index("--columns") + 1])
        header = (*mapping.arrival.names, *mapping.input.names, *mapping.output.names)
    trace.write_text("\n".join([",".join(header), *rows]), encoding="utf-8")
    words = [str(trace) if ".csv" in word else word for word in command.arguments]
    if recordings := [word for word in words if word.endswith(".jsonl.gz")]:
        record(tmp_path / recordings[0], load_of(), serve(load_of()), stateless=False)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", SIMULATE, *words], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert isinstance(json.loads(done.stdout.splitlines()[-1]), dict)
    assert all((tmp_path / word).exists() for word in words if word.endswith((".html", "/")))
