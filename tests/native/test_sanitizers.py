"""The C of engine, orders and draws: no compiler warns, and sanitizers of memory and threads find nothing.

Each sanitizer is shown to see a defect that is put into the source on purpose.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from native.builds import ENGINE, FOLDER, MEMORY, SMALL_CHUNKS, THREADS, compile_c, engine_sources
from quick import one_in

OF_C = ("arrowcache/native", "tests/native")
"""What these tests are of. Each commit has a few of them, and all where that changed."""
TESTS = FOLDER.parent
UNIT_TESTS = TESTS / "unit" / "native"
RACE_SECONDS = 3
DEADLINE_SECONDS = 240
COUNTS = re.compile(
    r"^done (\d+) refused (\d+) cancelled (\d+) damaged (\d+) failed (\d+) missed (\d+) read (\d+) "
    r"fetched (\d+) bytes (\d+)$",
    re.MULTILINE,
)
# Of a kernel that lays memory out as an old sanitizer does not expect it.
_NO_ROOM = ("unexpected memory mapping", "Shadow memory range interleaves", "ReserveShadowMemoryRange failed")

WITHOUT_A_CHECK = {"if ((uint64_t)ids[i] - first >= span)": "if (span > INT64_MAX)"}
A_BYTE_TOO_MANY = {"memcpy(to, from, (size_t)nbytes)": "memcpy(to, from, (size_t)nbytes + 1)"}
A_READ_OUT_OF_LINE = {
    "memcpy(ends, at.segment->base + at.segment->at[buffer] + at.row * 4, sizeof ends);": """
        const void *place = at.segment->base + at.segment->at[buffer] + at.row * 4;
        const int32_t *read = place;
        ends[0] = read[0], ends[1] = read[1];
"""
}
BEYOND_THE_FILE = {" && values + ends[1] * column->row_bytes <= segment->nbytes": ""}
ANOTHER_PIECE = {"job->got ? job->got + piece : NULL": "job->got ? job->got + piece / 2 * 2 : NULL"}
ANOTHER_FILE = {" || (int64_t)status.st_ino != segment->inode": ""}
UNTOLD = {"return done ? errno : -1;": "return 0;"}
FETCHED_UNKNOWN = {"if (!at.segment->at || !file_opens(file, at.segment))": "if (false)"}
A_PIECE_TWICE = {"if (begin + done >= from && begin + done < to)": "if (begin + done < to)"}
A_WINDOW_TOO_LONG = {"return end - start < WINDOW ? end : start + WINDOW;": "return end;"}
A_PART_UNCOMPARED = {
    "for (int64_t i = 0; i < kind->count; i++) {": "for (int64_t i = 1; i < kind->count; i++) {"
}
UNLIKE_AND_MAPPED = {"is_alike && has_room(file, most) ?": "file->fd >= 0 && has_room(file, most) ?"}
_LOCK, _UNLOCK = "    pthread_mutex_lock(&self->lock);\n", "    pthread_mutex_unlock(&self->lock);\n"
_DONE = "    int64_t chunk = begin_chunk(self, job);\n"
DONE_WITHOUT_A_LOCK = {f"{_LOCK}{_DONE}{_UNLOCK}    if": f"{_DONE}    if"}
_CANCELLED, _ENDED = "    int64_t unbegun = job->chunks", "    return wait_for(job, end, true)"
CANCELLED_WITHOUT_A_LOCK = {_LOCK + _CANCELLED: _CANCELLED, _UNLOCK + _ENDED: _ENDED}
WITHOUT_AN_ORDER = {
    "__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL)": "__atomic_sub_fetch(left, 1, __ATOMIC_RELAXED)"
}

A_LANE_TOO_MANY = {"for (; lanes < LANES && next": "for (; lanes <= LANES && next"}
A_KEY_TOO_MANY = {"rounds < ORDER_KEYS ? rounds : ORDER_KEYS": "ORDER_KEYS + 2"}
A_WEIGHT_TOO_MANY = {"of->weights[least(i, last)]": "of->weights[i]"}
NO_LEFT_HALF = {"half = bits > 1 ? bits / 2 : 1": "half = 0"}


def has(name: str) -> str:
    if not shutil.which(name):
        pytest.skip(f"there is no {name} on PATH")
    return name


def compiler_with(runtime: str) -> list[str]:
    """gcc, where its sanitizer's library is installed."""
    if not runtime_of(has("gcc"), runtime).is_absolute():
        pytest.skip(f"gcc has no {runtime}: Debian's package is libgcc-VERSION-dev, Fedora's {runtime[:-3]}")
    return ["gcc"]


