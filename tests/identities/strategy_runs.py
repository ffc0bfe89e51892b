"""Runs under FSDP2, under DDP and alone; what each function returns is compared over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from identities import world_runs
from surefoot.config import speed_table
from surefoot.run import build

WIDTH = 7  # whose rows no number of ranks shares evenly

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: sf.optim.adamw(lr=1e-2, weight_decay=0.1),
    "adam": lambda: sf.optim.adam(lr=1e-2, weight_decay=0.1),
    "sgd": lambda: sf.optim.sgd(lr=0.05, momentum=0.9, weight_decay=0.01),
    "nadam": lambda: sf.optim.nadam(lr=1e-2),
    "radam": lambda: sf.optim.radam(lr=1e-2),
    "lion": lambda: sf.optim.lion(lr=1e-3, weight_decay=0.1),
    "schedule_free": lambda: sf.optim.schedule_free(lr=1e-2),
    "muon": lambda: sf.optim.muon(lr=0.02),
}


class Block(nn.Module):
    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.shared = shared
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.relu(self.inner(self.norm(hidden)))
        return hidden + self.dropout(self.outer(inner)) + self.shared(hidden)


class Net(nn.Module):
    """What can lie in the way of sharding: fewer rows than ranks, a kernel, batch statistics,
    parameters that are frozen, tied within a block's surroundings, or shared by two blocks (the
    last of three has its own)."""

    def __init__(self, rounds: int = 1) -> None:
        super().__init__()
        self.rounds = rounds  # through the blocks
        self.kernel = nn.Conv1d(2, WIDTH, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            Block(shared if place < 2 else nn.Linear(WIDTH, WIDTH)) for place in range(3)
        )
        self.blocks[2].norm.weight.requires_grad_(False)
        self.back, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.back.weight
        self.out = nn.Linear(WIDTH, world_runs.CLASSES)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.batch_norm(self.kernel(inputs.unflatten(1, (2, -1)))).mean(2)
        mask = F.dropout(torch.ones_like(hidden), 0.25, training=self.training)
        hidden = hidden * mask
        for block in [*self.blocks] * self.rounds:
            hidden = block(hidden)
        return self.out(self.again(torch.tanh(self.back(hidden)))), mask


def trained(
    *,
    sharding: Mapping[str, Any] | None = None,
    parallel: Any = "auto",
    optimizer: str = "adamw",
    rounds: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """As `world_runs.trained`, of this model; `sharding` are the settings of FSDP."""
    settings: dict[str, Any] = {
        "model": lambda: Net(rounds),
        "parallel": parallel if sharding is None else sf.fsdp(**sharding),
    }
    if optimizer == "schedule_free":
        settings |= {"ema": None, "schedule": None}
    world_runs.OPTIMIZERS = OPTIMIZERS
    return world_runs.trained(**settings, optimizer=optimizer, **changes)


class Through(nn.Module):
    """What is called in a model's place; counts how often."""

    calls = 0

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Any:
        Through.calls += 1
        return self.model(inputs)


def trained_as_chosen(*, really: bool, **changes: Any) -> dict[str, Any]:
    """As `trained`, compiled since the table that "auto" reads says so; or, if not `really`, only
    called through another.
    """
    speed_table.COMPILE = {"cpu": True}  # type: ignore[assignment]
    if not really:
        build.compiled = lambda models: {name: Through(model) for name, model in models.items()}
        torch.compile = lambda model, **_: model  # what scores
    found: list[sf.Run] = []
    built = world_runs.built
    world_runs.built = lambda **settings: found.append(built(**settings)) or found[-1]
    try:
        run = trained(compile="auto", **changes)
    finally:
        world_runs.built = built
    return run | {"compiled": found[-1].parts.plan.identity["compile"], "called": Through.calls}


def of_each_optimizer(names: list[str], **changes: Any) -> dict[str, Any]:
    """What few steps of each come to; of them all one is not applied."""
    return {name: trained(optimizer=name, steps=3, bad=97, **changes) for name in names}


