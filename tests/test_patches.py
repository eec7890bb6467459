"""Drift of the host, and that a hook which does not fit or does not take effect is never overlooked.

Hooks change a process for good, so whatever installs some runs in a forked copy of the test process.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import logging
import pkgutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked import in_fork

from pla_patches import catalogue, host, install, verify
from pla_patches.seam import Group, Hook, Seam
from pla_patches.seams import of_group, table
from pla_sglang import config
from pla_sglang.config import PlaConfig
from pla_sglang.errors import HostMismatchError

CATALOGUE = Path(__file__).resolve().parent.parent / "patches" / "CATALOGUE.md"
SEAMS = {seam.id: seam for seam in table()}

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController."
_PASS = _SCHEDULER + "_get_new_batch_prefill_raw"

# seam -> where the host looks the name up at run time, and how it is written there
LOOKED_UP = {
    "cli.add": ("sglang.srt.server_args.prepare_server_args", "ServerArgs.add_cli_args"),
    "cli.parse": ("sglang.srt.server_args.prepare_server_args", "ServerArgs.from_cli_args"),
    "cpu.nixl_dram": ("sglang.srt.disaggregation.utils.get_kv_class", "NixlKVManager"),
    "cpu.nixl_rest": ("sglang.srt.disaggregation.utils.get_kv_class", "NixlKVManager"),
    "cpu.collectives": ("sglang.srt.distributed.parallel_state.init_model_parallel_group", "GroupCoordinator"),
    "cpu.pd_early_send": (_SCHEDULER + "run_batch", "self.maybe_send_cached_prefix_chunk"),
    "emu.forward": (_SCHEDULER + "run_batch", "self.model_worker.forward_batch_generation"),
    "emu.ready": (_SCHEDULER + "run_batch", "batch_result.copy_to_cpu"),
    "emu.idle": (_SCHEDULER + "event_loop_overlap", "self.on_idle"),
    "emu.kv_size": (
        "sglang.srt.disaggregation.decode.DecodePreallocQueue.pop_preallocated",
        "decode_req.kv_receiver.send_metadata",
    ),
    "emu.kv_poll": ("sglang.srt.disaggregation.utils._poll_with_failure_injection", "poller.poll"),
    "emu.kv_send_poll": ("sglang.srt.disaggregation.utils._poll_with_failure_injection", "poller.poll"),
    "emu.info": ("sglang.srt.managers.scheduler.run_scheduler_process", "scheduler.get_init_info"),
    "emu.state": (_SCHEDULER + "init_request_dispatcher", "self.get_internal_state"),
    "front.request": (
        "sglang.srt.entrypoints.http_server.generate_request",
        "_global_state.tokenizer_manager.generate_request",
    ),
    "front.serve": ("sglang.srt.entrypoints.http_server.launch_server", "_setup_and_run_http_server"),
    "sched.init": (_SCHEDULER + "__init__", "self.init_schedule_policy"),
    "sched.pass": (_SCHEDULER + "get_new_batch_prefill", "self._get_new_batch_prefill_raw"),
    "sched.order": (_PASS, "self.policy.calc_priority"),
    "sched.reserve": (_PASS, "PrefillAdder"),
    "sched.mix": (_PASS, "adder.add_chunked_req"),
    "sched.lora": (_PASS, "self._can_schedule_lora_req"),
    "sched.enqueue": (_SCHEDULER + "handle_generate_request", "self._add_request_to_queue"),
    "sched.dispatch": (_SCHEDULER + "__init__", "self.init_request_dispatcher"),
    "sched.clock": (
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests",
        "self._pull_raw_reqs",
    ),
    "sched.pd_chunk": (
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.get_next_disagg_prefill_batch_to_run",
        "self.process_prefill_chunk",
    ),
    "sched.launch": (_SCHEDULER + "event_loop_overlap", "self.run_batch"),
    "sched.result": (_SCHEDULER + "event_loop_normal", "self.process_batch_result"),
    "sched.load": (_SCHEDULER + "process_batch_result", "self.publish_load_snapshot"),
    "sched.info": ("sglang.srt.managers.scheduler.run_scheduler_process", "scheduler.get_init_info"),
    "sched.state": (_SCHEDULER + "init_request_dispatcher", "self.get_internal_state"),
    "sched.control": (_SCHEDULER + "init_request_dispatcher", "self.set_internal_state"),
    "tele.ready": ("sglang.srt.managers.scheduler.run_scheduler_process", "scheduler.get_init_info"),
    "tele.received": (
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests",
        "self._pull_raw_reqs",
    ),
    "tele.launch": (_SCHEDULER + "event_loop_overlap", "self.run_batch"),
    "tele.launched": (_SCHEDULER + "event_loop_normal", "self.run_batch"),
    "tele.result": (_SCHEDULER + "event_loop_normal", "self.process_batch_result"),
    "tele.idle": (_SCHEDULER + "event_loop_normal", "self.on_idle"),
    "tele.error": (_SCHEDULER + "abort_request", "prepare_abort"),
    "tele.state": (_SCHEDULER + "init_request_dispatcher", "self.get_internal_state"),
    "pools.entry": (
        "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        "run_data_parallel_controller_process",
    ),
    "dpc.dispatch": (_CONTROLLER + "__init__", "self.init_dispatcher"),
    "dpc.turns": (
        "sglang.srt.managers.data_parallel_controller.run_data_parallel_controller_process",
        "controller.event_loop",
    ),
    "graph.prefill": (
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_cuda_graphs",
        "capture_prefill_graph",
    ),
    "graph.idle": (_SCHEDULER + "event_loop_overlap", "self.on_idle"),
    "graph.info": ("sglang.srt.managers.scheduler.run_scheduler_process", "scheduler.get_init_info"),
    "graph.state": (_SCHEDULER + "init_request_dispatcher", "self.get_internal_state"),
    "launch.ready": ("sglang.launch_server.run_server", "launch_server"),
}


@pytest.fixture(autouse=True)
def _everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.CONFIG_ENV, raising=False)


# -- drift -------------------------------------------------------------------------------------------------------------


def test_the_installed_host_is_supported() -> None:
    assert host.version_reasons() == []


@pytest.mark.parametrize("seam", SEAMS.values(), ids=SEAMS)
def test_parameters_are_as_recorded(seam: Seam) -> None:
    assert verify.parameter_names(verify.raw_target(seam)) == seam.parameters


@pytest.mark.parametrize("seam", SEAMS.values(), ids=SEAMS)
def test_handler_takes_what_the_hook_type_passes(seam: Seam) -> None:
    """A handler that took other parameters would fail in the middle of a request."""
    names = [name for name in seam.parameters.split(", ") if name]
    extra = 0 if seam.hook in (Hook.BEFORE, Hook.REPLACE) else 1  # the result, or the original function
    signature = inspect.signature(verify.resolve_handler(seam))
    signature.bind(*[None] * (extra + len(names)))
    if seam.hook is not Hook.AROUND:
        return
    accepts_keywords = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    assert accepts_keywords or len(signature.parameters) == extra + len(names)


@pytest.mark.parametrize("seam", SEAMS.values(), ids=SEAMS)
def test_host_looks_the_name_up_where_it_is_replaced(seam: Seam) -> None:
    where, name = LOOKED_UP[seam.id]
    assert name in names_used_in(where), f"{where} no longer mentions {name}"


@functools.cache
def names_used_in(path: str) -> frozenset[str]:
    """Dotted names that a function of the host reads, imports made inside it included."""
    function = inspect.unwrap(pkgutil.resolve_name(path))
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.Attribute))}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return frozenset(names | {alias.name for node in imports for alias in node.names})


def test_every_seam_has_its_look_up() -> None:
    assert LOOKED_UP.keys() == SEAMS.keys()


def test_names_in_the_table_are_unique() -> None:
    assert len(SEAMS) == len(table())
    # Two hooks on one target depend on the order of registration, unless each only adds to what there is.
    adding = ("cpu.nixl_rest", "emu.info", "emu.state", "graph.idle", "graph.info", "graph.state")
    targets = [seam.target for seam in table() if seam.id not in adding and seam.group is not Group.TELEMETRY]
    assert len(set(targets)) == len(targets)


def test_every_seam_says_why_how_and_until_when() -> None:
    for seam in table():
        assert all((seam.why, seam.verify, seam.exit, seam.host_versions)), seam.id
        assert set(host.SUPPORTED) <= set(seam.host_versions), seam.id


# -- installation ------------------------------------------------------------------------------------------------------


def live_groups() -> tuple[set[str], list[str]]:
    """Groups of what is installed in this process, and what of it is not in effect."""
    seams = install.installed()
    return {seam.group.value for seam in seams}, verify.effect_reasons(seams)


def load(mode: str) -> Any:
    """As SGLang does in a process: load the plugins, which register, and apply."""
    from sglang.srt.plugins import load_plugins

    assert install.installed() == ()
    config.publish(PlaConfig(prefill_disagg=mode))
    load_plugins()
    return live_groups()


def test_scheduler_process_with_scheduling_on() -> None:
    groups, missing = in_fork(lambda: load("temporal"))
    assert missing == []
    assert groups - {"cpu"} == {"cli", "scheduler"}


def test_scheduler_process_with_scheduling_off() -> None:
    groups, missing = in_fork(lambda: load("off"))
    assert missing == []
    assert groups - {"cpu"} == {"cli"}


def test_front_process_before_its_command_line_is_read() -> None:
    """An environment left over from elsewhere turns nothing on; only the command line does."""
    groups, missing = in_fork(lambda: load("temporal"), as_child=False)
    assert missing == []
    assert groups - {"cpu"} == {"cli"}


def test_front_process_with_scheduling_on() -> None:
    def front() -> Any:
        load("off")
        install.install_frontend()
        return live_groups()

    groups, missing = in_fork(front, as_child=False)
    assert missing == []
    assert groups - {"cpu"} == {"cli", "frontend"}


def test_untouched_targets_stay_the_hosts() -> None:
    """With scheduling off no function of the scheduler or the HTTP server is ours."""

    def ours() -> list[str]:
        load("off")
        off = (*of_group(Group.SCHEDULER), *of_group(Group.FRONTEND), *of_group(Group.LAUNCHER))
        return [seam.id for seam in off if not verify.effect_reasons([seam])]

    assert in_fork(ours) == []


# -- what does not fit -------------------------------------------------------------------------------------------------

GOOD = SEAMS["sched.pass"]
MISSING = dataclasses.replace(GOOD, id="x.missing", target=_SCHEDULER + "no_such_function")
NO_MODULE = dataclasses.replace(GOOD, id="x.module", target="sglang.srt.no_such_module.function")
DRIFTED = dataclasses.replace(GOOD, id="x.drifted", parameters="self, running_batch")
NO_HANDLER = dataclasses.replace(GOOD, id="x.handler", handler="pla_sglang.engine.handlers:no_such_handler")
NO_HANDLER_MODULE = dataclasses.replace(GOOD, id="x.handler_module", handler="pla_sglang.no_such_module:handler")
BAD = (MISSING, NO_MODULE, DRIFTED, NO_HANDLER, NO_HANDLER_MODULE)


@pytest.fixture
def broken_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every group also has the seams that do not fit."""
    monkeypatch.setattr(install, "of_group", lambda group: (*of_group(group), *BAD))
    yield
    assert install.installed() == (), "a table that does not fit installs nothing"


