"""Installs as pip would: by uv, which takes a fifth of the time, or where it is missing by pip.

    python constraints/install.py ENVIRONMENT [--constraint FILE ...] REQUIREMENT ...

uv is told where pip is configured to look: find-links, indexes and constraints. So a build of torch that pip
would take comes by uv, too. INSTALLER=pip takes pip alone.
"""

from __future__ import annotations

import ast
import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

LISTS = {"find-links": "--find-links", "extra-index-url": "--extra-index-url", "constraint": "--constraint"}
CUDA = re.compile(r"^ *\+ *(nvidia-|cuda-)", re.MULTILINE)
NOTE = """\
note: PyTorch comes with CUDA here: 2.5 GB to download, 5 GB on the disk. For a build without it set
PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to where one is: README, "Install".
"""


def configured() -> list[str]:
    """Return where pip is configured to look, as options of uv. Variables of the shell replace files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, str] = {}
    for line in sorted(listed.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = ast.literal_eval(value)
    options = []
    for key, option in LISTS.items():
        options += [word for value in found.get(key, "").split() for word in (option, value)]
    if "index-url" in found:
        options += ["--default-index", found["index-url"]]
    return options


def uv() -> str | None:
    """Return the uv of the path, or of an environment of its own. None: pip brings none."""
    if os.environ.get("INSTALLER") == "pip":
        return None
    if found := shutil.which("uv"):
        return found
    ours = Path(".envs/uv/bin/uv")
    with open(".envs/uv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # environments are made side by side
        if not ours.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", ".envs/uv"], check=True)
            pip = [".envs/uv/bin/python", "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, "--constraint", "constraints/uv.txt", "uv"], check=False)
    return str(ours) if ours.exists() else None


def main() -> int:
    environment, *wishes = sys.argv[1:]
    python = f"{environment}/bin/python"
    found = uv()
    if found is None:
        pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
        return subprocess.run([*pip, *wishes], check=False).returncode
    command = [found, "pip", "install", "--python", python, "--index-strategy", "unsafe-best-match"]
    command += [*configured(), *wishes]
    if any("torch" in wish or wish.startswith(".[") for wish in wishes):
        planned = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=False)
        if CUDA.search(planned.stderr):
            sys.stderr.write(NOTE)
    return subprocess.run([*command, "--quiet"], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
