"""Five-fold cross-validation of a classifier: scikit-learn's guide, "Cross-validation".

Each fold is a run of its own. A second start repeats only what is not finished.
"""

import statistics

import torch
import torch.nn.functional as F
from sklearn.datasets import load_iris
from sklearn.model_selection import StratifiedKFold
from torch import nn

import surefoot as sf

inputs, labels = load_iris(return_X_y=True)
folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(inputs, labels))


def network():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def rows(numbers):
    return torch.tensor(inputs[numbers]).float(), torch.tensor(labels[numbers])


def build(fold=0):
    train, val = folds[fold]
    return sf.Run(
        model=network,
        loss=loss,
        train_data=rows(train),
        splits={"val": sf.Split(rows(val), metrics=sf.metrics.accuracy)},
        batch_size=16,
        length="60 epochs",
        evaluate_every="20 epochs",
        optimizer=sf.optim.adam(lr=1e-2),
        run_dir=f"runs/folds/{fold}",
    )


if __name__ == "__main__":
    for fold in range(len(folds)):
        build(fold).train()
    runs = [sf.load(f"runs/folds/{fold}") for fold in range(len(folds))]
    scores = [run.metrics["val/accuracy"] for run in runs]
    print(f"{statistics.mean(scores):.3f} +- {statistics.stdev(scores):.3f}", scores)
