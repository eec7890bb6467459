"""The table of every place where pla_sglang enters SGLang. ``CATALOGUE.md`` is made from it.

The modules here say who subscribes to which key; where a host has it stands in ``pla_patches.hosts``.
Subscribers of one key are called in the order in which they stand here: the emulated device first, load reports last.
"""

from __future__ import annotations

from pla_patches import host
from pla_patches.hosts import Host
from pla_patches.seam import Group, Seam
from pla_patches.table.cli import CLI
from pla_patches.table.graphs import GRAPHS
from pla_patches.table.migration_http import MIGRATION_HTTP
from pla_patches.table.platform import PLATFORM
from pla_patches.table.pools import POOLS
from pla_patches.table.predictor import PREDICTOR
from pla_patches.table.queues import QUEUES
from pla_patches.table.reports import REPORTS
from pla_patches.table.running import RUNNING
from pla_patches.table.scheduler import SCHEDULER
from pla_patches.table.stateless import STATELESS

SUBSCRIBERS = (
    *CLI,
    *PLATFORM,
    *GRAPHS,
    *SCHEDULER,
    *PREDICTOR,
    *REPORTS,
    *POOLS,
    *RUNNING,
    *STATELESS,
    *QUEUES,
    *MIGRATION_HTTP,
)


def table(known: Host | None = None) -> tuple[Seam, ...]:
    """All seams on a host, one for each target. ``known``: by default what is recorded for the installed one."""
    recorded = known or host.recorded()
    seams = (
        Seam(
            key=key,
            target=there.target,
            parameters=there.parameters,
            subscribers=tuple(one for one in SUBSCRIBERS if one.key == key and one.id not in recorded.absent),
        )
        for key, there in recorded.targets.items()
    )
    return tuple(seam for seam in seams if seam.subscribers)


def seams_of(*groups: Group) -> tuple[Seam, ...]:
    """Seams that ``groups`` need, each with the subscribers of these groups only."""
    narrowed = (seam.narrow_to(groups) for seam in table())
    return tuple(seam for seam in narrowed if seam.subscribers)
