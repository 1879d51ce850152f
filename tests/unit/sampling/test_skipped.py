"""Samples that cannot be had: a pool that skips leaves them out, and counts them; too many end it."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import marshal
import pickle
import struct
import tarfile
import urllib.error
import wave
import zipfile
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any
from xml.dom import minidom

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from drawing import write_tar
from helpers import DEADLINE_SECONDS, full, make_cache, read_ids, segment_files, wait_until
from helpers import sample as row
from pool_tasks import expected, tasks
from quick import first_is_quick

import arrowcache as ac
from arrowcache.explore import observe
from arrowcache.sampling.retries import is_fault, is_refusal, may_pass
from arrowcache.sampling.sources import ArrayWindows, Items, Map, Mix, ParquetRows, WebDatasetShards


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as executor:
        yield executor


def refused(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("https://store/key", code, "refused", Message(), None)


def cut_image() -> None:
    """Raise what Pillow does at a file that was cut short."""
    from PIL import Image

    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(whole, "JPEG")
    Image.open(io.BytesIO(whole.getvalue()[:-999])).load()


def throw(error: Exception) -> None:
    raise error


def is_bad(key: int) -> bool:
    return key % 37 == 0


def having(fault: Any, *, is_read: bool = True):
    """A sampler like `draws()`, some of whose samples cannot be had."""

    def read(key: int) -> Any:
        return fault() if is_bad(key) else row(key)

    def sampler(rng):
        while True:
            key = int(rng.integers(1 << 20))
            yield partial(read, key) if is_read else read(key)

    return sampler


def skipping(cache: ac.Cache, sampler: Any, **options: Any) -> ac.SamplerPool:
    given = {"workers": 2, "progress": False, "on_error": "skip", "retries": 0}
    return ac.SamplerPool(cache, sampler, **given | options)


FAULTS = {
    "not found": lambda: throw(FileNotFoundError("gone")),
    "not found by HTTP": lambda: throw(refused(404)),
    "a wrong text": lambda: b"\xff".decode(),
    "no zlib stream": lambda: zlib.decompress(b"no"),
    "no bz2 stream": lambda: bz2.decompress(b"no"),
    "too few bytes": lambda: struct.unpack("<q", b"no"),
    "an image that was cut short": cut_image,
    "no image": lambda: __import__("PIL.Image").Image.open(io.BytesIO(b"no")),
    "a key that is not there": lambda: {}["label"],
    "None": lambda: None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_cannot_be_had_is_left_out_and_counted(cache, threads, fault):
    if "image" in fault:
        pytest.importorskip("PIL", reason="Pillow is not installed")
    with skipping(cache, having(FAULTS[fault]), executor=threads, segments=14) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        stats = pool.stats()
    found, drawn = tasks(cache), {number: expected(number, rows=100) for number in range(14)}
    assert {n: [*itertools.filterfalse(is_bad, drawn[n])][: len(found[n])] for n in drawn} == found
    left_out = {n: [*map(is_bad, drawn[n])][: drawn[n].index(found[n][-1])].count(True) for n in drawn}
    assert 0 < sum(left_out.values()) == stats.skipped
    assert f"left out           {stats.skipped} samples" in str(stats)
    said = {}
    for path in segment_files(cache):
        with pa.memory_map(str(path)) as file:
            metadata = pa.ipc.open_file(file).metadata or {}
        said[int(path.stem.rpartition(".")[2])] = int(metadata.get(b"arrowcache.skipped", 0))
    assert said == left_out
    assert cache.verify() == []


@pytest.mark.parametrize("kind", first_is_quick(["threads", "its own"]))
def test_which_rows_a_task_has_does_not_depend_on_reads(tmp_path, threads, kind):
    found = []
    for reads in (1, 5):
        cache = make_cache(tmp_path / f"cache{reads}")
        options = {"executor": threads if kind == "threads" else None, "segments": 14, "reads": reads}
        with skipping(cache, having(FAULTS["not found"]), **options) as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
            found.append((tasks(cache), pool.stats().skipped))
    assert found[0] == found[1]
    assert found[0][1] > 0


def test_none_in_place_of_a_sample_is_left_out_too(cache, threads):
    with skipping(cache, having(lambda: None, is_read=False), executor=threads, segments=14) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().skipped > 0
    assert not any(map(is_bad, itertools.chain.from_iterable(tasks(cache).values())))


def test_a_sample_larger_than_a_segment_is_left_out(tmp_path, threads):
    schema = ac.Schema({"text": ac.String()})
    cache = ac.Cache.create(tmp_path / "cache", schema, capacity="1MiB", segment_bytes="64KiB")

    def sampler(rng):
        yield {"text": "x" * 50_000}
        yield {"text": "x" * (1 << 18)}
        yield {"text": "x" * 10_000}

    with skipping(cache, full(sampler), executor=threads, segments=2) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert (pool.stats().rows, pool.stats().skipped) == (4, 2)


@pytest.mark.parametrize("kind", ["read", "sample", "map"])
def test_without_skip_the_first_one_fails_its_task(cache, threads, kind):
    sampler = having(FAULTS["None"], is_read=kind == "read")
    if kind == "map":
        samples = having(lambda: row(-1), is_read=False)
        sampler = Map(samples, lambda sample: throw(KeyError("label")), schema=cache.schema)
    options = {"executor": threads, "segments": 14, "on_error": "raise"}
    with skipping(cache, sampler, **options) as pool, pytest.raises(ac.SamplerError, match=r"None|label"):
        pool.wait(timeout=DEADLINE_SECONDS)


NEVER = {
    "a refusal": lambda: throw(PermissionError("no")),
    "a refusal by HTTP": lambda: throw(refused(403)),
    "a refusal of S3": lambda: throw(OSError("AWS Error ACCESS_DENIED during GetObject")),
    "a sample that does not fit": lambda: {"id": "seven"},
    "no memory": lambda: throw(MemoryError()),
    "a module that is nowhere": lambda: throw(ImportError("nowhere")),
    "no mapping": lambda: 7,
    "another callable": lambda: dict,
}


@pytest.mark.parametrize("error", NEVER)
def test_what_is_not_of_one_sample_fails_its_task(cache, threads, error):
    with skipping(cache, full(having(NEVER[error])), executor=threads, segments=30) as pool:
        with pytest.raises(ac.SamplerError):
            pool.wait(timeout=DEADLINE_SECONDS)
        assert (pool.stats().skipped, pool.stats().failures > 0) == (0, True)


def test_what_may_pass_fails_the_task_and_is_tried_again(cache, threads):
    failed = []

    def passing() -> Any:
        failed.append(0)
        return row(37) if len(failed) > 7 else throw(ConnectionResetError("reset"))

    sampler = full(having(passing))
    with skipping(cache, sampler, executor=threads, workers=1, segments=8, retries=9) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert (pool.stats().skipped, pool.stats().segments, pool.stats().failures) == (0, 8, 0)
        assert pool.stats().retries > 0


def test_a_generator_that_raises_fails_its_task(cache, threads):
    sampler = having(FAULTS["not found"], is_read=False)
    with skipping(cache, sampler, executor=threads, segments=30) as pool:
        with pytest.raises(ac.SamplerError, match="gone"):
            pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().skipped == 0


@pytest.mark.parametrize("segments", [1, 100])
def test_a_pool_of_which_more_than_one_in_a_hundred_are_left_out_ends(tmp_path, threads, segments):
    rows = 5000 if segments == 1 else 16
    cache = make_cache(
        tmp_path / "cache", ac.Schema({"id": ac.Tensor("int64")}), segment_rows=rows, segment_bytes="1MiB"
    )

    def read(key: int) -> Any:
        return {"id": key} if key % 50 else throw(FileNotFoundError(f"no {key}"))

    def sampler(rng):
        while True:
            yield partial(read, int(rng.integers(1 << 20)))

    with skipping(cache, full(sampler), executor=threads, segments=segments) as pool:
        with pytest.raises(ac.SamplerError, match=r"\d\d of 1,\d\d\d samples cannot .*last: .*no \d+"):
            pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().rows < 1200, "it was not long until then"


def test_a_pool_of_fewer_samples_ends_only_if_the_first_hundred_are_left_out(cache, threads):
    def read(key: int) -> Any:
        return row(key) if key >= 99 else throw(FileNotFoundError(f"no {key}"))

    def late(rng):
        yield from (partial(read, key) for key in range(1 << 30))

    with skipping(cache, full(late), executor=threads, workers=1, segments=3) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert (pool.stats().rows, pool.stats().skipped) == (48, 3 * 99)
    nothing = Map(late, lambda _: None, schema=cache.schema)
    says = r"100 of 100 samples cannot be had.*last"
    with skipping(cache, nothing, executor=threads) as pool, pytest.raises(ac.SamplerError, match=says):
        pool.wait(rows=1, timeout=DEADLINE_SECONDS)


def test_a_sampler_of_one_sample_a_call_may_leave_out_several_in_a_row(cache, threads):
    def sampler(rng):
        yield partial(lambda key: row(key) if key % 8 == 0 else None, int(rng.integers(1 << 20)))

    with skipping(cache, sampler, executor=threads, segments=8, reads=1) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().segments == 8


class Numbers:
    """A dataset, some of whose items cannot be had."""

    def __init__(self, bad: set[int], fault: Any) -> None:
        self.bad, self.fault = bad, fault

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.fault() if index in self.bad else row(index)


@pytest.mark.parametrize("fault", first_is_quick(["not found", "None"]))
@pytest.mark.parametrize("around", [lambda items: items, lambda items: Map(items, dict)])
def test_of_items_each_other_one_comes_once_and_the_next_pool_finds_nothing_to_do(
    cache, threads, fault, around
):
    bad = {0, 1, 50, 51, 99}
    items = around(Items(Numbers(bad, FAULTS[fault]), passes=2, segment_items=1))
    for rows, skipped in ((190, 10), (0, 0)):  # a task of which none is left is done
        with skipping(cache, items, executor=threads) as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
            assert (pool.stats().rows, pool.stats().skipped) == (rows, skipped)
    found = Counter(itertools.chain.from_iterable(map(read_ids, segment_files(cache))))
    assert found == Counter({number: 2 for number in range(100) if number not in bad})


@pytest.mark.parametrize("fault", FAULTS)
def test_columns_are_those_of_the_first_sample_that_can_be_had(fault):
    if "image" in fault:
        pytest.importorskip("PIL", reason="Pillow is not installed")

    def odd(rng):
        for key in range(3):
            yield partial(FAULTS[fault] if key < 2 else partial(row, key))

    def cut(sample):
        return FAULTS[fault]() if sample["id"] < 2 else sample

    items = Items(Numbers({0, 1}, FAULTS[fault]))
    made = Map(lambda rng: map(row, range(3)), cut)
    assert items.schema == Map(odd, dict).schema == Mix([(odd, 1), (odd, 1)]).schema == made.schema
    for source in (
        lambda: Items(Numbers({*range(100)}, FAULTS[fault])),
        lambda: Map(lambda rng: itertools.repeat(FAULTS[fault]), dict),
    ):
        with pytest.raises(Exception) as caught:  # the fault itself
            source()
        assert is_fault(caught.value)


def test_a_map_goes_on_after_a_sample_that_its_function_cannot_change(cache, threads):
    def changed(sample):
        return sample if int(sample["id"]) % 37 else throw(ValueError("odd"))

    for is_read in (False, True):
        source = Map(having(lambda: row(0), is_read=is_read), changed, schema=cache.schema)
        with skipping(cache, source, executor=threads, segments=14, name=f"read{is_read}") as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
            assert pool.stats().skipped > 0
    assert tasks(cache, "readTrue.0") == tasks(cache, "readFalse.0")


def test_what_a_mix_leaves_out_are_generators_and_samples_are_the_pools(cache, threads):
    def odd(sample):
        return sample if int(sample["id"]) % 37 else throw(ValueError("odd"))

    def source(is_read: bool) -> Map:
        return Map(having(lambda: row(0), is_read=is_read), odd, schema=cache.schema)

    some = Map(source(False), lambda sample: {**sample, "id": -1}, schema=cache.schema)
    found = []
    for on_error in ("raise", "skip"):
        mix = Mix([(source(True), 1), (source(False), 1), (some, 1)], on_error=on_error)
        options = {"executor": threads, "segments": 10, "name": f"of_{on_error}"}
        with skipping(cache, full(mix), **options) as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
            found.append((tasks(cache, f"of_{on_error}.0"), pool.stats().skipped))
    assert found[0] == found[1]
    assert found[0][1] > 0
    of_some = sum(numbers.count(-1) for numbers in found[0][0].values())
    assert 0 < of_some < sum(map(len, found[0][0].values())) / 2


def of_json(folder: Path) -> tuple[Any, str]:
    files = {f"{number:02}.json": b"{" if number == 0 else b'{"x": 1}' for number in range(20)}
    write_tar(folder / "x.tar", files)
    source = WebDatasetShards(folder / "x.tar", fields=["json.x"])
    return source, r"x\.tar, sample '00': field 'json.x' cannot be decoded: JSONDecodeError: "


def of_parquet(folder: Path) -> tuple[Any, str]:
    path = folder / "x.parquet"
    table = pa.table({"x": np.random.default_rng(0).random(400)})
    pq.write_table(table, path, row_group_size=100, compression="zstd", use_dictionary=False)
    place = pq.read_metadata(path).row_group(2).column(0).data_page_offset
    path.write_bytes(path.read_bytes()[:place] + b"\xff" * 200 + path.read_bytes()[place + 200 :])
    return ParquetRows(path), r"x\.parquet: cannot be read as Parquet: row group 2: .*\w"


def of_zarr(folder: Path, **form: Any) -> tuple[Any, str]:
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    array = zarr.create_array(folder / "x.zarr", shape=(40,), chunks=(10,), dtype="f4", **form)
    array[:] = np.arange(40)
    (folder / "x.zarr" / "c" / "1").write_bytes(b"nothing of the kind")
    where = r"cells \[" if form else "chunk c/1: "
    return ArrayWindows(folder / "x.zarr", (1,)), rf"x\.zarr: cannot be read as Zarr: {where}.*\w"


def of_hdf5(folder: Path) -> tuple[Any, str]:
    (folder / "x.h5").write_bytes(hdf5())
    return ArrayWindows(f"{folder}/x.h5#x", (10,)), r"x\.h5#x: cannot be read as HDF5: .*filter"


def of_npy(folder: Path) -> tuple[Any, str]:
    paths = [folder / f"{number}.npy" for number in range(4)]
    for path in paths:
        np.save(path, np.arange(40.0))
    source = ArrayWindows(paths, (2,))
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    return source, r"1\.npy: cannot be read as \.npy: it has"


READY = {
    "JSON": of_json,
    "Parquet": of_parquet,
    "Zarr": of_zarr,
    "Zarr, in shards": partial(of_zarr, shards=(20,)),
    "HDF5": of_hdf5,
    ".npy": of_npy,
}


@pytest.mark.parametrize("around", ["alone", "in a Mix", "in a Mix that skips"])
@pytest.mark.parametrize("kind", READY)
def test_of_a_ready_source_what_does_not_decode_is_left_out_and_named(tmp_path, threads, kind, around):
    source, says = READY[kind](tmp_path)
    sampler = source
    if around != "alone":
        sampler = Mix([(source, 1), (source, 1)], on_error="skip" if "skips" in around else "raise")
    options = {"executor": threads, "segments": 14, "workers": 1}
    with skipping(make_cache(tmp_path / "skip", source.schema), sampler, **options) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert (pool.stats().segments, pool.stats().skipped > 0) == (14, True)
    if "skips" not in around:
        cache = make_cache(tmp_path / "raise", source.schema)
        raising = skipping(cache, sampler, on_error="raise", **options)
        with raising as pool, pytest.raises(ac.SamplerError, match=says):
            pool.wait(timeout=DEADLINE_SECONDS)


def test_a_pool_at_work_shows_it(cache, threads, tmp_path):
    gate = tmp_path / "gate"

    def sampler(rng):
        yield None
        yield row(1)
        wait_until(gate.exists, "the gate")
        while True:
            yield row(2)

    with skipping(cache, full(sampler), executor=threads, workers=1, segments=1) as pool:
        wait_until(lambda: [s.skipped for s in observe(cache).samplers if s.rows] == [1], "it to be seen")
        gate.touch()
        pool.wait(timeout=DEADLINE_SECONDS)


def test_an_unknown_policy_is_refused(cache):
    with pytest.raises(ValueError, match="on_error='ignore' is unknown: use 'raise' or 'skip'"):
        skipping(cache, having(dict), on_error="ignore")


def of_store(kind: type[Exception], **attributes: Any) -> Exception:
    error = kind("failed")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def of_s3(code: str, status: int) -> Exception:
    """As of botocore's ClientError."""
    return of_store(
        Exception, response={"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    )


def by_s3fs(code: str, status: int) -> Exception:
    error = OSError(5, "failed")
    error.__cause__ = of_s3(code, status)
    return error


def by_obstore(name: str, text: str = "") -> Exception:
    exceptions = pytest.importorskip("obstore.exceptions", reason="obstore is not installed")
    error: Exception = getattr(exceptions, name)(text)
    return error


STORES_SAY = {
    "RequestTimeout": (lambda: of_s3("RequestTimeout", 400), "may pass"),
    "ThrottlingException": (lambda: of_s3("ThrottlingException", 400), "may pass"),
    "SlowDown": (lambda: of_s3("SlowDown", 503), "may pass"),
    "ExpiredToken": (lambda: of_s3("ExpiredToken", 400), "refusal"),
    "InvalidToken": (lambda: of_s3("InvalidToken", 400), "refusal"),
    "AuthorizationHeaderMalformed": (lambda: of_s3("AuthorizationHeaderMalformed", 400), "refusal"),
    "AccessDenied": (lambda: of_s3("AccessDenied", 403), "refusal"),
    "403 of a HEAD": (lambda: of_s3("403", 403), "refusal"),
    "NoSuchKey": (lambda: of_s3("NoSuchKey", 404), "fault"),
    "404 of a HEAD": (lambda: of_s3("404", 404), "fault"),
    "400 of a HEAD, as of an expired token": (lambda: of_s3("400", 400), "neither"),
    "another bad request": (lambda: of_s3("InvalidRequest", 400), "neither"),
    "s3fs, a token": (lambda: by_s3fs("InvalidToken", 400), "refusal"),
    "s3fs, a timeout": (lambda: by_s3fs("RequestTimeout", 400), "may pass"),
    "pyarrow, a token": (lambda: OSError("AWS Error EXPIRED_TOKEN during GetObject"), "refusal"),
    "pyarrow, a timeout": (lambda: OSError("AWS Error REQUEST_TIMEOUT during GetObject"), "may pass"),
    "pyarrow, of Azure": (lambda: OSError("x Azure Error: [AuthenticationFailed] 403 Server"), "refusal"),
    "pyarrow, no blob": (lambda: OSError("x Azure Error: [BlobNotFound] 404 The specified blob"), "fault"),
    "pyarrow, of Google": (lambda: OSError("google::cloud::Status(PERMISSION_DENIED: no"), "refusal"),
    "obstore, denied": (lambda: by_obstore("PermissionDeniedError"), "refusal"),
    "obstore, unauthenticated": (lambda: by_obstore("UnauthenticatedError"), "refusal"),
    "obstore, absent": (lambda: by_obstore("NotFoundError"), "fault"),
    "obstore, a token": (lambda: by_obstore("GenericError", "400: <Code>ExpiredToken</Code>"), "refusal"),
    "obstore, a timeout": (lambda: by_obstore("GenericError", "<Code>RequestTimeout</Code>"), "may pass"),
    "Azure, a token": (
        lambda: of_store(Exception, status_code=400, error_code="InvalidAuthenticationInfo"), "refusal",
    ),
    "Azure, busy": (lambda: of_store(Exception, status_code=503, error_code="ServerBusy"), "may pass"),
    "Google, too often": (
        lambda: of_store(Exception, code=403, errors=[{"reason": "rateLimitExceeded"}]), "may pass",
    ),
    "Google, forbidden": (lambda: of_store(Exception, code=403, errors=[{"reason": "forbidden"}]), "refusal"),
    "HTTP 401": (lambda: refused(401), "refusal"),
    "HTTP 400": (lambda: refused(400), "fault"),
    "HTTP 410": (lambda: of_store(Exception, status=410), "fault"),
}  # fmt: skip


@pytest.mark.parametrize("says", STORES_SAY)
def test_what_a_store_says_is_a_refusal_or_of_one_sample_or_may_pass(says):
    make, means = STORES_SAY[says]
    error = make()
    found = {"refusal": is_refusal(error), "fault": is_fault(error), "may pass": may_pass(error)}
    assert {name for name, holds in found.items() if holds} == {means} - {"neither"}


@pytest.mark.parametrize("says", ["AccessDenied", "ExpiredToken", "obstore, denied", "HTTP 401"])
def test_a_refusal_is_asked_for_once_and_ends_the_pool(cache, threads, tmp_path, says):
    make, _ = STORES_SAY[says]
    make()  # here: without its library the test is left out

    def refuse() -> Any:
        with (tmp_path / "asked").open("a") as asked:
            asked.write("x")
        raise make()

    sampler = having(refuse)
    with skipping(cache, full(sampler), executor=threads, workers=1, reads=1, segments=9, retries=9) as pool:
        with pytest.raises(ac.SamplerError):
            pool.wait(timeout=DEADLINE_SECONDS)
        assert ((tmp_path / "asked").read_text(), pool.stats().retries) == ("x", 0)


def hdf5() -> bytes:
    """A file of HDF5, of whose dataset "x" the second chunk of four is damaged."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    file = io.BytesIO()
    with h5py.File(file, "w") as made:
        made.create_dataset("x", data=np.arange(1000.0), chunks=(250,), compression="gzip")
        place = made["x"].id.get_chunk_info(1)
    data = bytearray(file.getvalue())
    data[place.byte_offset : place.byte_offset + place.size] = bytes(place.size)
    return bytes(data)


def parquet() -> bytes:
    file, table = io.BytesIO(), pa.table({"x": np.random.default_rng(0).random(1000)})
    pq.write_table(table, file, compression="zstd", use_dictionary=False)
    return file.getvalue()[:200] + bytes(2000) + file.getvalue()[2200:]


def read_hdf5(data: bytes, name: str = "x") -> Any:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    return h5py.File(io.BytesIO(data), "r")[name][:]


JUNK = bytes(range(1, 256))
# ruff: noqa: SIM115  # none of these is opened
DO_NOT_DECODE = {
    "bz2": lambda: bz2.decompress(JUNK),
    "bz2, in pieces": lambda: bz2.BZ2Decompressor().decompress(JUNK),
    "csv": lambda: list(csv.reader(['"'], strict=True)),
    "gzip": lambda: gzip.decompress(JUNK),
    "HDF5": lambda: read_hdf5(JUNK),
    "HDF5, a chunk": lambda: read_hdf5(hdf5()),
    "HDF5, no dataset": lambda: read_hdf5(hdf5(), "y"),
    "JSON": lambda: json.loads(b"{"),
    "lzma": lambda: lzma.decompress(JUNK),
    "npy": lambda: np.load(io.BytesIO(JUNK)),
    "Parquet": lambda: pq.read_table(io.BytesIO(JUNK)),
    "Parquet, a page": lambda: pq.read_table(pa.BufferReader(parquet())),
    "pickle": lambda: pickle.loads(JUNK),
    "tar": lambda: tarfile.open(fileobj=io.BytesIO(JUNK)),
    "tar, empty": lambda: tarfile.open(fileobj=io.BytesIO()),
    "wave": lambda: wave.open(io.BytesIO(JUNK)),
    "XML": lambda: minidom.parseString(b"<a>"),
    "zip": lambda: zipfile.ZipFile(io.BytesIO(JUNK)),
}
CUT_OFF = {
    "bz2": lambda: bz2.open(io.BytesIO()).read(),
    "gzip": lambda: gzip.decompress(gzip.compress(JUNK)[:50]),
    "marshal": lambda: marshal.loads(b""),
    "npy": lambda: np.load(io.BytesIO()),
    "pickle": lambda: pickle.loads(b""),
    "wave": lambda: wave.open(io.BytesIO()),
    "Arrow": lambda: pa.ipc.open_stream(pa.BufferReader(stream()[:-90])).read_all(),
}


def stream() -> bytes:
    file, table = io.BytesIO(), pa.table({"x": np.arange(100)})
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


@pytest.mark.parametrize(
    ("decode", "is_cut"),
    [(each, False) for each in DO_NOT_DECODE.values()] + [(each, True) for each in CUT_OFF.values()],
    ids=[*DO_NOT_DECODE, *(f"{name}, cut off" for name in CUT_OFF)],
)
def test_bytes_that_do_not_decode_are_of_one_sample_and_those_cut_off_are_tried_again_before(decode, is_cut):
    with pytest.raises(Exception) as caught:  # as each library has it
        decode()
    assert (is_fault(caught.value), may_pass(caught.value)) == (True, is_cut)


def test_a_stream_that_is_always_cut_off_is_left_out_after_all_tries(cache, threads, tmp_path):
    def read(key: int) -> Any:
        if key:
            return row(key)
        with (tmp_path / "tries").open("a") as tries:
            tries.write("x")
        return gzip.decompress(gzip.compress(JUNK)[:50])

    def sampler(rng):
        yield from (partial(read, key) for key in range(1 << 20))

    with skipping(cache, full(sampler), executor=threads, workers=1, segments=1) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert (pool.stats().skipped, (tmp_path / "tries").read_text()) == (1, "xxxxx")


class Odd(OSError):
    """An error of h5py's that a disk caused."""

    __module__ = "h5py"


@pytest.mark.parametrize(
    "error",
    [
        EOFError("cut off"),
        ConnectionResetError(104, "reset"),
        Odd("Can't synchronously read data (file read failed: errno = 5, error message = ...)"),
        OSError("google::cloud::Status(UNAVAILABLE: Ran out of input"),
    ],
)
def test_a_connection_that_ends_may_pass_and_is_no_fault(error):
    assert (is_fault(error), may_pass(error)) == (False, True)
