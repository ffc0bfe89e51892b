"""Settings and presets of the image recipe. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from surefoot.config.setting import default, ordered, setting
from surefoot.config.tree import MOST_USED, NEVER, PATH
from surefoot.recipes.images.networks import Model
from surefoot.recipes.optimizer_settings import FRACTION, RecipeSettings


@dataclass(frozen=True, kw_only=True)
class Data:
    """The images and their conversion to arrays."""

    path: str | None = field(default=None, metadata=PATH | MOST_USED)
    """A directory of IDX files (MNIST), CIFAR-10's binary files, class folders, pictures beside a
    CSV file of labels, or train/, val/ and test/ with these; or synthetic. Default: scikit-learn's
    digits."""
    classes: tuple[str, ...] | None = field(default=None, metadata=NEVER)
    """Class names by index; for folders, all folder names in this order. Default: indices, or
    sorted folder names.
    """
    val_fraction: float = field(default=0.1, metadata=NEVER)
    """Fraction of the training images for validation, if val/ does not exist."""
    size: int | None = field(default=None, metadata=MOST_USED | NEVER)
    """Image height and width in pixels, for folders and synthetic. Default: the pictures' own size,
    if all have the same.
    """
    channels: int | None = field(default=None, metadata=NEVER)
    """For folders and synthetic: 1 converts pictures to gray, 3 to color. Default: unchanged."""
    crop: Literal["padded", "resized"] = "padded"
    """For folders: "resized" trains on random crops of 8% to 100% of the picture, as is usual for
    ImageNet.
    """
    on_corrupt: Literal["error", "skip"] = "error"
    """For folders: error stops at a damaged picture; skip reads all pictures first, and leaves out
    and counts damaged ones.
    """
    background: str = "white"
    """For folders: the color that shows through transparent parts of pictures: a name, or #ff8000."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Augmentation of the training images, drawn anew in every epoch."""

    crop_padding: int = 1
    """Black pixels added on each side before a random crop to the image's size."""
    flip: bool = False
    """Mirror half of the images horizontally."""
    cutout: int = 0
    """Height and width of a randomly placed square of the mean color; 0 disables it."""
    randaugment: int = 1
    """Number of random color and shape operations per image."""
    randaugment_magnitude: int = 5
    """Strength of the operations of randaugment, 0 to 10."""
    mixup: float = 0.0
    """Mix images in pairs, with a share from a Beta distribution with this parameter; 0 disables
    it.
    """
    cutmix: float = 0.0
    """Paste a rectangle of one image into another, its share from a Beta distribution with this
    parameter; 0 disables it.
    """


@ordered
@dataclass(kw_only=True)
class Config(RecipeSettings):
    """Train a classifier on images."""

    preset: Literal["tiny", "fashion-mnist", "fashion-mnist-fast", "cifar10", "imagenet"] | None = (
        setting(
            None,
            observer=True,
            after="",
            group="what is trained",
            changes_at="never",
            most_used=True,
        )
    )
    """A complete configuration to start from. Files and flags override it. Commands start from
    tiny.
    """
    run_dir: str | Path | None = default("runs/images")
    length: str = default("30 epochs")
    batch_size: int | str = default(64)
    evaluate_every: str = default("25%")
    data: Data = setting(factory=Data, identity=True, changes_at="epoch")
    augmentation: Changes = setting(factory=Changes, identity=True, changes_at="epoch")
    model: Model = setting(factory=Model, identity=True, changes_at="never")
    channels_last: bool | Literal["auto"] = default(True)
    label_smoothing: float = setting(
        0.1,
        check=FRACTION,
        identity=True,
        after="check_state",
        group="optimization",
        changes_at="step",
    )
    """Share of each target's probability that is spread over all classes in training. Metrics use
    the unsmoothed loss.
    """
    test_time_augmentation: bool = setting(False, identity=True, changes_at="step")
    """Evaluate and predict with mean logits over views of each image: mirrored if flip is on, and
    shifted by one pixel if crop_padding is not 0. Both make 6 views, and evaluation takes 6 times
    as long."""


BEST = "min val/loss"  # with few validation images, many checkpoints have the same accuracy

_FASHION = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)

_FASHION_FILES = "the directory of Fashion-MNIST's four files"

MEANT_FOR = {
    "fashion-mnist": _FASHION_FILES,
    "fashion-mnist-fast": _FASHION_FILES,
    "cifar10": "the directory of CIFAR-10's binary version",
    "imagenet": "a directory with train/ and val/, each with a folder of pictures for each class",
}

_RESNET: dict[str, Any] = {  # as ResNets were first trained
    "augmentation.flip": True,
    "augmentation.randaugment": 0,
    "label_smoothing": 0.0,
    "clip": "off",
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
    "optimizer.momentum": 0.9,
    "optimizer.nesterov": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"preset": "tiny"},  # images.Config() names no preset
    "fashion-mnist": {
        "data.classes": _FASHION,
        "augmentation.crop_padding": 1,
        "augmentation.flip": True,
        "augmentation.randaugment": 0,
        "batch_size": 256,
        "length": "14 epochs",
        "evaluate_every": "1 epochs",
        "model.width": 48,
        "optimizer.name": "muon",
        "optimizer.lr": 2e-2,
        "schedule.name": "linear",
    },
    # He et al. 2016, section 4.2, with today's usual network, cosine schedule and length
    "cifar10": {
        "model.name": "resnet18",
        "augmentation.crop_padding": 4,
        "batch_size": 128,
        "length": "200 epochs",
        "evaluate_every": "5 epochs",
        "optimizer.weight_decay": 5e-4,
        "schedule.warmup": "1 steps",
        **_RESNET,
    },
    # Goyal et al. 2017, section 5.1: https://arxiv.org/abs/1706.02677
    "imagenet": {
        "model.name": "resnet50",
        "data.size": 224,
        "data.channels": 3,
        "data.crop": "resized",
        "augmentation.crop_padding": 0,
        "batch_size": 256,
        "length": "90 epochs",
        "workers": 8,
        "optimizer.weight_decay": 1e-4,
        "schedule.name": "multistep",
        "schedule.warmup": "5 epochs",
        "schedule.milestones": ("30 epochs", "60 epochs", "80 epochs"),
        "schedule.gamma": 0.1,
        "save_every": "15 min",
        **_RESNET,
    },
}

# half an epoch is too short for augmentation and label smoothing to help
PRESETS["fashion-mnist-fast"] = PRESETS["fashion-mnist"] | {
    "augmentation.crop_padding": 0,
    "augmentation.flip": False,
    "label_smoothing": 0.0,
    "length": "140 steps",
    "evaluate_every": "100%",
    "model.width": 32,
    "optimizer.lr": 3e-2,
}
