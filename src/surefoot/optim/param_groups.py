"""Parameter groups by weight decay and learning rate, and hidden matrices, chosen by modules and
shapes.

Parameter names are not used: a pattern "LayerNorm.weight" would miss `norm1.weight`, and "bias"
would match the matrix `bias_proj.weight`. Depth, input matrices and the final layer follow from the
order of module registration, assumed to be the order of the forward pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from torch import nn

from surefoot.config.tree import nearest
from surefoot.errors import ConfigError

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    # batch and instance norms of all dimensions, including synchronized norms
    nn.modules.batchnorm._NormBase,
)
# the last two are MultiheadAttention's, with three dimensions
_BIASES = ("bias", "bias_k", "bias_v")
# MultiheadAttention's own
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters, with their names, that share a weight decay and a factor on the base learning
    rate (`rate`).
    """

    name: str
    decay: float
    parameters: list[nn.Parameter]
    names: list[str]
    hidden: bool = False  # True for matrices between embeddings and head, from `split_hidden`
    rate: float = 1.0


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    decay: str = "matrices",
    rates: Mapping[str, float] | None = None,
    trained: set[str] | None = None,
    has_decayed: bool = False,
) -> list[ParameterGroup]:
    """Return the trainable parameters of `model`, grouped by weight decay and learning rate.

    With `decay="matrices"`, embeddings, biases, norms and other parameters with fewer than two
    dimensions do not decay. With `decay="all"`, every parameter decays. `rates` maps names to
    factors on the base learning rate; the default is 1. Groups with the factor 1 come first, then
    groups by falling factor; with equal factors, the group with weight decay comes first. A tied
    parameter appears once, in the group of its first owner. `trained` names the parameters to
    group; None means all parameters with `requires_grad`. With `has_decayed`, the groups are those of
    a run with a decay, whose decay is 0 now.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    >>> [(group.name, group.decay, group.names) for group in parameter_groups(model, 0.1)]
    [('decay', 0.1, ['1.weight']), ('no decay', 0.0, ['0.weight', '1.bias', '2.weight', '2.bias'])]
    >>> [
    ...     (group.name, group.rate, group.names)
    ...     for group in parameter_groups(model, 0.0, rates={"0.weight": 0.5})
    ... ]
    [('all', 1.0, ['1.weight', '1.bias', '2.weight', '2.bias']), ('all', 0.5, ['0.weight'])]
    """
    has_two_groups = has_decayed or bool(weight_decay)
    groups: dict[tuple[bool, float], ParameterGroup] = {}
    grouped: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            is_trained = parameter.requires_grad if trained is None else full_name in trained
            if parameter in grouped or not is_trained:
                continue
            if isinstance(module, EMBEDDINGS) and module.sparse:
                raise ConfigError(
                    "embedding-sparse",
                    problem=f"model: {path or type(model).__name__} has sparse=True, and a run"
                    " cannot sum, clip or check sparse gradients",
                    remedy=f"write nn.{type(module).__name__}(..., sparse=False), and an optimizer"
                    " for dense gradients",
                    setting="model",
                    module=path,
                )
            grouped.add(parameter)
            rate = 1.0 if rates is None else rates.get(full_name, 1.0)
            is_matrix = not (
                is_bias_or_norm(module, name, parameter) or isinstance(module, EMBEDDINGS)
            )
            is_spared = has_two_groups and decay != "all" and not is_matrix
            group = groups.get((is_spared, rate))
            if group is None:
                if is_spared:
                    nothing = 0 * weight_decay  # of its type, which a checkpoint saves
                    group = ParameterGroup("no decay", nothing, [], [], rate=rate)
                elif has_two_groups:
                    group = ParameterGroup("decay", weight_decay, [], [], rate=rate)
                else:
                    group = ParameterGroup("all", weight_decay, [], [], rate=rate)
                groups[is_spared, rate] = group
            group.parameters.append(parameter)
            group.names.append(full_name)

    def place(key: tuple[bool, float]) -> tuple[bool, float, bool]:
        is_spared, rate = key
        return rate != 1.0, -rate, is_spared

    return [groups[key] for key in sorted(groups, key=place)]


def former_places(
    groups: Sequence[ParameterGroup], former: Sequence[ParameterGroup]
) -> list[int | None]:
    """Return for each group the index of the former group of its parameters; None if no former
    group has one of them.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    >>> former_places(
    ...     parameter_groups(model, 0.1), parameter_groups(model, 0.0, trained={"0.bias"})
    ... )
    [None, 0]
    """
    former_index = {}
    for index, group in enumerate(former):
        for name in group.names:
            former_index[name] = index
    places = []
    for group in groups:
        of_members = [former_index[name] for name in group.names if name in former_index]
        places.append(of_members[0] if of_members else None)
    return places


