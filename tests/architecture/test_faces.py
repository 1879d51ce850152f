"""Tests speak to faces: what they name of the package's privates, or put in their place, becomes less only.

Private is what begins with `_`: a test imports none, reads none, and patches none, constants included, in its
own process or in the text of a script. Clocks, sizes and waits are one value, `arrowcache.limits.Limits`: a
test sets it by `helpers.limit`, a script by `Limits.current = Limits(...)`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from arrowcache.limits import Limits

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "arrowcache"
SEAMS = (
    "os.", "subprocess.", "sys.", "time.", "tempfile.", "Path.", "socket.", "builtins.",  # Python's own
    "threading.Thread.", "resource.", "importlib.util.", "warnings.", "_thread.", "fcntl.",
    "torch.", "np.", "tf.", "jax.", "pq.", "ray.", "xxhash.",  # other libraries
    "arrowcache.linux.", "linux.", "maps.", "locks.", "Folder.", "LockFile.",  # the kernel, files of a cache
    "engine.library.", "engine.quick.", "arrowcache.torch.device.backend_of.",  # native code, devices
    "Limits.current.",
)  # fmt: skip
"""What may be patched: calls of files, of processes, of the kernel and of other libraries, and the limits."""
PATCHES = re.compile(r"\w+\.(setattr|delattr)|(mock\.)?patch(\.object)?")
PATCHERS = ("setattr", "delattr", "patch", "object")  # the last names of these: most calls have others
GETS = re.compile(r"^((\w+\.)*([sg]et|has|del)attr|patch\.object)\(")
LIST = Path(__file__).with_name("privates.txt")
"""How many of these each file has still. `python tests/architecture/test_faces.py` writes it anew, if no file
has more than before: it only shrinks.
"""


def allowed() -> dict[str, int]:
    lines = LIST.read_text().splitlines()
    return {name: int(count) for count, name in (line.split(maxsplit=1) for line in lines)}


PUBLIC = re.compile(r"__.*|_repr_\w+_|_asdict|_replace|_exit|_")
"""Names that begin as a private one does, and are in Python's or Jupyter's documentation."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not PUBLIC.fullmatch(name)


