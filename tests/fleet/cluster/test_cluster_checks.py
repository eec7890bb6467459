"""What a cluster says: mistakes before anything starts, polls kept out of its log, the error of a member that ended."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from pla_sglang import launch_cluster
from pla_sglang.fleet.cluster.children import ClusterError
from pla_sglang.fleet.cluster.instance import Instance, State
from pla_sglang.fleet.cluster.logs import LastErrors, LineReader, is_poll
from pla_sglang.fleet.cluster.spec import ClusterConfig, instances, router_arguments
from pla_sglang.fleet.cluster.stateless_flags import make_parser
from pla_sglang.fleet.cluster.supervisor import CHAIN_ANSWERS, FORGOTTEN_S, Supervisor
from pla_sglang.launch_cluster import check_members, main, read_config, scaled_by_planner, with_load_reports
from pla_sglang.plugin.start_checks import known_flags
from pla_sglang.sim.chain import model_path

PAIR = {"prefill": 1, "decode": 1}
STATELESS = ("--router", "pla", "--stateless", "1")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--router", "pla", "--policy", "arow"], "--policy 'arow' is not known; allowed: round-robin, least-requests"),
        (["--router", "pla", "--policy", "sla-scaler"], "--policy 'sla-scaler' is not known; allowed: round-r"),
        (["--policy", "arow"], "--policy 'arow' is not known; allowed: random, round-robin, cache-aware"),
        (
            ["--polcy", "pla"],
            "unknown argument '--polcy': neither of the cluster nor of its engines; did you mean '--p",
        ),
        (["--unified-args", "--chunked-prefil-size 9"], "did you mean '--chunked-prefill-size'?"),
        (["--pla-wait-mx-ms", "5"], "did you mean '--pla-wait-max-ms'?"),
        (["--pla-wait-max-ms", "-5"], "--pla-wait-max-ms -5 is out of range; allowed: 0 to 60000 ms"),
        (["--pla-time-scale", "2"], "--pla-emulate-kv-failures need --pla-emulate PROFILE"),
        (["--migration", "on"], "--migration on is not for --router sglang; allowed: --router pla"),
        (["--router", "pla", "--migration", "maybe"], "--migration 'maybe' is not known; allowed: off, on"),
        (["--router", "sglang", "--stateless", "2"], "--stateless 2 needs a router that knows them; allowed: --router"),
        (["--stateless", "-1"], "--stateless -1 is out of range; allowed: 0 to 64"),
        (["--pla-stateless"], "--pla-stateless is set for each instance by the cluster"),
        (["--router", "pla", "--stateless", "1", "--stateless-args", "--dp-sise 2"], "did you mean '--dp-size'?"),
        (
            [*STATELESS, "--stateless-args", "--dp 2 --enable-hisparse", "--pp-size=2", "--is-embedding"],
            "--pla-stateless cannot be combined with: --pipeline-parallel-size 2 (not tested); --dp-size 2 (each rank "
            "would need peers of its own); --enable-hisparse (it hands prefills to decode in its own way); --is-e",
        ),
        ([*STATELESS, "--stateless-args", "--disaggregation-mode decode"], "--disaggregation-mode decode (a stateless"),
        ([*STATELESS, "--disaggregation-transfer-backend", "mooncake"], "-backend mooncake (give nixl"),
        ([*STATELESS, "--dp-size", "many"], "argument --dp-size/--data-parallel-size: invalid int value: 'many'"),
        ([*STATELESS, "--engine-args", "--config {file}"], "with: --tokenizer-worker-num 2 (each would"),
        ([*STATELESS, "--stateless-args", "--pla-send-share 2"], "--pla-send-share 2 is out of range"),
        (["--engine-args", "--config /nowhere.yaml"], "/nowhere.yaml: No such file or directory"),
        (["--router", "pla", "--router-args", "--slo-ttft 5"], "router: unknown argument '--slo-ttft'"),
        (["--router", "pla", "--router-args", "--slo-ttft-ms 0"], "router: --slo-ttft-ms 0 is out of range"),
        (["--ssl-certfile", "a.crt"], "--ssl-certfile needs --ssl-keyfile"),
        (["--ssl-ca-certs", "ca.pem"], "--ssl-ca-certs needs --ssl-certfile"),
        (
            ["--ssl-certfile", "a.crt", "--ssl-keyfile", "a.key"],
            "--ssl-certfile is not for --router sglang; allowed: --router pla or none",
        ),
        (
            ["--router", "pla", "--ssl-certfile", "/nowhere.crt", "--ssl-keyfile", "a.key"],
            "--ssl-certfile /nowhere.crt: No such file or directory",
        ),
        (
            ["--router", "pla", "--unified-args", "--ssl-certfile a.crt --ssl-keyfile a.key"],
            "--ssl-certfile is for all members: give it to the cluster, not to some engines",
        ),
        (
            ["--on", "ray", "--router", "pla", "--ssl-certfile", "a.crt", "--ssl-keyfile", "a.key"],
            "--ssl-certfile is not for --on ray: its instances are at addresses of other machines",
        ),
        (["--tp-size", "2", "--nnodes", "2"], "--nnodes 2 needs nodes beside this machine; allowed: 1, or --on ray"),
        (
            ["--on", "ray", "--router", "pla", "--tp-size", "2", "--unified-args", "--nnodes 4"],
            "--nnodes 4 does not divide the ranks of --tp-size 2 and --pp-size 1; allowed: 1, 2",
        ),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("tokenizer-worker-num: 2\nenable_hisparse: false\nport: 7\n")
    arguments = [part.replace("{file}", str(file)) for part in arguments]
    started: list[Any] = []
    monkeypatch.setattr(launch_cluster, "run", lambda *_: started.append(1))
    assert main(["--unified", "1", *arguments]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert line in error
    assert started == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tp", "1", "--tensor-parallel-size=1", "--mem-frac", "0.5", "--log-level", "warning"],
        ["--pla-emulate", "linear", "--pla-time-scale", "4", "--prefill-disagg", "temporal", "--disable-radix-cache"],
        ["--router", "pla", "--policy", "least_tokens", "--router-args", "--slo-ttft-ms 5"],
        [*STATELESS, "--stateless-args", "--pla-send-share 0.4", "--dp-size=1", "--page-size", "16", "--tp", "2"],
        ["--unified-args", "--dp-size 2 --enable-hisparse", *STATELESS],
    ],
)
def test_flags_of_engines_and_router_pass(arguments: list[str]) -> None:
    check_members(read_config(["--unified", "1", *arguments]).config.to_cluster())


@pytest.mark.parametrize(
    ("arguments", "reports"),
    [
        (["--stateless", "2", "--policy", "star", "--migration", "on"], True),
        (["--stateless", "2", "--policy", "load_migration"], True),
        (["--stateless", "2", "--policy", "combined", "--router-args", "--migration on"], True),
        (["--stateless", "2", "--policy", "combined"], False),  # it moves requests with --migration on only
        (["--stateless", "2", "--policy", "arrow", "--migration", "on"], False),
        (["--stateless", "2", "--router", "none"], False),
        (["--router", "pla", "--prefill", "1", "--decode", "1", "--policy", "star"], False),  # nothing there can move
        (["--stateless", "2", "--policy", "star", "--pla-telemetry=tcp://127.0.0.1:7"], False),
        (["--stateless", "2", "--policy", "star", "--router-args", "--telemetry tcp://127.0.0.1:7"], False),
    ],
)
def test_engines_report_to_a_router_whose_policy_moves_requests(arguments: list[str], reports: bool) -> None:
    config = read_config(arguments).config.to_cluster()
    check_members(config)
    reporting = with_load_reports(config)
    check_members(reporting)
    assert (reporting is not config) == reports
    if reports:
        address = reporting.common[-1]
        assert reporting.common == (*config.common, "--pla-telemetry", address)
        assert reporting.router_extra == (*config.router_extra, "--telemetry", address)
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", address)


@pytest.mark.parametrize(
    ("router_args", "added"),
    [
        ("--planner combined", True),
        ("--relay-workers 1 --planner=combined", True),
        ("--planner none", False),
        ("--planner combined --actuator local:/other.json", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_planner_scales_the_cluster_of_its_router(
    router_args: str, added: bool, named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["--state-file", "state.json"] if named else []
    options = read_config([*STATELESS, *files, "--router-args", router_args]).config
    given = options.to_cluster()
    with scaled_by_planner(given, options) as (config, changed):
        if not added:
            assert (config, changed) == (given, options)
            return
        [*kept, flag, actuator] = config.router_extra
        assert (tuple(kept), flag) == (given.router_extra, "--actuator")
        file = changed.state_file
        assert file is not None
        assert actuator == f"local:{file}"
        assert file.is_absolute()
        assert file.parent.is_dir()
        assert (file == tmp_path / "state.json") == named
    assert file.parent.exists() == named, "a folder of our own goes at the end"


def test_a_planner_needs_our_router() -> None:
    options = read_config(["--unified", "1", "--router", "sglang", "--router-args", "--planner x"]).config
    with scaled_by_planner(options.to_cluster(), options) as (config, _):
        assert config == options.to_cluster()


@pytest.mark.parametrize(
    ("arguments", "router"),
    [(["--unified", "1"], "sglang"), (["--unified", "1", "--stateless", "1"], "pla"), (["--router", "none"], "none")],
)
def test_stateless_instances_have_our_router_by_default(arguments: list[str], router: str) -> None:
    assert read_config(["--unified", "1", *arguments]).config.to_cluster().router == router


def test_the_flags_of_sglang_are_those_of_its_parser() -> None:
    """Read from its source, as nothing may be imported; here they are compared with what it has after the import."""
    from sglang.srt.server_args import ServerArgs

    from pla_sglang.common.cli import Parser

    parser = Parser()
    ServerArgs.add_cli_args(parser)
    flags = {flag for flag in parser._option_string_actions if flag.startswith("--")} - {"--help"}
    ours = {flag for flag in flags if flag.startswith(("--pla-", "--prefill-disagg"))}
    assert len(flags) > 300
    assert flags - ours - known_flags() == set()


OF_SOME = {  # flags that not every version has
    f"--{name}": name.replace("-", "_")
    for name in (
        "attn-dp-size",
        "prefill-decode-interval",
        "disaggregation-decode-allocation-policy",
        "disaggregation-decode-host-receive-threshold",
        "enable-prefill-context-parallel",
    )
}


def test_what_a_stateless_engine_refuses_is_found_by_sglangs_names() -> None:
    """What the engine's check reads can be told beforehand: both go by one table."""
    from sglang.srt.server_args import ServerArgs

    from pla_sglang.common.cli import Parser

    theirs = Parser()
    ServerArgs.add_cli_args(theirs)
    ours = {flag: action.dest for flag, action in make_parser()._option_string_actions.items() if flag != "--config"}
    known = theirs._option_string_actions
    assert {flag: known[flag].dest for flag in ours if flag in known} | OF_SOME == ours


