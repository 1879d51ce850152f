"""DevicePrefetcher: any iterable, any structure, any end.

That no read sees another batch, whatever is kept or fails: tests/stateful/test_device_machine.py. That a
device without memory is told, and captures are left alone: tests/gpu.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import threading
import traceback
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

import numpy as np
import pytest
from helpers import DEADLINE_SECONDS, in_child

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from processes import Script
from quick import first_is_quick

from arrowcache.torch import DevicePrefetcher


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


class Edge(NamedTuple):
    """`to` is a field here, and no method."""

    source: torch.Tensor
    to: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str
    made: int = 0

    def __post_init__(self):
        object.__setattr__(self, "made", self.made + 1)


@dataclasses.dataclass
class More:
    x: torch.Tensor

    def __post_init__(self):
        self.half, self.note = self.x / 2, "n"


class Refusing(OrderedDict):
    """As transformers' ModelOutput."""

    def update(self, *args, **named):
        raise RuntimeError("nobody may call it")

    def __init__(self, **named):
        super().__init__()
        for key, value in named.items():
            self[key] = value


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor


class Movable:
    """What brings its own `to`."""

    def __init__(self, where="host"):
        self.where = where

    def to(self, device):
        return Movable(str(device))


BATCH_BYTES = 2 * 256  # of the memory for a batch: each leaf is aligned in it


def batches(count: int, rows: int = 4):
    for number in range(count):
        yield {"x": torch.full((rows, 3), float(number)), "id": torch.full((rows,), number)}


class Source:
    """Batches anew for each `iter`; counts them, and may fail or wait."""

    def __init__(self, count=10, fail_at=None, wait_at=None):
        self.count, self.fail_at, self.wait_at = count, fail_at, wait_at
        self.given = 0
        self.closed = 0
        self.go, self.is_waiting = threading.Event(), threading.Event()

    def __iter__(self):
        try:
            for number, batch in enumerate(batches(self.count)):
                if number == self.fail_at:
                    self.fail()
                if number == self.wait_at:
                    self.is_waiting.set()
                    self.go.wait(DEADLINE_SECONDS)
                self.given += 1
                yield batch
        finally:
            self.closed += 1

    def fail(self):
        raise ZeroDivisionError("of the source")


def moved(batch, fakes=None):
    """A batch, once it is on the CPU, or on a fake device."""
    with DevicePrefetcher([batch], "cpu" if fakes is None else "fake") as prefetcher:
        (found,) = prefetcher
    if fakes is not None:
        fakes["fake"].finish()
    return found


def check(batch, number: int) -> None:
    assert torch.equal(batch["x"], torch.full((4, 3), float(number)))
    assert batch["id"].tolist() == [number] * 4


def test_batches_arrive_in_order_in_every_iteration_over_the_same_memory():
    source = Source()
    with DevicePrefetcher(source, "cpu") as prefetcher:
        for _ in range(3):
            for number, batch in enumerate(prefetcher):
                check(batch, number)
            assert number == 9
        del batch
        first = prefetcher.stats()
        for _ in range(50):
            for _ in prefetcher:
                pass
        last = prefetcher.stats()
    assert source.closed == 53
    assert last.batches == 530
    assert last.bytes == 530 * (48 + 32)
    assert first.device_allocations == last.device_allocations == 4
    assert last.device_bytes == 4 * BATCH_BYTES


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_all_memory_is_there_with_the_first_batch(depth):
    with DevicePrefetcher(Source(30), "cpu", depth) as prefetcher:
        iterator = iter(prefetcher)
        next(iterator)
        first = prefetcher.stats()
        for _ in iterator:
            pass
        last = prefetcher.stats()
    assert first.device_allocations == last.device_allocations == depth + 2
    assert first.device_bytes == last.device_bytes == (depth + 2) * BATCH_BYTES


def test_what_was_kept_leaves_no_more_memory_than_there_was_before(fakes):
    with DevicePrefetcher(Source(40), "fake") as prefetcher:
        iterator = iter(prefetcher)
        kept = [next(iterator) for _ in range(20)]
        kept.clear()
        for _ in iterator:
            pass
        assert prefetcher.stats().device_bytes == 4 * BATCH_BYTES


def test_no_more_than_depth_batches_are_ahead(fakes):
    source = Source(50)
    with DevicePrefetcher(source, "cpu", depth=3) as prefetcher:
        for number, _ in enumerate(prefetcher):
            assert source.given == (1, 3, 5, 7)[number] if number < 4 else number + 1 + 3
            if number == 10:
                break
        assert source.given == 14


