"""The protocol of publish, lease, evict and recover, as a model whose states are all visited.

A step is one effect that other processes see: cache.lock taken or given back, a file made, renamed or
removed, a record written. Between two steps another process may step, a process may be killed (the kernel
drops its locks), or the machine may stop (the disk keeps what was synced; the rest is whole, torn or as
before). A segment, and a part, takes one unit of the capacity. Each step names its function in the package.

A model that finds nothing may look at nothing: so each rule of the protocol is left out once, and the search
has to find what that breaks. The code itself is attacked by tests/stateful, storm and crash.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

LEAP = 8  # numbers skipped once the machine stopped: more than are given here between two syncs

OVER, EVICTED, TWICE, TORN = (
    "the folder is above its capacity",
    "a segment was evicted under a lease",
    "a number was given twice",
    "a torn segment was read",
)
SWEPT, HOLE, STUCK = "a part vanished under its writer", "a newer segment left first", "nobody can go on"


class Segment(NamedTuple):
    seq: int
    is_whole: bool


class File(NamedTuple):
    """A file in incoming/: a part, or a segment that was retired, which nobody locks."""

    owner: int | None  # the process that locks it
    seq: int | None = None  # of the segment that it is, too, or was
    is_whole: bool = False
    is_retired: bool = False


class Process(NamedTuple):
    role: str
    left: int  # segments to publish, or epochs to read
    at: str = "idle"
    seqs: tuple[int, ...] = ()  # to be read; or the number that is about to be given
    lease: tuple[int, int] | None = None


class State(NamedTuple):
    processes: tuple[Process, ...]
    kills: int = 0  # that may still happen
    stops: int = 0  # of the machine, likewise
    segments: tuple[Segment, ...] = ()
    incoming: tuple[File, ...] = ()
    lock: int | None = None  # the process that holds cache.lock
    next_seq: int = 0
    synced_seq: int = 0
    suspect_below: int = 0
    is_recovered: bool = True
    newest_seq: int = -1  # that a segment ever had
    gone_seq: int = -1  # of the newest that was evicted
    gone: Segment | None = None  # the last: its end may not be on the disk yet


class Violation(Exception):
    """A guarantee is broken."""


@dataclass(frozen=True)
class Model:
    capacity: int = 2
    without: str = ""  # a key of BROKEN

    def steps(self, state: State) -> Iterator[State]:
        """The states that one step leads to. Raises: Violation."""
        for who, process in enumerate(state.processes):
            if process.at == "dead":
                continue
            yield from getattr(self, process.at)(state, who, process)
            if state.kills and process.at != "done":
                yield self._killed(state, who)
        if state.stops and state.is_recovered:
            yield from self._stopped(state)

    def check(self, state: State) -> None:
        """Raises: Violation."""
        seqs = {segment.seq for segment in state.segments}
        files = seqs | {
            file.seq for file in state.incoming if file.seq is not None
        }  # one file, whatever its names
        if (
            state.is_recovered
            and len(files) + sum(file.seq is None for file in state.incoming) > self.capacity
        ):
            raise Violation(OVER)
        if any(process.lease and not {*process.seqs} <= seqs for process in state.processes):
            raise Violation(EVICTED)
        if state.segments and state.segments[0].seq < state.gone_seq:
            raise Violation(HOLE)

    # who dies, and what the disk keeps

    def _killed(self, state: State, who: int) -> State:
        incoming = tuple(file._replace(owner=None) if file.owner == who else file for file in state.incoming)
        lock = state.lock
        if lock == who and self.without != "the kernel drops the locks of the dead":
            lock = None
        dead = _put(state, who, at="dead", lease=None, seqs=())
        return dead._replace(kills=state.kills - 1, incoming=incoming, lock=lock)

    def _stopped(self, state: State) -> Iterator[State]:
        ended = tuple(
            process if process.at == "dead" else process._replace(at="start", lease=None, seqs=())
            for process in state.processes
        )
        dead = state._replace(
            processes=ended, stops=state.stops - 1, lock=None, is_recovered=False, gone_seq=-1, gone=None
        )
        dead = dead._replace(incoming=tuple(file._replace(owner=None) for file in state.incoming))
        for next_seq in {state.synced_seq, state.next_seq}:
            lost = dead._replace(next_seq=next_seq)
            yield lost
            if state.segments:  # its bytes were not synced
                torn = state.segments[-1]._replace(is_whole=False)
                yield lost._replace(segments=(*state.segments[:-1], torn))
                yield lost._replace(segments=state.segments[:-1])  # nor its name
            if state.gone is not None:  # neither the rename nor the end of the file was synced
                others = tuple(file for file in dead.incoming if file.seq != state.gone.seq)
                yield lost._replace(segments=(state.gone, *state.segments), incoming=others)

    # opening: recovery.recover

    def start(self, state: State, who: int, process: Process) -> Iterator[State]:
        if state.lock is None:
            yield _put(state._replace(lock=who), who, at="sweep")

    def sweep(self, state: State, who: int, process: Process) -> Iterator[State]:
        """folder.sweep(), then store.evict_beyond_capacity()."""
        incoming = tuple(file for file in state.incoming if file.owner is not None)
        segments = state.segments
        if not state.is_recovered and self.without != "recovery shrinks the folder":
            segments = segments[max(0, len(segments) + len(incoming) - self.capacity) :]
        yield _put(state._replace(incoming=incoming, segments=segments), who, at="leap")

    def leap(self, state: State, who: int, process: Process) -> Iterator[State]:
        """folder.write_record() and sync_record()."""
        if not state.is_recovered:
            highest = max((segment.seq for segment in state.segments), default=-1)
            leap = 0 if self.without == "numbers leap" else LEAP
            following = max(state.next_seq, highest + 1) + leap
            state = state._replace(next_seq=following, synced_seq=following, suspect_below=following)
        yield _put(state._replace(is_recovered=True, lock=None), who, at="idle")

    # store.publish, and store.lease

    def idle(self, state: State, who: int, process: Process) -> Iterator[State]:
        if not process.left:
            yield _put(state, who, at="done")
        elif process.role == "writer" and self.without == "room is reserved under cache.lock":
            yield _put(state, who, at="look")
        elif state.lock is None:
            yield _put(state._replace(lock=who), who, at="reserve" if process.role == "writer" else "lease")

    def done(self, state: State, who: int, process: Process) -> Iterator[State]:
        return iter(())

    def look(self, state: State, who: int, process: Process) -> Iterator[State]:
        """Of the model alone: room that is looked at and taken in two steps."""
        if len(state.segments) + len(state.incoming) < self.capacity:
            yield _put(state, who, at="take")
        elif state.lock is None:
            yield _put(state._replace(lock=who), who, at="reserve")

    def take(self, state: State, who: int, process: Process) -> Iterator[State]:
        yield _put(state._replace(incoming=(*state.incoming, File(who))), who, at="write")

    def reserve(self, state: State, who: int, process: Process) -> Iterator[State]:
        """store._try_reserve: a part, or debris swept, or the oldest segment retired, or a wait."""
        counted = len(state.segments) + len(state.incoming)
        if self.without == "what is not unlinked yet counts":
            counted -= sum(file.is_retired for file in state.incoming)
        debris = next((file for file in state.incoming if file.owner is None), None)
        if self.without == "only unlocked parts are swept" and state.incoming:
            debris = state.incoming[0]
        if counted < self.capacity:
            yield _put(state._replace(incoming=(*state.incoming, File(who)), lock=None), who, at="write")
            return
        if debris is not None:
            yield _put(state._replace(incoming=_less(state.incoming, debris), lock=None), who, at="idle")
            return
        leases = [other.lease for other in state.processes if other.lease]
        unleased = [s for s in state.segments if not any(first <= s.seq <= last for first, last in leases)]
        victim = unleased[0] if unleased else None
        if self.without == "the lease bytes are asked" and state.segments:
            victim = state.segments[0]
        if victim is None or (victim != state.segments[0] and self.without != "the oldest leaves first"):
            yield _put(state._replace(lock=None), who, at="idle")
            return
        state = state._replace(
            segments=_less(state.segments, victim),
            incoming=(*state.incoming, File(None, *victim, is_retired=True)),
            gone_seq=max(state.gone_seq, victim.seq),
            gone=victim,
        )
        yield _put(state, who, at="retired", seqs=(victim.seq,))

    def retired(self, state: State, who: int, process: Process) -> Iterator[State]:
        yield _put(state._replace(lock=None), who, at="unlink")

    def unlink(self, state: State, who: int, process: Process) -> Iterator[State]:
        """folder.remove_unlocked: another one may have swept it."""
        incoming = tuple(
            file for file in state.incoming if not (file.is_retired and file.seq == process.seqs[0])
        )
        yield _put(state._replace(incoming=incoming), who, at="idle", seqs=())

    def write(self, state: State, who: int, process: Process) -> Iterator[State]:
        own = _own(state, who)
        written = (*_less(state.incoming, own), own._replace(is_whole=True))
        yield _put(state._replace(incoming=written), who, at="relock")

    def relock(self, state: State, who: int, process: Process) -> Iterator[State]:
        if state.lock is None:
            first = "link" if self.without == "the number is written before the name" else "number"
            yield _put(state._replace(lock=who), who, at=first, seqs=(state.next_seq,))

    def number(self, state: State, who: int, process: Process) -> Iterator[State]:
        """folder.write_record."""
        late = self.without == "the number is written before the name"
        yield _put(state._replace(next_seq=state.next_seq + 1), who, at="discard" if late else "link")

    def link(self, state: State, who: int, process: Process) -> Iterator[State]:
        """folder.link."""
        own, (seq,) = _own(state, who), process.seqs
        if seq <= state.newest_seq:
            raise Violation(TWICE)
        state = state._replace(segments=(*state.segments, Segment(seq, own.is_whole)), newest_seq=seq)
        state = state._replace(incoming=(*_less(state.incoming, own), own._replace(seq=seq)))
        late = self.without == "the number is written before the name"
        yield _put(state, who, at="number" if late else "discard")

    def discard(self, state: State, who: int, process: Process) -> Iterator[State]:
        incoming = tuple(file for file in state.incoming if file.owner != who)
        yield _put(state._replace(incoming=incoming), who, at="published", seqs=())

    def published(self, state: State, who: int, process: Process) -> Iterator[State]:
        yield _put(state._replace(lock=None), who, at="idle", left=process.left - 1)

    def lease(self, state: State, who: int, process: Process) -> Iterator[State]:
        """store.lease: list, then lock the bytes first to last."""
        seqs = tuple(segment.seq for segment in state.segments)
        if not seqs:
            yield _put(state._replace(lock=None), who, at="idle", left=process.left - 1)
        elif self.without == "a lease is taken under cache.lock":
            yield _put(state._replace(lock=None), who, at="late_lease", seqs=seqs)
        else:
            yield _put(state, who, at="leased", seqs=seqs, lease=(seqs[0], seqs[-1]))

    def late_lease(self, state: State, who: int, process: Process) -> Iterator[State]:
        yield _put(state, who, at="read", lease=(process.seqs[0], process.seqs[-1]))

    def leased(self, state: State, who: int, process: Process) -> Iterator[State]:
        yield _put(state._replace(lock=None), who, at="read")

    def read(self, state: State, who: int, process: Process) -> Iterator[State]:
        """Read the oldest, and narrow the lease. A torn segment that is suspect is found by its checksum."""
        seq, *others = process.seqs
        found = next(segment for segment in state.segments if segment.seq == seq)
        is_checked = seq < state.suspect_below and self.without != "suspects are checked"
        if not found.is_whole and not is_checked:
            raise Violation(TORN)
        if others:
            yield _put(state, who, seqs=tuple(others), lease=(others[0], others[-1]))
        else:
            yield _put(state, who, at="idle", seqs=(), lease=None, left=process.left - 1)


BROKEN = {
    "a lease is taken under cache.lock": EVICTED,
    "the lease bytes are asked": EVICTED,
    "room is reserved under cache.lock": OVER,
    "what is not unlinked yet counts": OVER,
    "recovery shrinks the folder": OVER,
    "only unlocked parts are swept": SWEPT,
    "the number is written before the name": TWICE,
    "numbers leap": TWICE,
    "the oldest leaves first": HOLE,
    "suspects are checked": TORN,
    "the kernel drops the locks of the dead": STUCK,
}
"""Rules of the protocol, and what is broken without them."""


def _put(state: State, who: int, **changed: object) -> State:
    processes = list(state.processes)
    processes[who] = processes[who]._replace(**changed)
    return state._replace(processes=tuple(processes))


def _less(files: tuple, one: object) -> tuple:
    return tuple(file for file in files if file != one)


def _own(state: State, who: int) -> File:
    for file in state.incoming:
        if file.owner == who:
            return file
    raise Violation(SWEPT)


def search(model: Model, first: State) -> int:
    """Visit every state. Returns: their number. Raises: Violation, as of one from which nobody can end."""
    found, todo, before = {first}, [first], dict[State, list[State]]()
    ends = []
    while todo:
        state = todo.pop()
        model.check(state)
        following = {*model.steps(state)}
        if all(process.at in ("done", "dead") for process in state.processes):
            ends.append(state)
        for one in following:
            before.setdefault(one, []).append(state)
        todo += following - found
        found |= following
    can_end = {*ends}
    while ends:
        new = {*before.get(ends.pop(), ())} - can_end
        can_end |= new
        ends += new
    if can_end != found:
        raise Violation(STUCK)
    return len(found)


def those(writers=(), readers=(), **more):
    """A state to begin with: processes by what they do, how often."""
    made = [Process("writer", count) for count in writers] + [Process("reader", count) for count in readers]
    return State(tuple(made), **more)


CASES = {
    "two writers and a reader": those([2, 2], [2]),
    "one is killed": those([2, 1], [1], kills=1),
    "the machine stops": those([2], [2], stops=1),
    "the machine stops, and a writer is killed": those([2, 1], stops=1, kills=1),
}


@pytest.mark.parametrize("name", CASES)
def test_whatever_the_order_of_steps_each_guarantee_holds(name):
    assert search(Model(), CASES[name]) > 1000


LARGE = {
    "four processes": those([2, 2], [2, 2]),
    "four processes, and two are killed": those([2, 2], [1, 1], kills=2),
    "four processes, and the machine stops": those([2, 1], [1, 1], stops=1),
    "three processes, one is killed, and the machine stops": those([2, 1], [1], stops=1, kills=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [2, 3])
@pytest.mark.parametrize("name", LARGE)
def test_of_up_to_four_processes_each_guarantee_holds(name, capacity):
    assert search(Model(capacity), LARGE[name]) > 10_000


@pytest.mark.parametrize("rule", BROKEN)
def test_without_a_rule_the_search_finds_what_it_is_for(rule):
    found = set()
    for first in CASES.values():
        try:
            search(Model(without=rule), first)
        except Violation as violation:
            found.add(str(violation))
    assert BROKEN[rule] in found
