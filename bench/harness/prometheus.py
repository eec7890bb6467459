"""A real Prometheus on this machine, and the dashboard and alert rules of examples/ as it is asked about them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.harness.bench import ROOT
from bench.harness.servers import is_healthy, running_child, wait_until_ready
from bench.harness.steps import Row
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.testing.server import ServerError, fetch

DASHBOARD, RULES = ROOT / "examples/grafana/dashboard.json", ROOT / "examples/grafana/alerts.yaml"
START_S, STOP_S = 30.0, 10.0
SCRAPE_S = 1  # between two scrapes, and between two evaluations of the rules
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = r"(\d+)(ms|s|m|h|d)"
_WINDOW = re.compile(rf"(?<=[\[:])({_SPAN})(?=[\]:])")  # in brackets; of a subquery both
_COMPARED = re.compile(r"\s(==|>=|>)\s")


# -- the files of examples/ --------------------------------------------------------------------------------------------


def read_rules() -> list[Row]:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def shorten_rules(factor: float) -> Row:
    """The shipped file with every ``for`` and every window of its expressions divided by ``factor``; bounds stay.

    Of a rule that has several conditions each is a rule of its own besides (``list_conditions``).
    """
    document: Row = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    document["groups"].append({"name": "conditions", "rules": list_conditions()})
    for group in document["groups"]:
        for rule in group["rules"]:
            rule["for"] = shorten_span(rule["for"], factor)
            rule["expr"] = shorten_windows(rule["expr"], factor)
    return document


def list_conditions() -> list[Row]:
    """Each part of a rule that fires by itself, as ``RULE.1``, ``RULE.2``; nothing of rules that have one alone."""
    found = []
    for rule in read_rules():
        parts = split_conditions(rule["expr"])
        for number, part in enumerate(parts, 1) if len(parts) > 1 else ():
            found.append(rule | {"alert": f"{rule['alert']}.{number}", "expr": part})
    return found


def split_conditions(expression: str) -> list[str]:
    """A line that begins with ``or`` begins a condition; an ``or`` within one stands elsewhere."""
    return [" ".join(part.split()) for part in re.split(r"^or\b", expression, flags=re.MULTILINE)]


def shorten_windows(expression: str, factor: float) -> str:
    return _WINDOW.sub(lambda found: shorten_span(found[1], factor), expression)


def shorten_span(text: str, factor: float) -> str:
    """``5m`` by 60 is ``5000ms``. Raises ValueError for another form."""
    found = re.fullmatch(_SPAN, text)
    if found is None:
        raise ValueError(f"{text!r} is no span of time such as 5m")
    return f"{round(1000 * int(found[1]) * UNITS_S[found[2]] / factor)}ms"


def show_values(expression: str) -> str:
    """An alert's expression has a value only where it fires; this one says 0 where it does not."""
    return _COMPARED.sub(r" \1 bool ", expression)


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """One that somebody's screen or rule asks. ``where``: the panel and its legend, or the alert."""

    where: str
    expression: str


def list_queries(window: str, factor: float = 1.0) -> list[Query]:
    """Of all panels, with ``window`` for Grafana's rate interval and all of every variable, and of all rules with
    windows shortened by ``factor``. Longer windows of panels stay."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = [
        Query(f"{panel['title']}: {target['legendFormat']}", fill_variables(target["expr"], window))
        for panel in panels
        for target in panel.get("targets", ())
    ]
    return asked + [Query(rule["alert"], show_values(shorten_windows(rule["expr"], factor))) for rule in read_rules()]


def fill_variables(expression: str, window: str) -> str:
    return re.sub(r"\$[a-z]+", ".*", expression.replace("$__rate_interval", window))


# -- the server --------------------------------------------------------------------------------------------------------


class Prometheus:
    """One that runs at ``url``. All methods raise ServerError where it does not answer, or refuses a query."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, expression: str) -> list[Row]:
        """Samples of this moment; those without a number are left out."""
        query = urllib.parse.urlencode({"query": expression})
        found = fetch(f"{self.url}/api/v1/query?{query}")["data"]["result"]
        return [row for row in found if row["value"][1] != "NaN"]

    def list_empty(self, queries: Sequence[Query]) -> list[Query]:
        """Those that have no sample now."""
        return [query for query in queries if not self.ask(query.expression)]

    def list_firing(self) -> set[str]:
        alerts = fetch(f"{self.url}/api/v1/alerts")["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def list_broken_rules(self) -> list[str]:
        """Rules that it cannot evaluate, and why."""
        groups = fetch(f"{self.url}/api/v1/rules")["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule["health"] == "err"]


def require_program(program: str) -> None:
    """Raises ConfigError where it is not there."""
    if shutil.which(program) is None:
        text = f"{program!r} is not installed; allowed: the program of Prometheus (Debian: apt install prometheus)"
        raise ConfigError(f"--prometheus {text}")


@contextlib.contextmanager
def running_prometheus(
    program: str, targets: Mapping[str, Sequence[str]], rules: Row, folder: Path
) -> Iterator[Prometheus]:
    """``program``: name or path; ``targets``: HOST:PORT of what it scrapes, by job.

    Raises ConfigError where it is not there or does not get ready.
    """
    require_program(program)
    folder.mkdir(parents=True, exist_ok=True)
    config, rule_file, log = (folder / f"prometheus.{ending}" for ending in ("json", "rules.json", "log"))
    rule_file.write_text(json.dumps(rules), encoding="utf-8")
    config.write_text(json.dumps(describe_config(targets, rule_file)), encoding="utf-8")
    shutil.rmtree(folder / "prometheus", ignore_errors=True)  # what an earlier run has scraped
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'prometheus'}"]
    command += [f"--web.listen-address={address}", "--log.level=warn"]
    with running_child(command, log, stop_s=STOP_S) as process:
        url = f"http://{address}"
        try:
            wait_until_ready(
                process, lambda: is_healthy(url, "/-/ready"), log, name=f"--prometheus {program}", limit_s=START_S
            )
        except ServerError as error:
            raise ConfigError(" ".join(str(error).split("\n"))) from None
        yield Prometheus(url)


def describe_config(targets: Mapping[str, Sequence[str]], rule_file: Path) -> dict[str, Any]:
    """JSON, which is YAML too."""
    every = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    jobs = [{"job_name": job, "static_configs": [{"targets": list(of)}]} for job, of in targets.items()]
    return {"global": every, "rule_files": [str(rule_file.resolve())], "scrape_configs": jobs}
