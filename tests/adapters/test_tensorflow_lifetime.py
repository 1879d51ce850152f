"""How iterations over `arrowcache.tensorflow.dataset` end: leases, interrupts, processes and their exit."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf
from helpers import in_child, limit, wait_until
from processes import Script
from tensorflow_backends import every_backend, ids_of, make_cache, wait_until_unleased

from arrowcache.explore.observation import observe
from arrowcache.tensorflow import dataset
from arrowcache.tensorflow.native_backend import end_here

EXIT_SECONDS = 40  # most of it for TensorFlow, which takes its time on a busy machine


@pytest.fixture
def cache(tmp_path):
    """1600 rows in segments of 16."""
    with make_cache(tmp_path / "cache", 1600) as cache:
        yield cache


def own(errors):
    """Lines that a process wrote to stderr, without TensorFlow's log."""
    log = ("I0", "W0", "E0", "WARNING: All log", "WARNING:tensorflow", "Cause: ", "To silence")
    return [
        line
        for line in errors.splitlines()
        if line.strip() and not line.startswith(log) and " tensorflow/" not in line
    ]


@every_backend
def test_leases_are_released_as_the_pass_moves_on(cache, backend, monkeypatch):
    limit(monkeypatch, frame_bytes=10_000)  # 8 batches
    iterator = iter(dataset(cache, 16, shuffle="window", window_bytes="16KiB", backend=backend, prefetch=0))
    next(iterator)
    most = cache.stats().leased_bytes
    for _ in range(20):  # of 100; the backends ask for some 40 ahead
        next(iterator)
    wait_until(lambda: cache.stats().leased_bytes < most, "what was passed is released")
    assert cache.stats().leased_bytes > 0
    assert len(ids_of(iterator)) == 79 * 16
    wait_until_unleased(cache)


BEGIN = """
import os, sys, threading
import tensorflow as tf
import arrowcache as ac
from arrowcache.tensorflow import dataset

cache = ac.Cache.open(sys.argv[1])
backend = sys.argv[2]
"""


@every_backend
def test_a_process_that_exits_while_a_batch_is_made_ends(cache, backend):
    """TensorFlow is inside a call of Python then, and no thread is left that would make the batch."""
    code = """
from arrowcache.limits import Limits
from arrowcache.native import engine

apart = {"asked": threading.Event()}  # a function of this module would keep the iterator for ever
exec('''
def take_nothing(pool, job, nanoseconds):
    asked.set()
    asked.__class__().wait(nanoseconds / 1e9)
    return True
''', apart)
Limits.current = Limits(inline_bytes=0)  # all jobs are the engine's
iterator = iter(dataset(cache, 16, epoch_rows=64, backend=backend, prefetch=2).repeat().prefetch(2))
next(iterator)
engine.quick.engine_help, engine.library.engine_take = lambda *_: True, apart["take_nothing"]
while not apart["asked"].wait(0.5):  # by then TensorFlow has two batches ready
    next(iterator)
print("asked", flush=True)
"""
    with Script(BEGIN + code, cache.path, backend, new_interpreter=True) as script:
        assert script.line() == "asked"
        code, errors = script.end(EXIT_SECONDS)
    assert (code, own(errors)) == (0, [])
    assert cache.stats().leased_bytes == 0


