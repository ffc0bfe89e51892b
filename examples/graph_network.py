"""A graph network on the nodes of one graph: https://github.com/tkipf/pygcn.

A sample is a labeled node, and the graph belongs to the model.
"""

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf

NODES, GROUPS, FEATURES = 400, 4, 64
nodes, groups = torch.arange(NODES), torch.arange(NODES) % GROUPS


def graph():
    random, alike = torch.Generator().manual_seed(0), groups[:, None] == groups
    links = torch.rand(NODES, NODES, generator=random) < 0.005 + 0.03 * alike
    links = (links | links.T | torch.eye(NODES, dtype=torch.bool)).float()
    favored = groups[:, None] == torch.arange(FEATURES) % GROUPS
    features = torch.rand(NODES, FEATURES, generator=random) < 0.05 + 0.05 * favored
    scale = links.sum(dim=1).rsqrt()
    return features.float(), scale[:, None] * links * scale


class GCN(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        for name, tensor in zip(("features", "links"), graph(), strict=True):
            self.register_buffer(name, tensor)
        self.first, self.dropout = nn.Linear(FEATURES, hidden), nn.Dropout(0.5)
        self.second = nn.Linear(hidden, GROUPS)

    def forward(self, nodes):
        hidden = self.dropout(F.relu(self.links @ self.first(self.features)))
        return (self.links @ self.second(hidden))[nodes]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build():
    test = sf.Split((nodes[200:], groups[200:]), metrics=sf.metrics.accuracy)
    return sf.Run(
        model=GCN,
        loss=loss,
        train_data=(nodes[:140], groups[:140]),
        splits={"test": test},
        batch_size=140,
        length="200 epochs",
        evaluate_every="20 epochs",
        optimizer=sf.optim.adam(lr=0.01, weight_decay=5e-4, decay="all"),
        run_dir="runs/graph",
    )


if __name__ == "__main__":
    build().train()
