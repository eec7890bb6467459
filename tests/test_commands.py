"""``pla-sglang COMMAND``, and what ``doctor`` finds."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pla_patches import host, verify
from pla_sglang import __main__ as commands
from pla_sglang import doctor
from pla_sglang.doctor import Diagnosis, Status

SCRIPT = Path(sys.executable).parent / "pla-sglang"


def test_each_command_names_a_module_of_ours() -> None:
    modules = [command.module for name, command in commands.COMMANDS.items() if name != commands.BENCH]
    assert all(importlib.util.find_spec(f"pla_sglang.{module}") for module in modules)
    usage = commands.describe_usage()
    assert all(f"\n  {name} " in usage for name in commands.COMMANDS)


def test_the_script_runs_commands_and_benches_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "router", "--port", "70000"], cwd=tmp_path, capture_output=True, text=True)
    line = "error: --port 70000 is out of range; allowed: 0 to 65535\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    done = subprocess.run([SCRIPT, "bench"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  hol " in done.stdout
    done = subprocess.run([SCRIPT, "bench", "holl"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "bench: 'holl' is not known; did you mean 'hol'?\n")


def test_a_command_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["rooter"]) == 2
    assert capsys.readouterr().err == "error: command 'rooter' is not known; did you mean 'router'?\n"
    assert commands.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: pla-sglang COMMAND")


def test_a_command_without_its_packages_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lack(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(commands.importlib, "import_module", lack)
    missing = "rich.table"
    assert commands.main(["simulate"]) == 2
    line = "error: simulate needs rich, which is not installed; run pip install 'pla-sglang[sim]'\n"
    assert capsys.readouterr().err == line
    missing = "pla_sglang.nowhere"  # not the user's to mend
    with pytest.raises(ModuleNotFoundError):
        commands.main(["simulate"])


def test_benches_need_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "CHECKOUT", tmp_path)
    assert commands.main(["bench"]) == 2
    assert "in a checkout of pla_sglang, run: python -m bench" in capsys.readouterr().err


def test_every_seam_fits_the_sglang_that_is_installed() -> None:
    assert doctor.check_sglang() == Diagnosis(Status.WORKS, host.installed_version())
    assert doctor.check_seams() == Diagnosis(Status.WORKS, f"{len(doctor.table())} functions of SGLang are as recorded")


def test_another_sglang_is_faulty_and_none_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed_version", lambda: "0.4.0")
    monkeypatch.setattr(verify, "host_reasons", lambda seams: ["a is not found", "b takes (x)"])
    assert doctor.check_sglang().status is Status.FAULTY
    seams = doctor.check_seams()
    assert (seams.status, seams.detail[:14]) == (Status.FAULTY, "3 do not fit, ")
    assert all(version in seams.remedy for version in host.SUPPORTED)
    monkeypatch.setattr(host, "installed_version", lambda: None)
    lacking = [doctor.check_sglang(), doctor.check_seams(), doctor.check_platform()]
    assert [finding.status for finding in lacking] == [Status.LACKING] * 3
    assert lacking[0].remedy == "pip install 'pla-sglang[engine]'"


def test_packages_are_those_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["numpy", 'pla-nowhere>=2; extra == "router"', 'pla-elsewhere; extra == "simulate"']
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    remedy = "pip install 'pla-sglang[router]'"
    assert doctor.check_packages("router") == Diagnosis(Status.LACKING, "missing: pla-nowhere", remedy)
    assert doctor.check_packages("sim") == Diagnosis(Status.WORKS, "all 1 installed")
    monkeypatch.undo()
    assert doctor.check_packages("router").status is Status.WORKS


def test_a_port_that_is_taken() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        finding = doctor.check_port(port)
    assert finding == Diagnosis(Status.LACKING, f"{port}: Address already in use", "start with another --port")
    assert doctor.check_port(port).status is Status.WORKS


def test_memory(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    assert doctor.check_memory(file).status is Status.LACKING
    file.write_text("MemTotal:       8388608 kB\nMemAvailable:   4194304 kB\n")
    assert doctor.check_memory(file) == Diagnosis(Status.WORKS, "4.0 of 8.0 GiB available")
    file.write_text("MemTotal:       8388608 kB\nMemAvailable:   2097152 kB\n")
    assert doctor.check_memory(file).status is Status.LACKING


@pytest.mark.parametrize(
    ("row", "status", "arguments", "lacks"),
    [
        ("SGLang", Status.LACKING, [], []),
        ("SGLang", Status.LACKING, ["--for", "router"], []),
        ("SGLang", Status.LACKING, ["--for", "serve"], ["SGLang"]),
        ("NIXL", Status.LACKING, ["--for", "cluster"], ["NIXL"]),
        ("port", Status.LACKING, ["--for", "router"], ["port"]),
        ("seams", Status.FAULTY, [], ["seams"]),
    ],
)
@pytest.mark.parametrize("form", ["json", "rich", "plain"])
def test_the_exit_status_says_whether_all_is_in_order(
    row: str,
    status: Status,
    arguments: list[str],
    lacks: list[str],
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["Python", "packages of router", "packages of sim", *doctor.NEEDS["cluster"], "port"]
    findings = {name: Diagnosis(Status.WORKS, "fine") for name in names} | {row: Diagnosis(status, "bad", "mend it")}
    monkeypatch.setattr(doctor, "examine_machine", lambda config: findings)
    if form == "plain":
        monkeypatch.setattr(doctor.util, "find_spec", lambda name: None)
    assert doctor.main([*arguments, *(["--json"] if form == "json" else [])]) == bool(lacks)
    out = capsys.readouterr().out
    if form == "json":
        answer = json.loads(out)
        assert (answer["works"], answer["lacks"]) == (not lacks, lacks)
        assert answer["checks"][row] == {"status": status.value, "detail": "bad", "remedy": "mend it"}
    else:
        assert "mend it" in out
        last = out.splitlines()[-1]
        assert last.startswith("not in order" if lacks else "in order")
        assert row in last, "also where nothing that is asked for needs it"


def test_rows_that_commands_need_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_seams", "check_gpu", "check_platform", "check_nixl"):  # these import SGLang
        monkeypatch.setattr(doctor, name, lambda: Diagnosis(Status.WORKS, ""))
    rows = doctor.examine_machine(doctor.DoctorConfig())
    assert {name for needed in doctor.NEEDS.values() for name in needed} <= set(rows)
    assert set(doctor.NEEDS) <= set(commands.COMMANDS)


def test_a_bad_value_of_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--for", "nobody"]) == 2
    assert capsys.readouterr().err.startswith("error: --for 'nobody' is not known; allowed: serve, router")
