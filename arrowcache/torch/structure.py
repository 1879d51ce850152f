"""Structure: batches of any nesting, taken apart into leaves and put together again.

A leaf is what goes to a device: a tensor, a NumPy array, or an object with a `to` method of its own.
Dicts and other mappings, lists, tuples, NamedTuples, dataclasses, TensorDicts and nested tensors of
jagged layout are taken apart; whatever else is in a batch (text, numbers, None) stays as it is.
Pure: nothing given is changed, and what holds no leaf is the same object afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

Change = Callable[[Any], Any]


def replace_leaves(
    node: Any, change: Change, device: torch.device | None = None, column: Change | None = None
) -> Any:
    """The same structure with each leaf replaced by what `change` makes of it, in a fixed order.

    Args:
        device: where the new leaves are; a TensorDict says so of itself.
        column: what becomes of a list without leaves, such as a column of text; None: it stays.
    """

    def again(inner: Any) -> Any:
        return replace_leaves(inner, change, device, column)

    if isinstance(node, torch.Tensor):
        if is_jagged(node):
            values, offsets = _jagged_parts(node)
            return torch.nested.nested_tensor_from_jagged(change(values), change(offsets))
        return change(node)
    if isinstance(node, np.ndarray):
        return change(node)
    if _is_tensordict(node):
        return node.apply(change) if device is None else node.apply(change, device=device)
    if isinstance(node, Mapping):
        return _mapping(node, again)
    if isinstance(node, list | tuple) and not hasattr(node, "to"):
        return _sequence(node, again, column)
    if isinstance(node, type):
        return node
    if callable(getattr(node, "to", None)):
        return change(node)
    if dataclasses.is_dataclass(node):
        return _dataclass(node, again)
    return node


def split(batch: Any, parts: int) -> list[Any]:
    """Parts of a batch, nearly equal, one after another along dimension 0 of its tensors: views.

    Tensors without dimensions, and what is no tensor, go into each part; a list of as many values
    as the batch has rows is split like a tensor.
    Raises: ValueError: tensors of different lengths, or nothing that could be split; fewer rows than
        parts.
    """
    lengths: list[int] = []

    def note(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor | np.ndarray) and not _is_tensordict(leaf):
            raise ValueError(
                f"a batch with a {type(leaf).__name__} cannot be split among devices: pass device="
            )
        if isinstance(leaf, torch.Tensor) and not _has_rows(leaf):
            kind = "nested" if leaf.is_nested else "sparse"
            raise ValueError(
                f"a batch with a {kind} tensor of layout {leaf.layout} cannot be split among devices: "
                "make it dense (nested ones: contiguous and jagged), or pass device="
            )
        if leaf.ndim:
            lengths.append(len(leaf))
        return leaf

    _replace_whole(batch, note)
    if len(set(lengths)) != 1:
        raise ValueError(
            f"a batch whose tensors have {sorted(set(lengths)) or 'no'} rows cannot be split among {parts} "
            "devices: give all the same first dimension, or pass device="
        )
    rows = lengths[0]
    if rows < parts:
        raise ValueError(
            f"a batch of {rows} rows cannot be split among {parts} devices: drop the last, short one"
        )
    bounds = [rows * part // parts for part in range(parts + 1)]

    def cut(start: int, stop: int) -> Any:
        def column(values: list[Any]) -> list[Any]:
            return values[start:stop] if len(values) == rows else values

        return _replace_whole(batch, lambda leaf: _rows(leaf, start, stop), column)

    return [cut(start, stop) for start, stop in itertools.pairwise(bounds)]


def is_jagged(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than values and offsets, its rows one after another."""
    nested: Any = tensor  # torch's stubs do not know what only nested tensors have
    return bool(
        tensor.is_nested
        and tensor.layout == torch.jagged
        and isinstance(tensor.shape[1], torch.SymInt)  # else it is transposed, and so are its values
        and nested.lengths() is None
        and not tensor.requires_grad
    )


def _jagged_parts(nested: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return nested.values(), nested.offsets()


def _replace_whole(batch: Any, change: Change, column: Change | None = None) -> Any:
    """As `replace_leaves`, but jagged tensors are leaves: their values have no rows."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping) and not _is_tensordict(batch):
        return _mapping(batch, lambda inner: _replace_whole(inner, change, column))
    if isinstance(batch, list | tuple) and not hasattr(batch, "to"):
        return _sequence(batch, lambda inner: _replace_whole(inner, change, column), column)
    if _is_tensordict(batch):
        return change(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type) and not hasattr(batch, "to"):
        return _dataclass(batch, lambda inner: _replace_whole(inner, change, column))
    return replace_leaves(batch, change)


def _has_rows(tensor: torch.Tensor) -> bool:
    """Whether rows can be cut out of a tensor."""
    return is_jagged(tensor) if tensor.is_nested else tensor.layout == torch.strided


def _rows(leaf: Any, start: int, stop: int) -> Any:
    if isinstance(leaf, torch.Tensor) and is_jagged(leaf):
        values, offsets = _jagged_parts(leaf)
        first, last = int(offsets[start]), int(offsets[stop])
        return torch.nested.nested_tensor_from_jagged(values[first:last], offsets[start : stop + 1] - first)
    return leaf[start:stop] if leaf.ndim else leaf


def _is_tensordict(node: Any) -> bool:
    kind = type(node)
    return hasattr(kind, "batch_size") and hasattr(kind, "apply") and hasattr(kind, "is_locked")


def _mapping(node: Mapping[Any, Any], again: Change) -> Any:
    items = {key: again(value) for key, value in node.items()}
    if type(node) is dict:
        return items
    if all(items[key] is value for key, value in node.items()):
        return node
    if isinstance(node, MutableMapping):
        changed = copy.copy(node)
        changed.update(items)
        return changed
    return items


def _sequence(node: Any, again: Change, column: Change | None) -> Any:
    items = [again(item) for item in node]
    if all(new is old for new, old in zip(items, node, strict=True)):
        return column(node) if column is not None and type(node) is list else node
    if isinstance(node, tuple) and hasattr(node, "_make"):
        return node._make(items)
    return type(node)(items)


def _dataclass(node: Any, again: Change) -> Any:
    """A copy with new values: neither __init__ nor __post_init__ runs again."""
    changes = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name, None)
        new = again(value)
        if new is not value:
            changes[field.name] = new
    if not changes:
        return node
    changed = copy.copy(node)
    for name, new in changes.items():
        object.__setattr__(changed, name, new)  # a frozen one, too
    return changed
