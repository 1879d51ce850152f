"""A schema as one line of text: what is written is read back, and a mistake is pointed at."""

from __future__ import annotations

import pytest
from helpers import EVERY_TYPE
from hypothesis import given
from hypothesis import strategies as st
from schemas import NAMES, schemas

import arrowcache as ac
from arrowcache.arrow.schema import difference, format_schema, parse_schema, type_name


def test_a_schema_is_one_line():
    assert parse_schema(
        "image: float32[64,64], label: int64, name: string, tokens: ragged int32, boxes: ragged float32[4]"
    ) == ac.Schema(
        {
            "image": ac.Tensor("float32", (64, 64)), "label": ac.Tensor("int64"), "name": ac.String(),
            "tokens": ac.Ragged("int32"), "boxes": ac.Ragged("float32", (4,)),
        }
    )  # fmt: skip


def test_each_field_may_have_a_line_and_remarks():
    text = """
    # of the first camera
    image: uint8[3, 32]   # colour first
    "the label": bool,
    when : timestamp
    """
    assert dict(parse_schema(text)) == {
        "image": ac.Tensor("uint8", (3, 32)), "the label": ac.Tensor("bool"), "when": ac.Timestamp(),
    }  # fmt: skip


def test_what_is_shown_is_what_one_writes():
    assert format_schema(EVERY_TYPE).startswith("id: int64, scalar_bool: bool, ")
    assert type_name(ac.Tensor("float32", (64, 64))) == "float32[64, 64]"
    assert format_schema(ac.Schema({"a, b": ac.Binary()})) == '"a, b": binary'
    assert parse_schema(format_schema(EVERY_TYPE)) == EVERY_TYPE


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("a: int64, b: string", "its fields are in the order b, a, not a, b"),
        ("b: string, a: int8", "a is int64, not int8"),
        ("b: string", "a is int64, and not asked for"),
        ("b: string, a: int64, \"c d\": bool[2]", '"c d" is not in it, asked for as bool[2]'),
        ("a: int8", "b is string, and not asked for, a is int64, not int8"),
    ],
)  # fmt: skip
def test_what_differs_is_named(other, says):
    assert difference(parse_schema("b: string, a: int64"), parse_schema(other)) == says


@pytest.mark.slow
@given(schemas(NAMES.filter(lambda name: "\0" not in name)))
def test_every_schema_comes_back_as_it_was(schema):
    assert parse_schema(format_schema(schema)) == schema


@given(st.text(max_size=40))
def test_any_text_is_a_schema_or_one_sentence(text):
    said = ""
    try:
        parse_schema(text)
    except ac.SchemaError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the schema is empty: write it such as 'image: float32[64, 64], label: int64, name: string'"),
        ("  # nothing", "the schema is empty"),
        ("image", 'at its end, after "image": a colon and the type of \'image\' is expected'),
        ("image float32", 'at character 7, "float32": a colon and the type of'),
        ("image: flaot32", "at character 8, \"flaot32\": 'flaot32' is no type: did you mean float32"),
        ("a: int64, b: str", "at character 14, \"str\": 'str' is no type: did you mean string? there are"),
        ("a: ragged string", "'string' is no dtype: there are bool"),
        ("a: float32(64, 64)", 'at character 11, "(64, 64)": a shape stands in square brackets'),
        ("a: float32[64, x]", 'at character 16, "x]": a shape has sizes of at least 1'),
        ("a: float32[0]", "a shape has sizes of at least 1"),
        ("a: float32[64", "a comma or the closing bracket of the shape is expected"),
        ("a: string[3]", 'at character 10, "[3]": a string has no shape'),
        ("a: int64 b: int64", "at character 10, \"b: int64\": a comma is expected after the type of 'a'"),
        ("a: int64\nb: int65", "at line 2, character 4, \"int65\": 'int65' is no type: did you mean"),
        ("a: int64, a: int8", "at character 11, \"a: int8\": the field 'a' is there twice"),
        ("a b: int8", "a colon and the type of 'a' is expected"),
        (": int8", "a field's name is expected"),
        ('"a\\q": int8', "the name in quotes is no text of JSON"),
        ("a:", "at its end, after \"a:\": a type is expected: there are bool"),
        ("_seq: int64", "field name '_seq' is reserved"),
        ("a: int64,, b: int8", 'at character 10, ", b: int8": a field\'s name is expected'),
    ],
)  # fmt: skip
def test_a_mistake_is_pointed_at(text, says):
    with pytest.raises(ac.SchemaError) as raised:
        parse_schema(text)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
