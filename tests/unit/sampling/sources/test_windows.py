"""ArrayWindows: every place equally likely, arrays cut at the same place, in every format alike."""

from __future__ import annotations

import base64
import gzip
import json
import struct
import sys
import time
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import pytest
from drawing import planned, require_pure, take
from processes import Script
from pyarrow import fs
from quick import first_is_quick

import arrowcache as ac
from arrowcache.errors import SamplerError, SchemaError
from arrowcache.sampling.sources import ArrayWindows

FORMATS = ["npy", "h5", "zarr"]


def store(folder: Path, name: str, array: np.ndarray, kind: str) -> str:
    """Write an array in one of the formats; returns how it is named."""
    if kind == "npy":
        np.save(folder / f"{name}.npy", array)
        return str(folder / f"{name}.npy")
    chunks = tuple(max(1, size // 3) for size in array.shape)
    if kind == "h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(folder / "all.h5", "a") as file:
            file.create_dataset(f"group/{name}", data=array, chunks=chunks, compression="gzip")
        return f"{folder / 'all.h5'}#group/{name}"
    zarr = pytest.importorskip("zarr", "3.0")
    zarr.create_array(f"{folder}/all.zarr/{name}", data=array, chunks=chunks)
    return f"{folder / 'all.zarr'}#{name}"


@pytest.fixture
def volume() -> np.ndarray:
    return np.random.default_rng(1).random((9, 12, 7)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_a_window_is_what_the_array_has_at_its_position(tmp_path, volume, kind):
    uri = store(tmp_path, "volume", volume, kind)
    with ArrayWindows(uri, (3, 5), with_position=True) as source:
        assert source.schema == ac.Schema(
            {
                "data": ac.Tensor("float32", (3, 5, 7)),
                "recording": ac.Tensor("int64"), "position": ac.Tensor("int64", (2,)),
            }
        )  # fmt: skip
        seen = set()
        for sample in take(source, 300):
            x, y = sample["position"]
            seen.add((int(x), int(y)))
            assert np.array_equal(sample["data"], volume[x : x + 3, y : y + 5])
            assert sample["data"].flags.writeable  # a copy of its own
        assert seen <= {(x, y) for x in range(7) for y in range(8)}
        assert len(seen) > 50


@pytest.mark.parametrize("kind", FORMATS)
def test_several_arrays_are_cut_at_the_same_place(tmp_path, kind):
    signal = np.arange(400, dtype=np.float64).reshape(200, 2)
    label = np.arange(200, dtype=np.int16) * 2
    arrays = {
        "signal": store(tmp_path, "signal", signal, kind),
        "label": store(tmp_path, "label", label, kind),
    }
    with ArrayWindows(arrays, {"signal": (16,), "label": (1,)}) as source:
        assert source.ramp, "each window is a read of its own"
        starts = set()
        for sample in take(source, 400):
            assert sample["label"].shape == (1,)
            starts.add(int(sample["label"][0]) // 2)
            assert sample["signal"][:, 0].tolist() == list(
                range(sample["label"][0], sample["label"][0] + 32, 2)
            )
    assert min(starts) < 10
    assert 175 < max(starts) <= 184


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_is_quick(FORMATS))
def test_a_task_is_a_function_of_the_source_the_seed_and_its_number(tmp_path, volume, kind):
    require_pure(ArrayWindows(store(tmp_path, "volume", volume, kind), (2, 2, 2), with_position=True))


def test_recordings_are_drawn_as_often_as_they_have_places_or_by_weight(tmp_path):
    long, short = (store(tmp_path, f"a{n}", np.full(n, n, np.int32), "npy") for n in (310, 110))
    for weights, share in ((None, 0.75), ([1, 3], 0.25), ([1e-9, 1], 0.0)):
        samples = take(ArrayWindows([long, short], (11,), weights=weights, with_position=True), 2000)
        assert {(int(s["recording"]), int(s["data"][0])) for s in samples} <= {(0, 310), (1, 110)}
        assert abs(np.mean([s["recording"] == 0 for s in samples]) - share) < 0.06


def test_every_place_is_equally_likely(tmp_path):
    uri = store(tmp_path, "x", np.arange(20), "npy")
    counts = np.bincount([int(s["data"][0]) for s in take(ArrayWindows(uri, (5,)), 8000)], minlength=16)
    assert len(counts) == 16
    assert np.abs(counts - 500).max() < 6 * np.sqrt(500)


def test_npy_in_fortran_order_and_of_another_byte_order(tmp_path, volume):
    for name, array in (("fortran", np.asfortranarray(volume)), ("swapped", volume.astype(">f4"))):
        np.save(tmp_path / f"{name}.npy", array)
        source = ArrayWindows(tmp_path / f"{name}.npy", (4, 4, 4), with_position=True)
        assert source.schema["data"] == ac.Tensor("float32", (4, 4, 4))
        for sample in take(source, 30):
            x, y, z = sample["position"]
            assert np.array_equal(sample["data"], volume[x : x + 4, y : y + 4, z : z + 4])


def test_a_window_as_large_as_the_array_is_the_array(tmp_path):
    array = np.arange(12).reshape(3, 4) > 5
    (sample,) = take(ArrayWindows(store(tmp_path, "x", array, "npy"), (3, 4)), 1)
    assert np.array_equal(sample["data"], array)


def test_chunks_of_zarr_that_were_never_written_hold_the_fill_value(tmp_path):
    zarr = pytest.importorskip("zarr", "3.0")
    array = zarr.create_array(tmp_path / "x.zarr", shape=(10,), chunks=(5,), dtype="int32", fill_value=7)
    array[:5] = 1
    with ArrayWindows(tmp_path / "x.zarr", (10,)) as source:
        assert take(source, 1)[0]["data"].tolist() == [1] * 5 + [7] * 5


# -- packed numbers ----------------------------------------------------------------------------------

NAN = float("nan")


def packed(folder: Path, kind: str, stored: np.ndarray, attributes: dict, name: str = "x") -> str:
    """An array with attributes, such as netCDF-4 and xarray write them."""
    uri = store(folder, name, stored, kind)
    path, _, inner = uri.partition("#")
    if kind == "h5":
        import h5py

        with h5py.File(path, "a") as file:
            for key, value in attributes.items():
                file[inner].attrs[key] = value
        return uri
    import zarr

    plain = {
        key: value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        for key, value in attributes.items()
    }
    zarr.open_array(f"{path}/{inner}", mode="r+").attrs.update(plain)
    return uri


#: what is stored, its attributes, the dtype and the numbers that CF has it stand for; where a file format has
#: its attributes in other types: of Zarr's JSON
PACKED = [
    (np.int16([0, 1, -1, 500]), {"scale_factor": 0.5, "add_offset": 270.0, "_FillValue": np.int16(-1)},
     "float64", [270.0, 270.5, NAN, 520.0]),
    (np.int16([0, 4, -1]), {"scale_factor": 0.25}, "float64", [0.0, 1.0, -0.25]),
    (np.int16([0, 4, -1]), {"add_offset": 10}, "float64", [10.0, 14.0, 9.0]),
    (np.uint8([0, 4, 255]), {"scale_factor": 2, "missing_value": np.uint8(255)}, "float64", [0.0, 8.0, NAN]),
    (np.uint8([0, 4, 255]), {"_FillValue": np.uint8(255)}, "float32", [0.0, 4.0, NAN]),
    (np.int32([1, 2**30 + 1, -1]), {"_FillValue": np.int32(-1)}, "float64", [1.0, 2.0**30 + 1, NAN]),
    (np.int64([1, 2, -1]), {"missing_value": np.int64([-1, 2])}, "float64", [1.0, NAN, NAN]),
    (np.int16([1, 2, 3]), {"missing_value": np.int16([2]), "_FillValue": np.int16(3)}, "float32",
     [1.0, NAN, NAN]),
    (np.int8([0, -1, -2]), {"_Unsigned": "true"}, "uint8", [0, 255, 254]),
    (np.int8([0, -1, -2]), {"_Unsigned": "true", "_FillValue": np.int8(-1)}, "float32", [0.0, NAN, 254.0]),
    (np.int8([0, -1, -2]), {"_Unsigned": "true", "_FillValue": np.int16(255), "scale_factor": 0.5}, "float64",
     [0.0, NAN, 127.0]),
    (np.uint8([0, 255, 128]), {"_Unsigned": "false", "_FillValue": np.uint8(255)}, "float32",
     [0.0, NAN, -128.0]),
    (np.int64([0, -1, -2]), {"_Unsigned": "true", "_FillValue": np.int64(-1)}, "float64",
     [0.0, NAN, 2.0**64]),
    (np.float32([1.5, -999.0, 2.5]), {"_FillValue": np.float32(-999.0)}, "float32", [1.5, NAN, 2.5]),
    (np.float32([1.5, 1e20, 2.5]), {"missing_value": 1e20}, "float32", [1.5, NAN, 2.5]),  # of a double
    (np.float64([1.5, -999.0]), {"scale_factor": 2.0, "_FillValue": -999.0}, "float64", [3.0, NAN]),
    (np.float16([1.5, -999.0]), {"_FillValue": np.float16(-999.0)}, "float16", [1.5, NAN]),
    (np.int8([0, 1, 1]), {"dtype": "bool"}, "bool", [False, True, True]),
]  # fmt: skip
AS_STORED = [
    (np.float32([1.5, NAN]), {"_FillValue": np.float32(NAN)}), (np.int16([1, 2]), {"_FillValue": NAN}),
    (np.int32([1, 2]), {"units": "days since 1900-01-01", "calendar": "standard"}),
    (np.uint8([0, 2]), {"flag_values": np.uint8([0, 2]), "flag_meanings": "land sea"}),
    (np.int16([1, 2]), {"valid_range": np.int16([2, 9]), "long_name": "height"}),
    (np.uint8([1, 255]), {"_Unsigned": "true"}), (np.float32([1.5, 2]), {"dtype": "bool"}),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["h5", "zarr"])
@pytest.mark.parametrize(("stored", "attributes", "dtype", "numbers"), PACKED)
def test_packed_numbers_are_what_cf_says_they_stand_for(tmp_path, kind, stored, attributes, dtype, numbers):
    uri = packed(tmp_path, kind, stored, attributes)
    with ArrayWindows(uri, (len(stored),)) as source:
        assert source.schema == ac.Schema({"data": ac.Tensor(dtype, (len(stored),))})
        found = take(source, 1)[0]["data"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, numbers)
    with ArrayWindows(uri, (len(stored),), decode=False) as source:
        assert source.schema["data"].dtype == stored.dtype.name
        np.testing.assert_array_equal(take(source, 1)[0]["data"], stored)


@pytest.mark.parametrize("kind", ["h5", "zarr"])
@pytest.mark.parametrize(("stored", "attributes"), AS_STORED)
def test_numbers_that_are_not_packed_are_as_they_are_stored(tmp_path, kind, stored, attributes):
    for decode in (True, False):
        with ArrayWindows(
            packed(tmp_path, kind, stored, attributes, f"x{decode}"), (2,), decode=decode
        ) as source:
            found = take(source, 1)[0]["data"]
        assert found.dtype == stored.dtype
        np.testing.assert_array_equal(found, stored)


@pytest.mark.parametrize(
    ("stored", "scale", "offset", "dtype"),
    [
        (np.int16, np.float32(0.5), np.float32(2), "float32"), (np.int16, np.float32(0.5), None, "float32"),
        (np.int16, np.float32(0.5), np.float64(2), "float64"), (np.int16, None, np.float32(2), "float64"),
        (np.int16, np.float64(0.5), np.float64(2), "float64"),
        (np.int32, np.float32(0.5), np.float32(2), "float64"),
        (np.int16, np.int16(2), np.int16(2), "float64"),
        (np.float32, np.float32(0.5), np.float32(2), "float32"),
        (np.dtype(">i2"), np.dtype(">f4").type(0.5), None, "float32"),
    ],
)  # fmt: skip
def test_the_dtype_of_unpacked_numbers_follows_the_attributes(tmp_path, stored, scale, offset, dtype):
    given = {"scale_factor": scale, "add_offset": offset}
    attributes = {key: value for key, value in given.items() if value is not None}
    with ArrayWindows(packed(tmp_path, "h5", np.arange(4).astype(stored), attributes), (4,)) as source:
        found = take(source, 1)[0]["data"]
    assert source.schema["data"].dtype == found.dtype.name == dtype
    expected = np.arange(4) * (1 if scale is None else float(scale)) + (
        0 if offset is None else float(offset)
    )
    assert found.tolist() == expected.tolist()


def in_base64(value: float) -> str:
    return base64.b64encode(struct.pack("<d", value)).decode()


@pytest.mark.parametrize("fill", [-999.0, 1e20, NAN])
@pytest.mark.parametrize("written", [in_base64, float, str])
def test_a_fill_value_of_floats_in_zarr_may_be_base64_as_xarray_writes_it(tmp_path, fill, written):
    uri = packed(tmp_path, "zarr", np.float32([1.5, fill]), {"_FillValue": written(fill)})
    with ArrayWindows(uri, (2,)) as source:
        found = take(source, 1)[0]["data"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [1.5, NAN])


def test_the_fill_value_of_cells_that_nobody_wrote_is_no_missing_one(tmp_path):
    zarr, h5py = pytest.importorskip("zarr", "3.0"), pytest.importorskip("h5py")
    array = zarr.create_array(tmp_path / "x.zarr", shape=(4,), chunks=(2,), dtype="int16", fill_value=7)
    array[:2] = 1
    array.attrs["scale_factor"] = 0.5
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("x", (4,), "int16", chunks=(2,), fillvalue=7)
        data[:2] = 1
        data.attrs["scale_factor"] = 0.5
    for uri in (tmp_path / "x.zarr", f"{tmp_path}/x.h5#x"):
        with ArrayWindows(uri, (4,)) as source:
            assert take(source, 1)[0]["data"].tolist() == [0.5, 0.5, 3.5, 3.5]


#: what is stored, the fill value of .zarray, attributes, and the dtype and the numbers that xarray has
OF_VERSION_2 = [
    (np.int16([0, 1, -999]), -999, {"scale_factor": 0.5}, "float64", [0.0, 0.5, NAN]),
    (np.int16([0, 1, -999]), -999, {}, "float32", [0.0, 1.0, NAN]),
    (np.uint8([0, 4, 255]), 255, {}, "float32", [0.0, 4.0, NAN]),
    (np.int8([0, -1, -2]), -1, {"_Unsigned": "true"}, "float32", [0.0, NAN, 254.0]),
    (np.float32([1.5, -999, NAN]), -999.0, {}, "float32", [1.5, NAN, NAN]),
    (np.int16([0, 1, -999]), -999, {"_FillValue": 1}, "float32", [0.0, 1.0, NAN]),
    (np.int16([0, 1, -999]), None, {}, "int16", [0, 1, -999]),
    (np.array([True, False]), False, {}, "bool", [True, False]),
]  # fmt: skip


@pytest.mark.parametrize(("stored", "fill", "attributes", "dtype", "numbers"), OF_VERSION_2)
def test_the_fill_value_of_zarr_v2_is_a_missing_one_where_xarray_wrote_it(
    tmp_path, stored, fill, attributes, dtype, numbers
):
    zarr = pytest.importorskip("zarr", "3.0")
    array = zarr.create_array(
        tmp_path / "x.zarr", shape=stored.shape, dtype=stored.dtype, fill_value=fill, zarr_format=2
    )
    array[:] = stored
    array.attrs.update(attributes)
    with ArrayWindows(tmp_path / "x.zarr", stored.shape) as source:
        is_missing = np.isnan(take(source, 1)[0]["data"])
    np.testing.assert_array_equal(is_missing, np.isnan(stored) | (stored == attributes.get("_FillValue")))
    array.attrs["_ARRAY_DIMENSIONS"] = ["x"]
    with ArrayWindows(tmp_path / "x.zarr", stored.shape) as source:
        found = take(source, 1)[0]["data"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, numbers)
    with ArrayWindows(tmp_path / "x.zarr", stored.shape, decode=False) as source:
        np.testing.assert_array_equal(take(source, 1)[0]["data"], stored)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_windows_of_a_packed_volume_are_unpacked_in_every_process(tmp_path, kind):
    stored = np.random.default_rng(2).integers(-100, 100, (9, 12, 7)).astype(np.int16)
    attributes = {"scale_factor": 0.5, "add_offset": 270.0, "_FillValue": np.int16(-7)}
    arrays = {
        "x": packed(tmp_path, kind, stored, attributes, "x"),
        "y": packed(tmp_path, kind, stored, {}, "y"),
    }
    expected = np.where(stored == -7, NAN, stored * 0.5 + 270.0)
    require_pure(source := ArrayWindows(arrays, (3, 5), with_position=True))
    assert {name: source.schema[name].dtype for name in "xy"} == {"x": "float64", "y": "int16"}
    with ac.Cache.create(tmp_path / "cache", source.schema, "8MiB", "64KiB") as cache:
        with ac.SamplerPool(cache, source, workers=2, segments=3, progress=False) as pool:
            pool.wait()
        with cache.snapshot() as snapshot:
            rows = snapshot.gather(np.arange(len(snapshot)))
    for x, y, (at, to) in zip(rows["x"], rows["y"], rows["position"], strict=True):
        np.testing.assert_array_equal(x, expected[at : at + 3, to : to + 5])
        np.testing.assert_array_equal(y, stored[at : at + 3, to : to + 5])


@pytest.mark.parametrize("kind", ["h5", "zarr"])
@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"scale_factor": "half"}, "scale_factor is 'half', which should be numbers"),
        ({"add_offset": np.array([1.0, 2.0])}, "add_offset is .*, which should be one real number"),
        ({"scale_factor": 1.0, "missing_value": "none"}, "missing_value is 'none'"),
        ({"_FillValue": "AAAA"}, "_FillValue is 'AAAA'"),
    ],
)
def test_an_attribute_that_cannot_be_used_is_an_error_that_names_it(tmp_path, kind, attributes, named):
    uri = packed(tmp_path, kind, np.int16([1, 2]), attributes)
    with pytest.raises(SchemaError, match=rf"all\.(h5|zarr)#.*: its attribute {named}.*decode=False"):
        ArrayWindows(uri, (2,))
    with ArrayWindows(uri, (2,), decode=False) as source:
        assert take(source, 1)[0]["data"].tolist() == [1, 2]


