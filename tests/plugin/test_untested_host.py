"""A version of SGLang that is not supported: refused with what differs, or started with --pla-untested-host allow.

The installed host stands for it, under another version.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from support.forked import in_fork
from support.seam_groups import names_of

from pla_patches import host, install, verify
from pla_patches.hosts import Host
from pla_patches.hosts.signature import Signature
from pla_patches.seam import Group
from pla_sglang.common.errors import ConfigError, HostMismatchError
from pla_sglang.plugin import config
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.hooks.hidden_keys import around_get_internal_state

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
REFUSED = PlaConfig(prefill_disagg="temporal").for_device("cpu")
ALLOWED = REFUSED.replace(untested_host="allow")
OTHER_BATCH = {"scheduler.run_batch": Signature(_SCHEDULER + "run_batch", "self, batch")}


@pytest.fixture(autouse=True)
def _everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.CONFIG_ENV, raising=False)


def pretend_newer(monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Signature] | None = None) -> Host:
    """The installed host has a version that nobody knows; what is recorded of its nearest has ``changes``, by key."""
    known = host.recorded()

    def changed(signatures: Mapping[str, Signature]) -> dict[str, Signature]:
        return {key: (changes or {}).get(key, there) for key, there in signatures.items()}

    recorded = dataclasses.replace(known, targets=changed(known.targets), constructed=changed(known.constructed))
    monkeypatch.setattr(host, "installed_version", lambda: "0.5.99")
    monkeypatch.setattr(host, "recorded", lambda: recorded)
    return recorded


def start_scheduler(knobs: PlaConfig) -> tuple[set[str], list[str], str]:
    """Groups of what a scheduler process installs, what of it is not in effect, and its line."""
    from sglang.srt.plugins import load_plugins

    config.publish(knobs)
    load_plugins()
    seams = install.installed()
    groups = {subscriber.group.value for seam in seams for subscriber in seam.subscribers}
    return groups - {"cpu"}, verify.effect_reasons(seams), install.verify_this_process()


def start_front(knobs: PlaConfig) -> tuple[set[str], list[str]]:
    """Groups of what the process of the command line installs, or why it does not."""
    config.publish(knobs)
    try:
        install.install_frontend(scheduling=knobs.enabled)
    except HostMismatchError as error:
        return set(), error.reasons
    return {subscriber.group.value for seam in install.installed() for subscriber in seam.subscribers}, []


def test_it_starts_where_every_signature_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = pretend_newer(monkeypatch)
    groups, missing, line = in_fork(lambda: start_scheduler(ALLOWED))
    assert (groups, missing) == ({"cli", "scheduler", "running"} | names_of(Group.GUARD_SCHEDULER), [])
    assert line.endswith(f"sglang 0.5.99 (untested: its signatures are those of {recorded.version})")
    assert in_fork(lambda: start_front(ALLOWED), as_child=False) == ({"guard", "frontend"}, [])


def test_it_is_refused_with_all_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the command line looks at all that is recorded, as also what a stateless instance calls."""
    gone = {"scheduler.on_idle": Signature(_SCHEDULER + "rests", "self")}
    buffers = "sglang.srt.disaggregation.utils.MetadataBuffers.__init__"
    pretend_newer(monkeypatch, {**OTHER_BATCH, **gone, "metadata_buffers.init": Signature(buffers, "self")})
    _, reasons = in_fork(lambda: start_front(ALLOWED), as_child=False)
    ids = {"emu.idle", "graph.idle", "tele.idle", "sched.launch", "tele.launch", "tele.launched"}
    assert {reason.split(":")[0] for reason in reasons} == {*ids, "metadata_buffers.init"}
    stop = in_fork(lambda: start_scheduler(ALLOWED))
    assert isinstance(stop, SystemExit)
    assert f"sched.launch: {_SCHEDULER}run_batch takes (self, batch, pp_proxy_tensors), recorded" in str(stop)
    assert "supported" not in str(stop)


def test_without_the_flag_the_refusal_says_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_newer(monkeypatch, OTHER_BATCH)
    stop = in_fork(lambda: start_scheduler(REFUSED))
    assert isinstance(stop, SystemExit)
    for wanted in ("sglang 0.5.99; supported: ", f"sched.launch: {_SCHEDULER}run_batch takes "):
        assert wanted in str(stop)
    _, reasons = in_fork(lambda: start_front(REFUSED), as_child=False)
    assert [reason.split(":")[0] for reason in reasons] == ["sglang 0.5.99; supported", "sched.launch"]


def test_no_host_at_all_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed_version", lambda: None)
    config.publish(ALLOWED)
    assert install.version_reasons() == host.version_reasons() != []


@pytest.mark.parametrize("newer", [True, False])
def test_server_info_says_so(newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every server, whatever of ours is on."""

    async def original(manager: Any) -> list[dict[str, Any]]:
        return [{"pla": {"hooks": "x"}}, {}]

    note = {}
    if newer:
        note = {"untested": f"untested: its signatures are those of {pretend_newer(monkeypatch).version}"}
    states = asyncio.run(around_get_internal_state(original, None))
    assert [state.get("pla", {}) for state in states] == [{"hooks": "x", **note}, note]


def test_a_supported_host_is_not_untested() -> None:
    assert host.untested_note() is None
    with pytest.raises(ConfigError, match="--pla-untested-host 'yes' is not known; allowed: refuse, allow"):
        PlaConfig(untested_host="yes")
