"""What a sample may hold: exact values, or a SchemaError that names field, expected and got."""

from __future__ import annotations

import array
import datetime as dt
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import arrowcache as ac
from arrowcache.arrow.convert import count_rows, exact_values, fixed_rows, variable_row
from arrowcache.arrow.dtype import bits_of
from arrowcache.arrow.schema import DTYPES

NUMPY_DTYPES = [name for name in DTYPES if not bits_of(name)]


def one(kind, value):
    """The value as the column stores it."""
    rows = fixed_rows("x", kind, value, None)
    assert rows.shape == (1, *kind.shape)
    assert rows.dtype == kind.numpy_dtype
    return rows[0]


def refused(kind, value, *parts):
    """The message with which a value is refused; it names the field and the parts."""
    with pytest.raises(ac.SchemaError) as caught:
        fixed_rows("x", kind, value, None)
    message = str(caught.value)
    for part in ("'x'", *parts):
        assert part in message
    return message


@pytest.mark.slow
@given(st.data(), st.sampled_from(NUMPY_DTYPES))
def test_an_array_of_the_columns_dtype_is_stored_bit_for_bit(data, dtype):
    values = data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, max_side=4)))
    stored = one(ac.Tensor(dtype, values.shape), values)
    assert stored.tobytes() == values.tobytes()


@pytest.mark.slow
@given(st.sampled_from(["int64", "float32"]), st.sampled_from(NUMPY_DTYPES), st.data())
def test_values_are_converted_exactly_whatever_numbers_carry_them(carrier, dtype, data):
    values = data.draw(hnp.arrays(carrier, 3))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = values.astype(dtype).tolist()
    try:
        stored = exact_values("x", ac.Tensor(dtype, (3,)), values)
    except ac.SchemaError:
        assert kept != values.tolist()
    else:
        assert stored.dtype == np.dtype(dtype)
        for got, value in zip(stored.tolist(), values.tolist(), strict=True):
            assert got == value or (got != got and value != value)


@given(st.data(), st.sampled_from(NUMPY_DTYPES), st.sampled_from(NUMPY_DTYPES))
def test_another_dtype_is_stored_exactly_if_numpy_calls_it_safe_and_refused_otherwise(data, source, target):
    values = data.draw(hnp.arrays(source, 3))
    if np.can_cast(source, target, "safe"):
        stored = one(ac.Tensor(target, (3,)), values)
        assert np.array_equal(stored, values, equal_nan=values.dtype.kind in "fc")
    else:
        refused(
            ac.Tensor(target, (3,)), values, f"expected {target}", f"got {source}", f".astype('{target}')"
        )


@given(st.sampled_from([n for n in DTYPES if "int" in n]), st.integers(-(2**70), 2**70))
def test_a_python_int_is_stored_if_it_is_in_range(dtype, value):
    limits = np.iinfo(dtype)
    if limits.min <= value <= limits.max:
        assert int(one(ac.Tensor(dtype), value)) == value
    else:
        refused(ac.Tensor(dtype), value)


@given(st.sampled_from(["float16", "float32", "float64"]), st.integers(-(2**64) + 1, 2**64 - 1))
def test_a_python_int_is_stored_as_float_only_if_exact(dtype, value):
    try:
        with np.errstate(over="ignore"):
            exact = int(float(value)) == value and int(np.dtype(dtype).type(float(value))) == value
    except OverflowError:
        exact = False
    if value >= -(2**63) and exact:
        assert int(one(ac.Tensor(dtype), value)) == value
    else:
        refused(ac.Tensor(dtype), value)


@given(st.sampled_from(["float16", "float32"]), st.floats(allow_nan=False))
def test_a_python_float_is_stored_only_if_exact(dtype, value):
    with np.errstate(over="ignore", under="ignore"):
        nearest = np.dtype(dtype).type(value)
    if float(nearest) == value:
        assert float(one(ac.Tensor(dtype), value)) == value
    else:
        refused(ac.Tensor(dtype), value, f"expected {dtype}", f".astype('{dtype}')")


def test_not_a_number_and_infinity_are_floats_and_no_ints():
    for value in (float("nan"), float("inf"), -float("inf")):
        assert np.array_equal(one(ac.Tensor("float16"), value), np.float16(value), equal_nan=True)
        refused(ac.Tensor("int64"), value)
        refused(ac.Tensor("bool"), value)


