"""Declarations of settings. Flags, config.toml, the settings page and comparisons on a resume
derive from these. Imports no torch."""

import ast
import dataclasses
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal, TypeVar

from surefoot.config.durations import Interval, Length
from surefoot.config.tree import When
from surefoot.errors import ConfigError, SurefootError, out_of_range, together

Role = Literal["identity", "per_rank", "one_session", "cadence", "observer"]
Check = Callable[..., Any]
T = TypeVar("T")


def setting(
    default: Any = MISSING,
    *,
    factory: Any = MISSING,
    check: Check | None = None,
    identity: bool = False,
    per_rank: bool = False,
    one_session: bool = False,
    cadence: bool = False,
    observer: bool = False,
    by_fingerprint: bool = False,
    absent_by_default: bool = False,
    shared: bool = True,
    path: bool = False,
    after: str | None = None,
    group: str | None = None,
    changes_at: When | None = None,
    most_used: bool = False,
    needs: str | None = None,
) -> Any:
    """Declare a setting: its default, its check `check(value, setting=name)`, and exactly one role.

    identity: a resume with another value is refused; with `by_fingerprint`, hashes of the setting's
    results are compared instead, and with `absent_by_default`, its default is left out, because
    older runs do not know the setting. per_rank: may differ between ranks and between sessions.
    one_session: reset by a resume. cadence: an interval; its `check` also takes the run's `length`
    and returns an `Interval`. observer: may change on a resume. Settings other than per_rank must be
    equal on all ranks, unless `shared` is False. With `path`, a text is a path (`tree.PATH`). `after` names the preceding field (`ordered`).
    `group` is the section of `--help-all`, by default the preceding field's section. `--help` shows
    a `most_used` setting. `changes_at` says when another value could hold while the run goes on
    (`tree.When`): a setting that a resume may change can at any step, unless it says otherwise; one
    of the run's identity must say it. Without the setting that it `needs`, a setting does nothing,
    which the header of a run says.
    """
    is_given = {
        "identity": identity,
        "per_rank": per_rank,
        "one_session": one_session,
        "cadence": cadence,
        "observer": observer,
    }
    roles = [role for role in is_given if is_given[role]]
    if len(roles) != 1:
        raise TypeError(
            f"a setting needs exactly one role of {', '.join(typing.get_args(Role))}; this one has {roles or 'none'}"
        )
    if changes_at is None:
        if identity:
            raise TypeError(
                "a setting of the run's identity needs changes_at: step, epoch or never"
            )
        changes_at = "step"
    metadata = {
        "role": roles[0],
        "check": check,
        "by_fingerprint": by_fingerprint,
        "absent_by_default": absent_by_default,
        "shared": shared and not per_rank,
        "path": path,
        "after": after,
        "group": group,
        "changes_at": changes_at,
        "most_used": most_used,
        "needs": needs,
    }
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def number(*, min_value: float, below: float = math.inf, kind: Any = int) -> Check:
    """Return a check for an integer, or a number of another `kind`, within these bounds.

    >>> number(min_value=0)(-1, setting="warmup")
    Traceback (most recent call last):
    surefoot.errors.ConfigError: warmup = -1 must be a whole number, 0 or more
      [setting-out-of-range]
    """
    noun = "whole number" if kind is int else "number"
    meaning = f"a {noun}, {min_value} or more"
    if below < math.inf:
        meaning += f" and below {below}"

    def check(value: Any, *, setting: str) -> None:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not min_value <= value < below:
            raise out_of_range(setting, value, meaning)

    return check


def default(value: Any) -> Any:
    """Change the default of an inherited setting; its check, text and role stay the same. Its type
    may lose members, such as None.
    """
    return dataclasses.field(default=value)


@dataclass(kw_only=True, eq=False, repr=False)
class Declared:
    """A base class of settings. Each new field must be declared by `setting(...)`; otherwise the
    import fails.
    """

    def __init_subclass__(cls) -> None:
        inherited = {field.name: field for field in dataclasses.fields(cls)}
        for name, annotation in inspect.get_annotations(cls).items():
            field = cls.__dict__.get(name)
            is_declared = isinstance(field, dataclasses.Field) and "role" in field.metadata
            if name not in inherited:
                if not is_declared:
                    raise TypeError(
                        f"{cls.__name__}.{name} is not declared by setting(...), which states its"
                        " role in a resume"
                    )
                continue
            if (
                is_declared
                or not isinstance(field, dataclasses.Field)
                or not _narrows(cls, annotation, inherited[name])
            ):
                raise TypeError(
                    f"{cls.__name__}.{name}: only the default of an inherited setting may change,"
                    " by default(...)"
                )
            field.metadata = inherited[name].metadata

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name in {field.name for field in dataclasses.fields(self)}:
            kind = type(self).__name__
            raise ConfigError(
                "setting-assigned",
                problem=f"{name} cannot be assigned: the settings of a {kind} are checked once",
                remedy=f"set it where it is created: {kind}(..., {name}={value!r})",
                setting=name,
                value=value,
            )
        super().__setattr__(name, value)


def _narrows(cls: type, annotation: Any, inherited: dataclasses.Field[Any]) -> bool:
    """Return True if a class gives an inherited field the same type, or some of its members."""
    owner = next(
        kind for kind in cls.__mro__[1:] if inherited.name in inspect.get_annotations(kind)
    )
    return _members(cls, annotation) <= _members(owner, inherited.type)


