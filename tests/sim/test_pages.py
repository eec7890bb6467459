"""Pages: what stands on them, that they need nothing from outside, and that figures show what was run."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import importlib
import json
import math
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.traces import write_plain

from pla_sglang import simulate
from pla_sglang.common.errors import ConfigError
from pla_sglang.common.legend.colours import NOT_READY_COLOUR, POLICY_COLOURS, ROLE_COLOURS, STAGE_COLOURS
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult, run_experiment
from pla_sglang.sim.core.samples import GONE, ROLE_ORDER, FleetSamples
from pla_sglang.sim.metrics.goodput import Capacity, Slo
from pla_sglang.sim.planning.result import FleetRow, PlanResult, RateTried, SizeTried
from pla_sglang.sim.report import page as pages
from pla_sglang.sim.report.capacity_page import make_capacity_page
from pla_sglang.sim.report.columns import COLUMNS, JOB, SCALED
from pla_sglang.sim.report.figures import Line, count_nines, draw_lines, thin_distribution, tick_times
from pla_sglang.sim.report.page import Heading, Page, PageTable, Section, render_page
from pla_sglang.sim.report.plan_page import make_plan_page
from pla_sglang.sim.report.run_page import make_run_page
from pla_sglang.sim.report.slow_requests import MOST, find_slow_requests, split_time
from pla_sglang.sim.report.timelines import MOST_INSTANCES, bin_samples, draw_instances, draw_pools
from pla_sglang.sim.report.verdict import (
    Knee,
    describe_capacities,
    describe_knees,
    describe_runs,
    find_knees,
    list_short_spans,
)
from pla_sglang.sim.workload import Arrivals, Trace, generated_trace, length_model

SLO = Slo(0.3, 0.015)
POLICIES = ("arrow", "round-robin")
RATES = (20.0, 200.0)


@pytest.fixture(scope="module")
def trace() -> Trace:
    inputs, outputs = length_model("lmsys_first_turn_prompt"), length_model("sharegpt4_output")
    made = generated_trace(240, Arrivals(12.0, random.Random(3)), inputs, outputs)
    return dataclasses.replace(made, name="<b>t & co</b>.csv")


@pytest.fixture(scope="module")
def outcomes(trace: Trace) -> list[ExperimentResult]:
    return [
        run_experiment(Experiment(policy, SLO, instances=2, rate_per_s=rate), trace)
        for policy in POLICIES
        for rate in RATES
    ]


@pytest.fixture(scope="module")
def run_page(outcomes: list[ExperimentResult], trace: Trace) -> Page:
    return make_run_page(outcomes, trace, {"seed": 1}, target=0.9)


class Reader(HTMLParser):
    """Elements with their attributes, and the texts of some of them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in ("meta", "link", "br", "img"):
            self._open.append(tag if "id" not in attributes else f"{tag}#{attributes['id']}")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().partition("#")[0] == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def text(self, element: str) -> str:
        return "".join(self.texts.get(element, []))

    def having(self, name: str, value: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.elements if attributes.get(name) == value]


def figures_of(reader: Reader) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = json.loads(reader.text("script#figures"))
    return figures


def traces_of(page: Page) -> Iterator[dict[str, Any]]:
    for section in page.sections:
        if section.figure is not None:
            yield from section.figure["data"]


def test_a_page_is_one_file_that_needs_nothing_else(run_page: Page) -> None:
    html = render_page(run_page)
    reader = Reader(html)
    assert not [tag for tag, attributes in reader.elements if {"src", "href"} & set(attributes)]
    script = reader.text("script#plotly")
    assert "http" not in html.replace(script, "")
    assert "@import" not in html
    assert "url(" not in html
    assert b"plotly.js" in gzip.decompress(base64.b64decode(script))[:200]
    assert reader.having("name", "viewport")
    assert "prefers-color-scheme: dark" in html
    assert len(html) < 3_000_000


def test_texts_are_escaped(run_page: Page) -> None:
    html = render_page(run_page)
    assert "<b>t" not in html
    assert "Simulation of &lt;b&gt;t &amp; co&lt;/b&gt;.csv" in html
    section = Section("s", figure={"data": [{"name": "</script><i>"}], "layout": {}, "height": 10})
    reader = Reader(render_page(Page("t", {}, [], [section], {"x": "</pre>"})))
    assert figures_of(reader)[0]["data"][0]["name"] == "</script><i>"
    assert "i" not in {tag for tag, _ in reader.elements}


