"""arrowcache: a rolling local cache of Arrow segments for training data that lives far away.

General layout, from top to bottom; an import only points down:

    cache.py                 the public Cache
    torch/                   batches as PyTorch tensors (imports torch: `import arrowcache.torch`)
    ray/                     samplers all over a cluster (imports ray: `import arrowcache.ray`)
    sampling/                samplers: user code that draws samples, on any executor
    reading/                 snapshots, orders, the arena, loaders: one pass over what is there
    storage/                 the folder: publish, evict, lease, recover
    arrow/                   schema <-> columns, segment <-> file
    errors.py, units.py      the exception tree; sizes in bytes
    html.py, text.py         what displays are made of

sampling and reading meet in storage and nowhere else.
"""

from arrowcache.arrow.schema import Binary, Ragged, Schema, String, Tensor, Timestamp
from arrowcache.cache import Cache
from arrowcache.errors import (
    ArrowCacheError,
    CacheFormatError,
    CacheFullError,
    CorruptSegmentError,
    LoaderTimeoutError,
    LockTimeoutError,
    MissingSegmentsError,
    SamplerError,
    SchemaError,
    WorkerError,
)
from arrowcache.reading.loader import Loader
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import LoaderStats
from arrowcache.reading.values import Values
from arrowcache.sampling.pool import PoolStats, SamplerPool
from arrowcache.sampling.rows import Rows
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.overview import CacheStats
from arrowcache.storage.pace import Pace
from arrowcache.storage.verification import Problem
from arrowcache.storage.writer import Writer

__version__ = "0.1.0"

__all__ = [
    "ArrowCacheError",
    "Binary",
    "Cache",
    "CacheFormatError",
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
]
