"""Near duplicates: images whose difference hashes differ in few bits."""

from __future__ import annotations

import io

import numpy as np
import pytest
from helpers import limit, seqs

pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
pytest.importorskip("PIL", reason="the extra 'explore' is not installed")
from PIL import Image

import arrowcache as ac
from arrowcache import explore
from arrowcache.explore import compare

RNG = np.random.default_rng(0)


def smooth(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    """Different images, (count, height, width), 0 to 1: a few blobs each."""
    coarse = RNG.random((count, 6, 8)).astype(np.float32)
    return np.kron(coarse, np.ones((1, height // 6, width // 8), np.float32))


def cache_of(path, kind, values, segment_rows=4):
    cache = ac.Cache.create(
        path,
        {"image": kind, "n": ac.Tensor("int64")},
        "64MiB",
        segment_bytes="1MiB",
        segment_rows=segment_rows,
    )
    with cache.writer() as writer:
        writer.extend(image=values, n=np.arange(len(values)))
    return cache


def places(frame) -> list[tuple[int, int]]:
    """Which row is like which, by their numbers in caches of segments of 4 rows."""
    rows = 4 * frame["_seq"] + frame["_row"]
    return list(zip(rows.tolist(), (4 * frame["first_seq"] + frame["first_row"]).tolist(), strict=True))


def variants(images: np.ndarray) -> np.ndarray:
    """The same images, brighter, of less contrast, and with noise."""
    return np.clip(0.8 * images + 0.1 + RNG.normal(0, 0.004, images.shape), 0, 1).astype(np.float32)


def test_the_hash_is_krawetzs():
    image = RNG.random((8, 9)).astype(np.float32)
    bits = [int(image[y, x] < image[y, x + 1]) for y in range(8) for x in range(8)]
    (found,) = compare.difference_hashes(image[None])
    assert np.unpackbits(np.array([found]).view(np.uint8)).tolist() == bits


def test_a_larger_image_is_averaged_whatever_its_size():
    image = RNG.random((8, 9)).astype(np.float32)
    (wanted,) = compare.difference_hashes(image[None])
    assert compare.difference_hashes(np.kron(image, np.ones((5, 7), np.float32))[None]) == [wanted]
    for shape in ((1, 1), (3, 5), (100, 2), (17, 31)):
        assert compare.difference_hashes(np.zeros((2, *shape), np.float32)).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16", "float64", "complex64"])
@pytest.mark.parametrize("layout", ["hw", "hwc", "chw", "rgba"])
def test_other_versions_of_an_image_are_found_with_their_ids(tmp_path, dtype, layout):
    first = smooth(5)
    images = np.concatenate([first, variants(first[[3, 0]]), smooth(2)])
    if layout != "hw":
        images = np.repeat(images[..., None], 4 if layout == "rgba" else 3, axis=3)
    if layout == "chw":
        images = np.moveaxis(images, 3, 1)
    images = (255 * images).round().astype(np.uint8) if dtype == "uint8" else images.astype(dtype)
    with cache_of(tmp_path / "c", ac.Tensor(dtype, images.shape[1:]), images) as cache:
        found = explore.duplicates(cache, "image", near=6)
        assert list(found.columns) == ["_seq", "_row", "first_seq", "first_row", "bits"]
        assert (found.dtypes == np.int64).all()
        assert places(found) == [(5, 3), (6, 0)]
        assert found["bits"].max() <= 6
        assert not len(explore.duplicates(cache, ["image"]))
        assert explore.rows(cache, found, ["n"])["n"].tolist() == [5, 6]
        assert cache.stats().leased_bytes == 0


def png(image: np.ndarray, name: str = "png") -> bytes:
    file = io.BytesIO()
    Image.fromarray((255 * image).round().astype(np.uint8)).resize((640, 480)).save(file, name)
    return file.getvalue()


def test_files_of_images_are_compared_and_others_are_like_none(tmp_path):
    first = smooth(2)
    files = [png(first[0]), b"", png(first[1]), b"no image", b"", png(first[0], "jpeg"), png(first[1])[:300]]
    with cache_of(tmp_path / "c", ac.Binary(), files) as cache:
        assert places(explore.duplicates(cache, "image", near=4)) == [(5, 0)]


def test_images_are_hashed_some_at_a_time(tmp_path, monkeypatch):
    images = np.tile(smooth(1), (7, 1, 1))
    with cache_of(tmp_path / "c", ac.Tensor("float32", images.shape[1:]), images) as cache:
        wanted = explore.duplicates(cache, "image", near=0)
        limit(monkeypatch, hashed_numbers=5000)
        assert explore.duplicates(cache, "image", near=0).equals(wanted)
        assert places(wanted) == [(i, 0) for i in range(1, 7)]


@pytest.mark.parametrize("most", [0, 1, 5, 20])
def test_what_stays_is_not_alike_and_what_goes_is_like_its_first(most):
    values = (RNG.integers(0, 2**10, 400, np.uint64) * 0x40100401) ^ RNG.integers(0, 4, 400, np.uint64)
    firsts, bits = compare.group_near(values, most)
    is_first = firsts == np.arange(len(values))
    off = np.vectorize(int.bit_count)((values[:, None] ^ values[None]).astype(object))
    assert (off[np.arange(len(values)), firsts] == bits).all()
    assert bits.max() <= most
    assert is_first[firsts].all()
    kept = off[np.ix_(is_first, is_first)]
    assert (kept[~np.eye(len(kept), dtype=bool)] > most).all()
    for place, first in enumerate(firsts):  # the oldest that it is like
        assert not (off[place, :first][is_first[:first]] <= most).any()


def test_no_image_has_no_duplicates(tmp_path):
    with cache_of(tmp_path / "c", ac.Tensor("uint8", (8, 8)), np.zeros((0, 8, 8), np.uint8)) as cache:
        found = explore.duplicates(cache, "image", near=3)
    assert list(found.columns) == ["_seq", "_row", "first_seq", "first_row", "bits"]
    assert len(found) == 0


def test_samplers_go_on_while_images_are_hashed(tmp_path, monkeypatch):
    images = np.tile(smooth(1), (64, 1, 1))
    with cache_of(tmp_path / "c", ac.Tensor("float32", images.shape[1:]), images) as cache:
        left = []

        def packed(bits, axis, original=np.packbits):  # once a segment
            cache.evict("1GB")
            left.append(len(seqs(cache)))
            return original(bits, axis=axis)

        monkeypatch.setattr(np, "packbits", packed)
        assert len(explore.duplicates(cache, "image", near=0)) == 63
    assert left[-1] < 8 < left[0]


@pytest.mark.parametrize(
    ("columns", "near", "says"),
    [
        (None, 3, "near=3 compares the images of one column: name it, not image, n"),
        (["n"], 3, "column 'n' is Tensor(dtype='int64', shape=()), and near duplicates are of images"),
        ("n", 3, "PNG and JPEG files: image can be"),
        ("imag", 3, "did you mean 'image'?"),
        ("image", 64, "near=64 must be an int of at most 63"),
        ("image", -1, "near=-1 must"),
    ],
)
def test_what_cannot_be_compared_says_so(tmp_path, columns, near, says):
    with cache_of(tmp_path / "c", ac.Tensor("uint8", (8, 8)), np.zeros((1, 8, 8), np.uint8)) as cache:
        with pytest.raises(ValueError) as raised:
            explore.duplicates(cache, columns, near=near)
        assert says in str(raised.value)
        assert "\n" not in str(raised.value)
