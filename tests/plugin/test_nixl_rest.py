"""What the CPU platform asks of NIXL, so that its progress thread can rest."""

from __future__ import annotations

import pytest

pytest.importorskip("nixl")

from nixl import _api
from sglang.srt.environ import envs

from pla_sglang.plugin.platform.host_fixes import ONE_WORKER, REST_US, let_nixl_rest

PARAMS = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS


@pytest.fixture(autouse=True)
def binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL's and the environment's own state come back."""
    monkeypatch.setattr(_api.nixlBind, "nixlAgentConfig", _api.nixlBind.nixlAgentConfig)
    monkeypatch.setenv(PARAMS.name, "")
    monkeypatch.delenv(PARAMS.name)


def test_agents_rest_and_have_one_worker() -> None:
    for _ in range(2):  # a stateless instance has two managers
        let_nixl_rest(None)
        assert PARAMS.get() == ONE_WORKER
        config = _api.nixlBind.nixlAgentConfig
        assert config.pla_rests
        assert not getattr(config.__mro__[1], "pla_rests", False)
    one = config()
    one.pthrDelay = 0
    assert one.pthrDelay == REST_US


def test_what_the_operator_asks_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARAMS.name, '{"num_threads": "4"}')
    let_nixl_rest(None)
    assert PARAMS.get() == '{"num_threads": "4"}'
