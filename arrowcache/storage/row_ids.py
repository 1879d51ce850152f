"""Row ids: which row of which segment, as a pair, as text, as columns `_seq` and `_row`, or as a number.

An id stays that row's as long as the cache exists: segments never change, and no number is given twice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from arrowcache.arrow.convert import require_unmasked
from arrowcache.errors import MissingSegmentsError
from arrowcache.units import as_int, format_count, format_seconds, shortened

if TYPE_CHECKING:
    from arrowcache.storage.layout import SegmentInfo

ID_COLUMNS = ("_seq", "_row")
_TEXT = re.compile(r"(\d{1,18}):(\d{1,18})", re.ASCII)
_FORMS = "a RowId, a text such as '83:26', or a pair of ints (seq, row)"


class RowId(NamedTuple):
    """One row of a cache. Its text is "seq:row", as below the pictures of a gallery."""

    seq: int  #: number of its segment
    row: int  #: its place in the segment, from 0 on

    def __str__(self) -> str:
        return f"{self.seq}:{self.row}"

    @classmethod
    def parse(cls, text: str) -> RowId:
        """The id that a text such as "83:26" says.

        Raises: ValueError: it says none.
        """
        if (found := _TEXT.fullmatch(text)) is None:
            raise ValueError(f"{shortened(text, 60)!r} is no row id: write seq:row, such as '83:26'")
        return cls(int(found[1]), int(found[2]))


def is_row_id(text: str) -> bool:
    """True if a text names a row."""
    return _TEXT.fullmatch(text) is not None


def row_ids(ids: object) -> NDArray[np.int64]:
    """Any form in which rows are named, as (n, 2) int64: `_seq` and `_row` of each, in the order given.

    Args:
        ids: a RowId, or a text "seq:row"; several of them; integers (n, 2); a DataFrame of pandas or Polars,
            an Arrow table, a relation of DuckDB or a batch, with the columns `_seq` and `_row`.
    Raises: ValueError, TypeError: names the id that is none, and its place.
    """
    if hasattr(ids, "__arrow_c_stream__") and not hasattr(ids, "__array__"):  # such as DuckDB's relations
        ids = pa.table(ids)
    names = getattr(ids, "column_names", getattr(ids, "columns", None))
    if names is None and hasattr(ids, "keys") and not hasattr(ids, "dtype"):  # a Series has keys
        names = ids.keys()
    if names is not None:
        columns = _columns(ids, [str(name) for name in names])
        found = np.empty((len(columns[0]), 2), np.int64)
        found[:, 0], found[:, 1] = columns
    elif isinstance(ids, str) or (isinstance(ids, tuple) and _is_pair(ids)):
        found = np.array([_pair(ids, "ids")], np.int64)
    elif not isinstance(ids, Iterable):
        raise TypeError(f"ids={ids!r}: name rows by {_FORMS}, several of these, or columns _seq and _row")
    else:
        found = _rows(ids)
    if found.min(initial=0) < 0:
        at = int((found < 0).any(axis=1).argmax())
        seq, row = found[at].tolist()
        raise ValueError(f"ids[{at}] is {seq}:{row}: a row id has no negative number")
    return found


def _columns(ids: Any, names: Sequence[str]) -> list[NDArray[np.int64]]:
    if lacking := [name for name in ID_COLUMNS if name not in names]:
        there = shortened(", ".join(names), 200)
        raise ValueError(
            f"ids have no column {' and no '.join(lacking)}, which say which row each is: keep both "
            f"(there are {there})"
        )
    columns = [_integers(name, ids[name]) for name in ID_COLUMNS]
    if len(columns[0]) != len(columns[1]):
        raise ValueError(f"ids have {len(columns[0])} of _seq and {len(columns[1])} of _row: give as many")
    return columns


def _integers(name: str, values: Any) -> NDArray[np.int64]:
    array = on_host(values, f"ids: column {name!r}")
    if array.ndim != 1:
        raise ValueError(f"ids: column {name!r} has shape {array.shape}: each row has one")
    if array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    if array.dtype.kind == "f" and len(array):  # as a join in pandas makes of integers
        at = int((~np.isfinite(array)).argmax())
        raise TypeError(
            f"ids: {name}[{at}] is {array[at].item()!r}, of {array.dtype}, which is no int: drop rows "
            "without an id, and write .astype('int64')"
        )
    found = np.empty(len(array), np.int64)
    for at, value in enumerate(array.tolist()):  # pandas' own integers are objects to NumPy
        if not _is_int(value):
            raise TypeError(f"ids: {name}[{at}] is {value!r}, which is no int")
        found[at] = value
    return found


def on_host(values: Any, what: str) -> NDArray[Any]:
    """Values as an array, a tensor's copied from its device, without its gradient; bfloat16 as float.

    Raises: TypeError: a masked array.
    """
    if not hasattr(values, "detach"):
        require_unmasked(values, f"{what} came as", "value")
        array = np.asarray(values)
        is_half = array.dtype.itemsize == 2 and array.dtype.name == "bfloat16"  # a name takes 10 us
        return array.astype(np.float64) if is_half else array
    host: NDArray[Any] = (values.float() if "bfloat16" in str(values.dtype) else values).numpy(force=True)
    return host


def _rows(ids: Any) -> NDArray[np.int64]:
    if hasattr(ids, "detach") or (hasattr(ids, "dtype") and hasattr(ids, "ndim")):
        array = on_host(ids, "ids")
        if array.dtype.kind in "iu":
            if array.ndim != 2 or array.shape[1] != 2:
                raise ValueError(f"ids of shape {array.shape}: they are (n, 2), a seq and a row each")
            return array.astype(np.int64)
    items = ids.to_pylist() if hasattr(ids, "to_pylist") else ids
    pairs = [_pair(item, f"ids[{at}]") for at, item in enumerate(items)]
    return np.array(pairs, np.int64).reshape(-1, 2)


def _pair(item: Any, what: str) -> tuple[int, int]:
    if isinstance(item, str):
        try:
            return RowId.parse(item)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    if not _is_pair(item):
        raise TypeError(f"{what} is {shortened(repr(item), 60)}: a row is named by {_FORMS}")
    return item[0], item[1]


def _is_pair(item: Any) -> bool:
    is_two = isinstance(item, tuple | list | np.ndarray) and len(item) == 2
    return is_two and all(_is_int(number) and -(2**63) <= number < 2**63 for number in item)


def _is_int(value: Any) -> bool:
    try:
        as_int(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def are_among(
    seqs: NDArray[np.int64], others: NDArray[np.int64], places: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """True for each number (n,) that is among others, which rise. `np.isin` would import numpy.ma: 30 ms.

    Args:
        places: theirs in `others`, if they are known.
    """
    if not len(others):
        return np.zeros(len(seqs), np.bool_)
    places = others.searchsorted(seqs) if places is None else places
    found: NDArray[np.bool_] = others.take(places, mode="clip") == seqs
    return found


class NumberedRows(NamedTuple):
    """The rows of some segments, numbered from 0 on, oldest segment first.

    Args:
        seqs: (n,) int64, ascending.
        starts: (n + 1,) int64: the number of each segment's first row, and the number of all rows.
    """

    seqs: NDArray[np.int64]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, segments: Sequence[SegmentInfo]) -> NumberedRows:
        """All rows of segments, oldest first."""
        seqs, rows = ([getattr(each, name) for each in segments] for name in ("seq", "rows"))
        return cls.of_counts(np.array(seqs, np.int64), np.array(rows, np.int64))

    @classmethod
    def of_counts(cls, seqs: NDArray[np.int64], rows: NDArray[np.int64]) -> NumberedRows:
        """All rows of segments, given the seq and the number of rows of each."""
        return cls(seqs, np.append(0, np.cumsum(rows)))

    @property
    def size(self) -> int:
        return int(self.starts[-1])

    def numbers(
        self, ids: NDArray[np.int64], next_seq: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Number rows (n, 2). Returns: the numbers of those that are here, and a mask (n,) of these.

        Args:
            next_seq: the number of the segment that comes next, if these are all segments that are there.
        Raises: IndexError: a row that never was, if `next_seq` is given.
        """
        indices = self.seqs.searchsorted(ids[:, 0])
        is_listed = are_among(ids[:, 0], self.seqs, indices)
        starts = self.starts.take(indices, mode="clip")
        is_there = is_listed & (ids[:, 1] < self.starts.take(indices + 1, mode="clip") - starts)
        if next_seq is not None and (never := ~is_there & (is_listed | (ids[:, 0] >= next_seq))).any():
            at = int(never.argmax())
            why = f"no segment has this number yet: the next one gets {next_seq}"
            if is_listed[at]:
                rows = int(np.diff(self.starts)[indices[at]])
                why = f"its segment has {format_count(rows, 'row')}, from 0 on"
            raise IndexError(f"row {RowId(*ids[at].tolist())} (ids[{at}]) never was in the cache: {why}")
        return (starts + ids[:, 1])[is_there], is_there


