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
    if named == "auto":
        return _repeated(model)
    patterns = [named] if isinstance(named, str) else named
    return _called(model, patterns)


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    candidates = dict(_candidates(model, prefix="", in_list=isinstance(model, nn.Sequential)))
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for block in candidates.values():
        by_class.setdefault(type(block), []).append(block)
    listed: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            listed.update(map(id, module))
    sizes = {}
    for block_class, blocks in by_class.items():
        if len(blocks) > 1 or id(blocks[0]) in listed:
            sizes[block_class] = sum(map(_size, blocks))
    min_size = _SMALL * max(sizes.values(), default=0)
    repeated = {}
    for name, block in candidates.items():
        if type(block) in sizes and sizes[type(block)] >= min_size:
            repeated[name] = block
    return repeated


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _candidates(
    module: nn.Module, *, prefix: str, in_list: bool
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_list = type(child) is nn.Sequential or isinstance(child, _LISTS)
        has_blocks = is_list and any(map(_made_of_parts, child.children()))
        if in_list and _made_of_parts(child) and not has_blocks:
            if not isinstance(child, _LISTS):
                yield path, child
        else:
            is_searched = isinstance(child, (nn.Sequential, *_LISTS))
            yield from _candidates(child, prefix=f"{path}.", in_list=is_searched)


def _made_of_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _called(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    fitting: set[str] = set()
    errors = []
    for pattern in dict.fromkeys(patterns or [""]):
        names = [name for name, module in modules.items() if _fits(pattern, name, module)]
        fitting.update(names)
        if not names:
            errors.append(_nothing_called(model, pattern, modules))
    if errors:
        raise together(errors)
    chosen: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if name not in fitting or any(name.startswith(f"{outer}.") for outer in chosen):
            continue
        if isinstance(module, _LISTS):
            for part, child in module.named_children():
                chosen[f"{name}.{part}"] = child
        else:
            chosen[name] = module
    return chosen


def _fits(pattern: str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


def _nothing_called(model: nn.Module, pattern: str, modules: dict[str, nn.Module]) -> SurefootError:
    class_names = {type(module).__name__ for module in modules.values()}
    meant = nearest(pattern, [*modules, *class_names])
    block_classes = dict.fromkeys(type(block).__name__ for block in _repeated(model).values())
    return ConfigError(
        "no-such-block",
        problem=f"blocks: {type(model).__name__} has no module or module class named {pattern!r}",
        reason=None if meant else f"its repeated blocks: {', '.join(block_classes) or 'none'}",
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
    trained_dtypes: set[str] = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained_dtypes.add(str(parameter.dtype).removeprefix("torch."))
        if parameter.ndim == 0:
            problems.append(
                f"{name} is a scalar without dimensions: use nn.Parameter(torch.ones(1))"
            )
        elif not parameter.is_contiguous():
            problems.append(f"{name} is not contiguous (channels last?): make it contiguous")
        elif parameter.is_complex():
            problems.append(
                f"{name} is complex: store its real and imaginary parts (torch.view_as_real)"
            )
    if len(trained_dtypes) > 1:
        dtypes = ", ".join(sorted(trained_dtypes))
        problems.append(
            f"its trained parameters have several dtypes, {dtypes}: FSDP reduces gradients in one dtype"
        )
    if problems:
        lines = problems
        if len(problems) > 3:
            lines = [*problems[:2], f"and {len(problems) - 2} more like these"]
        raise ConfigError(
            "model-not-shardable",
            problem=f"parallel = fsdp: {type(model).__name__} cannot be sharded",
            reason="\n".join(lines),
            remedy=Setting("parallel", "ddp"),
            setting="parallel",
            value="fsdp",
            count=len(problems),
        )


def fsdp_units(model: nn.Module, parallel: Strategy) -> list[nn.Module]:
    """Return FSDP's units, innermost first: the blocks (`blocks_of`), the batch normalizations that
    stay float32, and the model.
    """
    units = list(blocks_of(model, parallel.blocks or "auto").values())
    if parallel.gather_dtype == "bf16":
        units += filter(is_batch_norm, model.modules())
    return [*separable_blocks(model, units), model]


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module normalizes by running statistics and has weights."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.weight is not None


def separable_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that FSDP can gather separately, innermost first: those with parameters
    that no other module uses.
    """
    chosen = []
    for module in reversed(list(model.modules())):
        if module is model or not any(module is block for block in blocks):
            continue
        parameters = set(module.parameters())
        outside = _modules_outside(model, module)
        is_shared = any(parameters.intersection(other._parameters.values()) for other in outside)
        if parameters and not is_shared:
            chosen.append(module)
    return chosen


def _modules_outside(model: nn.Module, block: nn.Module) -> set[nn.Module]:
    """Return the modules that are reached from the model without passing through the block."""
    modules = {model}
    queue = [model]
    while queue:
        children = {child for child in queue.pop().children() if child is not block}
        queue += children - modules
        modules |= children
    return modules
