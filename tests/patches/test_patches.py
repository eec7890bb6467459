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
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_catalogue
import pytest
from support.forked import in_fork
from support.looked_up import look_ups_on
from support.seam_groups import names_of

from pla_patches import host, install, verify
from pla_patches.hook import HOOKS
from pla_patches.hosts import HOSTS
from pla_patches.seam import Group, Hook, Seam, Subscriber
from pla_patches.table import seams_of, table
from pla_sglang.common.errors import HostMismatchError
from pla_sglang.plugin import config
from pla_sglang.plugin.config import PlaConfig

CATALOGUE = Path(__file__).resolve().parents[2] / "patches" / "CATALOGUE.md"
SEAMS = {seam.target: seam for seam in table()}
LOOKED_UP = look_ups_on(host.recorded().version)
SUBSCRIBERS = {subscriber.id: (seam, subscriber) for seam in table() for subscriber in seam.subscribers}

QUEUES_MODULE = "pla_sglang.fleet.stateless.transfer.queues"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_PASS = _SCHEDULER + "_get_new_batch_prefill_raw"


@pytest.fixture(autouse=True)
def _everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.CONFIG_ENV, raising=False)


# -- drift -------------------------------------------------------------------------------------------------------------


def test_the_installed_host_is_supported() -> None:
    assert host.version_reasons() == []


@pytest.mark.parametrize("key", host.recorded().signatures)
def test_parameters_are_as_recorded(key: str) -> None:
    """Constructors that we call included."""
    assert verify.misfit_here(host.recorded().signatures[key]) is None


@pytest.mark.parametrize("ours", ["SendQueue", "ReceiveQueue", "TransferQueue"])
def test_every_method_that_we_override_has_its_row(ours: str) -> None:
    derived = pkgutil.resolve_name(f"{QUEUES_MODULE}:{ours}")
    [base] = derived.__bases__
    overridden = {
        f"{QUEUES_MODULE}:{ours}.{name}"
        for name in vars(derived).keys() & set(dir(base)) - {"__init__"}  # which takes what is ours, and calls theirs
        if callable(vars(derived)[name])
    }
    rows = {one.handler for _, one in SUBSCRIBERS.values() if one.handler.startswith(f"{QUEUES_MODULE}:{ours}.")}
    assert overridden == rows


@pytest.mark.parametrize(
    ("seam", "subscriber"),
    [
        pytest.param(seam, subscriber, id=f"{known.version} {subscriber.id}")
        for known in HOSTS
        if known.version in host.SUPPORTED
        for seam in table(known)
        for subscriber in seam.subscribers
    ],
)
def test_handler_takes_what_the_hook_type_passes(seam: Seam, subscriber: Subscriber) -> None:
    """A handler that took other parameters would fail in the middle of a request."""
    names = [name for name in seam.parameters.split(", ") if name]
    alone = subscriber.hook in (Hook.BEFORE, Hook.REPLACE, Hook.OVERRIDE)
    extra = 0 if alone else 1  # the result, or the original function
    signature = inspect.signature(verify.resolve_handler(subscriber))
    signature.bind(*[None] * (extra + len(names)))
    if subscriber.hook is not Hook.AROUND:
        return
    accepts_keywords = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    assert accepts_keywords or len(signature.parameters) == extra + len(names)


@pytest.mark.parametrize("subscriber", SUBSCRIBERS)
def test_host_looks_the_name_up_where_it_is_replaced(subscriber: str) -> None:
    where, name = LOOKED_UP[subscriber]
    assert name in names_used_in(where), f"{where} no longer mentions {name}"


@functools.cache
def names_used_in(path: str) -> frozenset[str]:
    """Dotted names that a function of the host reads, imports made inside it included."""
    function = inspect.unwrap(pkgutil.resolve_name(path))
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.Attribute))}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return frozenset(names | {alias.name for node in imports for alias in node.names})


def test_every_subscriber_has_its_look_up() -> None:
    assert LOOKED_UP.keys() >= SUBSCRIBERS.keys()


# -- installation ------------------------------------------------------------------------------------------------------


def live_groups() -> tuple[set[str], list[str]]:
    """Groups of what is installed in this process, and what of it is not in effect."""
    seams = install.installed()
    groups = {subscriber.group.value for seam in seams for subscriber in seam.subscribers}
    return groups, verify.effect_reasons(seams)


def load(mode: str, *, stateless: bool = False) -> Any:
    """As SGLang does in a process: load the plugins, which register, and apply."""
    from sglang.srt.plugins import load_plugins

    assert install.installed() == ()
    config.publish(PlaConfig(prefill_disagg=mode, stateless=stateless).for_device("cpu"))
    load_plugins()
    return live_groups()


def found(*groups: Group) -> set[str]:
    """Those of ``groups``, and of what every process has."""
    return names_of(Group.CLI, *groups)


def test_scheduler_process_with_scheduling_on() -> None:
    groups, missing = in_fork(lambda: load("temporal"))
    assert missing == []
    assert groups - {"cpu"} == found(Group.GUARD_SCHEDULER, Group.SCHEDULER, Group.RUNNING)


