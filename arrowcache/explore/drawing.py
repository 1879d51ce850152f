"""Drawing: what a value becomes before it is HTML, a PNG file or part of a figure. Small, and a copy.

A `Line` is a signal, one lowest and highest value a pixel column; `Pixels` are a map of colors or an
image; `Words` say what no picture would.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from arrowcache import display
from arrowcache.display import printable

GAP, NAN = 254, 255  # of the palette: nothing, and what is no finite number
COLORS = 254
_VIRIDIS = bytes.fromhex(  # 33 of the 256 colors of matplotlib's viridis (CC0); the others lie between
    "440154470d6048186a482374472d7b4537814240863e49893b528b375b8d33638d2f6b8e2c728e297a8e26828e23898e21918c"
    "1f978b1f9f8821a68527ad8131b57b3dbc744cc26c5cc8636ece5881d34d95d840aadc32c0df25d5e21aeae51afde725"
)
FLATTEST = 4  # no picture is more times as long as it is wide
_LINE_HEIGHT = 0.3  # of a line's width
_INK = (47, 127, 193)  # display.BLUE
_DOT = "m-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0"  # a circle around where the pen is
_SMOOTH = 3  # times larger is a line drawn, before it is made small


@dataclass(frozen=True, slots=True)
class Line:
    """A signal from left to right, from 0 to 1; NaN where it has a gap."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]

    def runs(self) -> list[slice]:
        """Where it has no gap."""
        is_there = np.concatenate(([False], np.isfinite(self.low), [False]))
        ends = np.flatnonzero(is_there[1:] != is_there[:-1]).tolist()
        return [slice(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True)]

    def outlines(self, width: float, height: float) -> list[NDArray[np.float64]]:
        """Of each run the points (n, 2) around it, or along it where low and high are one; y goes down."""
        x = np.linspace(1, width - 1, len(self.low)) if len(self.low) > 1 else np.array([width / 2])
        low, high = (height - 1 - (height - 2) * side for side in (self.low, self.high))
        found = []
        for run in self.runs():
            line = np.stack([x[run], high[run]], axis=1)
            if not np.array_equal(low[run], high[run]):
                line = np.concatenate([line, np.stack([x[run], low[run]], axis=1)[::-1], line[:1]])
            found.append(line)
        return found


