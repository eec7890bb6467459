"""Seams of the length predictor, in scheduler processes."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, subscribe

_HOOKS = "pla_sglang.plugin.engine.hooks.predicted_lengths"
_E2E = "tests/e2e/test_predicted_lengths.py"

_subscribe = functools.partial(subscribe, module=_HOOKS, group=Group.PREDICTOR, verify=_E2E)

PREDICTOR = (
    _subscribe(
        id="pred.capture",
        key="forward_batch.get_server_return_hidden_states_mode",
        handler="after_server_hidden_states_mode",
        why=(
            "Passes keep the hidden states of last tokens, without a copy. The host's flag would also let clients ask "
            "for them."
        ),
        verify=_E2E + ": return_hidden_states is refused as without a predictor",
    ),
    _subscribe(
        id="pred.forward",
        key="tp_worker.forward_batch_generation",
        why="Behind each k-th decode pass the predictor reads the hidden states, on the pass's stream.",
        verify="tests/plugin/test_length_outcomes.py; " + _E2E,
    ),
    _subscribe(
        id="pred.ready",
        key="scheduler.get_init_info",
        why="The model is loaded: verify our seams, load the predictor.",
    ),
    _subscribe(
        id="pred.state",
        key="scheduler.get_internal_state",
        why="How much was predicted and refused, in /server_info and /pla/state.",
    ),
)
