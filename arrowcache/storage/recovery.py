"""Recovery: making, opening, freezing and thawing a cache, whatever happened to those who used it before.

After the death of a process there is nothing to do but to sweep unlocked parts. After a restart
of the machine unsynced files may be full of zeros at full length; cache.lock's boot id tells,
and every older segment counts as suspect: its bytes are checked before its first use in each
process. The counter may have fallen back, too, behind numbers of segments that were evicted: it
leaps, so that a saved state never means a later segment. Of what had left, some may be back: it
leaves again where it does not fit. A folder that is not a cache is refused, and nothing in it is
touched.

A cache is used whole or not at all. Who reads must write too, since leases are locks and locks are files of
the folder: so it is its owner's alone, or a group's whose members may do all (`layout.modes`). A user who may
do only some of it would train on a part, call the rest damaged, or keep others waiting: he is refused.

A frozen cache is another matter: whoever can read it may use it. Opening it looks at cache.json and at names,
and touches nothing: it may lie on a read-only or a network file system, be another user's, or be a copy.
Guarantees of `freeze`: nobody was changing the cache, nor can anybody who has it open; all that is in it is
on the disk, and was checked, where a restart of the machine may have damaged it, before its mark is written.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from arrowcache import linux
from arrowcache.arrow.schema import difference
from arrowcache.errors import ArrowCacheError, CacheFormatError, CacheFrozenError, SchemaError, warn
from arrowcache.limits import Limits
from arrowcache.os_errors import explaining
from arrowcache.storage import claims, layout, verification
from arrowcache.storage.folder import Folder, require_right
from arrowcache.storage.locks import LOCK_TIMEOUT_SECONDS, LockFile, held
from arrowcache.storage.settings import Frozen, Settings, beyond_disk
from arrowcache.storage.store import Store
from arrowcache.units import format_bytes, parse_bytes

CHECKS = ("structure", "bytes")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_STICKY = "its sticky bit lets nobody but its owner evict here: have the owner take it away (chmod -R -t)"
_ARGUMENTS = {"capacity_bytes": "capacity", "full_rows": "segment_rows"}  # of `Cache.create`


class HasStore(Protocol):
    """A cache, as the layers below it see it."""

    @property
    def store(self) -> Store: ...


def store_of(cache: HasStore | str | os.PathLike[str]) -> Store:
    """The store of a cache, or of the cache at a path: wherever a cache is taken, a path will do."""
    if isinstance(cache, str | os.PathLike):
        return open_store(Path(cache).absolute(), check="structure")
    store = getattr(cache, "store", None)
    if not isinstance(store, Store):
        kind, way = type(cache), ""
        if hasattr(kind, "cache"):  # a CachedDataset
            way = ": pass its .cache, which has the items that are in"
        elif hasattr(kind, "__getitem__") and hasattr(kind, "__len__"):
            way = (
                ": read a dataset through arrowcache.torch.cached(dataset, path, capacity=...), "
                "and give that to arrowcache.torch.Loader"
            )
        raise TypeError(f"expected a Cache or the path of one, got {cache!r}{way}")
    return store


def create_store(path: Path, settings: Settings, *, exist_ok: bool, said: Collection[str] = ()) -> Store:
    """Make a cache folder, or open the one that is there if `exist_ok`. Warns where the disk holds less.

    Args:
        said: names of the settings that one that is there has to have, beside the schema.
    Raises: FileExistsError, CacheFormatError (a folder of something else), SchemaError. ValueError: the one
        that is there has another of the settings in `said`.
    """
    folder = Folder(path)
    exists = not is_free(path)
    if not exists:
        if why := beyond_disk(settings.capacity_bytes, 0, folder.free_bytes()):
            warn(why)  # first: as an error it leaves nothing behind
        folder.create()
        require_working_locks(folder)
        store = Store(folder, settings)
        # Of several processes that create at once, the first one's settings hold.
        with explaining(path), held(folder.cache_lock, LOCK_TIMEOUT_SECONDS):
            exists = (path / layout.CACHE_JSON).exists()
            if not exists:
                folder.write_record(layout.LockRecord(boot_id=linux.boot_id()))  # new, not lost
                folder.sync_record()
                folder.write_settings(settings)
        if not exists:
            recover(store)
            return store
    if not exist_ok:
        raise FileExistsError(f"{path} is a cache already: open it, or pass exist_ok=True")
    store = open_store(path, check="structure")
    if store.settings.schema != settings.schema:
        raise SchemaError(f"{path} has another schema: {difference(store.settings.schema, settings.schema)}")
    require_settings(store, {name: getattr(settings, name) for name in said})
    store.have_capacity(settings.capacity_bytes)
    return store


def require_settings(store: Store, given: Mapping[str, Any]) -> None:
    """Make sure that a cache that is there already has the settings that a caller gave.

    Args:
        given: settings by their names; sizes as of `parse_bytes`. None: not given.
    Raises: ValueError: it has another one; names the argument.
    """
    wants = {name: wanted for name, wanted in given.items() if wanted is not None}
    if wants:
        store.refresh_settings()
    for name, wanted in wants.items():
        has, argument = getattr(store.settings, name), _ARGUMENTS.get(name, name)
        if name.endswith("_bytes"):
            wanted = parse_bytes(wanted, argument)
        if has != wanted:
            way = "resize it first, by cache.resize()" if name == "capacity_bytes" else "give another path"
            shown = f"{has} ({format_bytes(has)})" if name.endswith("_bytes") else f"{has}"
            raise ValueError(
                f"{store.folder.path} is there already, with {argument}={shown}, and not {wanted}: leave "
                f"{argument} out, or {way}"
            )


def is_free(path: Path) -> bool:
    """True if a cache can be made at a path. False if one is there, of a format that this version knows.

    Raises: FileExistsError: a file is there. CacheFormatError: a folder of something else.
    """
    if os.path.lexists(path) and not path.is_dir():  # in this order: another may create it meanwhile
        raise FileExistsError(f"{path} is not a folder")
    if os.path.lexists(path / layout.CACHE_JSON):
        Folder(path).read_settings()  # or it is not ours, and nothing of it is touched
        Folder(path).require_known()
        return False
    if path.exists() and (foreign := _foreign_files(path)):
        raise CacheFormatError(
            f"{path} holds other files ({', '.join(map(layout.shown, foreign[:3]))}): "
            "give an empty or a new folder"
        )
    return True


def new_folders(path: Path) -> list[Path]:
    """The folders that `create_store` makes at a path and above it, the innermost first."""
    return list(itertools.takewhile(lambda folder: not folder.exists(), [path, *path.parents]))


def remove_unused(store: Store, made: Sequence[Path]) -> bool:
    """Remove a cache that was made in vain, unless anybody has used it since.

    Args:
        made: what `new_folders` said before it was made: these go too, if nothing is in them.
    Returns: True if it is gone. False if something was published, or somebody writes to it.
    """
    folder = store.folder
    try:
        with store.locked():
            if store.usage.somebody_writes() or not folder.is_bare():
                return False
            folder.dismantle(made)
    except (OSError, ArrowCacheError):  # it has left in another way, is held, or is frozen
        return not os.path.lexists(folder.path / layout.CACHE_JSON)
    return True


def open_store(path: Path, *, check: str) -> Store:
    """Open the cache at a path and recover it; of a frozen one compare the names of its files.

    Raises: FileNotFoundError: no folder. CacheFormatError: not a cache, one of a newer format, or no working
        locks. PermissionError: this user may use only a part of it. Nothing was touched then.
    """
    if check not in CHECKS:
        raise ValueError(f"check={check!r} is unknown: use {' or '.join(map(repr, CHECKS))}")
    folder = Folder(path)
    with explaining(path):
        store = Store(folder, folder.read_settings(), check_bytes=check == "bytes")
        folder.require_known()  # before anything is touched
        if store.is_frozen:
            store.segments()
            return store
        require_access(store)
        folder.complete()
        require_working_locks(folder)
        recover(store)
    return store


def freeze(store: Store) -> None:
    """Freeze a cache: see `Cache.freeze`. The notes that wait in this process are written by now.

    Blocks: for cache.lock, and while all that is not yet on the disk is written.
    """
    store.refresh_settings()
    if store.is_frozen:
        return
    suspect = store.suspect_below()
    verification.verify_segments(store, [each for each in store.segments() if each.seq < suspect])
    store.folder.sync()  # most of it, while nobody waits
    with store.locked():
        ways = [*store.usage.in_the_way(), *claims.in_the_way(store.folder), *store.folder.in_the_way()]
        if ways:
            raise CacheFrozenError(
                f"{store.folder.path} cannot be frozen: {'; '.join(dict.fromkeys(ways))}. First close "
                "writers, stop pools, and end epochs of ranks and by weights"
            )
        store.folder.sync()
        store.look_anew()
        frozen = Frozen(uuid.uuid4().hex, store.digest(store.segments()))
        settings = replace(store.settings, frozen=frozen)
        store.folder.write_settings(settings)
        store.settings = settings  # last: nothing can be written from then on


def thaw(store: Store) -> None:
    """Thaw a cache: see `Cache.thaw`. One that failed, or was done elsewhere, is completed."""
    folder = store.folder
    with explaining(folder.path):
        found = folder.read_settings(store.settings)
        if found.frozen is None and not store.is_frozen:
            return
        require_access(store)
        if os.statvfs(folder.path).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(folder.path))
        if found.frozen is not None:
            warn(
                f"{folder.path} may change from now on: whoever reads it, here or on other machines, finds "
                "that out at the begin of the next epoch, and nothing keeps the rows until then"
            )  # before it does: as an error it changes nothing
        folder.complete()
        require_working_locks(folder)
        with held(folder.cache_lock, LOCK_TIMEOUT_SECONDS):
            found = folder.read_settings(store.settings)
            if found.frozen is not None:
                folder.write_settings(replace(found, frozen=None))
        store.settings = replace(store.settings, frozen=None)
        recover(store)


def require_access(store: Store) -> None:
    """Make sure that this user may read and change all of a cache, each segment included.

    What is missing, or of another kind, is no matter here. Nor is a read-only file system, which is an error
    of its own.

    Raises: PermissionError: not; its path is the first thing that he may not use. OSError: as `segments`.
    """
    folder = store.folder
    if os.statvfs(folder.path).f_flag & os.ST_RDONLY:
        return
    for path in (folder.path, *(folder.path / name for name in layout.FOLDERS)):
        if stat.S_ISDIR(mode := _mode(path)):
            require_right(path, os.R_OK | os.W_OK | os.X_OK)
            if mode & stat.S_ISVTX and os.geteuid() not in (0, os.stat(path).st_uid):
                raise PermissionError(errno.EPERM, _STICKY, os.fspath(path))
    for path in (folder.cache_lock, folder.lease_lock, folder.usage):
        if stat.S_ISREG(_mode(path)):
            require_right(path, os.R_OK | os.W_OK)
    if stat.S_ISDIR(_mode(folder.segments)):
        store.segments()


def _mode(path: Path) -> int:
    """The mode of what is there, or 0 if nothing is. No link is followed."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0


