"""Adapters: a class a peer, which stores the data set and delivers it as the peer's documentation advises.

`ADAPTERS` has them by the key of `registry`. Each imports its peer inside its functions, so importing this
costs nothing. Nothing else but NumPy and the standard library is imported here: see `workload`.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.workload import Batch, Workload

SHARDS = 16
BUFFER_ROWS, BUFFER_BYTES = 1000, 256 << 20  # of a shuffle buffer, whichever is less
SHUFFLE_BYTES = 64 << 20  # of a shuffle buffer that is given in bytes


class Adapter:
    """One peer with one data set; a context manager that gives the epochs. What is put into `opened` ends
    with it. One whose state can be saved in mid-epoch has `resume`, too: see `Stateful`.

    Args:
        workers: processes (or threads, where the peer has those instead) beside the consumer's thread; 0: as
            few as the peer can do with.
    """

    def __init__(self, folder: Path, workload: Workload, workers: int = 0, *, shuffled: bool = True) -> None:
        self.folder, self.workload, self.workers, self.shuffled = folder, workload, workers, shuffled
        self.batch_rows = workload.batch_rows
        self.opened = ExitStack()

    def write(self) -> None:
        """Write the data set in the peer's own format into an empty folder."""
        raise NotImplementedError

    def epochs(self) -> Iterable[Batch]:
        """Open the data set. Each `iter` of the result is an epoch: all rows once, but for an incomplete
        last batch (of each worker), in another order each time if `shuffled`."""
        raise NotImplementedError

    def by_torch(self, kind: Any, rows: Any, **more: Any) -> Any:
        """torch's DataLoader, or one like it."""
        return kind(rows, num_workers=self.workers, persistent_workers=self.workers > 0, **more)

    def stock(self, rows: Any, **more: Any) -> Any:
        """torch's DataLoader of a map-style dataset."""
        from torch.utils.data import DataLoader

        more |= {"batch_size": self.batch_rows, "shuffle": self.shuffled, "drop_last": True}
        return self.by_torch(DataLoader, rows, **more)

    def __enter__(self) -> Iterable[Batch]:
        return self.epochs()

    def __exit__(self, *_: object) -> None:
        self.opened.close()


class Epochs:
    """Each `iter` is an epoch, which a function begins."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def pair(batch: Any) -> Batch:
    return batch["x"], batch["y"]


def pairs(batches: Iterable[Any]) -> Epochs:
    """Epochs of pairs, of a loader whose batches are dicts."""
    return Epochs(lambda: map(pair, batches))


def tensors(batch: Batch) -> Batch:
    """As tensors, which workers hand over in shared memory, where arrays would go through a pipe."""
    import torch

    x, y = batch
    return torch.from_numpy(x), torch.from_numpy(y)


class Stateful(Adapter):
    """A peer whose loader has torch's `state_dict` and `load_state_dict`."""

    def loader(self) -> Any:
        raise NotImplementedError

    def resume(self, state: bytes | None, batches: int | None) -> tuple[list[int], bytes]:
        """Take some batches of a shuffled epoch (None: all that are left), from its beginning or a state.

        Returns: the labels of their rows, and the state after them.
        """
        loader = self.loader()
        if state is not None:
            loader.load_state_dict(pickle.loads(state))
        rows: list[int] = []
        epoch = iter(loader)
        for batch in itertools.islice(epoch, batches):
            labels = batch["y"] if isinstance(batch, dict) else batch[1]
            rows.extend(np.asarray(labels).reshape(-1).tolist())
        return rows, pickle.dumps(loader.state_dict())


