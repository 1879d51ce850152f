"""Getter: bytes of objects by obstore, one request each.

pyarrow.fs sends a HEAD for each file that it opens, before the first GET, and takes more of the processor.
It still reads what obstore cannot: with options or credentials that obstore would take from another place,
names that obstore refuses, and after every error that may be obstore's own: then its bytes or error count.
obstore's threads do not survive a fork: a read in the child would wait for ever. pyarrow reads there, too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from urllib.request import getproxies

from pyarrow import fs

_WAS_LOADED = "obstore" in sys.modules

import obstore  # noqa: E402
from obstore.exceptions import BaseError  # noqa: E402
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store  # noqa: E402

from arrowcache.lifetimes import Origin  # noqa: E402

_ORIGIN = Origin()
_CHANCES = 2  # failures before the first success, after which obstore is not asked again
_READ_SECONDS = 5.0  # without a byte, before a read fails: Ctrl-C in the main thread waits for that
_STATUS = re.compile(r"status code: ((?:408|429|5\d\d)[\w ]*)")
_TRANSPORT = re.compile(r"HTTP error: ([\w ,]*)")
_FORKED = 0x40  # PF_FORKNOEXEC of Linux
# Of the environment, for obstore: another server, or other URLs. ELSEWHERE: whatever the options say.
_S3_ENDPOINTS = {"AWS_ENDPOINT", "AWS_ENDPOINT_URL"}
_S3_ELSEWHERE = {"AWS_ENDPOINT_URL_S3", "AWS_S3_EXPRESS", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"}
_GCS_ENDPOINTS = {"GOOGLE_BASE_URL"}
_AZURE_ELSEWHERE = {"AZURE_STORAGE_USE_EMULATOR", "AZURE_USE_EMULATOR", "AZURE_USE_FABRIC_ENDPOINT"}
_AWS_FILES = ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config")


class Getter:
    """Connections to one store.

    Args:
        store: makes that of a bucket, a container, or a server of HTTP.
        is_http: paths are whole URLs.
    """

    def __init__(self, store: Callable[[str], Any], *, is_http: bool = False) -> None:
        self._store, self._is_http = lru_cache(maxsize=64)(store), is_http
        self._chances, self._is_proven = _CHANCES, False

    def get(self, path: str, start: int, nbytes: int | None) -> tuple[bytes, int] | None:
        """Read an object, or bytes of it: fewer, if it ends before. Thread-safe.

        Returns: the bytes, and the object's size. None: another has to read it.

        Args:
            start: below zero it is counted from the object's end.
        Raises: FileNotFoundError, and OSError if the connection broke, both after a first success. OSError:
            the store is too busy.
        """
        root, key = self._split(path)
        if not key or self._chances < 1 or key.endswith("/") or nbytes == 0:
            return None
        part: Any = None
        if start < 0:
            part = {"suffix": -start}
        elif nbytes is not None:
            part = start, start + nbytes
        elif start:
            part = {"offset": start}
        try:
            found = obstore.get(self._store(root), key, options=None if part is None else {"range": part})
            data, size = found.bytes().to_bytes(), found.meta["size"]
        except FileNotFoundError:
            if self._is_proven:
                raise FileNotFoundError from None  # without the URL, which may have a key
            return None
        except ValueError:  # of a name
            return None
        except (BaseError, OSError) as error:
            if (busy := _STATUS.search(str(error))) is not None:
                raise OSError(f"HTTP status {busy[1].strip()}") from None
            if self._is_proven and (broken := _TRANSPORT.search(str(error))) is not None:
                raise OSError(broken[0]) from None
            self._chances -= not self._is_proven
            return None
        self._is_proven = True
        return data if nbytes is None or start >= 0 else data[:nbytes], size

    def _split(self, path: str) -> tuple[str, str]:
        if not self._is_http:
            root, _, key = path.partition("/")
            return root, key
        scheme, separator, rest = path.partition("://")
        host, _, key = rest.partition("/")
        is_plain = bool(separator) and not re.search("[?#%@]", rest)
        return f"{scheme}://{host}", key if is_plain else ""


def getter_of(filesystem: fs.FileSystem) -> Getter | None:
    """Return connections to the store of a file system. None: obstore cannot read it in the same way."""
    if not _ORIGIN.is_here or (_WAS_LOADED and _is_fork()):
        return None
    if {"http", "https", "all"} & getproxies().keys():  # pyarrow does not ask those of the environment
        return None
    if isinstance(filesystem, fs.PyFileSystem):
        files: Any = getattr(filesystem.handler, "fs", None)
        if "https" in getattr(files, "protocol", ()) and not files.storage_options:
            return Getter(lambda server: HTTPStore.from_url(server, **_common(server)), is_http=True)
        return None
    make = {"s3": _s3, "gcs": _gcs, "abfs": _azure}.get(filesystem.type_name)
    if make is None:
        return None
    _, (options,) = filesystem.__reduce__()
    store = make(options)
    return None if store is None else Getter(store)


def _is_any_set(names: set[str]) -> bool:
    return any(name.upper() in names for name in os.environ)  # obstore takes them in any case


def _is_fork() -> bool:
    """True if this process was forked, and runs no program of its own."""
    with open("/proc/self/stat") as file:
        return bool(int(file.read().rpartition(")")[2].split()[6]) & _FORKED)


def _common(scheme: str, read_seconds: float = 0) -> dict[str, Any]:
    """Return options of every store: no retries, which are ours, and no bound of a large object's time."""
    client: dict[str, Any] = {
        "allow_http": not scheme.startswith("https"),
        "connect_timeout": "3s",
        "timeout": "1day",
        "read_timeout": f"{int(1000 * (read_seconds if read_seconds > 0 else _READ_SECONDS))}ms",
    }
    return {"client_options": client, "retry_config": {"max_retries": 0}}


