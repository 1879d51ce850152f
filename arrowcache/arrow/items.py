"""Items: the samples of a dataset, of any nesting, as rows of a schema, and back.

An item's leaves are arrays, tensors, numbers, text, bytes, moments, images and lists of numbers. A leaf is
named by the way to it: `image`, `0`, `meta.age`; one that is the whole item is `value`. All else in an item
is a dict, a list, a tuple, a named tuple or a dataclass, of the same keys in each item.
Pure: no item is changed.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from arrowcache.arrow.convert import as_array, infer_type, require_value, variable_row
from arrowcache.arrow.dtype import dtype_of
from arrowcache.arrow.schema import FieldType, Ragged, Schema, Tensor
from arrowcache.errors import SchemaError
from arrowcache.units import as_int

ALONE = "value"
_NUMBERS = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}


class Leaf(NamedTuple):
    """A leaf of an item.

    `mode` is an image's, such as "RGB", `dtype` that of an array or a tensor, and `detail` what else there is
    to tell: the classes of a list's numbers, a time zone, a gradient, a device. Empty, or None, for all else.
    """

    name: str
    type: type
    mode: str = ""
    dtype: Any = None
    detail: str = ""

    def __str__(self) -> str:
        if self.mode:
            return f"an image of mode {self.mode!r}"
        article = "an" if self.type.__name__[0] in "aeiou" else "a"
        dtype = f" of {self.dtype}" if self.dtype is not None else ""
        return f"{article} {self.type.__name__}{dtype}{' ' * bool(self.detail)}{self.detail}"


class Node(NamedTuple):
    """A part of the first item that has parts itself: its class, and its keys in order."""

    name: str
    type: type
    keys: tuple[Any, ...]
    parts: tuple[Part, ...]


Part: TypeAlias = "Leaf | Node"


class ItemForm:
    """The form of a dataset's items, as the first one shows it. Pickles if the classes of its parts do.

    Args:
        item: the first item.
        schema: types of leaves, by name, that one item does not tell, such as Ragged ones. An empty array or
            list is Ragged without that: one of floats, if it is a list.
        columns: keys of a dict, or positions in a tuple or list, to keep. None means all.
        exact: refuse later items whose parts are of other classes or dtypes than those of the first.
    Raises: SchemaError: a value that no column holds. ValueError, TypeError: `schema` or `columns` names what
        an item has not.
    """

    def __init__(
        self,
        item: object,
        schema: Mapping[str, FieldType] | None = None,
        columns: Sequence[str | int] | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self._exact = exact
        self._keys = None if columns is None else _chosen_keys(item, columns)
        item = self.chosen(item)
        if not isinstance(schema, Mapping | None):
            raise TypeError(
                f"schema={schema!r} must be a dict of types, such as {{'tokens': Ragged('int64')}}"
            )
        given = dict(schema or {})
        self._root = _part("", item, given, exact)
        self.leaves = tuple(_leaves(self._root))
        names = [leaf.name for leaf in self.leaves]
        if len(set(names)) < len(names):
            raise SchemaError(f"two values of an item would have one name ({', '.join(names)}): rename a key")
        if unknown := [name for name in given if name not in names]:
            raise ValueError(f"schema names {', '.join(map(repr, unknown))}: an item has {', '.join(names)}")
        values = self.row_of_chosen(item)
        kinds = {name: given[name] if name in given else _type_of(name, values[name]) for name in names}
        try:
            self.schema = Schema(kinds)
        except ValueError as error:
            raise SchemaError(f"{error}: rename the key") from None

    @property
    def classes(self) -> str:
        """The leaves' classes, and modes of images, as a text; dtypes are in the schema."""
        return ", ".join(f"{leaf.name}: {leaf.mode or leaf.type.__name__}" for leaf in self.leaves)

    def row(self, item: object) -> dict[str, Any]:
        """Return the values of an item by the names of their columns; arrays and tensors as they are.

        Raises: SchemaError: its parts are not those of the first item; or, if `exact`, not of their classes.
        """
        return self.row_of_chosen(self.chosen(item))

    def row_of_chosen(self, item: object) -> dict[str, Any]:
        """Return what `row` does, of an item that `chosen` or `item` returned."""
        values: dict[str, Any] = {}
        _take(self._root, item, values, self._exact)
        return values

    def require(self, row: Mapping[str, Any]) -> None:
        """Make sure that the columns hold a row. Raises: SchemaError: a value does not fit."""
        for name, kind in self.schema.items():
            require_value(name, kind, row[name])

    def variable_bytes(self, row: Mapping[str, Any]) -> int:
        """Return the bytes of a row's columns of variable length.

        Raises: SchemaError: a value does not fit.
        """
        variable = self.schema.variable.items()
        return sum(variable_row(name, kind, row[name])[0].nbytes for name, kind in variable)

    def item(self, values: Iterator[Any]) -> Any:
        """Make an item of the values of its leaves, in their order. No __post_init__ of a dataclass runs."""
        return _made(self._root, values)

    def batch(self, columns: Iterator[Any]) -> Any:
        """Make a batch of the columns of the leaves, as torch makes it of items.

        As `item`; but a plain tuple becomes a list, and texts in any sequence a tuple.
        """
        return _made(self._root, columns, of_batch=True)

    def chosen(self, item: Any) -> Any:
        """Return an item with what `columns` keeps of it; as it is, if that is all."""
        if self._keys is None:
            return item
        try:
            chosen = {key: item[key] for key in self._keys}
        except (KeyError, IndexError, TypeError) as error:
            raise SchemaError(f"it lacks one of columns {list(self._keys)}: {error!r}") from None
        return chosen if isinstance(item, Mapping) else type(item)(chosen.values())


