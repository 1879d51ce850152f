"""Packed loader: documents of a cache as batches of sequences of one length, in tensors."""

from __future__ import annotations

import os
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from arrowcache.arguments import OF_DATALOADER, OF_ONCE, instead
from arrowcache.reading.loader import Loader as NumpyLoader
from arrowcache.reading.options import LoaderOptions, PackedArguments, takes
from arrowcache.reading.packing import Packing
from arrowcache.reading.sequences import SequenceAssembly
from arrowcache.storage.recovery import HasStore, store_of
from arrowcache.storage.store import Store
from arrowcache.torch.device import Device
from arrowcache.torch.loader import CachedLoader, Loader

if TYPE_CHECKING:
    from typing import Unpack

_DEFAULTS = {name: each.default for name, each in signature(LoaderOptions).parameters.items()}
_SHUFFLES = ("rows", "window", None)
_STORE_IT = "packed() makes no batches of rows: store what a transform makes, and give packed() that column"
_ONCE = "each document comes once; choose documents by rows= or where="
_INSTEAD = {
    **OF_ONCE,
    **OF_DATALOADER,
    **instead("transform", "collate_fn", say=_STORE_IT),
    **instead("columns", say="its documents are those of one column: column="),
    **instead("drop_last", "drop_remainder", say="the last sequence has padding, and is never dropped"),
    **instead(
        "workers",
        "num_workers",
        "worker_type",
        "multiprocessing_context",
        "persistent_workers",
        "worker_init_fn",
        say="native threads put sequences together: leave it out",
    ),
    **instead("with_ids", say="a sequence has parts of several rows, which document_ids tells apart"),
    **instead("weights", say=_ONCE),
    **instead("batch_tokens", "length_of", say="a batch has batch_size * length tokens"),
    **instead(
        "max_length", "max_seq_length", "max_seqlen", "seq_length", "sequence_length", say="use length="
    ),
    **instead("pin_memory", say="device='cuda' copies from pinned memory; without a device leave it out"),
}


class PackedLoader(Loader):
    """Batches of sequences, as of `packed`, which makes it: each `for` is an epoch over a new snapshot.

    `repeat`, `state_dict`, `load_state_dict`, `stats`, `close` and errors are those of
    `arrowcache.torch.Loader`; `stats` counts sequences as rows.
    """

    _may_yield_views = False
    _face = "packed(...)"
    _as_dataset = (
        "Code that wants a DataLoader gets DataLoader(it, batch_size=None) over an IterableDataset whose "
        "`__iter__` returns iter(loader); Hugging Face's Trainer takes that from its get_train_dataloader(), "
        "with max_steps"
    )

    def __init__(self, cache: HasStore | str | os.PathLike[str], packing: Packing, **options: Any) -> None:
        self._packing = packing
        super().__init__(cache, 1, columns=(packing.column,), drop_last=False, **options)

    @property
    def steps(self) -> int | None:
        """Batches of the epoch in progress, or of the last one, the same on all ranks; None before the first.

        With split=True it is known as the epoch begins. With split=False or `epoch_rows`, or where documents
        of a resumed epoch have left the cache, it is None until the last documents are packed.
        """
        progress = self._epochs.progress
        return None if progress is None else progress.steps

    def assert_zero_copy(self) -> None:
        """Raises: ValueError: sequences are put together, which copies."""
        raise ValueError("packed() puts sequences together, which copies their tokens: nothing can be a view")

    def __repr__(self) -> str:
        packing = self._packing
        assert packing is not None
        return (
            f"<PackedLoader of {self._store.folder.path}: column {packing.column!r}, "
            f"length={packing.length}, batch_size={packing.batch_size}, split={packing.split}, "
            f"epoch {self._epochs.next_number}>"
        )

    def _new_assembly(self) -> SequenceAssembly:
        return SequenceAssembly(self._store, self._options, self._meter, self._memory())


