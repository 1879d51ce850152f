"""ObjectStore: the files of a source, on any file system of pyarrow.fs or fsspec: listed, read, kept open.

An `ObjectStore` is a plain value until it is used. It is pickled as its URI, and connects anew in each
process, also in a forked one. Where obstore is installed it gets the bytes: see `getter`. Reads are tried
again as `retries` says. Its names of files are for messages: they have no key or secret of a URI, nor has any
error raised here.

`Handles` are the few files that a source keeps open between two reads. `Once` is a thing that several reads
need, and the first makes. Each process has its own.
"""

from __future__ import annotations

import errno
import io
import os
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from pyarrow import NativeFile, fs

from arrowcache.arrow.foreign import other_format
from arrowcache.lifetimes import Closable, Origin, call_all, forgets_in_child
from arrowcache.sampling.reads import is_hedge
from arrowcache.sampling.retries import Retries, tally
from arrowcache.units import did_you_mean

if TYPE_CHECKING:
    from arrowcache.sampling.sources.getter import Getter

T = TypeVar("T")
M = TypeVar("M")

URI = str | os.PathLike[str]
_COMPRESSED = (".gz", ".tgz", ".bz2", ".tbz", ".tbz2", ".xz", ".txz", ".zst", ".tzst", ".lz4", ".zip")
_HEAD_BYTES = 512
_FIRST_BYTES = 64 << 10
_MAX_NAMED = 20
_AUTHORITY_END = re.compile("[/?#]")
_CUT_SECRET = re.compile(r"[^@\[]*:[^@]*[^@\d][^@]*")  # not a host with a port, nor of IPv6
_MISTYPED = re.compile(r"(s3|gs|gcs|abfss?|hdfs|hf|https?|file):/?(?!/)")
_CONTAINERS = ("abfs", "abfss")  # their URIs name a container where others have a key


class ListedFile(NamedTuple):
    """A file of a store: its path there, and its length."""

    path: str
    nbytes: int


