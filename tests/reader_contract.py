"""What every reader of a cache keeps, whatever it hands batches to: NumPy, torch, a device, TensorFlow.

`Contract` is a class of tests. A module that has readers subclasses it and gives a fixture `face`: a `Face`
for each reader and each way in which its batches are made.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import pytest
from every_type import every_type
from helpers import (
    EVERY_TYPE,
    in_child,
    make_cache,
    publish,
    published_ids,
    sample,
    wait_until,
    worker_pids,
)
from interruptions import Interruption, library

import arrowcache as ac

if TYPE_CHECKING:
    from typing import Self

SHUFFLES = ["rows", "window", "blocks", None]
IDS = list(range(160))


@dataclass(frozen=True)
class Face:
    """One reader, and one way in which its batches are made.

    Args:
        make: a reader from (cache, batch_size, **options of `arrowcache.Loader`): a context manager, of which
            each `iter` begins an epoch.
        has: what it can do beside that, in words; a test of the contract says which it needs.
        error: as which an error of its epoch arrives; None means as itself.
    """

    make: Callable[..., Any]
    has: frozenset[str] = frozenset()
    error: type[Exception] | None = None

    def needs(self, *abilities: str) -> None:
        if missing := {*abilities} - self.has:
            pytest.skip(f"this reader has no {', '.join(missing)}")


class Unclosed:
    """A reader over batches of a framework's own, which nothing but their end closes."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._batches


def plain(column: Any) -> Any:
    """A column of any framework as an array, or as a list of its rows; bfloat16 as its bits."""
    if isinstance(column, ac.Values):
        return [plain(row) for row in np.split(column.data, column.offsets[1:-1])]
    if getattr(column, "is_nested", False):  # torch
        return [plain(row) for row in column.unbind()]
    if hasattr(column, "row_splits"):  # TensorFlow
        return [plain(row) for row in np.split(column.values.numpy(), column.row_splits.numpy()[1:-1])]
    if isinstance(column, list):
        return column
    if str(getattr(column, "dtype", "")) == "torch.bfloat16":
        import torch

        return column.view(torch.int16).numpy().view(np.uint16)
    array = np.asarray(column)
    if array.dtype == object:
        return array.tolist()
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def bits(value: Any) -> bytes:
    """What two values have in common that are the same to the last bit; a timestamp is its microseconds."""
    if isinstance(value, str):
        return value.encode()
    return value if isinstance(value, bytes) else np.ascontiguousarray(value).tobytes()


def ids_of(batches: Iterable[Any]) -> list[int]:
    """The ids of batches of schema ROW; each image is the one that was appended with its id."""
    found: list[int] = []
    for batch in batches:
        ids = plain(batch["id"]).ravel().tolist()
        if "image" in batch:
            assert np.array_equal(plain(batch["image"]), np.stack([sample(i)["image"] for i in ids]))
        found += ids
    return found


def same(batch: Any) -> Any:
    return batch


def nothing_is_left(cache: ac.Cache) -> None:
    """No lease of this cache, nor of those beside it that readers made, and no worker process."""
    caches = [ac.Cache.open(path.parent) for path in cache.path.parent.glob("*/cache.json")]

    def is_let_go() -> bool:
        gc.collect()
        return not any(each.stats().leased_bytes for each in caches) and not worker_pids()

    wait_until(is_let_go, "the leases and the workers to end")
    for each in caches:
        assert each.verify() == []


#: Has a reader's batches made another way.
TRANSFORMED = {"transform": same}


def yielded(reader: Any) -> Any:
    yield from reader


def begun(reader: Any) -> Any:
    return iter(reader)


def collected(reader: Any) -> Any:
    """Batches of an iterator that alone holds its reader, of which the garbage collector takes the rest."""
    batches = iter(reader)
    del reader
    for number, batch in enumerate(batches):
        if number < 2:  # a collection takes a tenth of a second
            gc.collect()
        yield batch


def in_a_thread(reader: Any) -> list[Any]:
    found: list[Any] = []
    thread = threading.Thread(target=found.extend, args=[iter(reader)])
    del reader
    thread.start()
    thread.join()
    return found


