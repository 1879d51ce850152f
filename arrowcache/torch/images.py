"""Images: those of Pillow by their pixels, and by a text of their info and their EXIF.

The text is JSON, of classes in a fixed list. The file's format goes, and with it the file's class and the
attributes of that class. Attributes that a user set are refused. Pure, but for Pillow's own loading.
"""

from __future__ import annotations

import base64
import dis
import functools
import json
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np

from arrowcache.arrow.items import Branch, Opened, with_article
from arrowcache.os_errors import importing
from arrowcache.torch.leaves import refusal

#: Modes of images whose pixels are all there is to them: a palette is more.
_MODES = {"1", "L", "LA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "I", "F"} | {
    "I;16", "I;16B", "I;16L"
}  # fmt: skip
_OF_SAVING = {"encoderinfo", "encoderconfig"}  # what Image.save leaves behind


class Mode(NamedTuple):
    """The mode of an image, such as RGB."""

    name: str

    def __str__(self) -> str:
        return f"mode {self.name!r}"


class ImageCodec:
    """Images of Pillow: their pixels, and a text of info and EXIF. The file's class and attributes go."""

    def opened(self, name: str, value: Any) -> Opened:
        from PIL.Image import Image

        value.load()
        if value.mode not in _MODES:
            has_alpha = value.mode == "PA" or "transparency" in value.info
            raise refusal(
                name,
                f"an image of mode {value.mode!r}, whose pixels are not all there is to it",
                f"image.convert('{'RGBA' if has_alpha else 'RGB'}')",
            )
        if getattr(value, "is_animated", False) and type(value).__name__ != "MpoImageFile":
            raise refusal(name, f"{with_article(type(value).__name__)} of several frames", "image.copy()")
        known = _names_of_image(type(value))  # type: ignore[arg-type]  # a class is hashable
        if unknown := sorted(vars(value).keys() - known):
            raise refusal(
                name,
                f"an image with the attribute {unknown[0]}",
                f"image.copy(), and image.{unknown[0]} as a value of its own",
            )
        pixels = np.asarray(value)
        return Opened(
            Image, ("pixels", "info"), ["", ".info"], [pixels, _info_of(name, value)], 2, (Mode(value.mode),)
        )

    def made(self, node: Branch, children: list[Any]) -> Any:
        image = _pillow()
        pixels, text = children
        mode = node.rest[0].name
        if mode == "1":
            made = image.fromarray(pixels.astype(np.uint8) * 255).convert("1")
        else:
            height, width = pixels.shape[:2]
            made = image.frombytes(mode, (width, height), np.ascontiguousarray(pixels).tobytes())
        if text:
            info, exif = json.loads(text)
            made.info.update({_decoded(key): _decoded(value) for key, value in info})
            if exif is not None:
                new = made.getexif()
                new.load(image.Exif().tobytes())  # so that it reads no groups from info
                new.endian, tags, groups = _decoded(exif)
                new.update(tags)
                new._ifds.update(groups)  # get_ifd of older ones gives a copy
        return made


def is_image(kind: type) -> bool:
    """True if a class is Pillow's own, of images or of files of them."""
    image = getattr(sys.modules.get("PIL.Image"), "Image", None)
    return image is not None and issubclass(kind, image) and kind.__module__.startswith("PIL.")


@functools.cache
def _pillow() -> Any:
    with importing():
        import PIL.Image
    return PIL.Image


@functools.cache
def _names_of_image(kind: type) -> frozenset[str]:
    """The attributes that an image of a class has by itself: others are the user's."""
    from PIL.Image import Image

    names = {*vars(Image()), *_OF_SAVING}
    for each in kind.__mro__[: kind.__mro__.index(Image)]:
        names |= _attributes_set_in(each.__module__)
    return frozenset(names)


def _attributes_set_in(module: str) -> set[str]:
    """Return the names of all attributes that functions and methods of a module set."""
    names: set[str] = set()
    codes = [*_codes(vars(sys.modules[module]).values(), module)]
    while codes:
        code = codes.pop()
        names |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return names


def _codes(things: Any, module: str) -> Iterator[CodeType]:
    for thing in things:
        if isinstance(thing, type) and thing.__module__ == module:
            yield from _codes(vars(thing).values(), module)
        function = getattr(thing, "fget", None) or getattr(thing, "__func__", thing)
        if isinstance(function, FunctionType):
            yield function.__code__


