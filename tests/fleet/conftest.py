"""Tests that are coroutines: each runs on an event loop of its own, of the kind that the router uses."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import uvloop

LIMIT_S = 120.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.function).parameters}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(pyfuncitem.function(**given), LIMIT_S))
    return True
