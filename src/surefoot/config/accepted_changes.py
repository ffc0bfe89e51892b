"""The setting `accept_change`, and the remedies where a run has changed that nobody accepted."""

from collections.abc import Sequence

from surefoot.config.setting import names_that_change
from surefoot.config.train_settings import TrainSettings
from surefoot.errors import Command, ConfigError, Setting

CHANGES = ("loss", "model", "collate", "data", "optimizer")
_ON_RECORD = {*names_that_change(TrainSettings), *CHANGES, "schedule", "early_stopping", "plateau"}
# what opens the run replaces DIR and RUN
ANOTHER_RUN = Setting("run_dir", "DIR")
FROM_ITS_WEIGHTS = ("start from its weights:", Setting("init_from", "RUN"))


def change_names(accepted: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the change names in `accept_change`, a list or comma-separated text; raise
    `ConfigError` for an unknown name.

    >>> change_names("loss,data"), change_names(None)
    (('loss', 'data'), ())
    """
    names = accepted.split(",") if isinstance(accepted, str) else list(accepted or ())
    for name in names:
        if name not in CHANGES:
            if name.partition(".")[0] in _ON_RECORD:
                raise ConfigError(
                    "change-of-a-setting",
                    problem=f"accept_change = {name!r} is a setting, which changes on record",
                    remedy=Command(f"surefoot change RUN {name}=VALUE"),
                    setting="accept_change",
                    value=name,
                )
            raise ConfigError(
                "change-unknown",
                problem=f"accept_change = {name!r} is not a known change",
                remedy=f"choose from {', '.join(CHANGES)}",
                setting="accept_change",
                value=name,
            )
    return tuple(names)
