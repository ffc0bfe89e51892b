"""The network of an image run: one of surefoot's, one of timm's, or one that the user's file
builds.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import surefoot as sf
from surefoot.config import user_code
from surefoot.config.extras import needed_for, refuse_missing
from surefoot.config.paths import local_path
from surefoot.config.setting import checked, number
from surefoot.config.tree import AT_STEP, MOST_USED, PATH, did_you_mean, nearest
from surefoot.errors import Setting, first_line
from surefoot.recipes.optimizer_settings import FRACTION

RESNETS: dict[str, Literal[18, 34, 50]] = {"resnet18": 18, "resnet34": 34, "resnet50": 50}
_KINDS = {"simple_cnn": "simple_cnn", **dict.fromkeys(RESNETS, "resnet")}
_SMALL_SIDE = 64  # pixels; up to this size a ResNet's stem does not downsample by 4
# up to this image size, the last feature map is one pixel
_LAST_PIXEL = {"cifar": 8, "imagenet": 32}
_DEFAULTS: dict[str, dict[str, Any]] = {  # defaults of each network's own settings
    "simple_cnn": {"width": 32, "dropout": 0.0},
    "resnet": {"stem": "auto", "zero_init_residual": True},
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network. Absent settings use the network's defaults; settings of another network are
    refused.
    """

    name: str = field(default="simple_cnn", metadata=PATH | MOST_USED)
    """simple_cnn, resnet18, resnet34, resnet50, timm:NAME (if timm is installed), or FILE.py:build,
    a function with the arguments (channels, classes), or without arguments, that returns a module.
    """
    width: int | None = None
    """simple_cnn: channels of the first of its three blocks; each block doubles them. Default: 32.
    """
    dropout: float | None = field(default=None, metadata=AT_STEP)
    """simple_cnn: dropout probability of the last features. Default: 0."""
    stem: Literal["cifar", "imagenet"] | None = None
    """resnet: cifar starts with a 3 x 3 convolution, imagenet with 7 x 7 and pooling. Default:
    cifar for images of up to 64 pixels.
    """
    zero_init_residual: bool | None = None
    """resnet: start every residual branch at zero. Default: True."""


def refuse_settings(model: Model) -> None:
    """Raise `ConfigError` for an unknown network, settings of another network, impossible values,
    and if timm is needed and missing.
    """
    kind = _kind(model.name)
    checks: list[Callable[[], Any]] = []
    for owner, settings in _DEFAULTS.items():
        for name in settings:
            if owner != kind and getattr(model, name) is not None:
                checks.append(partial(_refuse_setting, model, name))
    if model.width is not None:
        checks.append(partial(number(min_value=1), model.width, setting="model.width"))
    if model.dropout is not None:
        checks.append(partial(FRACTION, model.dropout, setting="model.dropout"))
    checked(*checks)
    if kind == "timm":
        refuse_missing(f"model.name = {model.name}", "timm")


def _refuse_setting(model: Model, name: str) -> None:
    value = getattr(model, name)
    raise sf.ConfigError(
        "setting-of-other-network",
        problem=f"model.{name} = {value!r} is not a setting of {model.name}",
        setting=f"model.{name}",
        value=value,
    )


def recorded_name(model: Model, *, recorded: str | None = None) -> str:
    """Return the network's name for the run's records. Paths are absolute; `recorded` is returned
    if it names the same file.
    """
    if _kind(model.name) != "file":
        return model.name
    path, _, function = model.name.rpartition(":")
    if recorded is not None and _kind(recorded) == "file" and not Path(path).is_absolute():
        recorded_path, _, recorded_function = recorded.rpartition(":")
        if (Path(recorded_path).name, recorded_function) == (Path(path).name, function):
            return recorded
    file = local_path(path, setting="model.name").resolve()
    return f"{file}:{function}"


def network_identity(model: Model, name: str) -> dict[str, Any]:
    """Return the settings of a network for a resume to compare; a user's file counts with its
    hash.
    """
    identity = vars(model) | {"name": name}
    if _kind(name) == "file":
        identity["sha256"] = digest(name)
    return identity


def digest(name: str) -> str | None:
    """Return the hash of a network's file; None for other networks, and if the file is missing."""
    file = file_of(name)
    return None if file is None else user_code.digest(file)


def file_of(name: str) -> Path | None:
    """Return the user's file that builds a network; None for networks of surefoot and timm."""
    return Path(name.rpartition(":")[0]) if _kind(name) == "file" else None


def note_changed(name: str, *, was: str | None) -> None:
    """Print a note if a network's file has changed since the run started; `was` is its `digest` at
    the start.
    """
    file = file_of(name)
    if file is not None:
        user_code.note_changed(file, was=was)