def test_recordings_that_are_packed_otherwise_are_told_apart(tmp_path):
    plain = packed(tmp_path, "h5", np.int16([1, 2]), {}, "plain")
    scaled = packed(tmp_path, "h5", np.int16([1, 2]), {"scale_factor": 0.5}, "scaled")
    with pytest.raises(SchemaError, match=r"scaled: field 'data' is .*float64.*int16.*plain"):
        ArrayWindows([plain, scaled], (2,))
    assert ArrayWindows([plain, scaled], (2,), decode=False).schema["data"].dtype == "int16"


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_a_window_larger_than_the_array_is_an_error_naming_array_axis_and_sizes(tmp_path, volume, kind):
    uri = store(tmp_path, "volume", volume, kind)
    with pytest.raises(ValueError, match=r"volume.*'data' is 13 long on axis 1, and the array 12"):
        ArrayWindows(uri, (3, 13))
    with pytest.raises(
        ValueError, match=r"window is of time, and the arrays are data: .*\{'data': \(6, 8, 8\)\}"
    ):
        ArrayWindows(uri, {"time": 3})
    with pytest.raises(ValueError, match=r"volume.*more axes than the array"):
        ArrayWindows(uri, (3, 3, 3, 3))


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_cannot_be_is_an_error_naming_it(tmp_path, weight):
    uri = store(tmp_path, "x", np.arange(10), "npy")
    with pytest.raises(ValueError, match=r"the weight of arrays\[1\]"):
        ArrayWindows([uri, uri], (3,), weights=[1, weight])