def test_the_box_says_what_was_run_and_what_came_of_it(run_page: Page) -> None:
    reader = Reader(render_page(run_page))
    facts = dict(zip(reader.texts["dt"], reader.texts["dd"], strict=False))
    assert facts["trace"].startswith("<b>t & co</b>.csv: 240 requests, ")
    assert facts["fleet"] == "2 instances"
    assert facts["profile"] == "h100-llama3.1-8b-tp1"
    assert facts["targets"] == "TTFT 0.3 s and TPOT 15 ms for 90 % of all requests"
    assert facts["policies"] == "arrow, round-robin"
    assert facts["rates"] == "20, 200 requests/s"
    assert len(run_page.verdict) == 1
    assert run_page.verdict[0] in reader.texts["p"]


def test_every_figure_has_its_place_caption_and_numbers(run_page: Page) -> None:
    reader = Reader(render_page(run_page))
    figures = figures_of(reader)
    places = reader.having("class", "figure")
    assert [int(place["data-figure"] or -1) for place in places] == list(range(len(figures)))
    assert all(place["aria-label"] for place in places)
    for section in run_page.sections:
        assert section.caption
    for figure in figures:
        assert figure["height"] > 100
        for drawn in figure["data"]:
            assert len(drawn["x"]) == (len(drawn["y"]) if drawn["type"] != "heatmap" else len(drawn["z"][0]))
            assert "<extra></extra>" in drawn["hovertemplate"]


def test_roles_and_policies_keep_their_colours(run_page: Page) -> None:
    names = {role.value: colour for role, colour in ROLE_COLOURS.items()} | {"not ready": NOT_READY_COLOUR}
    assert set(ROLE_COLOURS) == set(Role)
    assert len(set(names.values())) == len(names)
    assert not set(names.values()) & set(POLICY_COLOURS)
    seen: dict[str, set[str]] = {}
    for drawn in traces_of(run_page):
        if drawn["type"] == "heatmap" or "name" not in drawn:
            continue
        colour = drawn["marker"].get("color") if drawn["type"] == "bar" else drawn.get("line", {}).get("color")
        if colour is not None and drawn["name"] not in STAGE_COLOURS.keys() - names.keys():
            seen.setdefault(drawn["name"], set()).add(colour)
    assert {"prefill", "decode", "mixed", *POLICIES} <= set(seen)
    for name, colours in seen.items():
        assert len(colours) == 1, name
        if name in names:
            assert colours == {names[name]}


def test_tables_sort_and_explain_their_columns(run_page: Page, outcomes: list[ExperimentResult]) -> None:
    reader = Reader(render_page(run_page))
    heads = [attributes for tag, attributes in reader.elements if tag == "th"]
    assert len([tag for tag, _ in reader.elements if tag == "button"]) == len(heads)
    table = next(section.table for section in run_page.sections if section.heading == "All runs")
    assert table is not None
    assert len(table.rows) == len(outcomes)
    assert all(len(row) == len(table.headings) for row in table.rows)
    assert all(heading.legend for heading in table.headings)
    assert {heading.name for heading in table.headings} <= {column.name for column in COLUMNS}
    legends = {column.legend for column in COLUMNS if column.name not in ("refused", JOB, SCALED)}
    assert legends <= {attributes["title"] for attributes in heads}  # beside the mouse
    assert legends <= set(reader.texts["dd"])  # and for those without one


def test_decisions_stand_with_their_explanations(run_page: Page) -> None:
    section = next(one for one in run_page.sections if one.heading == "Decisions by reason: arrow")
    assert section.table is not None
    rows = {row[0]: row for row in section.table.rows}
    assert rows["arrow.prefill_slo"][3].startswith("The prefill instance with the least predicted delay")
    assert rows["pass.order"][3] == "The next request in the order of a baseline policy."
    assert section.figure is not None
    bars = section.figure["data"][0]
    assert dict(zip(bars["y"], bars["x"], strict=True))["arrow.prefill_slo"] == int(rows["arrow.prefill_slo"][1])
    assert all(text for text, _ in bars["customdata"])


