"""A model's own repeated blocks: where activations are computed again, and what FSDP gathers at a time.

Found from how the model is built, not from names of ours: blocks are what a list of modules holds several of.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from surefoot.config.parallel import Strategy
from surefoot.config.tree import nearest
from surefoot.errors import ConfigError

_LISTS = (nn.ModuleList, nn.ModuleDict)  # which have no forward of their own
_SMALL = 0.1  # of the parameters of the largest class of blocks: a list of less is one of heads, or the like


def blocks_of(model: nn.Module, named: str | Sequence[str] = "auto") -> dict[str, nn.Module]:
    """The repeated blocks of a model by their names in it, in order; none of them stands inside another.

    "auto": children of `nn.ModuleList`, `nn.ModuleDict` and `nn.Sequential` that are made of parts, have parameters, and are of
    a class of which such lists hold two or more (in an `nn.ModuleList` one is enough). Lists in lists, such as the stages of a
    ResNet, are looked through; a block is not. Classes with less than a tenth of the parameters of the largest do not count.
    A model without such blocks has none. Else names of modules or classes, in which * stands for anything; of a list its
    children. What fits nothing raises `ConfigError`, with the nearest names.

    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=8)
    >>> model = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
    >>> list(blocks_of(model)), list(blocks_of(model, ["layers.*.self_attn"])), list(blocks_of(model, ["LayerNorm"]))[0]
    (['layers.0', 'layers.1', 'layers.2'], ['layers.0.self_attn', 'layers.1.self_attn', 'layers.2.self_attn'], 'layers.0.norm1')
    """
    return _repeated(model) if named == "auto" else _called(model, [named] if isinstance(named, str) else named)


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    named = dict(_candidates(model, prefix="", in_list=isinstance(model, nn.Sequential)))
    classes = {
        type(block): [other for other in named.values() if type(other) is type(block)] for block in named.values()
    }
    listed = {id(child) for each in model.modules() if isinstance(each, nn.ModuleList) for child in each}
    sizes = {
        kind: sum(parameter.numel() for block in blocks for parameter in block.parameters())
        for kind, blocks in classes.items()
        if len(blocks) > 1 or id(blocks[0]) in listed
    }
    min_size = _SMALL * max(sizes.values(), default=0)
    return {name: block for name, block in named.items() if sizes.get(type(block), -1) >= min_size}


def _candidates(module: nn.Module, *, prefix: str, in_list: bool) -> Iterator[tuple[str, nn.Module]]:
    """Children of lists that are made of parts, outermost first; below modules that stand in no list, what those hold."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_list = type(child) is nn.Sequential or isinstance(child, _LISTS)
        if in_list and _made_of_parts(child) and not (is_list and any(map(_made_of_parts, child.children()))):
            if not isinstance(child, _LISTS):
                yield path, child
        else:
            yield from _candidates(child, prefix=f"{path}.", in_list=isinstance(child, (nn.Sequential, *_LISTS)))


def _made_of_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _called(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The outermost modules whose name or class fits one of the patterns."""
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
        raise ConfigError("\n".join(_nothing_called(model, pattern, modules) for pattern in idle or [""]))
    chosen: dict[str, nn.Module] = {}
    for name in sorted({name for names in fitting.values() for name in names}, key=list(modules).index):
        if any(name.startswith(f"{outer}.") for outer in chosen):
            continue
        if isinstance(modules[name], _LISTS):
            chosen |= {f"{name}.{part}": child for part, child in modules[name].named_children()}
        else:
            chosen[name] = modules[name]
    return chosen


def _nothing_called(model: nn.Module, pattern: str, modules: dict[str, nn.Module]) -> str:
    meant = nearest(pattern, [*modules, *{type(module).__name__ for module in modules.values()}])
    kinds = list(dict.fromkeys(type(block).__name__ for block in _repeated(model).values()))
    return f"blocks: {type(model).__name__} has no module, and no class of modules, called {pattern!r}" + (
        f"; did you mean {meant}?" if meant else f"\n  its repeated blocks are {', '.join(kinds) or 'none'}"
    )


def refuse_unshardable(model: nn.Module) -> None:
    """Raise one `ConfigError` that names every parameter that FSDP cannot shard, and why.

    >>> refuse_unshardable(nn.Linear(2, 1))
    """
    problems: list[str] = []
    for name, p in model.named_parameters():
        if p.ndim == 0:
            problems.append(f"{name} is a single number without dimension: make it nn.Parameter(torch.ones(1))")
        elif not p.is_contiguous():
            problems.append(f"{name} does not lie row by row in memory (channels last?): give it contiguous weights")
        elif p.is_complex():
            problems.append(f"{name} holds complex numbers: keep it as two real parts (torch.view_as_real)")
    types = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad})
    if len(types) > 1:
        problems.append(f"its trained parameters are of several types, {', '.join(types)}: gradients travel in one")
    if problems:
        first = problems if len(problems) <= 3 else [*problems[:2], f"and {len(problems) - 2} more like these"]
        lines = [f"parallel = fsdp: {type(model).__name__} cannot be sharded as it is", *first, "or use --parallel ddp"]
        raise ConfigError("\n  ".join(lines))


def gathered(model: nn.Module, parallel: Strategy) -> list[nn.Module]:
    """The modules whose weights FSDP gathers together: its blocks (`blocks_of`), innermost first, and last the model for all else.

    Where weights travel in bfloat16, every batch normalisation too: its own stay exact.
    """
    blocks = blocks_of(model, parallel.blocks or "auto").values()
    exact = [module for module in model.modules() if parallel.gather_dtype == "bf16" and is_batch_norm(module)]
    return [*by_themselves(model, [*blocks, *exact]), model]


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalises by running statistics, with weights."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.weight is not None


def by_themselves(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks, innermost first, but for those without parameters or with one that is used outside of them too.

    Such a one is gathered with what stands around it: one parameter cannot be in two parts.
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
    """All modules that are used without entering a block; a part that it shares with others is among them."""
    modules, queue = {module}, [module]
    while queue:
        fresh = {child for child in queue.pop().children() if child is not block} - modules
        modules |= fresh
        queue += fresh
    return modules
