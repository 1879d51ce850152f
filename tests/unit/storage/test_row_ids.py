"""Ids of rows: every form that people have them in, and what of them is none."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrowcache as ac
from arrowcache.storage.row_ids import NumberedRows, are_among, row_ids

WANTED = [[83, 26], [2, 0], [83, 26]]
SEQS, ROWS = [83, 2, 83], [26, 0, 26]


def test_an_id_is_a_pair_and_a_text_both_ways():
    row = ac.RowId(83, 26)
    assert tuple(row) == (83, 26)
    assert f"{row}" == str(row) == "83:26"
    assert ac.RowId.parse("83:26") == row
    assert repr(row) == "RowId(seq=83, row=26)"
    assert ac.RowId.parse("0083:0") == (83, 0)


def pandas_frame():
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pd.DataFrame({"label": [1, 2, 3], "_row": ROWS, "_seq": pd.array(SEQS, "Int64")}, index=[7, 3, 3])
    return frame.convert_dtypes()


def polars_frame():
    pl = pytest.importorskip("polars", reason="polars is not installed")
    return pl.DataFrame({"_seq": SEQS, "_row": ROWS, "name": ["a", "b", "c"]})


def torch_batch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return {"_seq": torch.tensor(SEQS), "_row": torch.tensor(ROWS), "_age_seconds": torch.zeros(3)}


def column_of_texts():
    return pytest.importorskip("pandas", reason="pandas is not installed").Series(["83:26", "2:0", "83:26"])


@pytest.mark.parametrize(
    "made",
    [
        lambda: [ac.RowId(83, 26), "2:0", (np.int32(83), 26)],
        lambda: (ac.RowId(83, 26), ac.RowId(2, 0), ac.RowId(83, 26)),
        lambda: iter(["83:26", "2:0", "83:26"]),
        lambda: np.array(["83:26", "2:0", "83:26"]),
        lambda: np.array(WANTED, np.uint16),
        lambda: WANTED,
        lambda: pa.array(["83:26", "2:0", "83:26"]),
        lambda: pa.table({"_seq": SEQS, "_row": ROWS}),
        lambda: pa.RecordBatch.from_pydict({"_row": ROWS, "_seq": pa.array(SEQS, pa.uint64())}),
        lambda: {"_seq": np.array(SEQS), "_row": ROWS},
        pandas_frame,
        polars_frame,
        torch_batch,
        column_of_texts,
    ],
)
def test_every_form_of_ids_is_taken(made):
    found = row_ids(made())
    assert found.dtype == np.int64
    assert found.tolist() == WANTED


@pytest.mark.parametrize("one", [ac.RowId(83, 26), "83:26", (83, 26), [[83, 26]]])
def test_one_id_is_a_list_of_one(one):
    assert row_ids(one).tolist() == [[83, 26]]


@pytest.mark.parametrize("none", [[], (), np.empty((0, 2), int), {"_seq": [], "_row": []}])
def test_no_id_is_none(none):
    assert row_ids(none).shape == (0, 2)
    assert row_ids(none).dtype == np.int64


@pytest.mark.parametrize(
    ("ids", "error", "says"),
    [
        ("83-26", ValueError, "ids: '83-26' is no row id: write seq:row, such as '83:26'"),
        (["1:2", " 3:4"], ValueError, "ids[1]: ' 3:4' is no row id"),
        (["1:2", "3:4:5"], ValueError, "ids[1]: '3:4:5'"),
        (["1:9999999999999999999"], ValueError, "ids[0]"),
        (3, TypeError, "ids=3: name rows by a RowId"),
        ([3, 4], TypeError, "ids[0] is 3: a row is named by a RowId"),
        (["1:2", None], TypeError, "ids[1] is None"),
        ([(1, 2), (1, 2.0)], TypeError, "ids[1] is (1, 2.0)"),
        ([(1, True)], TypeError, "ids[0] is (1, True)"),
        ([(1, 2, 3)], TypeError, "ids[0] is (1, 2, 3)"),
        ([(1, 2**63)], TypeError, "ids[0]"),
        ([(1, 2), (3, -4)], ValueError, "ids[1] is 3:-4: a row id has no negative number"),
        (np.zeros(4, int), ValueError, "ids of shape (4,): they are (n, 2)"),
        (np.zeros((2, 3), int), ValueError, "ids of shape (2, 3)"),
        (np.zeros((1, 2)), TypeError, "ids[0] is array([0., 0.])"),
        ({"_seq": [1], "label": [3]}, ValueError, "ids have no column _row"),
        (pa.table({"a": [1]}), ValueError, "no column _seq and no _row, which say which row each is"),
        ({"_seq": [1, 2], "_row": [3]}, ValueError, "ids have 2 of _seq and 1 of _row"),
        ({"_seq": [1, np.nan], "_row": [3, 4]}, TypeError, "_seq[1] is nan, of float64, which is no int"),
        ({"_seq": [1, 2], "_row": [3, None]}, TypeError, "_row[1] is None, which is no int"),
        (np.ma.array([[1, 2], [3, 4]], mask=[[0, 0], [1, 1]]), TypeError, "ids came as a masked array"),
        ({"_seq": np.ma.array([1, 2], mask=[0, 1]), "_row": [3, 4]}, TypeError, "came as a masked array"),
        ({"_seq": [[1]], "_row": [[3]]}, ValueError, "column '_seq' has shape (1, 1)"),
    ],
)  # fmt: skip
def test_what_names_no_row_is_named(ids, error, says):
    with pytest.raises(error) as raised:
        row_ids(ids)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@given(st.sets(st.integers(-5, 40)), st.lists(st.integers(-9, 50)))
def test_numbers_are_among_others_as_of_a_set(others, some):
    found = are_among(np.array(some, np.int64), np.array(sorted(others), np.int64))
    assert found.tolist() == [number in others for number in some]


NEXT_SEQ = 12


@given(
    st.dictionaries(st.integers(0, NEXT_SEQ - 1), st.integers(1, 4), max_size=5),
    st.lists(st.tuples(st.integers(0, NEXT_SEQ + 1), st.integers(0, 5)), max_size=6),
)
def test_rows_are_numbered_as_they_follow_one_another(sizes, ids):
    """Beside a list; rows that left are passed over, and ones that never were named."""
    seqs = sorted(sizes)
    listed = [(seq, row) for seq in seqs for row in range(sizes[seq])]
    rows = NumberedRows.of_counts(np.array(seqs, np.int64), np.array([sizes[seq] for seq in seqs], np.int64))
    assert rows.size == len(listed)
    array = np.array(ids, np.int64).reshape(-1, 2)
    numbers, is_there = rows.numbers(array)
    assert is_there.tolist() == [each in listed for each in ids]
    assert numbers.tolist() == [listed.index(each) for each in ids if each in listed]
    never = [at for at, (seq, row) in enumerate(ids) if seq >= NEXT_SEQ or row >= sizes.get(seq, 9)]
    if never:
        seq, row = ids[never[0]]
        why = f"its segment has {sizes[seq]} row" if seq in sizes else f"the next one gets {NEXT_SEQ}"
        with pytest.raises(IndexError, match=rf"row {seq}:{row} \(ids\[{never[0]}\]\) never was .*{why}"):
            rows.numbers(array, NEXT_SEQ)
    else:
        assert [each.tolist() for each in rows.numbers(array, NEXT_SEQ)] == [
            numbers.tolist(),
            is_there.tolist(),
        ]
