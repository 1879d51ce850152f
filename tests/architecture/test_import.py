"""`import arrowcache`: what it loads, what its names bring with them, and where it refuses."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import arrowcache

PACKAGE = Path(arrowcache.__file__).parent
UNUSED = {
    "asyncio", "cloudpickle", "dask", "difflib", "jax", "loky", "multiprocessing", "pandas", "pickle", "ray",
    "sklearn", "subprocess", "tempfile", "tensorflow", "torch", "tqdm",
}  # fmt: skip
"""What a cache, and a loader without worker processes, do without."""


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter, which finds this package."""
    return subprocess.run(
        [sys.executable, "-W", "error", *words], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment},
    )  # fmt: skip


def run(*lines: str) -> str:
    done = python("-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(*lines: str) -> set[str]:
    """Modules that some lines load beside those of NumPy and pyarrow, in a new interpreter."""
    before = "import sys, numpy, pyarrow; before = {*sys.modules}"
    return set(run(before, *lines, "print(*{*sys.modules} - before)").split())


def tops(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def parts(modules: set[str]) -> set[str]:
    """Of the package: its modules and folders at the top."""
    return {module.split(".")[1] for module in modules if module.startswith("arrowcache.")}


# what is loaded


def test_importing_the_package_loads_nothing_beside_it():
    """Each module costs a millisecond or so, sampling with its process pools fifty."""
    assert loaded_by("import arrowcache") == {"arrowcache"}


def test_importing_the_package_starts_no_thread():
    assert run("import threading, arrowcache; print(threading.active_count())") == "1\n"


def test_a_public_name_loads_no_framework_and_no_process_pool():
    """Each name is used in a child of one interpreter that has imported the package alone."""
    said = run(
        "import os, sys, numpy, pyarrow, warnings; before = {*sys.modules}",
        "import arrowcache",
        "warnings.simplefilter('ignore')",  # of the fork beside threads of NumPy's
        "for name in arrowcache.__all__:",
        "    if not os.fork():",
        "        getattr(arrowcache, name)",
        "        print(name, *{*sys.modules} - before, flush=True)",
        "        os._exit(0)",
        "    os.wait()",
    )
    loaded = {line.split()[0]: {*line.split()[1:]} for line in said.splitlines()}
    assert loaded.keys() == {*arrowcache.__all__}
    assert {name: found for name in loaded if (found := tops(loaded[name]) & UNUSED)} == {}
    other = {"Loader": "sampling", "Cache": "sampling", "SamplerPool": "reading", "Rows": "reading"}
    assert [name for name in other if other[name] in parts(loaded[name])] == []


def test_errors_and_schemas_come_without_storage_and_reading():
    loaded = loaded_by("from arrowcache import CacheFullError, Schema, Tensor")
    assert parts(loaded) == {"arrow", "display", "errors", "lifetimes", "units"}


def test_using_a_cache_loads_no_framework_and_no_process_pool(tmp_path):
    loaded = loaded_by(
        "import arrowcache as ac",
        "schema = {'x': ac.Tensor('int64')}",
        f"cache = ac.Cache.create({str(tmp_path / 'c')!r}, schema, '1MiB', segment_rows=8)",
        "with cache.writer() as writer:",
        "    writer.extend(x=numpy.arange(10))",
        "for options in ({}, {'transform': dict, 'workers': 1, 'worker_type': 'thread'}):",
        "    with ac.Loader(cache, batch_size=5, **options) as loader:",
        "        assert sum(int(batch['x'].sum()) for batch in loader) == 45",
    )
    assert not tops(loaded) & UNUSED
    assert not {module for module in loaded if module.startswith("arrowcache.reading.workers.")}
    assert "sampling" not in parts(loaded)


@pytest.mark.slow
def test_a_pool_on_an_executor_of_the_users_loads_no_process_pool(tmp_path):
    loaded = loaded_by(
        "import arrowcache as ac",
        "from concurrent.futures import ThreadPoolExecutor",
        "def draw(rng):",
        "    yield {'x': 1}",
        "schema = {'x': ac.Tensor('int64')}",
        f"cache = ac.Cache.create({str(tmp_path / 'c')!r}, schema, '1MiB', segment_rows=8)",
        "with ThreadPoolExecutor(1) as executor:",
        "    with ac.SamplerPool(cache, draw, executor=executor, segments=1, progress=False) as pool:",
        "        pool.wait(timeout=60)",
    )
    assert not tops(loaded) & {"loky", "torch"}
    assert not loaded & {"arrowcache.process", "arrowcache.sampling.workers"}


@pytest.mark.slow
def test_ready_samplers_load_no_reader_before_they_need_it():
    loaded = loaded_by("from arrowcache.sampling.sources import *")
    assert not tops(loaded) & {"zarr", "h5py", "fsspec", "pandas", "PIL", "torch", "tensorflow", "jax"}
    for name, module in (("ParquetRows", "parquet"), ("ArrayWindows", "windows"), ("Items", "items")):
        loaded = loaded_by(f"from arrowcache.sampling.sources import {name}; {name}.__doc__")
        others = {"parquet", "windows", "items", "shards"} - {module}
        assert not loaded & {f"arrowcache.sampling.sources.{other}" for other in others}
        assert "pandas" not in tops(loaded), "a worker process waits for it, and so does the first batch"


# the names


def test_a_name_that_is_none_is_an_attribute_error_that_knows_a_better_one():
    with pytest.raises(AttributeError, match="module 'arrowcache' has no attribute 'Cach'") as raised:
        arrowcache.Cach  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("Cach", arrowcache)
    assert "Did you mean: 'Cache'?" in python("-c", "import arrowcache; arrowcache.Cach").stderr
    assert not hasattr(arrowcache, "__wrapped__")


def test_names_are_listed_before_they_are_used():
    missing = "{*arrowcache.__all__, '__version__', '__doc__', '__path__'} - {*dir(arrowcache)}"
    assert run("import arrowcache", f"print({missing})") == "set()\n"


def test_everything_can_be_imported_by_a_star():
    script = "from arrowcache import *", "import arrowcache", "print({*arrowcache.__all__} - {*globals()})"
    assert run(*script) == "set()\n"


def test_help_shows_every_public_name():
    text = run("import arrowcache", "help(arrowcache)")
    assert "General layout, from top to bottom" in text
    classes = text[text.index("CLASSES") : text.index("    class ")]
    assert [name for name in arrowcache.__all__ if f".{name}" not in classes] == ["metrics"]
    assert "    metrics(cache:" in text[text.index("\nFUNCTIONS") :]


def test_a_name_is_looked_up_once():
    assert arrowcache.Cache is vars(arrowcache)["Cache"], "from then on no function is called"


@pytest.mark.slow
def test_a_first_use_without_a_descriptor_left_names_the_way_out_and_can_be_tried_again():
    script = (
        "import os, resource, arrowcache",
        "arrowcache.Cache",
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1, hard))",
        "try:",
        "    arrowcache.SamplerPool",
        "except OSError as error:",
        "    print('ulimit -n' in str(error))",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))",
        "print(arrowcache.SamplerPool.__name__)",
    )
    assert run(*script) == "True\nSamplerPool\n"


