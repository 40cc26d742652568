"""What a model and an optimizer must be to be compiled, checked before anything is changed."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from weft._torch import has_step_hooks, parameter_hooks, plain_tensor_access, storage_key


def check_model(model: nn.Module) -> torch.device:
    """The model's device; raises for what cannot be trained."""
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ValueError("the model has no parameters")
    device = device_of(model)
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


def device_of(model: nn.Module) -> torch.device:
    """Where the model is or, as far as it is on the meta device, will be."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    real = {tensor.device: name for name, tensor in model.named_parameters() if not tensor.is_meta}
    if len(real) > 1:
        seen = ", ".join(f"{name} on {device}" for device, name in real.items())
        raise ValueError(f"the model's parameters are on several devices ({seen}); move it to one before weft.compile")
    real = real or {tensor.device: name for name, tensor in tensors if not tensor.is_meta}
    return next(iter(real)) if len(real) == 1 else default_device()


def default_device() -> torch.device:
    """This process's GPU (torchrun's local rank, unless the script chose one), or the CPU where there is none."""
    if not torch.cuda.is_available() or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return torch.device("cpu")
    index = torch.cuda.current_device() or int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    return torch.device("cuda", index)


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
    filled = [key for state in optimizer.state.values() for key, v in state.items() if getattr(v, "is_meta", False)]
    if filled:
        raise ValueError(
            f"{type(optimizer).__name__} holds {filled[0]!r} of parameters on the meta device, which has no values: "
            "use an optimizer that creates its state in the first step (AdamW, SGD, RMSprop), or build the model on a "
            "real device"
        )
    if has_step_hooks(optimizer):
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


class ModelTree:
    """What a compiled step relies on: the same modules, parameters and groups as at compile, in the same memory."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.children = [
            (f"{path}.{name}" if path else name, parent, name, child)
            for path, parent in model.named_modules()
            for name, child in parent._modules.items()
        ]
        self.parameters = [
            (f"{path}.{name}" if path else name, module, name, parameter, parameter.requires_grad)
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.kinds = [(p.dtype, p.device, tuple(p.shape)) for _, _, _, p, _ in self.parameters]
        self.optimizer = optimizer
        self.groups = self._group_ids()
        self.pointers: list[int] = []

    def _group_ids(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]

    def check(self) -> None:
        for path, parent, name, child in self.children:
            if parent._modules.get(name) is not child:
                raise RuntimeError(f"the module {path} was replaced after weft.compile; call weft.compile again")
        with plain_tensor_access():
            for path, module, name, parameter, trained in self.parameters:
                if module._parameters.get(name) is not parameter:
                    raise RuntimeError(
                        f"the parameter {path} was replaced after weft.compile (an assignment, or load_state_dict with "
                        "assign=True), and the step holds the old one: copy values into it with parameter.copy_(...) "
                        "or load_state_dict, or call weft.compile again"
                    )
                if parameter.requires_grad != trained:
                    raise RuntimeError(
                        f"requires_grad of {path} was {trained} when weft.compile was called and is "
                        f"{parameter.requires_grad} now; buckets are laid out for the former. Call weft.compile again"
                    )
        if self._group_ids() != self.groups:
            raise RuntimeError(
                "the optimizer's parameter groups hold other parameters than when weft.compile was called "
                "(add_param_group?); call weft.compile again"
            )

    def remember_memory(self) -> None:
        with plain_tensor_access():
            self.pointers = [parameter.data_ptr() for _, _, _, parameter, _ in self.parameters]

    def check_memory(self) -> None:
        """Parameters are where weft put them; before that, of the kind that was compiled."""
        with plain_tensor_access():
            for index, (path, _, _, parameter, _) in enumerate(self.parameters):
                moved = (
                    parameter.data_ptr() != self.pointers[index]
                    if self.pointers
                    else (parameter.dtype, parameter.device, tuple(parameter.shape)) != self.kinds[index]
                )
                if moved:
                    raise RuntimeError(
                        f"the parameter {path} was given other memory after weft.compile (model.to(...), or an "
                        "assignment to .data): weft would train the old one. Move or cast the model before "
                        "weft.compile, and copy values with parameter.copy_(...) or load_state_dict"
                    )