def test_arrays_that_do_not_fit_each_other_are_an_error_naming_file_and_field(tmp_path):
    x, y = (store(tmp_path, name, np.zeros(size), "npy") for name, size in (("x", 10), ("y", 11)))
    narrow = store(tmp_path, "narrow", np.zeros(10, np.float32), "npy")
    with pytest.raises(SchemaError, match=r"y\.npy: field 'b' has 11 cells on axis 0, and 'a' 10"):
        ArrayWindows({"a": x, "b": y}, (3,))
    with pytest.raises(SchemaError, match=r"narrow\.npy: field 'data' is .*float32.*float64.*x\.npy"):
        ArrayWindows([x, narrow], (3,))
    with pytest.raises(SchemaError, match=r"text\.npy: field 'data': dtype 'str32' cannot be stored"):
        ArrayWindows(store(tmp_path, "text", np.array(["a"]), "npy"), (1,))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"window": ()}, ValueError), ({"window": (0,)}, ValueError), ({"window": (2.5,)}, TypeError),
        ({"window": "12"}, ValueError), ({"window": {"y": (1,)}}, ValueError),
        ({"decode": None}, TypeError), ({"decode": "no"}, TypeError),
        ({"weights": [1, 2]}, ValueError), ({"weights": ["1"]}, TypeError),
        ({"arrays": []}, ValueError), ({"arrays": {}}, ValueError),
        ({"arrays": [{"a": "x"}, {"b": "x"}]}, ValueError),
    ],
)  # fmt: skip
def test_arguments_that_cannot_work_fail_at_once(tmp_path, arguments, error):
    uri = store(tmp_path, "x", np.arange(10), "npy")
    with pytest.raises(error):
        ArrayWindows(**{"arrays": uri, "window": (3,), **arguments})
    with pytest.raises(ValueError, match="with_position adds position"):
        ArrayWindows({"position": uri}, (3,), with_position=True)