@functools.lru_cache(8)
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All that is in a tree, which is asked for several times; faster than `ast.walk`."""
    found = [tree]
    for node in found:  # which grows meanwhile
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                found.append(value)
    return found


def name_of(node: ast.AST) -> str | None:
    """Of a plain name; None for all else."""
    return node.id if isinstance(node, ast.Name) else None


def bound(tree: ast.AST) -> set[str]:
    """Private names that a file binds: of functions, classes, variables, and attributes of `self`."""
    found = {
        node.name
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if name_of(node.value) == "self" else set()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if is_private(name)}


@functools.cache
def privates() -> frozenset[str]:
    """All private names of the package, but for those of columns and the like, which are texts there too."""
    names, said = set[str](), set[str]()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names |= bound(tree)
        said.update(texts(tree))
    return frozenset(names - said)


@functools.cache
def modules() -> frozenset[str]:
    paths = (path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return frozenset(".".join(path.parts).removesuffix(".__init__") for path in paths)


def texts(tree: ast.AST) -> Iterator[str]:
    """The strings of a file, with a 0 for each thing that is put into one."""
    inside = {id(part) for node in nodes(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values]
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def scripts(tree: ast.AST) -> Iterator[ast.AST]:
    """The texts that are Python of several lines."""
    for text in texts(tree):
        if "\n" in text and re.search(r"[=(]", text):
            with suppress(SyntaxError), warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                yield ast.parse(textwrap.dedent(text))


def last_of(name: str) -> str:
    return name.rpartition(".")[2]


def named(tree: ast.AST) -> list[str]:
    """Private names of the package that a file imports, reads, or has as a text, and does not bind itself."""
    ours = privates() - bound(tree)
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("arrowcache"):
            found += [f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.Attribute) and node.attr in ours:
            name = ast.unparse(node)
            is_own = name_of(node.value) in ("self", "cls", "os", "sys") or name.startswith("torch.")
            found += [] if is_own else [name]
        elif isinstance(node, ast.Call | ast.Tuple | ast.List):  # as a text, beside what it is of
            parts = node.args if isinstance(node, ast.Call) else node.elts
            if told := [text for part in parts for text in private_text(part)]:
                is_ours = any(isinstance(part, ast.Name) for part in parts) or GETS.search(ast.unparse(node))
                found += [text for text in told if is_ours or "." in text]
    return found


def private_text(node: ast.AST) -> list[str]:
    text = node.value if isinstance(node, ast.Constant) else None
    is_one = isinstance(text, str) and re.fullmatch(r"[\w.]+", text) and last_of(text) in privates()
    return [text] if is_one else []


def patches(tree: ast.AST) -> list[str]:
    """What is put in place of something of the package's, other than at a seam.

    By an assignment too, if it is to a module or a class: attributes of others are settings. Private names
    are not among these: `named` has them.
    """
    ours, others = set(), {"benchmarks"}
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}": alias.asname or alias.name for alias in node.names}
            if (node.module or "").startswith("arrowcache"):
                ours |= {
                    name for full, name in names.items() if full in modules() or last_of(full)[0].isupper()
                }
            elif (node.module or "").startswith(("benchmarks", "gpu")):  # the latter lies beside this
                others |= {*names.values()}
    targets = [
        target(node)
        for node in nodes(tree)
        if isinstance(node, ast.Call) and node.args and is_patch(node.func)
    ]
    targets += [
        ast.unparse(node)
        for node in nodes(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) in ours
    ]
    return [
        name
        for name in targets
        if not f"{name}.".startswith(SEAMS)
        and name.partition(".")[0] not in others
        and not is_private(last_of(name))
    ]


def is_patch(function: ast.expr) -> bool:
    last = function.attr if isinstance(function, ast.Attribute) else name_of(function)
    return last in PATCHERS and PATCHES.fullmatch(ast.unparse(function)) is not None


def target(call: ast.Call) -> str:
    """What a call of setattr names, be it in one argument or in two."""
    is_whole = isinstance(call.args[0], ast.Constant)
    return ".".join(
        str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
        for node in call.args[: 1 if is_whole else 2]
    )


def offenders(tree: ast.AST) -> list[str]:
    return [found for each in (tree, *scripts(tree)) for found in (*named(each), *patches(each))]


@functools.cache
def counted() -> dict[str, list[str]]:
    found = {
        str(path.relative_to(TESTS)): offenders(ast.parse(path.read_text()))
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
    }
    return {name: each for name, each in found.items() if each}


def grown() -> dict[str, list[str]]:
    return {name: found for name, found in counted().items() if len(found) > allowed().get(name, 0)}


def test_no_test_names_more_privates_or_patches_more_than_the_list_says_which_is_no_longer_than_needed():
    assert grown() == {}, "speak to a public face, set a limit by helpers.limit, or patch at one of SEAMS"
    fewer = [name for name, count in allowed().items() if len(counted().get(name, ())) < count]
    assert fewer == [], "python tests/architecture/test_faces.py writes the list anew"


def test_what_is_looked_for_is_found():
    name = min(privates())
    for text in (
        "from arrowcache.native.engine import NAME",
        "threads.NAME()",
        "mapped.NAME",
        "monkeypatch.setattr(mapped, 'NAME', 0)",
        "monkeypatch.setattr('arrowcache.reading.mapped.NAME', 0)",
        "patch.object(mapped, 'NAME', 0)",
        "MISSING = {'half': (mapped, 'NAME')}",
        "monkeypatch.setattr(plan, 'MAX_ROWS', 0)",
        "monkeypatch.setattr(Stream, 'take', take)",
        'SCRIPT = """\nfrom arrowcache.reading import mapped\nmapped.NAME = 0"""',
        'SCRIPT = f"""\n    from arrowcache.reading import mapped\n    mapped.MOST = {most}"""',
    ):
        assert offenders(ast.parse(text.replace("NAME", name))), text
    for text in (
        "monkeypatch.setattr(os, 'link', link)",
        "monkeypatch.setattr(Limits, 'current', Limits())",
        "from benchmarks import figures\nmonkeypatch.setattr(figures, 'STEPS', 0)",
        'SCRIPT = """\nfrom arrowcache.limits import Limits\nLimits.current = Limits(join_seconds=0)"""',
        "class A:\n    def NAME(self): ...\nA().NAME()",
        "text = 'a sentence of NAME a cache'",
    ):
        assert not offenders(ast.parse(text.replace("NAME", name))), text


IMPORT = re.compile(r"\bfrom (arrowcache[\w.]*) import (?:\(([^)]*)\)|([\w, ]+))")


@functools.cache
def said_by(module: str) -> frozenset[str]:
    """All names and texts in a module, its folder's modules among them; nothing if there is none."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return frozenset()
    beside = {each.stem for each in path.iterdir()} if path.is_dir() else set()
    return frozenset(beside | {*re.findall(r"\w+", file.read_text())})


