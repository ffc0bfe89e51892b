"""The directory of a model is data: its config.json by a list of keys, its sizes by the headers of
its weights, its place by path or by name.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot as sf
from in_one import in_one
from refused import refused
from surefoot.errors import Command
from surefoot.recipes import finetune
from surefoot.recipes.finetune.model_directory import model_directory, read_settings
from surefoot.recipes.finetune.models import SETTINGS, base_model, model_config, quiet
from tuned_runs import FAMILIES, build_as_command, config, write_chat, write_model

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def changed(model: Path, tmp_path: Path) -> Any:
    """Return a function that gives the model's directory with other keys in its config.json."""

    def with_keys(**keys: Any) -> Path:
        place = tmp_path / "changed"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(model, place)
        settings = json.loads((model / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(settings | keys))
        return place

    return with_keys


CODE = "someone/compiled-code"


@in_one
@pytest.mark.parametrize(
    "keys",
    [
        {"_attn_implementation": CODE},
        {"attn_implementation": CODE},
        {"_attn_implementation_internal": CODE},
        {"_experts_implementation": CODE, "experts_implementation": CODE},
        {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}},
        {"no_such_key": 3},
        {"return_dict": False, "output_hidden_states": True},
    ],
)
def test_keys_that_the_class_does_not_declare_reach_no_model(
    keys: dict[str, Any], changed: Any, model: Path
) -> None:
    directory = changed(**keys)
    settings = read_settings(directory / "config.json")
    assert not set(keys) & set(settings.values)
    own = model_config(directory / "config.json")
    assert own.to_dict() == model_config(model / "config.json").to_dict()
    assert CODE not in json.dumps([repr(value) for value in vars(own).values()])


def test_the_header_names_keys_that_are_not_used(changed: Any, tmp_path: Path) -> None:
    chat = write_chat(tmp_path / "chat.jsonl")
    directory = changed(_attn_implementation=CODE, no_such_key=3, auto_map={})
    summary = finetune.build(config(None, directory, chat)).data_summary
    line = "not used of the model's config.json: _attn_implementation, no_such_key"
    assert line in summary
    healthy = finetune.build(config(None, changed(), chat)).data_summary
    assert not any("config.json" in line for line in healthy)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_keys_of_a_healthy_model_are_used(family: str, tmp_path: Path) -> None:
    """Each family's class declares what it writes, and reads it as transformers does."""
    from transformers import AutoConfig

    directory = write_model(tmp_path / family, family)
    theirs = AutoConfig.from_pretrained(directory).to_dict()
    ours = model_config(directory / "config.json").to_dict()
    of_writer = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
    for key in theirs.keys() - of_writer:
        assert ours.get(key) == theirs[key], key


def test_the_default_configuration_of_each_family_is_used(tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    refuses_its_default = {"gemma4_assistant"}
    sets_it_whatever_is_given = {"bailing_hybrid": ["linear_head_dim"]}
    unused = {}
    for kind in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - refuses_its_default):
        CONFIG_MAPPING[kind]().save_pretrained(tmp_path / kind)
        file = tmp_path / kind / "config.json"
        keys = read_settings(file).unused(model_config(file))
        if keys:
            unused[kind] = keys
    assert unused == sets_it_whatever_is_given


def test_numbers_that_json_has_no_word_for_are_read(tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    config: Any = CONFIG_MAPPING["mamba2"](time_step_limit=(float("-inf"), float("inf")))
    config.save_pretrained(tmp_path)
    read = model_config(tmp_path / "config.json")
    assert list(read.time_step_limit) == [float("-inf"), float("inf")]


def test_a_model_of_many_experts_is_read_again_in_its_run(tmp_path: Path) -> None:
    file = tmp_path / SETTINGS  # without weights beside it
    sizes = {"model_type": "doge", "num_hidden_layers": 32}
    file.write_text(json.dumps({**sizes, "num_experts": 16_384}))
    assert model_config(file).num_experts == 16_384
    file.write_text(json.dumps({**sizes, "num_experts": 40_000}))
    with refused("model-with-too-many-layers", value=40_000):
        model_config(file)


@pytest.mark.parametrize("kind", ["mpt", "dbrx"])
def test_parts_without_a_type_are_of_the_class_that_declares_them(
    kind: str, tmp_path: Path
) -> None:
    from transformers import CONFIG_MAPPING

    config: Any = CONFIG_MAPPING[kind](attn_config={"clip_qkv": 3.0})
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    own = model_config(tmp_path / "config.json")
    assert own.attn_config.clip_qkv == 3.0
    assert own.to_dict() == config.to_dict()


def test_older_keys_of_positions_are_used(changed: Any) -> None:
    own = model_config(changed(rope_parameters=None, rope_theta=5.0) / "config.json")
    frequencies = base_model(own, None).model.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, 5.0 ** (-torch.arange(0, 8, 2) / 8))


