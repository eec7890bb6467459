"""What the device did while an engine served: from a few seconds that SGLang's own profiler records.

Busy is what a kernel, copy or memset covers; idle is the rest. ``busy_us_a_pass`` of two arms says whether one of them
computes more, ``idle_us_a_pass`` whether it lets the device wait for its host.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pla_sglang.testing.server import Server, ServerError

WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what the device does
LAUNCHES = ("cuda_runtime", "cuda_driver")
SHOWN = 12  # kernels, calls
DELAY_S = 0.5
WRITTEN_WITHIN_S = 30.0  # after the last recorded pass


def describe_trace(trace: dict[str, Any], passes: int) -> dict[str, Any]:
    """Times of a recorded trace with so many passes; ``kernels`` 0 where the device did nothing."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    work = sorted((event["ts"], event["dur"], event["name"]) for event in events if event.get("cat") in WORK)
    if not work:
        return {"kernels": 0, "passes": passes}
    busy_us, end_us, gaps_us = 0.0, work[0][0], []
    kernels_us: Counter[str] = Counter()
    for begin_us, taken_us, name in work:
        kernels_us[name[:100]] += taken_us
        if begin_us > end_us:
            gaps_us.append(begin_us - end_us)
        busy_us += max(0.0, begin_us + taken_us - max(begin_us, end_us))
        end_us = max(end_us, begin_us + taken_us)
    calls = Counter(event["name"] for event in events if event.get("cat") in LAUNCHES)
    span_us = end_us - work[0][0]
    return {
        "passes": passes,
        "kernels": len(work),
        "span_us_a_pass": round(span_us / passes, 1),
        "busy_us_a_pass": round(busy_us / passes, 1),
        "idle_us_a_pass": round((span_us - busy_us) / passes, 1),
        "gaps_above_200_us": sum(gap_us > 200 for gap_us in gaps_us),
        "us_in_gaps_above_200_us_a_pass": round(sum(gap_us for gap_us in gaps_us if gap_us > 200) / passes, 1),
        "calls_a_pass": {name: round(count / passes, 1) for name, count in calls.most_common(SHOWN)},
        "kernel_us_a_pass": {name: round(us / passes, 1) for name, us in kernels_us.most_common(SHOWN)},
    }


class Recording:
    """Records so many passes of a server from ``DELAY_S`` on, beside the load that the caller sends in the ``with``."""

    def __init__(self, server: Server, device: str, *, passes: int) -> None:
        self.found: dict[str, Any] = {"failed": "no trace was written"}
        self._server, self._device, self._passes = server, device, passes
        self._thread = threading.Thread(target=self._record)

    def __enter__(self) -> Recording:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.join()

    def _record(self) -> None:
        time.sleep(DELAY_S)
        activity = "GPU" if self._device == "cuda" else "CPU"
        with tempfile.TemporaryDirectory() as folder:
            body = {"output_dir": folder, "num_steps": self._passes, "activities": [activity]}
            try:
                self._server.post("/start_profile", body | {"with_stack": False, "record_shapes": False})
            except ServerError as error:
                self.found = {"failed": str(error)[:500]}
                return
            end_s = time.monotonic() + WRITTEN_WITHIN_S
            while "failed" in self.found and time.monotonic() < end_s:
                time.sleep(0.3)
                for path in Path(folder).rglob("*.json*"):
                    self._read(path)

    def _read(self, path: Path) -> None:
        """A file that is still being written is read again later."""
        try:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            self.found = describe_trace(json.loads(data), self._passes)
        except (OSError, EOFError, ValueError):
            return
