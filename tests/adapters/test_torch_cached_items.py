"""An item comes back from the cache as it was made, or is refused with a way out that works."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import itertools
import json
import pathlib
import pickle
import random
import re
import struct
import threading
import types
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict
from datetime import datetime, time, timezone
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from datasets_of_items import Items
from torch.utils.data import DataLoader, StackDataset, Subset

import arrowcache as ac
from arrowcache.arrow.convert import fixed_rows
from arrowcache.sampling.sources import Items as Source
from arrowcache.torch import CachedDataset, Loader, cached
from arrowcache.torch.codecs import ExactForm
from arrowcache.torch.collation import columns_of

T = TypeVar("T")


def returned(items, path, **options):
    """Items as they come from the cache, all of them read."""
    with cached(Items(*items), path, capacity="16MiB", **options) as train:
        train.fill(0, progress=False)
        assert train.cached == len(items)
        return [train[index] for index in range(len(items))]


def same(one: Any, other: Any) -> bool:
    """True if all that can be seen of two values is the same. Knows nothing of how they are stored."""
    if type(one) is not type(other):
        return hasattr(one, "getbands") and same_image(one, other)
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape, laid(one.stride(), one.shape)) == (
            other.dtype, other.shape, laid(other.stride(), other.shape)
        )  # fmt: skip
        return alike and torch.equal(torch.isnan(one), torch.isnan(other)) and bool(
            (torch.nan_to_num(one) == torch.nan_to_num(other)).all()
        )  # fmt: skip
    if isinstance(one, np.ndarray):
        alike = (one.dtype, one.shape, laid(one.strides, one.shape)) == (
            other.dtype, other.shape, laid(other.strides, other.shape)
        )  # fmt: skip
        return alike and one.dtype.type is other.dtype.type and one.tobytes() == other.tobytes()
    if hasattr(one, "getbands"):
        return same_image(one, other)
    mine, its = state(one), state(other)
    if list(mine) != list(its) or not all(same(mine[key], its[key]) for key in mine):
        return False
    if isinstance(one, dict | UserDict):
        if list(one) != list(other) or not all(same(one[key], other[key]) for key in one):
            return False
        return getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(mine) or repr(one) == repr(other)


def laid(strides, shape):
    """The order of dimensions in memory; that of C where rows are repeated."""
    if not all(strides):
        return list(range(len(shape)))
    return sorted((at for at in range(len(shape)) if shape[at] > 1), key=lambda at: -abs(strides[at]))


def state(value):
    own = dict(getattr(value, "__dict__", {}))
    if isinstance(value, Attributes):
        return {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        own |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return own


def same_image(one, other):
    return (
        (one.mode, one.size, one.tobytes()) == (other.mode, other.size, other.tobytes())
        and one.info == other.info
        and list(map(repr, one.info.values())) == list(map(repr, other.info.values()))
        and tags(one) == tags(other)
    )


def tags(image):
    exif = image.getexif()
    inner = [each for each in (0x8769, 0x8825) if isinstance(exif.get(each), int)]
    return dict(exif), [dict(exif.get_ifd(each)) for each in (*inner, -1)]


class Words(UserDict):
    """As transformers' BatchEncoding."""

    def __init__(self, data=None, encodings=None, n_sequences=None):
        super().__init__(data)
        self._encodings, self._n_sequences = encodings, n_sequences

    def __getitem__(self, key):
        return self.data[key] if isinstance(key, str) else self._encodings[key]

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getstate__(self):
        return {"data": self.data, "encodings": self._encodings}

    def __setstate__(self, state):
        self.data, self._encodings = state["data"], state["encodings"]


class Output(OrderedDict):
    """As transformers' ModelOutput: what is not None is an attribute and a key."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value

    def update(self, *args, **named):
        raise Exception("You cannot use ``update``")  # as it is there

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name, value):
        if name in {field.name for field in dataclasses.fields(self)} and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self):
        made, _, *rest = super().__reduce__()
        return made, tuple(getattr(self, field.name) for field in dataclasses.fields(self)), *rest


@dataclasses.dataclass
class Hidden(Output):
    last: Any = None
    states: Any = None
    attentions: Any = None


class Plain(dict):
    pass


class Counts(defaultdict):
    def __init__(self, **named):
        super().__init__(int, **named)


class Titled(OrderedDict):
    def __init__(self, title, **named):
        super().__init__(**named)
        self.title = title


class Unchanged(dict):
    def refuse(self, *_):
        raise TypeError("it is not changed")

    update = __setitem__ = refuse


class Attributes(dict):
    """Its keys are its attributes."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.__dict__ = self


class Named(NamedTuple):
    a: Any
    b: Any


class NamedMore(Named):
    pass


@dataclasses.dataclass
class Sample:
    x: Any
    mask: Any = None

    def __post_init__(self):
        self.length = len(self.x)
        self.again = self.x


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any

    def __post_init__(self):
        object.__setattr__(self, "half", 0.5)


@dataclasses.dataclass
class Of(Generic[T]):
    x: T


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    y: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: Any
    y: int = 1


@dataclasses.dataclass
class Initialized:
    x: Any
    scale: dataclasses.InitVar[int] = 2

    def __post_init__(self, scale):
        self.scaled = self.x * scale


class Underscored:
    """A field whose value is an attribute of another name."""

    def __set_name__(self, owner, name):
        self.name = f"_{name}"

    def __get__(self, owner, kind=None):
        if owner is None:
            raise AttributeError(self.name)
        return vars(owner)[self.name]

    def __set__(self, owner, value):
        vars(owner)[self.name] = value


@dataclasses.dataclass
class Described:
    x: int = Underscored()


def with_attributes(value, **attributes):
    for name, each in attributes.items():
        setattr(value, name, each)
    return value


def zero() -> int:
    return 0