def keras_model():
    model = tf.keras.Sequential([tf.keras.layers.Input((16,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def pairs(batch):
    return batch["x"], tf.cast(batch["id"], tf.float32)


@every_backend
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_after_an_interrupted_fit_nothing_is_leased_and_the_next_one_trains(cache, backend, error):
    seen = []

    class Stop(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(cache.stats().leased_bytes)
            if batch == 2:
                raise error

    model, batches = keras_model(), dataset(cache, 16, backend=backend).map(pairs)
    with pytest.raises(error):
        model.fit(batches, callbacks=[Stop()], shuffle=False, verbose=0)
    assert len(seen) == 3
    assert all(seen)
    wait_until_unleased(cache)
    history = model.fit(batches.repeat(), epochs=2, steps_per_epoch=120, shuffle=False, verbose=0)
    assert len(history.history["loss"]) == 2
    wait_until_unleased(cache)


def interrupted(script):
    """How it ends by Ctrl-C, pressed again while it trains on.

    TensorFlow 2.16 with Keras lost 4 of 358, over a plain tf.data pipeline without arrowcache.
    """
    for _ in range(3):
        script.signal_group(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return script.end(EXIT_SECONDS / 2)
    pytest.fail("it did not end")


@every_backend
def test_ctrl_c_ends_a_process_in_fit(cache, backend):
    code = """
tf.keras.utils.set_random_seed(0)
model = tf.keras.Sequential([tf.keras.layers.Input((16,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")

class Tell(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            print("trains", flush=True)

batches = dataset(cache, 16, backend=backend).map(lambda b: (b["x"], b["x"][:, :1])).repeat()
model.fit(batches, steps_per_epoch=10**9, callbacks=[Tell()], shuffle=False, verbose=0)
"""
    with Script(BEGIN + code, cache.path, backend, new_interpreter=True) as script:
        assert script.line() == "trains"
        assert cache.stats().leased_bytes > 0
        code, errors = interrupted(script)
    assert code == -signal.SIGINT
    assert own(errors)[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1, errors
    assert cache.stats().leased_bytes == 0


@every_backend
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:os.fork:RuntimeWarning")
def test_a_forked_child_neither_ends_nor_prolongs_an_epoch(cache, backend):
    iterator = iter(dataset(cache, 16, shuffle=None, backend=backend))
    next(iterator)
    ready, release = os.pipe()

    def child():
        end_here()  # what an exit of the child runs
        os.read(ready, 1)

    with in_child(child):
        assert len(ids_of(iterator)) == 99 * 16
        del iterator
        wait_until_unleased(cache)
        os.write(release, b".")
    os.close(ready)
    os.close(release)


@every_backend
def test_its_loader_is_seen_from_another_process_with_its_stall_while_it_lasts(cache, backend):
    code = """
from arrowcache.limits import Limits
from arrowcache.native import engine

Limits.current = Limits(inline_bytes=0)  # all jobs are the engine's
batches = dataset(cache, 16, shuffle="window", backend=backend, prefetch=0).repeat()
iterator = iter(batches)
for _ in range(150):
    next(iterator)
print("read", flush=True)
sys.stdin.readline()

help_, take = engine.quick.engine_help, engine.library.engine_take
go_on = threading.Event()

def late(pool, job, nanoseconds):
    return take(pool, job, nanoseconds) if go_on.wait(nanoseconds / 1e9) else True

# batches are late from now on
engine.quick.engine_help = lambda *job: help_(*job) if go_on.is_set() else True
engine.library.engine_take = late
threading.Thread(target=lambda: (sys.stdin.readline(), go_on.set()), daemon=True).start()
for _ in range(1000):
    next(iterator)
print("read on", flush=True)
sys.stdin.readline()
"""
    with Script(BEGIN + code, cache.path, backend, new_interpreter=True) as script:
        assert script.line() == "read"
        wait_until(lambda: observe(cache).loaders, "the loader to be seen")
        (first,) = observe(cache).loaders
        assert (first.pid, first.workers, first.shuffle) == (script.pid, 0, "window")
        assert first.epochs >= 1
        assert first.batches >= 1
        assert first.rows == 16 * first.batches
        script.say("")
        wait_until(lambda: observe(cache).loaders[0].is_waiting, "TensorFlow to wait for the loader")
        waiting = observe(cache).loaders[0]
        wait_until(
            lambda: observe(cache).loaders[0].stall_seconds > waiting.stall_seconds + 0.2, "the stall to last"
        )
        assert observe(cache).loaders[0].batches == waiting.batches
        script.say("")
        assert script.line() == "read on"
        assert observe(cache).loaders[0].batches > waiting.batches
        script.kill()
        assert observe(cache).loaders == ()


def test_a_dataset_cannot_be_pickled_so_another_process_makes_its_own(cache):
    batches = dataset(cache, 16)
    with pytest.raises(tf.errors.InvalidArgumentError, match="variant"):
        pickle.dumps(batches)