class Arrowcache(Stateful):
    """arrowcache itself, with its defaults: README.md is its documentation."""

    def write(self) -> None:
        import arrowcache as ac

        columns = {"x": ac.Tensor("float32", (self.workload.columns,)), "y": ac.Tensor("int64")}
        capacity = 2 * self.workload.nbytes + (1 << 30)
        with ac.Cache.create(self.folder / "cache", columns, capacity) as cache, cache.writer() as writer:
            for x, y in self.workload.chunks():
                writer.extend(x=x, y=y)

    def loader(self) -> Any:
        from arrowcache.torch import Loader

        shuffle = "rows" if self.shuffled else None
        loader = Loader(self.folder / "cache", self.batch_rows, shuffle=shuffle, workers=self.workers)
        return self.opened.enter_context(loader)

    def epochs(self) -> Epochs:
        return pairs(self.loader())


class MappedRows:
    """A map-style dataset. The mappings are private, so that torch need not warn that they are read-only."""

    def __init__(self, folder: Path) -> None:
        import torch

        self.x = torch.from_numpy(np.load(folder / "x.npy", mmap_mode="c"))
        self.y = torch.from_numpy(np.load(folder / "y.npy", mmap_mode="c"))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.x[row], self.y[row]


class Mapped(Adapter):
    """Rows of an `.npy` file that is mapped, one at a time, through torch's DataLoader.

    The rows are views of a tensor of the whole mapping: at rows of 1 KiB that was several times as fast as
    views of NumPy's, which collation has to wrap one by one; at 64 KiB the two were near each other.
    """

    def write(self) -> None:
        rows, columns = self.workload.rows, self.workload.columns
        x = np.lib.format.open_memmap(self.folder / "x.npy", "w+", np.float32, (rows, columns))
        y = np.lib.format.open_memmap(self.folder / "y.npy", "w+", np.int64, (rows,))
        for xs, ys in self.workload.chunks():
            x[ys[0] : ys[-1] + 1], y[ys[0] : ys[-1] + 1] = xs, ys
        x.flush()
        y.flush()

    def epochs(self) -> Any:
        return self.stock(MappedRows(self.folder))


def mapped_arrays(folder: Path) -> list[NDArray[Any]]:
    """np.asarray: indexing the subclass np.memmap costs more, and gives that subclass."""
    return [np.asarray(np.load(folder / name, mmap_mode="r")) for name in ("x.npy", "y.npy")]


class MappedBatches:
    """A map-style dataset that is asked for all rows of a batch at once."""

    def __init__(self, folder: Path) -> None:
        self.x, self.y = mapped_arrays(folder)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Batch:
        return self.x[row], self.y[row]

    def __getitems__(self, rows: list[int]) -> Batch:
        return np.take(self.x, rows, axis=0), np.take(self.y, rows)


