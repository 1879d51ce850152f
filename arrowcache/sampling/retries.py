"""Retries: tries a read of a remote store again, while its error may pass.

Some errors are permanent: a missing file, credentials that the store refuses, a bug. They end at once; those
of ready sources as FileNotFoundError and PermissionError with advice. Other errors of the operating system or
the store (a connection that was reset, 503, a body that was cut off) are tried again after a
delay that doubles and is drawn at random, so that a hundred samplers do not all come back at the same
moment (Brooker, "Exponential backoff and jitter", AWS Architecture Blog, 2015: "full jitter").
It must never draw from a task's generator: the content of a task does not depend on the store's health.
A thread notes in `tally` what its read costs.
"""

from __future__ import annotations

import errno
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from arrowcache.errors import ArrowCacheError, CacheFormatError, SchemaError
from arrowcache.units import parse_count, parse_seconds

T = TypeVar("T")


class _Tally(threading.local):
    """Costs of a thread's read so far: the bytes that came from a store, and further attempts."""

    fetched_bytes = retries = 0


tally = _Tally()

#: Of S3, Google's C++ client and Azure by pyarrow, and of S3 by obstore.
_CODE = re.compile(r"AWS Error (\w+)|HTTP status (\d+)|Status\((\w+)|Azure Error: \[(\w+)|<Code>(\w+)</Code>")
# Codes of stores, without what is no letter or digit.
_REFUSED = {
    "401", "403", "accessdenied", "accountisdisabled", "accountproblem", "authenticationfailed",
    "authorizationfailure", "authorizationheadermalformed", "authorizationpermissionmismatch", "expiredtoken",
    "expiredtokenexception", "incompletesignature", "insufficientaccountpermissions", "invalidaccesskeyid",
    "invalidauthenticationinfo", "invalidclienttokenid", "invalidsignature", "invalidtoken",
    "missingauthenticationtoken", "noauthenticationinformation", "notauthorized", "optinrequired",
    "permissiondenied", "requesttimetooskewed", "signaturedoesnotmatch", "tokenrefreshrequired",
    "unauthenticated", "unrecognizedclient", "unrecognizedclientexception",
}  # fmt: skip
_ABSENT = {
    "404", "blobnotfound", "containernotfound", "filesystemnotfound", "nosuchbucket", "nosuchkey", "notfound",
    "pathnotfound", "resourcenotfound",
}  # fmt: skip
_BUSY = {
    "backenderror", "bandwidthlimitexceeded", "internalerror", "operationtimedout",
    "priorrequestnotcomplete", "provisionedthroughputexceededexception", "ratelimitexceeded",
    "requestlimitexceeded", "requestthrottled", "requestthrottledexception", "requesttimeout",
    "requesttimeoutexception", "serverbusy", "serviceunavailable", "slowdown", "throttledexception",
    "throttling", "throttlingexception", "toomanyrequests", "toomanyrequestsexception",
    "userratelimitexceeded",
}  # fmt: skip
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
#: Of a program, or of bytes that are not what they should be.
_BUGS = (
    ArithmeticError, AssertionError, AttributeError, CacheFormatError, ImportError, LookupError, MemoryError,
    NameError, NotImplementedError, SchemaError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
_MAY_PASS = {408, 425, 429}  # of the 4xx: too slow, too early, too many
_REFUSALS = {401, 403, 407}
_BAD_REQUEST = 400
#: Modules whose own errors say that bytes do not decode, though they are no ValueErrors. What is in a module
#: counts, too: the errors that functions in C raise are those of a class of theirs, or of their caller.
_DECODERS = (
    "PIL", "_block", "_compression", "_csv", "_lzma", "_pickle", "av", "brotli", "bz2", "chunk",
    "compression", "cramjam", "cv2", "fastavro", "google.protobuf", "gzip", "h5py", "imageio", "lz4", "lzma",
    "nibabel", "numcodecs", "numpy.lib", "pandas.io.pickle", "pickle", "pyarrow.lib", "pydicom",
    "safetensors", "scipy.io", "snappy", "soundfile", "struct", "tarfile", "tifffile",
    "torch._weights_only_unpickler", "torch.jit", "torch.serialization", "wave", "xml", "yaml", "zipfile",
    "zlib", "zstandard", "zstd",
)  # fmt: skip
#: Of functions in C of bz2, pickle, marshal and lz4.
_DECODER_SAYS = re.compile("Invalid data stream|Ran out of input|EOF read where|LZ4F_")
#: Of h5py: the file could not be read. Of pyarrow and nibabel: fewer bytes came.
_NOT_READ, _CUT_OFF = re.compile(r"errno = \d"), re.compile(r"end of stream|\bgot \d")
#: Never of one sample alone.
_OF_ALL = (ArrowCacheError, ImportError, MemoryError, PermissionError)

_E = TypeVar("_E", bound=BaseException)


def mark_permanent(error: _E, *, is_fault: bool = False) -> _E:
    """Mark an error as one that cannot pass, such as that of a sample that does not fit.

    Args:
        is_fault: it is of one sample: see `is_fault`.
    """
    error.is_permanent, error.is_fault = True, is_fault  # type: ignore[attr-defined]
    return error


def in_place_of(cause: Exception, error: _E) -> _E:
    """Mark an error that is raised in place of another as that of one sample, if the other is."""
    return mark_permanent(error, is_fault=True) if is_fault(cause) else error


def is_marked(error: BaseException) -> bool:
    return getattr(error, "is_permanent", False)


def may_pass(error: Exception) -> bool:
    """True if another attempt at a read may end in another way, whoever wrote it, and with which library."""
    if is_marked(error) or isinstance(error, (*_BUGS, *_PERMANENT)):
        return False
    if is_of_decoder(error):
        return not is_damage(error)
    codes, status = _codes(error), _status(error)
    if codes & (_BUSY | _REFUSED | _ABSENT):  # what a store says: S3 has status 400 for what may pass, too
        return bool(codes & _BUSY)
    return status is None or not 400 <= status < 500 or status in _MAY_PASS


def is_refusal(error: BaseException) -> bool:
    """True if a store refuses the credentials, or they may not read this, whichever library says so."""
    codes = _codes(error)
    is_refused = bool(codes & _REFUSED) or _status(error) in _REFUSALS
    return isinstance(error, PermissionError) or (is_refused and not codes & _BUSY)


def is_fault(error: Exception) -> bool:
    """True if an error is of one sample, and will not pass: it is not there, or does not decode.

    So is one that is cut off each time that it is read. A refusal, a sample that does not fit the schema and
    a lack of memory are more than that. So is a bad request that a store tells by another code, or by none
    where it may be a refusal: that of a HEAD of S3.
    """
    if is_marked(error):
        return getattr(error, "is_fault", False)
    if isinstance(error, _OF_ALL) or is_refusal(error):
        return False
    if is_of_decoder(error):
        return True
    if may_pass(error):
        return False
    return _status(error) != _BAD_REQUEST or not _codes(error)


def is_of_decoder(error: BaseException) -> bool:
    """True if a decoder raised an error of its own: the bytes came, and are damaged or cut off."""
    if isinstance(error, OSError) and (error.errno is not None or _codes(error)):
        return False
    if type(error).__name__.startswith("HTTP") or _NOT_READ.search(str(error)):  # of what it reads from
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    raised_in = "" if last is None else last.tb_frame.f_globals.get("__name__", "")
    modules = f"{type(error).__module__}.", f"{raised_in}."
    if any(module.startswith(f"{name}.") for name in _DECODERS for module in modules):
        return True
    return isinstance(error, OSError | EOFError | RuntimeError) and bool(_DECODER_SAYS.match(str(error)))


def is_damage(error: BaseException) -> bool:
    """True if a decoder says that bytes are damaged; what is cut off may be whole the next time."""
    is_cut_off = isinstance(error, EOFError) or _CUT_OFF.search(str(error))
    return is_of_decoder(error) and not is_cut_off


def _status(error: BaseException) -> int | None:
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
                attempt,
                passes=lambda error: (
                    isinstance(error, OSError) and not is_final(error) and not is_damage(error)
                ),
            )
        except OSError as error:
            end(error, name, attempts)


