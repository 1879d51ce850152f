"""Worker: a process that tries thousands of cases, and says which one it is at. Started by campaign.py.

A case is (kind, subject, number): with the campaign's seed it is the same in every process. While it runs
a watch is kept: whatever opens a file outside the cache, compiles, imports or unpickles fails the case.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from arrowcache.native import maps

_MAX_RISE_BYTES = 256 << 20
_MAX_DATA_BYTES = 6 << 30
_NEVER = (
    "compile", "exec", "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "marshal.loads",
)  # fmt: skip
_IMPORTED = {
    *sys.stdlib_module_names,
    "arrowcache",
    "fuzz",
    "helpers",
    "numpy",
    "pandas",
    "pyarrow",
    "xxhash",
}
_FILES = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir",
          "os.truncate", "os.chmod")  # fmt: skip
_SYSTEM = ("/proc/", "/sys/", "/dev/null/")


class Watch:
    """Notes what a case does that no data may cause; an audit hook, so it also sees what fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.fspath(folder)
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "import":
            is_known = args[0].partition(".")[0] in _IMPORTED
        else:
            is_known = event not in (*_NEVER, *_FILES) or _is_importing()
        if is_known:
            return
        if event in (*_NEVER, "import"):
            self.seen.append(f"{event} {args[:1]!r}"[:100])
        else:
            for path in args[:2] if event in ("os.rename", "os.link") else args[:1]:
                if isinstance(path, bytes):
                    path = os.fsdecode(path)
                if isinstance(path, str | os.PathLike) and not self._is_ours(os.fspath(path)):
                    self.seen.append(f"{event} {os.fspath(path)!r}")

    def _is_ours(self, path: str) -> bool:
        """A relative path is one that begins at a descriptor of a folder: it may not lead upwards."""
        if os.path.isabs(path):
            return f"{os.path.abspath(path)}/".startswith((f"{self._folder}/", *_SYSTEM))
        return ".." not in path.split("/")


def audit_mappings() -> None:
    """Have the files that the library opens with a system call of its own seen, too."""
    plain = maps.File.open

    def audited(file: maps.File, limit: int, most: int) -> None:
        sys.audit("open", os.fsdecode(file.path), "r", 0)
        plain(file, limit, most)

    maps.File.open = audited  # type: ignore[method-assign]


def _is_importing() -> bool:
    """Whether a module is just loaded, at its first use: its name was looked at when that began."""
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(job["folder"])
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute
    from fuzz import kinds

    assert len(pa.array(np.arange(2))) == len(
        pyarrow.compute.sort_indices(pa.array([1, 2]))
    )  # which looks for pandas

    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_DATA_BYTES, _MAX_DATA_BYTES))
    faulthandler.enable()
    audit_mappings()
    watch = Watch(folder)
    bench = kinds.Bench(folder, job["seed"])
    progress = os.open(job["progress"], os.O_WRONLY)
    outcomes: Counter[str] = Counter()
    known: set[str] = set()
    for warm in (True, False):  # what is imported at the first use is imported now
        for index, (kind, subject, number) in enumerate(job["cases"][:1] if warm else job["cases"]):
            if warm:
                for each in {kind for kind, _, _ in job["cases"]}:
                    bench.warm_up(each, subject)
                continue
            os.pwrite(progress, b"%20d" % index, 0)
            case = bench.case(kind, subject, number)
            faulthandler.dump_traceback_later(job["case_seconds"], exit=True)
            before = _restart_peak()
            watch.seen.clear()
            watch.is_on = True
            try:
                outcome, error = case(), ""
            except BaseException as problem:
                watch.is_on = False
                outcome, error = "wrong", "".join(traceback.format_exception(problem)[-6:])
                bench.restore(subject)
            finally:
                watch.is_on = False
            rise = _peak_bytes() - before
            if rise > _MAX_RISE_BYTES:
                outcome, error = "wrong", f"{error}took {rise >> 20} MiB"
            if watch.seen:
                outcome, error = "wrong", f"{error}did {watch.seen[:5]}"
            outcomes[f"{kind} {outcome}"] += 1
            brief = error.strip().splitlines()[-1][:120] if error else ""
            if error and brief not in known:
                known.add(brief)
                say({"case": [kind, subject, number], "error": error})
    faulthandler.cancel_dump_traceback_later()
    bench.close()
    say({"outcomes": outcomes})


def _restart_peak() -> int:
    """Forget the most memory that was resident so far; the bytes that are now.

    Of this image alone: `ru_maxrss` begins with that of the process that started it.
    """
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    random.seed(0)
    main()
