"""The command speaks of its options and commands, not of Python's arguments and methods."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import flip_byte, make_cache, publish, segment_files

import arrowcache as ac
from arrowcache.cli import of_shell

pytest.importorskip("typer", reason="the extra 'explore' is not installed")

from arrowcache.cli.commands import known_to

PYTHON = re.compile(
    r"\w=(?!=)|\bac\.|\bCache\.|\bcache\.\w+\(|arrowcache\.\w|\bschema=|exist_ok|Tensor\(|None\b|_"
)


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("no cache here: make one with arrowcache.Cache.create",
         "no cache here: make one with arrowcache create"),
        ("cast it, or leave it out with schema=", "cast it, or leave it out with --schema"),
        ("capacity='some' is not a size", "--capacity 'some' is not a size"),
        ("interval=0.0 must be seconds", "--interval 0.0 must be seconds"),
        ("raise segment_bytes, or lower segment_rows to 3",
         "raise --segment-bytes, or lower --segment-rows to 3"),
        ("segment_bytes is 1 KiB", "--segment-bytes is 1 KiB"),
        ("raise the capacity with cache.resize()", "raise the capacity with arrowcache resize"),
        ("cache.evict() some and cache.resize() to less",
         "arrowcache evict some and arrowcache resize to less"),
        ("raise headroom, or pass on_full='wait'", "raise headroom"),
        ("set another pace with cache.set_pace()", "set another pace in Python"),
        ("again=True imports them once more", "--again imports them once more"),
        ("unknown column 'segment_bytes': the cache has a",
         "unknown column 'segment_bytes': the cache has a"),
        ("/data/schema=1/capacity=2/a.parquet: no field", "/data/schema=1/capacity=2/a.parquet: no field"),
        ("columns must be a list", "columns must be a list"),
        ("can be freed; raise capacity, or raise headroom, or pass on_full='wait'",
         "can be freed; or raise the capacity by `arrowcache resize`"),
        (
            "cannot be read with compression=None: torn, or say which of (None, 'GZIP', 'ZLIB') it has",
            "cannot be read: torn, or call it .gz if it is compressed by gzip",
        ),
    ],
)  # fmt: skip
def test_python_words_become_those_of_the_shell(python, shell):
    assert of_shell(python) == shell


@pytest.mark.parametrize(
    ("command", "shell"),
    [
        ("create", "raise --capacity to 4 MiB, or lower --segment-bytes; column 'x', rows 'all'"),
        ("resize", "raise CAPACITY to 4 MiB, or lower segment bytes; column 'x', rows 'all'"),
        ("import", "raise --capacity to 4 MiB, or lower --segment-bytes; column 'x', rows 'all'"),
        ("export", "raise capacity to 4 MiB, or lower segment bytes; --column 'x', --rows 'all'"),
        ("head", "raise capacity to 4 MiB, or lower segment bytes; --column 'x', --rows 'all'"),
        ("nonsense", "raise capacity to 4 MiB, or lower segment bytes; column 'x', rows 'all'"),
    ],
)
def test_only_options_are_named_that_the_command_has(command, shell):
    said = "under 4 segments: raise capacity to 4 MiB, or lower segment_bytes; columns='x', rows='all'"
    assert of_shell(said, known_to(command)) == f"under 4 segments: {shell}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Caches and files that commands cannot do much with."""
    with make_cache(tmp_path / "cache") as cache:
        publish(cache, 3)
        cache.annotate([(0, 0)], loss=[1.0])
    publish(excluded := make_cache(tmp_path / "excluded"), 1)
    excluded.exclude([(0, row) for row in range(16)])
    publish(leased := make_cache(tmp_path / "leased"), 20)
    held = ac.Cache.create(tmp_path / "held", {"id": ac.Tensor("int64")}, "512KiB", "64KiB")
    with held.writer() as writer:
        writer.extend(id=np.arange(50_000))
    for file in segment_files(make_damaged(tmp_path)):
        flip_byte(file, -1)
    (tmp_path / "file").write_text("text")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "cache.json").write_text('{"format": "arrowcache", "version": 99}')
    (tmp_path / "bad.parquet").write_text("text")
    pq.write_table(pa.table({"s": pa.array([{"a": 1}])}), tmp_path / "struct.parquet")
    pq.write_table(pa.table({"id": [1, None]}), tmp_path / "null.parquet")
    pq.write_table(pa.table({"id": ["a"], "image": [1]}), tmp_path / "types.parquet")
    pq.write_table(pa.table({"s": ["x" * 100_000]}), tmp_path / "wide.parquet")
    pq.write_table(pa.table({"id": np.arange(3)}), tmp_path / "good.parquet")
    pq.write_table(pa.table({"id": np.arange(60_000)}), tmp_path / "many.parquet")
    monkeypatch.chdir(tmp_path)
    with leased.snapshot(), held.snapshot():
        yield tmp_path


def make_damaged(folder: Path) -> ac.Cache:
    cache = make_cache(folder / "damaged")
    publish(cache, 5)
    return cache


