"""A table with scikit-learn's metrics: the data of its example "plot_roc", breast cancer.

The metrics are scikit-learn's functions, computed over the whole split at once.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import f1_score, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn

import surefoot as sf

metrics = {
    "roc_auc": sf.metrics.whole_split(
        lambda logits, labels: roc_auc_score(labels, logits)
    ),
    "f1": sf.metrics.whole_split(lambda logits, labels: f1_score(labels, logits > 0)),
}


def network():
    layers = [nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)]
    return nn.Sequential(*layers, nn.Flatten(0))


def loss(model, batch):
    rows, labels = batch
    logits = model(rows)
    return F.binary_cross_entropy_with_logits(logits, labels), (logits, labels)


def build():
    rows, labels = load_breast_cancer(return_X_y=True)
    parts = train_test_split(rows, labels, stratify=labels, random_state=0)
    scaler = StandardScaler().fit(parts[0])
    train, val = (
        (torch.tensor(scaler.transform(rows)).float(), torch.tensor(labels).float())
        for rows, labels in (parts[::2], parts[1::2])
    )
    return sf.Run(
        model=network,
        loss=loss,
        train_data=train,
        splits={"val": sf.Split(val, metrics=metrics)},
        batch_size=32,
        length="40 epochs",
        evaluate_every="4 epochs",
        early_stopping=sf.EarlyStopping("max val/roc_auc", patience=5),
        best="max val/roc_auc",
        optimizer=sf.optim.adamw(lr=3e-3, weight_decay=0.05, decay="all"),
        run_dir="runs/tabular",
    )


if __name__ == "__main__":
    build().train()
