"""Each script at its smallest size, and the frame around them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import bench.lab.papers.__main__ as papers
from bench.harness.bench import ROOT
from bench.harness.catalogue import BENCHES
from bench.harness.publish import page_of, replace
from bench.harness.talks import Dataset
from bench.lab.papers.__main__ import FIGURES, named, recompute, script
from bench.lab.papers.context import Context, traces_facts
from bench.lab.papers.finding import Claim, Finding, Row, ordered, section, sections, summary, write
from bench.lab.papers.points import read_points
from bench.lab.papers.prefill_chats import conversations
from bench.lab.papers.stand_ins import SHAPES
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.demo import demo_model_path

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("name", FIGURES)
def test_each_script_runs(name: str, tmp_path: Path) -> None:
    context = Context(size=0)
    finding = script(name)(context)
    assert finding.name == name
    assert finding.rows
    assert finding.picture().startswith(PNG)
    for row in finding.rows:
        assert row.paper is not None or row.ours is not None, row.what
        assert row.why, f"{row.what}: no sentence for where it differs"
    about = {"size": "test", "seed": context.seed}
    write(finding, tmp_path, about, context.points)
    record = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert record["rows"][0]["what"] == finding.rows[0].what
    again = recompute(name, read_points(tmp_path / f"{name}.parquet"), about)
    assert again.as_json() == finding.as_json(), "the points do not give the result"
    assert again.picture() == finding.picture()
    page = section(record)
    assert all(f"| {row.what} |" in page for row in finding.rows if row.paper is not None)


def test_the_docs_hold_the_results() -> None:
    page = page_of("papers", ROOT).read_text(encoding="utf-8")
    kept = ROOT / "bench" / "lab" / "results" / "papers"
    assert replace(page, "papers", sections(kept, list(FIGURES))) == page
    assert replace(page, "papers_summary", summary(kept, list(FIGURES))) == page


def test_named() -> None:
    assert named(["all"]) == list(FIGURES)
    assert named(["pla_fig5", "arrow_fig7"]) == ["arrow_fig7", "pla_fig5"]
    with pytest.raises(ConfigError, match="is not known; allowed: all, arrow_fig4"):
        named(["arrow_fig6"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 3}, "size is 3"),
        ({"jobs": 0}, "jobs is 0"),
        ({"data": Path("no/such/folder")}, "is not a folder"),
    ],
)
def test_bad_options(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Context(**values)  # type: ignore[arg-type]


def test_a_folder_without_the_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no azure_code_2023"):
        script("arrow_fig9")(Context(tmp_path, size=0))


def test_a_trace_whose_file_says_synthetic_is_not_recorded(tmp_path: Path) -> None:
    for shape in SHAPES.values():
        path = tmp_path / shape.file
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(
                "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396,109\n"
            )
    context = Context(tmp_path, size=0)
    facts = traces_facts(context, ["azure_conv", "burstgpt"])
    assert facts["azure_conv"].is_recorded
    assert not facts["burstgpt"].is_recorded
    assert facts["burstgpt"].text.startswith("generated, like burstgpt: 2 requests")


@pytest.mark.parametrize(
    ("row", "ratio", "sentence"),
    [
        (Row("same", 2.0, 2.1, why="w"), 1.05, ""),
        (Row("other", 2.0, 4.0, why="w"), 2.0, "w"),
        (Row("not printed", None, 4.0, why="w"), None, "w"),
        (Row("not to be had", 2.0, None, why="w"), None, "w"),
        (Row("not finite", 2.0, float("nan"), why="w"), None, "w"),
        (Row("zero", 0.0, 1.0, why="w"), None, "w"),
    ],
)
def test_rows(row: Row, ratio: float | None, sentence: str) -> None:
    assert row.ratio == (None if ratio is None else pytest.approx(ratio))
    assert row.sentence == sentence


def test_ordered() -> None:
    assert ordered({"a": 3.0, "b": 2.0, "c": 2.0})[0]
    assert not ordered({"a": 3.0, "b": 2.0, "c": 2.1})[0]
    assert ordered({"a": 1.0, "b": 2.0}, falling=False) == (True, "a 1, b 2")
    assert not ordered({"a": 1.0, "b": float("nan")})[0]


def test_files_hold_no_number_that_json_does_not_know(tmp_path: Path) -> None:
    finding = Finding(
        "s",
        [Row("r", 1.0, float("inf"), why="w")],
        [Claim("c", True)],
        [],
        lambda: PNG,
        name="x",
        title="T",
    )
    write(finding, tmp_path, {}, [{"a": float("nan")}, {"b": 1}])
    record = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert record["rows"][0]["ours"] is None
    shown = sections(tmp_path, ["x", "missing"])
    assert "| r | 1 | - | - | (1) |" in shown
    assert "\n(1) w\n" in shown
    stale = "head\n<!-- results:papers -->\nstale\n<!-- /results:papers -->\ntail"
    page = replace(stale, "papers", shown)
    assert page.startswith("head\n")
    assert page.endswith("\ntail")
    assert "stale" not in page
    assert replace(page, "papers", shown) == page


def test_a_section_says_each_reason_once_and_lists_what_fails(tmp_path: Path) -> None:
    rows = [Row("a", 1.0, 2.0, why="Reason."), Row("b", 1.0, 3.0, why="Reason."), Row("c", 1.0, 1.0, why="Close.")]
    claims = [Claim(f"claim {at}", holds) for at, holds in enumerate([True] * 7 + [False] * 8 + [None] * 2)]
    finding = Finding("s", rows, claims, [], lambda: PNG, name="x", title="T")
    page = section(write(finding, tmp_path, {}, []))
    assert page.count("Reason.") == page.count("(1) Reason.") == 1
    assert "Close." not in page
    assert "| c | 1 | 1 | 1 |  |" in page
    assert page.count("**fails**: claim") == 8
    assert "* holds: 7 statements, in `x.json`" in page
    assert "* no difference seen: 2 statements, in `x.json`" in page


def test_the_same_seed_gives_the_same_finding() -> None:
    one, two = (script("pla_fig5")(Context(size=0, seed=3)) for _ in range(2))
    assert one.as_json() == two.as_json()
    assert one.picture() == two.picture()


def test_a_run_can_be_resumed_and_ends_with_the_keys_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def fake(name: str) -> Callable[[Context], Finding]:
        def run(context: Context) -> Finding:
            calls.append(name)
            rows = [Row("r", 1.0, 2.0, why="w")]
            claims = [Claim("c", name != "pla_table2")]
            return Finding("s", rows, claims, [], lambda: PNG, {f"{name}_key": 1.5}, name=name, title="T")

        return run

    monkeypatch.setattr(papers, "script", fake)
    monkeypatch.delenv("PLA_BENCH_DATA", raising=False)
    arguments = ["pla_table2", "pla_fig5", "--resume", "--out", str(tmp_path)]
    assert BENCHES["papers"].main(arguments) == 0
    assert BENCHES["papers"].main(arguments) == 0
    assert calls == ["pla_fig5", "pla_table2"]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["pla_table2_key"] == last["pla_fig5_key"] == 1.5
    assert last["claims_that_fail"] == ["pla_table2: c"]
    assert last["traces"] == "generated"
    assert BENCHES["papers"].main([*arguments, "--seed", "2"]) == 0  # another setting is measured anew
    assert calls == ["pla_fig5", "pla_table2"] * 2


def test_bad_names_and_folders_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["papers"].main(["nonsense"]) == 2
    assert BENCHES["papers"].main(["pla_fig5", "--data", "no/such/folder"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_recorded_conversations_are_asked_in_place_of_a_model_of_lengths(tmp_path: Path) -> None:
    path, out = tmp_path / "chat.jsonl", tmp_path / "out"
    talk = [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "d"}] * 2
    path.write_text(json.dumps({"conversation": talk}) + "\n", encoding="utf-8")
    dataset = Dataset(path, demo_model_path())
    context = Context(size=0, dataset=dataset)
    assert script("pla_table2")(context).rows
    assert conversations(20, 2, 1, dataset).name == dataset.label
    options = BENCHES["papers"].parse("pla_table2", "--dataset", str(path), "--out", str(out))
    assert papers.setting(options)["conversations"] == dataset.label
    assert "conversations" not in papers.setting(BENCHES["papers"].parse("pla_table2"))
