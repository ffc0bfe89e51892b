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

_RELATIVE, _RELATIVE_IN_FEW_BITS = (
    1e-4,
    2e-2,
)  # relative tolerances of a loss on another machine: fp32, other dtypes
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
    texts = {
        name: _changed_texts(before["sources"][name], now["sources"][name]) for name in CHANGES
    }
    elsewhere = is_elsewhere(before, now)
    samples = _differing(before["samples"], now["samples"])
    unlike = [
        (split, _differing(before["splits"].get(split, {}), now["splits"].get(split, {})))
        for split in steering
    ]
    batches = before["micro_batch"], now["micro_batch"]
    other_batch = _may_compare_batches(*batches) and batches[0] != batches[1]
    changes, notes = list[Change](), list[str]()
    if elsewhere and (samples or other_batch):
        notes.append(
            "samples have other bits than before, as is normal on another machine: only the loss is compared"
        )
    elif not elsewhere:
        if samples:
            rest = len(samples) - 1
            which = f"{samples[0]} and {rest} other{'s' * (rest > 1)}" if rest else samples[0]
            what = f"{which} of the training data {'have' if rest else 'has'} changed"
            changes.append(Change(("data",), what, _cause(texts["data"])))
        elif other_batch:
            changes.append(_change_of_batch(before, now, texts))
        changes += [
            Change(("data",), f"{labels[0]} of {split}, which affects the run, has changed")
            for split, labels in unlike
            if labels
        ]
    why = _why_not_compared(before, now, elsewhere=elsewhere)
    if now["failed"] and before["loss"] is not None:
        notes.append(
            "the forward pass of the first micro-batch worked when the run began, but fails now: its loss is not compared"
        )
    elif why is not None:
        changes += [
            Change(
                (name,), f"the source code of the {name} changed, and {why}", _cause(texts[name])
            )
            for name in ("loss", "model")
            if texts[name]
        ]
    else:
        changes += _changes_of_loss(before, now, texts)
    if texts["optimizer"]:
        changes.append(
            Change(
                ("optimizer",),
                "the source code of the optimizer changed",
                _cause(texts["optimizer"]),
            )
        )
    changed = {name for change in changes for name in change.names}
    if unharmed := [each for name in CHANGES if name not in changed for each in texts[name]]:
        notes.append(f"{_names(unharmed)} changed, but the results on the first samples did not")
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
    if refused := [change for change in changes if not set(change.names) <= set(accepted)]:
        names = ",".join(dict.fromkeys(name for change in refused for name in change.names))
        also = f"; also {'; '.join(shortened([change.text for change in refused[1:]], 2))}" * (
            len(refused) > 1
        )
        reason = f"{refused[0].cause}{also}; with this change it would be another run"
        raise CheckpointError(
            "program-changed",
            problem=refused[0].text,
            reason=reason.removeprefix("; "),
            remedy=[
                ANOTHER_RUN,
                FROM_ITS_WEIGHTS,
                ("to resume with this change:", Setting("accept_change", names)),
            ],
            changed=names.split(","),
        ).inside(f"cannot resume {where}")


def _change_of_batch(
    before: Fingerprints, now: Fingerprints, texts: Mapping[str, Sequence[str]]
) -> Change:
    counts = before["micro_batch"]["count"], now["micro_batch"]["count"]
    if counts[0] != counts[1]:
        what = f"the first micro-batch had {counts[0]} targets, and now has {counts[1]} (count_fn)"
        return Change(("loss",), what, _cause(texts["loss"]))
    own = (
        "collate"
        if texts["collate"] or (now["sources"]["collate"] and not texts["data"])
        else "data"
    )
    what = "collate_fn now returns" if own == "collate" else "the training data now gives"
    return Change((own,), f"{what} a different first micro-batch", _cause(texts[own]))


def _changes_of_loss(
    before: Fingerprints, now: Fingerprints, texts: Mapping[str, Sequence[str]]
) -> list[Change]:
    with_noise = " and noise added to its outputs"
    for name, added in (("loss", ""), ("noisy_loss", with_noise)):
        values = before.get(name), now.get(name)
        if None in values or _is_equal(*values, before=before, now=now):
            continue
        names = tuple(each for each in ("loss", "model") if texts[each]) or ("loss",)
        what = (
            f"the loss of the first micro-batch, with the weights of step 0{added}, was {values[0]},"
            f" and is now {values[1]}"
        )
        return [Change(names, what, _cause([text for each in names for text in texts[each]]))]
    return []


def _why_not_compared(before: Fingerprints, now: Fingerprints, *, elsewhere: bool) -> str | None:
    if None in (before["loss"], now["loss"]):
        return "no loss can be compared"
    batches = before["micro_batch"], now["micro_batch"]
    if None not in batches and not _may_compare_batches(*batches):
        return "its value cannot be compared: the first micro-batch has a different size"
    if not elsewhere and batches[0] != batches[1]:
        return "its value cannot be compared: the first micro-batch is different"
    is_other = any(
        before["machine"][name] != now["machine"][name] for name in ("torch", "device", "hardware")
    )
    if is_other and (before["draws"] or now["draws"]):
        return "its value cannot be compared: another device draws different random numbers"
    return None


def _may_compare_batches(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> bool:
    return before is not None and now is not None and before["samples"] == now["samples"]


def _is_equal(was: Any, is_now: Any, *, before: Fingerprints, now: Fingerprints) -> bool:
    machine = now["machine"]
    if before["machine"] == machine and (machine["device"] == "cpu" or machine["deterministic"]):
        return bool(was == is_now)
    a = float(was)
    b = float(is_now)
    relative = _RELATIVE if now["format"] == "fp32" else _RELATIVE_IN_FEW_BITS
    return math.isclose(a, b, rel_tol=relative, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [label for label in before if now.get(label, before[label]) != before[label]]


def _changed_texts(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the functions and classes with changed, added or removed source code. Moving a
    function to another file is not a change.
    """
    moved = {(_without_file(name), text) for name, text in before.items()}
    came = [name for name, text in now.items() if (_without_file(name), text) not in moved]
    return came + [
        name for name in before if _without_file(name) not in set(map(_without_file, now))
    ]


def _without_file(name: str) -> str:
    return name.partition(" in ")[0]


def _cause(texts: Sequence[str]) -> str:
    return (
        f"changed: {_names(texts)}"
        if texts
        else "the source code is unchanged: a value, a file, or code that it uses has changed"
    )


def _names(texts: Sequence[str]) -> str:
    return ", ".join(shortened(list(texts), 3))
