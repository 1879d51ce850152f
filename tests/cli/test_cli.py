"""The `arrowcache` command: what it prints, its exit codes, and errors without a traceback."""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc
import pytest
from helpers import DEADLINE_SECONDS, KIB, flip_byte, make_cache, publish, segment_files, seqs, wait_until

import arrowcache as ac
from arrowcache.cli import INTERRUPTED, OK, USAGE, WRONG, complain

if TYPE_CHECKING:
    from typing import Self

pytest.importorskip("typer", reason="the extra 'explore' is not installed")


def table(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


def start(
    *arguments: object, warnings: str = "error", within: Sequence[str] = (), **options
) -> subprocess.Popen:
    """The command as a shell starts it, `within` another command."""
    paths = os.pathsep.join(path for path in sys.path if path)
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": {**os.environ, "PYTHONPATH": paths, "COLUMNS": "100"},
    } | options
    command = [*within, sys.executable, "-W", warnings, "-m", "arrowcache", *map(str, arguments)]
    return subprocess.Popen(command, text=True, **options)


def ask(*arguments: object) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


# of the shell


@pytest.mark.slow
def test_a_script_gets_exit_codes_and_one_sentence(cache, tmp_path):
    assert ask("ls", cache.path)[::2] == (OK, "")
    flip_byte(segment_files(cache)[3], 9000)
    code, out, err = ask("verify", cache.path)
    assert (code, err) == (WRONG, "")
    assert len(table(out)) == 2
    code, out, err = ask("info", tmp_path / "missing")
    assert (code, out) == (USAGE, "")
    assert err == f"arrowcache: {tmp_path / 'missing'}: no cache here: make one with arrowcache create\n"


@pytest.mark.slow
def test_who_reads_no_further_hears_no_complaint(cache):
    publish(cache, 30)
    process = start("ls", cache.path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == OK
    process.stderr.close()


@pytest.mark.slow
def test_ctrl_c_ends_a_watch_well(cache):
    process = start("watch", cache.path, "--interval", "0.05", start_new_session=True)
    assert process.stdout is not None
    assert "160 rows" in process.stdout.readline()
    assert "160 rows" in process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == OK


@pytest.mark.slow
def test_ctrl_c_ends_another_command_quietly(cache):
    """One that waits for cache.lock."""
    with cache.store.locked():
        process = start("evict", cache.path, "64KiB", start_new_session=True)
        wait_until(
            lambda: str(cache.path / "cache.lock") in links_of(process.pid),
            "the command to wait for the lock",
        )
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (INTERRUPTED, "")


@pytest.mark.slow
def test_a_cache_that_vanishes_meanwhile_is_one_sentence(cache):
    with cache.store.locked():
        process = start("evict", cache.path, "64KiB")
        wait_until(
            lambda: str(cache.path / "cache.lock") in links_of(process.pid),
            "the command to wait for the lock",
        )
        cache.path.rename(cache.path.with_name("elsewhere"))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (USAGE, "", 1)
    assert "moved or removed while in use" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"), [(["ls"], OK), (["--help"], OK), (["--version"], OK), (["nonsense"], USAGE)]
)
def test_a_stream_that_the_shell_closed_is_nowhere(cache, arguments, code):
    arguments = [*arguments, str(cache.path)] if arguments == ["ls"] else arguments
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        process = start(*arguments, within=["sh", "-c", f'exec "$@" {closed}', "sh"])
        _, err = process.communicate(timeout=120)
        assert process.returncode == code
        assert "Traceback" not in err
        assert "Warning" not in err


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["ls"], ["head", "--json"], ["--version"]])
def test_output_that_cannot_be_written_is_one_sentence(cache, arguments):
    arguments = arguments if arguments == ["--version"] else [*arguments, cache.path]
    process = start(*arguments, within=["sh", "-c", 'exec "$@" >/dev/full', "sh"])
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (WRONG, "arrowcache: the output: No space left on device\n")