def test_reasons_name_the_seam_and_what_is_wrong() -> None:
    reasons = verify.host_reasons([*table(), *BAD])
    assert [reason.split(":")[0] for reason in reasons] == [seam.id for seam in BAD]
    assert "no_such_function not found" in reasons[0]
    assert "no_such_module" in reasons[1]
    assert "takes (self, prefill_delayer_single_pass, running_batch), recorded (self, running_batch)" in reasons[2]
    assert "handler pla_sglang.engine.handlers:no_such_handler not found" in reasons[3]


@pytest.mark.usefixtures("broken_table")
def test_a_misfit_ends_the_process_with_every_reason() -> None:
    """SystemExit, because SGLang's loader swallows every ordinary exception."""
    with pytest.raises(SystemExit) as stop:
        install.install_for_this_process()
    assert all(seam.id in str(stop.value) for seam in BAD)
    assert str(stop.value).startswith("error: pla_sglang does not fit this SGLang")


@pytest.mark.usefixtures("broken_table")
def test_a_misfit_ends_a_scheduler_process_through_the_hosts_own_loader() -> None:
    stop = in_fork(lambda: load("temporal"))
    assert isinstance(stop, SystemExit)
    assert all(seam.id in str(stop) for seam in BAD)


@pytest.mark.usefixtures("broken_table")
@pytest.mark.parametrize("installer", [install.install_frontend, install.install_launcher, install.install_scheduler])
def test_a_misfit_is_found_by_every_installer(installer: Any) -> None:
    with pytest.raises(HostMismatchError) as caught:
        installer()
    assert {reason.split(":")[0] for reason in caught.value.reasons} == {seam.id for seam in BAD}