def test_a_restart_waits_until_stock_decode_instances_have_forgotten_the_address() -> None:
    """They keep it until some heartbeats have failed, and would write to ports that nobody has any more."""
    from sglang.srt.environ import envs

    interval_s = envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.default
    failures = envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE.default
    assert interval_s * failures < FORGOTTEN_S <= interval_s * failures + 5


def test_stateless_instances_have_bootstrap_ports_of_their_own_beside_all_other_kinds() -> None:
    counts = {"stateless": 2, "prefill": 1, "unified": 1}
    made = instances(ClusterConfig(counts, router="pla"), itertools.count(20_000).__next__)
    assert [engine.name for engine in made] == ["prefill-0", "unified-0", "stateless-0", "stateless-1"]
    ports = [engine.bootstrap_port for engine in made]
    assert ports[1] is None
    assert len({engine.port for engine in made} | set(ports)) == 8, "no port twice"
    for engine in made[2:]:
        argv = list(engine.argv)
        assert "--pla-stateless" in argv
        assert "--disaggregation-mode" not in argv
        assert argv[argv.index("--disaggregation-bootstrap-port") + 1] == str(engine.bootstrap_port)
        assert argv[argv.index("--disaggregation-transfer-backend") + 1] == "nixl"


def test_names_of_policies_are_the_same_for_both_routers() -> None:
    for policy in ("cache-aware", "cache_aware"):
        ports = itertools.count(20_000).__next__
        given = {}
        for router in ("sglang", "pla"):
            config = ClusterConfig({"unified": 1}, router=router, policy=policy)
            command = router_arguments(config, instances(config, ports), 1, 2)
            given[router] = command[command.index("--policy") + 1]
        assert given == {"sglang": "cache_aware", "pla": "cache-aware"}


