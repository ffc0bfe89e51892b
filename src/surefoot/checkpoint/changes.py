"""Changes of the program since the run began. A change is an error unless the user accepts the name
of the change.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.checkpoint.module_state import shortened
from surefoot.config.accepted_changes import ANOTHER_RUN, CHANGES, FROM_ITS_WEIGHTS
from surefoot.errors import CheckpointError, Setting

# relative tolerances of a loss on another machine
_RELATIVE_IN_FP32 = 1e-4
_RELATIVE_IN_FEW_BITS = 2e-2
_READERS = ("torch", "surefoot", "device", "hardware", "cpu")  # may change the bits of samples
Fingerprints = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """A computation whose result has changed since the start of the run. The user accepts it with
    `names`.
    """

    names: tuple[str, ...]
    text: str
    cause: str = ""  # the changed functions or classes, if known


def find_changes(
    before: Fingerprints, now: Fingerprints, *, steering: Collection[str] = ()
) -> tuple[list[Change], list[str]]:
    """Return the computations whose results have changed, and notes on other differences.

    On the same machine, values must be equal bit for bit. On another machine, only losses are
    compared, within rounding. `steering` names the splits whose scores affect the run. Changed
    source code counts as a change if no values can be compared.
    """
    code = {name: _changed_code(before["sources"][name], now["sources"][name]) for name in CHANGES}
    elsewhere = is_elsewhere(before, now)
    changes: list[Change] = []
    notes: list[str] = []
    if not elsewhere:
        changes += _changes_of_data(before, now, code, steering=steering)
    elif _differing(before["samples"], now["samples"]) or _has_other_batch(before, now):
        notes.append(
            "samples have other bits than before, as is normal on another machine: only the loss is compared"
        )
    why = _why_not_compared(before, now, elsewhere=elsewhere)
    if now["failed"] and before["loss"] is not None:
        notes.append(
            "the forward pass of the first micro-batch worked when the run began, but fails now: its loss is not compared"
        )
    elif why is not None:
        for name in ("loss", "model"):
            if code[name]:
                what = f"the source code of the {name} changed, and {why}"
                changes.append(Change((name,), what, _cause(code[name])))
    else:
        changes += _changes_of_loss(before, now, code)
    if code["optimizer"]:
        what = "the source code of the optimizer changed"
        changes.append(Change(("optimizer",), what, _cause(code["optimizer"])))
    without_effect = []
    for name in CHANGES:
        if not any(name in change.names for change in changes):
            without_effect += code[name]
    if without_effect:
        notes.append(
            f"{_names(without_effect)} changed, but the results on the first samples did not"
        )
    return changes, notes


def is_elsewhere(before: Fingerprints, now: Fingerprints) -> bool:
    """Return True if the machine, torch or surefoot has changed, which may change the bits of
    samples.
    """
    return any(before["machine"][name] != now["machine"][name] for name in _READERS)


def refuse_changes(changes: Sequence[Change], *, accepted: Collection[str], where: str) -> None:
    """Raise `CheckpointError` for the changes whose names are not all in `accepted`; `where` is the
    step in words.
    """
    refused = [change for change in changes if not set(change.names) <= set(accepted)]
    if not refused:
        return
    names: list[str] = []
    for change in refused:
        names += [name for name in change.names if name not in names]
    first, *others = refused
    reasons = [first.cause] if first.cause else []
    if others:
        further = shortened([change.text for change in others], 2)
        reasons.append(f"also {'; '.join(further)}")
    reasons.append("with this change it would be another run")
    raise CheckpointError(
        "program-changed",
        problem=first.text,
        reason="; ".join(reasons),
        remedy=[
            ANOTHER_RUN,
            FROM_ITS_WEIGHTS,
            ("to resume with this change:", Setting("accept_change", ",".join(names))),
        ],
        changed=names,
    ).inside(f"cannot resume {where}")


def _changes_of_data(
    before: Fingerprints,
    now: Fingerprints,
    code: Mapping[str, Sequence[str]],
    *,
    steering: Collection[str],
) -> list[Change]:
    changes = []
    samples = _differing(before["samples"], now["samples"])
    if samples:
        changes.append(_change_of_samples(samples, code["data"]))
    elif _has_other_batch(before, now):
        changes.append(_change_of_batch(before, now, code))
    for split in steering:
        labels = _differing(before["splits"].get(split, {}), now["splits"].get(split, {}))
        if labels:
            what = f"{labels[0]} of {split}, which affects the run, has changed"
            changes.append(Change(("data",), what))
    return changes


def _change_of_samples(labels: Sequence[str], code: Sequence[str]) -> Change:
    which = labels[0]
    has = "has"
    rest = len(labels) - 1
    if rest:
        others = "other" if rest == 1 else "others"
        which += f" and {rest} {others}"
        has = "have"
    return Change(("data",), f"{which} of the training data {has} changed", _cause(code))


def _change_of_batch(
    before: Fingerprints, now: Fingerprints, code: Mapping[str, Sequence[str]]
) -> Change:
    first_count = before["micro_batch"]["count"]
    count = now["micro_batch"]["count"]
    if first_count != count:
        what = f"the first micro-batch had {first_count} targets, and now has {count} (count_fn)"
        return Change(("loss",), what, _cause(code["loss"]))
    has_collate = bool(now["sources"]["collate"])
    if code["collate"] or (has_collate and not code["data"]):
        what = "collate_fn now returns a different first micro-batch"
        return Change(("collate",), what, _cause(code["collate"]))
    what = "the training data now gives a different first micro-batch"
    return Change(("data",), what, _cause(code["data"]))


def _changes_of_loss(
    before: Fingerprints, now: Fingerprints, code: Mapping[str, Sequence[str]]
) -> list[Change]:
    with_noise = " and noise added to its outputs"
    for name, added in (("loss", ""), ("noisy_loss", with_noise)):
        first_loss = before.get(name)
        loss = now.get(name)
        if first_loss is None or loss is None:
            continue
        if not _is_equal(first_loss, loss, before=before, now=now):
            names = tuple(part for part in ("loss", "model") if code[part]) or ("loss",)
            what = (
                f"the loss of the first micro-batch, with the weights of step 0{added}, was"
                f" {first_loss}, and is now {loss}"
            )
            return [Change(names, what, _cause([*code["loss"], *code["model"]]))]
    return []


def _why_not_compared(before: Fingerprints, now: Fingerprints, *, elsewhere: bool) -> str | None:
    if before["loss"] is None or now["loss"] is None:
        return "no loss can be compared"
    first_batch = before["micro_batch"]
    batch = now["micro_batch"]
    are_hashed = first_batch is not None and batch is not None
    if are_hashed and not _may_compare_batches(first_batch, batch):
        return "its value cannot be compared: the first micro-batch has a different size"
    if not elsewhere and first_batch != batch:
        return "its value cannot be compared: the first micro-batch is different"
    is_other_device = any(
        before["machine"][name] != now["machine"][name] for name in ("torch", "device", "hardware")
    )
    if is_other_device and (before["draws"] or now["draws"]):
        return "its value cannot be compared: another device draws different random numbers"
    return None


def _has_other_batch(before: Fingerprints, now: Fingerprints) -> bool:
    first_batch = before["micro_batch"]
    batch = now["micro_batch"]
    return _may_compare_batches(first_batch, batch) and first_batch != batch


def _may_compare_batches(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> bool:
    return before is not None and now is not None and before["samples"] == now["samples"]


def _is_equal(first_loss: str, loss: str, *, before: Fingerprints, now: Fingerprints) -> bool:
    machine = now["machine"]
    is_deterministic = machine["device"] == "cpu" or machine["deterministic"]
    if before["machine"] == machine and is_deterministic:
        return first_loss == loss
    a = float(first_loss)
    b = float(loss)
    if math.isnan(a) and math.isnan(b):
        return True
    relative = _RELATIVE_IN_FP32 if now["format"] == "fp32" else _RELATIVE_IN_FEW_BITS
    return math.isclose(a, b, rel_tol=relative, abs_tol=1e-6)


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [label for label in before if now.get(label, before[label]) != before[label]]


def _changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the functions and classes with changed, added or removed source code. Moving a
    function to another file is not a change.
    """
    known = {(_without_file(name), text) for name, text in before.items()}
    new = [name for name, text in now.items() if (_without_file(name), text) not in known]
    present = {_without_file(name) for name in now}
    removed = [name for name in before if _without_file(name) not in present]
    return new + removed


def _without_file(name: str) -> str:
    return name.partition(" in ")[0]


def _cause(code: Sequence[str]) -> str:
    if code:
        return f"changed: {_names(code)}"
    return "the source code is unchanged: a value, a file, or code that it uses has changed"


def _names(code: Sequence[str]) -> str:
    return ", ".join(shortened(code, 3))
