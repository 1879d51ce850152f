"""WebDatasetShards: samples of tar files in WebDataset's format.

A tar is read from its beginning on, as a stream: there is no index. Files that follow each other and have a
name in common up to the first dot of their last part are one sample, and the part after that dot names
the field: `a/0017.jpg` and `a/0017.cls` are the fields "jpg" and "cls" of one sample. A file may be several
tars, one after the other.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from tarfile import HeaderError, ReadError
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from arrowcache.arrow.convert import require_value
from arrowcache.arrow.schema import FieldType, Schema
from arrowcache.errors import SamplerError, SchemaError
from arrowcache.sampling.retries import Retries, in_place_of
from arrowcache.sampling.samples import Fault, first_whole, made_or_fault
from arrowcache.sampling.sources.object_store import URI, ListedFile, StoreFile, locate
from arrowcache.sampling.sources.source import Choice, Source, first_of, shuffled
from arrowcache.units import did_you_mean, format_count, parse_count

if TYPE_CHECKING:
    from typing import Self

Decode = Callable[[str, bytes], Any]
"""(field, bytes) -> the value of the field."""

_BUFFER_BYTES = 1 << 20
_ENDS = tarfile.EOFHeaderError, tarfile.EmptyHeaderError  # type: ignore[attr-defined]  # not in typeshed
_MAX_EMPTY = 100  # shards in a row without a sample


class WebDatasetShards(Source):
    """Draws shards in proportion to their bytes, and yields the samples of each from its beginning.

    Samples come in order, except for a small shuffle: so the segments of many tasks begin with the first
    samples of some shard. Shards of about a segment's samples are drawn evenly; of much larger ones, the ends
    are never reached. So a pool's first segments are full ones, too. A task reads its shard piece by piece,
    and neither `reads` nor hedges make it faster: more `workers` do.

    Args:
        uris: a .tar, a folder with all below it, or several of either, on one store.
        decode: function of a field's name and its bytes that returns the value. None means `decode_by_name`.
        fields: names of the fields. None means those of the first sample. Other files of a sample are left
            out. "json.caption" is a value of the JSON object "json", which `decode` does not see, and
            "json.size.width" one of an object in it.
        shuffle: number of samples held; a random one of them is yielded for each that is read.
        schema: None means that of the first sample; a ragged field cannot be inferred from it.
        filesystem: of pyarrow.fs or fsspec; the URIs are paths on it. None means the URI's own.
        retries: number of further attempts at a read before its error is raised.
    Raises: FileNotFoundError, PermissionError, OSError: errors of the store. SamplerError: a file that is no
        tar, or damaged, or without a sample. SchemaError: a sample that lacks a field, or has a value that
        does not fit `schema` or cannot be decoded, whatever `decode` raises; names shard, sample and field.
        ValueError: `fields` differ from those of `schema`. All of these errors come at construction for the
        first shard, else from a task.
    """

    ramp = False

    def __init__(
        self,
        uris: URI | Iterable[URI],
        decode: Decode | None = None,
        *,
        fields: Iterable[str] | None = None,
        shuffle: int = 64,
        schema: Schema | Mapping[str, FieldType] | None = None,
        filesystem: Any = None,
        retries: int | Retries = 4,
    ) -> None:
        if isinstance(fields, str):
            raise TypeError(f"fields must be a list of names, such as fields=[{fields!r}]")
        self._decode = decode_by_name if decode is None else decode
        self._shuffle = parse_count(shuffle, "shuffle", least=0)
        self._store, paths = locate(uris, filesystem, retries)
        self._shards = [file for path in paths for file in self._store.find(path, (".tar",))]
        self._choice = Choice([float(max(1, shard.nbytes)) for shard in self._shards])
        self._fields: tuple[str, ...] | None = None if fields is None else tuple(fields)
        if self._fields is not None and len(set(self._fields)) != len(self._fields):
            raise ValueError(f"fields {self._fields} names a field twice")
        self._kinds: Mapping[str, FieldType] = {}  # until the schema is known
        if schema is not None:
            self.schema = Schema(schema)
            if self._fields is not None and set(self._fields) != set(self.schema):
                raise ValueError(
                    f"fields are {', '.join(map(str, self._fields)) or 'none'}, and schema has "
                    f"{', '.join(self.schema)}: one of both is enough"
                )
            self._fields = tuple(self.schema)
            self._kinds = self.schema
        # With a schema, too: what does not fit says so now.
        first = first_whole(partial(first_of, sample) for sample in self._samples(self._shards[0]))
        if schema is None:
            if first is None:
                raise SamplerError(f"{self._name(self._shards[0])}: there is no sample in it")
            self._kinds = self.schema = Schema.infer(first)
            self._fields = tuple(self.schema)

    def __repr__(self) -> str:
        others = format_count(len(self._shards) - 1, "other shard")
        return f"WebDatasetShards({self._name(self._shards[0])!r} and {others})"

    def __call__(self, rng: np.random.Generator) -> Iterator[Any]:
        empty = 0
        while empty < _MAX_EMPTY:
            shard = self._shards[self._choice.draw(rng)]
            empty += 1
            for sample in shuffled(self._samples(shard), self._shuffle, rng):
                empty = 0
                yield sample
        raise SamplerError(
            f"{self._name(shard)}: the last of {format_count(empty, 'shard')} in a row without a sample; "
            "leave them out"
        )

    def _name(self, shard: ListedFile) -> str:
        return self._store.name(shard.path)

    def _samples(self, shard: ListedFile) -> Iterator[Mapping[str, Any] | Fault]:
        name = self._name(shard)
        if shard.nbytes % tarfile.BLOCKSIZE:  # within a header, tarfile would take it for the end
            raise self._damaged(
                shard, f"it has {shard.nbytes} bytes, and tar has blocks of {tarfile.BLOCKSIZE}"
            )
        with io.BufferedReader(StoreFile(self._store, shard.path, shard.nbytes), _BUFFER_BYTES) as file:
            try:
                with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member, ignore_zeros=True) as tar:
                    for key, files in _grouped(tar):
                        yield made_or_fault(partial(self._sample, f"{name}, sample {key!r}", files))
            except tarfile.TarError as error:
                raise self._damaged(shard, str(error)) from None

    def _damaged(self, shard: ListedFile, why: str) -> SamplerError:
        why = self._store.other_format(shard.path, "tar") or f"{why}; get the file anew, or leave it out"
        return SamplerError(f"{self._name(shard)}: cannot be read as tar: {why}")

    def _sample(self, place: str, files: Mapping[str, bytes]) -> dict[str, Any]:
        fields = files if self._fields is None else self._fields
        sample = {}
        for field in fields:
            file = _file_of(field, files)
            if file not in files:
                hint = did_you_mean(str(field), files)
                raise SchemaError(f"{place}: there is no field {field!r}, {hint}there are {', '.join(files)}")
            try:
                if file == field:
                    sample[field] = self._decode(field, files[field])
                else:
                    sample[field] = _value_of(json.loads(files[file]), field[len(file) + 1 :])
            except Exception as error:
                why = f"{type(error).__name__}: {error}"  # the text of a KeyError says little
                wrong = SchemaError(f"{place}: field {field!r} cannot be decoded: {why}")
                raise in_place_of(error, wrong) from error
        try:
            for field, kind in self._kinds.items():
                require_value(field, kind, sample[field])
        except SchemaError as error:
            raise SchemaError(f"{place}: {error}") from None
        return sample


def decode_by_name(field: str, data: bytes) -> Any:
    """Decode bytes by the end of a field's name; never a pickle.

    `npy` an array, `cls` and `index` an int, `txt` text, `json` its value, if it is a number, text or
    numbers in lists, or text if it is an object; `jpg`, `jpeg`, `png`, `ppm` an array (height, width,
    channels) or (height, width) of uint8, where Pillow is installed; anything else, and pictures without
    Pillow, the bytes.
    """
    match _end(field):
        case "npy":
            return npy.read_array(io.BytesIO(data))  # refuses pickles by default
        case "cls" | "cls2" | "index" | "inx" | "id":
            return int(data)
        case "txt" | "text" | "transcript":
            return data.decode()
        case "json":
            return _value_of(json.loads(data))
        case "jpg" | "jpeg" | "png" | "ppm" | "pgm" | "pbm":
            return _picture(data)
        case _:
            return data


def _end(field: str) -> str:
    return field.rpartition(".")[2].lower()


def _file_of(field: str, files: Iterable[str]) -> str:
    """Return the file that has a field: one of its name, or a JSON object."""
    objects = [file for file in files if _end(file) == "json" and str(field).startswith(f"{file}.")]
    return field if field in files else max(objects, key=len, default=field)


def _value_of(value: Any, key: str = "") -> Any:
    """Return a value of JSON, or one in its objects by their keys, joined by dots; an object as text."""
    while key:
        names = list(value) if isinstance(value, dict) else []
        fits = [  # names may have dots
            each
            for each in names
            if each == key or (key.startswith(f"{each}.") and isinstance(value[each], dict))
        ]
        name = max(fits, key=len, default=key.partition(".")[0])
        if name not in names:
            has = f"{did_you_mean(name, names)}it has {', '.join(names)}" if names else "it is no object"
            raise ValueError(f"JSON without {name!r}, {has}")
        value, key = value[name], key[len(name) + 1 :]
    if value is None:
        raise ValueError("JSON's null is no value of a field: pass decode=")
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _picture(data: bytes) -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return data
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture)


class _Member(tarfile.TarInfo):
    """A file of a tar. A damaged header is an error, where tarfile takes it for the end of the tar."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        begin = tarfile.offset
        try:
            return super().fromtarfile(tarfile)
        except _ENDS:
            raise
        except HeaderError as error:
            raise ReadError(f"{error} at byte {begin}") from None


def _grouped(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the samples of a tar, as (key, field -> bytes); of several in one file, those of all."""
    current: str | None = None
    files: dict[str, bytes] = {}
    end = 0  # of the member before
    for member in tar:
        if 0 < member.offset - end < 2 * tarfile.BLOCKSIZE:  # a tar ends with two, or with its file
            raise ReadError(f"there is a lone block of zeros at byte {end}")
        end = tar.offset
        folder, _, last = member.name.rpartition("/")
        stem, dot, field = last.partition(".")
        if not member.isfile() or not dot or not stem:  # folders, links, hidden files
            continue
        key = f"{folder}/{stem}" if folder else stem
        if key != current:
            if current is not None:
                yield current, files
            current, files = key, {}
        opened = tar.extractfile(member)
        assert opened is not None  # only for other than files
        files[field] = opened.read()
        if len(files[field]) != member.size:
            raise ReadError(f"it ends within {member.name}")
    if current is not None:
        yield current, files
