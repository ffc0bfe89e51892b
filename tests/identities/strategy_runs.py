"""Runs under FSDP2, under DDP and alone; what each function returns is compared over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        self.back = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.back.weight
        self.out = nn.Linear(WIDTH, world_runs.CLASSES)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.batch_norm(self.kernel(inputs.unflatten(1, (2, -1)))).mean(2)
        mask = F.dropout(torch.ones_like(hidden), 0.25, training=self.training)
        hidden = hidden * mask
        for block in [*self.blocks] * self.rounds:
            hidden = block(hidden)
        return self.out(self.again(torch.tanh(self.back(hidden)))), mask


def built(
    *,
    sharding: Mapping[str, Any] | None = None,
    replicated: Mapping[str, Any] | None = None,
    optimizer: Any = "adamw",
    rounds: int = 1,
    **changes: Any,
) -> sf.Run:
    """As `world_runs.built`, of this model; `sharding` has the settings of FSDP, `replicated` those
    of DDP.
    """
    settings: dict[str, Any] = {"model": lambda: Net(rounds)} | changes
    if sharding is not None:
        settings["parallel"] = sf.fsdp(**sharding)
    if replicated is not None:
        settings["parallel"] = sf.ddp(**replicated)
    if optimizer == "schedule_free":
        settings |= {"ema": None, "schedule": None}
    if isinstance(optimizer, str):
        optimizer = OPTIMIZERS[optimizer]()
    return world_runs.built(optimizer=optimizer, **settings)


def trained(**changes: Any) -> dict[str, Any]:
    return world_runs.train(built(**changes))


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
    run = built(compile="auto", **changes)
    result = world_runs.train(run)
    result["compiled"] = run.parts.plan.identity["compile"]
    result["called"] = Through.calls
    return result


def of_each_optimizer(names: list[str], **changes: Any) -> dict[str, Any]:
    """What few steps of each come to; of them all one is not applied."""
    return {name: trained(optimizer=name, steps=3, bad=97, **changes) for name in names}


def of_each_limit(limits: list[str], **changes: Any) -> dict[str, Any]:
    """What each way to limit gradients comes to, and how much it limited."""
    results = {}
    for clip in limits:
        run = built(clip=clip, steps=4, splits={}, **changes)
        fractions = []
        with run:
            for step in run:
                for fraction in step.clip_fractions.values():
                    if fraction is not None:
                        fractions.append(float(fraction))
        results[clip] = {"clip_fraction": fractions, "weights": world_runs.weights(run)}
    return results


def sampled(**changes: Any) -> dict[str, Any]:
    """A run that between its steps uses the model otherwise on each rank: rank 0 samples, predict
    makes any number of calls.
    """
    calls = []

    def sample(model: Any) -> str:
        calls.append(1)
        logits, _ = model(torch.ones(1, world_runs.FEATURES, dtype=torch.float64))
        total = float(logits.sum())
        for block in model.blocks:
            total += float(block(torch.ones(1, WIDTH)).sum())
        return repr(total)

    def predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        for _ in range(int(batch[2][0]) % 3):
            model(batch[0])
        return model(batch[0])[0].sum(1), batch[1]

    def sum_of_outputs(outputs: Any, targets: Any) -> float:
        return float(outputs.sum())

    inputs = world_runs.Augmented().inputs[:11].double()
    held_out = inputs, torch.zeros(11, dtype=torch.long), torch.arange(11)
    splits = {
        "val": sf.Split(held_out, batch_size=3),
        "used": sf.Split(
            held_out,
            metrics=sf.metrics.whole_split(sum_of_outputs),
            batch_size=2,
            predict=predict,
            loss=False,
        ),
    }

    def panels(model: nn.Module) -> list[sf.report.Curves]:
        value = round(float(sample(model)), 6)
        return [sf.report.Curves(title="sample", legend="", curves={"sample": ((0, value),)})]

    run = built(
        steps=5,
        sample_fn=sample,
        sample_every="2 steps",
        panels_fn=panels,
        splits=splits,
        evaluate_every="2 steps",
        **changes,
    )
    with run:
        scores = [dict(step.metrics) for step in run]
        last_sample = run.sample()
        last_panels = run.make_panels().to_json()
    return {
        "scores": scores,
        "last_sample": last_sample,
        "last_panels": last_panels,
        "weights": world_runs.weights(run),
        "sample_calls": len(calls),
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

    def sum_of_outputs(outputs: Any, _: Any) -> float:
        return float(outputs.sum())

    data = world_runs.Augmented()
    held_out = data.inputs[:11], data.labels[:11]
    run = built(
        steps=5,
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
                metrics=sf.metrics.whole_split(sum_of_outputs),
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
    student = run.state.models["student"]
    teacher = run.state.models["teacher"]
    inputs = torch.ones(2, world_runs.FEATURES, dtype=torch.float64)

    def log_output_of(model: nn.Module) -> None:
        logged.append(float(model(inputs).sum()))

    with run:
        for step in run.steps():
            sf.forward_backward(step, loss)
            log_output_of(student)
            sf.update(step, "student")
            log_output_of(student)
            log_output_of(teacher)
            with torch.no_grad():
                for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                    old.lerp_(new, 0.1)
            sf.forward_backward(step, critic_loss)
            sf.update(step, "critic")
            log_output_of(student)
        scores = run.evaluate()
    return {"logged": logged, "scores": scores, "weights": world_runs.weights_of_models(run)}


def with_unused(**changes: Any) -> dict[str, Any]:
    """A model of which one part is used for some micro-batches alone, and another never."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always = nn.Linear(world_runs.FEATURES, world_runs.CLASSES)
            self.sometimes = nn.Linear(world_runs.FEATURES, world_runs.CLASSES)
            self.never = nn.Linear(2, 2)

        def forward(self, inputs: Tensor, *, both: bool) -> Tensor:
            logits: Tensor = self.always(inputs)
            if both:
                logits = logits + self.sometimes(inputs)
            return logits

    def loss(model: Any, batch: Any) -> Tensor:
        inputs, labels, samples = batch
        both = int(samples[0]) % 7 == 0
        return F.cross_entropy(model(inputs, both=both), labels)

    run = built(model=Sometimes, loss=loss, steps=4, splits={}, **changes)
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
                (rows,) = (chosen == index).nonzero(as_tuple=True)
                if len(rows):
                    weighted = expert(inputs[rows]) * share[rows, None]
                    outputs = outputs.index_add(0, rows, weighted)
            return outputs

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    run = built(model=Mixture, loss=loss, steps=5, splits={}, ema=None, **changes)
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
        tokens = continued(model, batch["input_ids"][:, :3], length)
        return tokens[:, 3:5], batch["labels"][:, 3:5]

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

    def weights_gathered_in(dtype: str) -> dict[str, Tensor]:
        run = built(sharding={"gather_dtype": dtype}, steps=4, ema=None, double=False)
        run.train()
        return world_runs.weights(run)

    return {"plain": weights_gathered_in("fp32"), "halved": weights_gathered_in("bf16")}


