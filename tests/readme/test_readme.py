"""README and the pages of docs/: links lead somewhere, code is code, and the examples run as they stand."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from object_store import serve
from processes import Script

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "docs/llms.txt", *sorted(ROOT.glob("docs/*/*.md"))]
FIRST = "first screen"
#: Stand-ins for the reader's own parts: a slow source, a step, and sizes that fit a test.
PRELUDE = """
    import contextlib, os, time
    import numpy as np, torch
    import arrowcache as ac
    from arrowcache.torch import Loader

    seen = []
    schema = ac.Schema({"image": ac.Tensor("float32", (64, 64)), "label": ac.Tensor("int64")})

    def read_somewhere_far_away(key):
        time.sleep(0.02)
        rng = np.random.default_rng(key)
        return rng.random((64, 64), np.float32), int(rng.integers(10))

    def step(image, label):
        assert image.shape == (len(label), 64, 64)
        seen.append(len(label))

    class Slow:
        def __len__(self):
            return 150
        def __getitem__(self, index):
            if index >= 150:
                raise IndexError(index)
            return np.full((64, 64), index, np.float32), index

    dataset = Slow()
"""


def sections(text: str) -> dict[str, list[str]]:
    """The Python blocks below each heading."""
    found: dict[str, list[str]] = {}
    heading, block, language = FIRST, [], None
    for line in text.splitlines():
        if line.startswith("```"):
            if language is None:
                language, block = line[3:], []
            else:
                if language == "python":
                    found.setdefault(heading, []).append("\n".join(block))
                language = None
        elif language is not None:
            block.append(line)
        elif (match := re.fullmatch(r"#+ (.*)", line)) and line != "# arrowcache":
            heading = match[1]
    return found


CODE = {page: sections(page.read_text()) for page in PAGES}


def code(page: str, heading: str = "") -> list[str]:
    """The blocks of a page below a heading, or below its title."""
    found = CODE[ROOT / page]
    return found[heading] if heading else next(iter(found.values()))


def headings(text: str) -> set[str]:
    """The anchors of a Markdown file."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_their_code_is_python():
    for page, found in CODE.items():
        for blocks in found.values():
            for block in blocks:
                ast.parse(block, str(page))


def test_their_links_lead_somewhere():
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), (page, link)
            if anchor:
                assert anchor in headings(path.read_text()), (page, link)


def test_readme_is_short_and_leads_to_each_page_of_how_to():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1500
    pages = [page for page in PAGES if page.parent.name == "how-to"]
    assert [page.name for page in pages if f"docs/how-to/{page.name}" not in text] == []


START = """
    import os, runpy, sys

    os.chdir(sys.argv[1])
    with open("output", "w") as file:
        os.dup2(file.fileno(), 1)
    runpy.run_path("script.py", run_name="__main__")
"""


def run(folder: Path, *blocks: str, then: str = "") -> str:
    """Run blocks of pages as one script, in a folder; what it printed."""
    code = "\n".join(blocks).replace('"/data/', f'"{folder}/').replace("range(100)", "range(3)")
    code = re.sub(r'capacity="\d+GB"', 'capacity="300MB"', code).replace("num_workers=4", "num_workers=2")
    (folder / "script.py").write_text(textwrap.dedent(PRELUDE) + "\n" + code + "\n" + textwrap.dedent(then))
    with Script(START, folder) as script:
        exit_code, errors = script.end(240)
        assert exit_code == 0, errors
    return (folder / "output").read_text()


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.slow
@pytest.mark.smoke
def test_the_first_example_trains_while_samplers_publish_and_started_again_goes_on(tmp_path, torch):
    then = """
        with ac.Cache.open(CACHE) as cache:
            names = [segment.task for segment in cache.store.segments()]
            print(cache.stats().rows, len(seen), min(seen), len({*names}) == len(names))
    """.replace("CACHE", repr(str(tmp_path / "cache")))
    rows = 0
    for _ in range(2):
        now, batches, least, are_distinct = run(tmp_path, *code("README.md"), then=then).split()
        assert int(now) >= max(rows, 64), "what the first run left is there"
        assert int(batches) >= 3
        assert least == "64"
        assert are_distinct == "True", "no task is drawn twice"
        rows = int(now)


@pytest.mark.slow
@pytest.mark.smoke
def test_the_recipe_of_a_slow_dataset_reads_each_item(tmp_path, torch):
    out = run(
        tmp_path, "from torch.utils.data import DataLoader", *code("docs/how-to/slow-dataset.md"),
        then="""
        for _ in range(2):
            labels = [int(label) for _, labels in loader for label in labels]
            print(len(labels), sorted(labels) == list(range(150)), train.cached)
        """,
    )  # fmt: skip
    assert out.split() == ["150", "True", "150"] * 2


@pytest.mark.slow
def test_the_recipe_of_finite_data_has_each_row_once(tmp_path, torch):
    out = run(
        tmp_path, *code("docs/how-to/finite-data.md"),
        then="""
        for _ in range(2):
            labels = [int(label) for batch in loader for label in batch["label"]]
            print(len(labels), sorted(labels) == list(range(150)))
        loader.close()
        """,
    )  # fmt: skip
    assert out.split() == ["150", "True"] * 2