def test_a_prefetcher_lives_as_long_as_its_iterator():
    numbers = [int(batch["id"][0]) for batch in DevicePrefetcher(Source(), "cpu")]
    assert numbers == list(range(10))


def alike(new, old) -> None:
    """It has the form of a batch, over tensors of its own; what is no numbers is the same object."""
    if isinstance(old, np.ndarray) and old.dtype.kind in "biufc":
        assert np.array_equal(new.numpy(), old)
        assert new.numpy().dtype == old.dtype.newbyteorder("=")
    elif isinstance(old, torch.Tensor):
        assert (type(new), new.dtype, new.shape) == (type(old), old.dtype, old.shape)
        assert torch.equal(new, old)
        assert not old.numel() or new.data_ptr() != old.data_ptr()
    elif isinstance(old, Movable):
        assert (old.where, new.where) == ("host", "cpu")
    elif isinstance(old, Mapping):
        assert (type(new), list(new)) == (type(old), list(old))
        alike([*new.values()], [*old.values()])
    elif dataclasses.is_dataclass(old) and not isinstance(old, type):
        assert type(new) is type(old)
        for field in dataclasses.fields(old):
            alike(getattr(new, field.name), getattr(old, field.name))
        alike(getattr(new, "__dict__", {}), getattr(old, "__dict__", {}))
    elif type(old) in (tuple, list, Pair, Edge):
        assert type(new) is type(old)
        for one, other in zip(new, old, strict=True):
            alike(one, other)
    else:
        assert new is old


def test_any_structure_comes_back_in_its_form():
    tensor = torch.arange(6.0).reshape(2, 3)
    text = ["a", "b"]
    batch = {
        "tuple": (tensor, text, None),
        "list": [tensor, {"deep": tensor.int()}],
        "named": Pair(tensor, "n"),
        "dataclass": Sample(tensor, "d"),
        "dataclass with more": More(tensor),
        "slotted": Slotted(tensor),
        "counter": Counter(x=tensor, y=2),
        "default": defaultdict(list, x=tensor),
        "refuses update": Refusing(x=tensor),
        "ordered": OrderedDict(b=tensor, a=1),
        "user": UserDict(x=tensor),
        "array": np.arange(4, dtype=np.uint16),
        "foreign": np.arange(3).astype(">i4"),
        "unaligned": np.array([(0, 1.5), (1, 2.5)], [("flag", "u1"), ("value", "f8")])["value"],
        "readonly": np.broadcast_to(np.float32(3), (2, 2)),
        "backwards": np.arange(4)[::-1],
        "names": np.array(["a", "b"]),
        "when": np.array([3], "datetime64[us]"),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "shape": torch.Size([1, 2]),
        "kind": torch.float32,
        "type": Sample,
        "number": 3.5,
        "moved": Movable(),
        "edge": Edge(tensor, tensor.int()),
    }
    found = moved(batch)
    alike(found, batch)
    assert found["tuple"][1] is text
    assert batch["slotted"].x is batch["user"]["x"] is tensor


class Attached(MutableMapping):
    """A mapping of its own kind, which says nothing of copies."""

    def __init__(self, items, note):
        self._items, self.note = dict(items), note

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, item):
        self._items[key] = item

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


def test_a_mapping_of_any_kind_comes_back_beside_that_of_the_source():
    tensor, name = torch.arange(3.0), ["a"]
    batch = Attached({"x": tensor, "name": name}, "from here")
    found = moved(batch)
    alike(found, batch)
    assert (found.note, found["name"]) == ("from here", name)
    assert batch["x"] is tensor


def test_a_first_batch_without_rows_comes_as_all_others():
    batches = [{"boxes": torch.zeros(count, 4)} for count in (0, 3, 0)]
    with DevicePrefetcher(batches, "cpu") as prefetcher:
        assert [tuple(batch["boxes"].shape) for batch in prefetcher] == [(0, 4), (3, 4), (0, 4)]


@pytest.mark.parametrize(
    "dtype",
    first_is_quick(
        [torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.complex64, torch.float64, torch.uint32]
    ),
)
def test_every_dtype(fakes, dtype):
    source = [torch.arange(5).to(dtype), torch.ones(2, 2).to(dtype)[0]]
    alike(moved(source, fakes), source)


