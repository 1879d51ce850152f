"""Records: the samples in one TFRecord file, each exactly once, or an error with its place.

TensorFlow's reader does the framing and the checksums. It does not notice the end of a file that was cut off
within the 12 bytes before a record, nor of a compressed one at the end of a block. So the bytes of the
records are counted, and compared with the file's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
import xxhash

from arrowcache.arrow.foreign import other_format
from arrowcache.arrow.schema import Schema
from arrowcache.errors import SamplerError, SchemaError
from arrowcache.storage.ingest import fingerprint
from arrowcache.tensorflow.examples import decode

COMPRESSIONS = (None, "GZIP", "ZLIB")
_FRAME_BYTES = 16  # of a record, without its data
_BLOCKS, _BLOCK_BYTES, _END_BYTES = 17, 64 << 10, 1 << 20  # of a remote file; their bytes identify it
_PIECE_BYTES = 64 << 10  # a thousand times as much may come out of it
_ANY_HEADER = 32 + zlib.MAX_WBITS  # gzip's or zlib's


def samples(
    path: str,
    schema: Schema,
    compression: str | None,
    at: Callable[[int], None],
    wanted: Sequence[tuple[int, int | None]] = ((0, None),),
) -> Iterator[dict[str, Any]]:
    """Read a file from its beginning to the last wanted record.

    Args:
        at: called with the number of each record, from 0, before the record is read.
        wanted: ranges of records to yield, as (first, stop), ascending. None as stop means the file's end,
            which is checked then.
    Raises: SchemaError: a record does not fit. SamplerError: a damaged file, or another
        compression. Both name the file and the record.
    """
    number, nbytes = 0, 0
    at(0)
    try:
        # tf.data's own iterator takes 70 times as long a record, and cannot say which one is damaged
        for record in tf.compat.v1.io.tf_record_iterator(path, tf.io.TFRecordOptions(compression or "")):
            if any(first <= number and (stop is None or number < stop) for first, stop in wanted):
                try:
                    sample = decode(record, schema)
                except SchemaError as error:
                    raise SchemaError(
                        f"{place(path, number)}: {error}; correct the file or the schema, or leave it out"
                    ) from None
                yield sample
            nbytes += len(record) + _FRAME_BYTES
            number += 1
            if all(stop is not None and number >= stop for _, stop in wanted):
                return
            at(number)
        complete = _is_complete(path, compression, nbytes)
    except tf.errors.OpError as error:
        raise _damaged(path, number, compression, error.message) from None
    if not complete:
        raise _damaged(path, number, compression, "the file ends within it")


def fingerprint_of(path: str) -> str:
    """Return the identity of a file, 16 hex digits, of all its bytes.

    For a remote file, where another reading is expensive, only its length, its first and last MiB, and
    16 blocks between are used: records have checksums, so files of other records differ there.

    Raises: tf.errors.OpError, OSError: the file cannot be read.
    """
    if "://" not in path:
        return fingerprint(path)
    length: int = tf.io.gfile.stat(path).length
    digest = xxhash.xxh3_64(f"of a part {length} ".encode())
    blocks = (
        [(length * n // _BLOCKS, _BLOCK_BYTES) for n in range(1, _BLOCKS)] if length > 2 * _END_BYTES else []
    )
    with tf.io.gfile.GFile(path, "rb") as file:
        for start, size in [(0, _END_BYTES), *blocks, (max(0, length - _END_BYTES), _END_BYTES)]:
            file.seek(start)
            digest.update(file.read(size))
    return str(digest.hexdigest())


def place(path: str, number: int) -> str:
    """Return the place of a record, for messages."""
    return f"{path}, record {number}"


def _damaged(path: str, number: int, compression: str | None, reason: str) -> SamplerError:
    with tf.io.gfile.GFile(path, "rb") as file:
        what = other_format(file.read(512), "gzip" if compression == "GZIP" else "TFRecord")
    return SamplerError(
        f"{place(path, number)}: cannot be read with compression={compression!r}: "
        f"{what or f'{reason}; get the file anew, or leave it out'}, or say which of {COMPRESSIONS} it has"
    )


def _is_complete(path: str, compression: str | None, nbytes: int) -> bool:
    """True if a file has exactly this number of bytes in records."""
    if compression is None:
        length: int = tf.io.gfile.stat(path).length
        return length == nbytes
    inflater, inflated = zlib.decompressobj(_ANY_HEADER), 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            while piece:
                if inflater.eof:  # files may be joined
                    inflater = zlib.decompressobj(_ANY_HEADER)
                try:
                    inflated += len(inflater.decompress(piece))
                except zlib.error:
                    return False
                piece = inflater.unused_data
    return inflater.eof and inflated == nbytes