#: How programs write an epoch of a reader that nothing else holds.
FORMS: dict[str, Callable[[Callable[[], Any]], Iterable[Any]]] = {
    "for": lambda make: [batch for batch in make()],  # noqa: C416  # as they write it
    "list": lambda make: list(make()),
    "yield from": lambda make: yielded(make()),
    "returned": lambda make: begun(make()),
    "collected": lambda make: collected(make()),
    "enumerate": lambda make: (batch for _, batch in enumerate(make())),
    "zip": lambda make: (batch for batch, _ in zip(make(), range(10))),  # noqa: B905  # as they write it
    "islice": lambda make: itertools.islice(make(), 10),
    "map": lambda make: map(same, make()),
    "chain": lambda make: itertools.chain(make()),
    "a thread": lambda make: in_a_thread(make()),
}

#: What others do to the epoch of a reader, and what a face has that can.
ACTS: dict[str, tuple[Callable[[Any], object], set[str]]] = {
    "was closed": (lambda reader: reader.close(), {"close"}),
    "a newer one began": (lambda reader: next(iter(reader)), {"one epoch"}),
    "a state was loaded": (
        lambda reader: reader.load_state_dict(reader.state_dict()),
        {"state", "one epoch"},
    ),
}


#: Those in windows and blocks without a transform are in the test of rows that are left out.
EPOCHS = {
    **{f"{shuffle}, transformed": (shuffle, same) for shuffle in SHUFFLES},
    **{f"{shuffle}, as it is": (shuffle, None) for shuffle in ("rows", None)},
}