REFUSED = [
    # a number that is not exactly one of the dtype
    *((ac.Tensor(name, np.shape(value)), value, f"expected {name}", f".astype('{name}')") for name, value in (
        ("bool", 0.5), ("float32", 0.1), ("float32", 1j), ("float32", 2**24 + 1), ("int64", 1.5),
        ("complex64", 0.1 + 0j))),
    # likewise, where a cast would wrap around
    *((ac.Tensor(name, np.shape(value)), value, f"expected {name}", "a type that holds") for name, value in (
        ("bool", 2), ("uint8", -1), ("uint8", 256), ("int8", [1, 300]), ("int64", 2**63), ("uint64", -1))),
    *((ac.Tensor("bfloat16", np.shape(value)), value, "expected bfloat16") for value in (
        0.1, 257, 1e300, 1j, np.float32(1.5) * np.ones(1), np.ones(1), np.ones(1, np.int16), [1e300])),
    # what NumPy would round; what is converted by nobody in silence
    *((ac.Tensor("float64", np.shape(values)), values) for values in (
        [2**63 + 1, -1], [2**53 + 1, 0.5], [[2**53 + 1, 0.5]])),
    (ac.Tensor("float32", (2,)), np.ma.masked_equal(np.float32([1, 2]), 2), "masked"),
    (ac.Tensor("float32", (1, 2)), [np.ma.masked_equal(np.float32([1, 2]), 2)], "masked"),
    (ac.Tensor("float64", (2,)), [np.ma.masked, 1.0], "masked"),
    (ac.Tensor("float32", (1, 1, 2)), [([1.0, 2.0],), (np.ma.array([1.0, 2.0]),)][1:], "masked"),
    (ac.Timestamp(), np.ma.array(np.datetime64(1, "us"), mask=True), "masked"),
    # what is no number
    *((ac.Tensor("float64"), value) for value in (
        None, "text", b"bytes", object(), {"a": 1}, [[1], [1, 2]], np.array(["a"]), [None], {1, 2})),
    # a wrong shape
    *((ac.Tensor("float32", (3, 4)), np.zeros(shape, np.float32), "(3, 4)", str(shape)) for shape in (
        (), (3,), (2, 4), (4, 3), (3, 4, 1), (1, 3, 4), (12,))),
    (ac.Tensor("float32", (3,)), np.zeros((5, 3), np.float32), "(5, 3)"),
    # no moment in microseconds
    *((ac.Timestamp(), value) for value in (
        np.datetime64("2020-01-01", "ns"), np.datetime64(400_000, "Y"), np.array([400_000], "M8[Y]"),
        5, "2020-01-01", dt.date(2020, 1, 1), None, 1.5, [],
        dt.timedelta(1), np.timedelta64(1, "us"))),
    (ac.Timestamp(), [dt.datetime(2020, 1, 1)] * 2, "()", "(2,)"),  # noqa: DTZ001
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_a_column_of_fixed_width_cannot_hold_is_refused(number):
    refused(*REFUSED[number])


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        *((ac.String(), value, "") for value in (3, None, b"bytes", ["a"], "\ud800")),
        *((ac.Binary(), value, "bytes") for value in (3, None, "text", [1, 2], np.zeros(3, np.uint8))),
        *((ac.Ragged("float32", (3,)), value, "") for value in (
            3.0, np.zeros((2,), np.float32), np.zeros((2, 4), np.float32), np.zeros((2, 3, 1), np.float32),
            np.zeros((0, 4), np.float32), [[1, 2, 3], [1, 2]])),
        (ac.Ragged("int32"), np.arange(3), r"expected int32, got int64.*\.astype\('int32'\)"),
    ],
)  # fmt: skip
def test_what_a_column_of_any_length_cannot_hold_is_refused(kind, value, words):
    with pytest.raises(ac.SchemaError, match=f"'x'.*{words}"):
        variable_row("x", kind, value)


def test_a_list_of_exact_values_is_stored():
    assert one(ac.Tensor("float32", (2, 2)), [[1, 2.5], [3, 4]]).tolist() == [[1, 2.5], [3, 4]]
    assert one(ac.Tensor("uint8", (3,)), range(3)).tolist() == [0, 1, 2]
    assert one(ac.Tensor("uint8", (2,)), (0, 255)).tolist() == [0, 255]
    assert one(ac.Tensor("complex64"), 1).tolist() == 1 + 0j
    assert one(ac.Tensor("bool", (2,)), [True, False]).tolist() == [True, False]
    assert one(ac.Tensor("int8", (2,)), array.array("b", [1, -1])).tolist() == [1, -1]


def test_many_rows_need_the_stated_number_of_rows():
    kind = ac.Tensor("int8", (2,))
    assert fixed_rows("x", kind, np.ones((4, 2), np.int8), 4).shape == (4, 2)
    with pytest.raises(ac.SchemaError, match=r"\(4, 2\).*\(3, 2\)"):
        fixed_rows("x", kind, np.ones((3, 2), np.int8), 4)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">f2"])