def read_on_the_host(**changes: Any) -> int:
    """Steps, all of them watched, under the guards of law 12, which raise where one reads a tensor;
    returns how many ended.
    """
    from identities.test_law_12_no_waiting import NothingDue, layers, nothing_read
    from surefoot.train.layer_stats import LayerWatch
    from surefoot.train.loop import steps

    count = 3
    run = built(bad=97, steps=5, **changes)
    feed = run.parts.pipeline.feed(workers=0)
    feed.start(0, stop=count)
    micro_batches = [feed.micro_batches(step) for step in range(count)]
    watched_layers = layers(run)
    loop = steps(
        run.parts.task,
        run.state,
        feed=micro_batches.__getitem__,
        length=count,
        record=run.parts.run_state.meter.add,
        clock=lambda phase: None,
        periodic=NothingDue(),
        watch=lambda index: LayerWatch(index, watched_layers),
    )

    with nothing_read():
        ended_count = len(list(loop))
    means, *_ = run.parts.run_state.meter.read()
    assert means["skipped"] > 0
    return ended_count


class Mine(torch.optim.SGD):
    """An optimizer of the user's own."""


def muon_of_torch(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    matrices = []
    for group in groups:
        matrices += [parameter for parameter in group["params"] if parameter.ndim == 2]
    return torch.optim.Muon(matrices, lr=0.1)


OF_WHOLE_PARAMETERS: dict[str, Callable[[], Any]] = {
    "adafactor": sf.optim.adafactor,
    "adamw8bit": lambda: sf.optim.adamw8bit(lr=1e-3),
    "Muon": lambda: muon_of_torch,
    "Mine": lambda: lambda groups: Mine(groups, lr=0.1),
}


def refusal_of(*, optimizer: str) -> tuple[str, str] | None:
    """The code and the value of the refusal of an optimizer that needs whole parameters."""
    try:
        world_runs.built(parallel="fsdp", optimizer=OF_WHOLE_PARAMETERS[optimizer]())
    except sf.ConfigError as error:
        return error.code, error.fields["value"]
    return None
