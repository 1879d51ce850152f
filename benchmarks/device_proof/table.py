"""The table of checks, in the order in which they run: the dearest to prove first."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.device_proof import correctness, figures, graphs, loaders, trouble
from benchmarks.device_proof.check import CPU, Check

LIMIT_SECONDS = 7.5 * 60  # and half a minute to begin and to end


def checks(trace: Path | None = None) -> list[Check]:
    """All checks. trace: where the profiler's trace is kept."""
    hidden = partial(figures.hidden, trace=trace)
    over = "a step over the longer of copy and compute"
    return [
        Check(
            "storm",
            "random takes, keeps, drops and streams: every read sees its batch",
            correctness.storm,
            60,
        ),
        Check("loader", "every order of a loader arrives, bit for bit the host's", correctness.loader, 60),
        Check("registered", "slots of a loader are read where they are", correctness.registered, 40),
        Check("workers", "slots of worker processes are read where they are", correctness.workers, 40),
        Check("items", "a slow dataset's items arrive, made or cached", loaders.of_items, 60),
        Check("documents", "packed and ragged batches arrive", loaders.of_documents, 40),
        Check("choice", "what is left out or weighs nothing does not", loaders.of_choice, 40),
        Check("autograd", "what only autograd keeps is kept", correctness.autograd, 30, CPU),
        Check(
            "sanitizer", "torch's CUDA sanitizer sees no race", correctness.sanitizer, 70, None, is_alone=True
        ),
        Check("sync", "nothing synchronizes the device", correctness.synchronization, 30),
        Check("capture global", "a capture is left alone", partial(graphs.capture, mode="global"), 40),
        Check(
            "capture thread_local", "in either mode", partial(graphs.capture, mode="thread_local"), 40, None
        ),
        Check("graphed callables", "and torch's own captures", graphs.graphed_callables, 40, None),
        Check("compile", "and its compiler's graphs", graphs.compiled, 110, None),
        Check("busy", "a busy device is no stall, and no timeout", trouble.busy, 40),
        Check("full", "a full device is told, and healed", trouble.out_of_memory, 40, is_alone=True),
        Check("broken", "a device that fails is told, and left", trouble.broken, 70),
        Check("ends", "interpreters end with copies under way", trouble.ends, 90, CPU),
        Check("memory", "reserved memory is flat", correctness.memory, 30),
        Check("copies", "small leaves share a copy", correctness.copies, 30),
        *(
            Check(f"step of {size} MB", over, partial(figures.step, megabytes=size), 60, None, is_figure=True)
            for size in figures.STEPS
        ),
        Check("hidden", "copies' time under kernels", hidden, 40, None, is_figure=True),
        Check("rates", "the loader end to end", figures.rates, 60, CPU, is_figure=True),
        Check("python", "what a batch costs Python", figures.python, 20, CPU, is_figure=True),
    ]
