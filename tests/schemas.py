"""Schemas for Hypothesis, and all that a reader checks of a segment's file."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import strategies as st

import arrowcache as ac
from arrowcache.arrow.schema import DTYPES, RESERVED_NAMES
from arrowcache.arrow.segment import Layout, check_bytes, read_structure

SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)
KINDS = st.one_of(
    st.builds(ac.Tensor, st.sampled_from(DTYPES), SHAPES),
    st.builds(ac.Ragged, st.sampled_from(DTYPES), SHAPES),
    st.sampled_from([ac.String(), ac.Binary(), ac.Timestamp()]),
)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(
    lambda name: name not in RESERVED_NAMES
)


def schemas(names: st.SearchStrategy[str] = NAMES, kinds: st.SearchStrategy = KINDS) -> st.SearchStrategy:
    """Any of few fields."""
    return st.dictionaries(names, kinds, min_size=1, max_size=6).map(ac.Schema)


def checked(data: bytes, schema: ac.Schema, rows: int) -> Layout:
    """Everything a reader checks, on memory of its own, as a mapping is."""
    buffer = pa.py_buffer(data)
    layout = read_structure(buffer, schema, rows)
    check_bytes(buffer, schema)
    return layout
