"""The recipes of docs/how-to: each with the real library, if it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_pages import run

pytestmark = pytest.mark.slow


def library(*names: str) -> None:
    for name in names:
        pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def test_grain_goes_on_where_it_was_also_when_rows_have_left(tmp_path: Path) -> None:
    library("grain")
    then = """
        from pathlib import Path

        class Killed(Exception):
            pass

        def step(batch):
            seen.append(batch["n"].tolist())
            if len(seen) == fails:
                raise Killed

        def seen_until(batch, name):
            global seen, fails
            seen, fails = [], batch
            try:
                train(cache, Path(name), 2)
            except Killed:
                pass
            return seen

        def main():
            global cache
            cache = ac.Cache.create("FOLDER/cache", {"n": ac.Tensor("int64")}, "64MB", segment_rows=1000)
            with cache.writer() as writer:
                writer.extend(n=range(20_000))
            straight = seen_until(None, "straight")
            cut = seen_until(150, "killed")
            again = seen_until(None, "killed")
            seen_until(150, "evicted")
            cache.evict(80_000)
            alive = set(cache.dataset().to_table()["n"].to_pylist())
            rest = seen_until(None, "evicted")
            left = [[n for n in batch if n in alive] for batch in straight[100:313]]
            print(
                sorted(sum(straight[:313], [])) == sorted(sum(straight[313:], [])) == [*range(20_000)],
                straight[:313] != straight[313:],
                cut + again == straight[:150] + straight[100:],
                0 < len(alive) < 20_000,
                rest[: len(left)] == left,
                sorted(sum(rest[len(left) :], [])) == sorted(alive),
            )
            with Rows(cache) as rows:
                two = grain.MapDataset.source(rows)[5:7].batch(2)[0]["n"].tolist()
                print(two == [rows[5]["n"], rows[6]["n"]])
                numbers = grain.MapDataset.range(len(rows)).batch(64).map(rows.gather)
                one_process = grain.MultiprocessingOptions(num_workers=1)
                elsewhere = numbers.to_iter_dataset().mp_prefetch(one_process)
                print(sum(len(batch["n"]) for batch in elsewhere) == len(alive))

        if __name__ == "__main__":  # Grain's processes import the script
            main()
    """.replace("FOLDER", str(tmp_path))
    assert run(tmp_path, "grain.md", then).split() == ["True"] * 8


def test_volumes_of_monai_are_loaded_once_and_augmented_each_time(tmp_path: Path) -> None:
    library("monai", "torch")
    before = """
        import numpy as np
        import torch

        files = []
        for number in range(6):  # five are alike, but for what is random in MONAI
            shape = (40, 40, 20) if number else (50, 30, 24)
            volume = np.random.default_rng(0).random(shape, np.float32)
            np.save(f"image{number}.npy", volume)
            np.save(f"label{number}.npy", (volume > 0.5).astype(np.float32))
            files.append({key: f"{key}{number}.npy" for key in ("image", "label")})
        steps = []

        def step(image, label):
            steps.append((image, label))
    """
    then = """
        def differ(batches):
            return len({batch.sum().item() for batch in batches}) == len(batches)

        once, windows = [each for each, _ in steps[:3]], [each for each, _ in steps[3:]]
        print(train.cached == 6, train.stats().made == 5)
        print({tuple(each.shape) for each in once} == {(2, 1, 16, 16, 8)})
        spacings = [each.affine.diagonal(dim1=-2, dim2=-1).abs().tolist() for each in once]
        print(spacings == [[[1.5, 1.5, 2.0, 1.0]] * 2] * 3)
        torch.manual_seed(0)
        loader = DataLoader(train, batch_size=1, num_workers=2)
        print(differ([batch["image"] for _ in range(2) for batch in loader]))
        print({tuple(each.shape) for each in windows} == {(16, 1, 16, 16, 8)})
        print(len(windows) == 20, differ(windows))
        print(all(((label == 0) | (label == 1)).all().item() for _, label in steps))
    """
    assert run(tmp_path, "monai.md", then, before).split() == ["True"] * 9


def test_a_model_learns_from_latents_that_were_encoded_once(tmp_path: Path) -> None:
    library("torch")
    before = """
        import torch

        class Images:
            asked = []

            def __len__(self):
                return 1000

            def __getitem__(self, number):
                self.asked.append(number)
                if len(self.asked) == dies_at:
                    raise KeyboardInterrupt
                return torch.full((3, 64, 64), number % 256, dtype=torch.uint8), torch.arange(8) + number

        class Model(torch.nn.Module):
            had = []

            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(32, 256)

            def forward(self, mixed, time, text):
                self.had += text[:, 0].half().tolist()
                return self.layer(text.mean(1)).view(mixed.shape)

        images, device, epochs, dies_at = Images(), None, 3, 0
        model = Model()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
    """
    then = """
        words = torch.nn.Embedding(49408, 32)
        epochs = [{*map(tuple, model.had[1000 * at :][:1000])} for at in range(3)]
        print(len(epochs[0]) == 1000, epochs == epochs[:1] * 3, len(model.had) == 3 * 1000 + 3 * 640)
        print(len(Images.asked) >= 1000 and Images.asked[:1000] == [*range(1000)])

        ac.Cache.create("FOLDER/killed", schema, "64MB", segment_rows=100).close()
        Images.asked.clear()
        dies_at = 600
        try:
            encode_all(images, "FOLDER/killed")
        except KeyboardInterrupt:
            print(len(Images.asked) == 600)
        done, dies_at = ac.Cache.open("FOLDER/killed").stats().rows, 0
        Images.asked.clear()
        for _ in range(2):
            encode_all(images, "FOLDER/killed")
        print(0 < done < 600, Images.asked == [*range(done, 1000)])
        tables = [ac.Cache.open(path).dataset().to_table() for path in ("FOLDER/killed", "FOLDER/latents")]
        print(tables[0]["text"] == tables[1]["text"])
    """.replace("FOLDER", str(tmp_path))
    assert run(tmp_path, "latents.md", then, before).split() == ["True"] * 8


def test_frames_of_episodes_are_decoded_once_and_read_at_delta_timestamps(tmp_path: Path) -> None:
    library("av", "torch")
    before = """
        from pathlib import Path

        import av
        import numpy as np

        def write(number, length):
            file = Path(f"episode{number}.mp4")
            with av.open(file, "w") as video:
                stream = video.add_stream("mpeg4", rate=10)
                stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
                stream.bit_rate = 4_000_000
                for at in range(length):
                    pixels = np.full((48, 64, 3), 9 * number + 5 * at, np.uint8)
                    video.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
                video.mux(stream.encode())
            number_and_time = np.stack([np.full(length, number), np.arange(length)], 1).astype(np.float32)
            np.savez(file.with_suffix(".npz"), state=number_and_time, action=number_and_time)
            return file

        files = [write(number, 40 + number) for number in range(4)]
        steps = []

        def step(batch):
            steps.append(batch)
    """
    then = """
        right, seen = [], []
        for batch in steps:
            episode, now = batch["state"][:, 0].numpy().T
            seen += zip(episode, now)
            length = 40 + episode
            for name, deltas in {"image": [-1, 0], "action": range(16)}.items():
                wanted = now[:, None] + np.array(deltas)
                at = wanted.clip(0, length[:, None] - 1)
                right.append((batch[f"{name}_is_pad"].numpy() == (at != wanted)).all())
                if name == "action":
                    right.append((batch["action"].numpy()[..., 1] == at).all())
                    right.append((batch["action"].numpy()[..., 0] == episode[:, None]).all())
                else:
                    levels = batch["image"].numpy().mean((2, 3, 4))
                    right.append(np.allclose(levels, 9 * episode[:, None] + 5 * at, atol=2.4))
        print(all(right), len(right) == 5 * len(steps), len(steps) == 5, len({*seen}) == 160)
        print(decoded.stats().cached == len(windows) == 166, decoded.stats().streamed == 166)
        print(windows[[0, 39]]["image_is_pad"].tolist() == [[True, False], [False, False]])
    """
    assert run(tmp_path, "video.md", then, before).split() == ["True"] * 7


def test_folders_of_yolo_give_letterboxed_images_and_their_boxes(tmp_path: Path) -> None:
    library("PIL.Image", "torch")
    before = """
        import os
        import numpy as np
        from PIL import Image

        folder, epochs, steps, painted = "FOLDER/in", 2, [], 0
        for name in ("images", "labels"):
            os.makedirs(f"{folder}/{name}")
        for number in range(32):
            width, height = (200, 100) if number % 2 else (100, 200)
            pixels = np.zeros((height, width, 3), np.uint8)
            lines = []
            for box in range(number % 4):  # white squares of 20 pixels
                x, y = 10 + 30 * box, 15 + 20 * box
                pixels[y : y + 20, x : x + 20] = 255
                lines.append(f"{number} {(x + 10) / width} {(y + 10) / height} {20 / width} {20 / height}")
            painted += len(lines)
            Image.fromarray(pixels).save(f"{folder}/images/{number:02}.jpg", quality=100)
            if number != 4:  # an image without boxes may have no file
                with open(f"{folder}/labels/{number:02}.txt", "w") as file:
                    file.write("\\n".join(lines))

        def step(batch):
            steps.append(batch)
    """.replace("FOLDER", str(tmp_path))
    then = """
        inside, around, flips = [], [], set()
        for batch in steps:
            for image, name, (x, y, width, height) in zip(batch["batch_idx"], batch["cls"], batch["bboxes"]):
                pixels = batch["img"][image].mean(0)
                left, right = int(640 * (x - width / 2)), int(640 * (x + width / 2))
                top, bottom = int(640 * (y - height / 2)), int(640 * (y + height / 2))
                inside.append(pixels[top + 6 : bottom - 6, left + 6 : right - 6].min().item())
                around.append(pixels[top + 20, left - 12].item())
                flips.add((name.item(), round(x.item(), 4)))
        print(len(inside) == 2 * painted, min(inside) > 0.9, max(around) < 0.5)
        print(len(steps) == 4, {tuple(batch["img"].shape) for batch in steps} == {(16, 3, 640, 640)})
        print(len(flips) > painted, train.stats().made == 31)
    """
    assert run(tmp_path, "yolo.md", then, before).split() == ["True"] * 7