def first_and_last(names: Sequence[str]) -> str:
    """Return the first and last name for a message.

    >>> first_and_last(["a", "b", "c"]), first_and_last(["a"])
    ('a ... c', 'a')
    """
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def hidden_matrices(
    model: nn.Module, *, excepted: Sequence[str] | None = None, conv1d: bool = True
) -> set[nn.Parameter]:
    """Return the weights of Linear layers, attention projections and convolutions, except the head
    and embeddings.

    The `Conv1D` of transformers is a Linear layer whose weight is stored transposed, (inputs,
    outputs). The orthogonal matrix of a transposed matrix is transposed, and its rate depends on
    the larger side. `conv1d` is False in a run of an older behavior.

    The head is every Linear layer tied to an embedding, or else the last layer with a matrix
    (`final_layer`). `excepted` names modules or parameters to exclude instead of the head. Kernels
    of grouped convolutions are not hidden, because each is several matrices in one tensor. Tensors
    owned by other module types are not hidden.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 9))
    >>> [name for name, weight in model.named_parameters() if weight in hidden_matrices(model)]
    ['1.weight']
    """
    candidates: set[nn.Parameter] = set()
    embedded: set[nn.Parameter] = set()
    linear_layers = []
    for module in model.modules():
        candidates.update(_matrices(module, conv1d=conv1d))
        if isinstance(module, EMBEDDINGS):
            embedded.add(dict(module.named_parameters())["weight"])
        elif isinstance(module, nn.Linear):
            linear_layers.append(module)
    if excepted is not None:
        left_out = _called(model, excepted)
    elif any(layer.weight in embedded for layer in linear_layers):
        left_out = set()  # the head is tied
    else:
        left_out = own_parameters(final_layer(model))
    return candidates - embedded - left_out


def split_hidden(
    groups: Sequence[ParameterGroup], hidden: set[nn.Parameter]
) -> list[ParameterGroup]:
    """Split each group into hidden matrices and other parameters; groups of hidden matrices come
    first.
    """
    groups_of_hidden = []
    groups_of_others = []
    for group in groups:
        hidden_part = replace(
            group, name=f"{group.name}, hidden", parameters=[], names=[], hidden=True
        )
        other_part = replace(group, parameters=[], names=[], hidden=False)
        for parameter, name in zip(group.parameters, group.names, strict=True):
            part = hidden_part if parameter in hidden else other_part
            part.parameters.append(parameter)
            part.names.append(name)
        if hidden_part.parameters:
            groups_of_hidden.append(hidden_part)
        if other_part.parameters:
            groups_of_others.append(other_part)
    return groups_of_hidden + groups_of_others


def with_rates(groups: Sequence[ParameterGroup], lr: float) -> list[dict[str, Any]]:
    """Return the groups for torch's optimizers, each with its weight decay and `lr` times its
    factor.
    """
    return [
        {"params": group.parameters, "weight_decay": group.decay, "lr": lr * group.rate}
        for group in groups
    ]


def _matrices(module: nn.Module, *, conv1d: bool) -> list[nn.Parameter]:
    """Return the weights of a module that can be hidden matrices."""
    wanted: tuple[str, ...] = ()
    if isinstance(module, nn.MultiheadAttention):
        wanted = _PROJECTIONS
    is_convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1
    is_transposed = conv1d and is_transposed_linear(module)
    if is_convolution or is_transposed or isinstance(module, nn.Linear):
        wanted = ("weight",)
    named = module.named_parameters(recurse=False)
    return [parameter for name, parameter in named if name in wanted]


def is_transposed_linear(module: nn.Module) -> bool:
    """Return True for the `Conv1D` of transformers, which GPT-2 has in place of Linear layers."""
    return any(
        cls.__module__ == "transformers.pytorch_utils" and cls.__name__ == "Conv1D"
        for cls in type(module).__mro__
    )


