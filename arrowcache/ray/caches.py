"""NodeCaches: one cache on the disk of every training node. A value: it travels to where it is used."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from arrowcache.arrow.schema import FieldType, Schema
from arrowcache.cache import Cache

NODE = "{node}"


@dataclass(frozen=True)
class NodeCaches:
    """The caches of a cluster: where they are, and what `Cache.create` makes them of.

    The other arguments are those of `Cache.create`. A cache that is there already is used, with its own
    settings but the capacity.

    Args:
        path: the folder on each node's own disk. `{node}` in it becomes the node's id, which a cluster on
            one machine needs; a function of that id gives the path itself.
        nodes: ids of the nodes that get one, from `ray.nodes()`; None: all that are alive when a pool starts.
            Those with a GPU: `[n["NodeID"] for n in ray.nodes() if n["Alive"] and "GPU" in n["Resources"]]`.
    Raises: ValueError, TypeError: nodes that are none, a path that is none.
    """

    path: str | os.PathLike[str] | Callable[[str], str | os.PathLike[str]]
    schema: Schema | Mapping[str, FieldType]
    capacity: int | str
    segment_bytes: int | str = "64MiB"
    segment_rows: int | None = None
    headroom: float = 0.1
    durable: bool = False
    nodes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not callable(self.path) and not isinstance(self.path, str | os.PathLike):
            raise TypeError(f"path must be a path, or a function of a node's id, not {self.path!r}")
        if self.nodes is not None and (isinstance(self.nodes, str) or not self.nodes):
            raise ValueError(f"nodes={self.nodes!r} must be ids of nodes, at least one, or None for all")

    def path_on(self, node: str) -> Path:
        """Where the cache of a node is, on that node."""
        if callable(self.path):
            return Path(self.path(node)).absolute()
        return Path(os.fspath(self.path).replace(NODE, node)).absolute()

    def node_ids(self) -> list[str]:
        """The nodes that have a cache, in an order that every driver agrees on.

        Raises: ValueError: one of `nodes` is not in the cluster, or not alive; none is.
        """
        alive = sorted(node["NodeID"] for node in alive_nodes())
        if self.nodes is None:
            return alive
        if missing := [node for node in self.nodes if node not in alive]:
            raise ValueError(
                f"nodes {', '.join(map(str, missing))} are not alive in this cluster, which has "
                f"{', '.join(alive)}: give NodeID of ray.nodes()"
            )
        return sorted(set(self.nodes))

    def local(self) -> Cache:
        """Open the cache of the node on which this runs, as in the training function of Ray Train.

        Raises: FileNotFoundError: none was made here; a pool makes them when it starts.
        """
        return Cache.open(self.path_on(ray.get_runtime_context().get_node_id()))

    def make(self, node: str) -> Cache:
        """Make the cache of the node on which this runs, or open the one that is there.

        Raises: as `Cache.create`.
        """
        return Cache.create(
            self.path_on(node),
            self.schema,
            self.capacity,
            self.segment_bytes,
            self.segment_rows,
            self.headroom,
            self.durable,
            exist_ok=True,
        )


def alive_nodes() -> list[dict[str, Any]]:
    """What Ray says of each node of the cluster that is alive."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # it has no types
    return [node for node in nodes if node["Alive"]]
