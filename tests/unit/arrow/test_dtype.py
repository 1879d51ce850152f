"""Kinds of numbers: as they are stored, seen, and named elsewhere."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from arrowcache.arrow.dtype import DTYPES, bits_of, dtype_name, dtype_of

OF_BITS = [name for name in DTYPES if bits_of(name)]


@pytest.mark.parametrize("name", DTYPES)
def test_a_number_is_of_whole_stored_elements_which_arrow_has(name):
    dtype = dtype_of(name)
    assert dtype.numpy.itemsize == dtype.elements * dtype.stored.itemsize
    assert pa.array(np.empty(1, dtype.stored)).type == dtype.arrow_type
    assert dtype.elements == (2 if dtype.kind == "c" else 1)


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in OF_BITS])
def test_numpy_knows_by_its_name_what_it_has(name):
    dtype = dtype_of(name)
    assert (dtype.numpy.name, dtype.numpy.kind) == (name, dtype.kind)
    assert dtype_name(dtype.numpy) == name
    assert bits_of(name) is None


@pytest.mark.parametrize("name", OF_BITS)
def test_bits_are_those_of_their_numbers(name):
    bits, seen = bits_of(name), dtype_of(name).numpy
    every = np.arange(np.iinfo(seen).max + 1).astype(seen)
    numbers = bits.to_float(every)
    is_number = ~np.isnan(numbers)
    assert np.array_equal(bits.from_float(numbers[is_number]), every[is_number])
    assert np.isnan(bits.to_float(bits.from_float(np.array([np.nan], np.float32)))).all()


@pytest.mark.parametrize("name", OF_BITS)
def test_what_it_has_all_numbers_of_it_has(name):
    bits = bits_of(name)
    for source in bits.exact_from:
        every = np.arange(256).astype(np.uint8).view(source) if source != "bool" else np.array([False, True])
        assert np.array_equal(bits.to_float(bits.from_float(every.astype(np.float32))), every)


@pytest.mark.parametrize("name", DTYPES)
def test_pytorch_has_a_dtype_of_each_name(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    assert dtype_name(getattr(torch, name)) == name


@pytest.mark.parametrize("name", ["object", "float8", "datetime64[us]", None, ""])
def test_what_no_column_holds_is_refused_with_the_names_of_those_it_does(name):
    with pytest.raises(ValueError, match="cannot be stored: use one of bool, int8"):
        dtype_name(name)
    assert bits_of(str(name)) is None
