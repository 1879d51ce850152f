"""Functions and expressions of `rows=` and `weights=`: when they are asked, and what is refused."""

from __future__ import annotations

import os
import threading
import time
import warnings
from datetime import datetime, timezone
from operator import attrgetter
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from helpers import ids_of, limit, make_cache, publish, wait_until
from processes import DEADLINE_SECONDS

import arrowcache as ac
from arrowcache import Loader
from arrowcache.proc import memory_bytes
from arrowcache.reading.per_segment import PythonFunction, StoredFunction
from arrowcache.reading.snapshot import Snapshot

IDS = list(range(160))
field = pc.field
call = attrgetter("_call")(pc.Expression)  # pyarrow's documents name it for functions of one's own
KINDS = ac.Schema(
    {
        "id": ac.Tensor("int64"),
        "flag": ac.Tensor("bool"),
        "small": ac.Tensor("float16"),
        "brain": ac.Tensor("bfloat16"),
        "wave": ac.Tensor("complex64"),
        "name": ac.String(),
        "raw": ac.Binary(),
        "at": ac.Timestamp(),
        "image": ac.Tensor("float32", (2,)),
        "tokens": ac.Ragged("int32"),
    }
)


@pytest.fixture
def kinds(tmp_path):
    cache = make_cache(tmp_path / "kinds", KINDS)
    with cache.writer() as writer:
        for number in range(20):
            writer.append(
                id=number,
                flag=number % 2 == 0,
                small=np.float16(number / 4),
                brain=np.array(number, np.float32).view(np.uint32).__rshift__(16).astype(np.uint16),
                wave=number * 1j,
                name=f"n{number}",
                raw=bytes([number]),
                at=np.datetime64("2026-01-01") + np.timedelta64(number, "D"),
                image=np.zeros(2, np.float32),
                tokens=np.arange(number, dtype=np.int32),
            )
    return cache


def epoch(cache, rows, **options):
    with Loader(cache, 4, rows=rows, columns=["id"], drop_last=False, timeout=5, **options) as loader:
        return sorted(ids_of(loader))


class Counted(Snapshot):
    """A snapshot that notes which columns are read."""

    read: ClassVar[list[tuple[str, ...]]] = []

    def gather(self, row_ids, columns=None, out=None):
        self.read.append(tuple(columns))
        return super().gather(row_ids, columns, out)


@pytest.fixture
def read():
    """Columns that were read of snapshots that are Counted, by each call."""
    Counted.read.clear()
    return Counted.read


def plainly(result, segment):
    assert segment.rows
    return result


# functions


@pytest.mark.parametrize("argument", ["rows", "weights", "where"])
def test_a_function_that_raises_stop_iteration_is_named(cache, argument):
    says = f"^the function of {argument}= raised StopIteration, which"
    options = {argument: lambda columns: next(iter(()))}
    with Loader(cache, 4, **options) as loader, pytest.raises(RuntimeError, match=says):
        next(iter(loader))
    if argument == "where":
        with Loader(cache, 4, shuffle=None, **options) as loader, pytest.raises(RuntimeError, match=says):
            loader.assert_zero_copy()
        with pytest.raises(RuntimeError, match=says):
            cache.snapshot(**options)


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="errors have notes from Python 3.11 on")
@pytest.mark.parametrize("argument", ["rows", "weights", "where"])
def test_an_error_of_a_function_has_a_note_with_its_argument(cache, argument):
    options = {argument: lambda columns: 1 / 0}
    with Loader(cache, 4, **options) as loader, pytest.raises(ZeroDivisionError) as caught:
        next(iter(loader))
    assert caught.value.__notes__ == [f"It was raised by the function of {argument}=."]


@pytest.mark.parametrize("argument", ["rows", "weights"])
def test_a_function_of_what_changes_is_asked_in_each_epoch(cache, argument):
    oldest = 0

    def function(columns):
        return columns["id"] >= oldest

    seen = []
    with Loader(cache, 16, **{argument: function}) as loader:
        for oldest in (0, 100, 50, 140):  # the function reads it
            seen += [min(ids_of(loader)) >= oldest]
    assert seen == [True] * 4


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("argument", ["rows", "weights"])
def test_each_segment_is_asked_once_an_epoch(cache, argument, endless):
    asked: list[int] = []

    def function(columns):
        asked.append(int(columns["_seq"][0]))
        return columns["id"] >= 0

    with Loader(cache, 16, **{argument: function}) as loader:
        batches = loader.repeat() if endless else (batch for _ in range(3) for batch in loader)
        for _, _ in zip(range(30), batches, strict=False):
            pass
    assert len(asked) % 10 == 0 or endless
    assert asked[:30] == [*range(10)] * 3