class MappedByBatch(Mapped, Stateful):
    """A mapped `.npy` file, a whole batch by one `np.take`, in torch's `__getitems__`."""

    def epochs(self) -> Any:
        return self.stock(MappedBatches(self.folder), collate_fn=tensors)

    def loader(self) -> Any:
        """torchdata's StatefulDataLoader in place of torch's DataLoader."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        rows, more = MappedBatches(self.folder), {"collate_fn": tensors, "drop_last": True}
        return self.by_torch(StatefulDataLoader, rows, batch_size=self.batch_rows, shuffle=True, **more)


class Spdl(Mapped):
    """SPDL: a pipeline whose threads gather batches out of a mapped `.npy` file.

    A stage that gathers a batch was faster than one that copies a row, with an `aggregate` after it. One
    pipeline serves all epochs (`continuous`), as its page on execution models says.
    """

    def epochs(self) -> Iterable[Batch]:
        from spdl.pipeline import PipelineBuilder

        x, y = mapped_arrays(self.folder)
        threads, chance = max(1, self.workers), np.random.default_rng() if self.shuffled else None

        def orders() -> Iterator[NDArray[np.int64]]:
            """The batches of an epoch: the numbers of their rows."""
            rows, size = self.workload.rows, self.batch_rows
            order = np.arange(rows) if chance is None else chance.permutation(rows)
            return (order[start : start + size] for start in range(0, rows - size + 1, size))

        def gather(rows: NDArray[np.int64]) -> Batch:
            return np.take(x, rows, axis=0), np.take(y, rows)

        pipeline = (
            PipelineBuilder()
            .add_source(Epochs(orders), continuous=True)
            .pipe(gather, concurrency=threads, output_order="input")
            .add_sink(3)
            .build(num_threads=threads)
        )
        self.opened.enter_context(pipeline.auto_stop())
        return pipeline  # type: ignore[no-any-return]


def parse_record(record: bytes) -> Batch:
    return np.frombuffer(record, np.float32, offset=8), np.frombuffer(record, np.int64, 1)[0]


class Grain(Adapter):
    """Grain over ArrayRecord: a record a row, a global shuffle by index, read-ahead in threads or processes.

    Batches made by the reading threads were faster than rows read ahead and batched afterwards; as many
    threads as Grain has by default, no slower than two.
    """

    def write(self) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(self.folder / "data.arrayrecord"), "group_size:1,uncompressed")
        for x, y in self.workload.samples():
            writer.write(y.tobytes() + x.tobytes())
        writer.close()

    def stream(self) -> tuple[Any, int]:
        """A stream that repeats the data set, and how many of its batches are an epoch."""
        import grain

        source = grain.sources.ArrayRecordDataSource(str(self.folder / "data.arrayrecord"))
        rows = grain.MapDataset.source(source).seed(0)
        if self.shuffled:
            rows = rows.shuffle()
        batches = rows.map(parse_record).batch(self.batch_rows, drop_remainder=True)
        stream = batches.repeat().to_iter_dataset(grain.ReadOptions(num_threads=16, prefetch_buffer_size=16))
        if self.workers:
            stream = stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=self.workers))
        return stream, len(batches)

    def epochs(self) -> Epochs:
        """Epochs of one stream, so that workers are started once."""
        dataset, count = self.stream()
        left: list[Iterator[Batch]] = []

        def epoch() -> Iterator[Batch]:
            stream = left.pop() if left else iter(dataset)  # an epoch that is abandoned gives its stream up
            for _ in range(count):
                yield next(stream)
            left.append(stream)

        return Epochs(epoch)

    def resume(self, state: bytes | None, batches: int | None) -> tuple[list[int], bytes]:
        """With the iterator's `get_state` and `set_state`, and the number of batches that were taken."""
        dataset, epoch = self.stream()
        stream, done = iter(dataset), 0
        if state is not None:
            at, done = pickle.loads(state)
            stream.set_state(at)
        count = epoch - done if batches is None else batches
        rows = [int(row) for _, (_, y) in zip(range(count), stream, strict=False) for row in y]
        return rows, pickle.dumps((stream.get_state(), done + count))


def pair_of_tensors(batch: dict[str, Any]) -> Batch:
    return tensors(pair(batch))


class HfDatasets(Adapter):
    """Hugging Face datasets, map-style: an Arrow file that is mapped, rows of a batch asked for at once.

    Format "numpy" was several times faster than "torch" at rows of 64 KiB; a sampler of batches, and a batch
    size and `__getitems__`, were as fast as each other.
    """

    def write(self) -> None:
        import pyarrow as pa
        from datasets import Features, List, Value

        features = Features({"x": List(Value("float32"), length=self.workload.columns), "y": Value("int64")})
        schema = features.arrow_schema
        with (
            pa.OSFile(str(self.folder / "data.arrow"), "wb") as file,
            pa.ipc.new_stream(file, schema) as stream,
        ):
            for x, y in self.workload.chunks():
                rows = pa.FixedSizeListArray.from_arrays(x.reshape(-1), type=schema.field("x").type)
                table = pa.table([rows, y], schema=schema)
                stream.write_table(table, max_chunksize=1000)  # as datasets does by default

    def epochs(self) -> Any:
        from datasets import Dataset
        from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

        rows: Any = Dataset.from_file(str(self.folder / "data.arrow")).with_format("numpy")
        order = RandomSampler(rows) if self.shuffled else SequentialSampler(rows)
        sampler = BatchSampler(order, self.batch_rows, drop_last=True)
        return self.by_hf(DataLoader, rows, sampler=sampler)

    def by_hf(self, kind: Any, rows: Any, **more: Any) -> Any:
        """torch's DataLoader, or one like it, of a dataset that makes batches itself."""
        return self.by_torch(kind, rows, batch_size=None, collate_fn=pair_of_tensors, **more)