def test_scheduler_process_with_scheduling_off() -> None:
    groups, missing = in_fork(lambda: load("off"))
    assert missing == []
    assert groups - {"cpu"} == found(Group.GUARD_SCHEDULER)


def test_processes_of_a_stateless_instance() -> None:
    def scheduler() -> Any:
        return load("off", stateless=True)

    def front() -> Any:
        load("off")
        install.install_frontend(scheduling=False, stateless=True)
        return live_groups()

    cases = (
        (scheduler, True, found(Group.GUARD_SCHEDULER, Group.STATELESS, Group.RUNNING)),
        (front, False, found(Group.GUARD, Group.STATELESS_HTTP)),
    )
    for process, as_child, wanted in cases:
        groups, missing = in_fork(process, as_child=as_child)
        assert missing == []
        assert groups - {"cpu"} == wanted


def test_front_process_before_its_command_line_is_read() -> None:
    """An environment left over from elsewhere turns nothing on; only the command line does."""
    groups, missing = in_fork(lambda: load("temporal"), as_child=False)
    assert missing == []
    assert groups - {"cpu"} == found()


def test_front_process_with_scheduling_on() -> None:
    def front() -> Any:
        load("off")
        install.install_frontend()
        return live_groups()

    groups, missing = in_fork(front, as_child=False)
    assert missing == []
    assert groups - {"cpu"} == found(Group.FRONTEND, Group.GUARD)


def test_untouched_targets_stay_the_hosts() -> None:
    """With scheduling off no function of the scheduler or the HTTP server is ours."""

    def ours() -> list[str]:
        load("off")
        off = seams_of(Group.SCHEDULER, Group.RUNNING, Group.FRONTEND, Group.LAUNCHER)
        return [seam.target for seam in off if len(verify.effect_reasons([seam])) < len(seam.subscribers)]

    assert in_fork(ours) == []


def test_methods_that_we_wrap_have_no_other_names() -> None:
    """A forked engine does not search for any: ``fleet/cluster/forking.py``. Nothing is wrapped in this process."""
    methods = set()
    for seam in table():
        owner, _, name = seam.target.rpartition(".")
        if isinstance(found_owner := pkgutil.resolve_name(owner), type):
            methods.add(id(getattr(found_owner, name)))
    assert len(methods) > 20
    other_names = [
        f"{module.__name__}.{name}"
        for module in list(sys.modules.values())
        for name, value in list(vars(module).items())
        if id(value) in methods
    ]
    assert other_names == []


# -- what does not fit -------------------------------------------------------------------------------------------------

GOOD = SEAMS[_PASS]


def spoiled(name: str, handler: str = GOOD.subscribers[0].handler, **changes: str) -> Seam:
    subscriber = dataclasses.replace(GOOD.subscribers[0], id=name, handler=handler)
    return dataclasses.replace(GOOD, subscribers=(subscriber,), **changes)


MISSING = spoiled("x.missing", target=_SCHEDULER + "no_such_function")
NO_MODULE = spoiled("x.module", target="sglang.srt.no_such_module.function")
DRIFTED = spoiled("x.drifted", parameters="self, running_batch")
NO_HANDLER = spoiled("x.handler", handler="pla_sglang.plugin.engine.hooks.scheduler:no_such_handler")
NO_HANDLER_MODULE = spoiled("x.handler_module", handler="pla_sglang.no_such_module:handler")
BAD = (MISSING, NO_MODULE, DRIFTED, NO_HANDLER, NO_HANDLER_MODULE)


@pytest.fixture
def broken_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every group also has the seams that do not fit."""
    monkeypatch.setattr(install, "seams_of", lambda *groups: (*seams_of(*groups), *BAD))
    yield
    assert install.installed() == (), "a table that does not fit installs nothing"


def test_reasons_name_the_seam_and_what_is_wrong() -> None:
    reasons = verify.host_reasons([*table(), *BAD])
    assert [reason.split(":")[0] for reason in reasons] == [seam.subscribers[0].id for seam in BAD]
    assert "no_such_function not found" in reasons[0]
    assert "no_such_module" in reasons[1]
    assert "takes (self, prefill_delayer_single_pass, running_batch), recorded (self, running_batch)" in reasons[2]
    assert "handler pla_sglang.plugin.engine.hooks.scheduler:no_such_handler not found" in reasons[3]


@pytest.mark.usefixtures("broken_table")
def test_a_misfit_ends_the_process_with_every_reason() -> None:
    """SystemExit, because SGLang's loader swallows every ordinary exception."""
    with pytest.raises(SystemExit) as stop:
        install.install_for_this_process()
    assert all(seam.subscribers[0].id in str(stop.value) for seam in BAD)
    assert str(stop.value).startswith("error: pla_sglang does not fit this SGLang")


