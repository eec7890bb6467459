"""Seams of running requests that may sit out passes: what the host would advance once a pass follows from their tokens.

Not of a stock engine: there the answer depends on what else runs, as ever.
"""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, subscribe

_E2E = "tests/e2e/test_same_answers.py"

_subscribe = functools.partial(subscribe, module="pla_sglang.plugin.engine.hooks.running", group=Group.RUNNING)

RUNNING = (
    _subscribe(
        id="run.penalties",
        key="batch.cumulate_penalty_output_tokens",
        hook=Hook.AROUND,
        handler="around_cumulate_penalties",
        why=(
            "The token that is counted before a step follows from how much KV is committed: the host counts the last "
            "one that it knows, which depends on what else runs, and on where the request began."
        ),
        verify="tests/plugin/test_penalties.py; " + _E2E,
    ),
    _subscribe(
        id="run.penalties_again",
        key="batch.prepare_for_extend",
        why=(
            "Penalties of a request that is prefilled with a part of its answer: the host begins at nothing. And their "
            "order, which is by chance in each process where there are several."
        ),
        verify="tests/plugin/test_penalties.py; "
        + _E2E
        + "; tests/e2e/test_stateless_pair.py: an answer computed again",
    ),
    _subscribe(
        id="run.processors",
        key="sampler.apply_custom_logit_processor",
        hook=Hook.AROUND,
        why=(
            "A custom logit processor reads the answer so far, which with the overlap schedule has a token more where "
            "a prefill of others, or a grammar of others, came between."
        ),
        verify="tests/plugin/test_logit_processors.py; " + _E2E,
    ),
)