@dataclass(frozen=True, slots=True)
class Pixels:
    """uint8, (height, width) of the palette if `is_map`, else of grey; or (height, width, 3 or 4).

    `lengths`: so many times as long as other pictures, which several side by side are.
    """

    values: NDArray[np.uint8]
    is_map: bool = False
    lengths: int = 1

    def rgba(self) -> NDArray[np.uint8]:
        """(height, width, 4), uint8."""
        if self.is_map:
            return palette()[self.values]
        return np.asarray(Image.fromarray(self.values).convert("RGBA"))

    def box(self, size: int) -> tuple[int, int]:
        """Width and height to be shown in; `size` is the longer one of other pictures."""
        size *= self.lengths
        height, width = self.values.shape[:2]
        longest = max(height, width)
        least = max(1, size // FLATTEST)
        return max(least, round(size * width / longest)), max(least, round(size * height / longest))


@dataclass(frozen=True, slots=True)
class Words:
    """A text instead of a picture."""

    text: str


Drawing = Line | Pixels | Words


@cache
def palette() -> NDArray[np.uint8]:
    """(256, 4): viridis, nothing (GAP), and grey for what is no finite number (NAN)."""
    anchors = np.frombuffer(_VIRIDIS, np.uint8).reshape(-1, 3)
    at = np.linspace(0, len(anchors) - 1, COLORS)
    colors = np.zeros((256, 4), np.uint8)
    for channel in range(3):
        colors[:COLORS, channel] = np.interp(at, np.arange(len(anchors)), anchors[:, channel]).round()
    colors[:COLORS, 3] = 255
    colors[NAN] = (150, 150, 150, 255)
    return colors


def to_html(drawing: Drawing, summary: str, size: int) -> display.Markup:
    """The drawing, `size` pixels long, which says its summary when pointed at."""
    if isinstance(drawing, Words):
        return display.element("span", drawing.text, title=summary)
    if isinstance(drawing, Line):
        return _svg(drawing, summary, size)
    width, height = drawing.box(size)
    data = base64.b64encode(_encode(_image(drawing))).decode()
    attributes = {"src": f"data:image/png;base64,{data}", "alt": summary, "title": summary}
    style = (
        "image-rendering: pixelated; vertical-align: middle" if drawing.is_map else "vertical-align: middle"
    )
    return display.empty_element("img", **attributes, width=width, height=height, style=style)


def to_png(drawing: Drawing, size: int) -> bytes:
    """A PNG file of the drawing, `size` pixels long."""
    if isinstance(drawing, Pixels):
        resampling = Image.Resampling.NEAREST if drawing.is_map else Image.Resampling.BILINEAR
        return _encode(_image(drawing).convert("RGBA").resize(drawing.box(size), resampling))
    if isinstance(drawing, Words):
        return _encode(_written(drawing.text))
    width, height = size, max(8, round(size * _LINE_HEIGHT))
    image = Image.new("RGBA", (_SMOOTH * width, _SMOOTH * height), (*_INK, 0))
    pen = ImageDraw.Draw(image)
    for outline in drawing.outlines(_SMOOTH * width, _SMOOTH * height):
        points = [(x, y) for x, y in outline.tolist()]
        if len(points) == 1:
            (x, y), r = points[0], _SMOOTH
            pen.ellipse((x - r, y - r, x + r, y + r), fill=_INK)
        elif points[0] == points[-1]:
            pen.polygon(points, fill=_INK, outline=_INK, width=_SMOOTH)
        else:
            pen.line(points, fill=_INK, width=_SMOOTH)
    return _encode(image.resize((width, height), Image.Resampling.BOX))


def _svg(line: Line, summary: str, size: int) -> display.Markup:
    width, height = size, max(8, round(size * _LINE_HEIGHT))
    path = "".join(
        f"M{'L'.join(f'{x:.1f} {y:.1f}' for x, y in outline.tolist())}{_DOT if len(outline) == 1 else ''}"
        for outline in line.outlines(width, height)
    )
    is_band = not np.array_equal(line.low, line.high, equal_nan=True)
    shape = display.element(
        "path",
        d=path,
        fill=display.BLUE if is_band else "none",
        stroke=display.BLUE,
        stroke_width=0.6 if is_band else 1.2,
        stroke_linejoin="round",
        stroke_linecap="round",
    )
    return display.element(
        "svg",
        display.element("title", summary),
        shape,
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        style="vertical-align: middle",
    )


def _image(pixels: Pixels) -> Image.Image:
    image = Image.fromarray(np.ascontiguousarray(pixels.values))
    if pixels.is_map:
        image.putpalette(palette().tobytes(), "RGBA")
    return image


def _written(text: str) -> Image.Image:
    font = ImageFont.load_default(14)
    left, top, right, bottom = font.getbbox(text)
    size = (round(right - left) + 8, round(bottom - top) + 8)
    image = Image.new("RGBA", size, (255, 255, 255, 255))  # a text of no known ground needs its own
    ImageDraw.Draw(image).text((4 - left, 4 - top), text, fill=(40, 40, 40), font=font)
    return image


def _encode(image: Image.Image) -> bytes:
    file = io.BytesIO()
    options: dict[str, Any] = {"compress_level": 1}  # small already; the time counts
    image.save(file, "png", **options)
    return file.getvalue()


def label(text: str) -> str:
    """Text in which matplotlib finds no formula, and no character that cannot be drawn."""
    return printable(text).replace("$", r"\$")