@pytest.mark.parametrize("dtype", [torch.uint4, torch.bits8, torch.float8_e5m2])
def test_a_dtype_that_torch_does_not_copy_or_lend_moves_by_itself(fakes, dtype):
    leaf = torch.arange(4, dtype=torch.uint8)
    found = moved({"x": leaf.view(dtype), "plain": torch.ones(4)}, fakes)
    assert found["x"].dtype == dtype
    assert torch.equal(found["x"].view(torch.uint8), leaf)
    assert torch.equal(found["plain"], torch.ones(4))


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_quantized_tensor_moves_by_itself(fakes):
    leaf = torch.quantize_per_tensor(torch.rand(3, 4), 0.1, 0, torch.quint8)
    found = moved(leaf, fakes)
    assert torch.equal(found.int_repr(), leaf.int_repr())
    assert found.q_scale() == leaf.q_scale()


def test_odd_tensors(fakes):
    images = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    strided = torch.arange(20.0).reshape(4, 5)[:, ::2]
    conjugate = torch.tensor([1 + 2j]).conj()
    parameter = torch.nn.Parameter(torch.ones(2))
    sparse = torch.eye(3).to_sparse()
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    grown = torch.ones(2, requires_grad=True) * 2
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)])
    source = [images, strided, conjugate, parameter, sparse, jagged, grown, packed]
    found = moved(source, fakes)
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for new, old in zip(found[:4], source[:4], strict=True):
        assert torch.equal(new, old)
    assert type(found[3]) is torch.nn.Parameter
    assert torch.equal(found[4].to_dense(), torch.eye(3))
    assert found[5].layout == torch.jagged
    for new, old in zip(found[5].unbind(), jagged.unbind(), strict=True):
        assert torch.equal(new, old)
    assert found[6].grad_fn is not None
    assert torch.equal(found[7].data, packed.data)


def test_a_tensordict(fakes):
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")
    source = tensordict.TensorDict({"x": torch.rand(4, 2), "in": {"y": torch.arange(4)}}, batch_size=[4])
    with DevicePrefetcher([source], "fake") as prefetcher:
        (found,) = prefetcher
        fakes["fake"].finish()
    assert type(found) is type(source)
    assert found.batch_size == source.batch_size
    assert (found == source).all()
    assert found["in", "y"].data_ptr() != source["in", "y"].data_ptr()
    with DevicePrefetcher([source], devices=["a", "b"]) as prefetcher:
        ((first, second),) = prefetcher
        fakes["a"].finish()
        fakes["b"].finish()
    assert first["in", "y"].tolist() == [0, 1]
    assert second["in", "y"].tolist() == [2, 3]


def test_several_devices_each_get_their_part(fakes):
    source = [
        {"x": torch.arange(7) + 10 * number, "text": list("abcdefg"), "scalar": torch.tensor(number)}
        for number in range(6)
    ]
    names = ["fake 0", "fake 1", "fake 2"]
    with DevicePrefetcher(source, devices=names) as prefetcher:
        for _ in range(4):
            for number, parts in enumerate(prefetcher):
                assert [part["text"] for part in parts] == [["a", "b"], ["c", "d"], ["e", "f", "g"]]
                for name, part, start, stop in zip(names, parts, [0, 2, 4], [2, 4, 7], strict=True):
                    fakes[name].read(part["x"], torch.arange(start, stop) + 10 * number)
                    fakes[name].read(part["scalar"], torch.tensor(number))
            del parts, part


def test_jagged_tensors_are_split_too():
    """Those of the same lengths are so in each part."""
    rows = [torch.full((n, 2), float(n)) for n in (3, 0, 1, 2)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with DevicePrefetcher([[jagged, 2 * jagged]], devices=["cpu", "cpu"]) as prefetcher:
        (parts,) = prefetcher
    for part, lengths in zip(parts, ([3, 0], [1, 2]), strict=True):
        summed = part[0] + part[1]
        assert [row.tolist() for row in summed.unbind()] == [[[3.0 * n, 3.0 * n]] * n for n in lengths]


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(3), torch.zeros(4)],
        {"n": 3},
        torch.zeros(1, 5),
        [torch.zeros(4), Movable()],
        torch.eye(4).to_sparse(),  # and others without rows of their own
        # Not made as the module is imported, which would import all that torch has for these.
        lambda: torch.nested.nested_tensor(
            [torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged
        ).transpose(1, 2),
        lambda: torch.nested.nested_tensor_from_jagged(
            torch.ones(5, 2), torch.tensor([0, 3, 5]), lengths=torch.tensor([1, 2])
        ),
    ],
)
def test_what_cannot_be_split_is_an_error_that_says_so(batch):
    with (
        DevicePrefetcher([batch() if callable(batch) else batch], devices=["cpu", "cpu"]) as prefetcher,
        pytest.raises(ValueError, match="cannot be split among"),
    ):
        next(iter(prefetcher))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, ValueError),
        ({"device": "cpu", "devices": ["cpu"]}, ValueError),
        ({"devices": []}, ValueError),
        ({"devices": "cpu"}, TypeError),
        ({"devices": torch.device("cpu")}, TypeError),
        ({"devices": ["cpu", None]}, ValueError),
        ({"device": "cpu", "depth": 0}, ValueError),
        ({"device": "cpu", "depth": 2.5}, TypeError),
        ({"device": "cpu", "iterable": 3}, TypeError),
    ],
)
def test_arguments_that_do_not_fit(arguments, error):
    with pytest.raises(error):
        DevicePrefetcher(**{"iterable": [], **arguments})


