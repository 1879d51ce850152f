"""Arguments: a face takes those of its signature, and refuses each other by name, with what to use here.

People know the names of other libraries: DataLoader's `num_workers`, tf.data's `drop_remainder`. A refusal
says what such a name is called here, or which part of the library takes it; else it shows the nearest names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any, TypeVar

from arrowcache.units import did_you_mean

Face = TypeVar("Face", bound=Callable[..., Any])

_SAME = (
    ("workers", "num_workers", "worker_count", "n_workers", "nworkers", "num_threads", "num_parallel_calls"),
    ("prefetch", "prefetch_factor", "worker_buffer_size", "prefetch_batches", "queue_size"),
    ("drop_last", "drop_remainder"),
    ("seed", "generator", "random_state", "shuffle_seed", "rng", "base_seed"),
    ("transform", "transforms", "collate_fn", "map_fn", "batch_transform", "preprocess"),
    ("cache", "source", "train", "dataset", "data_source", "caches", "iterable"),
    ("batch_size", "batch", "bs", "per_device_train_batch_size"),
    ("world_size", "num_replicas", "num_shards", "shard_count", "num_processes", "num_input_pipelines"),
    ("rank", "shard_index", "process_index", "process_id", "local_rank", "input_pipeline_id"),
    ("epoch_rows", "num_samples", "samples_per_epoch", "epoch_size", "epoch_length", "steps_per_epoch"),
    ("weights", "sample_weights"),
    ("window_bytes", "buffer_size", "shuffle_buffer", "shuffle_buffer_size"),
    ("device", "pin_memory", "pin_memory_device"),
    ("where", "filter", "predicate"),
    ("columns", "fields", "output_columns", "keys"),
    ("capacity", "capacity_bytes", "max_size", "size_limit", "max_cache_size", "limit"),
    ("path", "cache_dir", "local_dir", "root", "folder", "directory"),
    ("depth", "prefetch", "prefetch_factor"),
    ("segment_bytes", "chunk_bytes", "shard_size", "max_shard_size"),
    ("segment_rows", "chunk_size", "rows_per_segment"),
    ("worker_type", "multiprocessing_context"),
)
"""Names of one thing, in several libraries. A refusal names the first that the face has."""


def instead(*names: str, say: str) -> dict[str, str]:
    """Return what a face says to each of some names."""
    return dict.fromkeys(names, say)


#: What faces say that make epochs, and no batches one by one.
OF_ONCE = instead(
    "once",
    "acknowledge",
    say="arrowcache.Loader(cache, once=...), or that of torch or jax, has each row once",
)
OF_DATALOADER = {
    **instead("sampler", "batch_sampler", say="rows= and where= choose the rows, and shuffle= their order"),
    **instead("persistent_workers", say="workers live on between epochs, so leave it out"),
    **instead("worker_init_fn", say="have transform= set up what it needs, at its first call in a process"),
    **instead("in_order", "deterministic", say="batches come in the order of seed=, always, so leave it out"),
    **instead("reshuffle_each_iteration", say="each `for` has another order, so leave it out"),
    **instead("repeat", "epochs", "num_epochs", say="each `for` is an epoch; repeat() has no end"),
    **instead(
        "replacement", "replace", say="weights= draws rows with replacement; without it each comes once"
    ),
}
"""Answers of loaders to arguments of DataLoader, and of others, that they have under no other name."""


def face(
    name: str,
    instead: Mapping[str, str] | None = None,
    passed: Sequence[Parameter] = (),
    others: Sequence[str] = (),
    same: Mapping[str, str] | None = None,
) -> Callable[[Face], Face]:
    """Decorate a function, a constructor or a class: what it does not take is refused, and nothing is done.

    Args:
        name: of the face, in messages, such as "packed()".
        instead: what to do instead of giving arguments of some names.
        passed: parameters that it passes on, in place of its `**options`: its signature shows each.
        others: names that it takes, and does not show.
        same: other names of some of its arguments, which it takes, too.
    Raises of the decorated: TypeError: an argument of another name, or too many by position.
    """

    def decorate(face: Face) -> Face:
        made: Any = face.__init__ if isinstance(face, type) else face  # type: ignore[misc]  # a function
        own = [*inspect.signature(made).parameters.values()]
        by_place = [each for each in own if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
        by_name = [each for each in own if each.kind is Parameter.KEYWORD_ONLY]
        signature = inspect.Signature([*by_place, *passed, *by_name])
        places = [each.name for each in by_place if each.name not in ("self", "cls")]
        first = len(by_place) - len(places)
        known = [*dict.fromkeys([*places, *(each.name for each in (*passed, *by_name)), *others])]

        @functools.wraps(made)
        def checked(*given: Any, **named: Any) -> Any:
            named = {(same or {}).get(each, each): value for each, value in named.items()}
            for each in named:
                if each not in known:
                    raise TypeError(_refusal(name, each, known, instead or {}))
            if len(given) - first > len(places):
                raise TypeError(_too_many(name, len(given) - first, places, known))
            return made(*given, **named)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        if isinstance(face, type):
            face.__init__ = checked  # type: ignore[misc]
            return face
        return checked  # type: ignore[return-value]

    return decorate


def _refusal(face: str, name: str, known: Sequence[str], instead: Mapping[str, str]) -> str:
    same = [names for names in _SAME if name in names and {*names} & {*known}]
    if name in instead:
        way = instead[name]
    elif same:
        way = f"use {next(other for other in same[0] if other in known)}="
    elif near := did_you_mean(name, known, "{}=".format):
        way = near.rstrip()
    else:
        way = f"it takes {', '.join(known)}"
    return f"{face} has no argument {name!r}: {way}"


def _too_many(face: str, count: int, places: Sequence[str], known: Sequence[str]) -> str:
    takes = f"{' and '.join(places)} by position" if places else "nothing by position"
    others = [name for name in known if name not in places]
    way = f"; write others by name, such as {others[0]}=..." if others else ""
    return f"{face} takes {takes}, and {count} were given{way}"