AS_MADE = {
    "an ordered dict": lambda n: OrderedDict(b=n, a=torch.tensor([n])),
    "an ordered dict with an attribute": lambda n: with_attributes(OrderedDict(a=n), of=n),
    "a defaultdict": lambda n: defaultdict(int, a=n),
    "a defaultdict of a function": lambda n: defaultdict(zero, a=n),
    "a defaultdict without one": lambda n: defaultdict(None, a=n),
    "a counter": lambda n: Counter(a=n, b=2),
    "a UserDict": lambda n: UserDict(a=n, b={"c": torch.tensor([n])}),
    "a UserDict of one's own": lambda n: Words({"ids": torch.tensor([n, n])}),
    "with attributes": lambda n: Words({"ids": torch.tensor([n])}, [{"ids": [n]}], n),
    "a model's output": lambda n: Hidden(torch.tensor([n]), (torch.ones(n + 1).sum()[None],)),
    "a nested output": lambda n: {"out": Hidden(torch.tensor([float("nan")])), "n": n},
    "a defaultdict of one's own": lambda n: Counts(a=n),
    "an ordered dict with an argument": lambda n: Titled("t", a=n),
    "a dict that is not changed": lambda n: Unchanged(a=n),
    "a dict's subclass": lambda n: with_attributes(Plain(a=n), note=str(n), none=None),
    "keys that are attributes": lambda n: Attributes(a=n, t=torch.tensor([n])),
    "keys of numbers": lambda n: {1: n, (2, 3): "a", None: n},
    "a named tuple with an attribute": lambda n: with_attributes(NamedMore(n, "a"), more=torch.tensor([n])),
    "a generic dataclass": lambda n: [Of[int](n), Of(n), {"x": Of[Of[str]](Of[str](f"{n}"))}],
    "a dataclass with more": lambda n: Sample(torch.arange(3) + n),
    "a frozen dataclass with more": lambda n: Frozen(np.full(2, n)),
    "slots": lambda n: Slotted(torch.tensor([n]), n),
    "frozen slots": lambda n: FrozenSlotted(torch.tensor([n]), n),
    "an InitVar": lambda n: Initialized(np.full(2, n)),
    "a field behind a descriptor": lambda n: Described(n),
    "a dataclass of a mapping": lambda n: Frozen({"a": Words({"b": n}), "c": [Sample([n, n]), n]}),
    "nested empties": lambda n: {"n": n, "empty": {}, "tuple": (), "of": Frozen({})},
    "Fortran's order": lambda n: np.asfortranarray(np.full((2, 3), n)),
    "turned dimensions": lambda n: torch.full((2, 3, 4), n).permute(2, 0, 1),
    "channels last": lambda n: torch.full((2, 3, 4, 5), n).to(memory_format=torch.channels_last),
    "a ragged one of turned dimensions": lambda n: np.full((3, 4, n + 2), n, "f4").transpose(2, 1, 0),
    "a repeated row": lambda n: torch.full((1, 3), n).expand(4, 3),
    "a part": lambda n: torch.full((4, 6), n)[:, ::2],
    "backwards": lambda n: (np.arange(5) + n)[::-1],
    "big-endian": lambda n: np.full((2, 2), n, ">i8"),
    "not a number": lambda n: (float("nan"), np.array([np.nan, -0.0, n]), -0.0),
    "numbers of NumPy in a list": lambda n: [np.float64(n), np.float64(1)],
    "a text of NumPy that ends in nothing": lambda n: np.str_(f"{n}\0"),
    "bytes of NumPy that end in nothing": lambda n: np.bytes_(b"%d\0" % n),
    "a negative view": lambda n: torch.full((2,), complex(n, 1)).conj().imag,
    "a large int": lambda n: {"hash": 2**63 + n, "few": [2**64 - 1, 2**63 + n]},
    "long longs": lambda n: (np.arange(3, dtype="q") + n, np.full((2, 3), 2**63 + n, "Q", order="F")),
    "long longs of the other byte order": lambda n: np.full(2, n).astype(np.dtype("q").newbyteorder()),
    "a long long": lambda n: [np.longlong(n), np.ulonglong(2**63 + n)],
}


@pytest.mark.parametrize("kind", AS_MADE)
def test_an_item_comes_back_as_it_was_made(tmp_path, kind):
    items = [AS_MADE[kind](number) for number in range(3)]
    schema = {"value": ac.Ragged("float32", (4, 3))} if kind.startswith("a ragged") else None
    again = returned(items, tmp_path / "cache", schema=schema)
    for item, other in zip(items, again, strict=True):
        assert same(item, other), (item, other)


def test_what_was_one_object_beside_an_attribute_is_one_again(tmp_path):
    (sample,) = returned([Sample(torch.ones(3))], tmp_path / "a")
    assert sample.again is sample.x
    (output,) = returned([Hidden(torch.ones(3))], tmp_path / "b")
    assert output.last is output["last"]
    output["last"] = 3
    assert output.last == 3
    (attributes,) = returned([Attributes(a=1)], tmp_path / "c")
    attributes.b = 2
    assert attributes == {"a": 1, "b": 2}


@pytest.mark.parametrize("function", [lambda: 0, functools.partial(defaultdict, int)])
def test_a_default_factory_is_the_same_where_it_does_the_same(tmp_path, function):
    def made(n):
        return defaultdict((lambda: 0) if isinstance(function, types.FunctionType) else function, a=n)

    with cached(Items(made(0), made(1)), tmp_path / "cache", capacity="16MiB") as train:
        train.fill(0, progress=False)
        for each in (train, pickle.loads(pickle.dumps(train.form))):
            again = each[1] if each is train else each.item(iter([1]))
            assert again["b"] == function()
    others = Items(defaultdict(int, a=0), defaultdict(float, a=1))
    with (
        cached(others, tmp_path / "other", capacity="16MiB") as train,
        pytest.raises(ac.SchemaError, match=r"item 1: .* default_factory float, .* default_factory int"),
    ):
        train[1]


# images


@pytest.fixture
def pillow():
    return pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def photograph(pillow, file="JPEG", turned=6, number=0, **options):
    exif, stream = pillow.Exif(), io.BytesIO()
    exif[274] = turned
    exif.get_ifd(0x8825)[1] = "N"
    pillow.new("RGB", (16, 8), number).save(stream, file, exif=exif, **options)
    return pillow.open(io.BytesIO(stream.getvalue()))


def changed(pillow, number):
    image = photograph(pillow, number=number)
    image.getexif()[274] = 3 + number
    return image


def apart(pillow, number):
    image = photograph(pillow, turned=number + 1)
    image.getexif()
    del image.info["exif"]
    return image


def without_place(pillow, number):
    image = photograph(pillow, turned=number + 1)
    image.getexif().get_ifd(0x8825).clear()
    return image


def with_thumbnail(pillow, number):
    tags = [struct.pack("<HHHII", 1, tag, 3, 1, value) for tag, value in ((274, 6), (259, number + 1))]
    exif = b"Exif\0\0II*\0" + struct.pack("<I", 8) + tags[0] + struct.pack("<I", 26) + tags[1] + bytes(4)
    image = pillow.new("RGB", (2, 2))
    image.info["exif"] = exif
    image.getexif()[274] = 3
    assert image.getexif().get_ifd(-1)  # ExifTags.IFD.IFD1
    return image


def own_group(pillow, number):
    image = photograph(pillow, turned=number + 1)
    image.getexif()[0x8825] = {1: "S"}
    return image


def texts(pillow, number):
    from PIL.PngImagePlugin import PngInfo

    info, stream = PngInfo(), io.BytesIO()
    info.add_text("by", f"n{number}")
    info.add_itxt("of", "ä", "en", "key")
    pillow.new("L", (4, 4)).save(stream, "PNG", pnginfo=info, dpi=(72, 72), transparency=number)
    return pillow.open(io.BytesIO(stream.getvalue()))


IMAGES = {
    "a photograph": lambda pillow, n: photograph(pillow, number=n, dpi=(72, 71), icc_profile=b"\0\xff" * n),
    "a copy of one": lambda pillow, n: photograph(pillow, number=n).copy(),
    "one that was turned": lambda pillow, n: photograph(pillow, turned=n + 1).convert("L"),
    "EXIF that was changed": changed,
    "EXIF that info has no more": apart,
    "EXIF whose place was removed": without_place,
    "EXIF with a thumbnail": with_thumbnail,
    "a group of one's own": own_group,
    "EXIF of one's own": lambda pillow, n: own_exif(pillow, n),
    "a TIFF": lambda pillow, n: photograph(pillow, "TIFF", number=n, dpi=(3, 4)),
    "a WebP": lambda pillow, n: photograph(pillow, "WEBP", number=n),
    "a PNG with texts": texts,
    "info of one's own": lambda pillow, n: info(pillow, n),
}


def own_exif(pillow, number):
    image = pillow.new("RGB", (2, 2))
    image.getexif()[0x8769] = {36867: f"200{number}:01:01 00:00:00"}
    return image


def info(pillow, number):
    image = pillow.new("RGBA", (2, 2))
    image.info |= {"transparency": (1, 2, number), "a": {1: [None, {2}, frozenset([b"\0"])]}, "f": 0.1}
    return image


@pytest.mark.parametrize("kind", IMAGES)
def test_an_image_has_its_info_and_exif_again(tmp_path, pillow, kind):
    images = [IMAGES[kind](pillow, number) for number in range(3)]
    for image, again in zip(images, returned(images, tmp_path / "cache"), strict=True):
        assert same(image, again)
        assert type(again) is pillow.Image


