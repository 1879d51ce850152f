"""Graphs: batches beside the capture of CUDA graphs, by hand, by torch's callables and by its compiler."""

from __future__ import annotations

import copy
import gc
import importlib.util
from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from gpu.trials import BATCH_ROWS, WIDTH, Saw, Target, Trial, alike, cache_of_numbers

import arrowcache as ac
from arrowcache.torch import DevicePrefetcher, Loader

CAPTURE_SECONDS = 5.0
STEPS = 30
_TOLERANCE = 1e-2


def test_a_capture_is_left_alone(target: Target, saw: Saw) -> None:
    """Of a graph whose capture forbids calls to all threads."""
    _capture(target, "global", saw)


def test_a_capture_of_one_thread_is_left_alone(gpu: Target, saw: Saw) -> None:
    _capture(gpu, "thread_local", saw)


def _capture(target: Target, mode: str, saw: Saw) -> None:
    """A graph is captured while copies fly and batches die, and replayed over later batches."""
    with cache_of_numbers() as cache:
        replays = [_captured(trial, cache, mode) for trial in target.trials(CAPTURE_SECONDS)]
    saw(f"{len(replays)} captures in mode {mode!r}, {sum(replays)} replays: all right")


def _captured(trial: Trial, cache: ac.Cache, mode: str) -> int:
    batches, others = alike(12), alike(6)
    with (
        Loader(cache, BATCH_ROWS, device=trial.device) as loader,
        DevicePrefetcher(batches, trial.device) as prefetcher,
    ):
        dying = iter(DevicePrefetcher(others, trial.device))
        taken, loaded = iter(prefetcher), iter(loader)
        kept = [next(taken), next(taken), next(dying), next(dying), next(loaded)]
        with trial.capture(mode, kept[0]["x"]) as replay:
            for each in (taken, dying, loaded):
                _refuses(each)
            del each, dying
            kept.clear()
            gc.collect(1)  # of what is not old
        for number, batch in enumerate(taken, 2):
            trial.sleep(5e-4)
            replay(batch["x"], number)
        if number != len(batches) - 1:
            raise AssertionError(
                f"the iteration ended after batch {number} of {len(batches) - 1}: the capture cost some"
            )
        del batch
        if (left := sum(1 for _ in loaded)) != cache.stats().rows // BATCH_ROWS - 1:
            raise AssertionError(f"the loader gave {left} batches after the capture that it refused")
        trial.finish()
        return number - 1


def _refuses(batches: object) -> None:
    try:
        next(batches)  # type: ignore[call-overload]  # an iterator of ours
    except RuntimeError as error:
        if "captured" not in str(error):
            raise
    else:
        raise AssertionError("`next` gave a batch while a graph was captured")


def test_captures_of_graphed_callables_are_left_alone(gpu: Target, saw: Saw) -> None:
    """`torch.cuda.make_graphed_callables`, whose captures are global, forward and backward."""

    def make(model: torch.nn.Module, sample: torch.Tensor) -> torch.nn.Module:
        return torch.cuda.make_graphed_callables(model, (torch.zeros_like(sample),))

    _train(make, lambda: None)
    saw(f"{STEPS} steps, forward and backward, as without graphs")


@pytest.mark.proof(seconds=110)
def test_graphs_of_the_compiler_are_left_alone(gpu: Target, saw: Saw) -> None:
    """`torch.compile(mode="reduce-overhead")`, forward and backward: CUDA graphs whose inputs are batches."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("torch.compile needs triton, which is not installed here")
    from torch._dynamo.utils import counters

    def make(model: torch.nn.Module, sample: torch.Tensor) -> torch.nn.Module:
        made = torch.compile(model, mode="reduce-overhead")
        try:
            made(torch.zeros_like(sample)).sum().backward()
        except Exception as error:
            pytest.skip(f"torch.compile does not work here: {type(error).__name__}: {error}")
        model.zero_grad(set_to_none=True)
        return made

    _train(make, torch.compiler.cudagraph_mark_step_begin)
    if skips := counters["inductor"]["cudagraph_skips"]:
        pytest.skip(f"torch compiled without CUDA graphs {skips} times; {STEPS} steps were right")
    saw(f"{STEPS} steps, forward and backward, as without a compiler; no graph was skipped")


def _train(
    make: Callable[[torch.nn.Module, torch.Tensor], torch.nn.Module], begin: Callable[[], None]
) -> None:
    """Steps over batches beside steps without graphs, over what each batch should hold.

    Args:
        make: of a module and a batch: the module that uses graphs. Copies of later batches fly meanwhile.
        begin: is called at the begin of each step.
    Raises: AssertionError: losses or gradients differ.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 8, device="cuda")
    eager = copy.deepcopy(model)
    steps = []
    with DevicePrefetcher(alike(STEPS + 1), "cuda") as prefetcher:
        taken = iter(prefetcher)
        sample = next(taken)["x"]
        graphed = make(model, sample)
        for number, batch in enumerate(taken, 1):
            begin()
            torch.cuda._sleep(1_000_000)
            steps.append((_step(graphed, batch["x"]), _step(eager, torch.full_like(sample, number))))
    if len(steps) != STEPS:
        raise AssertionError(f"{len(steps)} steps, not {STEPS}")
    for number, step in enumerate(steps, 1):
        for what, found, expected in zip(("loss", "gradient", "gradient of the bias"), *step, strict=True):
            if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                most = (found - expected).abs().max().item()
                raise AssertionError(
                    f"step {number}: the {what} is off by {most:g} of {expected.abs().max().item():g}"
                )


def _step(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns: the loss and the gradients, copied: what graphs give is overwritten by the next step."""
    loss = model(x).sum()
    loss.backward()
    found = loss.detach().clone(), *(each.grad.clone() for each in model.parameters())
    model.zero_grad(set_to_none=True)
    return found
