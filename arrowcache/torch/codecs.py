"""Codecs: the classes of values that an item may have, and how each is taken apart and made again.

One rule for all: a value comes back as it was made, or is refused with a way out. The table is of exact
classes, as a subclass may have more to it, and it is looked at in each item that is stored: the first proves
nothing about the second. What a codec does not store has to be empty, or the same in each item. A class is
that of this process's first item: none is read from the disk.

    leaves       numbers, text, bytes, moments, lists of numbers, arrays, tensors: a column each
    containers   dict, list, tuple: by their parts
    objects      mappings that derive from dict or UserDict, named tuples, dataclasses: by their contents and
                 by all attributes in __dict__ and slots; no code of theirs runs
    images       by their pixels, and by a text of their info and EXIF

leaves.py has the first, images.py the last. Pure.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import inspect
import json
import operator
import sys
import warnings
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, Protocol, get_origin

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from arrowcache.arrow.items import (
    ALONE,
    Branch,
    ItemForm,
    Leaf,
    Opened,
    Part,
    Same,
    contents,
    is_empty_list,
    require_something,
    shown,
    with_article,
)
from arrowcache.arrow.schema import FieldType
from arrowcache.errors import SchemaError
from arrowcache.pickling import pickled, unpickled
from arrowcache.reading.columns import ColumnData
from arrowcache.torch.images import ImageCodec, is_image
from arrowcache.torch.leaves import (
    PLAIN,
    is_numbers,
    is_same,
    leaf_of,
    lies_in,
    refusal,
    require_dtype,
    restored,
)
from arrowcache.units import shortened

_MAPPINGS = (OrderedDict, defaultdict, dict)
_BASES = (*_MAPPINGS, tuple, object)


class ExactForm(ItemForm):
    """The form of items that come back as they were made. Pickles if the classes of its parts do.

    Args: as of `ItemForm`.
    Raises: as `ItemForm`; SchemaError: a value that would not come back as it was.
    """

    def __init__(
        self,
        item: object,
        schema: Mapping[str, FieldType] | None = None,
        columns: Sequence[str | int] | None = None,
    ) -> None:
        super().__init__(item, schema, columns)
        for leaf in self.leaves:
            require_dtype(leaf, self.schema[leaf.name])

    @property
    def classes(self) -> str:
        """The leaves' classes, and modes of images, as a text; dtypes are in the schema."""
        images = {part.name or ALONE: part.rest[0].name for part in _images(self.root)}
        return ", ".join(f"{leaf.name}: {images.get(leaf.name, leaf.type.__name__)}" for leaf in self.leaves)

    def opened(self, name: str, value: Any) -> Opened | None:
        kind = type(value)
        if kind in PLAIN or kind is torch.Tensor or kind is np.ndarray:
            return None
        if kind is list and is_numbers(value):
            return None
        codec = _codec_of(kind)  # type: ignore[arg-type]  # a class is hashable
        return None if codec is None else codec.opened(shown(name), value)

    def leaf(self, name: str, value: Any) -> Leaf:
        require_something(name, value)
        kind = type(value)
        if kind is not list and _codec_of(kind) is not None:  # type: ignore[arg-type]  # it has parts
            return Leaf(name or ALONE, kind)
        return leaf_of(name or ALONE, value)

    def is_like(self, found: Leaf, first: Leaf, value: Any) -> bool:
        if first.type is list and is_empty_list(value):
            return True
        if found == first:
            return True
        return found._replace(order=first.order) == first and lies_in(first.order, found.order, value)

    def items(self, columns: Mapping[str, ColumnData]) -> list[Any]:
        """Return the items of columns by the names of leaves, each (n, *shape), n texts, or `Values`."""
        values = [restored(leaf, self.schema[leaf.name], columns[leaf.name]) for leaf in self.leaves]
        return [self.item(iter(each)) for each in zip(*values, strict=True)]

    def item(self, values: Iterator[Any]) -> Any:
        """Make an item of the values of its leaves, in their order. No code of its classes runs."""
        return self.made(self.root, values)

    def made(self, part: Part, values: Iterator[Any]) -> Any:
        """Make a part of the values of its leaves, in their order."""
        if isinstance(part, Leaf):
            return next(values)
        assert isinstance(part, Branch)
        children: list[Any] = []
        for each in part.parts:
            if isinstance(each, Same):
                children.append(None if each.at is None else children[each.at])
            else:
                children.append(self.made(each, values))
        return made_of(part, children)

    def require_return(self, item: object, again: object) -> None:
        """Make sure that an item came back as a whole: a net under the rule.

        It reads properties, once each where nothing differs. What these set on the item is undone.

        Args:
            item: as `chosen` returns it. again: what came back.
        Raises: SchemaError: names the value that did not.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the item's own code, which nobody but this test asked
            name = self._difference("", item, again)
        if name is not None:
            raise SchemaError(
                f"{shown(name.removeprefix('.'))} does not come back from the cache as it was, so that it "
                "has more to it than it shows: give a dict of arrays, numbers and text in its place"
            )

    def is_same_item(self, one: object, other: object) -> bool:
        """True if two items have the same values in the columns. False: one of them does not fit these."""
        try:
            return self.is_same_row(self.row(one), self.row(other))
        except SchemaError:
            return False

    def is_same_row(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """True if two rows, as of `row`, have the same values."""
        return all(is_same(one[name], other[name]) for name in self.schema)

    def _difference(self, name: str, one: Any, other: Any) -> str | None:
        """Return the name of a value that differs. None: they are the same."""
        mine = self.opened(name, one)
        if mine is None:
            return None if is_same(one, other) else name
        its = self.opened(name, other)
        if its is None or (mine.kind, mine.keys, mine.rest) != (its.kind, its.keys, its.rest):
            return name
        for more, left, right in zip(mine.names, mine.values, its.values, strict=True):
            if (left is None) is not (right is None):
                return name + more
            if left is not None and (found := self._difference(name + more, left, right)) is not None:
                return found
        more_shown = self._shown_otherwise(one, other)
        return None if more_shown is None else name + more_shown

    def _shown_otherwise(self, one: Any, other: Any) -> str | None:
        """Return the name of a value that two objects of the same parts do not both show by their own code.

        It begins with a point, and is empty for their keys and contents. None: they show the same.
        """
        codec = _codec_of(type(one))  # type: ignore[arg-type]  # a class is hashable
        if not isinstance(codec, _Object):
            return None
        read: Callable[[Any, Any], Any] = operator.getitem
        keys: Any = []
        if isinstance(one, Mapping):
            keys = _tried(list, one)
            if (keys, _tried(len, one)) != (_tried(list, other), _tried(len, other)):
                return ""
        elif isinstance(one, tuple):
            keys = range(len(one))
        else:
            keys, read = [field.name for field in dataclasses.fields(one)], getattr
        held, copied = [*parts_of(one)], [*parts_of(other)]
        are_held, are_copied = {*map(id, held)}, {*map(id, copied)}
        for key in keys or ():
            shows, again = _tried(read, one, key), _tried(read, other, key)
            if id(shows) in are_held and id(again) in are_copied:
                continue
            if shows is not None and not self._is_alike(shows, again, ()):
                return f".{key}"
        names = _descriptors_of(type(one))  # type: ignore[arg-type]  # a class is hashable
        return next((f".{name}" for name in names if self._reads_other(codec, name, one, other)), None)

    def _reads_other(self, codec: _Object, name: str, one: Any, other: Any) -> bool:
        """True if a descriptor of the class gives another value of the copy: it reads what is elsewhere."""
        shows, again = codec.read(one, name), codec.read(other, name)
        if shows is _FAILED or self._is_alike(shows, again, ()):
            return False
        return self._is_alike(shows, codec.read(one, name), ())  # else it is another each time

    def _is_alike(self, one: Any, other: Any, within: tuple[tuple[Any, Any], ...]) -> bool:
        """True if two values that code of a user gives are the same, as far as a cache could tell.

        Of values of other classes, that may change, nothing is known: they are to be of one class.
        """
        if type(one) is not type(other) or any(one is mine and other is its for mine, its in within):
            return type(one) is type(other)
        try:
            mine, its = self.opened("", one), self.opened("", other)
            if mine is None or its is None:
                for leaf in (one, other) if one is not None else ():
                    self.leaf("", leaf)
                return mine is its and is_same(one, other)
        except SchemaError:  # no item could have it
            left, right = (frozenset(each) if type(each) is set else each for each in (one, other))
            return not (_has_no_state(left) and _has_no_state(right)) or _do_the_same(left, right)
        within = (*within, (one, other))
        return (mine.keys, mine.rest) == (its.keys, its.rest) and all(
            self._is_alike(left, right, within) for left, right in zip(mine.values, its.values, strict=True)
        )


class Codec(Protocol):
    """Takes values of one class apart, and makes them again."""

    def opened(self, name: str, value: Any) -> Opened:
        """Return the parts of a value. Raises: SchemaError: it has more to it; `name` is its in the error."""

    def made(self, node: Branch, children: list[Any]) -> Any:
        """Make a value of new parts."""


def _tried(read: Callable[..., Any], *args: Any) -> Any:
    """Return what code of a user gives. None: it fails."""
    try:
        return read(*args)
    except Exception:  # noqa: BLE001  # whatever it raises
        return None


_FAILED = object()  # in place of what code of a user gives
_OF_THE_CLASS = (
    classmethod,
    staticmethod,
    functools.partialmethod,
    functools.singledispatchmethod,
    MemberDescriptorType,  # slots, which are parts
    GetSetDescriptorType,
    type,
)


@functools.cache
def _descriptors_of(kind: type) -> tuple[str, ...]:
    """Return the names of properties, and other descriptors, of a class: their values are of each object."""
    parts = getattr(kind, "_fields", ()) if issubclass(kind, tuple) else ()
    plain = {name for name in parts if "_tuplegetter" in type(inspect.getattr_static(kind, name)).__name__}
    names = [name for name in dir(kind) if not name.startswith("__") and name not in plain]
    found = [(name, inspect.getattr_static(kind, name, None)) for name in names]
    return tuple(
        name
        for name, value in found
        if hasattr(type(value), "__get__")
        and not inspect.isroutine(value)
        and not isinstance(value, _OF_THE_CLASS)
    )


def parts_of(value: Any) -> Sequence[Any]:
    """Return the parts of a value of a class with a codec, as they are stored."""
    codec = _codec_of(type(value))  # type: ignore[arg-type]
    assert codec is not None
    return codec.opened("", value).values


def _images(part: Part) -> Iterator[Branch]:
    if isinstance(part, Branch):
        if isinstance(_codec_of(part.type), ImageCodec):
            yield part
        for each in part.parts:
            yield from _images(each)


def made_of(node: Branch, children: list[Any]) -> Any:
    """Make a value of new parts, those without a column among them."""
    codec = _codec_of(node.type)
    assert codec is not None
    return codec.made(node, children)


def is_value(node: Branch) -> bool:
    """True if a node is one value to its user: its first part is what a batch has of it."""
    return isinstance(_codec_of(node.type), ImageCodec | _Encoding)


@functools.cache
def _codec_of(kind: type) -> Codec | None:
    """Return the codec of a class. None: its values are leaves, or refused."""
    if kind in (dict, list, tuple):
        return _Container()
    if (kind.__module__, kind.__name__) == ("tokenizers", "Encoding"):
        return _Encoding()
    return ImageCodec() if is_image(kind) else _object_of(kind)


# containers


class _Container:
    """dict, list and tuple. Those of a dict come in the order of the first item's."""

    def opened(self, name: str, value: Any) -> Opened:  # noqa: ARG002
        if type(value) is dict:
            return contents(dict, value, value.values(), rest=_types_of(value))
        return contents(type(value), range(len(value)), value)

    def made(self, node: Branch, children: list[Any]) -> Any:
        return dict(zip(node.keys, children, strict=True)) if node.type is dict else node.type(children)