@pytest.mark.slow
@pytest.mark.smoke
def test_the_recipe_of_documents_has_each_token_once(tmp_path, torch):
    begin = """
    cache = ac.Cache.create("cache", ac.Schema({"tokens": ac.Ragged("int32")}), capacity="300MB")
    with cache.writer() as writer:
        for number in range(60):
            writer.append(tokens=np.arange(1000 * number, 1000 * (number + 1), dtype=np.int32))
    """
    pack = code("docs/how-to/documents.md")[0].replace("...", "seen += labels[labels >= 0].tolist()")
    out = run(
        tmp_path, textwrap.dedent(begin), "seen = []", pack,
        then="""
        firsts = [1000 * number for number in range(60)]
        left_out = sorted({*range(60_000)} - {*seen})
        print(len(seen) == len({*seen}), {*firsts} <= {*left_out}, len(left_out) < 200)
        loader.close()
        """,
    )  # fmt: skip
    assert out.split() == ["True"] * 3


@pytest.mark.slow
def test_the_recipe_of_a_cache_larger_than_memory_has_each_row_once(tmp_path, torch):
    begin = """
    cache = ac.Cache.create("cache", schema, capacity="100MB", segment_rows=64)
    with cache.writer() as writer:
        for number in range(640):
            writer.append(image=np.zeros((64, 64), np.float32), label=number)
    """
    out = run(
        tmp_path, textwrap.dedent(begin), *code("docs/how-to/larger-than-memory.md"),
        then="""
        print(sorted(int(label) for batch in loader for label in batch["label"]) == list(range(640)))
        loader.close()
        """,
    )  # fmt: skip
    assert out.split() == ["True"]


@pytest.mark.slow
@pytest.mark.smoke
def test_the_recipe_of_resuming_loses_and_repeats_nothing(tmp_path, torch):
    save, resume = code("docs/how-to/resume.md")
    begin = """
    cache = ac.Cache.create("cache", schema, capacity="100MB", segment_rows=50)
    with cache.writer() as writer:
        for number in range(320):
            writer.append(image=np.zeros((64, 64), np.float32), label=number)

    def sample(rng):
        while True:
            yield {"image": np.zeros((64, 64), np.float32), "label": -1}

    loader = Loader(cache, 64)
    first = iter(loader)
    before = [next(first)["label"].tolist() for _ in range(2)]
    """
    again = "first.close()\nloader.close()\nloader = Loader(cache, 64)\nrest = []\n"
    resume = resume.replace("...", 'rest.append(batch["label"].tolist())')
    out = run(
        tmp_path, textwrap.dedent(begin), save, again, resume,
        then="print(len(rest), sorted(sum(before + rest, [])) == list(range(320)))\nloader.close()",
    )  # fmt: skip
    assert out.split() == ["3", "True"]


@pytest.mark.slow
def test_the_recipe_of_rows_leaves_some_out_and_sees_others_more_often(tmp_path, torch):
    choose, weigh = code("docs/how-to/choose-rows.md")
    begin = """
    cache = ac.Cache.create("cache", schema, capacity="100MB", segment_rows=64)
    with cache.writer() as writer:
        for number in range(64 * 85):
            writer.append(image=np.zeros((2, 2), np.float32), label=number % 10)
    """.replace("schema", 'ac.Schema({"image": ac.Tensor("float32", (2, 2)), "label": ac.Tensor("int64")})')
    learn = """
    steps = 0

    def losses_of(batch):
        global steps
        steps += 1
        if steps == 5000:
            raise KeyboardInterrupt
        return torch.where(batch["label"] == 7, 10.0, 0.1).double()

    def train_on(losses):
        seen.append(float(losses.mean()))
    """
    out = run(
        tmp_path, textwrap.dedent(begin), choose,
        "print(len([1 for batch in hard]), len([1 for batch in loader]), len([1 for batch in some]))",
        textwrap.dedent(learn),
        f"try:\n{textwrap.indent(weigh, '    ')}\nexcept KeyboardInterrupt:\n    pass",
        then="""
        labels = torch.cat([batch["label"] for _, batch in zip(range(100), iter(loader))])
        print(float((labels == 7).double().mean()) > 0.5)
        """,
    )  # fmt: skip
    assert out.split() == ["2", "76", "67", "True"]


