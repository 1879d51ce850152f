"""Layout: the on-disk names and records, as values. Pure: text and bytes in, values out.

<cache>/        mode 0700, or group-writable: its mode decides that of all below, see `modes`
  cache.json    format version, schema, capacity, segment bytes; replaced atomically. With `frozen`, nothing
                of the cache changes, and readers need no other file than it, segments/ and notes/
  segments/     <seq:020d>-<rows>-<task>.arrow: published, immutable; seq grows
  incoming/     <uuid>.part: being written, locked by its writer; <uuid>.wait: a writer that
                waits for room, likewise; <uuid>.gone: evicted, about to be unlinked, and
                <uuid>.freed: its bytes until the disk has them back, locked by who unlinks it.
                An unlocked file here is debris
  quarantine/   segments that failed a check, each with <name>.reason beside it
  ranks/        <run>-<loader>-<epoch>, with .<n> where a job begins an epoch again: the snapshot
                that its ranks on this node agreed on, share-locked by each of them while it needs
                it: a RanksRecord, then a line for each that joined. An unlocked file is debris
  pools/        <name>.<seed>: the next task number of a sampler pool, 8 bytes; then those of earlier
                tasks that are to be drawn again, 8 bytes each, the first to be drawn last. Where samples
                are divided among tasks, these are all that were begun and are not published, and
                <name>.<seed>.division says how: see sampling/executors.py. A release that
                knows the first number only leaves the others where they are, undrawn. Pools lock bytes
                of it as signs: see `alive_byte` and `task_byte`
  notes/        <first>-<last>-<newest>-<digest>.<kind>.arrow: what is known of rows, see notes_log.py; and
                <digest>.weights.arrow: the weights of an epoch, see reading/row_weights.py. There is no such
                folder before the first, so that releases without notes refuse a cache that has some
  cache.lock    flock; holds a LockRecord
  lease.lock    byte `seq` of it is share-locked by every reader of segment `seq`
  usage         a UsageRecord, and from byte USAGE_COUNTS on 4 bytes a segment: how many epochs read it
  claims.lock   of a dataset's cache: 4 bytes an item, the number of the process that makes or holds it,
                which locks the byte of its number as long as it lives. Of a stream's: 8 bytes a shard,
                1 + its items once all are stored, or 0; who stores it locks a byte: see claims.py

How the format grows. A release refuses what it does not know as a newer format, and touches nothing: another
version in cache.json; a key, or a value under a sound checksum, that it cannot read; and, beside cache.json,
a name such as a format may have: lower-case letters and "_", alone or before ".json" or ".lock". So a new
file or folder gets such a name. A key that every cache has raises FORMAT_VERSION. A key that few caches have
is left out of the others, which stay readable by releases before it. Opening a cache checks all of that
first. Any other name there is somebody's own (.nfs0001, lost+found, cache.json.bak, Notes.md): it is
left alone, as is each unknown name in a subfolder.
"""

from __future__ import annotations

import base64
import json
import re
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import xxhash

from arrowcache.errors import CacheFormatError
from arrowcache.units import format_count, parse_count

FORMAT_VERSION = 4  # of cache.json, and of files in ranks/; 1 to 3 are of 0.1.0 and what followed it
CACHE_JSON, CACHE_LOCK, LEASE_LOCK, USAGE = "cache.json", "cache.lock", "lease.lock", "usage"
CLAIMS_LOCK = "claims.lock"
SEGMENTS, INCOMING, QUARANTINE, RANKS, POOLS = "segments", "incoming", "quarantine", "ranks", "pools"
FOLDERS = (SEGMENTS, INCOMING, QUARANTINE, RANKS, POOLS)
NOTES = "notes"
TOP_NAMES = frozenset({CACHE_JSON, CACHE_LOCK, LEASE_LOCK, USAGE, CLAIMS_LOCK, NOTES, *FOLDERS})
DIVISION = ".division"  # beside a pool's file
PART, WAIT, GONE, FREED, REASON = ".part", ".wait", ".gone", ".freed", ".reason"