def _foreign_files(path: Path) -> list[str]:
    """Files in a folder that no cache put there. Without cache.json a half-made cache may be there."""
    foreign = sorted(set(os.listdir(path)) - layout.TOP_NAMES)
    inside = [
        f"{name}/{entry}"
        for name in layout.FOLDERS
        if (path / name).is_dir()
        for entry in os.listdir(path / name)
        if not layout.INCOMING_NAME.fullmatch(entry)
    ]
    if inside and not (path / layout.CACHE_JSON).exists():
        foreign += sorted(inside)
    return foreign


def require_working_locks(folder: Folder) -> None:
    """Make sure that this file system's locks keep others out.

    Raises: CacheFormatError: they do not, as on some network file systems.
    """
    try:
        with LockFile(folder.lease_lock) as first, LockFile(folder.lease_lock) as second:
            byte = 2**62  # no segment's
            works = first.try_range(byte, 1, exclusive=False)
            works = works and not second.try_range(byte, 1, exclusive=True)
            reason = "a second lock on a locked byte was granted"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        works, reason = False, str(error)
    if not works:
        raise CacheFormatError(
            f"the file system of {folder.path} has no working locks ({reason}): put the cache on a local disk"
        )


def recover(store: Store) -> None:
    """Make a cache fit for use after whatever happened to those who used it before."""
    folder = store.folder
    with store.locked():
        folder.sweep()
        record, boot = folder.read_record(), linux.boot_id()
        names = [*folder.segment_names(), *folder.quarantined_names()]
        highest = max((layout.parse_segment_name(name) or (-1,))[0] for name in [*names, ""])
        next_seq, suspect = max(record.next_seq, highest + 1), record.suspect_below
        if record.boot_id != boot:
            next_seq = suspect = min(next_seq + Limits.current.number_leap, layout.MAX_SEQ)
            store.evict_beyond_capacity()
        if (next_seq, suspect, boot) != (record.next_seq, record.suspect_below, record.boot_id):
            folder.write_record(layout.LockRecord(next_seq, suspect, boot))
            folder.sync_record()  # once a restart: the next leap is from here at least
