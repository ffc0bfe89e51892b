"""Score a run by EleutherAI's lm-evaluation-harness (pip install lm_eval), without a network.

    surefoot train gpt --model.family llama --run-dir runs/llama
    python examples/evaluation/lm_harness.py runs/llama

The run is exported for transformers: a run of gpt with the family llama or gpt2, or of
finetune. Questions have the shape of HellaSwag's file.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before the libraries are imported

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import surefoot as sf


def task(name, **settings):
    """A task on the file of its name, beside this script."""
    file = Path(__file__).with_name(f"{name}.jsonl")
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(file)}},
        "validation_split": "validation",
        **settings,
    }


QUESTIONS = task(
    "questions",
    output_type="multiple_choice",
    doc_to_text="ctx",
    doc_to_choice="endings",
    doc_to_target="label",
)
TEXTS = task(
    "texts", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="text"
)


def score(run):
    directory = sf.load(run).export(layout="transformers").directory
    model = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=8)
    manager = TaskManager(include_defaults=False)
    outcome = simple_evaluate(model, tasks=[QUESTIONS, TEXTS], task_manager=manager)
    return outcome["results"]


if __name__ == "__main__":
    for name, metrics in score(sys.argv[1]).items():
        print(json.dumps({"task": name, **metrics}))
