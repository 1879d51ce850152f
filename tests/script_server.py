"""The process that most scripts of `processes.Script` are forked off: it has imported what takes seconds.

A script is as if it had started by itself: no process of `multiprocessing`; streams, arguments, environment
and session are its own; it ends as an interpreter does. Nothing that only tests need is imported here.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import numpy as np

PRELOADED = (
    "numpy.random", "arrowcache.cache", "arrowcache.reading.loader", "arrowcache.sampling.pool",
    "arrowcache.torch", "helpers",
)  # fmt: skip
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""NumPy's and Arrow's libraries start threads as they are imported, which a fork would lose."""
MOST_BYTES = 1 << 20  # of a request


def serve(number: int) -> str:
    """Fork a script for each request that socket `number` gets; returns in each of them, with its code.

    A request comes with standard input, output and error, and with a pipe: the script writes its pid to that,
    and this process its exit code.
    """
    for name in PRELOADED:
        with suppress(ImportError):  # some environments have no torch
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread that scripts would lack"
    requests = socket.socket(fileno=number)
    living: dict[int, tuple[int, int]] = {}  # pidfd: pid, and the pipe that waits for its exit code
    while True:
        for ready in select.select([requests, *living], [], [])[0]:
            if ready is not requests:
                pid, told = living.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):
                    os.write(told, b"%d\n" % code)
                os.close(told)
                os.close(ready)
                continue
            request, (*streams, told), _, _ = socket.recv_fds(requests, MOST_BYTES, 4)
            if not request:
                sys.exit()  # whoever asked has ended
            pid = os.fork()
            if pid == 0:
                requests.close()
                for each, (_, pipe) in living.items():
                    os.close(each)
                    os.close(pipe)
                return _begin(json.loads(request), streams, told)
            living[os.pidfd_open(pid)] = pid, told
            for stream in streams:
                os.close(stream)


def _begin(request: dict[str, Any], streams: list[int], told: int) -> str:
    os.setsid()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = request["arguments"]
    np.random.seed()  # noqa: NPY002 as in a new interpreter
    random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.write(told, b"%d\n" % os.getpid())
    os.close(told)
    return request["code"]
