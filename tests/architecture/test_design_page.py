"""The design page: each test and each file that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "design.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FILE = re.compile(r"`(arrowcache/[\w/]+\.\w+)`")


def defined(path: Path) -> set[str]:
    """Names of the functions, classes and values of a module; none, if it is not there."""
    found = set()
    if not path.exists():
        return found
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def missing(text: str) -> list[str]:
    """Files and tests that a text names, and that are not there."""
    files = {path for path in FILE.findall(text) if not (ROOT / path).exists()}
    tests = {f"{path}::{name}" for path, name in TEST.findall(text) if name not in defined(ROOT / path)}
    return sorted(files | tests)


def test_each_file_and_each_test_that_it_names_is_there():
    text = PAGE.read_text()
    assert len({*TEST.findall(text)}) > 50
    assert len({*FILE.findall(text)}) > 5
    assert len(TEST.findall(text)) == text.count("::"), "one is not between backticks, where it is looked for"
    assert len(FILE.findall(text)) == text.count("arrowcache/"), "as above"
    assert not missing(text)


@pytest.mark.parametrize(
    "name",
    [
        "tests/architecture/test_design_page.py::test_each_file_and_test_that_it_names_is_there",
        "tests/architecture/test_designs.py::test_each_file_and_each_test_that_it_names_is_there",
        "arrowcache/storage/shop.py",
        "arrowcache/native/engines.h",
    ],
)
def test_a_name_that_was_changed_is_seen(name):
    here = f"tests/architecture/test_design_page.py::{test_a_name_that_was_changed_is_seen.__name__}"
    assert missing(f"`{name}`, `arrowcache/cache.py` and `{here}`") == [name]