def missing_rows_error(
    ids: NDArray[np.int64], is_there: NDArray[np.bool_], segments: Sequence[SegmentInfo]
) -> MissingSegmentsError:
    """The error for rows whose segments are not there any more. It says what is known of them.

    Args:
        segments: those that are there, oldest first.
    """
    at = int(is_there.argmin())
    lost, row = int((~is_there).sum()), RowId(*ids[at].tolist())
    which = f"row {row} has left the cache"
    if len(ids) > 1:
        which = f"{lost:,} of {format_count(len(ids), 'row')} left the cache, such as {row} (ids[{at}])"
    if not segments:
        return MissingSegmentsError(f"{which}: no segment is there now")
    oldest = segments[0]
    age = f"published {format_seconds(max(0.0, time.time() - oldest.published))} ago"
    why = f"the oldest segment there now is number {oldest.seq}, {age}"
    why += (
        "; what came before it was evicted"
        if row.seq < oldest.seq
        else (f", and number {row.seq} was removed since, such as by cache.verify()")
    )
    left = len(ids) - lost
    way = (
        f"pass missing='skip' for the {format_count(left, 'row')} still there"
        if left
        else ("look anew at what is there, or raise the cache's capacity to keep rows for longer")
    )
    return MissingSegmentsError(f"{which}: {why}: {way}")
