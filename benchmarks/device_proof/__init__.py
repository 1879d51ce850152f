"""Does the way to the device hold on a real one?

Question: are batches right and safe to keep, whatever a consumer, its streams, graphs, compilers, a busy,
full or failing device, and the interpreter's end do; and what does the way cost, over its parts alone?
Method: a table of checks (`table.py`), each a small function with a time of its own, in processes that are
ended when that is over; 8 minutes in all. A check says what it saw, or why it could not run. One GPU; its
torch as it is; beyond torch, numpy, pyarrow and xxhash nothing is needed, and the engine is compiled with the
machine's cc.
Without a GPU what can runs on a device in software (tests/fake_device.py) or on the CPU. That proves nothing
about a GPU: the verdict says so. `--leave-out "copy waits"` (or "compute waits", "query") makes the fake deaf
to such calls: the verdict must then be that it failed.
Run: `python -m benchmarks.device_proof --out FOLDER`, in a checkout. FOLDER gets the table and the profiler's
trace. Results: benchmarks/RESULTS.md.

    check.py        what a check and its outcome are; the verdict
    table.py        all checks
    target.py       what checks run on: a GPU or the fake
    processes.py    checks in processes that are ended when their time is over
    absent.py       what stands in for a package that the machine lacks
    batches.py      sources and caches whose rows say what they must hold
    correctness.py, loaders.py, graphs.py, trouble.py, figures.py    the checks
"""

from benchmarks.device_proof.absent import stand_in

stand_in()  # in each process that imports any of this