@pytest.mark.slow
def test_an_error_that_nobody_reads_has_its_exit_code(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    process = start("info", tmp_path / "missing", stderr=writer)
    os.close(writer)
    assert process.communicate(timeout=120) == ("", None)
    assert process.returncode == USAGE


def test_what_is_written_after_an_error_that_nobody_reads_does_not_change_the_exit_code(monkeypatch):
    """What an interpreter cannot flush when it ends makes its exit code 120."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        complain("something is wrong")
        stream.write("more")
        stream.flush()


@pytest.mark.parametrize("stream", ["closed", "with `write` alone"])
def test_a_complaint_to_a_stream_that_takes_none_is_no_error(monkeypatch, stream):
    taken: list[str] = []
    streams = {"closed": io.StringIO(), "with `write` alone": SimpleNamespace(write=taken.append)}
    streams["closed"].close()
    monkeypatch.setattr(sys, "stderr", streams[stream])
    complain("something is wrong")
    assert taken == ["arrowcache: something is wrong\n"] * (stream != "closed")


def links_of(pid: int) -> list[str]:
    try:
        return [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(package):
    code = (
        f"import sys; sys.modules[{package!r}] = None\nfrom arrowcache.cli import main\nsys.exit(main({{}}))"
    )
    for arguments, returned in ((["info", "/x"], USAGE), (["--version"], OK)):
        done = subprocess.run(
            [sys.executable, "-c", code.format(arguments)], capture_output=True, text=True, timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}, check=False,
        )  # fmt: skip
        assert done.returncode == returned
        assert "Traceback" not in done.stderr
        assert ("pip install 'arrowcache[explore]'" in done.stderr) == (returned == USAGE)


def test_as_a_module_it_says_the_same_without_the_extra():
    code = (
        "import runpy, sys; sys.modules['typer'] = None; sys.argv[1:] = ['info', '/x']\n"
        "runpy.run_module('arrowcache', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert done.stderr == (
        "arrowcache: the command needs typer, which is not installed: pip install 'arrowcache[explore]'\n"
    )


@pytest.mark.slow
def test_the_demo_is_run_in_its_place_and_has_options_of_its_own(cache):
    pytest.importorskip("sklearn", reason="the extra 'demo' is not installed")
    code, _, err = ask("demo", "--epochs", "many")
    assert code == 2
    assert "invalid int value: 'many'" in err


# in a terminal


class Terminal:
    """A terminal of so many columns, and one command in it; a context manager that ends both."""

    def __init__(self, columns: int, *arguments: object, **environment: str) -> None:
        self._fd, of_command = pty.openpty()
        fcntl.ioctl(of_command, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = start(
            *arguments, stdin=of_command, stdout=of_command, stderr=of_command, start_new_session=True,
            env=inherited | {"PYTHONPATH": paths, "TERM": "xterm-256color"} | environment,
        )  # fmt: skip
        os.close(of_command)
        self._read = b""

    def read_until(self, text: str) -> str:
        """What it shows, from where the last such text was up to this one."""
        while text.encode() not in self._read:
            assert self._read_more(), f"it ended: {self._read.decode()}"
        before, found, self._read = self._read.partition(text.encode())
        return (before + found).decode()

    def interrupt(self) -> None:
        """Ctrl-C: the command's process group gets it."""
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """The exit code, and what it shows up to the end."""
        while self._read_more():
            pass
        return self._process.wait(DEADLINE_SECONDS), self._read.decode()

    def _read_more(self) -> bool:
        readable, _, _ = select.select([self._fd], [], [], DEADLINE_SECONDS)
        assert readable, f"it shows nothing more: {self._read.decode()}"
        try:
            more = os.read(self._fd, 1 << 16)
        except OSError:  # that is how a terminal says that nobody writes to it any more
            return False
        self._read += more
        return bool(more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self._process.kill()
        self._process.wait(DEADLINE_SECONDS)


def shown_by(columns: int, *arguments: object) -> tuple[int, str]:
    """The exit code of a command, and what a terminal of so many columns shows of it."""
    with Terminal(columns, *arguments) as terminal:
        return terminal.end()


def without_bold(text: str) -> str:
    return text.replace("\x1b[1m", "").replace("\x1b[0m", "")


@pytest.mark.slow
def test_a_table_has_lines_in_a_terminal_and_fits_it(cache):
    code, text = shown_by(100, "ls", cache.path)
    lines = without_bold(text).splitlines()
    assert code == OK
    assert len(lines) == 3 + 10 + 1
    assert {len(line) for line in lines} == {len(lines[-1])}
    assert len(lines[-1]) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("columns", [50, 20, 8])
def test_a_terminal_too_narrow_for_a_table_gets_a_list(cache, columns):
    code, text = shown_by(columns, "ls", cache.path)
    lines = without_bold(text).splitlines()
    assert code == OK
    assert max(map(len, lines)) <= columns
    assert lines.count("") == 9, "between ten segments"
    cells = "".join("".join(lines).split())
    for row in json.loads(ask("ls", "--json", cache.path)[1]):
        assert f"seq:{row['seq']}rows:16bytes:{row['bytes']}" in cells


@pytest.mark.slow
def test_text_of_a_cache_does_not_move_the_cursor_of_a_terminal(tmp_path):
    pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    cache = make_cache(tmp_path / "cache", {"name": ac.String()})
    with cache.writer() as writer:
        writer.append(name="a\x1b[2Jb\nc")
    for columns in (80, 8):
        code, text = shown_by(columns, "head", cache.path)
        assert code == OK
        assert "\x1b[2J" not in text
        assert "a\\x1b[2Jb\\nc" in without_bold(text).replace("\r\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_ctrl_c_ends_a_watch_in_a_terminal(cache, environment):
    with Terminal(100, "watch", cache.path, "--interval", "0.05", **environment) as terminal:
        shown = terminal.read_until("160 rows,") + terminal.read_until("160 rows,")
        terminal.interrupt()
        code, rest = terminal.end()
    shown += rest
    assert code == OK, shown
    assert "Traceback" not in shown
    assert ("\x1b" in shown) == ("TERM" not in environment)
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == int("TERM" not in environment), (
        "the cursor"
    )


# of each command


@pytest.mark.slow
def test_help_and_version(call):
    code, out, _ = call()
    assert code == OK
    for command in ("info", "ls", "head", "sql", "describe", "verify", "evict", "resize", "watch", "demo",
                    "export", "import", "create"):  # fmt: skip
        assert command in out
        if command != "demo":
            assert call(command, "--help")[0] == OK
    assert call("--version") == (OK, f"arrowcache {ac.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["ls"], ["ls", "a", "b"], ["ls", "--nope", "a"], ["head", "a", "-n", "0"]]
)
def test_wrong_usage_is_a_sentence(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (USAGE, "")
    assert err.startswith("arrowcache: ")
    assert err.endswith(". See 'arrowcache --help'.\n")
    assert err.count("\n") == 1
    assert ".." not in err


def test_the_exit_codes_are_in_the_help_and_the_reference(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    reference = (Path(__file__).parents[2] / "docs/reference/command-line.md").read_text()
    help_text = " ".join(call("--help")[1].split())
    for code, meaning in ((OK, "all is well"), (WRONG, "something is wrong"), (USAGE, "wrong usage"),
                          (INTERRUPTED, "Ctrl-C")):  # fmt: skip
        assert f"{code} {meaning}" in help_text
        assert f"| {code} | {meaning}" in reference


LOOKS = ("info", "ls", "head", "describe", "metrics", "verify", "export", "evict", "resize", "watch", "sql")


def arguments_of(command: str, path: Path) -> list[object]:
    """A command that would work on a cache."""
    more = {"export": [path.parent / "out"], "evict": ["64KiB"], "resize": ["1MiB"], "watch": ["--once"],
            "sql": ["select 1"]}  # fmt: skip
    return [command, path, *more.get(command, [])]


@pytest.mark.slow
@pytest.mark.parametrize("command", LOOKS)
def test_no_cache_a_file_or_no_permission_is_one_sentence_of_each_command(
    call, tmp_path, command, monkeypatch
):
    pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    (tmp_path / "file").touch()

    def refuse(path, *arguments, **options):
        if os.path.basename(path) == "lease.lock":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    opened = os.open
    for name, code, says in (
        ("missing", USAGE, "no cache here"),
        ("file", WRONG, "is not a cache: a cache is a folder"),
        ("secret", WRONG, "lease.lock: Permission denied"),
    ):
        if name == "secret":
            make_cache(tmp_path / name)
            monkeypatch.setattr(os, "open", refuse)
        returned, out, err = call(*arguments_of(command, tmp_path / name))
        assert (returned, out, err.count("\n")) == (code, "", 1), err
        assert err.startswith(f"arrowcache: {tmp_path / name}")
        assert says in err
    assert {path.name for path in tmp_path.iterdir()} == {"file", "secret"}


def test_a_folder_of_something_else_is_wrong(call, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = call("ls", tmp_path)
    assert (code, err) == (WRONG, f"arrowcache: {tmp_path} is not a cache: it has no cache.json\n")


def test_info_says_what_is_there_and_who_uses_it(call, cache):
    code, out, err = call("info", cache.path)
    assert (code, err) == (OK, "")
    facts = dict(table(out)[1:])
    assert facts["segments"] == "10 (0 to 9)"
    assert facts["capacity"] == "1.0 MiB"
    assert facts["column image"] == "float32[16, 16]"
    assert facts["schema"] == "id: int64, image: float32[16, 16]"
    with cache.snapshot(lambda segment: segment.seq >= 8), ac.Loader(cache, 16) as loader:
        assert next(iter(loader))
        facts = table(call("info", cache.path)[1])[1:]
        code, out, _ = call("info", cache.path, "--json")
    me = f"pid {os.getpid()} ("
    assert [value for name, value in facts if name == "lease" and value.startswith(me)]
    assert any(value.endswith("2 segments (8 to 9)") for name, value in facts if name == "lease")
    assert [value for name, value in facts if name == "loader" and value.startswith(me)]
    facts = json.loads(out)
    assert (code, facts["rows"], facts["segments"], facts["next_seq"]) == (OK, 160, 10, 10)
    assert {lease["pid"] for lease in facts["leases"]} == {os.getpid()}
    assert ac.Schema.from_json(facts["schema"]) == cache.schema


def test_info_says_how_many_rows_are_excluded_or_tagged(call, cache):
    cache.exclude(["0:1", "3:2"])
    cache.tag(["3:2"], "hard")
    notes = [value for name, value in table(call("info", cache.path)[1])[1:] if name == "notes"]
    assert notes == ["2 rows excluded", "1 row tagged hard"]
    cache.exclude(where=pc.field("id") < 8, reason="dark")
    assert "excluded where (id < 8): dark" in call("info", cache.path)[1]


def test_info_of_an_empty_cache(call, tmp_path):
    make_cache(tmp_path / "empty")
    assert "0 (none)" in call("info", tmp_path / "empty")[1]
    assert json.loads(call("info", tmp_path / "empty", "--json")[1])["oldest_published"] is None


def test_ls_lists_segments_oldest_first(call, cache):
    with cache.snapshot(lambda segment: segment.seq == 9):
        _, out, _ = call("ls", cache.path)
        _, as_json, _ = call("ls", cache.path, "--json")
    columns, *rows = table(out)
    assert columns[:4] == ["seq", "rows", "bytes", "allocated_bytes"]
    assert [row[0] for row in rows] == [str(seq) for seq in range(10)]
    assert rows[0][2] == str(segment_files(cache)[0].stat().st_size)
    assert [row["leased"] for row in json.loads(as_json)] == [False] * 9 + [True]


def test_verify_reports_or_repairs(call, cache):
    assert call("verify", cache.path) == (OK, "all is well: 10 segments\n", "")
    flip_byte(segment_files(cache)[3], 9000)
    for _ in range(2):
        code, out, err = call("verify", "--report-only", "--json", cache.path)
        assert (code, err) == (WRONG, "")
        (problem,) = json.loads(out)
        assert problem["name"] == segment_files(cache)[3].name
    code, out, err = call("verify", cache.path)
    assert (code, err) == (WRONG, "")
    assert problem["name"] in out
    assert 3 not in seqs(cache)
    assert call("verify", cache.path)[0] == OK
    assert json.loads(call("verify", "--json", cache.path)[1]) == []


def test_evict_frees_the_oldest(call, cache):
    code, out, _ = call("evict", cache.path, "60KiB")
    assert (code, table(out)[:2]) == (
        OK, [["what", "rows", "segments", "bytes"], ["evicted", "48", "3", str(60 * KIB)]],
    )  # fmt: skip
    assert table(out)[2:] == [["held now", "112", "7", str(140 * KIB)], ["capacity", "", "", str(1024 * KIB)]]
    assert seqs(cache) == list(range(3, 10))
    with cache.snapshot():
        code, out, err = call("evict", cache.path, 4096)
        assert (code, table(out)[1]) == (OK, ["evicted", "0", "0", "0"])
        assert err == "arrowcache: 4.0 KiB were asked for, and 0 B were freed: the next segment is leased\n"
    assert json.loads(call("evict", cache.path, "1MiB", "--json")[1]) == {
        "evicted": {"rows": 112, "segments": 7, "bytes": 140 * KIB},
        "held_now": {"rows": 0, "segments": 0, "bytes": 0},
        "capacity_bytes": 1024 * KIB,
    }
    code, _, err = call("evict", cache.path, "some")
    assert code == USAGE
    assert "is not a size" in err


def test_resize_beyond_the_disk_says_so(call, cache):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = call("resize", cache.path, "100TB")
    assert (code, table(out)[-1]) == (OK, ["capacity", "", "", str(100 * 10**12)])
    assert err.startswith("arrowcache: warning: the capacity is 90.9 TiB, and the disk has ")
    assert err.count("\n") == 1


def test_resize_changes_the_capacity_or_says_why_not(call, cache):
    code, out, err = call("resize", cache.path, "2MiB")
    assert (code, table(out)[1:], err) == (
        OK, [["evicted", "0", "0", "0"], ["held now", "160", "10", str(200 * KIB)],
             ["capacity", "", "", str(2048 * KIB)]], "",
    )  # fmt: skip
    code, out, _ = call("resize", cache.path, "240kB", "--json")
    facts = json.loads(out)
    assert facts["evicted"]["rows"] + facts["held_now"]["rows"] == 160
    assert facts["evicted"]["segments"] > 0
    assert facts["evicted"]["bytes"] + facts["held_now"]["bytes"] == 200 * KIB
    publish(cache, 10)
    assert call("resize", cache.path, "300000")[0] == OK
    assert cache.stats().capacity_bytes == 300000
    code, _, err = call("resize", cache.path, "1KiB")
    assert code == USAGE
    assert "raise CAPACITY to" in err
    cache.resize("1MiB")
    publish(cache, 20)
    with cache.snapshot():
        code, _, err = call("resize", cache.path, 300 * KIB)
    assert code == WRONG
    assert "leased" in err


def test_watch_looks_once(call, cache):
    code, out, err = call("watch", cache.path, "--once")
    assert (code, err) == (OK, "")
    assert out.count("\n") == 1
    assert "10 segments, 160 rows" in out
    assert call("watch", cache.path, "--interval", "0")[0] == USAGE


def test_head_prints_the_oldest_rows(call, cache):
    pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    code, out, err = call("head", cache.path, "-n", "3")
    assert (code, err) == (OK, "")
    columns, *rows = table(out)
    assert [row[columns.index("id")] for row in rows] == ["0", "1", "2"]
    assert rows[2][columns.index("image")].startswith("float32 [16, 16]: 2 3 4 5 6 7 ...")
    rows = json.loads(call("head", cache.path, "-n", "2", "--json")[1])
    assert [row["id"] for row in rows] == [0, 1]
    assert np.array(rows[1]["image"]).shape == (16, 16)


def test_sql_answers_or_says_what_is_wrong(call, cache):
    pytest.importorskip("duckdb", reason="the extra 'explore' is not installed")
    code, out, err = call("sql", cache.path, "select count(*) as n, max(id) as most from cache")
    assert (code, out, err) == (OK, "n\tmost\n160\t159\n", "")
    out = call("sql", cache.path, "select id from cache order by id limit 1", "--json")[1]
    assert json.loads(out) == [{"id": 0}]
    code, out, err = call("sql", cache.path, "select idd from cache")
    assert (code, out) == (USAGE, "")
    assert err.count("\n") == 1


def test_what_is_missing_is_empty_or_null(call, cache):
    pytest.importorskip("duckdb", reason="the extra 'explore' is not installed")
    query = """select null::int as i, null::timestamp as t, [1.5, null] as l, 'a'::blob as b, null as n,
               true as is_so, date '2026-01-02' as d"""
    code, out, _ = call("sql", cache.path, query)
    assert (code, table(out)[1]) == (
        OK,
        ["", "", "float64 [2]: 1.5 --", "61", "", "True", "2026-01-02 00:00:00"],
    )
    code, out, _ = call("sql", cache.path, query, "--json")
    a = base64.b64encode(b"a").decode()
    date = "2026-01-02T00:00:00"
    wanted = {"i": None, "t": None, "l": [1.5, None], "b": a, "n": None, "is_so": True, "d": date}
    assert (code, json.loads(out)) == (OK, [wanted])
    (image, number) = json.loads(call("describe", "--json", cache.path, "-c", "image", "-c", "id")[1])
    assert (image["distinct"], number["distinct"], number["longest"]) == (None, 160, None)


@pytest.mark.slow
def test_columns_are_chosen_by_name(call, cache, tmp_path):
    pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    assert call("head", cache.path, "-n", "1", "--column", "id")[1] == "_seq\t_row\tid\n0\t0\t0\n"
    shown = table(call("head", cache.path, "-n", "1", "-c", "image", "-c", "id")[1])
    assert shown[0] == ["_seq", "_row", "image", "id"]
    assert table(call("head", cache.path, "-c", "_row", "-c", "id")[1])[0] == ["_seq", "_row", "id"]
    assert len(table(call("describe", cache.path, "-c", "id")[1])) == 2
    assert call("export", cache.path, tmp_path / "parquet", "-c", "id")[0] == OK
    assert call("import", tmp_path / "parquet", tmp_path / "ids", "--capacity", "1GiB")[0] == OK
    assert [*ac.Cache.open(tmp_path / "ids").schema] == ["id"]
    for command in ("head", "describe", "export"):
        code, out, err = call(*arguments_of(command, cache.path), "-c", "imag")
        assert (code, out, err.count("\n")) == (USAGE, "", 1)
        assert "unknown column 'imag': did you mean 'image'?" in err


def test_rows_are_shown_and_exported_with_their_ids_and_marks(call, cache, tmp_path):
    pd = pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    cache.exclude([(0, 1)], reason="bad")
    cache.tag([(0, 2), (1, 3)], "hard")
    head, *rows = table(call("head", cache.path, "-n", "3", "-c", "id")[1])
    assert head == ["_seq", "_row", "id", "_excluded", "_reason", "_tags"]
    assert [row[3:5] for row in rows] == [["False", ""], ["True", "bad"], ["False", ""]]
    asked = call("sql", cache.path, "select _reason, 'nan'::float from cache order by id limit 2")[1]
    assert table(asked)[1:] == [["", "nan"], ["bad", "nan"]]
    cache.tag((0, 2), "ünlike")
    asked = call("sql", cache.path, "select id, _tags from cache order by id limit 3")[1]
    shown = table(call("head", cache.path, "-n", "3", "-c", "id")[1])
    assert [row[-1] for row in shown[1:]] == [row[1] for row in table(asked)[1:]] == ["", "", "hard, ünlike"]
    for given, exported, marked in (
        ([], 159, False), (["--rows", "included"], 159, False), (["--rows", "all"], 160, True),
        (["--rows", "hard"], 2, False), (["--rows", "1:3"], 1, False),
    ):  # fmt: skip
        folder = tmp_path / f"out{exported}{len(given)}"
        assert call("export", cache.path, folder, *given)[0] == OK
        found = pd.read_parquet(folder)
        assert (len(found), "_excluded" in found.columns) == (exported, marked)
    assert set(pd.read_parquet(tmp_path / "out22")["id"]) == {2, 19}
    code, _, err = call("export", cache.path, tmp_path / "none", "--rows", "hrad")
    assert (code, "did you mean 'hard'?" in err) == (USAGE, True)
    assert not (tmp_path / "none").exists()


def test_describe_has_a_row_a_column(call, cache):
    pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    code, out, _ = call("describe", cache.path)
    assert code == OK
    _, *rows = table(out)
    assert {"id", "image"} <= {cell for row in rows for cell in row}
    assert len(rows) == 2
    assert len(json.loads(call("describe", cache.path, "--json")[1])) == 2


def test_a_cache_goes_out_as_parquet_and_in_again(call, cache, tmp_path):
    pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    folder = tmp_path / "parquet"
    code, out, _ = call("export", cache.path, folder)
    files = sorted(folder.glob("*.parquet"))
    assert (code, out) == (OK, f"wrote {len(files)} files to {folder}\n")
    assert call("export", cache.path, folder)[0] == USAGE, "it is not empty any more"
    code, out, _ = call("import", *files, tmp_path / "again", "--capacity", "1GiB")
    assert (code, table(out)[1][:3]) == (OK, ["imported", "160", "2"])
    with ac.Cache.open(tmp_path / "again") as again, ac.Loader(again, 16) as loader:
        assert sorted(np.concatenate([batch["id"] for batch in loader]).tolist()) == list(range(160))


def test_an_imported_cache_has_segments_of_the_size_that_is_said(call, cache, tmp_path):
    pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    call("export", cache.path, tmp_path / "parquet")
    new = tmp_path / "new"
    code, _, err = call("import", tmp_path / "parquet", new)
    assert (code, err) == (
        USAGE, f"arrowcache: there is no cache at {new}: to make one, say its --capacity, such as 200GB\n"
    )  # fmt: skip
    arguments = ["--capacity", "4MiB", "--segment-bytes", "64MiB"]
    code, _, err = call("import", tmp_path / "parquet", new, *arguments)
    assert code == USAGE
    assert "under 4 segments of 64.0 MiB" in err
    small = tmp_path / "small"
    assert call("import", tmp_path / "parquet", small, "--capacity", "4MiB")[0] == OK
    assert ac.Cache.open(small).store.settings.segment_bytes == 256 << 10
    for size in ("many", "0", "100MiB"):
        arguments = ["--capacity", "4MiB", "--segment-bytes", size]
        assert call("import", tmp_path / "parquet", new, *arguments)[0] == USAGE
    assert not new.exists()
    for size, name in (("64KiB", "text"), ("65536", "digits")):
        arguments = ["--capacity", "4MiB", "--segment-bytes", size]
        assert call("import", tmp_path / "parquet", tmp_path / name, *arguments)[0] == OK
        made = ac.Cache.open(tmp_path / name)
        assert made.store.settings.segment_bytes == 65536
        assert len(segment_files(made)) == 3


def test_files_of_two_kinds_are_not_imported(call, cache, tmp_path):
    code, _, err = call("import", tmp_path / "a.tfrecord", tmp_path / "a.parquet", cache.path)
    assert (code, err.count("\n")) == (USAGE, 1)
    assert "some files are TFRecord and some are not" in err


def test_tfrecord_needs_a_cache_that_says_what_is_in_it(call, tmp_path):
    code, _, err = call("import", tmp_path / "a.tfrecord", tmp_path / "missing")
    assert code == USAGE
    assert "say its --capacity and --schema" in err


def test_without_tensorflow_it_says_what_tfrecord_files_need(call, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "b.tfrecords.gz").touch()
    for given in ("a.tfrecord", "records"):
        code, out, err = call("import", tmp_path / given, cache.path)
        assert (code, out) == (USAGE, "")
        assert err == (
            "arrowcache: TFRecord files need tensorflow, which is not installed: "
            "pip install 'arrowcache[tensorflow]'\n"
        )


@pytest.mark.slow
def test_a_warning_is_a_line_on_stderr(cache):
    flip_byte(segment_files(cache)[3], -1)
    process = start("head", cache.path, "-n", "100", warnings="default")
    _, err = process.communicate(timeout=120)
    assert process.returncode == WRONG
    warning, error = err.splitlines()
    assert warning.startswith("arrowcache: warning: segment 0")
    assert error.startswith("arrowcache: segment 0")
