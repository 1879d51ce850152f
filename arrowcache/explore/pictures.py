"""Pictures: any value of a cache as a small picture, one value large, and a gallery of many rows.

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

What is drawn is `Pixels`, an image by Pillow in matplotlib's colors, or words, which say what no picture
would. Of large arrays as few numbers are drawn as a picture has pixels. Nothing raises, whatever the numbers
are: the callers ignore floating-point errors.

`large` shows one value as large as one looks at it: images, slices, plots, sound, and text in full. A
`Gallery` has random rows of a column, rows that were asked for, or some of each value of another column; it
keeps pictures, and leases nothing.
"""

from __future__ import annotations

import base64
import datetime as dt
import html
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageDraw, UnidentifiedImageError

from arrowcache import display
from arrowcache.arrow.convert import as_array
from arrowcache.arrow.schema import Binary, FieldType, Ragged, Schema, String
from arrowcache.display import printable, shorten
from arrowcache.explore.columns import AnyCache, annotated, bfloat16_values, floats, has_axes, require_column
from arrowcache.limits import Limits
from arrowcache.reading.columns import Values
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.recovery import store_of
from arrowcache.storage.row_ids import RowId, row_ids
from arrowcache.units import format_bytes, format_count, parse_count

_FLATTEST = 4  # no picture is more times as long as it is wide
_NAN = "#969696"  # grey: what is no finite number
_INK = display.BLUE
_LINE_HEIGHT = 0.3  # of a line's width
_SHARP, _SMOOTH = 2, 4  # times larger a line is kept, for fine screens, and drawn
_BETWEEN = 2  # pixels between pictures side by side
_DENSE = 4  # numbers a side that a pixel is the mean of, at most: of more, some are left out
_PERCENTILES = (1, 99)
_SIZE = 192  # pixels a side
_MAX_TEXT = 60
_CHANNELS = (1, 3, 4)
FILES = ("PNG", "JPEG")  # of images, that are drawn
#: What Pillow raises for what is no image, damaged, or too large
NO_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning)
_MAX_FILE_PIXELS = 64_000_000
# of one value, large
_LARGE = 400  # pixels of the longer side, as shown first
_MAX_LARGE = 2048  # to be seen by zooming in
_MAX_PLOTTED = 200_000  # numbers of a signal; of a longer one `picture` draws the lowest and highest
_MIN_HEARD = 4000  # numbers of a signal that may be sound
_RATE = 16_000  # numbers a second, where no column tells
_HEARD = (1000, 192_000)  # rates of sound
_MAX_NUMBERS = 10_000  # of a ragged column's row that are shown as text, too
_MAX_SAMPLED = 100_000  # numbers of a volume that tell the limits of its colors
_SOUNDS = {b"RIFF": "audio/wav", b"fLaC": "audio/flac", b"OggS": "audio/ogg", b"ID3": "audio/mpeg"}
# of a gallery
_MAX_PICTURES = 1000
_MAX_NAME = 40  # characters of a value


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image. The pixels of a map are seen as squares where it is shown larger.

    `lengths`: so many times as long as other pictures, which several side by side are.
    """

    image: Image.Image
    is_map: bool = False
    lengths: int = 1

    def box(self, size: int) -> tuple[int, int]:
        """Width and height to be shown in; `size` is the longer one of other pictures."""
        size *= self.lengths
        longest, least = max(self.image.size), max(1, size // _FLATTEST)
        width, height = (max(least, round(size * side / longest)) for side in self.image.size)
        return width, height

    def to_png(self, size: int) -> bytes:
        """A PNG file, `size` pixels long."""
        resampling = Image.Resampling.NEAREST if self.is_map else Image.Resampling.BILINEAR
        return _encode(self.image.convert("RGBA").resize(self.box(size), resampling))


Drawing = Pixels | str


@cache
def _viridis() -> mpl.colors.Colormap:
    return mpl.colormaps["viridis"].with_extremes(bad=_NAN)


def colored(plane: NDArray[np.float64]) -> Image.Image:
    """Numbers from 0 to 1 as the colors of viridis, NaN as grey."""
    return Image.fromarray(_viridis()(np.ma.masked_invalid(plane), bytes=True))


def line(low: NDArray[np.float64], high: NDArray[np.float64], size: int) -> Pixels:
    """A signal from left to right, from 0 to 1, filled between its two sides; NaN where it has a gap."""
    width, height = size, max(8, round(size * _LINE_HEIGHT))
    image = Image.new("RGBA", (_SMOOTH * width, _SMOOTH * height), f"{_INK}00")
    pen = ImageDraw.Draw(image)
    x = np.linspace(_SMOOTH, _SMOOTH * (width - 1), len(low))
    sides = _SMOOTH * (height - 1 - (height - 2) * np.stack([high, low], axis=1))
    runs = np.ma.clump_unmasked(np.ma.masked_invalid(low))  # type: ignore[no-untyped-call]  # NumPy has not
    for run in runs:
        points = np.stack([np.repeat(x[run], 2), sides[run].reshape(-1)], axis=1)
        pen.line(points.ravel().tolist(), _INK, _SMOOTH, joint="curve")
        for center in points[[0, -1]].tolist():  # an end, or all there is
            pen.circle(center, _SMOOTH / 2, _INK)
    return Pixels(image.resize((_SHARP * width, _SHARP * height), Image.Resampling.BOX))


def side_by_side(images: list[Image.Image], tile: int) -> Image.Image:
    """Maps beside each other, each made `tile` long by repeating pixels, none of them flat."""
    tiles = [image.resize(Pixels(image).box(tile), Image.Resampling.NEAREST) for image in images]
    height, width = max(image.height for image in tiles), sum(image.width + _BETWEEN for image in tiles)
    canvas, left = Image.new("RGBA", (width - _BETWEEN, height)), 0
    for image in tiles:
        canvas.paste(image, (left, (height - image.height) // 2))
        left += image.width + _BETWEEN
    return canvas


def extent(values: NDArray[Any]) -> tuple[float, float]:
    """Lowest and highest number that is no NaN, ints exactly; NaN if there is none."""
    flat = values.reshape(-1)
    if not flat.size:
        return np.nan, np.nan
    return np.fmin.reduce(flat).item(), np.fmax.reduce(flat).item()


def scaled(values: NDArray[Any], low: float, high: float) -> NDArray[np.float64]:
    """`low` to `high` as 0 to 1, with what is outside at the ends; 1/2 if they are the same; NaN stays."""
    numbers = np.where(np.isfinite(values), values, np.nan).astype(np.float64) / 2  # no difference overflows
    if not low < high:
        return numbers * 0 + 0.5
    return np.clip((numbers - low / 2) / (high / 2 - low / 2), 0, 1)


def limits(values: NDArray[np.float64]) -> tuple[float, float]:
    """Percentiles 1 and 99 of the finite numbers, or the lowest and highest if most are the same."""
    numbers = values[np.isfinite(values)]
    low, high = np.percentile(numbers, _PERCENTILES).tolist() if len(numbers) else (0.0, 1.0)
    return (low, high) if low < high else extent(numbers)


def contrasted(planes: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Planes with the limits of all of them together as 0 to 1."""
    low, high = limits(np.concatenate([plane.reshape(-1) for plane in planes]))
    return [scaled(plane, low, high) for plane in planes]