class HfDatasetsIterable(HfDatasets, Stateful):
    """Hugging Face datasets, iterable: the same Arrow file read in order through a shuffle buffer.

    Format "numpy" was faster than "torch". `set_epoch` moves the first shard of an epoch even where nothing
    is shuffled, so only a shuffled data set is told its epoch.
    """

    def batches(self) -> Any:
        from datasets import Dataset

        rows = Dataset.from_file(str(self.folder / "data.arrow")).to_iterable_dataset(num_shards=SHARDS)
        if self.shuffled:
            rows = rows.shuffle(seed=0, buffer_size=buffer_rows(self.workload))
        return rows.with_format("numpy").batch(self.batch_rows, drop_last_batch=True)

    def epochs(self) -> Epochs:
        from torch.utils.data import DataLoader

        batches, numbers = self.batches(), itertools.count()
        loader = self.by_hf(DataLoader, batches)

        def epoch() -> Iterator[Batch]:
            if self.shuffled:
                batches.set_epoch(next(numbers))
            return iter(loader)

        return Epochs(epoch)

    def loader(self) -> Any:
        """torchdata's StatefulDataLoader, as its documentation says."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        return self.by_hf(StatefulDataLoader, self.batches())


def buffer_rows(workload: Workload) -> int:
    return max(2, min(BUFFER_ROWS, BUFFER_BYTES // workload.row_bytes))


class LanceRows:
    """SafeLanceDataset, but for its conversion to Python lists."""

    def __init__(self, uri: str, rows: int) -> None:
        self._uri, self._rows, self._dataset = uri, rows, None

    def __len__(self) -> int:
        return self._rows

    def __getitems__(self, rows: list[int]) -> Batch:
        import lance

        if self._dataset is None:  # opened in the worker: Lance is not fork-safe
            self._dataset = lance.dataset(self._uri)
        table = self._dataset.take(rows)
        x = table["x"].combine_chunks().flatten().to_numpy()
        return tensors((x.reshape(len(rows), -1), table["y"].to_numpy()))


def same(batch: Any) -> Any:
    return batch


class Lance(Adapter):
    """Lance: a random `take` a batch; in order and without workers, its own torch dataset, which was faster.

    Its SafeLanceDataset takes as here, but makes Python lists of the numbers, which was several times slower;
    and its torch dataset shuffles no more than the order of batches.
    """

    def write(self) -> None:
        import pyarrow as pa
        from lance import write_dataset

        schema = pa.schema({"x": pa.list_(pa.float32(), self.workload.columns), "y": pa.int64()})
        columns = (
            [pa.FixedSizeListArray.from_arrays(x.reshape(-1), self.workload.columns), y]
            for x, y in self.workload.chunks()
        )
        batches = (pa.record_batch(each, schema=schema) for each in columns)
        write_dataset(pa.RecordBatchReader.from_batches(schema, batches), self.folder / "data.lance")

    def epochs(self) -> Any:
        uri = str(self.folder / "data.lance")
        if self.shuffled or self.workers:
            context = "spawn" if self.workers else None
            rows = LanceRows(uri, self.workload.rows)
            return self.stock(rows, collate_fn=same, multiprocessing_context=context)
        from lance.torch.data import LanceDataset

        batches: Any = LanceDataset(uri, self.batch_rows)
        return Epochs(lambda: (pair(batch) for batch in batches if len(batch["y"]) == self.batch_rows))


def torch_samples(workload: Workload, _: int) -> Iterator[tuple[Any, int]]:
    import torch

    for x, y in workload.samples():
        yield torch.from_numpy(x), int(y)


class Litdata(Stateful):
    """litdata: `optimize` into chunks, read in place from a local folder.

    Chunks are of its default 64 MiB; of 256 for samples of a megabyte and more, as its FAQ advises.
    """

    def write(self) -> None:
        from litdata import optimize

        mebibytes = 256 if self.workload.row_bytes >= 1 << 20 else 64
        optimize(
            partial(torch_samples, self.workload), inputs=[0], output_dir=str(self.folder / "chunks"),
            chunk_bytes=mebibytes << 20, num_workers=1, verbose=False,
        )  # fmt: skip

    def loader(self) -> Any:
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(str(self.folder / "chunks"), shuffle=self.shuffled, drop_last=False)
        return self.by_torch(StreamingDataLoader, dataset, batch_size=self.batch_rows, drop_last=True)

    def epochs(self) -> Any:
        return self.loader()


class RayData(Adapter):
    """Ray Data over Parquet files, in a Ray of this machine alone.

    As its tips on performance say: blocks between 1 and 128 MiB, here of 16; the order of files and a local
    shuffle buffer in place of a full shuffle; batches prefetched. Columns are Arrow's fixed-shape tensors,
    not compressed, of which batches are NumPy views. Rows are read anew each epoch: `materialize`, its advice
    for data that fits into its object store, would keep a second copy of everything in /dev/shm.

    Ray Data works in processes of its own, always: `workers` is how many it may run at a time (`num_cpus`),
    and there is no case without. Its object store is 1 GiB of /dev/shm.
    """

    def write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows_per_file = max(1, min(16 << 20, self.workload.nbytes // 4) // self.workload.row_bytes)
        columns = pa.fixed_shape_tensor(pa.float32(), (self.workload.columns,))
        schema = pa.schema({"x": columns, "y": pa.int64()})
        for x, y in self.workload.chunks():
            for start in range(0, len(y), rows_per_file):
                rows = slice(start, start + rows_per_file)
                x_column = pa.FixedShapeTensorArray.from_numpy_ndarray(x[rows])
                table = pa.table([x_column, pa.array(y[rows])], schema=schema)
                path = self.folder / f"{int(y[start]):09}.parquet"
                pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)

    def epochs(self) -> Epochs:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        temporary = tempfile.mkdtemp(prefix="ray")  # short: paths of sockets have 107 characters at most
        options: dict[str, Any] = {"num_cpus": max(1, self.workers), "object_store_memory": 1 << 30}
        options |= {"_temp_dir": temporary, "include_dashboard": False, "log_to_driver": False}
        self.opened.callback(shutil.rmtree, temporary, ignore_errors=True)
        self.opened.callback(ray.shutdown)
        ray.init(**options, logging_level=logging.ERROR)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = not self.shuffled
        size = self.batch_rows

        def epoch() -> Iterator[Batch]:
            rows = ray.data.read_parquet(
                str(self.folder), shuffle="files" if self.shuffled else None, file_extensions=["parquet"]
            )
            batches = rows.iter_batches(
                batch_size=size, batch_format="numpy", drop_last=True, prefetch_batches=2,
                local_shuffle_buffer_size=max(2 * size, SHUFFLE_BYTES // self.workload.row_bytes)
                if self.shuffled else None,
            )  # fmt: skip
            return map(pair, batches)

        return Epochs(epoch)


def reverb_table(max_rows: int, columns: int) -> Any:
    """A table "rows" that drops its oldest rows, and is sampled uniformly with no rate limit but one row."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import reverb
    import tensorflow as tf

    return reverb.Table(
        name="rows", sampler=reverb.selectors.Uniform(), remover=reverb.selectors.Fifo(), max_size=max_rows,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature={"x": tf.TensorSpec((columns,), tf.float32), "y": tf.TensorSpec((), tf.int64)},
    )  # fmt: skip


