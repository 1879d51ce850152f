"""Fuzz the engine: `make fuzz`, or `PYTHONPATH=tests python -m native --seconds 600`.

What does harm is kept in fuzz-found/engine/, with the inputs that reached something new. One of them again:
`fuzz-found/engine/fuzz FILE`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

from native.builds import FOLDER, MEMORY, SMALL_CHUNKS, compile_c, engine_sources

LONGEST_INPUT_BYTES = 512
SEEDS = 16
HANG_SECONDS = 60


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--found", type=Path, default=Path("fuzz-found") / "engine")
    options = parser.parse_args()
    found = options.found.absolute()
    if shutil.which("clang"):
        # Tracing comparisons takes two thirds of the time, and finds little: the bytes are decisions.
        program = build("clang", found, "-fno-sanitize-coverage=trace-cmp")
        return with_libfuzzer(program, found, options.seconds)
    if shutil.which("afl-clang-fast"):
        return with_afl(build("afl-clang-fast", found), found, options.seconds)
    sys.exit(
        "there is no fuzzer: install clang (Debian: `apt install clang libclang-rt-dev`) or AFL++ "
        "(`apt install afl++`)"
    )


def build(compiler: str, found: Path, *flags: str) -> Path:
    """The program, in a folder that is made; AFL++ has a driver of its own for the same flag."""
    found.mkdir(parents=True, exist_ok=True)
    source = found / "source"
    source.mkdir(exist_ok=True)
    sources = FOLDER / "fuzz.c", *engine_sources(source, SMALL_CHUNKS)
    return compile_c([compiler], found / "fuzz", sources, ("-O1", *MEMORY, "-fsanitize=fuzzer", *flags))


def with_seeds(folder: Path) -> Path:
    """The folder, with some inputs to begin with."""
    folder.mkdir(exist_ok=True)
    for number in range(SEEDS):
        (folder / f"seed-{number}").write_bytes(random.Random(number).randbytes(LONGEST_INPUT_BYTES))
    return folder


def with_libfuzzer(program: Path, found: Path, seconds: int) -> int:
    options = {
        "artifact_prefix": f"{found}/",
        "detect_leaks": 0,
        "len_control": 0,
        "max_len": LONGEST_INPUT_BYTES,
        "max_total_time": seconds,
        "print_final_stats": 1,
        "timeout": HANG_SECONDS,
    }
    corpus = with_seeds(found / "corpus")
    command = [program, corpus, *(f"-{name}={value}" for name, value in options.items())]
    return subprocess.run(command, env=os.environ | with_files(found), check=False).returncode


def with_files(found: Path) -> dict[str, str]:
    """Where segments' files lie."""
    (found / "files").mkdir(exist_ok=True)
    return {"TMPDIR": os.fspath(found / "files")}


def with_afl(program: Path, found: Path, seconds: int) -> int:
    seeds, state = with_seeds(found / "seeds"), found / "afl"
    environment = (
        os.environ
        | with_files(found)
        | {
            "AFL_AUTORESUME": "1",
            "AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES": "1",
            "AFL_NO_UI": "1",
            "AFL_QUIET": "1",
            "AFL_SKIP_CPUFREQ": "1",
        }
    )
    options = [f"-i{seeds}", f"-o{state}", f"-V{seconds}", f"-t{HANG_SECONDS}000"]
    command = ["afl-fuzz", *options, "--", program]
    code = subprocess.run(command, env=environment, check=False).returncode
    crashes = sorted(path for kind in ("crashes", "hangs") for path in (state / "default" / kind).glob("id*"))
    print(f"{len(crashes)} inputs did harm" + "".join(f"\n{path}" for path in crashes))
    return code or int(bool(crashes))


if __name__ == "__main__":
    sys.exit(main())