def test_what_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.npy"):
        ArrayWindows(tmp_path / "no.npy", (1,))
    pytest.importorskip("h5py")
    pytest.importorskip("zarr", "3.0")
    uri = store(tmp_path, "x", np.arange(10), "h5")
    with pytest.raises(FileNotFoundError, match=r"no\.h5"):
        ArrayWindows(str(tmp_path / "no.h5#x"), (1,))
    with pytest.raises(ValueError, match=r"all\.h5#y: no dataset 'y'; the file has #group/x"):
        ArrayWindows(uri.replace("group/x", "y"), (1,))
    with pytest.raises(ValueError, match=r"all\.h5: say which dataset; the file has #group/x"):
        ArrayWindows(tmp_path / "all.h5", (1,))
    with pytest.raises(FileNotFoundError, match=r"no array of Zarr.*nothing"):
        ArrayWindows(tmp_path / "nothing", (1,))


def test_damaged_files_are_an_error_that_names_them(tmp_path, volume):
    npy = Path(store(tmp_path, "x", volume, "npy"))
    npy.write_bytes(npy.read_bytes()[:-1])
    with pytest.raises(SamplerError, match=r"x\.npy: cannot be read as \.npy: it has 3151 bytes, and should"):
        ArrayWindows(npy, (1,))
    npy.write_bytes(b"nothing of the kind")
    with pytest.raises(SamplerError, match=r"x\.npy: cannot be read as \.npy: its header"):
        ArrayWindows(npy, (1,))
    np.save(npy, np.array([{}], object), allow_pickle=True)
    with pytest.raises(SamplerError, match=r"x\.npy: cannot be read as \.npy: it holds Python objects"):
        ArrayWindows(npy, (1,))


