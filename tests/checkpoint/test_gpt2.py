"""GPT-2's weights from and to the files of transformers: equal logits both ways, what does not fit
is refused; 6 seconds.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close

import surefoot as sf
from refused import refused
from same_bits import assert_same_bits
from surefoot.checkpoint.gpt2 import from_gpt2_layout, to_gpt2_layout
from surefoot.checkpoint.init_weights import load_initial_weights
from surefoot.distributed.world import World
from surefoot.errors import ABSENT, Setting
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig

ALONE = World(torch.device("cpu"))
SHAPE = GPTConfig(
    layers=2, heads=2, width=32, context=16, vocab_size=50, family="gpt2", tie_embeddings=True
)
TOKENS = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(9))


def gpt(shape: GPTConfig = SHAPE, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.3)
    return model.eval()


def layout_of(shape: GPTConfig = SHAPE) -> dict[str, Tensor]:
    """The tensors of our model as transformers names them."""
    return to_gpt2_layout(gpt(shape).state_dict())


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip(
        "transformers", reason="transformers is not installed: nothing to compare with"
    )


@pytest.fixture
def saved_by_transformers(transformers: Any, tmp_path: Path) -> tuple[Any, Path]:
    """A model of transformers, and the directory in which it has saved it."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        n_positions=16,
        vocab_size=50,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "theirs")
    return model, tmp_path / "theirs"


