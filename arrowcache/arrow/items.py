"""Items: the samples of a dataset, of any nesting, as rows of a schema, and back.

An item's leaves are arrays, tensors, numbers, text, bytes, moments, images and lists of numbers. A leaf is
named by the way to it: `image`, `0`, `meta.age`; one that is the whole item is `value`. All else in an item
has parts, of the same keys in each item: a mapping, a list, a tuple, a named tuple or a dataclass.
Pure: no item is changed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MemberDescriptorType
from typing import Any, NamedTuple, TypeAlias

from arrowcache.arrow.convert import as_array, infer_type, require_value, variable_row
from arrowcache.arrow.dtype import dtype_of
from arrowcache.arrow.schema import FieldType, Ragged, Schema, Tensor
from arrowcache.errors import SchemaError, called
from arrowcache.units import as_int

ALONE = "value"
_NUMBERS = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}


class Leaf(NamedTuple):
    """A leaf of an item.

    `mode` is an image's, such as "RGB". Who gives items back notes more: `dtype` of an array or a tensor, in
    which `order` of its dimensions it lies in memory, empty for C's, and as `detail` the classes of a list's
    numbers.
    """

    name: str
    type: type
    mode: str = ""
    dtype: Any = None
    detail: str = ""
    order: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.mode:
            return f"an image of mode {self.mode!r}"
        words = [f"of {self.dtype}"] * (self.dtype is not None) + [self.detail] * bool(self.detail)
        words += [f"whose dimensions lie in the order {self.order} in memory"] * bool(self.order)
        return " ".join([with_article(self.type.__name__), *words])


class Branch(NamedTuple):
    """A part of the first item that has parts itself: its class, and its keys in order.

    `rest` is what it has beside them. It is the same in each item.
    """

    name: str
    type: type
    keys: tuple[Any, ...]
    parts: tuple[Part, ...]
    own: int
    rest: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return described(self.type, self.rest)


class Same(NamedTuple):
    """A part that takes no column: the object that the part before it at a position is, or None."""

    name: str
    at: int | None

    def __str__(self) -> str:
        return "None" if self.at is None else "the same object as another value beside it"


Part: TypeAlias = "Leaf | Branch | Same"


class Opened(NamedTuple):
    """A value that has parts: its class, the parts' keys, their names after its own, and themselves.

    `kind` of object: of any class.

    The first `own` parts are its contents, the others attributes beside them: each of these may be None, or
    the object that another part is. `rest` is what it has beside its parts. `is_ordered`: the order of its
    contents matters. `may_lack`: its contents may be None, too.
    """

    kind: type
    keys: tuple[Any, ...]
    names: Sequence[str]
    values: Sequence[Any]
    own: int
    rest: tuple[Any, ...] = ()
    is_ordered: bool = False
    may_lack: bool = False


class ItemForm:
    """The form of a dataset's items, as the first one shows it.

    This one reads items of any classes, for whoever needs their columns. torch/codecs.py has one that gives
    the items back.

    Args:
        item: the first item.
        schema: types of leaves, by name, that one item does not tell, such as Ragged ones. An empty array or
            list is Ragged without that: one of floats, if it is a list.
        columns: keys of a dict, or positions in a tuple or list, to keep. None means all.
    Raises: SchemaError: a value that no column holds. ValueError, TypeError: `schema` or `columns` names what
        an item has not.
    """

    def __init__(
        self,
        item: object,
        schema: Mapping[str, FieldType] | None = None,
        columns: Sequence[str | int] | None = None,
    ) -> None:
        self._keys = None if columns is None else _chosen_keys(item, columns)
        item = self.chosen(item)
        if not isinstance(schema, Mapping | None):
            raise TypeError(
                f"schema={schema!r} must be a dict of types, such as {{'tokens': Ragged('int64')}}"
            )
        given = dict(schema or {})
        self.root = self._part("", item, given, ())
        self.leaves = tuple(_leaves(self.root))
        names = [leaf.name for leaf in self.leaves]
        if len(set(names)) < len(names):
            raise SchemaError(f"two values of an item would have one name ({', '.join(names)}): rename a key")
        if not names:
            raise SchemaError(_nothing_in(self.root))
        if unknown := [name for name in given if name not in names]:
            raise ValueError(f"schema names {', '.join(map(repr, unknown))}: an item has {', '.join(names)}")
        values = self.row_of_chosen(item)
        kinds = {name: given[name] if name in given else _type_of(name, values[name]) for name in names}
        try:
            self.schema = Schema(kinds)
        except ValueError as error:
            raise SchemaError(f"{error}: rename the key") from None

    def row(self, item: object) -> dict[str, Any]:
        """Return the values of an item by the names of their columns; arrays and tensors as they are.

        Raises: SchemaError: its parts are not those of the first item.
        """
        return self.row_of_chosen(self.chosen(item))

    def row_of_chosen(self, item: object) -> dict[str, Any]:
        """Return what `row` does, of an item that `chosen` returned or that came from the columns."""
        values: dict[str, Any] = {}
        self._take(self.root, item, values)
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

    def chosen(self, item: Any) -> Any:
        """Return an item with what `columns` keeps of it; as it is, if that is all."""
        if self._keys is None:
            return item
        try:
            chosen = {key: item[key] for key in self._keys}
        except (KeyError, IndexError, TypeError) as error:
            raise SchemaError(f"it lacks one of columns {list(self._keys)}: {error!r}") from None
        return chosen if isinstance(item, Mapping) else type(item)(chosen.values())

    # how a value is read: another form may read it otherwise

    def opened(self, name: str, value: Any) -> Opened | None:  # noqa: ARG002  # others name it in errors
        """Return the parts of a value. None: it is a leaf."""
        if isinstance(value, Mapping):
            return contents(object, value, value.values())
        if isinstance(value, tuple) and (names := getattr(value, "_fields", ())):
            return contents(object, names, value)
        if isinstance(value, tuple) or (isinstance(value, list) and not _is_numbers(value)):
            return contents(object, range(len(value)), value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [field.name for field in dataclasses.fields(value)]
            return contents(object, fields, [getattr(value, field) for field in fields])
        return None

    def leaf(self, name: str, value: Any) -> Leaf:
        """Return what a value without parts is. Raises: SchemaError: no column holds it."""
        require_something(name, value)
        return Leaf(name or ALONE, type(value), _mode(value))

    def is_like(self, found: Leaf, first: Leaf, value: Any) -> bool:  # noqa: ARG002  # others look at it
        """True if a leaf of a later item is of the form of the first item's."""
        return found.mode == first.mode

    def _part(
        self, name: str, value: Any, given: Mapping[str, FieldType], within: tuple[object, ...]
    ) -> Part:
        """Return the form of a value. `within` are the values that it is a part of."""
        opened = self.opened(name, value)
        if opened is None:
            leaf = self.leaf(name, value)
            return leaf._replace(detail=_numbers_of(given.get(leaf.name))) if is_empty_list(value) else leaf
        if any(value is outer for outer in within):
            raise SchemaError(f"{shown(name)} contains itself: give a copy without that part")
        within = (*within, value)
        parts: list[Part] = []
        for at, (more, each) in enumerate(zip(opened.names, opened.values, strict=True)):
            full = name + more if name else more.removeprefix(".")
            if each is None and (at >= opened.own or opened.may_lack):
                parts.append(Same(full, None))
            elif at >= opened.own and (same := _position_of(each, opened.values[:at])) is not None:
                parts.append(Same(full, same))
            else:
                parts.append(self._part(full, each, given, within))
        kind = type(value) if opened.kind is object else opened.kind
        return Branch(name, kind, opened.keys, tuple(parts), opened.own, opened.rest)

    def _take(self, part: Part, value: Any, values: dict[str, Any]) -> None:
        if isinstance(part, Leaf):
            found = self.leaf(part.name, value)
            if not self.is_like(found, part, value):
                raise SchemaError(
                    f"{part.name!r} is {found}, and in the first item {part}: "
                    f"{self._way_out(found, part, value)}"
                )
            values[part.name] = value
            return
        assert isinstance(part, Branch)
        opened = self.opened(part.name, value)
        if opened is None:
            opened = contents(object, (), ())
            if not part.keys:
                raise SchemaError(
                    f"{shown(part.name)} is {with_article(type(value).__name__)}, and in the first item an "
                    f"empty {part.type.__name__}: give all items the same parts"
                )
        elif opened.kind not in (object, part.type) or opened.rest != part.rest:
            raise SchemaError(
                f"{shown(part.name)} is {described(opened.kind, opened.rest)}, and in the first item {part}: "
                "convert it"
            )
        children = opened.values if opened.keys == part.keys else _reordered(part, value, opened)
        for each, child in zip(part.parts, children, strict=True):
            if not isinstance(each, Same):
                self._take(each, child, values)
            elif child is not (None if each.at is None else children[each.at]):
                raise SchemaError(
                    f"{each.name!r} is {with_article(type(child).__name__)}, and in the first item {each}: "
                    "give all items the same parts"
                )

    def _way_out(self, found: Leaf, first: Leaf, value: Any) -> str:
        """Return what to do about a leaf of another form than the first item's."""
        if found.order != first.order:
            return "give np.ascontiguousarray(value) or tensor.contiguous() in all items"
        if not (found.type is list and first.type is list):
            return "convert it"
        if (classes := {*found.detail.removeprefix("of ").split(" and ")}) <= {*_NUMBERS.values()}:
            if len(classes) > 1:
                return "give numbers of one class"
            if not isinstance(self.schema[first.name], Ragged):
                return "convert it"
            kind = _type_of(first.name, value)
            assert isinstance(kind, Tensor)
            wanted = f"Ragged({kind.dtype!r}, {kind.shape[1:]})"
            return f"convert it, or, where the first one is empty, pass schema={{{first.name!r}: {wanted}}}"
        if classes <= {*_NUMBERS.values(), "str"} - {
            "complex"
        }:  # lists of texts have one length in all items
            return "give json.dumps(value) in all items"
        return "give lists of one length in all items, such as by padding"


