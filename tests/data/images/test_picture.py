"""A picture is trained, evaluated and predicted as viewers show it: turned, on a background, with
the values of more than 8 bits scaled. The references are Pillow's `ImageOps.exif_transpose`, and
formulas in NumPy; 4 seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import surefoot as sf
from refused import refused, refused_change
from surefoot.cli.main import main
from surefoot.config.tree import layered
from surefoot.recipes import images
from surefoot.recipes.readers.images.dataset import read_image
from surefoot.recipes.readers.images.folder import _header
from surefoot.recipes.readers.images.picture import Fitting, measure_value_range, open_picture

ORIENTATION = 0x0112


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def save_turned(path: Path, orientation: Any, *, size: tuple[int, int] = (9, 6)) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    Image.fromarray(random_pixels(size[1], size[0], 3)).save(path, exif=exif)


def cropped(path: Path, *, size: int = 6, channels: int = 3, **settings: Any) -> np.ndarray:
    return Fitting(size, channels, **settings).center_crop(open_picture(path))


def folder_of(place: Path, save: Any, *, count: int = 6) -> Path:
    """Two classes; `save(path without suffix, number)` writes a picture."""
    for label in ("a", "b"):
        (place / label).mkdir(parents=True)
        for number in range(count):
            save(place / label / str(number), number)
    return place


def pixels_of(dataset: Any, sample: int) -> np.ndarray:
    """The 8 bits of a sample, without normalization."""
    image = dataset[sample][0].numpy()
    mean, std = (np.reshape(part, (-1, 1, 1)) for part in (dataset.mean, dataset.std))
    return np.rint((image * std + mean) * 255).transpose(1, 2, 0).astype(np.uint8)


# --- orientation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_pillow_turns_it(
    orientation: int, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"picture.{suffix}"
    save_turned(path, orientation)
    shown = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    expected = Fitting(6, 3).center_crop(Image.fromarray(np.asarray(shown)))
    assert np.array_equal(cropped(path), expected)
    assert _header(path, as_shown=True) == (*shown.size, 3)


@pytest.mark.parametrize("orientation", [0, 9, 60_000])
def test_an_orientation_that_is_none_turns_nothing(orientation: int, tmp_path: Path) -> None:
    save_turned(tmp_path / "picture.png", orientation, size=(6, 6))
    assert np.array_equal(cropped(tmp_path / "picture.png"), random_pixels(6, 6, 3))


@pytest.mark.parametrize("exif", [b"Exif\0\0what", b"Exif\0\0II*\0\xff\xff\xff\xff", b"\0"])
def test_damaged_exif_data_turn_nothing(exif: bytes, tmp_path: Path) -> None:
    path = tmp_path / "picture.webp"
    Image.fromarray(random_pixels(6, 6, 3)).save(path, exif=exif, lossless=True)
    assert np.array_equal(cropped(path), random_pixels(6, 6, 3))


def test_photos_are_turned_in_every_split_and_in_random_crops(tmp_path: Path) -> None:
    def save(path: Path, _: int) -> None:
        half = np.zeros((8, 8), dtype=np.uint8)
        half[:4] = 255  # the upper half is white as stored, the right one as shown
        exif = Image.Exif()
        exif[ORIENTATION] = 6
        Image.fromarray(half).save(path.with_suffix(".jpg"), exif=exif, quality=100)

    for part in ("train", "val", "test"):
        folder_of(tmp_path / part, save, count=2)
    sets = sf.data.load_images(tmp_path)
    assert sets.test is not None
    for dataset in (sets.train, sets.val, sets.test):
        image = pixels_of(dataset, 0)
        assert image[:, 5:].min() > 200
        assert image[:, :3].max() < 50
    crop = Fitting(8, 1, "resized").random_crop(
        open_picture(tmp_path / "train" / "a" / "0.jpg"), lambda draw: 1.0 if draw == 0 else 0.5
    )
    assert crop[:, -1].min() > 200
    assert crop[:, 0].max() < 50


# --- transparency ---------------------------------------------------------------------------------


def translucent(mode: str) -> Image.Image:
    """Red or gray, of which the left half is transparent and the right one opaque."""
    if mode == "P":
        picture = Image.new("P", (6, 6), 1)
        picture.putpalette([0, 0, 0, 200, 0, 0])
        picture.paste(0, (0, 0, 3, 6))
        picture.info["transparency"] = 0
        return picture
    if mode == "L":
        picture = Image.new("L", (6, 6), 90)
        picture.paste(7, (0, 0, 3, 6))
        picture.info["transparency"] = 7
        return picture
    if mode == "RGB":
        picture = Image.new("RGB", (6, 6), (200, 0, 0))
        picture.paste((1, 2, 3), (0, 0, 3, 6))
        picture.info["transparency"] = (1, 2, 3)
        return picture
    color = (200, 0, 0) if mode == "RGBA" else (90,)
    picture = Image.new(mode, (6, 6), (*color, 255))
    picture.paste((*color, 0), (0, 0, 3, 6))
    return picture


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
@pytest.mark.parametrize(
    ("background", "color"),
    [("white", (255, 255, 255)), ("black", (0, 0, 0)), ("#ff8000", (255, 128, 0))],
)
def test_transparent_parts_show_the_background(
    mode: str, background: str, color: tuple[int, int, int], tmp_path: Path
) -> None:
    picture = translucent(mode)
    path = tmp_path / "picture.png"
    picture.save(path, transparency=picture.info.get("transparency"))
    image = cropped(path, background=background)
    assert (image[:, :3] == color).all()
    opaque = (90, 90, 90) if mode in ("LA", "L") else (200, 0, 0)
    assert (image[:, 3:] == opaque).all()


def test_half_transparent_pixels_are_mixed(tmp_path: Path) -> None:
    Image.new("RGBA", (6, 6), (200, 100, 0, 102)).save(tmp_path / "picture.png")  # 40 percent
    expected = np.array([200, 100, 0]) * 0.4 + 255 * 0.6
    assert abs(cropped(tmp_path / "picture.png").astype(float) - expected).max() <= 1


@pytest.mark.parametrize("background", ["blak", "#12", "", "1, 2"])
def test_a_background_that_is_no_color_is_refused(background: str, tmp_path: Path) -> None:
    with refused("background-unknown", setting="data.background", value=background):
        sf.data.load_images(tmp_path, background=background)


# --- more than 8 bits -----------------------------------------------------------------------------


def saver(dtype: str, values: np.ndarray) -> Any:
    def save(path: Path, number: int) -> None:
        Image.fromarray(np.roll(values, number).astype(dtype)).save(path.with_suffix(".tif"))

    return save


RAMP = np.linspace(0, 1, 64).reshape(8, 8)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "expected"),
    [
        ("uint16", 0, 4000, (0, 4095)),  # 12 bits in 16
        ("uint16", 0, 1000, (0, 1023)),
        ("uint16", 3, 16_383, (0, 16_383)),
        ("uint16", 0, 200, (0, 255)),  # 8 bits in 16
        ("uint16", 0, 60_000, (0, 65_535)),
        ("int32", 0, 4000, (0, 4095)),
        ("int32", -1000, 3000, (-1000, 3000)),
        ("int32", 0, 1_000_000, (0, 1_000_000)),
        ("float32", 0.25, 0.75, (0.25, 0.75)),
        ("float32", -2.5, 1e6, (-2.5, 1e6)),
    ],
)
def test_values_of_more_than_8_bits_are_scaled_by_the_range_of_the_data(
    dtype: str, low: float, high: float, expected: tuple[float, float], tmp_path: Path
) -> None:
    values = low + RAMP * (high - low)
    sets = sf.data.load_images(folder_of(tmp_path, saver(dtype, values)))
    assert sets.fitting.value_range == expected
    assert sets.fitting.channels == 1
    black, white = expected
    number = int(sets.train.files.paths[0].stem)  # type: ignore[union-attr]
    stored = np.roll(values, number).astype(dtype).astype(np.float64)
    scaled = np.rint((stored - black) / (white - black) * 255)
    assert abs(pixels_of(sets.train, 0)[..., 0] - scaled).max() <= 1


def test_the_range_is_that_of_all_pictures_and_not_of_each(tmp_path: Path) -> None:
    """A dark picture stays darker than a light one."""

    def save(path: Path, number: int) -> None:
        level = 100.0 if path.parent.name == "a" else 300.0
        Image.fromarray(np.full((8, 8), level + number, np.float32)).save(path.with_suffix(".tif"))

    sets = sf.data.load_images(folder_of(tmp_path, save))
    assert sets.fitting.value_range == (100, 305)
    dark = [
        int(pixels_of(sets.train, sample).mean())
        for sample in range(len(sets.train))
        if sets.train[sample][1] == 0
    ]
    assert max(dark) < 10


def test_a_big_endian_picture_is_gray_and_scaled(tmp_path: Path) -> None:
    values = (RAMP * 4000).astype(">u2")

    def save(path: Path, _: int) -> None:
        header = (
            b"MM\0*\0\0\0\x08\0\x08"
            b"\1\0\0\3\0\0\0\1\0\x08\0\0\1\1\0\3\0\0\0\1\0\x08\0\0"
            b"\1\2\0\3\0\0\0\1\0\x10\0\0\1\3\0\3\0\0\0\1\0\1\0\0\1\6\0\3\0\0\0\1\0\1\0\0"
            b"\1\x11\0\4\0\0\0\1\0\0\0\x6e\1\x16\0\3\0\0\0\1\0\x08\0\0\1\x17\0\4\0\0\0\1\0\0\0\x80"
            b"\0\0\0\0"
        )
        path.with_suffix(".tif").write_bytes(header + values.tobytes())

    sets = sf.data.load_images(folder_of(tmp_path, save))
    assert open_picture(tmp_path / "a" / "0.tif").mode == "I;16B"
    assert (sets.fitting.channels, sets.fitting.value_range) == (1, (0, 4095))


def test_floats_and_whole_numbers_in_one_data_set_are_refused(tmp_path: Path) -> None:
    def save(path: Path, number: int) -> None:
        saver("float32" if number % 2 else "uint16", RAMP * 9)(path, number)

    with refused("pictures-differ-in-values", sf.DataError):
        sf.data.load_images(folder_of(tmp_path, save))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(wrong: float, tmp_path: Path) -> None:
    values = RAMP.copy()
    values[2, 3] = wrong
    path = folder_of(tmp_path, saver("float32", values), count=1) / "a" / "0.tif"
    with refused("picture-not-finite", sf.DataError, path=str(path)):
        measure_value_range([path])


def test_color_of_12_bits_in_16_is_refused_because_pillow_reads_the_upper_8(tmp_path: Path) -> None:
    def save(path: Path, _: int) -> None:
        write_png_of_16_bits(path.with_suffix(".png"), largest=4095)

    folder_of(tmp_path / "dark", save)
    with refused("picture-of-few-bits", sf.DataError, largest=15):
        sf.data.load_images(tmp_path / "dark")
    folder_of(
        tmp_path / "whole",
        lambda path, _: write_png_of_16_bits(path.with_suffix(".png"), largest=65_535),
    )
    assert sf.data.load_images(tmp_path / "whole").fitting.value_range is None


def write_png_of_16_bits(path: Path, *, largest: int) -> None:
    """Write a color picture, which Pillow cannot."""
    import struct
    import zlib

    values = (np.linspace(0, largest, 8 * 8 * 3)).astype(">u2").reshape(8, 8, 3)
    rows = b"".join(b"\0" + row.tobytes() for row in values)

    def chunk(kind: bytes, data: bytes) -> bytes:
        code = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", code)

    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


MOMENTS: dict[str, Any] = {"size": 8, "channels": 1, "crop": "padded", "mean": (0.0,), "std": (1,)}


@pytest.mark.parametrize(
    ("dtype", "high"), [("uint16", 4095), ("uint16", 16_383), ("float32", 1.0), ("int32", 70_000)]
)
def test_a_picture_whose_range_nobody_measured_is_refused(
    dtype: str, high: float, tmp_path: Path
) -> None:
    saver(dtype, RAMP * high)(tmp_path / "x", 0)
    with refused("picture-range-unknown", sf.DataError, highest=high):
        read_image(tmp_path / "x.tif", **MOMENTS)
    image = read_image(tmp_path / "x.tif", **MOMENTS, value_range=(0, high))
    assert image[0, 0].numpy() == pytest.approx(RAMP, abs=1 / 255)


def test_all_of_16_bits_need_no_range(tmp_path: Path) -> None:
    saver("uint16", RAMP * 65_535)(tmp_path / "x", 0)
    image = read_image(tmp_path / "x.tif", **MOMENTS)
    assert image[0, 0].numpy() == pytest.approx(RAMP, abs=1 / 255)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["LAB", "HSV", "YCbCr", "La", "RGBa", "PA", "RGBX"])
def test_colors_of_every_kind_are_converted(mode: str, channels: int) -> None:
    assert Fitting(8, channels).center_crop(Image.new(mode, (8, 8))).shape == (8, 8, channels)


# --- a run keeps what it measured -----------------------------------------------------------------


FLAGS = [
    *("--length=4 steps", "--batch-size=4", "--model.width=2", "--precision=fp32"),
    *("--report=false", "--tensorboard=false", "--augmentation.randaugment=0"),
]


@pytest.fixture(scope="module")
def sensor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on pictures of 12 bits in 16, turned, on a background of black."""
    place = tmp_path_factory.mktemp("sensor")
    data = folder_of(place / "data", saver("uint16", RAMP * 4000))
    main(
        [
            *("train", "images", f"--data.path={data}", f"--run-dir={place / 'run'}"),
            *("--data.background=black", "--stop-after=2 steps", *FLAGS),
        ]
    )
    return place


