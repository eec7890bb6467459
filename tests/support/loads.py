"""Load figures written by place."""

from __future__ import annotations

import dataclasses

from pla_sglang.policy.interface.fleet import LoadAmounts

FIELDS = tuple(field.name for field in dataclasses.fields(LoadAmounts))


def load_amounts(*values: int, **named: int) -> LoadAmounts:
    """The sums in the order of their fields: prefills with tokens, attention and history, then decodes."""
    return LoadAmounts(**dict(zip(FIELDS, values, strict=False)), **named)
