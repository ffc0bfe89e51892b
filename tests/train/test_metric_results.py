"""What ranks tell each other of a user's values: it comes back as what it was. (3 s)"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

import surefoot as sf
from surefoot.train.metric_results import Messages


class Named(NamedTuple):
    label: int
    loss: float


def test_outputs_come_back_as_what_they_were() -> None:
    messages, held = Messages(), [Named(1, 0.5), {"a": (1, None)}, torch.tensor([True, False])]
    first, second, third = messages.read(messages.written(held))
    assert first == held[0]
    assert type(first) is Named
    assert second == held[1]
    torch.testing.assert_close(third, held[2])
    with pytest.raises(sf.ConfigError, match="cannot be sent to another rank"):
        messages.written([object()])


@dataclass(frozen=True, kw_only=True)
class Found:
    text: str
    length: int = field(init=False, default=0)


Other = type("Found", (list,), {"__module__": "elsewhere"})


def test_outputs_of_kinds_with_the_same_name_and_of_arguments_by_name_come_back() -> None:
    messages, held = Messages(), [Found(text="a"), Other(["b", 1]), torch.Size([2, 3])]
    found = messages.read(messages.written(held))
    assert found == held
    assert [type(one) for one in found] == [Found, Other, torch.Size]
