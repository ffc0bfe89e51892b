"""The API in use: each snippet of the public API, with small local data and models. (5 s)"""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import surefoot as sf
from rank_processes import Ranks
from run_files import same_tensors
from surefoot.cli.main import main

CLASSES = 4


class MyNet(nn.Module):
    """A classifier with a part to be frozen and a number to be logged."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(8, 16)
        self.head = nn.Linear(16, CLASSES)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x_BC: Tensor) -> Tensor:
        logits_BK: Tensor = self.head(self.backbone(x_BC).relu()) / self.temperature
        return logits_BK


def loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def samples(count: int, seed: int) -> TensorDataset:
    """Classes that can be told apart."""
    centers_KC = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels_B = torch.randint(CLASSES, (count,), generator=generator)
    noise_BC = 0.3 * torch.randn(count, 8, generator=generator)
    return TensorDataset(centers_KC[labels_B] + noise_BC, labels_B)


def classifier(run_dir: Path | None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": MyNet,
        "loss": loss,
        "train_data": samples(64, 1),
        "splits": {"val": sf.Split(samples(32, 2))},
        "batch_size": 16,
        "length": "12 steps",
        "evaluate_every": "2 steps",
        "log_every": "1 steps",
        "optimizer": sf.optim.adamw(lr=0.03),
        "run_dir": run_dir,
        "device": "cpu",
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


# --- classification with metrics (the example of README: test_readme.py) --------------------------

CLASSIFICATION = """
def loss(model, batch):
    images, labels = batch
    logits = model(images)
    return F.cross_entropy(logits, labels), (logits, labels)
data = sf.data.load_images("flowers/", val_fraction=0.1, size=224, augmentation=sf.data.Augmentation(flip=True))
run = sf.Run(
    model=lambda: timm.create_model("resnet18", num_classes=len(data.classes)), loss=loss, train_data=data.train,
    splits={
        "val": sf.Split(data.val, metrics=[sf.metrics.accuracy, torchmetrics.F1Score("multiclass", num_classes=5)]),
        "test": sf.Split(data.test, metrics=sf.metrics.ClassificationReport(data.classes), at_end=True),
    },
    best="max val/accuracy", early_stopping=sf.EarlyStopping("max val/accuracy", patience=5),
    batch_size=128, length="40 epochs", optimizer=sf.optim.sgd(lr=0.1, momentum=0.9), workers=4, run_dir="runs/flowers",
)
run.train()
"""


SMALL = {
    "size=224": "size=8",
    "40 epochs": "2 epochs",
    "workers=4": "workers=0",
    "batch_size=128": "batch_size=16",
}


def write_flowers() -> None:
    """Pictures of five kinds, each of another color: 50 to train on, 10 to test with."""
    from PIL import Image

    for part, count in (("train", 10), ("test", 2)):
        for kind in range(5):
            folder = Path("flowers", part, f"kind-{kind}")
            folder.mkdir(parents=True)
            for number in range(count):
                color = (40 * kind + number, 200 - 30 * kind, 9 * number)
                Image.new("RGB", (12, 12), color).save(folder / f"{number}.png")


def create_model(_name: str, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names of the example of classification after it has trained: `run`, `data`."""
    import torchmetrics

    code = CLASSIFICATION
    for usual, small in SMALL.items():
        assert usual in code
        code = code.replace(usual, small)
    names: dict[str, Any] = {
        "sf": sf,
        "F": F,
        "timm": SimpleNamespace(create_model=create_model),
        "torchmetrics": torchmetrics,
    }
    with chdir(tmp_path_factory.mktemp("flowers")):
        write_flowers()
        exec(code, names)
        names["saved"] = sf.load(Path("runs/flowers").absolute())
    return names


def test_the_confusion_of_a_test_set_is_that_of_its_accuracy(flowers: dict[str, Any]) -> None:
    (final,) = flowers["saved"].records("final_eval")
    confusion = torch.tensor(final["test/confusion"])

    assert confusion.sum(1).tolist() == [2] * 5
    assert final["test/accuracy"] == int(confusion.trace()) / 10


def test_metrics_of_ours_and_of_torchmetrics_are_those_of_all_outputs(
    flowers: dict[str, Any],
) -> None:
    from torchmetrics.functional import f1_score

    run = flowers["run"]
    data = flowers["data"].val
    images, labels = zip(*(data[index] for index in range(len(data))), strict=True)

    scores = run.evaluate("val")

    targets = torch.tensor(labels)
    with torch.no_grad():
        predictions = run.state.model.eval()(torch.stack(images)).argmax(1)
    accuracy = (predictions == targets).double().mean().item()
    f1 = f1_score(predictions, targets, task="multiclass", num_classes=5).item()
    assert scores["val/accuracy"] == pytest.approx(accuracy)
    assert scores["val/MulticlassF1Score"] == pytest.approx(f1)


