"""Pictures: any value of a cache as a small picture.

    what                             shown as
    one number, bool, timestamp      its text
    (n,)                             a line; of a longer one than the picture, the lowest and highest value
                                     of each pixel column, so that peaks stay
    (h, w)                           a map of colors
    (c, h, w), (h, w, c), c 1, 3, 4  an image: grey, RGB, RGBA
    other (d, h, w)                  a volume: its middle slices across each axis, side by side
    more axes                        as those, at the middle of the first ones
    text; bytes                      its beginning; the image, if it is a PNG or JPEG file, else its length

Where both ends could be the channels, the smaller one is, and the first of two that are the same; of a
ragged column it is the last. Complex numbers are shown by their magnitude. Images of uint8 are shown as
they are, and of floats within [0, 1] as if 1 were 255; of others, black to white are percentiles 1 and 99
of all channels together, and alpha is 0 to 1. Colors of maps are those of viridis, from percentile 1 to
99, too. Maps and images larger than the picture are averaged. What is no finite number is a gap in a
line, grey in a map, and black in an image. Where nothing can be seen, because nothing is there, is
finite, or differs, the picture says so.
"""

from __future__ import annotations

import datetime as dt
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from arrowcache.arrow.convert import as_array
from arrowcache.arrow.schema import FieldType, Ragged
from arrowcache.display import printable, shorten
from arrowcache.explore import drawing
from arrowcache.explore.drawing import Drawing, Pixels, Words, colored
from arrowcache.explore.numbers import bfloat16_values, floats
from arrowcache.units import format_bytes, parse_count

_SIZE = 192  # pixels a side
_MOST_TEXT = 60
_CHANNELS = (1, 3, 4)
FILES = ("PNG", "JPEG")  # of images, that are drawn
#: What Pillow raises for what is no image, damaged, or too large
NO_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning)
_MOST_PIXELS = 64_000_000  # of an image file


class Picture:
    """A value as a notebook shows it. It keeps the picture, not the value.

    `summary` says in words what was drawn: dtype, shape, range, and how many numbers are none.
    """

    def __init__(self, drawing: Drawing, summary: str, size: int) -> None:
        self.drawing = drawing
        self.summary = summary
        self.size = size

    def __repr__(self) -> str:
        return f"<Picture: {self.summary}>"

    def _repr_html_(self) -> str:
        return drawing.to_html(self.drawing, self.summary, self.size)

    def _repr_png_(self) -> bytes | None:
        return self.drawing.to_png(self.size) if isinstance(self.drawing, Pixels) else None


def picture(value: object, kind: FieldType | None = None, size: int = _SIZE) -> Picture:
    """Draw one value: an array or tensor, a number, text, bytes or a moment.

    Args:
        kind: its column's type; None: as the value itself tells. The bits of bfloat16 as uint16 need it.
        size: pixels of the longer side.
    Raises: SchemaError: what no column can hold. ValueError: a size below 8 or above 4096.
    """
    size = parse_count(size, "size", least=8, most=4096)
    with np.errstate(all="ignore"):
        return Picture(*_draw(value, kind, size), size)


def _draw(value: object, kind: FieldType | None, size: int) -> tuple[Drawing, str]:
    if isinstance(value, str):
        text = printable(shorten(value, _MOST_TEXT))
        return Words(text), f"text of {len(value):,} characters"
    if isinstance(value, bytes | bytearray | memoryview):
        return _draw_bytes(bytes(value), size)
    if isinstance(value, dt.datetime):
        return Words(value.isoformat(sep=" ")), "a moment"
    array, dtype = as_array("value", value)
    dtype = getattr(kind, "dtype", dtype)
    if array.ndim == 0:
        return Words(_number(plain(array, dtype)[()])), dtype
    return _draw_array(plain(array, dtype), dtype, isinstance(kind, Ragged), size)


