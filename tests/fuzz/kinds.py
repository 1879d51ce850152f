"""Kinds: what is damaged, and what may come of it. Segments by mutation.py and readers.py; the rest here.

A case returns what became of it, in a word; any exception of a case is a defect.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import pickle
import random
import shutil
import signal
import socket
import threading
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from fuzz.mutation import KINDS as SEGMENT_KINDS
from fuzz.readers import examine
from fuzz.subjects import ROWS, SCHEMAS, SEGMENTS, Subject, rows_of

import arrowcache as ac
from arrowcache.reading.options import RankInfo
from arrowcache.reading.ranks import SharedPlan
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import segment_name
from arrowcache.storage.mapping import FileMapping

_FOLDERS = ("segments", "incoming", "quarantine", "ranks", "pools")
_ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 8, 16, 2**20, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**40,
    0.5, -0.0, 1e308, float("inf"), float("nan"), "", "rows", "window", "int64", "float16", "O", "../../x",
    "\0", "\ud800", "x" * 5000, [], {}, [[]], [0], ["x"], {"x": 1}, [[[[]]]], "__import__('os').abort()",
)  # fmt: skip
Case = Callable[[], str]


class Bench:
    """The caches of one worker, and the cases over them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder / "caches", seed
        self._folder.mkdir()
        self._subjects: dict[str, Subject] = {}
        self._damaged: set[str] = set()
        self._outside = self._folder / "outside"
        self._outside.mkdir()
        (self._outside / "precious").write_bytes(b"precious")

    def subject(self, name: str) -> Subject:
        if name not in self._subjects:
            self._subjects[name] = Subject(self._folder, name)
        return self._subjects[name]

    def case(self, kind: str, subject: str, number: int) -> Case:
        """Prepare a case: the same in every process."""
        chance = random.Random(f"{self._seed} {kind} {subject} {number}")
        on = self.subject(subject)
        if kind in HARMS:
            return lambda: HARMS[kind]() or "equal"
        if kind in SEGMENT_KINDS:
            self._damaged.add(subject)
            data = SEGMENT_KINDS[kind](on.victim, number, chance)
            thorough = chance.random() < 0.1
            return lambda: _segment(on, data, chance, thorough=thorough)
        if subject in self._damaged:
            self._damaged.remove(subject)
            on.restore()
        return lambda: OTHER_KINDS[kind](on, chance, self._outside)

    def warm_up(self, kind: str, subject: str) -> None:
        """Have everything imported that a case imports at its first use."""
        on = self.subject(subject)
        chance = random.Random(0)
        for data in (on.victim.data, on.victim.data[:-1]):
            examine(on, data, chance, thorough=True)
        if kind in OTHER_KINDS:
            for number in range(20):
                with contextlib.suppress(Exception):
                    self.case(kind, subject, -1 - number)()
        self.restore(subject)

    def restore(self, subject: str) -> None:
        self.subject(subject).restore()

    def close(self) -> None:
        for each in self._subjects.values():
            each.close()


def _segment(on: Subject, data: bytes, chance: random.Random, *, thorough: bool) -> str:
    said = examine(on, data, chance, thorough=thorough)
    return next((word for word in ("different", "refused") if word in said.values()), "equal")


def _settings(on: Subject, chance: random.Random, outside: Path) -> str:
    """cache.json: any byte, or any value with the checksum that belongs to it."""
    path = on.folder / "cache.json"
    data = path.read_bytes()
    if chance.random() < 0.4:
        path.write_bytes(_altered(data, chance))
    else:
        record = json.loads(data)
        del record["checksum"]
        for _ in range(chance.choice([1, 1, 2])):
            record = _replaced(record, chance)
        if isinstance(record, dict) and chance.random() < 0.5:
            text = json.dumps(record)
            record["checksum"] = xxhash.xxh3_64_hexdigest(text.encode())
        path.write_text(json.dumps(record))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return _read_all(on)
    except ac.CacheFormatError:
        assert len(os.listdir(on.folder / "segments")) == SEGMENTS
        return "refused"
    except MemoryError as error:
        if "ulimit" not in str(error):  # no address space for segments of such a size
            raise
        return "refused"
    finally:
        on.restore()


def _read_all(on: Subject) -> str:
    """Open the cache anew and read every row: each is what was written, or is refused."""
    refused = 0
    with ac.Cache.open(on.folder) as cache, cache.snapshot() as snapshot:
        for first in range(0, len(snapshot), ROWS):
            try:
                got = rows_of(snapshot.gather(np.arange(first, first + ROWS)))
            except ac.CorruptSegmentError:
                refused += 1
            else:
                assert not on.differing(got)
        cache.stats()
        cache.verify(repair=False)
    return "refused" if refused else "equal"


