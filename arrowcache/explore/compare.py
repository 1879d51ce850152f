"""Compare: rows with other rows, and the oldest segments with the newest.

`duplicates` finds rows that are the same, or whose images are nearly the same; `similar` the rows nearest to
some; `map_of` puts rows on a plane. `drift` compares distributions.

Memory is bounded: values are read some MB at a time. Of each row a hash is kept, or of a map's rows at most
256 numbers.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import ks_2samp
from sklearn.decomposition import PCA
from sklearn.metrics import DistanceMetric
from sklearn.neighbors import NearestNeighbors
from sklearn.random_projection import SparseRandomProjection
from threadpoolctl import threadpool_limits

from arrowcache.arrow.schema import Binary, FieldType, Ragged, Schema, String, Tensor
from arrowcache.explore.columns import (
    AnyCache,
    annotated,
    floats,
    keeps_nothing,
    numbers,
    real,
    require_column,
    walk,
)
from arrowcache.explore.frames import RowsFrame, frame_of
from arrowcache.explore.pictures import FILES, NO_IMAGE, channel_axis
from arrowcache.explore.summary import Summary, summarize
from arrowcache.limits import Limits
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.recovery import store_of
from arrowcache.storage.row_ids import ID_COLUMNS, RowId, row_ids
from arrowcache.storage.store import Store
from arrowcache.units import format_count, parse_count

_WIDE_BYTES = 4096  # a column of such rows is hashed where it lies
_ROWS, _COLUMNS = 8, 9
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue, as in Pillow's "L"
METRICS = ("euclidean", "cosine")
_MAX_ASKED = 1000
_CHUNK_BYTES = 16 << 20


@keeps_nothing
def duplicates(
    cache: AnyCache,
    columns: Sequence[str] | str | None = None,
    progress: bool | None = None,
    near: int | None = None,
) -> pd.DataFrame:
    """Rows whose bytes are those of an earlier row, or whose images are nearly those of an earlier one.

    Two rows are the same if their 128-bit xxh3 is, which by chance happens to none. NaN equals a NaN of the
    same bits, and 0.0 is not -0.0.

    With `near`, two images are alike if their difference hashes, of 64 bits, differ in at most so many: the
    image in grey, averaged to 9 x 8 pixels, each compared with its right neighbour (Neal Krawetz, "Kind of
    Like That", 2013, by whom 0 is as good as the same, up to 10 perhaps another version, more another
    image). Going from the oldest on, an image belongs to the first row that it is like, or else is a first
    row itself. So without the duplicates no two images that stay are alike. All images without contrast are
    alike; files that are no PNG or JPEG, or damaged, are like none.

    Args:
        columns: which are compared; None for all. With `near`, one: tensors (h, w), (h, w, c) or (c, h, w),
            or image files as bytes.
        progress: show a bar; None: in a terminal or a notebook.
        near: bits that may differ, 0 to 63; None: compare bytes.
    Returns: one row a duplicate, oldest first: its id, `_seq` and `_row`, as in `to_pandas`, and that of the
        first row that is the same, `first_seq` and `first_row`; with `near`, also the `bits` that differ;
        all int64.
    Blocks: while the columns are read. Segments are released as they are passed. It takes some 50
        bytes of memory a row; with `near` 100, and then a time that grows with the square of the number of
        images that are like none: 8 s for 100,000.
    Raises: ValueError: with `near`, not one column, or one that holds no images. Else as `describe`.
    """
    store = store_of(cache)
    schema = store.settings.schema
    names = schema.select([columns] if isinstance(columns, str) else columns, least=1)
    if near is not None:
        return _near_duplicates(store, names, parse_count(near, "near", least=0, most=63), progress)
    with Snapshot.take(store) as snapshot:
        digests = np.empty((len(snapshot), 2), np.uint64)
        done = 0
        for _, batch in walk(snapshot, names, "comparing", progress):
            columns_of = [(batch.column(name), schema[name]) for name in names]
            _hash_rows(columns_of, digests[done : done + batch.num_rows])
            done += batch.num_rows
            del batch, columns_of
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: of the same ones the first row is first
        same = np.zeros(len(order), bool)
        same[1:] = (digests[order[1:]] == digests[order[:-1]]).all(axis=1)
        del digests
        firsts = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
        rows, first_rows = order[same], order[firsts[same]]
        by_age = np.argsort(rows)
        return _pairs(snapshot, rows[by_age], first_rows[by_age])


def _pairs(snapshot: Snapshot, rows: NDArray[np.int64], first_rows: NDArray[np.int64]) -> pd.DataFrame:
    ids, first_ids = snapshot.locate(rows), snapshot.locate(first_rows)
    found = {name: ids[name] for name in ID_COLUMNS}
    return pd.DataFrame(found | {f"first{name}": first_ids[name] for name in ID_COLUMNS})


def _near_duplicates(store: Store, names: Sequence[str], near: int, progress: bool | None) -> pd.DataFrame:
    if len(names) != 1:
        raise ValueError(f"near={near} compares the images of one column: name it, not {', '.join(names)}")
    wanted = "near duplicates are of images: tensors (h, w), (h, w, c) or (c, h, w), PNG and JPEG files"
    kind = require_column(store.settings.schema, names[0], holds_images, wanted)
    with Snapshot.take(store) as snapshot:
        hashes, has_one = np.zeros(len(snapshot), np.uint64), np.zeros(len(snapshot), bool)
        done = 0
        for _, batch in walk(snapshot, names, "hashing", progress):
            rows = slice(done, done := done + batch.num_rows)
            hashes[rows], has_one[rows] = hashes_of(batch.column(0), kind)
            del batch
        images = np.flatnonzero(has_one)
        firsts, bits = group_near(hashes[images], near)
        is_later = firsts != np.arange(len(images))
        pairs = _pairs(snapshot, images[is_later], images[firsts[is_later]])
        return pairs.assign(bits=bits[is_later])


def _hash_rows(columns: Sequence[tuple[pa.Array, FieldType]], digests: NDArray[np.uint64]) -> None:
    """The xxh3 of each row of a segment: of its narrow columns and all lengths, then of each other one."""
    rows = len(digests)
    packed: list[NDArray[np.uint8]] = [np.empty((rows, 0), np.uint8)]
    others: list[tuple[NDArray[np.int64], memoryview]] = []
    for column, kind in columns:
        if isinstance(kind, Ragged | String | Binary):
            data = column.buffers()[-1]
            item = column.values.type.bit_width // 8 if isinstance(kind, Ragged) else 1
            ends = np.frombuffer(column.buffers()[1], np.int32, rows + 1).astype(np.int64) * item
            packed.append(np.diff(ends).view(np.uint8).reshape(rows, 8))
            others.append((ends, memoryview(data or b"").cast("B")))
        else:
            values = numbers(column, kind).view(np.uint8)
            width = len(values) // rows
            if width < _WIDE_BYTES:
                packed.append(values.reshape(rows, width))
            else:
                others.append((np.arange(rows + 1) * width, values.data))
    found = []
    for row, start in enumerate(np.concatenate(packed, axis=1)):
        state = xxhash.xxh3_128(start)
        for ends, data in others:
            state.update(data[ends[row] : ends[row + 1]])
        found.append(state.digest())
    digests[:] = np.frombuffer(b"".join(found), np.uint64).reshape(rows, 2)


def holds_images(kind: FieldType) -> bool:
    if isinstance(kind, Tensor):
        return len(kind.shape) == 2 or (len(kind.shape) == 3 and channel_axis(kind.shape) is not None)
    return isinstance(kind, Binary)


def hashes_of(column: pa.Array, kind: FieldType) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """The hash of each row of a segment's column, and whether it has one: a damaged file has none."""
    if not isinstance(kind, Tensor):
        found = [_file_hash(value.as_buffer()) for value in column]
        return np.array([hash_ or 0 for hash_ in found], np.uint64), np.array([h is not None for h in found])
    flat, size = numbers(column, kind), math.prod(kind.shape)
    rows = max(1, Limits.current.hashed_numbers // size)
    parts = []
    with np.errstate(all="ignore"):  # whatever the numbers are
        for start in range(0, len(column), rows):
            piece = real(flat[start * size : (start + rows) * size], kind)
            parts.append(difference_hashes(piece.astype(np.float32).reshape(-1, *kind.shape)))
    return np.concatenate(parts), np.ones(len(column), bool)


def difference_hashes(images: NDArray[np.float32]) -> NDArray[np.uint64]:
    """The hash of each of several images, (n, h, w), or with channels, of which alpha is left out."""
    if images.ndim == 4:
        images = np.moveaxis(images, 1 + (channel_axis(images.shape[1:]) or 0), 3)
        images = images[..., :3] @ _LUMA if images.shape[3] >= 3 else images[..., 0]
    for axis, cells in ((1, _ROWS), (2, _COLUMNS)):
        edges = np.arange(cells) * images.shape[axis] // cells
        sizes = np.maximum(1, np.diff(edges, append=images.shape[axis]))
        images = np.add.reduceat(images, edges, axis=axis) / (sizes[:, None] if axis == 1 else sizes)
    bits = images[:, :, :-1] < images[:, :, 1:]
    return np.packbits(bits.reshape(len(bits), 64), axis=1).view(np.uint64).reshape(-1)


def _file_hash(data: pa.Buffer) -> int | None:
    try:
        with Image.open(io.BytesIO(data), formats=FILES) as image:
            image.draft("L", (8 * _COLUMNS, 8 * _ROWS))  # JPEG: decoded small at once
            small = image.convert("L").resize((_COLUMNS, _ROWS), Image.Resampling.BOX)
    except NO_IMAGE:
        return None
    return int(difference_hashes(np.asarray(small, np.float32)[None])[0])


def group_near(hashes: NDArray[np.uint64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each hash the place of the first one of its group, and how many bits differ from that. Pure.

    In their order, a hash joins the oldest group whose first one differs in at most `most` bits, or begins
    one. So those that begin groups differ in more, and nothing is chained. It takes some nanoseconds for each
    two that are compared: each different hash with the first one of each group.
    """
    different, places, which = np.unique(hashes, return_index=True, return_inverse=True)
    firsts, first_places = np.empty_like(different), np.empty_like(places)
    first_of, bits = np.empty_like(places), np.zeros_like(places)
    count = 0
    for at in np.argsort(places).tolist():
        off = _bits(firsts[:count] ^ different[at])
        near = off <= most
        group = int(near.argmax()) if count else 0
        if count and near[group]:
            first_of[at], bits[at] = first_places[group], off[group]
        else:
            firsts[count], first_places[count], first_of[at] = different[at], places[at], places[at]
            count += 1
    return first_of[which], bits[which]


def _bits(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The number of ones in each word, which NumPy 2 has as bitwise_count."""
    ones: NDArray[np.uint8] = _ONES[words.view(np.uint16)].reshape(-1, 4).sum(axis=1, dtype=np.uint8)
    return ones


_ONES = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)


def similar(
    cache: AnyCache,
    column: str,
    ids: object,
    n: int = 10,
    *,
    metric: str = "euclidean",
    max_rows: int | None = 100_000,
    seed: int = 0,
) -> pd.DataFrame:
    """The rows that are nearest to these by their values in a column, such as an embedding, or the pixels.

    A row's tensor is taken as one flat vector; all elements weigh the same. Complex numbers are taken by
    their magnitude. Found by scikit-learn's NearestNeighbors, exactly. Rows with a value that is not finite
    are near to none.

    Args:
        column: of tensors, or of one number a row.
        ids: the rows to begin from, at most 1,000, as of `rows`.
        n: how many rows for each of them; fewer where there are no more.
        metric: "euclidean", or "cosine", for which only the direction of a vector counts.
        max_rows: search at most so many rows, drawn at random; None: all.
        seed: of the draw.
    Returns: for each of `ids`, in their order, the nearest rows, nearest first, itself left out: `_seq` and
        `_row`, `query`, which is the id begun from as text, `distance`, float64, and the column, which a
        notebook shows as pictures; one named `query` or `distance` is `query_1` or `distance_1`.
    Blocks: while the values are read; until then every segment is leased.
    Raises: ValueError: a column without vectors, an unknown metric, a row to begin from that is not finite.
        MissingSegmentsError: one has left the cache. Else as `to_pandas`.
    """
    wanted, n = row_ids(ids), parse_count(n, "n")
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} must be one of {', '.join(METRICS)}")
    if len(wanted) > _MAX_ASKED:
        raise ValueError(f"ids name {format_count(len(wanted), 'row')}: begin from at most {_MAX_ASKED:,}")
    store = store_of(cache)
    schema = store.settings.schema
    kind = _vectors(schema, column)
    with Snapshot.take(store) as snapshot, threadpool_limits(1):  # more wait for each other where others work
        asked = snapshot.positions(wanted)
        vectors = [values for _, values in _chunks(snapshot, column, kind, asked, finite=False)]
        queries = np.concatenate(vectors) if vectors else np.empty((0, kind.elements))
        if len(bad := np.flatnonzero(~np.isfinite(queries).all(axis=1))):
            raise ValueError(f"row {RowId(*wanted[bad[0]].tolist())} has a {column!r} that is not finite")
        near: NDArray[np.int64] = np.zeros((len(asked), 0), np.int64)
        distance: NDArray[np.float64] = np.zeros((len(asked), 0))
        measure = metric  # by its name, squares would be subtracted, which far from 0 are all alike
        if metric == "euclidean":
            measure = DistanceMetric.get_metric(metric)
        searched = _drawn(snapshot, max_rows, seed) if len(asked) else asked
        for places, values in _chunks(snapshot, column, kind, searched):
            search = NearestNeighbors(n_neighbors=min(n + 1, len(places)), algorithm="brute", metric=measure)
            found, at = search.fit(values).kneighbors(queries)
            found[places[at] == asked[:, None]] = np.inf  # itself
            near, distance = np.hstack([near, places[at]]), np.hstack([distance, found])
            order = np.argsort(distance, axis=1, kind="stable")[:, :n]
            near = np.take_along_axis(near, order, axis=1)
            distance = np.take_along_axis(distance, order, axis=1)
        query, rank = np.nonzero(np.isfinite(distance))
        frame = frame_of(snapshot, store, near[query, rank], [*ID_COLUMNS, column])
    names = [str(RowId(*pair)) for pair in wanted.tolist()]
    queries_of = pd.Series([names[at] for at in query], dtype="str")
    return _with(frame, query=queries_of, distance=distance[query, rank])


def map_of(
    cache: AnyCache, column: str, by: str | None = None, *, max_rows: int = 10_000, seed: int = 0
) -> pd.DataFrame:
    """Rows as points of a plane on which rows of like values are close; `plot_map` draws it.

    The plane is that of the two principal components of the column's values, by scikit-learn's PCA; of more
    than 256 elements, of 256 sparse random projections, which keep distances to within some 10 % (Li, Hastie
    and Church, "Very Sparse Random Projections", KDD 2006). Rows with a value that is not finite are left
    out.

    Args:
        column: of tensors, such as images or embeddings.
        by: another column to go with it, of one value a row, such as the label, or an annotation: colors of
            `plot_map`.
        max_rows: at most so many rows, drawn at random. A row takes 1 KiB of memory.
        seed: of the draw.
    Returns: a row each, oldest first: `_seq` and `_row`, `x` and `y`, float64, and `by`; one named `x` or
        `y` is `x_1` or `y_1`. `attrs` has the names and, as `explained`, the shares of the variance along x
        and y. Points that are chosen of it are ids, as in `gallery(cache, column, rows=frame[frame.x > 3])`.
    Blocks: while the values are read; until then every segment is leased.
    Raises: ValueError: a column without vectors, fewer than three rows. Else as `to_pandas`.
    """
    store = store_of(cache)
    schema = store.settings.schema
    kind = _vectors(schema, column)
    if by is not None:
        require_column(annotated(store), by, _is_one, "a color stands for one number or text a row")
    kept: list[NDArray[np.float32]] = []
    places: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    project = SparseRandomProjection(Limits.current.map_numbers, dense_output=True, random_state=0)
    with Snapshot.take(store) as snapshot:
        for some, values in _chunks(snapshot, column, kind, _drawn(snapshot, max_rows, seed)):
            if not kept:
                origin = values[0].copy()  # far from 0 they would all be one float32
            values -= origin
            if values.shape[1] > Limits.current.map_numbers:
                values = project.transform(values) if kept else project.fit_transform(values)
            kept.append(values.astype(np.float32))
            places.append(some)
        frame = frame_of(snapshot, store, np.concatenate(places), [*ID_COLUMNS, *([by] if by else [])])
    if len(frame) < 3:
        raise ValueError(
            f"{store.folder.path} has {format_count(len(frame), 'row')} of finite values: a map is of three "
            "or more"
        )
    vectors = np.concatenate(kept)
    pca = PCA(min(2, vectors.shape[1]), random_state=0)
    points = np.zeros((len(frame), 2))
    with threadpool_limits(1), np.errstate(invalid="ignore"):  # where nothing varies there is no share
        points[:, : pca.n_components] = pca.fit_transform(vectors)
    frame = _with(frame, x=points[:, 0], y=points[:, 1])
    shown = None if by is None else str(frame.columns[-1])
    explained = np.nan_to_num(pca.explained_variance_ratio_).tolist()
    frame.attrs |= {"column": column, "by": shown, "explained": explained}
    return frame


def _with(frame: RowsFrame, **own: NDArray[np.float64] | pd.Series) -> RowsFrame:
    """Put columns after the ids. A column of the cache that has such a name becomes name_1, as in SQL."""
    taken = {name: f"{name}_1" for name in own if name in frame.columns}
    kinds = {taken.get(name, name): kind for name, kind in frame.kinds.items()}
    frame = frame.rename(columns=taken)
    frame.kinds = kinds
    for at, (name, values) in enumerate(own.items(), len(ID_COLUMNS)):
        frame.insert(at, name, values)
    return frame


def _vectors(schema: Schema, column: str) -> Tensor:
    wanted = "rows are compared by vectors of one length"
    kind = require_column(schema, column, lambda kind: isinstance(kind, Tensor), wanted)
    assert isinstance(kind, Tensor)
    return kind


def _is_one(kind: FieldType) -> bool:
    return isinstance(kind, String) or (isinstance(kind, Tensor) and not kind.shape)


def _drawn(snapshot: Snapshot, max_rows: int | None, seed: int) -> NDArray[np.int64]:
    """Places of rows, ascending."""
    rows = len(snapshot) if max_rows is None else min(len(snapshot), parse_count(max_rows, "max_rows"))
    rng = np.random.default_rng(parse_count(seed, "seed", least=0, most=None))
    return np.sort(rng.choice(len(snapshot), rows, replace=False)).astype(np.int64)


def _chunks(
    snapshot: Snapshot, column: str, kind: Tensor, places: NDArray[np.int64], finite: bool = True
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Rows some at a time: their places, and their values, (n, elements); the finite ones, unless all."""
    rows = max(1, min(Limits.current.neighbour_rows, _CHUNK_BYTES // (8 * kind.elements)))
    for start in range(0, len(places), rows):
        some = places[start : start + rows]
        values = np.asarray(snapshot.gather(some, [column])[column]).reshape(len(some), -1)
        values = floats(values, kind)  # of which scikit-learn is faster than of float32
        is_finite = np.isfinite(values).all(axis=1)
        if not finite:
            yield some, values
        elif is_finite.any():
            yield some[is_finite], values[is_finite]


@keeps_nothing
def drift(
    cache: AnyCache,
    columns: Sequence[str] | None = None,
    share: float = 0.25,
    progress: bool | None = None,
) -> pd.DataFrame:
    """How the newest segments' numbers differ from the oldest's: one row a column, the strongest drift first.

        first_mean, first_std, first_nan, newest_mean, newest_std, newest_nan   as in `describe`
        ks    the two-sample Kolmogorov-Smirnov statistic, 0 to 1: the largest distance between the two
              cumulative distributions (Smirnov, Annals of Mathematical Statistics 19, 1948)

    `ks` is of up to 200,000 values drawn from each side; so by chance alone it reaches some 0.01. It weighs
    elements as if they were independent, which those of one tensor are not.

    Args:
        columns: those of numbers, tensors and ragged; None for all of them.
        share: of the segments that are the oldest, and the newest; above 0, at most 0.5.
        progress: show a bar; None: in a terminal or a notebook.
    Blocks: while both shares are read. Segments are released as they are passed.
    Raises: ValueError: fewer than two segments; a column of no numbers; as `describe`.
    """
    store = store_of(cache)
    schema = store.settings.schema
    kinds = {name: kind for name, kind in schema.items() if isinstance(kind, Tensor | Ragged)}
    names = tuple(kinds) if columns is None else schema.select(columns, least=1)
    if others := [name for name in names if name not in kinds]:
        raise ValueError(f"column {others[0]!r} holds no numbers: leave it out of columns")
    if not names:
        raise ValueError("no column holds numbers: drift compares nothing else")
    if not isinstance(share, int | float) or not 0 < share <= 0.5:
        raise ValueError(f"share={share!r} is a share of the segments: give 0 < share <= 0.5")
    wanted = {name: kinds[name] for name in names}
    with Snapshot.take(store) as snapshot:
        seqs = [segment.seq for segment in snapshot.segments]
        if len(seqs) < 2:
            raise ValueError(
                f"{format_count(len(seqs), 'segment')} can be read, and drift compares two: wait for more"
            )
        count = max(1, int(len(seqs) * share))
        oldest, newest = frozenset(seqs[:count]), frozenset(seqs[-count:])
        with Snapshot.take(store, lambda segment: segment.seq in oldest) as part:
            snapshot.release_oldest(len(seqs) - count)  # `part` has the oldest, and moves on
            first = summarize(part, wanted, "oldest segments", progress, Limits.current.compared_values)
        with Snapshot.take(store, lambda segment: segment.seq in newest) as part:
            snapshot.close()
            last = summarize(part, wanted, "newest segments", progress, Limits.current.compared_values)
    rows = [_difference(first[name], last[name]) for name in names]
    frame = pd.DataFrame(rows, index=pd.Index(names, name="column"))
    return frame.sort_values("ks", ascending=False, kind="stable")


def _difference(first: Summary, newest: Summary) -> dict[str, float]:
    row: dict[str, float] = {}
    for which, side in (("first", first.values), ("newest", newest.values)):
        row |= {f"{which}_mean": side.mean, f"{which}_std": side.std, f"{which}_nan": side.nan_share}
    drawn = (np.concatenate(side.drawn) for side in (first, newest))
    one, other = (values[~np.isnan(values)] for values in drawn)
    is_told = len(one) and len(other)
    return row | {"ks": float(ks_2samp(one, other, method="asymp").statistic) if is_told else math.nan}
