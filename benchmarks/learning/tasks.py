"""Three small tasks with real structure, each of some 20,000 rows, and a part that is held out.

    digits  images: scikit-learn's 1,797 handwritten digits, each turned, shifted and scaled some ten times.
            The digits of the held-out part are others.
    text    tokens: the next character of the help texts that CPython ships, in windows of 64. The last tenth
            is held out.
    burgers a surrogate of a simulation: the viscous Burgers equation on 64 points, from the parameters of its
            start to its end.

A score is in points, up to 100: the share of right digits or characters, or 100 less the error of the
solution in per cent (relative L2). All data are made from seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

ROWS, HELD_OUT = 20_000, 4_000


@dataclass(frozen=True)
class Task:
    """Rows of a source, (n, ...) float32 or int64 each, and the model that is to learn them."""

    name: str
    inputs: NDArray[np.generic]
    targets: NDArray[np.generic]
    held_out: tuple[torch.Tensor, torch.Tensor]
    model: Callable[[], nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    score: Callable[[torch.Tensor, torch.Tensor], float]
    steps: int
    learning_rate: float = 1e-3


def _accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return 100 * (outputs.argmax(-1) == targets).double().mean().item()


def _closeness(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    errors = (outputs - targets).norm(dim=1) / targets.norm(dim=1)
    return 100 * (1 - errors.double().mean().item())


def digits() -> Task:
    from scipy import ndimage
    from sklearn.datasets import load_digits

    found, rng = load_digits(), np.random.default_rng(0)
    images = found.images.astype(np.float32) / 16
    order = rng.permutation(len(images))

    def varied(numbers: NDArray[np.int64], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        chosen = rng.choice(numbers, count)
        turns, scales = rng.uniform(-0.4, 0.4, count), rng.uniform(0.8, 1.25, count)
        shifts = rng.uniform(-2, 2, (count, 2))
        out = np.empty((count, 1, 16, 16), np.float32)
        for place, number in enumerate(chosen):
            cos, sin = np.cos(turns[place]), np.sin(turns[place])
            matrix = np.array([[cos, -sin], [sin, cos]]) * scales[place] * 8 / 14
            offset = 3.5 - matrix @ (7.5 + shifts[place])
            out[place, 0] = ndimage.affine_transform(images[number], matrix, offset, (16, 16), order=1)
        out += rng.normal(0, 0.1, out.shape).astype(np.float32)
        return out, found.target[chosen].astype(np.int64)

    inputs, targets = varied(order[400:], ROWS)
    unseen = tuple(map(torch.from_numpy, varied(order[:400], HELD_OUT)))

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    return Task("digits", inputs, targets, unseen, model, nn.functional.cross_entropy, _accuracy, 2000)


class _NextCharacter(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.rnn = nn.GRU(32, 128, batch_first=True)
        self.out = nn.Linear(128, characters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.out(self.rnn(self.embedding(tokens))[0])
        return outputs


def text() -> Task:
    whole = "\n".join(topics[name] for name in sorted(topics))
    characters = sorted({*whole})
    codes = np.searchsorted(np.array(characters), np.array([*whole]))
    cut, rng = len(codes) * 9 // 10, np.random.default_rng(0)

    def windows(codes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        starts = rng.integers(0, len(codes) - 65, count)
        return codes[starts[:, None] + np.arange(65)]

    rows, unseen = windows(codes[:cut], ROWS), torch.from_numpy(windows(codes[cut:], HELD_OUT // 4))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    return Task(
        "text", rows[:, :-1], rows[:, 1:], (unseen[:, :-1], unseen[:, 1:]),
        lambda: _NextCharacter(len(characters)), loss, _accuracy, 1500, 3e-3,
    )  # fmt: skip


def burgers() -> Task:
    points, modes, rng = 64, 4, np.random.default_rng(0)
    count = ROWS + HELD_OUT
    amplitudes, phases = rng.normal(0, 0.5, (count, modes)), rng.uniform(0, 2 * np.pi, (count, modes))
    viscosity = rng.uniform(0.02, 0.1, (count, 1))
    x = np.linspace(0, 2 * np.pi, points, endpoint=False)
    u = sum(
        amplitudes[:, n : n + 1] / (n + 1) * np.sin((n + 1) * x + phases[:, n : n + 1]) for n in range(modes)
    )
    dx, dt = x[1], 0.005
    for _ in range(200):  # to t = 1: conservative upwind differences by Lax and Friedrichs, and diffusion
        right, left = np.roll(u, -1, 1), np.roll(u, 1, 1)
        flux = (right**2 - left**2) / (4 * dx) - 0.5 * np.abs(u).max() * (right - 2 * u + left) / dx
        u = u - dt * flux + dt * viscosity * (right - 2 * u + left) / dx**2
    inputs = np.hstack([amplitudes, np.sin(phases), np.cos(phases), viscosity * 10]).astype(np.float32)
    targets = u.astype(np.float32)

    def model() -> nn.Module:
        width = 256
        return nn.Sequential(
            nn.Linear(inputs.shape[1], width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, points),
        )  # fmt: skip

    unseen = torch.from_numpy(inputs[ROWS:]), torch.from_numpy(targets[ROWS:])
    return Task(
        "burgers", inputs[:ROWS], targets[:ROWS], unseen, model, nn.functional.mse_loss, _closeness, 6000
    )


TASKS = {"digits": digits, "text": text, "burgers": burgers}
