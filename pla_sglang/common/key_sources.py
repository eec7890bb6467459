"""Where keys come from besides a command line, which everybody on the machine can read: a file, or the environment.

No message here has the key, nor a part of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
from pathlib import Path

from pla_sglang.common.checks import KEY
from pla_sglang.common.errors import ConfigError

MOST_BYTES = 4096


def read_key_file(flag: str, path: str) -> str:
    """The key in the file that ``flag`` names: one line; spaces around it do not count.

    A file that everybody may read is warned of, once: in containers, files of secrets often are. Raises ConfigError.
    """
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path}: {getattr(error, 'strerror', None) or 'is no path'}") from None
    _warn_of_mode(flag, path, mode)
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{flag} {path} has more than {MOST_BYTES} bytes; allowed: one line with a key")
    try:
        text = data.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path} is no text in UTF-8; allowed: one line with a key") from None
    return _check_key(f"{flag} {path}", text)


def read_key_variable(name: str) -> str | None:
    """The key in an environment variable; None where it is not set, or empty. Raises ConfigError."""
    text = os.environ.get(name, "") if name else ""
    return _check_key(f"the variable {name}", text.strip()) if text else None


def warn_of_readers(flag: str, path: Path) -> None:
    """Warns, once, of a file with a secret that everybody may read; not of one that is not there."""
    with contextlib.suppress(OSError):
        _warn_of_mode(flag, str(path), path.stat().st_mode)


def _warn_of_mode(flag: str, path: str, mode: int) -> None:
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        _warn_once(f"warning: {flag} {path} can be read by every user of this machine (chmod o-r)")


def _check_key(where: str, key: str) -> str:
    if not key:
        raise ConfigError(f"{where} is empty; allowed: one line with a key")
    if not KEY.allows(key):
        raise ConfigError(f"{where} is not valid; allowed: {KEY}")
    return key


@functools.cache
def _warn_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
