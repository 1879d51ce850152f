"""Loader for JAX: the batches of `arrowcache.Loader` as arrays over the same memory, or on devices.

Each step hands out a batch that was put on the device a step ago, and puts the one behind it there, if that
is made by then. There is no thread. A batch counts as delivered when the consumer gets it: a state that is
taken meanwhile has the batch ahead still to come.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from arrowcache.arguments import OF_DATALOADER
from arrowcache.jax.placement import Placement
from arrowcache.reading.assembly import Batch, ReadyBatch
from arrowcache.reading.batch_source import Batches, BatchSource, EpochIterator
from arrowcache.reading.loader import Loader as NumpyLoader
from arrowcache.reading.options import LoaderArguments, RankInfo, takes
from arrowcache.reading.stream import BatchStream
from arrowcache.storage.recovery import HasStore

if TYPE_CHECKING:
    from typing import Unpack


class Loader(NumpyLoader):
    """Batches as `dict[str, jax.Array]`: each `for` is an epoch over a new snapshot.

    Arguments, epochs, waiting and errors are those of `arrowcache.Loader`; `transform` is called with NumPy
    arrays, ahead, in a worker thread or process. If jax.distributed is initialized, it gives rank and
    world_size, unless they are arguments; `run_id` must be said then. Arrays are (batch_size, *shape).

    Args:
        device: jax.Device of the arrays. None means JAX's default device. On the CPU nothing is copied: an
            array is the slot that the rows were gathered into, or a view of the cache's file where that is
            aligned to 64 bytes. To other devices the next batch is copied while this one trains; it counts as
            delivered, in `stats` and `state_dict`, when the consumer gets it.
        sharding: jax.sharding.Sharding of every array, in place of a device; such as
            NamedSharding(mesh, PartitionSpec("data")), which divides axis 0, the rows. One over devices of
            several processes makes global arrays of world_size * batch_size rows.

    Keeping an array is safe: it is not overwritten while it lives. Text and bytes come as lists,
    timestamps as NumPy's datetime64[us], ragged columns as `arrowcache.Values`: JAX has none of these, or
    would compile anew for each length. bfloat16 comes as JAX's. Without `jax_enable_x64` JAX has no numbers
    of 64 bits: float64 become float32, and integers int32, exactly.
    Raises: as `arrowcache.Loader`; ValueError: a sharding that does not divide a batch; none
    divides those of batch_tokens. A step raises
        ValueError where an integer does not fit into JAX's.
    """

    _ahead: weakref.ref[AheadIterator] | None = None  # of the epoch that began last

    _face = "a Loader of arrowcache.jax"
    _as_dataset = (
        "A torch DataLoader would have no arrays of JAX, and `workers=` runs a transform in processes"
    )

    @takes("Loader", LoaderArguments, OF_DATALOADER)
    def __init__(
        self,
        cache: HasStore | str | os.PathLike[str],
        batch_size: int | None = None,
        *,
        device: Any = None,
        sharding: Any = None,
        **options: Unpack[LoaderArguments],
    ) -> None:
        self._placement = Placement(device, sharding)
        super().__init__(cache, batch_size, **options)
        try:
            self._require_fit()
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """End the epoch, and the threads and processes of workers; lease nothing afterwards. Idempotent.

        Blocks: at most some seconds, for a running transform.
        """
        super().close()
        if self._ahead is not None and (ahead := self._ahead()) is not None:
            ahead.forget()

    def _rank_info(self, *, begins: bool) -> RankInfo | None:  # noqa: ARG002  # known before, or not
        options = self._options
        is_given = options.rank is not None or options.world_size is not None
        if is_given or not jax.distributed.is_initialized():
            return options.rank_info
        return options.rank_info_of(jax.process_index(), jax.process_count())

    def _world_size(self) -> int:
        found = self._rank_info(begins=False)
        return 1 if found is None else found.world_size

    def _require_fit(self) -> None:
        """Raises: ValueError: the sharding does not divide the batches of this loader."""
        options, schema, ranks = self._options, self._store.settings.schema, self._world_size()
        is_shared, require_fit = self._placement.is_shared, self._placement.require_fit
        if is_shared and ranks == 1:
            raise ValueError(
                "the sharding has devices of other processes, and this loader has no rank: initialize "
                "jax.distributed, or pass rank=jax.process_index() and world_size=jax.process_count()"
            )
        rows = options.batch_size or 1  # batches of batch_tokens may have any number
        require_fit(schema, options.names, rows * (ranks if is_shared else 1))
        if not options.drop_last and ranks == 1:  # several get whole batches
            require_fit(schema, options.names, 1)

    def _hand_out(self, stream: BatchStream) -> Batches:
        ahead = AheadIterator(stream, self._options.timeout, self._finish)
        self._ahead = weakref.ref(ahead)
        return ahead

    def _finish(self, batch: Batch) -> Batch:
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"the transform returned {type(batch).__name__}, not a dict of columns: return one, or use "
                "arrowcache.Loader, which passes on whatever it is"
            )
        return self._placement.put(batch, self._store.settings.schema, self._world_size())


class AheadIterator(EpochIterator):
    """A consumer's iterator whose next batch is on its way to the device while this one is used.

    `finish` puts a batch on the device, and does not wait for it.
    """

    _taken: ReadyBatch | None = None  # the batch ahead
    _placed: Batch | None = None  # on its device; None if that failed, so that its step tries again

    def take(self) -> tuple[ReadyBatch | None, Batch]:
        source, taken, placed = self._source, self._taken, self._placed
        self.forget()
        if taken is None:
            taken = source.next(self._timeout_seconds)
        if taken is None:
            return None, {}
        placed = self._finish(taken.batch) if placed is None else placed
        self._look_ahead(source)
        return taken, placed

    def _look_ahead(self, source: BatchSource) -> None:
        """Take the batch behind, if it is made, and put it on the device; an error waits for its step."""
        assert isinstance(source, BatchStream)
        if not source.is_ready() or not source.ready:  # none, the end, or an error
            return
        taken = source.next(self._timeout_seconds)
        if taken is None:  # it has ended meanwhile
            return
        try:
            placed = self._finish(taken.batch)
        except Exception:  # noqa: BLE001  # such as no memory on the device
            self._taken = taken
        else:
            self._taken, self._placed = taken._replace(batch={}), placed

    def forget(self) -> None:
        """Drop the batch ahead, as when the loader is closed."""
        self._taken = self._placed = None
