"""What pyproject.toml cannot say: four packages from four folders, the files in them, and the README without its tree.

``kernels/``, ``patches/`` and ``graphs/`` themselves are not packages: SGLang depends on a PyPI package named
``kernels``, and a regular package of that name in the repository root would hide it for every process started there.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PACKAGE_ROOTS = {"pla_kernels": "kernels", "pla_patches": "patches", "pla_graphs": "graphs"}


def packages() -> list[str]:
    found = find_packages(str(ROOT), include=["pla_sglang", "pla_sglang.*"])
    for name, folder in PACKAGE_ROOTS.items():
        found += find_packages(str(ROOT / folder), include=[name, f"{name}.*"])
    return found


def make_description(readme: str) -> str:
    """README.md for a package index, which has none of our files: the text of pictures and links stays alone."""
    own = r"\[([^\]]*)\]\((?!https?://)[^)]*\)"
    return re.sub(own, r"\1", re.sub("!" + own, r"*Picture in the repository: \1*", readme))


setup(
    long_description=make_description((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    packages=packages(),
    package_dir={name: f"{folder}/{name}" for name, folder in PACKAGE_ROOTS.items()},
    package_data={
        "pla_sglang.plugin.demo": ["model/*"],
        "pla_sglang.profiles": ["data/*.json"],
        "pla_sglang.sim.chain": ["model/*"],
        "pla_sglang.common.legend": ["assets/*"],
        "pla_sglang.sim.report": ["template/*"],
        "pla_sglang.fleet.viewer": ["assets/*"],
    },
)
