"""The bench ``upgrade``: bad input in one line, what it finds wrong in a stream, and what it makes of that."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.check import upgrade
from bench.check.survive.streams import Stream
from bench.harness.catalogue import BENCHES
from pla_sglang.common.errors import ConfigError


@pytest.fixture
def no_sglang(tmp_path: Path) -> str:
    """An interpreter that has none."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho 'ModuleNotFoundError: sglang' >&2\nexit 1\n")
    path.chmod(0o755)
    return str(path)


def fake_python(folder: Path, version: str) -> str:
    path = folder / f"python-{version}"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--old-python", "/no/such/python"], "error: --old-python '/no/such/python' is not an executable file"),
        (["--new-python", "NONE"], "has no SGLang with this plugin: ModuleNotFoundError: sglang"),
        (["--old-python", "ONE", "--new-python", "ONE"], "both have SGLang 1.0: there is nothing to upgrade"),
        (["--instances", "1"], "allowed are 2 instances and more"),
        (["--streams", "3"], "allowed are 2 instances and more, and 4 streams and more for each"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    flags: list[str], says: str, tmp_path: Path, no_sglang: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"NONE": no_sglang, "ONE": fake_python(tmp_path, "1.0")}
    given = ["--old-python", names["ONE"], *(names.get(flag, flag) for flag in flags)]
    assert BENCHES["upgrade"].main([*given, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_two_interpreters_of_two_versions(tmp_path: Path) -> None:
    options = BENCHES["upgrade"].parse("--old-python", fake_python(tmp_path, "1.0"))
    assert options.new_python == sys.executable
    options.new_python = fake_python(tmp_path, "2.0")
    old, new = upgrade.find_hosts(options)
    assert (old.version, new.version) == ("1.0", "2.0")
    upgrade.check_engine("engine-0", old, {"version": "1.0"})
    with pytest.raises(ConfigError, match=r"engine-0 runs SGLang 2.0, and --old-python was checked as 1.0"):
        upgrade.check_engine("engine-0", old, {"version": "2.0"})


def answer(stream: Stream, text: str | None = None, **fields: Any) -> Stream:
    """Its events, as a server that says ``text`` sends them."""
    text, event = stream.wanted if text is None else text, {"id": "1"} | fields
    if stream.path == "/v1/completions":
        parts = [{"text": text[:9]}, {"text": text[9:], "finish_reason": "stop"}]
    elif stream.calls_tool:
        called = [{"function": {"name": "look_up"}}, {"function": {"arguments": text}}]
        deltas = [{"role": "assistant"}, *({"tool_calls": [call]} for call in called)]
        parts = [*({"delta": delta} for delta in deltas), {"delta": {}, "finish_reason": "tool_calls"}]
    else:
        parts = [{"delta": {"role": "assistant", "content": text}}, {"delta": {}, "finish_reason": "stop"}]
    chunks = [event | {"choices": [part]} for part in parts]
    chunks.append(event | {"choices": [], "usage": {"completion_tokens": stream.tokens}})
    stream.events = [*(json.dumps(chunk).encode() for chunk in chunks), b"[DONE]"]
    stream.event_s = [0.5 * place for place in range(len(stream.events))]
    return stream


def streams() -> list[Stream]:
    return [upgrade.make_stream(number, f"u{number}", random.Random(number)) for number in range(4)]


def test_a_fourth_of_the_streams_is_of_each_kind() -> None:
    made = streams()
    assert [stream.path.rpartition("/")[2] for stream in made] == ["completions"] * 4
    assert ["response_format" in stream.body for stream in made] == [False, False, True, False]
    assert ["tools" in stream.body for stream in made] == [False, False, False, True]
    assert "prompt" in made[1].body


def test_a_right_answer_of_each_kind() -> None:
    row = upgrade.describe_streams([answer(stream) for stream in streams()])
    assert (row["streams"], row["completed"], row["tokens_wrong"], row["bytes_wrong"]) == (4, 4, 0, 0)
    assert (row["longest_gap_s"], row["errors"]) == (0.5, [])


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(
    ("damage", "tokens"), [(lambda text: text[:-1], 1), (lambda text: text + "a", 1), (lambda text: "A" + text[1:], 1)]
)
def test_a_wrong_letter_is_found(kind: int, damage: Any, tokens: int) -> None:
    stream = streams()[kind]
    assert upgrade.count_wrong(answer(stream, damage(stream.wanted))) == (tokens, tokens)


def test_other_things_that_are_wrong_in_a_stream() -> None:
    one, two, three, four = (answer(stream) for stream in streams())
    one.stray_bytes = 7
    assert upgrade.count_wrong(one) == (0, 7)
    two.events = two.events[:-1]
    with pytest.raises(ValueError, match="not the stream of one answer"):
        upgrade.count_wrong(two)
    three.error = "status 500"
    row = upgrade.describe_streams([one, two, three, four])
    assert (row["completed"], row["tokens_wrong"], row["bytes_wrong"]) == (2, two.tokens, 7 + len(two.wanted))
    assert len(row["errors"]) == 2


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"completed": 3}, False),
        ({"bytes_wrong": 1}, False),
        ({"replaced": 3}, False),
        ({"errors": ["x"]}, False),
    ],
)
def test_what_ends_with_success(change: dict[str, Any], right: bool) -> None:
    row = upgrade.describe_streams([answer(stream) for stream in streams()]) | {"replaced": 4, "instances": 2}
    assert upgrade.is_right(row | change) is right
