"""The way to a device, in any order of events: no read sees anything but its batch, whatever fails.

A machine takes batches on several streams, keeps, views, drops them, on other threads too, begins anew, has
calls fail and Ctrl-C come at any line, while the device runs what it was given in any order. Then each wait
of the algorithm is left out in turn, and the machine has to find out.
"""

from __future__ import annotations

import gc
import importlib
import random
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from fake_device import ORDERS, FakeDevice, Movable
from helpers import limit, with_less
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from interruptions import Interruption, files
from quick import first_is_quick, some_of

from arrowcache.torch import device, device_copier

LARGE = 64  # bytes: a leaf of so many goes by itself here
COLUMNS, COLUMNS_OF_A_BATCH = 3, 2  # images, labels while they are small, and labels of many rows
TRACED = tuple(f"torch/{name}.py" for name in ("device", "device_copier", "pinned_memory"))


SETTINGS = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


class Source:
    """Batches without end. What is not pinned, the next batch of so many rows overwrites."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.number = 0
        self.given: deque[tuple[int, int, list[str]]] = deque()  # number, rows, the names of other leaves
        self.rows, self.pinned, self.made_on, self.moves = 4, False, None, False
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> dict[str, Any]:
        self.number += 1
        rows = self.rows
        if self.pinned:
            image, label = torch.empty(rows, 32), torch.empty(rows, dtype=torch.int64)
            self.device.pin(image)
        else:
            image, label = self._memory.setdefault(
                rows, (torch.empty(rows, 32), torch.empty(rows, dtype=torch.int64))
            )
        image.fill_(self.number)
        label.fill_(self.number)
        batch: dict[str, Any] = {"image": image, "label": label}
        if self.made_on is not None:
            with self.device.on(self.made_on):
                batch["made"] = self.device.made(torch.full((rows,), self.number))
            self.device.set_stream(self.made_on)
        if self.moves:
            batch["moved"] = Movable(self.device, torch.full((rows,), self.number))
        self.given.append((self.number, rows, [*batch][2:]))
        return batch


class DeviceMachine(RuleBasedStateMachine):
    """Any sequence of what a consumer, a device and a user at the keyboard may do."""

    module: Any = device

    @initialize(order=st.sampled_from(ORDERS), seed=st.integers(0, 99), depth=st.integers(1, 3))
    def begin(self, order: str, seed: int, depth: int) -> None:
        self.device, self.depth = FakeDevice(order, seed), depth
        self.computes = [self.device.default, self.device.compute_stream(), self.device.compute_stream()]
        self.source = Source(self.device)
        self.begin_another()
        self.kept: list[list[tuple[torch.Tensor, torch.Tensor, object]]] = []

    def begin_another(self) -> None:
        with mock.patch("arrowcache.torch.device.backend_of", return_value=self.device):
            self.prefetcher = self.module.DevicePrefetcher(self.source, "fake", self.depth)
        self.iterator = iter(self.prefetcher)

    def begin_anew(self) -> None:
        self.source.given.clear()
        self.iterator = iter(self.prefetcher)

    @rule(
        rows=st.sampled_from([4, 4, 2, 7]),
        pinned=st.booleans(),
        made=st.sampled_from([None, None, 1, 2]),
        moves=st.booleans(),
    )
    def change_the_source(self, rows: int, pinned: bool, made: int | None, moves: bool) -> None:
        self.source.rows, self.source.pinned, self.source.moves = rows, pinned, moves
        self.source.made_on = None if made is None else self.computes[made]

    @rule(stream=st.integers(0, 2), repeat=st.integers(1, 3))
    def take(self, stream: int, repeat: int) -> None:
        for _ in range(repeat):
            self.take_one(self.computes[stream])
        most = COLUMNS * (self.depth + 2) + COLUMNS_OF_A_BATCH * len(self.kept)
        if self.device.places > most:  # such as in the traceback of an error
            gc.collect()
        assert self.device.places <= most

    def take_one(self, stream: object) -> None:
        with self.device.on(stream):
            batch = next(self.iterator)
            stream = self.device.current_stream()
            number, rows, others = self.source.given.popleft()
            expected = {
                "image": torch.full((rows, 32), float(number)),
                "label": torch.full((rows,), number),
            }
            expected |= {name: torch.full((rows,), number) for name in others}
            assert batch.keys() == expected.keys()
            for name, tensor in batch.items():
                tensor.detach_()  # which no view lets be done
                self.device.read(tensor, expected[name])
            self.kept.append([(batch[name], expected[name], stream) for name in expected])

    @precondition(lambda self: self.kept)
    @rule(number=st.integers(0, 99))
    def use(self, number: int) -> None:
        for tensor, expected, stream in self.kept[number % len(self.kept)]:
            with self.device.on(stream):
                self.device.read(tensor, expected)

    @rule(first=st.integers(0, 2), then=st.integers(0, 2))
    def go_on_elsewhere(self, first: int, then: int) -> None:
        """Take a batch on one stream; work on another, which waits for it; let go and take the next there."""
        self.take_one(self.computes[first])
        here = self.computes[then]
        with self.device.on(here):
            batch = self.kept.pop()
            for tensor, expected, before in batch:
                self.order(before, here)
                self.device.read(tensor, expected)
            if len(batch) > 2:  # what was made on the device goes back to its source's stream at once
                self.order(here, before)
            batch = tensor = None
        self.take_one(here)

    def order(self, first: object, then: object) -> None:
        event = self.device.event()
        self.device.record(event, first)
        self.device.wait(then, event)

    @precondition(lambda self: self.kept)
    @rule(number=st.integers(0, 99))
    def view_and_detach(self, number: int) -> None:
        batch = self.kept[number % len(self.kept)]
        tensor, expected, stream = batch[0]
        batch[0] = tensor[1:].detach(), expected[1:], stream

    @precondition(lambda self: self.kept)
    @rule(number=st.integers(0, 99), leaf=st.integers(0, 2))
    def keep_less_of_one(self, number: int, leaf: int) -> None:
        batch = self.kept[number % len(self.kept)]
        del batch[leaf % len(batch)]
        self.kept = [each for each in self.kept if each]

    @precondition(lambda self: self.kept)
    @rule(last=st.booleans())
    def let_go(self, last: bool) -> None:
        self.kept.pop(-1 if last else 0)

    @rule()
    def let_all_go(self) -> None:
        self.kept.clear()

    @rule()
    def let_all_go_in_another_thread(self) -> None:
        thread = threading.Thread(target=self.kept.clear)
        thread.start()
        thread.join()

    @rule(count=st.integers(34, 37))
    def keep_one_for_long(self, count: int) -> None:
        kept = self.kept[-1:]
        for _ in range(count):
            self.take_one(self.device.default)
            self.kept = kept.copy()

    @rule(number=st.integers(0, 3), steps=st.integers(1, 12))
    def run_a_stream(self, number: int, steps: int) -> None:
        for _ in range(steps):
            self.device.step(self.device.streams[number])

    @rule(drop=st.booleans())
    def iterate_anew(self, drop: bool) -> None:
        if drop:
            del self.iterator
        self.begin_anew()

    @rule(count=st.integers(1, 2))
    def break_off_and_have_larger_batches(self, count: int) -> None:
        for _ in range(count):
            self.take_one(self.device.default)
        self.begin_anew()
        self.source.rows = self.source.rows + 5 if self.source.rows < 40 else 2
        self.take_one(self.device.default)

    @rule(drop=st.booleans())
    def another_prefetcher(self, drop: bool) -> None:
        if drop:
            del self.iterator, self.prefetcher
        else:
            self.prefetcher.close()
        self.source.given.clear()
        self.begin_another()

    @rule(number=st.integers(0, 300), stream=st.integers(0, 2))
    def interrupt(self, number: int, stream: int) -> None:
        with Interruption(number, files(*TRACED), ("line",)) as interruption:
            self.take_one(self.computes[stream])
        if interruption.where:
            self.begin_anew()

    @rule(calls=st.integers(0, 25), kind=st.sampled_from([RuntimeError, torch.OutOfMemoryError]))
    def a_call_fails(self, calls: int, kind: type[Exception]) -> None:
        self.device.fails_in, self.device.failure = calls, lambda: kind("of the fake")
        try:
            self.take_one(self.device.default)
        except kind:
            pass
        finally:
            self.device.fails_in = None
        self.begin_anew()  # the error may come in place of a later batch

    @rule(drop=st.booleans())
    def capture(self, drop: bool) -> None:
        before = len(self.device.calls)
        with self.device.capture():
            with pytest.raises(RuntimeError, match="captured"):
                next(self.iterator)
            self.kept.clear()
            if drop:
                self.source.given.clear()
                self.iterator = self.prefetcher = None
            assert len(self.device.calls) == before
        if drop:
            self.begin_another()

    @invariant()
    def nothing_was_read_that_should_not_be(self) -> None:
        if hasattr(self, "device"):
            assert self.device.errors == []
            assert self.device.threads <= {threading.get_ident()}

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        with self.device.on(self.device.default):
            for batch in self.kept:
                for tensor, expected, stream in batch:
                    with self.device.on(stream):
                        self.device.read(tensor, expected)
            batch = tensor = None
            self.prefetcher.close()
            self.kept.clear()
            self.device.finish()
            self.module.tidy()
            if self.device.memory_bytes:  # such as in the traceback of an error
                gc.collect()
            self.device.finish()
        assert self.device.errors == []
        assert self.device.memory_bytes == 0
        assert self.device.unmapped() == []


@pytest.fixture(autouse=True)
def large_leaves_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, small_leaf_bytes=LARGE)


def storm(kind: type[DeviceMachine], seed: int, steps: int = 60) -> None:
    """Drive a machine without Hypothesis, which takes longer to draw than all of this to run."""
    chance = random.Random(seed)
    number, stream, flag = (
        partial(chance.randrange, 100),
        partial(chance.randrange, 3),
        lambda: chance.random() < 0.5,
    )
    rules: list[tuple[int, str, dict[str, Callable[[], Any]]]] = [
        (20, "take", {"stream": stream, "repeat": lambda: chance.randint(1, 3)}),
        (6, "change_the_source", {
            "rows": lambda: chance.choice([4, 4, 2, 7]),
            "pinned": flag,
            "made": lambda: chance.choice([None, 1, 2]),
            "moves": flag,
        }),
        (4, "use", {"number": number}),
        (6, "go_on_elsewhere", {"first": stream, "then": stream}),
        (2, "view_and_detach", {"number": number}),
        (3, "keep_less_of_one", {"number": number, "leaf": stream}),
        (12, "let_go", {"last": flag}),
        (3, "let_all_go", {}),
        (1, "let_all_go_in_another_thread", {}),
        (1, "keep_one_for_long", {"count": lambda: 34}),
        (12, "run_a_stream", {"number": lambda: chance.randrange(4), "steps": lambda: chance.randint(1, 12)}),
        (3, "iterate_anew", {"drop": flag}),
        (3, "break_off_and_have_larger_batches", {"count": lambda: chance.randint(1, 2)}),
        (2, "another_prefetcher", {"drop": flag}),
        (6, "interrupt", {"number": lambda: chance.randrange(300), "stream": stream}),
        (6, "a_call_fails", {
            "calls": lambda: chance.randrange(25),
            "kind": lambda: chance.choice([RuntimeError, torch.OutOfMemoryError]),
        }),
        (1, "capture", {"drop": flag}),
    ]  # fmt: skip
    need_kept = ("use", "view_and_detach", "keep_less_of_one", "let_go")
    machine = kind()
    machine.begin(order=chance.choice(ORDERS), seed=seed, depth=chance.randint(1, 3))
    for _ in range(steps):
        ((_, name, arguments),) = chance.choices(rules, [weight for weight, _, _ in rules])
        if machine.kept or name not in need_kept:
            getattr(machine, name)(**{key: draw() for key, draw in arguments.items()})
            machine.nothing_was_read_that_should_not_be()
    machine.teardown()


def storms(kind: type[DeviceMachine], count: int) -> None:
    for seed in range(count):
        storm(kind, seed)


def test_no_read_sees_another_batch_whatever_happens():
    run_state_machine_as_test(DeviceMachine, settings=SETTINGS)


@pytest.mark.parametrize("part", first_is_quick(range(5)))
def test_no_read_sees_another_batch_in_storms(part):
    for seed in some_of(range(40 * part, 40 * part + 40)):
        storm(DeviceMachine, seed)


LEFT_OUT = {  # a part of device_copier.py, and what it is without a wait, or with less of one
    "the consumer waits for the copy": ("self.backend.wait(here, flight.copied)", "pass"),
    "the consumer waits for what was made on the device": ("self.backend.wait(here, event)", "pass"),
    "the copy waits for readers": ("self.backend.wait(self._stream, event)", "pass"),
    "for the one that the batch was lent to": (
        "done[stream] for stream in (place.reader, self._here)",
        "done[stream] for stream in (self._here,)",
    ),
    "for the one that is current": (
        "done[stream] for stream in (place.reader, self._here)",
        "done[stream] for stream in (place.reader,)",
    ),
    "for what new memory was used for before": (
        "(memory, self._here, {self._here: done})",
        "(memory, self._here, {})",
    ),
    "the processor waits for the copy out of a staging": (
        "if not self.backend.query(staging.copied)",
        "if False",
    ),
    "also where a call failed in between": (
        "copied, staging.copied = staging.copied, None",
        "copied = staging.copied",
    ),
    "memory is freed after readers": (", *place.users.values())", ",)"),
    "memory is freed after copies": (
        "(self._recorded(None, self._stream), *place.users.values())",
        "place.users.values()",
    ),
    "memory that is given away after its reader": (
        "self.backend.retain(place.memory.whole, place.reader)",
        "pass",
    ),
    "what a source made is freed after its reader": ("self.backend.retain(leaf, here)", "pass"),
    "what moves by itself stays until then": ("moving.sources.append(leaf)", "pass"),
    "what flies is not free": (" and (self.iteration_end is None or self.iteration_end.has_ended)", ""),
    "what was kept is given up": ("> self._depth + 2:", "> 1000:"),
    "what died on its way waits": ("_deferred[id(copier)] = copier", "pass"),
    "a batch is for the stream that is current": (
        " here = self.backend.current_stream()",
        " here = self._here",
    ),
}


def test_each_call_that_waits_is_left_out_once():
    source = Path(device_copier.__file__).read_text()
    for call, count in {"wait": 4, "query": 1, "retain": 2}.items():  # a new one belongs in LEFT_OUT
        assert source.count(f"self.backend.{call}(") == count


@pytest.mark.slow
@pytest.mark.parametrize("wait", LEFT_OUT)
def test_each_wait_that_is_left_out_is_found(wait, monkeypatch):
    less = machine_with_less(*LEFT_OUT[wait], monkeypatch)
    with pytest.raises(AssertionError):
        storms(less, 300)


def test_with_nothing_left_out_nothing_is_found(monkeypatch):
    storms(machine_with_less("class DeviceCopier:", "class DeviceCopier:", monkeypatch), 30)


def machine_with_less(text: str, less: str, monkeypatch: pytest.MonkeyPatch) -> type[DeviceMachine]:
    """A machine over both modules made anew, the one with less in place of a text."""
    with_less(device_copier, text, less, monkeypatch)
    with_less(device, *["class DevicePrefetcher(Closable):"] * 2, monkeypatch)

    class Less(DeviceMachine):
        module = importlib.import_module(device.__name__)

    return Less
