"""Retries: tries a read of a remote store again, while its error may pass.

Some errors are permanent: a missing file, credentials that the store refuses, a bug. They end at once; those
of ready sources as FileNotFoundError and PermissionError with advice. Other errors of the operating system or
the store (a connection that was reset, 503, a body that was cut off) are tried again after a
delay that doubles and is drawn at random, so that a hundred samplers do not all come back at the same
moment (Brooker, "Exponential backoff and jitter", AWS Architecture Blog, 2015: "full jitter").
It must never draw from a task's generator: the content of a task does not depend on the store's health.
"""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from arrowcache.errors import ArrowCacheError, CacheFormatError, SchemaError
from arrowcache.sampling.counts import tally
from arrowcache.units import parse_count, parse_seconds

T = TypeVar("T")

_CODE = re.compile(r"AWS Error (\w+)|HTTP status (\d+)|Status\((\w+)")  # of S3, and of Google's C++ client
_REFUSED = {
    "ACCESS_DENIED", "ACCOUNT_PROBLEM", "EXPIRED_TOKEN", "INCOMPLETE_SIGNATURE", "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID", "INVALID_SIGNATURE", "INVALID_TOKEN", "MISSING_AUTHENTICATION_TOKEN",
    "NOT_AUTHORIZED", "OPT_IN_REQUIRED", "SIGNATURE_DOES_NOT_MATCH", "UNRECOGNIZED_CLIENT",
    "PERMISSION_DENIED", "UNAUTHENTICATED", "401", "403",
}  # fmt: skip
_ABSENT = {"NO_SUCH_BUCKET", "NO_SUCH_KEY", "RESOURCE_NOT_FOUND", "NOT_FOUND", "404"}
_SETTLED = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
#: Of a program, or of bytes that are not what they should be.
_BUGS = (
    ArithmeticError, AssertionError, AttributeError, CacheFormatError, ImportError, LookupError, MemoryError,
    NameError, NotImplementedError, SchemaError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
_MAY_PASS = {408, 425, 429}  # of the 4xx: too slow, too early, too many
_REFUSALS = {401, 403, 407}
#: Modules whose own errors say that bytes do not decode, though they are no ValueErrors.
_DECODERS = {
    "PIL", "_lzma", "_pickle", "cv2", "gzip", "numcodecs", "pickle", "pydicom", "soundfile", "struct",
    "tifffile", "zipfile", "zlib", "zstandard", "zstd",
}  # fmt: skip
#: Never of one sample alone.
_OF_ALL = (ArrowCacheError, ImportError, MemoryError, PermissionError)

_E = TypeVar("_E", bound=BaseException)


def settled(error: _E, *, is_fault: bool = False) -> _E:
    """Mark an error as one that cannot pass, such as that of a sample that does not fit.

    Args:
        is_fault: it is of one sample: see `is_fault`.
    """
    error.is_settled, error.is_fault = True, is_fault  # type: ignore[attr-defined]
    return error


def is_marked(error: BaseException) -> bool:
    return getattr(error, "is_settled", False)


def may_pass(error: Exception) -> bool:
    """True if another attempt at a read may end in another way, whoever wrote it, and with which library."""
    if is_marked(error) or isinstance(error, _BUGS) or _is_of_decoder(error):
        return False
    status = _status(error)
    if status is not None:
        return not 400 <= status < 500 or status in _MAY_PASS
    return not isinstance(error, OSError) or not is_settled(error)


def is_fault(error: Exception) -> bool:
    """True if an error is of one sample, and will not pass: it is not there, or does not decode.

    A refusal, a sample that does not fit the schema and a lack of memory are more than that.
    """
    if is_marked(error):
        return getattr(error, "is_fault", False)
    is_refusal = _status(error) in _REFUSALS or (
        isinstance(error, OSError) and not _codes(error).isdisjoint(_REFUSED)
    )
    return not (is_refusal or isinstance(error, _OF_ALL) or may_pass(error))


def _is_of_decoder(error: Exception) -> bool:
    """True if a decoder raised an error of its own. One that is cut off may be whole the next time."""
    if isinstance(error, EOFError) or (isinstance(error, OSError) and error.errno is not None):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    raised_in = "" if last is None else last.tb_frame.f_globals.get("__name__", "")
    return not _DECODERS.isdisjoint(name.partition(".")[0] for name in (type(error).__module__, raised_in))


def _status(error: Exception) -> int | None:
    """The HTTP status in an error: of requests, httpx, urllib, aiohttp, botocore, Google's clients."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = next(
            (
                value
                for of in (response, error)
                for name in ("status_code", "status", "code")
                if isinstance(value := getattr(of, name, None), int)
            ),
            None,
        )
    return found if isinstance(found, int) and 100 <= found < 600 else None


def _fraction() -> float:
    """Return a number in [0, 1) without the generators of `random`, whose state is the user's."""
    return random.SystemRandom().random()


@dataclass(frozen=True, slots=True)
class Retries:
    """The number and the delays of repeated reads.

    Args:
        count: number of attempts after the first one.
        first_seconds: the longest delay before the second attempt; it doubles with each.
        most_seconds: the longest delay of all.
        sleep: replaceable in tests.
        jitter: draws the share of the longest delay; replaceable in tests.
    Raises: TypeError, ValueError: not a count, or not a time.
    """

    count: int = 4
    first_seconds: float = 0.25
    most_seconds: float = 10.0
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = _fraction

    def __post_init__(self) -> None:
        parse_count(self.count, "retries", least=0, most=1000)
        for name in ("first_seconds", "most_seconds"):
            if getattr(self, name) is None:
                raise TypeError(f"{name} must be a number of seconds, not None")
            parse_seconds(getattr(self, name), name)

    @classmethod
    def of(cls, retries: int | Retries) -> Retries:
        """Raises: TypeError, ValueError: not a count."""
        if isinstance(retries, Retries):
            return retries
        return cls(retries)

    def call(
        self,
        read: Callable[[], T],
        is_over: Callable[[], bool] = lambda: False,
        passes: Callable[[Exception], bool] | None = None,
    ) -> T:
        """Return the result of anybody's `read`, at the first attempt that succeeds.

        Args:
            is_over: True: nobody waits for it any more, and there are no further attempts.
            passes: tells the errors after which there are. None means `may_pass`.
        Blocks: for all attempts and the delays between them.
        Raises: what `read` raised last; at once, if it does not pass.
        """
        passes = passes or may_pass
        for attempt in range(self.count):
            try:
                return read()
            except Exception as error:
                if is_over() or not passes(error):
                    raise
                tally.retries += 1
                self.sleep(self.jitter() * min(self.most_seconds, self.first_seconds * 2**attempt))
        return read()

    def run(self, read: Callable[[], T], name: str) -> T:
        """Return the result of `read`, at the first attempt that succeeds.

        Args:
            name: the file's name for messages; without credentials.
        Blocks: for all attempts and the delays between them.
        Raises: FileNotFoundError, PermissionError: at once. OSError: at the last attempt; names the file
            and the cause. Other errors of `read` pass through.
        """
        attempts = 0

        def attempt() -> T:
            nonlocal attempts
            attempts += 1
            return read()

        try:
            return self.call(
                attempt, passes=lambda error: isinstance(error, OSError) and not is_settled(error)
            )
        except OSError as error:
            end(error, name, attempts)


def is_settled(error: OSError) -> bool:
    """True if trying again would end in the same way."""
    return isinstance(error, _SETTLED) or bool(_codes(error) & (_REFUSED | _ABSENT))


def end(error: OSError, name: str, attempts: int) -> NoReturn:
    """Raise the error in a class for handlers, with the file's name."""
    cause, codes = " ".join(str(error).split()), _codes(error)
    if isinstance(error, PermissionError) or codes & _REFUSED:
        raise PermissionError(
            errno.EACCES,
            "the store refuses these credentials, or they may not read this: check the key, its secret and "
            f"its rights (the store says: {cause})",
            name,
        ) from error
    if isinstance(error, FileNotFoundError) or codes & _ABSENT:
        raise FileNotFoundError(errno.ENOENT, "no such file or bucket", name) from error
    if isinstance(error, _SETTLED):
        raise type(error)(error.errno, cause, name) from error
    tried = "at the first attempt" if attempts == 1 else f"in {attempts} attempts"
    raise OSError(errno.EIO, f"cannot be read, {tried}: {cause}", name) from error


def _codes(error: OSError) -> set[str]:
    return {code for found in _CODE.findall(str(error)) for code in found if code}