def test_what_a_function_writes_into_its_columns_is_not_there_in_the_next_epoch(cache):
    def rows(columns):
        found = columns["id"] % 2 == 0
        columns["id"][:] = 1
        columns["image"][:] = np.nan
        return found

    with Loader(cache, 16, rows=rows) as loader:
        assert [sorted(ids_of(loader)) for _ in range(3)] == [IDS[::2]] * 3


@pytest.mark.parametrize("name", ["id", "name", "raw", "tokens"])
@pytest.mark.parametrize("share", [1, 0], ids=["all fit", "none fits"])
def test_columns_that_a_function_read_are_remembered_within_bounds(kinds, read, monkeypatch, name, share):
    if not share:
        limit(monkeypatch, function_memory=0)
    function = PythonFunction(kinds.store, lambda columns: columns[name], "rows", plainly)
    segments, found = len(kinds.store.segments()), []
    for _ in range(3):
        with Counted.take(kinds.store) as snapshot:
            found.append(function.of(snapshot))
    assert len(read) == segments * (1 if share else 3)
    assert [len(results) for results in found] == [segments] * 3


def test_columns_of_segments_that_left_make_room_for_others(cache, read, monkeypatch):
    limit(monkeypatch, function_memory=9 * 16 * 8 / memory_bytes())  # nine of ten segments
    function = PythonFunction(cache.store, lambda columns: columns["id"], "rows", plainly)

    def reads():
        read.clear()
        with Counted.take(cache.store) as snapshot:
            found = np.concatenate(function.of(snapshot))
        assert found.tolist() == [*range(160 - len(found), 160)]
        return len(read)

    assert [reads(), reads(), reads()] == [10, 1, 1]
    cache.evict("32KiB")
    assert [reads(), reads()] == [1, 0]


def test_tags_and_exclusions_are_looked_up_in_each_epoch(cache):
    cache.tag([(0, 0), (0, 1)], "hard")
    with Loader(cache, 1, rows="hard") as loader:
        assert sorted(ids_of(loader)) == [0, 1]
        cache.tag((1, 0), "hard")
        cache.exclude((0, 1))
        assert sorted(ids_of(loader)) == [0, 16]
        cache.untag((0, 0), "hard")
        assert ids_of(loader) == [16]


def test_a_resumed_epoch_has_its_saved_rows_whatever_the_function_says_now(cache):
    least = 32

    def rows(columns):
        return columns["id"] >= least

    with Loader(cache, 16, rows=rows) as loader:
        first = ids_of([next(iter(loader))])
        state = loader.state_dict()
    least = 150
    with Loader(cache, 16, rows=rows) as loader:
        loader.load_state_dict(state)
        assert sorted(first + ids_of(loader)) == IDS[32:]
        least = 144
        assert sorted(ids_of(loader)) == IDS[144:]


def test_repeat_asks_a_function_before_the_seam_a_part_at_each_step(tmp_path):
    cache = make_cache(tmp_path / "long")
    publish(cache, 40)
    asked: list[int] = []
    with Loader(cache, 4, rows=lambda columns: asked.append(1) or columns["id"] >= 0, prefetch=1) as loader:
        batches = loader.repeat()
        a_step = []
        for _ in range(160 + 4):
            before = len(asked)
            next(batches)
            a_step.append(len(asked) - before)
    assert sum(a_step) == 40
    assert max(a_step) <= 6, a_step
    assert a_step[-1] == a_step[-2] == 0, "the rest is for the epoch after it"


def test_a_function_that_fails_ahead_fails_at_the_seam(cache):
    is_sound = True

    def rows(columns):
        if not is_sound:
            raise LookupError("gone")
        return columns["id"] >= 0

    found = []
    with Loader(cache, 4, rows=rows) as loader:
        batches = loader.repeat()
        found += ids_of([next(batches)])
        is_sound = False
        with pytest.raises(LookupError, match="gone"):
            found.extend(int(number) for batch in batches for number in batch["id"])
    assert sorted(found) == IDS
    assert cache.stats().leased_bytes == 0


