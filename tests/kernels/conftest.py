"""Triton's interpreter: runs kernels on the CPU, one program after the other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """``interpreted("pla_kernels.x.kernel")``: that module with its kernels interpreted.

    Triton decides when a kernel is decorated, so the module is imported anew, and forgotten after the test. What
    Triton itself has decorated by then (``tl.cumsum``, ``tl.sum``) stays compiled: kernels here use its builtins only.
    """

    def load(name: str) -> ModuleType:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return load
