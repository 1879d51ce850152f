"""arrowcache itself, with its defaults: README.md is its documentation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers import states
from benchmarks.peers.workload import Batch, Workload


def write(folder: Path, workload: Workload) -> None:
    import arrowcache as ac

    schema = ac.Schema({"x": ac.Tensor("float32", (workload.columns,)), "y": ac.Tensor("int64")})
    with (
        ac.Cache.create(folder / "cache", schema, 2 * workload.nbytes + (1 << 30)) as cache,
        cache.writer() as writer,
    ):
        for x, y in workload.chunks():
            writer.extend(x=x, y=y)


class _Epochs:
    """Each `iter` is an epoch of pairs."""

    def __init__(self, loader: object) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return ((batch["x"], batch["y"]) for batch in self._loader)  # type: ignore[attr-defined]


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[_Epochs]:
    from arrowcache.torch import Loader

    shuffle = "rows" if shuffled else None
    with Loader(folder / "cache", workload.batch_rows, shuffle=shuffle, workers=workers) as batches:
        yield _Epochs(batches)


def resume(
    folder: Path, workload: Workload, *, workers: int, state: bytes | None, batches: int | None
) -> tuple[list[int], bytes]:
    from arrowcache.torch import Loader

    with Loader(folder / "cache", workload.batch_rows, workers=workers) as loader:
        return states.resume(loader, lambda batch: batch["y"], state, batches)
