"""Builds of the engine for tests: with sanitizers, with small chunks, or with a defect put in on purpose."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
ENGINE = FOLDER.parents[1] / "arrowcache" / "native"
FLAGS = ("-std=c11", "-g", "-pthread", f"-I{FOLDER}")
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
THREADS = ("-fsanitize=thread",)

SMALL_CHUNKS = {
    "CHUNK_BYTES = 256 << 10,": "CHUNK_BYTES = 600,",
    "LENGTHS_A_CHUNK = 4096,": "LENGTHS_A_CHUNK = 40,",
    "FETCHED_BYTES = 1 << 20,": "FETCHED_BYTES = 3000,",
    "FETCHED_ROWS = 256,": "FETCHED_ROWS = 10,",
    "ENGINE_PIECE_BYTES (128 << 10)": "ENGINE_PIECE_BYTES 250",
    "WINDOW = 32 << 10, CLOSE = 8 << 10": "WINDOW = 300, CLOSE = 40",
}
"""Changes of the source with which a small job has many chunks and pieces."""


def engine_sources(folder: Path, changes: Mapping[str, str]) -> list[Path]:
    """The engine's sources in this folder, headers beside them, with some of their text changed.

    Raises: LookupError: the sources have a text not once; the test that changes it has to follow.
    """
    texts = {path.name: path.read_text() for path in sorted(ENGINE.glob("*.[ch]"))}
    for old, new in changes.items():
        places = [name for name, text in texts.items() for _ in range(text.count(old))]
        if len(places) != 1:
            raise LookupError(f"{old!r} is {len(places)} times in the engine's sources, and not once")
        texts[places[0]] = texts[places[0]].replace(old, new)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts if name.endswith(".c")]


def compile_c(command: Sequence[str], made: Path, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Compile C files to one program or library; headers are those beside the last one.

    Raises: RuntimeError: the compiler's own words.
    """
    line = [
        *command,
        *FLAGS,
        f"-I{sources[-1].parent}",
        *flags,
        *map(os.fspath, sources),
        "-o",
        os.fspath(made),
    ]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(line)} failed:\n{done.stdout}")
    return made
