"""The package's shape: layers, imports, exports."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import arrowcache

PACKAGE = Path(arrowcache.__file__).parent
LAYERS = {  # an import may only point to a lower number
    "__main__": 9,  # `python -m arrowcache`
    "demo": 8, "cli": 8,  # users' own programs
    "arrowcache": 7,  # __init__: the list of exports
    "explore": 6,
    "torch": 5, "tensorflow": 5, "jax": 5, "ray": 5,
    "read_through": 4, "cache": 4,
    "sampling": 3, "reading": 3,
    "storage": 2,
    "arrow": 1,
    "progress": 0.75, "process": 0.6, "pickling": 0.5, "os_errors": 0.5,
    "display": 0, "errors": 0, "linux": 0, "native": 0, "proc": 0,
    "arguments": -1, "lifetimes": -1, "limits": -1,
    "units": -2,
}  # fmt: skip
STANDARD_LIBRARY_ONLY = ("arguments", "display", "errors", "lifetimes", "limits", "linux", "proc", "units")
FRAMEWORKS = {
    "torch": ("torch", "demo"),
    "tensorflow": ("tensorflow",),
    "jax": ("jax",),
    "ray": ("ray",),
    "sklearn": ("demo", "explore"),
    "pandas": ("explore",),
}
PUBLIC = [
    "ArrowCacheError", "Binary", "Cache", "CacheFormatError", "CacheFrozenError", "CacheFullError",
    "CacheStats", "CorruptSegmentError", "Loader", "LoaderStats", "LoaderTimeoutError", "LockTimeoutError",
    "MissingSegmentsError", "Pace", "PoolStats", "Problem", "Ragged", "RowId",
    "Rows", "SamplerError", "SamplerPool", "Schema", "SchemaError", "SegmentInfo",
    "Snapshot", "String", "Tensor", "Timestamp", "Values", "WorkerError", "Writer", "metrics",
]  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file, parsed once for all tests, none of which changes it."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(parsed(path))]


@functools.cache
def imports_of(path: Path, *, at_import: bool = False) -> frozenset[str]:
    """Every module that a file imports, wherever in it; only what runs at import if `at_import`."""
    found = set()
    for node in _unguarded(parsed(path)) if at_import else nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return frozenset(found)


def _unguarded(node: ast.AST):
    """The nodes that run when a module is imported: not in functions, not under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _unguarded(child)


def tops(path: Path) -> set[str]:
    """The top-level packages that a file imports."""
    return {name.split(".")[0] for name in imports_of(path)}


def attributes_of(path: Path) -> list[ast.Attribute]:
    return [node for node in nodes_of(path) if isinstance(node, ast.Attribute)]


