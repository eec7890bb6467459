"""What tests of prefill graphs share."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture
def ranks() -> Iterator[SimpleNamespace]:
    """The host's group of ranks that run each pass together, in place of a real one: this process alone."""
    from sglang.srt.runtime_context import get_parallel

    group = SimpleNamespace(world_size=1)
    with get_parallel().override(tp_group=group):
        yield group
