"""BERT on sentences: examples/pytorch/text-classification of huggingface/transformers.

A batch is padded to its longest sentence. The label says if good words outnumber bad.
"""

import random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification

import surefoot as sf

GOOD, BAD, OTHER = range(2, 12), range(12, 22), range(22, 60)  # 0 pads, 1 begins


def sentences(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        good, bad = draw.sample(range(8), 2)
        words = draw.choices(GOOD, k=good) + draw.choices(BAD, k=bad)
        words += draw.choices(OTHER, k=draw.randrange(20))
        yield torch.tensor([1, *draw.sample(words, len(words))]), int(good > bad)


def pad(samples):
    words, labels = zip(*samples, strict=True)
    ids = pad_sequence(words, batch_first=True)
    return {"input_ids": ids, "attention_mask": ids > 0, "labels": torch.tensor(labels)}


def network():
    size = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=60, **size))


def loss(model, batch):
    output = model(**batch)
    return output.loss, (output.logits, batch["labels"])


def build():
    train, val = list(sentences(2000, seed=0)), list(sentences(300, seed=1))
    return sf.Run(
        model=network,
        loss=loss,
        train_data=train,
        collate_fn=pad,
        splits={"val": sf.Split(val, metrics=sf.metrics.accuracy)},
        batch_size=32,
        length="4 epochs",
        optimizer=sf.optim.adamw(lr=1e-3, weight_decay=0.0),
        schedule=sf.schedules.linear(warmup="10%"),
        run_dir="runs/bert",
    )


if __name__ == "__main__":
    build().train()
