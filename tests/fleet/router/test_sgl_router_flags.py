"""Flags of sgl-router as ours: each alias, what has none, and the page that lists both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.router_process import router_process

from pla_sglang.common.cli import flags_of
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.sgl_router_flags import ABSENT, ALIASES, POLICIES, Takes, translate_flags
from pla_sglang.launch_router import RouterConfig, main, read_config
from pla_sglang.policy.registry import live_policy_names

PAGE = (Path(__file__).parents[3] / "docs/guide/from-sgl-router.md").read_text(encoding="utf-8")
OURS = {declared.knob.name for declared in flags_of(RouterConfig)}
A, B = "http://a:1", "http://b:2"


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["--worker-urls", A, B, "--port", "1"], ["--worker", A, B, "--port", "1"]),
        (["--worker-urls"], []),
        (["--pd-disaggregation", "--prefill", A, "8998", "--prefill", B], ["--worker", A, "--worker", B]),
        (["--prefill", A, "none", "--decode", B], ["--worker", A, "--worker", B]),
        (["--policy", "round_robin"], ["--policy", "round-robin"]),
        (["--policy=power_of_two"], ["--policy", "two-choices"]),
        (["--queue-timeout-secs", "2.5"], ["--pending-timeout-ms", "2500"]),
        (["--queue-timeout-secs=60"], ["--pending-timeout-ms", "60000"]),
        (["--queue-timeout-secs", "soon"], ["--pending-timeout-ms", "soon"]),  # our own check says what is allowed
        (["--max-concurrent-requests", "-1", "--queue-size", "100"], ["--max-queued-requests", "100"]),
        (["--max-concurrent-requests", "256"], ["--max-open-requests", "256"]),
        (["--health-check-interval-secs", "60"], ["--health-interval-ms", "60000"]),
    ],
)
def test_a_flag_of_sgl_router_becomes_ours_and_is_noted(given: list[str], ours: list[str]) -> None:
    translated, notes = translate_flags(given)
    assert translated == ours
    used = {word.partition("=")[0] for word in given if word.startswith("--")} - {"--port"}
    assert {note.split()[0] for note in notes} == used
    assert not any(address in note for note in notes for address in (A, B)), "an address may hold a password"


@pytest.mark.parametrize(
    "given", [[], ["--worker", A, "--policy", "pla"], ["--policy=cache-aware"], ["-h"], ["stray", "--port=1", "more"]]
)
def test_our_own_flags_stay_as_they_are(given: list[str]) -> None:
    assert translate_flags(given) == (given, [])


def test_a_command_line_of_sgl_router_is_ours() -> None:
    text = f"--pd-disaggregation --prefill {A} 8998 --decode {B} --policy random --max-payload-size 1000"
    config, _ = read_config(text.split())
    assert config.control.workers == (A, B)
    assert (config.control.policy, config.relay.max_body_bytes) == ("two-choices", 1000)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--prometheus-port", "29000"], "error: unknown argument '--prometheus-port', of sgl-router: /metrics is on "),
        (["--prefill"], "error: --prefill wants a value"),
        (["--queue-size", "some"], "error: --max-queued-requests 'some'"),
    ],
)
def test_what_cannot_be_taken_ends_the_start_with_one_line(
    given: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)


def test_the_router_starts_with_them_and_says_so(tmp_path: Path) -> None:
    arguments = ["--policy", "cache_aware", "--request-timeout-secs", "600", "--queue-timeout-secs", "5"]
    with router_process(["null"], arguments, tmp_path) as router:
        body = b'{"text": "hello", "sampling_params": {"max_new_tokens": 4}}'
        assert router.ask("/generate", body, {"content-type": "application/json"})[0] == 200
        assert router.stop() == 0
        notes = [line for line in router.log.splitlines() if "of sgl-router" in line]
    assert len(notes) == 3
    assert "--policy cache_aware of sgl-router is taken as --policy cache-aware" in notes[0]


# -- the tables, here and on the page --------------------------------------------------------------------------------


def test_aliases_lead_to_flags_and_policies_that_there_are() -> None:
    assert {alias.ours for alias in ALIASES} - {""} <= OURS
    assert set(POLICIES.values()) <= set(live_policy_names())
    theirs = [alias.flag for alias in ALIASES] + [flag for flags in ABSENT for flag in flags]
    assert len(set(theirs)) == len(theirs)
    assert set(theirs) & OURS == {"--policy"}
    assert all(alias.ours or alias.takes is Takes.NOTHING for alias in ALIASES)


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under this first line, without its header."""
    table = PAGE.partition(heading)[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]


def test_the_page_lists_the_aliases_as_they_are() -> None:
    shown = {flag: taken for flag, taken, _ in rows("| sgl-router | is taken as | note |")}
    wanted = {}
    for alias in ALIASES:
        names = {f" {word}": f" {taken}" for word, taken in alias.words.items() if taken} or {"": ""}
        wanted |= {f"`{alias.flag}{word}`": f"`{alias.ours}{names[word]}`" if alias.ours else "" for word in names}
    assert shown == wanted


def test_the_page_lists_what_has_no_counterpart() -> None:
    shown = {flag for cells in rows("| sgl-router | here |") for flag in re.findall(r"--[a-z-]+", cells[0])}
    assert {flag for flags in ABSENT for flag in flags} <= shown


def test_an_absent_flag_is_refused_with_its_reason() -> None:
    for flags, why in ABSENT.items():
        for flag in flags:
            with pytest.raises(ConfigError, match=re.escape(why)):
                translate_flags([flag, "1"])