@pytest.mark.usefixtures("broken_table")
def test_a_misfit_ends_a_scheduler_process_through_the_hosts_own_loader() -> None:
    stop = in_fork(lambda: load("temporal"))
    assert isinstance(stop, SystemExit)
    assert all(seam.subscribers[0].id in str(stop) for seam in BAD)


@pytest.mark.usefixtures("broken_table")
@pytest.mark.parametrize(
    "installer",
    [install.install_frontend, install.install_launcher, functools.partial(install.install_here, Group.SCHEDULER)],
)
def test_a_misfit_is_found_by_every_installer(installer: Any) -> None:
    with pytest.raises(HostMismatchError) as caught:
        installer()
    assert {reason.split(":")[0] for reason in caught.value.reasons} == {seam.subscribers[0].id for seam in BAD}


def test_a_front_process_also_checks_the_schedulers_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better before any process is started than in the log of a child."""
    monkeypatch.setattr(install, "seams_of", lambda *groups: (DRIFTED,) if Group.SCHEDULER in groups else ())
    with pytest.raises(HostMismatchError, match=r"x\.drifted"):
        install.install_frontend()


def unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed_version", lambda: "0.5.99")


def test_another_host_is_refused_when_scheduling_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported(monkeypatch)
    stop = in_fork(lambda: load("temporal"))
    assert isinstance(stop, SystemExit)
    assert f"sglang 0.5.99; supported: {', '.join(host.SUPPORTED)}" in str(stop)
    with pytest.raises(HostMismatchError, match=r"sglang 0\.5\.99"):
        install.install_frontend()


def test_another_host_is_served_stock_when_scheduling_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported(monkeypatch)
    groups, missing = in_fork(lambda: load("off"))
    assert missing == []
    assert groups - {"cpu"} == found()


def test_no_host_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed_version", lambda: None)
    assert host.version_reasons() == [f"sglang is not installed; supported: {', '.join(host.SUPPORTED)}"]


def ids_of(group: Group) -> set[str]:
    return {subscriber.id for seam in seams_of(group) for subscriber in seam.subscribers}


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
    assert {reason.split(":")[0] for reason in reasons} >= ids_of(Group.SCHEDULER)


def test_a_function_that_was_replaced_after_us_is_found() -> None:
    def overwrite() -> Any:
        load("temporal")
        scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
        scheduler.run_batch = lambda self, batch, pp_proxy_tensors=None: None
        return live_groups()[1]

    assert [reason.split(":")[0] for reason in in_fork(overwrite)] == ["sched.launch"]


def test_a_subscriber_that_our_own_hook_does_not_call_is_found() -> None:
    def silence() -> Any:
        load("temporal")
        HOOKS[_SCHEDULER + "process_batch_result"]._after.clear()
        return live_groups()[1]

    assert [reason.split(":")[0] for reason in in_fork(silence)] == ["sched.result"]


def test_an_override_that_the_host_does_not_call_is_found() -> None:
    """The host's class may lose the method, or be another than ours is derived from."""
    seam, subscriber = SUBSCRIBERS["queue.alloc"]
    assert verify.effect_reasons([seam]) == []
    elsewhere = dataclasses.replace(seam, target=SUBSCRIBERS["queue.poll"][0].target)
    renamed = dataclasses.replace(subscriber, handler=f"{QUEUES_MODULE}:ReceiveQueue._active_req_count")
    for spoilt in (elsewhere, dataclasses.replace(seam, subscribers=(renamed,))):
        assert [reason.split(":")[0] for reason in verify.effect_reasons([spoilt])] == ["queue.alloc"]


def test_groups_that_come_later_are_called_too() -> None:
    """A target is wrapped once; whoever subscribes after that is in effect all the same."""

    def later() -> Any:
        load("temporal")
        install.install_here(Group.TELEMETRY)
        return live_groups()

    groups, missing = in_fork(later)
    assert missing == []
    assert groups - {"cpu"} == found(Group.GUARD_SCHEDULER, Group.SCHEDULER, Group.RUNNING, Group.TELEMETRY)


def test_a_scheduler_without_our_seams_is_not_served() -> None:
    """The front process asks every scheduler; one that does not answer runs stock."""
    from types import SimpleNamespace

    from pla_sglang.plugin.engine.hooks.http_server import before_run_http_server

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
    assert int(line.split()[0]) >= len(seams_of(Group.SCHEDULER))


# -- catalogue ---------------------------------------------------------------------------------------------------------


def test_catalogue_is_made_from_the_table() -> None:
    wanted = make_catalogue.render()
    assert CATALOGUE.read_text(encoding="utf-8") == wanted, "run: python scripts/make_catalogue.py patches/CATALOGUE.md"


def test_catalogue_lists_every_seam_and_is_the_same_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_catalogue.main([])
    make_catalogue.main([str(tmp_path / "page.md")])
    page = capsys.readouterr().out
    assert page == (tmp_path / "page.md").read_text(encoding="utf-8")
    assert all(f"- **{name}** (" in page for name in SUBSCRIBERS)
