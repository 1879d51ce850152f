"""Arguments that no public face takes: each is refused at once, by its name, and nothing is left behind."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import ROW, held_rank_files, make_cache, published_ids, sample

import arrowcache as ac
from arrowcache.errors import SamplerError
from arrowcache.sampling.sources import Map, Mix

NAN, INF = math.nan, math.inf
RANKED = {"rank": 0, "world_size": 2, "run_id": "job"}
TEXTS = ac.Schema({"x": ac.Tensor("int64"), "t": ac.String()})
TOKENS = {"batch_size": None, "batch_tokens": 4096, "length_of": "id"}
Refusal = tuple[dict[str, Any], type[Exception], str]


def draws(rng: Any) -> Any:
    yield sample(0)


def other_draws(rng: Any) -> Any:
    yield sample(1)


LOCK = threading.Lock()
unpicklable = lambda argument: (LOCK, argument)  # noqa: E731  # goes by value


def with_ramp(ramp: Any, hedge: Any = False, chunk_rows: Any = 1) -> Any:
    def sampler(rng: Any) -> Any:
        yield sample(0)

    sampler.ramp, sampler.hedge, sampler.chunk_rows = ramp, hedge, chunk_rows  # type: ignore[attr-defined]
    return sampler


def gather(cache: ac.Cache, **options: Any) -> None:
    """`out` must be as it was where it is refused."""
    out = options.get("out")
    arrays = [value for value in out.values() if isinstance(value, np.ndarray)] if type(out) is dict else []
    with cache.snapshot() as snapshot:
        try:
            snapshot.gather(**{"row_ids": range(5), **options})
        finally:
            assert not any(map(np.any, arrays))


def views(cache: ac.Cache, **options: Any) -> None:
    with cache.snapshot() as snapshot:
        list(snapshot.views(**options))


def zero_copy(cache: ac.Cache, batch_size: int = 8, **options: Any) -> None:
    with ac.Loader(cache, batch_size, **options) as loader:
        loader.assert_zero_copy()


def table(cache: ac.Cache, **options: Any) -> None:
    with cache.snapshot() as snapshot:
        snapshot.table(**options)


def load_state(cache: ac.Cache, changed: dict[str, Any] | None = None, **options: Any) -> None:
    with ac.Loader(cache, 16) as loader:
        epoch = iter(loader)
        next(epoch)
        loader.load_state_dict(loader.state_dict() | (changed or {}), **options)


def append(cache: ac.Cache, *, row: Any, **values: Any) -> None:
    with cache.writer() as writer:
        writer.append(row, **values)


def wait(cache: ac.Cache, **counts: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with (
        ThreadPoolExecutor(1) as executor,
        ac.SamplerPool(cache, with_ramp(False), 1, executor=executor, segments=1, progress=False) as pool,
    ):
        pool.wait(timeout=60, **counts)


#: Where torch.distributed may still name the rank, it is refused once the epoch begins.
RUN_ALONE: Refusal = ({"run_id": "job"}, ValueError, "without a rank")
#: Of every reader that takes them: also those of test_torch_arguments.
LOADERS: list[Refusal] = [
    ({"batch_size": 0}, ValueError, "batch_size"),
    ({"batch_size": 1.5}, TypeError, "batch_size"),
    ({"batch_size": True}, ValueError, "batch_size"),
    ({"batch_size": 2**31}, ValueError, f"batch_size={2**31} must be an int of at most {2**31 - 1}"),
    ({"shuffle": "row"}, ValueError, "shuffle='row'"),
    ({"seed": -1}, ValueError, "seed"),
    ({"seed": None}, TypeError, "seed"),
    ({"columns": ["id", "imag"]}, ValueError, "unknown column 'imag': did you mean 'image'"),
    ({"columns": [3]}, ValueError, "unknown column 3: the cache has id, image"),
    ({"columns": "id"}, TypeError, "columns"),
    ({"columns": []}, ValueError, "columns is empty"),
    ({"columns": ["id", "id"]}, ValueError, "twice"),
    ({"epoch_rows": 0}, ValueError, "epoch_rows"),
    ({"epoch_rows": 15}, ValueError, "less than one step of 16 rows"),
    ({"batch_size": 1024}, ValueError, "one step of 1,024 rows takes.*lower batch_size"),
    ({"epoch_rows": 2**70}, ValueError, "epoch_rows=.*at most"),
    ({"wait_rows": 0}, ValueError, "wait_rows"),
    ({"wait_rows": 2**70}, ValueError, "wait_rows=.*at most"),
    ({"timeout": 0}, ValueError, "timeout=0 leaves no time"),
    ({"timeout": NAN}, ValueError, "timeout"),
    ({"transform": 5}, TypeError, "transform"),
    ({"where": "seq > 3"}, TypeError, "where"),
    ({"drop_last": "no"}, TypeError, "drop_last must be True or False, not 'no'"),
    ({"paced": "yes"}, TypeError, "paced"),
    ({"rank": 0}, ValueError, "pass world_size, too"),
    ({"world_size": 2}, ValueError, "pass rank, too"),
    ({"run_id": 5}, TypeError, "run_id must be a str"),
    RUN_ALONE,
    (RANKED | {"rank": 2}, ValueError, "ranks count from 0"),
    (RANKED | {"rank": -1}, ValueError, "ranks count from 0"),
    (RANKED | {"world_size": 0}, ValueError, "ranks count from 0"),
    (RANKED | {"rank": 0.0}, TypeError, "rank must be an int"),
    (RANKED | {"rank": True}, TypeError, "rank must be an int"),
    (RANKED | {"rank": np.bool_(1)}, TypeError, "rank must be an int"),
    (RANKED | {"run_id": 5}, TypeError, "run_id must be a str"),
    (RANKED | {"run_id": None}, ValueError, "pass run_id="),
    (RANKED | {"run_id": ""}, ValueError, "run_id is empty"),
    (RANKED | {"epoch_rows": 31}, ValueError, "one step of 32 rows"),
    ({"cache": 7}, TypeError, "Cache or the path"),
    ({"cache": None}, TypeError, "Cache or the path"),
    ({"cache": "/no/cache"}, FileNotFoundError, "/no/cache"),
]

FACES: dict[str, tuple[Callable[..., Any], list[Refusal]]] = {
    "Loader": (
        lambda held, **options: ac.Loader(**{"cache": held, "batch_size": 16, **options}),
        [
            *LOADERS,
            ({"batch_size": 2**31 - 1, "drop_last": False}, ValueError, "takes 2.0 TiB, and there.*lower"),
            ({"prefetch": -1}, ValueError, "prefetch=-1 must be an int of at least 0"),
            ({"prefetch": 2**20}, ValueError, "prefetch=1048576 must be an int of at most 65536"),
            ({"with_ids": 1}, TypeError, "with_ids must be True or False, not 1"),
            ({"worker_type": "fiber"}, ValueError, "worker_type='fiber' is unknown.*process.*thread"),
            ({"worker_type": None, "workers": 2}, ValueError, "worker_type=None"),
            ({"workers": -1}, ValueError, "workers"),
            ({"workers": 1.5}, TypeError, "workers"),
            ({"workers": True}, ValueError, "workers"),
            ({"workers": 5000, "worker_type": "thread"}, ValueError, "workers=5000 must be .*at most 256"),
            (TOKENS | {"batch_size": 16}, ValueError, "batch_tokens=4096 takes the place of batch_size=16"),
            ({"length_of": "id"}, ValueError, "length_of='id' belongs to batch_tokens"),
            (TOKENS | {"length_of": None}, ValueError, "batch_tokens needs length_of"),
            (TOKENS | {"length_of": "ids"}, ValueError, "unknown column 'ids': did you mean 'id'"),
            (TOKENS | {"length_of": ["id"]}, TypeError, "length_of must be the name of a column"),
            (TOKENS | {"length_of": "image"}, ValueError, "length_of='image' is Tensor.*tells no length"),
            (TOKENS | {"batch_tokens": 0}, ValueError, "batch_tokens=0 must be an int of at least 1"),
            (TOKENS | {"batch_tokens": 1.5}, TypeError, "batch_tokens must be an int"),
            (TOKENS | {"batch_tokens": 2**31}, ValueError, f"={2**31} must be .* at most {2**31 - 1}"),
            (TOKENS | {"shuffle": "window"}, ValueError, "order of shuffle='window': pass 'rows' or None"),
            (TOKENS | {"shuffle": "blocks"}, ValueError, "order of shuffle='blocks': pass 'rows' or None"),
            (
                {"workers": 1, "transform": unpicklable},
                TypeError,
                r"cannot be pickled.*worker_type='thread'",
            ),
        ],
    ),
    "Loader.assert_zero_copy": (
        zero_copy,
        [
            ({"shuffle": "rows"}, ValueError, "use shuffle='blocks'"),
            ({"shuffle": "window"}, ValueError, "use shuffle='blocks'"),
            ({"shuffle": "blocks", "batch_size": 5}, ValueError, "10 of 10 segments"),
            ({"shuffle": None, "batch_size": 32}, ValueError, "segment_rows"),
            ({"shuffle": None, "workers": 1}, ValueError, "worker processes copy"),
            (TOKENS | {"shuffle": None}, ValueError, "batch_tokens gathers.*use batch_size"),
        ],
    ),
    "Loader.load_state_dict": (
        load_state,
        [
            ({"missing": "ignore"}, ValueError, "must be 'skip' or 'raise'"),
            ({"missing": None}, ValueError, "must be 'skip' or 'raise'"),
            ({"missing": True}, ValueError, "must be 'skip' or 'raise'"),
            ({"changed": {"format": "torch"}}, ValueError, "not a state"),
            ({"changed": {"version": 99}}, ValueError, "version 99"),
            ({"changed": {"epoch": -1}}, ValueError, "damaged"),
            ({"changed": {"position": "12"}}, ValueError, "damaged"),
            ({"changed": {"position": 161}}, ValueError, "damaged"),
            ({"changed": {"epoch_rows": 0}}, ValueError, "damaged"),
            ({"changed": {"epoch_rows": 20, "position": 21}}, ValueError, "damaged"),
            ({"changed": {"window_rows": 0}}, ValueError, "damaged"),
            ({"changed": {"block_rows": 0}}, ValueError, "damaged"),
            ({"changed": {"shuffle": "all"}}, ValueError, "damaged"),
            ({"changed": {"segments": [[3, 1, 16], [0, 1, 16]]}}, ValueError, "damaged"),
            ({"changed": {"segments": [[-3, 2, 16]]}}, ValueError, "damaged"),
            ({"changed": {"segments": None}}, ValueError, "damaged"),
            ({"changed": {"segments": [[0, 1, 2**60]]}}, ValueError, "another cache"),  # it walked its rows
        ],
    ),
    "Cache.create": (
        lambda cache, schema=ROW, **options: make_cache(cache.path.parent / "new", schema, **options),
        [
            ({"capacity": "40KiB"}, ValueError, "capacity.*under 4 segments"),
            ({"capacity": 0}, ValueError, "capacity=0"),
            ({"capacity": "lots"}, ValueError, "capacity='lots'"),
            (
                {"segment_bytes": 1000, "segment_rows": None},
                ValueError,
                "a row needs a segment of.*raise segment_bytes",
            ),
            ({"segment_rows": 1000}, ValueError, "segment_rows=1000 needs.*lower segment_rows to"),
            ({"segment_rows": 0}, ValueError, "segment_rows=0"),
            ({"segment_rows": True}, ValueError, "segment_rows=True"),
            ({"segment_rows": 1.5}, TypeError, r"segment_rows must be an int, not 1\.5"),
            ({"headroom": 1}, ValueError, "headroom=1"),
            ({"headroom": -0.1}, ValueError, "headroom=-0.1"),
            ({"headroom": NAN}, ValueError, "headroom=nan"),
            ({"pace": {"max_reuse": 2}}, TypeError, r"arrowcache\.Pace"),
            ({"schema": {"x": "float32"}}, TypeError, "'x'"),
        ],
    ),
    "Cache.open": (
        lambda cache, **options: ac.Cache.open(cache.path, **options),
        [({"check": "all"}, ValueError, "check='all'")],
    ),
    "Cache.resize": (
        lambda cache, capacity: cache.resize(capacity),
        [
            ({"capacity": "50KiB"}, ValueError, "under 4 segments"),
            ({"capacity": "much"}, ValueError, "capacity"),
        ],
    ),
    "Cache.set_pace": (
        lambda cache, **options: cache.set_pace(ac.Pace(**options)),
        [
            ({"min_rows": 10_000}, ValueError, r"capacity is 1\.0 MiB: lower min_rows"),
            ({"min_rows": 0}, ValueError, "min_rows"),
            ({"min_rows": "1"}, TypeError, "min_rows"),
            ({"max_reuse": 0}, ValueError, "max_reuse"),
            ({"max_reuse": 1.5}, TypeError, "max_reuse"),
            ({"samples_per_insert": 0}, ValueError, "above 0"),
            ({"samples_per_insert": -1.0}, ValueError, "above 0"),
            ({"samples_per_insert": NAN}, ValueError, "finite"),
            ({"samples_per_insert": INF}, ValueError, "finite"),
            ({"samples_per_insert": 10**400}, ValueError, "finite"),
            ({"samples_per_insert": "2"}, TypeError, "samples_per_insert"),
            ({"samples_per_insert": True}, TypeError, "samples_per_insert"),
            ({"samples_per_insert": 2, "tolerance": -1}, ValueError, "tolerance"),
            ({"samples_per_insert": 2, "tolerance": NAN}, ValueError, "tolerance"),
            ({"tolerance": 10}, ValueError, "give that, too"),
            ({"samples_per_insert": 3, "max_reuse": 2}, ValueError, "never be reached"),
        ],
    ),
    "Cache.writer": (
        lambda cache, **options: cache.writer(**options),
        [
            ({"on_full": "block"}, ValueError, "on_full='block'"),
            ({"timeout": -1}, ValueError, "timeout=-1"),
            ({"timeout": NAN}, ValueError, "timeout"),
            ({"max_delay": -0.1}, ValueError, "max_delay"),
            ({"max_delay": NAN}, ValueError, "max_delay"),
            ({"max_delay": "5"}, TypeError, "max_delay"),
        ],
    ),
    "Writer.append": (
        append,
        [
            ({"row": sample(6), "id": 6}, TypeError, "not both"),
            ({"row": [1, 2]}, TypeError, "mapping"),
        ],
    ),
    "Cache.snapshot": (
        lambda cache, **options: cache.snapshot(**options),
        [({"where": 3}, TypeError, "where must be a function")],
    ),
    "Snapshot.gather": (
        gather,
        [
            ({"row_ids": [0.5]}, TypeError, "row_ids"),
            ({"row_ids": [[1, 2]]}, TypeError, "row_ids"),
            ({"row_ids": 3}, TypeError, "row_ids"),
            ({"row_ids": np.ma.array([1, 2], mask=[0, 1])}, TypeError, "row_ids are a masked array"),
            ({"row_ids": [True, False]}, TypeError, "row_ids"),
            ({"row_ids": ["a"]}, TypeError, "row_ids"),
            ({"row_ids": np.zeros((0, 2), np.int64)}, TypeError, "row_ids"),
            ({"columns": ["label"]}, ValueError, "'label'"),
            ({"out": {"image": np.zeros((4, 16, 16), np.float32)}}, ValueError, "out"),
            ({"out": {"image": np.zeros((5, 16, 16), np.float64)}}, ValueError, "out"),
            ({"out": {"image": np.zeros((5, 256), np.float32)}}, ValueError, "out"),
            ({"out": {"image": np.zeros((5, 16, 32), np.float32)[:, :, ::2]}}, ValueError, "out"),
            ({"out": {"image": np.zeros((5, 16, 16), ">f4")}}, ValueError, "out"),
            (
                {"out": {"image": np.frombuffer(bytes(5 * 1024), np.float32).reshape(5, 16, 16)}},
                ValueError,
                "out",
            ),
            ({"out": {"image": [[0.0]]}}, ValueError, "out"),
            ({"out": {"image": None}}, ValueError, "out"),
            ({"out": {"unknown": np.zeros(5)}}, ValueError, "out"),
            ({"columns": ["image"], "out": {"id": np.zeros(5, np.int64)}}, ValueError, "out"),
            ({"columns": ["id"], "out": np.zeros(5, np.int64)}, TypeError, "out must be a dict of arrays"),
            ({"columns": ["id"], "out": [np.zeros(5, np.int64)]}, TypeError, "out must be a dict of arrays"),
        ],
    ),
    "Snapshot.table": (table, [({"columns": ["label"]}, ValueError, "'label'")]),
    "Snapshot.views": (
        views,
        [
            ({"batch_rows": 5}, ValueError, "several segments"),
            ({"batch_rows": 0}, ValueError, "batch_rows"),
            ({"batch_rows": -1}, ValueError, "batch_rows"),
            ({"batch_rows": 1.5}, TypeError, "batch_rows"),
            ({"batch_rows": True}, ValueError, "batch_rows=True"),
            ({"columns": ["no"]}, ValueError, "unknown column"),
            ({"batch_rows": 8, "columns": []}, ValueError, "columns is empty"),
        ],
    ),
    "SamplerPool": (
        lambda held, **options: ac.SamplerPool(
            **{"cache": held, "sample": draws, "progress": False, **options}
        ),
        [
            ({"sample": 5}, TypeError, "sample"),
            ({"sample": unpicklable}, TypeError, "cannot be pickled"),
            ({"sample": with_ramp(10)}, TypeError, "ramp must be True or False, not 10"),
            ({"sample": with_ramp(True, chunk_rows=0)}, ValueError, "chunk_rows"),
            ({"sample": with_ramp(True, chunk_rows="12")}, TypeError, "chunk_rows"),
            ({"sample": with_ramp(True, hedge=1)}, TypeError, "hedge must be True or False, not 1"),
            ({"workers": 0}, ValueError, "workers"),
            ({"workers": True}, ValueError, "workers"),
            ({"workers": 1.5}, TypeError, "workers"),
            ({"seed": -1}, ValueError, "seed"),
            ({"seed": 2**128}, ValueError, "seed"),
            ({"name": "a/b"}, ValueError, "name"),
            ({"name": ""}, ValueError, "name"),
            ({"segments": 0}, ValueError, "segments"),
            ({"retries": -1}, ValueError, "retries"),
            ({"cache": 7}, TypeError, "Cache"),
        ],
    ),
    "Tensor": (
        lambda _, dtype="float32", shape=(): ac.Tensor(dtype, shape),
        [
            *(({"dtype": dtype}, ValueError, "cannot be stored")
              for dtype in ("object", "U8", "datetime64[us]", "float128", "banana", object(), "S3", "V8")),
            *(({"shape": shape}, ValueError, "positive")
              for shape in ((0,), (-1, 2), 3, None, (2, 0), (np.bool_(1),))),
        ],
    ),
    "Ragged": (
        lambda _, shape: ac.Ragged("float32", shape),
        [({"shape": shape}, ValueError, "positive") for shape in ((0,), (-1, 2), 3, None, (2, 0))],
    ),
    "Schema": (
        lambda _, columns: ac.Schema(columns),
        [
            ({"columns": {}}, ValueError, "at least one"),
            ({"columns": {"_seq": ac.String()}}, ValueError, "reserved"),
            ({"columns": {"_row": ac.String()}}, ValueError, "reserved"),
            ({"columns": {"_age_seconds": ac.String()}}, ValueError, "reserved"),
            ({"columns": {"": ac.String()}}, ValueError, "non-empty"),
            ({"columns": {3: ac.String()}}, ValueError, "non-empty"),
            ({"columns": {"x": np.float32}}, TypeError, r"'x'.*Tensor"),
            ({"columns": {"x": ac.String}}, TypeError, "'x'"),
        ],
    ),
    "Mix": (
        lambda _, sources, **options: Mix(sources, **options),
        [
            *(({"sources": {draws: 1, other_draws: weight}}, ValueError, r"weight of sources\[1\], .*, is")
              for weight in (0, -1, NAN, INF, 0.0)),
            ({"sources": {draws: 1.7e308, other_draws: 1.7e308}}, ValueError, "their sum is infinite"),
            ({"sources": {draws: 10**400, other_draws: 1}}, ValueError, "their sum is infinite"),
            ({"sources": {draws: "1"}}, TypeError, "must be a number"),
            ({"sources": {}}, ValueError, "at least one"),
            ({"sources": {draws: 1}, "on_error": "ignore"}, ValueError, "on_error='ignore'"),
            ({"sources": [(3, 1)]}, TypeError, r"sources\[0\].* must be a source"),
            ({"sources": [(lambda rng: iter([]), 1)]}, SamplerError, "yielded nothing"),
        ],
    ),
    "Map": (
        lambda _, source, function: Map(source, function),
        [
            ({"source": draws, "function": None}, TypeError, "function must be"),
            ({"source": 3, "function": dict}, TypeError, "source must be"),
            ({"source": draws, "function": print}, SamplerError, r"must return a sample.*not NoneType"),
        ],
    ),
}  # fmt: skip
CASES = [(face, *refusal) for face, (_, refusals) in FACES.items() for refusal in refusals]


def named(case: tuple[Any, ...]) -> str:
    """A name without an address in it."""
    face, options, *_ = case
    said = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{face}({said if ' at 0x' not in said else ', '.join(options)})"[:80]


def left(cache: ac.Cache) -> tuple[Any, ...]:
    """What a call that was refused must not have changed."""
    folders = {name: sorted(os.listdir(cache.path / name)) for name in ("segments", "incoming", "pools")}
    stats = cache.stats()
    held = (
        stats.leased_bytes,
        stats.waiting_writers,
        stats.capacity_bytes,
        cache.pace,
        held_rank_files(cache),
    )
    return (*held, folders, sorted(os.listdir(cache.path.parent)), published_ids(cache))


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("face", "options", "error", "words"), CASES, ids=map(named, CASES))
def test_what_does_not_fit_is_refused_and_nothing_is_left(unchanged, face, options, error, words):
    before = left(unchanged)
    with pytest.raises(error, match=words):
        FACES[face][0](unchanged, **options)
    assert left(unchanged) == before


@pytest.mark.parametrize("name", ["rows", "segments"])
@pytest.mark.parametrize("count", [-5, 0, True, 1.5, "5"])
def test_a_pool_is_not_waited_for_a_count_that_is_none(cache, name, count):
    error = ValueError if isinstance(count, int) else TypeError
    with pytest.raises(error, match=rf"^{name}(=| ).*must be an int"):
        wait(cache, **{name: count})