TASK_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,99}")
INCOMING_NAME = re.compile(r"[0-9a-f]{32}\.(part|wait|gone|freed)")
RANKS_NAME = re.compile(r"[A-Za-z0-9_.]{0,40}-[0-9a-f]{16}-\d{1,20}-\d{1,20}(\.\d{1,20})?", re.ASCII)
_FORMATS_NAME = re.compile(r"[a-z][a-z_]*(\.(json|lock))?", re.ASCII)
MAX_SEQ = 2**60  # lock bytes and counters end at 2**63; no publisher gets here
MAX_ROWS = 2**31 - 1  # of a segment: Arrow's offsets
MAX_BYTES = 2**62
_MAX_AGREED = 1 << 20  # segments; what a file says is bounded before memory is taken for it
_TASK_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_IMPORT_TASK = re.compile(
    r"(parquet|tfrecord)((?:\.[0-9a-f]{16}-\d{1,18}-\d{1,18}e?)+)(\.again-[0-9a-f]{8})?", re.ASCII
)
_FILE_ROWS = re.compile(r"\.([0-9a-f]{16})-(\d+)-(\d+)(e?)")
_MERGE_TASK = re.compile(r"parts\.(\d{1,19})-(\d{1,19})", re.ASCII)
_MAX_TASK_CHARACTERS = 200  # a file's name ends at 255
_MAX_ROW_DIGITS = 10  # of the rows of a segment
MAX_NOTE_BYTES = 1 << 30  # of a file of notes; what is cut off there is damage
_NOTE = re.compile(r"(\d{20})-(\d{20})-(\d{20})-([0-9a-f]{16})\.(marks|values)\.arrow", re.ASCII)
USED = ".used"  # behind the name of `Loader(once=name)`, in notes/
WEIGHTS_NAME = re.compile(r"[0-9a-f]{16}\.weights\.arrow", re.ASCII)
_SEGMENT = re.compile(r"(\d{20})-([1-9]\d{0,18})-((?:[A-Za-z0-9_.-]{1,200})?)\.arrow", re.ASCII)


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One published segment, as its name and its file's status tell.

    `task` says where its rows come from, so publishing, which refuses a task that is listed, refuses a second
    copy:

        <pool's name>.<seed>.<k>                    task k of a sampler pool
        <kind>.<fingerprint>-<first>-<rows>[e]{.<the next file's>}[.again-<n>]
                                                    `rows` rows of a file, from row `first` on; "e": the file
                                                    has no more. kind is "parquet" or "tfrecord". "again-<n>"
                                                    tells apart rows that were imported once more on purpose
        parts.<first seq>-<last seq>                all rows of the smaller segments in this range, which
                                                    leave once nobody leases them
        (empty)                                     a plain writer

    `nbytes` is the file's length, `allocated_bytes` what it takes on the disk, `published` the time in
    seconds since 1970 when it was written.
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
    """Return a segment's file name; `parse_segment_name` reverses it."""
    return f"{seq:020d}-{rows}-{task}.arrow"


def parse_segment_name(name: str) -> tuple[int, int, str] | None:
    """(seq, rows, task) of a segment's file name. None if it is no such name."""
    match = _SEGMENT.fullmatch(name)
    if match is None:
        return None
    seq, rows = int(match[1]), int(match[2])
    return (seq, rows, match[3]) if seq < MAX_SEQ and rows <= MAX_ROWS else None


@dataclass(frozen=True, slots=True)
class NoteFile:
    """One file of notes, as its name tells.

    It has the notes of numbers `first` to `last`, of one `kind`, on rows of segments up to `newest`, which is
    MAX_SEQ for a rule; `digest` is the XXH3 of its bytes.
    """

    first: int
    last: int
    newest: int
    digest: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.first:020d}-{self.last:020d}-{self.newest:020d}-{self.digest}.{self.kind}.arrow"

    def fits(self, data: bytes) -> bool:
        """True if these bytes are its content."""
        return xxhash.xxh3_64_hexdigest(data) == self.digest

    @property
    def is_rule(self) -> bool:
        """True if it has one rule, which is on rows to come, too."""
        return self.newest == MAX_SEQ

    def is_within(self, other: NoteFile) -> bool:
        """True if another file has all its numbers."""
        return self != other and other.first <= self.first and self.last <= other.last

    @classmethod
    @lru_cache(maxsize=1024)  # few names are there, and each listing asks for them
    def parse(cls, name: str) -> NoteFile | None:
        """The file of a name. None if it is no such name."""
        match = _NOTE.fullmatch(name)
        if match is None:
            return None
        first, last, newest = map(int, match.group(1, 2, 3))
        return cls(first, last, newest, match[4], match[5])


