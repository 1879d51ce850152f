"""The pages of docs/: each block of code runs, in the order of its page, and does as the page says."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import Script

PAGES = Path(__file__).parents[2] / "docs"
#: Pages whose code others run, or that need more than a script can have.
ELSEWHERE = {
    "design.md": "it has no code",
    "modules.md": "it has no code",
    "developing.md": "it has no code",
    "install.md": "it has commands alone",
    "command-line.md": "it has commands alone",
    "types.md": "it has no code",
    "glossary.md": "it has no code",
    "errors.md": "it has no code",
    "shuffles.md": "it has no code",
    "many-machines.md": "tests/adapters/test_ray.py and test_spark.py have its functions, and a notebook",
}
START = """
    import os, runpy, sys

    os.chdir(sys.argv[1])
    with open("output", "w") as file:
        os.dup2(file.fileno(), 1)
    runpy.run_path("script.py", run_name="__main__")
"""


def blocks(page: str) -> str:
    """The Python of a page."""
    text = next(PAGES.glob(f"*/{page}")).read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def run(
    folder: Path, page: str, then: str, before: str = "", instead: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Run the blocks of a page as one script, in a folder; what it printed."""
    code = blocks(page)
    for text, other in instead.items():
        assert text in code, text
        code = code.replace(text, other)
    code = textwrap.dedent(before) + code.replace('"/data/', f'"{folder}/')
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
    tests = [*Path(__file__).parent.glob("test_*.py"), *Path(__file__).parents[1].glob("readme/test_*.py")]
    text = "".join(path.read_text() for path in tests)
    pages = sorted(PAGES.glob("*/*.md"))
    assert [page.name for page in pages if not re.search(rf'[/"]{page.name}"', text)] == []
    assert [name for name, why in ELSEWHERE.items() if why.startswith("it has") and blocks(name)] == []


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


#: A cache with 100 rows of pictures and labels.
PICTURES = """
    import numpy as np
    import arrowcache as ac

    schema = ac.Schema({"image": ac.Tensor("float32", (8, 8)), "label": ac.Tensor("int64")})
    made = ac.Cache.create("CACHE", schema, capacity="64MB", segment_rows=10, exist_ok=True)
    rng = np.random.default_rng(0)
    with made.writer() as writer:
        writer.extend(image=rng.random((100, 8, 8), np.float32), label=np.arange(100) % 5)
"""


def pictures(folder: Path) -> str:
    return PICTURES.replace("CACHE", f"{folder}/cache")