class ObjectStore:
    """One file system.

    Args:
        uri: URI of any file on it, such as "s3://key:secret@bucket/path?region=eu-central-1"; local paths
            too.
        filesystem: used in place of the URI's own, of pyarrow.fs or fsspec; the URIs are paths on it then.
    """

    def __init__(self, uri: str, filesystem: Any, retries: int | Retries) -> None:
        self.retries = Retries.of(retries)
        self._uri = uri
        self._given = _as_filesystem(filesystem)
        self._made: tuple[Origin, fs.FileSystem] | None = None
        self._getter: tuple[Origin, Getter | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None, "_getter": None}

    @property
    def filesystem(self) -> fs.FileSystem:
        """This process' connection."""
        if self._given is not None:
            return self._given
        if self._made is None or not self._made[0].is_here:  # its threads did not survive a fork
            self._made = Origin(), _connect(self._uri)[0]
        return self._made[1]

    @property
    def getter(self) -> Getter | None:
        """This process' connections by obstore, if it is installed, and reads this store."""
        if self._getter is None or not self._getter[0].is_here:
            self._getter = Origin(), _getter_of(self.filesystem)
        return self._getter[1]

    @property
    def is_local(self) -> bool:
        return bool(self.filesystem.type_name == "local")

    @property
    def is_in_python(self) -> bool:
        """True if reading takes the GIL, such as through fsspec."""
        return isinstance(self.filesystem, fs.PyFileSystem)

    def name(self, path: str) -> str:
        """Return a file's name for messages."""
        kind = self.filesystem.type_name
        return f"{kind}://{path}" if kind in ("s3", "gcs", "abfs", "hdfs") else path

    def run(self, read: Callable[[], T], path: str) -> T:
        """Run a read of a file, with retries. Raises: as `Retries.run`."""
        return self.retries.run(read, self.name(path))

    def open(self, path: str) -> NativeFile | Unopened:
        """Open a file for random access. Without retries: `run` it. A getter finds it missing as it reads."""
        return self.open_native(path) if self.getter is None else Unopened(self, path)

    def open_native(self, path: str) -> NativeFile:
        """As `open`, for libraries that read files of pyarrow."""
        return self.filesystem.open_input_file(path)

    def read(self, file: NativeFile | Unopened, nbytes: int, start: int, path: str) -> bytes:
        """Read bytes of an open file, all of them, with retries. Thread-safe. Raises: as `Retries.run`."""
        if self.fsspec is not None:  # whose open files read one range at a time
            return self.fetch(path, start, nbytes)
        return self.run(lambda: read_at(file, nbytes, start), path)

    def fetch(self, path: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """Read a file that is not open, or bytes of it, with retries. Thread-safe.

        That is one request, but for pyarrow.fs alone, which asks for the file's size first.
        A start below zero is counted from the file's end.
        Raises: as `Retries.run`.
        """
        return self.run(lambda: self._fetch(path, start, nbytes), path)

    def _fetch(self, path: str, start: int, nbytes: int | None) -> bytes:
        getter = self.getter
        if getter is not None and (found := getter.get(path, start, nbytes)) is not None:
            return found[0] if nbytes is None else _whole(found[0], nbytes)
        if self.fsspec is None:
            with self.open_native(path) as file:
                start = start if start >= 0 else max(0, file.size() + start)
                return read_at(file, file.size() - start if nbytes is None else nbytes, start)
        if nbytes is None and not start:
            whole: bytes = self.fsspec.cat_file(path)
            return whole
        data: bytes = self.fsspec.cat_file(path, start, None if nbytes is None else start + nbytes)
        return data if nbytes is None else _whole(data, nbytes)

    @property
    def fsspec(self) -> Any | None:
        """The file system, if it is of fsspec."""
        handler = getattr(self.filesystem, "handler", None)
        return handler.fs if isinstance(handler, fs.FSSpecHandler) else None

    def is_file(self, path: str) -> bool:
        """Ask the store, with retries. Raises: PermissionError, OSError."""
        return bool(self.run(lambda: self.filesystem.get_file_info(path), path).is_file)

    def other_format(self, path: str, wanted: str) -> str:
        """As of `arrow.foreign`, of a file that could not be read. Empty also if that fails again."""
        try:
            with self.open(path) as file:
                return other_format(file.read_at(_HEAD_BYTES, 0), wanted)
        except OSError:
            return ""

    def find(self, path: str, suffixes: Sequence[str]) -> list[ListedFile]:
        """Return a file, or all files below a folder that end in one of `suffixes`, sorted by name.

        Files and folders whose names begin with a dot or an underscore are left out.
        Raises: FileNotFoundError: no file there, or none of these. PermissionError, OSError.
        """
        info = self.run(lambda: self.filesystem.get_file_info(path), path)
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", self.name(path))
        if info.type != fs.FileType.Directory:
            return [ListedFile(info.path, info.size)]
        selector = fs.FileSelector(path, recursive=True)
        found = self.run(lambda: self.filesystem.get_file_info(selector), path)
        files = sorted(
            ListedFile(info.path, info.size)
            for info in found
            if info.type == fs.FileType.File
            and info.path.endswith(tuple(suffixes))
            and not _is_hidden(info.path[len(path) :])
        )
        if not files:
            endings = Counter(_ending(info.path) for info in found if info.type == fs.FileType.File)
            has = ", ".join(
                f"{count} {ending or 'without ending'}" for ending, count in endings.most_common(5)
            )
            what = f"no file that ends in {' or '.join(suffixes)}" + (f"; it has {has}" if has else "")
            if packed := [ending for ending in endings if _unpacked(ending) in suffixes]:
                what += f": decompress those that end in {' or '.join(packed)}"
            raise FileNotFoundError(errno.ENOENT, f"the folder has {what}", self.name(path))
        return files


class Unopened(Closable):
    """A file that a getter reads, without opening it, or if it cannot the file system."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        self._store, self._path = store, path
        self._file: NativeFile | None = None
        self._size: int | None = None
        self._first = b""

    def read_at(self, nbytes: int, start: int) -> bytes:
        if start + nbytes <= len(self._first):
            return self._first[start : start + nbytes]
        data = self._got(nbytes, start)
        if data is None:
            data = self._native().read_at(nbytes, start)
        return data

    def size(self) -> int:
        """Return its length: known from any read, else from that of the first bytes, which are kept."""
        if self._size is None:
            self._first = self._got(_FIRST_BYTES, 0) or b""
        if self._size is None:
            self._size = self._native().size()
        return self._size

    def _got(self, nbytes: int, start: int) -> bytes | None:
        getter = self._store.getter if self._file is None else None
        if getter is None or (found := getter.get(self._path, start, nbytes)) is None:
            return None
        data, self._size = found
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _native(self) -> NativeFile:
        if self._file is None:
            self._file = self._store.open_native(self._path)
        return self._file


class StoreFile(io.RawIOBase):
    """A store's file for libraries that read files of Python.

    `error` is the last error of the store, for a library that does not report it. Once `is_over` is set, each
    read fails, and is not tried again.

    Args:
        nbytes: its length, if that is known: a shorter file is an error.
    """

    def __init__(self, store: ObjectStore, path: str, nbytes: int | None = None) -> None:
        self.error: OSError | None = None
        self.is_over = False
        self._store, self._path = store, path
        self._file = store.run(lambda: store.open(path), path)
        self._size: int = store.run(self._file.size, path) if nbytes is None else nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self._size - self._at)
        if wanted <= 0:
            return 0
        try:
            view[:wanted] = self._store.run(lambda: self._read(wanted), self._path)
        except OSError as error:
            self.error = error
            raise
        self._at += wanted
        tally.fetched_bytes += wanted
        return wanted

    def fetch(self, nbytes: int, start: int) -> bytes:
        """Read bytes from anywhere, with retries. Thread-safe. Raises: as `Retries.run`."""
        self.require_open()
        return self._store.read(self._file, nbytes, start, self._path)

    def require_open(self) -> None:
        """Raises: ValueError: `is_over`."""
        if self.is_over:
            raise ValueError(f"{self._store.name(self._path)} is closed: the process ends")

    def _read(self, nbytes: int) -> bytes:
        self.require_open()
        return read_at(self._file, nbytes, self._at)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def read_at(file: NativeFile | Unopened, nbytes: int, start: int) -> bytes:
    """Read bytes of an open file, all of them. Raises: OSError: also if fewer came."""
    data: bytes = file.read_at(nbytes, start)
    return _whole(data, nbytes)


def _whole(data: bytes, nbytes: int) -> bytes:
    if len(data) != nbytes:
        raise OSError(f"{len(data)} bytes came of {nbytes}")
    return data


def locate(
    uris: URI | Iterable[URI], filesystem: Any, retries: int | Retries
) -> tuple[ObjectStore, list[str]]:
    """Return the store of some URIs, and the path of each on it.

    Raises: ValueError: no URI, an unknown URI, or URIs of several stores.
        OSError: the store cannot be reached.
    """
    given = [os.fspath(uri) for uri in ([uris] if isinstance(uris, str | os.PathLike) else uris)]
    if not given:
        raise ValueError("there is no URI: give at least one file or folder")
    if filesystem is None:
        for uri in given:
            if (begins := _MISTYPED.match(uri)) and not os.path.exists(uri):
                raise ValueError(
                    f"a URI of that store begins with {begins[1]}://, and this one with {begins[0]}"
                )
        given = [uri if "://" in uri else os.path.abspath(uri) for uri in given]
    store = ObjectStore(given[0], filesystem, retries)
    if filesystem is not None:
        return store, given
    paths = []
    for uri in given:
        found, path = store.retries.run(lambda uri=uri: _connect(uri), redacted(uri))  # type: ignore[misc]  # mypy cannot infer lambdas with defaults
        if found != store.filesystem:
            raise ValueError(
                f"{redacted(uri)} is in another store than {redacted(given[0])}: make a source of each, "
                "and Mix them"
            )
        paths.append(path)
    return store, paths


def names_in(what: str, names: Sequence[str], asked: str = "") -> str:
    """Say which arrays a file or folder has, with those first that come near the one that was asked for."""
    shown = ", ".join(f"#{name}" for name in names[:_MAX_NAMED]) or "none"
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{did_you_mean(asked, names, '#{}'.format)}{what} has {shown}{more}"


def _getter_of(filesystem: fs.FileSystem) -> Getter | None:
    if filesystem.type_name == "local" or not is_installed("obstore"):
        return None
    from arrowcache.sampling.sources.getter import getter_of

    return getter_of(filesystem)


def is_installed(package: str) -> bool:
    """True if a package can be imported. Threads ask: an import that fails in one fails oddly in others."""
    return find_spec(package) is not None


def _connect(uri: str) -> tuple[fs.FileSystem, str]:
    try:
        found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(uri)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  # of pyarrow, or of a library that it hands the URI to
        reason = str(error).replace(uri, redacted(uri))
        raise ValueError(
            f"{redacted(uri)} is no URI of a store: {reason}; give a path, or file://, s3://, gs://, "
            "hdfs:// or abfs://, or pass filesystem="
        ) from None
    filesystem, path = found
    if filesystem.type_name == "s3":
        # pyarrow retries for 6 s, five times a second, after any error, and a URI cannot change that.
        _, (options,) = filesystem.__reduce__()
        once = fs.AwsStandardS3RetryStrategy(max_attempts=1)
        filesystem = fs.S3FileSystem(retry_strategy=once, **options)
    return filesystem, path


def redacted(uri: str) -> str:
    """Return a URI without key, secret and options. A path is returned as it is, whatever it contains."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    authority = _AUTHORITY_END.split(rest)[0]
    if _CUT_SECRET.fullmatch(authority) and "@" in rest:  # "key:sec/ret@bucket": it should be "key:sec%2Fret"
        rest = rest.rpartition("@")[2]
    elif "@" in authority:
        user, _, host = authority.rpartition("@")
        container = user.partition(":")[0] if scheme in _CONTAINERS else ""
        rest = f"{container}{'@' if container else ''}{host}{rest[len(authority) :]}"
    return f"{scheme}://{rest.partition('?')[0]}"


def _as_filesystem(filesystem: Any) -> fs.FileSystem | None:
    if filesystem is None or isinstance(filesystem, fs.FileSystem):
        return filesystem
    if hasattr(filesystem, "protocol") and hasattr(filesystem, "open"):
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem))
    raise TypeError(f"filesystem must be of pyarrow.fs or fsspec, not {filesystem!r}")


