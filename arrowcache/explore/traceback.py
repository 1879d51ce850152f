"""Traceback: what an error keeps alive. A notebook has the last one until the next, with all its frames."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def keeps_nothing(function: Callable[P, R]) -> Callable[P, R]:
    """Have what a function raises, Ctrl-C too, refer to none of its values, which hold mappings and leases.

    Lines and messages of the traceback stay; so do the values of an error that was being handled before.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = sys.exc_info()[1]
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            seen: BaseException | None = error
            while seen is not None and seen is not before:
                traceback.clear_frames(seen.__traceback__)
                seen = seen.__context__
            raise

    return called