def listing_digest(sizes: Iterable[tuple[str, int]]) -> str:
    """Return the digest of files, by the name and length of each, in any order: that of a frozen cache.

    The names of segments have number and rows, those of notes a digest of their content.
    """
    lines = sorted(f"{name} {nbytes}\n" for name, nbytes in sizes)
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def tasks_listed(pool: str, segments: Iterable[SegmentInfo]) -> set[int]:
    """The numbers of a pool's tasks that these segments are of."""
    parsed = [parse_task_name(segment.task) for segment in segments]
    return {each[1] for each in parsed if each is not None and each[0] == pool}


def parse_task_name(name: str) -> tuple[str, int] | None:
    """(pool, number) of a pool's task. None if it is the name of no such task."""
    pool, _, number = name.rpartition(".")
    return (pool, int(number)) if pool and _TASK_NUMBER.fullmatch(number) else None


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of one file: `rows` of them, from `first` on. `is_last`: the file has no more.

    `fingerprint` is of the file's bytes, 16 hex digits: the same wherever it lies and whatever its name is.
    """

    fingerprint: str
    first: int
    rows: int
    is_last: bool = False

    def __str__(self) -> str:
        return f"{self.fingerprint}-{self.first}-{self.rows}{'e' if self.is_last else ''}"


def import_task(kind: str, origins: Iterable[FileRows], again: str = "") -> str:
    """The task's name of a segment of these rows of files, in this order.

    Args:
        kind: "parquet" or "tfrecord".
        again: 8 hex digits, for rows that are imported once more on purpose.
    """
    return ".".join([kind, *map(str, origins), *([f"again-{again}"] if again else [])])


def file_rows_of(task: str) -> tuple[FileRows, ...]:
    """Return the file rows of a segment of this task. Empty if it was not imported."""
    match = _IMPORT_TASK.fullmatch(task)
    if match is None:
        return ()
    return tuple(
        FileRows(fingerprint, int(first), int(rows), bool(last))
        for fingerprint, first, rows, last in _FILE_ROWS.findall(match[2])
    )


def has_place(kind: str, origins: Sequence[FileRows], first: int, again: str = "") -> bool:
    """True if the name of a segment of these rows can name one more file's, from its row `first` on."""
    longest = FileRows("0" * 16, first, 10**_MAX_ROW_DIGITS - 1, is_last=True)
    return len(import_task(kind, [*origins, longest], again)) <= _MAX_TASK_CHARACTERS


def publisher_of(task: str) -> str:
    """The publisher of a segment of this task: a pool as "<name>.<seed>", an import's kind, or a writer."""
    if match := _IMPORT_TASK.fullmatch(task):
        return match[1]
    publisher = task.rpartition(".")[0]
    if publisher.startswith("tfrecord.") and publisher.count(".") == 2:
        return publisher[: len("tfrecord.") + 8]  # all workers of one import
    return publisher or task or "writer"


