"""Scripts that fork, as users run them: the child ends with all finalizers, or outlives its parent."""

from __future__ import annotations

import pytest
from helpers import make_cache, publish
from processes import Script


@pytest.fixture
def cache(tmp_path):
    """Twenty segments of 16 rows, ids 0 to 319."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    return cache


FORK = """
    import os, sys
    import numpy as np
    import arrowcache as ac

    cache = ac.Cache.open(sys.argv[1])
    loader = ac.Loader(cache, 16)
    epoch = iter(loader)
    first = next(epoch)
    snapshot = cache.snapshot()
    snapshot.gather([0])
    table = snapshot.table()
    leased = cache.stats().leased_bytes

    def ids(batches):
        return sorted(i for batch in batches for i in batch["id"].tolist())

    pid = os.fork()
    if pid == 0:
        assert ids(loader) == list(range(320))
        sys.exit(7)  # with all finalizers, of what it inherited and of its own
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert cache.stats().leased_bytes == leased, "the child's end touched the parent's lease"
    assert sorted(ids(epoch) + first["id"].tolist()) == list(range(320))
    assert snapshot.gather(np.arange(320))["id"].tolist() == list(range(320))
    assert table["id"].to_pylist() == list(range(320))
    del table
    snapshot.close()
    loader.close()
    assert cache.stats().leased_bytes == 0, "the child prolonged the parent's lease"
    print("well")
"""


@pytest.mark.slow
@pytest.mark.smoke
def test_a_fork_leaves_the_parent_its_lease_and_lets_the_child_read_anew(cache):
    with Script(FORK, cache.path, new_interpreter=True) as script:
        assert script.line() == "well"
        assert script.end() == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_living_fork_does_not_prolong_its_parents_lease(cache, how):
    code = """
        import os, sys, time
        import arrowcache as ac

        cache = ac.Cache.open(sys.argv[1])
        reads, writes = os.pipe()
        with ac.Loader(cache, 16) as loader, cache.snapshot() as snapshot:
            next(iter(loader))
            snapshot.gather([0])
            if os.fork() == 0:
                os.write(writes, b"-")
                time.sleep(3600)
            os.read(reads, 1)  # the child is at the user's own code: what it inherited is closed
            if sys.argv[2] == "killed":
                print("leased" if cache.stats().leased_bytes else "", flush=True)
                sys.stdin.read()
        print("" if cache.stats().leased_bytes else "closed", flush=True)
        sys.stdin.read()
    """
    with Script(code, cache.path, how) as script:
        assert script.line() == {"closed": "closed", "killed": "leased"}[how]
        if how == "closed":
            publish(cache, 100)
        script.kill()
        assert len(script.processes()) == 1
        assert cache.stats().leased_bytes == 0


FORK_OF_A_POOL = """
    import multiprocessing, os, signal, sys, warnings
    import arrowcache as ac
    from concurrent.futures import ThreadPoolExecutor
    from helpers import held_by_another_thread, sample

    def sampler(rng):
        while True:
            yield sample(int(rng.integers(1 << 20)))

    def child():
        signal.alarm(20)  # ends what hangs

    with ThreadPoolExecutor(1) as executor:
        cache = ac.Cache.open(sys.argv[1])
        pool = ac.SamplerPool(cache, sampler, workers=1, executor=executor, progress=False)
        pool.wait(segments=1, timeout=60)
        with held_by_another_thread(pool):
            if sys.argv[2] == "multiprocessing":
                process = multiprocessing.get_context("fork").Process(target=child)
                process.start()
                process.join()
                code = process.exitcode
            else:
                warnings.simplefilter("ignore")  # of forks beside threads
                pid = os.fork()
                if pid == 0:
                    child()
                    sys.exit()
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        pool.stop()
    print(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["multiprocessing", "os.fork"])
def test_a_forked_child_ends_though_its_parent_had_the_pools_lock(cache, how):
    with Script(FORK_OF_A_POOL, cache.path, how, new_interpreter=True) as script:
        assert script.line() == "0"
        assert script.end() == (0, "")
