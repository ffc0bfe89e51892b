"""Distillation: mnist of https://github.com/haitongli/knowledge-distillation-pytorch.

The teacher is a run of its own, and a second start loads it. The student's run has both
models, and an optimizer for the student only.
"""

import torch.nn.functional as F
from torch import nn

import surefoot as sf

digits, sgd = sf.data.load_images(), sf.optim.sgd(lr=0.05, momentum=0.9)
settings = {"train_data": digits.train, "batch_size": 64, "length": "10 epochs"}
settings["splits"] = {"val": sf.Split(digits.val, metrics=sf.metrics.accuracy)}


def network(width, dropout):
    first = nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout)
    second = nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)
    return nn.Sequential(*first, *second, nn.Linear(width, 10))


def teacher_network():
    return network(400, dropout=0.5)


def label_loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def distillation_loss(models, batch, temperature=20.0, alpha=0.7):
    images, labels = batch
    logits, targets = models["student"](images), models["teacher"](images)
    log_soft = F.log_softmax(logits / temperature, dim=1)
    soft = F.softmax(targets / temperature, dim=1)
    soft_loss = F.kl_div(log_soft, soft, reduction="batchmean") * temperature**2
    hard_loss = F.cross_entropy(logits, labels)
    return alpha * soft_loss + (1 - alpha) * hard_loss, (logits, labels)


def build(teacher):
    return sf.Run(
        model={"student": lambda: network(32, 0.0), "teacher": teacher},
        loss=distillation_loss,
        optimizer={"student": sgd},
        run_dir="runs/student",
        **settings,
    )


if __name__ == "__main__":
    where = {"run_dir": "runs/teacher", "optimizer": sgd, "loss": label_loss}
    sf.Run(model=teacher_network, **where, **settings).train()
    teacher = sf.load("runs/teacher").load_model(teacher_network)
    build(teacher.requires_grad_(False)).train()
