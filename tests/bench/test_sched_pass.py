"""The bench of a scheduling pass, on the installed SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_passes_of_a_real_scheduler_are_timed() -> None:
    """In a process of its own: it builds a scheduler, and keeps decodes out of its passes from then on."""
    flags = ["--waiting", "20", "--passes", "3", "--riders", "2", "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "bench", "sched_pass", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert (result["waiting"], result["passes"]) == (20, 3)
    assert result["added_p50_ms"] > 0
    assert result["stock_p50_ms"] > 0
    assert sum(result["decisions"].values()) > 3