def merge_task(parts: Sequence[SegmentInfo]) -> str:
    """Return the task's name of the segment that is merged of parts, oldest first."""
    return f"parts.{parts[0].seq}-{parts[-1].seq}"


def parts_of(segment: SegmentInfo) -> range:
    """Return the numbers of the segments that one was merged of. Empty if it was not."""
    match = _MERGE_TASK.fullmatch(segment.task)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)


def modes(mode: int) -> tuple[int, int]:
    """Modes of the files and folders of a cache whose own folder has this one.

    A group that may do all there shares the cache: who reads must lock, and so write.
    """
    if mode & stat.S_IRWXG == stat.S_IRWXG:
        return 0o660, 0o770 | mode & stat.S_ISGID
    return 0o600, 0o700


def shared_on_purpose(mode: int) -> bool:
    """True if an empty folder was made for a group. A umask of 002 alone gives others rights, too."""
    return mode & stat.S_IRWXG == stat.S_IRWXG and bool(mode & stat.S_ISGID or not mode & stat.S_IRWXO)


def newer_names(names: Iterable[str]) -> list[str]:
    """Names in a cache's own folder that a newer format has. Others are somebody's own."""
    return sorted(name for name in names if name not in TOP_NAMES and _FORMATS_NAME.fullmatch(name))


def newer_format(what: str) -> CacheFormatError:
    """Return the error that a newer format has: `what` names the file or key."""
    return CacheFormatError(
        f"{what}, which this arrowcache does not know: a newer one made or changed the cache. Nothing was "
        "touched: use that release"
    )


def alive_byte(token: int) -> int:
    """The byte of a pool's file that the pool locks as long as it lives."""
    return token


def task_byte(number: int) -> int:
    """The byte that it locks as long as it has this task, where samples are divided among tasks."""
    return 2**62 + number


def shown(name: str) -> str:
    """A file's name, which may be anything, as one line of text that can be printed."""
    return name if name.isprintable() else ascii(name)[1:-1]


@dataclass(frozen=True, slots=True)
class LockRecord:
    """The content of cache.lock.

    `next_seq` numbers the next publish. `boot_id` is the machine's boot in which the record was
    last valid: another one means that the machine restarted, and segments below `suspect_below`
    were published before that, maybe never synced: their bytes are checked before first use.
    """

    next_seq: int = 0
    suspect_below: int = 0
    boot_id: str = ""

    _STRUCT = struct.Struct("<QQ36s")
    nbytes = _STRUCT.size

    def pack(self) -> bytes:
        return self._STRUCT.pack(self.next_seq, self.suspect_below, self.boot_id.encode())

    @classmethod
    def unpack(cls, data: bytes) -> LockRecord:
        """Read a record; a short one (a new file), or one of numbers that no cache has, is all zero."""
        next_seq, suspect, boot = cls._STRUCT.unpack(data.ljust(cls._STRUCT.size, b"\0")[: cls._STRUCT.size])
        if max(next_seq, suspect) > MAX_SEQ:
            return cls()
        return cls(next_seq, suspect, boot.rstrip(b"\0").decode(errors="replace"))


USAGE_COUNTS = 4096  # where the counts of segments begin
_MAX_TOTAL = 2**62  # of rows: more were never counted
USAGE_SEQS = 2**40  # seqs so far apart have one place; they are never there together


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """The first bytes of `usage`: totals since the cache was made.

    `served_rows` are those of epochs, a row of two epochs twice; `unread_rows` those that were evicted
    before any epoch read them; `paced_inserted_rows` and `paced_served_rows` what was inserted and served
    when the pace was set, or rows left by hand.
    """

    inserted_rows: int = 0
    served_rows: int = 0
    evicted_segments: int = 0
    evicted_rows: int = 0
    unread_rows: int = 0
    paced_inserted_rows: int = 0
    paced_served_rows: int = 0

    _STRUCT = struct.Struct("<7Q")
    nbytes = _STRUCT.size

    def pack(self) -> bytes:
        return self._STRUCT.pack(*(min(getattr(self, name), _MAX_TOTAL) for name in self.__slots__))

    @classmethod
    def unpack(cls, data: bytes) -> UsageRecord:
        """Read a record; a short one, as of a new file, is all zero, and so is one that nobody counted."""
        totals = cls._STRUCT.unpack(data.ljust(cls._STRUCT.size, b"\0")[: cls._STRUCT.size])
        return cls() if max(totals) > _MAX_TOTAL else cls(*totals)


