"""What the extra "sources" is for: windows of arrays in Zarr and HDF5, in any store of fsspec, too."""

import sys
import tempfile
from pathlib import Path

import fsspec
import h5py
import numpy as np

from arrowcache.sampling.sources import ArrayWindows

if __name__ == "__main__":
    numbers = np.arange(1000.0, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        with h5py.File(Path(folder, "numbers.h5"), "w") as file:
            file["x"] = numbers
        uris = [f"{folder}/numbers.h5#x"]
        if sys.version_info >= (3, 11):  # as zarr asks
            import zarr

            zarr.save_array(f"{folder}/numbers.zarr", numbers)
            uris.append(f"{folder}/numbers.zarr")
        for uri in uris:
            for filesystem in (None, fsspec.filesystem("file")):
                source = ArrayWindows(uri, window=(16,), filesystem=filesystem)
                row = next(iter(source(np.random.default_rng(0))))
                window = np.asarray(row["data"])
                assert window.shape == (16,), window.shape
                assert (np.diff(window) == 1).all(), window
