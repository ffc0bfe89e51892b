"""What part a parameter plays, found from how its model is built: how deep it stands, what takes in data, what makes outputs.

Modules are taken in the order in which they were registered, which is how models are written: what comes first in the
forward pass comes first. Names are not looked at.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

from torch import nn

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # batch and instance norms of all dimensions, synchronised ones too
)
_BIASES = ("bias", "bias_k", "bias_v")  # the last two are MultiheadAttention's, of three dimensions


def depths(model: nn.Module) -> dict[str, int] | None:
    """How deep each parameter stands, by its first name, from 0 without gaps; None where the model holds no list of blocks.

    Blocks are the children of the outermost `nn.ModuleList` and `nn.Sequential`; where those hold single layers, every layer
    with a matrix is one. What stands before the blocks (embeddings, a stem) is at depth 0, and each block one deeper than the
    one before, through all lists (the stages of a ResNet, an encoder and its decoder). What stands between two lists belongs
    to the block before it; all that follows the last list (a norm, a head) is deepest. A tied parameter counts where it
    stands first.

    >>> depths(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9, bias=False)))
    {'0.weight': 0, '1.weight': 1, '1.bias': 1, '2.weight': 1, '2.bias': 1, '3.weight': 2}
    """
    pieces = _pieces(model)
    blocks = [place for place, (_, is_block) in enumerate(pieces) if is_block]
    if not blocks:
        return None
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, int] = {}
    depth = 0
    for place, (parameters, is_block) in enumerate(pieces):
        depth += is_block or place == blocks[-1] + 1
        for parameter in parameters:
            found.setdefault(names[parameter], depth)
    used = sorted(set(found.values()))
    return {name: used.index(depth) for name, depth in found.items()}


def matrices(model: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """All that activations are multiplied with or that is looked up, each with its owner: no bias, no norm; tied ones twice.

    >>> [tuple(matrix.shape) for _, matrix in matrices(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))]
    [(3, 2), (1, 3)]
    """
    return [
        (owner, parameter)
        for owner in model.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if not is_bias_or_norm(owner, name, parameter)
    ]


def final_layer(model: nn.Module) -> nn.Module | None:
    """The module that makes the outputs: the last one with a matrix that is no embedding; None where there is none.

    >>> final_layer(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1), nn.Tanh()))
    Linear(in_features=3, out_features=1, bias=True)
    """
    found = [owner for owner, _ in matrices(model) if not is_embedding(owner)]
    return found[-1] if found else None


def input_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Matrices that take in the data: embeddings, and what else stands before the blocks, or else the first of all.

    >>> [tuple(matrix.shape) for matrix in input_matrices(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))]
    [(3, 2)]
    """
    pieces, found = _pieces(model), matrices(model)
    if not any(is_block for _, is_block in pieces):
        pieces = []
    before = {each for parameters, _ in takewhile(lambda piece: not piece[1], pieces) for each in parameters}
    inputs = [parameter for owner, parameter in found if is_embedding(owner) or parameter in before]
    return inputs or [parameter for _, parameter in found[:1]]


def is_embedding(owner: nn.Module) -> bool:
    """True for what looks rows of its matrix up."""
    return isinstance(owner, EMBEDDINGS)


def is_bias_or_norm(owner: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """True for what is added to activations, or scales them one by one."""
    return parameter.ndim < 2 or name in _BIASES or isinstance(owner, _NORMS)


def _pieces(model: nn.Module) -> list[tuple[list[nn.Parameter], bool]]:
    """The model's parameters in order, cut into blocks (True) and what stands outside of them."""
    of_layers = not any(_holds_blocks(module) for module in model.modules())
    return [piece for piece in _cut(model, of_layers=of_layers) if piece[0]]


def _cut(module: nn.Module, *, of_layers: bool) -> Iterator[tuple[list[nn.Parameter], bool]]:
    yield list(module.parameters(recurse=False)), False
    is_list = isinstance(module, nn.ModuleList | nn.Sequential) if of_layers else _holds_blocks(module)
    for child in module.children():
        plain_list = type(child) in (nn.ModuleList, nn.Sequential)
        if not is_list or (plain_list and (of_layers or _holds_blocks(child))):
            yield from _cut(child, of_layers=of_layers)
        else:
            yield list(child.parameters()), not of_layers or bool(matrices(child))


def _holds_blocks(module: nn.Module) -> bool:
    """True for a list of parts that are themselves made of parts; in a Sequential two of them must be of one kind."""
    parts = [
        child
        for child in module.children()
        if next(child.children(), None) is not None and next(child.parameters(), None) is not None
    ]
    if isinstance(module, nn.ModuleList):
        return bool(parts)
    alike = Counter(type(part) for part in parts).values()
    return isinstance(module, nn.Sequential) and max(alike, default=0) > 1
