"""Notes: what is known of rows: excluded, tagged, or a value such as a loss. Kept with the cache.

Each call writes one small file into `notes/`, whole or not at all, with the next number, under cache.lock;
files never change. Of two notes on one matter the one of the higher number counts. Neighbours of similar size
are merged into one file, which has the numbers of both: so there are few. Who dies in between leaves a file
within another's numbers, which nobody reads, and the next merge removes.

There are two kinds. Marks (exclusions and tags) are on the disk before the call returns, and leave only with
their segment. Values (annotations) may be lost in a power cut; above an eighth of the capacity, or where
other notes need their room, the oldest leave. A file leaves with the newest segment that it has a note on.

Guarantees: notes count in the capacity; who reads takes no lock, and sees a call's notes wholly or not at
all; notes on rows that are gone are not seen.
Must never: change a segment, or an epoch that is under way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

import numpy as np
import xxhash
from numpy.typing import NDArray

from arrowcache.errors import ArrowCacheError, CacheFormatError, CacheFullError, log, warn
from arrowcache.storage.layout import MOST_NOTE_BYTES, NoteFile
from arrowcache.storage.note_lines import (
    EXCLUDED,
    INCLUDED,
    NO_LINES,
    TAGGED,
    UNTAGGED,
    VALUE,
    NoteLines,
    Rows,
    Said,
)
from arrowcache.storage.row_ids import found, is_row_id
from arrowcache.storage.store import Store
from arrowcache.units import did_you_mean, format_bytes, require_text

MARKS, VALUES = "marks", "values"
NO_TAGS = ("included", "all")  # what else may be said of rows
_MOST_MERGED = 32 << 20  # bytes of a file that is merged: cache.lock is held meanwhile
_VALUE_BYTES = 4  # of one value, at least
_ROW_BYTES = 12  # of a value and its row, and to merge files of them
_SECONDS = 60.0  # between two lines in the log
_ATTEMPTS = 100  # to read files that others merge meanwhile


class Notes:
    """The notes of one cache. Safe to use from several threads and processes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, NoteLines] = {}  # by the name of their file; replaced as a whole
        self._lost: str | None = None  # the first time that values left for want of room; "" once told
        self._logged = -math.inf  # the last time that it was logged

    # writing

    def exclude(self, ids: NDArray[np.int64], reason: str) -> int:
        """Have all that trains leave out rows (n, 2). Returns: the number of those still there."""
        return self._mark(ids, EXCLUDED, reason)

    def include(self, ids: NDArray[np.int64]) -> int:
        """Take back the exclusion of rows (n, 2). Returns: the number of those still there."""
        return self._mark(ids, INCLUDED, "")

    def tag(self, ids: NDArray[np.int64], tag: str) -> int:
        """Give rows (n, 2) a tag. Returns: the number of those still there."""
        return self._mark(ids, TAGGED, require_tag(tag))

    def untag(self, ids: NDArray[np.int64], tag: str) -> int:
        """Take a tag off rows (n, 2). Returns: the number of those still there.

        Raises: ValueError: no row has or had it, and some of these are there.
        """
        return self._mark(ids, UNTAGGED, require_tag(tag))

    def annotate(self, values: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]) -> None:
        """Write values of rows, by name: rows (n, 2), values (n,). Those of rows that left are not seen.

        Of more than values may take the last ones are written. Call `merge` now and then.
        """
        rows = Rows.of(self._store.segments())
        while True:
            said = []
            for place, (ids, value) in enumerate(values.values()):
                numbers, is_there = rows.numbers(ids)
                said.append(Said.of(numbers, VALUE, place, value[is_there]))
            lines = NoteLines.of(rows, [*values], Said(*map(np.concatenate, zip(*said, strict=True))))
            data = lines.pack()
            if len(data) <= min(self._share, MOST_NOTE_BYTES):
                break
            self._lose(len(data) // 2)
            values = {name: (ids[len(ids) // 2 :], v[len(ids) // 2 :]) for name, (ids, v) in values.items()}
        if len(lines.lines):
            self._write(VALUES, lines, data)

    @property
    def most_values(self) -> int:
        """The number of values that there may be, at most."""
        return self._share // _VALUE_BYTES

    def has_grown(self, values: int) -> bool:
        """True if there may be so many values, by a capacity that another process has raised."""
        with self._store.locked():
            self._store.refresh_settings()
        return values <= self.most_values

    @property
    def _share(self) -> int:
        """The most bytes that notes of a kind take."""
        return self._store.settings.notes_bytes

    def warn_of_loss(self) -> None:
        """Warn, once, of values that left for want of room. Where warnings are errors it is only logged."""
        if self._lost:
            message, self._lost = self._lost, ""
            with suppress(RuntimeWarning):
                warn(message)

    def _lose(self, nbytes: int) -> None:
        self.lose(
            f"the oldest annotations of {self._store.folder.path} leave, {format_bytes(nbytes)} now: all may "
            f"take {format_bytes(self._share)}, an eighth of the capacity, where exclusions, tags and leased "
            "segments leave them as much. Rows without a value weigh as much as the heaviest. Raise the "
            "capacity with cache.resize(), or annotate fewer rows, or by fewer names"
        )

    def lose(self, message: str) -> None:
        """Log that values were lost, at most once a minute, for `warn_of_loss` to warn of the first time."""
        if (now := time.monotonic()) - self._logged > _SECONDS:
            self._logged = now
            log(message)
        if self._lost is None:
            self._lost = message

    def _mark(self, ids: NDArray[np.int64], what: int, text: str) -> int:
        with self._store.locked():
            self._store.refresh_settings()
            rows = Rows.of(self._store.segments())
            next_seq = self._store.folder.read_record().next_seq
        segments, is_there = found(ids, rows.seqs, np.diff(rows.starts), next_seq)
        if is_there.any():
            if what == UNTAGGED and text not in (tags := self.tags()):
                raise ValueError(f"{_no_tag(text, tags)}; it can be taken off no row")
            numbers = (rows.starts[segments] + ids[:, 1])[is_there]
            del segments  # large, as may be the ids
            lines = NoteLines.of(rows, [text], Said.of(numbers, what))
            self._write(MARKS, lines, lines.pack())
            self.merge(MARKS)
            self.warn_of_loss()
        return int(is_there.sum())

    def _write(self, kind: str, lines: NoteLines, data: bytes) -> None:
        """Write lines as the newest file of a kind."""
        with self._store.locked():
            last = max((file.last for file in self._store.folder.note_files()), default=0)
            number = max(last + 1, time.time_ns())  # no number is given twice, also where the last file left
            self._link(NoteFile(number, number, lines.newest, _digest(data), kind), data, lines)

    def merge(self, kind: str) -> None:
        """Merge files of similar size. Never fails: it is done another time."""
        with suppress(ArrowCacheError, OSError):
            while self._merge(kind):
                pass

    def _merge(self, kind: str) -> bool:
        """Merge the newest file of a kind with the one before it, if that is not much larger.

        Returns: True if it has. cache.lock is taken only to put the merged file in their place.
        """
        folder, files = self._store.folder, self._files(kind)
        older, newer = map(folder.note_bytes, files[-2:]) if len(files) > 1 else (1, 0)
        if older > min(2 * newer, _MOST_MERGED, self._share):
            return False
        lines = self._lines(files[-2]).joined(self._lines(files[-1]), Rows.of(self._store.segments()))
        data = lines.pack()
        file = NoteFile(files[-2].first, files[-1].last, lines.newest, _digest(data), kind)
        with self._store.locked():
            is_last = self._files(kind)[-2:] == files[-2:]
            if is_last:
                self._link(file, data, lines)
        return is_last

    def _link(self, file: NoteFile, data: bytes, lines: NoteLines) -> None:
        """Make a file appear, in place of those with the same numbers; under cache.lock."""
        folder = self._store.folder
        self._make_room(file, len(data))
        folder.sweep()
        self._require_room(file, len(data))
        folder.link_note(file, data, syncs=file.kind == MARKS)
        self._known = {**self._known, file.name: lines}
        for other in folder.note_files():
            if other.kind == file.kind and other.is_within(file):
                folder.drop_note(other)

    def _make_room(self, new: NoteFile, more: int) -> None:
        """Drop the oldest values that leave no room for a file of more bytes, which may replace some.

        Raises: CacheFullError: marks would take too much.
        """
        folder, share, kind = self._store.folder, self._share, new.kind
        files = (file for file in folder.note_files() if not (file.kind == kind and file.is_within(new)))
        nbytes = {file: folder.note_bytes(file) for file in files}
        marks = sum(size for file, size in nbytes.items() if file.kind == MARKS)
        if kind == MARKS and (marks + more > share or more > MOST_NOTE_BYTES):
            raise CacheFullError(
                f"exclusions and tags take {format_bytes(marks)}, and these {format_bytes(more)} more, which "
                "is above an eighth of the capacity: choose so many rows by Loader(rows=a function), or "
                "raise the capacity"
            )
        values = [file for file in nbytes if file.kind == VALUES]
        left = share - more if kind == VALUES else share
        if kind == MARKS:  # rather values than segments
            left = min(left, self._store.settings.capacity_bytes - more - self._others_bytes(nbytes))
        lost = 0
        for file in reversed(values):
            left -= nbytes[file]
            if left < 0:
                folder.drop_note(file)
                lost += nbytes[file]
        if lost:
            self._lose(lost)

    def _require_room(self, new: NoteFile, more: int) -> None:
        """Evict as much as a file of more bytes needs. Where all is leased, rather the oldest values leave.

        Raises: CacheFullError: there are none, or it is a merged file, which is made another time.
        """
        folder = self._store.folder
        while True:
            try:
                return self._store.require_room(more)
            except CacheFullError:
                oldest = next((file for file in folder.note_files() if file.kind == VALUES), None)
                if oldest is None or new.first < new.last:
                    raise
                nbytes = folder.note_bytes(oldest)
                folder.drop_note(oldest)
                self._lose(nbytes)

    def missing_bytes(self, rows: int) -> int:
        """The bytes that values of so many rows may take beyond those that are there; under cache.lock."""
        folder = self._store.folder
        there = sum(folder.note_bytes(file) for file in folder.note_files() if file.kind == VALUES)
        return max(0, min(self._share, _ROW_BYTES * rows) - there)

    def _others_bytes(self, nbytes: Mapping[NoteFile, int]) -> int:
        """Return the allocated bytes of all but values."""
        values = sum(size for file, size in nbytes.items() if file.kind == VALUES)
        return self._store.allocated_bytes(self._store.segments()) - values

    # reading

    def version(self, kind: str) -> tuple[NoteFile, ...]:
        """The files of a kind, in order, which change with each note. Empty before the first."""
        files = self._files(kind)
        while files != (again := self._files(kind)):  # one may miss a new file and what it is made of
            files = again
        return tuple(files)

    def excluded(self, rows: Rows) -> NDArray[np.bool_]:
        """Tell which rows are excluded: (rows,)."""
        return self._marked(rows, INCLUDED, EXCLUDED)

    def tagged(self, rows: Rows, tag: str) -> NDArray[np.bool_]:
        """Tell which rows have a tag: (rows,)."""
        return self._marked(rows, UNTAGGED, TAGGED, tag)

    def values(self, rows: Rows, name: str) -> NDArray[np.float64]:
        """The latest value of this name of each row: (rows,); NaN where none is."""
        values = np.full(rows.size, np.nan)
        for _, said in self._said(VALUES, rows, VALUE, text=name):
            values[said.numbers] = said.values
        return values

    def reasons(self, rows: Rows) -> NDArray[np.object_]:
        """The reason of each excluded row, and None of the others: (rows,)."""
        none = np.array(None)
        reasons = np.full(rows.size, none)
        for texts, said in self._said(MARKS, rows, INCLUDED, EXCLUDED):
            reasons[said.numbers] = np.where(said.says(EXCLUDED), np.array(texts, object)[said.texts], none)
        return reasons

    def tags(self) -> list[str]:
        """All tags that rows have or had, in order."""
        return sorted(
            {text for notes in self.parts(MARKS).values() for text in notes.texts_of(UNTAGGED, TAGGED)}
        )

    def names(self) -> list[str]:
        """The names of all values, in order."""
        return sorted({text for notes in self.parts(VALUES).values() for text in notes.texts_of(VALUE)})

    def require_known_tag(self, tag: str, expected: Collection[str] = ()) -> None:
        """Check that some row has or had a tag, or that it is to come. Raises: ValueError: neither."""
        if tag in expected or tag in (tags := self.tags()):
            return
        raise ValueError(
            f"{_no_tag(tag, tags)}; cache.tag(ids, {tag!r}) gives it to rows, and a Loader takes one that is "
            f"only to come by expect={tag!r}"
        )

    def _marked(self, rows: Rows, off: int, on: int, text: str | None = None) -> NDArray[np.bool_]:
        marked = np.zeros(rows.size, np.bool_)
        for _, said in self._said(MARKS, rows, off, on, text=text):
            marked[said.numbers] = said.says(on)
        return marked

    def _said(
        self, kind: str, rows: Rows, *whats: int, text: str | None = None
    ) -> Iterator[tuple[tuple[str, ...], Said]]:
        """Read what notes of a kind say of rows, in order, each with the texts that it has."""
        for notes in self.parts(kind).values():
            for said in notes.of_rows(rows, *whats, text=text):
                yield notes.texts, said

    def parts(self, kind: str) -> dict[str, NoteLines]:
        """All notes of a kind, by the name of their file, in order."""
        for left in reversed(range(_ATTEMPTS)):
            try:
                known = {file.name: self._lines(file) for file in self.version(kind)}
                break
            except FileNotFoundError:  # it was merged into another one meanwhile
                if not left:
                    raise
        others = {name: lines for name, lines in self._known.items() if f".{kind}." not in name}
        self._known = others | known
        return known

    def _files(self, kind: str) -> list[NoteFile]:
        """The files of a kind, in order, without those whose numbers another one has, too."""
        files: list[NoteFile] = []
        for file in self._store.folder.note_files():
            if file.kind == kind and not (files and file.last <= files[-1].last):
                files.append(file)
        return files

    def _lines(self, file: NoteFile) -> NoteLines:
        """The content of a file. Raises: FileNotFoundError: it was merged. CacheFormatError: damage."""
        if (known := self._known.get(file.name)) is not None:
            return known
        folder, lines = self._store.folder, NO_LINES
        path = folder.notes / file.name
        data = folder.read_note(file)
        if file.fits(data):
            lines = NoteLines.unpack(data, str(path))
        elif file.kind == MARKS:
            raise CacheFormatError(
                f"{path} is damaged, which says which rows are excluded and tagged: to go on without its "
                "notes, call cache.verify()"
            )
        else:  # values are not synced
            warn(f"{path} is damaged: its annotations are lost")
        self._known = {**self._known, file.name: lines}
        return lines


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _no_tag(tag: str, tags: Collection[str]) -> str:
    there = f"there are {', '.join(map(repr, tags))}" if tags else "there is none yet"
    return f"no row has the tag {tag!r}: {did_you_mean(tag, tags)}{there}"


def require_tag(tag: str) -> str:
    """Return a tag. Raises: TypeError, ValueError: it is none, or means something else to `Loader(rows=)`."""
    if not require_text(tag, "a tag") or tag in NO_TAGS or is_row_id(tag):
        raise ValueError(
            f"{tag!r} cannot be a tag, since rows={tag!r} says something else: take another text"
        )
    return tag
