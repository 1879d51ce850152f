"""Structure: batches of any nesting, taken apart into leaves and put together again.

A leaf is what goes to a device: a tensor, a NumPy array, or an object with a `to` method of its own. Dicts
and other mappings, lists, tuples, NamedTuples, dataclasses, TensorDicts and nested tensors of jagged layout
are taken apart; whatever else is in a batch (text, numbers, None) stays as it is. Pure: nothing given is
changed, and what holds no leaf is the same object afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

#: Puts a batch together again: its new leaves by number, and where they are (a TensorDict says so of itself).
Build = Callable[[Any, torch.device | None], Any]


def take_apart(batch: Any, leaves: list[Any]) -> Build:
    """Find the leaves of a batch. What occurs twice is one leaf.

    Args:
        leaves: they are appended to this.
    """
    return _Taking(leaves, to_split=False).apart(batch)


def split(batch: Any, parts: int) -> list[Any]:
    """Parts of a batch, nearly equal, one after another along dimension 0 of its tensors: views.

    Tensors without dimensions, and what is no tensor, go into each part; a list of as many values
    as the batch has rows is split like a tensor.
    Raises: ValueError: tensors of different lengths, or nothing that could be split; fewer rows than
        parts.
    """
    leaves: list[Any] = []
    build = _Taking(leaves, to_split=True).apart(batch)
    found = [_length(leaf) for leaf in leaves if not isinstance(leaf, list)]
    lengths = {length for length in found if length is not None}
    if len(lengths) != 1:
        raise ValueError(
            f"a batch whose tensors have {sorted(lengths) or 'no'} rows cannot be split among {parts} "
            "devices: give all the same first dimension, or pass device="
        )
    (rows,) = lengths
    if rows < parts:
        raise ValueError(
            f"a batch of {rows} rows cannot be split among {parts} devices: drop the last, short one"
        )
    bounds = [rows * part // parts for part in range(parts + 1)]
    return [
        build([_rows(leaf, start, stop, rows) for leaf in leaves], None)
        for start, stop in itertools.pairwise(bounds)
    ]


class _Taking:
    """Takes one batch apart.

    Args:
        to_split: leaves are what has rows: jagged tensors and TensorDicts in whole, and plain lists.
    """

    def __init__(self, leaves: list[Any], *, to_split: bool) -> None:
        self._leaves, self._to_split = leaves, to_split
        self._numbers: dict[int, int] = {}  # by id

    def apart(self, node: Any) -> Build:
        if isinstance(node, torch.Tensor):
            if not node.is_nested or self._to_split or not _is_jagged(node):
                return self._leaf(node)
            return self._jagged(node)
        if isinstance(node, np.ndarray):
            return self._leaf(node)
        if _is_tensordict(node):
            return self._leaf(node) if self._to_split else self._tensordict(node)
        if isinstance(node, Mapping):
            return self._mapping(node)
        if isinstance(node, type):
            return _Same(node)
        if isinstance(node, list | tuple) and not hasattr(node, "to"):
            return self._sequence(node)
        if callable(getattr(node, "to", None)):
            return self._leaf(node)
        if dataclasses.is_dataclass(node):
            return self._dataclass(node)
        return _Same(node)

    def _number(self, leaf: Any) -> int:
        number = self._numbers.setdefault(id(leaf), len(self._leaves))
        if number == len(self._leaves):
            self._leaves.append(leaf)
        return number

    def _leaf(self, leaf: Any) -> Build:
        number = self._number(leaf)
        return lambda new, _: new[number]

    def _jagged(self, node: Any) -> Build:
        offsets = node.offsets()
        values, ends = self._leaf(node.values()), self._leaf(offsets)
        shortest = longest = None
        if offsets.is_cpu and len(offsets) > 1:  # else the first kernel that needs them waits for the device
            lengths = offsets.diff()
            shortest, longest = int(lengths.min()), int(lengths.max())
        return lambda new, device: torch.nested.nested_tensor_from_jagged(
            values(new, device), ends(new, device), min_seqlen=shortest, max_seqlen=longest
        )

    def _tensordict(self, node: Any) -> Build:
        builds: list[Build] = []

        def note(leaf: Any) -> Any:
            builds.append(self.apart(leaf))
            return leaf

        def build(new: Any, device: torch.device | None) -> Any:
            following = iter(builds)
            return node.apply(lambda _: next(following)(new, device), device=device)

        node.apply(note)
        return build

    def _mapping(self, node: Mapping[Any, Any]) -> Build:
        if type(node) is dict and {*map(type, node.values())} == {torch.Tensor}:  # the usual ones, quicker
            numbers = {key: self._number(value) for key, value in node.items()}
            return lambda new, _: {key: new[number] for key, number in numbers.items()}
        builds = {key: self.apart(value) for key, value in node.items()}
        if type(node) is dict:
            return lambda new, device: {key: build(new, device) for key, build in builds.items()}
        if _are_same(builds.values()):
            return _Same(node)

        def build(new: Any, device: torch.device | None) -> Any:
            items = {key: each(new, device) for key, each in builds.items()}
            if not isinstance(node, MutableMapping):
                return items
            changed = copy.copy(node)
            changed.update(items)
            return changed

        return build

    def _sequence(self, node: Any) -> Build:
        builds = [self.apart(item) for item in node]
        kind = type(node)
        if _are_same(builds):
            return self._leaf(node) if self._to_split and kind is list else _Same(node)
        make = node._make if isinstance(node, tuple) and hasattr(node, "_make") else kind
        return lambda new, device: make([build(new, device) for build in builds])

    def _dataclass(self, node: Any) -> Build:
        """A copy with new values: neither __init__ nor __post_init__ runs again."""
        builds = {
            field.name: self.apart(getattr(node, field.name, None)) for field in dataclasses.fields(node)
        }
        if _are_same(builds.values()):
            return _Same(node)
        changes = {name: each for name, each in builds.items() if not isinstance(each, _Same)}

        def build(new: Any, device: torch.device | None) -> Any:
            changed = copy.copy(node)
            for name, each in changes.items():
                object.__setattr__(changed, name, each(new, device))  # a frozen one, too
            return changed

        return build


class _Same:
    """What has no leaf."""

    __slots__ = ("_node",)

    def __init__(self, node: Any) -> None:
        self._node = node

    def __call__(self, new: Any, device: torch.device | None) -> Any:  # noqa: ARG002
        return self._node


def _are_same(builds: Any) -> bool:
    return all(isinstance(build, _Same) for build in builds)


def _is_jagged(tensor: torch.Tensor) -> bool:
    """Whether a nested tensor is no more than values and offsets, its rows one after another."""
    nested: Any = tensor  # torch's stubs do not know what only nested tensors have
    return bool(
        tensor.layout == torch.jagged
        and isinstance(tensor.shape[1], torch.SymInt)  # else it is transposed, and so are its values
        and nested.lengths() is None
        and not tensor.requires_grad
    )


def _length(leaf: Any) -> int | None:
    """The rows of a leaf; None: it goes into each part.

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


def _rows(leaf: Any, start: int, stop: int, rows: int) -> Any:
    if isinstance(leaf, list):
        return leaf[start:stop] if len(leaf) == rows else leaf
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        nested: Any = leaf
        offsets = nested.offsets()
        first, last = int(offsets[start]), int(offsets[stop])
        return torch.nested.nested_tensor_from_jagged(
            nested.values()[first:last], offsets[start : stop + 1] - first
        )
    return leaf[start:stop] if leaf.ndim else leaf


def _is_tensordict(node: Any) -> bool:
    kind = type(node)
    return hasattr(kind, "batch_size") and hasattr(kind, "apply") and hasattr(kind, "is_locked")