Term = bool | int | float | str | None


def ranks_name(run: str, loader: int, epoch: int, repeat: int = 0) -> str:
    """The file in ranks/ of one epoch of a run's n-th loader; `repeat` counts its beginnings.

    A run may hold any characters: what a file name cannot show is told apart by the digest.
    """
    shown = re.sub(r"[^A-Za-z0-9_.]+", "_", run)[:40]
    digest = xxhash.xxh3_64_hexdigest(run.encode(errors="surrogatepass"))
    return f"{shown}-{digest}-{loader}-{epoch}" + (f".{repeat}" if repeat else "")


def joiner_line(rank: int, pid: int) -> bytes:
    """Return the line of a rank that joins a file in ranks/."""
    return b"%d %d\n" % (rank, pid)


def joiners(data: bytes) -> set[bytes]:
    """The lines of all who joined, in the content of a file in ranks/."""
    return set(data.partition(b"\n")[2].splitlines(keepends=True))


def joined_pids(data: bytes) -> list[int]:
    """The processes of those who joined."""
    return sorted(int(line.split()[1]) for line in joiners(data) if re.fullmatch(rb"\d+ \d+\n", line))


@dataclass(frozen=True, slots=True)
class RanksRecord:
    """The first line of a file in ranks/: which segments an epoch reads, and on what terms.

    `seqs` ascends. On the disk it is runs, so thousands of segments in a row are two numbers, and
    the worst, every other of 16,000, are 32 kB. A checksum tells a damaged line. `next_seq` is the number
    that came next when the snapshot was taken; `left_out_rows` is how many rows it left to writers. `bitmaps`
    are those of reading/row_filter.py; `weights` names a file of weights, if there are some.
    """

    terms: Mapping[str, Term]
    seqs: Sequence[int]
    next_seq: int = 0
    left_out_rows: int = 0
    bitmaps: Mapping[int, bytes] = field(default_factory=dict)
    weights: str = ""

    def pack(self) -> bytes:
        record = {
            "version": FORMAT_VERSION,
            "terms": dict(self.terms),
            "runs": _to_runs(self.seqs),
            "seen": [self.next_seq, self.left_out_rows],
        }
        if self.bitmaps:
            record["selected"] = {seq: base64.b64encode(bits).decode() for seq, bits in self.bitmaps.items()}
        if self.weights:
            record["weights"] = self.weights
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
            seqs = _from_runs(record["runs"])
            next_seq, left_out_rows = record["seen"]
            parse_count(next_seq, "next_seq", 0, MAX_SEQ)
            parse_count(left_out_rows, "left_out_rows", 0, MAX_BYTES)
            selected = record.get("selected", {}).items()
            bitmaps = {int(seq): base64.b64decode(bits, validate=True) for seq, bits in selected}
            return cls(
                dict(record["terms"]), seqs, next_seq, left_out_rows, bitmaps, str(record.get("weights", ""))
            )
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
    if any(type(number) is not int or number < 0 for number in runs):
        raise ValueError("runs that are no counts")
    if sum(runs[1::2]) > _MAX_AGREED or sum(runs) > MAX_SEQ:
        raise ValueError(f"runs of {format_count(sum(runs[1::2]), 'segment')} up to {sum(runs)}")
    for skipped, count in zip(runs[::2], runs[1::2], strict=True):
        seqs += range(end + skipped, end + skipped + count)
        end += skipped + count
    return seqs
