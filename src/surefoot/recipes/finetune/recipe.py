"""The finetune recipe: from settings to a run that trains a model of transformers on conversations.
Imports no torch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import surefoot as sf
from surefoot.config.extras import refuse_missing
from surefoot.config.setting import checked, number
from surefoot.errors import Setting, out_of_range, together
from surefoot.recipes.finetune import corpus as texts
from surefoot.recipes.finetune import documentation, model_directory, models, template_date
from surefoot.recipes.finetune.config import BEST, MEANT_FOR, Config, Lora
from surefoot.recipes.finetune.forms import message_text
from surefoot.recipes.finetune.predict import (
    Predict,
    answers,
    decoded,
    prompt_tokens,
    stop_tokens,
    with_logits,
)
from surefoot.recipes.gpt.corpus import first_lines
from surefoot.recipes.optimizer_settings import FRACTION, Optimizer, note, refuse_default_data
from surefoot.tracking.run_reader import started_run


def check(config: Config) -> list[Any]:
    """Validate the settings and return the parts that need no data. Raises `ConfigError` with all
    problems.
    """
    max_tokens = config.data.max_tokens
    checks: list[Callable[[], Any]] = [
        lambda: refuse_missing("the recipe finetune", "transformers", "peft", "tokenizers"),
        _as_usual(config).spec,
        config.schedule.spec,
        config.check,
        lambda: number(min_value=1)(config.lora.rank, setting="lora.rank"),
        lambda: FRACTION(config.lora.dropout, setting="lora.dropout"),
        lambda: FRACTION(config.data.val_fraction, setting="data.val_fraction"),
    ]
    if max_tokens is not None:
        checks.append(lambda: number(min_value=2)(max_tokens, setting="data.max_tokens"))
    checks += [
        lambda: _refuse_ineffective(config),
        lambda: refuse_default_data(config.preset, config.data.path, MEANT_FOR),
        lambda: _refuse_missing_model(config),
    ]
    return checked(*checks)


def _refuse_missing_model(config: Config) -> None:
    if config.model is not None and started_run(config.run_dir) is None:
        model_directory.model_directory(config.model)


def build(config: Config) -> "sf.Run":
    """Build the run of a configuration without starting it. Without a model, a small GPT is trained
    first.
    """
    _, optimizer, schedule, *_ = check(config)
    return _built(config, _base(config), optimizer, schedule)


def planned(config: Config) -> "sf.Run":
    """Build the run that `surefoot plan` describes. Without a model, it has the shape of the small
    GPT, which is not trained.
    """
    _, optimizer, schedule, *_ = check(config)
    has_model = config.model is not None or documentation.is_trained(config.run_dir)
    if has_model or started_run(config.run_dir) is not None:
        return _built(config, _base(config), optimizer, schedule)
    note(
        "note: no model is named (--model DIR): training starts with a small GPT in"
        f" {config.run_dir}-base;\n  this plan has its shape"
    )
    shape = documentation.small_config()
    with TemporaryDirectory() as directory:
        documentation.write_small_tokenizer(Path(directory))
        base = BaseModel(
            shape,
            settings=shape.to_json_string(),
            generation=None,
            weights=None,
            tokenizer=Path(directory),
            template=config.data.template,
            name=_name(config),
        )
        return _built(config, base, optimizer, schedule)


def _built(config: Config, base: "BaseModel", optimizer: Any, schedule: Any) -> "sf.Run":
    default = documentation.questions() if config.data.path is None else None
    tokenizer = texts.load_tokenizer(base.tokenizer, template=base.template)
    template = tokenizer.chat_template
    files = texts.tokenizer_files(tokenizer) | {models.SETTINGS: base.settings}
    if base.generation is not None:
        files[model_directory.GENERATION] = base.generation
    date = _date(config, template)
    if date is not None:
        files[template_date.FILE] = date.isoformat()
        tokenizer.chat_template = template_date.with_date(template, date)
    corpus = texts.read_corpus(
        config, tokenizer, context=models.context_of(base.config), default=default
    )
    _refuse_vocabulary(corpus, base)

    def in_words(batch: Any) -> str:
        inputs_BT, targets_BT = batch
        is_answer = targets_BT[0] >= 0
        first_target = int(is_answer.nonzero()[0])
        prompt = tokenizer.decode(inputs_BT[0, : first_target + 1].tolist())
        answer = tokenizer.decode(targets_BT[0, is_answer].tolist())
        return f"{first_lines(prompt)}\n  -> {first_lines(answer)}"

    # what samples answer
    row = (corpus.held_out or corpus.rows)[0]
    first_answer = row.trained_answers("answers")[0]
    question = message_text(row.messages[first_answer - 1])
    reference = message_text(row.messages[first_answer])

    # templates are rendered in a process of their own: before training, and not within it
    prompt = prompt_tokens(tokenizer, row.messages[:first_answer], row.tools)
    ends = stop_tokens(tokenizer, base.ends)

    def sample(model: Any) -> str:
        tokens = sf.generate.sample(
            with_logits(model),
            prompt,
            max_new_tokens=config.sample_tokens,
            context=models.context_of(base.config) or len(prompt) + config.sample_tokens,
            temperature=0.0,
            eos_id=ends,
            use_cache=True,
        )
        answer = decoded(tokenizer, tokens[len(prompt) :])
        return f"{question}\n  reference: {reference}\n  output:    {answer}"

    splits = {}
    if corpus.val is not None:
        splits["val"] = sf.Split(corpus.val, derived={"perplexity": sf.metrics.perplexity})
    lora_identity = None
    if config.method == "lora":
        modules = list(config.lora.target_modules)
        lora_identity = vars(config.lora) | {"target_modules": modules}
    about = corpus.in_words + base.notes
    if date is not None:
        about[0] += f"; the chat template writes the date of the run's start, {date}"
    return sf.Run(
        model=lambda: models.tuned_model(
            base.config, base.weights, lora=_lora(config), name=base.name
        ),
        loss=_loss,
        count_unit="tokens",
        count_fn=_targets_of,
        train_data=corpus.train,
        optimizer=optimizer,
        schedule=schedule,
        splits=splits,
        sample_fn=sample if config.sample_tokens else None,
        sample_summary="always the likeliest token",
        derived={"perplexity": sf.metrics.perplexity},
        describe_fn=in_words,
        extra_files=files,
        predict_example=question,
        data_summary=about,
        identity={
            "model": sha256(base.settings.encode()).hexdigest(),
            "lora": lora_identity,
            "data": {"template": template, "max_tokens": corpus.max_tokens},
        },
        **config.run_settings(BEST if splits else None),
    )


def outline(config: Config) -> "sf.Run | None":
    """Return the run without its data and weights, to compute memory and time."""
    _, optimizer, schedule, *_ = check(config)
    is_trained_first = config.model is None and started_run(config.run_dir) is None
    shape = documentation.small_config() if is_trained_first else _base(config).config
    max_tokens = texts.limit(config.data.max_tokens, models.context_of(shape))
    from surefoot.recipes.readers.text.dialogues import Dialogues

    tokens = [0] * (max_tokens + 1)
    is_answer = [True] * (max_tokens + 1)
    return sf.Run(
        model=lambda: models.tuned_model(shape, None, lora=_lora(config)),
        loss=_loss,
        count_unit="tokens",
        train_data=Dialogues([(tokens, is_answer)] * 64, padding=0),
        optimizer=optimizer,
        schedule=schedule,
        data_summary=[
            f"not read: conversations have {max_tokens:,} tokens here, the most that"
            " data.max_tokens allows"
        ],
        **config.run_settings(None),
    )


def predict(
    config: Config, options: Predict, inputs: Sequence[str], *, run: Path, checkpoint: Any
) -> Iterator[str]:
    """Yield the tuned model's answer to each input."""
    base, tokenizer, model = _tuned(config, run, checkpoint, device=options.device)
    template = tokenizer.chat_template
    if template_date.has_clock(template):
        date = template_date.date_of_run(run)
        tokenizer.chat_template = template_date.with_date(template, date)
        note(
            f"note: the chat template writes the date of the run's start, {date.date()},"
            " not today's"
        )
    context = models.context_of(base.config)
    return answers(model, tokenizer, inputs, options, context=context, ends=base.ends)