def is_final(error: OSError) -> bool:
    """True if trying again would end in the same way."""
    return isinstance(error, _PERMANENT) or bool(_codes(error) & (_REFUSED | _ABSENT))


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
    if isinstance(error, _PERMANENT):
        raise type(error)(error.errno, cause, name) from error
    tried = "at the first attempt" if attempts == 1 else f"in {attempts} attempts"
    raise OSError(errno.EIO, f"cannot be read, {tried}: {cause}", name) from error


def _codes(error: BaseException) -> set[str]:
    """The codes in an error of a store: of pyarrow, obstore, botocore, Google's and Azure's clients, s3fs."""
    is_obstore = type(error).__module__ == "obstore.exceptions"
    codes: list[Any] = [type(error).__name__.removesuffix("Error")] if is_obstore else []
    if is_obstore or isinstance(error, OSError):
        codes += [code for found in _CODE.findall(str(error)) for code in found]
    response, errors = getattr(error, "response", None), getattr(error, "errors", None)
    if isinstance(response, dict):
        codes.append(response.get("Error", {}).get("Code"))
    codes.append(getattr(error, "error_code", None))
    if isinstance(errors, list | tuple):
        codes += [each.get("reason") for each in errors if isinstance(each, dict)]
    found = {"".join(filter(str.isalnum, code)).lower() for code in codes if isinstance(code, str)} - {""}
    if isinstance(error, OSError) and error.__cause__ is not None:
        found |= _codes(error.__cause__)
    return found