def test_damaged_hdf5_is_an_error_that_names_it(tmp_path, volume):
    store(tmp_path, "x", volume, "h5")
    path = tmp_path / "all.h5"
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(SamplerError, match=r"all\.h5#group/x: cannot be read as HDF5: .*truncated"):
        ArrayWindows(f"{path}#group/x", (1,))


#: How HDF5 may have the cells of a dataset without chunks, and their dtype.
PLAIN_OF_HDF5 = {
    "plain": "i4", "beside a user block": "i4", "in another byte order": ">i4", "in three bytes": "i4",
    "truth values": "?", "complex": "c8", "in another file": "i4", "never written": "i4",
    "in the header": "i4",
}  # fmt: skip


@pytest.mark.parametrize("how", PLAIN_OF_HDF5)
def test_hdf5_without_chunks_is_what_h5py_reads_however_its_cells_lie(tmp_path, how):
    h5py = pytest.importorskip("h5py")
    cells = (np.arange(600) % 251).reshape(100, 6).astype(PLAIN_OF_HDF5[how])
    kind, created = h5py.h5t.py_create(cells.dtype, logical=True), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if how == "in three bytes":
        kind = kind.copy()
        kind.set_precision(24)
        kind.set_offset(8)
    elif how == "in another file":
        created.set_external(bytes(tmp_path / "cells"), 0, h5py.h5s.UNLIMITED)
    elif how == "in the header":
        created.set_layout(h5py.h5d.COMPACT)
    elif how == "never written":
        created.set_fill_value(np.array(7, cells.dtype))
        cells[...] = 7
    block = 512 if how == "beside a user block" else 0
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=block) as file:
        space = h5py.h5s.create_simple(cells.shape)
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, space, created))
        if how != "never written":
            dataset[...] = cells
    files = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    with ArrayWindows("x.h5#x", (5, 2), filesystem=files, with_position=True) as source:
        rows = planned(source, 50)
        rows = {name: [*rows[name]] + [sample[name] for sample in take(source, 5)] for name in rows}
    assert len(set(map(bytes, rows["position"]))) > 30
    for data, (x, y) in zip(rows["data"], rows["position"], strict=True):
        assert np.array_equal(data, cells[x : x + 5, y : y + 2])