def _ending(path: str) -> str:
    """The end of a file's name, such as .tar.gz."""
    before, ending = os.path.splitext(path)
    return os.path.splitext(before)[1] + ending if ending in _COMPRESSED else ending


def _unpacked(ending: str) -> str | None:
    """The end of a compressed file's name after it was decompressed. None: it is not compressed."""
    before, packing = os.path.splitext(f"x{ending}")
    if packing not in _COMPRESSED:
        return None
    return ".tar" if packing.startswith(".t") else before[1:]


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


class _Closable(Protocol):
    def close(self) -> None: ...


H = TypeVar("H", bound=_Closable)


class Once(Generic[M]):
    """A thing that several reads need: the first to ask makes it, and others wait, but for hedges."""

    def __init__(self) -> None:
        self.thing: M | None = None
        self._changed, self._makers = threading.Condition(), 0

    @property
    def is_busy(self) -> bool:
        """True if a thread makes it."""
        return self._makers > 0

    def get(self, make: Callable[[], M], keeps: Callable[[M], bool] = lambda _: True) -> M:
        """Return the thing, made if there is none. Blocks: while another thread makes it. Raises: as `make`.

        Args:
            keeps: False: it is not kept, and whoever waits makes it anew.
        """
        with self._changed:
            while self.thing is None and self._makers and not is_hedge():
                self._changed.wait()
            if self.thing is not None:
                return self.thing
            self._makers += 1
        made: M | None = None
        try:
            made = make()
            return made
        finally:
            with self._changed:
                self._makers -= 1
                if self.thing is None and made is not None and keeps(made):
                    self.thing = made
                self._changed.notify_all()


