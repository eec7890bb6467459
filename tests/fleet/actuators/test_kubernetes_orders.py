"""Which pod stands for which plan, and which one Kubernetes would remove: tables, without an API server."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from pla_sglang.fleet.actuators.kubernetes_orders import KEPT_PLANS, Orders, Pod, find_obstacle


def pods(names: str) -> list[Pod]:
    """One letter each, by age; a capital one is being removed."""
    return [Pod(name.lower(), f"t{number}", ends=name.isupper()) for number, name in enumerate(names)]


@pytest.mark.parametrize(
    ("why", "before", "replicas", "there", "after"),
    [
        ("nothing was ordered", Orders(), 2, "ab", Orders()),
        ("its pod is not there yet", Orders({7: ""}, known=["a"]), 2, "a", Orders({7: ""}, known=["a"])),
        ("the newcomer is its pod", Orders({7: ""}, known=["a"]), 2, "ab", Orders({7: "b"}, known=["a"])),
        ("the oldest one comes first", Orders({8: "", 7: ""}), 2, "ab", Orders({8: "b", 7: "a"})),
        ("it is replaced", Orders({7: "b"}, known=["a"]), 2, "ac", Orders({7: "c"}, known=["a"])),
        ("it is being replaced", Orders({7: "b"}, known=["a"]), 2, "aB", Orders({7: ""}, known=["a"])),
        ("somebody has scaled down", Orders({7: "b", 8: "c"}), 2, "ab", Orders({7: "b", 8: "a"})),
        ("and there is no room", Orders({7: "b", 8: "c"}, known=["a"]), 1, "a", Orders(ended=[7, 8], known=["a"])),
        ("one is still to leave", Orders(stopping={"a": 7}), 1, "ab", Orders(stopping={"a": 7})),
        ("it leaves", Orders(stopping={"a": 7}), 1, "Ab", Orders(stopping={"a": 7})),
        ("it is gone", Orders(stopping={"a": 7}), 1, "b", Orders()),
        ("another has left in its place", Orders(stopping={"a": 7}), 1, "aB", Orders()),
    ],
)
def test_orders_follow_the_pods(why: str, before: Orders, replicas: int, there: str, after: Orders) -> None:
    before.settle(replicas, pods(there))
    assert before == after, why
    again = msgspec.json.decode(msgspec.json.encode(before), type=Orders)
    again.settle(replicas, pods(there))
    assert again == after


def test_what_is_remembered_is_bounded() -> None:
    orders = Orders()
    for plan in range(3 * KEPT_PLANS):
        orders.order_start(plan, [])
        orders.settle(1, [Pod(f"pod-{plan}", "now")])
        orders.order_stop(f"pod-{plan}")
        orders.settle(0, [])
    assert orders == Orders(ended=list(range(2 * KEPT_PLANS, 3 * KEPT_PLANS)))


READY = Pod("a", "t0")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({}, None),
        ({"ready": False}, "b is not ready, and Kubernetes would remove that one first"),
        ({"phase": "Pending"}, "b is not ready, and Kubernetes would remove that one first"),
        ({"scheduled": False}, "b is not ready, and Kubernetes would remove that one first"),
        ({"ready": False, "ends": True}, None),
        ({"template": "2"}, "a rollout is under way"),
        ({"template": "2", "ends": True}, None),
    ],
)
def test_a_pod_that_is_not_ready_stands_before_one_that_is(other: dict[str, object], says: str | None) -> None:
    assert find_obstacle(READY, [READY, dataclasses.replace(READY, name="b", **other)], []) == says


def test_those_that_leave_anyway_stand_before_nobody() -> None:
    other = dataclasses.replace(READY, name="b", ready=False)
    assert find_obstacle(READY, [READY, other], ["b"]) is None
    assert find_obstacle(other, [READY, other], []) is None