#: A source of HDF5 that is no local file for it, and that nothing frees before the interpreter is gone.
OPEN_AT_EXIT = """
import ctypes, os, sys, threading
import numpy as np
from pyarrow import fs
from arrowcache.sampling.sources import ArrayWindows

filesystem = fs.SubTreeFileSystem(sys.argv[1], fs.LocalFileSystem())
source = ArrayWindows("all.h5#group/x", (2,), filesystem=filesystem)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(source))
samples = source(np.random.default_rng(0))
print(next(samples)["data"].shape)
"""
ENDS_OF_HDF5 = {
    "exit": "",
    "forked": """
child = os.fork()
if child:
    print(os.waitpid(child, 0)[1], next(samples)["data"].shape)
""",
    "forked, and opened anew": """
child = os.fork()
print(next(samples)["data"].shape)
if child:
    print(os.waitpid(child, 0)[1], next(samples)["data"].shape)
""",
    "while a thread reads": """
has_begun = threading.Event()
def read():
    for _ in samples:
        has_begun.set()
threading.excepthook = lambda _: None
threading.Thread(target=read, daemon=True).start()
has_begun.wait()
""",
}


@pytest.mark.parametrize("how", ENDS_OF_HDF5)
def test_a_process_ends_well_with_an_hdf5_file_of_a_store_open(tmp_path, volume, how):
    store(tmp_path, "x", volume, "h5")
    with Script(OPEN_AT_EXIT + ENDS_OF_HDF5[how], tmp_path, new_interpreter=True) as script:
        assert script.end() == (0, "")
        assert script.printed().startswith("(2, 12, 7)")
        assert ("\n0 (2, 12, 7)" in script.printed()) == ("forked" in how), "the child's, then the parent's"


