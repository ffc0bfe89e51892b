"""Rates of parts of a model: closed forms, exact factors on an update, frozen bits, resume, and
muP's claim itself; 6 seconds.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf
from in_one import in_one
from refused import refused
from stated import numbers_by_line
from surefoot.cli.main import main
from surefoot.config.durations import Length
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig
from surefoot.optim.lr_multipliers import factors_of
from surefoot.optim.optimizers import named
from surefoot.optim.param_groups import parameter_groups
from surefoot.optim.validation import DECLARED
from surefoot.recipes.optimizer_settings import Optimizer
from surefoot.tools.plan import summary
from surefoot.tracking.jsonl import records


def mlp(width=16, layers=3, inputs=8, outputs=3):
    sizes = [inputs, *[width] * (layers - 1), outputs]
    parts = [
        part for before, after in pairwise(sizes) for part in (nn.Linear(before, after), nn.Tanh())
    ]
    return nn.Sequential(*parts[:-1])


def run_of(**changes):
    generator = torch.Generator().manual_seed(0)
    settings = {
        "model": mlp,
        "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "train_data": (
            torch.randn(32, 8, generator=generator),
            torch.randint(3, (32,), generator=generator),
        ),
        "batch_size": 8,
        "length": "8 steps",
        "optimizer": sf.optim.sgd(0.1),
        "clip": "off",
        "precision": "fp32",
        "device": "cpu",
        "console": False,
    }
    return sf.Run(**(settings | changes))


def weights(run):
    return {
        name: held.detach().clone() for name, held in run.state.models["model"].named_parameters()
    }


# --- layer-wise decay -----------------------------------------------------------------------------


def test_a_layer_decay_of_one_slows_nothing():
    assert set(sf.optim.layer_decay(1.0).factors(mlp(layers=4)).values()) == {1.0}


def test_layer_decay_is_the_closed_form_of_beit():
    """Bao et al.'s code: values = [decay ** (num_layers + 1 - i) for i in range(num_layers + 2)];
    embeddings 0, head last.
    """
    model = GPT(GPTConfig(layers=3, heads=2, width=8, context=16, vocab_size=10))
    decay = 0.75
    layers = 3
    values = [decay ** (layers + 1 - i) for i in range(layers + 2)]
    found = sf.optim.layer_decay(decay).factors(model)
    expected = {}
    for name in found:
        part, _, rest = name.partition(".")
        place = {"embedding": 0, "norm": layers + 1, "head": layers + 1}.get(part)
        expected[name] = values[int(rest[0]) + 1 if place is None else place]
    assert found == expected
    assert len(found) == len(list(model.parameters()))


def test_a_tied_head_has_the_rate_of_the_embedding():
    tied = GPT(
        GPTConfig(layers=1, heads=2, width=8, context=16, vocab_size=10, tie_embeddings=True)
    )
    assert sf.optim.layer_decay(0.5).factors(tied)["embedding.weight"] == 0.25


def test_a_model_without_blocks_is_told_what_to_do():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    with refused("model-without-depths", setting="layer_decay"):
        run_of(model=Flat, optimizer=sf.optim.sgd(0.1, lr_multipliers=sf.optim.layer_decay(0.5)))


# --- width scaling --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 64, 256])
def test_width_scaling_is_table_3_of_tensor_programs_v(width):
    """Adam: input weights and biases 1, hidden and output weights 1 / fan_in, relative to the base
    width.
    """
    model = mlp(width=width, layers=4)
    found = factors_of(model, [sf.optim.width_scaling(base_width=64)])
    hidden = {"2.weight", "4.weight", "6.weight"}
    assert found == {
        name: 64 / width if name in hidden else 1.0 for name, _ in model.named_parameters()
    }


def test_in_a_gpt_embeddings_and_norms_keep_the_base_rate():
    shape = GPTConfig(layers=2, heads=2, width=32, context=16, vocab_size=10, family="gpt2")
    for tied in (False, True):
        model = GPT(GPTConfig(**(vars(shape) | {"tie_embeddings": tied})))
        found = sf.optim.width_scaling(base_width=8).factors(model)
        blocks = {
            f"blocks.{block}.{part}.weight"
            for block in (0, 1)
            for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
        }
        assert found == dict.fromkeys(blocks | (set() if tied else {"head.weight"}), 0.25)


def test_at_the_base_width_nothing_changes():
    model = mlp(width=64)
    assert set(factors_of(model, [sf.optim.width_scaling(base_width=64)]).values()) == {1.0}


def hidden_change(width, *, base_width=None, steps=4):
    """How far some steps of Adam move a hidden layer's activations, root mean square over the batch
    and the layer.

    As muP asks, hidden weights start with variance 1 / fan_in and the head at 0.
    """
    generator = torch.Generator().manual_seed(1)

    def model():
        made = nn.Sequential(
            nn.Linear(8, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1, bias=False),
        )
        nn.init.normal_(made[2].weight, std=width**-0.5)
        nn.init.zeros_(made[4].weight)
        return made

    inputs = torch.randn(64, 8, generator=generator)
    run = run_of(
        model=model,
        loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square().mean(),
        train_data=(inputs, inputs[:, 0]),
        batch_size=64,
        length=f"{steps} steps",
        optimizer=sf.optim.adamw(
            0.02,
            weight_decay=0.0,
            lr_multipliers=[]
            if base_width is None
            else sf.optim.width_scaling(base_width=base_width),
        ),
    )
    net = run.state.models["model"]
    before = net[:3](inputs).detach()
    run.train()
    return float((net[:3](inputs) - before).detach().square().mean().sqrt())


def test_with_width_scaling_updates_move_activations_as_far_at_any_width():
    """The coordinate check: Yang et al. 2022, appendix D.1."""
    widths = [32, 64, 128, 256, 512]
    scaled = [hidden_change(width, base_width=32) for width in widths]
    plain = [hidden_change(width) for width in widths]
    slope_scaled, slope_plain = (
        math.log(changes[-1] / changes[0]) / math.log(widths[-1] / widths[0])
        for changes in (scaled, plain)
    )
    assert abs(slope_scaled) < 0.1  # of log change over log width: 0 in the limit
    assert slope_plain > 0.6


def test_the_modern_gpt_does_what_else_width_scaling_takes():
    """Its residual stream and its logits are moved as far at four times the width, with heads of 16
    channels at both.
    """

    def moved(width, rates):
        shape = GPTConfig(layers=2, heads=width // 16, width=width, context=16, vocab_size=50)
        tokens = torch.randint(50, (16, 17), generator=torch.Generator().manual_seed(0))
        run = run_of(
            model=lambda: GPT(shape),
            loss=lambda model, batch: F.cross_entropy(
                model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten()
            ),
            train_data=(tokens,),
            batch_size=16,
            length="6 steps",
            optimizer=sf.optim.adamw(0.01, weight_decay=0.0, lr_multipliers=rates),
        )
        model = run.state.models["model"]
        stream = []
        model.norm.register_forward_hook(
            lambda module, inputs, output: stream.append(inputs[0].detach())
        )
        before = model(tokens[:, :-1]).detach()
        run.train()
        after = model(tokens[:, :-1]).detach()
        return [
            float((b - a).square().mean().sqrt())
            for a, b in ((stream[0], stream[-1]), (before, after))
        ]

    at_base = moved(32, [])
    for name, scaled, plain, base in zip(
        ("stream", "logits"),
        moved(128, sf.optim.width_scaling(base_width=32)),
        moved(128, []),
        at_base,
        strict=True,
    ):
        assert 1 / 1.3 < scaled / base < 1.3, name
        assert plain / base > 2, name


@pytest.mark.parametrize(
    "model", [lambda: nn.Linear(8, 3), lambda: nn.Sequential(nn.Embedding(8, 3), nn.LayerNorm(3))]
)
def test_a_model_without_hidden_width_is_refused(model):
    with refused("model-without-hidden-width", setting="base_width"):
        run_of(
            model=model,
            optimizer=sf.optim.adamw(0.1, lr_multipliers=sf.optim.width_scaling(base_width=8)),
        )


def test_width_scaling_is_refused_for_optimizers_with_other_factors():
    with refused("lr-multipliers-of-adam", value={"base_width": 8}, optimizer="sgd"):
        sf.optim.sgd(0.1, lr_multipliers=sf.optim.width_scaling(base_width=8))


# --- exact factors --------------------------------------------------------------------------------


def test_an_update_of_sgd_is_scaled_by_exactly_the_factor():
    """Factors and rate are powers of two, so nothing is rounded: the change with them is the change
    without, times them.
    """
    rates = [
        sf.optim.layer_decay(0.5),
        sf.optim.LRMultipliers(lambda model: {"0.bias": 4.0}, identity={"mine": 4}),
    ]
    changes = []
    for given in ((), rates):
        run = run_of(length="1 steps", optimizer=sf.optim.sgd(0.25, lr_multipliers=given))
        before = weights(run)
        for held in run.state.models["model"].parameters():
            held.grad = torch.ones_like(held)
        run.state.optimizers["model"].optimizer.step()
        changes.append(
            {name: before[name].double() - held.double() for name, held in weights(run).items()}
        )
        for name, change in changes[
            -1
        ].items():  # float32 rounds the difference to the weight's last bit
            factor = (
                {"0": 0.25, "2": 0.5, "4": 1.0}[name[0]] * (4.0 if name == "0.bias" else 1.0)
                if given
                else 1.0
            )
            torch.testing.assert_close(
                change, torch.full_like(change, 0.25 * factor), rtol=0, atol=2**-22
            )


def test_factors_of_several_functions_multiply_and_do_not_depend_on_their_order():
    model = mlp(width=64)
    one = sf.optim.layer_decay(0.5)
    other = sf.optim.width_scaling(base_width=32)
    found = factors_of(model, [one, other])
    assert found == factors_of(model, [other, one])
    assert found["2.weight"] == 0.5 * 0.5
    assert found["0.weight"] == 0.25


def test_groups_of_one_decay_and_rate_are_one_and_the_base_rate_comes_first():
    model = mlp()
    groups = parameter_groups(model, 0.1, rates=factors_of(model, [sf.optim.layer_decay(0.5)]))
    assert [(group.rate, group.decay, group.names) for group in groups] == [
        (rate, decay, [f"{layer}.{kind}"])
        for rate, layer in ((1.0, 4), (0.5, 2), (0.25, 0))
        for decay, kind in ((0.1, "weight"), (0.0, "bias"))
    ]


def test_the_schedule_multiplies_every_rate_and_the_record_has_the_base_one(tmp_path):
    run = run_of(
        optimizer=sf.optim.adamw(0.5, lr_multipliers=sf.optim.layer_decay(0.5)),
        schedule=sf.schedules.cosine("2 steps"),
        run_dir=tmp_path / "run",
        log_every="1 steps",
    )
    factor = run.parts.task.factors
    seen = []
    with run:
        for _ in run:
            seen.append(
                [group["lr"] for group in run.state.optimizers["model"].optimizer.param_groups]
            )
    assert seen == [
        [0.5 * rate * factor(step) for rate in (1.0, 1.0, 0.5, 0.5, 0.25, 0.25)]
        for step in range(8)
    ]
    logged = [
        record["lr"]
        for record in records(tmp_path / "run" / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    assert logged == [0.5 * factor(step) for step in range(8)]


@in_one
@pytest.mark.parametrize("name", DECLARED)
def test_every_optimizer_has_the_rates_of_parts_of_the_model(name):
    run = run_of(
        model=lambda: mlp(layers=4),
        optimizer=named(
            name, lr=0.5, lr_multipliers=[sf.optim.layer_decay(0.5), sf.optim.frozen("0.bias")]
        ),
    )
    names = {held: title for title, held in run.state.models["model"].named_parameters()}
    found = {
        names[held]: group["initial_lr"]
        for group in run.state.optimizers["model"].optimizer.param_groups
        for held in group["params"]
    }
    rates = {"0": 0.0625, "2": 0.125, "4": 0.25, "6": 0.5}
    assert found == {title: rates[title[0]] for title in names.values() if title != "0.bias"}
    run.train()


# --- frozen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sf.optim.adamw, sf.optim.sgd])
def test_a_frozen_parameter_never_changes_a_bit_and_has_no_state(optimizer):
    run = run_of(
        optimizer=optimizer(0.1, weight_decay=0.5, lr_multipliers=sf.optim.frozen("0.*", "*.bias")),
        ema=0.9,
    )
    before = weights(run)
    run.train()
    after = weights(run)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {"0.weight", "0.bias", "2.bias", "4.bias"}
    held = dict(run.state.models["model"].named_parameters())
    state = run.state.optimizers["model"].optimizer.state
    assert all(not state.get(held[name]) and held[name].grad is None for name in same)
    averages = dict(run.state.ema_models["model"].model.named_parameters())
    assert all(torch.equal(averages[name], before[name]) for name in same)


def test_a_tied_parameter_has_its_factor_by_any_of_its_names():
    tied = GPT(GPTConfig(vocab_size=7, context=4, width=8, layers=1, heads=1, tie_embeddings=True))

    def factor_of(**factors):
        names = {"first": "embedding.weight", "second": "head.weight"}
        by_name = {names[key]: factor for key, factor in factors.items()}
        rule = sf.optim.LRMultipliers(lambda model: by_name, identity=factors)
        return factors_of(tied, [rule])["embedding.weight"]

    assert factor_of(first=0.5) == factor_of(second=0.5) == factor_of(first=0.5, second=0.5) == 0.5
    with refused("lr-multipliers-of-tied-parameter", value=[0.5, 0.0]):
        factor_of(first=0.5, second=0.0)


def test_freezing_one_name_of_a_tied_parameter_freezes_it():
    tied = GPT(
        GPTConfig(layers=1, heads=2, width=8, context=16, vocab_size=10, tie_embeddings=True)
    )
    assert sf.optim.frozen("head.*").factors(tied) == {"embedding.weight": 0.0}


def test_a_pattern_that_fits_nothing_is_told_what_there_is():
    with refused("frozen-parameter-unknown", value=["encoder.*"]) as told:
        run_of(optimizer=sf.optim.sgd(0.1, lr_multipliers=sf.optim.frozen("0.*", "encoder.*")))
    assert told.value.reason.endswith("0.*, 2.*, 4.*")


def test_all_frozen_is_nothing_to_train():
    with refused("nothing-to-train"):
        run_of(optimizer=sf.optim.sgd(0.1, lr_multipliers=sf.optim.frozen("*")))


@pytest.mark.parametrize(
    ("optimizer", "ema"),
    [(sf.optim.adamw, 0.9), (sf.optim.schedule_free, None)],
    ids=["ema", "schedule_free"],
)
def test_weights_to_start_from_are_those_of_the_average_too_where_they_are_frozen(
    optimizer, ema, tmp_path
):
    run_of(run_dir=tmp_path / "first", seed=1).train()
    run = run_of(
        init_from=tmp_path / "first",
        optimizer=optimizer(0.1, lr_multipliers=sf.optim.frozen("0.*")),
        ema=ema,
    )
    with run:
        start = weights(run)
        twin = dict(run.parts.evaluator.models()["model"].named_parameters())
        assert all(torch.equal(held, start[name]) for name, held in twin.items())
        for _ in run:
            pass
    run.parts.evaluator.models()  # brings it up to date
    assert torch.equal(twin["0.weight"], start["0.weight"])
    assert not torch.equal(twin["2.weight"], start["2.weight"])


# --- settings -------------------------------------------------------------------------------------


@in_one
@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        (lambda: sf.optim.layer_decay(0.0), "layer_decay"),
        (lambda: sf.optim.layer_decay(1.5), "layer_decay"),
        (lambda: sf.optim.layer_decay(math.nan), "layer_decay"),
        (lambda: sf.optim.width_scaling(base_width=0), "base_width"),
        (lambda: sf.optim.width_scaling(base_width=64.0), "base_width"),
        (sf.optim.frozen, "frozen"),
        (lambda: sf.optim.frozen(""), "frozen"),
        (lambda: sf.optim.adamw(0.1, lr_multipliers=0.5), "lr_multipliers"),
        (lambda: sf.optim.scale_lr(0.1, batch_size=0, base_batch_size=256), "batch_size"),
        (lambda: sf.optim.scale_lr(0.1, batch_size=8, base_batch_size=8, rule="cube"), "rule"),
        (lambda: sf.optim.noam_lr(0, warmup_steps=4), "d_model"),
    ],
)
def test_values_that_cannot_be_are_refused(wrong, setting):
    with refused("setting-out-of-range", setting=setting):
        wrong()


@pytest.mark.parametrize(
    ("factors", "code"),
    [
        ({"5.weight": 1.0}, "lr-multiplier-unknown"),
        ({"0.weight": -1.0}, "lr-multiplier-out-of-range"),
        ({"0.weight": math.inf}, "lr-multiplier-out-of-range"),
    ],
)
def test_factors_that_cannot_be_are_refused_with_their_parameter(factors, code):
    (parameter,) = factors
    with refused(code, parameter=parameter):
        factors_of(mlp(), [sf.optim.LRMultipliers(lambda _: factors, identity={})])


def test_a_resume_with_rates_is_bit_equal_and_one_with_others_is_refused(tmp_path):
    def build(run_dir, rates, **changes):
        return run_of(
            optimizer=sf.optim.adamw(0.05, lr_multipliers=rates),
            run_dir=tmp_path / run_dir,
            save_every="100 steps",
            **changes,
        )

    rates = [sf.optim.layer_decay(0.5), sf.optim.frozen("0.bias")]
    whole = build("whole", rates)
    whole.train()
    build("halves", rates, stop_after="4 steps").train()
    for others in (
        (),
        [rates[0]],
        [sf.optim.layer_decay(0.6), rates[1]],
        [rates[0], sf.optim.frozen("*.bias")],
    ):
        with refused("settings-changed", sf.CheckpointError):
            build("halves", others).train()
    second = build("halves", rates)
    second.train()
    assert all(torch.equal(held, weights(second)[name]) for name, held in weights(whole).items())


def test_a_rule_of_ones_own_that_changed_is_seen_at_resume(tmp_path):
    def build(factor, **changes):
        rates = sf.optim.LRMultipliers(lambda _: {"0.weight": factor}, identity={"mine": "slower"})
        return run_of(
            optimizer=sf.optim.adamw(0.05, lr_multipliers=rates),
            run_dir=tmp_path / "run",
            **changes,
        )

    build(0.5, stop_after="4 steps").train()
    with refused("settings-changed", sf.CheckpointError) as refusal:
        build(0.25).train()
    assert refusal.value.fields["changes"][0].startswith("optimizer.learning_rates was")


def test_settings_of_a_recipe_make_the_same_specification():
    config = Optimizer(lr=0.1, layer_decay=0.75, base_width=64, frozen=("embedding.*",))
    assert config.spec().to_dict()["lr_multipliers"] == [
        {"layer_decay": 0.75},
        {"base_width": 64},
        {"frozen": ["embedding.*"]},
    ]
    assert "lr_multipliers" not in Optimizer(lr=0.1).spec().to_dict()


def test_everything_wrong_with_them_is_told_at_once():
    with pytest.raises(sf.ConfigError) as told:
        Optimizer(lr=-1.0, layer_decay=2.0, base_width=-3, frozen=("",)).spec()
    assert [problem.fields["setting"] for problem in told.value.problems] == [
        "layer_decay",
        "base_width",
        "frozen",
        "optimizer.lr",
    ]


def test_plan_shows_the_rate_of_each_group_and_what_is_frozen():
    run = run_of(
        optimizer=sf.optim.adamw(
            0.1,
            weight_decay=0.1,
            lr_multipliers=[sf.optim.layer_decay(0.5), sf.optim.frozen("0.bias")],
        )
    )
    text = "\n".join(str(section) for section in summary.sections(run.parts))
    assert "group 0: 1 tensor, 48 elements, lr 0.1, weight decay 0.1: 4.weight" in text
    assert "group 4: 1 tensor, 128 elements, lr 0.025, weight decay 0.1: 0.weight" in text
    assert "frozen: 1 tensor, 16 elements: 0.bias" in text
    assert [0, 1, 0.5, 0.25] in numbers_by_line(text)  # relative to group 0


def test_the_command_line_takes_them(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("so it goes. " * 400)
    data = [
        "--data.path",
        str(tmp_path / "text.txt"),
        "--data.tokenizer",
        "bytes",
        "--model.width",
        "32",
    ]
    rates = [
        "--optimizer.name",
        "adamw",
        "--optimizer.layer-decay",
        "0.5",
        "--optimizer.base-width",
        "16",
    ]
    frozen = ["--optimizer.frozen", "embedding.*", "norm.*"]
    main(
        [
            "plan",
            "gpt",
            "--length",
            "2 steps",
            "--run-dir",
            str(tmp_path / "run"),
            "--precision",
            "fp32",
            *data,
            *rates,
            *frozen,
        ]
    )
    text = capsys.readouterr().out
    assert re.search(r"frozen: 2 tensors, [\d,]+ elements: embedding.weight ... norm.weight", text)
    assert "lr 0.0015, weight decay 0.1: head.weight" in text  # 0.003 x 16 / 32


@pytest.mark.parametrize(("rule", "power"), [("linear", 1.0), ("sqrt", 0.5)])
def test_the_rate_of_another_batch_size_grows_as_the_rule_says(rule, power):
    for batch_size in (64, 256, 2048):
        found = sf.optim.scale_lr(0.1, batch_size=batch_size, base_batch_size=256, rule=rule)
        assert found == pytest.approx(0.1 * (batch_size / 256) ** power)


def test_noam_s_rate_with_an_inverse_square_root_is_that_of_the_paper():
    width, warmup = 512, 400
    factor = sf.schedules.inverse_sqrt(warmup).factors(
        Length(steps=4000, samples_per_epoch=1, batch_size=1)
    )
    rate = sf.optim.noam_lr(width, warmup_steps=warmup)

    for step in range(1, 4000):
        paper = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert rate * factor(step) == pytest.approx(paper, rel=1e-9 if step >= warmup else 1 / step)