def _reordered(part: Branch, value: Any, opened: Opened) -> Sequence[Any]:
    """Return the parts of a value in the order of the first item's. Raises: SchemaError: it has others."""
    if isinstance(value, tuple | list) or {*opened.keys} != {*part.keys}:
        has = f"has {', '.join(map(str, opened.keys))}" if opened.keys else f"is a {type(value).__name__}"
        raise SchemaError(
            f"{shown(part.name)} {has}, and in the first item it has "
            f"{', '.join(map(str, part.keys)) or 'no parts'}: give all items the same parts"
        )
    if opened.is_ordered and opened.keys[: opened.own] != part.keys[: part.own]:
        raise SchemaError(
            f"{shown(part.name)} has its keys in the order {', '.join(map(str, opened.keys[: opened.own]))}, "
            f"and in the first item {', '.join(map(str, part.keys[: part.own]))}: give all items one order"
        )
    named = dict(zip(opened.keys, opened.values, strict=True))
    return [named[key] for key in part.keys]


def _nothing_in(root: Part) -> str:
    """Return the error of an item without leaves."""
    empty: Part = root
    while isinstance(empty, Branch) and (nodes := [each for each in empty.parts if isinstance(each, Branch)]):
        empty = nodes[0]
    if isinstance(empty, Branch) and not empty.parts:
        return f"{shown(empty.name)} is an empty {empty.type.__name__}: there is nothing to store"
    return f"{shown(root.name)} has no values but None: there is nothing to store"


