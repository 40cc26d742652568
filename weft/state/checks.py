"""What a model and an optimizer must be to be compiled, checked before anything is changed."""

from __future__ import annotations

import torch
from torch import nn

from weft._torch import parameter_hooks, storage_key


def check_model(model: nn.Module) -> torch.device:
    """The model's device; raises for what cannot be trained."""
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ValueError("the model has no parameters")
    devices = {parameter.device: name for name, parameter in parameters.items()}
    if len(devices) > 1:
        seen = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"the model's parameters are on several devices ({seen}); move it to one before weft.compile")
    device = next(iter(devices))
    if device.type == "meta":
        raise ValueError(
            "the model is on the meta device; this version needs real parameters: build it on its device, or call "
            "model.to_empty(device=...) and initialise it"
        )
    owners: dict[int, str] = {}
    for name, parameter in parameters.items():
        if parameter_hooks(parameter):
            raise ValueError(
                f"{name} has a gradient hook (register_hook or register_post_accumulate_grad_hook), which a compiled "
                "step would not run; remove it, or change the gradient in the loss function or with a module hook"
            )
        if parameter.numel() and storage_key(parameter) in owners:
            raise ValueError(
                f"{owners[storage_key(parameter)]} and {name} share memory without being one parameter; tie them by "
                "assigning the same nn.Parameter to both modules"
            )
        owners[storage_key(parameter)] = name
    return device


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The parameter group of each parameter that the optimizer holds."""
    index = {id(parameter): i for i, (_, parameter) in enumerate(model.named_parameters())}
    group_of: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in index:
                raise ValueError(
                    f"the optimizer's group {number} holds a parameter of shape {list(parameter.shape)} that is not "
                    "one of the model's: construct the optimizer from the parameters of the model that is compiled"
                )
            group_of[index[id(parameter)]] = number
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError("the optimizer has step hooks, which a compiled step would not run; remove them")
    return group_of


def buffer_slots(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Where each buffer hangs: buffers may be rebound, so they are looked up at every step."""
    modules = dict(model.named_modules())
    found = []
    for name, _ in model.named_buffers():
        path, _, attribute = name.rpartition(".")
        found.append((name, modules[path], attribute))
    return found


def dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own strides if it is dense (channels_last stays so), else contiguous ones."""
    expected = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= size
    return parameter.stride()
