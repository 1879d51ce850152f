"""What several tests share. Everything here looks at a cache from outside, past the code under test."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

import arrowcache as ac
from arrowcache.arrow.segment import Column, VariableColumn, encode
from arrowcache.limits import Limits
from arrowcache.proc import OpenFile
from arrowcache.storage.counters import LOADER_LINK, LoaderCounts, seen_loaders

if TYPE_CHECKING:
    import pytest

KIB = 1024
DEADLINE_SECONDS = 60.0  # what fails waits so long; a loaded machine takes 25 s to start TensorFlow thrice

ROW = ac.Schema({"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (16, 16))})
"""A row's content is a function of its id: see `sample`."""

DTYPES = [
    "bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
EVERY_TYPE = ac.Schema(
    {"id": ac.Tensor("int64")}
    | {f"scalar_{dtype}": ac.Tensor(dtype) for dtype in DTYPES}
    | {f"tensor_{dtype}": ac.Tensor(dtype, (3, 5)) for dtype in DTYPES}
    | {f"ragged_{dtype}": ac.Ragged(dtype) for dtype in DTYPES}
    | {"boxes": ac.Ragged("float32", (4,)), "name": ac.String(), "data": ac.Binary(), "when": ac.Timestamp()}
)


def face(name: str) -> Any:
    """A face of the package, such as "torch.Loader"; where its framework is missing, the test is skipped."""
    import pytest  # which processes that tests start do not need

    framework, _, attribute = name.rpartition(".")
    if framework:
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    return getattr(
        importlib.import_module(f"arrowcache.{framework}" if framework else "arrowcache"), attribute
    )


def sample(number: int) -> dict[str, Any]:
    """The row of schema ROW whose id is `number`."""
    image = np.arange(256, dtype=np.float32).reshape(16, 16) + np.float32(number)
    return {"id": number, "image": image}


def overfill(cache: ac.Cache, on_full: str = "raise") -> None:
    """Append several capacities of rows of schema ROW, of which none stays half."""
    writer = cache.writer(on_full, timeout=DEADLINE_SECONDS)
    try:
        for number in range(10**5, 10**5 + 16 * 200):
            writer.append(sample(number))
    finally:
        writer.abort()


def ramp_rows(number: int, full_rows: int = 16) -> int:
    """Rows of a pool's task, by the documented formula: early ones fill small segments."""
    return max(1, full_rows >> max(0, 10 - number))


def full(sampler: Any) -> Any:
    """The sampler, which asks for full segments from the first task on."""
    sampler.ramp = False
    return sampler


Lock, RLock = type(threading.Lock()), type(threading.RLock())
CONTAINERS = dict, list, tuple, deque


def locks_of(*things: object) -> list[Any]:
    """All locks that objects of arrowcache have, themselves or in other objects of it."""
    todo, seen = [*things], set[int]()
    found: list[Any] = []
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, RLock) or (isinstance(thing, Lock) and not thing.locked()):
            found.append(thing)  # a plain one that is locked is a signal, as a Future has one
        elif type(thing) in CONTAINERS or any(
            kind.__module__.startswith("arrowcache.") for kind in type(thing).__mro__
        ):
            todo += gc.get_referents(thing)
    return found


