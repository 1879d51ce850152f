"""Large: one value of a row, as large as one looks at it: images, slices, plots, sound, and text in full."""

from __future__ import annotations

import base64
import html
import io
from dataclasses import replace
from typing import Any

import numpy as np
from IPython import display
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from arrowcache.arrow.schema import FieldType, Ragged
from arrowcache.display import BLUE
from arrowcache.explore.drawing import Pixels, to_html
from arrowcache.explore.numbers import floats
from arrowcache.explore.pictures import channel_axis, picture

_AUDIO: Any = display.Audio  # without types
_PIXELS = 400  # of the longer side, as shown first
_MOST_PIXELS = 2048  # to be seen by zooming in
_MOST_PLOTTED = 200_000  # numbers of a signal; of a longer one `picture` draws the lowest and highest
_FEWEST_HEARD = 4000  # numbers of a signal that may be sound
_RATE = 16_000  # numbers a second, where no column tells
_HEARD = (1000, 192_000)  # rates of sound
_MOST_NUMBERS = 10_000  # of a ragged column's row that are shown as text, too
_LIMITS_OF = 100_000  # numbers of a volume that tell the limits of its colors
_SOUNDS = {b"RIFF": "audio/wav", b"fLaC": "audio/flac", b"OggS": "audio/ogg", b"ID3": "audio/mpeg"}


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
        player = _AUDIO(data=value)
        player.mimetype = sound[0]
        shown = player._repr_html_()
    elif axes == 1 and len(value) <= _MOST_PLOTTED:
        shown = _signal(value, rate)
    elif axes > 3 or (axes == 3 and not _is_image(value, kind)):
        slices = len(_slices(value, kind))
        shown = slice_html(value, slices // 2, kind)
    else:
        shown = _picture(value, kind, _PIXELS if axes == 1 else _MOST_PIXELS)
    if isinstance(kind, Ragged) and value.size <= _MOST_NUMBERS:
        shown += f"<pre>{np.array2string(value, threshold=_MOST_NUMBERS)}</pre>"
    return {"name": name, "html": shown, "slices": slices}


def slice_html(value: NDArray[Any], at: int, kind: FieldType | None = None) -> str:
    """One slice of a volume, in colors that all its slices share; or one image of several."""
    one = _slices(value, kind)[at]
    summary = picture(one).summary
    if one.ndim == 2:
        some = floats(value.reshape(-1)[:: 1 + value.size // _LIMITS_OF])
        low, high = np.percentile(some[np.isfinite(some)], (1, 99)) if np.isfinite(some).any() else (0, 1)
        one = colormaps["viridis"](Normalize(low, high)(floats(one)), bytes=True)[..., :3]
    return _picture(one, summary=summary)


def _picture(
    value: Any, kind: FieldType | None = None, most_pixels: int = _MOST_PIXELS, summary: str = ""
) -> str:
    """A picture whose own pixels are seen where it has few."""
    drawn = picture(value, kind, most_pixels)
    drawing = drawn.drawing
    if isinstance(drawing, Pixels):
        drawing = replace(drawing, is_map=max(drawing.image.size) < _PIXELS)
    return to_html(drawing, summary or drawn.summary, _PIXELS)


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
    axes.plot(numbers, linewidth=0.8, color=BLUE)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    shown = f'<img alt="" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
    if len(value) < _FEWEST_HEARD or not np.isfinite(numbers).all() or not numbers.any():
        return shown
    is_known = _HEARD[0] <= rate <= _HEARD[1]
    player = _AUDIO(data=numbers, rate=int(rate) if is_known else _RATE)._repr_html_()
    return (
        f"{shown}<div>{player}{'' if is_known else f' at {_RATE:,} a second: no column tells its rate'}</div>"
    )
