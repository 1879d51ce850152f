"""Readers: every way to read a cache, and what may come of one whose third segment is damaged.

Allowed are a refusal, by a typed error or by leaving the segment out; the rows that were written; and,
where the bytes of a column were altered, other rows of the same shape, which `verify` must find.
"""

from __future__ import annotations

import random
import warnings
from contextlib import ExitStack
from typing import Any

import numpy as np
from fuzz.subjects import DAMAGED, ROWS, SEGMENTS, Rows, Subject, batches_of, rows_of, shuffled

import arrowcache as ac

REFUSED, EQUAL, DIFFERENT = "refused", "equal", "different"
_TEXT = ": text"
_ALL = SEGMENTS * ROWS
_THEIRS = range(DAMAGED * ROWS, (DAMAGED + 1) * ROWS)


def examine(subject: Subject, data: bytes, chance: random.Random, *, thorough: bool) -> dict[str, str]:
    """Read a cache with a damaged segment in several ways; in all, by caches just opened, if thorough.

    `verify` and a cache that checks bytes are asked about one in five, and about all that gave other rows.

    Returns: what each reader said. Raises: AssertionError, or whatever no user should see.
    """
    readers = {"gather": _gather, "table": _table, "loader": _loader, "views": _views}
    chosen = list(readers) if thorough else ["gather", *(["table"] if chance.random() < 0.3 else [])]
    said: dict[str, str] = {}
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)  # that a segment is quarantined
        cache, strict = subject.cache, subject.strict
        if thorough:
            cache = stack.enter_context(ac.Cache.open(subject.folder))
            strict = stack.enter_context(ac.Cache.open(subject.folder, check="bytes"))
        for name in chosen:
            subject.damage(data)
            said[name] = readers[name](subject, cache, chance)
            _require_quarantined(subject, said[name])
        if not (thorough or DIFFERENT in said.values() or chance.random() < 0.2):
            return _words(said)
        subject.damage(data)
        problems = cache.verify(repair=False)
        assert {problem.name for problem in problems} <= {subject.files[DAMAGED]}
        said["verify"] = REFUSED if problems else EQUAL
        said["bytes"] = _gather(subject, strict, chance)
        _require_quarantined(subject, said["bytes"])
        assert said["bytes"] == said["verify"], said
        if DIFFERENT in said.values():
            assert problems, f"other rows, and verify finds nothing: {said}"
            assert subject.victim.alters_values(data), f"other rows, though no value was altered: {said}"
        if thorough and problems:
            subject.damage(data)
            cache.verify(repair=True)
            _require_quarantined(subject, REFUSED)
            assert cache.verify() == []
    return _words(said)


def _words(said: dict[str, str]) -> dict[str, str]:
    return {name: verdict.removesuffix(_TEXT) for name, verdict in said.items()}


def _require_quarantined(subject: Subject, verdict: str) -> None:
    quarantined = subject.empty_quarantine()
    assert (subject.files[DAMAGED] in quarantined) == (verdict == REFUSED), (verdict, quarantined)


def _gather(subject: Subject, cache: ac.Cache, chance: random.Random) -> str:
    with cache.snapshot() as snapshot:
        assert len(snapshot) == _ALL
        try:
            got = rows_of(snapshot.gather(shuffled(_ALL, chance)))
            verdict = EQUAL
            if subject.differing(got) or len(got) < _ALL:  # an id may have changed, too
                verdict = DIFFERENT
                _require_shape(subject, snapshot.gather(np.array(_THEIRS)))
        except ac.CorruptSegmentError as error:
            verdict = _verdict(error)
        ids = np.array(sorted(subject.sound))
        assert rows_of(snapshot.gather(ids)) == {n: subject.rows[n] for n in subject.sound}
        return verdict


def _verdict(error: ac.CorruptSegmentError) -> str:
    """A text that is none is met by its reader, when the segment is in use: it stays until `verify`."""
    return REFUSED + _TEXT if "not valid UTF-8" in str(error) else REFUSED


def _require_shape(subject: Subject, batch: dict[str, Any]) -> None:
    for name, kind in subject.schema.fixed.items():
        assert batch[name].shape == (ROWS, *kind.shape)
        assert batch[name].dtype == kind.numpy_dtype
    for name in subject.schema.variable:
        column = batch[name]
        count = len(column) if isinstance(column, list) else len(column.offsets) - 1
        assert count == ROWS


def _table(subject: Subject, cache: ac.Cache, chance: random.Random) -> str:
    with cache.snapshot() as snapshot:
        try:
            table = snapshot.table()
        except ac.CorruptSegmentError:
            return REFUSED
    assert table.schema.equals(subject.table.schema)
    if table.equals(subject.table):
        return EQUAL
    assert table.num_rows == _ALL
    for start in (0, (DAMAGED + 1) * ROWS):
        stop = DAMAGED * ROWS if start == 0 else _ALL
        assert table.slice(start, stop - start).equals(subject.table.slice(start, stop - start))
    try:  # whatever the bytes are, reading them is safe
        table.slice(_THEIRS.start, ROWS).to_pylist()
    except UnicodeDecodeError:
        pass
    table.validate()
    return DIFFERENT


def _loader(subject: Subject, cache: ac.Cache, chance: random.Random) -> str:
    shuffle = chance.choice(["rows", "window"])
    return _epoch(subject, ac.Loader(cache, 5, shuffle=shuffle, drop_last=False, timeout=10))


def _views(subject: Subject, cache: ac.Cache, chance: random.Random) -> str:
    shuffle = chance.choice(["blocks", None])
    return _epoch(subject, ac.Loader(cache, 4, shuffle=shuffle, drop_last=False, timeout=10))


def _epoch(subject: Subject, loader: ac.Loader) -> str:
    got: Rows = {}
    count = 0
    verdict = EQUAL
    try:
        for batch in batches_of(loader):
            count += len(batch["id"])
            got |= rows_of(batch)
    except ac.CorruptSegmentError as error:
        verdict = _verdict(error)
    if verdict != EQUAL:
        assert verdict != REFUSED, "a loader leaves a damaged segment out"
        return verdict
    if count == _ALL - ROWS:
        assert got == {n: subject.rows[n] for n in subject.sound}
        return REFUSED
    assert count == _ALL
    return DIFFERENT if subject.differing(got) or len(got) < _ALL else EQUAL
