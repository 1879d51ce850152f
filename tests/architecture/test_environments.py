"""The environments of the Makefile: what pip may install is pinned, and on every platform alike."""

from __future__ import annotations

import re
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints"
PIN = re.compile(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.!]*)")
REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?\s*==[^,;]+(?:;|\)|$)")

pytestmark = pytest.mark.skipif(not (CONSTRAINTS / "common.txt").exists(), reason="this is not a checkout")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lines(name: str) -> list[str]:
    text = (CONSTRAINTS / f"{name}.txt").read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pinned(name: str) -> set[str]:
    matches = [PIN.fullmatch(line) for line in lines(name)]
    return {normal(match[1]) for match in matches if match}


FILES = sorted(path.stem for path in CONSTRAINTS.glob("*.txt"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_constraints_pins_each_package_once_at_a_version_of_no_one_build(name):
    for line in lines(name):
        assert PIN.fullmatch(line), f"{name}.txt: {line}"
    assert len(pinned(name)) == len(lines(name))


@pytest.mark.parametrize("name", [name for name in FILES if name != "common"])
def test_what_is_frozen_holds_nothing_that_only_one_build_of_torch_brings(name):
    builds = {each for each in pinned(name) if re.match(r"(cuda|nvidia|triton|torch$)", each)}
    assert not builds, "torch pins these itself, or common.txt does"


def test_each_environment_of_the_makefile_has_its_constraints_and_each_file_its_environment():
    makefile = (ROOT / "Makefile").read_text()
    listed = {match[1] for match in re.finditer(r"^([a-z0-9.-]+) := (?:\.\[|[a-z])", makefile, re.MULTILINE)}
    assert listed == set(FILES) - {"common"}


def test_every_package_of_this_environment_is_pinned_by_a_file_or_by_one_that_is():
    name = Path(sys.prefix).name
    if name not in FILES or Path(sys.prefix).parent.name != ".envs":
        pytest.skip("this interpreter is of no environment that make built")
    folder = sysconfig.get_path("purelib")  # not sys.path: setuptools, once imported, adds what it has inside
    installed = {normal(each.metadata["Name"]): each for each in distributions(path=[folder])}
    installed = {each: it for each, it in installed.items() if each not in ("pip", "arrowcache")}
    exactly = {
        normal(match[1])
        for each in installed.values()
        for requirement in each.requires or ()
        if (match := REQUIREMENT.match(requirement))
    }
    assert not sorted(installed.keys() - pinned(name) - pinned("common") - exactly)
