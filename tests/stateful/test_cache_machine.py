"""A cache against a plain model: whatever is done in whatever order, no row is wrong and no byte too many.

The model is a dict of what each published segment holds. It does not know when the cache evicts;
it knows what may be gone: only the oldest, never what is leased, and nothing but by need. Processes
that die and machines that restart are acted: what they leave in the folder is left there, and
descriptors are closed as the kernel closes them, without a word to the library.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import uuid
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from helpers import KIB, disk_bytes, replace_file, sample, segment_files, seqs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from quick import in_part

import arrowcache as ac
from arrowcache import linux
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.lease import own_leases
from arrowcache.storage.locks import LockFile
from arrowcache.storage.settings import room_of_two

SCHEMA = ac.Schema({"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (16, 16)), "text": ac.String()})
ROWS = 8


HARM = {
    "all": lambda data: bytes(len(data)),
    "end": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "middle": lambda data: data[: len(data) // 4] + bytes(len(data) // 2) + data[-(len(data) // 4) :],
    "short": lambda data: data[:-7],
    "empty": lambda data: b"",
    "bit": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
    ),
}


def die(file):
    """What the kernel does with the locks of a process that was killed."""
    file.forget_in_child()  # drops nothing by itself: the kernel does


def row(number):
    return sample(number) | {"text": "t" * (number % 5) + str(number)}


class CacheMachine(RuleBasedStateMachine):
    snapshots = Bundle("snapshots")
    writers = Bundle("writers")

    def __init__(self):
        super().__init__()
        self.no_sync = mock.patch.object(os, "fsync", return_value=None)  # nobody cuts the power here
        self.no_sync.start()
        self.folder = Path(tempfile.mkdtemp(prefix="arrowcache-test-"))
        self.path = self.folder / "cache"
        self.published: dict[int, list[int]] = {}  # seq -> ids, all that ever were
        self.next_id = 0
        self.leases: list[set[int]] = []
        self.locks: dict[int, LockFile] = {}  # by the id of the snapshot
        self.pending: dict[int, list[int]] = {}  # of each open writer
        self.opened: list[ac.Writer | ac.Snapshot] = []
        self.evicted: dict[str, bytes] = {}  # the last ones, which a power cut may bring back
        self.boot = pytest.MonkeyPatch()

    def teardown(self):
        self.no_sync.stop()
        self.boot.undo()
        for thing in self.opened:
            thing.abort() if isinstance(thing, ac.Writer) else thing.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @initialize(headroom=st.sampled_from([0.0, 0.1, 0.4]), durable=st.sampled_from([False, False, True]))
    def create(self, headroom, durable):
        self.capacity = 320 * KIB  # of a full one an epoch reads half of the segments beside a writer
        self.cache = ac.Cache.create(
            self.path, SCHEMA, self.capacity, "12KiB", segment_rows=ROWS, headroom=headroom, durable=durable
        )
        self.synced_record = (self.path / "cache.lock").read_bytes()

    def ids(self, count):
        first, self.next_id = self.next_id, self.next_id + count
        return list(range(first, first + count))

    def note_published(self):
        """Learn what appeared, from the files themselves."""
        import pyarrow as pa

        for path in segment_files(self.cache):
            seq = int(path.name[:20])
            if seq not in self.published:
                assert not self.published or seq > max(self.published), "numbers only grow"
                with pa.OSFile(str(path)) as file:
                    self.published[seq] = pa.ipc.open_file(file).read_all()["id"].to_pylist()

    def leased(self):
        return set().union(*self.leases)

    # writing

    @rule(count=st.integers(1, 60))
    def write_and_close(self, count):
        before = {i for ids in self.published.values() for i in ids}
        ids, taken = self.ids(count), []
        writer = self.cache.writer(on_full="raise")
        self.opened.append(writer)
        try:
            for number in ids:
                writer.append(row(number))
                taken.append(number)
                self.note_published()  # at once: it may be evicted by the next
            writer.close()
        except ac.CacheFullError:
            assert self.leased(), "only a lease can be in the way"
            writer.abort()
        self.note_published()
        new = [i for ids in self.published.values() for i in ids if i not in before and i in set(taken)]
        whole = [i for i in taken if i in set(new)]
        assert whole == taken[: len(whole)], "what is published is a beginning of what was taken, in order"

    @rule(target=writers)
    def open_writer(self):
        writer = self.cache.writer(on_full="raise")
        self.pending[id(writer)] = []
        self.opened.append(writer)
        return writer

    @rule(writer=writers, count=st.integers(1, ROWS + 2), bad=st.booleans())
    def extend(self, writer, count, bad):
        if id(writer) not in self.pending:
            return
        ids = self.ids(count)
        rows = [row(number) for number in ids]
        columns = {name: [r[name] for r in rows] for name in SCHEMA}
        columns["id"], columns["image"] = np.array(columns["id"]), np.stack(columns["image"])
        if bad:
            try:
                writer.extend(columns | {"text": [*columns["text"][:-1], None]})
            except ac.SchemaError:
                pass
            else:
                raise AssertionError("a bad sample was taken")
        try:
            writer.extend(columns)
        except ac.CacheFullError as error:
            assert self.leased()
            ids = ids[: int(str(error).split()[0])]
        self.pending[id(writer)] += ids
        self.note_published()

    @rule(writer=consumes(writers), abort=st.booleans())
    def end_writer(self, writer, abort):
        ids = self.pending.pop(id(writer), None)
        if ids is None:
            return  # its process died
        try:
            if not abort:
                writer.close()
                self.note_published()
                everything = {i for published in self.published.values() for i in published}
                missing = [i for i in ids if i not in everything]
                assert not missing, "taken, closed without an error, and never published"
        except ac.CacheFullError:
            assert self.leased()
        finally:
            writer.abort()

    # reading

    @rule(target=snapshots, odd=st.booleans(), since=st.sampled_from(["none", "never", "always", "now"]))
    def lease(self, odd, since):
        """As who looks, or as a loader whose snapshot before was so long ago."""
        there, left_out = seqs(self.cache), []
        next_seq = self.cache.stats().next_seq
        yields_since = {"none": None, "never": math.inf, "always": 0, "now": next_seq}[since]
        where = (lambda segment: segment.seq % 2 == 1) if odd else None
        before = self.own_leases()
        snapshot = Snapshot.take(self.cache.store, where, yields_since=yields_since)
        self.opened.append(snapshot)
        seen = [segment.seq for segment in snapshot.segments]
        is_written = bool(self.pending) or (since == "always" and next_seq > 0)
        if self.settings.headroom and is_written and since != "none":
            left_out = self.headroom(there)
        wanted = [seq for seq in there if not odd or seq % 2]
        assert seen == [seq for seq in wanted if seq not in left_out]
        assert snapshot.left_out_rows == sum(len(self.published[s]) for s in wanted if s in left_out)
        if not seen:
            snapshot.close()
            return multiple()
        self.leases.append(set(seen))
        (taken,) = [lease for lease in self.own_leases() if lease not in before]
        self.locks[id(snapshot)] = taken.lock
        return snapshot, self.leases[-1]

    def own_leases(self):
        """All of this process."""
        path = self.cache.store.folder.lease_lock
        return list(dict.fromkeys(lease for seq in seqs(self.cache) for lease in own_leases(path, seq)))

    @property
    def settings(self):
        return self.cache.store.settings

    def headroom(self, there):
        """The oldest, as few as make two segments and the share that was asked for; never the newest."""
        wanted = max(self.settings.headroom * self.capacity, room_of_two(self.settings.segment_bytes))
        sizes = [path.stat().st_blocks * 512 for path in segment_files(self.cache)]
        free, left_out = self.capacity - disk_bytes(self.path), 0
        while left_out < len(there) - 1 and free < wanted:
            free += sizes[left_out]
            left_out += 1
        return there[:left_out]

    @rule(pair=snapshots, seed=st.integers(0, 99))
    def gather(self, pair, seed):
        snapshot, lease = pair
        if not any(lease is other for other in self.leases):
            return  # its process died
        expected = [i for segment in snapshot.segments for i in self.published[segment.seq]]
        assert len(snapshot) == len(expected)
        ids = np.random.default_rng(seed).integers(0, len(expected), 20)
        got = snapshot.gather(ids)
        wanted = [row(expected[i]) for i in ids]
        assert got["id"].tolist() == [w["id"] for w in wanted]
        assert got["text"] == [w["text"] for w in wanted]
        assert np.array_equal(got["image"], np.stack([w["image"] for w in wanted]))

    @rule(pair=consumes(snapshots), through_table=st.booleans())
    def release(self, pair, through_table):
        snapshot, lease = pair
        if through_table and any(lease is other for other in self.leases):
            table = snapshot.table()
            snapshot.close()
            assert table["id"].to_pylist() == [i for seq in sorted(lease) for i in self.published[seq]]
            assert set(seqs(self.cache)) >= lease
            del table
        snapshot.close()
        self.leases = [other for other in self.leases if other is not lease]

    # looking after it

    @rule(nbytes=st.integers(1, 200 * KIB))
    def evict(self, nbytes):
        before = seqs(self.cache)
        files = {path.name: path.read_bytes() for path in segment_files(self.cache)}
        freed = self.cache.evict(nbytes)
        left = {path.name for path in segment_files(self.cache)}
        self.evicted = {name: data for name, data in files.items() if name not in left}
        gone = before[: len(before) - len(seqs(self.cache))]
        assert seqs(self.cache) == before[len(gone) :]
        if freed < nbytes:
            assert len(gone) == len(before) or before[len(gone)] in self.ranges()

    def ranges(self):
        """A lease covers what lies between its segments, too."""
        return {seq for lease in self.leases for seq in range(min(lease), max(lease) + 1)}

    @rule(kilobytes=st.integers(220, 500))
    def resize(self, kilobytes):
        try:
            self.cache.resize(kilobytes * KIB)
        except ac.CacheFullError:
            assert self.leased()
        else:
            self.capacity = kilobytes * KIB
            assert disk_bytes(self.path) <= self.capacity

    @rule()
    def reopen(self):
        self.cache = ac.Cache.open(self.path)

    # what dies

    @rule(
        at=st.sampled_from(["reserved", "waiting", "numbered", "linked", "locked"]),
        nbytes=st.integers(1, 12 * KIB),
    )
    def a_writer_dies(self, at, nbytes):
        """Killed in the middle of a publish: what it held is unlocked, and its files stay."""
        folder = self.cache.store.folder
        if at == "locked":
            lock = LockFile(folder.cache_lock)
            assert lock.try_exclusive()
            die(lock)
        elif at == "numbered":
            with self.cache.store.locked():
                record = folder.read_record()
                folder.write_record(replace(record, next_seq=record.next_seq + 1))
        elif at == "linked":
            newest = segment_files(self.cache)[-1:]
            if newest and self.has_room(newest[0].stat().st_size):  # its blocks count under both names
                os.link(newest[0], folder.incoming / f"{uuid.uuid4().hex}.part")
        else:
            part = folder.new_wait() if at == "waiting" else folder.new_part()
            if at == "reserved" and self.has_room(nbytes):
                part.allocate(nbytes)
            die(part.file)

    def has_room(self, nbytes):
        return disk_bytes(self.path) + nbytes + 8 * KIB < self.capacity

    @precondition(lambda self: segment_files(self.cache) and seqs(self.cache)[0] not in self.ranges())
    @rule()
    def an_evictor_dies(self):
        """Killed between the rename and the unlink."""
        oldest = segment_files(self.cache)[0]
        oldest.rename(self.path / "incoming" / f"{uuid.uuid4().hex}.part")

    @rule(pair=consumes(snapshots))
    def a_reader_dies(self, pair):
        snapshot, lease = pair
        if self.locks[id(snapshot)].fd >= 0:
            die(self.locks[id(snapshot)])
        self.leases = [other for other in self.leases if other is not lease]
        snapshot.close()  # of its memory, which this process goes on with

    @precondition(lambda self: max(self.published, default=-1) in [-1, *seqs(self.cache)])
    @rule(left=st.sampled_from([b"", bytes(52), bytes(20)]))
    def the_counter_is_lost(self, left):
        (self.path / "cache.lock").write_bytes(left)
        self.cache = ac.Cache.open(self.path)

    @rule(
        zeroed=st.lists(
            st.tuples(st.integers(0, 99), st.sampled_from(["all", "end", "middle", "short", "empty"])),
            max_size=3,
        ),
        back=st.booleans(),
        count=st.integers(1, 40),
    )
    def the_machine_restarts(self, zeroed, back, count):
        """Every process dies; what was not synced may be zero or old, what was evicted may be back."""
        for thing in self.opened:
            thing.abort() if isinstance(thing, ac.Writer) else thing.close()
        self.leases, self.pending = [], {}
        self.write_and_close(count)  # the last seconds before the cut
        if back and self.evicted.keys().isdisjoint(os.listdir(self.path / "quarantine")):
            for name, data in self.evicted.items():
                (self.path / "segments" / name).write_bytes(data)
        lost = set()
        if not self.cache.store.settings.durable:
            for pick, how in zeroed:
                path = segment_files(self.cache)[pick % len(segment_files(self.cache))]
                replace_file(path, HARM[how](path.read_bytes()))
                lost.add(path.name)
        (self.path / "cache.lock").write_bytes(self.synced_record)
        boot_id = uuid.uuid4().hex
        self.boot.setattr(linux, "boot_id", lambda: boot_id)
        self.cache = ac.Cache.open(self.path)
        self.synced_record = (self.path / "cache.lock").read_bytes()
        self.read_all()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert self.cache.verify() == [], "the reader found all damage"
        assert not lost & set(os.listdir(self.path / "segments"))

    def read_all(self):
        """Whatever a new snapshot has is right, its damaged segments being out of it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with Snapshot.take(self.cache.store) as snapshot:
                snapshot.map_all()
                expected = [i for segment in snapshot.segments for i in self.published[segment.seq]]
                got = snapshot.gather(range(len(snapshot)))
        wanted = [row(number) for number in expected]
        assert got["id"].tolist() == expected
        assert [segment.seq for segment in snapshot.segments] == seqs(self.cache), "what is left is read"
        assert got["text"] == [w["text"] for w in wanted]
        assert not expected or np.array_equal(got["image"], np.stack([w["image"] for w in wanted]))

    # what is damaged

    @precondition(lambda self: set(seqs(self.cache)) - self.ranges())
    @rule(
        pick=st.integers(0, 99),
        how=st.sampled_from(["end", "all", "short", "empty", "bit"]),
        by_reader=st.booleans(),
    )
    def damage(self, pick, how, by_reader):
        free = [path for path in segment_files(self.cache) if int(path.name[:20]) not in self.ranges()]
        victim = free[pick % len(free)]
        replace_file(victim, HARM[how](victim.read_bytes()))
        if by_reader:
            before, self.cache = self.cache, ac.Cache.open(self.path, check="bytes")
            self.read_all()
            self.cache = before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            problems = self.cache.verify()
        assert [problem.name for problem in problems] == ([] if by_reader else [victim.name])
        assert not victim.exists()
        assert victim.name in os.listdir(self.path / "quarantine") or self.cache.stats().quarantined == 0

    @invariant()
    def the_capacity_holds(self):
        assert disk_bytes(self.path) <= self.capacity

    @invariant()
    def what_is_leased_is_there(self):
        assert self.leased() <= set(seqs(self.cache))

    @invariant()
    def statistics_agree(self):
        stats = self.cache.stats()
        there = seqs(self.cache)
        assert stats.segments == len(there)
        assert stats.rows == sum(len(self.published[seq]) for seq in there)
        assert stats.capacity_bytes == self.capacity
        assert stats.next_seq > max(self.published, default=-1)
        assert (stats.leased_bytes > 0) == bool(self.leases)

    @invariant()
    def all_is_well(self):
        assert self.cache.verify() == []


CacheMachine.TestCase.settings = settings(max_examples=in_part(50), stateful_step_count=30, deadline=None)
TestCacheMachine = pytest.mark.slow(CacheMachine.TestCase)