def _types_of(keys: Sequence[Any] | Mapping[Any, Any]) -> tuple[_Keys, ...]:
    """Return keys that are no texts, to be compared."""
    return () if {*map(type, keys)} <= {str} else (_Keys(keys),)


class _Keys:
    """The keys of a mapping that are no texts. Equal to others where all equal keys are the same."""

    def __init__(self, keys: Iterable[Any]) -> None:
        self._exact = {key: _exact(key) for key in keys}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keys) and all(
            other._exact.get(key, exact) == exact for key, exact in self._exact.items()
        )

    def __hash__(self) -> int:
        return hash(_Keys)

    def __str__(self) -> str:
        keys = ", ".join(f"{type(key).__name__} {key!r}" for key in self._exact)
        return f"the keys {shortened(keys, 100)}"


def _exact(value: Any) -> Any:
    """Return what is equal for two hashable values only where they are the same: 1 and True are equal."""
    kind: Any = type(value)
    if issubclass(kind, tuple):
        return kind, *map(_exact, tuple.__iter__(value))
    if issubclass(kind, frozenset):
        return kind, frozenset(map(_exact, frozenset.__iter__(value)))
    return kind, value, "" if kind.__repr__ is object.__repr__ else repr(value)


# objects

_ITSELF = "itself as its attributes"
_CLASS = "__orig_class__"  # where typing notes the parameters of a generic class


