"""Real disks that are smaller than the capacity, or just as large: tmpfs, and ext4 where it can be had."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Script, small_disk, small_ext4

ROLLING = """
    import faulthandler, os, signal, sys, threading, time, warnings
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(200)
    import numpy as np
    import arrowcache as ac
    from helpers import disk_bytes, make_cache, publish, sample, segment_files
    from pathlib import Path

    def draws(rng):
        while True:
            yield sample(int(rng.integers(1 << 20)))

    def same(batch):
        return batch

    def check(batch):
        for number, image in zip(batch["id"].tolist(), batch["image"], strict=True):
            assert (image == sample(number)["image"]).all(), "a wrong row"

    def used(path):
        status = os.statvfs(path)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    if __name__ == "__main__":
        disk, how, segments = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
        empty, status = used(disk), os.statvfs(disk)
        room = status.f_bavail * status.f_frsize
        capacity = {"larger": 64 << 20, "as large": room - (32 << 10)}[how]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cache = make_cache(disk / "cache", capacity=capacity)
        assert len(said) == (how == "larger"), said
        warnings.filterwarnings("ignore", "an epoch leaves out the oldest")  # the rows of the headroom
        most, refused = 0, []
        with (
            ac.SamplerPool(cache, draws, workers=2, segments=segments, retries=30, progress=False) as pool,
            ac.Loader(cache, 16, timeout=60) as plain,
            ac.Loader(cache, 16, timeout=60, workers=2, transform=same) as processes,
            ac.Loader(cache, 16, timeout=60, shuffle="window", window_bytes=1 << 18) as window,
        ):
            while pool.stats().segments < segments:
                assert not pool.stats().failures, pool.wait(timeout=1)
                for loader in (plain, processes, window):
                    for batch in loader:
                        check(batch)
                        most = max(most, used(disk) - empty)
                    assert disk_bytes(disk / "cache") <= capacity
            pool.wait(timeout=60)
        # ext4 takes some blocks for itself of those that it holds back
        assert most <= min(capacity, room + (32 << 10)), (most, capacity, room)
        assert cache.stats().oldest_seq > 0, "the disk was never full: this shows nothing"
        assert cache.stats().leased_bytes == 0
        assert os.listdir(cache.path / "incoming") == []
        assert cache.verify() == []
        print(cache.stats().segments, flush=True)