def runtime_of(compiler: str, runtime: str) -> Path:
    command = [compiler, f"-print-file-name={runtime}"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def run(*command: object, **environment: str) -> tuple[int, str]:
    """(exit code, all that was printed); nothing of this process' Python or pytest comes along."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    done = subprocess.run(
        list(map(str, command)),
        env=mine | environment,
        cwd=environment.get("PYTHONPATH"),  # `python -c` looks for modules there first
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    if done.returncode and any(words in done.stdout for words in _NO_ROOM):
        pytest.skip("this sanitizer cannot run on this kernel: it needs vm.mmap_rnd_bits=28, or a newer gcc")
    return done.returncode, done.stdout


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_no_compiler_has_a_warning(compiler, tmp_path):
    flags = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", "-O1", "-fPIC", "-shared"]
    compile_c([has(compiler)], tmp_path / "engine.so", engine_sources(tmp_path, {}), flags)
    sources = engine_sources(tmp_path, {"memcpy(to, from, (size_t)nbytes)": "memcpy(to, from, nbytes)"})
    with pytest.raises(RuntimeError, match="sign-conversion"):
        compile_c([compiler], tmp_path / "engine.so", sources, flags)


def package_with(changes: Mapping[str, str], folder: Path) -> dict[str, str]:
    """A copy of the package with a sanitized engine. Returns: the environment that uses it."""
    compiler = compiler_with("libasan.so")
    shutil.copytree(
        ENGINE.parent,
        folder / "arrowcache",
        ignore=lambda at, names: [n for n in names if not (n.endswith(".py") or (Path(at) / n).is_dir())],
    )
    library = folder / "arrowcache" / "native" / "libengine.so"
    flags = ("-O1", "-fPIC", "-shared", "-fvisibility=hidden", *MEMORY)
    compile_c(compiler, library, engine_sources(folder, changes), flags)
    return {
        "ASAN_OPTIONS": "detect_leaks=0",
        "LD_PRELOAD": os.fspath(runtime_of("gcc", "libasan.so")),
        "PYTHONMALLOC": "malloc",  # so that each object of Python's has memory of its own
        "PYTHONPATH": os.fspath(folder),
    }


# Nothing of this process' package may be used: the engine's path is checked.
PYTEST = """
import sys, pytest
from arrowcache.native.library import PATH
assert str(PATH).startswith(sys.argv[1]), PATH
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.nightly(*OF_C)
def test_the_unit_tests_touch_no_memory_but_their_own(tmp_path):
    environment = package_with({}, tmp_path)
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "--import-mode=importlib", "-q", "-m", "not slow"]
    # A sanitizer maps memory of its own, and ends the process where addresses are limited.
    options += ["-k", "not where_addresses_are_limited"]
    code, output = run(sys.executable, "-c", PYTEST, tmp_path, *options, UNIT_TESTS, **environment)
    assert code == 0, output
    passed = re.search(r"^(\d+) passed", output, re.MULTILINE)
    assert passed
    assert int(passed[1]) >= 50


OUTSIDE = """
import numpy as np
from arrowcache.native.engine import copy_rows
from arrowcache.native.engine import SegmentRows
data, layout, out = np.arange(64, dtype=np.uint8), np.zeros(1, np.int64), np.zeros((1, 8), np.uint8)
rows = SegmentRows(np.array([0, 8]))
rows.put([0], [[data.ctypes.data, 64, layout.ctypes.data, 0, 0, 0, 0]])
copy = copy_rows(rows, np.array([800]), [(0, 8, out.ctypes.data)], out)
print(copy.take(60), copy.refused)
"""


@pytest.mark.slow
@pytest.mark.nightly(*OF_C)
def test_a_row_out_of_range_that_the_engine_does_not_see_is_found(tmp_path):
    code, output = run(sys.executable, "-c", OUTSIDE, **package_with(WITHOUT_A_CHECK, tmp_path))
    assert code
    assert "ERROR: AddressSanitizer" in output, output