def test_an_exception_of_the_source_comes_in_its_place_with_its_traceback():
    with DevicePrefetcher(Source(fail_at=4), "cpu") as prefetcher:
        for _ in range(3):
            iterator, seen = iter(prefetcher), []
            with pytest.raises(ZeroDivisionError, match="of the source") as caught:
                seen.extend(int(batch["id"][0]) for batch in iterator)
            assert "in fail" in "".join(traceback.format_tb(caught.tb))
            assert list(iterator) == []
            with pytest.raises(ZeroDivisionError):
                list(prefetcher)


def test_an_exception_of_iter_comes_from_iter():
    class Broken:
        def __iter__(self):
            raise KeyError("no")

    with DevicePrefetcher(Broken(), "cpu") as prefetcher, pytest.raises(KeyError):
        iter(prefetcher)


def test_an_exception_in_the_loop_ends_the_iteration():
    source = Source(100)
    prefetcher = DevicePrefetcher(source, "cpu")

    def step(batch):
        raise RuntimeError("of the step")

    with pytest.raises(RuntimeError, match="of the step"):
        list(map(step, prefetcher))
    prefetcher.close()
    assert source.closed == 1


def test_an_iterator_of_the_users_own_is_not_closed():
    generator = batches(10)
    with DevicePrefetcher(generator, "cpu", depth=1) as prefetcher:
        check(next(iter(prefetcher)), 0)
    assert int(next(generator)["id"][0]) in (1, 2)


def test_a_newer_iteration_ends_the_one_in_progress():
    with DevicePrefetcher(Source(), "cpu") as prefetcher:
        older = iter(prefetcher)
        check(next(older), 0)
        newer = iter(prefetcher)
        check(next(newer), 0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a newer one began"):
                next(older)
        check(next(newer), 1)


def test_sources_are_let_go_when_their_copy_is_over():
    alive: list[weakref.ref] = []

    def source():
        for batch in batches(5):
            alive.append(weakref.ref(batch["x"].untyped_storage()))
            yield batch
            del batch

    with DevicePrefetcher(source(), "cpu") as prefetcher:
        kept = list(prefetcher)
        gc.collect()
        assert not any(ref() is not None for ref in alive)
    assert len(kept) == len(alive) == 5


def test_close_ends_all_and_may_be_called_again():
    source = Source(100)
    prefetcher = DevicePrefetcher(source, "cpu")
    iterator = iter(prefetcher)
    kept = next(iterator)
    prefetcher.close()
    prefetcher.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(iterator)
    with pytest.raises(ValueError, match="closed"):
        iter(prefetcher)
    check(kept, 0)
    assert prefetcher.stats().device_bytes == 0


def test_a_source_that_fails_at_close_keeps_no_memory(fakes):
    class Failing:
        def __iter__(self):
            return self

        def __next__(self):
            return next(batches(1))

        def close(self):
            raise ZeroDivisionError("of the source")

    class Sources:
        def __iter__(self):
            return Failing()

    prefetcher = DevicePrefetcher(Sources(), "fake")
    iterator = iter(prefetcher)
    next(iterator)
    with pytest.raises(ZeroDivisionError, match="of the source"):
        prefetcher.close()
    gc.collect()
    fakes["fake"].finish()
    assert prefetcher.stats().device_bytes == 0
    assert fakes["fake"].memory_bytes == 0


def test_a_close_in_another_thread_ends_an_iteration_whose_source_is_busy(fakes):
    source = Source(wait_at=2)
    prefetcher = DevicePrefetcher(source, "fake")
    fakes["fake"].order = "all"  # for the processor reads it
    iterator, found = iter(prefetcher), []

    def take() -> None:
        try:
            found.extend(int(batch["id"][0]) for batch in iterator)
        except RuntimeError as error:
            found.append(str(error)[:50])

    thread = threading.Thread(target=take)
    thread.start()
    assert source.is_waiting.wait(DEADLINE_SECONDS)
    prefetcher.close()  # returns at once
    assert source.closed == 0
    with pytest.raises(ValueError, match="closed"):
        iter(prefetcher)
    source.go.set()
    thread.join(DEADLINE_SECONDS)
    assert found == [0, "this iteration ended when the prefetcher was close"]
    assert source.closed == 1
    gc.collect()


def test_one_thread_at_a_time_takes_batches():
    source = Source(wait_at=2)
    with DevicePrefetcher(source, "cpu") as prefetcher:
        iterator = iter(prefetcher)
        thread = threading.Thread(target=lambda: [next(iterator), next(iterator)])
        thread.start()
        assert source.is_waiting.wait(DEADLINE_SECONDS)
        with pytest.raises(RuntimeError, match="another thread"):
            next(iterator)
        source.go.set()
        thread.join(DEADLINE_SECONDS)
        check(next(iterator), 2)


def test_dropping_all_closes_the_source():
    source = Source(100)
    iterator = iter(DevicePrefetcher(source, "cpu"))
    next(iterator)
    del iterator
    gc.collect()
    assert source.closed == 1


def test_it_has_the_length_of_its_source():
    data = torch.utils.data.TensorDataset(torch.arange(40.0), torch.arange(40))
    for source, length in (([1, 2, 3], 3), (torch.utils.data.DataLoader(data, batch_size=8), 5)):
        with DevicePrefetcher(source, "cpu") as prefetcher:
            assert len(prefetcher) == len(list(prefetcher)) == length
    with DevicePrefetcher(Source(), "cpu") as prefetcher, pytest.raises(TypeError):
        len(prefetcher)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["for batch in prefetcher: sys.exit(7)", "it = iter(prefetcher); next(it); sys.exit(7)"]
)
def test_the_interpreter_ends(how):
    code = f"""
        import sys, torch
        from arrowcache.torch import DevicePrefetcher

        prefetcher = DevicePrefetcher([{{'x': torch.zeros(1000)}}] * 100, "cpu")
        {how}
    """
    with Script(code, new_interpreter=True) as script:
        assert script.end() == (7, "")


