"""Classification of pictures by a trained model, and the facts about its data that a run saves."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import surefoot as sf
from surefoot.config import user_code
from surefoot.config.paths import local_path, read_regular
from surefoot.config.setting import number
from surefoot.config.tree import wrong_type
from surefoot.errors import Setting
from surefoot.recipes.shared_errors import nothing_to_predict, reading_run_file

FILE = "images.json"  # in the run's directory
EXAMPLE = "example.png"  # likewise: a validation image
_SINCE_BEHAVIOR_10 = ("background", "value_range", "as_shown")
_DIGITS = 4  # decimals of a probability
_SIDE = 16  # lines of a picture drawn as text
_SHADES = " ░▒▓█"


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Options for the classification of pictures, which are converted like the training data."""

    top_k: int = 5
    """Number of likeliest classes to show."""
    device: str = "auto"
    """Device of the model: "cpu", "cuda" or "mps". auto is the accelerator if there is one."""


@dataclass(frozen=True)
class Metadata:
    """The facts that convert a picture to the model's input, and the model's output to class
    names.
    """

    classes: Sequence[str]
    size: int
    channels: int
    crop: str
    mean: Sequence[float]
    std: Sequence[float]
    network: str
    """Name of the network; for a file, its absolute path and function."""
    sha256: str | None
    background: str = "white"
    value_range: tuple[float, float] | None = None
    as_shown: bool = False  # as in runs of 0.1.0, whose file lacks these three

    def to_json(self) -> str:
        fields = dict(vars(self))
        if not self.as_shown:
            for name in _SINCE_BEHAVIOR_10:
                del fields[name]
        return json.dumps(fields, indent=1, ensure_ascii=False) + "\n"

    def misfit(self, classes: Sequence[str], *, size: int, channels: int) -> sf.DataError | None:
        """Return the error for other classes, another size or other channels, with which other data
        cannot be evaluated, or None.
        """
        from surefoot.recipes.readers.images.folder import first_names  # imports NumPy

        if list(classes) != self.classes:
            return sf.DataError(
                "classes-of-other-data",
                problem=f"the classes of this data set are {first_names(classes)}; the run's"
                f" classes are, by index, {first_names(self.classes)}",
                reason="is this the run's data set?",
                remedy=("the classes of arrays are named by", Setting("data.classes")),
                value=list(classes),
                expected=self.classes,
            )
        for name, actual in (("size", size), ("channels", channels)):
            expected = getattr(self, name)
            if actual != expected:
                return sf.DataError(
                    "images-of-other-shape",
                    problem=f"the images of this data set have {name} {actual}, the run's images"
                    f" have {name} {expected}",
                    remedy=("to convert pictures in folders:", Setting(f"data.{name}", expected)),
                    setting=f"data.{name}",
                    value=actual,
                    expected=expected,
                )
        return None

    def model_input(self, picture: Path) -> Any:
        """Return the picture in a file as the model takes it, (1, C, H, W)."""
        return sf.data.read_image(
            picture,
            size=self.size,
            channels=self.channels,
            crop=self.crop,
            mean=tuple(self.mean),
            std=tuple(self.std),
            background=self.background,
            value_range=self.value_range,
            as_shown=self.as_shown,
        )


def read_metadata(run: Path) -> Metadata:
    """Load the saved facts of a run. Raises `CheckpointError` if the file is missing or damaged, or
    names a program inside the run.
    """
    from surefoot.recipes.readers.images.picture import check_background  # imports NumPy

    path = run / FILE
    with reading_run_file(path, content="the names of the run's classes"):
        fields = json.loads(read_regular(path))
        hints = get_type_hints(Metadata)
        if not isinstance(fields, dict) or not _has_types(fields, hints):
            raise ValueError(f"its entries should be {', '.join(hints)}")
        if fields.get("value_range") is not None:
            fields["value_range"] = tuple(fields["value_range"])
        check_background(fields.get("background", "white"))
    program = Path(fields["network"].rpartition(":")[0])
    if program.suffix == ".py":
        user_code.refuse_unresolved(program, file=path, run=run)
    return Metadata(**fields)


