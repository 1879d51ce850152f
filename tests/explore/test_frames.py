from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from every_type import ROWS, every_type
from helpers import DEADLINE_SECONDS, EVERY_TYPE, make_cache, publish, seqs, wait_for_sleep
from helpers import sample as row_of
from processes import Script

import arrowcache as ac
from arrowcache import explore
from arrowcache.explore.columns import bfloat16_values

pd = pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
pl = pytest.importorskip("polars", reason="polars is not installed")
head, sample, to_pandas, to_polars = explore.head, explore.sample, explore.to_pandas, explore.to_polars


@pytest.fixture
def cache(tmp_path) -> Iterator[ac.Cache]:
    with make_cache(tmp_path / "cache") as cache:
        publish(cache, segments=4)
        yield cache


def expected(name: str) -> list:
    """What a reader of `every_type()` should see, row by row."""
    kind, values = EVERY_TYPE[name], every_type()[name]
    if isinstance(kind, ac.Tensor | ac.Ragged) and kind.dtype == "bfloat16":
        return [bfloat16_values(np.asarray(value)) for value in values]
    return list(values)


def test_head_is_the_oldest_rows(cache):
    frame = head(cache, 20)
    assert isinstance(frame, pd.DataFrame)
    assert frame["id"].tolist() == list(range(20))
    assert list(frame.columns) == ["_seq", "_row", "id", "image"]
    assert list(frame.index) == list(range(20))
    for number in (0, 19):
        np.testing.assert_array_equal(frame["image"][number], row_of(number)["image"])
    assert len(head(cache)) == 5


def test_a_frame_of_halves_is_printed_without_a_warning(tmp_path):
    with ac.Cache.create(
        tmp_path / "c", {"half": ac.Tensor("float16")}, capacity="4MiB", segment_bytes="256KiB"
    ) as cache:
        with cache.writer() as writer:
            writer.append(half=np.float16(0.1))
        frame = head(cache)
    assert repr(frame)  # warnings are errors here
    assert frame["half"].tolist() == [np.float16(0.1)]


def test_ctrl_c_ends_a_wait_of_a_test_though_polars_is_imported():
    """What its handler keeps from waits: see tests/conftest.py."""
    held, ended, main = threading.Lock(), threading.Event(), threading.get_ident()

    def press() -> bool:
        wait_for_sleep()
        signal.pthread_kill(main, signal.SIGINT)
        is_ended = ended.wait(DEADLINE_SECONDS)
        held.release()
        return is_ended

    held.acquire()
    with ThreadPoolExecutor(1) as pool:
        pressed = pool.submit(press)
        with pytest.raises(KeyboardInterrupt):
            held.acquire()
        ended.set()
        assert pressed.result()


