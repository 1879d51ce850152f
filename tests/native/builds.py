"""Builds of the engine for tests: with sanitizers, with small chunks, or with a defect put in on purpose."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
ENGINE = FOLDER.parents[1] / "arrowcache" / "native"
FLAGS = ("-std=c11", "-g", "-pthread", f"-I{ENGINE}", f"-I{FOLDER}")
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
THREADS = ("-fsanitize=thread",)

SMALL_CHUNKS = {
    "CHUNK_BYTES = 256 << 10,": "CHUNK_BYTES = 600,",
    "LENGTHS_A_CHUNK = 4096,": "LENGTHS_A_CHUNK = 40,",
}
"""Changes of the source with which a small job has many chunks."""


def engine_source(folder: Path, changes: Mapping[str, str], name: str = "engine.c") -> Path:
    """A source of the engine's library with some of its text changed, in this folder.

    Raises: LookupError: the source has a text not once; the test that changes it has to follow.
    """
    source = (ENGINE / name).read_text()
    for old, new in changes.items():
        if source.count(old) != 1:
            raise LookupError(f"{name} has {old!r} {source.count(old)} times, and not once")
        source = source.replace(old, new)
    path = folder / name
    path.write_text(source)
    return path


def compile_c(command: Sequence[str], made: Path, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Compile C files to one program or library.

    Raises: RuntimeError: the compiler's own words.
    """
    line = [*command, *FLAGS, *flags, *map(os.fspath, sources), "-o", os.fspath(made)]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(line)} failed:\n{done.stdout}")
    return made