def _s3(options: dict[str, Any]) -> Callable[[str], Any] | None:
    proxy = options["proxy_options"]
    if (
        options["role_arn"] or options.get("tls_ca_file_path") or options["force_virtual_addressing"]
        or (proxy["host"] if isinstance(proxy, dict) else proxy)
        or _is_any_set(_S3_ELSEWHERE if options["endpoint_override"] else _S3_ELSEWHERE | _S3_ENDPOINTS)
    ):  # fmt: skip
        return None
    given: dict[str, Any] = {"region": options["region"]} if options["region"] else {}
    if options["anonymous"]:
        given["skip_signature"] = True
    elif options["access_key"]:  # as such obstore would take a token of the environment with them
        found = {
            "access_key_id": options["access_key"], "secret_access_key": options["secret_key"],
            "token": options["session_token"] or None, "expires_at": None,
        }  # fmt: skip
        given["credential_provider"] = lambda: found
    elif "AWS_ACCESS_KEY_ID" not in os.environ and (
        "AWS_EC2_METADATA_DISABLED" in os.environ
        or any(os.path.exists(os.path.expanduser(os.environ.get(*where))) for where in _AWS_FILES)
    ):
        return None  # obstore asks the machine, and reads none of these
    if host := options["endpoint_override"]:
        given["endpoint"] = host if "://" in host else f"{options['scheme']}://{host}"
    common = _common(options["scheme"], options["request_timeout"])
    return lambda bucket: S3Store(bucket, **given, **common)


def _gcs(options: dict[str, Any]) -> Callable[[str], Any] | None:
    if (
        options["access_token"] or options["target_service_account"]
        or (not options["endpoint_override"] and _is_any_set(_GCS_ENDPOINTS))
    ):  # fmt: skip
        return None
    given: dict[str, Any] = {"skip_signature": True} if options["anonymous"] else {}
    if host := options["endpoint_override"]:
        given["base_url"] = f"{options['scheme']}://{host}"
    common = _common(options["scheme"])
    return lambda bucket: GCSStore(bucket, **given, **common)


def _azure(options: dict[str, Any]) -> Callable[[str], Any] | None:
    keys = {"account_key": options["account_key"], "sas_key": options["sas_token"]}
    account, scheme = options["account_name"], options["blob_storage_scheme"]
    if not any(keys.values()) or _is_any_set(_AZURE_ELSEWHERE):
        return None
    host = options["blob_storage_authority"]
    given = {name: key for name, key in keys.items() if key} | {
        "account_name": account,
        "endpoint": f"{scheme}://{account}{host}" if host.startswith(".") else f"{scheme}://{host}/{account}",
    }
    common = _common(scheme)
    return lambda container: AzureStore(container, **given, **common)