def envelope(signal: NDArray[np.float64], most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lowest and highest of at most so many stretches of a 1-D array: peaks stay.

    NaN only where a stretch has no number.
    """
    if len(signal) <= most:
        return signal, signal
    edges = np.arange(most) * len(signal) // most
    return np.fmin.reduceat(signal, edges), np.fmax.reduceat(signal, edges)


def fitted(shape: tuple[int, ...], size: int) -> tuple[int, int]:
    """Rows and columns of a picture whose longer side has at most `size`, and the other not much fewer."""
    longest = max(shape)
    rows, columns = (min(n, max(round(n * size / longest), size // _FLATTEST)) for n in shape)
    return rows, columns


def thinned(array: NDArray[Any], target: tuple[int, int]) -> NDArray[Any]:
    """Every so many-th along the first two axes: of those that are many times the target."""
    steps = (max(1, n // (_DENSE * pixels)) for n, pixels in zip(array.shape, target, strict=False))
    return array[tuple(slice(None, None, step) for step in steps)]


def reduced(plane: NDArray[np.float64], target: tuple[int, int]) -> NDArray[np.float64]:
    """A 2-D array of so many rows and columns, each the mean of those in its block but for NaN."""
    for axis, pixels in enumerate(target):
        if plane.shape[axis] > pixels:
            edges = np.arange(pixels) * plane.shape[axis] // pixels
            is_there = np.isfinite(plane)
            sums = np.add.reduceat(np.where(is_there, plane, 0), edges, axis=axis)
            plane = sums / np.add.reduceat(is_there, edges, axis=axis, dtype=np.int64)
    return plane


def to_html(drawing: Drawing, summary: str, size: int) -> display.Markup:
    """The drawing, `size` pixels long, which says its summary when pointed at."""
    if isinstance(drawing, str):
        return display.element("span", drawing, title=summary)
    width, height = drawing.box(size)
    attributes = {"src": _data_url(_encode(drawing.image)), "alt": summary, "title": summary}
    style = f"{'image-rendering: pixelated; ' if drawing.is_map else ''}vertical-align: middle"
    return display.empty_element("img", **attributes, width=width, height=height, style=style)


def _encode(image: Image.Image) -> bytes:
    file = io.BytesIO()
    options: dict[str, Any] = {"compress_level": 1}  # small already; the time counts
    image.save(file, "png", **options)
    return file.getvalue()


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


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
        return to_html(self.drawing, self.summary, self.size)

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
        text = printable(shorten(value, _MAX_TEXT))
        return text, f"text of {format_count(len(value), 'character')}"
    if isinstance(value, bytes | bytearray | memoryview):
        return _draw_bytes(bytes(value), size)
    if isinstance(value, dt.datetime):
        return value.isoformat(sep=" "), "a moment"
    array, dtype = as_array("value", value)
    dtype = getattr(kind, "dtype", dtype)
    if array.ndim == 0:
        return _number(plain(array, dtype)[()]), dtype
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
        return f"empty {what}", f"{what}, empty"
    lead = array.ndim - 3
    if lead > 0:
        index = tuple(n // 2 for n in array.shape[:lead])
        array = array[index]
        what += f" at {index}"
    if array.dtype.kind == "c":
        array = np.abs(array)
        what += ", magnitude"
    channels = channel_axis(array.shape, is_ragged) if array.ndim == 3 else None
    lowest, highest = extent(array)
    bad = array.size - int(np.isfinite(array).sum()) if array.dtype.kind == "f" else 0
    if bad and bad < array.size and not np.isfinite([lowest, highest]).all():
        lowest, highest = extent(array[np.isfinite(array)])
    nans = f", {bad:,} not finite" if bad else ""
    if bad == array.size:
        return "no finite number", f"{what}, no finite number"
    same = lowest == highest
    is_image_as_it_is = channels is not None and array.dtype == np.uint8
    summary = f"{what}, {_number(lowest)} to {_number(highest)}{nans}"
    if same and not is_image_as_it_is:
        text = _number(lowest) if array.size == 1 else f"constant {_number(lowest)}"
        return text + nans, f"{what}, {text}{nans}"
    if channels is not None:
        return Pixels(_image(np.moveaxis(array, channels, 2), size)), summary
    unit = partial(scaled, low=lowest, high=highest)
    if array.ndim == 1:
        return line(*envelope(unit(array), size), size), summary
    if array.ndim == 2:
        return Pixels(colored(*contrasted([_plane(array, size, unit)])), is_map=True), summary
    tile = 2 * size // 3
    planes = [_plane(array.take(n // 2, axis), tile, unit) for axis, n in enumerate(array.shape)]
    slices = [colored(plane) for plane in contrasted(planes)]
    return Pixels(side_by_side(slices, tile), is_map=True, lengths=2), summary


def channel_axis(shape: tuple[int, ...], is_ragged: bool = False) -> int | None:
    """Which axis of three holds the channels of an image; None: it is a volume."""
    first, last = shape[0] in _CHANNELS and not is_ragged, shape[2] in _CHANNELS
    if first and last:
        return 2 if shape[2] < shape[0] else 0
    return 0 if first else 2 if last else None


def _plane(
    array: NDArray[Any], size: int, unit: Callable[[NDArray[Any]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    target = fitted(array.shape, size)
    return reduced(unit(thinned(array, target)), target)


def _image(array: NDArray[Any], size: int) -> Image.Image:
    """(h, w, c) as an image of at most `size` pixels a side."""
    target = fitted(array.shape[:2], size)
    array = thinned(array, target)
    if array.dtype != np.uint8:
        color, alpha = array[..., :3], np.clip(array[..., 3:].astype(np.float64), 0, 1)
        lowest, highest = extent(color[np.isfinite(color)])
        if array.dtype.kind != "f" or not 0 <= lowest <= highest <= 1:
            (color,) = contrasted([scaled(color, lowest, highest)])
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
            if width * height > _MAX_FILE_PIXELS:
                return f"{what}: too large to be drawn", what
            target = fitted((height, width), size)
            image.draft("RGB", (2 * size, 2 * size))  # JPEG: decoded small at once
            if image.mode in ("RGB", "L"):
                return Pixels(_smaller(image, target)), what
            if image.mode.startswith(("I", "F")):  # 16 bits
                return Pixels(_image(np.asarray(image)[..., None], size)), what
            return Pixels(_smaller(image.convert("RGBA"), target)), what
    except UnidentifiedImageError:
        return what, what
    except NO_IMAGE:
        return f"{what}: damaged, or too large to be drawn", what


def _number(value: Any) -> str:
    """A number to six digits; whatever else can be one value, as its text."""
    if isinstance(value, np.datetime64):
        return str(value).replace("T", " ") if value == value else "NaT"
    if isinstance(value, int | np.integer | bool | np.bool_):
        return str(value)
    return f"{value:.6g}"


def large(name: str, value: Any, kind: FieldType | None, rate: float = 0) -> dict[str, Any]:
    """What is shown of one value, as HTML.

    Args:
        rate: numbers a second of a signal that may be sound; 0: unknown.
    Returns: `name`, `html`, and `slices`: how many there are to choose from, 0 where it is no volume.
    """
    slices = 0
    axes = value.ndim if isinstance(value, np.ndarray) and value.size > 1 else 0
    sound = [kind for magic, kind in _SOUNDS.items() if isinstance(value, bytes) and value.startswith(magic)]
    if value is None or isinstance(value, str | list):  # of notes: no reason, a reason, tags
        text = value if isinstance(value, str) else ", ".join(value or ())
        shown = f"<pre>{html.escape(text)}</pre>"
    elif sound:
        shown = _player(value, sound[0])
    elif axes == 1 and len(value) <= _MAX_PLOTTED:
        shown = _signal(value, rate)
    elif axes > 3 or (axes == 3 and not _is_image(value, kind)):
        slices = len(_slices(value, kind))
        shown = slice_html(value, slices // 2, kind)
    else:
        shown = _picture(value, kind, _LARGE if axes == 1 else _MAX_LARGE)
    if isinstance(kind, Ragged) and value.size <= _MAX_NUMBERS:
        shown += f"<pre>{np.array2string(value, threshold=_MAX_NUMBERS)}</pre>"
    return {"name": name, "html": shown, "slices": slices}


def slice_html(value: NDArray[Any], at: int, kind: FieldType | None = None) -> str:
    """One slice of a volume, in colors that all its slices share; or one image of several."""
    one = _slices(value, kind)[at]
    summary = picture(one).summary
    if one.ndim == 2:
        some = floats(value.reshape(-1)[:: 1 + value.size // _MAX_SAMPLED])
        one = np.asarray(colored(scaled(floats(one), *limits(some))))[..., :3]
    return _picture(one, summary=summary)


def _picture(
    value: Any, kind: FieldType | None = None, most_pixels: int = _MAX_LARGE, summary: str = ""
) -> str:
    """A picture whose own pixels are seen where it has few."""
    drawn = picture(value, kind, most_pixels)
    drawing = drawn.drawing
    if isinstance(drawing, Pixels):
        drawing = replace(drawing, is_map=max(drawing.image.size) < _LARGE)
    return to_html(drawing, summary or drawn.summary, _LARGE)


def _is_image(value: NDArray[Any], kind: FieldType | None) -> bool:
    """Whether the last three axes are an image. Rows that differ in length have no channels along it."""
    return channel_axis(value.shape[-3:], isinstance(kind, Ragged) and value.ndim == 3) is not None


def _slices(value: NDArray[Any], kind: FieldType | None) -> NDArray[Any]:
    """The last two axes of each, or three of images."""
    return value.reshape(-1, *value.shape[-3 if _is_image(value, kind) else -2 :])


def _signal(value: NDArray[Any], rate: float) -> str:
    """A plot, and where it may be sound a player of it."""
    numbers = floats(value)
    figure = Figure(figsize=(9, 2.2), layout="tight")
    axes = figure.add_subplot()
    axes.plot(numbers, linewidth=0.8, color=_INK)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    shown = str(display.empty_element("img", alt="", src=_data_url(file.getvalue())))
    if len(value) < _MIN_HEARD or not np.isfinite(numbers).all() or not numbers.any():
        return shown
    is_known = _HEARD[0] <= rate <= _HEARD[1]
    player = _player(numbers, "audio/wav", int(rate) if is_known else _RATE)
    return (
        f"{shown}<div>{player}{'' if is_known else f' at {_RATE:,} a second: no column tells its rate'}</div>"
    )


def _player(sound: bytes | NDArray[np.float64], kind: str, rate: int | None = None) -> str:
    """Play a file, or numbers at a rate."""
    from IPython.display import Audio  # slow; only the explorer plays sound

    player: Any = Audio(data=sound, rate=rate)  # type: ignore[no-untyped-call]
    player.mimetype = kind
    return str(player._repr_html_())


@dataclass(frozen=True, slots=True)
class Tile:
    """One row's picture; `row` counts within its segment."""

    seq: int
    row: int
    picture: Picture

    @property
    def caption(self) -> str:
        return str(RowId(self.seq, self.row))


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one value of the column grouped by, or all; some of them have pictures.

    `value` is empty where nothing is grouped by, but says how many rows that were asked for have left.
    """

    value: str
    rows: int
    tiles: tuple[Tile, ...]


class Gallery:
    """Pictures of rows, as a notebook shows them. It keeps the pictures; nothing is leased by it.

    `groups` are one for each value, most rows first, or one of all.
    """

    def __init__(self, title: str, by: str | None, groups: Sequence[Group], size: int) -> None:
        self.title = title
        self.by = by
        self.groups = tuple(groups)
        self._size = size

    def __repr__(self) -> str:
        tiles = sum(len(group.tiles) for group in self.groups)
        return f"<Gallery of {format_count(tiles, 'picture')}: {printable(self.title)}>"

    def _repr_html_(self) -> str:
        return display.Card("Gallery", self.title, [*map(self._shown, self.groups)]).as_html()

    def _shown(self, group: Group) -> display.Markup:
        tiles = [
            display.element(
                "div",
                display.Markup(tile.picture._repr_html_()),
                display.element("div", tile.caption, style="font-size: 0.75em; opacity: 0.7"),
                style=f"min-width: {self._size}px; max-width: {2 * self._size}px; text-align: center; "
                "overflow-wrap: anywhere; line-height: 1.3",
            )
            for tile in group.tiles
        ]
        style = "display: flex; flex-wrap: wrap; gap: 0.6em; align-items: end; margin: 0.3em 0 0.7em"
        return display.join([display.note(self._name(group)), display.element("div", *tiles, style=style)])

    def _name(self, group: Group) -> str:
        rows = format_count(group.rows, "row")
        if self.by is None:
            return f"{rows}; {group.value}" if group.value else rows
        return f"{self.by} = {shorten(group.value, _MAX_NAME)}: {rows}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as an HTML file that needs nothing else."""
        Path(path).write_text(display.page(self.title, display.Markup(self._repr_html_())), encoding="utf-8")


def gallery(
    cache: AnyCache,
    column: str,
    n: int = 24,
    by: str | None = None,
    seed: int = 0,
    values: int = 12,
    size: int = 96,
    rows: object = None,
) -> Gallery:
    """Draw random rows of a column, or these.

    Args:
        cache: a Cache, or the path of one.
        column: which; of tensors, ragged or not, text or bytes.
        n: how many pictures at most, of random rows.
        by: a column of one value a row, or an annotation: the pictures are divided among its values.
        seed: of the choice of rows.
        values: how many of the values of `by` are shown at most, those with the most rows.
        size: pixels of a picture's longer side.
        rows: draw these, in this order: ids as of `rows`, such as a DataFrame of a query. Those that have
            left the cache are counted in the gallery, without a picture.
    Blocks: while the rows are read, one by one, and all of `by`. The rows are leased no longer.
    Raises: ValueError: an unknown column, one without pictures, one with too many values to group by, no
        row is there, both `rows` and `by`, more than 1,000 `rows`. MissingSegmentsError: all of these left
        the cache. FileNotFoundError: no cache. CorruptSegmentError: a damaged segment, which was
        quarantined: call it again.
    """
    store = store_of(cache)
    schema = store.settings.schema
    require_column(schema, column, _has_pictures, "a gallery has pictures of more than one number a row")
    n, values = parse_count(n, "n", most=_MAX_PICTURES), parse_count(values, "values")
    seed = parse_count(seed, "seed", least=0, most=None)
    asked = None if rows is None else _asked(rows, by)
    by_value = [] if by is None else _choose_by(cache, annotated(store), by, n, values, seed)
    with Snapshot.take(store) as snapshot:
        if not len(snapshot):
            raise ValueError(f"{store.folder.path} has no rows yet: start its samplers, then look again")
        if asked is not None:
            places = snapshot.positions(asked, "skip").tolist()
            if not places:
                snapshot.positions(asked)  # says what is known of them
            left = len(asked) - len(places)
            chosen = [(f"{format_count(left, 'row')} left the cache" if left else "", len(places), places)]
        elif by is None:
            rng = np.random.default_rng(seed)
            ids = rng.choice(len(snapshot), min(n, len(snapshot)), replace=False, shuffle=False)
            chosen = [("", len(snapshot), sorted(ids.tolist()))]
        else:
            chosen = [
                (value, count, sorted(snapshot.positions(drawn, "skip").tolist()))
                for value, count, drawn in by_value
            ]
        groups = [
            Group(value, count, tuple(_tile(snapshot, schema[column], column, i, size) for i in drawn))
            for value, count, drawn in chosen
        ]
    grouped = "" if by is None else f" by {by}"
    return Gallery(f"{column}{grouped} of {store.folder.path}", by, groups, size)


def _asked(rows: object, by: str | None) -> NDArray[np.int64]:
    asked = row_ids(rows)
    if by is not None:
        raise ValueError("rows= are shown in their order, and by= groups random ones: give one of the two")
    if not 0 < len(asked) <= _MAX_PICTURES:
        count = format_count(len(asked), "row")
        raise ValueError(f"rows= names {count}: a gallery shows 1 to {_MAX_PICTURES:,}")
    return asked


def _has_pictures(kind: FieldType) -> bool:
    return has_axes(kind) or isinstance(kind, String | Binary)


def _is_one(kind: FieldType) -> bool:
    return isinstance(kind, String) or not _has_pictures(kind)


def _choose_by(
    cache: AnyCache, schema: Schema, by: str, n: int, values: int, seed: int
) -> list[tuple[str, int, NDArray[np.int64]]]:
    """The most frequent values of a column, how many rows have them, and the ids of some of those."""
    from arrowcache.explore import sql  # DuckDB, for those who group; says where it is not there
    from arrowcache.explore.query import TABLE, column_in_sql

    require_column(schema, by, _is_one, "a gallery is grouped by one value a row")
    column, most = column_in_sql(schema, by), Limits.current.grouping_values
    found = sql(
        cache,
        f"select {column} as value, count(*) as rows, "
        f"arg_min(_seq || ':' || _row, hash(_seq, _row, '{seed}'), {n}) as drawn from {TABLE} "
        f"group by {column} order by rows desc, value limit {most + 1}",
    )
    if len(found) > most:
        raise ValueError(f"by={by!r} has over {most} different values: group by one of few")
    share = max(1, n // max(1, min(values, n, len(found))))
    ranked = found.head(min(values, n)).itertuples(index=False, name=None)
    return [
        ("NaN" if value != value and value is not pd.NaT else str(value), rows, row_ids(drawn[:share]))
        for value, rows, drawn in ranked
    ]


def _tile(snapshot: Snapshot, kind: FieldType, column: str, row_id: int, size: int) -> Tile:
    ids = np.array([row_id])
    values = snapshot.gather(ids, [column])[column]
    value = values.data if isinstance(values, Values) else values[0]
    where = snapshot.locate(ids)
    return Tile(int(where["_seq"][0]), int(where["_row"][0]), picture(value, kind, size))
