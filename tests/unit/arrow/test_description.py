"""A schema as people read it."""

from __future__ import annotations

import pytest
from markup import seen

import arrowcache as ac

SCHEMA = ac.Schema(
    {
        "signal": ac.Tensor("float32", (64, 1024)),
        "label": ac.Tensor("bool"),
        "z": ac.Tensor("complex64", (3,)),
        "boxes": ac.Ragged("bfloat16", (4,)),
        "tokens": ac.Ragged("int32"),
        "name": ac.String(),
        "raw": ac.Binary(),
        "at": ac.Timestamp(),
    }
)
TEXT = """\
column  type       dtype           shape       bytes a row
signal  Tensor     float32         (64, 1024)    256.0 KiB
label   Tensor     bool            ()                  1 B
z       Tensor     complex64       (3,)               24 B
boxes   Ragged     bfloat16        (any, 4)       8 B each
tokens  Ragged     int32           (any)          4 B each
name    String                                         any
raw     Binary                                         any
at      Timestamp  datetime64[us]  ()                  8 B
8 columns, 256.0 KiB a row, and what 4 columns of any length hold"""


def test_a_schema_prints_as_a_table():
    assert str(SCHEMA) == TEXT
    assert str(ac.Schema({"x": ac.Tensor("int8")})).endswith("\n1 column, 1 B a row")


def test_its_repr_stays_one_line_of_code():
    assert eval(repr(SCHEMA), vars(ac)) == SCHEMA
    assert "\n" not in repr(SCHEMA)


def test_a_notebook_shows_the_same_words():
    shown = seen(SCHEMA._repr_html_())
    assert shown.tags.count("tr") == 1 + len(SCHEMA)
    for word in TEXT.split():
        assert word in shown.text.split(), word


@pytest.mark.parametrize("name", ["<script>x</script>", "a\nb", "\"'&", "\u202eabc", "\x1b[31m"])
def test_any_name_of_a_column_is_shown_and_moves_nothing(name):
    schema = ac.Schema({name: ac.Tensor("int8"), "b": ac.Tensor("int8")})
    assert (
        seen(schema._repr_html_()).tags
        == seen(ac.Schema(dict.fromkeys("ab", ac.Tensor("int8")))._repr_html_()).tags
    )
    lines = str(schema).splitlines()
    assert len(lines) == 4
    assert len(set(map(len, lines[:3]))) == 1


def test_many_columns_are_folded_away():
    assert " open=" in ac.Schema({f"c{i}": ac.Tensor("int8") for i in range(20)})._repr_html_()
    assert " open=" not in ac.Schema({f"c{i}": ac.Tensor("int8") for i in range(21)})._repr_html_()