def test_foreign_byte_order_is_stored_as_the_same_numbers(dtype):
    values = np.array([[1.0, 2.0], [3.0, 4.0]], dtype)
    name = values.dtype.name
    assert one(ac.Tensor(name, (2, 2)), values).tolist() == values.tolist()
    data, elements = variable_row("x", ac.Ragged(name, (2,)), values)
    assert np.frombuffer(data, name).tolist() == values.reshape(-1).tolist()
    assert elements == 4 * (2 if "complex" in name else 1)


def test_arrays_that_are_not_contiguous_are_stored_in_their_logical_order():
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    for view in (base.T, base[::2, ::-1], base[:, 1:3], np.broadcast_to(np.int32(7), (3, 2))):
        assert one(ac.Tensor("int32", view.shape), view).tolist() == view.tolist()
        data, _ = variable_row("x", ac.Ragged("int32", view.shape[1:]), view)
        assert np.frombuffer(data, np.int32).reshape(view.shape).tolist() == view.tolist()


def test_an_array_of_the_right_dtype_is_not_copied():
    values = np.arange(6.0)
    assert np.shares_memory(fixed_rows("x", ac.Tensor("float64", (6,)), values, None), values)


@pytest.mark.parametrize(
    "dtype",
    ["float16", "float32", "float64", "int8", "int16", "int32", "int64",
     "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128"],
)  # fmt: skip
def test_a_torch_tensor_is_stored_as_its_numbers(torch, dtype):
    dtype = getattr(torch, dtype)
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    kind = ac.Tensor(dtype, (2, 3))
    assert one(kind, tensor).tolist() == tensor.tolist()
    assert one(ac.Tensor(dtype, (3, 2)), tensor.T).tolist() == tensor.T.tolist()


def test_a_tensor_with_a_gradient_or_a_conjugate_is_stored(torch):
    leaf = torch.ones(3, requires_grad=True)
    assert one(ac.Tensor("float32", (3,)), leaf * 2).tolist() == [2, 2, 2]
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert one(ac.Tensor("complex64", (2,)), z.conj().resolve_conj()).tolist() == [1 - 2j, 3 + 1j]


def test_lazy_views_of_torch_are_stored_by_value_or_refused(torch):
    z = torch.tensor([1 + 2j, 3 - 1j]).conj()
    try:
        stored = one(ac.Tensor("complex64", (2,)), z)
    except ac.SchemaError:
        return
    assert stored.tolist() == [1 - 2j, 3 + 1j]


def test_bfloat16_comes_as_torch_tensor_or_as_bits(torch):
    tensor = torch.tensor([[1.5, -2.0], [float("inf"), 3.140625]], dtype=torch.bfloat16)
    bits = tensor.view(torch.int16).numpy().view(np.uint16)
    kind = ac.Tensor("bfloat16", (2, 2))
    assert one(kind, tensor).tolist() == bits.tolist()
    assert one(kind, tensor.T).tolist() == bits.T.tolist()
    assert one(kind, bits).tolist() == bits.tolist()
    assert one(kind, bits.astype(">u2")).tolist() == bits.tolist()
    data, elements = variable_row("x", ac.Ragged("bfloat16", (2,)), tensor)
    assert (bytes(data), elements) == (bits.tobytes(), 4)
    data, _ = variable_row("x", ac.Ragged("bfloat16", (2,)), bits.astype(">u2"))
    assert bytes(data) == bits.tobytes()
    refused(ac.Tensor("int8", (1,)), torch.ones(1, dtype=torch.bfloat16), "got bfloat16")


@given(value=st.floats(width=32))
def test_a_python_float_is_stored_as_bfloat16_only_if_exact(torch, value):
    nearest = torch.tensor(value, dtype=torch.bfloat16)
    if float(nearest) == value or value != value:
        stored = torch.from_numpy(one(ac.Tensor("bfloat16"), value).astype(np.uint16)[None].view(np.int16))
        assert torch.equal(stored.view(torch.bfloat16).isnan(), nearest[None].isnan())
        assert value != value or float(stored.view(torch.bfloat16)[0]) == value
    else:
        refused(ac.Tensor("bfloat16"), value, "expected bfloat16")


def test_small_integers_and_bools_are_exact_bfloat16():
    for values in (np.array([0, 255], np.uint8), np.array([-128, 127], np.int8), np.array([False, True])):
        stored = one(ac.Tensor("bfloat16", (2,)), values)
        back = (stored.astype(np.uint32) << 16).view(np.float32)
        assert back.tolist() == values.astype(float).tolist()


UTC_PLUS_2 = dt.timezone(dt.timedelta(hours=2))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (dt.datetime(2020, 1, 2, 3, 4, 5, 6), "2020-01-02T03:04:05.000006"),  # noqa: DTZ001  # naive is UTC
        (dt.datetime(2020, 1, 2, 3, tzinfo=UTC_PLUS_2), "2020-01-02T01:00:00"),
        (np.datetime64("2020-01-02", "D"), "2020-01-02"),
        (np.datetime64("1969-01-02T01:01:01.000001", "us"), "1969-01-02T01:01:01.000001"),
        (np.array("2020-01-02", "M8[ms]"), "2020-01-02"),
    ],
)
def test_a_moment_is_stored_in_microseconds_of_utc(value, text):
    assert one(ac.Timestamp(), value) == np.datetime64(text, "us")


