"""Structure: batches of any nesting, taken apart into leaves and put together again.

A leaf goes to a device: a tensor, a NumPy array, or an object with a `to` method of its own. Dicts
and other mappings, lists, tuples, NamedTuples, dataclasses, TensorDicts and nested tensors of jagged layout
are taken apart; anything else in a batch (text, numbers, None) stays as it is. Pure: no argument is
changed. A node without leaves is the same object afterwards, except for a dict, which is made anew.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from arrowcache.units import format_count

#: Puts a batch together again, of its new leaves by number.
Build = Callable[[Any], Any]
Make = Callable[[Sequence[Any]], Any]
Opened = tuple[Sequence[Any], Make]  # the items of a node, and a function that makes a like node of others


def take_apart(batch: Any, leaves: list[Any]) -> Build:
    """Find the leaves of a batch. A leaf that occurs twice is found once."""
    return _Taking(leaves, to_split=False).apart(batch)


def split(batch: Any, parts: int) -> list[Any]:
    """Split a batch into nearly equal parts, one after another along dimension 0 of its tensors: views.

    Tensors without dimensions, and objects that are no tensors, go into each part; a list with as many values
    as the batch has rows is split like a tensor.
    Raises: ValueError: tensors of different lengths, or nothing to split; fewer rows than
        parts.
    """
    leaves: list[Any] = []
    build = _Taking(leaves, to_split=True).apart(batch)
    found = [_length(leaf) for leaf in leaves if not isinstance(leaf, list)]
    lengths = {length for length in found if length is not None}
    if len(lengths) != 1:
        raise ValueError(
            f"a batch whose tensors have {sorted(lengths) or 'no'} rows cannot be split among "
            f"{format_count(parts, 'device')}"
            ": give all the same first dimension, or pass device="
        )
    (rows,) = lengths
    if rows < parts:
        raise ValueError(
            f"a batch of {format_count(rows, 'row')} cannot be split among "
            f"{format_count(parts, 'device')}: drop "
            "the last, short one"
        )
    bounds = [rows * part // parts for part in range(parts + 1)]
    found = []
    for start, stop in itertools.pairwise(bounds):
        cut: dict[int, torch.Tensor] = {}
        found.append(build([_rows(leaf, start, stop, rows, cut) for leaf in leaves]))
    return found


class _Taking:
    """Takes one batch apart.

    Args:
        to_split: leaves are all objects with rows: jagged tensors and TensorDicts in whole, and plain lists.
    """

    def __init__(self, leaves: list[Any], *, to_split: bool) -> None:
        self._leaves, self._to_split = leaves, to_split
        self._numbers: dict[int, int] = {}  # by id

    def apart(self, node: Any) -> Build:
        if type(node) is dict:
            return self._made(*_of_mapping(node))
        if isinstance(node, torch.Tensor):
            if not node.is_nested or self._to_split or not _is_jagged(node):
                return self._leaf(node)
            return self._made(*_of_jagged(node))
        if isinstance(node, np.ndarray):
            return self._leaf(node)
        if _is_tensordict(node):
            return self._leaf(node) if self._to_split else self._made(*_of_tensordict(node))
        if isinstance(node, Mapping):
            return self._made(*_of_mapping(node), node)
        if isinstance(node, type):
            return _Same(node)
        if isinstance(node, list | tuple) and not callable(getattr(node, "to", None)):
            build = self._made(*_of_sequence(node), node)
            is_list = self._to_split and type(node) is list and isinstance(build, _Same)
            return self._leaf(node) if is_list else build
        if callable(getattr(node, "to", None)):
            return self._leaf(node)
        if dataclasses.is_dataclass(node):
            return self._made(*_of_dataclass(node), node)
        return _Same(node)

    def _made(self, items: Sequence[Any], make: Make, node: Any = None) -> Build:
        """Make a node of new items; the old `node`, if given, if no item has a leaf."""
        if {*map(type, items)} == {torch.Tensor}:  # the usual ones, quicker
            numbers = self._numbered(items)
            return lambda new: make([*map(new.__getitem__, numbers)])
        builds = [self.apart(item) for item in items]
        if node is not None and all(isinstance(build, _Same) for build in builds):
            return _Same(node)
        return lambda new: make([build(new) for build in builds])

    def _leaf(self, leaf: Any) -> Build:
        (number,) = self._numbered([leaf])
        return lambda new: new[number]

    def _numbered(self, leaves: Sequence[Any]) -> list[int]:
        """Return the number of each leaf, the old one if it was found before."""
        known, count = self._numbers, len(self._leaves)
        numbers = [known.setdefault(id(leaf), len(known)) for leaf in leaves]
        new = {number: leaf for number, leaf in zip(numbers, leaves, strict=True) if number >= count}
        self._leaves.extend(new.values())
        return numbers


class _Same:
    """An object without leaves."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __call__(self, new: Any) -> Any:  # noqa: ARG002
        return self._node