def _object_of(kind: type) -> _Object | None:
    base = next(each for each in kind.__mro__ if each in _BASES)
    is_known = (
        base in _MAPPINGS
        or issubclass(kind, UserDict)
        or (base is object and dataclasses.is_dataclass(kind))
        or (base is tuple and hasattr(kind, "_fields") and hasattr(kind, "_make"))
    )
    return _Object(kind, base) if is_known and not _hides(kind) else None


def _hides(kind: type) -> bool:
    """True if objects of a class have more to them than contents, __dict__ and slots.

    That is memory of a base that is written in C, or something outside that `__del__` gives back.
    """
    if hasattr(kind, "__del__"):
        return True
    for each in kind.__mro__:
        if each in _BASES:
            continue
        own = vars(each)
        known = sum(isinstance(value, MemberDescriptorType) for value in own.values())
        known += ("__dict__" in own) + ("__weakref__" in own)
        base = each.__base__
        assert base is not None
        if each.__basicsize__ > base.__basicsize__ + 8 * known:
            return True
    return False


class _Object:
    """Objects of one class by their contents, and by their attributes, named with an @ beside contents.

    The contents are what the base class holds; of a UserDict what `data` holds; of a dataclass its fields.
    """

    def __init__(self, kind: type, base: type) -> None:
        self._kind, self._base = kind, base
        self._slots = {
            name: member
            for each in reversed(kind.__mro__)
            if each not in _BASES
            for name, member in vars(each).items()
            if isinstance(member, MemberDescriptorType)
        }
        self._is_user_dict = base is object and issubclass(kind, UserDict)
        self._is_dataclass = base is object and not self._is_user_dict
        self._fields = [field.name for field in dataclasses.fields(kind)] if self._is_dataclass else []
        self._kept_elsewhere = [
            name
            for name in self._fields
            if name not in self._slots and hasattr(inspect.getattr_static(kind, name, None), "__set__")
        ]

    def opened(self, name: str, value: Any) -> Opened:
        base: Any = self._base
        rest: tuple[Any, ...] = ()
        attributes = self._attributes(value)
        if attributes is value:  # it has itself for its __dict__
            attributes, rest = {}, (_ITSELF,)
        elif get_origin(attributes.get(_CLASS)) is self._kind:  # of Kind[int](...)
            rest = (attributes.pop(_CLASS),)
        if self._is_dataclass:
            self._require_here(name, value, attributes)
            own = {field: attributes.pop(field) for field in self._fields if field in attributes}
            named = own | attributes
            return contents(self._kind, named, named.values(), may_lack=True, rest=rest)._replace(
                own=len(own)
            )
        if self._is_user_dict:
            held = attributes.pop("data", None)
            if type(held) is not dict:
                raise refusal(name, f"{with_article(self._kind.__name__)} around no dict", "dict(value)")
            own = held
        elif base is tuple:
            own = dict(zip(value._fields, tuple.__iter__(value), strict=True))
            if self._kind is PackedSequence and value.sorted_indices is None:
                raise refusal(name, "a PackedSequence without sorted_indices", "pad_packed_sequence(value)")
        else:
            own = dict(base.items(value))
            if base is defaultdict:
                _require_no_state(name, value.default_factory)
                rest += (_Factory(value.default_factory),)
        return Opened(
            self._kind,
            (*own, *(f"@{each}" for each in attributes)),
            [*(f".{key}" for key in own), *(f".@{each}" for each in attributes)],
            [*own.values(), *attributes.values()],
            len(own),
            rest + _types_of(own),
            is_ordered=base is OrderedDict,
        )

    def _attributes(self, value: Any) -> dict[str, Any]:
        try:
            found = object.__getattribute__(value, "__dict__")
        except AttributeError:
            found = {}
        if found is value:
            return found  # type: ignore[no-any-return]
        found = dict(found)
        for name, member in self._slots.items():
            try:
                found[name] = member.__get__(value)
            except AttributeError:  # it was never set
                continue
        return found

    def read(self, value: Any, name: str) -> Any:
        """Return what a descriptor of the class gives, or `_FAILED`. What it set on the object is undone."""
        before = self._attributes(value)
        try:
            return getattr(value, name)
        except Exception:  # noqa: BLE001  # whatever it raises
            return _FAILED
        finally:
            if before is not value:
                self._restore(value, before)

    def _restore(self, value: Any, before: Mapping[str, Any]) -> None:
        after = self._attributes(value)
        for name in after.keys() | before.keys():
            if name in before and after.get(name, _FAILED) is before[name]:
                continue
            if name not in self._slots:
                own = object.__getattribute__(value, "__dict__")
                if name in before:
                    own[name] = before[name]
                else:
                    del own[name]
            elif name in before:
                self._slots[name].__set__(value, before[name])
            else:
                self._slots[name].__delete__(value)

    def _require_here(self, name: str, value: Any, attributes: Mapping[str, Any]) -> None:
        """Make sure that a field behind a property is one of the attributes."""
        for field in self._kept_elsewhere:
            found = getattr(value, field, None)
            if all(found is not each for each in attributes.values()):
                raise refusal(
                    name,
                    f"{with_article(self._kind.__name__)} whose field {field!r} is kept elsewhere",
                    "a dict of its fields",
                )

    def made(self, node: Branch, children: list[Any]) -> Any:
        base: Any = self._base
        kind: Any = self._kind
        own = dict(zip(node.keys[: node.own], children, strict=False))
        named = zip(node.keys[node.own :], children[node.own :], strict=True)
        attributes = {key.removeprefix("@"): child for key, child in named}
        made = base.__new__(kind, own.values()) if base is tuple else base.__new__(kind)
        if self._is_dataclass:
            attributes = own | attributes
        elif self._is_user_dict:
            attributes = {"data": own, **attributes}
        elif base is not tuple:
            for key, child in own.items():
                base.__setitem__(made, key, child)
        for each in node.rest:
            if isinstance(each, _Factory):
                vars(defaultdict)["default_factory"].__set__(made, each.function)
            elif get_origin(each) is kind:
                attributes[_CLASS] = each
        for name in self._slots.keys() & attributes.keys():
            self._slots[name].__set__(made, attributes.pop(name))
        if _ITSELF in node.rest:
            object.__setattr__(made, "__dict__", made)
        elif attributes:
            object.__getattribute__(made, "__dict__").update(attributes)
        return made


