"""Neighbours: rows that are like others by the values of a column, and a map on which such rows are close.

Memory is bounded: values are copied some MB at a time, and of a map's rows at most 256 numbers each are kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.metrics import DistanceMetric
from sklearn.neighbors import NearestNeighbors
from sklearn.random_projection import SparseRandomProjection
from threadpoolctl import threadpool_limits

from arrowcache.arrow.schema import FieldType, Schema, String, Tensor
from arrowcache.explore.frames import frame_of
from arrowcache.explore.noted import annotated
from arrowcache.explore.numbers import floats, require_column
from arrowcache.explore.shown import Rows
from arrowcache.explore.walk import AnyCache
from arrowcache.limits import Limits
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.recovery import store_of
from arrowcache.storage.row_ids import ID_COLUMNS, RowId, row_ids
from arrowcache.units import parse_count

METRICS = ("euclidean", "cosine")
_MOST_ASKED = 1000
_CHUNK_BYTES = 16 << 20


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
    if len(wanted) > _MOST_ASKED:
        raise ValueError(f"ids name {len(wanted):,} rows: begin from at most {_MOST_ASKED:,}")
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
            f"{len(frame)} rows of {store.folder.path} have finite values: a map is of three or more"
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


def _with(frame: Rows, **own: NDArray[np.float64] | pd.Series) -> Rows:
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