def test_one_rank_of_a_node_asks_while_the_others_wait(cache):
    """However long it takes: longer than their timeout."""
    asked: list[int] = []
    is_asked, go_on = threading.Event(), threading.Event()

    def rows(columns):
        asked.append(1)
        is_asked.set()
        assert go_on.wait(DEADLINE_SECONDS)
        return columns["id"] % 2 == 0

    loaders = [
        Loader(cache, 4, rows=rows, rank=rank, world_size=3, run_id="job", timeout=0.2) for rank in range(3)
    ]
    found: list[object] = []

    def read(loader):
        try:
            found.append(ids_of(loader))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=read, args=(loader,)) for loader in loaders]
    threads[0].start()
    assert is_asked.wait(DEADLINE_SECONDS)
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: min(loader.stats().start_seconds for loader in loaders) > 0.6, "thrice their timeout")
    go_on.set()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    numbers = [number for each in found for number in each]
    assert len(numbers) == len({*numbers}) == 72
    assert {*numbers} <= {*IDS[::2]}
    assert len(asked) == 10
    for loader in loaders:
        loader.close()


def test_a_rank_that_dies_as_it_asks_leaves_the_others_to_ask(cache):
    read_end, write_end = os.pipe()

    def rows(columns):
        if os.getpid() != parent:
            os.write(write_end, b".")
            time.sleep(DEADLINE_SECONDS)
        return columns["id"] >= 0

    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            iter(Loader(str(cache.path), 4, rows=rows, rank=0, world_size=2, run_id="job"))
        finally:
            os._exit(1)
    assert os.read(read_end, 1) == b"."
    with Loader(cache, 4, rows=rows, rank=1, world_size=2, run_id="job", timeout=DEADLINE_SECONDS) as loader:
        killer = threading.Timer(0.3, os.kill, (child, 9))
        killer.start()
        assert len(ids_of(loader)) == 80
        killer.join()
    os.waitpid(child, 0)
    os.close(read_end)
    os.close(write_end)


# expressions


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        (field("id") < 3, [0, 1, 2]),
        (field("flag"), [*range(0, 20, 2)]),
        (~field("flag") & (field("id") > 15), [17, 19]),
        (field("small") >= 4.5, [18, 19]),
        (field("brain") == 17, [17]),
        (field("name").isin(["n3", "n5", "other"]), [3, 5]),
        (pc.starts_with(field("name"), "n1"), [1, *range(10, 20)]),
        (field("name") == 'random("', []),
        (field("raw") == b"\x07", [7]),
        (field("at") >= np.datetime64("2026-01-19T00:00:00").item(), [18, 19]),
        (pc.day_of_week(field("at")) == 0, [4, 11, 18]),
        (field("id").cast("float32") / 2 > 9, [19]),
        (pc.if_else(field("flag"), field("id") > 17, False), [18]),
        ((field("_seq") == 0) & (field("_row") < 2), [0, 1]),
        (field("_age_seconds") < 0, []),
        (pc.scalar(True), [*range(20)]),
    ],
)
def test_an_expression_reads_scalar_columns_in_their_logical_types(kinds, expression, wanted):
    if wanted:
        assert epoch(kinds, expression) == wanted
    else:
        with pytest.raises(ac.LoaderTimeoutError, match="`rows` refuses all 20 rows"):
            epoch(kinds, expression)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (field("lable") == 3, "reads 'lable', neither a column nor an annotation.*there are .*id, flag"),
        (field("flags"), "did you mean 'flag'"),
        (field("nmae") == "a", "did you mean 'name'"),
        (field("image") > 0, r"reads 'image', which is Tensor.*\(2,\).*columns\['image'\]"),
        (field("tokens") > 0, "reads 'tokens', which is Ragged"),
        (field("wave") == 0, "reads 'wave', which is Tensor.*Arrow has no complex numbers"),
        (field("id"), "gives int64, not a bool for each row"),
        (field("name"), "gives string, not a bool"),
        (pc.scalar(None), "gives null, not a bool"),
        (field("id") == "a", "cannot be evaluated: Function 'equal' has no kernel"),
        (pc.sum(field("id")) > 3, "calls sum: an expression may call pyarrow's own functions of one row"),
        (pc.cumulative_sum(field("id")) > 3, "calls cumulative_sum"),
        (call("random", [], pc.RandomOptions(initializer=1)) < 0.5, "calls random"),
        (field(0) > 3, r"by its number: write pyarrow.compute.field\(name\)"),
        (field(("id", "x")) > 3, "cannot be evaluated: No match"),
        (
            field("at") > datetime(2026, 1, 3, tzinfo=timezone.utc),
            "evaluated: .*is in UTC without a time zone",
        ),
        (pc.match_substring_regex(field("name"), "n("), r"evaluated: Invalid regular expression: missing \)"),
        (pc.assume_timezone(field("at"), "No/where").is_valid(), "evaluated: Cannot locate .*'No/where'"),
    ],
)
def test_an_expression_that_cannot_choose_rows_is_refused_at_once(kinds, expression, words):
    with pytest.raises(ValueError, match=words):
        Loader(kinds, 4, rows=expression)


