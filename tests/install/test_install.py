"""What pip makes of this checkout: its wheel, its sdist and its repository, in environments of their own.

All is built in a copy: a build leaves nothing in the checkout, and reads nothing that other tests write.
pip fetches packages here, which no other test does. `make test-install` runs those that take seconds, and
`make test-extras` all.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USES = Path(__file__).parent / "uses"
MESSAGES = {
    "torch": ("import arrowcache.torch", "arrowcache.torch needs torch, which is not installed"),
    "tensorflow": (
        "import arrowcache.tensorflow",
        "arrowcache.tensorflow needs tensorflow, which is not installed",
    ),
    "jax": ("import arrowcache.jax", "arrowcache.jax needs jax, which is not installed"),
    "explore": (
        "from arrowcache.explore import sql",
        "arrowcache.explore.sql needs duckdb, which is not installed",
    ),
    "ray": ("import arrowcache.ray", "arrowcache.ray needs ray, which is not installed"),
    "sources": (
        "from arrowcache.sampling.sources import ArrayWindows; ArrayWindows('numbers.h5#x', window=(1,))",
        "needs h5py",
    ),
    "demo": ("import arrowcache.demo", "the demo needs torch, which is not installed"),
}
"""Extra -> what needs it, and what that says without it, before the command that installs the extra."""


class Environment:
    """A virtual environment with nothing in it: pip installs into it from outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)

    def install(self, *asked: str, versions: str = "newest") -> None:
        """What a user asks of pip, held to the versions that everything else is tested with."""
        held = constraints(self.folder.parent, versions)
        self.pip("install", "--quiet", "--no-compile", *held, *asked)
        self.pip("check")

    def pip(self, *arguments: str) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=self.folder)

    def run(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run(self.python, *arguments, cwd=self.folder, check=check)

    def use(self, name: str) -> None:
        self.run(USES / f"{name}.py")


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command that finds nothing of this checkout or of this environment by itself."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=1200,
        stdin=subprocess.DEVNULL, env=inherited | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )  # fmt: skip
    assert done.returncode == 0 or not check, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def constraints(folder: Path, name: str) -> list[str]:
    """The versions of an environment of the Makefile, as pip is told of them."""
    frozen = (ROOT / "constraints" / f"{name}.txt").read_text()
    path = folder / "constraints.txt"  # tensorflow-cpu is another build of the same
    path.write_text(re.sub("^tensorflow[_-]cpu==", "tensorflow==", frozen, flags=re.MULTILINE))
    return [f"--constraint={each}" for each in (path, ROOT / "constraints" / "common.txt")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout without what git ignores, to build in."""
    lines = (ROOT / ".gitignore").read_text().splitlines()
    ignored = [line.strip("/").rpartition("/")[2] for line in lines if not line.startswith("#")]
    folder = tmp_path_factory.mktemp("source") / "arrowcache"
    return shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", *ignored))


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pip can be asked to install: kind -> a path or a URL."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "hatchling", "build", "--directory", folder, cwd=source)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {
        "wheel": str(wheel),
        "sdist": str(sdist),
        "git": f"git+{ROOT.as_uri()}",
        "checkout": str(source),
    }


@pytest.fixture
def environment(tmp_path: Path):
    yield Environment(tmp_path / "environment")
    shutil.rmtree(tmp_path)  # gigabytes, all together


def lacks(environment: Environment, extra: str) -> str:
    """What is said where the extra is needed; it is checked to say how to install it."""
    statement, message = MESSAGES[extra]
    done = environment.run("-c", statement, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1, (statement, done.stderr)
    assert message in last, last
    assert f"pip install 'arrowcache[{extra}]'" in last, last
    return last


def test_the_wheel_works_by_itself_says_what_each_extra_is_needed_for_and_an_extra_can_follow(
    built, environment
):
    environment.install(built["wheel"])
    environment.use("core")
    for extra in MESSAGES:
        lacks(environment, extra)
    command = environment.folder / "bin" / "arrowcache"
    assert run(command, "--version", cwd=environment.folder).stdout.startswith("arrowcache ")
    done = run(command, "info", "nowhere", cwd=environment.folder, check=False)
    assert done.returncode == 2
    assert "pip install 'arrowcache[explore]'" in done.stderr
    environment.install("arrowcache[sources]")  # as the message says: no index need know the package
    environment.use("with_sources")


@pytest.mark.parametrize("kind", ["sdist", "git", "checkout"])
def test_a_source_installs_and_works(built, environment, kind):
    if kind == "git" and not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    environment.install(built[kind])
    environment.use("core")


def test_an_sdist_has_all_that_the_wheel_has_and_the_tests(built, tmp_path):
    shutil.unpack_archive(built["sdist"], tmp_path / "sdist")
    (source,) = (tmp_path / "sdist").iterdir()
    shutil.unpack_archive(built["wheel"], tmp_path / "wheel", "zip")
    packaged = {path.relative_to(tmp_path / "wheel") for path in (tmp_path / "wheel/arrowcache").rglob("*.*")}
    assert packaged
    assert [path.name for path in packaged if not (source / path).exists()] == ["libengine.so"]
    for needed in (
        "Makefile", "pyproject.toml", "constraints/newest.txt", "tests/install/test_install.py",
        "arrowcache/native/engine.c", "arrowcache/native/engine.h", "arrowcache/native/build.py",
        "arrowcache/native/order.c", "arrowcache/native/order.h",
        "arrowcache/native/draw.c", "arrowcache/native/draw.h",
        "arrowcache/native/maps.c", "arrowcache/native/maps.h",
    ):  # fmt: skip
        assert (source / needed).exists()


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    """Nothing that compiles is found."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CC", raising=False)