@pytest.mark.parametrize(
    ("line", "poll"),
    [
        ('INFO:     127.0.0.1:5 - "GET /v1/loads HTTP/1.1" 200 OK', True),
        ('INFO:     127.0.0.1:5 - "GET /v1/loads?include=core HTTP/1.1" 200 OK', True),
        ('INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK', True),
        ('INFO:     127.0.0.1:5 - "GET /server_info HTTP/1.1" 200 OK', True),
        ('INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 503 Service Unavailable', False),
        ('INFO:     127.0.0.1:5 - "GET /health_generate HTTP/1.1" 200 OK', False),
        ('INFO:     127.0.0.1:5 - "POST /generate HTTP/1.1" 200 OK', False),
        ("all 3 ready", False),
    ],
)
def test_polls_that_went_well_are_left_out_of_the_log(line: str, poll: bool) -> None:
    assert is_poll(line) is poll


def test_the_last_error_of_a_member_is_kept() -> None:
    errors = LastErrors()
    assert errors.describe_error("a") == ""
    errors.note_line("a", "starting")
    assert errors.describe_error("a") == ": starting"
    errors.note_line("a", "usage: sglang serve")
    errors.note_line("a", "sglang serve: error: argument --tp: invalid int value: 'x'")
    errors.note_line("a", "bye")
    errors.note_line("a", '127.0.0.1:1 - "POST /error HTTP/1.1" 200 OK')
    errors.note_line("b", "ValueError: no")
    assert errors.describe_error("a") == ": sglang serve: error: argument --tp: invalid int value: 'x'"
    assert errors.describe_error("b") == ": ValueError: no"
    errors.forget_member("a")
    assert errors.describe_error("a") == ""


