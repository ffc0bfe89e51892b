"""The image recipe: from settings to a run with network, images, loss, metrics and predictions.
Imports no torch.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.batch_size import batching
from surefoot.config.extras import refuse_missing
from surefoot.config.ramps import first_value
from surefoot.config.setting import checked
from surefoot.data.scan import printable
from surefoot.errors import Setting
from surefoot.recipes.images import networks
from surefoot.recipes.images import predict as pictures
from surefoot.recipes.images.config import BEST, MEANT_FOR, Config
from surefoot.recipes.images.predict import Predict
from surefoot.recipes.optimizer_settings import refuse_default_data
from surefoot.tracking.run_reader import behavior_in, started_run


def check(config: Config) -> list[Any]:
    """Validate the settings and return the parts that need no data. Raises `ConfigError` with all
    problems.
    """
    # both import torch
    from surefoot.losses.mixing import refuse_mixing
    from surefoot.recipes.readers.images.load import refuse_fraction

    changes = config.augmentation
    return checked(
        lambda: augmentation_of(config),
        config.optimizer.spec,
        config.schedule.spec,
        config.check,
        lambda: networks.refuse_settings(config.model),
        lambda: refuse_mixing(mixup=changes.mixup, cutmix=changes.cutmix),
        lambda: refuse_fraction(config.data.val_fraction),
        lambda: refuse_default_data(config.preset, config.data.path, MEANT_FOR),
        lambda: _refuse_missing_digits(config),
        lambda: _refuse_missing_views(config),
    )


def augmentation_of(config: Config) -> "sf.data.Augmentation":
    """Return the changes of single images; mixup and cutmix are part of the loss."""
    changes = config.augmentation
    return sf.data.Augmentation(
        crop_padding=changes.crop_padding,
        flip=changes.flip,
        cutout=changes.cutout,
        randaugment=changes.randaugment,
        randaugment_magnitude=changes.randaugment_magnitude,
    )


def _refuse_missing_views(config: Config) -> None:
    changes = config.augmentation
    if config.test_time_augmentation and not (changes.flip or changes.crop_padding):
        raise sf.ConfigError(
            "test-time-augmentation-without-views",
            problem="test_time_augmentation averages mirrored and shifted views, and training has"
            " neither: flip is off, crop_padding is 0",
            remedy=[
                Setting("augmentation.flip", True),
                Setting("augmentation.crop_padding", 1),
                Setting("test_time_augmentation", False),
            ],
            setting="test_time_augmentation",
            value=True,
        )


def _refuse_missing_digits(config: Config) -> None:
    if config.data.path is None and config.preset not in MEANT_FOR:
        refuse_missing(
            "the default data set of digits", "sklearn", instead=Setting("data.path", "DIRECTORY")
        )


def build(config: Config) -> "sf.Run":
    """Build the run of a configuration without starting it."""
    from surefoot.tracking.task_panels import png_file

    augmentation, optimizer, schedule, *_ = check(config)
    datasets = sf.data.load_images(
        **vars(config.data),
        augmentation=augmentation,
        seed=config.seed,
        behavior=behavior_in(config.run_dir),
    )
    _warn_of_left_out(datasets.left_out)
    classes = list(datasets.classes)
    shape = {"size": datasets.fitting.size, "channels": datasets.fitting.channels}

    # an existing run goes on with its network and with the statistics of its images
    run = started_run(config.run_dir)
    before = None
    refusal = None
    recorded = None
    if run is not None:
        before = pictures.read_metadata(run)
        recorded = before.network
        refusal = before.misfit(classes, **shape)
        if refusal is None:
            datasets = datasets.normalized_with(tuple(before.mean), tuple(before.std))
            datasets = datasets.scaled_with(before.value_range)
    network = networks.recorded_name(config.model, recorded=recorded)
    metadata = pictures.Metadata(
        classes,
        **vars(datasets.fitting),
        mean=datasets.mean,
        std=datasets.std,
        network=network,
        sha256=networks.digest(network),
    )
    if before is not None and network == before.network:
        networks.note_changed(network, was=before.sha256)
    model = networks.builder(config.model, network, classes=len(classes), **shape)
    if not config.sync_batch_norm:
        batch_size = first_value(config.batch_size, setting="batch_size")
        sizes = batching(batch_size, config.micro_batch_size)
        networks.refuse_lone_pixels(
            config.model, network, size=shape["size"], micro_batch_size=sizes.micro_batch_size
        )

    normalization: dict[str, Any] = {"mean": datasets.val.mean, "std": datasets.val.std}

    def panels(model: Any) -> Iterator[Any]:
        if refusal is not None:
            raise refusal
        yield from sf.report.classification_panels(
            evaluated(config, model, datasets.val), datasets.val, classes=classes, **normalization
        )

    example = None
    if config.run_dir is not None:
        example = str(Path(config.run_dir) / pictures.EXAMPLE)
    return sf.Run(
        model=model,
        model_settings=networks.changing_settings(config.model, network),
        loss=_loss_of(config, datasets.val),
        train_data=datasets.train,
        optimizer=optimizer,
        schedule=schedule,
        splits=_splits(datasets, refusal),
        loss_note=_only_in_training(config),
        panels_fn=panels,
        describe_fn=pictures.picture_in_words(classes),
        extra_files={
            pictures.FILE: metadata.to_json(),
            pictures.EXAMPLE: png_file(datasets.val[0][0], **normalization),
        },
        predict_example=example,
        data_summary=in_words(datasets, config),
        identity=_identity(config, datasets, network),
        **config.run_settings(BEST),
    )


def _warn_of_left_out(left_out: Sequence[Path]) -> None:
    count = len(left_out)
    if count:
        first = printable(left_out[0])
        if count == 1:
            what = f"1 damaged picture is left out: {first}"
        else:
            what = f"{count} damaged pictures are left out: {first} ..."
        print(f"warning: {what}", flush=True)


def _loss_of(config: Config, val_data: Any) -> Callable[[Any, Any], Any]:
    """Return the loss: in training of mixed images, with their accuracy; else of plain ones, with
    outputs and targets.
    """
    changes = config.augmentation

    def loss(model: Any, batch: Any) -> Any:
        images_BCHW, labels_B = batch
        if not model.training:
            logits_BK = evaluated(config, model, val_data)(images_BCHW)
            return sf.losses.cross_entropy(logits_BK, labels_B), (logits_BK, labels_B)
        mixture = sf.losses.mixup(images_BCHW, labels_B, mixup=changes.mixup, cutmix=changes.cutmix)
        logits_BK = model(mixture.images)
        mean = sf.losses.mixup_cross_entropy(
            logits_BK, mixture, label_smoothing=config.label_smoothing
        )
        return mean, {"accuracy": _accuracy(logits_BK.detach(), mixture)}

    return loss


def _splits(
    datasets: "sf.data.ImageDatasets", refusal: sf.DataError | None
) -> "dict[str, sf.Split]":
    """Return the splits. With a `refusal`, the first evaluation raises it: so a plan still works,
    and a resume names the difference.
    """

    def refuse(outputs: Any, targets: Any) -> Any:
        del outputs, targets
        assert refusal is not None
        raise refusal

    splits = {}
    for name, part in (("val", datasets.val), ("test", datasets.test)):
        if part is not None:
            splits[name] = sf.Split(
                part,
                metrics=sf.metrics.ClassificationReport(list(datasets.classes)),
                batch_size=256,
                predict=None if refusal is None else refuse,
                at_end=name == "test",
            )
    return splits


def _identity(config: Config, datasets: "sf.data.ImageDatasets", network: str) -> dict[str, Any]:
    """Return what a resume compares besides the settings of every run."""
    paths = [f"{path.parent.name}/{path.name}" for path in datasets.left_out]
    left_out = repr(paths).encode(errors="surrogateescape")
    identity: dict[str, Any] = {
        "data": {
            "classes": list(datasets.classes),
            "left_out": {"pictures": len(paths), "sha256": sha256(left_out).hexdigest()},
        },
        "model": networks.network_identity(config.model, network),
        "loss": {"mixup": config.augmentation.mixup, "cutmix": config.augmentation.cutmix},
        "label_smoothing": config.label_smoothing,
    }
    if config.test_time_augmentation:  # 0.1.0 has no such setting
        identity["test_time_augmentation"] = True
    return identity


def evaluated(config: Config, model: Any, data: Any) -> Any:
    """Return the model for evaluation and prediction: with `test_time_augmentation`, a mean over
    views of each image.

    `data` has `mean` and `std`, which normalize the images. Pixels outside of an image are black,
    as in training.
    """
    if not config.test_time_augmentation:
        return model
    from surefoot.models.simple_cnn import AveragedViews  # imports torch

    changes = config.augmentation
    border = None
    if changes.crop_padding:
        border = [-mean / std for mean, std in zip(data.mean, data.std, strict=True)]
    return AveragedViews(model, flip=changes.flip, border=border)


def _only_in_training(config: Config) -> str | None:
    """Return what the training loss has and evaluation has not, in words."""
    changes = config.augmentation
    settings = {
        "label smoothing": config.label_smoothing,
        "mixup": changes.mixup,
        "cutmix": changes.cutmix,
    }
    facts = [f"{name} {value:g}" for name, value in settings.items() if value]
    return ", ".join(facts) or None


def in_words(datasets: "sf.data.ImageDatasets", config: Config) -> list[str]:
    """Return what the header of a run says of its images, and what a plan says besides."""
    from surefoot.recipes.readers.images.folder import first_names  # imports NumPy

    source = "scikit-learn's handwritten digits (data.path is not set)"
    if config.data.path is not None:
        source = f"images of {config.data.path}"
    if config.test_time_augmentation:
        shifts = 3 if config.augmentation.crop_padding else 1
        mirrors = 2 if config.augmentation.flip else 1
        source += f", each evaluated as the mean of {shifts * mirrors} views"
    test = "no test split"
    if datasets.test is not None:
        test = f"{len(datasets.test):,} for the test at the end"
    fits = datasets.fitting
    plural = "" if fits.channels == 1 else "s"
    shape = f"{fits.size} x {fits.size} pixels, {fits.channels} channel{plural}"
    if fits.value_range is not None:
        black, white = fits.value_range
        shape += f"; values {black:.6g} to {white:.6g} of more than 8 bits are black to white"
    classes = f"{len(datasets.classes)} classes: {first_names(datasets.classes)}"
    facts = [source, classes, *datasets.notes]
    if datasets.not_read:
        facts.append(datasets.not_read)
    return [
        "; ".join(facts),
        f"{len(datasets.train):,} for training, {len(datasets.val):,} for validation, {test}",
        shape,
    ]


def _accuracy(logits_BK: Any, mixture: "sf.losses.MixedBatch") -> "sf.Mean":
    of_labels = sf.metrics.top_k_accuracy(logits_BK, mixture.labels)
    of_others = sf.metrics.top_k_accuracy(logits_BK, mixture.others)
    total = mixture.share * of_labels.total + (1 - mixture.share) * of_others.total
    return sf.Mean(total, of_labels.count)


def program_files(config: Config, *, run: Path) -> list[tuple[Path, str | None]]:
    """Return the user's files that rebuild a run, each with its last recorded hash, or None without
    a record.
    """
    hashes: dict[str, str | None] = {}  # by the name of a network
    recorded = None
    if (run / pictures.FILE).is_file():
        # `predict` runs this network, not that of the settings
        metadata = pictures.read_metadata(run)
        recorded = metadata.network
        hashes[recorded] = metadata.sha256
    hashes.setdefault(networks.recorded_name(config.model, recorded=recorded), None)
    files = []
    for name, sha256_of_file in sorted(hashes.items()):
        file = networks.file_of(name)
        if file is not None:
            files.append((file, sha256_of_file))
    return files


def predict(
    config: Config, options: Predict, inputs: Sequence[str], *, run: Path, checkpoint: Any
) -> Iterator[str]:
    """Yield the most likely classes of each image file."""
    from surefoot.train.compile import layout  # imports torch
    from surefoot.train.model_weights import load_weights  # imports torch

    metadata = pictures.read_metadata(run)
    networks.note_changed(metadata.network, was=metadata.sha256)
    build_network = networks.builder(
        config.model,
        metadata.network,
        channels=metadata.channels,
        classes=len(metadata.classes),
        size=metadata.size,
    )
    model = load_weights(build_network(), checkpoint, device=options.device)
    if config.channels_last is True:
        layout(True, [model])
    return pictures.classify(evaluated(config, model, metadata), metadata, inputs, options)
