"""The pages of docs/how-to: each block of code runs, in the order of its page, and does as the page says."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from processes import Script

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
START = """
    import os, runpy, sys

    os.chdir(sys.argv[1])
    with open("output", "w") as file:
        os.dup2(file.fileno(), 1)
    runpy.run_path("script.py", run_name="__main__")
"""


def blocks(page: str) -> str:
    """The Python of a page."""
    return "\n".join(
        re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    )


def run(folder: Path, page: str, then: str, before: str = "") -> str:
    """Run the blocks of a page as one script, in a folder; what it printed."""
    code = textwrap.dedent(before) + blocks(page).replace('"/data/', f'"{folder}/')
    code = re.sub(r'capacity="\d+GB"', 'capacity="64MB"', code).replace("timeout=600", "timeout=60")
    (folder / "script.py").write_text(code + "\n" + textwrap.dedent(then))
    with Script(START, folder) as script:
        exit_code, errors = script.end(240)
        assert exit_code == 0, errors
    return (folder / "output").read_text()


@pytest.mark.slow
def test_a_policy_learns_from_groups_of_rollouts_that_come_once(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    then = """
        import threading

        class Policy:
            version = 0
            made = 0

            def goes_on(self):
                return self.version < 30 and not over.wait(0.001)

            def roll_out(self, group, length):
                self.made += 1
                with torch.no_grad():
                    tokens = torch.distributions.Categorical(logits=model.weight[0]).sample((group, length))
                return self.made, tokens.numpy(), (tokens == 3).float().mean(1).numpy()

        class Same(torch.nn.Module):  # the same distribution of tokens, whatever came before
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(1, 8))

            def forward(self, tokens):
                return self.weight.expand(*tokens.shape, 8)

        torch.manual_seed(0)
        model, policy, over = Same(), Policy(), threading.Event()
        optimizer = torch.optim.Adam(model.parameters(), 0.3)
        had = []
        model.register_forward_pre_hook(lambda _, given: had.append(len(given[0])))
        actor = threading.Thread(target=act, args=(cache.path, policy), daemon=True)
        actor.start()
        learn(cache, model, optimizer, 30, lambda _, version: setattr(policy, "version", version))
        over.set()
        actor.join()
        print(sum(had), cache.stats().served_rows, model.weight.softmax(-1)[0, 3].item() > 0.9)
    """
    rows, served, has_learned = run(tmp_path, "rollouts.md", then).split()
    assert (rows, served, has_learned) == ("120", "120", "True")


def test_each_page_has_a_test():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [path.name for path in PAGES.iterdir() if f'"{path.name}"' not in text] == []


@pytest.mark.slow
def test_a_stream_is_read_from_the_disk_the_next_time(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    before = """
        import numpy as np

        made, seen = [], []

        def stream():
            for number in range(100):
                made.append(number)
                yield {"x": np.full(4, number, np.float32), "number": number}

        def read_lines(file):
            for line in range(10):
                yield {"number": 10 * int(file[5]) + line}

        def step(item):
            seen.append(item["number"])
    """
    then = """
        numbers = [int(number) for some in seen for number in np.ravel(some)]
        print(numbers[:100] == list(range(100)), len(made))
        print(*(sorted(numbers[100 + 80 * n :][:80]) == list(range(80)) for n in range(2)), len(numbers))
        first = cached(stream, "/data/items", capacity="200GB")
        made.clear()
        print(len([*first]), len(made))
    """.replace('"/data/', f'"{tmp_path}/').replace("200GB", "64MB")
    page = run(tmp_path, "streams.md", then, before).split()
    assert page == ["True", "101", "True", "True", "260", "100", "0"]


@pytest.mark.slow
def test_a_frozen_cache_is_read_by_two_ranks_from_two_copies(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    before = f"""
        import arrowcache as ac

        path, schema = "{tmp_path}/finished", {{"number": ac.Tensor("int64")}}
        made = ac.Cache.create(path, schema, "64MB", segment_rows=64)
        with made.writer() as writer:
            writer.extend(number=range(1280))
        made.close()
    """
    then = """
        print(cache.store.is_frozen, ac.Cache.open("COPY").store.is_frozen)
        rows = [[int(n) for batch in loader for n in batch["number"]] for loader in (*ranks, again)]
        print(sorted(rows[0] + rows[1]) == list(range(1280)), rows[2] == rows[0])
    """.replace("COPY", f"{tmp_path}/copy")
    assert run(tmp_path, "frozen.md", then, before).split() == ["True"] * 4
