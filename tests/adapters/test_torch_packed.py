"""Packed: each token of an epoch is in one sequence of one rank, in its document's order."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from helpers import limit, make_cache, segment_files, wait_until
from quick import one_in, some_of

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

import arrowcache as ac
from arrowcache.errors import MissingSegmentsError
from arrowcache.torch import EpochBatchSampler, Loader, PackedLoader, packed

LENGTH, SIZE, DOCUMENTS = 32, 3, 160
SCHEMA = ac.Schema({"tokens": ac.Ragged("int32"), "id": ac.Tensor("int64")})
KINDS = pytest.mark.parametrize("split", [True, False], ids=["cut", "best fit"])


@pytest.fixture(autouse=True)
def small_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch has some ten bundles, of at least 16 sequences, and makes two batches at once."""
    limit(monkeypatch, bundle_tokens=1, bundle_sequences=16, group_tokens=2 * SIZE * LENGTH)


def fill(cache: ac.Cache, count: int, first: int = 0, seed: int = 0) -> int:
    """Publish documents, ten a segment; token n of document d is 1000 * d + n + 1. Returns: all tokens."""
    lengths = np.random.default_rng(seed).lognormal(3, 1, count).astype(np.int64)
    lengths[::7] = 0
    lengths[3:5] = 1, LENGTH
    lengths[5] = 900
    for start in range(0, count, 10):
        with cache.writer() as writer:
            for number in range(start, min(start + 10, count)):
                document = first + number
                tokens = np.arange(lengths[number], dtype=np.int32) + 1000 * document + 1
                writer.append(tokens=tokens, id=document)
    return int(lengths.sum())


@pytest.fixture(scope="module")
def of_documents(tmp_path_factory):
    """The folder of a closed cache, to be copied, and how many tokens it has."""
    path = tmp_path_factory.mktemp("documents") / "cache"
    with make_cache(path, SCHEMA, capacity="64MiB", segment_bytes="1MiB") as cache:
        return path, fill(cache, DOCUMENTS)


@pytest.fixture
def cache(tmp_path, of_documents):
    path, tokens = of_documents
    cache = ac.Cache.open(shutil.copytree(path, tmp_path / "cache", copy_function=shutil.copy))
    cache.expected = tokens
    return cache


def packed_of(cache: Any, **options: Any) -> PackedLoader:
    return packed(cache, "tokens", LENGTH, **{"batch_size": SIZE, **options})