def test_a_stored_image_is_not_changed(tmp_path, pillow):
    image, other = photograph(pillow).copy(), photograph(pillow).copy()
    image.getexif()[270] = other.getexif()[270] = "a"
    returned([image], tmp_path / "cache")
    assert image.getexif().tobytes() == other.getexif().tobytes()
    assert image.info == other.info


FILES = ["JPEG", "PNG", "BMP", "TIFF", "WEBP", "PPM", "TGA", "GIF", "JPEG2000", "PCX", "SGI", "ICO", "MPO"]


def test_images_of_several_files_are_alike(tmp_path, pillow):
    images = []
    for number, file in enumerate(FILES):
        stream = io.BytesIO()
        try:
            pillow.new("L" if file == "GIF" else "RGB", (32, 16), number).save(stream, file)
            image = pillow.open(io.BytesIO(stream.getvalue()))
            image.load()
        except (KeyError, OSError):  # this Pillow was built without it
            continue
        images.append(image if image.mode == "RGB" and image.size == (32, 16) else image.convert("RGB"))
    images = [image.resize((32, 16)) if image.size != (32, 16) else image for image in images]
    images.append(pillow.new("RGB", (32, 16)))
    assert len({*map(type, images)}) > 6
    for image, again in zip(images, returned(images, tmp_path / "cache"), strict=True):
        assert same_image(image, again)


def test_the_first_picture_of_a_file_that_a_phone_wrote_is_what_is_stored(tmp_path, pillow):
    stream = io.BytesIO()
    pillow.new("RGB", (4, 4), 1).save(stream, "MPO", save_all=True, append_images=[pillow.new("RGB", (4, 4))])
    image = pillow.open(io.BytesIO(stream.getvalue()))
    assert image.n_frames == 2
    (again,) = returned([image], tmp_path / "cache")
    assert again.tobytes() == image.tobytes()


def frames(pillow, file):
    stream = io.BytesIO()
    others = [pillow.new("RGB", (4, 4), 9)]
    pillow.new("RGB", (4, 4)).save(stream, file, save_all=True, append_images=others)
    return pillow.open(io.BytesIO(stream.getvalue()))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "label", "label of a file", "class", "info", "P", "PA"])
def test_an_image_with_more_to_it_is_refused_with_a_way_out(tmp_path, pillow, kind):
    class Mine(pillow.Image):
        pass

    image = pillow.new("RGB", (4, 4))
    if kind in ("PNG", "TIFF"):
        image = frames(pillow, kind)
    elif kind.startswith("label"):
        image = with_attributes(photograph(pillow) if "file" in kind else image, label=3)
    elif kind == "class":
        image.__class__ = Mine
    elif kind == "info":
        image.info["x"] = object()
    else:
        image = pillow.new(kind, (4, 4))
    with pytest.raises(ac.SchemaError, match=r"item 0: .*: give ") as caught:
        cached(Items(image), tmp_path / "cache", capacity="16MiB")
    if kind == "info":
        assert "del image.info['x']" in str(caught.value)
        del image.info["x"]
    else:
        image = eval(str(caught.value).rsplit("give ", 1)[1].split(", ")[0], {"image": image})
    assert same_image(image, *returned([image], tmp_path / "cache"))


def test_an_image_of_another_mode_is_refused(tmp_path, pillow):
    with (
        cached(
            Items(pillow.new("RGB", (4, 4)), pillow.new("HSV", (4, 4))), tmp_path / "cache", capacity="16MiB"
        ) as train,
        pytest.raises(ac.SchemaError, match=r"item 1: the item is an Image of mode 'HSV', .* of mode 'RGB'"),
    ):
        train[1]


# what is refused


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Kind(str, enum.Enum):
    GOOD = "good"


class Name(str):
    pass


class Whole(int):
    pass


class Real(float):
    pass


class Bytes(bytes):
    pass


class Values(list):
    pass


class Few(tuple):
    __slots__ = ()


class Mine(torch.Tensor):
    pass


class Array(np.ndarray):
    pass


class Moment(datetime):
    pass


def attribute(tensor):
    tensor.label = 1
    return tensor


def pandas(make):
    return lambda: make(pytest.importorskip("pandas", reason="pandas is not installed"))


REFUSED = {
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(2)),
    "a tensor's subclass": lambda: torch.zeros(2).as_subclass(Mine),
    "a tensor with an attribute": lambda: attribute(torch.zeros(2)),
    "a gradient": lambda: torch.zeros(2, requires_grad=True),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "compressed rows": lambda: torch.eye(2).to_sparse_csr(),
    "a nested tensor": lambda: torch.nested.nested_tensor(
        [torch.ones(1), torch.ones(2)], layout=torch.jagged
    ),
    "half complex numbers": lambda: torch.zeros(2, dtype=torch.complex32),
    "an eighth": lambda: torch.zeros(2, dtype=torch.float8_e5m2),
    "a matrix": lambda: np.matrix([[1, 2]]),
    "a masked array": lambda: np.ma.masked_array([1, 2], [0, 1]),
    "an array's subclass": lambda: np.zeros(2).view(Array),
    "a structured array": lambda: np.zeros(2, [("a", int), ("b", "f4")]),
    "a record": lambda: np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    "an array of objects": lambda: np.array(["a", 1], object),
    "an array of texts": lambda: np.array(["a", "bc"]),
    "an array of spans": lambda: np.ones(2, "m8[s]"),
    "an array of moments": lambda: np.ones(2, "M8[s]"),
    "a dtype with metadata": lambda: np.zeros(2, np.dtype("f4", metadata={"a": 1})),
    "a long double": lambda: np.longdouble(1),
    "an enum": lambda: Color.RED,
    "an enum of ints": lambda: Level.LOW,
    "an enum of texts": lambda: Kind.GOOD,
    "a text's subclass": lambda: Name("a"),
    "an int's subclass": lambda: Whole(1),
    "a float's subclass": lambda: Real(1),
    "subclasses in a list": lambda: [Whole(1), Whole(2)],
    "a bytes' subclass": lambda: Bytes(b"a"),
    "a list's subclass": lambda: Values([1]),
    "a tuple's subclass": lambda: Few((1, 2)),
    "a size": lambda: torch.Size([1, 2]),
    "a large int": lambda: 2**70,
    "half a character": lambda: "\ud800",
    "a path": lambda: pathlib.Path("/a"),
    "a time zone": lambda: datetime(2026, 1, 1, tzinfo=timezone.utc),
    "a fold": lambda: datetime(2026, 1, 1, fold=1),  # noqa: DTZ001
    "a moment's subclass": lambda: Moment(2026, 1, 1),
    "a day": lambda: dt.date(2026, 1, 1),
    "a span": lambda: dt.timedelta(1),
    "a decimal": lambda: decimal.Decimal("1.5"),
    "a fraction": lambda: fractions.Fraction(1, 2),
    "a bytearray": lambda: bytearray(b"a"),
    "a set": lambda: {1, 2},
    "a range": lambda: range(3),
    "a deque": lambda: collections.deque([1]),
    "an array of Python": lambda: array.array("d", [1.0]),
    "a view of a mapping": lambda: types.MappingProxyType({"a": 1}),
    "maps in a chain": lambda: collections.ChainMap({"a": 1}),
    "a dtype": lambda: torch.float32,
    "pandas' moment": pandas(lambda pd: pd.Timestamp("2026-01-02 03:04:05.000006")),
    "pandas' moment of a zone": pandas(lambda pd: pd.Timestamp("2026-01-02", tz="Asia/Tokyo")),
    "pandas' nanosecond": pandas(lambda pd: pd.Timestamp(1)),
    "pandas' no moment": pandas(lambda pd: pd.NaT),
    "pandas' no value": pandas(lambda pd: pd.NA),
    "pandas' span": pandas(lambda pd: pd.Timedelta(1, "s")),
    "a series": pandas(lambda pd: pd.Series([1, 2])),
    "a table": pandas(lambda pd: pd.DataFrame({"a": [1], "b": [0.5]})),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_refused_names_the_value_and_a_way_out_that_works(kind):
    value = REFUSED[kind]()
    with pytest.raises(ac.SchemaError, match=r"'x\.1\b.*: give ") as caught:
        fits({"x": [np.zeros(1), value]})
    said = str(caught.value).rsplit("give ", 1)[1]
    if kind == "subclasses in a list":
        value = value[0]
    advice = said.split(", ")[0] if not said.startswith(("{", "datetime", "np.datetime64")) else said
    names = {"value": value, "tensor": value, "np": np, "torch": torch, "datetime": datetime, "time": time}
    given = eval(advice, names | {"timezone": timezone})
    fits(given() if callable(given) else given)


