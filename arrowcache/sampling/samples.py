"""Samples: those of one task, read many at a time, in the order in which they were yielded.

    def sample(rng):
        for key in rng.permutation(keys):
            yield partial(read, key)  # read(key) runs in one of `reads` threads

`Samples` gives the samples of one task, from the `Stream` of its sampler, or from several: see mixture.py.
Guarantees: the sampler alone draws from `rng`, in the task's thread, in which it is closed, too. Samples
come in the order of yielding: a task has the same rows whatever `reads` is, and whichever read is slow, fails
or is tried again. Results that wait take about the bytes of a segment, of all tasks of a process together,
beside those of `reads` reads. A sampler that yields no callable costs none of this.
"""

from __future__ import annotations

import dis
import gc
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from types import BuiltinMethodType, CellType, CodeType, FunctionType, GeneratorType, MethodType
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from arrowcache.errors import SamplerError
from arrowcache.sampling.reads import (
    Pending,
    Read,
    Rows,
    Sampler,
    Threads,
    Values,
    hedge_of,
    held,
    is_read,
    nbytes_of,
    rows_in,
    values_of,
)
from arrowcache.sampling.retries import is_fault, mark_permanent

T = TypeVar("T")

MAX_EMPTY_CALLS = 3  # of a sampler in a row
_MAX_FAULTS = 100  # of samples that are tried for a schema
_QUEUE_SECONDS = 0.01  # between two looks at a queue that has as many reads as there are threads
_MAX_PARTS = 200  # of a read, that are looked at
_SETS = ("STORE_DEREF", "DELETE_DEREF")
_FUNCTIONS = (FunctionType, MethodType, partial)
_WAY_OUT = "write `yield partial(read, key)`, with functools.partial, which keeps the values of this moment"

_of_thread = threading.local()  # .skips, .is_closing


class _Ready(NamedTuple):
    """A sample that was yielded as such, or an exception of the sampler, or of a sample that it cannot give.

    `drawn` is None of a sample that does not wait: it is behind no reads, and alone.
    """

    values: Values | None
    drawn: str | None
    held_bytes: int = 0
    error: Exception | None = None
    is_of_sample: bool = False


class Fault:
    """A read that raises. A sampler that goes on yields it in place of a sample that it cannot give."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self) -> NoReturn:
        raise self.error


class Streams(ABC):
    """Samples in an order that is fixed, whatever has been read: of one sampler, or of several in turn."""

    drawn: str = ""
    """The name of the sample that was taken last, if the sampler's attribute `drawn` tells it."""

    read_failed: bool = False
    """True if `taken` raised the error of a read that a sampler had yielded, which is the pool's to judge."""

    @property
    @abstractmethod
    def due(self) -> Stream | None:
        """The stream from which the next sample comes. None: it has been taken from there already."""

    @property
    @abstractmethod
    def covered(self) -> float:
        """About the number of rows that were read, or will be by what has begun."""

    @property
    @abstractmethod
    def reads(self) -> int:
        """The number of reads that were begun and not taken."""

    @property
    @abstractmethod
    def has_reads(self) -> bool | None:
        """True if a sampler has yielded one. None: some has not yielded yet."""

    @abstractmethod
    def behind(self, wanted_rows: float, *, is_due: bool = True) -> Stream | None:
        """Return the stream whose sampler is to yield something more now, for about so many rows in all.

        Args:
            is_due: the next sample comes from here.
        """

    @abstractmethod
    def taken(self, most_rows: int | None = None) -> Values | Exception | None:
        """Take the next sample, which is there, or its fault, or None where a call of the sampler has ended.

        Args:
            most_rows: what a mixture may give at a time.
        Returns: NOTHING: the next one is to be waited for.
        Raises: what the sampler or its read raised.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up what was not taken, and close the samplers."""


NOTHING = Rows()
"""Stands for no sample, where the next one is to be waited for."""


