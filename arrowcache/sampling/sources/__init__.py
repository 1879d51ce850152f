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
"""

from arrowcache.sampling.retries import Retries
from arrowcache.sampling.sources.items import Items
from arrowcache.sampling.sources.map import Map
from arrowcache.sampling.sources.mix import Mix
from arrowcache.sampling.sources.parquet import ParquetRows
from arrowcache.sampling.sources.shards import WebDatasetShards, decode_by_name
from arrowcache.sampling.sources.source import Source
from arrowcache.sampling.sources.windows import ArrayWindows

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
