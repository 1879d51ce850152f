"""Options: all faces take the arguments of `Loader`, with its defaults, and show them one by one."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
from helpers import face

import arrowcache as ac
from arrowcache.reading.options import EpochArguments, LoaderArguments, LoaderOptions, PackedArguments

SPELLED_OUT = inspect.signature(ac.Loader).parameters
OWN = {"cache", "batch_size", "device", "num_workers", "options", "source", "column", "length", "split"}


def test_the_options_are_the_arguments_of_the_loader_with_their_defaults():
    arguments = {
        name: each.default for name, each in SPELLED_OUT.items() if name not in ("cache", "batch_size")
    }
    defaults = {field.name: field.default for field in fields(LoaderOptions) if field.init}
    assert defaults == arguments | {"batch_size": None, "may_view": True, "packing": None}
    assert {*LoaderArguments.__annotations__} == {*arguments}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("torch.Loader", LoaderArguments),
        ("torch.EpochBatchSampler", EpochArguments),
        ("torch.dataloader", EpochArguments),
        ("torch.packed", PackedArguments),
    ],
)
def test_a_face_shows_each_argument_with_the_default_of_the_loader(name, arguments):
    shown = inspect.signature(face(name)).parameters
    assert {*arguments.__annotations__} <= {*shown}
    for argument in {*shown} - OWN - ({"seed"} if name == "torch.packed" else set()):  # None: its source's
        assert shown[argument].default == SPELLED_OUT[argument].default


FACES = ["Loader", "torch.Loader", "torch.EpochBatchSampler"]


@pytest.mark.parametrize("name", FACES)
def test_a_face_refuses_an_argument_that_there_is_not(name, tmp_path):
    cache = ac.Cache.create(tmp_path / "cache", {"id": ac.Tensor("int64")}, "8MiB", segment_bytes="1MiB")
    with pytest.raises(TypeError, match="shufle"):
        face(name)(cache, 8, shufle="rows")


@pytest.mark.parametrize("name", FACES)
def test_rows_that_the_cache_can_never_hold_are_refused_and_not_waited_for(name, tmp_path):
    cache = ac.Cache.create(tmp_path / "cache", {"id": ac.Tensor("int64")}, "8MiB", segment_bytes="1MiB")
    with pytest.raises(ValueError, match=r"wait_rows=2000000 takes 15\.3 MiB or more, and the capacity is 8"):
        next(iter(face(name)(cache, 8, wait_rows=2_000_000)))
