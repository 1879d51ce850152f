"""Values as small pictures: what is drawn, and that nothing ever raises."""

from __future__ import annotations

import base64
import datetime as dt
import io
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from markup import seen

pytest.importorskip("PIL", reason="the extra 'explore' is not installed")
pytest.importorskip("matplotlib", reason="the extra 'explore' is not installed")
import matplotlib as mpl
from PIL import Image

import arrowcache as ac
from arrowcache.arrow.dtype import bits_of
from arrowcache.arrow.schema import DTYPES
from arrowcache.errors import SchemaError
from arrowcache.explore.pictures import envelope, line, picture, slice_html

NUMPY_DTYPES = [name for name in DTYPES if not bits_of(name)]


def drawn(value, kind=None, size=96):
    return picture(value, kind, size).drawing


def pixels(value, kind=None, size=96):
    """What is drawn as an array: (h, w) or (h, w, 3 or 4)."""
    return np.asarray(drawn(value, kind, size).image)


VIRIDIS = mpl.colormaps["viridis"](np.arange(256), bytes=True).astype(int)
NAN, GAP = 256, 257


def colors(value, kind=None, size=96):
    """Which of viridis' 256 colors each pixel of a map has, or NAN, or GAP."""
    drawing = drawn(value, kind, size)
    assert drawing.is_map
    table = np.concatenate([VIRIDIS, [[150, 150, 150, 255], [0, 0, 0, 0]]])
    off = np.abs(np.asarray(drawing.image, int)[:, :, None] - table).sum(axis=3)
    assert not off.min(axis=2).any()
    return off.argmin(axis=2)


def ink(value, kind=None, size=96):
    """How dark each pixel of a line is, 0 to 255, at twice the size."""
    return pixels(value, kind, size)[..., 3]


def shown_image(value, kind=None, size=96):
    """The pixels of the PNG file within the HTML, (h, w, 4)."""
    return image_in(picture(value, kind, size)._repr_html_())


def image_in(html):
    (source,) = seen(html).values("src")
    data = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))


def words(value, kind=None):
    drawing = drawn(value, kind)
    assert isinstance(drawing, str)
    return drawing