OF_TORCH = sorted({str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)})
OF_NUMPY = [*np.typecodes["All"], "V3", "V0", ">M8[s]", ">f8", "M8[7D]", "U3"]


def of_dtype(dtype):
    own = getattr(torch, dtype.removeprefix("torch."))
    if torch.empty(0, dtype=own).is_quantized:
        return torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, own)
    return torch.zeros(16, dtype=torch.uint8).view(own)


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(functools.partial(of_dtype, dtype), id=dtype) for dtype in OF_TORCH),
        *(pytest.param(functools.partial(np.zeros, 2, dtype), id=f"array {dtype}") for dtype in OF_NUMPY),
        *(pytest.param(lambda of=of: np.zeros(2, of)[0], id=f"scalar {of}") for of in OF_NUMPY),
        pytest.param(lambda: np.zeros(2, []), id="of no fields"),
        pytest.param(lambda: np.datetime64("NaT"), id="NaT"),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_value_of_any_dtype_fits_or_is_refused_with_a_way_out_that_works(make):
    value = make()
    try:
        fits(value)
    except ac.SchemaError as error:
        advice = str(error).rsplit("give ", 1)[1]
        fits(eval(advice, {"value": value, "tensor": value, "torch": torch}))


def fits(item):
    form = ExactForm(item)
    form.require(form.row(item))
    again = form.items(columns_of(form, [item], np.zeros(1, np.int64)))[0]
    form.require_return(item, again)


@pytest.mark.parametrize("lengths", [[2, 1], [3, 3]])
def test_a_packed_sequence_is_refused_with_a_way_out_that_works(tmp_path, lengths):
    rnn = torch.nn.utils.rnn
    value = rnn.pack_padded_sequence(torch.ones(3, 2, 4), lengths)
    with pytest.raises(ac.SchemaError, match=r"PackedSequence without sorted_indices, .*: give ") as caught:
        cached(Items({"x": value}), tmp_path / "refused", capacity="16MiB")
    given = eval(str(caught.value).rsplit("give ", 1)[1], {**vars(rnn), "value": value})
    assert same(returned([{"x": given}], tmp_path / "cache")[0], {"x": given})


def test_a_moment_of_pandas_is_written_in_whole_or_not_at_all():
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    kind = ac.Timestamp()
    assert fixed_rows("x", kind, pd.Timestamp("2026-01-02 03:04:05.000006"), None).tolist() == [
        datetime(2026, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001
    ]
    for values in (pd.Timestamp(1001), [pd.Timestamp(1001)]):
        with pytest.raises(ac.SchemaError, match=r"has nanoseconds, .*: write value\.floor\('us'\)"):
            fixed_rows("x", kind, values, None)
    assert pd.Timestamp(1001).floor("us").nanosecond == 0


def test_a_column_has_moments_of_pandas_and_its_no_moment_as_the_advice_makes_them(tmp_path):
    """It was another class for each, and a column has one."""
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    moments, made = [pd.Timestamp("2026-01-02 03:04:05.000006"), pd.NaT], []
    for moment in moments:
        with pytest.raises(ac.SchemaError, match=r"Timestamp|NaT") as caught:
            fits(moment)
        made.append(eval(str(caught.value).rsplit("give ", 1)[1], {"value": moment}))
    found = returned(made, tmp_path / "cache")
    assert [str(each) for each in found] == ["2026-01-02T03:04:05.000006", "NaT"]


ELSEWHERE: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
BY_ID: dict[Any, Any] = {}
ALIVE: list[Any] = []  # whose ids are in there: else a copy may get one of them


def keep(value, what, key=None):
    BY_ID[id(value) if key is None else (id(value), key)] = what
    ALIVE.append(value)
    return value


class Encoded(UserDict):
    @property
    def tokens(self):
        return BY_ID[id(self)]


class OrderedEncoded(OrderedDict):
    tokens = Encoded.tokens


class NamedEncoded(NamedTuple("NamedEncoded", [("a", int)])):
    tokens = Encoded.tokens


class NamedIndexed(NamedTuple("NamedIndexed", [("a", int)])):
    def __getitem__(self, at):
        return BY_ID[id(self)]


@dataclasses.dataclass
class Numbered:
    a: int

    @property
    def number(self):
        return BY_ID.get(id(self))


@dataclasses.dataclass
class Read:
    """Its property is what is kept by the id of the object, in other values."""

    a: int
    of: str

    @property
    def more(self):
        number = BY_ID.get(id(self), 0)
        return {
            "a list": [number, "a"],
            "an array": (np.zeros(2), np.array([number])),
            "a set": {number},
            "a span": dt.timedelta(number),
            "a dict": {"a": {"b": torch.tensor(number)}},
        }[self.of]


class Long(UserDict):
    def __len__(self):
        return 1 + BY_ID.get(id(self), 0)


class Noted:
    """An attribute that is no field, and is kept by the id of the object."""

    def __get__(self, owner, kind=None):
        return self if owner is None else BY_ID.get((id(owner), "note"), 0)

    def __set__(self, owner, value):
        keep(owner, value, "note")


class NotedDict(dict):
    note = Noted()


class NotedTuple(NamedTuple("NotedTuple", [("a", int)])):
    note = Noted()


@dataclasses.dataclass
class NotedFields:
    a: int
    note = Noted()


READ = ["a list", "an array", "a set", "a span", "a dict"]


def kept_by_id(value):
    return keep(value, 1)


class PinnedMemory:
    """A field whose value is kept by the id of the object."""

    def __get__(self, owner, kind=None):
        if owner is None:
            raise AttributeError
        return BY_ID[id(owner)]

    def __set__(self, owner, value):
        keep(owner, value)


@dataclasses.dataclass
class Kept:
    x: list = PinnedMemory()
    y: int = 1


@dataclasses.dataclass(eq=False)
class Looked:
    x: int

    def __post_init__(self):
        ELSEWHERE[self] = 5

    @property
    def more(self):
        return ELSEWHERE[self]


@dataclasses.dataclass
class Locked:
    x: int

    def __post_init__(self):
        self.lock = threading.Lock()


@dataclasses.dataclass
class Failure(Exception):
    x: int


@dataclasses.dataclass
class Owner:
    x: int

    def __del__(self):
        pass


class Elsewhere(UserDict):
    """Its values are kept by the id of the object."""

    def __init__(self, **named):
        super().__init__(dict.fromkeys(named, 0))
        keep(self, named)

    def __getitem__(self, key):
        return BY_ID[id(self)][key]


class Lazy(collections.abc.Mapping):
    def __getitem__(self, key):
        return 3

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2


class Ordered(UserDict):
    def __init__(self, **named):
        super().__init__(named)
        self.data = OrderedDict(self.data)


def cyclic():
    item: dict[str, Any] = {"a": 1}
    item["self"] = item
    return item


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Kept([1]), "the item is a Kept whose field 'x' is kept elsewhere"),
        (lambda: {"a": Looked(1)}, r"'a\.more' does not come back"),
        (lambda: Locked(1), "field 'lock': .* got a lock"),
        (lambda: Failure(1), "got a Failure"),
        (lambda: Owner(1), "got an Owner: give a dict of its values"),
        (lambda: Elsewhere(a=1), "does not come back from the cache as it was"),
        (lambda: kept_by_id(Encoded(a=1)), "'tokens' does not come back"),
        (lambda: {"x": kept_by_id(OrderedEncoded(a=1))}, r"'x\.tokens' does not come back"),
        (lambda: kept_by_id(NamedEncoded(1)), "'tokens' does not come back"),
        *((lambda of=of: kept_by_id(Read(1, of)), "'more' does not come back") for of in READ),
        (lambda: kept_by_id(Long(a=1)), "the item does not come back"),
        (lambda: kept_by_id(NamedIndexed(1)), "'0' does not come back"),
        (lambda: kept_by_id(Numbered(1)), "'number' does not come back"),
        (lambda: with_attributes(NotedDict(a=1), note=2), "'note' does not come back"),
        (lambda: with_attributes(NotedTuple(1), note=2), "'note' does not come back"),
        (lambda: with_attributes(NotedFields(1), note=2), "'note' does not come back"),
        (
            lambda: defaultdict([].copy, a=1),
            r"default_factory list\.copy, with a state .*: give dict\(value\)",
        ),
        (lambda: defaultdict(functools.partial(sorted, [1]), a=1), r"with a state .*: give dict\(value\)"),
        (lambda: defaultdict(giving([]), a=1), r"with a state .*: give dict\(value\)"),
        (lambda: defaultdict(lambda x=[]: x, a=1), "with a state"),
        (lambda: defaultdict(itertools.count().__next__, a=1), "with a state"),
        (Lazy, "got a Lazy: give dict"),
        (lambda: Ordered(a=1), "is an Ordered around no dict, .*: give dict"),
        (lambda: Words({"a": 1}, threading), "field '@_encodings': .* got a module"),
        (cyclic, "'self' contains itself: give a copy"),
        (dict, "the item is an empty dict: there is nothing to store"),
        (lambda: {"a": {"b": ()}}, r"'a\.b' is an empty tuple: there is nothing to store"),
        (lambda: Frozen({"a": None}), r"'x\.a' is None"),
        (lambda: {"a": np.zeros((3, 0))}, r"'a' is a ndarray .* of shape \(3, 0\), without values"),
        (lambda: torch.empty(2, device="meta"), "on meta, without values, .*: give a tensor of the CPU"),
        (lambda: np.datetime64(400000, "Y"), r"is outside what datetime64\[us\] holds: give its number"),
        (lambda: [[1], [2, 3]], "is not an array: .*: give lists of one length"),
        (lambda: open("/dev/null"), "field 'value': expected numbers, .* got a TextIOWrapper: give "),  # noqa: SIM115
    ],
)
@pytest.mark.filterwarnings("ignore:unclosed file")
def test_what_has_more_to_it_than_its_parts_is_refused(tmp_path, make, says):
    item = make()
    with pytest.raises(ac.SchemaError, match=f"item 0: .*({says})"):
        cached(Items(item), tmp_path / "cache", capacity="16MiB")
    assert not (tmp_path / "cache").exists()