@in_one
@pytest.mark.parametrize(
    "keys",
    [
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"quantization_config": {"bits": 4}},
        {"quantization_config": "fp8"},
        {"compression_config": {"format": "pack"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_a_quantized_model_is_refused(keys: dict[str, Any], changed: Any) -> None:
    with refused("model-is-quantized"):
        model_config(changed(**keys) / "config.json")


def test_no_quantization_is_none(changed: Any) -> None:
    assert model_config(changed(quantization_config=None) / "config.json").hidden_size == 32


@in_one
@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"num_hidden_layers": 10**9}, "model-with-too-many-layers"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "model-with-too-many-layers"),
        ({"num_local_experts": 10**9}, "model-with-too-many-layers"),
        ({"num_hidden_layers": 3}, "model-larger-than-weights"),
        ({"vocab_size": 10**12}, "model-sizes-differ"),
        ({"hidden_size": 1 << 40}, "model-sizes-differ"),
        ({"intermediate_size": 10**12}, "model-sizes-differ"),
        ({"intermediate_size": 10**30}, "model-not-built"),
        ({"num_attention_heads": 0}, "model-unknown"),
    ],
)
def test_sizes_beyond_the_weights_are_refused_before_anything_is_built(
    keys: dict[str, Any], code: str, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    directory = changed(**keys)
    with pytest.raises(sf.ConfigError) as caught:
        base_model(model_config(directory / "config.json"), directory)
    assert caught.value.code in (code, "model-not-built", "model-unknown"), str(caught.value)


def test_a_run_whose_model_is_larger_than_its_checkpoint_is_refused(
    model: Path, tmp_path: Path
) -> None:
    chat = write_chat(tmp_path / "chat.jsonl")
    build_as_command(config(tmp_path / "run", model, chat, length="1 steps")).train()
    file = tmp_path / "run" / "model_config.json"
    settings = json.loads(file.read_text())

    file.write_text(json.dumps(settings | {"vocab_size": 10**12}))
    with refused("model-larger-than-weights"):
        sf.load(tmp_path / "run").export()

    file.write_text(json.dumps(settings | {"num_hidden_layers": 10**9}))
    with refused("model-with-too-many-layers", value=10**9):
        sf.load(tmp_path / "run").export()


@in_one
@pytest.mark.parametrize(
    "data",
    [
        b"not one",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_weights_without_a_header_are_refused(data: bytes, changed: Any) -> None:
    directory = changed()
    (directory / "model.safetensors").write_bytes(data)
    with refused("model-weights-unreadable"):
        model_config(directory / "config.json")


def test_an_index_that_names_other_directories_is_refused(changed: Any) -> None:
    directory = changed()
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "../model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused("model-weights-unreadable"):
        model_config(directory / "config.json")


# --- by name --------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub, as `hf download` lays it out."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put(cache: Path, name: str, model: Path, *, only: str = "*") -> Path:
    place = cache / f"models--{name.replace('/', '--')}"
    commit = "0" * 39 + "1"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (place / "blobs").mkdir()
    for file in model.glob(only):
        blob = place / "blobs" / file.name
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def test_a_model_of_the_hubs_cache_is_found_by_its_name(
    cache: Path, model: Path, tmp_path: Path
) -> None:
    snapshot = put(cache, "someone/small", model)
    assert model_directory("someone/small") == snapshot
    put(cache, "gpt2", model)
    assert model_directory("gpt2").parent.parent.name == "models--gpt2"
    chat = write_chat(tmp_path / "chat.jsonl")
    run = finetune.build(config(None, Path("someone/small"), chat))
    assert run.state.model.peft_config["default"].base_model_name_or_path == "someone/small"


def test_a_directory_comes_before_a_name(cache: Path, model: Path, tmp_path: Path) -> None:
    put(cache, "someone/small", model)
    shutil.copytree(model, tmp_path / "someone" / "small")
    assert model_directory("someone/small") == Path("someone/small")


def test_a_name_that_the_cache_lacks_is_refused_with_the_command_that_downloads_it(
    cache: Path, model: Path
) -> None:
    with refused("model-not-in-cache", setting="model", value="someone/small") as caught:
        model_directory("someone/small")
    command = (Command("hf download someone/small"),)
    assert caught.value.remedies == command
    put(cache, "someone/small", model, only="*.json")  # the weights are not there
    with refused("model-without-weights") as caught:
        model_directory("someone/small")
    assert caught.value.remedies == command


def test_a_directory_without_any_weights_is_told_from_one_with_weights_that_may_run_code(
    changed: Any,
) -> None:
    directory = changed()
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    with refused("model-without-weights"):
        model_directory(str(directory))
    (directory / "pytorch_model.bin").touch()
    with refused("model-weights-may-run-code") as with_others:
        model_directory(str(directory))
    assert "pytorch_model.bin" in str(with_others.value.problem)


@pytest.mark.parametrize("path", ["./absent", "/absent/model", "a/b/c", "../absent", "absent/"])
def test_a_path_is_no_name(path: str) -> None:
    with refused("model-not-found", value=path):
        model_directory(path)


# --- what other libraries write -------------------------------------------------------------------


class Lines(logging.Handler):
    """What a logger hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("name", ["torchao", "torchao.float8", "bitsandbytes.cextension"])
def test_notes_of_libraries_that_are_not_used_are_kept_off(name: str) -> None:
    logger = logging.getLogger(name)
    handler = Lines()
    logger.addHandler(handler)
    try:
        with quiet():
            logger.error("Failed to load something")
        assert handler.lines == []
        logger.error("of the user's own")
        assert handler.lines == ["of the user's own"]
    finally:
        logger.removeHandler(handler)
