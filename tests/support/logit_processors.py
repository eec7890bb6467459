"""A custom logit processor. Forked servers find this module, so a request names it as SGLang's clients name theirs."""

from __future__ import annotations

import json
from typing import Any

import dill


class FewerRepeats:
    """Reads the answer so far: one token more or less of it changes the next."""

    def __call__(self, logits: Any, params: list[dict[str, Any]]) -> Any:
        for row, own in enumerate(params):
            for token in own["__req__"].output_ids[-6:]:
                logits[row, token] -= 1.5
        return logits


def fewer_repeats() -> str:
    """As ``custom_logit_processor`` of a request."""
    return json.dumps({"callable": dill.dumps(FewerRepeats).hex()})