class Busy(OrderedDict):
    """Its properties change it, fail, or give another value each time; a cache can do nothing about that."""

    times = 0

    @property
    def counted(self):
        Busy.times += 1
        return Busy.times

    @property
    def remembered(self):
        self._remembered = sorted(self)
        return self._remembered

    @property
    def failing(self):
        raise ValueError

    @property
    def me(self):
        return [self, self.remembered, {1}]

    @property
    def words(self):
        return map(str, self)

    @functools.cached_property  # noqa: TID251
    def total(self):
        return sum(self.values())


@dataclasses.dataclass(slots=True)
class BusySlots:
    a: int
    b: Any = dataclasses.field(init=False, repr=False, compare=False)

    @property
    def remembered(self):
        self.b = self.a = 7
        return self.b


def test_properties_are_read_and_leave_no_trace(tmp_path):
    for items in ([Busy(a=n) for n in range(3)], [BusySlots(n) for n in range(3)]):
        path = tmp_path / type(items[0]).__name__
        for item, again in zip(items, returned(items, path), strict=True):
            assert same(item, again)
            assert not state(again).keys() & {"_remembered", "total", "b"}
    assert Busy.times <= 3
    assert [item.a for item in items] == [0, 1, 2]


def giving(value):
    return lambda: value


def other_default(value):
    return defaultdict(lambda given=value: given, a=1)


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), ((1,), (True,)), ("a", b"a")])
@pytest.mark.parametrize(
    "make",
    [giving, lambda value: functools.partial(max, value, key=value), lambda value: lambda *, x=value: x],
)
def test_default_factories_that_give_other_values_are_told_apart(tmp_path, make, one, other):
    items = Items(*(defaultdict(make(value), a=1) for value in (one, one, other)))
    with cached(items, tmp_path / "cache", capacity="16MiB") as train:
        train[1]
        with pytest.raises(ac.SchemaError, match=r"item 2: .* default_factory .*, and in the first item"):
            train[2]


def recursive():
    def tree():
        return defaultdict(tree, a=1)

    return tree()


@pytest.mark.parametrize(
    "make",
    [
        recursive,
        lambda: defaultdict(functools.partial(torch.zeros, 2, dtype=torch.float64), a=1),
        lambda: defaultdict(functools.partial(np.full, 2, np.float32(3)), a=1),
        lambda: defaultdict(giving((functools.partial(giving(1)), frozenset("a"))[1]), a=1),
        lambda: defaultdict(giving(int), a=1),
        lambda: defaultdict(functools.partial(dict.fromkeys, "a"), a=1),
    ],
)
def test_a_default_factory_without_a_state_comes_back(tmp_path, make):
    items = [make() for _ in range(2)]
    for item, again in zip(items, returned(items, tmp_path / "cache"), strict=True):
        assert type(again) is defaultdict
        assert same(again["b"], item["b"]) or again["b"]["b"]["a"] == 1


KEYS = [
    ({1: 5, 2.0: 6}, {1.0: 5, 2: 6}),
    ({(1,): 5}, {(True,): 5}),
    ({frozenset({1}): 5}, {frozenset({1.0}): 5}),
    ({0.0: 5}, {-0.0: 5}),
    ({np.int64(1): 5}, {1: 5}),
    ({Level.LOW: 5}, {1: 5}),
    ({Name("a"): 5}, {"a": 5}),
    ({"a": 5, ((1, 2), "b"): 6}, {"a": 5, ((1, 2.0), "b"): 6}),
    ({decimal.Decimal("1.0"): 5}, {decimal.Decimal("1.00"): 5}),
]


@pytest.mark.parametrize("kind", [dict, OrderedDict, Counter, UserDict, functools.partial(defaultdict, int)])
@pytest.mark.parametrize(("first", "other"), KEYS)
def test_keys_that_are_equal_and_not_the_same_are_told_apart(tmp_path, kind, first, other):
    items = Items(kind(first), kind(dict(reversed(first.items()))), kind(other))
    with cached(items, tmp_path / "cache", capacity="16MiB") as train:
        if kind is not OrderedDict:
            assert train[1] == first
        with pytest.raises(
            ac.SchemaError, match=r"item 2: the item is .*, and in the first item .* the keys "
        ):
            train[2]


C, F = np.ones((3, 4)), np.asfortranarray(np.ones((3, 4)))


