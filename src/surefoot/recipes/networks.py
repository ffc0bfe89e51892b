"""Which network a run of images trains: one of surefoot's, one of timm's, or one that a file of the user's builds."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import surefoot as sf
from surefoot.config import nearest

RESNETS: dict[str, Literal[18, 34, 50]] = {"resnet18": 18, "resnet34": 34, "resnet50": 50}
_SMALL_SIDE = 64  # pixels, up to which a ResNet does not throw three quarters of its rows away at once
_OWN: dict[str, dict[str, Any]] = {  # settings that are absent have these values, and are foreign to all other networks
    "simple_cnn": {"width": 32, "dropout": 0.0, "channels_last": True},
    "resnet": {"stem": "auto", "zero_last_gain": True, "channels_last": True},
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network. A setting that is absent has the network's default; a foreign one is refused."""

    name: str = "simple_cnn"
    """simple_cnn, resnet18, resnet34, resnet50, timm:NAME (where timm is installed), or FILE.py:build, a function of
    (channels, classes), or of nothing, that returns a module."""
    width: int | None = None
    """simple_cnn: channels of the first of its three blocks, doubled in each; absent: 32."""
    dropout: float | None = None
    """simple_cnn: fraction of the last features dropped while training."""
    stem: Literal["cifar", "imagenet"] | None = None
    """resnet: cifar begins with 3 x 3, imagenet with 7 x 7 and pooling; absent: by the size of images, cifar up to 64."""
    zero_last_gain: bool | None = None
    """resnet: start every residual branch at zero; absent: yes."""
    channels_last: bool | None = None
    """simple_cnn and resnet: lay out the channels of a pixel side by side, faster as a rule; absent: yes."""
    sync_batch_norm: bool = False
    """Normalise over the batches of all processes instead of each by itself; for accelerators."""


def refuse_settings(model: Model, *, device: str) -> None:
    """Raise `ConfigError` for a network that is none, and for settings that are not its own or cannot be."""
    kind = _kind(model.name)
    given = {name: getattr(model, name) for own in _OWN.values() for name in own}
    problems = [
        f"model.{name} = {value!r} is foreign to {model.name}"
        for name, value in given.items()
        if value is not None and name not in _OWN.get(kind, {})
    ]
    if model.width is not None and model.width < 1:
        problems.append(f"model.width = {model.width}: channels of the first block, 1 or more")
    if model.dropout is not None and not 0 <= model.dropout < 1:
        problems.append(f"model.dropout = {model.dropout}: a fraction, at least 0 and below 1")
    if model.sync_batch_norm and _is_cpu(device):
        problems.append(
            "model.sync_batch_norm = True: torch has it for accelerators only, and this run is on a CPU\n"
            "  leave it out: one process normalises over its whole micro-batch anyhow"
        )
    if problems:
        raise sf.ConfigError("\n".join(problems))


def recorded_name(model: Model) -> str:
    """The network's name as a run's directory keeps it: of a file its absolute path."""
    if _kind(model.name) != "file":
        return model.name
    path, _, function = model.name.rpartition(":")
    return f"{Path(path).resolve()}:{function}"


def described(model: Model, name: str) -> dict[str, Any]:
    """What makes it this network and no other, as JSON; of a file also a hash of what is in it."""
    told: dict[str, Any] = {key: value for key, value in vars(model).items() if key not in ("name", "channels_last")}
    if _kind(name) != "file":
        return {"name": name, **told}
    path = Path(name.rpartition(":")[0])
    return {"name": name, "sha256": sha256(path.read_bytes()).hexdigest() if path.is_file() else None, **told}


