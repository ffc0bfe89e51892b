"""Kinds of models that users pass: a compiled one is unwrapped, and one that cannot be trained or
saved is refused by name.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor, jit, nn
from torch.nn.parameter import is_lazy

from surefoot.errors import ConfigError, first_line

_PARALLEL = ("torch.nn.parallel.", "torch.distributed.")
_LEGACY_QUANTIZED = ("torch.ao.", "torch.nn.quantized", "torch.nn.qat", "torch.nn.intrinsic")


def refuse_other_than_model(name: str, source: Any) -> NoReturn:
    """Raise `ConfigError` for what is neither a module nor a callable, such as a configuration or
    the name of a model.
    """
    kind = type(source).__name__
    what = f"a {kind}"
    if isinstance(source, str):
        what = f"the text {source!r}"
        reason = "surefoot has no list of models, and downloads nothing"
        remedy = f"pass a function: lambda: timm.create_model({source!r}), or lambda: AutoModel.from_pretrained({source!r})"
    elif isinstance(source, Tensor):
        reason = "weights alone have no forward; a dictionary names several models"
        remedy = "pass the model, and its weights by Run(init_from=FILE) or load_state_dict"
    elif any(base.__module__.startswith("transformers.") for base in type(source).__mro__):
        classes = getattr(source, "architectures", None) or ["AutoModelForCausalLM"]
        maker = f"{classes[0]}.from_config" if classes[0].startswith("Auto") else classes[0]
        reason = "a configuration of transformers does not say which head the model has"
        remedy = f"pass a function that builds the model: lambda: {maker}(config)"
    else:
        reason = "a model is an nn.Module, or a function that returns one"
        remedy = "pass an nn.Module, or lambda: MyNet(...)"
    raise ConfigError(
        "not-a-model",
        problem=f"model: {name!r} is {what}",
        reason=reason,
        remedy=remedy,
        setting="model",
        value=kind,
        model=name,
    )


def needs_arguments(build: Callable[..., Any], problem: TypeError) -> ConfigError:
    """Return the error of a class or function that cannot be called without arguments."""
    called = getattr(build, "__name__", type(build).__name__)
    return ConfigError(
        "model-needs-arguments",
        problem=f"model: {called} cannot be called without arguments: {first_line(problem)}",
        remedy=f"pass a function that supplies those of the model: lambda: {called}(...)",
        setting="model",
        value=called,
    )


def takes_no_settings(
    build: Callable[..., Any], settings: Mapping[str, Any], problem: TypeError
) -> ConfigError:
    """Return the error of a class or function that cannot be called with `model_settings`."""
    called = getattr(build, "__name__", type(build).__name__)
    return ConfigError(
        "model-settings-not-taken",
        problem=f"model: {called} cannot be called with the keywords {', '.join(settings)}:"
        f" {first_line(problem)}",
        remedy="let the factory of the model take the keywords of model_settings",
        setting="model_settings",
        value=dict(settings),
    )


def are_built_by_functions(model: Any) -> bool:
    """Return True if functions build the model or models of a run, so that it can be built again."""
    sources = model.values() if isinstance(model, Mapping) else [model]
    return not any(isinstance(source, nn.Module) for source in sources)


def uncompiled(model: nn.Module) -> tuple[nn.Module, bool]:
    """Return a model without the wrappers of `torch.compile`, and True if it had any. Wrapped
    submodules are replaced in the model.

    These wrappers put `_orig_mod.` into the names of weights.

    >>> import torch
    >>> layer = nn.Linear(1, 1)
    >>> uncompiled(layer) == (layer, False)
    True
    """
    if "torch._dynamo" not in sys.modules:
        return model, False
    from torch._dynamo.eval_frame import OptimizedModule

    wrapped = [each for each in model.modules() if isinstance(each, OptimizedModule)]
    while isinstance(model, OptimizedModule):
        model = model._orig_mod
    for parent in list(model.modules()) if wrapped else ():
        for key, child in parent._modules.items():
            inner = child
            while isinstance(inner, OptimizedModule):
                inner = inner._orig_mod
            parent._modules[key] = inner
    return model, bool(wrapped)


def refuse_kind(name: str, model: nn.Module, *, on_meta: bool) -> None:
    """Raise `ConfigError` for a model whose state a checkpoint cannot hold, or whose wrapper would
    compete with the run.
    """
    tensors: Mapping[str, Tensor] = {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
    }
    empty = [key for key, each in tensors.items() if each.is_meta]
    inferred = [key for key, each in tensors.items() if not is_lazy(each) and each.is_inference()]
    for part_name, part in model.named_modules():
        where = f"{name}.{part_name}" if part_name else name
        module = type(part).__module__
        if isinstance(part, jit.ScriptModule):
            raise ConfigError(
                "model-of-torchscript",
                problem=f"model: {where} is a {type(part).__name__} of TorchScript",
                reason="its hidden state and its source code cannot be checked at a resume",
                remedy="pass the module that was scripted or traced",
                module=where,
            )
        if module.startswith(_PARALLEL) and not part_name:
            raise ConfigError(
                "model-wrapped-for-ranks",
                problem=f"model: {name} is wrapped by {type(part).__name__}",
                reason="the run itself shares steps among processes, and weights would be named"
                " module.*",
                remedy="pass the module inside: model.module, and choose Run(parallel=...)",
                module=where,
            )
        if module.startswith(_LEGACY_QUANTIZED):
            raise ConfigError(
                "model-of-legacy-quantization",
                problem=f"model: {where} is a {type(part).__name__} of torch.ao.quantization",
                reason="its packed weights and observers are not tensors of fixed shape, so a"
                " checkpoint cannot restore them",
                remedy="quantize with torchao: torchao.quantization.quantize_(model,"
                " Int8WeightOnlyConfig()), and train adapters or a head",
                module=where,
            )
    lazy = [key for key, each in tensors.items() if is_lazy(each)]
    if lazy:
        raise ConfigError(
            "model-without-shapes",
            problem=f"model: {lazy[0]} of {name!r} has no shape yet (a lazy module)",
            reason="no optimizer can train it",
            remedy="pass one batch through the model before you return it",
            tensor=lazy[0],
        )
    if empty and not on_meta:
        raise ConfigError(
            "model-on-meta-device",
            problem=f"model: {empty[0]} of {name!r} is on the meta device, so it has no values",
            reason="the run would train uninitialized memory",
            remedy="build the model outside torch.device('meta'), or pass its class or a function",
            tensor=empty[0],
        )
    if inferred:
        raise ConfigError(
            "model-of-inference-mode",
            problem=f"model: {inferred[0]} of {name!r} was built in torch.inference_mode()",
            reason="autograd cannot train or read such a tensor",
            remedy="build the model outside torch.inference_mode(), or pass its class or a function",
            tensor=inferred[0],
        )


def described_adapters(models: Mapping[str, nn.Module]) -> dict[str, str | bytes]:
    """Return files that describe the adapters of peft models, from which
    `surefoot export --layout peft` writes them.
    """
    if "peft" not in sys.modules:
        return {}
    from surefoot.checkpoint.peft_adapter import adapter_files

    return adapter_files(models)
