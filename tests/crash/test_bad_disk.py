"""A disk that does not give a segment's bytes, or does not answer, while rows are read.

Errors name the segment, hints that fail harm nothing, Ctrl-C ends each wait, and what was begun goes on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_disk import faulty_disk
from helpers import make_cache, publish
from mixed_rows import mixed_cache
from processes import Script

import arrowcache as ac


@pytest.fixture
def cache(tmp_path: Path) -> ac.Cache:
    return mixed_cache(tmp_path / "cache")


def runs_well(code: str, cache: ac.Cache, tmp_path: Path) -> None:
    """A script on a faulty disk gets to its end, and nothing is told of."""
    with Script(BEGINNING + code + END, cache.path, within=faulty_disk(tmp_path)) as script:
        assert script.line() == "well"
        assert script.end() == (0, "")


BEGINNING = """
    import errno, gc, os, re, signal, sys, threading, time, warnings
    from pathlib import Path
    import numpy as np
    import arrowcache as ac
    from arrowcache.limits import Limits
    from faulty_disk import Disk
    from helpers import ids_of, mapped_seqs, segment_files, wait_for_sleep, wait_until
    from mixed_rows import BAD, DAMAGED, FIXED, OTHERS, VARIABLE, WHOLE, checked, rows_of

    disk, cache = Disk(), ac.Cache.open(sys.argv[1])
    of_loader = ac.Loader
    files = segment_files(cache)
    name = files[DAMAGED].name

    def drop():
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def failed(call, kind, *words):
        try:
            result = call()
        except kind as error:
            assert all(word in str(error) for word in words), error
        else:
            raise AssertionError(f"it did not fail: {result!r}")
"""

END = """
    print("well", flush=True)
"""

GATHERS = """
    for most_mapped in (1000, 0):
        Limits.current = Limits(mapped_segments=most_mapped)
        for is_cold in (True, False):
            for columns in (FIXED, VARIABLE):
                drop()
                with cache.snapshot() as snapshot:
                    snapshot.map_all()
                    snapshot.read_mode.is_cold = is_cold
                    with disk.fails(name, errno.EIO, "read"):
                        if is_cold or not most_mapped:
                            for _ in range(2):
                                gather = lambda: snapshot.gather(WHOLE, columns)
                                failed(gather, ac.CorruptSegmentError, name, "Input/output error")
                        assert checked(snapshot.gather(OTHERS, columns)) == OTHERS
                    assert checked(snapshot.gather(BAD, columns)) == BAD, "it was a moment's"
                assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])
"""


@pytest.mark.slow
def test_a_gather_of_rows_that_the_disk_does_not_give_names_their_segment(cache, tmp_path):
    """Cold, and warm where they are not mapped."""
    runs_well(GATHERS, cache, tmp_path)


LOADERS = """
    options = {"drop_last": False, "prefetch": 1}
    for shuffle in ("rows", "window"):
        for columns in (FIXED, VARIABLE):
            for more in ({}, {"transform": dict, "workers": 2, "worker_type": "thread"}):
                drop()
                with of_loader(cache, 6, shuffle=shuffle, columns=columns, **options, **more) as loader:
                    epoch = iter(loader)
                    checked(next(epoch))
                    with disk.fails(name, errno.EIO, "read"):
                        failed(lambda: list(epoch), ac.CorruptSegmentError, name, "Input/output error")
                        assert next(epoch, None) is None
                        for _ in range(2):
                            with warnings.catch_warnings(record=True) as caught:
                                warnings.simplefilter("always")
                                assert rows_of(loader) == OTHERS
                            assert f"{name} left out" in str(caught[0].message), caught[0].message
                    assert rows_of(loader) == WHOLE, "well again"
                    assert sorted(ids_of(loader)) == WHOLE
                assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])
    assert cache.verify() == []
"""


@pytest.mark.slow
def test_a_step_that_the_disk_does_not_give_names_its_segment_and_the_next_epochs_go_on(cache, tmp_path):
    """Until the disk gives it again: it may be sound, so that it stays where it is."""
    runs_well(LOADERS, cache, tmp_path)


HINTS = """
    for error in (errno.EIO, errno.ENOSYS):
        for shuffle in ("rows", "window", "blocks", None):
            drop()
            with disk.fails("/segments/", error, "advise"), of_loader(cache, 6, shuffle=shuffle) as loader:
                for _ in range(2):
                    assert rows_of(loader) == WHOLE
                assert disk.calls("advise")
        drop()
        with disk.fails("/segments/", error, "advise"), cache.snapshot() as snapshot:
            assert checked(snapshot.gather(WHOLE)) == WHOLE
    gc.collect()  # views
    assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])
