"""A virtual environment with nothing but this checkout and one of its extras."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP_S = 300  # on a machine that does much else
FOLDERS = ("pla_sglang", "kernels", "patches", "graphs")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "CHANGELOG.md", "LICENSE", "README.md")


def copy_sources(folder: Path) -> Path:
    """The sources that make a wheel, elsewhere: building in the checkout would leave files in it."""
    target = folder / "sources"
    target.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, target)
    return target


UNPRIVILEGED = 65532  # as in examples/deploy/Dockerfile
# A root of its own, read-only but for /tmp, in which a user without rights runs "$@": folder, interpreter, environment.
PRISON = """
set -e
root=$1 prefix=$2 venv=$3
shift 3
show() { mkdir -p "$root$2"; mount --bind "$1" "$root$2"; mount -o remount,bind,ro "$root$2"; }
mount -t tmpfs tmpfs "$root"
for folder in /bin /lib /lib64; do
    if [ -L $folder ]; then cp -P $folder "$root$folder"; else show $folder $folder; fi
done
show /usr /usr
show /etc /etc
[ "${prefix#/usr}" != "$prefix" ] || show "$prefix" "$prefix"
show "$venv" /opt/pla
mkdir "$root/dev" "$root/proc" "$root/tmp"
mount -t tmpfs tmpfs "$root/tmp"
for device in null urandom; do : >"$root/dev/$device"; mount --bind /dev/$device "$root/dev/$device"; done
mount -t proc proc "$root/proc"
mount -o remount,ro "$root"
exec chroot "$root" /usr/bin/setpriv --reuid=65532 --regid=65532 --clear-groups --no-new-privs --bounding-set=-all \\
    /usr/bin/env -i PATH=/opt/pla/bin PYTHONDONTWRITEBYTECODE=1 /opt/pla/bin/python "$@"
"""


class BareEnvironment:
    """Made by ``pip install .[EXTRA]``, with the pinned versions. Commands run outside the checkout.

    ``options``: further ones of pip.
    """

    def __init__(self, folder: Path, extra: str, *options: str) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, capture_output=True)
        pinned = ["--constraint", str(ROOT / f"constraints-{version('sglang')}.txt")]
        self.run("-m", "pip", "install", "--quiet", *options, *pinned, f"{copy_sources(folder)}[{extra}]")

    def without_rights(self, folder: Path) -> Path:
        """A command that is this environment's Python without rights, which can write /tmp alone; needs root.

        ``folder``: for its files. Its mounts end with it.
        """
        script, command = folder / "prison.sh", folder / "python"
        script.write_text(PRISON)
        (folder / "root").mkdir()
        places = [folder / "root", self.run("-c", "import sys; print(sys.base_prefix)").strip(), self.folder / "venv"]
        enter = ["unshare", "--mount", "--propagation", "private", "sh", str(script), *map(str, places)]
        command.write_text(f'#!/bin/sh\nexec {shlex.join(enter)} "$@"\n')
        command.chmod(0o700)
        return command

    def run(self, *arguments: str) -> str:
        """Standard output of Python with these arguments. Raises AssertionError with its errors where it fails."""
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PIP_S,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def size_mb(self) -> float:
        """Of site-packages, in 10^6 bytes."""
        packages = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        return sum(path.lstat().st_size for path in Path(packages).rglob("*")) / 1e6

    def missing(self, *modules: str) -> list[str]:
        """Those of ``modules`` that cannot be imported."""
        script = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if not importlib.util.find_spec(n)))"
        return self.run("-c", script, *modules).split()
