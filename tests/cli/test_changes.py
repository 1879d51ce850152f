"""`arrowcache create` and `import`: what they make, what they leave behind, and what they say of it."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import KIB, make_cache, publish, published_ids, wait_until

import arrowcache as ac
from arrowcache.cli import INTERRUPTED, OK, USAGE, WRONG

pytest.importorskip("typer", reason="the extra 'explore' is not installed")

from arrowcache.cli.commands import create
from arrowcache.storage.settings import OPTIONS

SCHEMA = "image: float32[16, 16], label: int64, name: string, tokens: ragged int32"
SIZES = ["--capacity", "1MiB", "--segment-bytes", "32KiB"]


def table(text: str) -> dict[str, list[str]]:
    return {line.split("\t")[0]: line.split("\t")[1:] for line in text.splitlines()}


def write(path, start, stop, *, bad=None):
    ids = [None if number == bad else number for number in range(start, stop)]
    pads = [np.random.default_rng(n).bytes(1000) for n in range(start, stop)]
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "pad": pads}), path)
    return path


# create


def test_a_setting_that_stands_by_itself_is_an_option_of_create():
    assert {*OPTIONS} <= {*inspect.signature(create).parameters}


def test_create_makes_an_empty_cache_and_says_what_it_is(call, tmp_path):
    code, out, err = call("create", tmp_path / "c", "--schema", SCHEMA, "--capacity", "1GB")
    assert (code, err) == (OK, "")
    facts = table(out)
    assert facts["schema"] == [SCHEMA]
    assert facts["headroom"] == ["10%"]
    made = ac.Cache.open(tmp_path / "c")
    assert dict(made.schema) == {
        "image": ac.Tensor("float32", (16, 16)), "label": ac.Tensor("int64"), "name": ac.String(),
        "tokens": ac.Ragged("int32"),
    }  # fmt: skip
    assert made.stats().capacity_bytes == 10**9
    assert made.store.settings.segment_bytes == 10**9 // 16


def test_create_takes_every_setting(call, tmp_path):
    code, out, err = call(
        "create", tmp_path / "c", "--schema", "x: int8", "--capacity", "1048576", "--segment-bytes", "64KiB",
        "--segment-rows", 100, "--headroom", "25%", "--durable", "--json",
    )  # fmt: skip
    assert (code, err) == (OK, "")
    facts = json.loads(out)
    settings = ac.Cache.open(tmp_path / "c").store.settings
    assert settings.full_rows == facts["full_rows"] == 100
    assert settings.headroom == facts["headroom"] == 0.25
    assert settings.durable is facts["durable"] is True
    assert settings.capacity_bytes == facts["capacity_bytes"] == 1 << 20
    assert ac.Schema.from_json(facts["schema"]) == settings.schema
    assert (
        call("create", tmp_path / "d", "--schema", "x: int8", "--capacity", "1GB", "--headroom", "0")[0] == OK
    )
    assert ac.Cache.open(tmp_path / "d").store.settings.headroom == 0


def test_a_cache_like_another_has_its_schema_and_settings_unless_said(call, tmp_path):
    make_cache(tmp_path / "one", headroom=0.3, durable=True)
    assert call("create", tmp_path / "other", "--like", tmp_path / "one", "--capacity", "2MiB")[0] == OK
    one, other = (ac.Cache.open(tmp_path / name).store.settings for name in ("one", "other"))
    assert other == one.with_capacity(2 << 20)
    options = ["--segment-bytes", "64KiB", "--headroom", "10%"]
    assert call("create", tmp_path / "third", "--like", tmp_path / "one", *options)[0] == OK
    third = ac.Cache.open(tmp_path / "third").store.settings
    assert (third.segment_bytes, third.headroom, third.capacity_bytes) == (65536, 0.1, one.capacity_bytes)
    assert third.full_rows > one.full_rows


def test_a_cache_like_another_that_is_much_smaller_has_smaller_segments(call, tmp_path):
    ac.Cache.create(tmp_path / "one", {"x": ac.Tensor("uint8", (100,))}, "10GB", headroom=0.3)
    assert call("create", tmp_path / "other", "--like", tmp_path / "one", "--capacity", "100MB")[0] == OK
    settings = ac.Cache.open(tmp_path / "other").store.settings
    assert (settings.segment_bytes, settings.headroom) == (100_000_000 // 16, 0.3)


def test_a_schema_may_be_in_a_file(call, tmp_path):
    make_cache(tmp_path / "one")
    (tmp_path / "text").write_text("# pictures\nimage: float32[16, 16]\nlabel: int64\n")
    (tmp_path / "info.json").write_text(call("info", tmp_path / "one", "--json")[1])
    (tmp_path / "list.json").write_text(json.dumps(ac.Cache.open(tmp_path / "one").schema.to_json()))
    for number, file in enumerate(
        (tmp_path / "text", tmp_path / "info.json", tmp_path / "list.json", tmp_path / "one" / "cache.json")
    ):
        code, _, err = call("create", tmp_path / str(number), "--schema", file, "--capacity", "1GB")
        assert (code, err) == (OK, "")
        image = ac.Cache.open(tmp_path / str(number)).schema["image"]
        assert image == ac.Tensor("float32", (16, 16))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "with --schema, or with --like as another cache"),
        (["--schema", "x: int8"], "--capacity, such as 200GB"),
        (["--schema", "x: int8", "--like", "c", "--capacity", "1GB"], "and not both"),
        (["--schema", "x: int9", "--capacity", "1GB"],
         "--schema: the schema at character 4, \"int9\": 'int9' is"),
        (["--schema", "nowhere.json", "--capacity", "1GB"],
         "--schema 'nowhere.json' is no file, and no schema"),
        (["--schema", "", "--capacity", "1GB"], "--schema '' is no file, and no schema"),
        (["--schema", ".", "--capacity", "1GB"], "--schema '.' is a folder"),
        (["--schema", "x: int8", "--capacity", "many"],
         "--capacity 'many' is not a size: say bytes as a number"),
        (["--schema", "x: int8", "--capacity", "0"], "--capacity '0' must be more than 0"),
        (["--schema", "x: int8", "--capacity", "1MiB", "--segment-bytes", "1MiB"], "lower --segment-bytes"),
        (["--schema", "x: int8", "--capacity", "150kB"], "raise --capacity to"),
        (["--schema", "x: int8[999999999]", "--capacity", "1GB"], "raise --capacity to"),
        (["--schema", "x: int8[9999]", "--capacity", "1GB", "--segment-bytes", "8kB"],
         "raise --segment-bytes"),
        (["--schema", "x: int8[999999]", "--capacity", "1GB", "--segment-rows", "9999"],
         "lower --segment-rows to"),
        (["--schema", "x: int8", "--capacity", "1GB", "--headroom", "2"], "--headroom '2' is no share"),
        (["--schema", "x: int8", "--capacity", "1GB", "--headroom", "a lot"],
         "--headroom 'a lot' is no share"),
        (["--like", "nowhere", "--capacity", "1GB"], "no cache here: make one with arrowcache create"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_a_sentence_and_makes_nothing(call, tmp_path, options, says, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("create", tmp_path / "c", *options)
    assert (code, out, err.count("\n")) == (USAGE, "", 1)
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_no_schema_is_a_sentence_that_names_it(call, tmp_path):
    for content, says in (
        ('{"a": 1}', "the JSON has no schema: it has a"),
        ("[1]", "not a schema description"),
        ("{", "Expecting property name"),
        ("a int8", "a colon and the type of 'a'"),
        ("a: int8\nb: in8", "line 2, character 4"),
        ("\xff".encode("latin-1"), "utf-8"),
    ):
        (tmp_path / "s").write_bytes(content if isinstance(content, bytes) else content.encode())
        code, out, err = call("create", tmp_path / "c", "--schema", tmp_path / "s", "--capacity", "1GB")
        assert (code, out, err.count("\n")) == (USAGE, "", 1)
        assert err.startswith(f"arrowcache: {tmp_path / 's'}: ")
        assert says in err


def test_a_cache_that_is_there_is_not_made_again(call, tmp_path):
    make_cache(tmp_path / "c")
    code, out, err = call("create", tmp_path / "c", "--schema", "x: int8", "--capacity", "1GB")
    assert (code, out) == (USAGE, "")
    assert err == (
        f"arrowcache: {tmp_path / 'c'} is a cache already: take another path, or `arrowcache resize` to "
        "change it\n"
    )


# import


def test_an_import_says_how_many_rows_came_and_went(call, tmp_path):
    path = write(tmp_path / "a.parquet", 0, 100)
    code, out, err = call("import", path, tmp_path / "c", *SIZES)
    assert (code, err) == (OK, "")
    facts = table(out)
    assert facts["imported"] == facts["held now"]
    assert facts["imported"][0] == "100"
    more = write(tmp_path / "b.parquet", 100, 1500)
    code, out, err = call("import", path, more, tmp_path / "c", "--json")
    assert (code, err) == (OK, "")
    facts = json.loads(out)
    assert facts["imported"]["rows"] == 1400
    assert facts["there_already"]["rows"] == 100
    assert facts["evicted_meanwhile"]["rows"] == 1500 - facts["held_now"]["rows"] > 0
    assert facts["capacity_bytes"] == 1 << 20
    code, out, _ = call("import", more, tmp_path / "c", "--json")
    facts = json.loads(out)
    assert facts["imported"]["rows"] == facts["back_after_eviction"]["rows"] > 0
    assert facts["there_already"]["rows"] + facts["imported"]["rows"] == 1400


def test_a_file_that_is_in_already_is_refused_unless_again_is_said(call, tmp_path):
    path = write(tmp_path / "a.parquet", 0, 20)
    assert call("import", path, tmp_path / "c", *SIZES)[0] == OK
    code, out, err = call("import", path, tmp_path / "c")
    assert (code, out) == (USAGE, "")
    assert err == (
        f"arrowcache: {path}: the cache has all 20 rows of the file already: nothing was imported; --again "
        "imports them once more\n"
    )
    assert call("import", path, tmp_path / "c", "--again")[0] == OK
    assert published_ids(ac.Cache.open(tmp_path / "c")) == [*range(20)] * 2


def test_a_file_without_a_cache_is_said_to_be_that(call, tmp_path):
    path = write(tmp_path / "a.parquet", 0, 20)
    code, out, err = call("import", path)
    assert (code, out) == (USAGE, "")
    assert err == (
        f"arrowcache: {path} is taken for the cache, and no file is left: say files, then the cache\n"
    )


def test_a_failed_import_leaves_no_cache_and_the_repaired_file_is_imported(call, tmp_path):
    path = write(tmp_path / "a.parquet", 0, 100, bad=99)
    code, out, err = call("import", path, tmp_path / "c", *SIZES)
    assert (code, out, err.count("\n")) == (WRONG, "", 1)
    assert "nothing was imported, no cache was made" in err
    assert not (tmp_path / "c").exists()
    pq.write_table(pa.table({"id": np.arange(9.0)}), path)
    assert call("import", path, tmp_path / "c", *SIZES)[0] == OK


def test_the_types_of_lists_are_said_by_a_schema(call, tmp_path):
    pq.write_table(pa.table({"x": [[1.0, 2], [3, 4]], "y": [1, 2]}), tmp_path / "a.parquet")
    options = [*SIZES, "--schema", "x: float32[2]"]
    assert call("import", tmp_path / "a.parquet", tmp_path / "c", *options)[0] == OK
    assert dict(ac.Cache.open(tmp_path / "c").schema) == {"x": ac.Tensor("float32", (2,))}
    assert call("import", tmp_path / "a.parquet", tmp_path / "d", *SIZES)[0] == OK
    assert ac.Cache.open(tmp_path / "d").schema["x"] == ac.Ragged("float64")
    code, _, err = call("import", tmp_path / "a.parquet", tmp_path / "d", *options)
    assert code == WRONG
    assert "has another schema: x is ragged float64, not float32[2], y is int64, and not asked for" in err
    pq.write_table(pa.table({"s": pa.array([{"a": 1}])}), tmp_path / "b.parquet")
    code, _, err = call("import", tmp_path / "b.parquet", tmp_path / "e", *SIZES)
    assert code == WRONG
    assert "cast it, or leave it out with --schema" in err


def test_options_of_a_new_cache_that_one_that_is_there_has_not_are_refused(call, tmp_path):
    make_cache(tmp_path / "c", {"id": ac.Tensor("int64")}, segment_rows=None)
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "a.parquet")
    for option, says in (
        (
            ["--capacity", "2GB"],
            "capacity 1048576 (1.0 MiB), and not 2000000000: leave capacity out, or resize it first",
        ),
        (
            ["--segment-bytes", "1MiB"],
            "segment-bytes 32768 (32.0 KiB), and not 1048576: leave --segment-bytes out, or give another",
        ),
    ):
        code, out, err = call("import", tmp_path / "a.parquet", tmp_path / "c", *option)
        assert (code, out) == (USAGE, "")
        assert err.startswith(f"arrowcache: {tmp_path / 'c'} is there already, with --{says}")
    assert ac.Cache.open(tmp_path / "c").stats().segments == 0
    same = ["--capacity", "1MiB", "--segment-bytes", "32KiB"]
    code, out, err = call("import", tmp_path / "a.parquet", tmp_path / "c", *same)
    assert (code, err) == (OK, "")
    assert table(out)["capacity"][-1] == str(1 << 20)


@pytest.mark.slow
def test_ctrl_c_says_what_is_in_and_the_same_command_goes_on(tmp_path, call):
    """An import that waits for room, since all of a cache is leased."""
    path = write(tmp_path / "a.parquet", 0, 3000)
    with make_cache(
        tmp_path / "c", {"id": ac.Tensor("int64"), "pad": ac.Binary()}, segment_rows=None, headroom=0
    ) as cache:
        with cache.writer() as writer:
            for number in range(700):
                writer.append(id=-1 - number, pad=bytes(1000))
        with cache.snapshot():
            process = subprocess.Popen(
                [sys.executable, "-m", "arrowcache", "import", str(path), str(cache.path)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )  # fmt: skip
            wait_until(lambda: cache.stats().waiting_writers == 1, "the import to wait for room")
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (INTERRUPTED, "")
        rows = sum(number >= 0 for number in published_ids(cache))
        assert err.strip() == (
            f"arrowcache: interrupted: imported {rows:,} of 3,000 rows, which the cache keeps; the same "
            "command goes on with the others"
        )
        assert rows > 0
        facts = json.loads(call("import", path, cache.path, "--json")[1])
        assert facts["imported"]["rows"] == 3000 - rows


@pytest.mark.filterwarnings("default")
def test_a_warning_of_any_package_is_one_line_in_words_of_the_shell(call, tmp_path, monkeypatch):
    def statvfs(*_):
        warnings.warn("it is\n too much: use cache.resize(), or capacity='1GB'", UserWarning, stacklevel=2)
        raise ValueError("no")

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    assert call("create", tmp_path / "c", "--schema", "x: int8", "--capacity", "1GB") == (
        USAGE,
        "",
        "arrowcache: warning: it is too much: use arrowcache resize, or --capacity '1GB'\narrowcache: no\n",
    )


def test_a_table_in_a_terminal_has_sizes_that_people_read(tmp_path, monkeypatch, call):
    cache = make_cache(tmp_path / "c")
    publish(cache, 3)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "20.0 KiB" in call("evict", cache.path, 16 * KIB)[1]


def test_freeze_and_thaw_say_what_is_held_and_a_frozen_cache_says_how_to_thaw_it(call, tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 2)
    code, out, err = call("freeze", cache.path)
    assert (code, err, table(out)["held now"][0]) == (OK, "", "32")
    assert call("freeze", cache.path)[0] == OK  # again
    frozen = json.loads(call("info", cache.path, "--json")[1])["frozen"]
    assert frozen in table(call("info", cache.path)[1])["frozen"][0]
    code, _, err = call("evict", cache.path, "1MiB")
    assert code == WRONG
    assert "is frozen, and does not change: write to another cache, or call arrowcache thaw first" in err
    code, _, err = call("verify", cache.path)
    assert code == WRONG
    assert "check it by arrowcache verify --report-only, or call arrowcache thaw first" in err
    assert call("verify", cache.path, "--report-only")[0] == OK
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = call("thaw", cache.path, "--json")
    assert "warning: " in err
    assert "may change from now on" in err
    assert (code, json.loads(out)["held_now"]["rows"]) == (OK, 32)
    assert json.loads(call("info", cache.path, "--json")[1])["frozen"] is None
    with cache.writer():
        code, _, err = call("freeze", cache.path)
    assert code == WRONG
    assert f"cannot be frozen: pid {os.getpid()} (" in err