def missing(source: str) -> list[str]:
    """The names that a source, or a script in a text of it, imports from modules which do not have them."""
    return [
        f"{module}.{name}"
        for module, several, one_line in IMPORT.findall(source)
        for name in re.findall(r"(?:^|,)\s*([A-Za-z_]\w*)", re.sub(r"#.*", "", several or one_line))
        if name not in said_by(module)
    ]


def test_each_name_that_a_script_in_a_text_imports_is_there():
    folders = (TESTS, TESTS.parent / "benchmarks")
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py")) if path != Path(__file__)]
    assert {path.name: found for path in paths if (found := missing(path.read_text()))} == {}


def test_a_name_that_is_gone_from_a_module_is_seen():
    script = "'from arrowcache.native.order import {}; print(1)'"
    assert missing(script.format("Stage, Pass as Turn")) == []
    assert missing(script.format("Stage, Table")) == ["arrowcache.native.order.Table"]
    assert missing('"""\nfrom arrowcache.gone import (\n    One,\n)\n"""') == ["arrowcache.gone.One"]


def read_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run as a module is imported: defaults of arguments and decorators are among these."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            parts = [*child.args.defaults, *filter(None, child.args.kw_defaults)]
            parts += [] if isinstance(child, ast.Lambda) else child.decorator_list
            for part in parts:
                yield from ast.walk(part)
        else:
            yield child
            yield from read_at_import(child)


def test_limits_are_read_when_they_act_and_the_package_sets_none():
    """One that is read at import, or kept in a default, could not be set any more."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if "Limits" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        early = {id(node) for node in read_at_import(tree)}
        found += [
            f"{path.relative_to(PACKAGE)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == "current" and name_of(node.value) == "Limits"
            if path.name != "limits.py" and (id(node) in early or not isinstance(node.ctx, ast.Load))
        ]
    assert found == []


def test_each_limit_is_read_and_is_set_by_a_test():
    """Else it is a constant of its module."""
    limits = {field.name for field in dataclasses.fields(Limits)}
    read = re.findall(r"Limits\.current\.(\w+)", "".join(p.read_text() for p in PACKAGE.rglob("*.py")))
    given = {
        keyword.arg
        for path in TESTS.rglob("*.py")
        if re.search(r"\b(limit|Limits)\(", text := path.read_text())
        for tree in [ast.parse(text)]
        for each in (tree, *scripts(tree))
        for node in nodes(each)
        if isinstance(node, ast.Call) and name_of(node.func) in ("limit", "Limits")
        for keyword in node.keywords
    }
    assert limits - {*read} == set()
    assert limits - given == set()


if __name__ == "__main__":
    if not grown():
        LIST.write_text("".join(f"{len(found)} {name}\n" for name, found in counted().items()))
