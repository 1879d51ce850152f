"""WebDatasetShards: samples as they were put into tar files, decoded without pickle."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from drawing import require_pure, take, write_tar

import arrowcache as ac
from arrowcache.errors import SamplerError, SchemaError
from arrowcache.sampling.retries import Retries
from arrowcache.sampling.sources import WebDatasetShards


def encoded(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def sample_files(number: int) -> dict[str, bytes]:
    name = f"train/{number:04}"
    return {
        f"{name}.npy": encoded(np.full(4, number, np.float32)), f"{name}.cls": str(number).encode(),
        f"{name}.txt": f"n{number}".encode(), f"{name}.meta.json": json.dumps([number, 1]).encode(),
        f"{name}.bin": bytes([number]) * 3,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "shards"
    path.mkdir()
    for shard in range(4):
        files = {"train/": b"", "README": b"no sample", "train/.hidden": b"no sample"}
        for number in range(shard * 20, shard * 20 + 20):
            files |= sample_files(number)
        write_tar(path / f"{shard}.tar", files)
    return path


def check(sample) -> int:
    number = sample["cls"]
    assert np.array_equal(sample["npy"], np.full(4, number, np.float32))
    assert (sample["txt"], sample["meta.json"], sample["bin"]) == (
        f"n{number}",
        [number, 1],
        bytes([number]) * 3,
    )
    return int(number)


@pytest.mark.slow
def test_samples_are_what_was_stored(folder):
    source = WebDatasetShards(folder)
    assert source.schema == ac.Schema(
        {
            "npy": ac.Tensor("float32", (4,)), "cls": ac.Tensor("int64"), "txt": ac.String(),
            "meta.json": ac.Tensor("int64", (2,)), "bin": ac.Binary(),
        }
    )  # fmt: skip
    assert {check(sample) for sample in take(source, 800)} == set(range(80))
    require_pure(source)


def test_shards_which_are_read_from_their_beginning_fill_full_segments_from_the_start(folder):
    assert not WebDatasetShards(folder).ramp


def test_a_shard_is_read_in_order_but_for_a_small_shuffle(folder):
    first = [s["cls"] for s in take(WebDatasetShards(folder, shuffle=0), 20)]
    assert first == list(range(first[0], first[0] + 20))
    mixed = [s["cls"] for s in take(WebDatasetShards(folder, shuffle=5), 20)]
    assert sorted(mixed) == first
    assert mixed != first
    assert all(
        at <= number - first[0] + 14 and number - first[0] <= at + 5 for at, number in enumerate(mixed)
    )


def test_only_the_fields_asked_for_are_decoded(folder):
    assert list(take(WebDatasetShards(folder, fields=["txt"]), 1)[0]) == ["txt"]
    raw = WebDatasetShards(folder, lambda field, data: data, fields=["npy"])
    assert raw.schema == ac.Schema({"npy": ac.Binary()})
    ragged = WebDatasetShards(folder, schema={"npy": ac.Ragged("float32")})
    assert len(take(ragged, 3)) == 3


@pytest.mark.parametrize(
    ("field", "value"), [("a.b", '{"c": 1}'), ("a.b.c", 1), ("a.x.y", 2), ("a.x.y.z", 3), ("a.x", '{"y": 2}')]
)
def test_names_of_json_may_have_dots(tmp_path, field, value):
    found = {"a.b": {"c": 1}, "a": {"x": {"y": 2}}, "a.x.y": {"z": 3}}
    if field == "a.x.y":
        del found["a.x.y"]
    write_tar(tmp_path / "a.tar", {"0.json": json.dumps(found).encode()})
    assert take(WebDatasetShards(tmp_path, fields=[f"json.{field}"]), 1)[0] == {f"json.{field}": value}


def test_json_objects_are_text_and_fields_names_values_in_them(tmp_path):
    files: dict[str, bytes] = {}
    for number in range(8):
        found = {"caption": f"größe {number}", "size": {"width": number, "a.b": [number, 1]}, "none": None}
        files[f"{number}.json"] = files[f"{number}.meta.json"] = json.dumps(found).encode()
        files[f"{number}.bin"] = b"x"
    write_tar(tmp_path / "a.tar", files)
    whole = take(WebDatasetShards(tmp_path), 1)[0]
    assert json.loads(whole["json"])["size"]["a.b"] == json.loads(whole["meta.json"])["size"]["a.b"]
    assert "größe" in whole["json"]
    fields = ["json.caption", "json.size", "meta.json.size.width", "meta.json.size.a.b", "bin"]
    source = WebDatasetShards(tmp_path, lambda field, data: data * 2, fields=fields)
    assert source.schema == ac.Schema(
        {
            "json.caption": ac.String(), "json.size": ac.String(), "meta.json.size.width": ac.Tensor("int64"),
            "meta.json.size.a.b": ac.Tensor("int64", (2,)), "bin": ac.Binary(),
        }
    )  # fmt: skip
    for sample in take(source, 8):
        number = sample["meta.json.size.width"]
        assert sample == {
            "json.caption": f"größe {number}",
            "json.size": json.dumps({"width": number, "a.b": [number, 1]}),
            "meta.json.size.width": number, "meta.json.size.a.b": [number, 1], "bin": b"xx",
        }  # fmt: skip
    floats = WebDatasetShards(tmp_path, schema={"json.size.width": ac.Tensor("float32")})
    assert floats.schema["json.size.width"] == ac.Tensor("float32")
    for field, says in {
        "json.captoin": "without 'captoin', did you mean 'caption'",
        "json.caption.x": "without 'x', it is no object",
        "json.none": "null is no value",
        "bin.x": "there is no field 'bin.x'",
    }.items():
        with pytest.raises(SchemaError, match=rf"a\.tar, sample '0': .*{says}"):
            WebDatasetShards(tmp_path, fields=[field])


def test_pictures_become_arrays_where_pillow_is_installed(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8)
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "png")
    write_tar(tmp_path / "a.tar", {"1.png": file.getvalue()})
    assert np.array_equal(take(WebDatasetShards(tmp_path), 1)[0]["png"], pixels)
    write_tar(tmp_path / "a.tar", {"1.jpg": b"no picture"})
    with pytest.raises(SchemaError, match=r"a\.tar, sample '1': field 'jpg' cannot be decoded"):
        WebDatasetShards(tmp_path)


def test_a_sample_that_lacks_a_field_is_an_error_that_names_shard_sample_and_field(folder):
    write_tar(folder / "1.tar", sample_files(20) | {"train/0021.cls": b"21"})
    with pytest.raises(SchemaError, match=r"1\.tar, sample 'train/0021': there is no field 'npy'"):
        take(WebDatasetShards(folder / "1.tar"), 2)


def test_what_cannot_be_decoded_is_an_error_that_names_the_field(tmp_path):
    for name, data in (("x.cls", b"cat"), ("x.json", b"null"), ("x.json", b"{"), ("x.txt", b"\xff")):
        write_tar(tmp_path / "a.tar", {name: data})
        with pytest.raises(SchemaError, match=r"a\.tar, sample 'x': field '\w+' cannot be decoded"):
            WebDatasetShards(tmp_path)


def test_a_field_that_drifts_is_an_error_that_names_shard_sample_and_field(tmp_path):
    write_tar(tmp_path / "a.tar", {"1.npy": encoded(np.zeros(3)), "2.npy": encoded(np.zeros(4))})
    source = WebDatasetShards(tmp_path)
    with pytest.raises(SchemaError, match=r"a\.tar, sample '2': field 'npy': expected shape \(3,\)"):
        take(source, 2)


def test_whatever_a_decoder_raises_names_shard_sample_and_field(folder):
    def decode(field, data):
        return {}[field]

    with pytest.raises(SchemaError, match=r"0\.tar, sample 'train/0000': field 'cls' .* KeyError: 'cls'"):
        WebDatasetShards(folder / "0.tar", decode, fields=["cls"])


def packings(tar: bytes) -> dict[str, tuple[bytes, str]]:
    """A tar in other files, by their names, with what is said of each."""
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as file:
        file.writestr("a.tar", tar)
    return {
        "a.tar.gz": (gzip.compress(tar), "it is compressed by gzip: decompress it"),
        "a.tgz": (gzip.compress(tar), "it is compressed by gzip: decompress it"),
        "a.tar": (gzip.compress(tar), "it is compressed by gzip: decompress it"),
        "a.tar.bz2": (bz2.compress(tar), "it is compressed by bzip2: decompress it"),
        "a.tar.xz": (lzma.compress(tar), "it is compressed by xz: decompress it"),
        "a.tar.zst": (pa.compress(tar, "zstd", asbytes=True), "it is compressed by zstd: decompress it"),
        "a.tar.lz4": (pa.compress(tar, "lz4", asbytes=True), "it is compressed by lz4: decompress it"),
        "a.zip": (zipped.getvalue(), "it is a zip archive: unpack it"),
        "page.tar": (b"<!DOCTYPE html><html>404", "it is a page of HTML"),
        "lfs.tar": (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        "table.tar": (b"PAR1" + bytes(508), "it is a Parquet file"),
    }


@pytest.mark.parametrize("schema", [None, {"cls": ac.Tensor("int64")}])
@pytest.mark.parametrize("name", packings(b""))
def test_another_file_than_a_tar_is_said_to_be_that_when_the_source_is_made(folder, tmp_path, name, schema):
    content, says = packings((folder / "0.tar").read_bytes())[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SamplerError, match=rf"{name}: cannot be read as tar: .*{says}"):
        WebDatasetShards(tmp_path / name, schema=schema)


def test_a_folder_of_compressed_shards_is_said_to_be_that(folder, tmp_path):
    for name in ("0.tar.gz", "1.tar.gz", "2.tgz", "3.tar.zst", "README"):
        (tmp_path / name).write_bytes(gzip.compress((folder / "0.tar").read_bytes()))
    for shard in folder.glob("*.tar"):
        shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"2 \.tar\.gz, .*decompress those that end in .*\.tgz"):
        WebDatasetShards(tmp_path)
    (folder / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"no file that ends in \.tar; it has 1 \.txt'?:? "):
        WebDatasetShards(folder)


def test_a_misspelt_field_is_an_error_when_the_source_is_made(folder):
    for given in ({"fields": ["tx"]}, {"schema": {"tx": ac.String()}}, {"fields": ["cls", "tx"]}):
        with pytest.raises(SchemaError, match=r"no field 'tx', did you mean 'txt'\? there are npy, cls, txt"):
            WebDatasetShards(folder, **given)
    with pytest.raises(SchemaError, match="field 'cls'"):  # of another type
        WebDatasetShards(folder, schema={"cls": ac.Tensor("int64", (2,))})
    with pytest.raises(ValueError, match="names a field twice"):
        WebDatasetShards(folder, fields=["cls", "cls"])


@pytest.mark.parametrize("files", [{}, {"README": b"no dot, no field"}])
def test_shards_without_a_sample_end_the_task(tmp_path, files):
    write_tar(tmp_path / "a.tar", files)
    with pytest.raises(SamplerError, match=r"a\.tar: there is no sample"):
        WebDatasetShards(tmp_path)
    declared = WebDatasetShards(tmp_path, schema={"cls": ac.Tensor("int64")})
    with pytest.raises(SamplerError, match=r"a\.tar: the last of 100 shards in a row without a sample"):
        take(declared, 1)


def test_pickles_are_never_read(tmp_path):
    write_tar(tmp_path / "a.tar", {"x.npy": encoded(np.array([{}], object), allow_pickle=True)})
    with pytest.raises(SchemaError, match="Object arrays cannot be loaded"):
        WebDatasetShards(tmp_path)


def test_damaged_shards_are_an_error_that_names_them(folder):
    shard = folder / "2.tar"
    whole = shard.read_bytes()
    source = WebDatasetShards(shard)
    shard.write_bytes(bytes([1]) * len(whole))
    with pytest.raises(SamplerError, match=r"2\.tar: cannot be read as tar"):
        take(source, 1)
    for kept in (3000, len(whole) // 2, 4096):
        shard.write_bytes(whole[:kept])
        with pytest.raises(SamplerError, match=r"2\.tar"):
            take(WebDatasetShards(shard), 100)
    shard.write_bytes(b"")
    with pytest.raises(SamplerError, match=r"2\.tar"):
        WebDatasetShards(shard)


def rows_of(tmp_path, content: bytes) -> list[int]:
    """All samples of a shard of 8 rows a tar, from its beginning."""
    (tmp_path / "a.tar").write_bytes(content)
    source = WebDatasetShards(tmp_path / "a.tar", schema={"cls": ac.Tensor("int64")}, shuffle=0)
    return [sample["cls"] for sample in take(source, 8 * max(1, content.count(b"0000.cls")))]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_damaged_header_is_an_error_wherever_it_stands(tmp_path, form):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for number in range(8):
            member = tarfile.TarInfo(f"s/{'long' * 30 if number == 5 else ''}/{number:04}.cls")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"%d" % number))
    whole = file.getvalue()
    blocks = len(whole.rstrip(b"\0")) // 512 + 1
    if form == tarfile.PAX_FORMAT:
        record = whole.index(b" path=") - 3
        with pytest.raises(SamplerError, match=r"a\.tar: cannot be read as tar: .*get the file anew"):
            rows_of(tmp_path, whole[:record] + b"000" + whole[record + 3 :])
    assert rows_of(tmp_path, whole) == list(range(8))
    for at in range(0, blocks * 512, 512):
        if whole[at + 257 : at + 262] != b"ustar":
            continue
        for damage in (bytes([whole[at + 150] ^ 0xFF]), b"\0" * (512 - 150)):
            with pytest.raises(SamplerError, match=r"a\.tar: cannot be read as tar: .*get the file anew"):
                rows_of(tmp_path, whole[: at + 150] + damage + whole[at + 150 + len(damage) :])
        if at:
            with pytest.raises(SamplerError, match=r"a\.tar: cannot be read as tar: .*get the file anew"):
                rows_of(tmp_path, whole[:at] + bytes(512) + whole[at + 512 :])


def test_a_tar_ends_with_blocks_of_zeros_or_with_its_file_and_another_may_follow(tmp_path):
    write_tar(tmp_path / "a.tar", {f"{number:04}.cls": b"%d" % number for number in range(8)})
    whole = (tmp_path / "a.tar").read_bytes()
    bare = whole[: 8 * 1024]
    assert not whole[len(bare) :].strip(b"\0")
    for ending in (0, 512, 1024, 1536, 1 << 20):
        assert rows_of(tmp_path, bare + bytes(ending)) == list(range(8))
    for between in (0, 1024, 10240):
        assert rows_of(tmp_path, bare + bytes(between) + whole) == [*range(8), *range(8)]
    for rest in (bytes(512) + whole, whole + bytes([1]) * 512):
        with pytest.raises(SamplerError, match=r"a\.tar: cannot be read as tar: .*get the file anew"):
            rows_of(tmp_path, bare + rest)


def test_arguments_that_cannot_work_fail_at_once(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        WebDatasetShards(tmp_path / "nothing")
    with pytest.raises(TypeError, match="fields must be a list"):
        WebDatasetShards(folder, fields="txt")
    with pytest.raises(ValueError, match="shuffle"):
        WebDatasetShards(folder, shuffle=-1)
    with pytest.raises(ValueError, match="fields are txt, and schema has cls"):
        WebDatasetShards(folder, fields=["txt"], schema={"cls": ac.Tensor("int64")})


def test_a_read_that_fails_is_tried_again_and_changes_nothing(folder):
    local = pytest.importorskip("fsspec.implementations.local")
    delays: list[float] = []

    class Flaky(local.LocalFileSystem):
        cachable = False
        opened = 0

        def _open(self, path, *args, **options):
            Flaky.opened += 1
            if Flaky.opened % 2:
                raise OSError("connection reset")
            return super()._open(path, *args, **options)

    patient = Retries(1, sleep=delays.append)
    flaky = WebDatasetShards(str(folder), filesystem=Flaky(), retries=patient)
    found, expected = take(flaky, 60), take(WebDatasetShards(folder), 60)
    assert [sample["cls"] for sample in found] == [sample["cls"] for sample in expected]
    assert len(delays) > 1
    with pytest.raises(OSError, match="at the first attempt: connection reset"):
        WebDatasetShards(str(folder), filesystem=Flaky(), retries=0)