def test_a_member_that_ends_while_starting_is_reported_with_its_error() -> None:
    """Also where its last lines are still in the pipe when its end is known."""
    seen: list[tuple[str, str]] = []

    async def work() -> None:
        config = ClusterConfig({"unified": 1}, router="none")
        made = Supervisor(
            config, free_port=lambda: 1, sink=lambda name, line: seen.append((name, line)), environment={}
        )
        member = made.engines[0]
        reading, writing = os.pipe()
        made._readers.append(LineReader(member.name, reading, made._on_line))
        os.write(writing, b"importing\nerror: --port 1: Permission denied")
        os.close(writing)
        made._started_s = time.monotonic()
        member.move_to(State.DEAD)
        member.exit_status = 2
        made._http = object()  # type: ignore[assignment]  # nobody asks with it here
        with pytest.raises(ClusterError, match="unified-0 ended with status 2 while starting: error: --port 1: Perm"):
            await made._wait_ready(member)

    async def unhealthy(url: str, http: Any) -> bool:
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pla_sglang.fleet.cluster.supervisor.is_healthy", unhealthy)
        asyncio.run(work())


@pytest.mark.parametrize(
    ("counts", "router", "common", "lines"),
    [
        ({"unified": 1}, "none", (), ["try: curl -s http://127.0.0.1:20000/v1/chat/completions"]),
        (PAIR, "none", (), []),
        (PAIR, "pla", ("--api-key", "k"), ["try: curl -s http://127.0.0.1:30123/v1/chat/completions"]),
        (
            PAIR,
            "pla",
            ("--model-path", str(model_path())),
            ["try: curl -s http://127.0.0.1:30123/v1/chat/completions", CHAIN_ANSWERS],
        ),
    ],
)
def test_a_cluster_that_is_ready_gives_a_request_to_try(
    counts: dict[str, int], router: str, common: tuple[str, ...], lines: list[str]
) -> None:
    seen: list[str] = []
    ports = itertools.count(20_000).__next__
    config = ClusterConfig(counts, router=router, router_port=30_123, host="0.0.0.0", common=common)
    made = Supervisor(config, free_port=ports, sink=lambda name, line: seen.append(line), environment={})
    assert isinstance(made.engines[0], Instance)
    made._log_request()
    assert [line.partition(" -H")[0] for line in seen] == lines
    assert ("$API_KEY" in "".join(seen)) is ("--api-key" in common)
