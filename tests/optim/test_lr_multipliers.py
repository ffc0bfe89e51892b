"""Rates of parts of a model: closed forms, exact factors on an update, frozen bits, resume, and
muP's claim itself; 6 seconds.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf
from in_one import in_one
from refused import refused
from same_bits import assert_same_bits, changed_names, weights
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
    """A network whose layers have the even names "0", "2", ..."""
    model = nn.Sequential(nn.Linear(inputs, width))
    for _ in range(layers - 2):
        model.extend([nn.Tanh(), nn.Linear(width, width)])
    return model.extend([nn.Tanh(), nn.Linear(width, outputs)])


def small_gpt(**changes):
    shape = {"layers": 1, "heads": 2, "width": 8, "context": 16, "vocab_size": 10}
    return GPT(GPTConfig(**(shape | changes)))


def build(**changes):
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


# --- layer-wise decay -----------------------------------------------------------------------------


def test_a_layer_decay_of_one_slows_nothing():
    assert set(sf.optim.layer_decay(1.0).factors(mlp(layers=4)).values()) == {1.0}


def test_layer_decay_is_the_closed_form_of_beit():
    """Bao et al.'s code: values = [decay ** (num_layers + 1 - i) for i in range(num_layers + 2)];
    embeddings 0, head last.
    """
    decay = 0.75
    layers = 3
    model = small_gpt(layers=layers)
    values = [decay ** (layers + 1 - i) for i in range(layers + 2)]
    depths = {"embedding": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 3, "norm": 4, "head": 4}

    factors = sf.optim.layer_decay(decay).factors(model)

    assert len(factors) == len(list(model.parameters()))
    for name, factor in factors.items():
        (depth,) = [depth for part, depth in depths.items() if name.startswith(f"{part}.")]
        assert factor == values[depth], name


def test_a_tied_head_has_the_rate_of_the_embedding():
    tied = small_gpt(tie_embeddings=True)

    assert sf.optim.layer_decay(0.5).factors(tied)["embedding.weight"] == 0.25


def test_a_model_without_blocks_is_told_what_to_do():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 3)

    with refused("model-without-depths", setting="layer_decay"):
        build(model=Flat, optimizer=sf.optim.sgd(0.1, lr_multipliers=sf.optim.layer_decay(0.5)))


# --- width scaling --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 64, 256])
def test_width_scaling_is_table_3_of_tensor_programs_v(width):
    """Adam: input weights and biases 1, hidden and output weights 1 / fan_in, relative to the base
    width.
    """
    model = mlp(width=width, layers=4)

    factors = factors_of(model, [sf.optim.width_scaling(base_width=64)])

    expected = {name: 1.0 for name, _ in model.named_parameters()}
    for name in ("2.weight", "4.weight", "6.weight"):
        expected[name] = 64 / width
    assert factors == expected


@pytest.mark.parametrize("tied", [False, True])
def test_in_a_gpt_embeddings_and_norms_keep_the_base_rate(tied):
    model = small_gpt(layers=2, width=32, family="gpt2", tie_embeddings=tied)
    scaled = set()
    for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down"):
        scaled |= {f"blocks.0.{part}.weight", f"blocks.1.{part}.weight"}
    if not tied:
        scaled.add("head.weight")

    factors = sf.optim.width_scaling(base_width=8).factors(model)

    assert factors == dict.fromkeys(scaled, 0.25)


def test_at_the_base_width_nothing_changes():
    model = mlp(width=64)
    assert set(factors_of(model, [sf.optim.width_scaling(base_width=64)]).values()) == {1.0}


def root_mean_square(change):
    return float(change.square().mean().sqrt())


def hidden_change(width, *, rates=(), steps=4):
    """How far some steps of Adam move a hidden layer's activations, root mean square over the batch
    and the layer.

    As muP asks, hidden weights start with variance 1 / fan_in and the head at 0.
    """

    def model():
        net = nn.Sequential(
            nn.Linear(8, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1, bias=False),
        )
        nn.init.normal_(net[2].weight, std=width**-0.5)
        nn.init.zeros_(net[4].weight)
        return net

    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    run = build(
        model=model,
        loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square().mean(),
        train_data=(inputs, inputs[:, 0]),
        batch_size=64,
        length=f"{steps} steps",
        optimizer=sf.optim.adamw(0.02, weight_decay=0.0, lr_multipliers=rates),
    )
    hidden = run.state.models["model"][:3]
    before = hidden(inputs).detach()
    run.train()
    return root_mean_square(hidden(inputs).detach() - before)


def test_with_width_scaling_updates_move_activations_as_far_at_any_width():
    """The coordinate check: Yang et al. 2022, appendix D.1."""
    narrow = 32
    wide = 512
    log_width_change = math.log(wide / narrow)
    scaling = sf.optim.width_scaling(base_width=narrow)

    scaled = hidden_change(wide, rates=scaling) / hidden_change(narrow, rates=scaling)
    plain = hidden_change(wide) / hidden_change(narrow)

    assert abs(math.log(scaled) / log_width_change) < 0.1  # 0 in the limit
    assert math.log(plain) / log_width_change > 0.6


def changes_of_gpt(width, rates):
    """How far some steps move the residual stream and the logits of a GPT with heads of 16
    channels.
    """
    shape = GPTConfig(layers=2, heads=width // 16, width=width, context=16, vocab_size=50)
    tokens = torch.randint(50, (16, 17), generator=torch.Generator().manual_seed(0))
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    run = build(
        model=lambda: GPT(shape),
        loss=lambda model, batch: F.cross_entropy(
            model(batch[0]).flatten(0, 1), batch[1].flatten()
        ),
        train_data=(inputs, targets),
        batch_size=16,
        length="6 steps",
        optimizer=sf.optim.adamw(0.01, weight_decay=0.0, lr_multipliers=rates),
    )
    model = run.state.models["model"]
    streams = []
    model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0].detach()))

    logits = model(inputs).detach()
    run.train()
    later_logits = model(inputs).detach()

    return {
        "stream": root_mean_square(streams[-1] - streams[0]),
        "logits": root_mean_square(later_logits - logits),
    }


def test_the_modern_gpt_does_what_else_width_scaling_takes():
    """Its residual stream and its logits are moved as far at four times the width."""
    base = changes_of_gpt(32, [])
    scaled = changes_of_gpt(128, sf.optim.width_scaling(base_width=32))
    plain = changes_of_gpt(128, [])

    for name in ("stream", "logits"):
        assert 1 / 1.3 < scaled[name] / base[name] < 1.3, name
        assert plain[name] / base[name] > 2, name


@pytest.mark.parametrize(
    "model", [lambda: nn.Linear(8, 3), lambda: nn.Sequential(nn.Embedding(8, 3), nn.LayerNorm(3))]
)
def test_a_model_without_hidden_width_is_refused(model):
    with refused("model-without-hidden-width", setting="base_width"):
        build(
            model=model,
            optimizer=sf.optim.adamw(0.1, lr_multipliers=sf.optim.width_scaling(base_width=8)),
        )


def test_width_scaling_is_refused_for_optimizers_with_other_factors():
    with refused("lr-multipliers-of-adam", value={"base_width": 8}, optimizer="sgd"):
        sf.optim.sgd(0.1, lr_multipliers=sf.optim.width_scaling(base_width=8))


# --- exact factors --------------------------------------------------------------------------------


def change_by_one_update(rates):
    """What one update of SGD at a rate of 0.25 with gradients of 1 takes from each parameter."""
    run = build(length="1 steps", optimizer=sf.optim.sgd(0.25, lr_multipliers=rates))
    before = weights(run)
    for parameter in run.state.models["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    run.state.optimizers["model"].optimizer.step()
    return {name: before[name].double() - weight.double() for name, weight in weights(run).items()}


def test_an_update_of_sgd_is_scaled_by_exactly_the_factor():
    """Factors and rate are powers of two, so nothing is rounded but the weight itself."""
    bias_rule = sf.optim.LRMultipliers(lambda model: {"0.bias": 4.0}, identity={"mine": 4})
    factors = {"0.weight": 0.25, "0.bias": 0.25 * 4.0, "2.weight": 0.5, "2.bias": 0.5}
    factors |= {"4.weight": 1.0, "4.bias": 1.0}

    plain = change_by_one_update([])
    scaled = change_by_one_update([sf.optim.layer_decay(0.5), bias_rule])

    assert plain.keys() == scaled.keys() == factors.keys()
    for name, factor in factors.items():  # to the last bit of a weight in float32
        expected = torch.full_like(plain[name], 0.25)
        torch.testing.assert_close(plain[name], expected, rtol=0, atol=2**-22)
        torch.testing.assert_close(scaled[name], expected * factor, rtol=0, atol=2**-22)


def test_factors_of_several_functions_multiply_and_do_not_depend_on_their_order():
    model = mlp(width=64)
    decay = sf.optim.layer_decay(0.5)
    scaling = sf.optim.width_scaling(base_width=32)

    factors = factors_of(model, [decay, scaling])

    assert factors == factors_of(model, [scaling, decay])
    assert factors["2.weight"] == 0.5 * 0.5
    assert factors["0.weight"] == 0.25


def test_groups_of_one_decay_and_rate_are_one_and_the_base_rate_comes_first():
    model = mlp()
    rates = factors_of(model, [sf.optim.layer_decay(0.5)])

    groups = parameter_groups(model, 0.1, rates=rates)

    assert [(group.rate, group.decay, group.names) for group in groups] == [
        (1.0, 0.1, ["4.weight"]),
        (1.0, 0.0, ["4.bias"]),
        (0.5, 0.1, ["2.weight"]),
        (0.5, 0.0, ["2.bias"]),
        (0.25, 0.1, ["0.weight"]),
        (0.25, 0.0, ["0.bias"]),
    ]


def test_the_schedule_multiplies_every_rate_and_the_record_has_the_base_one(tmp_path):
    run = build(
        optimizer=sf.optim.adamw(0.5, lr_multipliers=sf.optim.layer_decay(0.5)),
        schedule=sf.schedules.cosine("2 steps"),
        run_dir=tmp_path / "run",
        log_every="1 steps",
    )
    factors = [run.parts.task.factors(step) for step in range(8)]

    rates_by_step = []
    with run:
        for _ in run:
            groups = run.state.optimizers["model"].optimizer.param_groups
            rates_by_step.append([group["lr"] for group in groups])

    base_rates = [0.5 * factor for factor in factors]
    assert rates_by_step == [
        [rate, rate, rate * 0.5, rate * 0.5, rate * 0.25, rate * 0.25] for rate in base_rates
    ]
    run_records = records(tmp_path / "run" / "metrics.jsonl")
    logged = [record["lr"] for record in run_records if record["kind"] == "train"]
    assert logged == base_rates


@in_one
@pytest.mark.parametrize("name", DECLARED)
def test_every_optimizer_has_the_rates_of_parts_of_the_model(name):
    rules = [sf.optim.layer_decay(0.5), sf.optim.frozen("0.bias")]
    run = build(
        model=lambda: mlp(layers=4),
        optimizer=named(name, lr=0.5, lr_multipliers=rules),
        length="2 steps",
    )
    rates = {}
    for group in run.state.optimizers["model"].optimizer.param_groups:
        for parameter in group["params"]:
            rates[parameter] = group["initial_lr"]
    parameters = dict(run.state.models["model"].named_parameters())

    frozen = parameters.pop("0.bias")
    by_layer = {"0": 0.0625, "2": 0.125, "4": 0.25, "6": 0.5}
    assert frozen not in rates
    assert len(rates) == len(parameters)
    for title, parameter in parameters.items():
        assert rates[parameter] == by_layer[title[0]], title
    run.train()


# --- frozen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sf.optim.adamw, sf.optim.sgd])
def test_a_frozen_parameter_never_changes_a_bit_and_has_no_state(optimizer):
    rule = sf.optim.frozen("0.*", "*.bias")
    run = build(optimizer=optimizer(0.1, weight_decay=0.5, lr_multipliers=rule), ema=0.9)
    before = weights(run)

    run.train()

    assert changed_names(weights(run), before) == ["2.weight", "4.weight"]
    parameters = dict(run.state.models["model"].named_parameters())
    averages = dict(run.state.ema_models["model"].model.named_parameters())
    optimizer_state = run.state.optimizers["model"].optimizer.state
    for name in ("0.weight", "0.bias", "2.bias", "4.bias"):
        assert not optimizer_state.get(parameters[name])
        assert parameters[name].grad is None
        assert torch.equal(averages[name], before[name])


def test_a_tied_parameter_has_its_factor_by_any_of_its_names():
    tied = small_gpt(tie_embeddings=True)

    def factor_with(**factors):
        by_name = {f"{part}.weight": factor for part, factor in factors.items()}
        rule = sf.optim.LRMultipliers(lambda model: by_name, identity=factors)
        return factors_of(tied, [rule])["embedding.weight"]

    assert factor_with(embedding=0.5) == 0.5
    assert factor_with(head=0.5) == 0.5
    assert factor_with(embedding=0.5, head=0.5) == 0.5
    with refused("lr-multipliers-of-tied-parameter", value=[0.5, 0.0]):
        factor_with(embedding=0.5, head=0.0)


def test_freezing_one_name_of_a_tied_parameter_freezes_it():
    tied = small_gpt(tie_embeddings=True)

    assert sf.optim.frozen("head.*").factors(tied) == {"embedding.weight": 0.0}


def test_a_pattern_that_fits_nothing_is_told_what_there_is():
    with refused("frozen-parameter-unknown", value=["encoder.*"]) as caught:
        build(optimizer=sf.optim.sgd(0.1, lr_multipliers=sf.optim.frozen("0.*", "encoder.*")))
    assert caught.value.reason.endswith("0.*, 2.*, 4.*")


def test_all_frozen_is_nothing_to_train():
    with refused("nothing-to-train"):
        build(optimizer=sf.optim.sgd(0.1, lr_multipliers=sf.optim.frozen("*")))


@pytest.mark.parametrize(
    ("optimizer", "ema"),
    [(sf.optim.adamw, 0.9), (sf.optim.schedule_free, None)],
    ids=["ema", "schedule_free"],
)
def test_weights_to_start_from_are_those_of_the_average_too_where_they_are_frozen(
    optimizer, ema, tmp_path
):
    build(run_dir=tmp_path / "first", seed=1).train()
    run = build(
        init_from=tmp_path / "first",
        optimizer=optimizer(0.1, lr_multipliers=sf.optim.frozen("0.*")),
        ema=ema,
    )

    with run:
        start = weights(run)
        start_of_average = average_of(run)
        for _ in run:
            pass

    assert_same_bits(start_of_average, start)
    changed = changed_names(average_of(run), start)
    assert "0.weight" not in changed
    assert "2.weight" in changed


def average_of(run):
    state = run.parts.evaluator.models()["model"].state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


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


def build_with_rates(run_dir, rates, **changes):
    optimizer = sf.optim.adamw(0.05, lr_multipliers=rates)
    return build(optimizer=optimizer, run_dir=run_dir, save_every="100 steps", **changes)


def test_a_resume_with_rates_is_bit_equal_and_one_with_others_is_refused(tmp_path):
    decay = sf.optim.layer_decay(0.5)
    frozen = sf.optim.frozen("0.bias")
    other_decay = sf.optim.layer_decay(0.6)
    others_frozen = sf.optim.frozen("*.bias")
    whole = build_with_rates(tmp_path / "whole", [decay, frozen])
    whole.train()
    build_with_rates(tmp_path / "halves", [decay, frozen], stop_after="4 steps").train()

    for others in ([], [decay], [other_decay, frozen], [decay, others_frozen]):
        with refused("settings-changed", sf.CheckpointError):
            build_with_rates(tmp_path / "halves", others).train()
    second = build_with_rates(tmp_path / "halves", [decay, frozen])
    second.train()

    assert_same_bits(weights(second), weights(whole))


def test_a_rule_of_ones_own_that_changed_is_seen_at_resume(tmp_path):
    def rule(factor):
        return sf.optim.LRMultipliers(lambda _: {"0.weight": factor}, identity={"mine": "slower"})

    build_with_rates(tmp_path / "run", rule(0.5), stop_after="4 steps").train()

    with refused("settings-changed", sf.CheckpointError) as caught:
        build_with_rates(tmp_path / "run", rule(0.25)).train()

    assert caught.value.fields["changes"][0].startswith("optimizer.learning_rates was")


def test_settings_of_a_recipe_make_the_same_specification():
    config = Optimizer(lr=0.1, layer_decay=0.75, base_width=64, frozen=("embedding.*",))

    assert config.spec().to_dict()["lr_multipliers"] == [
        {"layer_decay": 0.75},
        {"base_width": 64},
        {"frozen": ["embedding.*"]},
    ]
    assert "lr_multipliers" not in Optimizer(lr=0.1).spec().to_dict()


def test_everything_wrong_with_them_is_told_at_once():
    with pytest.raises(sf.ConfigError) as caught:
        Optimizer(lr=-1.0, layer_decay=2.0, base_width=-3, frozen=("",)).spec()

    settings = [problem.fields["setting"] for problem in caught.value.problems]
    assert settings == ["layer_decay", "base_width", "frozen", "optimizer.lr"]


def test_plan_shows_the_rate_of_each_group_and_what_is_frozen():
    rules = [sf.optim.layer_decay(0.5), sf.optim.frozen("0.bias")]
    run = build(optimizer=sf.optim.adamw(0.1, weight_decay=0.1, lr_multipliers=rules))

    text = "\n".join(str(section) for section in summary.sections(run.parts))

    assert "group 0: 1 tensor, 48 elements, lr 0.1, weight decay 0.1: 4.weight" in text
    assert "group 4: 1 tensor, 128 elements, lr 0.025, weight decay 0.1: 0.weight" in text
    assert "frozen: 1 tensor, 16 elements: 0.bias" in text
    assert [0, 1, 1, 0.5, 0.5, 0.25] in numbers_by_line(text)  # relative to group 0


def test_the_command_line_takes_them(tmp_path, capsys):
    text_file = tmp_path / "text.txt"
    text_file.write_text("so it goes. " * 400)
    settings = {
        "--length": "2 steps",
        "--run-dir": str(tmp_path / "run"),
        "--precision": "fp32",
        "--data.path": str(text_file),
        "--data.tokenizer": "bytes",
        "--model.width": "32",
        "--optimizer.name": "adamw",
        "--optimizer.layer-decay": "0.5",
        "--optimizer.base-width": "16",
    }
    flags = [word for setting in settings.items() for word in setting]

    main(["plan", "gpt", *flags, "--optimizer.frozen", "embedding.*", "norm.*"])

    text = capsys.readouterr().out
    assert re.search(r"frozen: 2 tensors, [\d,]+ elements: embedding.weight ... norm.weight", text)
    assert "lr 0.0015, weight decay 0.1: head.weight" in text  # 0.003 x 16 / 32


@pytest.mark.parametrize(("rule", "power"), [("linear", 1.0), ("sqrt", 0.5)])
def test_the_rate_of_another_batch_size_grows_as_the_rule_says(rule, power):
    for batch_size in (64, 256, 2048):
        rate = sf.optim.scale_lr(0.1, batch_size=batch_size, base_batch_size=256, rule=rule)
        assert rate == pytest.approx(0.1 * (batch_size / 256) ** power)


def test_noam_s_rate_with_an_inverse_square_root_is_that_of_the_paper():
    width = 512
    warmup = 400
    length = Length(steps=4000, samples_per_epoch=1, batch_size=1)
    factor = sf.schedules.inverse_sqrt(warmup).factors(length)

    rate = sf.optim.noam_lr(width, warmup_steps=warmup)

    def paper(step):
        return width**-0.5 * min(step**-0.5, step * warmup**-1.5)

    for step in range(1, warmup):
        assert rate * factor(step) == pytest.approx(paper(step), rel=1 / step)
    for step in range(warmup, 4000):
        assert rate * factor(step) == pytest.approx(paper(step), rel=1e-9)
