"""One arm of ``graphs/test_real_scheduler.py``, in a process of its own: ``support.graph_arm MODEL OPTIONS``.

OPTIONS: fields of ``PlaConfig`` as JSON, and ``pays``: what the comparison of ``auto`` is to say, as no graph pays on a
CPU; it then takes place as on a GPU. The last line it prints is the answers and the state of the graphs.
"""

from __future__ import annotations

import json
import sys

from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.hooks import graphs
from pla_sglang.testing.steps import Stepper

# Single requests, mixed lengths, cached prefixes, more than one pass, one that is too long; and three shapes of 128
# tokens, each asked for twice, so that an idle moment captures them.
BATCHES = [
    *([5], [1], [8, 17, 30, 2], [20] * 12, [40, 1, 2, 3, 70], [300, 7], [9] * 3, [200, 5]),
    *([[16] * 8, [30] * 4, [60] * 2] * 2),
]
TURNS, NEW_TOKENS, IDLE_MOMENTS = 4, 4, 8


def force_comparison(pays: bool) -> None:
    from pla_sglang.plugin.engine.graphs.compare import HostTimes

    PlaConfig.for_device = lambda self, device: self  # type: ignore[method-assign]
    HostTimes.pays = property(lambda self: pays)  # type: ignore[method-assign, assignment]


def main(model: str, options: str) -> None:
    flags = ["--model-path", model, "--device", "cpu", "--chunked-prefill-size", "512", "--log-level", "error"]
    fields = json.loads(options)
    if (pays := fields.pop("pays", None)) is not None:
        force_comparison(pays)
    stepper = Stepper(flags, PlaConfig(**fields))
    prompts = [[stepper.tokens(length) for length in lengths] for lengths in BATCHES]
    answers = []
    for _ in range(TURNS):
        answers += [stepper.answers(batch, NEW_TOKENS) for batch in prompts]
        for _ in range(IDLE_MOMENTS):
            stepper.idle()
        # The next turn of everybody: a history in the prefix cache, partly computed in graphs, and a few new tokens.
        prompts = [[prompt + stepper.tokens(3 + len(prompt) % 7) for prompt in batch] for batch in prompts]
    print(json.dumps({"answers": answers, "graphs": stepper.graphs["ours"], "refused": graphs._refused}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