class Stream(Streams):
    """The samples of one sampler, in the order of yielding. Used in one thread.

    Args:
        sampler: called with `rng`, and called again whenever it ends. A source that plans is asked for a plan
            in its place: see `Source.plan_reads`.
        most_bytes: of results that wait.
        rows: that a source plans. None: it does not.
        skips: faults of single samples are given in their places, not raised.
        place: of the sampler in others.
    """

    def __init__(
        self,
        sampler: Sampler,
        rng: np.random.Generator,
        threads: Threads,
        most_bytes: int,
        rows: int | None = None,
        *,
        skips: bool = False,
        place: tuple[int, ...] = (),
    ) -> None:
        self._sampler, self._rng, self._threads, self._most_bytes = sampler, rng, threads, most_bytes
        self._skips, self._hedges = skips, hedge_of(sampler)
        self._mean, self._waits = threads.mean_of(place), bool(place)  # a sample, for those of others
        self.is_divided = getattr(sampler, "is_divided", False)
        plan = None if rows is None else getattr(sampler, "plan_reads", None)
        self._begun: Sampler = sampler if plan is None else lambda rng: plan(rng, rows)
        self._plans = plan is not None
        self._is_whole = self.is_divided or self._plans  # a call yields all that the task has room for
        self._yielded: Iterator[Any] | None = None  # of the call at work
        self.entries: deque[Pending | _Ready | None] = deque()  # None: the end of a call
        self._reads = self._ready = 0  # of these, in the queue
        self._is_stuck = False  # the queue ends in what has to be taken first
        self._drawn: str | None = None
        self._has_reads: bool | None = None
        self._left: Mapping[str, Any] | None = None  # the state of `rng` since it yielded last, from then on
        self._is_drawn_from = False  # by a read

    @property
    def drawn(self) -> str:  # type: ignore[override]  # never set here
        return getattr(self._sampler, "drawn", "") if self._drawn is None else self._drawn

    @property
    def due(self) -> Stream:
        return self

    @property
    def covered(self) -> float:
        return self._ready + self._reads * max(1.0, self._mean.rows)

    @property
    def reads(self) -> int:
        return self._reads

    @property
    def has_reads(self) -> bool | None:
        return self._has_reads

    def behind(self, wanted_rows: float, *, is_due: bool = True) -> Stream | None:
        return self if self._may_go_on(wanted_rows, is_due=is_due) else None

    def taken(self, most_rows: int | None = None) -> Values | Exception | None:  # noqa: ARG002  # all at once
        entry = self.entries.popleft()
        self._drawn = None
        if entry is None:
            return None
        self._drawn = entry.drawn
        if isinstance(entry, Pending):
            self._reads -= 1
            if entry.error is None:
                self._mean.learn(rows_in(entry.values), entry.held_bytes + entry.more_bytes)
            self._threads.give_up(entry)
            self._look_at_rng()
            _require_unchanged(entry.variables)
            is_of_sample = True
        else:
            self._ready -= entry.error is None
            held.add(-entry.held_bytes)
            is_of_sample = entry.is_of_sample
        error = entry.error
        if error is None:
            return entry.values
        if is_of_sample and self._skips and isinstance(error, Exception) and is_fault(error):
            return error
        self.read_failed = isinstance(entry, Pending) and not self._plans
        raise error

    def close(self) -> None:
        """Give up what was not taken, and close the sampler. Reads that run already go on by themselves."""
        while self.entries:
            entry = self.entries.popleft()
            if isinstance(entry, Pending):
                self._threads.give_up(entry)
            elif isinstance(entry, _Ready):
                held.add(-entry.held_bytes)
        self._reads = self._ready = 0
        yielded, self._yielded = self._yielded, None
        with _closing():
            _close(yielded)

    def advance(self) -> None:
        """Take one thing more from the sampler, into the queue."""
        skipped, _of_thread.skips = leaves_out(), self._skips
        try:
            sample = self._next()
            if isinstance(sample, Mapping):
                ready = _Ready(sample, self._named() if self._waits else None)
                if self.entries:
                    ready = _Ready(sample, self._named(), nbytes_of(sample))
                    held.add(ready.held_bytes)
                self.entries.append(ready)
                self._ready += 1
            elif isinstance(sample, Fault):
                self.entries.append(_Ready(None, self._named(), error=sample.error, is_of_sample=True))
            elif is_read(sample):
                assert self._yielded is not None
                self._begin(sample, require_bound(sample, self._yielded, self._rng))
            else:
                wrong = SamplerError(
                    "a sampler must yield mappings of field names to values, or callables that return "
                    f"such, not {type(sample).__name__}"
                )
                if sample is not None:
                    raise mark_permanent(wrong)
                fault = mark_permanent(wrong, is_fault=True)
                self.entries.append(_Ready(None, self._named(), error=fault, is_of_sample=True))
            self._is_stuck = False
        except StopIteration:
            self._yielded = None
            self.entries.append(None)
            self._is_stuck |= self._is_whole  # a call that yielded nothing leaves it as it was: stuck
        except Exception as error:  # noqa: BLE001  # a sampler may raise anything; it comes in its turn
            self.entries.append(_Ready(None, self._named(), error=error))
            self._is_stuck = True
        finally:
            _of_thread.skips = skipped
            self._has_reads = bool(self._has_reads)

    def _may_go_on(self, wanted_rows: float, *, is_due: bool) -> bool:
        """True if the sampler is to yield something more now."""
        if not self.entries and (is_due or self._has_reads is False):
            return is_due
        if self.entries and (not self._reads or self._is_stuck):  # what can be taken is taken first
            return False
        mean, count = self._mean, self._threads.count
        if not mean.nbytes and self._reads >= count:  # nothing is known of what they give
            return False
        return self.covered < wanted_rows and held.nbytes <= self._most_bytes + (count - 1) * mean.nbytes

    def _next(self) -> Any:
        self._look_at_rng()
        try:
            if self._yielded is None:
                self._yielded, self._is_stuck = _called(self._begun, self._rng), True
            return next(self._yielded)
        finally:
            if self._has_reads:
                self._left = self._rng.bit_generator.state

    def _look_at_rng(self) -> None:
        """Raise SamplerError if a read has drawn from the task's generator, now or since the last sample."""
        if not self._is_drawn_from and self._left is not None:
            self._is_drawn_from = self._left != self._rng.bit_generator.state
        if self._is_drawn_from:
            raise _draws("a read")

    def _named(self) -> str:
        return getattr(self._sampler, "drawn", "")

    def _begin(self, read: Read, variables: Sequence[_Variable]) -> None:
        if not self._has_reads:
            self._has_reads, self._left = True, self._rng.bit_generator.state
        nbytes, may_repeat = int(self._mean.nbytes), self._hedges and self._threads.count > 1
        pending = Pending(partial(values_of, read), self._named(), nbytes, may_repeat=may_repeat)
        pending.variables = variables
        self._threads.submit(pending)
        held.add(pending.held_bytes)
        self.entries.append(pending)
        self._reads += 1


