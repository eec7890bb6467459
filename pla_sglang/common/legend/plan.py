"""What planners look at, as the axes of pages name it. ``policy/common/plan_log.py`` has the figures."""

from __future__ import annotations

from collections.abc import Mapping

PLAN_FIGURES: Mapping[str, str] = {
    "requests_per_s": "requests/s",
    "requests": "requests at once",
    "input_tokens": "prompt, tokens",
    "output_tokens": "answer, tokens",
    "prefill_utilisation": "backlog / target",
    "decode_utilisation": "KV in use, share",
}