def of_each_limit(limits: list[str], **changes: Any) -> dict[str, Any]:
    """What each way to limit gradients comes to, and how much it limited."""
    found = {}
    for clip in limits:
        fractions = []

        def note(step: sf.Step, kept: list[float] = fractions) -> None:
            kept += [float(share) for share in step.clip_fractions.values() if share is not None]

        run = _run(clip=clip, steps=4, splits={}, **changes)
        with run:
            for step in run:
                note(step)
        found[clip] = {"clip_fraction": fractions, "weights": world_runs.weights(run)}
    return found


def sampled(**changes: Any) -> dict[str, Any]:
    """A run that between its steps uses the model otherwise on each rank: rank 0 samples, predict
    makes any number of calls.
    """
    calls = []

    def sample(model: nn.Module) -> str:
        calls.append(1)
        inputs = torch.ones(1, world_runs.FEATURES, dtype=torch.float64)
        return repr(
            float(model(inputs)[0].sum())
            + sum(float(block(torch.ones(1, WIDTH)).sum()) for block in model.blocks)
        )

    def predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        for _ in range(int(batch[2][0]) % 3):
            model(batch[0])
        return model(batch[0])[0].sum(1), batch[1]

    def added(outputs: Any, targets: Any) -> float:
        return float(outputs.sum())

    held_out = (
        world_runs.Augmented().inputs[:11].double(),
        torch.zeros(11, dtype=torch.long),
        torch.arange(11),
    )
    splits = {
        "val": sf.Split(held_out, batch_size=3),
        "used": sf.Split(
            held_out,
            metrics=sf.metrics.whole_split(added),
            batch_size=2,
            predict=predict,
            loss=False,
        ),
    }

    def panels(model: nn.Module) -> list[sf.report.Curves]:
        return [
            sf.report.Curves(
                title="said", legend="", curves={"said": ((0, round(float(sample(model)), 6)),)}
            )
        ]

    run = _run(
        sample_fn=sample,
        sample_every="2 steps",
        panels_fn=panels,
        splits=splits,
        evaluate_every="2 steps",
        **changes,
    )
    with run:
        scores = [dict(step.metrics) for step in run]
        said = run.sample()
        shown = run.make_panels().to_json()
    written = sf.load(changes["run_dir"]).panels() if "run_dir" in changes else None
    return {
        "scores": scores,
        "said": said,
        "panels": [shown, None if written is None else written.to_json()],
        "weights": world_runs.weights(run),
        "sampled": len(calls),
    }


