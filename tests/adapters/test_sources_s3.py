"""Sources on S3: moto for what an S3 means, a server of our own for one that fails."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tarfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from drawing import require_pure, run_elsewhere, take
from helpers import in_child
from object_store import Fault, ObjectStore, serve
from pyarrow import fs

from arrowcache.errors import SamplerError
from arrowcache.sampling.sources import ArrayWindows, Mix, ParquetRows, Retries, WebDatasetShards
from arrowcache.sampling.sources.object_store import locate

pytest.importorskip("pyarrow._s3fs", reason="this pyarrow has no S3")

ROWS = 400
ALL_ROWS = f" {2 * ROWS} rows"


@pytest.fixture(autouse=True)
def _without_an_instance_of_ec2(monkeypatch):
    """Who has no credentials asks for those of the machine, at an address that nothing answers."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def fill(folder: Path) -> None:
    """A bucket: Parquet files below data/, of 16 row groups, arrays in arrays/."""
    bucket = folder / "bucket"
    (bucket / "data" / "more").mkdir(parents=True)
    (bucket / "arrays").mkdir()
    rng = np.random.default_rng(0)
    for number, name in enumerate(["a.parquet", "more/b.parquet"]):
        ids = np.arange(number * ROWS, (number + 1) * ROWS)
        x = (ids[:, None] + np.arange(64)).astype(np.float32)
        wide = rng.random((ROWS, 256))
        table = pa.table(
            {
                "id": ids,
                "x": pa.FixedSizeListArray.from_arrays(x.ravel(), 64),
                "wide": pa.FixedSizeListArray.from_arrays(wide.ravel(), 256),
            }
        )
        pq.write_table(table, bucket / "data" / name, row_group_size=50)
    np.save(bucket / "arrays" / "x.npy", np.arange(10_000).reshape(1000, 10))


def check(sample) -> int:
    number = int(sample["id"])
    assert sample["x"].tolist() == list(range(number, number + 64))
    return number


# -- a server of our own ----------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path) -> Iterator[ObjectStore]:
    fill(tmp_path)
    with serve(tmp_path) as serving:
        yield serving