class _Kept(Once[H]):
    """A thing, and the number of threads that use it. The last of them closes it, once it was given up."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.is_given_up = 0, False


class Handles(Generic[H]):
    """Open things by their keys; the least recently used is closed first.

    Several threads use a thing at a time, so things are thread-safe. One that is in use is closed after it.
    Pickled without its things. A forked child begins with none, and closes none of its parent's.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._things: OrderedDict[Hashable, _Kept[H]] = OrderedDict()
        self._lock = threading.Lock()
        forgets_in_child(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._most,)

    def forget_in_child(self) -> None:
        self._inherited = self._things  # kept alive, or they would be closed here
        self._things, self._lock = OrderedDict(), threading.Lock()

    @contextmanager
    def use(self, key: Hashable, make: Callable[[], H]) -> Iterator[H]:
        """Give the open thing of a key, made if there is none. One whose use fails is given up.

        Blocks: while another thread makes it.
        """
        used: H | None = None
        kept, unused = self._taken(key)
        try:
            call_all(thing.close for thing in unused)
            used = kept.get(make)
            yield used
        except BaseException:
            with self._lock:
                if self._things.get(key) is kept:
                    del self._things[key]
                kept.is_given_up = True
            raise
        finally:
            with self._lock:
                kept.users -= 1
                is_last = kept.is_given_up and not kept.users
            if used is not None and used is not kept.thing:  # another was made first
                used.close()
            if is_last and kept.thing is not None:
                kept.thing.close()

    def close(self) -> None:
        """Close all, those in use after it. Idempotent; things can be made again."""
        with self._lock:
            unused = self._given_up(0)
        call_all(thing.close for thing in unused)

    def _taken(self, key: Hashable) -> tuple[_Kept[H], list[H]]:
        """Return a key's thing, for one user more, and things to close for it."""
        with self._lock:
            unused = [] if key in self._things else self._given_up(self._most - 1)
            kept = self._things.setdefault(key, _Kept())
            self._things.move_to_end(key)
            kept.users += 1
        return kept, unused

    def _given_up(self, most: int) -> list[H]:
        """Give up all but so many, the least recently used first; return those that nobody uses."""
        unused = []
        while len(self._things) > most:
            kept = self._things.popitem(last=False)[1]
            kept.is_given_up = True
            if not kept.users and kept.thing is not None:
                unused.append(kept.thing)
        return unused