AFTER_POLARS = """
    import signal, sys, threading
    from arrowcache.explore import to_polars

    to_polars(sys.argv[1])
    held = threading.Lock()
    held.acquire()
    print("waits", flush=True)
    try:
        held.acquire()
    except KeyboardInterrupt:
        print("ended", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_wait_after_to_polars(cache):
    """With its import polars has waits go on."""
    with Script(AFTER_POLARS, cache.path, new_interpreter=True) as script:
        assert script.line() == "waits"
        wait_for_sleep(script.pid)
        script.signal_group(signal.SIGINT)
        assert script.line() == "ended"


def test_a_path_will_do(cache):
    assert head(cache.path, 2)["id"].tolist() == [0, 1]
    assert to_polars(str(cache.path), limit=2)["id"].to_list() == [0, 1]


def test_a_sample_is_drawn_from_all_rows_and_none_twice(cache):
    drawn = sample(cache, 40, seed=3)
    ids = drawn["id"].tolist()
    assert len(set(ids)) == 40
    assert {number // 16 for number in ids} == {0, 1, 2, 3}
    assert ids != sorted(ids)
    assert ids == sample(cache, 40, seed=3)["id"].tolist()
    assert ids != sample(cache, 40, seed=4)["id"].tolist()
    for place, number in enumerate(ids):
        np.testing.assert_array_equal(drawn["image"][place], row_of(number)["image"])


def test_a_sample_of_more_than_all_is_all(cache):
    assert sorted(sample(cache, 1000)["id"]) == list(range(64))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_TYPE)
def test_pandas_gets_every_type(varied, name):
    found = to_pandas(varied, [name])[name]
    assert len(found) == ROWS
    kind = EVERY_TYPE[name]
    if isinstance(kind, ac.Tensor) and not kind.shape:
        found = found.to_numpy()  # else its values are Python's
    for value, wanted in zip(found, expected(name), strict=True):
        if isinstance(kind, ac.Timestamp):
            assert value == pd.Timestamp(wanted, tz="UTC")
        elif isinstance(kind, ac.Tensor | ac.Ragged):
            np.testing.assert_array_equal(value, wanted)
            is_half = kind == ac.Tensor("float16")  # of which pandas makes no column
            assert np.asarray(value).dtype == (np.float32 if is_half else wanted.dtype)
            assert np.shape(value) == wanted.shape
        else:
            assert value == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_TYPE)
def test_polars_gets_every_type(varied, name):
    found = to_polars(varied, [name])[name]
    kind = EVERY_TYPE[name]
    if isinstance(kind, ac.Tensor) and kind.shape:
        pair = (2,) if kind.dtype.startswith("complex") else ()
        assert found.dtype.shape == (*kind.shape, *pair)
    values = (
        found.to_list() if isinstance(kind, ac.Ragged) or not found.dtype.is_nested() else found.to_numpy()
    )
    for value, wanted in zip(values, expected(name), strict=True):
        if isinstance(kind, ac.Timestamp):
            assert np.datetime64(value.replace(tzinfo=None)) == wanted
            assert str(value.tzinfo) == "UTC"
        elif isinstance(kind, ac.Tensor | ac.Ragged):
            if wanted.dtype.kind == "c":
                wanted = np.stack([wanted.real, wanted.imag], axis=-1)
            np.testing.assert_array_equal(np.asarray(value, wanted.dtype).reshape(wanted.shape), wanted)
        else:
            assert value == wanted


def test_columns_and_limit_choose(cache):
    assert list(to_pandas(cache, ["image"]).columns) == ["image"]
    assert to_pandas(cache, ["id"], limit=17)["id"].tolist() == list(range(17))
    assert to_polars(cache, columns=["id"], limit=17)["id"].to_list() == list(range(17))
    assert len(to_pandas(cache, limit=0)) == 0
    assert len(to_pandas(cache, limit=10_000)) == 64


def test_an_empty_cache_has_columns_of_the_right_types(tmp_path):
    with ac.Cache.create(tmp_path / "empty", EVERY_TYPE, capacity="4MiB", segment_bytes="256KiB") as cache:
        frame, drawn, frame_of_polars = head(cache), sample(cache), to_polars(cache)
    assert list(frame.columns) == list(drawn.columns) == frame_of_polars.columns
    assert list(frame.columns) == ["_seq", "_row", *EVERY_TYPE]
    assert len(frame) == len(drawn) == len(frame_of_polars) == 0
    assert str(frame["when"].dtype) == "datetime64[us, UTC]"
    assert frame["scalar_int8"].dtype == np.int8
    assert frame_of_polars["tensor_int8"].dtype == pl.Array(pl.Int8, (3, 5))


@pytest.mark.parametrize("look", [head, sample, to_pandas, to_polars])
def test_what_is_returned_keeps_no_segment(tmp_path, look):
    cache = make_cache(tmp_path / "cache", capacity="256KiB")
    publish(cache, segments=3)
    kept = look(cache)
    before = kept["image"][0].tolist() if look is not to_polars else kept["image"][0].to_list()
    assert cache.stats().leased_bytes == 0
    publish(cache, segments=8)  # on_full="raise": it would not wait
    assert seqs(cache)[0] > 2
    after = kept["image"][0].tolist() if look is not to_polars else kept["image"][0].to_list()
    assert after == before


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda cache: to_pandas(cache, ["imag"]), ValueError, "did you mean 'image'?"),
        (lambda cache: to_pandas(cache, "id"), TypeError, "list of names"),
        (lambda cache: to_pandas(cache, []), ValueError, "empty"),
        (lambda cache: to_pandas(cache, limit=-1), ValueError, "limit=-1"),
        (lambda cache: head(cache, "5"), TypeError, "must be an int"),
        (lambda cache: sample(cache, seed=-1), ValueError, "seed=-1"),
        (lambda cache: head(cache.path / "nowhere"), FileNotFoundError, "nowhere"),
        (lambda cache: head(3), TypeError, "expected a Cache or the path of one"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(cache, ask, error, says):
    with pytest.raises(error) as raised:
        ask(cache)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_cache_that_vanishes_is_one_sentence(cache):
    shutil.rmtree(cache.path)
    with pytest.raises(FileNotFoundError, match="moved or removed while in use") as raised:
        head(cache)
    assert "\n" not in str(raised.value)


def test_text_in_a_notebook_is_no_html(tmp_path):
    schema = {"<b>": ac.String(), "n": ac.Tensor("int64")}
    with ac.Cache.create(tmp_path / "c", schema, capacity="4MiB", segment_bytes="256KiB") as cache:
        with cache.writer() as writer:
            writer.append({"<b>": "<script>alert(1)</script>", "n": 3})
        frame = head(cache)
        text = frame._repr_html_()
    assert "<script>" not in text
    assert "<b>" not in text
    assert "&lt;script&gt;" in text
    assert "&lt;b&gt;" in text
    assert ">3<" in text


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame,
        lambda frame: frame.set_index("<b>"),
        lambda frame: frame.set_index(["n", "<b>"]),
        lambda frame: frame.groupby("<b>")[["n"]].max(),
        lambda frame: frame.rename_axis(columns="<b>"),
        lambda frame: frame.rename(columns=lambda name: ("<b>", name)),
    ],
)
def test_names_and_labels_in_a_notebook_are_no_html(tmp_path, change):
    schema = {"<b>": ac.String(), "n": ac.Tensor("int64")}
    with ac.Cache.create(tmp_path / "c", schema, capacity="4MiB", segment_bytes="256KiB") as cache:
        with cache.writer() as writer:
            writer.append({"<b>": "<b>bold</b>", "n": 3})
        text = change(head(cache))._repr_html_()
    assert "<b>" not in text
    assert "&lt;b&gt;" in text
    assert "None" not in text


def test_a_long_frame_shows_its_first_rows_in_a_notebook(cache):
    frame = to_pandas(cache, ["id"])
    with pd.option_context("display.max_rows", 10):
        text = frame._repr_html_()
    assert text.count("<tr") == 11
    assert "10 of 64 rows" in text
    with pd.option_context("display.notebook_repr_html", False):
        assert frame._repr_html_() is None


def test_frames_are_used_like_any_other(cache):
    frame = to_pandas(cache, ["id"])
    assert type(frame[frame["id"] > 60]) is type(frame)
    assert frame.assign(twice=frame["id"] * 2)["twice"].sum() == 2 * sum(range(64))
    assert frame.groupby(frame["id"] % 2).size().tolist() == [32, 32]
    assert frame.assign(twice=3)._repr_html_()