class WholeEpochs:
    """Tests of how an epoch of one face ends: after all of its batches, or by an error. Ids are 0 to 159."""

    @pytest.mark.parametrize("form", FORMS)
    def test_an_epoch_is_whole_where_nothing_else_holds_its_reader(self, face, cache, form):
        batches = FORMS[form](lambda: face.make(cache, 16))
        assert sorted(ids_of(batches)) == IDS

    def test_the_first_batch_of_a_reader_that_nothing_else_holds_comes(self, face, cache):
        assert len(ids_of([next(iter(face.make(cache, 16)))])) == 16
        nothing_is_left(cache)

    def test_endless_batches_need_nothing_that_holds_their_reader(self, face, cache):
        face.needs("repeat")
        found = ids_of(itertools.islice(face.make(cache, 16).repeat(), 20))
        assert [sorted(found[:160]), sorted(found[160:])] == [IDS, IDS]

    @pytest.mark.parametrize("taken", [0, 1, 5, 9])
    @pytest.mark.parametrize("act", ACTS)
    def test_an_epoch_that_is_cut_short_raises_in_its_consumer(self, face, cache, act, taken):
        do, abilities = ACTS[act]
        face.needs(*abilities)
        if face.error is not None and not taken:
            pytest.skip("this reader begins an epoch with its first batch")
        with face.make(cache, 16) as reader:
            epoch = iter(reader)
            assert len(ids_of(itertools.islice(epoch, taken))) == 16 * taken
            do(reader)
            if face.error is None:
                for _ in range(3):
                    with pytest.raises(RuntimeError, match=act):
                        next(epoch)
                return
            try:
                rest = ids_of(epoch)
            except face.error as error:
                assert act in str(error)  # noqa: PT017  # or none, where TensorFlow had asked for all by then
            else:
                assert len(rest) == 160 - 16 * taken, "no part of it looks whole"

    def test_an_epoch_beside_a_newer_one_is_whole(self, face, cache):
        face.needs("epochs beside another")
        with face.make(cache, 16) as reader:
            older = iter(reader)
            first = ids_of([next(older)])
            newer = iter(reader)
            second = ids_of([next(newer)])
            if "state" in face.has:
                reader.load_state_dict(reader.state_dict())
            assert sorted(first + ids_of(older)) == sorted(second + ids_of(newer)) == IDS

    @pytest.mark.parametrize("act", ACTS)
    def test_an_epoch_whose_last_batch_came_ends_as_it_is_whatever_comes_then(self, face, cache, act):
        do, abilities = ACTS[act]
        face.needs(*abilities)
        with face.make(cache, 16) as reader:
            epoch = iter(reader)
            assert sorted(ids_of(itertools.islice(epoch, 10))) == IDS
            do(reader)
            assert [*epoch] == []

    def test_endless_batches_that_are_cut_short_raise_in_their_consumer(self, face, cache):
        face.needs("repeat")
        reader = face.make(cache, 16)
        for taken in (3, 10, 13):
            batches = reader.repeat()
            assert len(ids_of(itertools.islice(batches, taken))) == 16 * taken
            reader.load_state_dict(reader.state_dict())
            for _ in range(3):
                with pytest.raises(RuntimeError, match="a state was loaded"):
                    next(batches)
        batches = reader.repeat()
        next(batches)
        reader.close()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="the loader was closed"):
                next(batches)

    def test_endless_batches_of_a_reader_that_is_closed_between_two_epochs_just_end(self, face, cache):
        face.needs("repeat")
        for taken in (10, 20):
            with face.make(cache, 16) as reader:
                batches = reader.repeat()
                assert len(ids_of(itertools.islice(batches, taken))) == 16 * taken
            assert [*batches] == []

    def test_a_consumer_that_closes_its_iterator_or_drops_it_is_told_nothing(self, face, cache):
        face.needs("one epoch")
        with face.make(cache, 16) as reader:
            epoch = iter(reader)
            next(epoch)
            if hasattr(epoch, "close"):
                epoch.close()
                assert [*epoch] == []
            for _ in reader:
                break
            assert sorted(ids_of(reader)) == IDS

    def test_an_epoch_goes_on_whole_after_its_cache_was_closed(self, face, cache):
        reader = face.make(cache, 16)
        epoch = iter(reader)
        first = ids_of([next(epoch)])
        cache.close()
        assert sorted(first + ids_of(epoch)) == IDS

    @pytest.mark.parametrize("taken", [0, 1, 5, 10])
    def test_each_iteration_is_a_whole_epoch_after_one_that_was_left(self, face, cache, taken):
        with face.make(cache, 16) as reader:
            for _ in range(2):
                assert len(ids_of(itertools.islice(reader, taken))) == 16 * taken
                for _ in range(2):
                    assert sorted(ids_of(reader)) == IDS

    def test_an_iterator_that_the_garbage_collector_takes_ends_its_epoch_in_silence(self, face, cache):
        with face.make(cache, 16) as reader:
            for taken in (0, 1, 5):
                epoch = iter(reader)
                assert len(ids_of(itertools.islice(epoch, taken))) == 16 * taken
                cycle: list[Any] = [epoch]
                cycle.append(cycle)
                del epoch, cycle
                gc.collect()
                assert sorted(ids_of(reader)) == IDS

    def test_an_iterator_cannot_be_copied_and_none_of_its_batches_is_lost(self, face, cache):
        face.needs("one epoch")
        with face.make(cache, 16) as reader:
            epoch = iter(reader)
            head = ids_of(itertools.islice(epoch, 3))
            for again in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot be pickled or copied"):
                    again(epoch)
            gc.collect()
            assert sorted(head + ids_of(epoch)) == IDS

    def test_endless_batches_that_their_consumer_closes_end_in_silence(self, face, cache):
        face.needs("repeat")
        with face.make(cache, 16) as reader:
            for taken in (0, 3, 10, 25):
                batches = reader.repeat()
                assert len(ids_of(itertools.islice(batches, taken))) == 16 * taken
                batches.close()
                assert [*batches] == []
                assert sorted(ids_of(itertools.islice(reader.repeat(), 10))) == IDS

    @pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")  # of a destructor
    @pytest.mark.parametrize("method", ["__iter__", "repeat"])
    def test_after_an_interrupt_the_next_epoch_is_whole(self, face, cache, method):
        face.needs("repeat", "interrupt")
        with face.make(cache, 16) as reader:
            for number in (5, 40, 90, 200, 350):
                with Interruption(number, library) as interruption:
                    ids_of(itertools.islice(getattr(reader, method)(), 25))
                assert interruption.where
                assert sorted(ids_of(reader)) == IDS, interruption.where
        del reader
        nothing_is_left(cache)

    def test_what_is_dropped_in_mid_epoch_leaves_nothing(self, face, cache):
        for options in ({}, TRANSFORMED) if "transform" in face.has else ({},):
            reader = face.make(cache, 8, **options)
            epoch = iter(reader)
            kept = next(epoch)
            del epoch, reader
            nothing_is_left(cache)
            assert len(ids_of([kept])) == 8

    def test_a_closed_reader_says_so_and_what_it_had_begun_is_over(self, face, cache):
        face.needs("close")
        reader = face.make(cache, 16, **(TRANSFORMED if "transform" in face.has else {}))
        epoch = iter(reader)
        kept = next(epoch)
        reader.close()
        reader.close()
        assert cache.stats().leased_bytes == 0
        assert not worker_pids()
        with pytest.raises(RuntimeError, match="was closed"):
            next(epoch)
        assert len(ids_of([kept])) == 16
        with pytest.raises(ValueError, match="is closed: make a new one"):
            iter(reader)

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:os.fork:RuntimeWarning")
    def test_a_forked_child_reads_anew_and_its_parent_goes_on(self, face, cache):
        face.needs("fork")
        with face.make(cache, 16, **(TRANSFORMED if "transform" in face.has else {})) as reader:
            epoch = iter(reader)
            first = ids_of([next(epoch)])

            def child() -> None:
                with pytest.raises(ValueError, match="the process that forked this one"):
                    next(epoch)
                assert sorted(ids_of(reader)) == IDS
                reader.close()

            with in_child(child):
                pass
            assert sorted(first + ids_of(epoch)) == IDS

    @pytest.mark.parametrize("where", [0, 7])
    def test_a_stop_iteration_of_a_function_is_an_error_and_no_end(self, face, cache, where):
        face.needs("transform")

        def transform(batch):
            if where in plain(batch["id"]).ravel().tolist():
                raise StopIteration("the stream is over")
            return batch

        with pytest.raises(Exception, match=r"StopIteration|the stream is over") as caught:
            list(face.make(cache, 16, transform=transform))
        assert not isinstance(caught.value, StopIteration)


