"""Sources: ready samplers for common formats, each reading only the data that it samples.

    ParquetRows         random rows of a Parquet dataset
    ArrayWindows        random windows of Zarr, HDF5 and .npy arrays
    WebDatasetShards    samples of WebDataset's tar files, shard after shard
    Items               each item of a map-style dataset, once a pass
    Mix, Map            several sources by weight; a function of each sample

on any store: local paths, s3://, gs://, hdfs://, abfs://, or a filesystem= of pyarrow.fs or fsspec.

Not here: `TFRecordFiles`, which is in `arrowcache.tensorflow`, as TensorFlow does the framing and
the examples. Shards of MosaicML's StreamingDataset (MDS): its reader does not install beside the pyarrow and
NumPy that this package needs.

Each is imported with its first use: so a worker process imports no more than the sources of its sampler.
"""

from typing import TYPE_CHECKING

from arrowcache.os_errors import importing

if TYPE_CHECKING:
    from arrowcache.sampling.retries import Retries
    from arrowcache.sampling.sources.items import Items
    from arrowcache.sampling.sources.parquet import ParquetRows
    from arrowcache.sampling.sources.shards import WebDatasetShards, decode_by_name
    from arrowcache.sampling.sources.source import Map, Mix, Source
    from arrowcache.sampling.sources.windows import ArrayWindows
else:  # a type checker that saw this would take any name for one of ours

    def __getattr__(name: str) -> object:
        with importing():
            value = globals()[name] = _imported(name)
        return value

    def _imported(name: str) -> object:
        match name:
            case "Retries":
                from arrowcache.sampling import retries as home
            case "Items":
                from arrowcache.sampling.sources import items as home
            case "ParquetRows":
                from arrowcache.sampling.sources import parquet as home
            case "WebDatasetShards" | "decode_by_name":
                from arrowcache.sampling.sources import shards as home
            case "Map" | "Mix" | "Source":
                from arrowcache.sampling.sources import source as home
            case "ArrayWindows":
                from arrowcache.sampling.sources import windows as home
            case _:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(home, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "ArrayWindows",
    "Items",
    "Map",
    "Mix",
    "ParquetRows",
    "Retries",
    "Source",
    "WebDatasetShards",
    "decode_by_name",
]