"""


@pytest.mark.slow
def test_what_the_disk_is_told_may_fail(cache, tmp_path):
    runs_well(HINTS, cache, tmp_path)


OPENS = """
    WORDS = {errno.EMFILE: (OSError, "ulimit -n"), errno.EACCES: (OSError, "Permission denied", "user "),
             errno.ENOENT: (ac.CorruptSegmentError, "No such file")}
    for error, (kind, *words) in WORDS.items():
        for is_cold in (True, False):
            for columns in (FIXED, VARIABLE):
                drop()
                with cache.snapshot() as snapshot:
                    snapshot.map_all()
                    snapshot.read_mode.is_cold = is_cold
                    fetch = None
                    with disk.fails("/segments/", error, "open"):
                        assert checked(snapshot.gather(WHOLE, columns)) == WHOLE, "they are mapped"
                        fetch = snapshot.fetch(0, len(WHOLE), columns)
                        while not fetch.take(0.05):
                            pass
                    del fetch
                Limits.current = Limits(mapped_segments=0)
                with cache.snapshot() as snapshot:
                    snapshot.map_all()
                    snapshot.read_mode.is_cold = is_cold
                    with disk.fails(name, error, "open"):
                        failed(lambda: snapshot.gather(WHOLE, columns), kind, name, *words)
                        assert checked(snapshot.gather(OTHERS, columns)) == OTHERS
                    assert checked(snapshot.gather(WHOLE, columns)) == WHOLE
                Limits.current = Limits(mapped_segments=1000)
        for shuffle in ("rows", "window"):
            drop()
            with of_loader(cache, 6, shuffle=shuffle) as loader:
                epoch = iter(loader)
                with disk.fails("/segments/", error, "open"):
                    assert rows_of(epoch) == WHOLE
    assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])
    assert cache.verify() == []
"""


@pytest.mark.slow
def test_files_that_cannot_be_opened_while_rows_are_read_are_read_where_they_are_mapped(cache, tmp_path):
    """Those that are not mapped cannot: the error says what to do, and is no damage where it is none."""
    runs_well(OPENS, cache, tmp_path)


ENDS = """
    from arrowcache.reading.slots import Slots
    from plain_rows import threads

    Limits.current = Limits(stuck_seconds=0.05)

    def consume(epoch):
        try:
            list(epoch)
        except RuntimeError as error:
            assert "closed" in str(error), error

    def left_behind(end, *begun):
        "How many jobs were, as two threads were held."
        while disk.calls("read") < 2:
            for each in begun:
                each.advance()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            end()
        return len(caught)

    for shuffle in ("rows", "window"):
        drop()
        with threads(2):
            loader = of_loader(cache, 6, shuffle=shuffle, epoch_rows=2000)
            epoch = iter(loader)
            checked(next(epoch))
            with disk.is_held("/segments/", "read"):
                on_its_way = threading.Thread(target=consume, args=(epoch,), daemon=True)
                on_its_way.start()
                assert left_behind(lambda: [loader.close(), on_its_way.join()]) <= 2, shuffle
    drop()
    with threads(2), cache.snapshot() as snapshot:
        snapshot.map_all()
        with disk.is_held("/segments/", "read"):
            slot = Slots({"image": ((64, 64), np.dtype(np.float32))}, 96).lend(96)
            gather = snapshot.read(np.arange(96), snapshot.columns_of(["image", "name", "boxes"]), slot)
            assert left_behind(gather.cancel, gather) <= 2
"""


@pytest.mark.slow
def test_what_ends_on_a_disk_that_does_not_answer_waits_for_what_was_begun_and_nothing_more(cache, tmp_path):
    """Each job that was left behind had a new thread, which began the next one: it ended after 5 s each."""
    runs_well(ENDS, cache, tmp_path)


INTERRUPTED = """
    from arrowcache.native import engine
    from plain_rows import threads

    real, cancels = engine.library, threading.Event()

    class Library:
        def __getattr__(self, name):
            if name == "engine_cancel":
                cancels.set()
            return getattr(real, name)

    engine.library = Library()
    for shuffle in ("rows", "window"):
        drop()
        loader = of_loader(cache, 6, shuffle=shuffle, timeout=0.1)
        epoch, held = iter(loader), disk.is_held("/segments/", "read")

        def press():
            cancels.wait()
            wait_for_sleep()
            os.kill(os.getpid(), signal.SIGINT)
            held.__exit__(None, None, None)

        with threads(1):
            held.__enter__()
            cancels.clear()
            pressed = threading.Thread(target=press)
            pressed.start()
            try:
                next(epoch)
            except KeyboardInterrupt as error:
                assert isinstance(error.__context__, ac.LoaderTimeoutError), error.__context__
            else:
                raise AssertionError(f"{shuffle}: Ctrl-C was lost")
            pressed.join()
            loader.close()
            assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])
            drop()
            with of_loader(cache, 6, shuffle=shuffle) as loader:
                assert rows_of(loader) == WHOLE
"""


@pytest.mark.slow
def test_ctrl_c_while_an_epoch_ends_on_a_disk_that_does_not_answer_comes_once_it_has(cache, tmp_path):
    """It was lost: the step said that it came too late, 5 s after that."""
    runs_well(INTERRUPTED, cache, tmp_path)


MAPS = """
    import faulthandler

    faulthandler.dump_traceback_later(60, exit=True)  # where a thread that waits keeps the GIL
    with cache.snapshot() as snapshot:
        snapshot.map_all()  # now their layout is known
    for one_by_one in (False, True):
        with cache.snapshot() as snapshot:
            rows = [number for number in range(len(snapshot)) if number % 16 == 0]
            call = (lambda: [snapshot.gather([row]) for row in rows]) if one_by_one else snapshot.map_all
            with disk.is_held("/segments/", "read"):
                thread = threading.Thread(target=call)
                thread.start()
                wait_until(lambda: disk.calls("read"), "the thread waits for the disk")
            thread.join()
            assert mapped_seqs(cache) == [0, 1, 2, 3, 4, 5]
"""


@pytest.mark.slow
def test_the_interpreter_goes_on_while_a_new_segment_is_waited_for(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 6)
    runs_well(MAPS, cache, tmp_path)