def _lock(on: Subject, chance: random.Random, outside: Path) -> str:
    """cache.lock: the next number, whatever it says, is one that no segment has."""
    path = on.folder / "cache.lock"
    data = chance.choice(
        [_altered(path.read_bytes(), chance), chance.randbytes(chance.randrange(60)), b"\xff" * 52]
    )
    path.write_bytes(data)
    try:
        assert _read_all(on) == "equal"
        with ac.Cache.open(on.folder) as cache:
            _publish_again(on, cache)
            assert cache.verify() == []
        return "equal"
    finally:
        on.restore()


def _publish_again(on: Subject, cache: ac.Cache) -> None:
    with cache.snapshot() as snapshot:
        newest = snapshot.segments[-1].seq
        sample = {n: v[0] for n, v in snapshot.gather([0]).items() if not isinstance(v, ac.Values)}
        for name in set(on.schema) - set(sample):
            kind = on.schema[name]
            assert isinstance(kind, ac.Ragged)
            sample[name] = np.zeros((0, *kind.inner_shape), kind.numpy_dtype)
    with cache.writer(on_full="raise") as writer:
        writer.append(**sample)
    with cache.snapshot() as snapshot:
        assert snapshot.segments[-1].seq > newest


def _names(on: Subject, chance: random.Random, outside: Path) -> str:
    """Odd names and things in every folder: none is followed, none is deleted that is not ours."""
    for _ in range(chance.choice([1, 2, 6])):
        with contextlib.suppress(FileExistsError):
            _put_odd(on, chance, outside)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            got: dict[int, Any] = {}
            with ac.Cache.open(on.folder) as cache:
                with ac.Loader(cache, 4, shuffle=None, drop_last=False, timeout=10) as loader:
                    for batch in loader:
                        got |= rows_of(batch)
                assert not on.differing(got)
                cache.verify(repair=chance.random() < 0.5)
                cache.stats()
                with contextlib.suppress(ac.CacheFormatError):  # a number that is the last one
                    _publish_again(on, cache)
                cache.evict(1)
        assert os.listdir(outside) == ["precious"]
        assert (outside / "precious").read_bytes() == b"precious"
        return "equal" if len(got) == len(on.rows) else "refused"
    finally:
        on.restore()


def _put_odd(on: Subject, chance: random.Random, outside: Path) -> None:
    numbers = [0, 1, 2, 3, 4, 99, 2**31, 2**60 - 1, 2**60, 2**62, 2**63, 2**64, 10**20 - 1]
    rows = [0, 1, ROWS, ROWS + 1, 2**31 - 1, 2**31, 10**18, 10**19]
    names = [
        segment_name(chance.choice(numbers), chance.choice(rows), chance.choice(["", "a", "..", "x" * 150])),
        segment_name(chance.choice(numbers), ROWS, ""),
        f"{chance.randrange(2**128):032x}.{chance.choice(['part', 'wait', 'arrow'])}",
        f"run-{'0' * 16}-{chance.choice(numbers)}-0",
        chance.choice(["..arrow", "...", "~", "a\nb", "é" * 50, "-rf", "$(id)", "%s", "x" * 255, "a.reason"]),
        os.fsdecode(b"\xff\xfe.arrow"),
        segment_name(1, ROWS, "") + ".reason",
    ]  # fmt: skip
    path = on.folder / chance.choice([*_FOLDERS, "segments", "segments"]) / chance.choice([*names, names[0]])
    kind = chance.randrange(7)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(chance.choice([outside, outside / "precious", path, "/dev/zero", "../../../x"]))
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        with socket.socket(socket.AF_UNIX) as made, contextlib.suppress(OSError):  # its path may be too long
            made.bind(os.fspath(path))
    elif kind == 4:
        if not os.path.lexists(path):
            path.write_bytes(chance.choice([b"", b"ARROW1", chance.randbytes(5000)]))
    elif not os.path.lexists(path):
        shutil.copy(on.folder / "segments" / chance.choice(on.files), path)


