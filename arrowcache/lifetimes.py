"""Lifetimes: how things end in a process: by a fork, in the garbage collector, at exit, beside Ctrl-C.

- Fork: an `Origin` tells whether an object was made in this process, or before its fork. Objects with
  descriptors, memory or locks have `forget_in_child`. `unforked` keeps forks from coming between two steps.
  A `cached_property` has no lock.
- Finalizers: the garbage collector calls them at any point of any thread. They wait for no lock: they tell a
  `Mutex` which object ended, and the thread at work handles it.
- Exit: `at_exit` ends objects while threads still run. Then `is_exiting`, and the kernel frees the rest.
- Ctrl-C: `shielded` delays it until a block has ended, and blocks it in processes that are started there.

No other module registers for a fork or an exit, compares process numbers, or masks a signal.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T")

_AGAIN_SECONDS = 0.05


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls, then raise the error of the last failed one."""
    error: Exception | None = None  # an ExitStack would keep its frames, and so memory, in a cycle
    for call in calls:
        try:
            call()
        except Exception as failed:  # noqa: BLE001  # it is raised below
            error = failed
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback has this frame


class Closable:
    """An object that is closed at the end of its `with` block."""

    __slots__ = ()

    def close(self) -> None:
        """End it. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# fork


class Origin:
    """The process in which an object was made. Costs no call of the kernel."""

    __slots__ = ("_generation",)

    def __init__(self) -> None:
        self._generation = _generation

    @property
    def is_here(self) -> bool:
        """False in a forked child: locks that its parent's threads held stay locked there for ever."""
        return self._generation == _generation

    def require(self, what: str, remedy: str) -> None:
        """Raises: ValueError: this process was forked from the one in which `what` was made."""
        if self._generation != _generation:
            raise ValueError(f"{what} belongs to the process that forked this one: {remedy}")


class Inherited(Protocol):
    """An object that a forked child has a copy of."""

    def forget_in_child(self) -> None:
        """Give up the parent's resources. No other thread runs then. Idempotent."""


def forgets_in_child(thing: Inherited) -> None:
    """Call `forget_in_child` of an object in each forked child, while it lives; keeps no reference."""
    _inherited.add(thing)


def at_fork(before: Callable[[], object] | None = None, in_child: Callable[[], object] | None = None) -> None:
    """Call functions before each fork, and in each child before objects forget."""
    _before.extend([before] if before else [])
    _in_child.extend([in_child] if in_child else [])


def _before_fork() -> None:
    try:
        call_all(_before)
    finally:
        unforked.acquire()


def _after_fork() -> None:
    with suppress(RuntimeError):  # Ctrl-C came before it was taken
        unforked.release()


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1
    _after_fork()
    call_all([*_in_child, *(thing.forget_in_child for thing in [*_inherited])])


