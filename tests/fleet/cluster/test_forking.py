"""What a forked engine does otherwise than one that is spawned."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from support.forked import in_fork

from pla_sglang.fleet.cluster.forking import fork_workers


def test_another_name_of_a_function_that_is_wrapped_means_the_wrapped_one() -> None:
    """As SGLang sees to it; methods, which have no other names, are wrapped without a search for them."""

    def wrap() -> Any:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        class Owner:
            def method(self) -> int:
                return 1

        def function() -> int:
            return 1

        for name in ("defines", "imports"):
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(function=function, Owner=Owner)
        fork_workers()
        for target in ("defines.function", "defines.Owner.method"):
            HookRegistry.register(target, lambda result, *_: result + 1, HookType.AFTER)
        HookRegistry.apply_hooks()
        return [(module.function(), module.Owner().method()) for module in map(sys.modules.get, ("defines", "imports"))]

    assert in_fork(wrap) == [(2, 2), (2, 2)]
