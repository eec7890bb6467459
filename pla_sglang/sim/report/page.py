"""A page as data, and its one HTML file: facts, a verdict, sections with figures and tables. It needs no network.

plotly's script is the largest part. It is kept compressed (1.9 of 4.8 MB) and unpacked by the browser; the wheel brings
no smaller one. Figures are plain dictionaries in plotly's form, so the Python side of plotly is not needed.
"""

from __future__ import annotations

import base64
import functools
import gzip
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.common.legend.pages import encode_json, read_base_style

LIBRARIES = ("jinja2", "plotly")
Figure = Mapping[str, Any]  # data, layout: as plotly has them; height: pixels


@dataclass(frozen=True, slots=True)
class Heading:
    """The heading of a column. ``legend``: what it holds. ``is_text``: sentences, which may be folded."""

    name: str
    legend: str = ""
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class PageTable:
    """Cells are texts; numbers in front of them decide the order when a reader sorts. ``marked``: the winner's row."""

    headings: Sequence[Heading]
    rows: Sequence[Sequence[str]]
    marked: int | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """``caption`` says what is drawn. ``folded``: the reader opens it. ``picture``: a data URI."""

    heading: str
    caption: str = ""
    figure: Figure | None = None
    table: PageTable | None = None
    folded: bool = False
    picture: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """``facts``: what was run, first in the box at the top; then ``verdict``, sentences of the result.

    ``unsure``: what it says lies within the error.
    """

    title: str
    facts: Mapping[str, str]
    verdict: Sequence[str]
    sections: Sequence[Section]
    setting: Mapping[str, Any]
    unsure: bool = False


def require_libraries(flag: str) -> None:
    """Before the work that a page is to show. Raises ConfigError."""
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            raise ConfigError(
                f"{flag} needs {name}, which is not installed; run pip install 'pla-sglang[report]'"
            ) from None


def render_page(page: Page) -> str:
    """One HTML file."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("pla_sglang.sim.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = [section.figure for section in page.sections if section.figure is not None]
    return environment.get_template("page.html.j2").render(
        page=page,
        style=Markup(read_base_style() + _read_template("page.css")),
        script=Markup(_read_template("page.js")),
        figures=Markup(encode_json(figures)),
        plotly=Markup(_packed_plotly() if figures else ""),
        setting=json.dumps(page.setting, indent=1),
    )


def _read_template(name: str) -> str:
    return resources.files("pla_sglang.sim.report").joinpath("template", name).read_text(encoding="utf-8")


@functools.cache
def _packed_plotly() -> str:
    """plotly's script, gzip in base64."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