def test_many_moments_come_as_list_or_array():
    moments = [dt.datetime(2020, 1, 1, hour) for hour in range(3)]  # noqa: DTZ001
    expected = np.array(moments, "M8[us]")
    for values in (moments, tuple(moments), expected, expected.astype("M8[s]"), expected.astype(">M8[us]")):
        assert fixed_rows("x", ac.Timestamp(), values, 3).tolist() == expected.tolist()


def test_no_moment_of_pandas_is_numpys():
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    assert np.isnat(one(ac.Timestamp(), pd.NaT))
    moments = [pd.Timestamp("2020-01-02"), pd.NaT]
    assert str(fixed_rows("x", ac.Timestamp(), moments, 2).tolist()[1]) == "None"


@pytest.mark.parametrize("value", ["2020-01-02", 12, ["2020-01-02"]])
def test_the_advice_for_what_is_no_moment_makes_one(value):
    with pytest.raises(ac.SchemaError, match=r"write (.*) if that is meant") as caught:
        fixed_rows("x", ac.Timestamp(), value, None)
    advice = str(caught.value).partition("write ")[2].removesuffix(" if that is meant")
    for each in value if isinstance(value, list) else [value]:
        one(ac.Timestamp(), eval(advice, {"numpy": np, "value": each}))


def test_text_is_stored_as_utf8():
    data, elements = variable_row("x", ac.String(), "naïve 🙂")
    assert bytes(data).decode() == "naïve 🙂"
    assert elements == data.nbytes
    assert bytes(variable_row("x", ac.String(), "")[0]) == b""
    assert bytes(variable_row("x", ac.String(), np.str_("a"))[0]) == b"a"


def test_bytes_are_stored_as_they_are():
    doubled = memoryview(b"abcdef")[::2]
    for value, stored in [
        (b"", b""), (b"\0\xff", b"\0\xff"), (bytearray(b"ab"), b"ab"), (doubled, b"ace"),
        (memoryview(np.arange(2, dtype="<u2")), b"\0\0\1\0"),
    ]:  # fmt: skip
        data, elements = variable_row("x", ac.Binary(), value)
        assert (bytes(data), elements) == (stored, len(stored))


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        (ac.Ragged("float32"), np.arange(3, dtype=np.float32), 3),
        (ac.Ragged("float32"), [1, 2.5], 2),
        (ac.Ragged("float32"), [], 0),
        (ac.Ragged("int8", (2, 3)), [], 0),
        (ac.Ragged("int8", (2, 3)), np.zeros((0, 2, 3), np.int8), 0),
        (ac.Ragged("int8", (2, 3)), np.ones((4, 2, 3), np.int8), 24),
        (ac.Ragged("complex64", (2,)), np.ones((3, 2), np.complex64), 12),
        (ac.Ragged("bool"), np.array([True, False]), 2),
        (ac.Ragged("int64"), np.arange(5, dtype=np.int8), 5),
    ],
)
def test_a_ragged_value_may_have_any_length(kind, value, stored):
    data, elements = variable_row("x", kind, value)
    assert elements == stored
    expected = np.asarray(value, kind.numpy_dtype).tobytes() if len(value) else b""
    assert bytes(data) == expected


def test_many_samples_need_a_leading_axis():
    assert count_rows("x", np.zeros((5, 2))) == 5
    assert count_rows("x", ["a", "b"]) == 2
    for value in (3, "text", b"bytes", np.float32(1), np.zeros(()), iter([1, 2])):
        with pytest.raises(ac.SchemaError, match=r"'x'.*append\(\)"):
            count_rows("x", value)


def test_a_tensor_is_a_ragged_value_or_many_samples_as_an_array_is(torch):
    data, elements = variable_row("x", ac.Ragged("int64"), torch.arange(5))
    assert (bytes(data), elements) == (np.arange(5).tobytes(), 5)
    assert count_rows("x", torch.zeros(4, 2)) == 4
    with pytest.raises(ac.SchemaError, match=r"'x'.*append\(\)"):
        count_rows("x", torch.zeros(()))


def test_refusing_a_value_warns_of_nothing():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dtype in DTYPES:
            for value in (1e300, 2**63, -1, float("nan"), 1e300 + 1j, [1e300, 0.5]):
                try:
                    fixed_rows("x", ac.Tensor(dtype, np.shape(value)), value, None)
                except ac.SchemaError:
                    pass
    assert [str(w.message) for w in caught] == []