class _Factory:
    """The default_factory of a defaultdict. Equal to one that does the same. Pickles by value."""

    def __init__(self, function: Callable[[], Any] | None) -> None:
        self.function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Factory) and _do_the_same(self.function, other.function)

    def __hash__(self) -> int:
        return hash(type(self.function))

    def __str__(self) -> str:
        return f"default_factory {getattr(self.function, '__qualname__', self.function)}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return _unpickled_factory, (pickled(self.function, "the default_factory {!r}"),)


def _unpickled_factory(function: bytes) -> _Factory:
    return _Factory(unpickled(function))


def _do_the_same(one: Any, other: Any, within: tuple[Any, ...] = ()) -> bool:
    """True if two values without a state are the same, or functions of one definition and such values."""
    if one is other or any(one is outer for outer in within):
        return True
    mine, its = _taken_apart(one), _taken_apart(other)
    if mine is None or its is None:
        return bool(_exact(one) == _exact(other))
    if type(one) is FunctionType and not (
        type(other) is FunctionType
        and one.__code__ == other.__code__
        and one.__globals__ is other.__globals__
    ):
        return False
    within = (*within, one)
    return (type(one), len(mine)) == (type(other), len(its)) and all(
        _do_the_same(left, right, within) for left, right in zip(mine, its, strict=True)
    )


