"""Which processes get the seams of load reports and pools, and that a spawned controller process finds our entry."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import pytest
from support.forked import in_fork
from support.seam_groups import names_of

from pla_patches import install, verify
from pla_patches.seam import Group
from pla_patches.table import seams_of
from pla_sglang.common.errors import HostMismatchError
from pla_sglang.plugin import config
from pla_sglang.plugin.config import PlaConfig

POOLS = PlaConfig(prefill_disagg="spatial", controller_folder="/nowhere")


@pytest.fixture(autouse=True)
def _everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.CONFIG_ENV, raising=False)


def load(knobs: PlaConfig, *, controller: bool = False) -> tuple[set[str], list[str]]:
    """As SGLang does in a process: groups of what is installed, and what of it is not in effect."""
    from sglang.srt.plugins import load_plugins

    config.publish(knobs.for_device("cpu"))
    if controller:
        install.enter_controller()
    load_plugins()
    return live_groups(), verify.effect_reasons(install.installed())


def live_groups() -> set[str]:
    active = {subscriber.group.value for seam in install.installed() for subscriber in seam.subscribers}
    return active - {"cpu"}


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        (PlaConfig(telemetry="ipc:///x"), {"cli", "telemetry"}),
        (PlaConfig(prefill_disagg="temporal", telemetry="ipc:///x"), {"cli", "scheduler", "running", "telemetry"}),
        (PlaConfig(prefill_disagg="spatial", role="short"), {"cli", "scheduler", "running"}),
        (POOLS, {"cli", "scheduler", "running", "telemetry"}),
        (POOLS.replace(emulate="x"), {"cli", "scheduler", "running", "telemetry", "emulate"}),
    ],
    ids=["telemetry only", "temporal", "member of a router's pool", "pools", "emulated"],
)
def test_scheduler_process(knobs: PlaConfig, expected: set[str]) -> None:
    assert in_fork(lambda: load(knobs)) == (expected | names_of(Group.GUARD_SCHEDULER), [])


def test_controller_process() -> None:
    assert in_fork(lambda: load(POOLS, controller=True)) == ({"cli", "controller"}, [])


def test_a_scheduler_that_is_forked_from_the_controller_is_no_controller() -> None:
    def controller() -> Any:
        load(POOLS, controller=True)
        install._controller_pid = -1  # as a forked process sees it
        from sglang.srt import plugins

        plugins._plugins_loaded = False  # as cluster.forking does
        return load(POOLS)

    groups, missing = in_fork(controller)
    assert missing == []
    scheduler = {"scheduler", "running", "telemetry"} | names_of(Group.GUARD_SCHEDULER)
    assert groups == {"cli", "controller"} | scheduler


def test_the_front_process_starts_the_controller_through_us() -> None:
    def front() -> Any:
        load(PlaConfig())
        install.install_frontend(pools=True, reports=True)
        engine = importlib.import_module("sglang.srt.entrypoints.engine")
        entry = importlib.import_module("pla_sglang.plugin.engine.hooks.dp_entry")
        target = engine.run_data_parallel_controller_process
        return (
            target is entry.ControllerProcess,
            pickle.loads(pickle.dumps(target)) is target,
            entry.host_entry().__module__,
            live_groups(),
        )

    ours, same, host_module, groups = in_fork(front, as_child=False)
    assert ours
    assert same, "a spawned process looks it up by name"
    assert host_module == "sglang.srt.managers.data_parallel_controller"
    assert groups == {"cli", "guard", "frontend", "pools"}


def test_without_pools_the_entry_is_the_hosts() -> None:
    def front() -> Any:
        load(PlaConfig())
        install.install_frontend()
        return [seam.target for seam in seams_of(Group.POOLS) if not verify.effect_reasons([seam])]

    assert in_fork(front, as_child=False) == []


def test_telemetry_alone_installs_only_the_guard_in_the_front_process() -> None:
    def front() -> Any:
        load(PlaConfig())
        install.install_frontend(scheduling=False, reports=True)
        return live_groups()

    assert in_fork(front, as_child=False) == {"cli", "guard"}


def test_a_controller_without_our_seams_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from pla_sglang.plugin.engine.hooks.http_server import before_run_http_server

    monkeypatch.setenv(config.CONFIG_ENV, "")
    config.publish(POOLS)
    with pytest.raises(HostMismatchError, match="scheduler 0 runs without"):
        before_run_http_server(SimpleNamespace(dp_size=2), scheduler_infos=[{"status": "ready"}])


def test_a_lost_hook_ends_the_controller() -> None:
    def lose() -> Any:
        load(POOLS, controller=True)
        host = importlib.import_module("sglang.srt.managers.data_parallel_controller")
        host.DataParallelController.init_dispatcher = lambda self: None
        from pla_sglang.plugin.engine.hooks.dp_controller import after_init_dispatcher, ready_info

        reasons = []
        for call in (lambda: after_init_dispatcher(None, None), lambda: ready_info(0.0)):
            try:
                call()
            except HostMismatchError as error:
                reasons.append(error.reasons[0].split(":")[0])
        return reasons

    assert in_fork(lose) == ["dpc.dispatch", "dpc.dispatch"]


def test_old_socket_folders_are_removed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import tempfile

    from pla_sglang.plugin.engine.hooks.http_server import socket_folder

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("pla-sockets-99999999-x", f"pla-sockets-{os.getpid()}-x", "pla-other"):
        (tmp_path / name).mkdir()
    made = socket_folder()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != os.path.basename(made)) == [
        "pla-other",
        f"pla-sockets-{os.getpid()}-x",
    ]
    assert os.stat(made).st_mode & 0o777 == 0o700