def test_in_a_forked_child_it_says_what_to_do():
    with DevicePrefetcher(Source(), "cpu") as prefetcher:
        iterator = iter(prefetcher)
        next(iterator)

        def child() -> None:
            for attempt in (lambda: next(iterator), lambda: iter(prefetcher)):
                with pytest.raises(ValueError, match="forked"):
                    attempt()

        with in_child(child):
            pass
        check(next(iterator), 1)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.ma.MaskedArray([1.0, 2.0], [False, True]), "mask"),
        (torch.empty(3, device="meta"), "has no values"),
    ],
)
def test_what_would_lose_its_values_is_an_error_that_says_so(fakes, leaf, message):
    for batch in (leaf, {"deep": [leaf]}):
        with (
            DevicePrefetcher([batch], "fake") as prefetcher,
            pytest.raises(TypeError, match=message),
        ):
            next(iter(prefetcher))
        with (
            DevicePrefetcher([batch], devices=["fake 0"]) as prefetcher,
            pytest.raises(TypeError, match=message),
        ):
            next(iter(prefetcher))


def test_a_transposed_jagged_tensor_keeps_its_values():
    rows = [torch.arange(6.0).view(2, 3), torch.ones(1, 3)]
    turned = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    found = moved(turned)
    for new, row in zip(found.unbind(), rows, strict=True):
        assert torch.equal(new, row.T)


def test_what_occurs_twice_in_a_batch_does_so_on_the_device(fakes):
    tensor = torch.arange(4)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    batch = {"x": tensor, "again": [tensor], "a": jagged, "b": 2 * jagged}
    with DevicePrefetcher([batch], "fake") as prefetcher:
        (found,) = prefetcher
        leaves = tensor, jagged.values(), jagged.offsets(), (2 * jagged).values()
        assert prefetcher.stats().bytes == sum(leaf.nbytes for leaf in leaves)
    fakes["fake"].finish()
    assert found["again"][0] is found["x"]
    total = found["a"] + found["b"]  # of one ragged shape: they share their offsets
    assert [row.tolist() for row in total.unbind()] == [[[3.0] * 3] * 2, [[3.0] * 3]]


@pytest.mark.parametrize("again", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_not_pickled_or_copied(again):
    with DevicePrefetcher(Source(), "cpu") as prefetcher:
        iterator = iter(prefetcher)
        for each in (prefetcher, iterator):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                again(each)
        check(next(iterator), 0)