NEW = ["--capacity", "1MiB", "--segment-bytes", "32KiB"]
WRONG_USAGES = [
    *[[command, path, *more]
      for path in ("nowhere", "file", "full", "empty", "newer")
      for command, more in (("info", []), ("ls", []), ("head", []), ("sql", ["select 1"]), ("describe", []),
                            ("verify", []), ("evict", ["1GB"]), ("resize", ["1GB"]), ("watch", ["--once"]),
                            ("export", ["out"]))],
    ["head", "cache", "-n", "0"], ["head", "cache", "-c", "imag"], ["head", "cache", "-c", "id", "-c", "id"],
    ["head", "damaged", "-n", "99"], ["describe", "damaged"], ["export", "damaged", "out"],
    ["verify", "damaged"],
    ["describe", "cache", "-c", "nothing"], ["sql", "cache", "selec 1"],
    ["sql", "cache", "select x from cache"],
    ["evict", "cache", "some"], ["evict", "cache", "-1"], ["evict", "cache", "0"], ["evict", "cache", "1 XB"],
    ["resize", "cache", "100KiB"], ["resize", "leased", "300KiB"],
    ["export", "cache", "out", "--rows", "hrad"], ["export", "excluded", "out"],
    ["export", "cache", "out", "--rows", "99:1"], ["export", "cache", "out", "--rows", ""],
    ["describe", "cache", "-c", "loss"], ["create", "new", "--like", "cache", "--capacity", "100KiB"],
    ["create", "new", "--like", "cache", "--segment-rows", "99999999"],
    ["import", "wide.parquet", "tiny", "--capacity", "1MiB", "--segment-bytes", "1KiB"],
    ["import", "many.parquet", "held"],
    ["resize", "cache", "some"], ["resize", "cache", "1"], ["resize", "cache", "0MiB"],
    ["watch", "cache", "--interval", "0"], ["watch", "cache", "--interval", "nan"],
    ["watch", "cache", "-i", "x"],
    ["export", "cache", "full"], ["export", "cache", "file"], ["export", "cache", "cache/out"],
    ["create", "cache", "--schema", "x: int8", "--capacity", "1GB"],
    ["create", "full", "--schema", "x: int8", "--capacity", "1GB"],
    ["create", "file", "--schema", "x: int8", "--capacity", "1GB"],
    ["create", "file/c", "--schema", "x: int8", "--capacity", "1GB"],
    ["create", "new", "--schema", "x: int8", "--capacity", "1"],
    ["create", "new", "--schema", "x: int8", "--capacity", "1GB", "--segment-bytes", "1"],
    ["create", "new", "--schema", "x: int8", "--capacity", "1GB", "--segment-rows", "0"],
    ["create", "new", "--schema", "x: int8", "--capacity", "1GB", "--segment-rows", "999999999"],
    ["create", "new", "--schema", "x: int8", "--capacity", "1GB", "--headroom", "1"],
    ["create", "new", "--schema", "_seq: int8", "--capacity", "1GB"],
    ["create", "new", "--like", "file", "--capacity", "1GB"],
    ["import", "nowhere.parquet", "cache"], ["import", "good.parquet", "nowhere"], ["import", "cache"],
    ["import", "good.parquet", "full", *NEW], ["import", "good.parquet", "file", *NEW],
    ["import", "good.parquet", "newer", *NEW], ["import", "good.parquet", "empty"],
    ["import", "empty", "cache"],
    ["import", "bad.parquet", "new", *NEW], ["import", "struct.parquet", "new", *NEW],
    ["import", "null.parquet", "new", *NEW], ["import", "types.parquet", "cache"],
    ["import", "wide.parquet", "new", *NEW], ["import", "good.parquet", "cache"],
    ["import", "good.parquet", "new", "--capacity", "x"],
    ["import", "good.parquet", "new", *NEW, "--schema", "x: int8"],
    ["import", "good.parquet", "new", *NEW, "--schema", "id: int8["],
    ["import", "good.parquet", "cache", "--schema", "id: int8"],
    ["import", "a.tfrecord", "nowhere"], ["import", "a.tfrecord", "good.parquet", "cache"],
    ["nonsense"], ["info"], ["info", "cache", "--nope"],
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_no_wrong_usage_is_answered_in_python(call, folder):
    pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    for arguments in WRONG_USAGES:
        before = sorted(path for path in folder.rglob("*") if "segments" not in path.parts)
        code, out, err = call(*arguments)
        said = re.sub(r"by pid \d+ \(.*?\)", "by a process", err.replace(str(folder), ""))
        assert code != 0, (arguments, out)
        assert "Traceback" not in err, (arguments, err)
        assert err.startswith("arrowcache: ") or (out and not err), (arguments, err)
        lines = [line for line in said.splitlines() if not line.startswith("arrowcache: warning: ")]
        assert len(lines) == (1 if err else 0), (arguments, err)
        given = known_to(arguments[0])  # by which the advice can be followed
        assert {*re.findall(r"(?<!\S)--[a-z-]+", said)} <= {*given, "--help", "--nope"}, (arguments, err)
        assert arguments[0] == "sql" or not PYTHON.search(re.sub(r"'[^']*'", "''", said)), (arguments, err)
        after = sorted(path for path in folder.rglob("*") if "segments" not in path.parts)
        known = [path for path in after if not {"quarantine", "out"} & set(path.parts)]
        assert known == [path for path in before if not {"quarantine", "out"} & set(path.parts)], arguments