def reverb_append(writer: Any, x: Any, y: Any) -> None:
    """Write a row, which is an item."""
    writer.append({"x": x, "y": y})
    writer.create_item("rows", 1.0, {"x": writer.history["x"][-1], "y": writer.history["y"][-1]})


def reverb_batches(address: str, batch_rows: int, prefetch: int, **more: Any) -> Iterator[Batch]:
    """Batches of pairs without end, with three of them in flight."""
    import reverb

    dataset = reverb.TrajectoryDataset.from_table_signature(
        address, "rows", max_in_flight_samples_per_worker=3 * batch_rows, **more
    )
    rows = dataset.map(lambda sample: (sample.data["x"], sample.data["y"]))
    batches = rows.batch(batch_rows, drop_remainder=True).prefetch(prefetch)
    return batches.as_numpy_iterator()  # type: ignore[no-any-return]


class Reverb(Adapter):
    """Reverb, DeepMind's replay server: a Table in the memory of a server in this process, and its Dataset.

    What `write` leaves is a checkpoint of the table, which the server of `loader` loads: the rows are in
    memory from then on. As its documentation says, rows are written by a TrajectoryWriter, and read by a
    TrajectoryDataset with two to three batches in flight, which batches by itself.

    A table that is sampled uniformly gives rows with replacement, and one that removes what was sampled has
    no second epoch: so an "epoch" is as many rows as the table has, drawn at random, of which about two in
    three are different, and there is no unshuffled one. `workers` is the number of threads that fetch.
    """

    def server(self) -> Any:
        table = reverb_table(self.workload.rows, self.workload.columns)
        import reverb

        checkpoints = reverb.platform.checkpointers_lib.DefaultCheckpointer(
            path=str(self.folder / "checkpoint")
        )
        return reverb.Server(tables=[table], checkpointer=checkpoints)

    def write(self) -> None:
        server = self.server()
        client = server.localhost_client()
        with client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for x, y in self.workload.samples():
                reverb_append(writer, x, y)
                writer.flush(block_until_num_items=64)
            writer.flush()
        client.checkpoint()
        server.stop()

    def epochs(self) -> Epochs:
        if not self.shuffled:
            raise ValueError("a table that is read again and again has no order to be read in")
        server = self.server()
        self.opened.callback(server.stop)
        size, threads = self.batch_rows, max(1, self.workers)
        batches = reverb_batches(f"localhost:{server.port}", size, 2, num_workers_per_iterator=threads)
        return Epochs(lambda: itertools.islice(batches, self.workload.rows // size))


def streaming_module() -> Any:
    """MosaicML's. Also where torchvision's operators cannot be loaded: none of them is called here.

    `import streaming` imports torchvision, whose released wheels are for torch with CUDA and do not import
    beside a torch without.
    """
    try:
        import streaming
    except RuntimeError:
        import torch

        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
        import streaming
    return streaming


def write_mds(folder: Path, workload: Workload, **more: Any) -> None:
    columns = {"x": f"ndarray:float32:{workload.columns}", "y": "int64"}
    with streaming_module().MDSWriter(out=str(folder), columns=columns, **more) as writer:
        for x, y in workload.samples():
            writer.write({"x": x, "y": y})


class Streaming(Stateful):
    """MosaicML Streaming: local shards in its MDS format, read by torch's DataLoader.

    As its documentation says, `batch_size` goes to the dataset as well as to the DataLoader ("for optimal
    performance and deterministic resumption"), shuffling is its default `py1e`, shards are of its default 64
    MiB and not compressed, and arrays have their type and shape in the column's encoding, so that none is
    stored a row. Batches are made by the DataLoader's own collate. Its StreamingDataLoader is the DataLoader
    that can be resumed, and so the one that is measured.
    """

    def write(self) -> None:
        write_mds(self.folder / "mds", self.workload)

    def loader(self) -> Any:
        streaming = streaming_module()
        dataset = streaming.StreamingDataset(
            local=str(self.folder / "mds"), batch_size=self.batch_rows, shuffle=self.shuffled,
            num_canonical_nodes=1,
        )  # fmt: skip
        kind = streaming.StreamingDataLoader
        return self.by_torch(kind, dataset, batch_size=self.batch_rows, drop_last=True)

    def epochs(self) -> Epochs:
        return pairs(self.loader())


def tensordict_of(x: NDArray[np.float32], y: NDArray[np.int64]) -> Any:
    import torch
    from tensordict import TensorDict

    return TensorDict({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, batch_size=[len(y)])


class Tensordict(Adapter):
    """tensordict: memory-mapped tensors, from which torch's DataLoader reads each batch by one index."""

    def write(self) -> None:
        import torch
        from tensordict import TensorDict

        row = {"x": torch.zeros(self.workload.columns), "y": torch.zeros((), dtype=torch.int64)}
        rows = TensorDict(row, batch_size=[]).expand(self.workload.rows).memmap_like(self.folder / "rows")
        for x, y in self.workload.chunks():
            rows[int(y[0]) : int(y[-1]) + 1] = tensordict_of(x, y)

    def epochs(self) -> Any:
        from tensordict import TensorDict

        rows = TensorDict.load_memmap(self.folder / "rows")
        return self.stock(rows, collate_fn=pair)


def tensorflow_module() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    return tf


class Tfrecord(Adapter):
    """tf.data over TFRecord files of tf.train.Example, tuned as TensorFlow's guide to performance says.

    Files are read by a parallel interleave; batches are made before they are parsed, so that parsing is one
    vectorised call a batch (`parse_example`, `decode_raw`); what is ready is prefetched; batches come out as
    views of TensorFlow's memory (`as_numpy_iterator`). The order of files is drawn anew each epoch, and rows
    are drawn from a buffer of 64 MiB.

    tf.data has no worker processes: `workers` is how many threads it is given, as size of its private thread
    pool and as `num_parallel_calls`; without workers that is left to tf.data itself (`AUTOTUNE`), as the
    guide says. Its `cache`, which would keep the whole data set in memory, is for data that fits.
    """

    def write(self) -> None:
        tf = tensorflow_module()
        nbytes, row_bytes = self.workload.nbytes, self.workload.row_bytes
        rows_per_file = max(self.batch_rows, min(64 << 20, nbytes // 4) // row_bytes)
        file = None
        for number, (x, y) in enumerate(self.workload.samples()):
            if number % rows_per_file == 0:
                if file is not None:
                    file.close()
                file = tf.io.TFRecordWriter(str(self.folder / f"{number // rows_per_file:05}.tfrecord"))
            features = {
                "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[x.tobytes()])),
                "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(y)])),
            }
            file.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
        if file is not None:
            file.close()

    def batches(self) -> Any:
        tf = tensorflow_module()
        threads = self.workers or tf.data.AUTOTUNE
        features = {"x": tf.io.FixedLenFeature((), tf.string), "y": tf.io.FixedLenFeature((), tf.int64)}

        def parse(batch: Any) -> tuple[Any, Any]:
            parsed = tf.io.parse_example(batch, features)
            return tf.io.decode_raw(parsed["x"], tf.float32), parsed["y"]

        files = tf.data.Dataset.list_files(str(self.folder / "*.tfrecord"), shuffle=self.shuffled)
        rows = files.interleave(  # 16 rows of one file at a time: less CPU than a row
            tf.data.TFRecordDataset, cycle_length=4, block_length=16, num_parallel_calls=threads,
            deterministic=not self.shuffled,
        )  # fmt: skip
        if self.shuffled:
            rows = rows.shuffle(max(4 * self.batch_rows, SHUFFLE_BYTES // self.workload.row_bytes))
        batches = rows.batch(self.batch_rows, drop_remainder=True)
        batches = batches.map(parse, num_parallel_calls=threads).prefetch(tf.data.AUTOTUNE)
        options = tf.data.Options()
        if self.workers:
            options.threading.private_threadpool_size = self.workers
            options.threading.max_intra_op_parallelism = 1
        return batches.with_options(options)

    def epochs(self) -> Epochs:
        return Epochs(self.batches().as_numpy_iterator)

    def resume(self, state: bytes | None, batches: int | None) -> tuple[list[int], bytes]:
        """With a checkpoint of the iterator, in which its shuffle buffer is."""
        tf = tensorflow_module()
        epoch = iter(self.batches())
        checkpoint = tf.train.Checkpoint(epoch=epoch)
        with tempfile.TemporaryDirectory() as temporary:
            if state is not None:
                for name, content in pickle.loads(state).items():
                    Path(temporary, name).write_bytes(content)
                checkpoint.read(f"{temporary}/state").assert_consumed()
            rows = [int(row) for _, y in itertools.islice(epoch, batches) for row in y.numpy()]
            checkpoint.write(f"{temporary}/state")
            return rows, pickle.dumps({path.name: path.read_bytes() for path in Path(temporary).iterdir()})


class Torchrl(Adapter):
    """torchrl: a ReplayBuffer over LazyMemmapStorage, sampled without replacement."""

    def storage(self) -> Any:
        from torchrl.data import LazyMemmapStorage

        return LazyMemmapStorage(self.workload.rows, scratch_dir=self.folder / "storage")

    def write(self) -> None:
        from torchrl.data import TensorDictReplayBuffer

        storage = self.storage()
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=self.batch_rows)
        for x, y in self.workload.chunks():
            buffer.extend(tensordict_of(x, y))
        buffer.storage.dumps(self.folder / "storage")  # where it is already: only its metadata

    def epochs(self) -> Epochs:
        """Each epoch samples anew: a buffer goes on where the last iteration of it was left."""
        from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

        storage = self.storage()
        storage.loads(self.folder / "storage")

        def epoch() -> Iterator[Batch]:
            sampler = SamplerWithoutReplacement(drop_last=True, shuffle=self.shuffled)
            return map(pair, ReplayBuffer(
                storage=storage, sampler=sampler, batch_size=self.batch_rows, prefetch=self.workers or None
            ))  # fmt: skip

        return Epochs(epoch)


def decode(content: bytes) -> NDArray[np.float32]:
    return np.frombuffer(content, np.float32)


class Webdataset(Adapter):
    """WebDataset: tar files, each read in order, and a shuffle buffer; batches are made in the workers.

    Arrays are stored as their bytes, and decoded by a function of ours, as its documentation has it for other
    formats: that took a fifth less CPU than `.ten`, the faster one of the formats that it decodes of itself.
    """

    def write(self) -> None:
        import webdataset as wds

        with wds.ShardWriter(
            str(self.folder / "%04d.tar"),
            maxcount=-(-self.workload.rows // SHARDS),
            maxsize=1 << 40,
            verbose=0,
        ) as sink:
            for x, y in self.workload.samples():
                sink.write({"__key__": f"{y:09d}", "x.bin": x.tobytes(), "y.cls": int(y)})

    def epochs(self) -> Any:
        import webdataset as wds

        shards = sorted(str(path) for path in self.folder.glob("*.tar"))
        dataset = wds.WebDataset(shards, shardshuffle=len(shards) if self.shuffled else False)
        if self.shuffled:
            dataset = dataset.shuffle(buffer_rows(self.workload))
        dataset = dataset.decode(wds.handle_extension("bin", decode)).to_tuple("x.bin", "y.cls")
        dataset = dataset.batched(self.batch_rows, partial=False)
        return self.by_torch(wds.WebLoader, dataset, batch_size=None)


ADAPTERS: dict[str, type[Adapter]] = {
    "arrowcache": Arrowcache, "streaming": Streaming, "tfrecord": Tfrecord, "ray": RayData, "reverb": Reverb,
    "memmap": Mapped, "memmap_batched": MappedByBatch, "litdata": Litdata, "webdataset": Webdataset,
    "hf_datasets": HfDatasets, "hf_datasets_iterable": HfDatasetsIterable, "spdl": Spdl, "grain": Grain,
    "lance": Lance, "torchrl": Torchrl, "tensordict": Tensordict,
}  # fmt: skip