class Samples:
    """The samples of one task, in their order. Used in one thread."""

    def __init__(self, streams: Streams, threads: Threads) -> None:
        self._streams, self._threads = streams, threads
        self.counts = threads.counts
        self.are_divided = isinstance(streams, Stream) and streams.is_divided

    @property
    def drawn(self) -> str:
        """The name of the sample that was taken last, if the sampler's attribute `drawn` tells it."""
        return self._streams.drawn

    @property
    def has_reads(self) -> bool:
        """True if the sampler has yielded one."""
        return bool(self._streams.has_reads)

    def take(self, wanted_rows: int, go_on: Callable[[], None]) -> Values | Exception | None:
        """Return the next sample, or its fault, or None once a call of the sampler has ended.

        Args:
            wanted_rows: rows that the task has room for. Reads are begun for about so many.
            go_on: called where threads are free and no read is left to begin, and a few times a second while
                a read is waited for. May raise.
        Blocks: until it is read.
        Raises: what the sampler or the read raised, or `go_on`. SamplerError: neither a sample nor a read.
        """
        while True:
            self._await(wanted_rows, go_on)
            if self._streams.reads and self._threads.backlog < 0:
                go_on()
            taken = self._streams.taken()
            if taken is not NOTHING:
                return taken

    def begin(self, wanted_rows: int) -> None:
        """Begin reads for about so many rows, and wait for none."""
        while self._threads.backlog < self._threads.count:
            stream = self._streams.behind(wanted_rows)
            if stream is None:
                return
            stream.advance()

    def has_more(self) -> bool:
        """True if this call of the sampler yields something more. Blocks: as the sampler does."""
        due = self._streams.due
        assert due is not None
        while not due.entries:
            due.advance()
        return due.entries[0] is not None

    def close(self) -> None:
        """Give up what was not taken, and close the samplers. Reads that run already go on by themselves."""
        with _closing():
            self._streams.close()

    def _await(self, wanted_rows: int, go_on: Callable[[], None]) -> None:
        """Wait until the next sample can be taken."""
        while True:
            due = self._streams.due
            head = due.entries[0] if due is not None and due.entries else None
            pending = head if isinstance(head, Pending) and not head.has_ended else None
            is_empty = due is not None and not due.entries
            is_enough = not is_empty and self._threads.backlog >= self._threads.count
            behind = None
            if (is_empty or pending is not None or self._threads.backlog < 0) and not is_enough:
                behind = self._streams.behind(wanted_rows)
            if behind is not None:
                behind.advance()
            elif pending is None:
                return
            else:
                go_on()
                began = time.monotonic()
                seconds = self._threads.hedge()
                pending.wait(min(seconds, _QUEUE_SECONDS) if is_enough else seconds)
                self.counts.add(reading_seconds=time.monotonic() - began)