def _ranks(on: Subject, chance: random.Random, outside: Path) -> str:
    """A file in ranks/, altered while a rank uses it, or put there before: the same rows, or an error."""
    run = f"run{chance.randrange(10**9)}"
    agreements = [SharedPlan(on.cache.store, RankInfo(rank, 2, run, 2)) for rank in range(2)]
    snapshots: list[Snapshot | None] = []
    try:
        snapshots.append(agreements[0].snapshot(0, {"seed": 0}, lambda: _taken(on)))
        (path,) = (on.folder / "ranks").iterdir()
        line, _, rest = path.read_bytes().partition(b"\n")
        if chance.random() < 0.4:
            altered = _altered(line + b"\n" + rest, chance)
        else:
            record = json.loads(line.partition(b" ")[2])
            for _ in range(chance.choice([1, 1, 3])):
                record = _replaced(record, chance)
            text = json.dumps(record).encode()
            altered = xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n" + rest
        path.write_bytes(altered)  # in place: it is held
        try:
            snapshots.append(agreements[1].snapshot(0, {"seed": 0}, lambda: _taken(on)))
        except (ac.CacheFormatError, ac.CorruptSegmentError, ValueError):
            return "refused"
        joined = snapshots[-1]
        assert joined is not None
        if not len(joined):
            return "refused"
        assert not on.differing(rows_of(joined.gather(np.arange(len(joined)))))
        return "equal"
    finally:
        for each in (*snapshots, *agreements):
            if each is not None:
                each.close()
        on.cache.verify()
        for left in (on.folder / "ranks").iterdir():
            left.unlink()


def _taken(on: Subject) -> Snapshot:
    snapshot = Snapshot.take(on.cache.store)
    snapshot.map_all()
    return snapshot


def _state(on: Subject, chance: random.Random, outside: Path) -> str:
    """A loader's state: a ValueError, or rows that were written."""
    shuffle = chance.choice(["rows", "window", "blocks", None])
    with ac.Loader(on.cache, 4, shuffle=shuffle) as loader:  # which a slow machine may keep waiting
        for _ in islice(loader, chance.randrange(3)):
            pass
        state: Any = loader.state_dict()
    with warnings.catch_warnings(), ac.Loader(on.cache, 4, shuffle=shuffle, timeout=0.2) as loader:
        warnings.simplefilter("ignore", RuntimeWarning)
        if chance.random() < 0.3 and state["segments"]:
            state["segments"] = [_replaced(run, chance) for run in state["segments"] * chance.randrange(3)]
        for _ in range(chance.choice([1, 1, 2, 4])):
            state = _replaced(state, chance)
        try:
            loader.load_state_dict(state, chance.choice(["skip", "raise"]))
        except (ValueError, ac.MissingSegmentsError):
            return "refused"
        return _deliver(on, loader)


def _deliver(on: Subject, batches: Any) -> str:
    try:
        for batch in islice(batches, 12):
            assert not on.differing(rows_of({n: v for n, v in batch.items() if not n.startswith("_")}))
    except (ac.LoaderTimeoutError, ac.MissingSegmentsError):
        return "refused"
    return "equal"


def _replaced(node: Any, chance: random.Random) -> Any:
    """A copy of a JSON value in which one value is another one."""
    node = copy.deepcopy(node)
    if not isinstance(node, dict | list) or not node or chance.random() < 0.03:
        return chance.choice([*_ODD_VALUES, *([node + 1, -node, node * 2] if isinstance(node, int) else [])])
    key = chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
    way = chance.random()
    if way < 0.08:
        del node[key]
    elif way < 0.12 and isinstance(node, list):
        node += node
    elif way < 0.16 and isinstance(node, dict):
        node[chance.choice(["more", "", "__class__"])] = chance.choice(_ODD_VALUES)
    else:
        node[key] = _replaced(node[key], chance)
    return node


def _altered(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, left out or put in."""
    altered = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.randrange(len(altered) + 1)
        way = chance.randrange(4)
        if way == 0:
            del altered[at : at + chance.choice([1, 5, 500])]
        elif way == 1:
            altered[at:at] = chance.choice(
                [chance.randbytes(1), b"0", b"[" * 3000, b"\0" * 9, b'"', b"9" * 5000]
            )
        elif at < len(altered):
            altered[at] ^= 1 << chance.randrange(8)
    return bytes(altered)


OTHER_KINDS = {
    "settings": _settings, "lock": _lock, "names": _names, "ranks": _ranks, "state": _state,
}  # fmt: skip
SUBJECTS = tuple(SCHEMAS)


def _other_rows() -> None:
    raise AssertionError("other rows")


HARMS: dict[str, Callable[[], Any]] = {
    "segfault": lambda: signal.raise_signal(signal.SIGSEGV),
    "abort": os.abort,
    "hang": lambda: threading.Event().wait(),
    "wrong": _other_rows,
    "outside": lambda: os.listdir("/"),
    "upwards": lambda: os.listdir(".."),
    "mapped": lambda: FileMapping("/etc/passwd") and None,
    "eval": lambda: eval("'equal'"),
    "import": lambda: importlib.import_module("fuzz_of_no_such_name"),
    "unpickle": lambda: pickle.loads(pickle.dumps(Path())) and None,
    "memory": lambda: b"x" * (400 << 20) and None,
}
"""What a campaign must notice, for its own test."""
