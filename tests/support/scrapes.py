"""What scrapers ask for at /metrics, and the names that they then store."""

from __future__ import annotations

import re

_OPEN = "application/openmetrics-text;version=1.0.0"
_REST = "application/openmetrics-text;version=0.0.1;q=0.4"
ACCEPT = {
    "prometheus 2": f"{_OPEN};q=0.5,{_REST},text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "prometheus 3": f"{_OPEN};escaping=allow-utf-8;q=0.5,{_REST},"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    "prometheus 3 legacy": f"{_OPEN};escaping=underscores;q=0.5,{_REST},"
    "text/plain;version=1.0.0;escaping=underscores;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    "prometheus text": "text/plain;version=0.0.4",
    "openmetrics": "application/openmetrics-text; version=1.0.0; charset=utf-8",
    "any": "*/*",
}
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*|\{\"[^\"]*\")", re.M)


def sample_names(text: str) -> set[str]:
    """Names of the samples of a scrape; those in quotes, as for names outside the old alphabet, without them."""
    return {name.removeprefix("{").strip('"') for name in _SAMPLE.findall(text)}


def documented_names(page: str, prefix: str) -> dict[str, str]:
    """Name -> type, from the rows ``| `NAME`, ... | type | ...`` of a page's tables."""
    rows = re.findall(rf"^\| ((?:`{prefix}[a-z_]+`(?:, )?)+) \| (\w+) \|", page, re.M)
    return {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}


def stored_name(name: str, kind: str) -> str:
    """One of the samples of a documented series: a histogram has none under its own name."""
    return f"{name}_bucket" if kind == "histogram" else name