def builder(
    model: Model, name: str, *, channels: int, classes: int, size: int
) -> Callable[..., Any]:
    """Return the function that builds the network, and import the file or timm now. `name` is a
    result of `recorded_name`. The function takes other values of `changing_settings`.
    """
    kind = _kind(name)
    shape: dict[str, Any] = {"channels": channels, "classes": classes}
    settings = _settings_of(model, kind, size=size)
    if kind == "simple_cnn":
        return lambda **changed: sf.models.SimpleCNN(**shape, **(settings | changed))
    if kind == "resnet":
        return lambda: sf.models.ResNet(RESNETS[name], **shape, **settings)
    if kind == "timm":
        build_network = _of_timm(name.removeprefix("timm:"), **shape)
    else:
        build_network = _of_file(name, shape)

    def build_checked() -> Any:
        network = build_network()
        _refuse_outputs(network, name, **shape, size=size)
        return network

    return build_checked


def changing_settings(model: Model, name: str) -> dict[str, Any] | None:
    """Return the settings of a network that can change while a run goes on."""
    if _kind(name) != "simple_cnn":
        return None
    return {
        "dropout": _DEFAULTS["simple_cnn"]["dropout"] if model.dropout is None else model.dropout
    }


def refuse_lone_pixels(model: Model, name: str, *, size: int, micro_batch_size: int) -> None:
    """Raise `ConfigError` if batch normalization of surefoot's own networks would average over a
    single value per channel.
    """
    kind = _kind(name)
    if micro_batch_size != 1 or kind not in _DEFAULTS:
        return
    stem = _settings_of(model, kind, size=size).get("stem", "cifar")
    if size <= _LAST_PIXEL[stem]:
        raise sf.ConfigError(
            "image-reduced-to-one-pixel",
            problem=f"micro-batches of 1 image of {size} x {size} pixels: {name} reduces it to one"
            " pixel",
            reason="batch normalization needs several values per channel",
            remedy=(
                Setting("micro_batch_size", 2),
                "and a",
                Setting("batch_size"),
                "that it divides",
            ),
            setting="micro_batch_size",
            value=1,
            size=size,
        )


def _settings_of(model: Model, kind: str, *, size: int) -> dict[str, Any]:
    """Return a network's own settings, with its defaults for absent ones."""
    settings = dict(_DEFAULTS.get(kind, {}))
    for name in settings:
        value = getattr(model, name)
        if value is not None:
            settings[name] = value
    if settings.get("stem") == "auto":
        settings["stem"] = "cifar" if size <= _SMALL_SIDE else "imagenet"
    return settings


def _kind(name: str) -> str:
    if name in _KINDS:
        return _KINDS[name]
    if name.startswith("timm:"):
        return "timm"
    if name.rpartition(":")[0].endswith(".py"):
        return "file"
    choices = f"one of {', '.join(_KINDS)}, timm:NAME, FILE.py:build"
    raise _unknown(name, did_you_mean(name, _KINDS, otherwise=choices))


def _unknown(name: str, remedy: str | None) -> sf.ConfigError:
    return sf.ConfigError(
        "network-unknown",
        problem=f"model.name = {name!r} is not a network",
        remedy=remedy,
        setting="model.name",
        value=name,
    )


def _of_timm(name: str, *, channels: int, classes: int) -> Callable[[], Any]:
    with needed_for(f"model.name = timm:{name}", "timm"):
        import timm
    if not timm.is_model(name):
        close = nearest(name, timm.list_models())
        raise _unknown(f"timm:{name}", f"did you mean timm:{close}?" if close else None)
    return lambda: timm.create_model(name, pretrained=False, in_chans=channels, num_classes=classes)


def _of_file(name: str, shape: dict[str, Any]) -> Callable[[], Any]:
    path, _, function = name.rpartition(":")
    form = f"def {function}(channels, classes)"
    names = user_code.names_in(Path(path), function=function, form=f"{form} -> nn.Module")
    build: Callable[..., Any] = names[function]
    parameters = list(inspect.signature(build).parameters)
    if parameters and sorted(parameters) != sorted(shape):
        raise sf.ConfigError(
            "network-arguments",
            problem=f"{path}: {function} takes {', '.join(parameters)}",
            remedy=f"write {form}, or a function without arguments",
            path=path,
            function=function,
        )
    if not parameters:
        return build
    return lambda: build(**shape)


def _refuse_outputs(network: Any, name: str, *, channels: int, classes: int, size: int) -> None:
    import torch

    if not isinstance(network, torch.nn.Module):
        raise sf.ConfigError(
            "network-not-a-module",
            problem=f"{name} returned {type(network).__name__}, not a torch.nn.Module",
            setting="model.name",
            value=name,
        )
    was_training = network.training
    try:
        with torch.no_grad():
            logits = network.eval()(torch.zeros(2, channels, size, size))
    except Exception as problem:  # any error of the user's code or torch
        raise sf.ConfigError(
            "network-refuses-images",
            problem=f"{name} cannot take images of {channels} channel(s) and {size} x {size} pixels:"
            f" {type(problem).__name__}: {first_line(problem)}",
            setting="model.name",
            value=name,
        ) from problem
    network.train(was_training)
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, classes):
        actual: Any = type(logits).__name__
        if isinstance(logits, torch.Tensor):
            actual = tuple(logits.shape)
        raise sf.ConfigError(
            "network-outputs",
            problem=f"{name} returns {actual} for 2 images: (2, {classes}) is needed, one logit per"
            " class",
            setting="model.name",
            value=name,
            expected=(2, classes),
        )
