from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from every_type import every_type
from helpers import EVERY_TYPE, make_cache, processor_seconds, publish, segment_files, seqs, wait_until
from helpers import sample as row_of
from page_cache import drop_from_memory, resident_bytes
from quick import first_is_quick

import arrowcache as ac
from arrowcache import explore
from arrowcache.explore.columns import bfloat16_values

pd = pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
pytest.importorskip("duckdb", reason="the extra 'explore' is not installed")
sql = explore.sql


@pytest.fixture
def cache(tmp_path):
    with make_cache(tmp_path / "cache") as cache:
        publish(cache, segments=4)
        yield cache


def test_a_query_counts_and_groups(cache):
    frame = sql(
        cache, "select id % 3 as rest, count(*) as n, max(id) as most from cache group by 1 order by 1"
    )
    assert frame.to_dict("list") == {"rest": [0, 1, 2], "n": [22, 21, 21], "most": [63, 61, 62]}


def test_rows_come_in_their_order_without_one_being_asked_for(cache):
    assert sql(cache.path, "select id from cache")["id"].tolist() == list(range(64))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_TYPE)
def test_a_query_gets_every_type(varied, name):
    frame = sql(varied, f'select "{name}" from cache')
    kind = EVERY_TYPE[name]
    for value, wanted in zip(frame[name].to_list(), every_type()[name], strict=True):
        if isinstance(kind, ac.Timestamp):
            assert value.to_datetime64() == wanted
        elif isinstance(kind, ac.Tensor | ac.Ragged):
            if kind.dtype == "bfloat16":
                wanted = bfloat16_values(np.asarray(wanted))
            if wanted.dtype.kind == "c":
                wanted = np.stack([wanted.real, wanted.imag], axis=-1)
            np.testing.assert_array_equal(value, wanted)
            assert np.shape(value) == np.shape(wanted)
            assert np.asarray(frame[name].iloc[0]).dtype.kind == wanted.dtype.kind
        else:
            assert bytes(value) == wanted if isinstance(wanted, bytes) else value == wanted


def test_tensors_are_indexed_by_their_shape(cache):
    frame = sql(cache, "select image[2][3] as pixel, image[16][16] as last from cache where id = 5")
    assert frame["pixel"].tolist() == [1 * 16 + 2 + 5]
    assert frame["last"].tolist() == [255 + 5]


def test_halves_are_numbers_also_at_their_ends(tmp_path):
    bits = np.arange(1 << 16, dtype=np.uint16)
    schema = {"half": ac.Tensor("float16"), "brain": ac.Tensor("bfloat16")}
    with ac.Cache.create(tmp_path / "c", schema, capacity="8MiB", segment_bytes="1MiB") as cache:
        with cache.writer() as writer:
            writer.extend(half=bits.view(np.float16), brain=bits)
        frame = sql(cache, "select * from cache")
    np.testing.assert_array_equal(frame["half"].to_numpy(), bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(frame["brain"].to_numpy(), bfloat16_values(bits))


def test_an_empty_cache_has_its_table(tmp_path):
    with ac.Cache.create(tmp_path / "c", EVERY_TYPE, capacity="4MiB", segment_bytes="256KiB") as cache:
        assert sql(cache, "select count(*) as n from cache")["n"].tolist() == [0]
        frame = sql(cache, "select * from cache")
    assert list(frame.columns) == ["_seq", "_row", *EVERY_TYPE]
    assert frame.dtypes["_seq"] == frame.dtypes["_row"] == np.int64


def test_odd_names_are_quoted(tmp_path):
    schema = {'a "b"': ac.Tensor("bool"), "select": ac.Tensor("float16", (2,))}
    with ac.Cache.create(tmp_path / "c", schema, capacity="4MiB", segment_bytes="256KiB") as cache:
        with cache.writer() as writer:
            writer.append({'a "b"': True, "select": np.zeros(2, np.float16)})
        frame = sql(cache, 'select "a ""b""" as one, "select" as other from cache')
    assert frame["one"].tolist() == [True]
    assert frame["other"][0].tolist() == [0, 0]


def test_names_that_differ_in_case_are_columns_of_their_own(tmp_path):
    schema = dict.fromkeys(("id", "ID", "id_1"), ac.Tensor("int64"))
    with ac.Cache.create(tmp_path / "c", schema, capacity="4MiB", segment_bytes="256KiB") as cache:
        with cache.writer() as writer:
            writer.append({"id": 1, "ID": 2, "id_1": 3})
        found = sql(cache, "select * exclude (_seq, _row) from cache").iloc[0]
        assert found.to_dict() == {"id": 1, "ID_2": 2, "id_1": 3}
        assert sql(cache, "select id_2 as it from cache")["it"].tolist() == [2]
        with pytest.raises(ValueError, match="ID_2"):
            sql(cache, "select ID_3 from cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("select imag from cache", 'Candidate bindings: "image"'),
        ("select * from cach", 'Did you mean "cache"?'),
        ("select id +* 3 from cache", "+*"),
        ("select image + 'a' from cache", "No function matches"),
        ("select id / from cache", "syntax error"),
        ("select nowhere(id) from cache", "nowhere"),
        ("select cast('a' as int)", "Could not convert"),
        ("", "no result"),
        ("   -- nothing", "no result"),
    ],
)
def test_a_wrong_query_is_one_sentence(cache, query, says):
    with pytest.raises(ValueError) as raised:
        sql(cache, query)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("query", ["select id", "drop table cache"])