def _has_types(fields: Mapping[str, Any], hints: Mapping[str, Any]) -> bool:
    """Return True for the fields of `Metadata`, each with a value of its type."""
    of_0_1_0 = hints.keys() - {*_SINCE_BEHAVIOR_10}
    if fields.keys() not in (hints.keys(), of_0_1_0):
        return False
    return not any(wrong_type(name, value, hints[name]) for name, value in fields.items())


def picture_in_words(classes: Sequence[str]) -> Callable[[Any], str]:
    """Return a function that describes an image by shape and class, and draws it as blocks from
    dark (minimum) to white (maximum).

    >>> import torch
    >>> print(
    ...     picture_in_words(["no", "yes"])(
    ...         (torch.tensor([[[[0.0, 1.0], [0.5, 0.0]]]]), torch.tensor([1]))
    ...     )
    ... )
    1 x 2 x 2, yes
      ██
    ▒▒
    """

    def described(batch: Any) -> str:
        images_BCHW, labels_B = batch
        image_HW = images_BCHW[0].float().mean(dim=0)
        stride = max(1, -(-max(image_HW.shape) // _SIDE))
        small = image_HW[::stride, ::stride]
        finite = small[small.isfinite()]
        low = high = 0.0
        if finite.numel():
            low = float(finite.min())
            high = float(finite.max())
        shape = " x ".join(map(str, images_BCHW.shape[1:]))
        lines = [f"{shape}, {classes[int(labels_B[0])]}"]
        for row in small.tolist():
            shades = "".join(_shade(value, low, high) * 2 for value in row)
            lines.append(shades.rstrip())
        return "\n".join(lines)

    return described


def _shade(value: float, low: float, high: float) -> str:
    if not low <= value <= high:  # NaN or infinity
        return "?"
    if high == low:
        return _SHADES[0]
    level = int((value - low) / (high - low) * len(_SHADES))
    return _SHADES[min(level, len(_SHADES) - 1)]


def classify(
    model: Any, metadata: Metadata, inputs: Sequence[str], options: Predict
) -> Iterator[str]:
    """Yield the likeliest classes: a line per class for one picture, a JSON line per picture for
    several or for a directory. Errors are raised first.
    """
    import torch

    from surefoot.data.scan import printable

    if not inputs:
        raise nothing_to_predict("a picture", example="picture.png")
    number(min_value=1)(options.top_k, setting="top_k")
    entries: list[tuple[str, Path, Any]] = []  # a name, and a picture that was read or None
    for name in inputs:
        path = local_path(name, setting="picture")
        if path.is_dir():  # read one at a time: all may exceed the memory
            entries += [(printable(file), file, None) for file in _pictures_below(path)]
        else:
            entries.append((printable(name), path, metadata.model_input(path)))
    is_single = len(inputs) == 1 and entries[0][2] is not None
    device = next(model.parameters()).device
    for name, path, read_before in entries:
        picture_1CHW = read_before
        if picture_1CHW is None:
            picture_1CHW = metadata.model_input(path)
        with torch.no_grad():
            chances_K = torch.softmax(model(picture_1CHW.to(device))[0].float(), dim=0).cpu()
        chances, indices = chances_K.topk(min(options.top_k, len(metadata.classes)))
        likeliest = [metadata.classes[index] for index in indices.tolist()]
        chance_of = dict(zip(likeliest, chances.tolist(), strict=True))
        if is_single:
            for label, chance in chance_of.items():
                yield f"{chance:.4f}  {label}\n"
        else:
            rounded = {label: round(chance, _DIGITS) for label, chance in chance_of.items()}
            yield json.dumps({"image": name, "classes": rounded}, ensure_ascii=False) + "\n"


def _pictures_below(directory: Path) -> list[Path]:
    """Return all pictures below a directory; raise `DataError` if there are none."""
    from surefoot.data.scan import PICTURES, printable, scan

    listing = scan(directory, PICTURES)
    if not listing.files:
        raise sf.DataError(
            "directory-without-pictures",
            problem=f"the directory {printable(directory)} holds no picture",
            reason=listing.line() or None,
            path=directory,
        )
    return listing.files
