"""Batches in JAX: the memory of `arrowcache.Loader` as it is, and the loader of arrowcache.jax.

Guaranteed: on the CPU nothing is copied; an array that is kept is not overwritten; one batch is on its way
while another is used, and is not counted; no number changes; no process is forked beside JAX's threads.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import DEADLINE_SECONDS, make_cache, publish, segment_files, wait_until
from quick import first_is_quick
from reader_contract import IDS, Contract, Face, ids_of
from tracing import writes_and_locks

pytest.importorskip("jax", reason="JAX is not installed: make test-jax")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import arrowcache as ac
import arrowcache.jax as aj

jax.config.update("jax_platforms", "cpu")  # a GPU has benchmarks.jax_device
jax.config.update("jax_num_cpu_devices", 8)  # before the first array

ABILITIES = frozenset({"transform", "ids", "ranks", "one epoch", "close", "state", "tokens", "repeat"})
ROOT = Path(ac.__file__).parents[1]


def sharding(*axes: str | None) -> NamedSharding:
    return NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec(*axes))


def face(**fixed: Any) -> Face:
    def make(cache: ac.Cache, size: int, **options: Any) -> aj.Loader:
        on_all = {"sharding": sharding()} if fixed.get("sharding") else {}
        return aj.Loader(cache, size, **{**fixed, **on_all}, **options)

    return Face(make, ABILITIES if "workers" in fixed else ABILITIES | {"interrupt"})


FACES = {
    "default device": face(),
    "all devices": face(sharding="replicated"),
    "threads": face(workers=2, worker_type="thread"),
    "processes": face(workers=2),
}


class TestReaders(Contract):
    """Each of FACES, where JAX has numbers of 64 bits."""

    @pytest.fixture(params=first_is_quick(FACES))
    def face(self, request: pytest.FixtureRequest) -> Iterator[Face]:
        with jax.enable_x64(True):
            yield FACES[request.param]


def address(array: Any) -> int:
    return int(array.unsafe_buffer_pointer())


# NumPy's batches


@pytest.mark.parametrize("enter", [jax.device_put, jnp.from_dlpack])
@pytest.mark.parametrize("options", [{}, {"workers": 2, "transform": dict}], ids=["engine", "processes"])
def test_a_batch_of_numpy_enters_jax_without_a_copy(cache, enter, options):
    with ac.Loader(cache, 16, columns=["image"], **options) as loader:
        for batch in loader:
            array = enter(batch["image"])
            assert address(array) == batch["image"].ctypes.data
            batch["image"][...] = 7  # it is the same memory
            assert (np.asarray(array) == 7).all()


def test_an_array_keeps_its_slot_and_gives_it_back(cache):
    with ac.Loader(cache, 16) as loader:
        kept = [jax.device_put(batch) for _ in range(3) for batch in loader]
        addresses = {address(batch["image"]) for batch in kept}
        assert len(addresses) == 30
        assert not addresses & {batch["image"].ctypes.data for batch in loader}
        images = np.concatenate([batch["image"] for batch in kept])
        assert sorted(images[:, 0, 0].astype(int).tolist()) == sorted(3 * IDS)
        kept.clear()
        later = {address(jax.device_put(batch["image"])) for _ in range(3) for batch in loader}
        assert later & addresses, "JAX lets go of what died in its next call, and the next epoch has it"


def test_computations_that_are_under_way_keep_their_slots(cache):
    """JAX computes later than it is asked to: nothing is read after it was overwritten."""
    image_sum = jax.jit(lambda image: (image @ image @ image @ image).sum() * 0 + image[:, 0, 0].sum())
    with ac.Loader(cache, 16, columns=["image"]) as loader:
        sums = [image_sum(jax.device_put(batch["image"])) for _ in range(20) for batch in loader]
    assert sum(float(each) for each in sums) == 20 * sum(IDS)


@pytest.mark.parametrize("shuffle", ["blocks", None])
def test_a_view_of_a_file_enters_jax_and_lives_on(cache, shuffle):
    with ac.Loader(cache, 16, shuffle=shuffle) as loader:
        loader.assert_zero_copy()
        batches = list(loader)
        arrays = [jax.device_put(batch["image"]) for batch in batches]
        assert [address(each) for each in arrays] == [batch["image"].ctypes.data for batch in batches]
        ids = [batch["id"].tolist() for batch in batches]
        del batches
    assert cache.stats().leased_bytes > 0
    cache.evict("1MB")
    assert [np.asarray(each)[:, 0, 0].astype(int).tolist() for each in arrays] == ids
    arrays.clear()
    wait_until(lambda: [gc.collect(), jnp.zeros(1)] and not cache.stats().leased_bytes, "the leases to end")
    cache.evict("1MB")
    assert not segment_files(cache)


# the loader


def test_the_loader_copies_nothing_on_the_cpu(cache):
    seen: set[int] = set()

    def look(batch):
        seen.add(batch["image"].ctypes.data)
        return batch

    with aj.Loader(cache, 16, transform=look) as loader:
        for batch in loader:
            assert address(batch["image"]) in seen


def test_arrays_go_to_the_device_that_is_said(cache):
    third = jax.devices()[3]
    with aj.Loader(cache, 16, device=third) as loader:
        assert {array.device for batch in loader for array in batch.values()} == {third}


def test_a_sharding_divides_the_rows_among_devices(cache):
    with aj.Loader(cache, 16, shuffle=None, sharding=sharding("data")) as loader:
        for number, batch in enumerate(loader):
            parts = sorted(batch["image"].addressable_shards, key=lambda part: part.index[0].start)
            assert [part.data.shape for part in parts] == [(2, 16, 16)] * 8
            assert len({part.device for part in parts}) == 8
            first = [int(part.data[0, 0, 0]) for part in parts]
            assert first == [16 * number + 2 * part for part in range(8)]


def test_columns_that_jax_lacks_stay_numpy_s(tmp_path):
    schema = ac.Schema({
        "half": ac.Tensor("bfloat16", (2,)), "is_odd": ac.Tensor("bool"), "name": ac.String(),
        "data": ac.Binary(), "when": ac.Timestamp(), "tokens": ac.Ragged("int32"),
    })  # fmt: skip
    cache = make_cache(tmp_path / "cache", schema)
    with cache.writer() as writer:
        for number in range(16):
            writer.append(
                half=np.full(2, number, np.uint8), is_odd=number % 2 == 1, name=str(number),
                data=b"a" * number, when=np.datetime64(number, "us"),
                tokens=np.arange(number, dtype=np.int32),
            )  # fmt: skip
    with aj.Loader(cache, 16, shuffle=None, sharding=sharding("data")) as loader:
        (batch,) = loader
    assert isinstance(batch["half"], jax.Array)
    assert batch["half"].dtype == jnp.bfloat16
    assert batch["half"][:, 1].astype(int).tolist() == list(range(16))
    assert isinstance(batch["is_odd"], jax.Array)
    assert batch["is_odd"].tolist() == [False, True] * 8
    assert batch["name"] == [str(number) for number in range(16)]
    assert batch["data"] == [b"a" * number for number in range(16)]
    assert batch["when"].dtype == np.dtype("datetime64[us]")
    assert isinstance(batch["tokens"], ac.Values)


def test_a_number_that_jax_would_cut_is_an_error_in_its_step(tmp_path):
    cache = make_cache(tmp_path / "cache", ac.Schema({"id": ac.Tensor("int64"), "x": ac.Tensor("float64")}))
    with cache.writer() as writer:
        for number in range(64):
            writer.append(id=number if number != 40 else -(1 << 31) - 1, x=float(number))
    delivered: list[int] = []
    with aj.Loader(cache, 16, shuffle=None) as loader:
        words = "column 'id' has -2147483649, and JAX makes int32 of int64 .*jax_enable_x64"
        with pytest.raises(ValueError, match=words):
            delivered.extend(number for batch in loader for number in batch["id"].tolist())
        assert delivered == list(range(32)), "the batches before it come, though it was ahead"
        state = loader.state_dict()
    with jax.enable_x64(True), aj.Loader(cache, 16, shuffle=None) as loader:
        loader.load_state_dict(state)
        rest = [number for batch in loader for number in batch["id"].tolist()]
    assert rest == [number if number != 40 else -(1 << 31) - 1 for number in range(32, 64)]
    with aj.Loader(cache, 16, columns=["x"]) as loader:
        assert {batch["x"].dtype for batch in loader} == {jnp.dtype("float32")}


def test_the_next_batch_is_put_on_the_device_before_this_one_is_used(cache, monkeypatch):
    count, put = itertools.count(), jax.device_put
    begun = 0

    def counted(*arguments: Any) -> Any:
        nonlocal begun
        begun = next(count) + 1
        return put(*arguments)

    monkeypatch.setattr("jax.device_put", counted)
    with aj.Loader(cache, 4) as loader:
        ahead = []
        for number, batch in enumerate(loader):
            ahead.append(begun - 1 - number)
            assert (np.asarray(batch["image"])[:, 0, 0] == np.asarray(batch["id"])).all()
            time.sleep(0.005)  # a step, in which the next batches are made
    assert {*ahead} == {0, 1} or {*ahead} == {1}
    assert ahead[-1] == 0


def test_what_is_ahead_is_let_go_when_the_loader_is_closed(cache):
    with aj.Loader(cache, 16, shuffle=None) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
            time.sleep(0.01)  # a step, in which the next batch is made
    wait_until(lambda: [gc.collect(), jnp.zeros(1)] and not cache.stats().leased_bytes, "the leases to end")
    with pytest.raises(RuntimeError, match="was closed"):
        next(batches)


def test_endless_batches_follow_one_another(cache):
    with aj.Loader(cache, 16) as loader:
        found = ids_of(itertools.islice(loader.repeat(), 30))
        assert [sorted(found[start : start + 160]) for start in (0, 160, 320)] == [IDS] * 3
        assert (loader.steps, loader.stats().batches) == (10, 30)


def test_numbers_in_parts_of_a_batch_are_jax_arrays_too_and_none_is_cut(cache):
    def nested(batch, more=0):
        return {"b": {"ids": [batch["id"] + more, "text"], "none": None}, "a": (batch["image"],)}

    with aj.Loader(cache, 16, shuffle=None, transform=nested) as loader:
        batch = next(iter(loader))
    assert [*batch] == ["b", "a"]
    ids, text = batch["b"]["ids"]
    assert text == "text"
    assert batch["b"]["none"] is None
    assert all(isinstance(each, jax.Array) for each in (ids, *batch["a"]))
    assert ids.tolist() == [*range(16)]
    with (
        aj.Loader(cache, 16, transform=partial(nested, more=1 << 40)) as loader,
        pytest.raises(ValueError, match=r"column 'b\.ids\.0' has .* would cut it"),
    ):
        next(iter(loader))


def test_a_masked_array_of_a_transform_is_refused(cache):
    def masked(batch):
        return {"a": [np.ma.array(batch["id"], mask=batch["id"] > 3)]}

    with (
        aj.Loader(cache, 16, transform=masked) as loader,
        pytest.raises(TypeError, match=r"column 'a\.0' is a masked array"),
    ):
        next(iter(loader))


def test_a_transform_that_returns_no_columns_is_told(cache):
    with (
        aj.Loader(cache, 16, transform=lambda batch: batch["id"]) as loader,
        pytest.raises(TypeError, match="the transform returned ndarray, not a dict"),
    ):
        next(iter(loader))


# processes


def script(text: str, *words: object, **environment: str) -> subprocess.Popen[str]:
    """A Python of its own, in which each warning is an error."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text), *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def said(process: subprocess.Popen[str]) -> list[str]:
    out, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, errors) == (0, "")
    return out.split()