@pytest.fixture
def patient() -> Retries:
    """Retries that note their delays, and take none."""
    delays: list[float] = []
    return Retries(4, sleep=delays.append, jitter=lambda: 1.0)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing is collected as garbage: h5py's objects take h5py's lock as they die.

    The store's thread, where the collector may run, would wait for whoever reads HDF5 from that very store.
    """
    gc.disable()
    yield
    gc.enable()


def delays_of(retries: Retries) -> list[float]:
    return retries.sleep.__self__  # type: ignore[attr-defined]  # the list whose append it is


@pytest.mark.slow
def test_rows_from_s3_are_what_was_stored_in_every_process(store):
    with ParquetRows(store.uri("bucket/data"), ["id", "x"], rows_per_group=10) as source:
        assert {check(sample) for sample in take(source, 3000)} > set(range(0, 2 * ROWS, 100))
        require_pure(source)


def test_only_footers_are_read_at_construction_and_then_only_what_is_sampled(store):
    total = sum(file.stat().st_size for file in (store.folder / "bucket" / "data").rglob("*.parquet"))
    source = ParquetRows(store.uri("bucket/data"), ["id", "x"], rows_per_group=5)
    footers = store.read_bytes()
    assert footers <= 2 * 65536 < 0.1 * total
    take(source, 5)
    opened = len(store.requests)
    before = store.read_bytes()
    take(source, 5 * 40)
    # one request a row group, for its columns together; two to open the other file
    assert len(store.requests) - opened <= 40 + 2
    assert store.read_bytes() - before < 40 * 0.3 * total / 16 + 65536  # without the widest column
    source.close()


@pytest.mark.slow
@pytest.mark.usefixtures("uncollected")
def test_windows_of_every_format_come_from_s3(store):
    volume = np.random.default_rng(1).random((40, 30)).astype(np.float32)
    folder = store.folder / "bucket" / "arrays"
    np.save(folder / "v.npy", volume)
    names = ["v.npy"]
    h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr", "3.0")
    with h5py.File(folder / "v.h5", "w") as file:
        file.create_dataset("deep/v", data=volume, chunks=(7, 30))
    zarr.create_array(folder / "v.zarr", data=volume, chunks=(7, 30))
    names += ["v.h5", "v.zarr"]
    for name in names:
        uri = store.uri(f"bucket/arrays/{name}") + ("#deep/v" if name == "v.h5" else "")
        with ArrayWindows(uri, (8, 9), with_position=True) as source:
            for sample in take(source, 20):
                x, y = sample["position"]
                assert np.array_equal(sample["data"], volume[x : x + 8, y : y + 9])
            require_pure(source)


@pytest.mark.parametrize("kind", ["slow_down", "reset", "truncated"])
def test_what_passes_is_tried_again_and_changes_nothing(store, patient, kind):
    expected = [s["id"] for s in take(ParquetRows(store.uri("bucket/data"), ["id"], rows_per_group=7), 70)]
    source = ParquetRows(store.uri("bucket/data"), ["id"], rows_per_group=7, retries=patient)
    store.faults.append(Fault(kind, 3))
    assert [s["id"] for s in take(source, 70)] == expected
    assert store.faults[0].times == 0
    source.close()


@pytest.mark.parametrize("kind", ["slow_down", "reset", "truncated"])
def test_construction_tries_again_too(store, patient, kind):
    store.faults += [Fault(kind, 2), Fault("slow_down", 1, method="HEAD")]
    assert ALL_ROWS in repr(ParquetRows(store.uri("bucket/data"), retries=patient))
    assert not any(fault.times for fault in store.faults)


@pytest.mark.slow
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("name", ["v.npy", "v.h5#v", "v.zarr"])
def test_windows_of_every_format_are_tried_again_and_end_with_the_stores_error(store, patient, name):
    folder = store.folder / "bucket" / "arrays"
    if name == "v.npy":
        np.save(folder / name, np.arange(100_000))
    elif name == "v.h5#v":
        with pytest.importorskip("h5py").File(folder / "v.h5", "w") as file:
            file.create_dataset("v", data=np.arange(100_000), chunks=(1000,))
    else:
        pytest.importorskip("zarr", "3.0").create_array(folder / "v.zarr", data=np.arange(1000), chunks=(50,))
    file_name, _, inner = name.partition("#")
    uri = store.uri(f"bucket/arrays/{file_name}") + (f"#{inner}" if inner else "")
    with ArrayWindows(uri, (80,), retries=patient) as source:
        take(source, 1)
        store.faults.append(Fault("slow_down", 3))
        for sample in take(source, 30):
            assert np.array_equal(np.diff(sample["data"]), np.ones(79))
        assert store.faults[0].times == 0
        store.faults.append(Fault("slow_down", 10_000))
        with pytest.raises(OSError, match=rf"in 5 attempts: .*{file_name}"):
            take(source, 100)
        store.faults.clear()
        assert len(take(source, 3)) == 3
        store.faults.append(Fault("denied", 10_000))
        with pytest.raises(PermissionError, match="refuses these credentials"):
            take(source, 100)


@pytest.mark.slow
def test_a_store_that_throttles_is_asked_more_slowly_until_it_answers(store):
    """Eight samplers at a store that serves two at a time: each comes through, with real delays."""
    from concurrent.futures import ThreadPoolExecutor

    uri = store.uri("bucket/data")
    expected = [s["id"] for s in take(ParquetRows(uri, ["id"], rows_per_group=5), 50)]
    store.most_at_once, store.latency_seconds = 2, 0.005
    quick = Retries(1000, first_seconds=0.01, most_seconds=0.05)
    with ThreadPoolExecutor(8) as threads:
        sources = [
            threads.submit(ParquetRows, uri, ["id"], rows_per_group=5, retries=quick) for _ in range(8)
        ]
        drawn = [threads.submit(take, source.result(), 50) for source in sources]
        for each in drawn:
            assert [s["id"] for s in each.result()] == expected
    assert store.throttled > 0


def test_what_does_not_pass_ends_after_growing_delays_with_file_and_cause(store, patient):
    source = ParquetRows(store.uri("bucket/data/more"), ["id"], retries=patient)
    store.faults.append(Fault("slow_down", 10_000))
    with pytest.raises(
        OSError,
        match=r"(?i)in 5 attempts: .*(service.unavailable|slow.down).*s3://bucket/data/more/b\.parquet",
    ) as caught:
        take(source, 1)
    assert delays_of(patient) == [0.25, 0.5, 1.0, 2.0]
    assert "secret" not in str(caught.value)


def test_rights_that_end_are_no_reason_to_try_again(store, patient):
    source = ParquetRows(store.uri("bucket/data"), ["id"], retries=patient)
    asked = len(store.requests)
    store.faults.append(Fault("denied", 10_000))
    with pytest.raises(PermissionError, match=r"refuses these credentials.*check the key.*parquet"):
        take(source, 1)
    assert len(store.requests) <= asked + 3  # by obstore, its length, and what was denied
    assert not delays_of(patient)


def test_a_mix_goes_on_without_the_store_that_fails_only_if_asked_to(store, patient, tmp_path):
    local = ParquetRows(store.folder / "bucket" / "data", ["id"])
    for on_error in ("skip", "raise"):
        far = ParquetRows(store.uri("bucket/data"), ["id"], retries=patient)
        mix = Mix({local: 1, far: 1}, on_error=on_error)
        store.faults[:] = [Fault("slow_down", 10_000)]
        if on_error == "skip":
            assert len(take(mix, 100)) == 100
        else:
            with pytest.raises(OSError, match=r"(?i)service.unavailable|slow.down"):
                take(mix, 100)
        store.faults.clear()


@pytest.mark.slow
def test_a_filesystem_of_pyarrow_does_as_well_as_a_uri(store):
    filesystem = fs.S3FileSystem(
        access_key="key", secret_key="secret", region="us-east-1", scheme="http",
        endpoint_override=f"127.0.0.1:{store.port}",
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=2),
    )  # fmt: skip
    source = ParquetRows("bucket/data", ["id"], filesystem=filesystem)
    require_pure(source)
    assert ALL_ROWS in repr(source)


READS = """
import os, sys
from arrowcache.pickling import unpickled
from drawing import take

