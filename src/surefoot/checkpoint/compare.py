"""Is the run that is started the run that was saved? Every difference is named; one that would change the run is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.checkpoint.contents import shortened
from surefoot.errors import CheckpointError

Described = Mapping[str, Any]


def flat(described: Described, prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys.

    >>> flat({"optimizer": {"lr": 0.1}, "seed": 0})
    {'optimizer.lr': 0.1, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for key, value in described.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return found


def differences(saved: Described, now: Described) -> list[str]:
    """One line for each setting whose value differs: its dotted name, then both values."""
    before, after = flat(saved), flat(now)
    keys = [*before, *(key for key in after if key not in before)]
    return [
        f"{key} was {_shown(before, key)}, now {_shown(after, key)}"
        for key in keys
        if _shown(before, key) != _shown(after, key)
    ]


def refuse_differences(saved: Described, now: Described, *, where: str) -> None:
    """Raise `CheckpointError` naming every setting in which a run differs from the saved one."""
    found = differences(saved, now)
    if found:
        raise CheckpointError(
            f"cannot resume {where}: {found[0]}"
            + "".join(f"\n  also {line}" for line in shortened(found[1:], 2))
            + "\n  with these settings it would be another run: choose another --out, or start from its weights with --init"
        )


def refuse_another_length(saved: Described, now: Described, *, extends_exactly: bool, step: int, where: str) -> None:
    """Raise `CheckpointError` where a run saved with one length after `step` steps cannot go on with another."""
    steps = int(str(now["length"]).split()[0])
    if saved["length"] == now["length"] or (extends_exactly and steps >= step):
        return
    why = (
        f"{step} steps are made already"
        if steps < step
        else "its schedule would have had other rates from the start on; only a constant one can be extended exactly"
    )
    raise CheckpointError(
        f"cannot resume {where}: length was {saved['length']}, now {now['length']}\n  {why}\n"
        "  to train on from its weights: another --out, with --init"
    )


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"
