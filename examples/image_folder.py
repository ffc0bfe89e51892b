"""A folder of images and any timm model: train.py of huggingface/pytorch-image-models.

`data/flowers` has a folder of images for each class. Without it, drawn images are used.
"""

from pathlib import Path

import timm
import torch.nn.functional as F

import surefoot as sf


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    return F.cross_entropy(logits, labels, label_smoothing=0.1), (logits, labels)


def build():
    path = Path("data/flowers")
    data = sf.data.load_images(
        path if path.exists() else "synthetic",
        size=32,
        channels=3,
        augmentation=sf.data.Augmentation(flip=True),
    )
    model = lambda: timm.create_model(  # noqa: E731
        "resnet10t", num_classes=len(data.classes), drop_path_rate=0.1
    )
    return sf.Run(
        model=model,
        loss=loss,
        train_data=data.train,
        splits={"val": sf.Split(data.val, metrics=sf.metrics.accuracy)},
        batch_size=32,
        length="200 steps",
        evaluate_every="100 steps",
        optimizer=sf.optim.sgd(lr=0.05, momentum=0.9, weight_decay=2e-5),
        schedule=sf.schedules.cosine(warmup="5%"),
        best="max val/accuracy",
        ema=0.99,
        run_dir="runs/image-folder",
    )


if __name__ == "__main__":
    build().train()
