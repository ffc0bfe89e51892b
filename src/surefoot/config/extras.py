"""Optional packages, the extras that install them, the trackers of a run, and the error for a missing
package. Imports none of these packages.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

from surefoot.config.tree import did_you_mean
from surefoot.errors import Command, ConfigError, Remedy, Setting, first_line

TRACKERS = {
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
}
"""The imported modules of each tracker. Its module in surefoot has the tracker's name; the class
name is capitalized.
"""

EXTRAS = {
    "text": ("tokenizers",),
    "translation": ("sacrebleu", "babel"),
    "images": ("sklearn",),
    "vision": ("timm", "torchvision"),
    "plots": ("resvg_py",),
    "tensorboard": ("tensorboard",),
    "hub": ("pyarrow", "datasets"),
    "zstd": ("zstandard",),
    "hf": ("transformers", "peft"),
    "remote": ("fsspec",),
    "trackers": tuple(module for modules in TRACKERS.values() for module in modules),
    "search": ("optuna",),
    "slurm": ("submitit",),
    "notebook": ("pandas",),
    "quant": ("bitsandbytes", "torchao"),
}
"""The modules of each extra in pyproject.toml, by the names that an import uses."""


def is_installed(module: str) -> bool:
    """Return True if a top-level module can be imported. It is not imported.

    >>> is_installed("torch"), is_installed("no_such_module")
    (True, False)
    """
    try:
        spec = find_spec(module)
    except ValueError:  # a module without a spec
        return False
    # a directory of that name, such as wandb's, has no origin
    return spec is not None and spec.origin is not None


def refuse_missing(purpose: str, *modules: str, instead: Remedy | None = None) -> None:
    """Raise one `ConfigError` for all optional modules that are not installed, with the command to
    type.

    `purpose` is the subject of the message. `instead` is another choice, which needs none of these
    modules.

    >>> refuse_missing("precision = fp8", "no_such_module")
    Traceback (most recent call last):
    surefoot.errors.ConfigError: precision = fp8 needs no_such_module: not installed
      ...
    """
    missing = [module for module in modules if not is_installed(module)]
    if missing:
        needed = [extra for extra, names in EXTRAS.items() if not set(names).isdisjoint(missing)]
        extras = ",".join(needed)
        install = f'pip install "surefoot[{extras}]"'
        raise _unusable(purpose, missing, "not installed", install, instead)


def trackers_of(trackers: str | Sequence[str] | None, *, out: str | Path | None) -> tuple[str, ...]:
    """Parse tracker names from "wandb,mlflow" or a sequence; raise `ConfigError` for unknown or
    repeated names, or if `out` is None.

    >>> (
    ...     trackers_of("wandb, mlflow", out="runs/first"),
    ...     trackers_of(["trackio"], out="a"),
    ...     trackers_of(None, out=None),
    ... )
    (('wandb', 'mlflow'), ('trackio',), ())
    """
    words = trackers.split(",") if isinstance(trackers, str) else trackers or ()
    names = tuple(word.strip() for word in words)
    for name in names:
        if name not in TRACKERS:
            remedy: Remedy = did_you_mean(
                name, TRACKERS, otherwise=f"available: {', '.join(TRACKERS)}"
            )
            if name == "tensorboard":
                remedy = Setting("tensorboard", True)
            raise ConfigError(
                "tracker-unknown",
                problem=f"no tracker {name!r}",
                remedy=remedy,
                setting="trackers",
                value=name,
            )
    if len(set(names)) < len(names):
        raise ConfigError(
            "tracker-named-twice",
            problem=f"trackers = {trackers!r} names a tracker twice",
            setting="trackers",
            value=trackers,
        )
    if names and out is None:
        raise ConfigError(
            "trackers-without-directory",
            problem=f"trackers = {trackers!r}: a tracker's run id is stored in the run directory,"
            " and this run has none",
            remedy=Setting("run_dir", "DIR"),
            setting="trackers",
            value=trackers,
        )
    return names


def refuse_missing_trackers(names: Sequence[str]) -> None:
    """Raise one `ConfigError` for all trackers whose packages are not installed."""
    modules = [module for name in names for module in TRACKERS[name]]
    refuse_missing(f"trackers = {','.join(names)}", *modules, instead="or leave out the tracker")


@contextmanager
def needed_for(purpose: str, *modules: str, instead: Remedy | None = None) -> Iterator[None]:
    """Refuse missing modules as `refuse_missing` does, and also modules whose import inside the
    block fails.
    """
    refuse_missing(purpose, *modules, instead=instead)
    try:
        yield
    except Exception as problem:  # a package built for another torch may raise any exception
        cause = f"the import fails: {type(problem).__name__}: {first_line(problem)}"
        packages_of_module = packages_distributions()
        packages = dict[str, None]()  # in order, each once
        for module in modules:
            packages |= dict.fromkeys(packages_of_module.get(module, [module]))
        # the extra is installed: pip would do nothing
        install = f"pip install --force-reinstall {' '.join(packages)}"
        raise _unusable(purpose, modules, cause, install, instead) from problem


def _unusable(
    purpose: str, modules: Sequence[str], cause: str, install: str, instead: Remedy | None
) -> ConfigError:
    choices = [] if instead is None else [instead]
    return ConfigError(
        "package-not-usable",
        problem=f"{purpose} needs {', '.join(modules)}: {cause}",
        remedy=[*choices, Command(install)],
        modules=list(modules),
    )
