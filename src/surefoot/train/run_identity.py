"""Comparison of a resumed run with its checkpoint. An error names the settings that would change
the run.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from surefoot.checkpoint.module_state import shortened
from surefoot.config.accepted_changes import ANOTHER_RUN, FROM_ITS_WEIGHTS
from surefoot.config.averaging import OF_AVERAGE
from surefoot.config.behavior import PICTURES_AS_SHOWN, behavior_of
from surefoot.config.durations import Length
from surefoot.config.mixture_weights import WEIGHTS
from surefoot.config.setting_change import SettingChange
from surefoot.config.tree import flat
from surefoot.errors import CheckpointError, ConfigError, Remedy, Setting
from surefoot.optim.lr_multipliers import FROZEN, is_frozen
from surefoot.schedules.joined import AnySchedule
from surefoot.schedules.lr_schedule import Schedule
from surefoot.tracking.format import counted

Described = Mapping[str, Any]

_WHICH_DATA = (".sha256", ".type", ".indices")  # suffixes of the settings that identify a data set
_NAMED = 5  # changed settings that an error names


def differences(saved: Described, now: Described) -> list[str]:
    """Return a line for each setting whose value differs: its dotted name and both values."""
    return list(_differences(saved, now).values())


def _differences(saved: Described, now: Described) -> dict[str, str]:
    before = {key: repr(value) for key, value in flat(saved).items()}
    after = {key: repr(value) for key, value in flat(now).items()}
    lines = {}
    for key in before | after:
        if key not in before and _was_not_recorded(key, after):
            continue
        value_before = before.get(key, "absent")
        value_after = after.get(key, "absent")
        if value_before != value_after:
            lines[key] = f"{key} was {value_before}, now {value_after}"
    return lines


_FOLLOWING = {
    "length": ("schedule",),
    "batch_size": ("micro_batch_size", "length", "schedule", "plateau.evaluate_every"),
    "ema": OF_AVERAGE,
    "data": ("length", "schedule", "plateau.evaluate_every"),
}
"""What changes in the identity of a run besides a setting that was changed."""
_SIZES = ("batch_size", "micro_batch_size")
_CUT_BY_SIZES = ("batches", "sha256")  # in the description of an order


def with_changed(
    saved: Described, now: Described, changes: Iterable[SettingChange]
) -> dict[str, Any]:
    """Return the identity of a saved run with the present values of settings that were changed
    since then, and of what follows from them.
    """
    names = set()
    for change in changes:
        if change.goes_back:
            continue
        name = change.setting
        names |= {name, *change.follows, *_FOLLOWING.get(name, ())}
        if name.startswith("model."):
            part = name.removeprefix("model.")
            names |= {f"model_settings.{part}", f"identity.model.{part}"}
        if name.startswith("optimizer."):
            names.add(f"{name.rpartition('.')[0]}.learning_rates")
        if name.rpartition(".")[2] == FROZEN and _has_same_others(saved, now, name):
            names.add(f"{name.rpartition('.')[0]}.lr_multipliers")
    changed = dict(saved)
    if isinstance(now.get("micro_batch_size"), str) and "micro_batch_size" in names:
        names |= set(_FOLLOWING["batch_size"])  # it decides the number of batches
    if names & set(_SIZES) and "plan" in saved.get("data", {}):
        changed["data"] = {**saved["data"], "plan": _recut(saved["data"], now["data"])}
    for name in sorted(names):
        if name == WEIGHTS:
            changed["data"] = _with_weights(changed["data"], now["data"])
            continue
        changed = _with_present(changed, now, name)
    return changed


def _has_same_others(saved: Described, now: Described, name: str) -> bool:
    """Return True if the factors on the learning rates of two optimizers differ at most in what is
    frozen. `name` is that of the setting, such as "optimizer.frozen".
    """
    groups = name.split(".")[:-1]
    others = []
    for described in (saved, now):
        optimizer: Any = described
        for group in groups:
            optimizer = optimizer.get(group, {})
        rates = optimizer.get("lr_multipliers", ())
        others.append([rate for rate in rates if not is_frozen(rate)])
    return others[0] == others[1]


def _with_present(saved: Described, now: Described, name: str) -> dict[str, Any]:
    """Return settings with the present value of one, by its dotted name."""
    group, _, rest = name.partition(".")
    changed = dict(saved)
    if group not in now:
        changed.pop(group, None)
    elif not rest:
        changed[group] = now[group]
    elif isinstance(now[group], Mapping) and isinstance(saved.get(group), Mapping):
        changed[group] = _with_present(saved[group], now[group], rest)
    return changed


def _with_weights(saved: Described, now: Described) -> dict[str, Any]:
    """Return the identity of the data of a saved run with the present weights of their mixture."""
    if saved["plan"]["order"] != "mixture" or now["plan"]["order"] != "mixture":
        return dict(saved)
    parts = dict(saved["parts"])
    for name in parts.keys() & now["parts"].keys():
        parts[name] = {**parts[name], "weight": now["parts"][name]["weight"]}
    plan = {**saved["plan"], "weights": now["plan"]["weights"]}
    return {**saved, "plan": plan, "parts": parts}


def _recut(saved: Described, now: Described) -> dict[str, Any]:
    """Return the description of the saved order after another size has cut it into other steps."""
    plan = dict(saved["plan"])
    for name in _CUT_BY_SIZES:
        if name in plan and name in now["plan"]:
            plan[name] = now["plan"][name]
    return plan


def printed_through(changes: Iterable[SettingChange], text: str) -> str:
    """Return the part of a model's printed form that changes of settings leave as it is. Layers in 8
    bits are others, with the same parameters; a setting of a model may be a number that it prints.

    >>> printed_through([SettingChange(1, 3, "model.dropout", 0.5, 0.1)], "Dropout(p=0.5)")
    'Dropout(p=#)'
    """
    for change in changes:
        if change.setting == "precision" and "fp8" in (change.was, change.now):
            return ""
        if change.setting.startswith("model."):
            text = re.sub(r"(?<=[=( ])[0-9][0-9.e+-]*", "#", text)
    return text


def _was_not_recorded(key: str, settings: Mapping[str, str]) -> bool:
    """Return True for a setting that 0.1.0 had without recording it."""
    if key.startswith("model_settings."):
        return True
    if key == "exact_sums":
        return settings[key] == "False"
    kind = settings.get(f"{key.removesuffix('sha256')}type")
    is_hash_of_hugging_face = key.endswith("sha256") and kind == "'Dataset'"
    return is_hash_of_hugging_face or ".attributes." in key


def user_changes(saved: Described, now: Described) -> list[str]:
    """Return `differences` without what follows from another one, the data first and the length
    last, which follows from data and batch size if it is in epochs.

    >>> adam = {"optimizer": {"name": "adam", "eps": 1e-8}, "batch_size": 8, "micro_batch_size": 8}
    >>> sgd = {"optimizer": {"name": "sgd"}, "batch_size": 4, "micro_batch_size": 4}
    >>> user_changes({"length": "6 steps", **adam}, {"length": "12 steps", **sgd})
    ["optimizer.name was 'adam', now 'sgd'", 'batch_size was 8, now 4', "length was '6 steps', now '12 steps'"]
    """
    changes = _differences(saved, now)
    for key in list(changes):
        part, _, name = key.rpartition(".")
        if part.startswith(("optimizer", "schedule")) and name in ("name", "shape"):
            # another optimizer or schedule has other settings
            kept = (f"{part}.name", f"{part}.lr", f"{part}.shape")
            for other in list(changes):
                if other.startswith(f"{part}.") and other not in kept:
                    del changes[other]
    has_whole_batches = all(
        settings.get("micro_batch_size") == settings.get("batch_size") for settings in (saved, now)
    )
    if "batch_size" in changes and has_whole_batches:
        changes.pop("micro_batch_size", None)
    if "data.samples" in changes:
        changes.pop("data.plan.samples", None)
    in_order = sorted(changes, key=lambda key: (key == "length", not key.startswith("data.")))
    return [changes[key] for key in in_order]


def machine_changes(then: Described, now: Described, *, how: str = "") -> list[str]:
    """Return the changed facts of `Components.machine` that change bits. `how` says how steps are
    computed now.

    >>> ddp = {"device": "cpu", "threads": 1, "ranks": 4, "parallel": "ddp", "exact": True}
    >>> machine_changes(
    ...     ddp, ddp | {"ranks": 1, "parallel": "none", "threads": 2}, how="repeated in one process"
    ... )
    ['threads was 1, now 2']
    """
    of_ranks = ("ranks", "parallel", "shards", "exact")  # 0.1.0 recorded the first two
    changes = differences(_without(then, of_ranks), _without(now, of_ranks))
    kind_then = then["parallel"]
    kind_now = now["parallel"]
    if kind_then != kind_now and "fsdp" in (kind_then, kind_now):
        why = "FSDP updates shards, which rounds otherwise"
    elif then.get("exact") and now["exact"]:
        return changes
    elif (then["ranks"], kind_then) == (now["ranks"], kind_now):
        why = "its sums are added in another order"
    else:
        why = "its sums depend on the number of ranks"
    if any(then.get(name, now.get(name)) != now.get(name) for name in of_ranks):
        how = how or f"now on {counted(now['ranks'], 'rank')} ({kind_now})"
        trained = f"trained on {counted(then['ranks'], 'rank')} ({kind_then})"
        changes.insert(0, f"{trained}, {how}: {why}")
    return changes


def _without(facts: Described, names: Collection[str]) -> Described:
    return {name: value for name, value in facts.items() if name not in names}


def refuse_differences(saved: Described, now: Described, *, where: str) -> None:
    """Raise `CheckpointError` if settings differ from those of the saved run, and name these
    settings.
    """
    changes = user_changes(saved, now)
    if not changes:
        return
    also = [f"also {line}" for line in changes[1:_NAMED]]
    if len(changes) > _NAMED:
        also.append(f"and {len(changes) - _NAMED} more")
    reasons = [*also, *_cure_of_pictures(changes, saved)]
    raise CheckpointError(
        "settings-changed",
        problem=changes[0],
        reason="\n".join(reasons) if reasons else "the settings of a run cannot change",
        remedy=[
            ANOTHER_RUN,
            FROM_ITS_WEIGHTS,
        ],
        changes=changes,
    ).inside(f"cannot resume {where}")


def has_same_samples(saved: Described, now: Described) -> bool:
    """Return True if two data sets have equally many samples in the same order."""
    return all(saved["data"].get(name) == now["data"].get(name) for name in ("plan", "samples"))


def refuse_other_data(saved: Described, now: Described, *, where: str, step: int) -> None:
    """Raise `CheckpointError` if the type or hash of the data differs from that of a run saved
    after `step` steps. The message lists the data before other settings.
    """
    data_before = _without(saved["data"], ["plan"])
    data_now = _without(now["data"], ["plan"])
    changes = differences({"data": data_before}, {"data": data_now})
    if not any(line.split()[0].endswith(_WHICH_DATA) for line in changes):
        return
    all_changes = []
    for line in user_changes(saved, now):
        if not line.startswith(_FOLLOWING["data"]):
            all_changes.append(line)
    reasons = [*shortened(all_changes, _NAMED), *_cure_of_pictures(changes, saved)]
    remedies: list[Remedy] = [ANOTHER_RUN]
    if has_same_samples(saved, now):
        remedies.append(("to accept the changed data:", Setting("accept_change", "data")))
    if step == 0:
        remedies.append("or remove that directory, in which no step was trained")
    raise CheckpointError(
        "data-changed",
        problem="the data set has changed",
        reason="\n".join(reasons),
        remedy=remedies,
        changes=all_changes,
    ).inside(f"cannot resume {where}")


def _cure_of_pictures(changes: Sequence[str], saved: Described) -> list[str]:
    """Return a line for a script whose run began before pictures were read as viewers show them. A
    recipe reads them as the run began.
    """
    behavior = behavior_of(saved)
    if behavior >= PICTURES_AS_SHOWN or not any("data.as_shown was" in line for line in changes):
        return []
    return [
        f"the run began with behavior {behavior}: load_images(..., behavior={behavior}) reads its"
        " pictures as it did"
    ]


def refuse_another_length(
    saved: Described,
    now: Described,
    length: Length,
    *,
    schedule: AnySchedule,
    step: int,
    where: str,
) -> None:
    """Raise `CheckpointError` if a run saved after `step` steps cannot continue with another
    length.

    `schedule` is in steps; its percentages refer to the length with which the run began. The
    learning rates of runs of two lengths are equal only up to a certain step. The saved run must
    not have passed this step.
    """
    before = int(str(saved["length"]).split()[0])
    if before == length.steps:
        return
    shorter = replace(length, steps=min(before, length.steps))
    shared = 0
    misfit = ""
    try:
        shared = schedule.shared_steps(shorter)
    except ConfigError as problem:  # the longer run's schedule does not fit in the shorter run
        misfit = str(problem).splitlines()[0]
    if step <= min(length.steps, shared) and not misfit:
        return
    if step > length.steps:
        why = f"{step} steps are already completed"
    elif misfit:
        why = misfit
    elif isinstance(schedule, Schedule) and schedule.shape == "wsd":
        why = f"its cooldown begins at step {shared} of a run of {shorter.steps} steps, and {step} steps are completed"
    else:
        why = (
            f"with another length, its learning rates differ from step {shared} on,"
            f" and {step} steps are completed\n"
            "constant, inverse_sqrt and multistep can always be extended exactly, wsd only until its cooldown begins"
        )
    if differences(_without(saved, ["length"]), _without(now, ["length"])):
        # what changed the length may be among them
        refuse_differences(saved, now, where=where)
    raise length_changed(before, length.steps, why=why).inside(f"cannot resume {where}")


def length_changed(before: int, now: int, *, why: str) -> CheckpointError:
    """Return the error for a length, in steps, with which a run cannot go on."""
    return CheckpointError(
        "length-changed",
        problem=f"length was {before} steps, now {now} steps",
        reason=why,
        remedy=[
            ANOTHER_RUN,
            FROM_ITS_WEIGHTS,
        ],
        setting="length",
        value=f"{now} steps",
    )
