"""Graphs: batches beside the capture of CUDA graphs, by hand, by torch's callables and by its compiler."""

from __future__ import annotations

import copy
import gc
import importlib.util
from collections.abc import Callable

import torch

import arrowcache as ac
from arrowcache.torch import DevicePrefetcher, Loader
from benchmarks.device_proof.batches import BATCH_ROWS, WIDTH, alike, cache_of_numbers
from benchmarks.device_proof.check import CannotRun, Wrong
from benchmarks.device_proof.target import Target, Trial

CAPTURE_SECONDS = 5.0
STEPS = 30
_TOLERANCE = 1e-3


def capture(target: Target, mode: str) -> str:
    """A graph is captured while copies fly and batches and a prefetcher die, and replayed over later batches.

    Args:
        mode: of errors: "thread_local" or "global", which forbids calls to all threads.
    """
    with cache_of_numbers() as cache:
        replays = [_captured(trial, cache, mode) for trial in target.trials(CAPTURE_SECONDS)]
    return f"{len(replays)} captures in mode {mode!r}, {sum(replays)} replays: all right"


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
            raise Wrong(
                f"the iteration ended after batch {number} of {len(batches) - 1}: the capture cost some"
            )
        del batch
        trial.finish()
        return number - 1


def _refuses(batches: object) -> None:
    try:
        next(batches)  # type: ignore[call-overload]  # an iterator of ours
    except RuntimeError as error:
        if "captured" not in str(error):
            raise
    else:
        raise Wrong("`next` gave a batch while a graph was captured")


def graphed_callables(target: Target) -> str:
    """`torch.cuda.make_graphed_callables`, whose captures are global, forward and backward."""
    del target
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 8, device="cuda")
    eager = copy.deepcopy(model)
    with DevicePrefetcher(alike(STEPS + 1), "cuda") as prefetcher:
        taken = iter(prefetcher)
        sample = next(taken)["x"]  # copies of the next ones fly
        graphed = torch.cuda.make_graphed_callables(model, (torch.zeros_like(sample),))
        losses = _losses(taken, graphed, eager, sample, lambda: None)
    _compare(losses, model, eager)
    return f"{STEPS} steps, forward and backward, as without graphs"


def compiled(target: Target) -> str:
    """`torch.compile(mode="reduce-overhead")`, forward and backward: CUDA graphs whose inputs are batches."""
    del target
    if importlib.util.find_spec("triton") is None:
        raise CannotRun("torch.compile needs triton, which is not installed here")
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 8, device="cuda")
    eager = copy.deepcopy(model)
    with DevicePrefetcher(alike(STEPS + 1), "cuda") as prefetcher:
        taken = iter(prefetcher)
        sample = next(taken)["x"]
        step = torch.compile(model, mode="reduce-overhead")
        losses = _losses(taken, step, eager, sample, torch.compiler.cudagraph_mark_step_begin)
    _compare(losses, model, eager)
    if skips := counters["inductor"]["cudagraph_skips"]:
        raise CannotRun(f"torch compiled without CUDA graphs {skips} times; {STEPS} steps were right")
    return f"{STEPS} steps, forward and backward, as without a compiler; no graph was skipped"


def _losses(
    batches: object,
    model: Callable[[torch.Tensor], torch.Tensor],
    eager: Callable[[torch.Tensor], torch.Tensor],
    like: torch.Tensor,
    begin: Callable[[], None],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Losses of each step over batches, and of one that knows what the batch holds. Gradients are summed."""
    losses = []
    for number, batch in enumerate(batches, 1):  # type: ignore[call-overload]  # an iterator of ours
        begin()
        torch.cuda._sleep(1_000_000)
        loss, expected = model(batch["x"] / STEPS).sum(), eager(torch.full_like(like, number) / STEPS).sum()
        loss.backward()
        expected.backward()
        losses.append((loss.detach().clone(), expected.detach()))
    return losses


def _compare(
    losses: list[tuple[torch.Tensor, torch.Tensor]], model: torch.nn.Module, eager: torch.nn.Module
) -> None:
    if len(losses) != STEPS:
        raise Wrong(f"{len(losses)} steps, not {STEPS}")
    gradients = [[each.grad for each in one.parameters()] for one in (model, eager)]
    for number, (found, expected) in enumerate([*losses, *zip(*gradients, strict=True)]):
        if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            what = f"the loss of step {number}" if number < STEPS else "a gradient"
            most = (found - expected).abs().max().item()
            raise Wrong(f"{what} is off by {most:g}, where it is up to {expected.abs().max().item():g}")
