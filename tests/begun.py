"""The threads and processes that a test began, told from those of earlier tests, which end at any moment.

A test that counts all threads of its process before and after fails where an earlier test's ends between.
Those that it began itself end with nobody else.
"""

from __future__ import annotations

import threading
import weakref
from multiprocessing import active_children
from multiprocessing.process import BaseProcess

_of_earlier_tests: weakref.WeakSet[threading.Thread | BaseProcess] = weakref.WeakSet()


def a_test_begins() -> None:
    _of_earlier_tests.clear()
    _of_earlier_tests.update([*threading.enumerate(), *active_children()])


def own_threads(name: str = "") -> list[threading.Thread]:
    """The living threads that this test began, whose names begin so."""
    every = [thread for thread in threading.enumerate() if thread not in _of_earlier_tests]
    return [thread for thread in every if thread.name.startswith(name)]


def own_children() -> list[BaseProcess]:
    """The living processes of `multiprocessing` that this test began."""
    return [process for process in active_children() if process not in _of_earlier_tests]
