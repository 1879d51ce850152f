"""README's recipe for Horovod, on two processes of this machine, by gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import make_cache, publish

pytest.importorskip("horovod", reason="Horovod is not installed")

TRAINING = """
    import json, sys
    import horovod.torch as hvd
    import torch
    from arrowcache.torch import Loader

    cache, folder = sys.argv[1:]
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(256, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    epochs = []
    with Loader(cache, 8, rank=hvd.rank(), world_size=hvd.size(), run_id="run 17") as loader:
        for _ in range(3):
            epochs.append([])
            for batch in loader:
                optimizer.zero_grad()
                model(batch["image"].flatten(1)).mean().backward()
                optimizer.step()  # averages over all ranks, which so must have equally many steps
                epochs[-1] += batch["id"].tolist()
        hvd.barrier()
    with open(f"{folder}/{hvd.rank()}.json", "w") as file:
        json.dump({"epochs": epochs, "weights": model.weight.detach().tolist()}, file)
"""


def test_ranks_of_horovod_train_on_disjoint_rows_in_equally_many_steps(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    script = tmp_path / "training.py"
    script.write_text(textwrap.dedent(TRAINING))
    launcher = [
        Path(sys.executable).with_name("horovodrun"),
        "--gloo",
        "-np",
        "2",
        "--network-interfaces",
        "lo",
    ]
    done = subprocess.run(
        [*launcher, sys.executable, script, cache.path, tmp_path],
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for first, second in zip(*(rank["epochs"] for rank in ranks), strict=True):
        assert len(first) == len(second) == 80
        assert sorted(first + second) == list(range(160))
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert cache.stats().leased_bytes == 0
    assert cache.verify() == []