@pytest.mark.parametrize(
    ("first", "other", "says"),
    [
        ({"x": 1}, OrderedDict(x=1), "the item is an OrderedDict, and in the first item a dict"),
        ({"x": Counter(a=1)}, {"x": Counter(b=1)}, "'x' has b, and in the first item it has a"),
        (
            OrderedDict(a=1, b=2),
            OrderedDict(b=2, a=1),
            "the item has its keys in the order b, a, .* a, b: give",
        ),
        ({1: 2}, {True: 2}, "a dict of the keys bool True, and in the first item a dict of the keys int 1"),
        (Words({"a": 1}), Words({"a": 1}, None, 2), "'@_n_sequences' is an int, and in the first item None"),
        (Words({"a": 1}, None, 2), Words({"a": 1}), "'@_n_sequences' is None"),
        (Words({"a": 1}), with_attributes(Words({"a": 1}), b=2), "the item has a, .*, @b, .* it has a, "),
        (Sample([1]), with_attributes(Sample([1]), again=[1]), "'again' is a list, .* the same object"),
        (Sample([1]), with_attributes(Sample([1]), length=1.0), "'length' is a float"),
        (Frozen(1), Slotted(1), "the item is a Slotted, and in the first item a Frozen"),
        (Named(1, 2), NamedMore(1, 2), "the item is a NamedMore, and in the first item a Named"),
        ({"x": C}, {"x": F}, r"order \(1, 0\) in memory, .*: give np.ascontiguousarray\(value\)"),
        (
            {"x": torch.from_numpy(F)},
            {"x": torch.from_numpy(C)},
            r"in memory: give np.asc.* tensor.contiguous",
        ),
        ({"x": C}, {"x": C.view(Array)}, r"'x' is an Array of float64, .*: give np.asarray"),
        ({"x": C}, {"x": C.tolist()}, "'x' is a list of float, and in the first item a ndarray"),
        (Of[int](1), Of[bool](1), "the item is an Of of .*Of.bool., and in the first item an Of of .*int.*"),
        ([1, 2], (1, 2), "'value' is a tuple, and in the first item a list of int: convert it$"),
        ({"x": 1}, {"x": {"a": 1}}, "'x' is a dict, and in the first item an int: convert it$"),
        ({"x": [1]}, {"x": [1, 2.0]}, "'x' is a list of float and int, .*: give numbers of one class$"),
        ({"x": [1]}, {"x": [C]}, "'x' is a list of ndarray, .*: give lists of one length in all items, such"),
        (
            {"x": torch.ones(2)},
            {"x": torch.ones(2, requires_grad=True)},
            "with a gradient, .*: give tensor.det",
        ),
        (
            {"x": torch.ones(2)},
            {"x": attribute(torch.ones(2))},
            "with the attribute label, .*: give tensor.det",
        ),
        ({"x": 1, "y": {}}, {"x": 1, "y": {"a": 1}}, "'y' has a, and in the first item it has no parts"),
        ({"x": 1, "y": {}}, {"x": 1, "y": 2}, "'y' is an int, and in the first item an empty dict"),
        ({"x": 1}, {"x": Level.LOW}, "'x' is a Level, .*: give value.value"),
        ({"x": "a"}, {"x": Name("a")}, r"'x' is a Name, .*: give str\(value\)"),
    ],
)
def test_a_later_item_that_differs_is_refused_by_its_number_and_its_value(tmp_path, first, other, says):
    with cached(Items(first, other), tmp_path / "cache", capacity="16MiB") as train:
        for _ in range(2):
            with pytest.raises(ac.SchemaError, match=f"item 1: .*{says}"):
                train[1]
        train[0]


@pytest.mark.parametrize("items", [([], ["x"]), ([1, 2], ["a"]), ([], [["a"], ["b", 1]])])
def test_lists_of_texts_and_others_are_stored_as_json(tmp_path, items):
    with (
        cached(Items(*items), tmp_path / "refused", capacity="16MiB") as train,
        pytest.raises(ac.SchemaError, match=r"item 1: .* first item a list of .*: give ") as caught,
    ):
        train[1]
    advice = str(caught.value).rsplit("give ", 1)[1].removesuffix(" in all items")
    given = [eval(advice, {"value": value, "json": json}) for value in items]
    assert returned(given, tmp_path / "cache") == given


@pytest.mark.parametrize(
    "items",
    [
        ([1, 2**70],), ([1, 2], [2**70, 1]), ([1, 2], [2**63, -1]), ([2**63, -1],), ([[-1], [2**64 - 1]],),
        ([2**63, 1], [2**64, 1]), ([-(2**63) - 1],),
    ],
)  # fmt: skip
def test_ints_that_no_dtype_holds_are_stored_as_json(tmp_path, items):
    with pytest.raises(ac.SchemaError, match="has ints that no dtype holds: give ") as caught:
        returned(items, tmp_path / "refused")
    advice = str(caught.value).rsplit("give ", 1)[1].removesuffix(" in all items")
    given = [eval(advice, {"value": value, "json": json}) for value in items]
    assert [json.loads(each) for each in returned(given, tmp_path / "cache")] == [*items]


@pytest.mark.parametrize(
    ("items", "schema"),
    [
        ([[1, 2], [2**63, 1]], {}), ([[1, 2], [2**64 - 1, 2**63 + 1]], {}), ([1, 2**63], {}),
        ([[1], [2**63, 1]], {"value": ac.Ragged("int64")}),
        ([[1], [300]], {"value": ac.Tensor("int8", (1,))}),
    ],
)  # fmt: skip
def test_ints_beyond_the_dtype_of_the_first_item_have_a_type_in_the_advice(tmp_path, items, schema):
    with pytest.raises(ac.SchemaError, match=r"item 1: .* such as schema=") as caught:
        returned(items, tmp_path / "refused", schema=schema)
    given = eval(str(caught.value).rsplit("schema=", 1)[1], {"Ragged": ac.Ragged, "Tensor": ac.Tensor})
    assert returned(items, tmp_path / "cache", schema=given) == items


def test_a_first_list_of_ints_beyond_int64_is_of_uint64(tmp_path):
    items = [[2**63 + 1, 1], [2, 2**64 - 1]]
    assert returned(items, tmp_path / "cache") == items


@pytest.mark.parametrize("later", [[1, 2], [[1, 2], [3, 4]], [2**63, 1], [True]])
def test_a_first_list_that_is_empty_gets_its_type_from_the_advice(tmp_path, later):
    with (
        cached(Items([], later), tmp_path / "refused", capacity="16MiB") as train,
        pytest.raises(ac.SchemaError, match=r"item 1: .* is empty, pass schema=") as caught,
    ):
        train[1]
    schema = eval(str(caught.value).rsplit("schema=", 1)[1], {"Ragged": ac.Ragged})
    assert returned([[], later], tmp_path / "cache", schema=schema) == [[], later]


def test_keys_and_dimensions_of_length_one_are_in_the_order_of_the_first_item(tmp_path):
    items = [{"a": 1, "x": np.ones((1, 4))}, {"x": np.asfortranarray(np.ones((1, 4))), "a": 2}]
    again = returned(items, tmp_path / "cache")
    assert [list(item) for item in again] == [["a", "x"]] * 2
    assert again[1]["a"] == 2


def test_a_class_is_that_of_the_dataset_and_not_of_the_disk(tmp_path):
    for kind in (Plain, Attributes, UserDict):
        with cached(Items(kind(a=1), kind(a=2)), tmp_path / "cache", capacity="16MiB") as train:
            train.fill(0, progress=False)
            assert type(train[1]) is kind
            assert train[1]["a"] == 2


# the advice of an item whose shape does not fit