def test_the_slowest_requests_have_all_their_time(outcomes: list[ExperimentResult], trace: Trace) -> None:
    run = outcomes[1]
    slow = find_slow_requests(run, trace)
    assert 0 < len(slow) <= MOST
    overs = [request.over for request in slow]
    assert overs == sorted(overs, reverse=True)
    assert overs[-1] > 1
    e2e_s = run.result.served.e2e_s()
    for request in slow:
        assert sum(request.stages_s.values()) == pytest.approx(e2e_s[request.row])
        assert request.stages_s["waiting"] + request.stages_s["prefill"] == pytest.approx(request.ttft_s)
        assert request.input_tokens == trace.input_tokens[request.row]
    stages_s = split_time(run)
    assert list(stages_s) == list(STAGE_COLOURS)
    assert min(column.min() for column in stages_s.values()) >= 0
    assert stages_s["waiting"].max() > 0
    assert stages_s["hand-off"].max() > 0  # arrow decodes elsewhere


def test_a_run_without_misses_says_so(trace: Trace) -> None:
    run = run_experiment(Experiment("round-robin", Slo(60.0, 1.0), instances=2, rate_per_s=4.0), trace)
    page = make_run_page([run], trace, {}, target=0.9)
    assert page.sections[-1].caption.endswith("Every request met both targets.")
    assert "by rate" not in " ".join(section.heading for section in page.sections)
    assert page.verdict == ["At 4 requests/s round-robin keeps 90 % of requests in target: round-robin 100 %."]
    render_page(page)


def test_requests_that_never_finish_are_the_slowest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,900000,10\n1,100,10\n")
    page = tmp_path / "r.html"
    flags = ["--trace", str(path), "--slo-ttft-ms", "100", "--slo-tpot-ms", "50", "--report", str(page)]
    assert simulate.main(flags) == 0
    reader = Reader(page.read_text())
    assert "refused" in reader.texts["td"]
    assert "nan" not in " ".join(reader.texts["td"])
    assert f"report: {page}" in capsys.readouterr().out.splitlines()[-2]


def table_of_knees() -> list[tuple[list[Knee], str]]:
    arrow, other = Knee("a", 30.0, 40.0), Knee("b", 20.0, 40.0)
    return [
        ([arrow, other], "a keeps 99 % of requests in target up to 30 requests/s; b up to 20."),
        ([other, arrow, Knee("c", None, 40.0)], "a keeps .* up to 30 requests/s; b up to 20; c at no rate."),
        ([arrow, Knee("b", 30.0, 40.0)], "a and b keep 99 % of requests in target up to 30 requests/s."),
        ([Knee("a", 40.0, 40.0), other], "up to 40 requests/s, the highest rate that was run; b up to 20."),
        ([Knee("a", None, 40.0)], "No policy keeps 99 % of requests in target, not even at the lowest rate"),
    ]


@pytest.mark.parametrize(("knees", "sentence"), table_of_knees())
def test_the_verdict_on_rates(knees: list[Knee], sentence: str) -> None:
    assert re.search(sentence, describe_knees(knees, 0.99))


def test_a_knee_has_no_failure_below_it(outcomes: list[ExperimentResult]) -> None:
    def at(rate: float, attainment: float) -> ExperimentResult:
        figures = dataclasses.replace(outcomes[0].figures, attainment=attainment)
        return dataclasses.replace(outcomes[0], rate_per_s=rate, figures=figures)

    runs = [at(30.0, 0.95), at(10.0, 0.99), at(20.0, 0.8)]
    assert find_knees(runs, 0.9) == [Knee("arrow", 10.0, 30.0)]
    assert find_knees(runs, 0.7) == [Knee("arrow", 30.0, 30.0)]
    assert find_knees(runs, 0.995) == [Knee("arrow", None, 30.0)]
    assert describe_runs([at(10.0, 0.5)], 0.9)[0].startswith("At 10 requests/s no policy keeps 90 % of requests")


def test_a_line_is_drawn_in_order_with_its_star() -> None:
    line = Line("a", [30.0, 10.0, 20.0], [0.5, 1.0, 0.9], 20.0)
    figure = draw_lines([line], {"a": "#000000"}, "requests/s", "share", target=0.9)
    drawn, star = figure["data"]
    assert (drawn["x"], drawn["y"]) == ([10.0, 20.0, 30.0], [1.0, 0.9, 0.5])
    assert (star["x"], star["y"]) == ([20.0], [0.9])
    assert figure["layout"]["shapes"][0]["y0"] == 0.9


def test_a_distribution_keeps_its_ends_when_it_is_thinned() -> None:
    values = np.concatenate([np.arange(5000.0), [math.nan]])
    at_s, shares = thin_distribution(values)
    assert len(at_s) < 300
    assert (at_s[0], at_s[-1], shares[-1]) == (0.0, 4999.0, 1.0)
    assert shares[0] == pytest.approx(1 / 5000)
    assert thin_distribution(np.array([math.nan]))[0].size == 0


