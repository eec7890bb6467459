"""The table itself, and that a hook calls its subscribers in the table's order."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from pla_patches import host
from pla_patches.hook import TargetHook
from pla_patches.hosts import HOSTS, Host, nearest
from pla_patches.seam import Hook, Seam
from pla_patches.table import SUBSCRIBERS, table

ROOT = Path(__file__).parents[2]
BY_ID = {subscriber.id: subscriber for subscriber in SUBSCRIBERS}


on_every_host = pytest.mark.parametrize("known", HOSTS, ids=lambda known: known.version)


@on_every_host
def test_names_in_the_table_are_unique(known: Host) -> None:
    targets = {seam.target for seam in table(known)}
    assert len(targets) == len(table(known)), "one seam for each target"
    assert len(BY_ID) == len(SUBSCRIBERS)


@on_every_host
def test_a_subscriber_has_its_place_or_a_reason_why_not(known: Host) -> None:
    at_a_seam = {subscriber.id for seam in table(known) for subscriber in seam.subscribers}
    assert at_a_seam.isdisjoint(known.absent)
    assert at_a_seam | known.absent.keys() == BY_ID.keys()
    assert {seam.key for seam in table(known)} == known.targets.keys(), "nothing is recorded that nobody needs"
    assert all(known.absent.values())


def test_supported_hosts_are_recorded() -> None:
    assert set(host.SUPPORTED) <= {known.version for known in HOSTS}


@pytest.mark.parametrize(
    ("version", "recorded"),
    [
        ("0.5.17", "0.5.17"),
        ("0.5.23", "0.5.23"),
        ("0.5.23.post1", "0.5.23"),
        ("0.5.18", "0.5.17"),
        ("0.5.20", "0.5.17"),  # the older of two
        ("0.5.22rc1", "0.5.23"),
        ("0.6", "0.5.23"),
        ("0.4.0", "0.5.17"),
        (None, "0.5.17"),
    ],
)
def test_an_unknown_version_is_compared_with_the_nearest(version: str | None, recorded: str) -> None:
    assert nearest(version).version == recorded


@on_every_host
def test_subscribers_of_one_target_do_not_get_in_each_others_way(known: Host) -> None:
    """One that wraps may keep the others from being called, so there is one at most; one that stands in is alone.

    ``emu.parse`` and ``less.parse`` wrap within ``cli.parse``: they call what they wrap, or end the start.
    """
    for seam in table(known):
        hooks = [subscriber.hook for subscriber in seam.subscribers if subscriber.id not in ("emu.parse", "less.parse")]
        assert hooks.count(Hook.AROUND) <= 1, seam.target
        assert len(hooks) == 1 or not {Hook.REPLACE, Hook.OVERRIDE} & set(hooks), seam.target


def test_every_subscriber_says_why_how_and_until_when() -> None:
    for subscriber in SUBSCRIBERS:
        assert all((subscriber.why, subscriber.verify, subscriber.goes_when)), subscriber.id
        for name in re.findall(r"tests(?:/\w+)+(?:\.py)?", subscriber.verify):
            assert (ROOT / name).exists(), f"{subscriber.id}: {name}"


def recording(name: str, hook: Hook, calls: list[str]) -> Any:
    def before(*args: Any) -> Any:
        calls.append(name)
        return (*args, name), {}

    def after(result: Any, *args: Any) -> Any:
        calls.append(name)
        return None if name == "silent" else [*result, name]

    def around(original: Any, *args: Any) -> Any:
        calls.append(name)
        return original(*args)

    return {Hook.BEFORE: before, Hook.AFTER: after, Hook.AROUND: around}[hook]


def test_a_hook_calls_in_the_order_of_the_table_whenever_its_subscribers_came() -> None:
    names = {
        "after1": Hook.AFTER,
        "outer": Hook.AROUND,
        "before1": Hook.BEFORE,
        "inner": Hook.AROUND,
        "silent": Hook.AFTER,
        "after2": Hook.AFTER,
        "before2": Hook.BEFORE,
        "idle": Hook.AFTER,  # not active here
    }
    base = BY_ID["sched.pass"]
    subscribers = tuple(dataclasses.replace(base, id=name, hook=hook) for name, hook in names.items())
    target = TargetHook(Seam(key="x.y", target="x.y", parameters="", subscribers=subscribers))
    calls: list[str] = []
    made = {name: recording(name, hook, calls) for name, hook in names.items()}
    for name in ("before2", "after2", "inner", "silent", "outer", "after1", "before1"):
        target.activate({name: made[name]})
    assert target(lambda *args: [*args], "argument") == ["argument", "before1", "before2", "after1", "after2"]
    assert calls == ["before1", "before2", "outer", "inner", "after1", "silent", "after2"]
    assert target.calls(made["outer"])
    assert not target.calls(made["idle"])