def test_a_run_stores_how_its_pictures_were_converted(sensor: Path) -> None:
    stored = json.loads((sensor / "run" / "images.json").read_text())
    assert stored["value_range"] == [0, 4095]
    assert (stored["background"], stored["as_shown"]) == ("black", True)


def test_predict_converts_a_picture_as_the_training_did(
    sensor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 bits, and the same picture with 8 bits, are one picture."""
    values = np.rint(RAMP * 4000 / 4095 * 255)
    Image.fromarray(values.astype(np.uint8)).save(tmp_path / "8.png")
    saver("uint16", RAMP * 4000)(tmp_path / "12", 0)
    capsys.readouterr()
    main(["predict", str(sensor / "run"), str(tmp_path)])
    named = {Path(line["image"]).name: line["classes"] for line in lines_of(capsys)}
    assert named["8.png"] == named["12.tif"]


def test_other_pictures_are_evaluated_with_the_range_of_the_run(
    sensor: Path, tmp_path: Path
) -> None:
    other = folder_of(tmp_path / "other", saver("uint16", RAMP * 900))  # alone: 10 bits
    settings = {"run_dir": str(sensor / "run"), "data.path": str(other), "model.width": 2}
    run = images.build(layered(images.Config, [("test", settings)])[0])
    assert run.parts.evaluator.splits["val"].data.fitting.value_range == (0, 4095)


def test_a_run_resumes_with_its_range(sensor: Path) -> None:
    main(["resume", str(sensor / "run")])
    records = (sensor / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["step"] == 4


def test_another_background_is_another_run(sensor: Path) -> None:
    settings = {"data.background": "white", "model.width": 2, "run_dir": str(sensor / "run")}
    kept = {"data.path": str(sensor / "data"), "batch_size": 4, "augmentation.randaugment": 0}
    kept |= {"length": "4 steps", "precision": "fp32"}
    run = images.build(layered(images.Config, [("test", settings | kept)])[0])
    with refused_change("data.background", "'black'", "'white'"):
        run.train()


def test_the_background_is_no_setting_of_a_run_that_ignores_transparency(tmp_path: Path) -> None:
    folder_of(tmp_path, saver("uint16", RAMP))
    with refused("background-of-older-run", behavior=9):
        sf.data.load_images(tmp_path, background="black", behavior=9)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]
