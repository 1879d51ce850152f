"""Loader(batch_tokens=, length_of=): batches of rows of similar length, within a budget."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from helpers import KIB, make_cache, wait_until
from quick import some_of

import arrowcache as ac
from arrowcache import Loader
from arrowcache.reading.per_segment import Lengths

SCHEMA = ac.Schema({"id": ac.Tensor("int64"), "tokens": ac.Ragged("int32"), "count": ac.Tensor("uint16")})
ROWS, BUDGET = 320, 128
LENGTHS = np.random.default_rng(0).integers(0, 60, 1000)


def append(cache: ac.Cache, numbers: range, lengths: Any = LENGTHS) -> None:
    with cache.writer() as writer:
        for number in numbers:
            length = int(lengths[number])
            writer.append(id=number, tokens=np.full(length, number, np.int32), count=length)


@pytest.fixture
def cache(tmp_path):
    """Segments of 16 rows, ids 0 to 319; row i has LENGTHS[i] tokens, each of them i, and says so."""
    cache = make_cache(tmp_path / "cache", SCHEMA)
    append(cache, range(ROWS))
    return cache


def loader_of(cache: ac.Cache, **options: Any) -> Loader:
    return Loader(cache, **{"batch_tokens": BUDGET, "length_of": "tokens", "seed": 3} | options)


def ids_of(batch: dict[str, Any]) -> list[int]:
    """The ids of a batch, which has their tokens and keeps to the budget."""
    ids, (data, ends) = batch["id"].tolist(), batch["tokens"]
    lengths = np.diff(ends)
    assert lengths.tolist() == LENGTHS[ids].tolist()
    assert data.tolist() == np.repeat(ids, lengths).tolist()
    assert len(ids) * max(lengths.max(), 1) <= BUDGET
    return ids


def flat(batches: Any) -> list[int]:
    return sorted(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("shuffle", ["rows", None])
def test_each_row_comes_once_an_epoch_within_the_budget_and_epochs_differ(cache, shuffle):
    with loader_of(cache, shuffle=shuffle) as loader:
        assert loader.steps is None
        epochs = [[ids_of(batch) for batch in loader] for _ in range(2)]
        assert loader.steps == len(epochs[1])
    assert [flat(epoch) for epoch in epochs] == [list(range(ROWS))] * 2
    assert (epochs[0] == epochs[1]) == (shuffle is None)
    tokens = int(LENGTHS[:ROWS].sum())
    assert len(epochs[0]) < 1.3 * tokens / BUDGET, "by chance twice as many would be needed"


def test_the_order_is_of_the_seed_and_the_epoch_whatever_tells_the_lengths(cache):
    with loader_of(cache) as loader:
        expected = [ids_of(batch) for batch in loader]
    with loader_of(cache, length_of="count", columns=["tokens", "id"]) as loader:
        assert [ids_of(batch) for batch in loader] == expected
    with loader_of(cache, columns=["id"]) as loader:
        assert [batch["id"].tolist() for batch in loader] == expected


def test_memory_is_for_the_rows_of_a_batch_not_for_as_many_as_tokens(cache):
    with loader_of(cache, batch_tokens=1 << 24) as loader:
        assert [len(batch["id"]) for batch in loader] == [ROWS]
        assert loader.stats().slot_bytes < 64 * KIB


def test_a_ragged_length_counts_items_of_any_shape(tmp_path):
    cache = make_cache(tmp_path / "boxes", ac.Schema({"boxes": ac.Ragged("complex64", (2, 3))}))
    with cache.writer() as writer:
        for length in (5, 1, 4, 2, 4, 0):
            writer.append(boxes=np.zeros((length, 2, 3), np.complex64))
    with Loader(cache, batch_tokens=8, length_of="boxes", shuffle=None) as loader:
        batches = [np.diff(batch["boxes"].offsets).tolist() for batch in loader]
    assert batches == [[5], [4, 4], [2, 1, 0]]


class Watched:
    """A snapshot that notes how many rows it tells the lengths of."""

    def __init__(self, snapshot: Any, read: list[int]) -> None:
        self._snapshot, self._read = snapshot, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)

    def lengths(self, first: int, last: int, name: str) -> Any:
        self._read.append(last - first)
        return self._snapshot.lengths(first, last, name)


def test_the_lengths_of_new_segments_alone_are_read(cache):
    lengths, read = Lengths("tokens", BUDGET), list[int]()
    for rows in (ROWS, 400, 400):
        append(cache, range(cache.stats().rows, rows))
        with cache.snapshot() as snapshot:
            found = lengths.of_selected(Watched(snapshot, read))
        assert found.tolist() == LENGTHS[:rows].tolist()
    cache.evict(1)
    with cache.snapshot(where=lambda segment: segment.seq % 2) as snapshot:
        assert len(lengths.of_selected(Watched(snapshot, read))) == 12 * 16
    with cache.snapshot() as snapshot:
        found = lengths.of_selected(Watched(snapshot, read))
    assert found.tolist() == LENGTHS[16:400].tolist()
    assert read == [ROWS, 80, *[16] * 12], "every other one was forgotten"


def test_a_row_that_is_too_long_is_named_and_leaving_its_segment_out_helps(cache):
    append(cache, range(ROWS, ROWS + 16), np.full(1000, 200))
    append(cache, range(ROWS + 16, ROWS + 32))
    for length_of in ("tokens", "count"):
        served_rows = cache.stats().served_rows
        with loader_of(cache, length_of=length_of) as loader:
            with pytest.raises(
                ValueError, match=f"row 0 of segment 20 has length 200 in '{length_of}', more tha"
            ):
                iter(loader)
            wait_until(lambda: cache.stats().leased_bytes == 0, "the lease to end")
            assert cache.stats().served_rows == served_rows
        with loader_of(cache, length_of=length_of, where=lambda segment: segment.seq != 20) as loader:
            assert len(flat(map(ids_of, loader))) == ROWS + 16


def test_a_negative_length_is_no_length(tmp_path):
    cache = make_cache(tmp_path / "signed", ac.Schema({"n": ac.Tensor("int8")}))
    with cache.writer() as writer:
        writer.extend(n=np.array([3, 1, -2, 4], np.int8))
    named = "row 2 of segment 0 has length -2 in 'n': a length is at least 0"
    with Loader(cache, batch_tokens=8, length_of="n") as loader, pytest.raises(ValueError, match=named):
        iter(loader)


def test_ranks_share_all_rows_in_equally_many_steps(cache):
    loaders = [loader_of(cache, rank=rank, world_size=3, run_id="job") for rank in range(3)]
    for _ in range(2):
        steps = [[ids_of(batch) for batch in step] for step in zip(*loaders, strict=True)]
        assert flat(itertools.chain.from_iterable(steps)) == list(range(cache.stats().rows))
        append(cache, range(cache.stats().rows, cache.stats().rows + 16))
    last = loader_of(cache, rank=0, world_size=2, run_id="other")
    epoch = iter(last)
    other = loader_of(cache, rank=1, world_size=2, run_id="other", batch_tokens=256)
    with other, pytest.raises(ValueError, match="batch_tokens is 256 here and 128 there"):
        iter(other)
    for loader in (last, *loaders):
        loader.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(epoch)


def test_repeat_goes_on_without_an_end(cache):
    with loader_of(cache) as loader, loader_of(cache) as other:
        batches = map(ids_of, loader.repeat())
        for _ in range(2):
            expected = [ids_of(batch) for batch in other]
            assert [*itertools.islice(batches, len(expected))] == expected


def test_epoch_rows_are_drawn_whatever_their_length(cache):
    with loader_of(cache, epoch_rows=100) as few, loader_of(cache, epoch_rows=2 * ROWS) as many:
        drawn = flat(map(ids_of, few))
        assert len({*drawn}) == len(drawn) == 100
        assert flat(map(ids_of, many)) == sorted([*range(ROWS)] * 2)


def test_rows_count_as_served_when_they_are_delivered(cache):
    with loader_of(cache) as loader:
        delivered = [ids_of(batch) for batch in itertools.islice(loader, 5)]
        loader.close()
        wait_until(lambda: cache.stats().served_rows == sum(map(len, delivered)), "the rest to be given back")
        assert loader.stats().rows == sum(map(len, delivered))


@pytest.mark.parametrize("gone", [0, 5])
def test_an_epoch_goes_on_at_every_step(cache, gone):
    states = []
    with loader_of(cache) as loader:
        epoch, whole = iter(loader), []
        for batch in epoch:
            states.append(json.dumps(loader.state_dict()))
            whole.append(ids_of(batch))
        del epoch
        for _ in range(gone):
            assert cache.evict(1)
        first = 16 * gone
        for step, state in some_of([*enumerate(states, 1)]):
            expected = [row for row in flat(whole[step:]) if row >= first]
            loader.load_state_dict(json.loads(state))
            if len(expected) < len(flat(whole[step:])):
                with pytest.raises(ac.MissingSegmentsError, match=" rows of epoch 0 are lost to it"):
                    loader.load_state_dict(json.loads(state), missing="raise")
                with pytest.warns(
                    RuntimeWarning, match="rows of epoch 0 are lost to it: 5 of its 20 segments"
                ):
                    rest = iter(loader)
            else:
                rest = iter(loader)
            found = [ids_of(batch) for batch in rest]
            assert flat(found) == expected
            assert gone or found == whole[step:]
        assert flat(map(ids_of, loader)) == list(range(first, ROWS)), "then comes the next epoch"


def test_a_state_goes_on_with_another_budget_and_other_ranks(cache):
    with loader_of(cache) as loader:
        epoch = iter(loader)
        delivered = flat(ids_of(next(epoch)) for _ in range(30))
        state = loader.state_dict()
    loaders = [
        loader_of(cache, batch_tokens=70, rank=rank, world_size=2, run_id="job", seed=9) for rank in range(2)
    ]
    for each in loaders:
        each.load_state_dict(state)
    rest = [ids_of(batch) for step in zip(*loaders, strict=True) for batch in step]
    assert sorted(delivered + flat(rest)) == list(range(ROWS))
    assert all(len(ids) * LENGTHS[ids].max() <= 70 for ids in rest)
    for each in loaders:
        each.close()
    with Loader(cache, 16) as loader:
        with pytest.raises(ValueError, match="by batch_tokens: resume it in a Loader with batch_tokens, or "):
            loader.load_state_dict(state)
        loader.load_state_dict(state | {"epoch": 1, "position": 0, "segments": []})
        assert len(list(loader)) == 20


def test_a_loader_says_what_its_batches_are(cache):
    with loader_of(cache) as loader:
        assert "batch_tokens=128, shuffle='rows', epoch 0" in repr(loader)


def test_padded_tensors_of_torch_keep_to_the_budget(cache):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from arrowcache.torch import Loader as TorchLoader

    with TorchLoader(cache, batch_tokens=BUDGET, length_of="tokens") as loader:
        ids = []
        for batch in loader:
            padded = torch.nn.utils.rnn.pad_sequence(batch["tokens"].unbind(), batch_first=True)
            assert padded.numel() <= BUDGET
            ids.append(batch["id"].tolist())
    assert flat(ids) == list(range(ROWS))
