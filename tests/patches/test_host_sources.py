"""Hosts that are not installed: signatures from their sources, ``record_host`` and ``doctor --host-wheel``.

The wheels here are made of what is recorded: functions without bodies, at their places.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import record_host

from pla_patches.hosts import HOSTS, Host, nearest
from pla_patches.hosts.signature import Signature
from pla_patches.sources import Difference, Sources, compare
from pla_sglang import doctor

OLD = nearest("0.5.17")
NEW = nearest("0.5.23")
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_PREFILL = "sglang.srt.disaggregation.prefill."
_NIXL = "sglang.srt.disaggregation.nixl.conn."
_COMMON = "sglang.srt.disaggregation.common.conn."
MODULE = """
def plain(a, *rest, b=1, **keywords): ...

class Some:
    async def method(self, first, /, second): ...

class Derived(Some):
    def own(self): ...
"""


def modules_of(signatures: Iterable[Signature]) -> dict[str, str]:
    """Text of each module, by its dotted name."""
    classes: dict[str, dict[str, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for there in signatures:
        owner, _, name = there.target.rpartition(".")
        module, _, last = owner.rpartition(".")
        if last[0].islower():
            module, last = owner, ""
        classes[module][last].append(f"def {name}({there.parameters}): ...")
    return {
        module: "\n".join(
            "\n".join([f"class {name}:", *(f"    {line}" for line in lines)]) if name else "\n".join(lines)
            for name, lines in owners.items()
        )
        for module, owners in classes.items()
    }


def make_wheel(folder: Path, version: str, modules: Mapping[str, str]) -> Path:
    file = folder / f"sglang-{version}-cp312-cp312-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"sglang-{version}.dist-info/METADATA", f"Name: sglang\nVersion: {version}\n")
        wheel.writestr("sglang/__init__.py", "")
        for module, text in modules.items():
            wheel.writestr(f"{module.replace('.', '/')}.py", text)
    return file


def differing_wheel(folder: Path, version: str = "0.5.18") -> Path:
    """One of each kind of difference from 0.5.17."""
    signatures = dict(OLD.signatures)
    del signatures["scheduler.on_idle"], signatures["prefill_mixin.process_prefill_chunk"]
    signatures["scheduler.run_batch"] = Signature(_SCHEDULER + "run_batch", "self, batch, extra")
    signatures["scheduler.can_schedule_lora_req"] = Signature(
        _SCHEDULER + "can_schedule_lora_req", "self, req, running_loras"
    )
    signatures["schedule_policy.calc_priority"] = Signature(
        "sglang.srt.policies.SchedulePolicy.calc_priority", "self, waiting_queue, running_batch"
    )
    modules = modules_of(signatures.values())
    base = "sglang.srt.disaggregation.base"
    modules[base] = "class Base:\n    def process_prefill_chunk(self, last_batch, running_batch): ..."
    mixin = "class SchedulerDisaggregationPrefillMixin"
    prefill = _PREFILL.strip(".")
    modules[prefill] = f"from {base} import (\n    Base,\n)\n" + modules[prefill].replace(mixin, f"{mixin}(Base)")
    return make_wheel(folder, version, modules)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("sglang.part.module.plain", "a, rest, b, keywords"),
        ("sglang.part.module.Some.method", "self, first, second"),
        ("sglang.part.module.Derived.own", "self"),
        ("sglang.part.module.Derived.method", None),  # inherited: a hook there would not be looked up
        ("sglang.part.module.Derived.__repr__", "self"),  # as of every class
        ("sglang.part.module.Some", None),
        ("sglang.part.module.none", None),
        ("sglang.part.none.plain", None),
        ("sglang.part", None),
        ("sglang.in_package", "b"),
    ],
)
@pytest.mark.parametrize("form", ["wheel", "folder"])
def test_signatures_are_read_from_sources(path: str, names: str | None, form: str, tmp_path: Path) -> None:
    file = make_wheel(tmp_path, "0.5.18", {"sglang.part.module": MODULE, "sglang/__init__": "def in_package(b): ..."})
    if form == "folder":
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(tmp_path / "unpacked")
        file = tmp_path / "unpacked"
    assert Sources(file).version == "0.5.18"
    assert Sources(file).parameter_names(path) == names


@pytest.mark.parametrize("known", HOSTS, ids=lambda known: known.version)
def test_a_host_of_what_is_recorded_fits(known: Host, tmp_path: Path) -> None:
    file = make_wheel(tmp_path, known.version, modules_of(known.signatures.values()))
    assert compare(Sources(file), known) == []


def test_every_kind_of_difference(tmp_path: Path) -> None:
    found = {one.key: (one.how, str(one)) for one in compare(Sources(differing_wheel(tmp_path)), OLD)}
    assert found == {
        "scheduler.on_idle": ("gone", f"{_SCHEDULER}on_idle not found"),
        "scheduler.run_batch": ("parameters", f"{_SCHEDULER}run_batch with extra, without pp_proxy_tensors"),
        "scheduler.can_schedule_lora_req": (
            "moved",
            f"{_SCHEDULER}_can_schedule_lora_req is {_SCHEDULER}can_schedule_lora_req",
        ),
        "schedule_policy.calc_priority": (
            "moved",
            "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority is "
            "sglang.srt.policies.SchedulePolicy.calc_priority",
        ),
        "prefill_mixin.process_prefill_chunk": (
            "moved",
            f"{_PREFILL}SchedulerDisaggregationPrefillMixin.process_prefill_chunk is "
            "sglang.srt.disaggregation.base.Base.process_prefill_chunk",
        ),
    }


def test_a_class_that_overrides_what_is_recorded_is_where_it_is(tmp_path: Path) -> None:
    """The host calls that one: a hook in its base would not be called."""
    modules = modules_of(NEW.signatures.values())
    poll = f"from {_COMMON.strip('.')} import CommonKVReceiver\nclass NixlKVReceiver(CommonKVReceiver):\n"
    modules[_NIXL.strip(".")] += f"\n{poll}    def poll(self): ..."
    file = make_wheel(tmp_path, "0.5.22", modules)
    wanted = Signature(_NIXL + "NixlKVReceiver.poll", "self")
    assert compare(Sources(file), NEW) == [Difference("kv_receiver.poll", NEW.targets["kv_receiver.poll"], wanted)]


def test_the_order_of_parameters_counts() -> None:
    one = Difference("x.f", Signature("x.f", "a, b"), Signature("x.f", "b, a"))
    assert (one.how, str(one)) == ("parameters", "x.f in another order: b, a")


# -- record_host -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", HOSTS, ids=lambda known: known.version)
def test_recorded_hosts_have_the_form_of_the_script(known: Host) -> None:
    file = record_host.FOLDER / f"v{known.version.replace('.', '_')}.py"
    assert file.read_text(encoding="utf-8") == record_host.render(known)


def test_the_installed_host_is_recorded_from_its_sources() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    installed = Sources(Path(spec.origin).parents[1])
    known = nearest(installed.version)
    assert record_host.record(installed, known) == (known, [])


def test_a_new_host_is_written_with_what_has_gone_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record_host, "FOLDER", tmp_path)
    assert record_host.main([str(differing_wheel(tmp_path)), "--write"]) == 1
    assert f"gone       scheduler.on_idle: {_SCHEDULER}on_idle not found" in capsys.readouterr().out
    made: dict[str, Any] = {}
    exec((tmp_path / "v0_5_18.py").read_text(encoding="utf-8"), made)
    assert made["VERSION"] == "0.5.18"
    assert OLD.targets.keys() - made["TARGETS"].keys() == {"scheduler.on_idle"}
    assert made["TARGETS"]["scheduler.run_batch"] == Signature(_SCHEDULER + "run_batch", "self, batch, extra")
    assert made["CONSTRUCTED"] == OLD.constructed
    assert made["ABSENT"] == OLD.absent


def test_what_is_absent_on_the_nearest_host_is_taken_over(tmp_path: Path) -> None:
    file = make_wheel(tmp_path, "0.5.24", modules_of(NEW.signatures.values()))
    assert record_host.record(Sources(file), NEW) == (dataclasses.replace(NEW, version="0.5.24"), [])
    assert record_host.main([str(file)]) == 0
    assert record_host.main([str(file), "--against", "0.5.17"]) == 1, "what is absent there is not in this wheel"


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(differing_wheel(tmp_path))
    assert doctor.main(["--host-wheel", file]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "parameters scheduler.run_batch (sched.launch, tele.launch, tele.launched)" in lines
    assert "gone       scheduler.on_idle (emu.idle, graph.idle, tele.idle)" in lines
    assert lines[-1].startswith(f"sglang 0.5.18: of the functions that we enter 5 of {len(OLD.signatures)} differ from")
    assert doctor.main(["--host-wheel", file, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["works"], answer["host"], answer["compared_with"]) == (False, "0.5.18", "0.5.17")
    assert len(answer["differ"]) + len(answer["fit"]) == len(OLD.signatures)
    assert {one["how"] for one in answer["differ"]} == {"gone", "moved", "parameters"}


def test_doctor_of_a_host_that_fits_imports_nothing_of_it(tmp_path: Path) -> None:
    file = make_wheel(tmp_path, "0.5.24", modules_of(NEW.signatures.values()))
    script = (
        "import sys; from pla_sglang import doctor; status = doctor.main(sys.argv[1:]); "
        "sys.exit(status or 3 * ('sglang' in sys.modules or 'torch' in sys.modules))"
    )
    command = [sys.executable, "-c", script, "--host-wheel", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["compared_with"] == "0.5.23"


def bad_files(folder: Path) -> dict[str, Path]:
    folder.mkdir(exist_ok=True)
    text = folder / "text.whl"
    text.write_text("no zip")
    whole = differing_wheel(folder)
    cut = folder / "cut.whl"
    cut.write_bytes(whole.read_bytes()[:-100])
    other = folder / "other.whl"
    with zipfile.ZipFile(other, "w") as wheel:
        wheel.writestr("flask/__init__.py", "")
    damaged = folder / "damaged.whl"
    damaged.write_bytes(whole.read_bytes().replace(b"def add_cli_args", b"def add_cli_argz"))
    newer = make_wheel(folder, "0.5.25", {"sglang.srt.server_args": "class ServerArgs[:"})
    return {
        "is no wheel, and no folder where one is unpacked: File is not a zip file": text,
        "is no wheel, and no folder where one is unpacked: [Errno 2]": folder / "missing.whl",
        "is no wheel, and no folder where one is unpacked: File is not": cut,
        "has no sglang/ beside one sglang-VERSION.dist-info/": other,
        "/bad has no sglang/ beside one sglang-VERSION.dist-info/": folder,
        "server_args.py cannot be read: Bad CRC-32": damaged,
        "sglang.srt.server_args is no Python that we can read": newer,
    }


def test_a_bad_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wanted, file in bad_files(tmp_path / "bad").items():
        for main in (lambda name: doctor.main(["--host-wheel", name]), lambda name: record_host.main([name])):
            assert main(str(file)) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            [line] = captured.err.splitlines()
            assert line.startswith("error: ")
            assert wanted in line
