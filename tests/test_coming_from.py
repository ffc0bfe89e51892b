"""The pages on other libraries: both scripts of a page train alike, and its tables have the names
of the library. (4 s)
"""

from __future__ import annotations

import contextlib
import io
import os
import pkgutil
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot as sf
from run_files import same_tensors

START = Path(__file__).parents[1] / "docs" / "start"
PEERS = {"lightning": "lightning", "hf-trainer": "transformers", "accelerate": "accelerate"}
PAGES = {name: START / f"from-{name}.md" for name in ("plain-loop", *PEERS)}
# not the lines that a library prints by itself
LOSSES = re.compile(r"^(?:epoch|step) \d+.*: .*$", flags=re.MULTILINE)
NUMBER = re.compile(r"\d+\.\d+")
SAVE = '\ntorch.save((model if "model" in globals() else run.state.model).state_dict(), "weights.pt")\n'


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page].read_text(), flags=re.DOTALL)


def train(script: str, directory: Path, *, fresh: bool) -> tuple[list[str], dict[str, Any]]:
    """Run a script in a directory, in a fresh interpreter if a library would change this one;
    return its losses and weights.
    """
    directory.mkdir()
    if fresh:
        output = run_in_interpreter(script + SAVE, directory)
    else:
        with contextlib.chdir(directory), contextlib.redirect_stdout(io.StringIO()) as stream:
            exec(script + SAVE, {"__name__": "__main__"})
        output = stream.getvalue()
    weights = torch.load(directory / "weights.pt")
    named = {name.removeprefix("model."): weight for name, weight in weights.items()}
    return LOSSES.findall(output), named


def run_in_interpreter(script: str, directory: Path) -> str:
    """What a script prints in an interpreter of its own."""
    source = str(Path(sf.__file__).parents[1])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def skip_without(peer: str | None) -> None:
    if peer is not None and find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed: pip install '.[peers]'")


@pytest.mark.fast("plain-loop")
@pytest.mark.parametrize("page", PAGES)
def test_both_scripts_of_a_page_print_the_same_losses_and_end_with_the_same_bits(
    page: str, tmp_path: Path
) -> None:
    skip_without(PEERS.get(page))
    shared, before, after = blocks(page, "python")
    fresh = page in PEERS

    losses, weights = train(f"{shared}\n{before}", tmp_path / "before", fresh=fresh)
    ported_losses, ported_weights = train(f"{shared}\n{after}", tmp_path / "after", fresh=fresh)

    assert losses == ported_losses
    assert same_tensors(weights, ported_weights)
    compare_with_page(page, losses)


def compare_with_page(page: str, losses: list[str]) -> None:
    """Other processors round differently, so that a sample more or less may be classified
    correctly.
    """
    (text,) = blocks(page, "text")
    for expected, line in zip(text.splitlines(), losses, strict=True):
        assert NUMBER.sub("x", line) == NUMBER.sub("x", expected)
        numbers = [float(number) for number in NUMBER.findall(line)]
        expected_numbers = [float(number) for number in NUMBER.findall(expected)]
        assert numbers == pytest.approx(expected_numbers, rel=0, abs=0.02), expected


@pytest.mark.parametrize("page", ["lightning", "accelerate"])
def test_the_port_prints_the_losses_of_the_page_without_the_other_library(
    page: str, tmp_path: Path
) -> None:
    shared, _, after = blocks(page, "python")
    losses, _ = train(f"{shared}\n{after}", tmp_path / "after", fresh=False)
    compare_with_page(page, losses)


# --- the tables -----------------------------------------------------------------------------------


def rows(page: str) -> list[tuple[str, str]]:
    """Both cells of each row, without the heads of the tables."""
    text = PAGES[page].read_text()
    rows_and_heads = re.findall(r"(?m)^\| (.*) \| (.*) \|$", text)
    heads = re.findall(r"(?m)^\| (.*) \| (.*) \|\n\|---\|---\|$", text)
    other_lines = re.findall(r"(?m)^\|[^-]", text)
    assert len(rows_and_heads) == len(other_lines)
    return [row for row in rows_and_heads if row not in heads]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# keywords of an optimizer or a split, beside those of a run
OF_PARTS = {"lr_multipliers", "betas", "eps", "metrics"}
OWNERS = {r"\brun": sf.Run, r"\bstep": sf.Step, r"sf\.load\(run_dir\)": sf.SavedRun}


def snippets(page: str) -> list[str]:
    """The code in the cells of surefoot."""
    return [text for _, cell in rows(page) for text in code(cell)]


@pytest.mark.parametrize("page", PAGES)
def test_each_row_says_what_surefoot_has_instead(page: str) -> None:
    assert [row for row, cell in rows(page) if not cell.strip()] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_name_only_what_surefoot_has(page: str) -> None:
    for text in snippets(page):
        for name in re.findall(r"\bsf((?:\.\w+)+)", text):
            pkgutil.resolve_name(f"surefoot:{name[1:]}")
        for owner, kind in OWNERS.items():
            for name in re.findall(rf"(?<![/\w]){owner}\.(\w+)", text):
                assert hasattr(kind, name), text


def without_parentheses(text: str) -> str:
    """A text without all that stands in parentheses, the innermost first."""
    while True:
        shorter = re.sub(r"\([^()]*\)", "", text)
        if shorter == text:
            return text
        text = shorter


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_name_only_keywords_of_a_run_its_optimizer_and_its_splits(page: str) -> None:
    keywords = set(sf.Run.__dataclass_fields__) | OF_PARTS
    for text in snippets(page):
        names = re.findall(r"(?:^|, )(\w+)=", without_parentheses(text))
        assert {*names} <= keywords, text