def test_damaged_zarr_is_an_error_that_names_it(tmp_path, volume):
    uri = store(tmp_path, "x", volume, "zarr")
    source = ArrayWindows(uri, (9, 12, 7))
    folder = tmp_path / "all.zarr" / "x"
    chunk = folder / "c" / "0" / "0" / "0"
    chunk.write_bytes(b"nothing of the kind")
    with source, pytest.raises(SamplerError, match=r"all\.zarr#x: cannot be read as Zarr"):
        take(source, 1)
    (folder / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    with pytest.raises(SamplerError, match=r"all\.zarr#x: cannot be read as Zarr"):
        ArrayWindows(uri, (1,))


@pytest.mark.parametrize("code", ["pickle", "json2", "msgpack2", "vlen-utf8", "zfpy", "no such"])
@pytest.mark.parametrize("where", ["compressor", "filters"])
def test_codecs_of_zarr_v2_that_may_run_code_are_refused(tmp_path, code, where):
    uri = version_2(tmp_path)
    described = json.loads((tmp_path / "x.zarr" / ".zarray").read_text())
    described[where] = (
        {"id": code} if where == "compressor" else [{"id": "delta", "dtype": "<i4"}, {"id": code}]
    )
    (tmp_path / "x.zarr" / ".zarray").write_text(json.dumps(described))
    why = "may run code of the file" if code == "pickle" else "is not supported"
    with pytest.raises(SamplerError, match=rf"x\.zarr: .*2, and its codec '{code}' {why}: .*; convert it"):
        ArrayWindows(uri, (1,))


@pytest.mark.parametrize("codec", ["Fletcher32", "JenkinsLookup3", "CRC32", "Adler32"])
def test_checksums_of_zarr_v2_are_checked(tmp_path, codec):
    numcodecs = pytest.importorskip("numcodecs")
    filters = [getattr(numcodecs, codec)()]
    source = ArrayWindows(
        version_2(tmp_path, filters=filters, compressors=None), (3, 2), with_position=True, decode=False
    )
    array = np.full((20, 6), 7)
    array[:15] = np.arange(90).reshape(15, 6)
    for sample in take(source, 30):
        x, y = sample["position"].tolist()
        assert np.array_equal(sample["data"], array[x : x + 3, y : y + 2])
    chunks = list((tmp_path / "x.zarr").glob("?.?"))
    for damage in (lambda data: bytes([data[0] ^ 1]) + data[1:], lambda _: b"", lambda data: data[:3]):
        for chunk in chunks:
            whole = chunk.read_bytes()
            chunk.write_bytes(damage(whole))
        with pytest.raises(SamplerError, match=r"x\.zarr: cannot be read as Zarr: "):
            take(source, 30)


def version_2(folder: Path, **options) -> str:
    zarr = pytest.importorskip("zarr", "3.0")
    given = {
        "shape": (20, 6),
        "chunks": (5, 4),
        "dtype": "int32",
        "zarr_format": 2,
        "fill_value": 7,
        **options,
    }
    array = zarr.create_array(folder / "x.zarr", **given)
    array[:15] = np.arange(90).reshape(15, 6)
    array.attrs["_ARRAY_DIMENSIONS"] = ["time", "x"]
    return str(folder / "x.zarr")


@pytest.mark.parametrize("number", range(6))
def test_zarr_v2_is_read(tmp_path, number):
    numcodecs = pytest.importorskip("numcodecs")
    options = [
        {}, {"compressors": None}, {"compressors": numcodecs.Zlib(1), "dtype": ">f4"}, {"order": "F"},
        {"compressors": numcodecs.Blosc(), "filters": [numcodecs.Delta("<i4")]},
        {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    ][number]  # fmt: skip
    uri = version_2(tmp_path, **options)
    array = np.full((20, 6), 7)
    array[:15] = np.arange(90).reshape(15, 6)
    where = {"time": slice(4, None)}
    with ArrayWindows(uri, (3, 2), where=where, with_position=True, decode=False) as source:
        rows = planned(source, 100)
        for sample in take(source, 20) + [{name: rows[name][at] for name in rows} for at in range(100)]:
            x, y = sample["position"].tolist()
            assert np.array_equal(sample["data"], array[x : x + 3, y : y + 2])
        assert rows["position"][:, 0].min() == 4


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("is_consolidated", [False, True])
def test_arrays_of_a_group_of_zarr_v2_are_found_by_their_names(tmp_path, is_consolidated):
    zarr = pytest.importorskip("zarr", "3.0")
    group = zarr.open_group(tmp_path / "group", mode="w", zarr_format=2)
    for name in ("signal", "sub/label"):
        group.create_array(name, data=np.arange(4, dtype="int32"), chunks=(2,))
    if is_consolidated:
        zarr.consolidate_metadata(group.store)
    for uri in ("group#sub/label", "group/sub#label", "group/sub/label", "group#signal"):
        assert take(ArrayWindows(f"{tmp_path}/{uri}", (4,)), 1)[0]["data"].tolist() == [0, 1, 2, 3]
    with pytest.raises(SamplerError, match="a group: say which array; it has #signal, #sub/label"):
        ArrayWindows(tmp_path / "group", (1,))
    with pytest.raises(FileNotFoundError, match="no array 'sginal' of Zarr: did you mean #signal"):
        ArrayWindows(f"{tmp_path}/group#sginal", (1,))


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("keeps_root", [True, False])
def test_arrays_that_consolidated_metadata_alone_describe_are_read(tmp_path, version, keeps_root):
    zarr = pytest.importorskip("zarr", "3.0")
    path = tmp_path / "group"
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name in ("signal", "sub/label", "sub/deeper/mask"):
        array = group.create_array(name, data=np.arange(4, dtype="int16"), chunks=(2,), fill_value=9)
        array.attrs["scale_factor"] = 0.5
    zarr.consolidate_metadata(group.store, zarr_format=version)
    for file in [*path.rglob(".z*"), *path.rglob("zarr.json")]:
        is_root = file.parent == path
        if file.name != ".zmetadata" and not (is_root and (keeps_root or file.name == "zarr.json")):
            file.unlink()
    for name in ("signal", "sub/label", "sub/deeper/mask"):
        source = ArrayWindows(f"{path}#{name}", (4,))
        assert take(source, 1)[0]["data"].tolist() == [0, 0.5, 1, 1.5]
        assert planned(source, 1)["data"].tolist() == [[0, 0.5, 1, 1.5]]
    for uri, says in {
        "group": "a group: say which array; it has #signal, #sub/deeper/mask, #sub/label",
        "group#sub": "a group: say which array; it has #sub/deeper/mask, #sub/label",
    }.items():
        with pytest.raises(SamplerError, match=says):
            ArrayWindows(f"{tmp_path}/{uri}", (1,))
    for uri in ("group#sub/lable", "group/sub/lable"):
        with pytest.raises(FileNotFoundError, match="no array 'sub/lable' of Zarr: did you mean #sub/label"):
            ArrayWindows(f"{tmp_path}/{uri}", (1,))


@pytest.fixture(scope="module")
def hierarchy(tmp_path_factory):
    """To be read: groups of arrays, as Zarr with and without consolidated metadata, and as HDF5."""
    zarr, h5py = pytest.importorskip("zarr", "3.0"), pytest.importorskip("h5py")
    names, path = ("signal", "sub/label", "sub/deeper/mask"), tmp_path_factory.mktemp("hierarchy")
    for name in ("a.zarr", "b"):
        group = zarr.open_group(path / name, mode="w")
        for array in names:
            group.create_array(array, data=np.arange(4), chunks=(2,))
        group.create_group("empty")
        if name == "b":
            zarr.consolidate_metadata(group.store)
    with h5py.File(path / "c.h5", "w") as file:
        for array in names:
            file[array] = np.arange(4)
        file["none"] = h5py.Empty("f4")
    return path


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("a.zarr", "a group: say which array; it has #signal, #sub/label, #sub/deeper/mask"),
        ("b", "a group: say which array; it has #signal, #sub/deeper/mask, #sub/label"),
        ("a.zarr#sub", "a group: say which array; it has #sub/label, #sub/deeper/mask"),
        ("a.zarr/sub", "a group: say which array; it has #label, #deeper/mask"),
        ("a.zarr#empty", "a group: say which array; it has none"),
        ("a.zarr#sginal", "no array 'sginal' of Zarr: did you mean #signal"),
        ("a.zarr/sginal", "no array 'sginal' of Zarr: did you mean #signal"),
        ("b#signals", "no array 'signals' of Zarr: did you mean #signal"),
        ("a.zarr#sub/lable", "no array 'sub/lable' of Zarr: did you mean #sub/label"),
        ("a.zarr/sub#lable", "no array 'lable' of Zarr: did you mean #label"),
        ("a.zarr#MASK", "no array 'MASK' of Zarr: did you mean #sub/deeper/mask"),
        ("c.h5#Mask", "no dataset 'Mask'; did you mean #sub/deeper/mask"),
        ("a.zarr#nothing/alike", "no array 'nothing/alike' of Zarr: .*a.zarr has #signal, #sub/label"),
        ("c.h5", "say which dataset; the file has #none, #signal, #sub/deeper/mask, #sub/label"),
        ("c.h5#sub", "'sub' is a group: say which dataset; the file has #sub/deeper/mask, #sub/label"),
        ("c.h5#sginal", "no dataset 'sginal'; did you mean #signal"),
        ("c.h5#sub/lable", "no dataset 'sub/lable'; did you mean #sub/label"),
        ("c.h5#none", "'none' is empty"),
    ],
)
def test_a_group_and_a_misspelt_array_name_those_that_are_there(hierarchy, uri, says):
    with pytest.raises((FileNotFoundError, SamplerError, SchemaError, ValueError), match=says):
        ArrayWindows(f"{hierarchy}/{uri}", (2,))


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("uri", ["b#signal", "b/sub#label", "a.zarr/sub#label", "a.zarr#sub/deeper/mask"])
def test_a_name_after_a_hash_is_in_any_folder_that_is_there(hierarchy, uri):
    with ArrayWindows(f"{hierarchy}/{uri}", (4,)) as source:
        assert take(source, 1)[0]["data"].tolist() == [0, 1, 2, 3]