def item_of(dataset: Any, index: int) -> Any:
    """Return dataset[index]. An error of the dataset gets a note with the index, from Python 3.11 on."""
    try:
        return dataset[index]
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"It was raised by item {index} of the dataset.")
        raise


def _chosen_keys(item: object, columns: Sequence[str | int]) -> tuple[Any, ...]:
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
        raise TypeError(f"columns={columns!r} must be a list of an item's keys or positions")
    if isinstance(item, Mapping):
        keys: list[Any] = list(item)
    elif isinstance(item, tuple | list) and type(item) in (tuple, list):
        keys, columns = list(range(len(item))), [*map(_position, columns)]
    else:
        raise TypeError(f"columns chooses from a dict, tuple or list: an item is a {type(item).__name__}")
    if unknown := [column for column in columns if column not in keys]:
        raise ValueError(f"columns names {', '.join(map(repr, unknown))}: an item has {keys}")
    if len({*columns}) < len(columns):
        raise ValueError(f"columns={[*columns]} names one of them twice")
    return tuple(columns)


def _position(column: str | int) -> int:
    """A position in a tuple or list, which may be given as a leaf's name."""
    if isinstance(column, str) and column.isdecimal():
        return int(column)
    try:
        return as_int(column)
    except TypeError:
        raise TypeError(f"columns of a tuple or list are positions, not {column!r}") from None


def _part(name: str, value: Any, given: Mapping[str, FieldType], exact: bool) -> Part:
    opened = _opened(value)
    if opened is None:
        leaf = _leaf(name, value)
        return leaf._replace(detail=_numbers_of(given.get(leaf.name))) if _is_empty_list(value) else leaf
    keys, values = opened
    if not keys:
        raise SchemaError(f"{_shown(name)} is an empty {type(value).__name__}: there is nothing to store")
    if exact and isinstance(value, tuple | list) and type(value) not in (tuple, list) and keys[0] == 0:
        plain = "list" if isinstance(value, list) else "tuple"
        raise SchemaError(
            f"{_shown(name)} is a {type(value).__module__}.{type(value).__name__}, which is more than its "
            f"values: give {plain}(value)"
        )
    named = zip(keys, values, strict=True)
    parts = tuple(_part(f"{name}.{key}".lstrip("."), each, given, exact) for key, each in named)
    return Node(name, type(value), keys, parts)


def _leaf(name: str, value: Any) -> Leaf:
    if value is None:
        raise SchemaError(
            f"{_shown(name)} is None, which no column holds: leave it out of the item, or give a value of "
            "the type that it has elsewhere, such as -1 or ''"
        )
    dtype = None if isinstance(value, str | bytes) else getattr(value, "dtype", None)  # NumPy's: a length
    return Leaf(name or ALONE, type(value), _mode(value), dtype, _detail(value))


def _is_empty_list(value: Any) -> bool:
    return isinstance(value, list) and not value


def _numbers_of(kind: FieldType | None) -> str:
    """The detail of a list of which only the type of its column is known."""
    if not isinstance(kind, Tensor | Ragged):
        return "of float"
    return f"of {_NUMBERS[dtype_of(kind.dtype).kind]}"