@pytest.mark.slow
def test_workers_are_no_forks_so_jax_has_nothing_to_warn_of(tmp_path):
    """JAX warns of each fork, since it has threads."""
    process = script(
        """
        import sys
        import arrowcache as ac
        import jax
        from arrowcache.jax import Loader

        jax.device_put(1.0).block_until_ready()  # its threads run
        def sample(rng):
            yield {"x": int(rng.integers(10))}
        with ac.Cache.create(sys.argv[1], {"x": ac.Tensor("int32")}, "1MiB", segment_rows=8) as cache:
            with ac.SamplerPool(cache, sample, workers=2, segments=20, progress=False) as pool:
                pool.wait(timeout=60)
            with Loader(cache, 8, transform=dict, workers=2) as loader:
                print(sum(len(batch["x"]) for batch in loader) > 0)
        """,
        tmp_path / "cache",
    )
    assert said(process) == ["True"]


@pytest.mark.slow
def test_processes_of_one_mesh_read_disjoint_rows_as_global_arrays(cache):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = """
        import sys
        import jax
        path, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
        jax.config.update("jax_num_cpu_devices", 2)
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
        from jax.sharding import NamedSharding, PartitionSpec
        from arrowcache.jax import Loader
        sharding = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec("data"))
        with Loader(path, 8, sharding=sharding, run_id="job", columns=["id"]) as loader:
            for batch in loader:
                assert batch["id"].shape == (16,)
                parts = batch["id"].addressable_shards
                assert {part.data.shape for part in parts} == {(4,)}
                assert all(part.index[0].start // 8 == rank for part in parts)
                print(*(number for part in parts for number in part.data.tolist()))
    """
    ranks = [script(text, cache.path, port, rank) for rank in range(2)]
    found = [[*map(int, said(rank))] for rank in ranks]
    assert [len(each) for each in found] == [80, 80]
    assert sorted(found[0] + found[1]) == IDS


@pytest.mark.slow
def test_a_frozen_cache_on_a_read_only_mount_is_read_without_a_write_or_a_lock(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    cache.freeze()
    code = """
        import sys
        import jax

        jax.config.update("jax_platforms", "cpu")
        from arrowcache.jax import Loader

        with Loader(sys.argv[1], 8) as loader:
            assert len([*loader]) == 8
        """
    assert writes_and_locks(code, cache.path) == []