# --- a custom loop --------------------------------------------------------------------------------


def frozen_at_first() -> MyNet:
    model = MyNet()
    model.backbone.requires_grad_(False)
    return model


def train_in_custom_loop(run_dir: Path, *, low_enough: float, **changes: Any) -> list[float]:
    """Level 2, with gradual unfreezing, a value in the records, and a stop of its own: the losses
    of each evaluation.
    """
    return run_custom_loop(
        classifier(run_dir, model=frozen_at_first, **changes), low_enough=low_enough
    )


def run_custom_loop(run: sf.Run, *, low_enough: float) -> list[float]:
    with run:
        history: list[float] = run.register_state("history", [])
        for step in run:
            if step.index == 3:
                run.state.model.get_submodule("backbone").requires_grad_(True)
            step.log(temperature=run.state.model.get_parameter("temperature"))
            if step.metrics:
                history.append(step.metrics["val/loss"])
                if history[-1] < low_enough:
                    break
    return history


def test_a_custom_loop_that_broke_off_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    straight = train_in_custom_loop(tmp_path / "straight", low_enough=0.0)
    assert sorted(straight, reverse=True) == straight
    third_loss = straight[2] + 1e-6

    cut = train_in_custom_loop(tmp_path / "cut", low_enough=third_loss)
    assert cut == straight[:3]
    assert sf.load(tmp_path / "cut").status == "stopped"

    resumed = train_in_custom_loop(tmp_path / "cut", low_enough=0.0)
    assert resumed == straight


def test_a_value_that_a_custom_loop_logs_is_in_every_record(tmp_path: Path) -> None:
    train_in_custom_loop(tmp_path / "run", low_enough=0.0, length="6 steps")

    temperatures = [record["temperature"] for record in sf.load(tmp_path / "run").records("train")]
    assert len(temperatures) == 6
    assert len(set(temperatures)) == 6


def test_what_a_custom_loop_unfreezes_is_trained_from_then_on(tmp_path: Path) -> None:
    run = classifier(
        tmp_path / "run", model=frozen_at_first, length="6 steps", save_every="3 steps"
    )
    built = run.state.model.get_parameter("backbone.weight").detach().clone()
    run_custom_loop(run, low_enough=0.0)

    saved = sf.load(tmp_path / "run")
    first, third, last = (
        saved.load_model(MyNet, checkpoint=step).get_parameter("backbone.weight")
        for step in (0, 3, 6)
    )
    assert torch.equal(first, built)
    assert torch.equal(third, first)
    assert not torch.equal(last, first)


# --- a GAN ----------------------------------------------------------------------------------------


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 8)

    def forward(self, noise_BZ: Tensor) -> Tensor:
        faces_BC: Tensor = self.layer(noise_BZ)
        return faces_BC


class Discriminator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 1)


def discriminator_loss(models: dict[str, nn.Module], batch: Any) -> Tensor:
    (faces,) = batch
    fakes = models["generator"](torch.randn(len(faces), 2)).detach()
    loss_of_faces = F.softplus(-models["discriminator"](faces)).mean()
    loss_of_fakes = F.softplus(models["discriminator"](fakes)).mean()
    return loss_of_faces + loss_of_fakes


def generator_loss(models: dict[str, nn.Module], batch: Any) -> Tensor:
    (faces,) = batch
    fakes = models["generator"](torch.randn(len(faces), 2))
    return F.softplus(-models["discriminator"](fakes)).mean()


def copy_parameters(run: sf.Run) -> dict[str, list[Tensor]]:
    """The parameters of each model, as they are now."""
    return {
        name: [parameter.detach().clone() for parameter in model.parameters()]
        for name, model in run.state.models.items()
    }


def models_changed_since(before: dict[str, list[Tensor]], run: sf.Run) -> set[str]:
    changed = set()
    for name, tensors in copy_parameters(run).items():
        if any(not torch.equal(*pair) for pair in zip(tensors, before[name], strict=True)):
            changed.add(name)
    return changed


def test_the_steps_of_a_gan_train_each_model_with_its_own_optimizer(tmp_path: Path) -> None:
    adam = sf.optim.adam(lr=2e-4, betas=(0.5, 0.999))
    run = sf.Run(
        model={"generator": Generator, "discriminator": Discriminator},
        train_data=(torch.randn(64, 8),),
        batch_size=16,
        length="2 epochs",
        run_dir=tmp_path / "gan",
        optimizer={"generator": adam, "discriminator": adam},
        log_every="1 steps",
        device="cpu",
        console=False,
        report=False,
    )
    changed_models = []

    with run:
        for step in run.steps():
            before = copy_parameters(run)
            sf.forward_backward(step, discriminator_loss)
            sf.update(step, "discriminator")
            changed_models.append(models_changed_since(before, run))
            before = copy_parameters(run)
            value = sf.forward_backward(step, generator_loss)
            sf.update(step, "generator")
            changed_models.append(models_changed_since(before, run))
            step.log(generator_loss=value)

    assert changed_models == 8 * [{"discriminator"}, {"generator"}]
    losses = [record["generator_loss"] for record in sf.load(tmp_path / "gan").records("train")]
    assert min(losses) > 0


