"""The page: nothing from outside, one script and one style that its policy names, and no name that becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.recorded_fleet import EVIL, record_run

from pla_sglang.__main__ import main as command
from pla_sglang.fleet.viewer.history import BUCKETS_PER_DOUBLING, FleetHistory, Membership, find_bucket
from pla_sglang.fleet.viewer.page import live_headers, render_live, render_recorded
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.view_recording import make_document


class Elements(HTMLParser):
    """Start tags with their attributes, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.texts.append((str(self.tags[-1][1].get("type") or self.tags[-1][0]), data))


def evil_document() -> dict[str, Any]:
    history = FleetHistory()
    history.note_instance(0, EVIL, EVIL, 10)
    history.note_membership(0, Membership("ready", "prefill", ""), 0.0, reason=EVIL)
    return {**history.to_document(1.0), "title": EVIL, "life": EVIL, "head": {EVIL: EVIL}}


def test_a_name_is_never_markup() -> None:
    plain, evil = Elements(render_live().decode()), Elements(render_recorded(evil_document()))
    assert [tag for tag, _ in plain.tags] == [tag for tag, _ in evil.tags]
    [legend, data, script] = [text for kind, text in evil.texts if kind != "style"]
    assert json.loads(data)["instances"][0]["name"] == EVIL
    assert json.loads(legend)["roles"]["prefill"].startswith("#")
    # What the script writes, it writes as text.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|srcdoc", script)


@pytest.mark.parametrize("live", [True, False])
def test_the_policy_names_the_script_and_the_style_of_the_page(live: bool) -> None:
    page = Elements(render_live().decode() if live else render_recorded(evil_document()))
    policy = next(str(given["content"]) for tag, given in page.tags if given.get("http-equiv"))
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert f"connect-src {'' if not live else chr(39) + 'self' + chr(39)}" in policy or not live
    assert ("connect-src 'none'" in policy) is not live
    for kind in ("script", "style"):
        [text] = [text for of, text in page.texts if of == kind]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not any(name.startswith("on") or name == "style" for _, given in page.tags for name in given)
    links = [given[name] for _, given in page.tags for name in ("src", "href") if given.get(name)]
    assert links == ["data:,"]


def test_the_live_page_is_the_same_each_time_and_may_stand_in_no_frame() -> None:
    assert render_live() == render_live()
    headers = dict(live_headers())
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


# -- from a recording --------------------------------------------------------------------------------------------------


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl.gz"
    record_run(path)
    return path


def test_a_recording_becomes_a_history(recording: Path) -> None:
    document = make_document(recording)
    changes = [(round(at_s - 100.0, 3), index, *rest) for at_s, index, *rest in document["changes"]]
    assert changes[:3] == [(0.0, index, "ready", "prefill", "", "", None) for index in range(3)]
    assert changes[3:] == [
        (5.0, 2, "ready", "decode", "", FleetReason.NO_DATA.value, 1),
        (10.0, 0, "ready", "prefill", "short", FleetReason.OTHER_PAIR.value, None),
        (15.0, 1, "suspect", "prefill", "", "worker.health", None),
    ]
    assert (document["moved"], document["moves"]) == (
        1,
        [[112.5, "r25", f"h1{EVIL}", f"h0{EVIL}", "pull", "star.migrate", 1 << 20, 0.05]],
    )
    assert document["now_s"] - document["start_s"] == pytest.approx(19.4, abs=0.6)
    assert len(document["samples"]) == pytest.approx((document["now_s"] - 100.0) / document["interval_s"], abs=2)
    last = document["samples"][-1]
    assert (last[1], last[2]) in ((3, 3), (4, 4))  # those that wait for ever; the last one is the last line
    fields = dict(zip(("index", *document["load_fields"]), last[3][1], strict=True))
    assert (fields["first_tokens"], fields["ttft_ms"], fields["predicted_ttft_ms"]) == (36, 36 * 300, 36 * 200)