@pytest.mark.parametrize("use", ["arrowcache.explore.observe", "cache.dataset()"])
def test_a_first_import_within_a_use_names_it_too(tmp_path, use):
    script = (
        "import os, resource, arrowcache, arrowcache.explore",
        "schema = {'x': arrowcache.Tensor('int8')}",
        f"cache = arrowcache.Cache.create({str(tmp_path / 'c')!r}, schema, '1MiB')",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1, 4096))",
        "try:",
        f"    {use}",
        "except OSError as error:",
        "    print('ulimit -n' in str(error))",
    )
    assert run(*script) == "True\n"


@pytest.mark.slow
def test_an_editor_that_reads_the_source_knows_the_names():
    jedi = pytest.importorskip("jedi", reason="jedi is not installed")
    source = "import arrowcache as ac\nac.\nac.Cache.cre"
    script = jedi.Script(source, environment=jedi.InterpreterEnvironment())
    assert {*arrowcache.__all__} <= {found.name for found in script.complete(2, 3)}
    assert [found.name for found in script.complete(3, 12)] == ["create"]


@pytest.mark.parametrize("name", arrowcache.__all__)
def test_a_class_is_pickled_by_where_it_is_defined(name):
    thing = getattr(arrowcache, name)
    assert thing.__module__.startswith("arrowcache.")
    assert pickle.loads(pickle.dumps(thing)) is thing


def test_what_was_pickled_loads_where_nothing_was_imported(tmp_path):
    values = [
        arrowcache.Schema({"x": arrowcache.Tensor("float32", (2,))}),
        arrowcache.Pace(samples_per_insert=2.0),
    ]
    (tmp_path / "pickled").write_bytes(pickle.dumps(values))
    script = f"import pickle; print(pickle.load(open({str(tmp_path / 'pickled')!r}, 'rb')))"
    assert run("import warnings; warnings.simplefilter('ignore')", script) == f"{values}\n"


def test_threads_that_use_a_name_for_the_first_time_at_once_get_the_same():
    script = (
        "import threading, arrowcache",
        "found, start = [], threading.Barrier(16)",
        "def use(name):",
        "    start.wait()",
        "    found.append((name, getattr(arrowcache, name)))",
        "names = ['Cache', 'Loader', 'SamplerPool', 'Writer'] * 4",
        "threads = [threading.Thread(target=use, args=(name,)) for name in names]",
        "for thread in threads: thread.start()",
        "for thread in threads: thread.join()",
        "print(len(found), len({*found}))",
    )
    assert run(*script) == "16 4\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["reading.loader", "sampling.pool", "reading.workers.worker", "storage.store"]
)
def test_a_module_can_be_imported_before_all_others(module):
    assert run(f"import arrowcache.{module}") == ""


# elsewhere

ELSEWHERE = """
import sys

sys.platform = {platform!r}
for name in ("fcntl", "resource", "termios", "pwd"):
    sys.modules[name] = None  # is not there


class Watch:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in ("arrowcache", "sitecustomize", "usercustomize"):
            print("looked for", name)


sys.meta_path.insert(0, Watch())
"""
"""The beginning of an interpreter that takes itself to be on another system."""


@pytest.mark.parametrize("platform", ["darwin", "win32"])
@pytest.mark.parametrize("module", ["arrowcache", "arrowcache.torch", "arrowcache.linux", "arrowcache.cli"])
def test_elsewhere_than_on_linux_one_sentence_says_that_it_needs_linux(platform, module):
    script = ELSEWHERE.format(platform=platform)
    script += f"try:\n    import {module}\nexcept ImportError as error:\n    print(error)\n"
    done = python("-S", "-c", script)
    assert done.stdout == (
        f"arrowcache needs Linux, and this is {platform}: it rests on the kernel's open-file-description "
        "locks, memory maps and /proc; use it in a container, a virtual machine or WSL\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_command_says_elsewhere_that_it_needs_linux(platform, tmp_path):
    """As the script runs it that pip writes: what follows a traceback of two lines is that sentence."""
    script = ELSEWHERE.format(platform=platform) + "from arrowcache.cli import main\nsys.exit(main())\n"
    done = python("-S", "-c", script, "info", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"ImportError: arrowcache needs Linux, and this is {platform}: "
    )
