"""CONTRIBUTING and its pages: the map has each module, by its docstring; whatever they name is there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "arrowcache"
PAGE, DEVELOPING = (ROOT / "docs/explanation" / name for name in ("modules.md", "developing.md"))
TEXT = "".join(path.read_text() for path in (ROOT / "CONTRIBUTING.md", PAGE, DEVELOPING))
MAP = re.compile(r"(?<=\n)arrowcache/  .*?(?=```\n)", re.DOTALL)
"""The tree that begins with the package. `python tests/architecture/test_contributing.py` writes it anew: all
lines where they were, those of new modules at the end of their folders.
"""
PARTS = ("", "arrowcache/", "tests/native/", "arrowcache/native/")
"""Where a path that the text names may begin."""
MADE = ("CACHE/", "constraints/NAME", "dist/", "fuzz-found/", "site/")
"""How names of files begin that are none of the repository's."""
SUFFIXES = (".py", ".c", ".h", ".md", ".txt", ".toml", ".jsonl", ".ipynb")


@functools.cache
def first_lines() -> dict[str, str]:
    """Path in arrowcache/ -> first line of its docstring. A folder is its __init__.py; a .c is its header."""
    found = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.[hc]")]):
        text = path.read_text()
        if path.suffix == ".py":
            said = ast.get_docstring(ast.parse(text)) or ""
        elif path.suffix == ".h" or not path.with_suffix(".h").exists():
            said = text.removeprefix("/* ")
        else:
            continue
        name = path.relative_to(PACKAGE).as_posix().removesuffix("__init__.py")
        found[name] = said.split("\n")[0].removesuffix(" */")
    return found


def modules() -> dict[str, str]:
    """Path in arrowcache/ -> its line in the map: without the name before its colon, and the full stop."""
    return {
        path: re.sub(r"^(\S+ ){0,2}\S+: ", "", line).removesuffix(".") for path, line in first_lines().items()
    }


def read(tree: str) -> list[tuple[str, str]]:
    """What a map says, line by line, as pairs like those of `modules`."""
    found, folders = [], [""]
    for line in tree.splitlines():
        name, _, said = line.strip().partition("  ")
        depth = (len(line) - len(line.lstrip())) // 2
        path = "".join(folders[1:depth]) + name if depth else ""
        folders[depth:] = [name] if name.endswith("/") else []
        found.append((path, said.strip()))
    return found


def written(tree: str, said: dict[str, str]) -> str:
    """A map of just these modules, each where it was; what is new ends its folder."""
    paths = [path for path, _ in read(tree) if path in said]
    for path in said:
        if path not in paths:
            folder = path[: path.rstrip("/").rfind("/") + 1]
            last = max(place for place, other in enumerate(paths) if other.startswith(folder))
            paths.insert(last + 1, path)
    lines = []
    for path in paths:
        *above, name = f"arrowcache/{path}".rstrip("/").split("/")
        slash = "/" if path.endswith("/") or not path else ""
        lines.append(f"{'  ' * len(above) + name + slash:<24} {said[path]}\n")
    return "".join(lines)


def tree() -> str:
    match = MAP.search(PAGE.read_text())
    assert match, f"{PAGE} has no tree of arrowcache/"
    return match[0]


def wrong(tree: str, said: dict[str, str]) -> list[str]:
    """What a map lacks, has too much, or says otherwise than the module does."""
    lines = read(tree)
    paths = [path for path, _ in lines]
    return [
        *(f"{path} is missing" for path in said if path not in paths),
        *(f"{path} is no module" for path in paths if path not in said),
        *(f"{path} stands there twice" for path in set(paths) if paths.count(path) > 1),
        *(f"{path} says {said[path]!r}" for path, line in lines if path in said and line != said[path]),
    ]


def test_the_map_has_each_module_with_the_first_line_of_its_docstring():
    assert not wrong(tree(), modules()), "python tests/architecture/test_contributing.py writes it anew"


def test_each_first_line_is_a_whole_sentence():
    assert [path for path, line in first_lines().items() if not line.endswith(".")] == []


@pytest.mark.parametrize(
    "defect",
    [
        ("  cache.py", "  cash.py"),
        ("\n  cache.py", "\n  cache.py  the face\n  cache.py"),
        ("    pool.py", "    pool.py  and"),
        ("  reading/", "  writing/"),
        ("    engine.h", "    engine.c"),
    ],
)
def test_a_defect_in_the_map_is_seen(defect):
    assert wrong(tree().replace(*defect), modules())


def test_the_map_is_written_as_it_stands():
    assert written(tree(), modules()) == tree()


def test_a_new_module_ends_its_folder_in_the_map():
    said = {"": "all", "one/": "first", "one/a.py": "a", "two.py": "second"}
    lines = written("arrowcache/  all\n  one/  first\n  two.py  second\n  gone.py  gone\n", said).splitlines()
    assert [line.split()[0] for line in lines] == ["arrowcache/", "one/", "a.py", "two.py"]


def test_the_layers_are_those_that_imports_are_held_to():
    tree = ast.parse((ROOT / "tests/architecture/test_architecture.py").read_text())
    numbers = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    )
    line = next(line for line in TEXT.splitlines() if line.startswith("An import may only"))
    said = [{*re.findall(r"`(\w+)`", layer)} for layer in line.partition(". ")[0].split(";")]
    known = [number for number in sorted({*numbers.values()}, reverse=True) if number > 0]
    named = [{name for name in numbers if numbers[name] == number} for number in known]
    assert said[:-1] == [names for names in named if names not in ({"__main__"}, {"arrowcache"})]


def named(text: str) -> set[str]:
    """Paths that a text names between backticks."""
    spans = re.findall(r"`([^`\n]+)`", text)
    words = {word.partition("::")[0] for span in spans for word in span.split()}
    paths = {word for word in words if "/" in word or word.endswith(SUFFIXES)}
    return {path for path in paths if re.fullmatch(r"\w[\w./-]*", path) and not path.startswith(MADE)}


def missing(text: str) -> list[str]:
    return sorted(path for path in named(text) if not any((ROOT / part / path).exists() for part in PARTS))


def test_each_path_that_it_names_is_there():
    assert len(named(TEXT)) > 100
    assert not missing(TEXT)


def test_a_path_that_is_not_there_is_seen():
    text = "`reading/order.py`, `python tests/quick.py`, `make it`, `fuzz-found/x`, `reading/disorder.py`"
    assert missing(text) == ["reading/disorder.py"]


def test_each_command_of_make_that_it_names_is_one():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = set(re.findall(r"(?:`|\n)make ([\w-]+)", TEXT))
    assert len(commands) > 10
    assert commands <= {*targets}


def test_each_folder_of_tests_is_in_its_tree():
    tree = DEVELOPING.read_text().partition("\ntests/\n")[2].partition("\nbenchmarks/ ")[0]
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    assert folders == set(re.findall(r"^  (\w+)", tree, re.MULTILINE))


if __name__ == "__main__":
    PAGE.write_text(MAP.sub(lambda match: written(match[0], modules()), PAGE.read_text()))
