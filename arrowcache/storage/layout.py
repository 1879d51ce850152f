"""Layout: the on-disk names and records, as values. Pure: text and bytes in, values out.

<cache>/        mode 0700
  cache.json    format version, schema, capacity, segment bytes; replaced atomically
  segments/     <seq:020d>-<rows>-<task>.arrow: published, immutable; seq grows
  incoming/     <uuid>.part: being written, locked by its writer; <uuid>.wait: a writer that
                waits for room, likewise. An unlocked file here is debris
  quarantine/   segments that failed a check, each with <name>.reason beside it
  ranks/        <run>-<loader>-<epoch>, with .<n> where a job begins an epoch again: the snapshot
                that its ranks on this node agreed on, share-locked by each of them while it needs
                it: a RanksRecord, then a line for each that joined. An unlocked file is debris
  pools/        <name>.<seed>: the next task number of a sampler pool
  cache.lock    flock; holds a LockRecord
  lease.lock    byte `seq` of it is share-locked by every reader of segment `seq`
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import xxhash

from arrowcache.arrow.schema import Schema
from arrowcache.errors import CacheFormatError, SchemaError

FORMAT_VERSION = 1
CACHE_JSON, CACHE_LOCK, LEASE_LOCK = "cache.json", "cache.lock", "lease.lock"
SEGMENTS, INCOMING, QUARANTINE, RANKS, POOLS = "segments", "incoming", "quarantine", "ranks", "pools"
FOLDERS = (SEGMENTS, INCOMING, QUARANTINE, RANKS, POOLS)
PART, WAIT, REASON = ".part", ".wait", ".reason"

TASK_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,99}")
INCOMING_NAME = re.compile(r"[0-9a-f]{32}\.(part|wait)")
RANKS_NAME = re.compile(r"[A-Za-z0-9_.]{0,40}-[0-9a-f]{16}-\d{1,20}-\d{1,20}(\.\d{1,20})?", re.ASCII)
_SEGMENT = re.compile(r"(\d{20})-([1-9]\d{0,18})-((?:[A-Za-z0-9_.-]{1,200})?)\.arrow", re.ASCII)


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One published segment, as its name and its file's status tell.

    `task` is "<name>.<seed>.<k>" for task k of a sampler pool, "tfrecord.<import>.<worker>.<k>" for what
    was imported from TFRecord files, and "" for a plain writer; `nbytes` is the file's length,
    `allocated_bytes` what it takes on the disk, `published` the time in seconds since 1970 when it was
    written.
    """

    seq: int
    rows: int
    task: str
    nbytes: int
    allocated_bytes: int
    published: float

    @property
    def name(self) -> str:
        return segment_name(self.seq, self.rows, self.task)


def segment_name(seq: int, rows: int, task: str) -> str:
    return f"{seq:020d}-{rows}-{task}.arrow"


