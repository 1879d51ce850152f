"""What /proc tells of a process: its command, as a person would name it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from arrowcache.storage.processes import command

WAIT = "import sys; print(flush=True); sys.stdin.read()"


def command_of(name: str, *arguments: str) -> str:
    """What is said of a process that began as this."""
    said = [name, "-I", "-c", WAIT, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(said, executable=sys.executable, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = command(child.pid)
        child.communicate()
    return found


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/opt/somewhere/far/down/bin/python", "python"),  # where it lies tells nobody what it does
        ("python", "python"),
        ("../bin/python", "../bin/python"),
        ("/a title: with / in it", "/a title: with / in it"),  # what a process calls itself, as Ray's do
    ],
)
def test_a_command_begins_with_the_name_of_its_program(name, shown):
    assert command_of(name, "train").startswith(f"{shown} -I -c import sys; ")


def test_a_long_command_is_shortened_at_its_end():
    said = command_of(sys.executable, "x" * 200)
    assert len(said) == 80
    assert said.startswith(Path(sys.executable).name)
    assert said.endswith("xxx...")