def _called(model: nn.Module, names: Sequence[str]) -> set[nn.Parameter]:
    """Return the parameters with these names, and those of the modules with these names."""
    called: dict[str, list[nn.Parameter]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        called[name] = list(module.parameters())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        called[name] = [parameter]
    unknown = [name for name in names if name not in called]
    if unknown:
        meant = nearest(unknown[0], [*called])
        raise ConfigError(
            "adamw-module-unknown",
            problem=f"optimizer.adamw_modules: {type(model).__name__} has no module or parameter"
            f" {unknown[0]!r}",
            remedy=f"did you mean {meant}?" if meant else None,
            setting="optimizer.adamw_modules",
            value=unknown[0],
        )
    chosen: set[nn.Parameter] = set()
    for name in names:
        chosen.update(called[name])
    return chosen


def depths(model: nn.Module) -> dict[str, int] | None:
    """Return each parameter's depth by its first name, from 0 without gaps, or None if the model
    has no list of blocks.

    Blocks are the children of the outermost `nn.ModuleList` and `nn.Sequential`. If these
    containers hold single layers, every layer with a matrix is a block. Modules before the blocks
    (embeddings, a stem) have depth 0. The depth increases by 1 from block to block, across all
    lists. Modules between two lists belong to the block before them; modules after the last list (a
    norm, a head) are deepest. A tied parameter has the depth of its first occurrence.

    >>> depths(
    ...     nn.Sequential(
    ...         nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9, bias=False)
    ...     )
    ... )
    {'0.weight': 0, '1.weight': 1, '1.bias': 1, '2.weight': 1, '2.bias': 1, '3.weight': 2}
    """
    pieces = _pieces(model)
    blocks = [index for index, (_, is_block) in enumerate(pieces) if is_block]
    if not blocks:
        return None
    names = {parameter: name for name, parameter in model.named_parameters()}
    depth_of: dict[str, int] = {}
    depth = 0
    for index, (parameters, is_block) in enumerate(pieces):
        if is_block or index == blocks[-1] + 1:
            depth += 1
        for parameter in parameters:
            depth_of.setdefault(names[parameter], depth)
    # a block whose parameters all occurred before leaves a gap
    used = sorted(set(depth_of.values()))
    return {name: used.index(depth) for name, depth in depth_of.items()}


def matrices(model: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """Return all (module, weight) pairs except biases and norms; a tied weight appears once per
    owner.

    >>> [
    ...     tuple(matrix.shape)
    ...     for _, matrix in matrices(
    ...         nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    ...     )
    ... ]
    [(3, 2), (1, 3)]
    """
    return [
        (owner, parameter)
        for owner in model.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if not is_bias_or_norm(owner, name, parameter)
    ]


def final_layer(model: nn.Module) -> nn.Module | None:
    """Return the output layer: the last module with a matrix that is not an embedding, or None.

    >>> final_layer(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1), nn.Tanh()))
    Linear(in_features=3, out_features=1, bias=True)
    """
    for owner, _ in reversed(matrices(model)):
        if not isinstance(owner, EMBEDDINGS):
            return owner
    return None


def own_parameters(module: nn.Module | None) -> set[nn.Parameter]:
    """Return the parameters of a module itself, without those of its children."""
    return set() if module is None else set(module.parameters(recurse=False))


def input_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices that process the input: embeddings and matrices before the blocks, or
    else the first matrix.

    >>> [
    ...     tuple(matrix.shape)
    ...     for matrix in input_matrices(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    ... ]
    [(3, 2)]
    """
    pieces = _pieces(model)
    before_blocks: set[nn.Parameter] = set()
    if any(is_block for _, is_block in pieces):
        for parameters, _ in takewhile(lambda piece: not piece[1], pieces):
            before_blocks.update(parameters)
    owned_matrices = matrices(model)
    inputs = [
        parameter
        for owner, parameter in owned_matrices
        if isinstance(owner, EMBEDDINGS) or parameter in before_blocks
    ]
    return inputs or [parameter for _, parameter in owned_matrices[:1]]


def is_bias_or_norm(owner: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is added to activations or scales them element by element."""
    return parameter.ndim < 2 or name in _BIASES or isinstance(owner, _NORMS)


def _pieces(model: nn.Module) -> list[tuple[list[nn.Parameter], bool]]:
    """Return the parameters of a model in order, cut into pieces, and whether a piece is a block.
    Pieces without parameters are left out.
    """
    of_layers = not any(_holds_blocks(module) for module in model.modules())
    return [piece for piece in _cut(model, of_layers=of_layers) if piece[0]]


def _cut(module: nn.Module, *, of_layers: bool) -> Iterator[tuple[list[nn.Parameter], bool]]:
    """With `of_layers`, the model's lists hold single layers, and those with a matrix are blocks."""
    yield list(module.parameters(recurse=False)), False
    if of_layers:
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    else:
        is_list = _holds_blocks(module)
    for child in module.children():
        is_inner_list = type(child) in (nn.ModuleList, nn.Sequential)
        if is_inner_list and not of_layers:
            is_inner_list = _holds_blocks(child)
        if not is_list or is_inner_list:
            yield from _cut(child, of_layers=of_layers)
        else:
            yield list(child.parameters()), not of_layers or bool(matrices(child))


def _holds_blocks(module: nn.Module) -> bool:
    """Return True for a list of submodules that have submodules of their own; in an
    `nn.Sequential`, two must be of one class.
    """
    blocks = [
        child
        for child in module.children()
        if next(child.children(), None) is not None and next(child.parameters(), None) is not None
    ]
    if isinstance(module, nn.ModuleList):
        return bool(blocks)
    classes = {type(block) for block in blocks}
    return isinstance(module, nn.Sequential) and len(classes) < len(blocks)