def _taken_apart(value: Any) -> list[Any] | None:
    """Return the values that a function of Python, a partial or a tuple has. None: it is none of these."""
    if type(value) is tuple:
        return [*value]
    if type(value) is functools.partial:
        return [value.func, value.args, *sorted(value.keywords.items()), *sorted(vars(value).items())]
    if type(value) is not FunctionType:
        return None
    named = {**(value.__kwdefaults__ or {}), **vars(value)}
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    return [value.__defaults__ or (), *sorted(named.items()), *cells]


_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(dt.date, dt.timedelta, decimal.Decimal, fractions.Fraction, enum.Enum),
    *(type, np.generic, np.dtype, torch.dtype, torch.device, ModuleType),
)


def _has_no_state(value: Any, within: tuple[Any, ...] = ()) -> bool:
    """True if a value cannot change, or a function has nothing else but what its whole module has."""
    if isinstance(value, _CONSTANTS) or any(value is outer for outer in within):
        return True
    if type(value) is frozenset:
        return all(map(_has_no_state, value))
    if type(value) is BuiltinFunctionType:
        return isinstance(value.__self__, type | ModuleType | None)
    try:
        parts = _taken_apart(value)
    except ValueError:  # a variable without a value yet
        return False
    if parts is not None:
        return all(_has_no_state(part, (*within, value)) for part in parts)
    module = sys.modules.get(str(getattr(value, "__module__", None)))
    return getattr(module, str(getattr(value, "__qualname__", "")), _FAILED) is value


def _require_no_state(name: str, factory: Any) -> None:
    """Raises: SchemaError: a default_factory has something that may change, which all items would share."""
    if not _has_no_state(factory):
        what = getattr(factory, "__qualname__", type(factory).__name__)
        raise refusal(
            name, f"a defaultdict of default_factory {what}, with a state of its own", "dict(value)"
        )


class _Encoding:
    """The result of a tokenizer of `tokenizers`, as transformers' BatchEncoding has it: as JSON."""

    def opened(self, name: str, value: Any) -> Opened:  # noqa: ARG002
        text = json.dumps(json.loads(value.__getstate__()), sort_keys=True)  # its own order is random
        return Opened(type(value), ("state",), [""], [text.encode()], 1)

    def made(self, node: Branch, children: list[Any]) -> Any:
        made = node.type()
        made.__setstate__(children[0])
        return made