@pytest.mark.slow
def test_batches_go_to_a_device(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    before = """
        import torch

        any_iterable_of_batches = [{"x": torch.arange(4), "nested": [torch.ones(4, 2)]} for _ in range(3)]
        seen = []
    """
    out = run(
        tmp_path, "pytorch.md", "print(len(seen))", pictures(tmp_path) + before,
        {  # a processor stands for the GPUs
            '"cuda"': '"cpu"', '["cuda:0", "cuda:1"]': '["cpu", "cpu"]',
            "...": "seen.append(1)", 'cache", 64, num_workers=4': 'cache", 10, num_workers=2',
        },
    )  # fmt: skip
    assert out.split() == ["16"]


@pytest.mark.slow
def test_sources_sample_tables_and_arrays(tmp_path):
    zarr = pytest.importorskip("zarr", "3.0")
    pq.write_table(
        pa.table({"image": [[1.0, 2.0]] * 50, "label": range(50), "year": [2020, 2021] * 25}),
        tmp_path / "table.parquet",
    )
    group = zarr.create_group(tmp_path / "run.zarr")
    group.create_array("signal", data=np.ones((1000, 12), np.float32), chunks=(100, 12))
    group.create_array("label", data=np.arange(1000), chunks=(100,))
    zarr.create_group(tmp_path / "era5.zarr").create_array(
        "t2m", data=np.zeros((2100, 64, 64), np.float32), chunks=(42, 64, 64),
        dimension_names=["time", "lat", "lon"],
    )  # fmt: skip
    then = """
        assert len({*labels}) > 5 and all(label % 2 for label in labels)
        rng = np.random.default_rng(0)
        first = next(noisy(rng))
        row = {name: values[0] for name, values in first.items()} if isinstance(first, ac.Rows) else first
        print(len(labels), row["signal"].shape, train.schema["data"].shape)
    """
    take = 'pool.wait(rows=8, timeout=60)\n    labels = cache.dataset().to_table()["label"].to_pylist()'
    before = "import numpy as np\nimport arrowcache as ac\n"
    out = run(
        tmp_path, "sources.md", then, before,
        {
            "s3://bucket/table/?region=eu-central-1": f"{tmp_path}/table.parquet",
            "s3://bucket": str(tmp_path),
            "reads=32),": "reads=32) as pool,",
            "...": take,
        },
    )  # fmt: skip
    assert int(out.split()[0]) >= 8
    assert out.split(maxsplit=1)[1].split(")") == ["(256, 12", " (6, 64, 64", "\n"]


@pytest.mark.slow
def test_a_cache_is_looked_into(tmp_path):
    pytest.importorskip("duckdb", reason="DuckDB is not installed")
    pytest.importorskip("ipywidgets", reason="the extra explore is not installed")
    then = """
        print(len(dark), dark["label"].unique().tolist())
    """
    more = {'"83:26"': '"3:6"'}
    assert run(tmp_path, "look-inside.md", then, pictures(tmp_path), more).split() == ["20", "[3]"]


@pytest.mark.slow
def test_a_cache_is_a_folder(tmp_path):
    before = """
        import arrowcache as ac

        path, schema = "made", {"x": ac.Tensor("int64")}
    """
    then = "print(len(cache.schema), cache.stats().rows)"
    assert run(tmp_path, "cache.md", then, before, {"64MiB": "1MiB"}).split() == ["1", "0"]


@pytest.mark.slow
def test_a_pace_and_a_snapshot(tmp_path):
    then = """
        print(cache.store.settings.pace.max_reuse)
    """
    before = pictures(tmp_path) + "    cache = made\n"
    assert run(tmp_path, "pace.md", then, before).split() == ["8"]


@pytest.mark.slow
def test_each_for_is_an_epoch(tmp_path):
    before = pictures(tmp_path) + "    loader, seen = ac.Loader(made, 10), []\n"
    out = run(tmp_path, "loader.md", "print(len(seen))", before, {"...": "seen.append(batch)"})
    assert out.split() == ["10"]


@pytest.mark.slow
def test_jax_trains(tmp_path):
    pytest.importorskip("jax", reason="JAX is not installed")
    before = """
        state, seen = None, []

        def train_step(state, image, label):
            assert isinstance(image, jax.Array) and image.shape == (10, 8, 8)
            seen.append(label)
    """
    out = run(
        tmp_path, "jax.md", "print(len(seen))", pictures(tmp_path) + before, {'cache", 64)': 'cache", 10)'}
    )
    assert out.split() == ["10"]


@pytest.mark.slow
def test_keras_trains_and_tfrecords_come_and_go(tmp_path):
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    before = f"""
        import os, warnings
        import tensorflow as tf
        from arrowcache.tensorflow import to_tfrecords as export

        warnings.filterwarnings("ignore", "Your input ran out of data")  # which the page tells
        os.mkdir("{tmp_path}/old")
        export(made, "{tmp_path}/old")
        cache = ac.Cache.create("{tmp_path}/again", schema, capacity="64MB")
        model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(5)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)

        def to_inputs_and_targets(batch):
            return batch["image"], batch["label"]
    """
    then = """
        labels = sorted(int(row["label"]) for row in old)
        print(cache.stats().rows, labels == sorted([0, 1, 2, 3, 4] * 20))
    """
    out = run(
        tmp_path, "tensorflow.md", then, pictures(tmp_path) + before,
        {"epochs=100": "epochs=2, verbose=0", 'cache", 64)': 'cache", 10)'},
    )  # fmt: skip
    assert out.split()[-2:] == ["100", "True"]


@pytest.mark.slow
@pytest.mark.smoke
def test_ten_tasks(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    before = """
        import time
        import numpy as np
        import torch

        seen = []
        documents = [np.arange(50, dtype=np.int32)] * 40

        def read_far_away(key):
            time.sleep(0.001)
            return np.full((3, 32, 32), key % 7, np.float32), key % 7

        def step(image, label):
            assert image.shape == (64, 3, 32, 32) and (image[:, 0, 0, 0] == label).all()
            seen.append(len(label))

        def losses_of(batch):
            return torch.where(batch["label"] == 2, 5.0, 0.1)

        class Slow:
            def __len__(self):
                return 70
            def __getitem__(self, index):
                if index >= 70:
                    raise IndexError(index)
                return {"x": np.full(4, index, np.float32)}

        def stream():
            yield from (Slow()[index] for index in range(70))

        dataset = Slow()
    """
    then = """
        print(len(seen) > 2, len([*train]) > len([*validate]), sum(len(batch["x"]) for batch in batches))
        print({int(label) for batch in some for label in batch["label"]} <= {0, 1, 2})
        shares = [float((batch["label"] == 2).float().mean()) for batch in often]
        print(np.mean(shares) > 0.4, len([*passing]))
    """
    out = run(
        tmp_path,
        "ten-tasks.md",
        then,
        before,
        {"...": "pass", "\npool.stop()": "\npool.wait(rows=4000, timeout=120)\npool.stop()"},
    )
    assert out.split()[-6:] == ["True", "True", "70", "True", "True", "70"]


@pytest.mark.slow
def test_numbers_go_to_others(tmp_path):
    before = """
        import sys
        from types import SimpleNamespace

        logged, port = {}, 0
        wandb, mlflow = SimpleNamespace(log=logged.update), SimpleNamespace(log_metrics=logged.update)
        cache = made
        loader = ac.Loader(cache, 10)
        for batch in loader:
            pass
    """
    then = """
        import threading
        from urllib.request import urlopen

        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stderr = open("log", "w")  # the server's, of each request
        served = urlopen(f"http://127.0.0.1:{server.server_port}", timeout=60).read().decode()
        server.shutdown()
        print(logged["loader/batches"], logged["cache.rows"], logged["loader/wait_p99_seconds"] >= 0)
        print(text.endswith("# EOF\\n"), "arrowcache_loader_batches_total" in served)
    """
    out = run(tmp_path, "monitoring.md", then, pictures(tmp_path) + before, {"PORT": "port"})
    assert out.split() == ["10", "100", "True", "True", "True"]
