"""Rows that are like others, and maps of rows."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from helpers import limit, make_cache, publish
from markup import seen

pytest.importorskip("sklearn", reason="the extra 'explore' is not installed")
pytest.importorskip("pandas", reason="the extra 'explore' is not installed")

import arrowcache as ac
from arrowcache import explore
from arrowcache.errors import MissingSegmentsError
from arrowcache.explore.compare import map_of, similar

SCHEMA = ac.Schema(
    {
        "point": ac.Tensor("float32", (3,)),
        "image": ac.Tensor("uint8", (20, 20)),
        "half": ac.Tensor("bfloat16", (3,)),
        "turn": ac.Tensor("complex64"),
        "label": ac.Tensor("int64"),
        "name": ac.String(),
        "boxes": ac.Ragged("float32", (4,)),
    }
)
COUNT = 90
RNG = np.random.default_rng(0)
LABELS = np.arange(COUNT) % 3
POINTS = (RNG.normal(size=(COUNT, 3)) + 20 * np.eye(3)[LABELS]).astype(np.float32)
HALVES = (POINTS.view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("neighbours") / "cache"
    sizes = {"capacity": "4MiB", "segment_bytes": "64KiB", "segment_rows": 20}
    with ac.Cache.create(path, SCHEMA, **sizes) as cache, cache.writer() as writer:
        writer.extend(
            point=POINTS,
            image=(RNG.integers(0, 20, (COUNT, 20, 20)) + 80 * LABELS[:, None, None]).astype(np.uint8),
            half=HALVES,
            turn=(np.exp(1j * np.arange(COUNT)) * (1 + np.arange(COUNT))).astype(np.complex64),
            label=LABELS,
            name=[f"<b>{label}</b>" for label in LABELS],
            boxes=[np.zeros((1, 4), np.float32)] * COUNT,
        )
    return path


@pytest.fixture
def cache(tmp_path, folder):
    with ac.Cache.open(shutil.copytree(folder, tmp_path / "cache")) as cache:
        yield cache


def places(frame) -> list[int]:
    return (20 * frame["_seq"] + frame["_row"]).tolist()


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("chunk", [7, 90])
def test_the_nearest_rows_come_first_however_they_are_read(cache, monkeypatch, metric, chunk):
    limit(monkeypatch, neighbour_rows=chunk)
    found = similar(cache, "point", ["4:9", "0:0"], n=8, metric=metric)
    assert list(found.columns) == ["_seq", "_row", "query", "distance", "point"]
    assert found["query"].tolist() == ["4:9"] * 8 + ["0:0"] * 8
    for start, at in ((0, 89), (8, 0)):
        if metric == "euclidean":
            off = np.linalg.norm(POINTS - POINTS[at], axis=1)
        else:
            unit = POINTS / np.linalg.norm(POINTS, axis=1, keepdims=True)
            off = 1 - unit @ unit[at]
        wanted = [place for place in np.argsort(off) if place != at][:8]
        part = found[start : start + 8]
        assert places(part) == wanted
        assert part["distance"].tolist() == pytest.approx(off[wanted], abs=1e-5)
        np.testing.assert_array_equal(np.stack(part["point"].tolist()), POINTS[wanted])
    assert cache.stats().leased_bytes == 0


@pytest.mark.parametrize("column", ["image", "half", "point", "label"])
def test_every_column_of_vectors_is_searched(cache, column):
    found = similar(cache.path, column, (0, 4), n=5)
    assert {place % 3 for place in places(found)} == {1}
    assert 4 not in places(found)


def test_complex_numbers_are_near_by_their_magnitude(cache):
    assert sorted(places(similar(cache, "turn", "0:10", n=4))) == [8, 9, 11, 12]


def test_vectors_of_complex_numbers_have_a_map(tmp_path):
    waves = (np.arange(8)[:, None] * np.exp(1j * np.arange(200))).astype(np.complex64)
    kind = {"wave": ac.Tensor("complex64", (200,))}
    with ac.Cache.create(tmp_path / "c", kind, "4MiB", segment_bytes="64KiB") as cache:
        with cache.writer() as writer:
            writer.extend(wave=waves)
        frame = map_of(cache, "wave")
        assert np.abs(np.diff(frame["x"])) == pytest.approx([200**0.5] * 7, rel=1e-4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1, 20, 300])
def test_rows_are_told_apart_far_from_zero(tmp_path, size):
    moments = 1_700_000_000 + 3 * np.arange(100)
    kinds = {"t": ac.Tensor("int64", (size,)), "same": ac.Tensor("float32", (size,))}
    with ac.Cache.create(tmp_path / "c", kinds, "8MiB", segment_bytes="512KiB") as cache:
        with cache.writer() as writer:
            writer.extend(t=np.repeat(moments[:, None], size, axis=1), same=np.full((100, size), 0.1, "f4"))
        frame = similar(cache, "t", ["0:20", "0:80"], n=2)
        assert frame["distance"].tolist() == pytest.approx([3 * size**0.5] * 4)
        assert frame["_row"].isin([19, 21, 79, 81]).all()
        assert map_of(cache, "t")["x"].nunique() == 100
        constant = map_of(cache, "same")
        assert constant[["x", "y"]].to_numpy().tolist() == [[0, 0]] * 100
        assert constant.attrs["explained"] == [0] * min(size, 2)


def test_rows_begun_from_that_lie_far_apart_each_have_their_nearest(tmp_path):
    values = np.zeros((200, 2))
    values[:, 0] = [*range(100), *(1e9 + np.arange(100))]
    with ac.Cache.create(
        tmp_path / "c", {"v": ac.Tensor("float64", (2,))}, "4MiB", segment_bytes="64KiB"
    ) as cache:
        with cache.writer() as writer:
            writer.extend(v=values)
        for ids in ([(0, 10), (0, 150)], [(0, 150), (0, 10)]):
            found = similar(cache, "v", ids, n=2)
            assert found["distance"].tolist() == [1] * 4
            near = [{row - 1, row + 1} for _, row in ids]
            assert [{*found["_row"][:2]}, {*found["_row"][2:]}] == near


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_what_is_near_does_not_depend_on_the_order_of_ids(cache, metric):
    ids = [f"{at // 20}:{at % 20}" for at in range(COUNT)]
    for column in ("image", "point", "label"):
        answers = [
            similar(cache, column, some, n=5, metric=metric).sort_values("query", kind="stable")
            for some in (ids, ids[::-1])
        ]
        for name in ("_seq", "_row", "query", "distance"):
            assert answers[0][name].tolist() == answers[1][name].tolist()


def test_what_is_found_is_shown_as_pictures_and_names_rows(cache):
    found = similar(cache, "image", "0:4", n=3)
    assert seen(found._repr_html_()).tags.count("img") == 3
    assert explore.rows(cache, found, ["label"])["label"].tolist() == [1, 1, 1]
    assert len(explore.gallery(cache, "image", rows=found).groups[0].tiles) == 3
    assert explore.rows(cache, found["query"], ["label"])["label"].tolist() == [1] * 3


def test_fewer_rows_than_asked_for_are_all(cache):
    assert len(similar(cache, "point", "0:0", n=1000)) == COUNT - 1
    assert len(similar(cache, "point", [], n=3)) == 0


def test_rows_are_drawn_of_a_large_cache(cache):
    some = similar(cache, "point", "0:0", n=1000, max_rows=30)
    assert 29 <= len(some) <= 30
    assert some["distance"].is_monotonic_increasing
    assert places(some) == places(similar(cache, "point", "0:0", n=1000, max_rows=30))
    assert places(some) != places(similar(cache, "point", "0:0", n=1000, max_rows=30, seed=1))
    assert len(similar(cache, "point", "0:0", n=1000, max_rows=None)) == COUNT - 1


def test_what_is_not_finite_is_near_to_none(tmp_path):
    values = np.arange(10, dtype=np.float32)
    values[[2, 5]] = np.nan, np.inf
    with ac.Cache.create(tmp_path / "c", {"x": ac.Tensor("float32")}, "4MiB", segment_bytes="64KiB") as cache:
        with cache.writer() as writer:
            writer.extend(x=values)
        assert similar(cache, "x", "0:3", n=20)["x"].tolist() == [4, 1, 0, 6, 7, 8, 9]
        assert len(map_of(cache, "x")) == 8
        with pytest.raises(ValueError, match="row 0:5 has a 'x' that is not finite"):
            similar(cache, "x", ["0:1", "0:5"])


def test_a_map_has_like_rows_close_and_says_which_they_are(cache):
    for column in ("point", "image"):
        frame = map_of(cache, column, by="label")
        assert list(frame.columns) == ["_seq", "_row", "x", "y", "label"]
        assert places(frame) == list(range(COUNT))
        assert frame["label"].tolist() == LABELS.tolist()
        xy = frame[["x", "y"]].to_numpy()
        centers = np.stack([xy[label == LABELS].mean(axis=0) for label in range(3)])
        nearest = np.linalg.norm(xy[:, None] - centers[None], axis=2).argmin(axis=1)
        assert (nearest == LABELS).all()
        assert frame.attrs["explained"][0] >= frame.attrs["explained"][1]
        assert map_of(cache, column, by="label").equals(frame)
    assert cache.stats().leased_bytes == 0
    chosen = frame[frame["label"] == 2]
    assert len(explore.gallery(cache, "image", rows=chosen).groups[0].tiles) == 30


def test_a_map_is_of_the_principal_components(cache):
    frame = map_of(cache, "point")
    centered = POINTS.astype(np.float64) - POINTS.mean(axis=0)
    singular = np.linalg.svd(centered, full_matrices=False)[1]
    assert frame["x"].std(ddof=0) * COUNT**0.5 == pytest.approx(singular[0], rel=1e-4)
    assert frame.attrs["explained"] == pytest.approx((singular**2 / (singular**2).sum())[:2], rel=1e-4)


def test_a_map_keeps_distances_of_what_it_projects(cache, monkeypatch):
    frame = map_of(cache, "image", max_rows=60)
    assert len(frame) == 60
    limit(monkeypatch, map_numbers=400)
    exact = map_of(cache, "image", max_rows=60)
    assert places(frame) == places(exact)
    spread = [np.linalg.norm(np.diff(some[["x", "y"]], axis=0), axis=1) for some in (frame, exact)]
    far = spread[1] > 1000
    assert spread[0][far] == pytest.approx(spread[1][far], rel=0.25)


@pytest.mark.parametrize("by", [None, "label", "name"])
def test_a_map_is_drawn(cache, by, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'explore' is not installed")
    import matplotlib.pyplot as plt

    ax = explore.plot_map(map_of(cache, "point", by))
    assert len(ax.collections[0].get_offsets()) == COUNT
    assert "of the variance" in ax.get_xlabel()
    ax.figure.savefig(tmp_path / "map.png")
    plt.close(ax.figure)
    _, mine = plt.subplots()
    assert explore.plot_map(map_of(cache, "label"), ax=mine) is mine
    plt.close(mine.figure)


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda cache: similar(cache, "pont", "0:0"), ValueError, "did you mean 'point'?"),
        (
            lambda cache: similar(cache, "name", "0:0"),
            ValueError,
            "one length: point, image, half, turn, label can be",
        ),
        (lambda cache: similar(cache, "boxes", "0:0"), ValueError, "vectors of one length"),
        (lambda cache: similar(cache, "point", "0:0", metric="far"), ValueError, "one of euclidean, cosine"),
        (lambda cache: similar(cache, "point", "0:0", n=0), ValueError, "n=0 must"),
        (lambda cache: similar(cache, "point", "0:0", max_rows=0), ValueError, "max_rows=0 must"),
        (lambda cache: similar(cache, "point", ["0:0"] * 1001), ValueError, "1,001 rows: begin from at most"),
        (lambda cache: similar(cache, "point", "0:20"), IndexError, "never was"),
        (lambda cache: map_of(cache, "name"), ValueError, "vectors of one length"),
        (lambda cache: map_of(cache, "point", by="image"), ValueError, "column 'image' is"),
        (lambda cache: map_of(cache, "point", by="lable"), ValueError, "did you mean 'label'?"),
        (lambda cache: map_of(cache, "point", max_rows=2), ValueError, "2 rows of"),
        (lambda cache: explore.plot_map(explore.head(cache)), TypeError, "map_of(cache, column) gives"),
    ],
)
def test_what_cannot_be_compared_says_so(cache, ask, error, says):
    with pytest.raises(error) as raised:
        ask(cache)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert cache.stats().leased_bytes == 0


def test_a_row_that_left_the_cache_is_begun_from_no_more(tmp_path):
    with make_cache(tmp_path / "rolled", capacity="256KiB") as cache:
        publish(cache, segments=20)
        with pytest.raises(MissingSegmentsError, match="row 0:0 has left the cache"):
            similar(cache, "image", "0:0")


@pytest.fixture
def named(tmp_path):
    """A cache whose columns have the names that maps and neighbours give theirs."""
    vectors = RNG.random((9, 4), np.float32)
    schema = {"x": ac.Tensor("int64"), "y": ac.String()} | dict.fromkeys(
        ("query", "distance"), ac.Tensor("float32", (4,))
    )
    with make_cache(tmp_path / "named", ac.Schema(schema)) as cache:
        with cache.writer() as writer:
            writer.extend(x=np.arange(9), y=list("abcdefghi"), query=vectors, distance=vectors)
        yield cache


@pytest.mark.parametrize("column", ["query", "distance"])
def test_a_column_with_a_name_of_what_is_near_is_shown_beside_it(named, column):
    found = similar(named, column, "0:0", n=3)
    assert list(found.columns) == ["_seq", "_row", "query", "distance", f"{column}_1"]
    assert found["query"].tolist() == ["0:0"] * 3
    assert found["distance"].is_monotonic_increasing
    assert found._repr_html_().count("<img") == 3


@pytest.mark.parametrize("by", ["x", "y"])
def test_a_column_with_a_name_of_a_maps_axis_is_shown_beside_it(named, by):
    frame = map_of(named, "query", by=by)
    assert list(frame.columns) == ["_seq", "_row", "x", "y", f"{by}_1"]
    assert frame[f"{by}_1"].tolist() == (list(range(9)) if by == "x" else list("abcdefghi"))
    plt = pytest.importorskip("matplotlib.pyplot", reason="the extra 'explore' is not installed")
    plt.close(explore.plot_map(frame).figure)