def sum_figures(document: dict[str, Any]) -> dict[str, Any]:
    """Counts over all samples, and the smallest bucket of TTFT."""
    figures = [
        dict(zip(document["figure_fields"], sample[5], strict=True)) for sample in document["samples"] if sample[5]
    ]
    return {
        "ended": sum(one["ended"] for one in figures),
        "failed": sum(one["failed"] for one in figures),
        "ttft": [sum(one["ttft"][met] for one in figures) for met in (0, 1)],
        "bucket": min(bucket for one in figures for bucket in one["ttft_buckets"]),
    }


def test_a_recording_says_which_targets_were_met(recording: Path) -> None:
    figures = sum_figures(make_document(recording))
    assert (figures["ended"], figures["failed"], sum(figures["ttft"])) == (36, 0, 36)
    assert figures["ttft"] == [10, 26]
    assert figures["bucket"] == find_bucket(0.3)
    assert (
        2 ** ((figures["bucket"] - 1) / BUCKETS_PER_DOUBLING) < 0.3 <= 2 ** (figures["bucket"] / BUCKETS_PER_DOUBLING)
    )


def test_a_recording_shows_the_plans(recording: Path) -> None:
    plan = make_document(recording)["plan"]
    assert plan["plans"] == [[117.5, 4, {"requests": {"load": 5.0, "forecast": 8.0, "by": "peak"}}]]
    assert (plan["fleet"], plan["starts"]) == ([[117.5, 3, 0, 0, 0.5]], [[115.5, 117.5, "ready"]])


def test_a_recording_of_a_slow_device_has_the_durations_that_its_clients_saw(tmp_path: Path) -> None:
    """So the same move takes as long on both pages, whatever the time scale."""
    documents = []
    for scale in (1.0, 8.0):
        record_run(tmp_path / "run.jsonl", scale)
        documents.append(make_document(tmp_path / "run.jsonl"))
    plain, slow = documents
    assert [move[-1] for move in slow["moves"]] == [8 * move[-1] for move in plain["moves"]]
    assert slow["now_s"] - slow["start_s"] == pytest.approx(8 * (plain["now_s"] - plain["start_s"]), rel=0.05)
    assert slow["targets"] == {name: 8 * value for name, value in plain["targets"].items()}
    assert sum_figures(slow)["bucket"] == sum_figures(plain)["bucket"] + 3 * BUCKETS_PER_DOUBLING
    assert "1/8" in slow["head"]["durations"]
    assert "durations" not in plain["head"]


def test_the_command_writes_a_page(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["view", str(recording)]) == 0
    page = recording.with_name("run.html")
    assert str(page) in capsys.readouterr().out
    assert [tag for tag, _ in Elements(page.read_text()).tags] == [
        tag for tag, _ in Elements(render_live().decode()).tags
    ]
    other = recording.with_name("other.html")
    assert command(["view", str(recording), "--out", str(other)]) == 0
    assert other.read_text() == page.read_text()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "No such file"),
        ("", "is empty"),
        ("{}\n", "line 1"),
        (["header"], "holds nothing after its header"),
        (["header", '{"type":"views","now_s":1.0,"changed":{"7":{"name":"x"}}}'], "line 2 does not fit"),
    ],
)
def test_a_file_that_is_no_recording(
    lines: str | list[str] | None, said: str, recording: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bad.jsonl"
    if isinstance(lines, list):
        file.write_text("\n".join([_header(recording), *lines[1:]]) + "\n")
    elif lines is not None:
        file.write_text(lines)
    assert command(["view", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error


def _header(recording: Path) -> str:
    import gzip

    return gzip.decompress(recording.read_bytes()).decode().splitlines()[0]


def test_a_page_goes_into_a_folder_that_exists(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["view", str(recording), "--out", "/nonexistent/x.html"]) == 2
    assert "--out /nonexistent/x.html" in capsys.readouterr().err