def contents(kind: type, keys: Iterable[Any], values: Iterable[Any], **more: Any) -> Opened:
    """Return a value as its contents, named by their keys. `more`: as of `Opened`."""
    keys, values = tuple(keys), [*values]
    return Opened(kind, keys, [f".{key}" for key in keys], values, len(keys), **more)


def _position_of(value: Any, others: Sequence[Any]) -> int | None:
    """Return where among others an object is that may be changed. None: nowhere."""
    if isinstance(value, bool | int | float | complex | str | bytes) or (type(value) is tuple and not value):
        return None
    return next((at for at, other in enumerate(others) if other is value), None)


def require_something(name: str, value: Any) -> None:
    """Raises: SchemaError: a leaf is None."""
    if value is None:
        raise SchemaError(
            f"{shown(name)} is None, which no column holds: leave it out of the item, or give a value of "
            "the type that it has elsewhere, such as -1 or ''"
        )


def described(kind: type, rest: tuple[Any, ...]) -> str:
    """Return what a node is, in words."""
    return with_article(kind.__name__) + (f" of {' and '.join(map(str, rest))}" if rest else "")


def with_article(words: str) -> str:
    """Return words with "a" or "an" before them."""
    return f"{'an' if words[0] in 'aeiouAEIO' else 'a'} {words}"