def single(samples: Iterable[Any], rng: np.random.Generator) -> Generator[Any, None, None]:
    """Yield what a sampler yields, samples of `Rows` one at a time; closes the sampler when it is closed.

    Raises: SamplerError: a read that `require_bound` refuses.
    """
    iterator = iter(samples)
    try:
        for sample in iterator:
            if isinstance(sample, Rows):
                yield from sample.split()
                continue
            if is_read(sample):
                require_bound(sample, iterator, rng)
            yield sample
    finally:
        _close(iterator)


@contextmanager
def _closing() -> Iterator[None]:
    was_closing, _of_thread.is_closing = is_closing(), True
    try:
        yield
    finally:
        _of_thread.is_closing = was_closing


def _close(yielded: object) -> None:
    """Close what a sampler returned, if it can be."""
    close = getattr(yielded, "close", None)
    if close is not None:
        close()


def yielded_nothing(what: str) -> SamplerError:
    """Return the error of a sampler that yields nothing in MAX_EMPTY_CALLS. Trying again would not help."""
    return mark_permanent(
        SamplerError(
            f"{what} yielded nothing in {MAX_EMPTY_CALLS} calls: it must yield at least one sample a call"
        )
    )


def leaves_out() -> bool:
    """True in a sampler whose task leaves out samples that cannot be had."""
    return getattr(_of_thread, "skips", False)


def made_or_fault(make: Callable[[], T]) -> T | Fault:
    """Return a sample that a source makes, or in a task that leaves it out, its fault: the source goes on.

    Raises: what `make` raises.
    """
    try:
        return make()
    except Exception as error:
        if leaves_out() and is_fault(error):
            return Fault(error)
        raise


def first_whole(reads: Iterable[Callable[[], T | None]]) -> T | None:
    """Return the result of the first read that gives one, and does not end in a fault of its sample.

    Raises: the first fault, where none of the first _MAX_FAULTS gives one; whatever else a read raises.
    """
    fault = None
    skipped, _of_thread.skips = leaves_out(), True
    try:
        for read in islice(reads, _MAX_FAULTS):
            try:
                found = read()
            except Exception as error:
                if not is_fault(error):
                    raise
                fault = fault or error
            else:
                if found is not None:
                    return found
    finally:
        _of_thread.skips = skipped
    if fault is not None:
        raise fault
    return None


def _called(sampler: Sampler, rng: np.random.Generator) -> Iterator[Any]:
    try:
        yielded = sampler(rng)
        if isinstance(yielded, Mapping):
            name = type(yielded).__name__
            raise mark_permanent(
                SamplerError(f"the sampler returned a {name}: `yield` it, and the next ones")
            )
        return iter(yielded)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # from within the sampler
        mark_permanent(error)  # it takes no generator, or returned nothing to iterate over
        raise


class _Variable(NamedTuple):
    """A variable that a function of a read takes from around it, and its value as the read was yielded."""

    function: FunctionType
    name: str
    cell: CellType
    value: object


