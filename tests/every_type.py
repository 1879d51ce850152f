"""Rows of every type, with values that each reader can hold."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers import EVERY_TYPE

import arrowcache as ac

ROWS = 21


def every_type(rows: int = ROWS) -> dict[str, Any]:
    """Columns of EVERY_TYPE, as a writer's extend takes them; bfloat16 is its bits."""
    rng = np.random.default_rng(7)
    columns: dict[str, Any] = {}
    for name, kind in EVERY_TYPE.items():
        if isinstance(kind, ac.Tensor):
            columns[name] = numbers(rng, kind.dtype, (rows, *kind.shape))
        elif isinstance(kind, ac.Ragged):
            sizes = [3, 0, *rng.integers(0, 4, rows - 2).tolist()]
            columns[name] = [numbers(rng, kind.dtype, (size, *kind.inner_shape)) for size in sizes]
    columns["name"] = [f"näme <{number % 5}>" for number in range(rows)]
    columns["data"] = [b"\x00\xff" * (number % 4) for number in range(rows)]
    steps = (np.arange(rows) * 10**9).astype("m8[us]")
    columns["when"] = np.datetime64("2026-01-01T00:00:00.000001", "us") + steps
    return columns


def numbers(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers of a dtype: subnormal ones, infinity and NaN too."""
    if dtype == "bool":
        return rng.integers(0, 2, shape, np.uint8).astype(bool)
    if dtype == "bfloat16":
        bits = rng.integers(0, 1 << 16, shape, np.uint16)
        return np.where(bits & 0x7F80 == 0x7F80, bits & 0xFFC0, bits)  # NaN without a payload
    if "int" in dtype:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    if dtype.startswith("complex"):
        part = "float32" if dtype == "complex64" else "float64"
        return numbers(rng, part, (*shape, 2)).view(dtype).reshape(shape)
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-7, 4, shape)).astype(dtype)
    flat = values.reshape(-1)
    flat[::7], flat[3::11], flat[5::13] = 0, np.nan, -np.inf
    return values