# --- distributed ----------------------------------------------------------------------------------


def train_on_a_rank(run_dir: str) -> tuple[int, int, str]:
    """A file that does not mention processes."""
    run = classifier(Path(run_dir), micro_batch_size=4)
    run.train()
    return run.rank, run.world_size, run.parts.plan.parallel.kind


def test_the_same_program_trains_on_several_ranks(tmp_path: Path, ranks: Ranks) -> None:
    classifier(tmp_path / "one", micro_batch_size=4).train()

    places = ranks(2, train_on_a_rank, run_dir=str(tmp_path / "two"))

    assert places == [(0, 2, "ddp"), (1, 2, "ddp")]
    one = sf.load(tmp_path / "one")
    two = sf.load(tmp_path / "two")
    assert two.metrics["val/loss"] == pytest.approx(one.metrics["val/loss"], rel=1e-5)
    assert two.step == one.step == 12


# --- afterwards -----------------------------------------------------------------------------------

PROGRAM = """
import surefoot as sf
from test_api_snippets import classifier, samples

def build():
    return classifier(
        "runs/a", best="min val/loss", ema=0.5, save_every="4 steps",
        splits={"val": sf.Split(samples(32, 2), metrics=sf.metrics.accuracy)},
    )
"""


def test_afterwards_a_run_is_read_evaluated_replayed_verified_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    main(["train", "train.py:build"])
    test_set = samples(32, 3)
    capsys.readouterr()

    run = sf.load("runs/a")
    print(run.step, run.metrics["val/accuracy"])
    curve = run.records("train")
    model = run.load_model(MyNet, checkpoint="best")
    metrics = sf.evaluate(model, sf.Split(test_set, metrics=sf.metrics.accuracy), loss=loss)
    findings = [str(finding) for finding in run.diagnose()]
    replay = run.replay(step=6)
    verdict = run.verify(windows=3)
    page = run.report()
    run.export("export/", checkpoint="best")

    assert capsys.readouterr().out.splitlines()[0] == f"12 {run.metrics['val/accuracy']}"
    assert [record["step"] for record in curve] == list(range(1, 13))
    assert metrics["accuracy"] > 0.8
    assert set(metrics) == {"accuracy", "loss"}
    assert not model.training
    assert all(findings)
    assert float(replay.look.loss) == pytest.approx(curve[6]["loss"])
    assert verdict.exit_status == 0
    assert page.read_text().startswith("<!")
    assert same_tensors(model.state_dict(), load_file(Path("export", "model.safetensors")))
    accuracies = [record["val/accuracy"] for record in run.records("eval") if record["step"] > 0]
    assert run.evaluate("val", checkpoint="best")["val/accuracy"] == max(accuracies)


# --- fine-tuning a transformers model -------------------------------------------------------------


@pytest.mark.slow
def test_a_transformers_model_is_fine_tuned_and_saved_as_such(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[PAD]": 0, "good": 1, "bad": 2, "film": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[PAD]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    config = transformers.BertConfig(
        vocab_size=4,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
    )
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 7, (48,), generator=generator).tolist()
    data = [
        {
            "input_ids": [1 + number % 2] + [3] * length,
            "attention_mask": [1] * (length + 1),
            "label": number % 2,
        }
        for number, length in enumerate(lengths)
    ]

    def fine_tuning_loss(model: Any, batch: Any) -> Any:
        output = model(**batch)
        return output.loss, (output.logits, batch["labels"])

    run = sf.Run(
        model=lambda: transformers.AutoModelForSequenceClassification.from_config(config),
        loss=fine_tuning_loss,
        train_data=data[:32],
        collate_fn=transformers.DataCollatorWithPadding(tokenizer),
        splits={"val": sf.Split(data[32:], metrics=sf.metrics.accuracy)},
        batch_size=16,
        micro_batch_size=4,
        length="20 epochs",
        optimizer=sf.optim.adamw(lr=1e-2, lr_multipliers=sf.optim.layer_decay(0.9)),
        schedule=sf.schedules.linear(warmup="6%"),
        clip="norm 1.0",
        precision="bf16",
        run_dir=tmp_path / "bert",
        device="cpu",
        console=False,
    )
    run.train()
    assert sf.load(tmp_path / "bert").metrics["val/accuracy"] == 1.0
    run.state.model.save_pretrained(tmp_path / "tuned")  # type: ignore[operator]
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    assert same_tensors(run.state.model.state_dict(), saved.state_dict())