@pytest.mark.parametrize(
    ("first", "other", "says"),
    [
        ({"ids": [1, 2], "y": 0}, {"ids": [3, 4, 5], "y": 1}, r"schema=\{'ids': Ragged\('int64', \(\)\)\}$"),
        ({"y": 0.5, "x": np.ones((2, 3))}, {"y": 1.5, "x": np.ones((4, 3))}, r"Ragged\('float64', \(3,\)\)"),
        ((True, "a", torch.ones(1)), (False, "b", torch.ones(2)), r"\{'2': Ragged\('float32', \(\)\)\}$"),
        (
            {"n": np.int64(1), "x": [1], "z": [1, 2]},
            {"n": np.int64(1), "x": [1, 2], "z": [1]},
            "'x': .*'z': ",
        ),
        ({"y": 0, "x": np.ones((2, 3))}, {"y": 0, "x": np.ones((2, 4))}, "such as by a resize"),
        ({"y": 0, "x": np.ones(3)}, {"y": 0, "x": np.ones((3, 1))}, "such as by a resize"),
        ([1, 2], [[1, 2]], r"expected shape \(2,\), got \(1, 2\); give all items one shape in the dataset"),
    ],
)
def test_the_advice_is_of_the_values_that_do_not_fit(tmp_path, first, other, says):
    with (
        cached(Items(first, other), tmp_path / "cache", capacity="16MiB") as train,
        pytest.raises(ac.SchemaError, match=f"item 1: .*{says}"),
    ):
        train[1]


# batches


def seen(batch: Any) -> Any:
    """What can be seen of a batch, to be compared."""
    if isinstance(batch, dict | UserDict):
        own = {name: seen(each) for name, each in state(batch).items() if name != "data"}
        return type(batch), {key: seen(batch[key]) for key in batch}, own
    if isinstance(batch, tuple | list):
        return type(batch), [seen(each) for each in batch]
    if dataclasses.is_dataclass(batch):
        return type(batch), {name: seen(each) for name, each in state(batch).items()}
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


BATCHED = [
    "an ordered dict", "an ordered dict with an attribute", "a defaultdict", "a counter", "a UserDict",
    "a UserDict of one's own", "with attributes", "a dict's subclass", "keys that are attributes",
    "keys of numbers", "a named tuple with an attribute", "turned dimensions", "big-endian",
    "a defaultdict of one's own", "an ordered dict with an argument", "a dict that is not changed",
    "numbers of NumPy in a list", "a text of NumPy that ends in nothing",
]  # fmt: skip


@pytest.mark.parametrize("kind", BATCHED)
def test_a_batch_is_that_of_a_dataloader_whether_its_items_are_made_or_read(tmp_path, kind):
    items = [AS_MADE[kind](number) for number in range(3)]
    with cached(Items(*items), tmp_path / "cache", capacity="16MiB") as train:
        with Loader(train, 3, shuffle=False, workers=0) as loader:
            made, read = itertools.chain(loader, loader)
        assert train.cached == 3
        if kind == "big-endian":  # which torch refuses
            stock = torch.from_numpy(np.stack(items).astype("i8"))
        else:
            stock = next(iter(DataLoader(train, 3)))
        assert seen(made) == seen(read) == seen(stock)


LARGE = 2**63


@pytest.mark.parametrize(
    ("numbers", "options"),
    [
        ([LARGE, LARGE + 1, 2 * LARGE - 1], {}),
        ([LARGE, 5, 0], {}),
        ([5, LARGE, 7], {"schema": {"hash": ac.Tensor("uint64")}}),
        ([np.uint64(LARGE), np.uint64(1), np.uint64(2)], {}),
        ([np.ulonglong(LARGE), np.ulonglong(1), np.ulonglong(2)], {}),
    ],
)
@pytest.mark.parametrize("loading", [{}, {"device": "cpu"}, {"workers": 1}])
def test_ints_that_int64_does_not_hold_are_a_batch_of_uint64(tmp_path, numbers, options, loading):
    items = Items(*({"hash": number} for number in numbers))
    with (
        cached(items, tmp_path / "cache", capacity="16MiB", **options) as train,
        Loader(train, 3, shuffle=False, **{"workers": 0} | loading) as loader,
    ):
        for batch in itertools.chain(loader, loader):  # of items that are made, and read
            assert batch["hash"].dtype == torch.uint64
            assert batch["hash"].tolist() == numbers
        assert train.cached == 3


def test_positions_of_large_ints_are_batches_of_uint64(tmp_path):
    with (
        cached(
            Items([LARGE, LARGE + 1], [LARGE + 2, LARGE + 3]), tmp_path / "cache", capacity="16MiB"
        ) as train,
        Loader(train, 2, shuffle=False, workers=0) as loader,
    ):
        for one, other in itertools.chain(loader, loader):
            assert one.tolist() == [LARGE, LARGE + 2]
            assert other.tolist() == [LARGE + 1, LARGE + 3]


def test_the_classes_of_long_longs_are_told_apart(tmp_path):
    items = Items(np.ones(2, "l"), np.ones(2, "q"))
    with (
        cached(items, tmp_path / "cache", capacity="16MiB") as train,
        pytest.raises(
            ac.SchemaError, match="a ndarray of int64 as longlong, and in the first item a ndarray"
        ),
    ):
        train[1]


def test_what_a_dataloader_refuses_is_a_batch_of_its_class(tmp_path):
    items = [(Hidden(torch.tensor([n]), (torch.tensor([n]),)), Sample(torch.ones(2) * n)) for n in range(2)]
    with (
        cached(Items(*items), tmp_path / "cache", capacity="16MiB") as train,
        Loader(train, 2, shuffle=False, workers=0) as loader,
    ):
        for output, sample in itertools.chain(loader, loader):
            assert type(output) is Hidden
            assert output["last"] is output.last
            assert output.last.tolist() == [[0], [1]]
            assert output.attentions is None
            assert type(sample) is Sample
            assert sample.length.tolist() == [2, 2]
            assert sample.again is sample.x
            assert sample.mask is None


class Doubled(dict):
    def __getitem__(self, key):
        return super().__getitem__(key) * 2


def test_a_mapping_that_shows_other_values_needs_a_collate_function(tmp_path):
    items = Items(Doubled(a=0), Doubled(a=1))
    with cached(items, tmp_path / "cache", capacity="16MiB") as train:
        with (
            Loader(train, 2, workers=0) as loader,
            pytest.raises(ac.SchemaError, match=r"a Doubled shows other values .*: pass collate_fn="),
        ):
            next(iter(loader))
        collate = torch.utils.data.default_collate
        with Loader(train, 2, shuffle=False, workers=0, collate_fn=collate) as loader:
            for batch in loader:
                assert dict(batch.items())["a"].tolist() == [0, 2]


# datasets that give many items at once


class Scaled(StackDataset):
    def __getitem__(self, index):
        return {key: value * 100 for key, value in super().__getitem__(index).items()}


class Many(Items):
    def __getitems__(self, indices):
        return [super(Many, self).__getitem__(index) for index in indices]


class Overridden(Many):
    def __getitem__(self, index):
        return super().__getitem__(index) * 100


class Mixin:
    def __getitem__(self, index):
        return super().__getitem__(index) * 100


class Mixed(Mixin, Many):
    pass


