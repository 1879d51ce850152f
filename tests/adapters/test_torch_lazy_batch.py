"""What a transform made or raised arrives from a DataLoader's worker, or an exception in its place."""

from __future__ import annotations

import threading
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from helpers import DEADLINE_SECONDS, make_cache, publish
from processes import Script
from quick import first_is_quick

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._utils import ExceptionWrapper  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import arrowcache as ac  # noqa: E402
from arrowcache.torch import CacheDataset, EpochBatchSampler  # noqa: E402
from arrowcache.torch.lazy_batch import failure, pack, unpack  # noqa: E402


class Stubborn:
    """Cannot be pickled, for a reason of a class that cannot be either."""

    def __reduce__(self):
        class Local(Exception):
            pass

        raise Local("not this one")


def raises_local(batch):
    class Local(Exception):
        pass

    raise Local("of a class without a name")


UNSENDABLE = {
    "a lock": (lambda: threading.Lock(), "cannot pickle '_thread.lock' object"),
    "a function without a name": (lambda: lambda: None, "pickle"),
    "a generator": (lambda: (i for i in ()), "cannot pickle 'generator' object"),
    "what raises a class without a name": (Stubborn, "not this one"),
}


@pytest.mark.parametrize("what", UNSENDABLE)
@pytest.mark.parametrize("inside", [False, True])
def test_what_cannot_be_pickled_is_sealed_as_the_exception_that_says_so(what, inside):
    make, words = UNSENDABLE[what]
    sealed = pack({"x": torch.arange(3), "odd": make()} if inside else make())
    assert isinstance(sealed, ExceptionWrapper)
    arrived = ForkingPickler.loads(ForkingPickler.dumps(sealed))  # as the queue's thread does
    opened = unpack(arrived)
    assert opened is arrived
    with pytest.raises(Exception, match=words) as caught:
        opened.reraise()
    assert "a DataLoader's worker sent what a transform had made" in str(caught.value)


@pytest.mark.parametrize("content", [3, None, {"x": [1, "a"]}, {"x": torch.arange(5), "y": torch.zeros(0)}])
def test_what_can_be_pickled_arrives_as_it_was(content):
    opened = unpack(pack(content))
    assert type(opened) is type(content)
    if isinstance(content, dict) and "y" in content:
        assert all(torch.equal(opened[name], content[name]) for name in content)
    else:
        assert opened == content


def test_a_failure_keeps_its_class_where_it_can_be_sent_and_its_text_always():
    def failing(error):
        try:
            raise error
        except Exception:
            return ForkingPickler.loads(ForkingPickler.dumps(failure("somewhere")))

    with pytest.raises(LookupError, match="Caught LookupError somewhere"):
        failing(LookupError("77")).reraise()
    try:
        raises_local(None)
    except Exception as error:
        local = error
    with pytest.raises(ac.WorkerError, match="of a class without a name"):
        failing(local).reraise()


@pytest.fixture
def cache(tmp_path):
    made = make_cache(tmp_path / "cache")
    publish(made, 4)
    return made


def loader_of(cache, transform):
    sampler = EpochBatchSampler(cache, 16)
    dataset = CacheDataset(cache, transform=transform)
    return DataLoader(dataset, batch_sampler=sampler, num_workers=1, timeout=DEADLINE_SECONDS)


TRANSFORMS = {
    "what raises a class without a name": (lambda batch: {"odd": Stubborn()}, "not this one"),
    "an exception of a class without a name": (raises_local, "of a class without a name"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", TRANSFORMS)
def test_the_consumer_gets_an_error_in_place_of_what_cannot_be_sent(cache, what):
    transform, words = TRANSFORMS[what]
    loader = loader_of(cache, transform)
    with pytest.raises(Exception, match=words) as caught:
        next(iter(loader))
    assert "DataLoader timed out" not in str(caught.value)
    assert len(list(loader_of(cache, lambda batch: {"n": np.array([len(batch["id"])])}))) == 4


#: A receiver hangs up between any two steps in which it takes memory from a worker, as Ctrl-C has it do.
HANGS_UP = """
import socket, sys
from multiprocessing import process, reduction, resource_sharer
from multiprocessing.connection import Client
import torch
import arrowcache as ac
from arrowcache.torch import Loader, cached, dataloader
from datasets_of_items import Numbers

path, face, step = sys.argv[1:]

def connected(address):
    return Client(address, authkey=process.current_process().authkey)

def hangs_up(identity):
    address, key = identity
    if step == "connected":
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(address)
    elif step == "known":
        connected(address).close()
    else:
        with connected(address) as connection:
            connection.send((key, 2**22))
    connected(address).close()  # the worker has come to the next one
    raise KeyboardInterrupt

resource_sharer._ResourceSharer.get_connection = staticmethod(hangs_up)
loader = {
    "items": lambda: Loader(cached(Numbers(64), path + "-items", capacity="16MiB"), 8, workers=1),
    "dataloader": lambda: dataloader(path, 8, 1, transform=dict),
}[face]()
try:
    for _ in loader:
        pass
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("step", ["connected", "known", "asked"])
@pytest.mark.parametrize("face", first_is_quick(["items", "dataloader"]))
def test_ctrl_c_while_a_batch_is_received_prints_nothing_in_the_worker(cache, face, step):
    """It was a traceback of multiprocessing.resource_sharer, at times."""
    with Script(HANGS_UP, cache.path, face, step) as script:
        assert script.line() == "interrupted"
        assert script.end() == (0, "")