@pytest.mark.slow
@given(
    st.sampled_from(NUMPY_DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=9))
    ),
    st.integers(8, 64),
)
def test_any_numbers_of_any_shape_make_a_picture(array, size):
    made = picture(array, size=size)
    shown = seen(made._repr_html_())
    assert len(shown.tags) >= 1
    png = made._repr_png_()
    assert (png is None) == isinstance(made.drawing, str)
    assert png is None or Image.open(io.BytesIO(png)).size >= (1, 1)
    assert "\n" not in repr(made)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize(
    "shape", [(0,), (1,), (300,), (64, 64), (3, 40, 50), (40, 50, 3), (9, 10, 11), (2, 3, 9, 10, 11)]
)
def test_every_dtype_is_drawn_in_every_shape(dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    if array.size > 1:
        assert not isinstance(drawn(array), str)
    assert dtype in picture(array).summary


# lines


def test_a_short_signal_is_a_line_through_its_values():
    dark = ink(np.array([0.0, 1.0, 3.0, 4.0]))
    assert dark.shape == (58, 192)
    rows = [int(dark[:, column].argmax()) for column in (2, 65, 127, 189)]
    assert rows == pytest.approx([55, 42, 15, 2], abs=2)
    assert dark.max(axis=0)[2:190].min() > 100, "all the way"
    assert seen(picture(np.arange(4.0), ac.Tensor("float64", (4,)))._repr_html_()).tags == ["img"]


@pytest.mark.slow
@given(st.integers(800, 5000), st.integers(0, 2**32), st.booleans())
def test_a_long_signal_keeps_every_peak(length, seed, has_infinite):
    signal = np.random.default_rng(seed).normal(size=length)
    low, high = envelope(np.where((np.arange(length) == 7) & has_infinite, np.nan, signal), 100)
    assert len(low) == 100
    if has_infinite:
        signal[7] = signal[6]  # another of its pixel column, if that has several
    edges = [*(np.arange(100) * length // 100), length]
    for column, (start, stop) in enumerate(itertools.pairwise(edges)):
        part = signal[start:stop]
        assert (low[column], high[column]) == (part.min(), part.max())


def test_a_peak_of_one_value_in_many_is_seen():
    signal = np.zeros(100_000)
    signal[50_000] = 1
    dark = ink(signal, size=100)
    assert dark[:10].any(axis=0).nonzero()[0] == pytest.approx(100, abs=5)
    assert dark[-4:].any(axis=0)[3:-3].all()


@pytest.mark.parametrize("length", [10, 1000])
@pytest.mark.parametrize("nothing", [np.nan, np.inf, -np.inf])
def test_what_is_no_finite_number_is_a_gap(length, nothing):
    signal = np.arange(float(length))
    signal[: length // 2] = nothing
    dark = ink(signal, size=50)
    there = dark.any(axis=0).nonzero()[0]
    assert (there[0], there[-1]) == pytest.approx((50, 98), abs=6)
    assert dark[:6].any()
    assert dark[-6:].any()
    assert (
        picture(signal).summary
        == f"float64 ({length},), {length // 2} to {length - 1}, {length // 2} not finite"
    )


def test_a_number_alone_between_gaps_is_a_dot():
    dark = ink(np.array([np.nan, 1.0, np.nan, 2.0]))
    there = dark.any(axis=0).nonzero()[0]
    assert set(there.tolist()) <= {*range(60, 70), *range(184, 192)}
    assert len(there) >= 4


def same_line(value, signal, kind=None):
    """Whether a value is drawn as that signal, from 0 to 1."""
    signal = np.asarray(signal, float)
    return np.array_equal(ink(value, kind), np.asarray(line(signal, signal, 96).image)[..., 3])


def test_complex_numbers_are_magnitudes_and_bools_are_steps():
    assert same_line(np.array([3 + 4j, 0, 10]), [0.5, 0.0, 1.0])
    assert same_line(np.array([True, False]), [1.0, 0.0])
    assert not same_line(np.array([True, False]), [0.0, 1.0])


def test_bfloat16_bits_are_numbers():
    bits = (np.array([1.0, -2.0, 0.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert same_line(bits, [1.0, 0.0, 2 / 3], ac.Tensor("bfloat16", (3,)))
    assert picture(bits, ac.Ragged("bfloat16")).summary == "bfloat16 (3,), -2 to 1"
    assert words(bits[0], ac.Tensor("bfloat16")) == "1"


def test_moments_in_a_row_are_a_line():
    moments = np.array(["2024-01-01", "NaT", "2024-01-03"], "datetime64[us]")
    assert same_line(moments, [0.0, np.nan, 1.0])


def test_integers_beyond_a_floats_digits_are_named_exactly():
    assert "0 to 18446744073709551615" in picture(np.array([2**64 - 1, 0], np.uint64)).summary


# maps


def test_a_map_goes_from_the_first_color_to_the_last():
    plane = np.linspace(0, 1, 64 * 64).reshape(64, 64)
    found = colors(plane)
    assert found.shape == (64, 64)
    assert (found[0, 0], found[-1, -1]) == (0, 255)
    image = shown_image(plane)
    assert image[0, 0].tolist() == [68, 1, 84, 255]
    assert image[-1, -1].tolist() == [253, 231, 36, 255]
    assert np.array_equal(image, VIRIDIS[found])


def test_a_few_outliers_do_not_take_the_colors_from_the_rest():
    plane = np.arange(100.0 * 100).reshape(100, 100)
    plane[0, 0] = 1e9
    assert len(np.unique(colors(plane, size=100))) > 200


def test_few_numbers_among_many_that_are_the_same_are_seen():
    plane = np.zeros((64, 64))
    plane[30, 30] = 1
    values = colors(plane)
    assert (values[30, 30], values.sum()) == (255, 255)


@pytest.mark.parametrize("nothing", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [20, 500])
def test_what_is_no_finite_number_is_grey(nothing, side):
    plane = np.arange(float(side * side)).reshape(side, side)
    plane[: side // 2] = nothing
    values = colors(plane, size=50)
    assert (values[: len(values) // 2 - 1] == NAN).all()
    assert (values[len(values) // 2 + 1 :] < NAN).all()


def test_a_large_map_is_averaged():
    plane = np.kron(np.array([[0.0, 1.0], [2.0, 3.0]]), np.ones((200, 200)))
    plane += np.resize([-0.4, 0.4], plane.shape)
    values = colors(plane, size=40)
    assert values.shape == (40, 40)
    assert [int(values[y, x]) for y in (5, 35) for x in (5, 35)] == pytest.approx([0, 85, 170, 255], abs=1)


def test_one_number_that_is_none_does_not_take_its_neighbours_along():
    plane = np.arange(10_000.0).reshape(100, 100)
    plane[50, 50] = np.nan
    assert (colors(plane, size=25) < NAN).all()


def test_rows_of_a_ragged_column_of_items_are_a_map():
    assert colors(np.arange(12.0).reshape(3, 4), ac.Ragged("float64", (4,))).shape == (3, 4)


@pytest.mark.parametrize(
    ("shape", "box"), [((2, 4000), (96, 24)), ((4000, 2), (24, 96)), ((10, 20), (96, 48))]
)
def test_a_map_has_its_arrays_shape_unless_it_were_too_flat_to_be_seen(shape, box):
    assert drawn(np.arange(float(np.prod(shape))).reshape(shape)).box(96) == box


@pytest.mark.parametrize("scale", [1e308, 1e-308])
def test_numbers_at_the_ends_of_float64_are_drawn(scale):
    plane = np.resize([-scale, 0, scale], (300, 300))
    with np.errstate(all="raise"):
        assert len(np.unique(colors(plane, size=300))) == 3
        assert same_line(plane.ravel()[:30], np.resize([0, 0.5, 1], 30))
        assert ink(plane.ravel()[:300], size=30)[3:-3, 3:-3].all()
        assert not isinstance(drawn(plane, size=30), str)


# images


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("axis", [0, 2])
def test_images_of_bytes_are_shown_as_they_are_whichever_axis_the_channels_have(channels, axis):
    image = np.random.default_rng(0).integers(0, 256, (20, 30, channels), np.uint8)
    assert not drawn(np.moveaxis(image, 2, axis)).is_map
    found = pixels(np.moveaxis(image, 2, axis))
    assert np.array_equal(found, image[..., 0] if channels == 1 else image)
    rgba = shown_image(np.moveaxis(image, 2, axis))
    color = np.broadcast_to(image[..., :3], (20, 30, 3))
    assert np.array_equal(rgba[..., :3][rgba[..., 3] > 0], color[rgba[..., 3] > 0])


@pytest.mark.parametrize(
    ("shape", "size"),
    [((3, 20, 30), (20, 30)), ((20, 30, 3), (20, 30)), ((3, 30, 4), (30, 4)), ((4, 30, 3), (4, 30)),
     ((3, 30, 3), (30, 3)), ((1, 20, 3), (20, 3))],
)  # fmt: skip
def test_which_axis_holds_the_channels_follows_from_the_rule(shape, size):
    assert pixels(np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)).shape[:2] == size


def test_of_a_ragged_column_the_last_axis_may_be_channels_and_the_first_never():
    array = np.arange(3 * 20 * 30.0).reshape(3, 20, 30)
    assert not drawn(array).is_map
    assert drawn(array, ac.Ragged("float64", (20, 30))).is_map
    assert not drawn(array.reshape(20, 30, 3), ac.Ragged("float64", (30, 3))).is_map


def test_floats_from_0_to_1_are_shown_as_they_are_and_others_are_scaled_together():
    image = np.zeros((10, 10, 3))
    image[..., 0], image[0, 0, 1] = 0.5, 0.25
    assert pixels(image)[0, 0].tolist() == [128, 64, 0]
    wide = np.stack([np.full((10, 10), -100.0), np.full((10, 10), 0.0), np.full((10, 10), 100.0)])
    assert pixels(wide)[0, 0].tolist() == [0, 128, 255]
    rgba = np.concatenate([wide, np.full((1, 10, 10), 0.25)])
    assert pixels(rgba)[0, 0].tolist() == [0, 128, 255, 64]
    wide[0, 0, 0] = np.nan
    assert pixels(wide)[0, 0, 0] == 0


def test_a_large_image_is_made_small():
    image = np.zeros((1000, 600, 3), np.uint8)
    image[:, 300:] = 200
    values = pixels(image, size=100)
    assert values.shape == (100, 60, 3)
    assert (values[50, 10].tolist(), values[50, 50].tolist()) == ([0] * 3, [200] * 3)


# volumes, and more


def test_a_volume_shows_its_middle_slices_side_by_side_in_one_scale():
    volume = np.zeros((20, 30, 40))
    volume[10], volume[0] = 1, 2  # the first is in the slices across the other two axes only
    found = colors(volume, size=60)
    assert (found == GAP).any()
    tile = 40
    first, rest = found[:, :tile], found[:, tile + 2 :]
    first = first[(first != GAP).any(axis=1)]
    assert np.unique(first).tolist() == [128]
    assert {0, 255} <= set(np.unique(rest).tolist())
    assert drawn(volume, size=60).box(60)[0] == 120


def test_a_slice_of_a_volume_is_in_colors_of_all_and_grey_where_no_number_is():
    volume = np.arange(5 * 8 * 9.0).reshape(5, 8, 9)
    volume[1, 0] = np.nan
    first, second, last = (image_in(slice_html(volume, at)) for at in (0, 1, 4))
    assert (second[0] == [150, 150, 150, 255]).all()
    assert first[0, 0].tolist() == VIRIDIS[0].tolist()
    assert last[-1, -1].tolist() == VIRIDIS[255].tolist()
    assert (second[1:, :, :3] != [150] * 3).any(axis=2).all()


def test_of_more_axes_the_middle_of_the_first_ones_is_shown():
    array = np.zeros((4, 5, 3, 10, 12), np.uint8)
    array[2, 2] = 77
    made = picture(array)
    assert (np.asarray(made.drawing.image) == 77).all()
    assert made.summary == "uint8 (4, 5, 3, 10, 12) at (2, 2), 77 to 77"


# words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((0, 4)), "empty float64 (0, 4)"),
        (np.full((3, 5), np.nan), "no finite number"),
        (np.full(100, -np.inf), "no finite number"),
        (np.full((3, 5), 2.5), "constant 2.5"),
        (np.array([2.5, np.nan, np.inf]), "constant 2.5, 2 not finite"),
        (np.array([7]), "7"),
        (np.zeros(5, bool), "constant False"),
        (3, "3"),
        (True, "True"),
        (np.float16(0.1), "0.0999756"),
        (1e-30, "1e-30"),
        (np.nan, "nan"),
        (1 - 2j, "1-2j"),
        (dt.datetime(2024, 2, 29, 12, 30), "2024-02-29 12:30:00"),  # noqa: DTZ001  # naive is UTC
        (np.datetime64("2024-02-29T12:30:15.123456"), "2024-02-29 12:30:15.123456"),
        (np.datetime64("NaT"), "NaT"),
        ("short", "short"),
        ("a\nb", r"a\nb"),
        ("", ""),
        (b"", "0 B of bytes"),
        (b"x" * 3000, "2.9 KiB of bytes"),
    ],
)  # fmt: skip
def test_where_nothing_can_be_seen_words_say_so(value, text):
    assert words(value) == text
    assert text in seen(picture(value)._repr_html_()).text
    assert picture(value)._repr_png_() is None


def test_a_long_text_is_shortened_and_no_markup():
    long = "<b>&" * 100
    assert words(long) == long[:59] + "…"
    assert seen(picture(long)._repr_html_()).tags == ["span"]
    assert picture(long).summary == "text of 400 characters"


def file(image, name):
    buffer = io.BytesIO()
    image.save(buffer, name)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["png", "jpeg"])
@pytest.mark.parametrize("mode", ["L", "RGB", "1", "CMYK", "P", "RGBA", "LA"])
def test_image_files_are_shown(name, mode):
    if (name, mode) in {("png", "CMYK"), ("jpeg", "P"), ("jpeg", "RGBA"), ("jpeg", "LA")}:
        mode = "RGB"
    data = file(Image.new("RGB", (300, 200), (255, 255, 255)).convert(mode), name)
    made = picture(bytearray(data), ac.Binary(), 60)
    assert made.drawing.image.size == (60, 40)
    assert np.asarray(made.drawing.image).min() > 250
    assert made.summary.startswith(f"{name.upper()} of ")
    assert made.summary.endswith(", 300 x 200")


def test_a_png_of_16_bits_is_scaled():
    ramp = np.linspace(1000, 3000, 50 * 50).reshape(50, 50).astype(np.uint16)
    values = pixels(file(Image.fromarray(ramp), "png"))
    assert (values[0, 0], values[-1, -1]) == (0, 255)


@pytest.mark.parametrize("name", ["png", "jpeg"])
def test_a_damaged_image_file_says_so(name):
    data = file(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)), name)
    for stop in range(64, len(data) - 20, len(data) // 40):  # behind what tells that it is one
        assert "damaged" in words(data[:stop])


def test_an_image_file_that_claims_to_be_enormous_is_not_decoded():
    data = bytearray(file(Image.new("L", (8, 8)), "png"))
    data[16:24] = (60_000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    assert "too large to be drawn" in words(bytes(data))
    data[16:24] = (8500).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    assert "8500 x 8500: too large to be drawn" in words(bytes(data))


def test_torch_tensors_are_drawn_too():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.arange(6, dtype=torch.bfloat16, requires_grad=True)
    assert picture(tensor).summary == "bfloat16 (6,), 0 to 5"


@pytest.mark.parametrize("value", [object(), None, [object()], np.array(["a", "b"])])
def test_what_no_column_can_hold_is_refused(value):
    with pytest.raises(SchemaError):
        picture(value)


@pytest.mark.parametrize("size", [0, 7, 5000, -1])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match="size"):
        picture(3, size=size)


def test_a_picture_keeps_no_value():
    array = np.zeros((64, 64), np.uint8)
    made = picture(array[None])
    before = made._repr_html_()
    array[:] = 99
    assert made._repr_html_() == before
