"""Check: one thing that is proved, what came of it, and the verdict over all. Knows no device."""

from __future__ import annotations

import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

HELD, TOLD, FAILED, NOT_RUN = "held", "told", "FAILED", "not run"
GPU, FAKE, CPU = "GPU", "fake", "CPU"
_LAST_FRAMES = -3


class Wrong(Exception):
    """What a check saw, and should not have."""


class CannotRun(Exception):
    """Why a check cannot run here."""


@dataclass(frozen=True)
class Check:
    """One function of a target, which returns what it saw.

    Args:
        proves: what holds if it returns, or what the figure is.
        run: raises Wrong with what it saw; CannotRun. Any other error is a failure, too.
        seconds: after which it is ended, and has failed.
        without_gpu: where it runs then: FAKE, CPU, or None: it does not.
        is_alone: in a process of its own.
        is_figure: it proves nothing, and tells a figure.
    """

    name: str
    proves: str
    run: Callable[[Any], str]
    seconds: float
    without_gpu: str | None = FAKE
    is_alone: bool = False
    is_figure: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a check. `where`: on what it ran, or would have."""

    name: str
    proves: str
    where: str
    state: str
    said: str
    seconds: float = 0.0


def run(check: Check, target: Any, where: str) -> Outcome:
    """Run a check here and now."""
    started = time.perf_counter()
    try:
        state, said = TOLD if check.is_figure else HELD, check.run(target)
    except Wrong as error:
        state, said = FAILED, str(error)
    except CannotRun as error:
        state, said = NOT_RUN, str(error)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what the check saw
        frames = "".join(traceback.format_tb(error.__traceback__)[_LAST_FRAMES:])
        state, said = FAILED, f"{type(error).__name__}: {error}\n{frames}".rstrip()
    return Outcome(check.name, check.proves, where, state, said, time.perf_counter() - started)


def not_run(check: Check, why: str, where: str = GPU) -> Outcome:
    """The outcome of a check that is left out."""
    return Outcome(check.name, check.proves, where, NOT_RUN, why)


def line(outcome: Outcome) -> str:
    """One row of the table, and what was seen below it."""
    head = f"{outcome.state:8}{outcome.where:5}{outcome.seconds:6.1f} s  {outcome.name}: {outcome.proves}"
    return "\n".join([head, textwrap.indent(outcome.said, " " * 22)])


def verdict(outcomes: Sequence[Outcome], device: str | None, *, is_complete: bool = True) -> tuple[str, bool]:
    """The last words, and whether nothing failed.

    Args:
        device: the GPU's name; None: there was none.
        is_complete: all checks were asked for.
    """
    failed = [outcome for outcome in outcomes if outcome.state == FAILED]
    left = [outcome.name for outcome in outcomes if outcome.state == NOT_RUN]
    held = [outcome for outcome in outcomes if outcome.state == HELD]
    if failed:
        return f"FAILED: {', '.join(f'{each.name} ({each.where})' for each in failed)}", False
    without = ", ".join(left) or ("none" if device is None else "what was not asked for")
    if device is None:
        places = ", ".join(
            f"{sum(each.where == where for each in held)} on the {where}" for where in (FAKE, CPU)
        )
        return f"NOT PROVED ON A GPU, for there is none here: {places} held; not run: {without}", True
    if left or not is_complete:
        return f"NOT PROVED on {device}: {len(held)} checks held; not run: {without}", True
    return f"PROVED ON A GPU: {device}, {len(held)} checks", True
