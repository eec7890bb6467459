"""Settings that every test shares."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import settings
from support.forked_servers import ForkParent
from support.host_imports import modules_that_meet_the_host

TESTS = Path(__file__).parent

# A landing must not hang on the luck of the draw: CI draws the same examples each time, everybody else new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


# They measure time, or something has to happen while something else is under way: a kill, a role switch, a client that
# goes. All others only wait for what they need, and compare answers; two of their files may run at once.
ALONE = {
    "test_chaos",
    "test_emulation",
    "test_fitted_profile",
    "test_flips_bench",
    "test_router_control",
    "test_router_relays",
    "test_streams_survive",
}

SLOWEST_FILES = 30  # how many a run lists

# Of those marked e2e, what CI runs on every version of SGLang.
HOST_E2E = {"test_temporal_server", "test_riding", "test_cpu_pd", "test_stateless_pair", "test_spatial_server"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=("beside", "alone"),
        help="tests that may run beside others, or those that need the machine alone; without it both, in one process",
    )


def is_left_out(path: Path, config: pytest.Config) -> bool:
    """True for a file of tests that the part of ``--part`` does not have."""
    part = config.getoption("--part")
    return part is not None and (path.stem in ALONE) != (part == "alone")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is left out need not be imported."""
    return True if collection_path.match("test_*.py") and is_left_out(collection_path, config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that meet SGLang are marked as such, by what their module imports.

    Those of real servers come last; on several processes first, as their files take longest, and all processes should
    end at about the same time.
    """
    left_out = [item for item in items if is_left_out(item.path, config)]  # named on the command line
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    items.sort(
        key=lambda item: item.get_closest_marker("e2e") is not None, reverse=config.getoption("--part") == "beside"
    )
    for item in items:
        is_e2e = item.get_closest_marker("e2e") is not None
        if item.path.stem in HOST_E2E if is_e2e else item.path in modules_that_meet_the_host():
            item.add_marker(pytest.mark.host)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time of a run goes, for the table in CONTRIBUTING.md."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]
    terminalreporter.section(f"slowest files of {sum(seconds.values()):.0f} s")
    for file, taken_s in seconds.most_common(SLOWEST_FILES):
        terminalreporter.write_line(f"{taken_s:7.1f} s  {file}")


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """What a test that starts a server in its own process leaves in the environment is not there for the next one."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def fork_parent() -> Iterator[ForkParent]:
    """A process that imports SGLang at the first use, and forks servers and commands that need it."""
    parent = ForkParent()
    yield parent
    parent.close()


@pytest.fixture
def published() -> Iterator[None]:
    """SGLang's arguments where its own functions look for them, until the test ends: those of a server of no model.

    A test may publish others (``support.published``).
    """
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args():
        yield


def pytest_configure() -> None:
    """A test run that is ended from outside ends as with Ctrl-C: fixtures stop their servers on the way."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    pytest.exit("ended by SIGTERM", returncode=128 + number)
