"""REINFORCE: https://github.com/pytorch/examples, reinforcement_learning/reinforce.py.

A sample is the number of an episode, which the loss plays, with gymnasium's CartPole.
"""

import torch
from torch import nn
from torch.distributions import Categorical

import surefoot as sf

LIMIT = 100  # steps of an episode


def policy():
    layers = nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2)
    return nn.Sequential(*layers)


def move(state, force):
    _, speed, angle, turn = state.unbind(1)
    push = (force + 0.05 * turn.square() * angle.sin()) / 1.1
    inertia = 0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1)
    swing = (9.8 * angle.sin() - angle.cos() * push) / inertia
    push -= 0.05 * swing * angle.cos() / 1.1
    return state + 0.02 * torch.stack([speed, push, turn, swing], dim=1)


def loss(model, batch):
    state = 0.1 * torch.rand(len(batch[0]), 4, device=batch[0].device) - 0.05
    alive, log_probs, played = torch.ones_like(state[:, 0]), [], []
    for _ in range(LIMIT):
        action = (choice := Categorical(logits=model(state))).sample()
        log_probs, played = [*log_probs, choice.log_prob(action)], [*played, alive]
        state = move(state, 20.0 * action - 10.0)
        alive = alive * (state[:, 0].abs() < 2.4) * (state[:, 2].abs() < 0.2095)
    played, times = torch.stack(played), torch.arange(LIMIT, device=state.device)
    returns = (0.99 ** (times - times[:, None])).triu() @ played
    count = played.sum(dim=0)
    above = played * (returns - returns.sum(dim=0) / count)
    advantages = above / ((above.square().sum(dim=0) / (count - 1)).sqrt() + 1e-7)
    loss = -(torch.stack(log_probs) * advantages).sum() / len(state)
    return loss, {"reward": sf.Mean(count.sum(), len(state))}


def build():
    return sf.Run(
        model=policy,
        loss=loss,
        train_data=(torch.arange(16 * 100),),
        batch_size=16,
        length="1 epochs",
        optimizer=sf.optim.adam(lr=1e-2),
        run_dir="runs/reinforce",
    )


if __name__ == "__main__":
    build().train()
