"""The table itself, and that a hook calls its subscribers in the table's order."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from pla_patches import host
from pla_patches.hook import TargetHook
from pla_patches.seam import Hook, Seam
from pla_patches.table import SUBSCRIBERS, table

ROOT = Path(__file__).parents[1]
BY_ID = {subscriber.id: subscriber for subscriber in SUBSCRIBERS}


def test_names_in_the_table_are_unique() -> None:
    targets = {seam.target for seam in table()}
    assert len(targets) == len(table()), "one seam for each target"
    assert len(BY_ID) == len(SUBSCRIBERS)
    assert {subscriber.target for subscriber in SUBSCRIBERS} == targets, "each stands at a seam"


def test_subscribers_of_one_target_do_not_get_in_each_others_way() -> None:
    """One that wraps may keep the others from being called, so there is one at most; one that stands in is alone."""
    for seam in table():
        hooks = [subscriber.hook for subscriber in seam.subscribers]
        assert hooks.count(Hook.AROUND) <= 1, seam.target
        assert len(hooks) == 1 or not {Hook.REPLACE, Hook.OVERRIDE} & set(hooks), seam.target


def test_every_subscriber_says_why_how_and_until_when() -> None:
    for subscriber in SUBSCRIBERS:
        assert all((subscriber.why, subscriber.verify, subscriber.goes_when, subscriber.host_versions)), subscriber.id
        assert set(host.SUPPORTED) <= set(subscriber.host_versions), subscriber.id
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
    target = TargetHook(Seam(target="x.y", parameters="", next_host=None, subscribers=subscribers))
    calls: list[str] = []
    made = {name: recording(name, hook, calls) for name, hook in names.items()}
    for name in ("before2", "after2", "inner", "silent", "outer", "after1", "before1"):
        target.activate({name: made[name]})
    assert target(lambda *args: [*args], "argument") == ["argument", "before1", "before2", "after1", "after2"]
    assert calls == ["before1", "before2", "outer", "inner", "after1", "silent", "after2"]
    assert target.calls(made["outer"])
    assert not target.calls(made["idle"])