ONE_ORDER = """
import numpy as np
from arrowcache.native.order import WeightSums
from arrowcache.native.order import KEYS, Drawn, Pass, Stage
print(Pass(1000, Stage(np.array([0, 1000]), np.arange(KEYS, dtype=np.uint64)))(0, 1000))
table = WeightSums(np.ones(1003, np.float32))
table.change(np.array([0, 5, 1002]), np.full(3, 2, np.float32))
print(Pass(1000, drawn=Drawn(table, 0))(0, 1000))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "words"),
    one_in(
        4,
        [
            (A_LANE_TOO_MANY, "runtime error: index 8 out of bounds|AddressSanitizer: stack-buffer-overflow"),
            (A_KEY_TOO_MANY, "AddressSanitizer: heap-buffer-overflow"),
            (A_WEIGHT_TOO_MANY, "AddressSanitizer: heap-buffer-overflow"),
            (NO_LEFT_HALF, "runtime error: shift exponent 64 is too large"),
        ],
        *OF_C,
    ),
    ids=["a lane too many", "a key too many", "a weight too many", "no left half"],
)
def test_a_defect_of_the_order_is_found(defect, words, tmp_path):
    code, output = run(sys.executable, "-c", ONE_ORDER, **package_with(defect, tmp_path))
    assert code
    assert re.search(words, output), output


def counts(output: str) -> list[int]:
    """What a program of ours did: all of it more than nothing."""
    found = COUNTS.search(output)
    assert found, output
    numbers = list(map(int, found.groups()))
    assert all(numbers), output
    return numbers


def fuzz_with(engine: Mapping[str, str], folder: Path) -> Path:
    sources = FOLDER / "fuzz.c", *engine_sources(folder, engine)
    return compile_c(compiler_with("libasan.so"), folder / "fuzz", sources, ("-O1", "-DDRIVER", *MEMORY))


@pytest.mark.slow
def test_random_jobs_are_copied_as_a_plain_reader_copies_them(tmp_path):
    program = fuzz_with(SMALL_CHUNKS, tmp_path)
    code, output = run(program, 2000, 0, ASAN_OPTIONS="detect_leaks=0", TMPDIR=str(tmp_path))
    assert code == 0, output
    assert counts(output)[0] > 2000
    compared = re.search(r"^mapped (\d+) unlike (\d+) without (\d+)$", output, re.MULTILINE)
    assert compared, output
    assert min(map(int, compared.groups())) > 100, output
    one = tmp_path / "input"
    one.write_bytes(bytes(range(256)))
    assert run(program, one, ASAN_OPTIONS="detect_leaks=0", TMPDIR=str(tmp_path))[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "words"),
    one_in(
        12,
        [
            (WITHOUT_A_CHECK, "AddressSanitizer|this is not so|runtime error"),
            (A_BYTE_TOO_MANY, "AddressSanitizer: heap-buffer-overflow"),
            (A_READ_OUT_OF_LINE, "runtime error: load of misaligned address"),
            (BEYOND_THE_FILE, "AddressSanitizer|this is not so"),
            (ANOTHER_PIECE, "this is not so"),
            (ANOTHER_FILE, "this is not so"),
            (UNTOLD, "this is not so"),
            (FETCHED_UNKNOWN, r"AddressSanitizer: SEGV|null pointer|\A\Z"),  # the engine's threads are mute
            (A_PIECE_TWICE, "this is not so"),
            (A_WINDOW_TOO_LONG, "AddressSanitizer: stack-buffer-overflow"),
            (A_PART_UNCOMPARED, "this is not so"),
            (UNLIKE_AND_MAPPED, "this is not so"),
        ],
        *OF_C,
    ),
    ids=[
        "without a check", "a byte too many", "a read out of line", "beyond the file", "another piece",
        "another file", "untold", "fetched unknown", "a piece twice", "a window too long",
        "a part uncompared", "unlike and mapped",
    ],
)  # fmt: skip
def test_random_jobs_find_a_defect(defect, words, tmp_path):
    program = fuzz_with(SMALL_CHUNKS | defect, tmp_path)
    code, output = run(program, 2000, 0, ASAN_OPTIONS="detect_leaks=0", TMPDIR=str(tmp_path))
    assert code
    assert re.search(words, output), output


@pytest.mark.slow
@pytest.mark.nightly(*OF_C)
def test_a_fuzzer_runs_the_same_jobs(tmp_path):
    folder = subprocess.run([has("clang"), "-print-resource-dir"], capture_output=True, text=True, check=True)
    if not list(Path(folder.stdout.strip()).rglob("libclang_rt.fuzzer*")):
        pytest.skip("clang has no libFuzzer: Debian's package is libclang-rt-dev")
    code, output = run(
        sys.executable, "-m", "native", "--seconds=1", f"--found={tmp_path}", PYTHONPATH=str(TESTS)
    )
    assert code == 0, output
    assert re.search(r"stat::number_of_executed_units: +[1-9]\d", output), output


def test_without_a_fuzzer_a_sentence_says_what_to_install(tmp_path):
    code, output = run(sys.executable, "-m", "native", PYTHONPATH=str(TESTS), PATH=str(tmp_path))
    assert code == 1
    assert output.startswith("there is no fuzzer: install clang ")


def race_with(engine: Mapping[str, str], folder: Path) -> tuple[int, str]:
    sources = FOLDER / "race.c", *engine_sources(folder, SMALL_CHUNKS | engine)
    program = compile_c(compiler_with("libtsan.so"), folder / "race", sources, ("-O1", *THREADS))
    return run(program, RACE_SECONDS, 1, TSAN_OPTIONS="halt_on_error=1", TMPDIR=str(folder))


@pytest.mark.slow
def test_threads_that_queue_take_cancel_start_and_stop_do_not_race(tmp_path):
    code, output = race_with({}, tmp_path)
    assert code == 0, output
    counts(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "defect",
    one_in(4, [DONE_WITHOUT_A_LOCK, CANCELLED_WITHOUT_A_LOCK, WITHOUT_AN_ORDER, A_PIECE_TWICE], *OF_C),
    ids=["done without a lock", "cancelled without a lock", "without an order", "a piece twice"],
)
def test_a_race_is_found(defect, tmp_path):
    code, output = race_with(defect, tmp_path)
    assert code
    assert "WARNING: ThreadSanitizer: data race" in output, output