@pytest.mark.slow
def test_the_recipe_of_held_out_data_splits_segments(tmp_path, torch):
    begin = """
    cache = ac.Cache.create("cache", schema, capacity="100MB", segment_rows=64)
    with cache.writer() as writer:
        for number in range(64 * 20):
            writer.append(image=np.zeros((64, 64), np.float32), label=number // 64)
    """
    out = run(
        tmp_path, textwrap.dedent(begin), *code("docs/how-to/finite-data.md", "Held-out data"),
        then="""
        for loader in (train, validate):
            print(sorted({int(label) for batch in loader for label in batch["label"]}))
            loader.close()
        """,
    )  # fmt: skip
    training, held_out = map(ast.literal_eval, out.splitlines())
    assert held_out == [0, 10]
    assert sorted(training + held_out) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_recipe_of_pools_under_ddp_has_one_pool_a_node(tmp_path, torch, monkeypatch, rank):
    monkeypatch.setenv("LOCAL_RANK", rank)
    block = code("docs/how-to/ranks.md", "Pools under DDP")[0].replace(
        "epoch_rows=100_000", "epoch_rows=256, wait_rows=1"
    )
    begin = """
    cache = ac.Cache.create("cache", schema, capacity="100MB", segment_rows=64)
    with cache.writer() as writer:
        for number in range(128):
            writer.append(image=np.zeros((64, 64), np.float32), label=number)

    def sample(rng):
        while True:
            yield {"image": np.zeros((64, 64), np.float32), "label": -1}
    """
    out = run(
        tmp_path, textwrap.dedent(begin), block.replace("...", 'seen.append(len(batch["label"]))'),
        then="print(sum(seen), isinstance(pool, ac.SamplerPool))",
    )  # fmt: skip
    assert out.split() == ["256", str(rank == "0")]


#: A store of .npy files, each of a number's own, which answers 20 ms after it was asked.
STORE = """
    import http.server, threading, urllib.request
    from functools import partial
    from io import BytesIO

    lock, at_once, most = threading.Lock(), 0, 0

    class Store(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            global at_once, most
            with lock:
                at_once += 1
                most = max(most, at_once)
            time.sleep(0.02)
            file = BytesIO()
            np.save(file, np.full(1024, int(self.path[1:-4]), np.float32))
            with lock:
                at_once -= 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(file.getvalue())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    STORE = f"http://127.0.0.1:{server.server_port}"

    def simulate(number):
        with urllib.request.urlopen(f"{STORE}/{number}.npy", timeout=60) as answer:
            return np.frombuffer(answer.read()[-4096:], np.float32)

    class Far:
        def __len__(self):
            return 150
        def __getitem__(self, index):
            return {"x": simulate(index)}

    dataset = Far()
    cache = ac.Cache.create(
        "cache", ac.Schema({NAME: ac.Tensor("float32", (1024,))}), "16MB", segment_rows=64
    )
"""
READER, ZARR, DATASET, SIMULATOR = code("docs/how-to/samplers.md")


def test_each_of_the_four_samplers_takes_fewer_than_ten_lines():
    for block in code("docs/how-to/samplers.md"):
        assert len([line for line in block.splitlines() if line and "import" not in line]) < 10


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize(("block", "name"), [(READER, "x"), (SIMULATOR, "states")])
def test_a_sampler_has_many_reads_at_a_time_from_a_store_that_takes_its_time(tmp_path, torch, block, name):
    out = run(
        tmp_path, textwrap.dedent(STORE.replace("NAME", repr(name))), block,
        then="""
        pool.wait(rows=120, timeout=120)
        pool.stop()
        server.shutdown()
        with cache.snapshot() as snapshot:
            x = snapshot.gather(range(120))[NAME]
        print(bool((x == x[:, :1]).all()), len({*x[:, 0].tolist()}) > 72, most > 4)
        """.replace("NAME", repr(name)),
    )  # fmt: skip
    assert out.split() == ["True"] * 3


@pytest.mark.slow
def test_a_slow_dataset_is_asked_for_many_items_at_a_time(tmp_path, torch):
    out = run(
        tmp_path, textwrap.dedent(STORE.replace("NAME", "'x'")),
        DATASET.replace("...", 'seen.extend(batch["x"][:, 0].tolist())'),
        then="server.shutdown()\nprint(len(seen), len({*seen}), most > 4)",
    )  # fmt: skip
    assert out.split() == ["150", "150", "True"]


@pytest.mark.slow
def test_windows_of_zarr_come_from_a_store_that_takes_its_time(tmp_path, torch):
    zarr = pytest.importorskip("zarr", "3.0")
    pytest.importorskip("pyarrow._s3fs", reason="this pyarrow has no S3")
    cells = np.arange(3000 * 8 * 16, dtype=np.float32).reshape(3000, 8, 16)
    zarr.create_group(tmp_path / "store" / "bucket" / "era5.zarr").create_array(
        "t2m", data=cells, chunks=(126, 8, 16), dimension_names=["time", "lat", "lon"]
    )
    with serve(tmp_path / "store", latency_seconds=0.02) as store:
        out = run(
            tmp_path, ZARR.replace("s3://bucket/era5.zarr", store.uri("bucket/era5.zarr")),
            then="""
            pool.wait(rows=500, timeout=120)
            pool.stop()
            with cache.snapshot() as snapshot:
                x = snapshot.gather(range(500))["data"]
            print(x.shape == (500, 6, 8, 8), bool((np.diff(x) == 1).all()), x.max() < 2016 * 8 * 16)
            """,
        )  # fmt: skip
    assert out.split() == ["True"] * 3