@KINDS
def test_excluded_documents_are_in_no_sequence_and_the_steps_are_known(cache, split):
    left_out = [*range(5, DOCUMENTS, 9)]
    cache.exclude([(number // 10, number % 10) for number in left_out])
    with packed_of(cache, split=split) as loader:
        epoch = iter(loader)
        steps = loader.steps
        batches = [*epoch]
        tokens = torch.cat([batch["tokens"][batch["loss_mask"]] for batch in batches]).tolist()
    assert tokens
    assert not {(token - 1) // 1000 for token in tokens} & {*left_out}
    assert steps == len(batches) or (steps is None and not split)


def test_where_documents_are_left_out_the_steps_are_known_in_each_epoch_as_segments_come_and_go(cache):
    with packed_of(cache, rows=lambda columns: columns["id"] % 2 == 0) as loader:
        steps = []
        for change in (lambda: None, lambda: fill(cache, 40, first=DOCUMENTS), lambda: cache.evict(1)):
            change()
            epoch = iter(loader)
            steps.append(loader.steps)
            assert len([*epoch]) == steps[-1]
    assert steps[1] > steps[0] > 0
    assert steps[2] <= steps[1]


def tokens_of(batches: Iterable[dict[str, torch.Tensor]]) -> list[int]:
    """The tokens of batches, each of which is checked by itself."""
    found: list[int] = []
    for batch in batches:
        check(batch)
        found += batch["tokens"][batch["loss_mask"]].tolist()
    return found


def check(batch: dict[str, torch.Tensor]) -> None:
    """What a batch says of documents is so."""
    tokens, mask, edges = batch["tokens"], batch["loss_mask"], batch["cu_seqlens"]
    shape = (len(tokens), LENGTH)
    found = {name: (values.dtype, values.shape) for name, values in batch.items() if name != "cu_seqlens"}
    assert found == {
        "tokens": (torch.int32, shape),
        "position_ids": (torch.int64, shape),
        "document_ids": (torch.int32, shape),
        "loss_mask": (torch.bool, shape),
    }
    assert edges.dtype == torch.int32
    assert (edges[0], edges[-1]) == (0, tokens.numel())
    assert torch.equal(mask, tokens != 0)
    assert torch.equal(mask, batch["document_ids"] >= 0)
    numbers = []
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        assert start // LENGTH == (stop - 1) // LENGTH  # a document ends where its sequence does
        part = tokens.ravel()[start:stop]
        assert torch.equal(batch["position_ids"].ravel()[start:stop], torch.arange(stop - start))
        (number,) = set(batch["document_ids"].ravel()[start:stop].tolist())
        numbers.append((start // LENGTH, number))
        if number < 0:
            assert not part.any()
            assert not stop % LENGTH
        else:
            assert torch.equal(part, part[0] + torch.arange(stop - start))
    for row in range(len(tokens)):
        documents = [number for place, number in numbers if place == row and number >= 0]
        assert documents == [*range(len(documents))]


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def evict(cache: ac.Cache, count: int) -> set[int]:
    """Evict the oldest segments, and return the documents that they had."""
    wait_until(lambda: cache.stats().leased_bytes == 0, "the leases to end")
    with cache.snapshot() as snapshot:
        rows = sum(segment.rows for segment in snapshot.segments[:count])
        gone = {*snapshot.gather(np.arange(rows), ["id"])["id"].tolist()}
    for _ in range(count):
        assert cache.evict(1) > 0
    return gone


# an epoch


@KINDS
@pytest.mark.parametrize("shuffle", ["rows", "window", None])
@pytest.mark.parametrize("world_size", [1, 3])
def test_each_token_is_in_one_batch_of_one_rank_and_all_ranks_have_equally_many(
    cache, split, shuffle, world_size
):
    options: dict[str, Any] = {"shuffle": shuffle, "split": split}
    if shuffle == "window":
        options["window_bytes"] = "10KiB"
    found, steps = [], set()
    for rank in range(world_size):
        ranked = {"rank": rank, "world_size": world_size, "run_id": "job"} if world_size > 1 else {}
        with packed_of(cache, **options, **ranked) as loader:
            batches = [*loader]
            assert loader.steps == len(batches)
        steps.add(len(batches))
        found += tokens_of(batches)
    assert len(found) == len({*found}) == cache.expected
    assert len(steps) == 1


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_cut_documents_lose_no_place_to_padding_but_in_the_last_step(cache, world_size):
    lost, dealt = 0, []
    for rank in range(world_size):
        ranked = {"rank": rank, "world_size": world_size, "run_id": "job"} if world_size > 1 else {}
        with packed_of(cache, **ranked) as loader:
            epoch = iter(loader)
            assert loader.steps == -(-cache.expected // (LENGTH * SIZE * world_size))
            *batches, last = epoch
        assert all(batch["loss_mask"].all() for batch in batches)
        used = last["loss_mask"].sum(1)
        assert used.tolist() == sorted(used.tolist(), reverse=True)
        lost += int(((used > 0) & (used < LENGTH)).sum())
        dealt.append(int((used > 0).sum()))
    assert lost == 1
    assert max(dealt) - min(dealt) <= 1


def test_by_best_fit_documents_stay_whole_and_longer_ones_fill_sequences(cache):
    parts: dict[int, list[int]] = {}
    with packed_of(cache, split=False) as loader:
        for batch in loader:
            flat = batch["tokens"].ravel()
            for start, stop in zip(batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:], strict=True):
                if flat[start]:
                    parts.setdefault(int(flat[start] - 1) // 1000, []).append(int(stop - start))
    with cache.snapshot() as snapshot:
        offsets = snapshot.gather(np.arange(len(snapshot)), ["tokens"])["tokens"].offsets
    lengths = np.diff(offsets).tolist()
    assert {d: sorted(some) for d, some in parts.items()} == {
        d: sorted([LENGTH] * (count // LENGTH) + [count % LENGTH] * (count % LENGTH > 0))
        for d, count in enumerate(lengths)
        if count
    }


@KINDS
def test_seed_and_epoch_alone_choose_the_sequences(cache, split):
    with packed_of(cache, split=split, seed=5) as loader, packed_of(cache, split=split, seed=5) as other:
        first, second = [*loader], [*loader]
        assert same(first, [*other])
        assert same(second, [*other])
        assert not same(first, second)
    with packed_of(cache, split=split, seed=6) as loader:
        assert not same(first, [*loader])


def test_sequences_of_a_long_document_are_shuffled_among_others(cache, monkeypatch):
    """Documents in their order: even so few batches are all of one document."""
    limit(monkeypatch, bundle_sequences=1000)
    with packed_of(cache, shuffle=None) as loader:
        runs = [{*(batch["tokens"][batch["loss_mask"]] // 1000).tolist()} == {5} for batch in loader]
    assert sum(runs) < 900 // LENGTH // SIZE - 5


@pytest.mark.parametrize("source", ["path", "cache", "loader", "torch"])
def test_a_path_a_cache_and_a_loader_will_do(cache, source):
    options = {"shuffle": None, "where": lambda segment: segment.seq % 2 == 0}
    sources = {
        "path": lambda: cache.path,
        "cache": lambda: cache,
        "loader": lambda: ac.Loader(cache, 8, columns=["id"], window_bytes=None, **options),
        "torch": lambda: Loader(cache, 8, device="cpu", prefetch=3, **options),
    }
    made = sources[source]()
    given = {} if isinstance(made, ac.Loader) else options
    with packed_of(cache, **options) as loader:
        expected = [*loader]
    with packed_of(made, **given) as loader:
        assert same([*loader], expected)
    if isinstance(made, ac.Loader):
        with packed_of(made, shuffle="rows") as loader:
            assert sorted(tokens_of(loader)) == sorted(tokens_of(expected))
        made.close()


def test_a_transform_of_a_loader_is_not_left_out_in_silence(cache):
    with Loader(cache, 8, transform=dict) as loader, pytest.raises(ValueError, match="has a transform"):
        packed_of(loader)
    weights = {"weights": lambda columns: columns["_row"] + 1.0}
    with Loader(cache, 8, **weights) as loader, pytest.raises(ValueError, match="has weights"):
        packed_of(loader)


def test_the_seed_of_a_loader_holds_where_none_is_given(cache):
    with ac.Loader(cache, 8, seed=5) as made:
        for given, seed in (({}, 5), ({"seed": 0}, 0)):
            with packed_of(made, **given) as loader, packed_of(cache, seed=seed) as other:
                assert same([*loader], [*other])
    with packed_of(cache, seed=5) as loader, packed_of(cache) as other:
        assert not same([*loader], [*other])


@pytest.mark.parametrize(
    "option",
    [
        {"workers": 1}, {"workers": 2, "worker_type": "thread"}, {"drop_last": False}, {"with_ids": True},
        {"batch_size": None, "batch_tokens": 99, "length_of": "tokens"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("face", [ac.Loader, Loader])
def test_a_loader_with_an_option_that_sequences_cannot_have_is_refused(cache, face, option):
    name = "batch_tokens" if "batch_tokens" in option else next(iter(option))
    with (
        face(cache, **{"batch_size": 8} | option) as loader,
        pytest.raises(ValueError, match=f"the Loader has {name}=, which packed\\(\\) cannot have: "),
    ):
        packed_of(loader)


def test_a_loader_of_another_framework_is_refused(cache):
    class Others(ac.Loader):
        _face = "a Loader of another framework"

    with Others(cache, 8) as loader, pytest.raises(TypeError, match=r"another framework .* the cache"):
        packed_of(loader)


@pytest.mark.parametrize("options", [{}, {"device": "cpu", "split": False}])
def test_what_packed_returned_is_refused_as_such(cache, options):
    with (
        packed_of(cache, **options) as loader,
        pytest.raises(TypeError, match=r"packed\(\) returned.* the cache"),
    ):
        packed_of(loader)


def test_batches_on_a_device_are_the_same(cache):
    with packed_of(cache) as loader, packed_of(cache, device="cpu") as other:
        assert same([*loader], [*other])


def test_a_kept_batch_is_not_overwritten(cache):
    with packed_of(cache, split=False) as loader:
        kept = [(batch, {name: values.clone() for name, values in batch.items()}) for batch in loader]
        for _ in range(3):
            tokens_of(loader)
    assert same([batch for batch, _ in kept], [copy for _, copy in kept])


@KINDS
def test_an_epoch_has_what_was_published_before_it(cache, split):
    with packed_of(cache, split=split) as loader:
        epoch = iter(loader)
        first = [next(epoch)]
        more = fill(cache, 30, first=DOCUMENTS, seed=1)
        assert len(tokens_of([*first, *epoch])) == cache.expected
        assert len(tokens_of(loader)) == cache.expected + more


def test_epochs_follow_one_another_without_end(cache):
    with packed_of(cache) as loader, packed_of(cache) as other:
        expected = [*loader, *loader]
        batches = other.repeat()
        assert same([next(batches) for _ in expected], expected)


@pytest.mark.parametrize("split", [True, False])
def test_an_epoch_of_empty_documents_is_an_error(tmp_path, split):
    says = "no epoch has a batch: 5 documents in column 'tokens', all empty"
    with make_cache(tmp_path / "cache", SCHEMA) as cache, packed_of(cache, split=split) as loader:
        with cache.writer() as writer:
            for number in range(5):
                writer.append(tokens=np.zeros(0, np.int32), id=number)
        with pytest.raises(ValueError, match=says):
            list(loader)
        with pytest.raises(ValueError, match=says):  # it looked for a batch for ever
            next(loader.repeat())
        with cache.writer() as writer:
            writer.append(tokens=np.ones(3, np.int32), id=5)
        assert len(list(loader)) == 1


@pytest.mark.parametrize("dtype", ["uint16", "int64", "bool", "bfloat16", "float32", "complex64"])
def test_tokens_may_be_any_numbers(tmp_path, dtype):
    values = torch.arange(50).to(getattr(torch, dtype))
    with make_cache(tmp_path / "cache", ac.Schema({"x": ac.Ragged(dtype)})) as cache:
        with cache.writer() as writer:
            writer.append(x=values)
        with packed(cache, "x", 50, batch_size=1) as loader:
            (batch,) = loader
    assert batch["x"].dtype == values.dtype
    assert torch.equal(batch["x"][0], values)


def test_an_epoch_of_some_documents_takes_so_many(cache):
    for count in (40, 3 * DOCUMENTS):
        with packed_of(cache, epoch_rows=count) as loader:
            found = tokens_of(loader)
        if count < DOCUMENTS:
            assert len({*found}) == len(found) < cache.expected
        else:
            assert {*np.unique(found, return_counts=True)[1].tolist()} == {3}


def test_ranks_count_the_documents_they_serve_together(cache):
    before = cache.stats().served_rows
    for rank in range(2):
        with packed_of(cache, rank=rank, world_size=2, run_id="job") as loader:
            tokens_of(loader)
    assert cache.stats().served_rows - before == DOCUMENTS
    with packed_of(cache) as loader:
        next(iter(loader))
    assert cache.stats().served_rows - before < 2 * DOCUMENTS  # what was not delivered is given back


def test_an_epoch_in_order_lets_go_of_documents_that_are_over(cache):
    with packed_of(cache, shuffle=None) as loader:
        leased = [cache.stats().leased_bytes for _ in loader]
    assert leased == sorted(leased, reverse=True)
    assert leased[-1] < leased[0] / 4


def test_it_closes_and_shows_itself(cache):
    with packed_of(cache, split=False, prefetch=2) as loader:
        assert f"length={LENGTH}, batch_size={SIZE}, split=False, epoch 0" in repr(loader)
        assert loader.steps is None
        epoch = iter(loader)
        next(epoch)
        assert loader.stats().rows == SIZE
        assert loader.steps is None  # not all documents were looked at
    assert cache.stats().leased_bytes == 0
    with pytest.raises(ValueError, match="closed"):
        next(iter(loader))
    with pytest.raises(ValueError, match="copies"):
        loader.assert_zero_copy()


# resuming


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it comes back from two kinds of files."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = json.loads(json.dumps(torch.load(file, weights_only=True)))
    assert again == state
    return again


@KINDS
@pytest.mark.parametrize("shuffle", ["rows", None])
def test_an_epoch_goes_on_at_any_step_with_the_same_batches(cache, split, shuffle):
    options: dict[str, Any] = {"split": split, "shuffle": shuffle, "batch_size": 7}
    with packed_of(cache, **options) as loader:
        whole, following = [*loader], [*loader]
    for step in some_of(range(len(whole) + 1)):
        with packed_of(cache, **options) as loader:
            epoch = iter(loader)
            for _ in range(step):
                next(epoch)
            state = plain(loader.state_dict())
        with packed_of(cache, **options) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            rest = [*loader]
            assert same(rest, whole[step:])
            assert loader.steps == len(rest)
            if step == len(whole) // 2:
                assert same([*loader], following)


@KINDS
def test_a_state_of_a_resumed_epoch_is_as_good_as_the_first(cache, split):
    """Each loader delivers a batch, and leaves the rest to the next one."""
    with packed_of(cache, split=split) as loader:
        state = loader.state_dict()
        whole = [*loader]
    for step, expected in enumerate(whole):
        with packed_of(cache, split=split, prefetch=1) as loader:
            loader.load_state_dict(state)
            assert same([next(iter(loader))], [expected])
            assert loader.steps == len(whole) - step or (loader.steps is None and not split)
            state = loader.state_dict()


@KINDS
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_other_ranks_go_on_with_the_rest(cache, split, before, after):
    def ranks(count: int) -> list[PackedLoader]:
        options = [{"rank": rank, "world_size": count, "run_id": f"{count}"} for rank in range(count)]
        return [packed_of(cache, split=split, **(each if count > 1 else {})) for each in options]

    found, states = [], []
    for loader in ranks(before):
        with loader:
            epoch = iter(loader)
            found += tokens_of(next(epoch) for _ in range(4))
            states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    steps = set()
    for loader in ranks(after):
        with loader:
            loader.load_state_dict(states[0])
            rest = [*loader]
            steps.add(len(rest))
            found += tokens_of(rest)
    assert len(found) == len({*found}) == cache.expected
    assert len(steps) == 1


@KINDS
@pytest.mark.parametrize(("shuffle", "documents"), [("rows", 1000), (None, 1000), ("rows", 12)])
@pytest.mark.parametrize("step", one_in(2, [0, 1, 7, 20]))
def test_what_has_left_the_cache_is_left_out_and_nothing_else_changes(
    cache, split, shuffle, documents, step, monkeypatch
):
    """Evicted twice, and resumed twice: the second time within an epoch that has lost documents already."""
    limit(monkeypatch, short_documents=documents)  # of a bundle
    limit(monkeypatch, short_sequences=2)
    options: dict[str, Any] = {"split": split, "shuffle": shuffle}
    with packed_of(cache, **options) as loader:
        whole = [*loader]
    with packed_of(cache, **options) as loader:
        epoch = iter(loader)
        delivered = tokens_of(next(epoch) for _ in range(step))
        state = loader.state_dict()
    gone: set[int] = set()
    for steps in (5, None):
        gone |= evict(cache, 3)
        with packed_of(cache, **options) as loader:
            loader.load_state_dict(plain(state))
            epoch = iterated(loader)
            some = [*epoch] if steps is None else [next(epoch) for _ in range(steps)]
            assert all(token // 1000 not in gone for token in tokens_of(some))
            delivered += tokens_of(some)
            state = loader.state_dict()
    assert len(delivered) == len({*delivered})
    missing = {*tokens_of(whole)} - {*delivered}
    assert {(token - 1) // 1000 for token in missing} <= gone


def iterated(loader: PackedLoader) -> Any:
    """An epoch that has lost documents, or perhaps none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*rows of epoch 0 are lost to it.*")
        return iter(loader)


def test_lost_documents_are_told_or_refused(cache):
    with packed_of(cache) as loader:
        next(iter(loader))
        state = loader.state_dict()
    evict(cache, 2)
    with packed_of(cache) as loader:
        with pytest.raises(MissingSegmentsError, match="2 of its 16 segments"):
            loader.load_state_dict(state, missing="raise")
        loader.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="rows of epoch 0 are lost to it"):
            next(iter(loader))


@KINDS
def test_sequences_keep_the_documents_that_are_left(cache, split):
    """Of the bundle that was begun: the sequences are those of before, without what is gone."""
    with packed_of(cache, split=split, batch_size=1) as loader:
        whole = [batch["tokens"][batch["loss_mask"]].tolist() for batch in loader]
    with packed_of(cache, split=split, batch_size=1) as loader:
        epoch = iter(loader)
        for _ in range(3):
            next(epoch)
        state = loader.state_dict()
    gone = evict(cache, 4)
    left = [[token for token in tokens if (token - 1) // 1000 not in gone] for tokens in whole[3:16]]
    with packed_of(cache, split=split, batch_size=1) as loader:
        loader.load_state_dict(state)
        epoch = iterated(loader)
        for expected in filter(None, left):
            batch = next(epoch)
            assert batch["tokens"][batch["loss_mask"]].tolist() == expected


def begun(cache: ac.Cache, **options: Any) -> dict[str, Any]:
    with packed_of(cache, **options) as loader:
        next(iter(loader))
        return loader.state_dict()


def by_tokens(cache: ac.Cache) -> Loader:
    return Loader(cache, batch_tokens=1 << 16, length_of="tokens", columns=["tokens"])


@pytest.mark.parametrize("face", [ac.Loader, Loader, by_tokens, lambda cache: iter(EpochBatchSampler(cache))])
def test_a_reader_of_rows_refuses_a_state_of_sequences(cache, face):
    with pytest.raises(ValueError, match=r"of length=32, split=True: load it into what .*packed"):
        face(cache).load_state_dict(begun(cache))


@pytest.mark.parametrize("options", [{"split": False}, {"length": 16}])
def test_other_sequences_refuse_a_state(cache, options):
    arguments = {"column": "tokens", "length": LENGTH, "batch_size": SIZE} | options
    with (
        packed(cache, **arguments) as loader,
        pytest.raises(ValueError, match=r"the state is of .*length=32"),
    ):
        loader.load_state_dict(begun(cache))


def test_a_state_of_batches_by_tokens_is_refused_with_the_loader_that_resumes_it(cache):
    with by_tokens(cache) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        packed_of(cache) as loader,
        pytest.raises(ValueError, match="by batch_tokens: resume it in a Loader with batch_tokens, or begin"),
    ):
        loader.load_state_dict(state)


def test_a_state_whose_documents_have_other_lengths_is_refused(cache):
    state = begun(cache)
    state["within"]["lengths"][-1] += 1
    with packed_of(cache) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="documents have other lengths here"):
            next(iter(loader))
    state["within"]["lengths"] += [1] * DOCUMENTS
    with packed_of(cache) as loader, pytest.raises(ValueError, match="damaged"):
        loader.load_state_dict(state)


def test_a_state_of_a_reader_of_rows_begins_at_its_document(cache):
    with Loader(cache, 16, columns=["id"]) as loader:
        delivered = {*next(iter(loader))["id"].tolist()}
        state = loader.state_dict()
    with packed_of(cache) as loader:
        loader.load_state_dict(state)
        found = {(token - 1) // 1000 for token in tokens_of(loader)}
    assert not found & delivered
    assert len(segment_files(cache)) == 16
