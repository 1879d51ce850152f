"""What the whole run shares."""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from begun import a_test_begins
from hypothesis import HealthCheck, settings
from quick import NIGHTLY, SECONDS, SEED, changed, function_of, is_drawn, recorded

if TYPE_CHECKING:
    from arrowcache import Cache

# On a busy machine any example may take long: that is no finding.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


# What a shell starts in the background ignores Ctrl-C, and what nohup starts the terminal's end. So would all
# processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_runtest_setup() -> None:
    """Each test begins with Python's own handler of Ctrl-C.

    With its import polars puts another one there, and whatever wait that interrupts goes on:
    https://github.com/pola-rs/polars/issues/21739
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_IS_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are left out, a module that is slow as a whole is not imported: some take seconds."""
    if not config.option.markexpr.startswith("not slow") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    has_smoke = "smoke" in config.option.markexpr and "mark.smoke" in text
    return True if _IS_SLOW.search(text) and not has_smoke else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run all, what is marked `nightly`, too")
    parser.addoption(
        "--quickest", action="store_true", help="leave out the functions that take most of the time"
    )
    parser.addoption("--share", type=int, default=1, help="run one test in so many, drawn by TESTS_SEED")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One commit has one order: pytest-randomly, which prints it, gets the seed that draws the cases, too."""
    if config.getoption("randomly_seed", None) == "default":
        config.option.randomly_seed = SEED
    if config.getoption("nightly"):
        os.environ[NIGHTLY] = "1"


def pytest_report_header() -> str:
    return f"cases drawn by TESTS_SEED={SEED:x}"


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-randomly: a first case is always the same
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Processes that share the tests have to agree on their names, in which no address may be.

    What is marked `nightly` is left out where it need not run: see quick.py. Of a test with many cases that
    is marked `smoke` the first of those left is. Of those that the marks select, `--share` and `--quickest`
    leave a part.
    """
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"give ids= to the parameters of {named[0]}: its name has an address")
    if not config.getoption("nightly"):
        is_changed: dict[tuple[str, ...], bool] = {}
        leave_out(config, items, [item for item in items if is_left_to_the_night(item, is_changed)])
    seen = set()
    for item in items:
        name = function_of(item.nodeid)
        if name in seen:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "smoke"]
        seen.add(name)
    yield
    share = 1 if config.getoption("nightly") else config.getoption("share")
    most = {*recorded()["longest"]} if config.getoption("quickest") else set()
    left = [item for item in items if not is_drawn(item.nodeid, share) or function_of(item.nodeid) in most]
    leave_out(config, items, left)


def leave_out(config: pytest.Config, items: list[pytest.Item], left: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=left)
    gone = {*left}
    items[:] = [item for item in items if item not in gone]


def is_left_to_the_night(item: pytest.Item, is_changed: dict[tuple[str, ...], bool]) -> bool:
    marks = [*item.iter_markers("nightly")]
    for mark in marks:
        if mark.args not in is_changed:
            is_changed[mark.args] = changed(mark.args)
    return any(not is_changed[mark.args] for mark in marks)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A nightly run keeps the seconds of the quick tests' functions, for `python tests/quick.py`."""
    if not config.getoption("nightly"):
        return
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and "slow" not in report.keywords:
                seconds[function_of(report.nodeid)] += report.duration
    assert config.cache is not None
    config.cache.set(SECONDS, config.cache.get(SECONDS, {}) | seconds)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: to look for garbage in it took a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Many tests collect garbage: spare each of them the frameworks that were imported for all."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """The interpreter's end collects all, or DuckDB says of what was imported that it leaked."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def of_this_test():
    """Its threads and processes are told from those that earlier tests leave for a while: see helpers.py."""
    a_test_begins()


@pytest.fixture(scope="session")
def torch():
    """PyTorch, for a test of the core that needs it: the others of its file run without."""
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture(scope="session")
def filled(tmp_path_factory) -> Callable[[int, Path], Cache]:
    """Make a cache of segments of 16 rows: how many rows, and where.

    The first of so many rows is kept, and copied for all others: that takes a sixth of the time.
    """
    from helpers import append_rows, make_cache

    from arrowcache import Cache

    @functools.cache
    def kept(rows: int) -> Path:
        path = tmp_path_factory.mktemp("filled") / "cache"
        with make_cache(path) as cache:
            append_rows(cache, range(rows))
        return path

    def filled(rows: int, path: Path) -> Cache:
        return Cache.open(shutil.copytree(kept(rows), path, copy_function=shutil.copy))

    return filled


@pytest.fixture
def cache(tmp_path, filled):
    """Ten segments of 16 rows, ids 0 to 159, the test's own; a module that needs another one says so."""
    return filled(160, tmp_path / "cache")


@pytest.fixture
def call(capsys):
    """Run the `arrowcache` command here: (exit code, stdout, stderr)."""
    from arrowcache.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call
