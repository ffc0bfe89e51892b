"""A schedule whose run becomes longer or shorter after its rate began to depend on the length."""

from __future__ import annotations

from itertools import pairwise

import pytest

import surefoot as sf
from surefoot.config.durations import Length
from surefoot.schedules.joined import continued
from surefoot.schedules.lr_schedule import Schedule

BEFORE = Length(steps=20, samples_per_epoch=8, batch_size=1)
AT = 18  # in every fall below
SHAPES = {
    "linear": sf.schedules.linear(),
    "cosine": sf.schedules.cosine(2, min_lr_ratio=0.1),
    "polynomial": sf.schedules.polynomial(power=2.0, min_lr_ratio=0.01),
    "exponential": sf.schedules.exponential(min_lr_ratio=0.01),
    "one_cycle": sf.schedules.one_cycle(4),
    "wsd": sf.schedules.wsd(cooldown=8, min_lr_ratio=0.05),
    "cosine_restarts": sf.schedules.cosine_restarts(cycle=10),
}


@pytest.mark.parametrize("steps", [19, 30, 100])
@pytest.mark.parametrize("name", SHAPES)
def test_the_rate_goes_on_without_a_jump_and_falls_to_its_minimum(name: str, steps: int) -> None:
    schedule: Schedule = SHAPES[name].resolved(BEFORE)
    after = Length(steps=steps, samples_per_epoch=8, batch_size=1)
    minimum = schedule.min_lr_ratio or 0.0

    present = schedule.factors(BEFORE)(AT)
    factor = continued(schedule, before=BEFORE, after=after, at=AT).factors(after)

    rest = [factor(step) for step in range(AT, steps + 1)]
    assert rest[0] == pytest.approx(present, rel=1e-12)
    if steps - AT > 1:  # one step has no room for a fall
        assert rest[-1] == pytest.approx(minimum, abs=1e-12)
    assert all(later <= earlier for earlier, later in pairwise(rest))
    assert [factor(step) for step in range(AT)] == [
        schedule.factors(BEFORE)(step) for step in range(AT)
    ]