class Both(Overridden):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Forwarding:
    """Passes on what it has not, and changes each item."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index] * 100

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Disabled(Overridden):
    __getitems__ = None


class Holding:
    """Has another dataset, under whatever name."""

    def __init__(self, inner, name="data"):
        setattr(self, name, inner)
        self.name = name

    @property
    def inner(self):
        return vars(self)[self.name]

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index]

    def __getitems__(self, indices):
        return self.inner.__getitems__(indices)


class Joined:
    """Has other datasets, all of a length, in a list or the like."""

    def __init__(self, parts):
        self.parts = parts

    def part_of(self, index):
        parts = [*(self.parts.values() if isinstance(self.parts, dict) else self.parts)]
        return parts[index // len(parts[0])], index % len(parts[0])

    def __len__(self):
        return 6

    def __getitem__(self, index):
        part, place = self.part_of(index)
        return part[place]

    def __getitems__(self, indices):
        return [part.__getitems__([place])[0] for part, place in map(self.part_of, indices)]


class JoinedInSlots(Joined):
    __slots__ = ("__other", "one")

    def __init__(self, one, other):
        self.one, self.__other = one, other

    parts = property(lambda self: [self.one, self.__other])


class Propertied(Forwarding):
    __getitems__ = property(lambda self: self.inner.__getitems__)


class Assigned(Forwarding):
    def __init__(self, inner):
        super().__init__(inner)
        self.__getitems__ = inner.__getitems__


DATASETS = {
    "one that holds one": lambda: Holding(Overridden(1, 2, 3)),
    "one that holds one that holds one": lambda: Holding(Holding(Overridden(1, 2, 3), "base"), "_source"),
    "a list of some": lambda: Joined([Many(1, 2, 3), Overridden(4, 5, 6)]),
    "a tuple of some": lambda: Joined((Many(1, 2, 3), Overridden(4, 5, 6))),
    "a dict of some": lambda: Joined({"a": Many(1, 2, 3), "b": Overridden(4, 5, 6)}),
    "slots": lambda: JoinedInSlots(Many(1, 2, 3), Overridden(4, 5, 6)),
    "a property": lambda: Propertied(Many(1, 2, 3)),
    "an attribute": lambda: Assigned(Many(1, 2, 3)),
    "a stack": lambda: Scaled(x=[1.0, 2.0, 3.0]),
    "a subclass": lambda: Overridden(1, 2, 3),
    "a mixin": lambda: Mixed(1, 2, 3),
    "both": lambda: Both(1, 2, 3),
    "a subset of one": lambda: Subset(Overridden(1, 2, 3), [2, 0, 1]),
    "a subset of a subset": lambda: Subset(Subset(Overridden(1, 2, 3), [2, 0, 1]), [1, 0]),
    "a stack of one": lambda: StackDataset(Overridden(1, 2, 3), Many(1, 2, 3)),
    "one that forwards": lambda: Forwarding(Many(1, 2, 3)),
    "none": lambda: Disabled(1, 2, 3),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_items_are_those_of_getitem_where_it_is_the_more_derived(tmp_path, kind):
    dataset = DATASETS[kind]()
    with cached(dataset, tmp_path / "cache", capacity="16MiB") as train:
        for _ in range(2):
            assert [train[index] for index in range(len(train))] == [dataset[i] for i in range(len(train))]
        assert train.__getitems__([1, 0]) == [dataset[1], dataset[0]]


class Told(Items):
    """Its `__getitems__` is another function of the indices."""

    def __init__(self, of, *items):
        super().__init__(*items)
        self.of = of

    def __getitems__(self, indices):
        return self.of(self, indices)


def failing(dataset, indices):
    raise OSError


TOLD = {
    "other values": lambda dataset, indices: [dataset[index] + 1 for index in indices],
    "another second one": lambda dataset, indices: [dataset[index] + (index == 1) for index in indices],
    "another class": lambda dataset, indices: [float(dataset[index]) for index in indices],
    "in the order of the disk": lambda dataset, indices: [dataset[index] for index in sorted(indices)],
    "too few": lambda dataset, indices: [dataset[index] for index in indices[:-1]],
    "a dict": lambda dataset, indices: {"x": [dataset[index] for index in indices]},
    "a function that holds one": lambda dataset, indices: Many(4, 5, 6).__getitems__(indices),
    "an error": failing,
}


@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_many_items_that_are_others_are_not_asked_for(tmp_path, kind, on_error):
    dataset = Told(TOLD[kind], 1, 2, 3)
    with pytest.warns(
        RuntimeWarning, match=r"Told.__getitems__ gives other items .*: items are made one by on"
    ):
        train = cached(dataset, tmp_path / "cache", capacity="16MiB", on_error=on_error)
    with train:
        assert train.__getitems__([2, 0, 1]) == [3, 1, 2]
        for _ in range(2):
            assert [train[index] for index in range(3)] == [1, 2, 3]


class Drawn(Items):
    """Items of random numbers, from each generator that is global."""

    def __init__(self, own=False):
        super().__init__(1, 2, 3)
        self.own = np.random.default_rng(0) if own else None
        self.asked = []

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
        return drawn if self.own is None else [self.own.random()]

    def __getitems__(self, indices):
        self.asked.append(indices)
        return [self[index] for index in indices]


class DrawnOtherwise(Drawn):
    def __getitems__(self, indices):
        return [[number * 2 for number in self[index]] for index in indices]


def seeded():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002


@pytest.mark.parametrize("own", [False, True])
def test_random_items_do_not_prove_that_many_are_others(tmp_path, own):
    dataset = Drawn(own)
    seeded()
    with cached(dataset, tmp_path / "cache", capacity="16MiB") as train:
        after = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
        dataset.asked.clear()
        train.__getitems__([1, 2])
    assert dataset.asked == [[1, 2]]
    seeded()
    if not own:
        assert after == [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002


def test_random_items_are_compared_from_one_state_of_the_generators(tmp_path):
    with pytest.warns(RuntimeWarning, match="DrawnOtherwise.__getitems__ gives other items than dataset"):
        cached(DrawnOtherwise(), tmp_path / "cache", capacity="16MiB").close()


def test_an_item_beside_the_first_that_cannot_be_made_proves_nothing(tmp_path):
    class Bad(Many):
        def __getitem__(self, index):
            if index == 1:
                raise OSError
            return super().__getitem__(index)

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    with cached(Bad(1, 2, 3), tmp_path / "cache", capacity="16MiB", on_error="skip") as train:
        assert train.__getitems__([0, 2]) == [1, 3]


def test_a_source_of_items_has_those_of_getitem():
    rows = Source(Overridden(1, 2, 3))(np.random.default_rng(0))
    assert sorted(row["value"] for row in rows) == [100, 200, 300]


def test_many_items_are_asked_for_at_once_where_they_may_be(tmp_path):
    asked = []

    class Asked(Many):
        def __getitems__(self, indices):
            asked.append(indices)
            return super().__getitems__(indices)

    for number, dataset in enumerate((Asked(1, 2, 3), Subset(Asked(1, 2, 3), [0, 1, 2]))):
        with cached(dataset, tmp_path / str(number), capacity="16MiB") as train:
            asked.clear()
            train.__getitems__([1, 2])
            assert asked == [[1, 2]]


def test_a_subclass_of_the_cached_dataset_may_override_getitem(tmp_path):
    class Shifted(CachedDataset):
        def __getitem__(self, index):
            return super().__getitem__(index) + 1

    with cached(Items(1, 2, 3), tmp_path / "cache", capacity="16MiB") as train:
        train.__class__ = Shifted
        (batch,) = DataLoader(train, 3)
        assert batch.tolist() == [2, 3, 4]


def test_names_are_those_of_the_parts(tmp_path):
    item = {"words": Words({"ids": [1]}, None, 3), "sample": Sample([1, 2]), "named": Named(1, 2)}
    names = [leaf.name for leaf in ExactForm(item).leaves]
    assert names == ["words.ids", "words.@_n_sequences", "sample.x", "sample.length", "named.a", "named.b"]
    assert not [name for name in names if re.search(r"\s", name)]
