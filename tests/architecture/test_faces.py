"""Tests speak to faces: what they read of others' privates, or put in their place, becomes less only."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
SEAMS = (
    "os.", "subprocess.", "sys.", "time.", "tempfile.", "Path.", "socket.", "builtins.",  # Python's own
    "threading.Thread.", "resource.", "importlib.util.", "warnings.",
    "torch.", "np.", "tf.", "jax.", "pq.",  # other libraries, as they are on another machine
    "arrowcache.linux.", "linux.", "maps.", "locks.", "Folder.", "LockFile.",  # the kernel, files of a cache
    "engine.library.", "engine.quick.", "arrowcache.torch.device.backend_of.",  # native code, devices
)  # fmt: skip
"""What may be patched: calls of files, of the clock, of processes, of the kernel and of other libraries."""
CONSTANTS_AND_CLOCKS = re.compile(r"_?[A-Z][A-Z_]*|time|resource")
"""So may constants, or a large size and a long wait would take much of either, and a module's clock.

Constants may be read, too.
"""
LIST = Path(__file__).with_name("privates.txt")
"""How many of both each file has still. `python tests/architecture/test_faces.py` writes it anew, if no file
has more than before: it only shrinks.
"""


def allowed() -> dict[str, int]:
    lines = LIST.read_text().splitlines()
    return {name: int(count) for count, name in (line.split(maxsplit=1) for line in lines)}


PUBLIC = re.compile(r"__.*|_repr_\w+_|_asdict|_replace|_exit")
"""Names that begin as a private one does, and are in Python's or Jupyter's documentation."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not PUBLIC.fullmatch(name)


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a file defines by itself: its classes may use them among themselves."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def reads(tree: ast.AST) -> list[str]:
    """Private attributes of any object but `self` and those that the file itself defines."""
    own = own_names(tree)
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and not CONSTANTS_AND_CLOCKS.fullmatch(node.attr)
        and node.attr not in own
        and ast.unparse(node.value) not in ("self", "cls", "os", "sys")
    ]


def patches(tree: ast.AST) -> list[str]:
    """What is put in place of something of the package's, other than at a seam."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("patch.setattr")
        and node.args
        and not f"{_target(node)}.".startswith(SEAMS)
        and not CONSTANTS_AND_CLOCKS.fullmatch(_target(node).rpartition(".")[2])
    ]


def _target(call: ast.Call) -> str:
    """What a call of setattr names, be it in one argument or in two."""
    return ".".join(_value(node) for node in call.args[: 1 if len(call.args) == 2 else 2])


def _value(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


@functools.cache
def counted() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in sorted(TESTS.rglob("*.py")):
        tree = ast.parse(path.read_text())
        found[str(path.relative_to(TESTS))] += len(reads(tree)) + len(patches(tree))
    return +found


def grown() -> dict[str, int]:
    return {name: count for name, count in counted().items() if count > allowed().get(name, 0)}


def test_no_test_reads_more_privates_or_patches_more_than_it_did():
    assert not grown(), "speak to a public face, or patch at one of SEAMS"


def test_the_list_of_those_that_still_do_is_no_longer_than_needed():
    found = counted()
    fewer = {name: found[name] for name, count in allowed().items() if found[name] < count}
    assert not fewer, "python tests/architecture/test_faces.py writes the list anew"


def test_what_is_looked_for_is_found():
    tree = ast.parse(
        "monkeypatch.setattr(Stream, 'take', take)\nmonkeypatch.setattr(os, 'link', link)\nit._lock"
    )
    assert (len(reads(tree)), len(patches(tree))) == (1, 1)


if __name__ == "__main__":
    if not grown():
        LIST.write_text("".join(f"{count} {name}\n" for name, count in sorted(counted().items())))