def export(
    config: Config, *, run: Path, checkpoint: Any, out: Path, layout: str, max_bytes: int
) -> list[str]:
    """Write the model of a checkpoint for transformers, or with the layout peft its adapter, and
    return the names of the files.
    """
    base, tokenizer, model = _tuned(config, run, checkpoint, device="cpu")
    return models.write_tuned(
        model,
        tokenizer,
        out,
        config=base.config,
        adapter=layout == "peft",
        max_bytes=max_bytes,
        generation=base.generation,
        ends=stop_tokens(tokenizer, base.ends),
    )


def _tuned(
    config: Config, run: Path, checkpoint: Any, *, device: str
) -> "tuple[BaseModel, Any, Any]":
    from surefoot.train.model_weights import load_weights  # imports torch

    refuse_missing("the recipe finetune", "transformers", "peft", "tokenizers")
    base = _of_run(config, run)
    shapes = {}
    for file, tensors in checkpoint.files.items():
        for name, tensor in tensors.items():
            if hasattr(tensor, "shape"):
                shapes[f"{file}/{name}"] = tuple(tensor.shape)
    models.refuse_other_sizes(base.config, shapes, where=str(run))
    model = models.tuned_model(base.config, None, lora=_lora(config), name=base.name)
    tokenizer = texts.load_tokenizer(run, template=None)
    return base, tokenizer, load_weights(model, checkpoint, device=device)