def test_a_front_process_also_checks_the_schedulers_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better before any process is started than in the log of a child."""
    broken = {Group.SCHEDULER: (DRIFTED,), Group.FRONTEND: ()}
    monkeypatch.setattr(install, "of_group", lambda group: broken[group])
    with pytest.raises(HostMismatchError, match=r"x\.drifted"):
        install.install_frontend()


def unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed_version", lambda: "0.5.99")


def test_another_host_is_refused_when_scheduling_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported(monkeypatch)
    stop = in_fork(lambda: load("temporal"))
    assert isinstance(stop, SystemExit)
    assert "sglang 0.5.99; supported: 0.5.17" in str(stop)
    with pytest.raises(HostMismatchError, match=r"sglang 0\.5\.99"):
        install.install_frontend()


def test_another_host_is_served_stock_when_scheduling_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported(monkeypatch)
    groups, missing = in_fork(lambda: load("off"))
    assert missing == []
    assert groups - {"cpu"} == {"cli"}


def test_no_host_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed_version", lambda: None)
    assert host.version_reasons() == ["sglang is not installed; supported: 0.5.17"]


# -- hooks that silently did not apply ---------------------------------------------------------------------------------


def test_a_hook_that_the_host_only_logged_is_found() -> None:
    """SGLang logs a hook that fails to apply and goes on. Here every one fails."""

    def lose() -> Any:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        logging.disable(logging.CRITICAL)
        config.publish(PlaConfig(prefill_disagg="temporal"))
        HookRegistry.apply_hooks = classmethod(lambda cls: None)
        load_plugins()
        try:
            install.verify_this_process()
        except HostMismatchError as error:
            return error.reasons
        return []

    reasons = in_fork(lose)
    assert all("is not ours after installation" in reason for reason in reasons)
    assert {reason.split(":")[0] for reason in reasons} >= {seam.id for seam in of_group(Group.SCHEDULER)}


def test_a_function_that_was_replaced_after_us_is_found() -> None:
    def overwrite() -> Any:
        load("temporal")
        scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
        scheduler.run_batch = lambda self, batch, pp_proxy_tensors=None: None
        return live_groups()[1]

    assert [reason.split(":")[0] for reason in in_fork(overwrite)] == ["sched.launch"]


def test_a_scheduler_without_our_seams_is_not_served() -> None:
    """The front process asks every scheduler; one that does not answer runs stock."""
    from types import SimpleNamespace

    from pla_sglang.engine.frontend import before_run_http_server

    infos = [{"pla": {}}, {}]
    with pytest.raises(HostMismatchError, match="scheduler 1 runs without"):
        before_run_http_server(SimpleNamespace(dp_size=1), scheduler_infos=infos)
    with pytest.raises(HostMismatchError, match="scheduler 1 runs without"):
        before_run_http_server(SimpleNamespace(dp_size=1), None, None, None, infos)


def test_status_line_counts_what_is_in_effect() -> None:
    def status() -> str:
        load("temporal")
        return install.verify_this_process()

    line = in_fork(status)
    assert line.endswith(f"seams verified on sglang {host.installed_version()}")
    assert int(line.split()[0]) >= len(of_group(Group.SCHEDULER))


# -- catalogue ---------------------------------------------------------------------------------------------------------


def test_catalogue_is_made_from_the_table() -> None:
    wanted = catalogue.render(table())
    assert CATALOGUE.read_text(encoding="utf-8") == wanted, "run: python -m pla_patches.catalogue patches/CATALOGUE.md"


def test_catalogue_lists_every_seam_and_is_the_same_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue.main([])
    catalogue.main([str(tmp_path / "page.md")])
    page = capsys.readouterr().out
    assert page == (tmp_path / "page.md").read_text(encoding="utf-8")
    assert all(f"### {seam.id}\n" in page for seam in table())