def _info_of(name: str, image: Any) -> bytes:
    """Return an image's info, and its EXIF where info does not have it, as a text. Empty: it has none."""
    info = []
    for key, value in image.info.items():
        try:
            info.append([_coded(key), _coded(value)])
        except _UncodableError as error:
            raise refusal(
                name,
                f"an image with {with_article(error.args[0])} as info[{key!r}]",
                f"the image after del image.info[{key!r}]",
            ) from None
    try:
        exif = _exif_beside(image)
    except _UncodableError as error:
        raise refusal(
            name, f"an image with {with_article(error.args[0])} in its EXIF", "image.copy(), without EXIF"
        ) from None
    return json.dumps([info, exif]).encode() if info or exif is not None else b""


def _exif_beside(image: Any) -> Any:
    """Return the EXIF of an image that was changed, or of a file that has it elsewhere. None: info has it.

    It is not written as a file has it: Pillow would move the offsets of TIFF files in it.
    Raises: _UncodableError.
    """
    from PIL.Image import Image

    plain: Any = Image()
    plain.info = dict(image.info)
    try:
        of_info = _contents_of(plain.getexif())
    except Exception:  # noqa: BLE001  # info has what nobody can read: neither can who gets the copy
        return None
    coded = _coded(_contents_of(image.getexif()))
    return None if coded == _coded(of_info) else coded


def _contents_of(exif: Any) -> list[Any]:
    """Return the byte order of EXIF, its tags, and those of each group in it."""
    from PIL.ExifTags import IFD

    groups = {each: _group(exif, each) for each in IFD if type(exif.get(each)) is int}
    groups |= {each: _group(exif, each) for each in (*exif._ifds, *getattr(exif, "_hidden_data", ()))}
    if IFD.Interop in groups.get(IFD.Exif, ()):
        groups[IFD.Interop] = _group(exif, IFD.Interop)
    groups[IFD.IFD1] = _group(exif, IFD.IFD1)
    return [exif.endian, _tags(exif), [[int(each), _tags(groups[each])] for each in sorted(groups)]]


def _group(exif: Any, group: int) -> Any:
    """Return the tags of a group of EXIF."""
    try:
        return exif.get_ifd(group)
    except Exception:  # noqa: BLE001  # nobody can read it: neither can who gets the copy
        return {}


def _tags(tags: Any) -> dict[int, Any]:
    return {int(tag): tags[tag] for tag in sorted(tags)}  # Pillow's enums are ints, too


class _UncodableError(Exception):
    """A class of values that no text holds."""


def _coded(value: Any) -> Any:
    """Return a value of an image's info as JSON. Raises: _UncodableError."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [*map(_coded, value)]
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [*map(_coded, value)]}
    if kind is dict:
        return {"dict": [[_coded(key), _coded(each)] for key, each in value.items()]}
    if (kind.__module__, kind.__name__) == ("PIL.TiffImagePlugin", "IFDRational"):
        return {"rational": [_coded(value.numerator), _coded(value.denominator)]}
    if (kind.__module__, kind.__name__) == ("PIL.PngImagePlugin", "iTXt"):
        return {"iTXt": [str(value), _coded(value.lang), _coded(value.tkey)]}
    raise _UncodableError(kind.__name__)


def _decoded(coded: Any) -> Any:
    if isinstance(coded, list):
        return [*map(_decoded, coded)]
    if not isinstance(coded, dict):
        return coded
    ((kind, value),) = coded.items()
    return _DECODERS[kind](value)


def _rational(value: list[Any]) -> Any:
    from PIL.TiffImagePlugin import IFDRational

    return IFDRational(*map(_decoded, value))


def _text_of_png(value: list[Any]) -> Any:
    from PIL.PngImagePlugin import iTXt

    return iTXt(*map(_decoded, value))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "bytes": base64.b64decode,
    "tuple": lambda value: tuple(map(_decoded, value)),
    "set": lambda value: {*map(_decoded, value)},
    "frozenset": lambda value: frozenset(map(_decoded, value)),
    "dict": lambda value: {_decoded(key): _decoded(each) for key, each in value},
    "rational": _rational,
    "iTXt": _text_of_png,
}