def shown(name: str) -> str:
    """Return a part's name for an error."""
    return repr(name) if name else "the item"


def is_map_style(dataset: object) -> bool:
    """True if a dataset has a length, and items by index. A stream may have a length."""
    getter = getattr(type(dataset), "__getitem__", None)
    named = getattr(getter, "__module__", ""), getattr(getter, "__qualname__", "")
    is_torchs_own = named == ("torch.utils.data.dataset", "Dataset.__getitem__")  # which raises
    return hasattr(dataset, "__len__") and getter is not None and not is_torchs_own


def item_of(dataset: Any, index: int) -> Any:
    """Return dataset[index]. Raises: as `called`, which names the item."""
    return called(f"item {index} of the dataset", operator.getitem, dataset, index)


def getter_of_items(dataset: Any) -> Callable[[list[int]], list[Any]] | None:
    """Return the `__getitems__` of a dataset, which gives many items at once, where it gives dataset[index].

    Returns: None: it has none; its class, or that of a dataset that it holds, overrides `__getitem__` alone,
        or passes on that of another object.
    """
    return _getter_of_items(dataset, {})


def _getter_of_items(dataset: Any, seen: dict[int, Any]) -> Callable[[list[int]], list[Any]] | None:
    many = getattr(dataset, "__getitems__", None)
    if not callable(many) or getattr(many, "__self__", dataset) is not dataset:
        return None
    if "__getitems__" not in getattr(dataset, "__dict__", {}) and overrides_getitem_alone(type(dataset)):
        return None
    seen[id(dataset)] = dataset
    for inner in _held_by(dataset):
        if id(inner) not in seen and _has_getitems(inner) and _getter_of_items(inner, seen) is None:
            return None
    return many  # type: ignore[no-any-return]


def overrides_getitem_alone(kind: type) -> bool:
    """True if a class has the `__getitem__` of a class that is derived from that of its `__getitems__`."""
    for each in kind.__mro__:
        if "__getitems__" in vars(each):
            return False
        if "__getitem__" in vars(each):
            return True
    return False


def _held_by(dataset: Any) -> Iterator[Any]:
    """Yield what a dataset has in its attributes and slots, and in the lists, tuples and dicts there."""
    others = ["dataset", "datasets", *_slots_of(type(dataset))]  # the first two may be properties
    own = getattr(dataset, "__dict__", {}).values()
    for value in [*own, *(getattr(dataset, name, None) for name in others)]:
        yield value
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value


def _slots_of(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        yield from (name for name, value in vars(each).items() if isinstance(value, MemberDescriptorType))


def _has_getitems(value: Any) -> bool:
    try:
        return callable(getattr(value, "__getitems__", None))
    except Exception:  # noqa: BLE001  # an attribute's own __getattr__ may raise anything
        return False


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


def is_empty_list(value: Any) -> bool:
    return isinstance(value, list) and not value


def _numbers_of(kind: FieldType | None) -> str:
    """The detail of a list of which only the type of its column is known."""
    if not isinstance(kind, Tensor | Ragged):
        return "of float"
    return f"of {_NUMBERS[dtype_of(kind.dtype).kind]}"


def _type_of(name: str, value: Any) -> FieldType:
    """The type of a value's column. What is empty shows that its length varies."""
    is_empty = is_empty_list(value) or (getattr(value, "shape", ()) or (1,))[0] == 0
    if not is_empty:
        return infer_type(name, value)
    array, dtype = as_array(name, value)
    try:
        return Ragged(dtype, array.shape[1:])
    except ValueError as error:
        raise SchemaError(f"field {name!r}: {error}") from None


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
    elif isinstance(part, Branch):
        for each in part.parts:
            yield from _leaves(each)
