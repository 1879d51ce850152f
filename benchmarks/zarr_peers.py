"""Epochs of insitubatch and xbatcher over a Zarr array behind S3, as their documents say.

Run by benchmarks/reads.py with a Python of 3.12 or newer that has both: the seconds to the first batch, and
MB/s of two epochs. It imports nothing of arrowcache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

BATCH_ROWS = 64


OPTIONS: dict[str, Any] = {
    "region": "us-east-1", "access_key_id": "k", "secret_access_key": "s",
    "client_options": {"allow_http": True}, "virtual_hosted_style_request": False,
}  # fmt: skip
Epoch = Callable[[], Iterable[int]]
"""Gives the bytes of each batch."""


def insitubatch(endpoint: str, path: str) -> Epoch:
    """Shuffled batches."""
    from insitubatch import InSituDataset, obstore_store, open_geometries, split_by_chunk

    store = obstore_store(f"s3://{path}", endpoint=endpoint, **OPTIONS)
    geometries = open_geometries(store, variables=["x"])
    manifest = split_by_chunk(geometries["x"], fractions=(1.0, 0.0, 0.0))
    dataset = InSituDataset(store, manifest, geometries=geometries, batch_size=BATCH_ROWS)
    return lambda: (batch.arrays["x"].nbytes for batch in dataset.train)


def xbatcher(endpoint: str, path: str) -> Epoch:
    """Batches in the order of the array."""
    import xarray as xr
    from obstore.store import S3Store
    from xbatcher import BatchGenerator
    from zarr.storage import ObjectStore

    bucket, _, prefix = path.partition("/")
    store = S3Store(bucket, prefix=prefix, endpoint=endpoint, **OPTIONS)
    data = xr.open_zarr(ObjectStore(store, read_only=True), chunks=None)["x"]
    dims = {data.dims[0]: BATCH_ROWS, data.dims[1]: data.shape[1]}
    return lambda: (batch.to_numpy().nbytes for batch in BatchGenerator(data, input_dims=dims))


def measured(peer: str, endpoint: str, path: str) -> dict[str, float]:
    began = time.perf_counter()
    epoch = {"insitubatch": insitubatch, "xbatcher": xbatcher}[peer](endpoint, path)
    first, rates = 0.0, []
    for _ in range(2):
        nbytes, since = 0, time.perf_counter() if first else began
        for each in epoch():
            first = first or time.perf_counter() - began
            nbytes += each
        rates.append(nbytes / (time.perf_counter() - since) / 1e6)
    return {"first batch, s": first, "cold, MB/s": rates[0], "second epoch, MB/s": rates[1]}
