"""Drawing: what a value becomes before it is HTML, a PNG file or part of a figure. Small, and a copy.

`Pixels` are an image, drawn by Pillow and in matplotlib's colors; `Words` say what no picture would.
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

FLATTEST = 4  # no picture is more times as long as it is wide
_NAN = "#969696"  # grey: what is no finite number
_INK = display.BLUE
_LINE_HEIGHT = 0.3  # of a line's width
_SHARP, _SMOOTH = 2, 4  # times larger a line is kept, for fine screens, and drawn
_BETWEEN = 2  # pixels between pictures side by side


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
        longest, least = max(self.image.size), max(1, size // FLATTEST)
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