# names of a library, and those that few people use: they need no row
NAMES = {
    "lightning": """
import inspect, lightning, lightning.pytorch.callbacks as callbacks, lightning.pytorch.loggers as loggers, torch
modules = set(dir(lightning.LightningModule)) - set(dir(torch.nn.Module)) | {"forward", "state_dict"}
names = modules | set(dir(lightning.pytorch.Callback)) | set(dir(lightning.LightningDataModule)) | set(dir(lightning.Trainer))
names |= set(callbacks.__all__) | set(loggers.__all__) | set(vars(lightning)) & {"LightningDataModule", "Fabric", "seed_everything"}
for part in (lightning.Trainer, callbacks.ModelCheckpoint, callbacks.EarlyStopping, lightning.LightningModule.log):
    names |= set(inspect.signature(part).parameters)
""",
    "hf-trainer": """
import dataclasses, inspect, transformers, transformers.integrations, transformers.trainer_callback
callbacks = [*dir(transformers.integrations), *dir(transformers.trainer_callback)]
names = {name for name in callbacks if name.endswith("Callback")} | set(inspect.signature(transformers.Trainer).parameters)
names |= {field.name for kind in (transformers.TrainingArguments, transformers.TrainerControl) for field in dataclasses.fields(kind)}
names |= set(dir(transformers.Trainer)) | set(dir(transformers.TrainerCallback))
names |= set(inspect.signature(transformers.EarlyStoppingCallback).parameters)
""",
    "accelerate": """
import inspect, accelerate, accelerate.local_sgd, accelerate.utils
names = set(inspect.signature(accelerate.Accelerator).parameters) | set(dir(accelerate.Accelerator)) | {"set_seed", "LocalSGD"}
names |= {name for name, value in vars(accelerate).items() if inspect.isfunction(value)}
""",
}
RARE = {
    "lightning": """
CHECKPOINT_HYPER_PARAMS_KEY CHECKPOINT_HYPER_PARAMS_NAME CHECKPOINT_HYPER_PARAMS_TYPE configure_sharded_model device_mesh fabric
hparams_initial on_gpu on_predict_model_eval on_validation_model_zero_grad remove_ignored_hparams to_tensorrt trainer state_key
from_datasets name checkpoint_callback checkpoint_callbacks ckpt_path device_ids distributed_sampler_kwargs early_stopping_callback
early_stopping_callbacks enable_validation evaluating init_module interrupted is_last_batch lr_scheduler_configs node_rank
num_devices num_predict_batches num_sanity_val_batches num_test_batches num_val_batches precision_plugin predict_dataloaders
predicting progress_bar_callback progress_bar_metrics received_sigterm sanity_checking scaler test_dataloaders testing training
val_dataloaders validating enable_autolog_hparams model_registry Checkpoint Logger verbose auto_insert_metric_name
log_rank_zero_only value enable_graph sync_dist_group add_dataloader_idx metric_attribute rank_zero_only self
""",
    "hf-trainer": """
log_on_each_node log_level_replica trackio_space_id trackio_bucket_id trackio_static_space_id save_on_each_node
enable_jit_checkpoint hub_always_push hub_revision dataloader_multiprocessing_context dataloader_in_order activation_checkpointing
activation_checkpointing_kwargs args TrainerCallback AzureMLCallback CodeCarbonCallback DagsHubCallback FlyteCallback KubeflowCallback
autocast_smart_context_manager call_model_init compute_loss_context_manager create_accelerator_and_postprocess end
floating_point_ops get_batch_samples get_cp_size get_num_trainable_parameters get_optimizer_cls_and_kwargs get_optimizer_group
get_sp_size get_total_train_batch_size get_tp_size init_hf_repo is_local_process_zero loss_is_scaled_for_ga metrics_format
num_examples set_initial_training_values store_flos
""",
    "accelerate": """
context_parallel_rank data_parallel_rank data_parallel_shard_rank deepspeed_ulysses_dl_adapter dispatch_batches fp8_backend
is_composable_parallelism_enabled is_fsdp2 lomo_backward non_blocking on_local_process pipeline_parallel_rank should_save_model
tensor_parallel_rank torch_device_mesh use_seedable_sampler use_stateful_dataloader cpu_offload_with_hook init_on_device
is_rich_available load_checkpoint_in_model prepare_pippy synchronize_rng_states
""",
}
OTHER = {
    "should_stop",
    "control",
    "state",
    "optimizer",
    "lr_scheduler",
    "LightningCLI",
    "accelerate",
    "register_for_checkpointing",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PEERS)
def test_the_tables_have_the_names_of_the_library_and_no_others(page: str) -> None:
    skip_without(PEERS[page])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{NAMES[page]}\nprint(*names)"],
        capture_output=True,
        text=True,
        check=True,
    )
    last_line = process.stdout.splitlines()[-1]
    names = {name for name in last_line.split() if not name.startswith("_")}
    listed = set()
    first_words = set()
    for cell, _ in rows(page):
        for text in code(cell):
            listed.update(re.findall(r"[A-Za-z_]\w*", text))
            first_words.update(re.findall(r"^[A-Za-z_]\w*", text))

    missing = names - listed - {*RARE[page].split()}
    assert sorted(missing) == [], "add a row to the table, or a word to RARE"
    assert sorted(first_words - names - OTHER) == []