source = unpickled(sys.stdin.buffer.read())
before = len(os.listdir("/proc/self/task"))
assert len(take(source, 300)) == 300
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.slow
def test_files_of_a_filesystem_in_python_are_read_without_threads_of_arrow(store):
    """They held such a file still while the process ended, which then was aborted."""
    files = pytest.importorskip("fsspec").filesystem("file")
    source = ParquetRows(str(store.folder / "bucket" / "data"), ["id"], filesystem=files)
    require_pure(source)
    assert run_elsewhere(READS, source) == "0"


@pytest.mark.parametrize("condition", [pc.field("id") >= 0, pc.is_valid(pc.field("x"))])
def test_with_a_filter_too_they_are_read_by_the_thread_that_draws(store, condition):
    local, readers = pytest.importorskip("fsspec.implementations.local"), set()

    class Watched(local.LocalFileOpener):
        def read(self, *arguments):
            readers.add(threading.get_ident())
            return self.f.read(*arguments)

    class Files(local.LocalFileSystem):
        cachable = False

        def _open(self, path, mode="rb", **options):
            return Watched(path, mode, fs=self, **options)

    source = ParquetRows(str(store.folder / "bucket" / "data"), ["id"], condition, filesystem=Files())
    readers.clear()  # of the footers
    assert len(take(source, 300)) == 300
    assert readers == {threading.get_ident()}


def test_files_named_one_by_one_are_on_one_store(store):
    uris = [store.uri(f"bucket/data/{name}") for name in ("a.parquet", "more/b.parquet")]
    assert ALL_ROWS in repr(ParquetRows(uris))


def test_a_listing_of_many_pages_is_read_to_its_end(store):
    folder = store.folder / "bucket" / "many"
    folder.mkdir()
    for number in range(230):
        pq.write_table(pa.table({"x": [number]}), folder / f"{number}.parquet")
    source = ParquetRows(store.uri("bucket/many"))
    assert " 230 rows" in repr(source)


# -- obstore -----------------------------------------------------------------------------------------

NUMBERS = "bucket/arrays/x.npy"


@pytest.fixture
def obstore():
    pytest.importorskip("obstore", reason="obstore is not installed")


def asked(store: ObjectStore) -> set[str]:
    """The methods of the requests since the last look."""
    methods = {request.method for request in store.requests}
    store.requests.clear()
    return methods


def draw_windows(uri: str, filesystem=None) -> None:
    array = np.arange(10_000).reshape(1000, 10)
    with ArrayWindows(uri, (5,), with_position=True, filesystem=filesystem) as source:
        for sample in take(source, 10):
            start = int(sample["position"][0])
            assert np.array_equal(sample["data"], array[start : start + 5])


