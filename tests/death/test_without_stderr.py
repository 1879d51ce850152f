"""A process without stderr, such as a daemon: no bar, no error, no file in its place, no sign that stays.

What a standard stream can be: closed before the start, None, closed or detached within the process, a pipe
whose reader is gone, a full disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import DEADLINE_SECONDS, make_cache, publish
from pool_tasks import draws
from quick import one_in

import arrowcache as ac

AT_EXIT_NONE = "import atexit; atexit.register(setattr, sys, 'stderr', None)"
#: What the shell or the script does to its stderr, before arrowcache is imported.
STREAMS = {
    "closed by the shell": ("2>&-", ""),
    "all closed by the shell": ("0<&- 2>&-", ""),
    "None": ("", "sys.stderr = None"),
    "closed": ("", "sys.stderr.close()"),
    "closed below Python": ("", "os.close(2)"),
    "detached": (
        "",
        "kept = sys.stderr.detach(); " + AT_EXIT_NONE,
    ),
    "with `write` alone": (  # which Python flushes at exit
        "",
        "sys.stderr = type('', (), {'write': len}); " + AT_EXIT_NONE,
    ),
    "a pipe that nobody reads": ("2>PIPE", ""),
    "a full disk": ("2>/dev/full", ""),
}

#: How Python itself ends where it cannot write at exit what was logged.
UNTAKEN = {"a pipe that nobody reads": [120], "a full disk": [120]}

BEGIN = """
import os, sys, traceback
sys.excepthook = lambda *error: print(*traceback.format_exception(*error), flush=True)
{stream}
import arrowcache as ac
from arrowcache.storage.recovery import store_of

folder = sys.argv[1]

def sample(rng):
    assert os.path.exists(f"/proc/self/fd/2")
    try:
        os.write(2, b"from a C library" * 1000)  # to whatever is there, and no file of the cache
    except OSError:
        pass
    while True:
        yield {{"x": rng.random(4)}}

schema = ac.Schema({{"x": ac.Tensor("float64", (4,))}})
cache = ac.Cache.create(folder + "/c", schema, capacity="10MB", segment_bytes="256KiB")
with cache.writer() as writer:
    writer.append(x=[0.0] * 4)
"""
END = """
assert not cache.store.usage.somebody_writes()
assert folder not in os.readlink("/proc/self/fd/2")
assert cache.verify() == []
print("done", flush=True)
"""
WORK = {
    "a pool": """
        for progress in (None, True):
            with ac.SamplerPool(cache, sample, workers=1, progress=progress) as pool:
                pool.wait(rows=50)
    """,
    "a pool of threads": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(1) as threads:
            with ac.SamplerPool(cache, sample, workers=1, progress=True, executor=threads) as pool:
                pool.wait(rows=50)
    """,
    "a pool that fails": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(1) as threads:
            pool = ac.SamplerPool(cache, lambda rng: 1 / 0, retries=0, executor=threads)
            try:
                pool.wait(rows=50)
            except ac.SamplerError as error:
                assert "ZeroDivisionError" in str(error), error
            pool.stop()
    """,
    "fill": """
        from arrowcache.torch import cached
        for number, progress in enumerate((None, True)):
            train = cached([1, 2, 3], f"{folder}/d{number}", capacity="1MB")
            assert train.fill(workers=number, progress=progress) == 3
            train.close()
            assert not store_of(f"{folder}/d{number}").usage.somebody_writes()
    """,
    "a loader of items": """
        from arrowcache.torch import Loader
        train = cached([1, 2, 3], f"{folder}/items", capacity="1MB")
        with Loader(train, 1, workers=1) as loader:
            assert [len(list(loader)) for _ in range(2)] == [3, 3]
    """,
    "export and import": """
        from arrowcache import explore
        for progress in (None, True):
            explore.export_parquet(cache, f"{folder}/e{progress}", progress=progress)
            explore.import_parquet(
                f"{folder}/e{progress}", f"{folder}/i{progress}", capacity="1GB", progress=progress
            )
    """,
    "a loader of processes": """
        with ac.Loader(cache, 1, workers=1, transform=dict) as loader:
            assert len(list(loader)) >= 1
    """,
    "a warning": """
        from arrowcache.errors import log, warn
        warn("it is so")
        log("it is so")
    """,
}


def run(folder: Path, stream: str, code: str, *command: str) -> subprocess.CompletedProcess[str]:
    redirection, within = STREAMS[stream]
    reader, unread = os.pipe()
    os.close(reader)
    redirection = redirection.replace("PIPE", f"/proc/{os.getpid()}/fd/{unread}")
    script = folder / "script.py"
    script.write_text(code.replace("{stream}", within))
    paths = os.pathsep.join(path for path in sys.path if path)
    as_usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = command or (str(script), str(folder))
    try:
        return subprocess.run(
            ["sh", "-c", f'exec "$0" "$@" {redirection}', sys.executable, *words],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=2 * DEADLINE_SECONDS,
            check=False, env=as_usual | {"PYTHONPATH": paths},
        )  # fmt: skip
    finally:
        os.close(unread)


@pytest.mark.slow
@pytest.mark.parametrize("stream", one_in(4, STREAMS))
def test_a_process_without_stderr_works(tmp_path, stream):
    works = (f"print({name!r})\n{textwrap.dedent(work)}" for name, work in WORK.items())
    done = run(tmp_path, stream, BEGIN.replace("{{", "{").replace("}}", "}") + "".join(works) + END)
    assert done.stdout.splitlines() == [*WORK, "done"]
    assert done.returncode in (0, *UNTAKEN.get(stream, ()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stream", one_in(3, ["closed by the shell", "a pipe that nobody reads", "a full disk"])
)
def test_the_command_works_without_stderr(tmp_path, stream):
    make_cache(tmp_path / "cache")
    done = run(tmp_path, stream, "", "-m", "arrowcache", "info", str(tmp_path / "cache"))
    assert done.stdout
    assert done.returncode == 0
    done = run(tmp_path, stream, "", "-m", "arrowcache", "info", str(tmp_path / "none"))
    assert not done.stdout
    assert done.returncode in (2, *UNTAKEN.get(stream, ()))


def fails(*_: object, **__: object) -> None:
    raise RuntimeError("no bar")


def test_a_pool_that_cannot_be_made_leaves_no_sign_that_somebody_writes(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    kept = []
    for target in (
        "arrowcache.sampling.dispatcher.progress_bar",
        "arrowcache.sampling.pool.finalizer",
        "arrowcache.sampling.pool.start",
        "arrowcache.sampling.workers.Workers",
        "arrowcache.sampling.executors.take_numbers",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, fails)
            with pytest.raises(RuntimeError, match="no bar") as caught:
                ac.SamplerPool(cache, draws(), progress=False)
        kept.append(caught)  # its traceback has the pool
        assert not cache.store.usage.somebody_writes(), target
    for options in ({"on_full": "perhaps"}, {"timeout": -1}, {"max_delay": "soon"}):
        with pytest.raises((ValueError, TypeError)) as caught:
            cache.writer(**options)
        kept.append(caught)
        assert not cache.store.usage.somebody_writes(), options
    with ac.Loader(cache, 16) as loader:
        assert len(list(loader)) == 1
