"""The repeated blocks of a model, for activation checkpointing and for FSDP. Blocks are found from
the model's structure.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from surefoot.config.parallel import Strategy
from surefoot.config.tree import nearest
from surefoot.errors import ConfigError, Setting, SurefootError, together

_LISTS = (nn.ModuleList, nn.ModuleDict)  # containers without a forward method
_SMALL = 0.1  # parameters of a block class relative to the largest class; smaller lists hold heads


def blocks_of(model: nn.Module, named: str | Sequence[str] = "auto") -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by module name, in model order. No block contains
    another block.

    For "auto", the blocks are children of `nn.ModuleList`, `nn.ModuleDict` and `nn.Sequential` that
    have submodules and parameters. A block's class must occur at least twice in such lists, or once
    in an `nn.ModuleList`. Nested lists, such as the stages of a ResNet, are searched; blocks are
    not searched. Classes with less than 10% of the parameters of the largest class are ignored. The
    result is empty if a model has no such blocks.

    Otherwise, `named` has patterns for module or class names, with * as a wildcard. If a pattern
    matches a list, the children of the list are blocks. Raises `ConfigError` with the nearest names
    if a pattern matches no module.

    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=8)
    >>> model = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
    >>> (
    ...     list(blocks_of(model)),
    ...     list(blocks_of(model, ["layers.*.self_attn"])),
    ...     list(blocks_of(model, ["LayerNorm"]))[0],
    ... )
    (['layers.0', 'layers.1', 'layers.2'], ['layers.0.self_attn', 'layers.1.self_attn', 'layers.2.self_attn'], 'layers.0.norm1')
    """
    return (
        _repeated(model)
        if named == "auto"
        else _called(model, [named] if isinstance(named, str) else named)
    )


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    named = dict(_candidates(model, prefix="", in_list=isinstance(model, nn.Sequential)))
    classes = {
        type(block): [other for other in named.values() if type(other) is type(block)]
        for block in named.values()
    }
    listed = {
        id(child) for each in model.modules() if isinstance(each, nn.ModuleList) for child in each
    }
    sizes = {
        kind: sum(parameter.numel() for block in blocks for parameter in block.parameters())
        for kind, blocks in classes.items()
        if len(blocks) > 1 or id(blocks[0]) in listed
    }
    min_size = _SMALL * max(sizes.values(), default=0)
    return {name: block for name, block in named.items() if sizes.get(type(block), -1) >= min_size}


def _candidates(
    module: nn.Module, *, prefix: str, in_list: bool
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_list = type(child) is nn.Sequential or isinstance(child, _LISTS)
        if (
            in_list
            and _made_of_parts(child)
            and not (is_list and any(map(_made_of_parts, child.children())))
        ):
            if not isinstance(child, _LISTS):
                yield path, child
        else:
            yield from _candidates(
                child, prefix=f"{path}.", in_list=isinstance(child, (nn.Sequential, *_LISTS))
            )


def _made_of_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _called(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    fitting = {
        pattern: [
            name
            for name, module in modules.items()
            if fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)
        ]
        for pattern in patterns
    }
    idle = [pattern for pattern, names in fitting.items() if not names]
    if idle or not patterns:
        raise together([_nothing_called(model, pattern, modules) for pattern in idle or [""]])
    chosen: dict[str, nn.Module] = {}
    for name in sorted(
        {name for names in fitting.values() for name in names}, key=list(modules).index
    ):
        if any(name.startswith(f"{outer}.") for outer in chosen):
            continue
        if isinstance(modules[name], _LISTS):
            chosen |= {f"{name}.{part}": child for part, child in modules[name].named_children()}
        else:
            chosen[name] = modules[name]
    return chosen


def _nothing_called(model: nn.Module, pattern: str, modules: dict[str, nn.Module]) -> SurefootError:
    meant = nearest(pattern, [*modules, *{type(module).__name__ for module in modules.values()}])
    kinds = list(dict.fromkeys(type(block).__name__ for block in _repeated(model).values()))
    return ConfigError(
        "no-such-block",
        problem=f"blocks: {type(model).__name__} has no module or module class named {pattern!r}",
        reason=None if meant else f"its repeated blocks: {', '.join(kinds) or 'none'}",
        remedy=f"did you mean {meant}?" if meant else None,
        value=pattern,
        nearest=meant,
    )


def refuse_unshardable(model: nn.Module) -> None:
    """Raise `ConfigError` if FSDP cannot shard the model's parameters. The message names each
    problem.

    >>> refuse_unshardable(nn.Linear(2, 1))
    """
    problems: list[str] = []
    for name, p in model.named_parameters():
        if p.ndim == 0:
            problems.append(
                f"{name} is a scalar without dimensions: use nn.Parameter(torch.ones(1))"
            )
        elif not p.is_contiguous():
            problems.append(f"{name} is not contiguous (channels last?): make it contiguous")
        elif p.is_complex():
            problems.append(
                f"{name} is complex: store its real and imaginary parts (torch.view_as_real)"
            )
    types = sorted(
        {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    )
    if len(types) > 1:
        problems.append(
            f"its trained parameters have several dtypes, {', '.join(types)}: FSDP reduces gradients in one dtype"
        )
    if problems:
        first = (
            problems
            if len(problems) <= 3
            else [*problems[:2], f"and {len(problems) - 2} more like these"]
        )
        raise ConfigError(
            "model-not-shardable",
            problem=f"parallel = fsdp: {type(model).__name__} cannot be sharded",
            reason="\n".join(first),
            remedy=Setting("parallel", "ddp"),
            setting="parallel",
            value="fsdp",
            count=len(problems),
        )


def gathered(model: nn.Module, parallel: Strategy) -> list[nn.Module]:
    """Return FSDP's units, innermost first: the blocks (`blocks_of`), the batch normalizations that
    stay float32, and the model.
    """
    blocks = blocks_of(model, parallel.blocks or "auto").values()
    exact = [
        module
        for module in model.modules()
        if parallel.gather_dtype == "bf16" and is_batch_norm(module)
    ]
    return [*by_themselves(model, [*blocks, *exact]), model]


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module normalizes by running statistics and has weights."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.weight is not None


def by_themselves(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that FSDP can gather separately, innermost first: those with parameters
    that no other module uses.
    """
    chosen = []
    for module in reversed(list(model.modules())):
        if module is not model and any(module is block for block in blocks):
            own = set(module.parameters())
            outside = {p for each in _beside(model, module) for p in each._parameters.values()}
            if own and own.isdisjoint(outside):
                chosen.append(module)
    return chosen


def _beside(module: nn.Module, block: nn.Module) -> set[nn.Module]:
    modules, queue = {module}, [module]
    while queue:
        fresh = {child for child in queue.pop().children() if child is not block} - modules
        modules |= fresh
        queue += fresh
    return modules
