"""A cache against a plain model: whatever is done in whatever order, no row is wrong and no byte too many.

The model is a dict of what each published segment holds. It does not know when the cache evicts;
it knows what may be gone: only the oldest, never what is leased, and nothing but by need.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
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

import arrowcache as ac

SCHEMA = ac.Schema({"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (16, 16)), "text": ac.String()})
ROWS = 8


def row(number):
    return sample(number) | {"text": "t" * (number % 5) + str(number)}


class CacheMachine(RuleBasedStateMachine):
    snapshots = Bundle("snapshots")
    writers = Bundle("writers")

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="arrowcache-test-"))
        self.path = self.folder / "cache"
        self.published: dict[int, list[int]] = {}  # seq -> ids, all that ever were
        self.next_id = 0
        self.leases: list[set[int]] = []
        self.pending: dict[int, list[int]] = {}  # of each open writer
        self.opened: list[ac.Writer | ac.Snapshot] = []

    def teardown(self):
        for thing in self.opened:
            thing.abort() if isinstance(thing, ac.Writer) else thing.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @initialize(headroom=st.sampled_from([0.0, 0.1, 0.4]), durable=st.booleans())
    def create(self, headroom, durable):
        self.capacity = 256 * KIB
        self.cache = ac.Cache.create(
            self.path, SCHEMA, self.capacity, "12KiB", segment_rows=ROWS, headroom=headroom, durable=durable
        )

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
        ids = self.pending.pop(id(writer))
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

    @rule(target=snapshots, odd=st.booleans())
    def lease(self, odd):
        snapshot = self.cache.snapshot(where=(lambda segment: segment.seq % 2 == 1) if odd else None)
        self.opened.append(snapshot)
        seen = [segment.seq for segment in snapshot.segments]
        there = seqs(self.cache)
        if not odd and there:
            assert seen == there[len(there) - len(seen) :], "all but the oldest, which are the headroom"
            assert seen[-1] == there[-1]
        if not seen:
            snapshot.close()
            return multiple()
        self.leases.append(set(seen))
        return snapshot, self.leases[-1]

    @rule(pair=snapshots, seed=st.integers(0, 99))
    def gather(self, pair, seed):
        snapshot, _ = pair
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
        if through_table:
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
        freed = self.cache.evict(nbytes)
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

    @rule(pick=st.integers(0, 99))
    def leave_debris(self, pick):
        part = self.cache.store.folder.new_part()
        part.reserve(1 + pick * 100)
        part._file.close()
        self.cache = ac.Cache.open(self.path)

    @precondition(lambda self: set(seqs(self.cache)) - self.ranges())
    @rule(pick=st.integers(0, 99))
    def damage(self, pick):
        free = [path for path in segment_files(self.cache) if int(path.name[:20]) not in self.ranges()]
        victim = free[pick % len(free)]
        replace_file(victim, victim.read_bytes()[:-7])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            problems = self.cache.verify()
        assert [problem.name for problem in problems] == [victim.name]
        assert not victim.exists()

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


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestCacheMachine = CacheMachine.TestCase