@contextmanager
def held_by_another_thread(*things: object) -> Iterator[None]:
    """As a thread finds objects all whose locks another one has."""
    locks = locks_of(*things)
    assert locks
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            is_held.set()
            is_over.wait(DEADLINE_SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert is_held.wait(DEADLINE_SECONDS)
        yield
    finally:
        is_over.set()
        thread.join()


def limit(patch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Have other limits in this process, and in its forked children, until the patch is undone.

    In the text of a script: `Limits.current = Limits(mapped_segments=2)`.
    """
    patch.setattr(Limits, "current", dataclasses.replace(Limits.current, **changed))


def worker_processes_run(patch: pytest.MonkeyPatch, code: str, *, instead: bool = False) -> None:
    """Have processes that are started from now on run some Python first, or nothing but that."""

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            command = [*command]
            if "arrowcache.process" in (command[place := command.index("-c") + 1]):
                command[place] = code if instead else code + command[place]
            super().__init__(command, **options)

    patch.setattr(subprocess, "Popen", Popen)


def make_cache(path: Path, schema: ac.Schema = ROW, **options: Any) -> ac.Cache:
    """A small cache: segments of 16 rows within 1 MiB, unless said otherwise."""
    options = {"capacity": 1024 * KIB, "segment_bytes": 32 * KIB, "segment_rows": 16} | options
    return ac.Cache.create(path, schema, **options)


def publish(cache: ac.Cache, segments: int, first: int | None = None, rows: int = 16) -> None:
    """Publish full segments of schema ROW with consecutive ids; the first id follows the cache's last."""
    start = cache.stats().next_seq * rows if first is None else first
    with cache.writer(on_full="raise") as writer:
        for number in range(start, start + segments * rows):
            writer.append(sample(number))


def append_rows(cache: ac.Cache, numbers: Iterable[int]) -> None:
    """Publish rows of schema ROW with these ids; the last segment may be short."""
    with cache.writer() as writer:
        for number in numbers:
            writer.append(sample(number))


def ids_of(batches: Iterable[Mapping[str, Any]]) -> list[int]:
    """The `id` column of batches, one after another."""
    return [number for batch in batches for number in batch["id"].tolist()]


def mapped_seqs(cache: ac.Cache) -> list[int]:
    """Which segments this process has mapped, oldest first; each as often as it is."""
    folder = f"{cache.path}/segments/"
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    names = [fields[5] for fields in lines if fields[5:] and int(fields[2], 16) == 0]
    return sorted(int(name[len(folder) :].split("-")[0]) for name in names if name.startswith(folder))


def open_files() -> set[tuple[int, str]]:
    """Descriptors of this process, and what each is of; others than its own may go at any time."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it is that of the listing, or was closed meanwhile
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def seqs(cache: ac.Cache) -> list[int]:
    """Sequence numbers of what is published, read from the folder's names."""
    return sorted(int(name[:20]) for name in os.listdir(cache.path / "segments"))


def segment_files(cache: ac.Cache) -> list[Path]:
    """The published files, oldest first."""
    return sorted((cache.path / "segments").iterdir())


def disk_bytes(path: Path) -> int:
    """Allocated bytes of a whole tree, as `du` counts them."""
    total = os.lstat(path).st_blocks * 512
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:  # evicted meanwhile
                pass
    return total


def read_ids(path: Path) -> list[int]:
    """The `id` column of one segment's file, by a plain Arrow reader."""
    with pa.OSFile(str(path)) as file:
        ids: list[int] = pa.ipc.open_file(file).read_all()["id"].to_pylist()
    return ids


def published_ids(cache: ac.Cache) -> list[int]:
    """The `id` of every published row, oldest first, by a plain Arrow reader."""
    return [number for path in segment_files(cache) for number in read_ids(path)]


def file_bytes(schema: ac.Schema, columns: Mapping[str, Column]) -> bytes:
    """The file of one segment."""
    return b"".join(encode(schema, columns).pieces)


def variable(values: list[bytes], item_bytes: int = 1) -> VariableColumn:
    """A variable-length column of given values."""
    ends = np.cumsum([0, *(len(value) // item_bytes for value in values)]).astype(np.int32)
    return VariableColumn(ends, bytearray(b"".join(values)))


def columns_of(schema: ac.Schema, rows: int, seed: int = 0) -> dict[str, Column]:
    """Random columns of any schema, ready for `encode`."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Column] = {}
    for name, kind in schema.fixed.items():
        nbytes = rows * kind.row_bytes
        raw = rng.integers(0, 2 if kind.numpy_dtype.kind == "b" else 256, nbytes, np.uint8)
        columns[name] = raw.view(kind.numpy_dtype).reshape(rows, *kind.shape)
    for name, variable_kind in schema.variable.items():
        ragged = isinstance(variable_kind, ac.Ragged)
        item = variable_kind.item_bytes if ragged else 1
        values = [bytes(rng.integers(0, 128, item * int(rng.integers(0, 4)), np.uint8)) for _ in range(rows)]
        stored = item // variable_kind.elements if ragged else 1
        columns[name] = variable(values, stored)
    return columns


def held_rank_files(cache: ac.Cache) -> list[str]:
    """What some rank holds in ranks/; the rest is debris, left where cache.lock could not be had soon."""
    with cache.store.locked():
        cache.store.folder.sweep()
    return sorted(os.listdir(cache.path / "ranks"))


def goes_unheld(make: Callable[[], Any]) -> bool:
    """True if what `make` returns goes with its last reference, without the garbage collector."""
    gc.disable()
    try:
        return weakref.ref(make())() is None
    finally:
        gc.enable()


def loader_pages(pid: int | None = None) -> list[OpenFile]:
    """The pages on which the loaders of this process, or of another, show their counts."""
    pid, found = pid or os.getpid(), []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it is that of the listing, or was closed meanwhile
            if (link := os.readlink(f"/proc/{pid}/fd/{fd}")) == LOADER_LINK:
                found.append(OpenFile(pid, fd, link))
    return found


def shown_loaders(folder: Path, pid: int | None = None, now: float | None = None) -> list[LoaderCounts]:
    """What the loaders of a cache in this process, or in another, show."""
    return seen_loaders(folder, loader_pages(pid), now)


def worker_pids() -> list[int]:
    """The loaders' worker processes that this test began, in the order in which they were started."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # " (setup)" follows, or another one
    found = []
    for process in Path("/proc").iterdir():
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            command = (process / "cmdline").read_bytes()
            is_worker = parent == os.getpid() and b"arrowcache.reading.workers.worker" in command
            if is_worker and test.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except (OSError, IndexError):  # not a process, or one that has ended
            continue
    return sorted(found)


def names_in_dev_shm(pids: Iterable[int]) -> list[str]:
    """What has the number of one of these processes in its name; others use the folder meanwhile."""
    numbers = {str(pid) for pid in pids}
    return [name for name in os.listdir("/dev/shm") if numbers & {*re.findall(r"\d+", name)}]


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll until a condition holds; fails after a generous deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS} s for: {what}"
        time.sleep(0.002)


def wait_for_sleep(pid: int | None = None) -> None:
    """Until the main thread of a process, this one by default, has slept for 20 looks: it is in its wait."""
    stat, asleep = Path(f"/proc/{pid or os.getpid()}/stat"), 0
    while asleep < 20:
        asleep = asleep + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
        time.sleep(0.002)


def processor_seconds(pid: int) -> float:
    """What a process has used of all processors."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def flip_byte(path: Path, position: int) -> None:
    """Change one byte of a file in place; a negative position counts from its end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    replace_file(path, bytes(data))


def replace_file(path: Path, data: bytes) -> None:
    """Write other bytes under a file's name; a new file, so that no mapping sees it change."""
    temporary = path.with_name(path.name + ".test")
    temporary.write_bytes(data)
    temporary.rename(path)


@contextmanager
def in_child(body: Callable[[], None]) -> Iterator[int]:
    """Run a function in a forked child, which must end well; yields its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(DEADLINE_SECONDS))  # its end, if it hangs
        try:
            body()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed: see its traceback"


@contextmanager
def in_living_child(body: Callable[[], None]) -> Iterator[int]:
    """As `in_child`, with a child that has done its work as the block begins, and lives until its end."""
    (told, tells), (waits, ends) = os.pipe(), os.pipe()

    def live() -> None:
        os.close(ends)
        body()
        os.write(tells, b"-")
        os.read(waits, 1)

    with ExitStack() as descriptors:
        for fd in (told, waits):
            descriptors.callback(os.close, fd)
        with in_child(live) as pid:
            os.close(tells)
            try:
                assert os.read(told, 1), "the child failed: see its traceback"
                yield pid
            finally:
                os.close(ends)


def with_less(module: ModuleType, text: str, less: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a module made anew from its source, with less in place of a text that it has once.

    Modules that are imported, or made anew, from now on have it in the place of the module itself.
    """
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(text) == 1
    made = ModuleType(module.__name__)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(compile(source.replace(text, less), module.__file__, "exec"), made.__dict__)


def nearly_full(path: Path, headroom: float = 0.1) -> ac.Cache:
    """A cache of four segments, 5,000 rows with ids 0 to 4999, of which none was evicted; nobody writes.

    300 MB with rows of 48 KiB, a hundred times smaller: two segments are more than what is free.
    """
    schema = ac.Schema({"id": ac.Tensor("int64"), "data": ac.Tensor("uint8", (480,))})
    cache = ac.Cache.create(path, schema, "3MB", "640KiB", headroom=headroom)
    with cache.writer() as writer:
        writer.extend(id=np.arange(5000), data=np.zeros((5000, 480), np.uint8))
    assert cache.stats().rows == 5000
    return cache


def _used(field: int = 0) -> int:
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


def _free_stacks() -> None:
    """The C library keeps the stacks of threads, of the parent's too, until another thread ends."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    threading.Thread(target=int).start()
    wait_until(lambda: threads() <= before, "the end of a thread")


@contextmanager
def limited(more: int, kind: int = resource.RLIMIT_AS) -> Iterator[None]:
    """So many bytes beyond those in use; what others of this process freed is no use to it."""
    gc.collect()
    _free_stacks()
    ctypes.CDLL(None).malloc_trim(0)
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (_used(0 if kind == resource.RLIMIT_AS else 5) + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)
