"""GPT-2's weights from and to the files of transformers: equal logits both ways, what does not fit
is refused; 6 seconds.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import surefoot as sf
from refused import refused
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


def theirs(tmp_path: Path) -> Any:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: nothing to compare with"
    )
    torch.manual_seed(1)
    settings = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 50}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "theirs")
    return model


@pytest.mark.slow
def test_a_model_that_transformers_saved_gives_its_logits(tmp_path: Path) -> None:
    there = theirs(tmp_path)
    for place in (tmp_path / "theirs", tmp_path / "theirs" / "model.safetensors"):
        assert_close(
            sf.checkpoint.load_gpt2(place).eval()(TOKENS),
            there(TOKENS).logits,
            rtol=1e-4,
            atol=1e-4,
        )


def test_a_model_of_ours_gives_its_logits_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: nothing to compare with"
    )
    sf.checkpoint.save_gpt2(gpt(), tmp_path / "ours", eos_id=None)
    there = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    assert_close(there(TOKENS).logits, gpt()(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("eos_id", [None, 0, 7])
def test_the_end_of_a_text_is_that_of_the_tokenizer(eos_id: int | None, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: nothing to compare with"
    )
    sf.checkpoint.save_gpt2(gpt(), tmp_path, eos_id=eos_id)
    there = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (there.bos_token_id, there.eos_token_id) == (eos_id, eos_id)


def test_an_end_that_is_no_token_is_refused(tmp_path: Path) -> None:
    with refused("eos-id-outside-vocabulary", sf.CheckpointError, value=50, vocab_size=50):
        sf.checkpoint.save_gpt2(gpt(), tmp_path, eos_id=50)


def test_a_run_starts_from_what_transformers_saved(tmp_path: Path) -> None:
    there = theirs(tmp_path)
    model = gpt(seed=5)
    said = load_initial_weights({"model": model}, tmp_path / "theirs", world=ALONE)
    assert "GPT-2" in said.splitlines()[0]
    assert "skipped" not in said
    assert "new " not in said
    assert_close(model(TOKENS), there(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_there_and_back_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    state = gpt().state_dict()
    again = from_gpt2_layout(to_gpt2_layout(state))
    assert {*again} == {*state}
    assert all(torch.equal(again[name], held) for name, held in state.items())
    sf.checkpoint.save_gpt2(gpt(), tmp_path, eos_id=None)
    assert all(
        torch.equal(sf.checkpoint.load_gpt2(tmp_path).state_dict()[name], held)
        for name, held in state.items()
    )


def old_style(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the weights on the hub are: without a prefix, with each block's mask, and the head as
    well.
    """
    plain = {name.removeprefix("transformer."): held for name, held in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(16, 16).tril()[None, None] for layer in range(2)}
    return (
        plain
        | masks
        | {
            "h.0.attn.masked_bias": torch.tensor(-1e4),
            "lm_head.weight": plain["wte.weight"].clone(),
        }
    )


def test_names_without_a_prefix_masks_and_a_saved_head_are_understood(tmp_path: Path) -> None:
    save_file(old_style(to_gpt2_layout(gpt().state_dict())), tmp_path / "a.safetensors")
    model = sf.checkpoint.load_gpt2(tmp_path / "a.safetensors", heads=2).eval()
    assert torch.equal(model(TOKENS), gpt()(TOKENS))


def test_without_a_config_there_is_a_head_for_64_channels(tmp_path: Path) -> None:
    save_file(
        to_gpt2_layout(gpt(replace(SHAPE, width=128)).state_dict()), tmp_path / "a.safetensors"
    )
    assert sf.checkpoint.load_gpt2(tmp_path / "a.safetensors").shape.heads == 2


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
    before = {name: held.clone() for name, held in model.state_dict().items()}
    with refused(code, sf.CheckpointError) as caught:
        load_initial_weights({"model": model}, tmp_path / "model.safetensors", world=ALONE)
    (typed,) = caught.value.remedies
    settings = [typed] if isinstance(typed, Setting) else typed
    assert remedy == {
        part.name: part.value
        for part in settings
        if isinstance(part, Setting) and part.value is not ABSENT
    }
    assert all(torch.equal(before[name], held) for name, held in model.state_dict().items())


def bare(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, tmp_path / "bare.safetensors")
    return tmp_path / "bare.safetensors"