def require_bound(read: Read, yielded: Iterator[Any], rng: np.random.Generator) -> list[_Variable]:
    """Raise SamplerError for a read that would see what changes as its sampler goes on.

    That is one with a function that refers to variables of the sampler's generator, and one that draws from
    `rng`, as far as either can be told from its parts.

    Returns: variables from around its functions, but for those that it sets itself: if one has another value
        once the read is done, the read may have seen that: see `_require_unchanged`.
    """
    functions, values = _parts(read)
    if any(value is rng or value is rng.bit_generator for value in values):
        raise _draws(repr(read))
    variables = [
        _Variable(function, name, cell, _value_of(cell))
        for function in functions
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    ]
    if variables:
        own = _own_cells(yielded)
        _require_none(each for each in variables if (each.name, id(each.cell)) in own)
        set_here = {id(each.cell) for each in variables if each.name in _names_set(each.function.__code__)}
        variables = [each for each in variables if id(each.cell) not in set_here]
    return variables


def _require_unchanged(variables: Iterable[_Variable]) -> None:
    """Raise SamplerError if a variable has another value than as its read was yielded."""
    _require_none(each for each in variables if _value_of(each.cell) is not each.value)


def _require_none(late: Iterable[_Variable]) -> None:
    found = list(late)
    if found:
        names = ", ".join(dict.fromkeys(each.name for each in found))
        raise mark_permanent(
            SamplerError(
                f"the sampler yields {found[0].function.__qualname__}, which reads {names} when it is "
                f"called, and the sampler has gone on by then: {_WAY_OUT}"
            )
        )


def _draws(read: str) -> SamplerError:
    return mark_permanent(
        SamplerError(
            f"the sampler yields {read}, which draws from rng in another thread, in any order: draw "
            "first, and yield what reads it, as in `yield partial(read, rng.integers(n))`"
        )
    )


def _parts(read: Read) -> tuple[list[FunctionType], list[object]]:
    """The functions that a read is made of, and the values that it holds."""
    functions: list[FunctionType] = []
    values: list[object] = [read]
    for part in values:
        if len(values) > _MAX_PARTS:
            break
        if isinstance(part, partial):
            more = [part.func, *part.args, *part.keywords.values()]
        elif isinstance(part, FunctionType):
            if part in functions:
                continue
            functions.append(part)
            more = [*map(_value_of, part.__closure__ or ()), *(part.__defaults__ or ())]
            more += (part.__kwdefaults__ or {}).values()
        elif isinstance(part, MethodType | BuiltinMethodType):
            more = [getattr(part, "__func__", None), part.__self__, *_called_by(part.__self__)]
        else:
            more = _called_by(part) if callable(part) else []
        values += more
    return functions, values


def _called_by(thing: object) -> list[object]:
    """The functions among the attributes of an object, which it may call."""
    if isinstance(thing, type):
        return []
    return [each for each in getattr(thing, "__dict__", {}).values() if isinstance(each, _FUNCTIONS)]


def _value_of(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return _value_of


@lru_cache(maxsize=256)
def _names_set(code: CodeType) -> frozenset[str]:
    """The variables from around it that a function sets, or one within it."""
    within = [_names_set(each) for each in code.co_consts if isinstance(each, CodeType)]
    own = [each.argval for each in dis.get_instructions(code) if each.opname in _SETS]
    return frozenset(own).union(*within).intersection(code.co_freevars)


def _own_cells(yielded: Any) -> set[tuple[str, int]]:
    """The variables that a running generator sets and that functions refer to, by name and identity."""
    cells: set[tuple[str, int]] = set()
    while isinstance(yielded, GeneratorType):
        if names := _names_set(yielded.gi_code).union(yielded.gi_code.co_cellvars):
            # The variables are the frame's up to Python 3.10, and the generator's from 3.11 on.
            held = gc.get_referents(yielded, yielded.gi_frame)
            cells |= {(name, id(each)) for name in names for each in held if isinstance(each, CellType)}
        yielded = yielded.gi_yieldfrom
    return cells


def is_closing() -> bool:
    """True while this thread closes a sampler's generator: nothing is to interrupt its `finally`."""
    return getattr(_of_thread, "is_closing", False)