@pytest.mark.usefixtures("obstore")
def test_with_obstore_arrays_and_shards_are_read_without_a_request_for_their_size(store):
    zarr = pytest.importorskip("zarr", "3.0")
    array = np.arange(10_000).reshape(1000, 10)
    folder = store.folder / "bucket" / "arrays"
    zarr.create_array(folder / "x.zarr", data=array, chunks=(50, 10))
    zarr.create_array(folder / "y.zarr", data=array, chunks=(50, 10), shards=(500, 10))
    for name in ("x.npy", "x.zarr", "y.zarr"):
        draw_windows(store.uri(f"bucket/arrays/{name}"))
        assert asked(store) == {"GET"}, name
    with tarfile.open(folder / "x.tar", "w") as shard:
        shard.add(folder / "x.npy", "0.npy")
    source = WebDatasetShards(store.uri("bucket/arrays/x.tar"))
    asked(store)
    assert np.array_equal(take(source, 1)[0]["npy"], array)
    assert asked(store) == {"GET"}


@pytest.mark.usefixtures("obstore", "uncollected")
@pytest.mark.parametrize("chunks", [None, (50, 10)])
def test_with_obstore_hdf5_is_read_without_a_request_for_its_size(store, chunks):
    h5py = pytest.importorskip("h5py")
    folder = store.folder / "bucket" / "arrays"
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(10_000).reshape(1000, 10), chunks=chunks)
    draw_windows(store.uri("bucket/arrays/x.h5") + "#x")
    assert asked(store) == {"GET"}
    for name in ("empty.h5", "no.h5"):
        (folder / "empty.h5").touch()
        with pytest.raises((SamplerError, FileNotFoundError), match=rf"s3://bucket/arrays/{name}"):
            ArrayWindows(store.uri(f"bucket/arrays/{name}") + "#x", (1,))


@pytest.mark.usefixtures("obstore")
def test_with_obstore_parquet_is_read_without_a_request_for_its_size(store):
    path, count = store.folder / "bucket" / "wide" / "x.parquet", 2000
    path.parent.mkdir()
    numbers = np.arange(count)
    table = pa.table(
        {"id": numbers, "id.b": numbers * 2, "text": [f"{n:09}" for n in range(count)]}
        | {"pair": pa.array([[n, n] for n in range(count)]), "in": [{"x": n, "y": -n} for n in range(count)]}
        | {f"column{n}": numbers for n in range(500)}  # a long footer
    )
    pq.write_table(table, path, row_group_size=100)
    columns, uri = ["id", "id.b", "text", "pair"], store.uri("bucket/wide/x.parquet")
    for condition in (None, pc.field("in", "x") < 1000):
        source = ParquetRows(uri, columns, condition, rows_per_group=10)
        asked(store)
        for sample in take(source, 200):
            number = int(sample["id"])
            assert (int(sample["id.b"]), sample["text"]) == (2 * number, f"{number:09}")
            assert [*sample["pair"]] == [number, number]
        assert asked(store) == {"GET"}
    path.unlink()
    source.close()
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/wide/x\.parquet"):
        take(source, 1)


@pytest.mark.usefixtures("obstore")
def test_obstore_and_pyarrow_read_the_same_bytes_and_raise_the_same_errors(store, patient):
    files = fs.FileSystem.from_uri(store.uri("bucket"))[0]
    found, _ = locate(store.uri("bucket/data"), None, patient)
    for name in ("x y", "x%20y", "x#y?", "\u00fc=&+", "a..b", ".x", "empty"):
        path = f"bucket/names/{name}"
        (store.folder / path).parent.mkdir(exist_ok=True)
        (store.folder / path).write_bytes(b"" if name == "empty" else name.encode() * 40)
        with files.open_input_file(path) as file:
            data = file.readall()
        parts = [(), (0,), (0, 0), (7,), (3, 40), (-9,)]
        for part in parts[: 3 if not data else None]:
            start, nbytes = (*part, None, None)[:2]
            start = start or 0
            expected = data[start:] if nbytes is None else data[start : start + nbytes]
            assert found.fetch(path, *part) == expected, (name, part)
    for path, part, error in [
        ("bucket/no", (), FileNotFoundError), ("none/no", (0, 5), FileNotFoundError),
        ("bucket/names/x y", (100, 50), OSError), ("bucket/names/x y", (1000, 50), OSError),
    ]:  # fmt: skip
        with pytest.raises(error, match=f"s3://{path}") as caught:
            found.fetch(path, *part)
        assert type(caught.value) is error
        assert "secret" not in str(caught.value)


