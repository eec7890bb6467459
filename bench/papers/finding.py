"""What one figure or table comes to: paper values beside ours, statements that must hold, points, and a picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CLOSE = 0.1  # values whose ratio is nearer to 1 than this need no explanation
Point = dict[str, float | int | str | bool | None]


@dataclasses.dataclass(frozen=True)
class Row:
    """One value of the paper beside ours.

    Attributes:
        what: the quantity, with its setting.
        paper: printed in the paper; None where it shows a curve without numbers.
        ours: of this run; None where it cannot be had here.
        unit: of both; "" for ratios.
        why: what explains a difference. Shown where the two differ by more than ``CLOSE``, or where one is missing.
    """

    what: str
    paper: float | None
    ours: float | None
    unit: str = ""
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's; None where there is no such number."""
        if self.paper is None or self.ours is None or not self.paper or not math.isfinite(self.ours):
            return None
        return self.ours / self.paper

    @property
    def differs(self) -> bool:
        return self.ratio is None or abs(self.ratio - 1) > CLOSE

    @property
    def sentence(self) -> str:
        return self.why if self.differs else ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement of the paper or the issue, and whether this run bears it out. ``seen`` are the figures behind it."""

    text: str
    holds: bool
    seen: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one script.

    Attributes:
        name: of the script, as on the command line.
        title: paper and figure.
        setting: fleet, profile, workload, in words.
        rows, claims: see above.
        points: everything the picture shows, one flat record a point; becomes the parquet file.
        keys: what the script adds to the JSON object of ``all``.
        picture: PNG.
    """

    name: str
    title: str
    setting: str
    rows: Sequence[Row]
    claims: Sequence[Claim]
    points: Sequence[Point]
    picture: bytes
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Everything but points and picture; numbers that are none are null."""
        rows = [{**dataclasses.asdict(row), "ratio": row.ratio, "sentence": row.sentence} for row in self.rows]
        return {
            "name": self.name,
            "title": self.title,
            "setting": self.setting,
            "rows": [{key: finite(value) for key, value in row.items()} for row in rows],
            "claims": [dataclasses.asdict(claim) for claim in self.claims],
            "keys": dict(self.keys),
        }


def finite(value: Any) -> Any:
    """``value``, or None for a float that is no finite number (JSON has none)."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None, unit: str = "") -> str:
    """For people: three significant digits."""
    if value is None:
        return "-"
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown} {unit}".rstrip()


def ordered(
    values: Mapping[str, float], *, falling: bool = True, slack: float = 0.0, show: Callable[[float], str] = number
) -> tuple[bool, str]:
    """Whether the values fall (or rise) in the order given, each by no more than ``slack`` (relative) the wrong way."""
    pairs = zip(list(values.values())[:-1], list(values.values())[1:], strict=True)
    sign = 1 if falling else -1
    holds = all(sign * (later - earlier) <= slack * abs(earlier) for earlier, later in pairs)
    return holds, ", ".join(f"{name} {show(value)}" for name, value in values.items())
