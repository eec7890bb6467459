"""The table of every place where pla_sglang enters SGLang. ``CATALOGUE.md`` is made from it.

``targets`` has the host's functions, here and in the next version, the other modules who subscribes to them.
Subscribers of one target are called in the order in which they stand here: the emulated device first, load reports
last.
"""

from __future__ import annotations

from pla_patches.seam import Group, Seam, Signature
from pla_patches.table.cli import CLI
from pla_patches.table.graphs import GRAPHS
from pla_patches.table.hop_front import HOP_FRONT
from pla_patches.table.platform import PLATFORM
from pla_patches.table.pools import POOLS
from pla_patches.table.queues import QUEUES
from pla_patches.table.reports import REPORTS
from pla_patches.table.running import RUNNING
from pla_patches.table.scheduler import SCHEDULER
from pla_patches.table.stateless import STATELESS
from pla_patches.table.targets import NEXT_HOST, PARAMETERS

SUBSCRIBERS = (*CLI, *PLATFORM, *GRAPHS, *SCHEDULER, *REPORTS, *POOLS, *RUNNING, *STATELESS, *QUEUES, *HOP_FRONT)


def table() -> tuple[Seam, ...]:
    """All seams, one for each target."""
    return tuple(
        Seam(
            target=target,
            parameters=parameters,
            next_host=NEXT_HOST.get(target, Signature(target, parameters)),
            subscribers=tuple(subscriber for subscriber in SUBSCRIBERS if subscriber.target == target),
        )
        for target, parameters in PARAMETERS.items()
    )


def seams_of(*groups: Group) -> tuple[Seam, ...]:
    """Seams that ``groups`` need, each with the subscribers of these groups only."""
    narrowed = (seam.narrow_to(groups) for seam in table())
    return tuple(seam for seam in narrowed if seam.subscribers)