def _of_jagged(node: Any) -> Opened:
    offsets = node.offsets()
    shortest = longest = None
    if offsets.is_cpu and len(offsets) > 1:  # else the first kernel that needs them waits for the device
        lengths = offsets.diff()
        shortest, longest = int(lengths.min()), int(lengths.max())

    def make(items: Sequence[Any]) -> Any:
        values, ends = items
        return torch.nested.nested_tensor_from_jagged(values, ends, min_seqlen=shortest, max_seqlen=longest)

    return [node.values(), offsets], make


def _of_tensordict(node: Any) -> Opened:
    items: list[Any] = []
    node.apply(items.append)

    def make(new: Sequence[Any]) -> Any:
        following = iter(new)
        where = next((each.device for each in new if isinstance(each, torch.Tensor)), node.device)
        return node.apply(lambda _: next(following), device=where)  # else the result names another device

    return items, make


def _of_mapping(node: Mapping[Any, Any]) -> Opened:
    keys = list(node)

    def make(items: Sequence[Any]) -> Any:
        new = dict(zip(keys, items, strict=True))
        if type(node) is dict or not isinstance(node, MutableMapping):
            return new
        if isinstance(node, dict) or hasattr(node, "__copy__"):
            changed = copy.copy(node)
        else:  # a plain copy would share the inner dict, and writes to it
            changed = copy.deepcopy(node, {id(item): item for item in node.values()})
        for key, item in new.items():  # `update` adds in a Counter, and is refused by a ModelOutput
            changed[key] = item
        return changed

    return list(node.values()), make


def _of_sequence(node: Any) -> Opened:
    return node, getattr(node, "_make", type(node))


def _of_dataclass(node: Any) -> Opened:
    """Copy a dataclass with new values: neither __init__ nor __post_init__ runs again.

    The values are its fields, and what __post_init__ set beside them.
    """
    fields = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
    names = [*fields, *(name for name in getattr(node, "__dict__", {}) if name not in fields)]

    def make(items: Sequence[Any]) -> Any:
        changed = copy.copy(node)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(changed, name, item)  # also a frozen one
        return changed

    return [getattr(node, name) for name in names], make


def _is_jagged(tensor: torch.Tensor) -> bool:
    """True if a nested tensor consists of values and offsets alone, its rows one after another."""
    nested: Any = tensor  # torch's stubs lack the attributes of nested tensors
    return bool(
        tensor.layout == torch.jagged
        and isinstance(tensor.shape[1], torch.SymInt)  # else it is transposed, and so are its values
        and nested.lengths() is None
        and not tensor.requires_grad
    )


def _length(leaf: Any) -> int | None:
    """Return the rows of a leaf, or None if it goes into each part.

    Raises: ValueError: it cannot be cut.
    """
    if not isinstance(leaf, torch.Tensor | np.ndarray) and not _is_tensordict(leaf):
        raise ValueError(f"a batch with a {type(leaf).__name__} cannot be split among devices: pass device=")
    if isinstance(leaf, torch.Tensor) and not (
        _is_jagged(leaf) if leaf.is_nested else leaf.layout == torch.strided
    ):
        kind = "nested" if leaf.is_nested else "sparse"
        raise ValueError(
            f"a batch with a {kind} tensor of layout {leaf.layout} cannot be split among devices: "
            "make it dense (nested ones: contiguous and jagged), or pass device="
        )
    return len(leaf) if leaf.ndim else None


def _rows(leaf: Any, start: int, stop: int, rows: int, cut: dict[int, torch.Tensor]) -> Any:
    """Return some rows of a leaf.

    Args:
        cut: offsets of these rows, by the id of the whole ones: torch requires the same object for the same
            lengths.
    """
    if isinstance(leaf, list):
        return leaf[start:stop] if len(leaf) == rows else leaf
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        nested: Any = leaf
        offsets = nested.offsets()
        first, last = int(offsets[start]), int(offsets[stop])
        if id(offsets) not in cut:
            cut[id(offsets)] = offsets[start : stop + 1] - first
        return torch.nested.nested_tensor_from_jagged(nested.values()[first:last], cut[id(offsets)])
    return leaf[start:stop] if leaf.ndim else leaf


def _is_tensordict(node: Any) -> bool:
    kind = type(node)
    return hasattr(kind, "batch_size") and hasattr(kind, "apply") and hasattr(kind, "is_locked")
