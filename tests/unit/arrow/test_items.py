"""Items of any nesting become rows, and rows items of the same form."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from nested import Pair, Scan

import arrowcache as ac
from arrowcache.arrow.items import ItemForm


@pytest.fixture
def exact_form(torch):
    """The form that gives items back, which is PyTorch's face's."""
    from arrowcache.torch.codecs import ExactForm

    return ExactForm


class Locked(dict):
    """A mapping that copies itself where it is copied, as a library's own do."""


FORMS = {
    "an array": (np.zeros(3, np.float32), ["value"]),
    "a number": (3, ["value"]),
    "a dict": ({"x": np.zeros(2), "y": 1}, ["x", "y"]),
    "a tuple": ((np.zeros(2), 1, "a"), ["0", "1", "2"]),
    "a list": ([np.zeros(2), 1], ["0", "1"]),
    "a list of numbers": ([1, 2, 3], ["value"]),
    "a named tuple": (Pair(1.5, b"a"), ["first", "second"]),
    "a dataclass": (Scan(np.zeros(2)), ["image", "age"]),
    "an ordered dict": (OrderedDict(b=1, a=2), ["b", "a"]),
    "nested": ({"x": (np.zeros(2), {"z": [[1, 2], [3, 4]]}), "who": Pair(1, 2)},
               ["x.0", "x.1.z", "who.first", "who.second"]),
    "a moment": ({"at": dt.datetime(2026, 1, 2)}, ["at"]),  # noqa: DTZ001
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Scan):
        return same(dataclasses.astuple(one), dataclasses.astuple(other))
    return bool(one == other)


@pytest.mark.parametrize(("item", "names"), FORMS.values(), ids=FORMS)
def test_an_item_is_a_row_and_the_row_is_the_item(exact_form, item, names):
    form = exact_form(item)
    assert [leaf.name for leaf in form.leaves] == names == list(form.schema)
    again = form.item(iter(form.row(item).values()))
    assert type(again) is type(item)
    assert same(again, item)


def test_keys_in_another_order_are_the_same_form():
    form = ItemForm({"x": 1, "y": "a"})
    assert form.row({"y": "b", "x": 2}) == {"x": 2, "y": "b"}


def test_a_mapping_that_is_no_dict_is_given_back_as_what_it_was(exact_form):
    again = exact_form(Locked(x=1)).item(iter([2]))
    assert type(again) is Locked
    assert again == Locked(x=2)


@pytest.mark.parametrize(
    ("item", "columns", "kept"),
    [({"x": 1, "y": 2, "z": {"a": 3}}, ["z", "x"], {"z": {"a": 3}, "x": 1}), ((1, 2, 3), ["2", 0], (3, 1))],
)
def test_columns_are_what_is_kept_in_that_order(exact_form, item, columns, kept):
    form = exact_form(item, columns=columns)
    assert form.chosen(item) == kept
    assert form.item(iter(form.row(item).values())) == kept


def test_the_schema_says_what_one_item_does_not():
    form = ItemForm({"tokens": [1, 2], "x": 1}, {"tokens": ac.Ragged("int64")})
    assert dict(form.schema) == {"tokens": ac.Ragged("int64"), "x": ac.Tensor("int64")}


@pytest.mark.parametrize(
    ("item", "options", "error", "says"),
    [
        ({"x": None}, {}, ac.SchemaError, "'x' is None, which no column holds"),
        (None, {}, ac.SchemaError, "the item is None"),
        ({"x": {}}, {}, ac.SchemaError, "'x' is an empty dict"),
        ({"x": object()}, {}, ac.SchemaError, "field 'x': expected numbers"),
        ({"a.b": 1, "a": {"b": 2}}, {}, ac.SchemaError, "would have one name"),
        ({"x": 1}, {"schema": {"y": ac.String()}}, ValueError, "schema names 'y': an item has x"),
        ({"x": 1}, {"columns": ["y"]}, ValueError, "columns names 'y'"),
        ({"x": 1}, {"columns": "x"}, TypeError, "list of an item's keys"),
        ({"x": 1}, {"columns": []}, TypeError, "list of an item's keys"),
        ((1, 2), {"columns": ["x"]}, TypeError, "are positions, not 'x'"),
        (Pair(1, 2), {"columns": ["first"]}, TypeError, "an item is a Pair"),
        (1, {"columns": ["x"]}, TypeError, "an item is a int"),
        ((1, 2), {"columns": [0, "0"]}, ValueError, r"columns=\[0, 0\] names one of them twice"),
        ({"_seq": 1}, {}, ac.SchemaError, "field name '_seq' is reserved"),
        ({"x": 1}, {"schema": {"x": None}}, TypeError, "field 'x': expected one of Tensor, .*got None"),
        ({"x": 1}, {"schema": "x"}, TypeError, "schema='x' must be a dict of types"),
    ],
)
def test_what_no_column_holds_is_refused(item, options, error, says):
    with pytest.raises(error, match=says):
        ItemForm(item, **options)


@pytest.mark.parametrize(
    ("first", "other", "says"),
    [
        ({"x": 1}, {"x": 1, "y": 2}, "the item has x, y, and in the first item it has x"),
        ({"x": {"a": 1}}, {"x": 3}, "'x' is a int, and in the first item it has a"),
        ((1, 2), (1,), "the item has 0, and in the first item it has 0, 1"),
        ({"x": 1}, [1], "the item is a list"),
        ({"x": 1}, {"x": None}, "'x' is None, which no column holds: leave it out"),
    ],
)
def test_an_item_of_another_form_is_refused(first, other, says):
    with pytest.raises(ac.SchemaError, match=says):
        ItemForm(first).row(other)


@pytest.mark.parametrize(
    ("first", "other", "says"),
    [
        (1, 2.0, "'value' is a float, and in the first item an int: convert it"),
        (True, 1, "is an int, and in the first item a bool"),
        ({"x": np.ones(2)}, {"x": np.ones(2, np.float32)}, "'x' is a ndarray of float32, .* of float64"),
        (np.ones(2, "<i4"), np.ones(2, ">i4"), "ndarray of >i4, .* ndarray of int32"),
        (np.float32(1), 1.0, "a float, .* a float32 of float32"),
        ([1, 2], [1, 2.0], "a list of float and int, .* a list of int"),
        ([[1], [2]], [[1], [2.0]], "a list of float and int, .* a list of int"),
        ({"a": (1, "a")}, {"a": [2, "b"]}, "'a' is a list, and in the first item a tuple"),
        (Pair(1, 2), {"first": 3, "second": 4}, "the item is a dict, and in the first item a Pair"),
    ],
)
def test_an_item_of_other_classes_is_refused_where_they_matter(exact_form, first, other, says):
    assert ItemForm(first).row(other)
    with pytest.raises(ac.SchemaError, match=says):
        exact_form(first).row(other)
    assert exact_form(first).row(first)


def test_an_item_that_lacks_a_column_is_refused():
    with pytest.raises(ac.SchemaError, match=r"it lacks one of columns \['x'\]"):
        ItemForm({"x": 1, "y": 2}, columns=["x"]).row({"y": 2})
