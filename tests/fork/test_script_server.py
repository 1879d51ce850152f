"""A script that is forked off the server of scripts begins and ends as one of a new interpreter."""

from __future__ import annotations

import os
import signal

import pytest
from processes import Script

ENDS = {
    "the end": "print('well')",
    "an exit": "import sys; sys.exit(3)",
    "an exit that says why": "import sys; sys.exit('mine')",
    "an error": "raise LookupError('mine')",
    "_exit": "import os; os._exit(9)",
    "atexit": "import atexit; atexit.register(print, 'last'); print('first')",
    "a thread": "from threading import Timer; Timer(0.1, print, ['last']).start(); print('first')",
    "a cycle": "class Mine:\n    def __del__(self): print('gone')\nmine = Mine(); mine.itself = mine",
    "what was not closed": "mine = open('/dev/null')",
    "a warning": "import warnings; warnings.warn('mine')",
    "a fork": "import os, sys\nif not os.fork(): sys.exit(5)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
    "Ctrl-C": "import signal; signal.raise_signal(signal.SIGINT)",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_script_ends_as_one_of_a_new_interpreter(how):
    seen = []
    for new_interpreter in (False, True):
        with Script(ENDS[how], new_interpreter=new_interpreter) as script:
            code, errors = script.end()
            printed = script.printed()
            said = [line for line in errors.splitlines() if not line.startswith("  ")]  # no lines of code
        seen.append((code, printed, [line for line in said if not line.startswith("Traceback")]))
    assert seen[0] == seen[1]


STATE = """
    import json, multiprocessing, os, random, sys, threading
    import numpy as np

    print(random.random(), np.random.rand())
    print(json.dumps({
        "threads": len(os.listdir("/proc/self/task")), "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "arguments": sys.argv, "name": __name__, "options": sys.warnoptions, "folder": os.getcwd(),
        "environment": {**os.environ}, "process": multiprocessing.current_process().name,
        "parent": multiprocessing.parent_process(), "descriptors": sorted(os.listdir("/proc/self/fd")),
    }))
"""


def test_a_script_begins_as_one_of_a_new_interpreter(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # or NumPy starts threads as it is imported
    monkeypatch.chdir(tmp_path)
    seen, drawn = [], set()
    for new_interpreter in (False, False, True):
        with Script(STATE, "some", 3, new_interpreter=new_interpreter) as script:
            drawn.update(script.line().split())
            seen.append(script.line())
            assert script.end() == (0, "")
    assert seen[0] == seen[1] == seen[2]
    assert len(drawn) == 6


def test_a_script_that_says_nothing_fails_with_what_it_wrote():
    code = "import sys; print('mine', file=sys.stderr, flush=True); print('begun', flush=True); input()"
    with Script(code) as script:
        assert script.line() == "begun"
        with pytest.raises(AssertionError, match="mine"):
            script.line(timeout=0.05)
        script.kill()
        assert script.end() == (-signal.SIGKILL, "mine\n")
    assert not os.path.exists(f"/proc/{script.pid}")
