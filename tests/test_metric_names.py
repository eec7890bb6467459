"""Series have the names that the pages give them, whoever scrapes, and every query of the pages finds its series.

Engines: every series of ours, made in one process and shown by SGLang's own ``/metrics``, beside SGLang's series.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.scrapes import ACCEPT, documented_names, sample_names, stored_name

from pla_sglang.common.series import FORMER_NAMES

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
METRICS = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")

SCRAPE = """
import asyncio, json, sys
from types import SimpleNamespace

accepted = json.loads(sys.argv[1])

from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector
from sglang.srt.utils.common import add_prometheus_middleware

from pla_sglang.sim.emulate.metrics import DeviceSeries
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.plugin.engine.graphs.metrics import GraphSeries
from pla_sglang.plugin.engine.predicted_lengths import show_outcomes
from pla_sglang.plugin.engine.pools.series import Series as PoolSeries
from pla_sglang.fleet.stateless.transfer.series import LegSeries
from pla_sglang.plugin.engine.telemetry import Telemetry
from pla_sglang.common.series import LabelledSeries
from support.published import publish_arguments

class Touched(LabelledSeries):
    # each series has a sample
    def gauge(self, name, text, *extra):
        made = super().gauge(name, text, *extra)
        made.at(*["any"] * len(extra)).set(1)
        return made

    def total(self, name, text, *extra):
        made = super().total(name, text, *extra)
        made.at(*["any"] * len(extra)).inc()
        return made

    def histogram(self, name, text, buckets, *extra):
        made = super().histogram(name, text, buckets, *extra)
        made.at(*["any"] * len(extra)).observe(0.1)
        return made

labels = {"model_name": "tiny"}
series = Touched(labels)
Telemetry(DeviceClock(1.0)).attach(series)
GraphSeries(series)
PoolSeries(series)
LegSeries(series)
show_outcomes(series)
DeviceSeries(series, "h200", 1.0)
fields = {"prompt_tokens_buckets": None, "generation_tokens_buckets": None}
publish_arguments(**fields)
ttft = TokenizerMetricsCollector(SimpleNamespace(**fields), labels).histogram_time_to_first_token
ttft.labels(*["any"] * len(ttft._labelnames)).observe(0.1)

app = FastAPI()
add_prometheus_middleware(app)

async def scrape():
    async with AsyncClient(transport=ASGITransport(app), base_url="http://engine") as client:
        answers = {name: await client.get("/metrics", headers={"accept": text}) for name, text in accepted.items()}
    assert all(answer.status_code == 200 for answer in answers.values())
    return {name: answer.text for name, answer in answers.items()}

print(json.dumps(asyncio.run(scrape())))
"""


def documented_series() -> dict[str, str]:
    """Type by name, of an engine; the page has those of the router too."""
    named = documented_names(METRICS, "pla_")
    return {name: kind for name, kind in named.items() if not name.startswith("pla_router_")}


@functools.cache
def engine_scrapes() -> dict[str, set[str]]:
    """Names of samples by scraper. SGLang's metrics need a folder before the first import, so a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder, "PYTHONPATH": str(ROOT / "tests")}
        command = [sys.executable, "-c", SCRAPE, json.dumps(ACCEPT)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: sample_names(text) for name, text in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("scraper", ACCEPT)
def test_every_documented_series_of_an_engine_has_its_name(scraper: str) -> None:
    documented = documented_series()
    assert len(documented) > 25
    found = engine_scrapes()[scraper]
    assert {stored_name(name, kind) for name, kind in documented.items()} - found == set()


@pytest.mark.parametrize("scraper", ACCEPT)
def test_every_series_of_an_engine_is_documented(scraper: str) -> None:
    documented = documented_series()
    ours = {name for name in engine_scrapes()[scraper] if name.startswith("pla") and not name.endswith("_created")}
    unknown = {re.sub("_(bucket|count|sum)$", "", name) for name in ours} - documented.keys()
    unknown = {name for name in unknown if name not in {re.sub("_total$", "", one) for one in documented}}
    assert {name for name in unknown if name.removesuffix("_total") not in FORMER_NAMES} == set()


# -- queries -----------------------------------------------------------------------------------------------------------

QUERY_FUNCTIONS = {"histogram_quantile", "sum", "rate", "increase", "avg", "max", "min", "by", "without", "irate"} | {
    "avg_over_time",
    "last_over_time",
    "min_over_time",
}


def queries() -> list[tuple[str, str]]:
    """PromQL of the pages, and of dashboards and alert rules in examples/: where, and the expression."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```promql\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            found += [(page.name, line) for line in block.splitlines() if line.strip()]
    for path in (ROOT / "examples").rglob("*"):
        if path.is_symlink() or path.parent.name == "templates":  # of a chart: the same rules again; no YAML yet
            continue
        if path.suffix in (".yaml", ".yml", ".json"):
            for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
                found += [(path.name, query) for query in find_expressions(document)]
    return found


def find_expressions(document: Any) -> list[str]:
    """What stands under the key ``expr``, anywhere."""
    if isinstance(document, list):
        return [query for one in document for query in find_expressions(one)]
    if not isinstance(document, dict):
        return []
    inner = [query for value in document.values() for query in find_expressions(value)]
    return [document["expr"], *inner] if isinstance(document.get("expr"), str) else inner


def series_of(query: str) -> list[re.Pattern[str]]:
    """Patterns of the names that a query selects."""
    patterns = [re.compile(text) for text in re.findall(r'__name__=~"([^"]+)"', query)]
    bare = re.sub(r'\{[^}]*\}|"[^"]*"|\$\w+|\b(?:by|without|on) ?\([^)]*\)', " ", query)
    names = {name for name in re.findall(r"\b[a-zA-Z_][\w:]*", bare) if "_" in name} - QUERY_FUNCTIONS
    return patterns + [re.compile(re.escape(name)) for name in sorted(names)]


def test_there_are_queries() -> None:
    assert len(queries()) >= 3
    assert all(series_of(query) for _, query in queries())


@pytest.mark.parametrize("scraper", ["prometheus 2", "prometheus 3", "prometheus 3 legacy"])
@pytest.mark.parametrize(("where", "query"), queries())
def test_a_query_finds_its_series(where: str, query: str, scraper: str) -> None:
    stored = engine_scrapes()[scraper] | router_names()
    for pattern in series_of(query):
        assert any(pattern.fullmatch(name) for name in stored), (where, pattern.pattern)


def router_names() -> set[str]:
    """As documented; tests/fleet/router holds the router to them."""
    return {stored_name(name, kind) for name, kind in documented_names(METRICS, "pla_router_").items()}
