"""Package definition of pla_sglang.

Four packages from four top-level folders. ``kernels/``, ``patches/`` and ``graphs/`` themselves are not packages:
SGLang depends on a PyPI package named ``kernels``, and a regular package of that name in the repository root would
hide it for every process started there.

``scripts/requirements.py`` reads the dependency lists from this file's text: keep them literal.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"
PACKAGE_ROOTS = {"pla_kernels": "kernels", "pla_patches": "patches", "pla_graphs": "graphs"}


def packages() -> list[str]:
    found = find_packages(str(ROOT), include=["pla_sglang", "pla_sglang.*"])
    for name, folder in PACKAGE_ROOTS.items():
        found += find_packages(str(ROOT / folder), include=[name, f"{name}.*"])
    return found


setup(
    name="pla-sglang",
    version="0.1.0",
    description="Prefill-length-aware scheduling for stock SGLang, as a plugin",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=packages(),
    package_dir={name: f"{folder}/{name}" for name, folder in PACKAGE_ROOTS.items()},
    package_data={
        "pla_sglang.demo": ["model/*"],
        "pla_sglang.profiles": ["data/*.json"],
        "pla_sglang.chain": ["model/*"],
    },
    install_requires=[
        "sglang==0.5.17",
        "nixl==1.5.1",
        "numpy",
        "scipy",
        "statsmodels",
        "pandas",
        "pyarrow",
        "prometheus-client",
        "pyzmq",
        "msgspec",
        "aiohttp",
        "matplotlib",
        "rich",
        "psutil",
        "uvloop",
        "orjson",
        "tqdm",
    ],
    extras_require={
        "bench": ["sglang-router"],
        "tracing": ["opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc"],
        "test": [
            "pytest",
            "hypothesis",
            "schemathesis",
            "sglang-router",
            "h11",
            "openai",
            "opentelemetry-sdk",
            "opentelemetry-exporter-otlp-proto-grpc",
        ],
        "dev": ["ruff", "mypy"],
    },
    entry_points={
        "sglang.srt.plugins": ["pla_sglang = pla_sglang.plugin:register"],
        "sglang.srt.platforms": ["pla_cpu = pla_sglang.platform:activate"],
    },
)
