"""What the recipe images makes of a path: classes with counts, sizes, and a sheet of pictures as the
network sees them.
"""

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import surefoot as sf
from surefoot.data.scan import printable
from surefoot.errors import DataError, first_line
from surefoot.recipes.data_look import DataPreview, evenly
from surefoot.recipes.images.config import Config, Data
from surefoot.recipes.images.recipe import augmentation_of, in_words
from surefoot.recipes.readers.images.folder import first_names, readable_files
from surefoot.seeding import fold, seed_generators, stream_key, untouched

# of the sheet, if the pictures differ
_SIZE = 64
_CHANNELS = 3
_ROWS = 16  # classes on the sheet
_SIDE = 96  # pixels of a picture on it
_GAP = 2  # pixels between pictures
_SIZES_SHOWN = 4
_FILES_DECODED = 2_000  # of a part
_FEW = 5  # pictures of a class
_UNEQUAL = 10  # times as many pictures of one class as of another


def look(config: Config, *, count: int) -> DataPreview:
    """Read the pictures as a run does. If they differ in size or channels, the samples have the
    size that the error names.
    """
    odd = list[str]()
    try:
        datasets = _read(config, config.data)
    except DataError as problem:
        fitted = replace(
            config.data,
            size=config.data.size or _SIZE,
            channels=config.data.channels or _CHANNELS,
        )
        if fitted == config.data:
            raise
        datasets = _read(config, fitted)
        odd.append(f"training refuses them: {first_line(problem)}")
        odd.append(f"shown with --data.size {fitted.size} --data.channels {fitted.channels}")
    parts = {"training": datasets.train, "validation": datasets.val, "test": datasets.test}
    counts = {name: _counts(part) for name, part in parts.items() if part is not None}
    facts = []
    for index, name in enumerate(datasets.classes):
        numbers = [f"{counted[index]:,} for {part}" for part, counted in counts.items()]
        facts.append(f"class {index}: {printable(name)}: {', '.join(numbers)}")
    facts += _sizes(datasets.train)
    odd += _odd(datasets.classes, counts["training"])
    odd += _damaged(datasets)
    return DataPreview(
        in_words(datasets, config),
        facts=facts,
        odd=odd,
        sheet=_sheet(datasets, count=count, seed=config.seed),
    )


def _read(config: Config, data: Data) -> Any:
    return sf.data.load_images(**vars(data), augmentation=augmentation_of(config), seed=config.seed)


def _labels(part: Any) -> list[int]:
    labels = part.labels if isinstance(part, sf.data.ImageArrays) else part.files.labels
    return [int(label) for label in labels]


def _counts(part: Any) -> Counter[int]:
    return Counter(_labels(part))


def _sizes(part: Any) -> list[str]:
    """Return one line about the sizes of up to 2,000 picture files."""
    if isinstance(part, sf.data.ImageArrays):
        height, width = part.images.shape[1:3]
        return [f"sizes: all {width} x {height} pixels"]
    from PIL import Image

    from surefoot.recipes.readers.images.picture import shown_size

    sizes = Counter[tuple[int, int]]()
    for index in evenly(len(part.files.paths), _FILES_DECODED):
        try:
            with Image.open(part.files.paths[index]) as picture:
                sizes[shown_size(picture)] += 1
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            continue  # the sheet, or training, names the damaged file
    shown = []
    for (width, height), number in sizes.most_common(_SIZES_SHOWN):
        shown.append(f"{width} x {height} ({number:,})")
    more = ""
    if len(sizes) > _SIZES_SHOWN:
        more = f" and {len(sizes) - _SIZES_SHOWN:,} other sizes"
    return [f"sizes: {', '.join(shown)}{more} pixels"]


def _odd(classes: Sequence[str], counted: Counter[int]) -> list[str]:
    odd = []
    few = [name for index, name in enumerate(classes) if counted[index] < _FEW]
    if few:
        odd.append(f"classes with fewer than {_FEW} pictures: {', '.join(map(printable, few))}")
    most = max(counted.values())
    fewest = min(counted.values())
    if most > _UNEQUAL * fewest:
        odd.append(f"one class has {most:,} pictures for training, another {fewest:,}")
    return odd


def _damaged(datasets: Any) -> list[str]:
    """Return the damaged files: those that are left out, and those that would stop training, of up
    to 2,000 of each part.
    """
    odd = []
    if datasets.left_out:
        odd.append(f"damaged, and left out: {first_names(_names(datasets.left_out))}")
    damaged = []
    for part in (datasets.train, datasets.val, datasets.test):
        if isinstance(part, sf.data.ImageFiles):
            files = part.files.select(np.array([*evenly(len(part), _FILES_DECODED)]))
            _, unreadable = readable_files(files)
            damaged += unreadable
    if damaged:
        odd.append(f"damaged, so that training stops: {first_names(_names(damaged))}")
        odd.append("to leave them out: --data.on-corrupt skip")
    return odd


def _names(files: Sequence[Path]) -> list[str]:
    return [printable(file.name) for file in files]


def _sheet(datasets: Any, *, count: int, seed: int) -> bytes:
    """Return a PNG file with a row of pictures for each class, augmented as in the first epoch of
    training.
    """
    from PIL import Image

    from surefoot.tracking.task_panels import png_file

    labels = _labels(datasets.train)
    rows = []
    for index in range(min(len(datasets.classes), _ROWS)):
        samples = [sample for sample, label in enumerate(labels) if label == index]
        rows.append([samples[place] for place in evenly(len(samples), count)])
    across = max(len(row) for row in rows)
    cell = _SIDE + _GAP
    sheet = Image.new("RGB", (across * cell + _GAP, len(rows) * cell + _GAP), "white")
    for down, row in enumerate(rows):
        for right, sample in enumerate(row):
            try:
                image_CHW = _in_first_epoch(datasets.train, sample, seed=seed)
            except DataError:
                continue  # a damaged file, which `_damaged` names
            png = png_file(image_CHW, mean=datasets.train.mean, std=datasets.train.std)
            with Image.open(io.BytesIO(png)) as picture:
                shown = picture.convert("RGB").resize((_SIDE, _SIDE))
            sheet.paste(shown, (right * cell + _GAP, down * cell + _GAP))
    file = io.BytesIO()
    sheet.save(file, "png")
    return file.getvalue()


def _in_first_epoch(dataset: Any, sample: int, *, seed: int) -> Any:
    with untouched():
        seed_generators(fold(stream_key(seed, "augment"), 0, sample))
        return dataset[sample][0]