class cached_property(Generic[T]):  # noqa: N801  # the name that it has elsewhere
    """A property that is computed at its first use, and kept in the object. Threads may compute it twice.

    Before Python 3.12 that of functools has a lock for all objects of a class: a child that is forked while
    a thread computes one would wait for it for ever.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, thing: None, kind: type) -> Self: ...
    @overload
    def __get__(self, thing: object, kind: type) -> T: ...
    def __get__(self, thing: object | None, kind: type) -> Self | T:
        if thing is None:
            return self
        found = thing.__dict__[self._compute.__name__] = self._compute(thing)
        return found


unforked = threading.RLock()  # a thread that holds it, for a moment, delays forks of other threads
_generation = 0  # rises in each forked child
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()
_before: list[Callable[[], object]] = []
_in_child: list[Callable[[], object]] = []
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


# finalizers


class Mutex:
    """A lock for work of many steps, which neither a finalizer nor a signal handler waits for.

    Either may run in the thread at work. There a plain lock would make it wait for ever, and a reentrant one
    would show it the work half done. A finalizer calls `tell`; a handler gets an error.
    """

    def __init__(self, work: str) -> None:
        self._work = work
        self._lock = threading.RLock()
        self._holder = 0  # the thread at work
        self._told: deque[Any] = deque()
        forgets_in_child(self)

    def forget_in_child(self) -> None:
        """Begin anew: another thread may have been at work; the ended objects were the parent's."""
        self.__init__(self._work)  # type: ignore[misc]  # anew, in the same object

    @property
    def is_held(self) -> bool:
        return self._holder != 0

    @property
    def is_here(self) -> bool:
        return self._holder == threading.get_ident()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do the work inside; call `drain` after it. Blocks: while another thread is at work.

        Raises: RuntimeError: this thread is at work already.
        """
        with self._lock:
            if self._holder:
                raise RuntimeError(
                    f"a signal handler has interrupted {self._work}, which it cannot wait for: "
                    "do this once the handler has returned"
                )
            try:
                self._holder = threading.get_ident()
                yield
            finally:
                self._holder = 0

    def tell(self, what: Any, handle: Callable[[Any], object]) -> None:
        """Handle an object: here, or in the thread at work as soon as its work is done."""
        self._told.append(what)
        self.drain(handle)

    def drain(self, handle: Callable[[Any], object]) -> None:
        """Handle the told objects, unless a thread is at work.

        It may wait for a thread that has come in between, but never for one that waits for this thread.

        Args:
            handle: called with each object in order, and again with one that Ctrl-C cut short. Returns:
                False: not now, nor the objects after it. A reference to it in the mutex would be a cycle.
        """
        while self._told and not self._holder:
            with self.held():  # not a try to acquire it: Ctrl-C would come between that and its try block
                while self._told:
                    if handle(self._told[0]) is False:
                        return
                    self._told.popleft()


# exit


def at_exit(call: Callable[[], object]) -> None:
    """Call a function at exit, before all functions registered by now.

    So the user of a resource ends before it. Daemon threads still run. A forked child calls it at its own
    exit.
    """
    _at_exit.insert(0, call)
    atexit.unregister(_exit)
    atexit.register(_exit)


def at_worker_exit(call: Callable[[], object]) -> None:
    """Call a function at exit of a process that multiprocessing started: it skips those of `at_exit`.

    A daemon, as a DataLoader's worker is, calls it on SIGTERM, too: so multiprocessing ends daemons when
    their parent exits. Two threads may call it then.
    """
    from multiprocessing import current_process, parent_process, util

    if parent_process() is None:
        return
    util.Finalize(None, call, exitpriority=0)
    _at_sigterm.append(call)
    is_main = threading.current_thread() is threading.main_thread()
    if current_process().daemon and is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _end_well_on_sigterm()


def _end_well_on_sigterm() -> None:
    """Have a thread call the functions of `at_worker_exit` on SIGTERM, then end the process.

    A handler in Python would wait for the main thread, which may be deep in a dataset, or hold a lock that
    the functions need. Python writes the signal's number to a pipe at once, whatever that thread does.
    """
    numbers, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(numbers, True)
    before = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
    if before != -1:  # somebody else wants to know
        signal.set_wakeup_fd(before)
        os.close(numbers)
        os.close(into)
        return

    def end() -> None:
        while signal.SIGTERM not in os.read(numbers, 1):
            pass
        try:
            call_all(_at_sigterm)
        finally:
            os._exit(0)

    def undo() -> None:
        _at_sigterm.clear()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    threading.Thread(target=end, name="arrowcache-sigterm", daemon=True).start()
    at_fork(in_child=undo)  # else a signal to the child would end this process
    signal.signal(signal.SIGTERM, lambda *_: None)


def exit_beside_threads() -> NoReturn:
    """End this process well, though daemon threads are in C: one that comes back meanwhile may abort it."""
    try:
        atexit._run_exitfuncs()
    finally:
        os._exit(0)


def finalizer(thing: object, call: Callable[..., object], *arguments: object) -> None:
    """Call a function once an object is gone, at the latest at exit, as those of `at_exit`.

    Python's own would come before or after all of `at_exit`: that depends on who first asked it for one.
    Must not wait for a lock. The arguments must not refer to the object.
    """
    ending = weakref.finalize(thing, call, *arguments)
    ending.atexit = False
    if not _finalizers:
        at_exit(_finalize_all)  # by now: after Python's own exit hook no finalizer does anything
    _finalizers[:] = [*(each for each in _finalizers if each.alive), ending]


def _finalize_all() -> None:
    call_all([*reversed(_finalizers)])


def before_threads_are_joined(call: Callable[[], object]) -> None:
    """Call a function before executors wait for their tasks; register after the executor has begun."""
    threading._register_atexit(call)  # type: ignore[attr-defined]  # the last one registered is called first


def is_exiting() -> bool:
    """True once the interpreter ends: a thread may be cut off at any point, and the kernel frees all."""
    return _is_exiting is not False  # None once this module was cleared


def exit_has_begun() -> bool:
    """True once the functions of `at_exit` are called, or later. Only daemon threads still run then."""
    return _exit_has_begun is not False


def until_exit(end: Callable[[T], object]) -> Callable[[T], None]:
    """Make a `__del__` that does nothing once the interpreter ends.

    By then the modules that it needs may be empty: a library that keeps `__main__`, as dill does, has its
    objects die after them. What must end at exit has a function of `at_exit`; the kernel frees the rest.
    """

    def __del__(thing: T, ends: Callable[[], bool] = is_exiting) -> None:  # noqa: N807
        if not ends():
            end(thing)

    return __del__


def _exit() -> None:
    global _is_exiting, _exit_has_begun
    _exit_has_begun = True
    try:
        call_all([*_at_exit])
    finally:
        _is_exiting = True


_at_exit: list[Callable[[], object]] = []
_at_sigterm: list[Callable[[], object]] = []
_finalizers: list[weakref.finalize[..., Any]] = []
_is_exiting = _exit_has_begun = False
atexit.register(_exit)


# Ctrl-C


@contextmanager
def shielded() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended, then raise it. Processes started in the block have it blocked.

    For short blocks: nobody can interrupt them.
    """
    came: list[Any] = []
    before, mask = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    is_main = callable(before) and threading.current_thread() is threading.main_thread()
    try:
        if is_main:  # Python raises it there, whichever thread gets the signal
            signal.signal(signal.SIGINT, lambda *what: came.append(what))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by processes
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[-1])


def interrupt_again() -> None:
    """Raise a Ctrl-C that came in a finalizer a moment later: no exception leaves a finalizer."""

    def again() -> None:
        time.sleep(_AGAIN_SECONDS)  # until the finalizer has ended
        _thread.interrupt_main()

    _thread.start_new_thread(again, ())  # threading's would wait here for its start
