"""`arrowcache import` of TFRecord files where TensorFlow is; test_cli.py has what it says where it is not."""

from __future__ import annotations

import os
import re

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
pytest.importorskip("typer", reason="typer is not installed")

from helpers import make_cache, publish, published_ids

import arrowcache as ac
from arrowcache.cli import OK, USAGE, WRONG
from arrowcache.tensorflow import to_tfrecords


@pytest.fixture
def files(tmp_path):
    """TFRecord files of 10 segments, ids 0 to 159, in the folder "records"."""
    with make_cache(tmp_path / "cache") as cache:
        publish(cache, 10)
        return to_tfrecords(cache, tmp_path / "records")


def test_files_and_folders_of_tfrecord_are_imported(call, files, tmp_path):
    for name, given in (("files", files), ("folder", [tmp_path / "records"])):
        with make_cache(tmp_path / name) as cache:
            code, out, err = call("import", *given, cache.path)
            assert (code, err) == (OK, "")
            assert "imported\t160\t" in out
            assert sorted(published_ids(cache)) == list(range(160))
            assert cache.verify() == []


def test_compressed_files_are_known_by_their_names(call, files, tmp_path):
    import gzip

    packed = tmp_path / "packed.tfrecord.gz"
    packed.write_bytes(gzip.compress(files[0].read_bytes()))
    with make_cache(tmp_path / "other") as cache:
        assert "imported\t16\t1\t" in call("import", packed, cache.path)[1]
        code, out, err = call("import", *files, packed, cache.path)
    assert (code, out, err.count("\n")) == (USAGE, "", 1)
    assert "some files are compressed and some are not" in err


def test_what_cannot_be_imported_is_one_sentence(call, files, tmp_path):
    with make_cache(tmp_path / "other", {"nothing": ac.Tensor("int64")}) as cache:
        code, out, err = call("import", *files, cache.path)
        assert (code, out, err.count("\n")) == (WRONG, "", 1)
        assert "nothing" in err
        (damaged := tmp_path / "damaged.tfrecord").write_bytes(files[0].read_bytes()[:-7])
        for file, wrong, says in (
            (damaged, WRONG, "damaged.tfrecord"),
            (tmp_path / "missing.tfrecord", USAGE, "missing.tfrecord"),
        ):
            code, out, err = call("import", file, cache.path)
            assert (code, out, err.count("\n")) == (wrong, "", 1)
            assert says in err
            assert "Traceback" not in err
    code, out, err = call("import", *files, tmp_path / "nowhere")
    assert (code, out) == (USAGE, "")
    assert "say its --capacity and --schema" in err


def test_a_cache_is_made_of_the_schema_that_is_said_or_nothing_is(call, files, tmp_path):
    schema = "id: int64, image: float32[16, 16]"
    options = ["--capacity", "4MiB", "--segment-bytes", "64KiB", "--schema", schema]
    (bad := tmp_path / "bad.tfrecord").write_bytes(files[0].read_bytes()[:-7])
    code, out, err = call("import", bad, tmp_path / "new" / "c", *options)
    assert (code, out, err.count("\n")) == (WRONG, "", 1)
    assert "bad.tfrecord, record 15: cannot be read" in err
    assert "nothing was imported" in err
    assert not re.search(r"\w=|None", err)
    assert not (tmp_path / "new").exists()
    code, out, err = call("import", *files, tmp_path / "c", *options)
    assert (code, err) == (OK, "")
    assert "imported\t160\t" in out
    code, out, err = call("import", *files, tmp_path / "c")
    assert (code, out, err.count("\n")) == (USAGE, "", 1)
    assert "all 160 rows of 10 files already: nothing was imported; --again imports them once more" in err
    assert "imported\t160\t" in call("import", *files, tmp_path / "c", "--again")[1]