"""


def disk_of(kind: str, folder: Path) -> list[str]:
    folder.mkdir()
    return small_disk(folder, "2m") if kind == "tmpfs" else small_ext4(folder, "4M")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), [("tmpfs", "larger"), ("tmpfs", "as large"), ("ext4", "larger")])
def test_a_capacity_beyond_or_up_to_the_disk_rolls_on_and_loses_nothing(tmp_path, kind, how):
    """Epochs leased all there was, so that samplers on a disk that is too small were given up one by one."""
    disk = tmp_path / "disk"
    with Script(ROLLING, disk, how, 160, within=disk_of(kind, disk)) as script:
        assert int(script.line()) > 20, "most of what the disk could hold went"
        assert script.end() == (0, "")


FOREIGN = """
    import os, sys
    import numpy as np
    import arrowcache as ac
    from helpers import append_rows, ids_of, make_cache, publish, read_ids, sample, segment_files
    from pathlib import Path

    disk = Path(sys.argv[1])
    cache = make_cache(disk / "cache", capacity="1536KiB")
    publish(cache, 30)
    loader = ac.Loader(cache, 16)
    epoch, held = iter(loader), cache.snapshot()
    made = ids_of([next(epoch)])

    def fill():  # somebody else takes all there is
        with open(disk / "foreign", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    fill()
    before = segment_files(cache)
    writer, number = cache.writer("raise"), 480
    try:
        while True:
            writer.append(sample(number))
            number += 1
    except ac.CacheFullError as error:
        text = str(error)
    advice = "the disk is full: free space on it, or cache.evict() some and cache.resize() to less"
    assert advice in text, text
    try:
        cache.resize("1536KiB")  # which may find the block that it needs
    except OSError as error:
        assert "the disk is full" in str(error), error
    assert len(made + ids_of(epoch)) == 480, "the epoch in progress has all its rows"
    assert held.gather(np.arange(len(held)))["id"].tolist() == list(range(480))
    left = segment_files(cache)
    assert left == before, "what is leased was evicted"
    held.close()
    assert cache.stats().capacity_bytes == 1536 * 1024
    for file in left:
        assert read_ids(file)
    assert os.listdir(cache.path / "incoming") == []
    (disk / "foreign").unlink()
    writer.append(sample(number))
    writer.close()
    append_rows(cache, range(number + 1, 512))
    assert len(ids_of(loader)) == 512
    loader.close()
    fill()
    cache.evict("200KiB")  # as advised
    cache.resize("1MiB")
    assert cache.stats().allocated_bytes <= cache.stats().capacity_bytes == 1 << 20
    assert cache.verify() == []
    print("well", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_others_fill_is_a_typed_error_until_there_is_room_again(tmp_path, kind):
    disk = tmp_path / "disk"
    with Script(FOREIGN, disk, within=disk_of(kind, disk)) as script:
        assert script.line() == "well"
        assert script.end() == (0, "")


UNREADABLE = """
    import os, sys, warnings
    import arrowcache as ac
    from helpers import make_cache, publish, seqs, segment_files
    from pathlib import Path

    disk, image = Path(sys.argv[1]), Path(sys.argv[1] + ".image")
    cache = make_cache(disk / "cache", capacity="8MiB", segment_bytes="1MiB", segment_rows=512)
    publish(cache, 5, rows=512)
    for file in segment_files(cache):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    os.truncate(image, 2 << 20)  # what lies beyond is an I/O error from now on
    warnings.simplefilter("ignore", RuntimeWarning)
    problems = cache.verify()
    print(len(problems), len(seqs(cache)), *{problem.reason for problem in problems}, flush=True)
    assert cache.verify() == []
"""


@pytest.mark.slow
def test_a_disk_that_fails_to_read_is_found_by_verify_and_does_not_end_it(tmp_path):
    """Reading such bytes where they are mapped is a bus error."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with Script(UNREADABLE, disk, within=small_ext4(disk, "16M")) as script:
        damaged, left, reason = script.line().split(" ", 2)
        assert int(damaged) > 0
        assert int(damaged) + int(left) == 5
        assert reason == "the disk does not give its bytes (an I/O error: see dmesg)"
        assert script.end() == (0, "")


TRAINING = """
    import os, sys, warnings
    import numpy as np
    import arrowcache as ac
    from helpers import make_cache, segment_files
    from pathlib import Path

    disk, image, with_text = Path(sys.argv[1]), Path(sys.argv[1] + ".image"), sys.argv[2] == "text"
    schema = ac.Schema({"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (32, 32))}
                       | ({"name": ac.String()} if with_text else {}))
    cache = make_cache(disk / "cache", schema, capacity="8MiB", segment_bytes="1MiB", segment_rows=128)
    with cache.writer() as writer:
        for number in range(10 * 128):
            image_of = np.full((32, 32), number, np.float32)
            writer.append(id=number, image=image_of, **({"name": str(number)} if with_text else {}))
    for file in segment_files(cache):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    os.truncate(image, 4 << 20)  # what lies beyond is an I/O error from now on
    warnings.simplefilter("always", RuntimeWarning)
    failures, came = 0, []
    with warnings.catch_warnings(record=True) as caught, ac.Loader(cache, 8) as loader:
        warnings.simplefilter("always")
        while not came:
            try:
                for batch in loader:
                    assert (batch["image"] == batch["id"][:, None, None]).all()
                    came += batch["id"].tolist()
            except ac.CorruptSegmentError as error:
                assert ".arrow can't be read any more (Input/output error)" in str(error), error
                failures, came = failures + 1, []
    left_out = {str(each.message) for each in caught}
    assert all(".arrow left out: " in text for text in left_out), left_out
    assert len(set(came)) == len(came) == 1280 - 128 * len(left_out)
    print(failures, len(came), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "none"])
def test_a_loader_goes_on_with_what_a_failing_disk_still_gives(tmp_path, kind):
    """Headers that the disk does not give are no bus error, where the check of a segment would touch them."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with Script(TRAINING, disk, kind, within=small_ext4(disk, "16M")) as script:
        failures, rows = map(int, script.line().split())
        assert failures <= 10
        assert 0 < rows < 1280
        assert script.end() == (0, "")
