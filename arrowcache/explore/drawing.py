"""Drawing: what a value becomes before it is HTML, a PNG file or part of a figure. Small, and a copy.

`Pixels` are an image, drawn by Pillow and in matplotlib's colors; `Words` say what no picture would. Of large
arrays as few numbers are drawn as a picture has pixels. What is no finite number is NaN there, and nothing
raises, whatever the numbers are: the callers ignore floating-point errors.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from arrowcache import display
from arrowcache.display import printable

_FLATTEST = 4  # no picture is more times as long as it is wide
_NAN = "#969696"  # grey: what is no finite number
_INK = display.BLUE
_LINE_HEIGHT = 0.3  # of a line's width
_SHARP, _SMOOTH = 2, 4  # times larger a line is kept, for fine screens, and drawn
_BETWEEN = 2  # pixels between pictures side by side
_DENSE = 4  # numbers a side that a pixel is the mean of, at most: of more, some are left out
_PERCENTILES = (1, 99)


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


@dataclass(frozen=True, slots=True)
class Words:
    """A text instead of a picture."""

    text: str


Drawing = Pixels | Words


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


def contrasted(planes: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Planes with percentiles 1 to 99 of all of them as 0 to 1, or all if most numbers are the same."""
    numbers = np.concatenate([plane.reshape(-1) for plane in planes])
    numbers = numbers[np.isfinite(numbers)]
    low, high = np.percentile(numbers, _PERCENTILES).tolist() if len(numbers) else (0.0, 1.0)
    low, high = (low, high) if low < high else extent(numbers)
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
    if isinstance(drawing, Words):
        return display.element("span", drawing.text, title=summary)
    width, height = drawing.box(size)
    data = base64.b64encode(_encode(drawing.image)).decode()
    attributes = {"src": f"data:image/png;base64,{data}", "alt": summary, "title": summary}
    style = f"{'image-rendering: pixelated; ' if drawing.is_map else ''}vertical-align: middle"
    return display.empty_element("img", **attributes, width=width, height=height, style=style)


def _encode(image: Image.Image) -> bytes:
    file = io.BytesIO()
    options: dict[str, Any] = {"compress_level": 1}  # small already; the time counts
    image.save(file, "png", **options)
    return file.getvalue()


def label(text: str) -> str:
    """Text in which matplotlib finds no formula, and no character that cannot be drawn."""
    return printable(text).replace("$", r"\$")