def builder(model: Model, name: str, *, channels: int, classes: int, size: int) -> Callable[[], Any]:
    """What builds the network; the file and timm are found now. `name` is as `recorded_name` has it."""
    kind = _kind(name)
    shape: dict[str, Any] = {"channels": channels, "classes": classes}
    own = {key: value if (given := getattr(model, key)) is None else given for key, value in _OWN.get(kind, {}).items()}
    if own.get("stem") == "auto":
        own["stem"] = "cifar" if size <= _SMALL_SIDE else "imagenet"
    match kind:
        case "simple_cnn":
            made: Callable[[], Any] = lambda: sf.models.SimpleCNN(**shape, **own)  # noqa: E731
        case "resnet":
            made = lambda: sf.models.ResNet(RESNETS[name], **shape, **own)  # noqa: E731
        case "timm":
            made = _of_timm(name.partition(":")[2], channels=channels, classes=classes)
        case _:
            made = _of_file(name, shape)

    def built() -> Any:
        from torch import nn

        network = made()
        if kind in ("timm", "file"):
            _refuse_outputs(network, name, channels=channels, classes=classes, size=size)
        if not model.sync_batch_norm:
            return network
        return nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]

    return built


def _kind(name: str) -> str:
    if name == "simple_cnn":
        return name
    if name in RESNETS:
        return "resnet"
    if name.startswith("timm:"):
        return "timm"
    if name.rpartition(":")[0].endswith(".py"):
        return "file"
    close = nearest(name, ["simple_cnn", *RESNETS])
    meant = f"did you mean {close}?" if close else f"one of simple_cnn, {', '.join(RESNETS)}, timm:NAME, FILE.py:build"
    raise sf.ConfigError(f"model.name = {name!r} is no network: {meant}")


def _is_cpu(device: str) -> bool:
    import torch

    return device == "cpu" or (device == "auto" and not torch.accelerator.is_available())


def _of_timm(name: str, *, channels: int, classes: int) -> Callable[[], Any]:
    try:
        import timm
    except Exception as problem:  # a torchvision that does not fit torch raises what it likes
        raise sf.ConfigError(
            f"model.name = timm:{name} needs timm, which cannot be imported: {str(problem).splitlines()[0]}\n"
            "  install it: pip install surefoot[timm]"
        ) from problem
    if not timm.is_model(name):
        close = nearest(name, timm.list_models())
        raise sf.ConfigError(f"timm has no model {name!r}" + (f": did you mean timm:{close}?" if close else ""))
    return lambda: timm.create_model(name, pretrained=False, in_chans=channels, num_classes=classes)


def _of_file(name: str, shape: dict[str, Any]) -> Callable[[], Any]:
    path, _, function = name.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise sf.ConfigError(f"model.name = {name}: no file {file} (looked in {Path.cwd()})")
    module_name = f"_network_{file.stem}"
    specification = importlib.util.spec_from_file_location(module_name, file.resolve())
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module  # where dataclasses look up the types of their fields
    specification.loader.exec_module(module)
    build = vars(module).get(function)
    if not callable(build):
        raise sf.ConfigError(
            f"{file} has no function {function!r}: write def {function}(channels, classes) -> nn.Module"
        )
    parameters = list(inspect.signature(build).parameters)
    if parameters and sorted(parameters) != sorted(shape):
        raise sf.ConfigError(
            f"{file}: {function} takes {', '.join(parameters)}; write def {function}(channels, classes), or without arguments"
        )
    return lambda: build(**shape) if parameters else build()


def _refuse_outputs(network: Any, name: str, *, channels: int, classes: int, size: int) -> None:
    import torch

    if not isinstance(network, torch.nn.Module):
        raise sf.ConfigError(f"{name} returned {type(network).__name__}, not a torch.nn.Module")
    were = network.training
    try:
        with torch.no_grad():
            logits = network.eval()(torch.zeros(2, channels, size, size))
    except (RuntimeError, ValueError, TypeError, AssertionError) as problem:
        raise sf.ConfigError(
            f"{name} cannot take images of {channels} channel(s) and {size} x {size} pixels: {str(problem).splitlines()[0]}"
        ) from problem
    network.train(were)
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, classes):
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise sf.ConfigError(f"{name} makes {found} of 2 images: (2, {classes}) is needed, a number for each class")