@pytest.mark.usefixtures("obstore")
def test_in_a_forked_child_pyarrow_reads_what_obstore_read_before(store):
    uri = store.uri(NUMBERS)
    draw_windows(uri)
    with in_child(lambda: draw_windows(uri)):
        pass
    assert asked(store) == {"GET", "HEAD"}
    draw_windows(uri)
    assert asked(store) == {"GET"}, "the parent goes on with obstore"


OWN_OBSTORE = """
import os, signal, sys
import obstore
from obstore.store import S3Store

store = S3Store(
    "bucket", endpoint=f"http://127.0.0.1:{sys.argv[2]}", access_key_id="key", secret_access_key="secret",
    region="us-east-1", client_options={"allow_http": True},
)
obstore.get(store, "arrays/x.npy").bytes()
if not os.fork():
    signal.alarm(60)
    import numpy as np
    from arrowcache.sampling.sources import ArrayWindows
    from drawing import take
    os._exit(len(take(ArrayWindows(sys.argv[1], (5,)), 3)))
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.usefixtures("obstore")
def test_in_a_child_of_a_process_that_used_obstore_itself_pyarrow_reads(store):
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", OWN_OBSTORE, store.uri(NUMBERS), str(store.port)],
        env=os.environ | {"PYTHONPATH": path}, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "HEAD" in asked(store)


@pytest.mark.usefixtures("obstore")
def test_what_obstore_does_not_speak_pyarrow_reads(store, monkeypatch, tmp_path):
    def of(**options):
        return fs.S3FileSystem(
            region="us-east-1", scheme="http", endpoint_override=f"127.0.0.1:{store.port}", **options
        )

    draw_windows(NUMBERS, of(access_key="key", secret_key="secret"))
    assert asked(store) == {"GET"}
    draw_windows(NUMBERS, of(anonymous=True))
    assert asked(store) == {"GET"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    draw_windows(NUMBERS, of())
    assert asked(store) == {"GET"}
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = key\naws_secret_access_key = secret\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    draw_windows(NUMBERS, of())
    assert asked(store) == {"GET", "HEAD"}
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # of which pyarrow knows nothing
    draw_windows(NUMBERS, of(access_key="key", secret_key="secret"))
    assert asked(store) == {"GET", "HEAD"}


@pytest.mark.usefixtures("obstore")
@pytest.mark.parametrize(
    "name",
    ["AWS_ENDPOINT", "AWS_Endpoint", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "GOOGLE_BASE_URL",
     "AZURE_STORAGE_USE_EMULATOR"],
)  # fmt: skip
def test_a_store_that_the_environment_names_for_obstore_is_not_read_by_it(monkeypatch, name):
    from arrowcache.sampling.sources.getter import getter_of

    files = {
        "AWS": lambda: fs.S3FileSystem(anonymous=True, region="us-east-1"),
        "GOOGLE": lambda: fs.GcsFileSystem(anonymous=True),
        "AZURE": lambda: fs.AzureFileSystem("account", account_key="a2V5"),
    }[name.partition("_")[0]]()
    assert getter_of(files) is not None
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert getter_of(files) is None


@pytest.mark.usefixtures("obstore")
@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("AWS_ENDPOINT", {"GET"}), ("AWS_ENDPOINT_URL", {"GET"}), ("AWS_ENDPOINT_URL_S3", {"GET", "HEAD"}),
        ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", {"GET", "HEAD"}), ("AWS_S3_EXPRESS", {"GET", "HEAD"}),
    ],
)  # fmt: skip
def test_the_server_of_a_uri_goes_before_one_of_the_environment(store, monkeypatch, name, methods):
    for other in ("other/bucket/arrays", "arrays"):  # the second as of a host that is a bucket
        (store.folder / other).mkdir(parents=True)
        np.save(store.folder / other / "x.npy", np.zeros((1000, 10), np.int64))
    monkeypatch.setenv(name, f"http://127.0.0.1:{store.port}/other" if "ENDPOINT" in name else "true")
    draw_windows(store.uri(NUMBERS))
    assert asked(store) == methods


def test_keys_of_a_uri_go_without_a_token_of_the_environment(store, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of others")
    draw_windows(store.uri(NUMBERS))
    assert {request.token for request in store.requests} == {None}


@pytest.mark.usefixtures("obstore")
def test_obstore_reads_other_stores_without_a_request_for_their_size(store):
    at = f"127.0.0.1:{store.port}"
    azure = dict.fromkeys(["blob_storage_authority", "dfs_storage_authority"], at)
    azure |= dict.fromkeys(["blob_storage_scheme", "dfs_storage_scheme"], "http")
    draw_windows(NUMBERS, fs.GcsFileSystem(anonymous=True, scheme="http", endpoint_override=at))
    assert asked(store) == {"GET"}
    draw_windows("arrays/x.npy", fs.AzureFileSystem("bucket", account_key="a2V5", **azure))
    assert asked(store) == {"GET"}
    http = pytest.importorskip("fsspec.implementations.http").HTTPFileSystem()
    draw_windows(f"http://{at}/{NUMBERS}", http)
    assert asked(store) == {"GET"}


# -- moto --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moto_port(tmp_path_factory) -> Iterator[int]:
    server = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    folder = tmp_path_factory.mktemp("moto")
    fill(folder)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    _, port = running.get_host_and_port()
    client = boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
        aws_access_key_id="key", aws_secret_access_key="secret",
    )  # fmt: skip
    client.create_bucket(Bucket="bucket")
    for file in sorted((folder / "bucket").rglob("*")):
        if file.is_file():
            key = str(file.relative_to(folder / "bucket"))
            client.put_object(Bucket="bucket", Key=key, Body=file.read_bytes())
    client.close()
    yield port
    running.stop()


def of_moto(port: int, path: str, key: str = "key", secret: str = "secret") -> str:
    return f"s3://{key}:{secret}@{path}?endpoint_override=127.0.0.1%3A{port}&scheme=http&region=us-east-1"


@pytest.mark.slow
def test_moto_rows_and_windows(moto_port):
    source = ParquetRows(of_moto(moto_port, "bucket/data"), rows_per_group=10)
    assert len({check(sample) for sample in take(source, 100)}) > 50
    array = np.arange(10_000).reshape(1000, 10)
    for sample in take(ArrayWindows(of_moto(moto_port, "bucket/arrays/x.npy"), (5,), with_position=True), 5):
        start = int(sample["position"][0])
        assert np.array_equal(sample["data"], array[start : start + 5])
    source.close()


def test_moto_a_bucket_or_key_that_is_not_there_is_named(moto_port):
    for path in ("bucket/no", "none/data", "bucket/data/no.parquet"):
        with pytest.raises(FileNotFoundError, match=f"s3://{path}"):
            ParquetRows(of_moto(moto_port, path))
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/no\.npy"):
        ArrayWindows(of_moto(moto_port, "bucket/no.npy"), (1,))
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/arrays/no"):
        ArrayWindows(of_moto(moto_port, "bucket/arrays/no"), (1,))


def require_rights(port: int, after_requests: int) -> None:
    """Have moto look at credentials, which it otherwise does not."""
    url, headers = f"http://127.0.0.1:{port}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    request = urllib.request.Request(url, str(after_requests).encode(), headers, method="POST")
    urllib.request.urlopen(request, timeout=60).close()


@pytest.mark.parametrize("path", ["bucket/data", "bucket/data/a.parquet"])
def test_moto_wrong_credentials_end_at_once_and_say_what_to_do(moto_port, path, patient):
    require_rights(moto_port, after_requests=0)
    try:
        with pytest.raises(PermissionError, match=rf"check the key, its secret.*s3://{path}") as caught:
            ParquetRows(of_moto(moto_port, path, key="AKIAWRONG", secret="hidden"), retries=patient)
    finally:
        require_rights(moto_port, after_requests=2**31)
    assert "hidden" not in str(caught.value)
    assert not delays_of(patient)


def test_sources_of_two_stores_are_not_one_source(moto_port, store):
    with pytest.raises(
        ValueError, match="in another store than s3://bucket/data: make a source of each"
    ) as caught:
        ParquetRows([of_moto(moto_port, "bucket/data"), store.uri("bucket/data")])
    assert "secret" not in str(caught.value)
