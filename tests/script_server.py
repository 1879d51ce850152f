"""The process that most scripts of `processes.Script` are forked off: it has imported what takes seconds.

A script is as if it had started by itself: no process of `multiprocessing`; streams, arguments, environment
and session are its own. It also ends as an interpreter does, but for the end of modules, which takes a second
where PyTorch is one. Nothing that only tests need is imported here.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

PRELOADED = (
    "numpy.random",
    "arrowcache.cache",
    "arrowcache.reading.loader",
    "arrowcache.sampling.pool",
    "helpers",
)
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""NumPy's and Arrow's libraries start threads as they are imported, which a fork would lose."""
MOST_BYTES = 1 << 20  # of a request


def serve(number: int, *more: str) -> NoReturn:
    """Fork a script for each request that socket `number` gets, having imported `more`, too.

    A request comes with standard input, output and error, and with a pipe: the script writes its pid to that,
    and this process its exit code.
    """
    for name in (*PRELOADED, *more):
        with suppress(ImportError):  # some environments have no torch
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread that scripts would lack"
    gc.collect()
    gc.freeze()  # or each script would copy all that is here, only to look at it
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
            request, fds, _, _ = socket.recv_fds(requests, MOST_BYTES, 4)
            if not request:
                sys.exit()  # whoever asked has ended
            *streams, told = fds
            pid = os.fork()
            if pid == 0:
                requests.close()
                for each, (_, pipe) in living.items():
                    os.close(each)
                    os.close(pipe)
                _begin(script := json.loads(request), streams, told)
                _run(script["code"])
            living[os.pidfd_open(pid)] = pid, told
            for stream in streams:
                os.close(stream)


def _begin(script: dict[str, Any], streams: list[int], told: int) -> None:
    os.setsid()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(script["folder"])
    os.environ.clear()
    os.environ.update(script["environment"])
    sys.argv[1:] = script["arguments"]
    np.random.seed()  # noqa: NPY002 as in a new interpreter
    random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.write(told, b"%d\n" % os.getpid())
    os.close(told)


def _run(code: str) -> NoReturn:
    main = vars(sys.modules["__main__"])
    status, is_interrupted = 0, False
    try:
        exec(compile(code, "<string>", "exec", dont_inherit=True), main)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        status, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()
    atexit._run_exitfuncs()
    main.clear()
    gc.collect()
    sys.stdout.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)