@pytest.mark.slow
@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_a_model_that_transformers_saved_gives_its_logits(
    file: str, saved_by_transformers: tuple[Any, Path]
) -> None:
    theirs, directory = saved_by_transformers

    ours = sf.checkpoint.load_gpt2(directory / file).eval()

    assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_a_model_of_ours_gives_its_logits_in_transformers(
    transformers: Any, tmp_path: Path
) -> None:
    sf.checkpoint.save_gpt2(gpt(), tmp_path, eos_id=None)

    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()

    assert_close(theirs(TOKENS).logits, gpt()(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("eos_id", [None, 0, 7])
def test_the_end_of_a_text_is_that_of_the_tokenizer(
    eos_id: int | None, transformers: Any, tmp_path: Path
) -> None:
    sf.checkpoint.save_gpt2(gpt(), tmp_path, eos_id=eos_id)

    config = transformers.AutoConfig.from_pretrained(tmp_path)

    assert config.bos_token_id == eos_id
    assert config.eos_token_id == eos_id


def test_an_end_that_is_no_token_is_refused(tmp_path: Path) -> None:
    with refused("eos-id-outside-vocabulary", sf.CheckpointError, value=50, vocab_size=50):
        sf.checkpoint.save_gpt2(gpt(), tmp_path, eos_id=50)


def test_a_run_starts_from_what_transformers_saved(
    saved_by_transformers: tuple[Any, Path],
) -> None:
    theirs, directory = saved_by_transformers
    model = gpt(seed=5)

    report = load_initial_weights({"model": model}, directory, world=ALONE)

    assert "GPT-2" in report.splitlines()[0]
    assert "skipped" not in report
    assert "new " not in report
    assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_the_layout_there_and_back_is_the_same_bit_for_bit() -> None:
    state = gpt().state_dict()

    assert_same_bits(from_gpt2_layout(to_gpt2_layout(state)), state)


def test_a_model_that_is_saved_and_loaded_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    sf.checkpoint.save_gpt2(gpt(), tmp_path, eos_id=None)

    assert_same_bits(sf.checkpoint.load_gpt2(tmp_path).state_dict(), gpt().state_dict())


def write_tensors(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    """A file without a config."""
    file = tmp_path / "tensors.safetensors"
    save_file(tensors, file)
    return file


def test_names_without_a_prefix_masks_and_a_saved_head_are_understood(tmp_path: Path) -> None:
    """As the weights on the hub are."""
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in layout_of().items()}
    for layer in (0, 1):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(16, 16).tril()[None, None]
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    file = write_tensors(tmp_path, tensors)

    model = sf.checkpoint.load_gpt2(file, heads=2).eval()

    assert torch.equal(model(TOKENS), gpt()(TOKENS))


def test_without_a_config_there_is_a_head_for_64_channels(tmp_path: Path) -> None:
    file = write_tensors(tmp_path, layout_of(replace(SHAPE, width=128)))

    assert sf.checkpoint.load_gpt2(file).shape.heads == 2


@pytest.mark.parametrize(
    ("here", "code", "remedy"),
    [
        ({"vocab_size": 64}, "gpt2-size-differs", {}),
        ({"vocab_size": 40}, "gpt2-size-differs", {}),
        ({"context": 8}, "gpt2-size-differs", {"model.context": 16}),
        (
            {"layers": 1, "width": 64},
            "gpt2-size-differs",
            {"model.layers": 2, "model.width": 32},
        ),
        ({"heads": 4}, "gpt2-size-differs", {"model.heads": 2}),
        ({"family": "modern"}, "gpt2-family-differs", {"model.family": "gpt2"}),
    ],
)
def test_weights_that_do_not_fit_whole_are_refused_naming_the_sizes(
    here: dict[str, Any], code: str, remedy: dict[str, Any], tmp_path: Path
) -> None:
    sf.checkpoint.save_gpt2(gpt(), tmp_path, eos_id=None)
    model = GPT(replace(SHAPE, **here))
    before = deepcopy(model.state_dict())

    with refused(code, sf.CheckpointError) as caught:
        load_initial_weights({"model": model}, tmp_path / "model.safetensors", world=ALONE)

    assert_same_bits(model.state_dict(), before)
    (typed,) = caught.value.remedies
    parts = [typed] if isinstance(typed, Setting) else typed
    settings = {}
    for part in parts:
        if isinstance(part, Setting) and part.value is not ABSENT:
            settings[part.name] = part.value
    assert settings == remedy


def test_a_file_without_config_has_the_heads_of_its_width(tmp_path: Path) -> None:
    wide = replace(SHAPE, width=128)
    file = write_tensors(tmp_path, layout_of(wide))
    model = gpt(wide, seed=5)

    load_initial_weights({"model": model}, file, world=ALONE)

    assert torch.equal(model(TOKENS), gpt(wide)(TOKENS))


def test_a_file_without_config_has_not_the_heads_of_the_model(tmp_path: Path) -> None:
    wide = replace(SHAPE, width=128)
    file = write_tensors(tmp_path, layout_of(wide))
    model = gpt(replace(wide, heads=4), seed=5)

    with refused("gpt2-size-differs", sf.CheckpointError, names=["heads"]):
        load_initial_weights({"model": model}, file, world=ALONE)


def test_a_file_of_a_width_that_has_no_such_heads_is_refused(tmp_path: Path) -> None:
    file = write_tensors(tmp_path, layout_of(replace(SHAPE, width=130)))
    (tmp_path / "config.json").write_text('{"n_head": 4}')

    with refused("not-a-gpt2-model", sf.CheckpointError, path=file):
        load_initial_weights({"model": gpt()}, file, world=ALONE)


LACKING = "transformer.h.0.mlp.c_fc.weight"


@pytest.mark.parametrize(
    "changes",
    [
        {LACKING: None},
        {"transformer.ln_f.weight": torch.ones(31)},
        {"lm_head.weight": torch.ones(50, 32)},
    ],
    ids=["lacking", "shape", "head"],
)
def test_weights_of_which_a_part_is_missing_or_foreign_are_refused_whole(
    changes: dict[str, Tensor | None], tmp_path: Path
) -> None:
    tensors = layout_with(changes)
    (tmp_path / "config.json").write_text('{"n_head": 2}')
    model = gpt(seed=5)

    with refused("gpt2-tensors-differ", sf.CheckpointError):
        load_initial_weights({"model": model}, write_tensors(tmp_path, tensors), world=ALONE)

    assert torch.equal(model(TOKENS), gpt(seed=5)(TOKENS))


def layout_with(changes: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The tensors of our model with other ones; None: without it."""
    tensors = layout_of()
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    return tensors


def test_a_head_of_its_own_goes_into_a_model_that_has_one(tmp_path: Path) -> None:
    head = torch.ones(50, 32)
    model = gpt(replace(SHAPE, tie_embeddings=False))
    (tmp_path / "config.json").write_text('{"n_head": 2}')
    file = write_tensors(tmp_path, layout_with({"lm_head.weight": head}))

    load_initial_weights({"model": model}, file, world=ALONE)

    assert torch.equal(model.state_dict()["head.weight"], head)


@pytest.mark.parametrize(
    "changes",
    [
        {"transformer.h.0.extra.weight": torch.ones(3)},
        {"lm_head.weight": torch.ones(50, 32)},
        {"transformer.ln_f.weight": None, "transformer.ln_f.bias": None},
    ],
    ids=["foreign", "head", "lacking"],
)
def test_a_file_of_other_tensors_is_refused(
    changes: dict[str, Tensor | None], tmp_path: Path
) -> None:
    file = write_tensors(tmp_path, layout_with(changes))

    with refused("not-a-gpt2-model", sf.CheckpointError, path=file):
        sf.checkpoint.load_gpt2(file, heads=2)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    file = write_tensors(tmp_path, {"weight": torch.ones(3)})

    with refused("not-a-gpt2-model", sf.CheckpointError, path=file):
        sf.checkpoint.load_gpt2(file, heads=2)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "broken.safetensors"
    file.write_bytes(b"nothing")

    with refused("weights-unreadable", sf.CheckpointError, path=file):
        sf.checkpoint.load_gpt2(file)


@pytest.mark.parametrize(
    ("settings", "code", "value"),
    [
        ({"activation_function": "relu"}, "gpt2-setting-unsupported", "relu"),
        ({"layer_norm_epsilon": 1e-6}, "gpt2-setting-unsupported", 1e-6),
        ({"n_head": 4}, "gpt2-heads-differ", 2),
    ],
)
def test_a_config_of_another_network_is_refused(
    settings: dict[str, Any], code: str, value: Any, tmp_path: Path
) -> None:
    sf.checkpoint.save_gpt2(gpt(), tmp_path, eos_id=None)
    (tmp_path / "config.json").write_text(json.dumps(settings))

    with refused(code, sf.CheckpointError, value=value):
        sf.checkpoint.load_gpt2(tmp_path, heads=2)


@pytest.mark.parametrize("here", [{"family": "modern"}, {"tie_embeddings": False}])
def test_a_model_that_transformers_has_no_room_for_is_not_written(
    here: dict[str, Any], tmp_path: Path
) -> None:
    model = GPT(replace(SHAPE, **here))

    with refused("not-saved-as-gpt2", sf.CheckpointError):
        sf.checkpoint.save_gpt2(model, tmp_path / "a", eos_id=None)

    assert not (tmp_path / "a").exists()


def test_the_page_about_evaluation_shows_how_published_weights_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "evaluating-gpt.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    tokenizer = sf.tokenizers.BPETokenizer.train(["the cat sat on the mat"], vocab_size=260)
    model = gpt(replace(SHAPE, vocab_size=tokenizer.vocab_size))
    sf.checkpoint.save_gpt2(model, "gpt2", eos_id=tokenizer.eos_id)
    Path("gpt2/tokenizer.json").write_text(tokenizer.to_json())
    Path("hellaswag_val.jsonl").write_text(
        '{"ctx": "the", "endings": ["cat", "cat"], "label": 0}\n'
    )

    exec(code, {})

    assert "'acc_norm': 1.0" in capsys.readouterr().out
