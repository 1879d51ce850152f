"""Retries and stores: what is tried again, what never, and that no secret is told."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import in_child, limit, wait_until
from pyarrow import fs

from arrowcache.sampling.reads import at_once
from arrowcache.sampling.retries import Retries
from arrowcache.sampling.sources.object_store import Handles, locate, redacted
from arrowcache.sampling.sources.source import Choice, parse_weights


def failing(*errors: Exception):
    """Raises these, one a call, then returns 7."""
    left = list(errors)

    def read() -> int:
        if left:
            raise left.pop(0)
        return 7

    return read


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_what_passes_is_tried_again_after_delays_that_double_up_to_a_bound(failures):
    delays: list[float] = []
    retries = Retries(3, 1.0, 3.0, sleep=delays.append, jitter=lambda: 0.5)
    assert retries.run(failing(*[OSError("reset")] * failures), "x") == 7
    assert delays == [0.5, 1.0, 1.5][:failures]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("gone"), FileNotFoundError),
        (PermissionError("no"), PermissionError),
        (IsADirectoryError(21, "folder"), IsADirectoryError),
        (OSError("When reading x: AWS Error ACCESS_DENIED during HeadObject"), PermissionError),
        (OSError("AWS Error INVALID_ACCESS_KEY_ID during ListObjectsV2"), PermissionError),
        (OSError("AWS Error SIGNATURE_DOES_NOT_MATCH during ListObjectsV2"), PermissionError),
        (OSError("AWS Error UNKNOWN (HTTP status 403) during HeadBucket"), PermissionError),
        (OSError("google::cloud::Status(UNAUTHENTICATED: who)"), PermissionError),
        (OSError("AWS Error NO_SUCH_BUCKET during ListObjectsV2"), FileNotFoundError),
    ],
)
def test_what_cannot_pass_ends_at_once_with_its_own_type(error, kind):
    delays: list[float] = []
    with pytest.raises(kind, match="a/file"):
        Retries(3, sleep=delays.append).run(failing(error, error), "a/file")
    assert not delays


def test_the_last_error_names_file_cause_and_attempts():
    retries = Retries(2, sleep=lambda _: None)
    with pytest.raises(OSError, match=r"in 3 attempts: curlCode 7: 'a/file'") as caught:
        retries.run(failing(*[OSError("curlCode\n  7")] * 3), "a/file")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(OSError, match="at the first attempt"):
        Retries(0).run(failing(OSError("x")), "a/file")


@pytest.mark.parametrize(
    "options", [{"count": -1}, {"count": 1.5}, {"first_seconds": -1}, {"most_seconds": float("nan")}]
)
def test_retries_that_cannot_be_fail_at_once(options):
    with pytest.raises((ValueError, TypeError), match="must be"):
        Retries(**options)


def test_a_file_called_access_denied_is_no_refusal():
    assert Retries(1, sleep=lambda _: None).run(failing(OSError("ACCESS_DENIED.npy: reset")), "x") == 7


def test_other_errors_pass_through():
    with pytest.raises(KeyError):
        Retries(3).run(failing(KeyError("x")), "a/file")


def test_a_store_is_pickled_without_its_connection_and_connects_again_after_a_fork(tmp_path):
    store, (path,) = locate(tmp_path, None, 0)
    (tmp_path / "x").write_bytes(b"data")
    connection = store.filesystem
    assert store.filesystem is connection
    assert pickle.loads(pickle.dumps(store)).find(f"{path}/x", ()) == [(f"{path}/x", 4)]

    def body() -> None:
        assert store.filesystem is not connection
        assert store.find(f"{path}/x", ()) == [(f"{path}/x", 4)]

    with in_child(body):
        pass


class Unread:
    """An open file that is read by nobody."""

    def read_at(self, nbytes: int, start: int) -> bytes:
        raise AssertionError("an open file of fsspec reads one range at a time")


def test_bytes_of_an_open_file_of_fsspec_are_asked_for_by_themselves(tmp_path):
    local = pytest.importorskip("fsspec.implementations.local")
    (tmp_path / "x").write_bytes(b"0123456789")
    store, (path,) = locate(str(tmp_path / "x"), local.LocalFileSystem(), 0)
    assert store.read(Unread(), 3, 4, path) == b"456"


def test_a_filesystem_that_is_given_is_used(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"data")
    inner = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    store, paths = locate(["x.bin"], inner, 0)
    assert paths == ["x.bin"]
    assert pickle.loads(pickle.dumps(store)).open("x.bin").read() == b"data"


def test_a_path_with_a_hash_or_a_space_is_a_path(tmp_path):
    folder = tmp_path / "a #1 %20"
    folder.mkdir()
    (folder / "x.bin").write_bytes(b"data")
    store, (path,) = locate(folder, None, 0)
    assert [Path(file.path).name for file in store.find(path, (".bin",))] == ["x.bin"]


def test_what_is_done_at_once_keeps_its_order_and_ends_with_the_first_error():
    assert at_once(lambda n: n * n, range(100)) == [n * n for n in range(100)]
    with pytest.raises(ZeroDivisionError):
        at_once(lambda n: 1 // (n - 5), range(100))


@pytest.mark.parametrize("uri", ["s3:/KEY:SECRET@bucket/x", "s3:KEY:SECRET@bucket/x", "gs:/a:SECRET@b/x"])
def test_a_uri_that_lacks_slashes_is_refused_without_its_secret(uri):
    with pytest.raises(ValueError, match=r"begins with (s3|gs)://") as caught:
        locate(uri, None, 0)
    assert "SECRET" not in str(caught.value)


class Thing:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_what_was_not_used_for_longest_is_closed_first():
    kept: Handles[Thing] = Handles(2)

    def opened(key: int, of: Handles[Thing] = kept) -> Thing:
        with of.use(key, Thing) as thing:
            assert not thing.closed
            return thing

    first, second = opened(1), opened(2)
    assert opened(1) is first
    third = opened(3)
    assert (first.closed, second.closed, third.closed) == (False, True, False)
    with pytest.raises(OSError, match="reset"), kept.use(1, Thing):
        raise OSError("reset")
    assert first.closed
    assert opened(1) is not first
    copy = pickle.loads(pickle.dumps(kept))
    assert opened(3, copy) is not third

    def body() -> None:
        assert opened(3) is not third
        kept.close()
        assert not third.closed

    with in_child(body):
        pass
    kept.close()
    assert third.closed


def test_what_a_thread_uses_is_closed_after_it_and_made_once():
    kept: Handles[Thing] = Handles(1)
    made: list[Thing] = []
    both_use, one_has_ended = threading.Barrier(2), threading.Event()

    def make() -> Thing:
        made.append(Thing())
        return made[-1]

    def use(wait: bool) -> bool:
        with kept.use(1, make) as thing:
            both_use.wait(60)
            if wait:
                one_has_ended.wait(60)
            return thing.closed

    with ThreadPoolExecutor(2) as pool:
        long, short = pool.submit(use, True), pool.submit(use, False)
        assert not short.result()
        with kept.use(2, Thing):  # in the first one's place
            assert not made[0].closed
        kept.close()
        one_has_ended.set()
        assert not long.result()
    assert len(made) == 1
    assert made[0].closed


def test_a_draw_at_the_end_of_the_range_is_the_last_choice():
    class Last:
        def random(self, count: int) -> np.ndarray:
            return np.full(count, 1 - 2**-53)

    assert Choice([0.1] * 10).draw(Last()) == 9  # type: ignore[arg-type]
    assert Choice([3.0]).draw(Last()) == 0  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 weights for 1"):
        parse_weights([1, 2], ["x"])
    for large in (1.7e308, 10**400):
        with pytest.raises(ValueError, match="so large that their sum is infinite"):
            parse_weights([large, large], ["x", "y"])


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://b/a@x/c", "s3://b/a@x/c"),
        ("gs://b/a@1.2/c", "gs://b/a@1.2/c"),
        ("s3://key:secret@bucket/path?x=a@b", "s3://bucket/path"),
        ("s3://key:secret@bucket/a@x/c", "s3://bucket/a@x/c"),
        ("s3://bucket/path?access_key=key&secret_key=se@cret", "s3://bucket/path"),
        ("s3://bucket?region=a@b", "s3://bucket"),
        ("s3://key:se@cret@bucket/path", "s3://bucket/path"),
        ("s3://key:se%2Fcr%40et@bucket/path%40x", "s3://bucket/path%40x"),
        ("s3://key:se/cret@bucket/path", "s3://bucket/path"),  # no URI, and yet a secret
        ("s3://key:se/cr/et@bucket", "s3://bucket"),
        ("s3://key:se?cret@bucket/path", "s3://bucket/path"),
        ("http://u:p@h/x", "http://h/x"),
        ("http://u:p@h:8080/x@y", "http://h:8080/x@y"),
        ("http://h:8080/x@y", "http://h:8080/x@y"),
        ("hdfs://user@host:9000/a@b", "hdfs://host:9000/a@b"),
        ("hdfs://user@[::1]:9000/a", "hdfs://[::1]:9000/a"),
        ("http://[::1]:9000/a@b", "http://[::1]:9000/a@b"),
        (
            "abfs://container:key@account.dfs.core.windows.net/a@b",
            "abfs://container@account.dfs.core.windows.net/a@b",
        ),
        ("abfs://:key@account.blob.core.windows.net/c/p", "abfs://account.blob.core.windows.net/c/p"),
        ("file:///data/a@b/c", "file:///data/a@b/c"),
        ("/data/me@home/x:y@z", "/data/me@home/x:y@z"),
        ("me@home/x", "me@home/x"),
    ],
)
def test_a_uri_is_shown_without_credentials_and_whole_otherwise(uri, shown):
    assert redacted(uri) == shown


def test_an_error_waits_for_no_other_call_that_was_begun_with_it():
    hangs, ended = threading.Event(), threading.Event()

    def call(number: int) -> int:
        if number == 0:
            raise ZeroDivisionError
        assert hangs.wait(60)
        ended.set()
        return number

    with pytest.raises(ZeroDivisionError):
        at_once(call, range(40))
    assert not ended.is_set()
    hangs.set()
    assert at_once(lambda number: -number, range(40)) == [-number for number in range(40)]


def test_threads_end_with_the_calls_that_they_make(monkeypatch):
    limit(monkeypatch, idle_read_seconds=3600)
    before = {*threading.enumerate()}
    assert at_once(lambda number: -number, range(40)) == [-number for number in range(40)]
    wait_until(lambda: not {*threading.enumerate()} - before, "the end of threads without a call")
