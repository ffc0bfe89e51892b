"""GPT-2 with LoRA on chats: examples/sft of https://github.com/huggingface/peft.

Only answers are learned. After the first checkpoint, checkpoints hold the adapter alone.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

import surefoot as sf

tokenizer = sf.tokenizers.ByteTokenizer()


def chat(a, b):
    return ("user", f"{a} plus {b}?"), ("assistant", f"{a} plus {b} is {a + b}.")


def encode(messages):
    ids, labels = [], []
    for role, content in messages:
        head = tokenizer.encode(f"<|{role}|>\n").tolist()
        body = [*tokenizer.encode(content).tolist(), tokenizer.eos_id]
        ids += head + body
        labels += [-100] * len(head)
        labels += [token if role == "assistant" else -100 for token in body]
    return torch.tensor(ids), torch.tensor(labels)


def pad(samples):
    ids, labels = zip(*samples, strict=True)
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_ids": pad_sequence(ids, batch_first=True), "labels": labels}


def network():
    size = {"vocab_size": 257, "n_embd": 48, "n_layer": 2, "initializer_range": 0.2}
    lora = LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(GPT2LMHeadModel(GPT2Config(**size)), lora)


def build():
    return sf.Run(
        model=network,
        loss=lambda model, batch: model(**batch).loss,
        count_fn=lambda batch: int((batch["labels"][:, 1:] >= 0).sum()),
        train_data=[encode(chat(a, b)) for a in range(20) for b in range(20)],
        collate_fn=pad,
        batch_size=32,
        length="8 epochs",
        optimizer=sf.optim.adamw(lr=1e-2, weight_decay=0.0),
        schedule=sf.schedules.cosine(warmup="5%"),
        run_dir="runs/gpt2-lora",
    )


if __name__ == "__main__":
    build().train()
