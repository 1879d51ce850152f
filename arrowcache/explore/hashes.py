"""Hashes: 64 bits an image, of which near duplicates differ in few.

The difference hash, dHash: the image in grey, averaged to 8 rows of 9 pixels; a bit is 1 where a pixel is
darker than the one to its right (Neal Krawetz, "Kind of Like That", The Hacker Factor Blog, 2013). It hardly
changes with brightness, contrast, size or noise. Of an image without any contrast no bit is 1.
"""

from __future__ import annotations

import io
import math

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from arrowcache.arrow.schema import Binary, FieldType, Tensor
from arrowcache.explore.numbers import numbers, real
from arrowcache.explore.pictures import FILES, NO_IMAGE, channel_axis

_ROWS, _COLUMNS = 8, 9
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue, as in Pillow's "L"
_PIECE = 1 << 21  # numbers at a time


def holds_images(kind: FieldType) -> bool:
    if isinstance(kind, Tensor):
        return len(kind.shape) == 2 or (len(kind.shape) == 3 and channel_axis(kind.shape) is not None)
    return isinstance(kind, Binary)


def hashes_of(column: pa.Array, kind: FieldType) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """The hash of each row of a segment's column, and whether it has one: a damaged file has none."""
    if not isinstance(kind, Tensor):
        found = [_file_hash(value.as_buffer()) for value in column]
        return np.array([hash_ or 0 for hash_ in found], np.uint64), np.array([h is not None for h in found])
    flat, size = numbers(column, kind), math.prod(kind.shape)
    rows = max(1, _PIECE // size)
    parts = []
    with np.errstate(all="ignore"):  # whatever the numbers are
        for start in range(0, len(column), rows):
            piece = real(flat[start * size : (start + rows) * size], kind)
            parts.append(difference_hashes(piece.astype(np.float32).reshape(-1, *kind.shape)))
    return np.concatenate(parts), np.ones(len(column), bool)


def difference_hashes(images: NDArray[np.float32]) -> NDArray[np.uint64]:
    """The hash of each of several images, (n, h, w), or with channels, of which alpha is left out."""
    if images.ndim == 4:
        images = np.moveaxis(images, 1 + (channel_axis(images.shape[1:]) or 0), 3)
        images = images[..., :3] @ _LUMA if images.shape[3] >= 3 else images[..., 0]
    for axis, cells in ((1, _ROWS), (2, _COLUMNS)):
        edges = np.arange(cells) * images.shape[axis] // cells
        sizes = np.maximum(1, np.diff(edges, append=images.shape[axis]))
        images = np.add.reduceat(images, edges, axis=axis) / (sizes[:, None] if axis == 1 else sizes)
    bits = images[:, :, :-1] < images[:, :, 1:]
    return np.packbits(bits.reshape(len(bits), 64), axis=1).view(np.uint64).reshape(-1)


def _file_hash(data: pa.Buffer) -> int | None:
    try:
        with Image.open(io.BytesIO(data), formats=FILES) as image:
            image.draft("L", (8 * _COLUMNS, 8 * _ROWS))  # JPEG: decoded small at once
            small = image.convert("L").resize((_COLUMNS, _ROWS), Image.Resampling.BOX)
    except NO_IMAGE:
        return None
    return int(difference_hashes(np.asarray(small, np.float32)[None])[0])


def group_near(hashes: NDArray[np.uint64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each hash the place of the first one of its group, and how many bits differ from that. Pure.

    In their order, a hash joins the oldest group whose first one differs in at most `most` bits, or begins
    one. So those that begin groups differ in more, and nothing is chained. It takes some nanoseconds for each
    two that are compared: each different hash with the first one of each group.
    """
    different, places, which = np.unique(hashes, return_index=True, return_inverse=True)
    firsts, first_places = np.empty_like(different), np.empty_like(places)
    first_of, bits = np.empty_like(places), np.zeros_like(places)
    count = 0
    for at in np.argsort(places).tolist():
        off = _bits(firsts[:count] ^ different[at])
        near = off <= most
        group = int(near.argmax()) if count else 0
        if count and near[group]:
            first_of[at], bits[at] = first_places[group], off[group]
        else:
            firsts[count], first_places[count], first_of[at] = different[at], places[at], places[at]
            count += 1
    return first_of[which], bits[which]


def _bits(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The number of ones in each word, which NumPy 2 has as bitwise_count."""
    ones: NDArray[np.uint8] = _ONES[words.view(np.uint16)].reshape(-1, 4).sum(axis=1, dtype=np.uint8)
    return ones


_ONES = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)
