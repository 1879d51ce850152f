"""arrowcache: a rolling local cache of Arrow segments for training data that lives far away.

General layout, from top to bottom; an import only points down:

    __main__.py              `python -m arrowcache`
    cli/, explore/           look into a cache: the `arrowcache` command; observations, monitors, plots
    demo.py                  a first look: a sampler, a loader and a model that learns
    torch/, tensorflow/,     batches as tensors and arrays (each imports its framework: `import
    jax/                     arrowcache.torch`)
    ray/                     samplers all over a cluster (imports ray: `import arrowcache.ray`)
    cache.py                 the public Cache
    read_through/            items of a dataset, made once, published for all
    sampling/                samplers: user code that draws samples, on any executor
    reading/                 snapshots, orders, mapped segments, loaders: one pass over what is there
    storage/                 the folder: publish, evict, lease, recover
    arrow/                   schema <-> columns, segment <-> file
    native/                  the engine: a library in C whose threads copy rows and read them from the disk
    process.py, pickling.py  one group of worker processes, and what they are sent
    lifetimes.py             how things end: forks, finalizers, the exit, Ctrl-C
    arguments.py             what a face takes, and what it says to other names
    display.py               how values show themselves, as text and as HTML
    progress.py              a bar on stderr, which may be gone
    os_errors.py, errors.py  advice where the kernel refuses; the exception tree
    proc.py, linux.py        other processes and the memory there is; the kernel's calls
    units.py, limits.py      sizes, times and counts as people write them, and as they are bounded

sampling and reading meet in storage and nowhere else.

`import arrowcache` imports none of these: each public name is imported with its first use (PEP 562).
"""

import sys


def _require_linux(platform: str) -> None:
    if platform != "linux":
        raise ImportError(
            f"arrowcache needs Linux, and this is {platform}: it rests on the kernel's open-file-description "
            "locks, memory maps and /proc; use it in a container, a virtual machine or WSL"
        )


_require_linux(sys.platform)

from typing import TYPE_CHECKING  # noqa: E402  # nothing is touched before the line above

if TYPE_CHECKING:
    from arrowcache.arrow.schema import Binary, Ragged, Schema, String, Tensor, Timestamp
    from arrowcache.cache import Cache
    from arrowcache.errors import (
        ArrowCacheError,
        CacheFormatError,
        CacheFrozenError,
        CacheFullError,
        CorruptSegmentError,
        LoaderTimeoutError,
        LockTimeoutError,
        MissingSegmentsError,
        SamplerError,
        SchemaError,
        WorkerError,
    )
    from arrowcache.explore.metrics import metrics
    from arrowcache.reading.columns import Values
    from arrowcache.reading.loader import Loader
    from arrowcache.reading.snapshot import Snapshot
    from arrowcache.reading.stats import LoaderStats
    from arrowcache.sampling.pool import PoolStats, SamplerPool
    from arrowcache.sampling.reads import Rows
    from arrowcache.storage.layout import SegmentInfo
    from arrowcache.storage.overview import CacheStats
    from arrowcache.storage.pace import Pace
    from arrowcache.storage.row_ids import RowId
    from arrowcache.storage.verification import Problem
    from arrowcache.storage.writer import Writer
else:  # a type checker that saw this would take any name for one of ours

    def __getattr__(name: str) -> object:
        """Import a public name; it is a plain attribute from then on."""
        try:
            value = globals()[name] = _imported(name)
        except OSError as error:  # no file can be opened
            from arrowcache.os_errors import explained

            raise explained(error) from error
        return value

    def _imported(name: str) -> object:
        match name:
            case "Binary" | "Ragged" | "Schema" | "String" | "Tensor" | "Timestamp":
                from arrowcache.arrow import schema as home
            case "Cache":
                from arrowcache import cache as home
            case _ if name.endswith("Error") and name in __all__:
                from arrowcache import errors as home
            case "Loader":
                from arrowcache.reading import loader as home
            case "Snapshot":
                from arrowcache.reading import snapshot as home
            case "LoaderStats":
                from arrowcache.reading import stats as home
            case "Values":
                from arrowcache.reading import columns as home
            case "PoolStats" | "SamplerPool":
                from arrowcache.sampling import pool as home
            case "RowId":
                from arrowcache.storage import row_ids as home
            case "Rows":
                from arrowcache.sampling import reads as home
            case "SegmentInfo":
                from arrowcache.storage import layout as home
            case "CacheStats":
                from arrowcache.storage import overview as home
            case "Pace":
                from arrowcache.storage import pace as home
            case "metrics":
                from arrowcache.explore import metrics as home
            case "Problem":
                from arrowcache.storage import verification as home
            case "Writer":
                from arrowcache.storage import writer as home
            case _:
                fact = f"module {__name__!r} has no attribute {name!r}"
                raise AttributeError(fact, name=name, obj=sys.modules[__name__])
        return getattr(home, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "sys"})


__version__ = "0.2.0.dev0"

__all__ = [
    "ArrowCacheError",
    "Binary",
    "Cache",
    "CacheFormatError",
    "CacheFrozenError",
    "CacheFullError",
    "CacheStats",
    "CorruptSegmentError",
    "Loader",
    "LoaderStats",
    "LoaderTimeoutError",
    "LockTimeoutError",
    "MissingSegmentsError",
    "Pace",
    "PoolStats",
    "Problem",
    "Ragged",
    "RowId",
    "Rows",
    "SamplerError",
    "SamplerPool",
    "Schema",
    "SchemaError",
    "SegmentInfo",
    "Snapshot",
    "String",
    "Tensor",
    "Timestamp",
    "Values",
    "WorkerError",
    "Writer",
    "metrics",
]
