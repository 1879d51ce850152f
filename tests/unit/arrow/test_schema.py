"""Schemas: logical types, their Arrow columns, their JSON."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schemas import SHAPES, schemas

import arrowcache as ac
from arrowcache.arrow.schema import DTYPES


@pytest.mark.slow
@given(schemas())
def test_a_schema_survives_json_and_pickle(schema):
    again = ac.Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert again == schema
    assert list(again) == list(schema)
    assert hash(again) == hash(schema)
    assert again.arrow.equals(schema.arrow, check_metadata=True)
    assert pickle.loads(pickle.dumps(schema)) == schema


@given(schemas())
def test_fixed_width_columns_come_first_and_none_is_nullable(schema):
    assert schema.arrow.names == [*schema.fixed, *schema.variable]
    assert sorted(schema.arrow.names) == sorted(schema)
    assert not any(field.nullable for field in schema.arrow)


@given(st.sampled_from(DTYPES), SHAPES)
def test_stored_elements_times_their_width_are_the_row(dtype, shape):
    kind = ac.Tensor(dtype, shape)
    stored = kind.arrow_type.value_type if kind.is_list else kind.arrow_type
    assert kind.elements * stored.bit_width == 8 * kind.row_bytes
    assert kind.row_bytes == np.empty(shape, kind.numpy_dtype).nbytes


@pytest.mark.parametrize(
    ("kind", "arrow_type"),
    [
        (ac.Tensor("float32"), "float"),
        (ac.Tensor("bool"), "uint8"),
        (ac.Tensor("bfloat16"), "uint16"),
        (ac.Tensor("float16"), "halffloat"),
        (ac.Tensor("complex64"), "list<item: float not null>"),
        (ac.Tensor("complex128", (2,)), "list<item: double not null>"),
        (ac.Tensor("int8", (2, 3)), "list<item: int8 not null>"),
        (ac.Ragged("uint64", (2,)), "list<item: uint64 not null>"),
        (ac.String(), "string"),
        (ac.Binary(), "binary"),
        (ac.Timestamp(), "timestamp[us]"),
    ],
)
def test_each_logical_type_has_its_physical_one(kind, arrow_type):
    assert str(kind.arrow_type) == arrow_type


@pytest.mark.parametrize("given_dtype", ["float32", np.float32, np.dtype("f4"), "<f4", "single"])
def test_a_dtype_may_be_written_in_many_ways(given_dtype):
    assert ac.Tensor(given_dtype, [2, 3]) == ac.Tensor("float32", (2, 3))


def test_dtypes_of_pytorch_are_dtypes_and_its_tensors_have_them(torch):
    assert ac.Tensor(torch.float32, [2, 3]) == ac.Tensor("float32", (2, 3))
    assert ac.Tensor(torch.bfloat16).dtype == "bfloat16"
    inferred = ac.Schema.infer({"x": torch.zeros(2, dtype=torch.bfloat16)})
    assert dict(inferred) == {"x": ac.Tensor("bfloat16", (2,))}


def test_python_types_are_dtypes():
    assert ac.Tensor(bool).dtype == "bool"
    assert ac.Tensor(float).dtype == "float64"
    assert ac.Tensor("bfloat16").numpy_dtype == np.uint16


def test_order_and_types_make_schemas_different():
    a, b = ac.Tensor("int64"), ac.Tensor("int32")
    assert ac.Schema({"x": a, "y": b}) != ac.Schema({"y": b, "x": a})
    assert ac.Schema({"x": a}) != ac.Schema({"x": b})
    assert ac.Schema({"x": a}) != {"x": a}


def test_the_schema_of_a_sample_is_inferred():
    schema = ac.Schema.infer(
        {
            "signal": np.zeros((3, 4), np.float32),
            "label": 3,
            "weight": 0.5,
            "flag": True,
            "z": 1j,
            "name": "a",
            "raw": b"\0\1",
            "at": dt.datetime(2020, 1, 1),  # noqa: DTZ001
            "at64": np.datetime64("2020-01-01T00:00:00", "s"),
            "list": [[1, 2], [3, 4]],
        }
    )
    assert dict(schema) == {
        "signal": ac.Tensor("float32", (3, 4)),
        "label": ac.Tensor("int64"),
        "weight": ac.Tensor("float64"),
        "flag": ac.Tensor("bool"),
        "z": ac.Tensor("complex128"),
        "name": ac.String(),
        "raw": ac.Binary(),
        "at": ac.Timestamp(),
        "at64": ac.Timestamp(),
        "list": ac.Tensor("int64", (2, 2)),
    }


@pytest.mark.parametrize("value", [None, object(), {"a": 1}, ["a", "b"], np.zeros(0), [[1], [2, 3]], 2**70])
def test_a_value_that_no_type_holds_cannot_be_inferred(value):
    with pytest.raises(ac.SchemaError, match="'bad'"):
        ac.Schema.infer({"bad": value})


class Pair(NamedTuple):
    image: np.ndarray
    label: int


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ((np.zeros((2, 3), "f4"), 1), "a tuple of 2 (Tensor(dtype='float32', shape=(2, 3)), Tensor("),
        ((np.zeros((2, 3), "f4"), 1), 'Schema.infer({"x": x, "y": y}), and have samplers yield such dicts'),
        ([1.5], 'shape=())): write Schema.infer({"x": x})'),
        (np.zeros(3), "a ndarray (Tensor(dtype='float64', shape=(3,))): write"),
        ((None, b""), "a NoneType, which no type holds, Binary()"),
        (list(range(9)), '"z": z, "w": w, ...}'),
        ("text", "a str (String())"),
        ([{"x": 1}, {"x": 2}], "a list of 2 dicts: give one of them"),
        (Pair(np.zeros(2), 1), "a Pair: write Schema.infer(sample._asdict())"),
        ((), "a tuple of 0"),
        (None, "a NoneType"),
    ],
)  # fmt: skip
def test_a_sample_whose_values_have_no_names_is_told_how_to_name_them(sample, said):
    with pytest.raises(TypeError, match=re.escape(said)):
        ac.Schema.infer(sample)


@pytest.mark.parametrize(
    "described",
    [None, 3, {}, [1], [{}], [{"name": "a"}], [{"name": "a", "type": "tensor"}], [],
     [{"name": "a", "type": "tensor", "dtype": "int8", "shape": 3}],
     [{"name": "a", "type": "string", "extra": 1}], [{"name": "a", "type": "nothing"}],
     [{"name": "a", "type": ["tensor"]}]],
)  # fmt: skip
def test_a_damaged_description_is_a_schema_error(described):
    with pytest.raises(ac.SchemaError):
        ac.Schema.from_json(described)


def test_columns_are_chosen_by_known_names_without_repeats():
    schema = ac.Schema({"a": ac.String(), "b": ac.Tensor("int8")})
    assert schema.select(None) == ("a", "b")
    assert schema.select(["b"]) == ("b",)
    assert schema.select(iter(["b", "a"])) == ("b", "a")
    with pytest.raises(ValueError, match=r"'c'.*a, b"):
        schema.select(["c"])
    with pytest.raises(ValueError, match="twice"):
        schema.select(["a", "a"])
    with pytest.raises(TypeError, match=r"columns=\['a'\]"):
        schema.select("a")


def test_a_name_that_arrow_cannot_hold_fails_when_the_schema_is_made():
    with pytest.raises((ValueError, pa.ArrowException)):
        ac.Schema({"\ud800": ac.String()})
