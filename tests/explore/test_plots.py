"""Plots: what each draws, by its numbers; and what cannot be drawn is a sentence."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import EVERY_TYPE, columns_of, limit, make_cache, publish, segment_files
from quick import first_is_quick, in_part

pytest.importorskip("matplotlib", reason="the extra 'explore' is not installed")

import matplotlib as mpl

mpl.use("Agg")  # here alone: a variable would reach the kernels of other tests
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import arrowcache as ac
from arrowcache.arrow.segment import encode
from arrowcache.explore.live_view import Board
from arrowcache.explore.plots import plot_growth, plot_values

MIB = 2**20
OF_A_CACHE = [plot_growth, lambda cache, **more: plot_values(cache, "id", **more)]


@pytest.fixture(autouse=True)
def figures():
    """No figure outlives its test; each can be drawn."""
    yield
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()
    plt.close("all")


@pytest.fixture
def cache(tmp_path):
    """Ten segments of 16 rows, ids 0 to 159."""
    cache = make_cache(tmp_path / "cache", capacity=600 * 1024)
    publish(cache, 10)
    return cache


@pytest.fixture
def history(cache):
    """Of a cache that fills, is read once, and evicts."""
    board = Board(cache)
    board.look()
    with ac.Loader(cache, 16, shuffle=None) as loader:
        list(loader)
        board.look()
    publish(cache, 20)
    board.look()
    return board.history


def test_a_monitor_goes_on_while_its_history_is_drawn(cache, history):
    is_over, ax = threading.Event(), plt.figure().subplots()

    def go_on() -> None:
        while not is_over.is_set():
            history.add(dataclasses.replace(history.last, clock=history.last.clock + 1))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for _ in range(in_part(20)):
            plot_growth(cache, history, ax=ax)
            ax.clear()
    finally:
        is_over.set()
        thread.join()


def line(ax: Axes, label: str) -> np.ndarray:
    """The values of a line, by its label."""
    (found,) = [one for one in ax.get_lines() if one.get_label() == label]
    return np.asarray(found.get_ydata(), float)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_a_plot_of_a_cache_takes_it_or_its_path_and_draws_where_it_is_told(cache, number):
    plot = OF_A_CACHE[number]
    figure, ax = plt.subplots()
    assert plot(cache, ax=ax) is ax
    assert plt.get_fignums() == [figure.number]
    other = plot(str(cache.path))
    assert other.figure is not figure
    assert cache.stats().leased_bytes == 0


def test_an_empty_cache_makes_an_empty_plot(tmp_path):
    assert isinstance(plot_growth(make_cache(tmp_path / "cache")), Axes)


@pytest.mark.parametrize("history", [5, "x", 0])
def test_growth_over_what_is_no_history_is_a_sentence(cache, history):
    with pytest.raises(TypeError, match="expected a History, such as monitor"):
        plot_growth(cache, history)
    assert plt.get_fignums() == []


def test_growth_adds_up_what_is_there(cache):
    for number, path in enumerate(segment_files(cache)):
        os.utime(path, (1e9 + number, 1e9 + number))
    ax = plot_growth(str(cache.path))
    sizes = line(ax, "segments in the cache")
    assert sizes[-1] == pytest.approx(cache.stats().published_bytes / MIB)
    assert (np.diff(sizes) > 0).all()
    assert line(ax, "capacity")[0] == pytest.approx(600 / 1024)


def test_growth_over_a_history_shows_what_was_evicted(cache, history):
    ax = plot_growth(cache, history)
    stored, evicted = line(ax, "published segments"), line(ax, "evicted since")
    assert len(stored) == len(evicted) == 3
    assert stored[-1] == pytest.approx(cache.stats().published_bytes / MIB)
    each = cache.stats().published_bytes / cache.stats().segments / MIB
    assert evicted[-1] == pytest.approx(each * (30 - cache.stats().segments))


def test_a_name_with_control_characters_is_drawn(tmp_path):
    schema = {"\x1b[31m$x_y$": ac.Tensor("float32")}
    with ac.Cache.create(tmp_path / "c", schema, capacity="4MiB", segment_bytes="256KiB") as cache:
        with cache.writer() as writer:
            writer.append({"\x1b[31m$x_y$": 1.0})
        ax = plot_values(cache, "\x1b[31m$x_y$")
    assert ax.get_ylabel() == r"\x1b[31m\$x_y\$"
    ax.figure.canvas.draw()  # a character without a glyph would be a warning


@pytest.mark.parametrize("plot", OF_A_CACHE)
def test_a_cache_that_vanishes_is_one_sentence(cache, plot):
    shutil.rmtree(cache.path)
    with pytest.raises(FileNotFoundError, match="moved or removed while in use"):
        plot(cache)


def test_values_show_each_segments_share_oldest_first(cache):
    ax = plot_values(cache, "id", bins=10)
    (mesh,) = ax.collections
    shares = np.asarray(mesh.get_array()).reshape(10, 10)
    assert np.allclose(shares.sum(axis=0), 1)
    assert (shares.argmax(axis=0) == np.arange(10)).all(), "ids grow with the segments"


@pytest.mark.parametrize("column", ["image", "id"])
def test_of_many_segments_and_values_some_are_drawn(cache, monkeypatch, column):
    limit(monkeypatch, plotted_segments=4, plotted_values=5)
    ax = plot_values(cache, column, bins=1000)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "3", "6", "9"]
    (mesh,) = ax.collections
    shares = np.asarray(mesh.get_array()).reshape(1000, 4)
    assert np.allclose(shares.sum(axis=0), 1)
    assert np.allclose(5 * shares, (5 * shares).round()), "of 5 values each"


@pytest.fixture
def every(tmp_path):
    """A cache of every type."""
    cache = ac.Cache.create(tmp_path / "every", EVERY_TYPE, capacity="4MiB", segment_bytes="64KiB")
    for seed in range(3):
        cache.store.publish(encode(EVERY_TYPE, columns_of(EVERY_TYPE, 16, seed)))
    return cache


@pytest.mark.parametrize("column", first_is_quick(EVERY_TYPE))
def test_every_column_is_drawn_or_says_why_not(every, column):
    kind = EVERY_TYPE[column]
    if isinstance(kind, ac.String | ac.Binary) or "complex" in getattr(kind, "dtype", ""):
        with pytest.raises(ValueError, match=rf"column '{column}' is .*no numbers.*drawn: id"):
            plot_values(every, column)
        assert plt.get_fignums() == []
    else:
        assert isinstance(plot_values(every, column), Axes)


@pytest.mark.slow
def test_bfloat16_and_timestamps_are_drawn_as_what_they_mean(tmp_path):
    schema = ac.Schema({"b": ac.Tensor("bfloat16", (2,)), "when": ac.Timestamp(), "flag": ac.Tensor("bool")})
    cache = ac.Cache.create(tmp_path / "cache", schema, capacity="1MiB", segment_bytes="16KiB")
    with cache.writer() as writer:
        bits = np.array([1.0, -3.0], np.float32).view(np.uint32) >> 16
        for second in range(10):
            when = np.datetime64("2020-01-01") + np.timedelta64(second, "s")
            writer.append(b=bits.astype(np.uint16), when=when, flag=second % 2 == 0)
    assert plot_values(cache, "b").get_ylim() == (-3, 1)
    low, high = plot_values(cache, "when").get_ylim()
    assert (low, high) == (1577836800, 1577836809)
    assert plot_values(cache, "flag").get_ylim() == (0, 1)
    with cache.writer() as writer:
        writer.append(b=bits.astype(np.uint16), when=np.datetime64("NaT"), flag=True)
    assert plot_values(cache, "when").get_ylim() == (low, high)


def test_what_is_not_finite_is_left_out_and_nothing_else_is_a_sentence(tmp_path):
    schema = ac.Schema({"x": ac.Tensor("float32", ())})
    cache = ac.Cache.create(
        tmp_path / "cache", schema, capacity="1MiB", segment_rows=4, segment_bytes="16KiB"
    )
    with pytest.raises(ValueError, match="no finite values"):
        plot_values(cache, "x")
    with cache.writer() as writer:
        writer.extend(x=np.array([np.nan, np.inf, -np.inf, np.nan], np.float32))
    with pytest.raises(ValueError, match="no finite values"):
        plot_values(cache, "x")
    with cache.writer() as writer:
        writer.extend(x=np.array([np.nan, 2, 2, 2], np.float32))
    assert plot_values(cache, "x").get_ylim() == (1.5, 2.5)
    assert [label.get_text() for label in plot_values(cache, "x").get_xticklabels()] == ["1"]


def test_numbers_that_are_farther_apart_than_any_number_are_drawn(tmp_path):
    cache = ac.Cache.create(
        tmp_path / "cache", {"x": ac.Tensor("float64")}, capacity="1MiB", segment_bytes="16KiB"
    )
    with cache.writer() as writer:
        writer.extend(x=np.array([-1.7e308, 0, 1.7e308]))
    assert plot_values(cache, "x").get_ylim() == (-1e300, 1e300)


def test_a_wrong_column_or_number_of_bins_is_a_sentence(cache):
    with pytest.raises(ValueError, match="unknown column 'nope': the cache has id, image"):
        plot_values(cache, "nope")
    with pytest.raises(ValueError, match="bins=0"):
        plot_values(cache, "id", bins=0)
    assert plt.get_fignums() == []


def test_what_is_evicted_while_it_is_drawn_is_left_out(cache, monkeypatch):
    clipped = []

    def clip(*arguments, original=np.clip):  # the last step of each segment, oldest first
        clipped.append(1)
        if len(clipped) == 3:
            cache.evict(5 * 20 * 1024)
        return original(*arguments)

    monkeypatch.setattr(np, "clip", clip)
    ax = plot_values(cache, "id")
    first = [int(label.get_text()) for label in ax.get_xticklabels()]
    assert {0, 1, 2, 9} <= set(first)
    assert not {3, 4} & set(first)


def test_segments_are_leased_one_at_a_time(cache, monkeypatch):
    leased = []

    def sort(places, original=np.sort):  # of the values that are drawn, while their segment is read
        leased.append(len(cache.store.survey().leased))
        return original(places)

    limit(monkeypatch, plotted_values=8)
    monkeypatch.setattr(np, "sort", sort)
    plot_values(cache, "id")
    assert leased[:10] == [1] * 10, "matplotlib sorts, too"


@pytest.mark.slow
def test_names_are_no_formulas(tmp_path):
    schema = ac.Schema({"$\\frac$": ac.Tensor("int64")})
    cache = ac.Cache.create(Path(tmp_path / "cache"), schema, capacity="1MiB", segment_bytes="16KiB")
    with cache.writer() as writer:
        writer.append({"$\\frac$": 1})
    plot_values(cache, "$\\frac$").figure.canvas.draw()