def test_a_group_of_many_arrays_names_some(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number in range(50):
            file[f"array{number:02}"] = [1]
    with pytest.raises(ValueError, match=r"#array00, .*#array19 and 30 more"):
        ArrayWindows(tmp_path / "x.h5", (1,))


OTHERS = {
    "gzip: decompress it": gzip.compress(b"abc", mtime=0), "a zip archive: unpack it": b"PK\3\4" + bytes(99),
    "a page of HTML": b"<?xml version='1.0'?>",
    "a tar archive: unpack it": bytes(257) + b"ustar" + bytes(250),
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1",
    "a netCDF file of version 3": b"CDF\1" + bytes(99),
}  # fmt: skip


@pytest.mark.parametrize("says", OTHERS)
@pytest.mark.parametrize("name", ["x.npy", "x.h5#y", "x.nc#y", "x.zarr", "x.zarr#y", "x.zarr.zip", "x.npz"])
def test_another_file_is_said_to_be_that(tmp_path, name, says):
    pytest.importorskip("h5py")
    pytest.importorskip("zarr", "3.0")
    (tmp_path / name.partition("#")[0]).write_bytes(OTHERS[says])
    with pytest.raises(SamplerError, match=rf"{name}: cannot be read as .*: it is .*{says}"):
        ArrayWindows(f"{tmp_path}/{name}", (1,))


class Slowly:
    """Finds a module of the package whose import takes a while, so that threads meet in it."""

    def __init__(self, name: str) -> None:
        self._name = f"arrowcache.sampling.sources.{name}"

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (time.sleep(0.3), execute(module))
        return spec


@pytest.fixture
def missing(monkeypatch):
    """Have a package be missing, which a module of ours imports."""

    def have(package: str, module: str) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"arrowcache.sampling.sources.{module}", raising=False)
        monkeypatch.setattr(sys, "meta_path", [Slowly(module), *sys.meta_path])

    return have


@pytest.mark.parametrize(
    ("package", "module", "uri"), [("zarr", "zarr3", "x.zarr"), ("h5py", "hdf5", "x.h5#x")]
)
@pytest.mark.parametrize("arrays", [1, 5])
def test_a_package_that_is_missing_is_named_with_what_to_install(
    tmp_path, missing, package, module, uri, arrays
):
    missing(package, module)
    advice = rf"{package}: pip install 'arrowcache\[sources\]'"
    with pytest.raises(ModuleNotFoundError, match=advice):
        ArrayWindows([f"{tmp_path}/{uri}"] * arrays, (1,))


def test_without_obstore_many_arrays_are_opened_at_once(tmp_path, missing, volume):
    missing("obstore", "getter")
    np.save(tmp_path / "x.npy", volume)
    files = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    source = ArrayWindows(["x.npy"] * 8, (3,), filesystem=files)
    assert next(iter(source(np.random.default_rng(0))))["data"].shape == (3, 12, 7)