@dataclass(frozen=True)
class BaseModel:
    """The model that is tuned: its configuration, and the directories of its weights and
    tokenizer.
    """

    config: Any
    settings: str  # the text of its config.json
    generation: str | None  # the text of its generation_config.json
    weights: Path | None  # None: a checkpoint of the run has them
    tokenizer: Path
    template: str | None  # a file
    name: str  # of the base model, in the files of an adapter
    unused: tuple[str, ...] = ()  # keys of config.json

    @property
    def ends(self) -> list[int]:
        """The tokens at which the base model ends a text."""
        return models.end_tokens(self.config, self.generation)

    @property
    def notes(self) -> list[str]:
        """What the header says of the model's directory."""
        if not self.unused:
            return []
        return [f"not used of the model's config.json: {', '.join(self.unused)}"]


def _base(config: Config) -> BaseModel:
    run = started_run(config.run_dir)
    if run is not None:
        return _of_run(config, run)
    if config.model is None:
        directory = documentation.small_model(
            config.run_dir, seed=config.seed, device=config.device
        )
    else:
        directory = model_directory.model_directory(config.model)
    settings = directory / model_directory.CONFIG
    model_config = models.model_config(settings)
    unused = model_directory.read_settings(settings).unused(model_config)
    return BaseModel(
        model_config,
        settings=settings.read_text(encoding="utf-8"),
        generation=model_directory.generation_in(directory),
        weights=directory,
        tokenizer=directory,
        template=config.data.template,
        name=_name(config),
        unused=tuple(unused),
    )


def _of_run(config: Config, run: Path) -> BaseModel:
    file = run / models.SETTINGS
    if not file.is_file():
        raise sf.CheckpointError(
            "run-without-model-config",
            problem=f"{file} is missing: it describes the model of the run's checkpoints",
            reason="the run was written by another recipe, or its files were moved",
            remedy=["restore it", ("another", Setting("run_dir"))],
            path=str(file),
        )
    return BaseModel(
        models.model_config(file),
        settings=file.read_text(encoding="utf-8"),
        generation=model_directory.generation_in(run),
        weights=None,
        tokenizer=run,
        template=None,
        name=_name(config),
    )


