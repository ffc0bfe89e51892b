"""Whether the checkpoint of step 0 is what the run's seed builds."""

from __future__ import annotations

from surefoot.checkpoint import contents
from surefoot.parts import Parts
from surefoot.replay.execution import unlike
from surefoot.snapshot import file_name
from surefoot.verifying.comparing import TOLERANCE, as_problem, drawn_anew, tensor
from surefoot.verifying.files import Files
from surefoot.verifying.verdict import Problem


def begun(parts: Parts, files: Files) -> tuple[list[Problem], list[str], list[str]]:
    """Compare the weights of step 0 with those of the run as it is built now; what is wrong, what is proved, and what is not.

    A model that is handed over ready-made, or that was made by another version of torch, comes out of another drawing, which
    proves nothing: then more than half of some tensor differs. One of which a few entries differ was changed.
    """
    if 0 not in files.checkpoints or parts.state.step:
        return [], [], []
    start = files.checkpoints[0]
    init = start.described["init"]
    if init is not None:
        return [], [], [f"the weights of step 0: they came from {init}, and are taken as they are saved"]
    then = start.found.saved.machine
    other = unlike(then, parts.machine() | {"threads": then["threads"]})  # no weight is drawn by several
    problems: list[Problem] = []
    drawn = False
    for name, model in parts.state.models.items():
        file = file_name("model", name)
        saved = start.found.tensors(file) if file in start.found.files else {}
        for key, built in contents.model_tensors(model)[0].items():
            difference = tensor(f"{file}.safetensors, {key}", saved[key], built) if key in saved else None
            if difference is None:
                continue
            rounded = bool(other) and difference.relative <= TOLERANCE
            if rounded or drawn_anew(saved[key], built):
                drawn = True
            else:
                problems.append(as_problem(difference, step=0, what=start.path.name))
    if drawn:
        why = other or "a model that is not built under the run's seed, or from a file, or by code that has changed"
        return (
            [],
            [],
            [f"the weights of step 0: they are not those that are built now, and are taken as they are saved ({why})"],
        )
    return (
        problems,
        [] if problems else [f"step 0: the weights are those that seed {start.described['seed']} builds"],
        [],
    )