def _type_of(name: str, value: Any) -> FieldType:
    """The type of a value's column. What is empty shows that its length varies."""
    is_empty = _is_empty_list(value) or (getattr(value, "shape", ()) or (1,))[0] == 0
    if not is_empty:
        return infer_type(name, value)
    array, dtype = as_array(name, value)
    try:
        return Ragged(dtype, array.shape[1:])
    except ValueError as error:
        raise SchemaError(f"field {name!r}: {error}") from None


def _detail(value: Any) -> str:
    if isinstance(value, list):
        return f"of {' and '.join(sorted(_classes(value)))}"
    if getattr(value, "tzinfo", None) is not None:
        return "with a time zone"
    if getattr(value, "requires_grad", False) is True:
        return "with a gradient"
    if getattr(value, "is_cpu", False) is True:  # torch's: a device is slow to put in words
        return ""
    device = str(getattr(value, "device", "cpu"))  # NumPy's arrays have one, too
    return "" if device == "cpu" else f"on {device}"


def _classes(values: list[Any]) -> set[str]:
    """The names of the classes of a nested list's numbers."""
    classes = {*map(type, values)}
    if list not in classes:
        return {each.__name__ for each in classes}
    return set().union(
        *(_classes(each) if isinstance(each, list) else {type(each).__name__} for each in values)
    )


def _opened(value: Any) -> tuple[tuple[Any, ...], Sequence[Any]] | None:
    """Return the keys and values of a node. None if it is a leaf."""
    if isinstance(value, Mapping):
        return tuple(value), list(value.values())
    if isinstance(value, tuple) and (names := getattr(value, "_fields", ())):
        return tuple(names), value
    if isinstance(value, tuple) or (isinstance(value, list) and not _is_numbers(value)):
        return tuple(range(len(value))), value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        return names, [getattr(value, name) for name in names]
    return None


def _is_numbers(values: list[Any]) -> bool:
    return all(
        _is_numbers(each) if isinstance(each, list) else isinstance(each, int | float | complex)
        for each in values
    )


def _mode(value: Any) -> str:
    is_image = type(value).__module__.startswith("PIL.") and hasattr(value, "mode")
    return str(value.mode) if is_image else ""


def _leaves(part: Part) -> Iterator[Leaf]:
    if isinstance(part, Leaf):
        yield part
    else:
        for each in part.parts:
            yield from _leaves(each)


def _take(part: Part, value: Any, values: dict[str, Any], exact: bool) -> None:
    if isinstance(part, Leaf):
        found = _leaf(part.name, value)
        is_same = found == part or (part.type is list and _is_empty_list(value))
        if found.mode != part.mode or (exact and not is_same):
            hint = ", or, where the first one is empty, name its type in schema" if part.type is list else ""
            raise SchemaError(f"{part.name!r} is {found}, and in the first item {part}: convert it{hint}")
        values[part.name] = value
        return
    if exact and type(value) is not part.type and _opened(value):
        raise SchemaError(
            f"{_shown(part.name)} is a {type(value).__name__}, and in the first item a "
            f"{part.type.__name__}: convert it"
        )
    keys, children = _opened(value) or ((), ())
    if isinstance(value, Mapping) and keys != part.keys and {*keys} == {*part.keys}:
        keys, children = part.keys, [value[key] for key in part.keys]
    if keys != part.keys:
        has = f"has {', '.join(map(str, keys))}" if keys else f"is a {type(value).__name__}"
        raise SchemaError(
            f"{_shown(part.name)} {has}, and in the first item it has {', '.join(map(str, part.keys))}: "
            "give all items the same parts"
        )
    for each, child in zip(part.parts, children, strict=True):
        _take(each, child, values, exact)


def _made(part: Part, values: Iterator[Any], *, of_batch: bool = False) -> Any:
    if isinstance(part, Leaf):
        return next(values)
    children = [_made(each, values, of_batch=of_batch) for each in part.parts]
    if of_batch and issubclass(part.type, tuple | list):
        children = [
            tuple(new) if _is_text(each) else new for each, new in zip(part.parts, children, strict=True)
        ]
    if issubclass(part.type, Mapping):
        named = zip(part.keys, children, strict=True)
        return OrderedDict(named) if part.type is OrderedDict else dict(named)
    if hasattr(part.type, "_make"):
        return part.type._make(children)
    if issubclass(part.type, tuple | list):
        return children if of_batch or issubclass(part.type, list) else tuple(children)
    made = object.__new__(part.type)
    for key, child in zip(part.keys, children, strict=True):
        object.__setattr__(made, key, child)  # also a frozen one
    return made


def _is_text(part: Part) -> bool:
    return isinstance(part, Leaf) and part.type in (str, bytes)


def _shown(name: str) -> str:
    return repr(name) if name else "the item"