def test_a_function_that_the_user_registered_is_refused(cache):
    name = "arrowcache_test_odd"
    if name not in pc.function_registry().list_functions():
        docs = {"summary": "odd", "description": "odd"}
        pc.register_scalar_function(
            lambda _, x: pc.not_equal(pc.bit_wise_and(x, 1), 0), name, docs, {"x": "int64"}, "bool"
        )
    with pytest.raises(ValueError, match=f"calls {name}: .*give a Python function instead"):
        Loader(cache, 4, rows=call(name, [field("id")]))


@pytest.mark.parametrize(
    ("value", "row", "why"),
    [
        (field("id").cast("int8") + pa.scalar(100, pa.int8()), None, ""),
        (field("id").cast("int8") + pa.scalar(110, pa.int8()), "1:2", "overflow"),
        (pc.scalar(6) / (field("id") - 3), "0:3", "divide by zero"),
        (pc.divide(pc.scalar(6), pc.coalesce(field("id"), 0) - 7), "0:7", "divide by zero"),
        (field("name").cast("int64"), "0:0", "Failed to parse string: 'n0' as a scalar of type int64"),
        (pc.choose(field("id"), field("id"), 1), "0:2", "choose: index 2 out of range"),
        (pc.scalar(6) / pc.if_else(field("id") == 3, 1, field("id") - 3), None, ""),
    ],
)
def test_an_expression_that_fails_for_a_row_names_argument_and_row(kinds, value, row, why):
    for argument, expression in {"rows": value < 1000, "weights": pc.abs(value.cast("float64"))}.items():
        with Loader(kinds, 4, **{argument: expression}) as loader:
            if row is None:
                assert ids_of(loader)
                continue
            said = f"^{argument}=.* cannot be evaluated for row {row}: {why}; replace .*if_else"
            with pytest.raises(ValueError, match=said):
                iter(loader)
    assert kinds.stats().leased_bytes == 0


def test_of_rows_for_which_an_expression_fails_the_first_is_named(cache):
    for bad in (0, 16, 159):
        with (
            Loader(cache, 4, rows=pc.scalar(1) / pc.if_else(field("id") < bad, 1, 0) > 0) as loader,
            pytest.raises(ValueError, match=f"for row {bad // 16}:{bad % 16}: divide by zero"),
        ):
            iter(loader)


@pytest.fixture
def stored(cache):
    """A function of columns by name, whose results can be kept, and the rows of each call of it."""

    def make(*names):
        rows: list[int] = []

        def function(columns):
            assert {*columns} == {*names}
            rows.append(len(columns[names[0]]))
            return columns[names[0]]

        return StoredFunction(cache.store, names, function, plainly), rows

    return make


def results(function, cache):
    with Snapshot.take(cache.store) as snapshot:
        return np.concatenate(function.of(snapshot))


def test_the_answer_of_an_expression_over_stored_columns_is_remembered(cache, stored):
    function, rows = stored("id", "_seq", "_row")
    for _ in range(3):
        assert results(function, cache).tolist() == IDS
    publish(cache, 1)
    assert len(results(function, cache)) == 176
    assert rows == [160, 16]
    assert not function.reads_notes


def test_the_answer_of_an_expression_over_annotations_is_remembered_until_they_change(cache, stored):
    function, rows = stored("loss", "id")
    for _ in range(2):
        assert np.isnan(results(function, cache)).all()
    assert rows == [160]
    cache.annotate((2, 3), loss=20)
    for _ in range(2):
        assert np.nanargmax(results(function, cache)) == 35
    assert rows == [160, 160]
    assert function.reads_notes


