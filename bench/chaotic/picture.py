"""Requests by how they ended, second by second, with the kills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.chaotic.faults import Done, Fault
from bench.replaying.client import Record
from bench.replaying.rough import GONE


def plot_chaos(records: Sequence[Record], faults: Sequence[Done], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    def outcome(record: Record) -> str:
        if record.error is None:
            return "completed"
        return "client gone" if record.error == GONE else "failed or aborted"

    counts = Counter((outcome(record), int(record.due_s)) for record in records)
    seconds = range(int(max(record.due_s for record in records)) + 1)
    figure, axes = plt.subplots(figsize=(9, 3.5), constrained_layout=True)
    base = [0] * len(seconds)
    for name, colour in (("completed", "#4477aa"), ("client gone", "#bbbbbb"), ("failed or aborted", "#cc3311")):
        height = [counts[name, second] for second in seconds]
        axes.bar(seconds, height, width=1.0, bottom=base, label=name, color=colour)
        base = [below + more for below, more in zip(base, height, strict=True)]
    for one in faults:
        if one.kind is Fault.KILL:
            axes.axvline(one.since_start_s, color="black", linestyle="--", linewidth=1)
            axes.annotate(f"SIGKILL {one.name}", (one.since_start_s, max(base)), fontsize=8, ha="left", va="top")
    axes.set_xlabel("arrival, s")
    axes.set_ylabel("requests a second")
    axes.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
