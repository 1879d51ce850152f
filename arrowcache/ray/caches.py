"""NodeCaches: one cache on the disk of every training node. A value, sent to its users."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from arrowcache.arguments import face
from arrowcache.arrow.schema import FieldType, Schema
from arrowcache.arrow.segment import Form
from arrowcache.cache import Cache
from arrowcache.storage.sizing import settings_of

NODE = "{node}"


@face("NodeCaches")
@dataclass(frozen=True)
class NodeCaches:
    """The caches of a cluster: their places, and the arguments of `Cache.create` for them.

    The other arguments are those of `Cache.create`. A cache that is there already is opened as by
    `exist_ok=True`: another capacity resizes it, and any other setting than its own is an error.

    Args:
        path: the folder on each node's own disk. `{node}` in it becomes the node's id, needed for a cluster
            on one machine; a function of that id returns the path itself.
        nodes: ids of the nodes that get one, from `ray.nodes()`. None means all that are alive when a pool
            starts. Those with a GPU: `[n["NodeID"] for n in ray.nodes() if n["Alive"] and "GPU" in
            n["Resources"]]`.
    Raises: ValueError, TypeError: not nodes, or not a path.
    """

    path: str | os.PathLike[str] | Callable[[str], str | os.PathLike[str]]
    schema: Schema | Mapping[str, FieldType]
    capacity: int | str
    segment_bytes: int | str | None = None
    segment_rows: int | None = None
    headroom: float | None = None
    durable: bool | None = None
    nodes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not callable(self.path) and not isinstance(self.path, str | os.PathLike):
            raise TypeError(f"path must be a path, or a function of a node's id, not {self.path!r}")
        if self.nodes is not None and (isinstance(self.nodes, str) or not self.nodes):
            raise ValueError(f"nodes={self.nodes!r} must be ids of nodes, at least one, or None for all")

    @property
    def form(self) -> Form:
        """The form of the segments of new caches. Raises: as `Cache.create`."""
        sizes = self.capacity, self.segment_bytes, self.segment_rows, self.headroom, self.durable
        return settings_of(Schema(self.schema), *sizes).form

    def path_on(self, node: str) -> Path:
        """Return the path of a node's cache on that node."""
        if callable(self.path):
            return Path(self.path(node)).absolute()
        return Path(os.fspath(self.path).replace(NODE, node)).absolute()

    def node_ids(self) -> list[str]:
        """Return the nodes that have a cache, in the same order in every driver.

        Raises: ValueError: one of `nodes` is not in the cluster, or not alive; there are none.
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
        """Open the cache of the current node, as in the training function of Ray Train.

        Raises: FileNotFoundError: there is none; a pool makes the caches when it starts.
        """
        return Cache.open(self.path_on(ray.get_runtime_context().get_node_id()))

    def make(self, node: str) -> Cache:
        """Make the cache of the current node, or open an existing one.

        Raises: as `Cache.create`.
        """
        sizes = self.capacity, self.segment_bytes, self.segment_rows, self.headroom, self.durable
        return Cache.create(self.path_on(node), self.schema, *sizes, exist_ok=True)


def alive_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # it has no types
    return [node for node in nodes if node["Alive"]]