def test_ages_are_never_remembered(cache, stored):
    function, rows = stored("_age_seconds")
    before = results(function, cache)
    assert (results(function, cache) > before).all()
    assert rows == [160, 160]


def test_an_expression_over_annotations_takes_newer_ones(cache):
    cache.annotate([(0, row) for row in range(16)], loss=np.arange(16.0))
    with Loader(cache, 1, rows=(field("loss") > 13) & (field("id") < 100)) as loader:
        assert [sorted(ids_of(loader)) for _ in range(2)] == [[14, 15]] * 2, "a missing one is null"
        cache.annotate((2, 3), loss=20)
        assert sorted(ids_of(loader)) == [14, 15, 35]


def test_many_rows_are_asked_for_in_parts(cache, stored, monkeypatch):
    limit(monkeypatch, expression_rows=40)
    function, rows = stored("id")
    assert results(function, cache).tolist() == IDS
    assert rows == [48, 48, 48, 16]
    assert epoch(cache, field("id") >= 10) == IDS[10:]


def test_rows_without_an_annotation_can_be_asked_for(cache):
    cache.annotate([(0, 0), (9, 15)], loss=[1, 2])
    assert epoch(cache, field("loss").is_null()) == IDS[1:-1]
    assert epoch(cache, pc.coalesce(field("loss"), 9) > 1) == IDS[1:]


def test_excluded_rows_are_left_out_of_an_expression_and_it_resumes(cache):
    cache.exclude((0, 1))
    with Loader(cache, 8, rows=field("id") < 41, drop_last=False) as loader:
        first = ids_of([next(iter(loader))])
        state = loader.state_dict()
    with Loader(cache, 8, rows=field("id") > 100, drop_last=False) as loader:
        loader.load_state_dict(state)
        assert sorted(first + ids_of(loader)) == [0, *range(2, 41)]


def test_ranks_must_have_the_same_expression(cache):
    first = Loader(cache, 4, rows=field("id") < 41, rank=0, world_size=2, run_id="a")
    other = Loader(cache, 4, rows=field("id") < 42, rank=1, world_size=2, run_id="a")
    with first, other:
        iter(first)
        with pytest.raises(ValueError, match=r"rows is '\(id < 42\)"):
            iter(other)


def test_an_expression_weighs(cache):
    with Loader(cache, 16, weights=field("id") * 2, epoch_rows=1600) as loader:
        assert 0 not in ids_of(loader)
        assert np.isclose(loader.probabilities((0, 4))[0], 4 / sum(IDS))
    cache.annotate([(0, row) for row in range(16)], loss=np.zeros(16))
    with Loader(cache, 16, weights=field("loss") + 1, epoch_rows=1600) as loader:
        assert len({*ids_of(loader)}) > 100, "a missing one weighs as much as the heaviest"
    with Loader(cache, 16, weights=field("loss"), epoch_rows=1600) as loader:
        assert min(ids_of(loader)) >= 16


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (field("id") > 3, "gives bool, not a number for each row: cast it"),
        (field("los") * 2, "reads 'los', neither a column nor an annotation"),
        (field("name"), "reads 'name', neither"),
    ],
)
def test_an_expression_that_cannot_weigh_is_refused_at_once(cache, expression, words):
    with pytest.raises(ValueError, match=words):
        Loader(cache, 4, weights=expression)


def test_a_weight_of_an_expression_that_is_no_number_is_named(cache):
    is_bad = pc.equal(field("id"), 20)
    with (
        Loader(cache, 4, weights=pc.if_else(is_bad, float("nan"), 1.0)) as loader,
        pytest.raises(ValueError, match="row 1:4 has the weight nan"),
    ):
        iter(loader)


# names that are not there


def test_weights_of_a_name_that_no_row_has_are_refused_with_those_there_are(cache):
    cache.annotate((0, 0), priority=1, loss=2)
    for name in ("priorty", "los", "Id"):
        with pytest.raises(
            ValueError, match=f"weights='{name}' is neither .* annotations loss, priority, and"
        ):
            Loader(cache, 4, weights=name)
    with pytest.raises(ValueError, match="did you mean 'priority'"):
        Loader(cache, 4, weights="priorty")
    with Loader(cache, 4, weights="priorty", expect=["priorty"]) as loader:
        assert len(ids_of(loader)) == 160
    with Loader(cache, 4, weights="priority") as loader:
        assert len(ids_of(loader)) == 160