class Contract(WholeEpochs):
    """Tests of one face. `cache` has ten segments of 16 rows, ids 0 to 159."""

    # what an epoch holds

    @pytest.mark.parametrize(("shuffle", "transform"), EPOCHS.values(), ids=EPOCHS)
    def test_epochs_are_those_of_the_plain_loader_and_grow_with_the_cache(
        self, face, cache, shuffle, transform
    ):
        options = {"shuffle": shuffle, "seed": 3, "drop_last": False}
        if transform is not None:
            face.needs("transform")
        with (
            face.make(cache, 14, transform=transform, **options) as reader,
            ac.Loader(cache, 14, **options) as own,
        ):
            for _ in range(3):
                found = [ids_of([batch]) for batch in reader]
                assert found == [ids_of([batch]) for batch in own]
                assert sorted(itertools.chain(*found)) == list(range(cache.stats().rows))
                publish(cache, 1)

    def test_a_short_last_batch_is_left_out(self, face, cache):
        with face.make(cache, 64) as reader:
            assert [len(batch["id"]) for batch in reader] == [64, 64]

    @pytest.mark.parametrize("transform", [None, same], ids=["as it is", "transformed"])
    def test_every_type_comes_as_it_was_written(self, face, tmp_path, transform):
        if transform is not None:
            face.needs("transform")
        options = {"capacity": "16MiB", "segment_bytes": "1MiB", "segment_rows": 11}
        cache, written = make_cache(tmp_path / "every", EVERY_TYPE, **options), every_type(40)
        written["id"] = np.arange(40)
        with cache.writer() as writer:
            writer.extend(written)
        seen = []
        with face.make(cache, 8, transform=transform) as reader:
            for batch in reader:
                assert list(batch) == list(EVERY_TYPE)
                numbers = plain(batch["id"]).tolist()
                for name, column in batch.items():
                    for value, number in zip(plain(column), numbers, strict=True):
                        assert bits(value) == bits(written[name][number]), (name, number)
                seen += numbers
        assert sorted(seen) == list(range(40))

    @pytest.mark.parametrize("transform", [None, same], ids=["as it is", "transformed"])
    def test_batches_by_tokens_are_those_of_the_plain_loader_and_go_on_from_a_state(
        self, face, cache, transform
    ):
        face.needs("tokens")
        options = {"batch_tokens": 320, "length_of": "id", "seed": 3}
        if transform is not None:
            face.needs("transform")
        with (
            face.make(cache, None, transform=transform, **options) as reader,
            ac.Loader(cache, **options) as own,
        ):
            for _ in range(2):
                found = [ids_of([batch]) for batch in reader]
                assert found == [ids_of([batch]) for batch in own]
                assert sorted(itertools.chain(*found)) == list(range(cache.stats().rows))
                assert all(len(ids) * max(*ids, 1) <= 320 for ids in found if len(ids) > 1)
                assert len({*map(len, found)}) > 5
                publish(cache, 1)
            if "state" in face.has:
                steps, epoch = iter(reader), [ids_of([batch]) for batch in own]
                assert [ids_of([next(steps)]) for _ in range(7)] == epoch[:7]
                reader.load_state_dict(reader.state_dict())
                assert [ids_of([batch]) for batch in reader] == epoch[7:]

    def test_columns_and_segments_are_chosen(self, face, cache):
        options = {"columns": ["image"], "where": lambda segment: segment.seq % 5 == 0}
        with face.make(cache, 16, shuffle=None, **options) as reader:
            batches = list(reader)
        assert [list(batch) for batch in batches] == [["image"]] * 2
        assert [int(plain(batch["image"])[0, 0, 0]) for batch in batches] == [0, 80]

    @pytest.mark.parametrize("shuffle", SHUFFLES)
    def test_rows_that_are_excluded_or_not_selected_are_left_out(self, face, cache, shuffle):
        options = {"shuffle": shuffle, "seed": 3, "drop_last": False}
        cache.exclude([(seq, seq) for seq in range(10)])
        for rows in ("included", lambda columns: columns["id"] % 3 != 0, [(0, 0), (0, 1), (9, 15), (5, 5)]):
            with (
                face.make(cache, 14, rows=rows, **options) as reader,
                ac.Loader(cache, 14, rows=rows, **options) as own,
            ):
                found, wanted = [ids_of([batch]) for batch in reader], [ids_of([batch]) for batch in own]
                assert found == wanted
                assert not {*range(0, 160, 17)} & {*itertools.chain(*found)}
        assert sorted(itertools.chain(*found)) == [1, 159]

    def test_an_exclusion_holds_from_the_next_epoch_on(self, face, cache):
        with face.make(cache, 16) as reader:
            epoch = iter(reader)
            first = ids_of([next(epoch)])
            cache.exclude([(row // 16, row % 16) for row in range(80)])
            assert sorted(first + ids_of(epoch)) == IDS
            assert sorted(ids_of(reader)) == IDS[80:]
            cache.include((0, 0))
            cache.exclude([(9, row) for row in range(1, 16)])
            with face.make(cache, 1, rows="included", drop_last=False) as another:
                assert sorted(ids_of(another)) == [0, *range(80, 145)]
            with face.make(cache, 16, rows="all") as another:
                assert sorted(ids_of(another)) == IDS

    def test_a_rule_leaves_rows_out_and_those_to_come(self, face, cache):
        cache.exclude(where=pc.field("id") < 80)
        with face.make(cache, 16) as reader:
            assert sorted(ids_of(reader)) == IDS[80:]
            publish(cache, 1, first=0)
            assert sorted(ids_of(reader)) == IDS[80:]
            cache.include(where=pc.field("id") < 80)
            assert len(ids_of(reader)) == 176

    def test_a_function_of_rows_is_asked_in_each_epoch_and_by_one_process(self, face, cache, tmp_path):
        oldest, asked = tmp_path / "oldest", tmp_path / "asked"

        def rows(columns):
            with asked.open("a") as file:
                file.write("+")
            return columns["id"] >= int(oldest.read_text())

        with face.make(cache, 16, rows=rows) as reader:
            for first in (0, 80, 32):
                oldest.write_text(str(first))
                assert sorted(ids_of(reader)) == IDS[first:]
        assert asked.read_text() == "+" * 30

    def test_an_expression_chooses_rows_and_what_it_does_not_know_is_refused_at_once(self, face, cache):
        field = pc.field
        with face.make(cache, 8, rows=(field("id") >= 40) & (field("_seq") != 4), drop_last=False) as reader:
            for _ in range(2):
                assert sorted(ids_of(reader)) == [*range(40, 64), *range(80, 160)]
        with ac.Cache.open(cache.path) as another:  # whose end writes them
            another.annotate([(0, row) for row in range(16)], loss=np.arange(16))
        with face.make(cache, 1, rows=field("loss") > 12) as reader:
            assert sorted(ids_of(reader)) == [13, 14, 15]
            with ac.Cache.open(cache.path) as another:
                another.annotate((2, 0), loss=20)
            assert sorted(ids_of(reader)) == [13, 14, 15, 32]
        with pytest.raises(ValueError, match=r"reads 'los'.*did you mean 'loss'"):
            face.make(cache, 8, rows=field("los") > 12)
        with pytest.raises(ValueError, match="no row has the tag 'tga'"):
            face.make(cache, 8, rows="tga")
        with face.make(cache, 8, rows=field("los").is_null(), expect="los") as reader:
            assert sorted(ids_of(reader)) == IDS

    def test_an_expression_that_fails_for_a_row_names_argument_and_row(self, face, cache):
        divisor, words = (
            pc.field("id") - 40,
            "rows=.* cannot be evaluated for row 2:8: divide by zero; replace",
        )
        with (
            face.make(cache, 8, rows=pc.scalar(6) / divisor < 9) as reader,
            pytest.raises(face.error or ValueError, match=words),
        ):
            ids_of(reader)
        with face.make(cache, 8, rows=pc.scalar(6) / pc.if_else(divisor == 0, 1, divisor) < 9) as reader:
            assert len(ids_of(reader)) == 160

    def test_a_state_keeps_the_rows_with_which_its_epoch_began(self, face, cache):
        face.needs("state")
        with face.make(cache, 8, rows=lambda columns: columns["id"] >= 40) as reader:
            epoch = iter(reader)
            first = ids_of(itertools.islice(epoch, 3))
            state = reader.state_dict()
            rest = ids_of(epoch)
        cache.exclude([(5, row) for row in range(16)])
        with face.make(cache, 8, rows="included") as reader:
            reader.load_state_dict(state)
            assert ids_of(reader) == rest
            assert sorted(first + rest) == IDS[40:]
            assert sorted(ids_of(reader)) == sorted({*IDS} - {*range(80, 96)})

    def test_ids_say_where_each_row_comes_from(self, face, cache):
        face.needs("ids")
        with face.make(cache, 16, with_ids=True, columns=["id"]) as reader:
            for batch in reader:
                assert list(batch) == ["id", "_seq", "_row", "_age_seconds"]
                assert np.array_equal(plain(batch["_seq"]) * 16 + plain(batch["_row"]), plain(batch["id"]))
                assert ((plain(batch["_age_seconds"]) >= 0) & (plain(batch["_age_seconds"]) < 3600)).all()

    def test_ranks_read_disjoint_rows_in_equally_many_steps(self, face, cache):
        face.needs("ranks")
        readers = [face.make(cache, 8, rank=rank, world_size=3, run_id="job") for rank in range(3)]
        for _ in range(2):
            steps = list(zip(*readers, strict=True))
            found = [number for step in steps for number in ids_of(step)]
            assert len(found) == len(set(found)) == 24 * len(steps) == cache.stats().rows // 24 * 24
            publish(cache, 2)
        for reader in readers:
            reader.__exit__(None, None, None)
        del readers, reader, steps
        nothing_is_left(cache)

    # memory

    def test_nothing_that_is_kept_is_overwritten_nor_needs_the_reader(self, face, cache):
        with face.make(cache, 16) as reader:
            kept = [batch for _ in range(4) for batch in reader]
        del reader
        if "writing" in face.has:
            kept.pop(0)["image"][...] = 7
        assert len(kept) >= 39
        assert set(ids_of(kept)) == set(IDS)
        cache.evict("1MB")
        assert len(ids_of(kept)) == 16 * len(kept)

    def test_what_a_transform_writes_into_its_batch_is_delivered_and_reaches_no_other(self, face, cache):
        face.needs("transform")

        def transform(batch):
            batch["image"] += 1
            return batch | {"more": batch["id"] * 2}

        with face.make(cache, 16, transform=transform) as reader:
            for _ in range(3):
                for batch in reader:
                    ids = plain(batch["id"])
                    assert np.array_equal(plain(batch["image"])[:, 0, 0], ids + 1)
                    assert np.array_equal(plain(batch["more"]), ids * 2)
        assert cache.verify() == []

    # ends

    def test_after_a_break_the_next_epoch_is_whole(self, face, cache):
        with face.make(cache, 8) as reader:
            for steps in (1, 4):
                assert len(ids_of(itertools.islice(reader, steps))) == 8 * steps
                publish(cache, 1)
                assert sorted(ids_of(reader)) == list(range(cache.stats().rows))
        del reader
        nothing_is_left(cache)

    def test_a_newer_epoch_ends_the_one_before(self, face, cache):
        face.needs("one epoch")
        with face.make(cache, 4) as reader:
            older = iter(reader)
            next(older)
            assert sorted(ids_of(reader)) == IDS
            with pytest.raises(face.error or RuntimeError, match="a newer one began"):
                list(older)

    def test_a_writer_makes_room_between_epochs(self, face, tmp_path):
        cache = make_cache(tmp_path / "full", capacity="400KiB", headroom=0)
        publish(cache, 24)
        with face.make(cache, 16, columns=["id"]) as reader:
            for _ in range(3):
                assert sorted(ids_of(reader)) == published_ids(cache)
                publish(cache, 24)
        assert cache.verify() == []

    # errors

    def test_the_error_of_a_transform_comes_in_its_place_and_the_next_epoch_is_whole(
        self, face, cache, tmp_path
    ):
        face.needs("transform")
        is_mended = tmp_path / "mended"

        def transform(batch):
            if 100 in batch["id"] and not is_mended.exists():
                raise LookupError("of all rows, 100")
            return batch

        with face.make(cache, 16, shuffle=None, transform=transform) as reader:
            delivered: list[int] = []
            with pytest.raises(LookupError, match="of all rows, 100") as caught:
                delivered.extend(number for batch in reader for number in ids_of([batch]))
            del caught
            assert delivered == list(range(96))
            is_mended.touch()
            assert ids_of(reader) == IDS
        del reader
        nothing_is_left(cache)

    def test_an_empty_cache_is_an_error_and_no_empty_epoch(self, face, tmp_path):
        cache = make_cache(tmp_path / "empty")
        with (
            face.make(cache, 16, timeout=0.05) as reader,
            pytest.raises(face.error or ac.LoaderTimeoutError, match="which has 0"),
        ):
            next(iter(reader))

    def test_an_empty_cache_to_which_nobody_writes_is_an_error_before_the_timeout(self, face, tmp_path):
        """Here there is none."""
        cache = make_cache(tmp_path / "empty")
        with (
            face.make(cache, 16, timeout=None) as reader,
            pytest.raises(face.error or ac.LoaderTimeoutError, match="is empty, and nobody writes to it"),
        ):
            next(iter(reader))

    # states

    @pytest.mark.parametrize("taken", [1, 7, 20])
    def test_a_state_goes_on_where_it_was_taken(self, face, cache, taken):
        face.needs("state")
        with face.make(cache, 8, seed=2) as reader:
            epoch = iter(reader)
            head = ids_of(itertools.islice(epoch, taken))
            state = reader.state_dict()
            rest = ids_of(epoch)
        assert sorted(head + rest) == IDS
        publish(cache, 2)
        with face.make(cache, 8, seed=9) as reader:
            reader.load_state_dict(state)
            if rest or "length" not in face.has:  # else the state is of the next epoch
                assert ids_of(reader) == rest
            assert sorted(ids_of(reader)) == list(range(192))