def part_of(module: str) -> str:
    """The layer's name that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def test_every_module_belongs_to_a_layer():
    assert [module for module in MODULES if part_of(module) not in LAYERS] == []


def test_imports_only_point_down():
    offenders = [
        f"{module} imports {imported}"
        for module, path in MODULES.items()
        for imported in imports_of(path)
        if imported.split(".")[0] == "arrowcache"
        and part_of(imported) != part_of(module)
        and LAYERS[part_of(imported)] >= LAYERS[part_of(module)]
    ]
    assert offenders == []


def test_the_layout_of_the_package_names_each_part():
    found = {part_of(module) for module in MODULES} - {"arrowcache"}
    assert arrowcache.__doc__ is not None
    assert not {part for part in found if not re.search(rf"\b{part}(/|\.py)", arrowcache.__doc__)}


IMPURE = re.compile(
    r"(time|os|random|threading|socket|tempfile|subprocess|shutil|arrowcache\.(linux|proc))\b"
)


def test_what_says_that_it_is_pure_knows_no_clock_no_machine_and_no_file():
    offenders = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if re.search(r"\. Pure\b|^Pure\b", ast.get_docstring(parsed(path)) or "", re.MULTILINE)
        for name in imports_of(path)
        if IMPURE.match(name)
    ]
    assert offenders == []


def test_sampling_and_reading_meet_nowhere_but_below():
    for module, path in MODULES.items():
        other = {"sampling": "reading", "reading": "sampling"}.get(part_of(module))
        assert not [
            name for name in imports_of(path) if part_of(name) == other and name.startswith("arrowcache")
        ]


def test_no_module_imports_itself_however_long_the_way():
    graph = {
        module: {name for name in imports_of(path, at_import=True) if name in MODULES}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way, module])
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    assert done == set(MODULES)


def test_the_lowest_layer_needs_the_standard_library_only():
    known = {*sys.stdlib_module_names, "arrowcache"}  # whose lower layers are as these
    others = {module: tops(MODULES[f"arrowcache.{module}"]) - known for module in STANDARD_LIBRARY_ONLY}
    assert not any(others.values()), others


def test_a_framework_is_imported_only_where_it_is_named():
    offenders = [
        f"{module} imports {framework}"
        for module, path in MODULES.items()
        for framework in tops(path) & FRAMEWORKS.keys()
        if part_of(module) not in FRAMEWORKS[framework]
    ]
    assert offenders == []


ONE_MODULE = {
    "h5py": "arrowcache.sampling.sources.hdf5",
    "obstore": "arrowcache.sampling.sources.getter",
    "zarr": "arrowcache.sampling.sources.zarr3",
}


def test_an_optional_package_is_imported_in_one_module():
    importing = {
        package: [name for name, path in MODULES.items() if package in tops(path)] for package in ONE_MODULE
    }
    assert importing == {package: [module] for package, module in ONE_MODULE.items()}


LACKED = (
    "memfd_", "MFD_", "pidfd_", "PIDFD_", "P_PIDFD", "eventfd", "EFD_", "F_OFD_", "F_SEAL_",
    "copy_file_range", "getrandom", "GRND_", "preadv", "pwritev", "RWF_", "splice", "MAP_NORESERVE",
    "MADV_FREE", "MADV_POPULATE",
)  # fmt: skip
"""How names begin that a Python may lack which was built against an old C library."""
C_LIBRARIES = ("CDLL", "PyDLL", "LoadLibrary", "cdll", "pythonapi")
OWNERS = {"arrowcache.reading.slots", "arrowcache.reading.workers.worker"}
"""Where ctypes arrays are: objects under NumPy arrays, which tell by their death that nobody uses these."""


def test_the_kernel_and_the_c_library_are_called_in_one_module():
    """Not every Python has a name for each call: arrowcache/linux.py knows the way round."""
    offenders = []
    for module, path in MODULES.items():
        if module == "arrowcache.linux" or module.startswith("arrowcache.native."):  # has its own library
            continue
        offenders += [
            f"{module}: {ast.unparse(node)}" for node in attributes_of(path) if is_kernel_call(node)
        ]
        allowed = {"ctypes"} if module in OWNERS else set()
        named = {"ctypes", *C_LIBRARIES} & imports_of(path) - allowed
        offenders += [f"{module}: {name}" for name in named]
    assert offenders == []


def is_kernel_call(node: ast.Attribute) -> bool:
    is_lacked = node.attr.startswith(LACKED) and ast.unparse(node.value) in ("os", "signal", "fcntl", "mmap")
    return is_lacked or node.attr in C_LIBRARIES


LIFETIMES = {
    "register_at_fork", "pthread_sigmask", "_register_atexit", "interrupt_main", "set_wakeup_fd", "settrace",
    "finalize",
}  # fmt: skip
"""What only arrowcache/lifetimes.py calls, of `os`, `signal`, `threading`, `_thread` and `weakref`."""
TELL_THEIR_PID = {
    "arrowcache.process": "to a child, which looks whether its parent lives",
    "arrowcache.reading.ranks": "to the other ranks",
    "arrowcache.storage.counters": "to who looks at what this process shows",
}
"""Who asks for this process' number, to tell others. Whether a thing is another process' tells its Origin."""


def test_forks_exits_and_signals_are_seen_to_in_one_module():
    elsewhere = {
        module: path
        for module, path in MODULES.items()
        if module != "arrowcache.lifetimes" and part_of(module) != "explore"
    }
    used = {module: {node.attr for node in attributes_of(path)} for module, path in elsewhere.items()}
    assert [module for module, path in elsewhere.items() if "atexit" in imports_of(path)] == []
    assert [module for module in used if used[module] & LIFETIMES] == ["arrowcache.process"]
    assert {module for module in used if "getpid" in used[module]} == {*TELL_THEIR_PID}


KERNEL = {
    "fcntl": {"linux"},
    "mmap": {"linux", "reading.slots", "storage.counters", "storage.mapping", "torch.pinned_memory"},
    "socket": {"process", "sampling.executors", "storage.locks"},
    "subprocess": {"native.build", "process"},
}
"""Modules of Python that call the kernel, and who imports them: locks, memory, messages, processes."""


def test_what_calls_the_kernel_is_used_where_it_is_named():
    """A lease on another system, slots on huge pages, another way to start processes are two files each."""
    users = {
        library: {
            module.removeprefix("arrowcache.")
            for module, path in MODULES.items()
            if library in imports_of(path) and part_of(module) not in ("explore", "demo")
        }
        for library in KERNEL
    }
    assert users == KERNEL


CONTROL = {
    "arrowcache.pickling": "a user's functions, from a process to those it started, and what they raised",
}
"""Where anything is unpickled, and what: never a file of a cache. torch's queues, loky and Dask pickle alike,
between processes of one user's program: settings, row ids, and what a user's transform made."""
UNTRUSTWORTHY = {
    "pickle",
    "cloudpickle",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "yaml",
    "imp",
    "runpy",
    "code",
}


def test_nothing_is_unpickled_but_what_the_users_own_processes_say():
    assert [module for module, path in MODULES.items() if tops(path) & UNTRUSTWORTHY] == [*CONTROL]


def test_no_text_is_ever_run_as_code():
    """No eval, no import of a computed name, no file format that may hold pickles."""
    names = {"eval", "exec", "compile", "__import__", "import_module", "literal_eval", "system", "popen"}
    files = {"np.load", "numpy.load", "np.save", "torch.load", "pd.read_pickle", "pa.deserialize"}
    offenders = []
    for module, path in MODULES.items():
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                is_method = called.startswith(("self.", "re."))  # a network's eval(), a regular expression
                runs = not is_method and called.rpartition(".")[2] in names
                unpickles = called in files or "allow_pickle" in {keyword.arg for keyword in node.keywords}
                offenders += [f"{module}: {called}"] if runs or unpickles else []
    assert offenders == []


def test_files_of_a_cache_change_in_one_module_only():
    changing = {"rename", "unlink", "link", "mkdir", "rmdir", "remove", "posix_fallocate", "writev",
                "pwrite", "fsync", "ftruncate", "symlink", "write_text", "write_bytes", "touch"}  # fmt: skip
    for module, path in MODULES.items():
        if (  # claims.py writes who makes an item now; the last two have files without a name
            part_of(module) in ("arrow", "storage", "reading", "sampling", "cache")
            and module
            not in (
                "arrowcache.storage.folder",
                "arrowcache.storage.claims",
                "arrowcache.storage.counters",
                "arrowcache.reading.slots",
            )
        ):
            calls = {
                f"{ast.unparse(node.func.value)}.{node.func.attr}"
                for node in nodes_of(path)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in changing
            }
            calls = {
                call
                for call in calls
                if not call.startswith(("self.folder.", "folder.", "store.folder.", "dataclasses."))
            }
            assert not calls, f"{module}: {calls}"


def test_the_exports_are_just_these():
    assert sorted(arrowcache.__all__) == PUBLIC
    shown = {name for name in dir(arrowcache) if not name.startswith("_")}
    assert {name for name in shown if not inspect.ismodule(getattr(arrowcache, name))} == set(PUBLIC)


def test_type_checkers_see_the_same_exports():
    """They do not run `__getattr__`: what they read stands beside it."""
    for_checkers = [
        alias.name
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for alias in statement.names
    ]
    assert sorted(for_checkers) == PUBLIC


def test_every_export_and_each_of_its_methods_is_documented():
    undocumented = []
    for name in PUBLIC:
        thing = getattr(arrowcache, name)
        is_signature = (thing.__doc__ or "").startswith(f"{name}(")  # a dataclass' own is no docstring
        undocumented += [] if inspect.getdoc(thing) and not is_signature else [name]
        is_class = isinstance(thing, type) and not issubclass(thing, Exception)
        methods = vars(thing) if is_class else {}
        undocumented += [
            f"{name}.{method}"
            for method, function in methods.items()
            if inspect.isfunction(function) or isinstance(function, classmethod | staticmethod)
            if not method.startswith("_") and not inspect.getdoc(getattr(thing, method))
        ]
    assert undocumented == []


def test_every_module_says_what_it_is():
    for module, path in MODULES.items():
        assert ast.get_docstring(parsed(path)), module


CLAUSE = re.compile(
    r"(?:\A|Returns: )(?:(?:at |in |of )?which|what|whether|that|where|how|who|when|why)\b", re.IGNORECASE
)
C_COMMENT = re.compile(r"/\*\s*(.*?)\s*\*/", re.DOTALL)


def first_clause(text: str) -> str | None:
    found = CLAUSE.search(" ".join(text.split()))
    return found and found[0]


def test_a_docstring_is_a_sentence_or_a_noun_not_a_clause():
    clauses = [
        f"{module}: {node.value.value}"
        for module, path in MODULES.items()
        if part_of(module) != "explore"
        for node in nodes_of(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if first_clause(str(node.value.value))
    ]
    assert clauses == []


def test_a_comment_on_what_c_code_declares_is_one_too():
    """Comments that begin a line: those behind a member of a structure are nouns as they come."""
    files = sorted((PACKAGE / "native").glob("*.[ch]"))
    comments = {
        path.name: [match for match in C_COMMENT.finditer(path.read_text()) if begins_a_line(match)]
        for path in files
    }
    assert all(comments.values())
    clauses = [f"{name}: {each[0]}" for name in comments for each in comments[name] if first_clause(each[1])]
    assert clauses == []


def begins_a_line(match: re.Match[str]) -> bool:
    return match.string[: match.start()].endswith("\n") or match.start() == 0


def test_a_clause_is_seen_at_the_beginning_and_behind_returns():
    clauses = ("When it began.", "Move it.\n    Returns: whether it moved.", "/* How many there are. */")
    assert all(first_clause(text.removeprefix("/* ")) for text in clauses)
    assert not any(map(first_clause, ("Say when it began.", "Returns: True if it moved.", "Whatever it is.")))


@pytest.mark.slow
def test_the_package_runs_as_the_command_does():
    runs = [
        subprocess.run(
            [sys.executable, "-m", "arrowcache", *arguments], capture_output=True, text=True, timeout=120,
            check=False, env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        )
        for arguments in (["--version"], ["info", "/nowhere"])
    ]  # fmt: skip
    said = [(done.returncode, done.stdout, done.stderr) for done in runs]
    assert said[0] == (0, f"arrowcache {arrowcache.__version__}\n", "")
    assert said[1][2].startswith("arrowcache: ")


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_every_complaint_about_other_loaders_has_its_test():
    """Rows 1 to 20, and 24, of the list that the design answers, and what it says beside them."""
    names = [
        node.name.removeprefix("test_complaint_")
        for path in (Path(__file__).parents[1] / "complaints").glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    rows = {f"{row:02}" for row in (*range(1, 21), 24)}
    assert {name.partition("_")[0] for name in names} == rows | {"also"}
    assert sum(name.startswith("also") for name in names) == 2


def counts_in_text(path: Path) -> Iterator[tuple[ast.FormattedValue, str]]:
    """Each value in an f-string, and the text behind it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            for value, text in itertools.pairwise(node.values):
                if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                    yield value, str(text.value)


