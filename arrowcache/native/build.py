"""Build: compiles the shared library of engine, orders and maps, when the package is built.

hatchling finds `EngineHook` here. The compiler is `$CC`, else cc, gcc or clang, else the one of the PyPI
package ziglang, which pip then brings. A wheel's library is for the platform of its tag; that of an editable
install is beside the source. One library serves every version of Python.

Must never be imported by the package: it is in no wheel. Run as a script it needs no hatchling.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # `python arrowcache/native/build.py` needs only a compiler
    BuildHookInterface = list  # type: ignore[misc, assignment]  # nobody looks for the hook then


FOLDER = Path(__file__).parent
LIBRARY = "libengine.so"
SOURCES = tuple(FOLDER / name for name in ("engine.c", "chunks.c", "files.c", "maps.c", "order.c", "draw.c"))
HEADERS = tuple(path.with_suffix(".h") for path in SOURCES)
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra")
PLATFORM_VARIABLE = "ARROWCACHE_WHEEL_PLATFORM"  # a wheel's platform tag, for releases
_COMPILERS = ("cc", "gcc", "clang")
_GLIBC = "2.28"


class NoCompilerError(Exception):
    """No C compiler was found."""


def compiler() -> list[str]:
    """Return the command that compiles C on this machine.

    Raises: NoCompilerError: there is none.
    """
    if command := shlex.split(os.environ.get("CC", "")):
        return command
    for name in _COMPILERS:
        if path := shutil.which(name):
            return [path]
    try:
        import ziglang  # noqa: F401
    except ImportError:
        raise NoCompilerError(
            "arrowcache's engine is written in C, and no C compiler was found: install gcc or clang, or "
            "`pip install ziglang`, which has one, or install arrowcache from a wheel"
        ) from None
    target = f"{platform.machine()}-linux-gnu.{_GLIBC}"
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def compile_engine(library: Path) -> None:
    """Compile the engine; the library appears at its path whole, or not at all.

    Raises: NoCompilerError; RuntimeError: the compiler's own message.
    """
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".engine-") as folder:
        made = Path(folder) / library.name
        command = [*compiler(), *FLAGS, *map(os.fspath, SOURCES), "-o", os.fspath(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
        made.replace(library)


def refresh() -> None:
    """Compile the library beside the source, if the source is newer."""
    library = FOLDER / LIBRARY
    if not library.exists() or library.stat().st_mtime < max(
        path.stat().st_mtime for path in SOURCES + HEADERS
    ):
        compile_engine(library)


class EngineHook(BuildHookInterface[Any]):
    """The build hook that Hatchling calls for a wheel, and for an editable install."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return packages that pip installs for the build: a compiler, if there is none."""
        try:
            compiler()
        except NoCompilerError:
            return ["ziglang"]
        return []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and set the platform of the wheel."""
        named = os.environ.get(PLATFORM_VARIABLE) or f"linux_{platform.machine()}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{named}"
        if version == "editable":
            refresh()
            return
        self._folder = tempfile.TemporaryDirectory(prefix="arrowcache-engine-")
        library = Path(self._folder.name) / LIBRARY
        compile_engine(library)
        build_data["force_include"][os.fspath(library)] = f"arrowcache/native/{LIBRARY}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the library after the wheel has its copy."""
        if version != "editable":
            self._folder.cleanup()


if __name__ == "__main__":
    refresh()