def test_without_any_annotation_weights_of_a_name_give_a_warning_until_there_is_one(cache):
    words = "an error of the next epoch once rows have only other annotations; pass expect='priorty'"
    with pytest.warns(RuntimeWarning, match=words):
        loader = Loader(cache, 4, weights="priorty")
    with loader:
        assert len(ids_of(loader)) == 160
        cache.annotate((0, 0), priority=1)
        with pytest.raises(ValueError, match=r"weights='priorty' is neither.*did you mean 'priority'"):
            iter(loader)
    assert cache.stats().leased_bytes == 0


@pytest.mark.parametrize("name", ["ID", "idd", "lables", "labe"])
def test_without_any_annotation_a_name_like_a_columns_is_refused_unless_it_is_expected(tmp_path, name):
    cache = ac.Cache.create(tmp_path / "c", {"id": ac.Tensor("int64"), "label": ac.Tensor("int64")}, "1MiB")
    with cache.writer() as writer:
        writer.extend(id=range(9), label=range(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            ValueError,
            match=f"weights='{name}' is neither .*did you mean.* there is no annotation, and there are the "
            f"columns id, label; pass expect='{name}'",
        ):
            Loader(cache, 3, weights=name)
        with Loader(cache, 3, weights=name, expect=name) as loader:
            assert len(ids_of(loader)) == 9


def test_annotations_that_left_after_the_loader_was_made_do_not_end_it(cache):
    cache.annotate([(0, 0), (0, 1)], priority=1)
    with Loader(cache, 4, weights="priority") as loader:
        ids_of(loader)
        cache.close()
        cache = ac.Cache.open(cache.path)
        cache.annotate((9, 0), other=1)
        cache.close()
        ac.Cache.open(cache.path).evict("32KiB")
        assert ids_of(loader)


def test_a_tag_that_no_row_has_is_refused_with_those_there_are(cache):
    with pytest.raises(ValueError, match=r"no row has the tag 'hard': there is none yet; .*expect='hard'"):
        Loader(cache, 4, rows="hard")
    cache.tag((0, 0), "hard")
    cache.tag((0, 0), "odd one")
    for tag in ("hrad", "Hard", "odd_one"):
        with pytest.raises(ValueError, match=f"no row has the tag '{tag}'.* there are 'hard', 'odd one'"):
            Loader(cache, 1, rows=tag)


def test_a_tag_that_is_to_come_is_waited_for(cache):
    with Loader(cache, 1, rows="hard", expect="hard", timeout=DEADLINE_SECONDS) as loader:
        timer = threading.Timer(1.5, cache.tag, ((3, 1), "hard"))  # longer than a refusal takes
        timer.start()
        assert ids_of(loader) == [49]
        timer.join()


def test_an_expected_annotation_is_nan_to_a_function_and_null_to_an_expression(cache):
    assert epoch(cache, lambda columns: np.isnan(columns["loss"]), expect="loss") == IDS
    assert epoch(cache, field("loss").is_null(), expect=("loss",)) == IDS
    with pytest.raises(KeyError, match="pass expect='loss'"):
        epoch(cache, lambda columns: np.isnan(columns["loss"]))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"expect": 3, "weights": "id"}, TypeError, "expect must be names"),
        ({"expect": [3], "weights": "id"}, TypeError, "a name of expect must be a text"),
        ({"expect": "loss"}, ValueError, "neither rows= nor weights= asks for it: leave it out"),
        ({"expect": ["hard", "hrad"], "rows": "hard"}, ValueError, "asks for it: did you mean 'hard'. leave"),
        ({"expect": "los", "rows": field("loss") > 1}, ValueError, "'los' is to come.* did you mean 'loss'"),
        ({"expect": "prio", "weights": "id", "rows": "all"}, ValueError, "'prio' is to come.*leave it out"),
        ({"expect": "loss", "rows": "all"}, ValueError, "leave it out"),
        ({"expect": "loss", "rows": ["0:0"]}, ValueError, "leave it out"),
    ],
)
def test_what_expects_nothing_is_refused(cache, options, error, words):
    with pytest.raises(error, match=words):
        Loader(cache, 4, **options)
