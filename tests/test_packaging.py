"""What an installation must offer: entry points, the demo model, pins, and the name ``kernels`` left to its owner."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path

import pytest
import requirements
from packaging.specifiers import SpecifierSet
from support.bare_environment import copy_sources

import pla_sglang
from pla_sglang.plugin.demo import demo_model_path

ROOT = Path(__file__).resolve().parent.parent
MAX_MODEL_BYTES = 10_000_000


@pytest.mark.parametrize(
    ("group", "name", "target"),
    [
        ("sglang.srt.plugins", "pla_sglang", "pla_sglang.plugin.entry:register"),
        ("sglang.srt.platforms", "pla_cpu", "pla_sglang.plugin.platform:activate"),
    ],
)
def test_entry_point_is_registered_and_loads(group: str, name: str, target: str) -> None:
    found = [point for point in importlib.metadata.entry_points(group=group) if point.name == name]
    assert [point.value for point in found] == [target]
    assert callable(found[0].load())


def test_this_checkout_is_the_installed_one() -> None:
    # Several checkouts share one environment of dependencies; none may see another's code.
    script = "import pla_sglang, pla_kernels, pla_patches, pla_graphs; print(pla_sglang.__file__, pla_patches.__file__)"
    out = _python(script, cwd=Path("/"))
    assert [Path(path).is_relative_to(ROOT) for path in out.split()] == [True, True]


def test_kernels_in_the_repository_root_is_sglangs_dependency() -> None:
    found = Path(_python("import kernels; print(kernels.__file__)", cwd=ROOT).strip())
    assert not found.is_relative_to(ROOT) or ".venv" in found.parts


@dataclasses.dataclass(frozen=True)
class Built:
    """The two files that `make package` makes: names in the sdist (without its top folder), the wheel that it makes."""

    sdist_names: set[str]
    wheel: zipfile.ZipFile

    def metadata(self) -> EmailMessage:
        (name,) = [name for name in self.wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(self.wheel.read(name), policy=default)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("built")
    make_sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", make_sdist], cwd=copy_sources(folder), check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sdist)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with tarfile.open(sdist) as unpacked, zipfile.ZipFile(wheel) as zipped:
        yield Built({name.partition("/")[2] for name in unpacked.getnames()}, zipped)


def test_wheel_holds_the_four_packages_and_the_demo_model(built: Built) -> None:
    names = set(built.wheel.namelist())
    assert {
        "pla_sglang/plugin/entry.py",
        "pla_kernels/__init__.py",
        "pla_patches/__init__.py",
        "pla_graphs/__init__.py",
        "pla_sglang/plugin/demo/model/model.safetensors",
        "pla_sglang/sim/report/template/page.html.j2",
    } <= names
    assert not [name for name in names if name.startswith(("kernels/", "patches/", "graphs/", "tests/", "bench/"))]
    assert {"setup.py", "LICENSE", "CHANGELOG.md"} <= built.sdist_names
    assert not [name for name in built.sdist_names if name.startswith(("tests", "bench"))]


def test_every_file_of_a_package_is_in_the_wheel(built: Built) -> None:
    ours = {
        str(file.relative_to(ROOT / top))
        for top, package in (("", "pla_sglang"), *((top, f"pla_{top}") for top in ("kernels", "patches", "graphs")))
        for file in (ROOT / top / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert ours - set(built.wheel.namelist()) == set()


def test_metadata_say_what_an_index_shows(built: Built) -> None:
    metadata = built.metadata()
    assert metadata["Version"] == pla_sglang.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    classifiers = metadata.get_all("Classifier", [])
    assert not [line for line in classifiers if line.startswith("License ::")], "the expression stands in their place"
    versions = SpecifierSet(metadata["Requires-Python"])
    named = {line.rpartition(" ")[2] for line in classifiers if ":: Python :: 3." in line}
    assert named == {f"3.{minor}" for minor in range(30) if f"3.{minor}" in versions}
    assert all(" https://" in url for url in metadata.get_all("Project-URL", []))


def test_the_page_of_an_index_links_to_nothing_that_is_only_here(built: Built) -> None:
    metadata = built.metadata()
    page, readme = metadata.get_content(), (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert len(targets) == len(re.findall(r"\]\(https://[^)]*\)", readme)) > 0
    headings = re.compile(r"^#+ .*$", re.MULTILINE)
    assert headings.findall(page) == headings.findall(readme)


@pytest.mark.parametrize("host", requirements.known_hosts())
def test_every_requirement_is_pinned(host: str) -> None:
    pinned = _constraints(host)
    names = {re.split(r"[=<>\[]", requirement)[0] for requirement in requirements.requirements(host)}
    assert names - {line.split("==")[0] for line in pinned} == set()
    assert f"sglang=={host}" in pinned
    assert not [line for line in pinned if not re.fullmatch(r"[a-z0-9.-]+==[0-9][a-z0-9.]*", line)]


def test_environments_of_hosts_differ_and_the_default_is_one_of_them() -> None:
    hosts = requirements.known_hosts()
    assert requirements.default_host() in hosts
    assert len({requirements.environment_key(host) for host in hosts}) == len(hosts)


def test_a_host_without_pins_is_refused_in_one_line() -> None:
    script = ROOT / "scripts" / "requirements.py"
    done = subprocess.run([sys.executable, script, "--key", "--host", "0.5.1"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"HOST=0.5.1: no constraints-0.5.1.txt. Known: {', '.join(requirements.known_hosts())}\n"


def test_demo_model_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in demo_model_path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "MODEL_CARD.md"} <= set(
        files
    )
    assert sum(files.values()) < MAX_MODEL_BYTES
    config = json.loads((demo_model_path() / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["max_position_embeddings"] >= 32768


def test_demo_tokenizer_loses_nothing_and_writes_chatml() -> None:
    tokenizer = _tokenizer()
    text = "Hello  World's  12345\n\n  def f(x):\n\tπ — “quoted”"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer("<|im_start|>")["input_ids"]) == 1


@pytest.mark.parametrize("question", ["What is json?", "What does threading do?", "Hello"])
def test_demo_model_answers_a_chat_with_words_and_ends(question: str) -> None:
    import torch

    tokenizer, model = _tokenizer(), _model()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=120, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(output, skip_special_tokens=True)
    words = re.findall(r"[A-Za-z]{2,}", answer)
    assert len(words) >= 4, answer
    assert output[-1] == tokenizer.eos_token_id, answer


def test_demo_model_takes_the_last_position_of_its_context() -> None:
    import torch

    model = _model()
    last = model.config.max_position_embeddings - 1
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6]]), position_ids=torch.tensor([[last - 1, last]])).logits
    assert torch.isfinite(logits).all()


def _python(script: str, *, cwd: Path) -> str:
    return subprocess.run([sys.executable, "-c", script], cwd=cwd, check=True, capture_output=True, text=True).stdout


def _constraints(host: str) -> list[str]:
    lines = requirements.pins(host).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _tokenizer():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model_path())


def _model():  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model_path())