def test_a_name_that_is_right_is_not_suggested(cache, query):
    with pytest.raises(ValueError, match="the query failed") as raised:
        sql(cache, query)
    assert "Did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    "query",
    [
        "copy cache to '{path}/out.csv'",
        "attach '{path}/out.db'",
        "select * from read_text('{path}/secret.csv')",
        "select * from '{path}/secret.csv'",
        "install httpfs",
        "set enable_external_access = true",
        'from "table"',  # a variable of the function that asks
    ],
)
def test_a_query_sees_and_makes_no_file_and_no_variable(cache, tmp_path, query):
    (tmp_path / "secret.csv").write_text("word\nsesame\n")
    with pytest.raises(ValueError, match="the query failed"):
        sql(cache, query.format(path=tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "secret.csv"]


def test_a_query_is_text(cache):
    with pytest.raises(TypeError, match="the query must be a text, not None"):
        sql(cache, None)
    with pytest.raises(ValueError, match=r"the query is .*, which UTF-8 cannot hold"):
        sql(cache, "select '\ud800'")


def test_the_result_keeps_no_segment(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="384KiB")
    publish(cache, segments=3)
    kept = sql(cache, "select * from cache")
    wait_until(lambda: cache.stats().leased_bytes == 0, "Arrow's threads to let go")
    publish(cache, segments=16)  # on_full="raise"
    assert seqs(cache)[0] > 2
    assert [image[0, 0] for image in kept["image"]] == kept["id"].tolist()
    assert len(kept)


def test_a_failed_query_keeps_no_segment(cache):
    with pytest.raises(ValueError, match="Could not convert") as kept:
        sql(cache, "select cast(cast(id as text) || 'a' as int) from cache")
    wait_until(lambda: cache.stats().leased_bytes == 0, "Arrow's threads to let go")
    assert kept.value.__traceback__ is not None  # a notebook keeps it, too, until the next error


@pytest.mark.slow
def test_ctrl_c_ends_a_query_of_the_command(tmp_path):
    sizes = {"capacity": "64MiB", "segment_bytes": "4MiB"}
    with ac.Cache.create(tmp_path / "c", {"x": ac.Tensor("float32")}, **sizes) as cache:
        with cache.writer() as writer:
            writer.extend(x=np.arange(400_000, dtype=np.float32))
        query = "select sum(a.x * b.x) from cache a, cache b"  # minutes
        command = [sys.executable, "-m", "arrowcache", "sql", str(cache.path), query]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            wait_until(lambda: cache.stats().leased_bytes, "the query to have its rows")
            used = processor_seconds(process.pid)
            wait_until(lambda: processor_seconds(process.pid) > used + 1, "it to be at work on them")
            process.send_signal(signal.SIGINT)
            try:
                assert process.communicate(timeout=60) == (None, "")
            finally:
                process.kill()
        assert process.returncode == 130
        assert cache.stats().leased_bytes == 0


def test_a_query_has_ended_where_a_second_ctrl_c_comes_at_once():
    from arrowcache.explore.query import interruptible

    asked, may_end, ended = [], threading.Event(), threading.Event()

    class Connection:
        def interrupt(self):
            asked.append(self)
            if len(asked) == 1:
                raise KeyboardInterrupt
            may_end.set()

    def work():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        may_end.wait(60)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        interruptible(Connection(), work)
    assert ended.is_set()
    assert len(asked) >= 2


@pytest.mark.parametrize(
    "late", first_is_quick(["threading.Thread(target=after_main).start()", "atexit.register(ask)"])
)
def test_a_query_is_answered_after_the_end_of_the_main_thread(cache, late):
    code = f"""
import atexit, threading
from arrowcache import Cache, explore
cache = Cache.open({str(cache.path)!r})
def ask():
    print(explore.sql(cache, "select count(*) from cache").iloc[0, 0])
def after_main():
    threading.main_thread().join()
    ask()
ask()
{late}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["64", "64"], "")


def test_where_no_thread_can_be_started_a_query_is_answered(cache, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert len(sql(cache, "select id from cache")) == 64


def test_a_cache_that_vanishes_is_one_sentence(cache):
    shutil.rmtree(cache.path)
    with pytest.raises(FileNotFoundError, match="moved or removed while in use"):
        sql(cache, "select 1")


def test_a_group_by_reads_the_pages_of_its_column_only(tmp_path):
    schema = ac.Schema({"image": ac.Tensor("float32", (128, 128)), "label": ac.Tensor("int64")})
    cache = ac.Cache.create(
        tmp_path / "c", schema, capacity="128MiB", segment_bytes="16MiB", segment_rows=240
    )
    with cache.writer() as writer:
        writer.extend(image=np.ones((480, 128, 128), np.float32), label=np.arange(480) % 3)
    files = segment_files(cache)
    drop_from_memory(*files)
    frame = sql(cache, "select label, count(*) as n from cache group by 1 order by 1")
    assert frame["n"].tolist() == [160, 160, 160]
    few = sum(map(resident_bytes, files))
    sql(cache, "select sum(image[1][1] + image[128][128]) from cache")
    many = sum(map(resident_bytes, files))
    total = sum(path.stat().st_size for path in files)
    assert few < total / 100
    assert many > total / 2  # so it can be told


def test_rows_of_long_segments_and_columns_named_almost_like_ids_keep_their_ids(tmp_path):
    rows, names = 150_000, ("_SEQ", "_Row", "_age_SECONDS")
    with ac.Cache.create(
        tmp_path / "c", dict.fromkeys(names, ac.Tensor("int32")), capacity="64MiB", segment_bytes="4MiB"
    ) as cache:
        for first in (0, rows):
            with cache.writer() as writer:
                writer.extend(dict.fromkeys(names, np.arange(first, first + rows, dtype=np.int32)))
        assert len(seqs(cache)) == 2
        frame = sql(cache, "select * from cache")
        assert list(frame.columns) == ["_seq", "_row", "_SEQ_1", "_Row_1", "_age_SECONDS_1"]
        assert (frame["_seq"] * rows + frame["_row"] == frame["_SEQ_1"]).all()
        asked = f"select _Row_1 from cache where _seq = 1 and _row in (3, 65536, {rows - 1})"
        assert sql(cache, asked)["_Row_1"].tolist() == [rows + 3, rows + 65536, 2 * rows - 1]


OF_ELEMENTS = {
    "t_mean": np.mean,
    "t_min": np.min,
    "t_max": np.max,
    "t_std": np.std,
    "t_norm": lambda a: np.sqrt((a * a).sum()),
}
NUMBERS = [n for n, kind in EVERY_TYPE.items() if isinstance(kind, ac.Tensor | ac.Ragged)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_elements_of_every_type_become_one_number(varied, name):
    kind = EVERY_TYPE[name]
    is_complex = kind.dtype.startswith("complex")
    macros = ["t_norm"] if is_complex else list(OF_ELEMENTS)
    asked = ", ".join(f'{macro}("{name}") as {macro}' for macro in macros)
    frame = sql(varied, f"select {asked} from cache")
    for macro in macros:
        for found, value in zip(frame[macro], every_type()[name], strict=True):
            numbers = np.abs(value) if is_complex else value
            if kind.dtype == "bfloat16":
                numbers = bfloat16_values(np.asarray(value))
            numbers = np.asarray(numbers).astype(np.float64)
            if np.isfinite(numbers).all() and numbers.size:
                wanted = OF_ELEMENTS[macro](numbers)
                assert float(found) == pytest.approx(wanted, rel=1e-6, abs=1e-6 * np.abs(numbers).max())
            elif not numbers.size:
                assert found == 0 if macro == "t_norm" else pd.isna(found)


def test_elements_are_asked_of_parts_results_and_any_case(cache):
    frame = sql(
        cache,
        "select T_Mean(image[2]) as part, t_max([2 * x for x in image[1]]) as twice, t_mean(id) as itself, "
        "t_min(renamed) as low from (select *, image as renamed from cache) where id = 5",
    )
    image = row_of(5)["image"]
    assert frame.iloc[0].tolist() == [image[1].mean(), 2 * image[0].max(), 5, image.min()]
    brightest = sql(cache, "select id from cache where t_mean(image) > 100 order by t_mean(image) limit 1")
    assert brightest["id"].tolist() == [row for row in range(64) if row_of(row)["image"].mean() > 100][:1]


def test_a_name_that_stands_for_a_number_is_taken_as_one(cache):
    given = ["id as image", 'id "image"', "id + 0 image", "image: id", "(id) image", "[id][1] image"]
    given += ["case when true then id end /* of */ image", "id + 0 --\n IMAGE"]
    for one in given:
        for name in ("m", "image"):
            query = f"select max(image) as {name} from (select {one} from cache)"
            assert sql(cache, query)[name].tolist() == [63], query
    found = sql(cache, "select max(image) as image from (select t_max(image) as image from cache)")
    assert found["image"].tolist() == [255 + 63]
    assert sql(cache, "with t(image) as (select 1) select max(image) as m from t")["m"].tolist() == [1]


@pytest.mark.parametrize(
    "text", ["'max(image)'", "$$max(image)$$", "'é' -- max(image)\n", "/* max(image) */ 1"]
)
def test_what_a_text_or_a_comment_says_is_not_asked(cache, text):
    assert len(sql(cache, f"select {text} from cache")) == 64


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("select avg(image) from cache", "avg(image) is of one number a row, and 'image' has many"),
        ("select max(c.image) from cache c", "t_max(c.image)"),
        ("select max(distinct image) from cache", "t_max(image)"),
        ("select id, max(image) as image from cache group by id", "t_max(image)"),
        ("select max(image) from (select min(image) as IMAGE from cache)", "t_m"),
        ("select avg(image) from cache", "select avg(t_mean(image)) from cache"),
        ('select MAX( cache."image" ) from cache', 't_max(cache."image")'),
        ("select id from cache order by min(image)", "there is t_min(image)"),
        ("select stddev(image) from cache", "t_std(image)"),
        ("select 'é', min(image) from cache t where 'image' = ''", "there is t_min(image)"),
        ("select sum(image) from cache", "there are t_mean, t_min, t_max, t_std, t_norm of it"),
        ("select sqrt(x) from (select image x from cache)", "of the elements of a tensor there are t_mean"),
        ("select t_mean(wave) from cache", "t_norm(wave) is its norm"),
        ("select max(wave) from cache", "max(wave)"),
        ("select t_mean('a') from cache", "t_mean() does not support"),
    ],
)
def test_a_tensor_taken_for_a_number_is_named_with_what_was_meant(tmp_path, query, says):
    schema = {"image": ac.Tensor("float32", (2, 3)), "id": ac.Tensor("int8"), "wave": ac.Tensor("complex64")}
    cache = ac.Cache.create(tmp_path / "c", schema, capacity="4MiB", segment_bytes="256KiB")
    with cache, pytest.raises(ValueError) as raised:
        sql(cache, query)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tensors_of_a_result_are_pictures_in_a_notebook(cache):
    frame = sql(cache, "select _seq, _row, image, image as again, encode('abc') as raw from cache limit 3")
    assert set(frame.kinds) == {"image"}
    text = frame._repr_html_()
    assert text.count("<img") == 6
    assert "3 B of bytes" in text


def test_elements_are_asked_for_beside_notes(cache):
    cache.tag("0:0", "hard")
    found = sql(cache, "select * from cache order by t_mean(image) limit 1")
    assert found["_tags"].tolist() == [["hard"]]


@pytest.mark.parametrize("query", ["-- all\nfrom cache", "with a as (select 1) from cache"])
def test_whatever_names_all_columns_has_the_notes(cache, query):
    cache.exclude("0:1")
    assert sql(cache, query)["_excluded"].sum() == 1


def test_a_query_that_is_no_plain_select_or_is_deep_names_everything(cache):
    cache.annotate("0:0", loss=1.0)
    many = sql(cache, f"select {'id + ' * 400} id as far from cache order by id limit 2")
    assert many["far"].tolist() == [0, 401]
    assert "loss" in sql(cache, "unpivot (select * exclude image from cache) on id")