def plain(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """bfloat16 as numbers, an array's moments as microseconds, and no float that NumPy is slow with."""
    if dtype == "bfloat16" and array.dtype == np.uint16:
        return bfloat16_values(array)
    if array.dtype.kind == "M" and array.ndim:
        return floats(array)
    return array.astype(np.float32) if array.dtype == np.float16 and array.ndim else array


def _draw_array(array: NDArray[Any], dtype: str, is_ragged: bool, size: int) -> tuple[Drawing, str]:
    what = f"{dtype} ({', '.join(map(str, array.shape))}{',' * (array.ndim == 1)})"
    if not array.size:
        return Words(f"empty {what}"), f"{what}, empty"
    lead = array.ndim - 3
    if lead > 0:
        index = tuple(n // 2 for n in array.shape[:lead])
        array = array[index]
        what += f" at {index}"
    if array.dtype.kind == "c":
        array = np.abs(array)
        what += ", magnitude"
    channels = channel_axis(array.shape, is_ragged) if array.ndim == 3 else None
    lowest, highest = drawing.extent(array)
    bad = array.size - int(np.isfinite(array).sum()) if array.dtype.kind == "f" else 0
    if bad and bad < array.size and not np.isfinite([lowest, highest]).all():
        lowest, highest = drawing.extent(array[np.isfinite(array)])
    nans = f", {bad:,} not finite" if bad else ""
    if bad == array.size:
        return Words("no finite number"), f"{what}, no finite number"
    same = lowest == highest
    is_image_as_it_is = channels is not None and array.dtype == np.uint8
    summary = f"{what}, {_number(lowest)} to {_number(highest)}{nans}"
    if same and not is_image_as_it_is:
        text = _number(lowest) if array.size == 1 else f"constant {_number(lowest)}"
        return Words(text + nans), f"{what}, {text}{nans}"
    if channels is not None:
        return Pixels(_image(np.moveaxis(array, channels, 2), size)), summary
    unit = partial(drawing.scaled, low=lowest, high=highest)
    if array.ndim == 1:
        return drawing.line(*drawing.envelope(unit(array), size), size), summary
    if array.ndim == 2:
        return Pixels(colored(*drawing.contrasted([_plane(array, size, unit)])), is_map=True), summary
    tile = 2 * size // 3
    planes = [_plane(array.take(n // 2, axis), tile, unit) for axis, n in enumerate(array.shape)]
    slices = [colored(plane) for plane in drawing.contrasted(planes)]
    return Pixels(drawing.side_by_side(slices, tile), is_map=True, lengths=2), summary


def channel_axis(shape: tuple[int, ...], is_ragged: bool = False) -> int | None:
    """Which axis of three holds the channels of an image; None: it is a volume."""
    first, last = shape[0] in _CHANNELS and not is_ragged, shape[2] in _CHANNELS
    if first and last:
        return 2 if shape[2] < shape[0] else 0
    return 0 if first else 2 if last else None


def _plane(
    array: NDArray[Any], size: int, unit: Callable[[NDArray[Any]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    target = drawing.fitted(array.shape, size)
    return drawing.reduced(unit(drawing.thinned(array, target)), target)


def _image(array: NDArray[Any], size: int) -> Image.Image:
    """(h, w, c) as an image of at most `size` pixels a side."""
    target = drawing.fitted(array.shape[:2], size)
    array = drawing.thinned(array, target)
    if array.dtype != np.uint8:
        color, alpha = array[..., :3], np.clip(array[..., 3:].astype(np.float64), 0, 1)
        lowest, highest = drawing.extent(color[np.isfinite(color)])
        if array.dtype.kind != "f" or not 0 <= lowest <= highest <= 1:
            (color,) = drawing.contrasted([drawing.scaled(color, lowest, highest)])
        values = np.concatenate([color, alpha], axis=2)
        array = np.where(np.isfinite(values), (255 * values).round(), 0).astype(np.uint8)
    grey_or_color = array[..., 0] if array.shape[2] == 1 else array
    return _smaller(Image.fromarray(np.ascontiguousarray(grey_or_color)), target)


def _smaller(image: Image.Image, target: tuple[int, int]) -> Image.Image:
    return image.resize(target[::-1], Image.Resampling.BOX) if image.size != target[::-1] else image.copy()


def _draw_bytes(data: bytes, size: int) -> tuple[Drawing, str]:
    length = format_bytes(len(data))
    what = f"{length} of bytes"
    try:
        with Image.open(io.BytesIO(data), formats=FILES) as image:
            width, height = image.size
            what = f"{image.format} of {length}, {width} x {height}"
            if width * height > _MOST_PIXELS:
                return Words(f"{what}: too large to be drawn"), what
            target = drawing.fitted((height, width), size)
            image.draft("RGB", (2 * size, 2 * size))  # JPEG: decoded small at once
            if image.mode in ("RGB", "L"):
                return Pixels(_smaller(image, target)), what
            if image.mode.startswith(("I", "F")):  # 16 bits
                return Pixels(_image(np.asarray(image)[..., None], size)), what
            return Pixels(_smaller(image.convert("RGBA"), target)), what
    except UnidentifiedImageError:
        return Words(what), what
    except NO_IMAGE:
        return Words(f"{what}: damaged, or too large to be drawn"), what


def _number(value: Any) -> str:
    """A number to six digits; whatever else can be one value, as its text."""
    if isinstance(value, np.datetime64):
        return str(value).replace("T", " ") if value == value else "NaT"
    if isinstance(value, int | np.integer | bool | np.bool_):
        return str(value)
    return f"{value:.6g}"