def nouns_of_counts() -> set[str]:
    """Those that `format_count` is called with anywhere, as one word and more than one."""
    calls = [
        [each.value for each in node.args[1:] if isinstance(each, ast.Constant)]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "format_count"
    ]
    return {nouns[-1] if len(nouns) > 1 else f"{nouns[0]}s" for nouns in calls if nouns}


NEVER_ONE = {
    "most": "several", "rows": "1 has other words", "len(numbers) - 2": "thousands", "first": "2**62",
    "first.deaths": "MAX_LOSSES", "attempts": "1 has other words",
    "options.workers": "the demo's", "len(digits) - held_out.sum()": "the demo's", "first.rows": "the demo's",
    "self._rank_info.local_world_size": "several", "lengths.max()": "a range's end",
    "sorted(lengths) or 'no'": "a list", "_most_mappings()": "thousands", "step_rows": "above what is there",
    "reader.num_record_batches": "none or several", "len(column.spec.shape)": "several",
    "self.times_served": "with a fraction", "self._timeout_seconds": "seconds", "segment_rows": "no count",
    **dict.fromkeys(("shown(expression)", "shown", "name", "noted", "path", "went"), "a text"),
}  # fmt: skip


def test_a_count_in_a_message_is_one_of_its_noun_or_of_more():
    """Messages said "1 rows": `format_count` gives a number its noun."""
    nouns = "|".join(sorted(nouns_of_counts(), key=len, reverse=True))
    assert "retries" in nouns
    assert "rows" in nouns
    found = [
        f"{path.relative_to(PACKAGE)}:{value.lineno}: {{{ast.unparse(value.value)}}}{text[:30]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for value, text in counts_in_text(path)
        if re.match(rf" (\w+ )?({nouns})\b(?!/)", text)
        and value.conversion != ord("r")
        and not re.match(r"format_\w+\(|_?[A-Z_]+$", written := ast.unparse(value.value))
        and written not in NEVER_ONE
    ]
    assert not found, "\n".join(found)
