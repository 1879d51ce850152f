"""At what rate does JAX get the cache's batches on its device, and do the copies hide behind the steps?

Question: GB/s of `arrowcache.jax.Loader`, over `jax.device_put` of batches that are ready in memory, and over
the loader without a device; seconds a step over max(copy, compute), beside a step that puts its batch itself.
First, what comes is compared with the host's, also batches that were kept meanwhile.
Method: rows of 1 KiB and 64 KiB in memory, shuffled, batches of 4 and of 32 MB; compute is matrix products
that take about as long as the copy. `block_until_ready` at a turn's end; cases take turns; medians.
Run: `python -m benchmarks jax_device`, on JAX's default device. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

import arrowcache as ac
import arrowcache.jax
from benchmarks.harness import Cases, Figures, Options, Round, Way, filled, interleaved, seconds_of

CACHE_BYTES, REPEATS = 512 << 20, 5
BATCHES = ((1 << 10, 4 << 20), (1 << 16, 4 << 20), (1 << 16, 32 << 20))  # bytes of a row, of a batch
TURN_BYTES = 1 << 30
SIDE = 1024


def compute_for(seconds: float) -> Callable[[jax.Array], jax.Array]:
    """Work of about so long, after a pass over the batch."""
    matrix = jax.random.normal(jax.random.key(0), (SIDE, SIDE)) / SIDE**0.5

    def products(count: int) -> Callable[[jax.Array], jax.Array]:
        def work(batch: jax.Array) -> jax.Array:
            found = matrix + batch.sum()
            return jax.lax.fori_loop(0, count, lambda _, each: each @ matrix, found).sum()

        return jax.jit(work)

    def taken(count: int) -> float:
        work, batch = products(count), jax.numpy.zeros(1)
        work(batch).block_until_ready()
        return seconds_of(lambda: work(batch).block_until_ready())

    return products(max(1, round(seconds / ((taken(210) - taken(10)) / 200))))


def require_right(cache: ac.Cache, batch_rows: int) -> None:
    """Compare two epochs with the host's, while the last batches are kept."""
    kept: deque[tuple[Any, Any]] = deque(maxlen=8)
    with arrowcache.jax.Loader(cache, batch_rows) as ours, ac.Loader(cache, batch_rows) as host:
        for _ in range(2):
            for batch, expected in zip(ours, host, strict=True):
                kept.append((batch, {name: values.copy() for name, values in expected.items()}))
                for name, values in kept[0][1].items():
                    assert np.array_equal(kept[0][0][name], values), f"values of {name!r} differ"


def measure(cache: ac.Cache, batch_rows: int, batch_bytes: int, options: Options) -> Cases:
    steps = options.of(TURN_BYTES) // batch_bytes
    ready = [np.random.default_rng(n).random(batch_bytes // 4, np.float32) for n in range(4)]

    def run(batches: Iterable[Any], work: Callable[[Any], Any]) -> None:
        last = None
        for batch in itertools.islice(batches, steps):
            last = work(batch)
        jax.block_until_ready(last)

    with (
        arrowcache.jax.Loader(cache, batch_rows, columns=["x"]) as ours,
        ac.Loader(cache, batch_rows, columns=["x"]) as host,
    ):
        on_device, on_host = ours.repeat(), host.repeat()
        put: dict[str, Way] = {
            "device_put": lambda: run(itertools.cycle(ready), jax.device_put),
            "loader": lambda: run(on_device, lambda batch: batch["x"]),
            "loader without a device": lambda: run(on_host, lambda _: None),
        }
        title = f"{batch_rows} rows, {batch_bytes >> 20} MiB"
        over, gigabytes = ["device_put", "loader without a device"], steps * batch_bytes / 1e9
        told = yield Round(title, put, over, gigabytes, turns=REPEATS)
        copy = batch_bytes / 1e9 / np.median(told["ways"]["device_put"]["rates"])
        compute, there = compute_for(copy), jax.device_put(ready[0])
        steps_of: dict[str, Way] = {
            "compute": lambda: run(itertools.repeat(there), compute),
            "loader": lambda: run(on_device, lambda batch: compute(batch["x"])),
            "device_put in the step": lambda: run((jax.device_put(batch["x"]) for batch in on_host), compute),
        }
        for way in steps_of.values():
            way()
        found = interleaved(steps_of, options.turns(REPEATS))
    took = {name: seconds / steps for name, seconds in found.items()}
    least = max(copy, took["compute"])
    values = {name: seconds / least for name, seconds in took.items()}
    of = f"max(copy {1000 * copy:.2f}, compute {1000 * took['compute']:.2f} ms)"
    yield Figures(f"{title}: a step over {of}", values)


def jax_device(options: Options) -> Cases:
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}")
    for row_bytes, batch_bytes in BATCHES:
        with filled(options, row_bytes, CACHE_BYTES) as cache:
            require_right(cache, batch_bytes // row_bytes)
            yield from measure(cache, batch_bytes // row_bytes, batch_bytes, options)
