"""Delivery: an epoch of a loader, handed over on a device.

Batches are taken of the epoch ahead, as far as they are ready; they count as delivered here, when the
consumer gets them. What is still on its way when an epoch ends is dropped, and was never delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arrowcache.reading.assembly import Batch
from arrowcache.reading.portion import Made
from arrowcache.reading.stream import Stream
from arrowcache.torch.device import DevicePrefetcher, PrefetchIterator


class DeviceEpoch:
    """The batches of one epoch, or of all that follow, on a device. Dropping it ends the epoch.

    Args:
        epoch: what makes them.
        prefetcher: what brings them there.
        timeout_seconds: how long a step waits for a batch to be made; None: for ever.
        finish: makes tensors of a batch.
    """

    _batches: PrefetchIterator | None = None  # until the prefetcher has begun

    def __init__(
        self,
        epoch: Stream,
        prefetcher: DevicePrefetcher,
        timeout_seconds: float | None,
        finish: Callable[[Batch], Batch],
    ) -> None:
        self._epoch = epoch
        self._finish = finish  # of the loader, which so lives as long as this
        try:
            self._batches = prefetcher.over(_Undelivered(epoch, timeout_seconds, finish))
        except BaseException:
            epoch.close()
            raise

    def __iter__(self) -> DeviceEpoch:
        return self

    def __next__(self) -> Batch:
        """The next batch, on the device.

        Blocks: until it is made, at most the loader's timeout, and its copy was begun.
        Raises: as the iterator of a loader without a device; RuntimeError: a graph is captured, or another
            thread takes a batch: the epoch goes on then.
        """
        assert self._batches is not None
        try:
            batch, receipt = next(self._batches)
        except StopIteration:
            self._epoch.deliver(None)
            raise
        except BaseException:
            if self._batches.has_ended:  # else the call was refused
                self._epoch.fail()
            raise
        try:
            self._epoch.deliver(receipt.made)
        except BaseException:
            self._batches.close()
            raise
        return batch  # type: ignore[no-any-return]  # as `finish` made it

    def close(self) -> None:
        """End the epoch: its batches are dropped, its snapshot is let go. Idempotent."""
        try:
            self._epoch.close()
        finally:
            if self._batches is not None:
                self._batches.close()

    def __del__(self) -> None:
        if (epoch := getattr(self, "_epoch", None)) is not None:  # else the constructor failed
            epoch.has_stopped = True  # nobody is left who could be told of its end
            self.close()


class _Receipt:
    """What is counted at the delivery of a batch; no structure that a prefetcher would look into."""

    __slots__ = ("made",)

    def __init__(self, made: Made) -> None:
        self.made = made._replace(batch={})


class _Undelivered:
    """An epoch's batches, not counted, each with its receipt: a source."""

    def __init__(
        self, epoch: Stream, timeout_seconds: float | None, finish: Callable[[Batch], Batch]
    ) -> None:
        self._epoch, self._timeout_seconds, self._finish = epoch, timeout_seconds, finish

    def next(self) -> tuple[Batch, _Receipt]:
        with self._epoch.waiting():
            made: Any = self._epoch.take(self._timeout_seconds)
        if made is None:
            raise StopIteration
        return self._finish(made.batch), _Receipt(made)

    def is_ready(self) -> bool:
        return self._epoch.is_ready()

    def close(self) -> None:
        self._epoch.close()