def with_calls_beside(**changes: Any) -> dict[str, Any]:
    """Models that are called without a backward pass of their own: a teacher that the body moves,
    in the loss, the check of state, the body, and an evaluation that computes gradients.
    """
    logged: list[float] = []

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Linear(world_runs.FEATURES, world_runs.FEATURES) for _ in range(2)
            )
            self.out = nn.Linear(world_runs.FEATURES, world_runs.CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            for block in self.blocks:
                inputs = torch.tanh(block(inputs))
            return self.out(inputs)  # type: ignore[no-any-return]

    def loss(models: Any, batch: Any) -> Tensor:
        wanted = models["teacher"](batch[0]).detach()  # with gradients enabled
        return F.mse_loss(models["student"](batch[0]), wanted + F.one_hot(batch[1], 3))

    def critic_loss(models: Any, batch: Any) -> Tensor:
        return models["critic"](models["student"](batch[0]).detach()).square().mean()  # type: ignore[no-any-return]

    def predict(models: Any, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            inputs = batch[0].detach().requires_grad_()
            outputs = models["student"](inputs)
            (slope,) = torch.autograd.grad(outputs.sum(), inputs)
            models["teacher"](inputs)
            return outputs.detach() + slope.sum(1, keepdim=True), batch[1]

    def added(outputs: Any, _: Any) -> float:
        return float(outputs.sum())

    held_out = tuple(
        each[:11] for each in (world_runs.Augmented().inputs, world_runs.Augmented().labels)
    )
    run = _run(
        model={
            "student": Student,
            "teacher": Student,
            "critic": lambda: nn.Linear(world_runs.CLASSES, 1),
        },
        loss=None,
        optimizer={
            "student": OPTIMIZERS["adamw"](),
            "critic": OPTIMIZERS["sgd"](),
        },
        splits={
            "val": sf.Split(
                held_out,
                metrics=sf.metrics.whole_split(added),
                predict=predict,
                loss=False,
                batch_size=4,
            )
        },
        evaluate_every="1 steps",
        save_every="2 steps",
        ema=None,
        **changes,
    )
    inputs = torch.ones(2, world_runs.FEATURES, dtype=torch.float64)

    def called() -> float:
        return float(run.state.models["student"](inputs).sum())

    with run:
        for step in run.steps():
            sf.forward_backward(step, loss)
            before = called()
            sf.update(step, "student")
            logged += [before, called(), float(run.state.models["teacher"](inputs).sum())]
            for old, new in zip(
                run.state.models["teacher"].parameters(),
                run.state.models["student"].parameters(),
                strict=True,
            ):
                with torch.no_grad():
                    old.lerp_(new, 0.1)
            sf.forward_backward(step, critic_loss)
            sf.update(step, "critic")
            logged.append(called())
        scores = run.evaluate()
    return {
        "logged": logged,
        "scores": scores,
        "weights": {
            f"{name} {place}": world_runs.whole(held)
            for name, model in run.state.models.items()
            for place, held in model.state_dict().items()
        },
    }


def with_unused(**changes: Any) -> dict[str, Any]:
    """A model of which one part is used for some micro-batches alone, and another never."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always = nn.Linear(world_runs.FEATURES, world_runs.CLASSES)
            self.sometimes = nn.Linear(world_runs.FEATURES, world_runs.CLASSES)
            self.never = nn.Linear(2, 2)

        def forward(self, inputs: Tensor, *, both: bool) -> Tensor:
            return self.always(inputs) + (self.sometimes(inputs) if both else 0)

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0], both=bool(batch[2][0] % 7 == 0)), batch[1])

    run = _run(model=Sometimes, loss=loss, steps=4, splits={}, **changes)
    run.train()
    return world_runs.weights(run)


def routed(**changes: Any) -> dict[str, Tensor]:
    """A mixture of experts: a router sends each sample to one, and many passes use some of them
    only.
    """

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(world_runs.FEATURES, 5)
            self.experts = nn.ModuleList(
                nn.Linear(world_runs.FEATURES, world_runs.CLASSES) for _ in range(5)
            )

        def forward(self, inputs: Tensor) -> Tensor:
            weights = torch.softmax(self.router(inputs), 1)
            share, chosen = weights.max(1)
            outputs = inputs.new_zeros(len(inputs), world_runs.CLASSES)
            for index, expert in enumerate(self.experts):
                (own,) = (chosen == index).nonzero(as_tuple=True)
                if len(own):
                    outputs = outputs.index_add(0, own, expert(inputs[own]) * share[own, None])
            return outputs

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    run = _run(model=Mixture, loss=loss, steps=5, splits={}, ema=None, **changes)
    run.train()
    return world_runs.weights(run)


def generated(**changes: Any) -> dict[str, Any]:
    """A language model of transformers, whose `generate` the run calls on rank 0 for samples, and
    on each rank in an evaluation.
    """
    import transformers

    torch.set_default_dtype(torch.float64)
    tokens = torch.randint(1, 64, (32, 9), generator=torch.Generator().manual_seed(0))
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    sampled: list[str] = []

    def continued(model: Any, prompt: Tensor, length: int) -> Tensor:
        with_length: Tensor = model.generate(
            prompt, max_new_tokens=length, do_sample=False, pad_token_id=0
        )
        return with_length

    def sample(model: Any) -> str:
        sampled.append(str(continued(model, tokens[:1, :3], 4).tolist()))
        return sampled[-1]

    def predict(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        length = 2 + int(batch["input_ids"].sum()) % 3  # other lengths on other ranks
        made = continued(model, batch["input_ids"][:, :3], length)
        return made[:, 3:5], batch["labels"][:, 3:5]

    def equal(outputs: Tensor, targets: Tensor) -> sf.Mean:
        return sf.Mean((outputs == targets).double().mean(1).sum(), len(outputs))

    rows = [{"input_ids": row, "labels": row} for row in tokens]
    run = sf.Run(
        model=lambda: transformers.AutoModelForCausalLM.from_config(
            transformers.GPT2Config(**sizes)
        ),
        loss=sf.losses.of_model,
        train_data=rows,
        splits={"val": sf.Split(rows[:10], metrics=equal, predict=predict, loss=False)},
        batch_size=8,
        micro_batch_size=4,
        length="4 steps",
        optimizer=sf.optim.adamw(lr=1e-2),
        sample_fn=sample,
        sample_every="2 steps",
        device="cpu",
        precision="fp32",
        console=False,
        **changes,
    )
    run.train()
    scores = run.evaluate()
    return {"sampled": sampled, "scores": scores, "weights": world_runs.weights(run)}


def of_gathered_halves() -> dict[str, Any]:
    """Weights that travel and are computed with in bfloat16, beside those that are not; of a model
    with batch statistics.
    """
    plain, halved = (
        _run(parallel=sf.fsdp(gather_dtype=form), steps=4, ema=None, double=False)
        for form in ("fp32", "bf16")
    )
    for run in (plain, halved):
        run.train()
    return {"plain": world_runs.weights(plain), "halved": world_runs.weights(halved)}


def read_on_the_host(**changes: Any) -> int:
    """Steps, all of them watched, under the guards of law 12, which raise where one reads a tensor;
    how many were made.
    """
    from identities.test_law_12_no_waiting import NothingDue, layers, nothing_read
    from surefoot.train.layer_stats import LayerWatch
    from surefoot.train.loop import steps

    count = 3
    run = _run(bad=97, **changes)
    feed = run.parts.pipeline.feed(workers=0)
    feed.start(0, stop=count)
    fed = [feed.micro_batches(step) for step in range(count)]
    looking = layers(run)
    settings: dict[str, Any] = {
        "record": run.parts.run_state.meter.add,
        "clock": lambda phase: None,
        "periodic": NothingDue(),
        "watch": lambda index: LayerWatch(index, looking),
    }
    with nothing_read():
        made = len(
            list(steps(run.parts.task, run.state, feed=fed.__getitem__, length=count, **settings))
        )
    assert run.parts.run_state.meter.read()[0]["skipped"] > 0
    return made


def refused(*, optimizer: str) -> str:
    """The code and the value of the refusal of an optimizer that needs whole parameters."""
    own = {
        "adafactor": sf.optim.adafactor(),
        "adamw8bit": sf.optim.adamw8bit(lr=1e-3),
        "Muon": lambda groups: torch.optim.Muon(
            [p for g in groups for p in g["params"] if p.ndim == 2], lr=0.1
        ),
        "Mine": lambda groups: type("Mine", (torch.optim.SGD,), {})(groups, lr=0.1),
    }
    world_runs.OPTIMIZERS = {optimizer: lambda: own[optimizer]}
    try:
        world_runs.built(parallel="fsdp", optimizer=optimizer)
    except sf.ConfigError as problem:
        return f"{problem.code} {problem.fields['value']}"
    return "nothing"


def _run(**changes: Any) -> sf.Run:
    world_runs.OPTIMIZERS = OPTIMIZERS
    sharding, replicated = changes.pop("sharding", None), changes.pop("replicated", None)
    if sharding is not None:
        changes["parallel"] = sf.fsdp(**sharding)
    if replicated is not None:
        changes["parallel"] = sf.ddp(**replicated)
    return world_runs.built(**({"model": Net, "steps": 5} | changes))
