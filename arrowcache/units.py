"""Units: sizes, times and counts as people write them. Parsed at the door, printed in messages."""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Callable, Iterable

_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("k" if base == 1000 else "K", "M", "G", "T"), start=1)
}
MAX_COUNTED = 1 << 62  # such a number and a step more fit into 64 bits
_SIZE = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*")


def parse_bytes(size: int | str, name: str) -> int:
    """Turn 4096 or "64MiB" into bytes.

    Args:
        size: bytes, or text with B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (1024).
    Raises: ValueError: not a size, or not positive. TypeError: neither int nor text.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None:
            raise ValueError(
                f"{name}={size!r} is not a size: write bytes as a number, "
                f"or text such as '64MiB' or '200GB' (units: {', '.join(_UNITS)})"
            )
        number, unit = match.groups()
        nbytes = int(float(number) * _UNITS[unit]) if "." in number else int(number) * _UNITS[unit]
    elif isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    else:
        raise TypeError(f"{name} must be bytes or text such as '64MiB', not {size!r}")
    if nbytes <= 0:
        raise ValueError(f"{name}={size!r} must be positive")
    return nbytes


def parse_seconds(seconds: float | None, name: str) -> float | None:
    """Check a time to wait. None and infinity mean no limit.

    Raises: ValueError: negative or not a number. TypeError: not a number.
    """
    if seconds is None:
        return None
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise TypeError(f"{name} must be seconds as a number, or None, not {seconds!r}")
    if not seconds >= 0:
        raise ValueError(f"{name}={seconds!r} must be seconds >= 0, or None for no bound")
    return None if seconds > threading.TIMEOUT_MAX / 2 else float(seconds)


def parse_count(value: object, name: str, least: int = 1, most: int | None = MAX_COUNTED) -> int:
    """Check a count: any type of int, such as NumPy's.

    Args:
        most: None means no limit.
    Raises: TypeError: not an int. ValueError: below `least`, above `most`, or a bool.
    """
    try:
        number = as_int(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {value!r}") from None
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name}={value!r} must be an int of at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name}={value!r} must be an int of at most {most}")
    return number


def as_int(value: object) -> int:
    """`operator.index`, which takes bool, but refuses NumPy's bool in NumPy 1 too, which would only warn.

    Raises: TypeError: not an int.
    """
    if str(getattr(value, "dtype", "")) == "bool":
        raise TypeError(f"{value!r} is no int")
    return operator.index(value)  # type: ignore[arg-type]  # it raises TypeError itself


def shortened(text: str, most: int) -> str:
    """Print at most `most` characters, with "..." in place of others."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def format_bytes(nbytes: float) -> str:
    """Print a size with a binary unit: 67108864 -> "64.0 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def format_enough(nbytes: int) -> str:
    """Print a size as `format_bytes`, rounded up: whoever takes it has enough."""
    unit = _UNITS[format_bytes(nbytes).split()[1]]
    return format_bytes(-(-10 * nbytes // unit) * unit / 10)


def format_seconds(seconds: float) -> str:
    """Print a time to two digits or so: 0.0314 -> "31 ms", 125 -> "2.1 min"; below 0.5 us it is "0 s"."""
    if seconds < 0.0005:
        return f"{1e6 * seconds:.0f} us" if seconds >= 5e-7 else "0 s"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    for unit, factor in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < factor:
            return f"{seconds:.1f} {unit}" if seconds < 10 else f"{seconds:.0f} {unit}"
        seconds /= 24 if unit == "h" else factor
    return f"{seconds:,.1f} d"


def format_count(count: int, noun: str, nouns: str | None = None) -> str:
    """Print a count with its noun: 1 -> "1 row", 92000 -> "92,000 rows"; `nouns` if "s" does not make it."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {nouns or noun + 's'}"


def format_share(part: float, whole: float) -> str:
    """Print a share in per cent; never 0 % of something, nor 100 % of less than all."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 1:
        return "<1 %"
    return ">99 %" if 99 < share < 100 else f"{share:.0f} %"


def did_you_mean(name: object, names: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """Return a question that names what is like an unknown name, and a space. Empty: nothing is."""
    import difflib  # 4 ms that only an error takes

    names = [*map(str, names)]
    near = difflib.get_close_matches(str(name), names)
    if not near:  # in other letters, or by its last part
        last = str(name).casefold()
        near = [each for each in names if last in (each.casefold(), each.casefold().rpartition("/")[2])][:3]
    return f"did you mean {' or '.join(map(shown, near))}? " if near else ""


def require_function(function: object, name: str) -> None:
    """Check that an argument is a function or None.

    Raises: TypeError: it is neither.
    """
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be a function or None, not {function!r}")


def require_text(text: object, name: str) -> str:
    """Return a text. Raises: TypeError: it is none. ValueError: UTF-8 cannot hold it."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a text, not {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{name} is {text!r}, which UTF-8 cannot hold: take text.encode(errors='replace').decode()"
        ) from None
    return text
