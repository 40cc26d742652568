"""The one module that touches PyTorch's private API; everything else imports from here.

Each name says what it stands for and why no public one serves. When a PyTorch release moves something, this file is
where it is mended.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# The public save and load of torch.distributed.checkpoint warn at every call of a single process.
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict as load_flat
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict as save_flat
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

# By packet: a formula over an op's arguments and `out_val`; the public counter counts only what really runs.
from torch.utils.flop_counter import flop_registry as flop_formulas
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "SYMPY_FUNCTIONS",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "WeakIdKeyDictionary",
    "all_gather",
    "default_store",
    "drop_step_hooks",
    "enable_python_dispatcher",
    "fake_mode",
    "flop_formulas",
    "has_step_hooks",
    "load_flat",
    "make_fx",
    "mark_stepped",
    "new_size",
    "op_schema",
    "parameter_hooks",
    "plain_tensor_access",
    "print_size",
    "pytree",
    "reduce_scatter",
    "save_flat",
    "size_hint",
    "storage_key",
    "swap_values",
    "trunc_normal_code",
]

OLDEST, NEWEST = (2, 11), (2, 13)


def check_version() -> None:
    """Raise ImportError unless the installed PyTorch is one that weft is tested with."""
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not OLDEST <= found <= NEWEST:
        raise ImportError(
            f"weft works with PyTorch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, and found "
            f"{torch.__version__}. Install one of these, for instance: pip install torch==2.13.0"
        )


def fake_mode(symbolic: bool = False) -> FakeTensorMode:
    """Fake tensors that accept real ones beside them: constants a model keeps in plain attributes.

    `symbolic`: sizes may be symbols, every one of its own (PyTorch takes sizes that are equal for one symbol otherwise,
    and a batch as long as it is wide would stay so).

    The cache of fake results is shared by all modes and loses that two outputs of an op are one tensor (an LSTM's bias
    gradients), so that a second trace would differ from the first: start from an empty one.
    """
    FakeTensorMode.cache_clear()
    environment = ShapeEnv(duck_shape=False) if symbolic else None
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment, static_shapes=True)


# What the text of a printed size or guard refers to.
SYMPY_FUNCTIONS = SYMPY_INTERP


def new_size(environment: ShapeEnv, value: int, name: str) -> Any:
    """A size that is left open, and that is `value` in the batch at hand."""
    from torch._dynamo.source import ConstantSource  # takes seconds to import, and few steps need it

    source = ConstantSource(name)
    symbol = environment.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symintnode(symbol, hint=value, source=source)


def print_size(expression: Any) -> str:
    """An expression of sizes (or a guard over them) as Python."""
    return PythonPrinter().doprint(expression)


def size_hint(value: Any) -> Any:
    """What an open size (or a number computed from one) is in the batch that was traced; asking adds no guard."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


# Inside this context an op on a Parameter subclass does not go through __torch_function__.
plain_tensor_access = torch._C.DisableTorchFunctionSubclass


def storage_key(tensor: torch.Tensor) -> int:
    """An identity of the tensor's storage, the same for all its views (fake tensors have no data pointer)."""
    return tensor.untyped_storage()._cdata


# Exchanges what two tensor objects stand for; `torch.utils.swap_tensors` exchanges the objects' attributes as well, and
# refuses where there are weak references to them, as an LSTM keeps.
swap_values = torch._C._swap_tensor_impl

# The code of `nn.init.trunc_normal_`, which draws again until all numbers fit: to know its draws when they come.
trunc_normal_code = getattr(torch.nn.init._no_grad_trunc_normal_, "__code__", None)


def parameter_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks on the parameter's gradient are registered."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def op_schema(target: Any) -> torch._C.FunctionSchema | None:
    """The declared signature of an ATen op; None for everything else."""
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def drop_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell LR schedulers that the optimizer has stepped: they warn about the order of calls otherwise."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def default_store() -> dist.Store:
    """The store through which the ranks of this job found each other; they may leave notes in it."""
    return dist.distributed_c10d._get_default_store()


# PyTorch 2.13 renamed the flat collectives and warns about the old names; 2.11 knows only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of equal slices into one flat tensor."""
    return _all_gather(output, shard, group=group, async_op=True)


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start a summing reduce-scatter of one flat tensor into equal slices."""
    return _reduce_scatter(shard, full, group=group, async_op=True)
