"""Error messages for unknown keywords, with the probable keyword and its value. Other libraries'
keywords are recognized. Imports no torch."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

from surefoot.config.closest import closest
from surefoot.config.numpy_numbers import plain_number, plain_numbers
from surefoot.errors import ConfigError, Setting, at_boundary, out_of_range

T = TypeVar("T", bound=Callable[..., Any])

_OF_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# Keywords of other libraries -> replacements, the first whose keyword exists. {} is the value's
# repr, {n} has no quotes.
_FOREIGN_NAMES: Mapping[str, tuple[str, ...]] = {
    "epochs num_epochs n_epochs max_epochs num_train_epochs": ('length="{n} epochs"',),
    "steps max_steps num_steps n_steps total_steps num_training_steps max_iters iterations": (
        'length="{n} steps"',
    ),
    "output_dir out_dir out save_dir log_dir logging_dir default_root_dir directory": (
        "run_dir={}",
    ),
    "resume resume_from resume_from_checkpoint ckpt_path": ("run_dir=...",),
    "learning_rate base_lr": ("lr={}", "optimizer=sf.optim.adamw(lr={})"),
    "lr": ("optimizer=sf.optim.adamw(lr={})",),
    "weight_decay": ("optimizer=sf.optim.adamw(lr=..., weight_decay={})",),
    "wd decay l2": ("weight_decay={}", "optimizer=sf.optim.adamw(lr=..., weight_decay={})"),
    "momentum": ("optimizer=sf.optim.sgd(lr=..., momentum={})",),
    "beta1 beta2 adam_beta1 adam_beta2": (
        "betas=(0.9, 0.999)",
        "optimizer=sf.optim.adamw(lr=..., betas=(0.9, 0.999))",
    ),
    "epsilon adam_epsilon": ("eps={}", "optimizer=sf.optim.adamw(lr=..., eps={})"),
    "warmup_steps num_warmup_steps": (
        'warmup="{n} steps"',
        'schedule=sf.schedules.cosine(warmup="{n} steps")',
    ),
    "warmup_ratio warmup": ('warmup="5%"', 'schedule=sf.schedules.cosine(warmup="5%")'),
    "min_lr eta_min lr_min end_lr": (
        "min_lr_ratio=0.1",
        "schedule=sf.schedules.cosine(min_lr_ratio=0.1)",
    ),
    "scheduler lr_scheduler lr_scheduler_type lr_schedule": (
        "schedule=sf.schedules.cosine(...), or from a torch scheduler: sf.schedules.from_scheduler(factory)",
    ),
    "step_size": ('milestones="every {n} steps"',),
    "cycle_momentum base_momentum max_momentum": ("momentum_range=(0.85, 0.95)",),
    "num_workers dataloader_num_workers": ("workers={}",),
    "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum": (
        "micro_batch_size=batch_size // {}",
    ),
    "train_batch_size per_device_train_batch_size": ("batch_size={}",),
    "train train_dataset train_set trainset train_loader train_dataloader train_dataloaders dataset dataloader": (
        "train_data={}",
        "data={}",
    ),
    "data": ("train_data={}",),
    "eval_dataset val_dataset valid_dataset test_dataset val_data eval_data validation_data evaluate val_loader"
    " val_dataloaders": ('splits={"val": sf.Split({})}',),
    "compute_metrics metrics": ('splits={"val": sf.Split(data, metrics=...)}',),
    "outputs": ("predict={}",),
    "scores metric": ("metrics={}", 'splits={"val": sf.Split(data, metrics=...)}'),
    "collator data_collator": ("collate_fn={}",),
    "loss_fn loss_function criterion objective": ("loss={}",),
    "optim optimizers": ("optimizer={}",),
    "max_grad_norm gradient_clip_val grad_clip clip_grad_norm clip_norm": ('clip="norm {n}"',),
    "fp16": ('precision="fp16"',),
    "bf16 amp use_amp mixed_precision autocast": ('precision="bf16"',),
    "tf32": ('precision="tf32"',),
    "dtype": ("precision=...",),
    "torch_compile": ("compile={}",),
    "gradient_checkpointing": ('activation_checkpointing="blocks"',),
    "save_steps": ('save_every="{n} steps"',),
    "eval_steps eval_every val_every": ('evaluate_every="{n} steps"',),
    "logging_steps log_interval log_every_n_steps": ('log_every="{n} steps"',),
    "save_total_limit": ("keep_last={}",),
    "report_to": ("trackers={}",),
    "shuffle": ('order="shuffled", which is the default, or order="sequential"',),
    "random_seed manual_seed": ("seed={}",),
    "strategy": ("parallel={}",),
    "ema_decay": ("ema={}",),
    "update_after_step ema_update_after_step": ('ema_start="{n} steps"',),
    "ema_update_every ema_update_interval": ('ema_every="{n} steps"',),
    "ema_warmup use_ema_warmup": ("ema_ramp={}",),
    "patience": ('early_stopping=sf.EarlyStopping("min val/loss", patience={})',),
    "val_split validation_split test_size held_out_fraction": ("val_fraction={}",),
    "watch": ("monitor={}",),
    "rates lr_mult param_groups": (
        "lr_multipliers={}",
        "optimizer=sf.optim.adamw(lr=..., lr_multipliers={})",
    ),
}
_REPLACEMENTS = {
    word.replace("_", ""): texts
    for words, texts in _FOREIGN_NAMES.items()
    for word in words.split()
}
_NO_KEYWORD = {  # concepts without a keyword of Run
    **dict.fromkeys(
        ("callbacks", "callback"),
        "put your code into the body of `for step in run:`, inside `with run:`",
    ),
    **dict.fromkeys(
        ("devices", "gpus", "num_gpus", "nproc"),
        "start several processes with torchrun, or `surefoot train FILE.py:build --nproc {}`",
    ),
    **dict.fromkeys(
        ("logger", "loggers"),
        "leave it out: a run writes its records to run_dir itself, and `step.log(name=value)` adds yours",
    ),
}
_FOREIGN_METHODS = {  # methods of other libraries -> what to write instead
    "fit fit_generator learn train_model run launch start": "run.train()",
    "validate validation val eval score": "run.evaluate()",
    "test": 'run.evaluate("test")',
    "save_checkpoint save_model save_state checkpoint": "run.save()",
    "load load_model load_from_checkpoint load_state_dict restore": (
        "sf.load(run_dir).load_model(...)"
    ),
    "resume": "run.train(), which resumes from the newest checkpoint in run_dir",
    "log log_metrics log_dict": "step.log(name=value) in the body of `for step in run:`",
    "history": "sf.load(run_dir).records()",
    "global_step current_step step iteration": "run.state.step",
    "summary describe": "print(run)",
    "stop_training": "run.stop()",
    "add_callback": "your code in the body of `for step in run:`",
}
_METHODS = {name: text for names, text in _FOREIGN_METHODS.items() for name in names.split()}

_EXAMPLES = {
    "monitor": '"min val/loss"',
    "patience": "5",
    "length": '"10 epochs"',
    "identity": '{"my_rule": 1})  # JSON that a resume compares, because it cannot compare functions',
}


def known_keywords(constructor: T) -> T:
    """Make a function or class raise `ConfigError` for an unknown keyword, with the probable
    keyword, and for a missing one.

    >>> @known_keywords
    ... def adamw(lr, *, weight_decay=0.0): ...
    >>> adamw(learning_rate=0.1)
    Traceback (most recent call last):
    surefoot.errors.ConfigError: adamw(learning_rate=0.1): adamw has no keyword learning_rate
      its keywords: lr, weight_decay
      write lr=0.1
      [keyword-unknown]
    >>> adamw()
    Traceback (most recent call last):
    surefoot.errors.ConfigError: adamw(...): missing lr
      its keywords: lr, weight_decay
      write adamw(..., lr=...)
      [keyword-missing]
    """
    if isinstance(constructor, type):
        setattr(constructor, "__init__", known_keywords(vars(constructor)["__init__"]))  # noqa: B010 (mypy)
        return constructor
    signature = inspect.signature(constructor)
    known = [name for name in signature.parameters if name != "self"]
    required = []
    for keyword in known:
        parameter = signature.parameters[keyword]
        if parameter.default is inspect.Parameter.empty and parameter.kind not in _OF_SEVERAL:
            required.append(keyword)
    name = constructor.__qualname__.removesuffix(".__init__")
    # elsewhere a list may be a data set
    of_settings = constructor.__module__.startswith(("surefoot.optim", "surefoot.schedules"))

    def plain(keyword: str, value: Any) -> Any:
        is_searched = of_settings or keyword == "identity"
        return plain_numbers(value) if is_searched else plain_number(value)

    @at_boundary
    @functools.wraps(constructor)
    def call(*arguments: Any, **keywords: Any) -> Any:
        for keyword, value in keywords.items():
            if keyword not in known:
                raise _unknown(name, keyword, value, known)
        try:
            bound = signature.bind_partial(*arguments, **keywords).arguments
        except TypeError as problem:
            raise ConfigError(
                "arguments-do-not-fit",
                problem=f"{name}(...): {problem}",
                reason=_all_of(name, known),
                called=name,
            ) from None
        missing = [keyword for keyword in required if keyword not in bound]
        if missing:
            values = ", ".join(f"{keyword}={_EXAMPLES.get(keyword, '...')}" for keyword in missing)
            # an example with a comment closes the bracket before it
            closing = "" if "#" in values else ")"
            raise ConfigError(
                "keyword-missing",
                problem=f"{name}(...): missing {', '.join(missing)}",
                reason=_all_of(name, known),
                remedy=f"write {name}(..., {values}{closing}",
                setting=missing[0],
            )
        plain_arguments = [plain("", value) for value in arguments]
        plain_keywords = {keyword: plain(keyword, value) for keyword, value in keywords.items()}
        return constructor(*plain_arguments, **plain_keywords)

    return cast("T", call)


def same_as(word: str, known: Collection[str]) -> str | None:
    """Return the known keyword for another library's `word`, or None.

    >>> (
    ...     same_as("learning_rate", ["lr", "name"]),
    ...     same_as("epochs", ["length"]),
    ...     same_as("colour", ["length"]),
    ... )
    ('lr', 'length', None)
    """
    keywords = (text.partition("=")[0] for text in _replacements(word))
    return next((keyword for keyword in keywords if keyword in known), None)


def text_for(word: str, keyword: str, value: str) -> str:
    """Return the text of `keyword` with the number of another library's `word`, or "" if no text
    contains the number.
    """
    if not re.fullmatch(r"[\d.]+", value):
        return ""
    leaf = keyword.rpartition(".")[2]
    for cure in _replacements(word.rpartition(".")[2]):
        name, _, text = cure.partition("=")
        if name == leaf and re.fullmatch(r'".*{n}.*"', text):
            return text.strip('"').replace("{n}", value)
    return ""


def attribute_error(kind: str, name: str, known: Collection[str]) -> AttributeError:
    """Return the error for an attribute that an object does not have, with what to write instead:
    for a method of another library, a keyword of another library, or one of `known`.

    >>> print(attribute_error("Run", "fit", ["train"]))
    Run has no attribute fit
      write run.train()
    """
    instead = _METHODS.get(name)
    near = same_as(name, known) or closest(name, known)
    if instead is None and near is not None:
        instead = f"{kind.lower()}.{near}"
    hint = "" if instead is None else f"\n  write {instead}"
    return AttributeError(f"{kind} has no attribute {name}{hint}")


def _replacements(word: str) -> tuple[str, ...]:
    return _REPLACEMENTS.get(word.lower().replace("_", ""), ())


def _unknown(name: str, word: str, value: Any, known: list[str]) -> ConfigError:
    text = "..."
    if isinstance(value, str):
        text = json.dumps(value)
    elif isinstance(value, bool | int | float):
        text = repr(value)
    if len(text) >= 40:
        text = "..."
    cures = [f"write {cure}" for cure in _replacements(word) if cure.partition("=")[0] in known]
    if word in _NO_KEYWORD and "train_data" in known:
        cures.append(_NO_KEYWORD[word])
    near = closest(word, known)
    if near is not None:
        cures.append(f"write {near}={{}}")
    remedy = None
    if cures:
        remedy = cures[0].replace("{}", text).replace("{n}", text.strip('"'))
        remedy = re.sub(r'([hps]) \w+"', r'\1"', remedy)
    return ConfigError(
        "keyword-unknown",
        problem=f"{name}({word}={text}): {name} has no keyword {word}",
        reason=_all_of(name, known),
        remedy=remedy,
        setting=word,
    )


def _all_of(name: str, known: list[str]) -> str:
    if len(known) > 20:
        return f"all keywords: help(sf.{name})"
    return f"its keywords: {', '.join(known)}"


def parse_score(text: str, *, setting: str = "metric") -> tuple[Literal["min", "max"], str]:
    """Return direction and score of "min SPLIT/METRIC", the text of a setting. Raises `ConfigError`
    for any other text.

    >>> parse_score("max val/accuracy")
    ('max', 'val/accuracy')
    """
    match text.split(maxsplit=1):
        case ["min", score]:
            return "min", score
        case ["max", score]:
            return "max", score
    meaning = "min or max and a score, as in 'min val/loss' or 'max val/accuracy'"
    raise out_of_range(setting, text, meaning)


def unmonitored(by: str, text: str, why: str, *, scores: Sequence[str]) -> ConfigError:
    """Return the error for "min SPLIT/METRIC", the text that `best`, `early_stopping` or `plateau`
    monitors; it suggests the nearest of `scores`, or a loss.

    >>> print(unmonitored("best", "min loss", "no split has that name", scores=["val/loss"]))
    best = 'min loss' cannot be monitored: no split has that name
      try: best="min val/loss"
      [score-unknown]
    """
    direction, score = parse_score(text)
    losses = [name for name in scores if name.endswith("loss")]
    near = closest(score, scores) or next(iter([*losses, *scores]), None)
    setting = by if by == "best" else f"{by}.monitor"
    remedy: Setting | str = 'first add a split: splits={"val": sf.Split(...)}'
    if near in losses:
        remedy = Setting(setting, f"min {near}")
    elif near is not None:
        remedy = Setting(setting, f"{direction} {near}")
    return ConfigError(
        "score-unknown",
        problem=f"{setting} = {text!r} cannot be monitored: {why}",
        remedy=remedy,
        setting=setting,
        value=text,
        scores=list(scores),
    )