def samples(count: int, instances: int = 2) -> FleetSamples:
    tokens = np.tile(np.arange(count, dtype=np.int64)[:, None], (1, instances))
    role = np.full((count, instances), ROLE_ORDER.index(Role.PREFILL), dtype=np.int8)
    role[count // 2 :, 0] = ROLE_ORDER.index(Role.DECODE)
    role[: count // 4, 1] = GONE
    return FleetSamples(np.arange(count) * 5.0, tokens, tokens * 2, tokens, role)


def test_timelines_are_means_over_bins_and_roles_have_spans() -> None:
    binned = bin_samples(samples(1000))
    assert len(binned.at_s) == 200
    assert (binned.width_s, binned.samples) == (25.0, 5)
    assert binned.queued_tokens[0].tolist() == [2.0, 2.0]
    assert binned.note == "Tokens are means over 25 s."
    bars = [drawn for drawn in draw_instances(binned)["data"] if drawn["type"] == "bar"]
    spans = {
        (bar["name"], y): (base, x) for bar in bars for y, base, x in zip(bar["y"], bar["base"], bar["x"], strict=True)
    }
    assert spans == {
        ("prefill", "i0"): (0.0, 2500.0),
        ("decode", "i0"): (2500.0, 2500.0),
        ("not ready", "i1"): (0.0, 1250.0),
        ("prefill", "i1"): (1250.0, 3750.0),
    }
    sizes = {drawn["name"]: drawn["y"] for drawn in draw_pools(binned)["data"] if "stackgroup" in drawn}
    assert (sizes["prefill"][0], sizes["prefill"][-1]) == (1.0, 1.0)
    assert (sizes["not ready"][0], sizes["decode"][-1]) == (1.0, 1.0)
    assert bin_samples(samples(8)).note == "Tokens are as sampled every 5 s."


def test_a_large_fleet_has_no_row_per_instance(outcomes: list[ExperimentResult], trace: Trace) -> None:
    result = dataclasses.replace(outcomes[0].result, samples=samples(8, MOST_INSTANCES + 1))
    page = make_run_page([dataclasses.replace(outcomes[0], result=result)], trace, {}, target=0.9)
    assert not [section for section in page.sections if section.heading.startswith("Instances over time")]


def test_the_page_of_a_search_for_rates(trace: Trace) -> None:
    found = {
        "arrow": Capacity(31.2, 31.8, ((10.0, 1.0), (40.0, 0.5), (31.2, 0.91), (31.8, 0.89)), 400.0),
        "star": Capacity(15.6, 16.0, ((10.0, 1.0), (15.6, 0.9), (16.0, 0.8)), 800.0),
        "dopd": Capacity(None, 10.0, ((10.0, 0.2),)),
    }
    page = make_capacity_page(found, trace, Experiment("arrow", SLO, instances=3), {}, target=0.9)
    assert page.verdict == [
        "arrow keeps 90 % of requests in target up to 31.2 requests/s (fails at 31.8).",
        "The others, and their share of that: star 15.6 (50%).",
        "Not even at the lowest rate: dopd.",
    ]
    assert page.facts["fleet"] == "3 instances"
    table = page.sections[1].table
    assert table is not None
    assert [list(row) for row in table.rows][2] == ["dopd", "-", "10", "1", "-"]
    stars = [drawn["x"] for drawn in traces_of(page) if drawn["name"].startswith("knee")]
    assert stars == [[31.2], [15.6]]
    Reader(render_page(page))
    at_end = describe_capacities({"a": Capacity(50.0, None, ((50.0, 1.0),))}, 0.9)
    assert at_end == ["a keeps 90 % of requests in target up to 50 requests/s (the highest rate of the search)."]
    assert describe_capacities({"a": found["dopd"]}, 0.9)[0].startswith("No policy keeps 90 %")


def test_steps_up_are_tenths_of_the_misses() -> None:
    assert [count_nines(share, 10**6) for share in (0.0, 0.9, 0.99)] == pytest.approx([0, 1, 2])
    assert count_nines(1.0, 50) == pytest.approx(2.0)  # less than one of fifty: half a request


def test_times_on_an_axis_have_their_units() -> None:
    ticks = tick_times([np.array([0.012, 3.0, np.nan])])
    assert ticks["ticktext"] == ["10 ms", "30 ms", "100 ms", "300 ms", "1 s", "3 s", "10 s", "30 s"]
    assert tick_times([np.array([np.nan])]) == {}


def test_a_search_at_a_high_rate_says_that_its_span_is_short() -> None:
    found = {"a": Capacity(50.0, 51.0, ((50.0, 1.0),), span_s=24.0), "b": Capacity(5.0, 6.0, (), span_s=400.0)}
    (sentence,) = list_short_spans(found)
    assert "a 24 s of arrivals" in sentence
    assert "b " not in sentence
    assert list_short_spans({"b": found["b"]}) == []


def fleet(name: str, **fields: Any) -> FleetRow:
    stock = name.startswith("least")
    return FleetRow(name, name, "fcfs", "p", 8192, mixed=False, stock=stock, gpus_per_instance=1, **fields)


def test_the_page_of_a_search_for_instances(trace: Trace) -> None:
    sizes = (SizeTried(4, 2, 0.8), SizeTried(5, 2, 0.91), SizeTried(5, 1, 0.5))
    rows = (
        fleet(
            "combined",
            instances=5,
            prefills=2,
            attainment=0.91,
            one_fewer=0.8,
            margin=0.1,
            sizes=sizes,
            instances_low=4,
            instances_high=7,
        ),
        fleet("least-tokens", problem="too slow"),
    )
    rows = (dataclasses.replace(rows[0], rates=(RateTried(30.0, 0.91), RateTried(33.0, 0.9))), rows[1])
    plan = PlanResult("t", 240, 30.0, 400.0, 3.0, 0.1, 0.9, 0.02, rows, ("a note",), missing=("star",))
    page = make_plan_page(plan, trace, {})
    assert page.verdict[0].startswith("combined keeps 0.9 at 30 requests/s with 5 instances (2+3)")
    assert page.verdict[1] == "Not finished: star."
    assert not page.unsure
    bars = page.sections[0].figure
    assert bars is not None
    assert (bars["data"][0]["y"], bars["data"][0]["x"], bars["data"][0]["customdata"]) == (["A"], [5], ["4 to 7"])
    assert (bars["data"][0]["error_x"]["arrayminus"], bars["data"][0]["error_x"]["array"]) == ([1], [2])
    table = page.sections[1].table
    assert table is not None
    assert (table.marked, list(table.rows[0][:5])) == (0, ["A combined", "5 (2+3)", "4 to 7", "5", "6"])
    assert list(table.rows[1][:3]) == ["B least-tokens", "none", "-"]
    assert all(len(row) == len(table.headings) for row in table.rows)
    notes = page.sections[2].table
    assert notes is not None
    assert [note for (note,) in notes.rows] == ["a note", "least-tokens: too slow"]
    lines = [drawn for drawn in traces_of(page) if drawn.get("name") == "A"]
    nines = [count_nines(share, 240) for share in (0.8, 0.91, 0.91, 0.9)]
    assert [line["x"] for line in lines] == [[4.0, 5.0], [30.0, 33.0]]
    assert [y for line in lines for y in line["y"]] == pytest.approx(nines, rel=1e-3)
    assert [drawn["x"] for drawn in traces_of(page) if drawn.get("name", "").startswith("knee")] == [[5]]
    Reader(render_page(page))


def test_a_page_without_figures_has_no_script_of_plotly() -> None:
    table = PageTable([Heading("a", "what it is")], [["1"]])
    html = render_page(Page("t", {"x": "1"}, ["fine."], [Section("s", table=table)], {}))
    assert len(html) < 20_000


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(ConfigError, match=r"--report needs jinja2, .* pip install 'pla-sglang\[report\]'"):
        pages.require_libraries("--report")


def test_find_capacity_writes_its_page(tmp_path: Path, trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    path, page, out = tmp_path / "t.csv", tmp_path / "r.html", tmp_path / "out"
    write_plain(trace, path)
    flags = ["--trace", str(path), "--slo-ttft-ms", "300", "--slo-tpot-ms", "15", "--instances", "2"]
    more = ["--low", "5", "--high", "200", "--tolerance", "0.5", "--report", str(page), "--out", str(out)]
    assert simulate.main(["find-capacity", *flags, "--policy", "round-robin", *more]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:-1] == [f"report: {page}", f"results: {out}"]
    reader = Reader(page.read_text())
    assert reader.text("h1") == "Highest rates for t.csv"
    assert json.loads((out / "summary.json").read_text())["capacity"] == json.loads(printed[-1])["capacity"]
    assert (out / "report.html").read_text() == page.read_text()