@takes("packed()", PackedArguments, _INSTEAD)
def packed(
    source: NumpyLoader | HasStore | str | os.PathLike[str],
    column: str,
    length: int,
    *,
    batch_size: int,
    seed: int | None = None,
    split: bool = True,
    device: Device | None = None,
    **options: Unpack[PackedArguments],
) -> PackedLoader:
    """Return batches of sequences of `length` tokens, made of the documents of a column.

    Each `for` over the result is an epoch over a new snapshot, in another order of its documents. A batch is
    a dict of tensors of shape (batch_size, length), and one of boundaries:

    - `column`: the tokens, of the column's dtype; 0 where there is padding.
    - "position_ids": int64, the place of each token in its document.
    - "document_ids": int32, the number of each token's document in its sequence; -1 in padding. A mask of
      FlexAttention is `document_ids[b, q] == document_ids[b, k]`.
    - "loss_mask": bool, False in padding.
    - "cu_seqlens": (documents + 1,) int32, where each document begins in the flattened batch, and its end.
      `flash_attn_varlen_func` takes it, with `max_seqlen=length`.

    A part of a document that is cut counts as a document, and so does the padding of a sequence in
    "position_ids" and "cu_seqlens".

    Args:
        source: a Cache, the path of one, or a Loader: its cache, and its options where none are given here,
            but for columns and batch_size, which are said here. An option of it that sequences cannot have,
            such as workers, is an error.
        column: name of a Ragged column of numbers, such as `Ragged("int32")`. A row is a document.
        length: tokens of a sequence.
        batch_size: sequences of a batch, of one rank.
        seed: selects the order of the documents, together with the epoch's number and the segments. None
            means that of the Loader, else 0.
        split: True: documents are joined and cut where a sequence ends. No token is lost, and only the last
            sequence of an epoch has padding. False: documents stay whole, and each goes where it leaves the
            least padding (best-fit decreasing, over some thousand documents at a time): less than 1 % at
            2,048 tokens, if documents have lengths as texts have. A longer document is cut into whole
            sequences and a rest.
        device: device of the tensors, as of `arrowcache.torch.Loader`.
        shuffle: order of the documents: "rows", "window" or None, as of `Loader`. Sequences of some thousand
            documents are shuffled among themselves in any case.
        prefetch: number of batches begun ahead.
        where: SegmentInfo -> bool, True for segments to read.
        rank: rank of this process. None means that of torch.distributed, if it is initialized when an epoch
            begins, else a single process. All ranks have equally many steps and, but for the last step,
            sequences: those of the last are dealt out evenly, and the rest of its batches is padding. Ranks
            of several nodes, each with a cache of its own, may have other numbers of steps: train by
            `repeat()` there, for as many steps as you choose.
        world_size: number of ranks. None with `rank`.
        run_id: name of the job whose ranks agree on snapshots.
        epoch_rows: documents of an epoch. None means all.
        wait_rows: number of documents that must be published before an epoch begins.
        timeout: seconds that a step waits for its batch, and an epoch for documents.
        window_bytes: size of the window of shuffle="window".
        paced: keep the cache's pace, and count the documents served.

    A tensor that is kept is not overwritten. `state_dict()` of the result resumes to the token, on any number
    of ranks, with the same length and split; it has some thousand documents' lengths, some 20 kB. Documents
    whose segments have left the cache since are left out, with a warning; others stay in their sequences.
    Blocks: not here; an epoch as that of `arrowcache.torch.Loader`.
    Raises: ValueError, TypeError: an argument that does not fit. FileNotFoundError, CacheFormatError: no such
        cache.
    """
    chosen: dict[str, Any] = {**options}
    if isinstance(source, NumpyLoader) and not isinstance(source, CachedLoader):
        chosen, device = _options_of(source) | chosen, device or _device_of(source)
        source = _Opened(source._store)
    cache = store_of(source)  # type: ignore[arg-type]  # which refuses a CachedLoader
    if chosen.get("shuffle", "rows") not in _SHUFFLES:
        raise ValueError(
            f"shuffle={chosen['shuffle']!r} is unknown, or of no use to documents, which are taken one by "
            f"one: use one of {_SHUFFLES}"
        )
    if chosen.get("shuffle") != "window" and "window_bytes" not in options:
        chosen.pop("window_bytes", None)  # of a loader with another shuffle
    packing = Packing.of(cache.settings.schema, column, length, batch_size, split)
    if seed is not None:
        chosen["seed"] = seed
    return PackedLoader(_Opened(cache), packing, device=device, **chosen)


class _Opened(NamedTuple):
    """A cache that is open."""

    store: Store


def _options_of(loader: NumpyLoader) -> dict[str, Any]:
    """Return the options of a loader that those of `packed` are. Raises: ValueError: another one matters."""
    if isinstance(loader, PackedLoader):
        raise TypeError(
            "this loader is what packed() returned, and has no documents to pack: give packed() the cache, "
            "or the Loader that this one was made of"
        )
    if loader._face != NumpyLoader._face and not isinstance(loader, Loader):
        raise TypeError(
            f"{loader._face} has its arrays where its framework does, and packed() makes tensors of torch: "
            "give packed() the cache"
        )
    options = loader._options
    if options.transform is not None:
        raise ValueError(
            "the Loader has a transform, which is applied to batches of rows, and packed() makes none: give "
            "packed() the cache, and store what the transform makes"
        )
    for name in ("weights", "batch_tokens", "with_ids", "drop_last", "workers", "worker_type"):
        if getattr(options, name) != _DEFAULTS[name]:
            raise ValueError(
                f"the Loader has {name}=, which packed() cannot have: {_INSTEAD[name]}. Give packed() a "
                "Loader without it, or the cache"
            )
    return {name: getattr(options, name) for name in ("seed", *PackedArguments.__annotations__)}


def _device_of(loader: NumpyLoader) -> Device | None:
    prefetcher = loader._prefetcher if isinstance(loader, Loader) else None
    return None if prefetcher is None else prefetcher.devices[0]