def _members(owner: type, annotation: Any) -> set[Any]:
    """Return the members of the union that a field's annotation names, or its one type."""
    # `get_type_hints` of the class would evaluate its other fields, too
    names = {"__annotations__": {"setting": annotation}, "__module__": owner.__module__}
    hint = typing.get_type_hints(type(owner.__name__, (), names))["setting"]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return set(typing.get_args(hint))
    return {hint}


def ordered(kind: type[T]) -> type[T]:
    """Move each field behind the field that its `after` names ("" is the start), in signature, help
    and files.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    order: list[str] = list(vars(kind.__mro__[1])["__dataclass_fields__"])
    new = [name for name in inspect.get_annotations(kind) if name not in order]
    before = order[-1] if order else ""
    for name in new:
        after = fields[name].metadata["after"]
        if after is not None:
            before = after
        place = order.index(before) + 1 if before else 0
        order.insert(place, name)
        before = name
    signature = inspect.signature(vars(kind)["__init__"])
    kind.__dataclass_fields__ = {name: fields[name] for name in order}  # type: ignore[attr-defined]
    parameters = [signature.parameters[name] for name in order]
    kind.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return kind


def texts_of(kind: type[Any]) -> Mapping[str, str]:
    """Return the string below each field of a class and of its base classes. A class without a
    source file has none. They are kept: reading the source takes most of the time of a help.
    """
    if kind not in _texts:
        _texts[kind] = _read_texts(kind)
    return _texts[kind]


_texts: dict[type[Any], Mapping[str, str]] = {}


def _read_texts(kind: type[Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(owner))
        except (OSError, TypeError):
            continue
        definition = ast.parse(source).body[0]
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for field, below in itertools.pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    texts[name] = " ".join(text.split())
    return texts


def by_group(kind: type[Declared]) -> dict[str, list[dataclasses.Field[Any]]]:
    """Return the settings of a class by the section of their help, in the order of its
    signature.
    """
    groups: dict[str, list[dataclasses.Field[Any]]] = {}
    group = "what is trained"
    for field in dataclasses.fields(kind):
        group = field.metadata["group"] or group
        groups.setdefault(group, []).append(field)
    return groups


class KeywordsDoc:
    """The docstring of a class followed by its keywords, made when it is read: `help` needs them,
    and reading the source takes time.
    """

    head = "Keywords, by subject:"

    def __init__(self, doc: str | None) -> None:
        self.doc = doc

    def __get__(self, _instance: object, kind: type[Declared]) -> str:
        paragraphs = [inspect.cleandoc(self.doc or ""), self.head]
        texts = texts_of(kind)
        for group, fields in by_group(kind).items():
            lines = [group]
            for field in fields:
                default = " (required)" if field.default is MISSING else f" = {field.default!r}"
                lines.append(f"  {field.name}{default}")
                lines += textwrap.wrap(
                    texts[field.name], 76, initial_indent="    ", subsequent_indent="    "
                )
            paragraphs.append("\n".join(lines))
        return "\n\n".join(paragraphs)


def names_of(kind: type[Declared] | Declared, role: Role) -> list[str]:
    """Return the names of the settings with this role.

    >>> from surefoot.config.train_settings import TrainSettings
    >>> names_of(TrainSettings, "one_session")
    ['stop_after', 'time_limit', 'check_state']
    """
    return [field.name for field in dataclasses.fields(kind) if field.metadata["role"] == role]


def without_effect(settings: Declared) -> dict[str, list[str]]:
    """Return the names of the settings that do nothing, by the name of the setting that they need
    and that is absent.
    """
    names: dict[str, list[str]] = {}
    for field in dataclasses.fields(settings):
        needed = field.metadata["needs"]
        if needed is None or getattr(settings, needed):
            continue
        if getattr(settings, field.name) != field.default:
            names.setdefault(needed, []).append(field.name)
    return names


def names_that_change(kind: type[Declared] | Declared) -> list[str]:
    """Return the names of the settings of a run's identity that can change while the run goes on.

    >>> from surefoot.config.train_settings import TrainSettings
    >>> names_that_change(TrainSettings)[:3]
    ['length', 'batch_size', 'micro_batch_size']
    """
    names = []
    for field in dataclasses.fields(kind):
        if field.metadata["role"] == "identity" and field.metadata["changes_at"] == "step":
            names.append(field.name)
    return names


def shared_by_ranks(settings: Declared) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks, by name."""
    shared = [field.name for field in dataclasses.fields(settings) if field.metadata["shared"]]
    return {name: getattr(settings, name) for name in shared}


def identity_of(settings: Declared, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that identify a run. Values in `resolved` replace the values of the
    settings.
    """
    fields = dataclasses.fields(settings)
    identity: dict[str, Any] = {}
    for field in fields:
        if field.metadata["role"] == "identity" and not field.metadata["by_fingerprint"]:
            identity[field.name] = getattr(settings, field.name)
    identity |= resolved
    for field in fields:
        if field.metadata["absent_by_default"] and identity[field.name] == field.default:
            del identity[field.name]
    return identity


def cadences(settings: Declared, *, length: Length) -> dict[str, Interval]:
    """Return the interval of each cadence setting by name, for a run of this length."""
    intervals = {}
    for field in dataclasses.fields(settings):
        if field.metadata["role"] == "cadence":
            text = getattr(settings, field.name)
            parse = field.metadata["check"]
            intervals[field.name] = parse(text, length=length, setting=field.name)
    return intervals


def checked(*checks: Callable[[], Any]) -> list[Any]:
    """Return the results of all checks. Raises one `ConfigError` with all problems."""
    values = []
    problems: list[SurefootError] = []
    for check in checks:
        try:
            values.append(check())
        except ConfigError as problem:
            problems.append(problem)
    if problems:
        raise together(problems)
    return values