def test_a_release_has_a_wheel_for_each_platform_that_needs_no_compiler(
    source, tmp_path, environment, monkeypatch
):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{ROOT / '.envs/uv/bin'}")  # make has brought uv before
    done = run("make", "wheels", cwd=source)
    wheels = {path.stem.split("-")[-1]: path for path in (source / "dist").glob("*.whl")}
    assert sorted(wheels) == ["manylinux_2_28_aarch64", "manylinux_2_28_x86_64"]
    for platform in wheels:  # as auditwheel found them: of that processor, and of an older C library
        machine = platform.removeprefix("manylinux_2_28_")
        found = re.findall(rf'platform\s+tag:\s+"manylinux_2_(\d+)_{machine}"', done.stdout)
        assert [int(minor) <= 28 for minor in found] == [True], done.stdout
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    environment.install(str(wheels[f"manylinux_2_28_{os.uname().machine}"]))
    environment.use("core")


def test_a_build_where_nothing_compiles_says_what_to_install(source, no_compiler, tmp_path):
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    if importlib.util.find_spec("ziglang"):
        pytest.skip("ziglang is installed, and compiles")
    command = sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path
    done = run(*command, cwd=source, check=False)
    assert done.returncode == 1
    assert (
        "no C compiler was found: install gcc or clang, or `pip install ziglang`"
        in done.stderr.splitlines()[-1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sdist", "checkout"])
def test_a_source_installs_where_nothing_compiles(built, environment, no_compiler, kind):
    environment.install(built[kind])  # pip brings a compiler
    environment.use("core")


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(MESSAGES))
def test_the_wheel_with_one_extra_does_what_that_is_for(built, environment, extra):
    versions = extra if extra in ("jax", "tensorflow") else "newest"
    environment.install(f"{built['wheel']}[{extra}]", versions=versions)
    environment.use("core")
    if extra == "demo":
        environment.run("-m", "arrowcache.demo", "--capacity=64MiB", "--epochs=14", "--seconds=200")
    else:
        environment.use(f"with_{extra}")