def _date(config: Config, template: str) -> datetime | None:
    """Return the moment that the chat template writes, the same on all ranks; None if it writes
    none. Collective.
    """
    if not template_date.has_clock(template):
        return None
    from surefoot.distributed.world import joined  # imports torch

    run = started_run(config.run_dir)
    date = datetime.now() if run is None else template_date.date_of_run(run)
    return datetime.fromisoformat(joined(config.device).from_main(date.isoformat()))


def _name(config: Config) -> str:
    if config.model is not None:
        return config.model
    return str(Path(f"{config.run_dir}-base", "export"))


def _lora(config: Config) -> Lora | None:
    return config.lora if config.method == "lora" else None


def _loss(model: Any, batch: Any) -> Any:
    inputs_BT, targets_BT = batch
    logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
    mean = sf.losses.cross_entropy(logits_BTV, targets_BT)
    if model.training:
        return mean
    right = (logits_BTV.argmax(dim=-1) == targets_BT).sum()
    return mean, {"accuracy": sf.Mean(right, mean.count)}


def _targets_of(batch: Any) -> int:
    return int((batch[1] >= 0).sum())


def _as_usual(config: Config) -> Optimizer:
    # LoRA's rate as in https://arxiv.org/abs/2305.14314, section 5; without weight decay
    optimizer = config.optimizer
    if optimizer.name != "adamw":
        return optimizer
    lr = optimizer.lr
    if lr is None and config.model is not None:
        lr = 2e-4 if config.method == "lora" else 2e-5
    elif lr is None:  # the small GPT, which is trained first
        lr = 3e-3 if config.method == "lora" else 1e-3
    return replace(optimizer, lr=lr, weight_decay=optimizer.weight_decay or 0.0)


def _refuse_ineffective(config: Config) -> None:
    data = config.data
    lora = config.lora
    problems = []
    if lora.alpha is not None and not lora.alpha > 0:
        problems.append(out_of_range("lora.alpha", lora.alpha, "above 0"))
    if not lora.target_modules:
        modules = sf.ConfigError(
            "lora-of-no-modules",
            problem="lora.target_modules is empty",
            remedy=["name some layers", Setting("lora.target_modules", "all-linear")],
            setting="lora.target_modules",
        )
        problems.append(modules)
    if config.method == "full" and lora != Lora():
        method = sf.ConfigError(
            "lora-without-effect",
            problem="method = full trains all weights, and the settings of lora have no effect",
            remedy=["leave them out", Setting("method", "lora")],
            setting="method",
            value=config.method,
        )
        problems.append(method)
    if data.val_path is not None and data.path is None:
        path = sf.ConfigError(
            "val-path-without-path",
            problem="data.val_path needs data.path",
            reason="without it, rows come from Python's documentation",
            remedy=Setting("data.path", "FILE.jsonl"),
            setting="data.val_path",
            value=data.val_path,
        )
        problems.append(path)
    if config.init_from is not None:
        weights = sf.ConfigError(
            "init-from-without-effect",
            problem="init_from has no effect: a model brings its own weights",
            remedy=Setting("model", "DIR"),
            setting="init_from",
            value=str(config.init_from),
        )
        problems.append(weights)
    if problems:
        raise together(problems)


def _refuse_vocabulary(corpus: texts.ConversationCorpus, base: BaseModel) -> None:
    largest = int(corpus.train.tokens.max())
    if corpus.val is not None:
        largest = max(largest, int(corpus.val.tokens.max()))
    size = base.config.get_text_config().vocab_size
    if largest >= size:
        raise sf.ConfigError(
            "tokenizer-larger-than-model",
            problem=f"the tokenizer writes token {largest}, and the model has {size} tokens",
            reason="they do not belong together, or tokens were added to the tokenizer alone",
            remedy="use the model's own tokenizer, or resize the model:"
            " model.resize_token_embeddings(len(tokenizer))",
            token=largest,
            vocab_size=size,
        )