def test_a_file_without_config_has_the_heads_of_its_width_and_not_of_the_model(
    tmp_path: Path,
) -> None:
    wide = replace(SHAPE, width=128)
    file = bare(tmp_path, to_gpt2_layout(gpt(wide).state_dict()))
    with refused("gpt2-size-differs", sf.CheckpointError, names=["heads"]):
        load_initial_weights({"model": gpt(replace(wide, heads=4), seed=5)}, file, world=ALONE)
    model = gpt(wide, seed=5)
    load_initial_weights({"model": model}, file, world=ALONE)
    assert torch.equal(model(TOKENS), gpt(wide)(TOKENS))


def test_a_file_of_a_width_that_has_no_such_heads_is_refused(tmp_path: Path) -> None:
    file = bare(tmp_path, to_gpt2_layout(gpt(replace(SHAPE, width=130)).state_dict()))
    (tmp_path / "config.json").write_text('{"n_head": 4}')
    with refused("not-a-gpt2-model", sf.CheckpointError, path=file):
        load_initial_weights({"model": gpt()}, file, world=ALONE)


def test_weights_of_which_a_part_is_missing_or_foreign_are_refused_whole(tmp_path: Path) -> None:
    whole = to_gpt2_layout(gpt().state_dict())
    (tmp_path / "config.json").write_text('{"n_head": 2}')
    for wrong in (
        {name: held for name, held in whole.items() if "h.0.mlp.c_fc.weight" not in name},
        whole | {"transformer.ln_f.weight": torch.ones(31)},
        whole | {"lm_head.weight": torch.ones(50, 32)},
    ):
        model = gpt(seed=5)
        with refused("gpt2-tensors-differ", sf.CheckpointError):
            load_initial_weights({"model": model}, bare(tmp_path, wrong), world=ALONE)
        assert torch.equal(model(TOKENS), gpt(seed=5)(TOKENS))


def test_a_head_of_its_own_goes_into_a_model_that_has_one(tmp_path: Path) -> None:
    head = torch.ones(50, 32)
    model = gpt(replace(SHAPE, tie_embeddings=False))
    (tmp_path / "config.json").write_text('{"n_head": 2}')
    load_initial_weights(
        {"model": model},
        bare(tmp_path, to_gpt2_layout(gpt().state_dict()) | {"lm_head.weight": head}),
        world=ALONE,
    )
    assert torch.equal(model.state_dict()["head.weight"], head)


def test_what_is_no_gpt2_is_refused(tmp_path: Path) -> None:
    sf.checkpoint.save_gpt2(gpt(), tmp_path / "good", eos_id=None)
    tensors = load_file(tmp_path / "good" / "model.safetensors")
    for name, wrong in {
        "other": {"weight": torch.ones(3)},
        "foreign": tensors | {"transformer.h.0.extra.weight": torch.ones(3)},
        "head": tensors | {"lm_head.weight": torch.ones(50, 32)},
        "lacking": {name: held for name, held in tensors.items() if "ln_f" not in name},
    }.items():
        path = tmp_path / f"{name}.safetensors"
        save_file(wrong, path)
        with refused("not-a-gpt2-model", sf.CheckpointError, path=path):
            sf.checkpoint.load_gpt2(path, heads=2)
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"nothing")
    with refused("weights-unreadable", sf.CheckpointError, path=path):
        sf.checkpoint.load_gpt2(tmp_path / "broken.safetensors")


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
    with refused("not-saved-as-gpt2", sf.CheckpointError):
        sf.checkpoint.save_gpt2(GPT(replace(SHAPE, **here)), tmp_path / "a", eos_id=None)
    assert not (tmp_path / "a").exists()


def test_the_page_about_evaluation_shows_how_published_weights_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "evaluating-gpt.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    tokenizer = sf.tokenizers.BPETokenizer.train(["the cat sat on the mat"], vocab_size=260)
    sf.checkpoint.save_gpt2(
        gpt(replace(SHAPE, vocab_size=tokenizer.vocab_size)), "gpt2", eos_id=tokenizer.eos_id
    )
    Path("gpt2/tokenizer.json").write_text(tokenizer.to_json())
    Path("hellaswag_val.jsonl").write_text(
        '{"ctx": "the", "endings": ["cat", "cat"], "label": 0}\n'
    )
    exec(code, {})
    assert "'acc_norm': 1.0" in capsys.readouterr().out