def parse_segment_name(name: str) -> tuple[int, int, str] | None:
    """(seq, rows, task) of a segment's file name; None: not such a name."""
    match = _SEGMENT.fullmatch(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


@dataclass(frozen=True)
class Settings:
    """What cache.json holds. `full_rows` is the rows of a full segment."""

    schema: Schema
    capacity_bytes: int
    segment_bytes: int
    full_rows: int
    headroom: float
    durable: bool

    @property
    def headroom_bytes(self) -> int:
        """What a snapshot leaves unleased: at least two segments."""
        return max(int(self.headroom * self.capacity_bytes), 2 * self.segment_bytes)

    def with_capacity(self, capacity_bytes: int) -> Settings:
        return replace(self, capacity_bytes=capacity_bytes)

    @cached_property
    def text(self) -> str:
        """The content of cache.json; `from_json` is the inverse."""
        return json.dumps(
            {
                "format": "arrowcache",
                "version": FORMAT_VERSION,
                "schema": self.schema.to_json(),
                "capacity_bytes": self.capacity_bytes,
                "segment_bytes": self.segment_bytes,
                "full_rows": self.full_rows,
                "headroom": self.headroom,
                "durable": self.durable,
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read cache.json.

        Raises: CacheFormatError: not ours, or of another format version.
        """
        try:
            record: dict[str, Any] = json.loads(text)
            if record["format"] != "arrowcache":
                raise CacheFormatError(f"cache.json is of format {record['format']!r}, not 'arrowcache'")
            if record["version"] != FORMAT_VERSION:
                raise CacheFormatError(
                    f"the cache has format version {record['version']}, this arrowcache reads "
                    f"{FORMAT_VERSION}: use the arrowcache that made it, or make a new cache"
                )
            settings = cls(
                Schema.from_json(record["schema"]),
                int(record["capacity_bytes"]),
                int(record["segment_bytes"]),
                int(record["full_rows"]),
                float(record["headroom"]),
                bool(record["durable"]),
            )
            if min(settings.capacity_bytes, settings.segment_bytes, settings.full_rows) <= 0:
                raise CacheFormatError("cache.json has a size that is not positive")
            return settings
        except (KeyError, TypeError, ValueError, SchemaError, RecursionError) as error:
            raise CacheFormatError(f"cache.json is damaged: {error!r}") from error


@dataclass(frozen=True, slots=True)
class LockRecord:
    """What cache.lock holds.

    `next_seq` numbers the next publish. `boot_id` is the machine's boot in which the record was
    last valid: another one means that the machine restarted, and segments below `suspect_below`
    were published before that, maybe never synced: their bytes are checked before first use.
    """

    next_seq: int = 0
    suspect_below: int = 0
    boot_id: str = ""

    _STRUCT = struct.Struct("<QQ36s")

    def pack(self) -> bytes:
        return self._STRUCT.pack(self.next_seq, self.suspect_below, self.boot_id.encode())

    @classmethod
    def unpack(cls, data: bytes) -> LockRecord:
        """Read a record; a short one (a new or damaged file) is all zero."""
        next_seq, suspect, boot = cls._STRUCT.unpack(data.ljust(cls._STRUCT.size, b"\0")[: cls._STRUCT.size])
        return cls(min(next_seq, 2**62), min(suspect, 2**62), boot.rstrip(b"\0").decode(errors="replace"))


Term = bool | int | float | str | None


def ranks_name(run: str, loader: int, epoch: int, repeat: int = 0) -> str:
    """The file in ranks/ of one epoch of a run's n-th loader; `repeat` counts its beginnings.

    A run may hold any characters: what a file name cannot show is told apart by the digest.
    """
    shown = re.sub(r"[^A-Za-z0-9_.]+", "_", run)[:40]
    digest = xxhash.xxh3_64_hexdigest(run.encode(errors="surrogatepass"))
    return f"{shown}-{digest}-{loader}-{epoch}" + (f".{repeat}" if repeat else "")


def joiner_line(rank: int, pid: int) -> bytes:
    """What a file in ranks/ gets for each process that joined."""
    return b"%d %d\n" % (rank, pid)


def joiners(data: bytes) -> set[bytes]:
    """The lines of all who joined, in the content of a file in ranks/."""
    return set(data.partition(b"\n")[2].splitlines(keepends=True))


@dataclass(frozen=True, slots=True)
class RanksRecord:
    """The first line of a file in ranks/: which segments an epoch reads, and on what terms.

    `seqs` ascends. On the disk it is runs, so thousands of segments in a row are two numbers, and
    the worst, every other of 16,000, are 32 kB. A checksum tells a damaged line.
    """

    terms: Mapping[str, Term]
    seqs: Sequence[int]

    def pack(self) -> bytes:
        record = {"version": FORMAT_VERSION, "terms": dict(self.terms), "runs": _to_runs(self.seqs)}
        text = json.dumps(record, separators=(",", ":")).encode()
        return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)

    @classmethod
    def unpack(cls, data: bytes) -> RanksRecord:
        """Read the first line.

        Raises: CacheFormatError: it is damaged, or of another format version.
        """
        line, _, _ = data.partition(b"\n")
        digest, _, text = line.partition(b" ")
        if digest != xxhash.xxh3_64_hexdigest(text).encode():
            raise CacheFormatError("its checksum does not fit its content")
        try:
            record = json.loads(text)
            if record["version"] != FORMAT_VERSION:
                raise CacheFormatError(f"it has format version {record['version']}, not {FORMAT_VERSION}")
            return cls(dict(record["terms"]), _from_runs(record["runs"]))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CacheFormatError(f"it does not hold what it should: {error!r}") from error


def _to_runs(seqs: Iterable[int]) -> list[int]:
    """Ascending numbers as: how many are skipped, how many follow, how many are skipped, ..."""
    runs: list[int] = []
    end = 0
    for seq in seqs:
        if runs and seq == end:
            runs[-1] += 1
        else:
            runs += [seq - end, 1]
        end = seq + 1
    return runs


def _from_runs(runs: Sequence[int]) -> list[int]:
    seqs: list[int] = []
    end = 0
    for skipped, count in zip(runs[::2], runs[1::2], strict=True):
        seqs += range(end + skipped, end + skipped + count)
        end += skipped + count
    return seqs
