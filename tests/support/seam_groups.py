"""Groups of seams by name, as processes report what they have installed."""

from __future__ import annotations

from pla_patches.seam import Group
from pla_patches.table import seams_of


def names_of(*groups: Group) -> set[str]:
    """Of those that the installed host has a seam for: what it does by itself, it has none for."""
    return {group.value for group in groups if seams_of(group)}
