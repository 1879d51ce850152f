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
from contextlib import suppress
from typing import Any, NoReturn

PRELOADED = (
    "numpy.random",
    "arrowcache.cache",
    "arrowcache.reading.loader",
    "arrowcache.sampling.pool",
    "helpers",
)
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""NumPy's and Arrow's libraries start threads as they are imported, which a fork would lose."""
MAX_BYTES = 1 << 20  # of a request


def serve(number: int, *more: str) -> NoReturn:
    """Fork a script for each request that socket `number` gets, having imported `more`, too.

    A request comes with standard input, output and error, and with a pipe: the script writes its pid to that,
    and this process its exit code.
    """
    atexit.register(_end)  # the first is the last to be called
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
            request, fds, _, _ = socket.recv_fds(requests, MAX_BYTES, 4)
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
    sys.modules["numpy"].random.seed()  # as in a new interpreter
    random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.write(told, b"%d\n" % os.getpid())
    os.close(told)


exit_code = 0
"""Of a script that has ended; -2 after Ctrl-C."""


def _run(code: str) -> NoReturn:
    global exit_code
    try:
        exec(compile(code, "<string>", "exec", dont_inherit=True), vars(sys.modules["__main__"]))
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        of_script = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(of_script), of_script)
        exit_code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    sys.exit()


def _end() -> None:
    """The interpreter's exit comes to this once other threads, and all else of `atexit`, have ended."""
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    sys.stdout.flush()
    if exit_code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(exit_code)
