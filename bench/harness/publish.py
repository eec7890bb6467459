"""Write the tables of docs/ and bench/lab/docs/ from the JSON files that benches left behind.

    python -m bench publish hol=bench_out/hol.json overload=bench_out/overload.json ...

NAME is a pair of markers on one page, ``<!-- results:NAME -->`` and ``<!-- /results:NAME -->``; what stands between
them is replaced. ``hol`` fills the headline as well. The JSON files are copied to
``bench/results/FOLDER/NAME.json``, those of the lab to ``bench/lab/results``, pictures beside them too, so that every
figure on a page can be looked up.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

from bench.harness.bench import ROOT, Bench, MakePage
from bench.harness.catalogue import BENCHES
from pla_sglang.common.errors import ConfigError
from pla_sglang.common.reading import read_json

FOLDERS = ("docs", "bench/lab/docs")  # of the pages
# What a bench raises that makes a table of something else than a whole result of its own.
MISFITS = (KeyError, TypeError, AttributeError, ValueError, IndexError)
HEADLINE = "headline"  # the marker in docs/results.md, filled from the same file as ``hol``


def all_pages() -> dict[str, tuple[Bench, MakePage]]:
    """Every bench's tables by the name of their result. Imports all benches."""
    return {name: (bench, make) for bench in BENCHES.values() for name, make in bench.pages.items()}


def replace(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the markers of ``name``. Raises ValueError where there is not one pair."""
    start, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
    filled, count = re.subn(
        re.escape(start) + r".*?" + re.escape(end), lambda _: f"{start}\n\n{text}\n\n{end}", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{start} ... {end} has to stand once, found {count} times")
    return filled


def page_of(name: str, root: Path) -> Path:
    """README.md or the page of ours or of the lab with the marker. Raises ValueError where there is not exactly one."""
    mark = f"<!-- results:{name} -->"
    known = [root / "README.md", *(page for where in FOLDERS for page in sorted((root / where).rglob("*.md")))]
    pages = [page for page in known if page.is_file() and mark in page.read_text("utf-8")]
    if len(pages) != 1:
        raise ValueError(f"{mark} has to stand on one page, found {len(pages)}")
    return pages[0]


def fill_page(name: str, text: str, root: Path = ROOT) -> None:
    """Put ``text`` between the markers of ``name``, wherever they stand."""
    page = page_of(name, root)
    page.write_text(replace(page.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def publish(name: str, source: Path, root: Path, pages: dict[str, tuple[Bench, MakePage]]) -> None:
    result = read_json(source, ConfigError)
    bench, make = pages[name]
    try:
        text = make(result)
    except MISFITS as error:
        raise ConfigError(f"{source} is no result of {name}: {error!r}") from None
    fill_page(name, text, root)
    if name == "hol":
        fill_page(HEADLINE, pages[HEADLINE][1](result), root)
    measured_on = "cpu" if result.get("device", "cpu") == "cpu" else "gpu"
    folder = bench.results or ("emulated" if "profile" in result else measured_on)
    kept = root / bench.results_folder / ("emulated" if "time_scale" in result else folder)
    kept.mkdir(parents=True, exist_ok=True)
    (kept / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for ending in (".png", "-queue.png"):
        picture, copy = source.with_name(f"{source.stem}{ending}"), kept / f"{name}{ending}"
        if picture.exists() and picture.resolve() != copy.resolve():
            shutil.copy(picture, copy)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", metavar="NAME=JSON", help="a table, and the result of its bench")


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for a name or a file that is not there."""
    pages = all_pages()
    pairs = [given.partition("=")[::2] for given in args.results]
    for name, path in pairs:
        if name not in pages or name == HEADLINE or not Path(path).is_file():
            names = ", ".join(sorted(pages.keys() - {HEADLINE}))
            raise ConfigError(f"{name}={path} is not NAME=FILE with a name of: {names}")
    for name, path in pairs:
        publish(name, Path(path), ROOT, pages)
        print(f"{name}: {path}")
    return 0
