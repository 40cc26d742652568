"""`WeftTrainer`: the `transformers.Trainer` with its training steps run by `weft.compile`.

Everything around a step stays the Trainer's own: data, schedulers, callbacks, logging, evaluation, checkpoints. Its
loop computes the loss of one micro-batch at a time and then lets the optimizer step. Here micro-batches are kept until
the last one of a step, and forward, backward, reduction, clipping and update run as one compiled step in its place; the
optimizer's own `step`, which the loop calls after that, then finds no gradients and does nothing.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weft

try:
    import accelerate  # noqa: F401  (the Trainer cannot be constructed without it)
    from transformers import Trainer
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
except ImportError as error:
    raise ImportError(
        f"weft.integrations.transformers needs transformers 5 and accelerate, and the import failed: {error}. Install "
        "them: pip install 'weft[transformers]'"
    ) from error

__all__ = ["WeftTrainer"]

# What the Trainer's own arguments say already, and where.
TAKEN = {
    "model": "WeftTrainer(model=...)",
    "optimizer": "WeftTrainer(optimizers=...) or TrainingArguments(optim=...)",
    "loss": "compute_loss_func=, or a compute_loss method of a subclass",
    "accumulate": "TrainingArguments(gradient_accumulation_steps=...)",
    "clip_norm": "TrainingArguments(max_grad_norm=...)",
}


class WeftTrainer(Trainer):
    """A Trainer whose training steps are compiled; `weft` holds the options of `weft.compile`.

        trainer = WeftTrainer(model=model, args=args, train_dataset=data, weft={"mode": "zero3"})
        trainer.train()

    `trainer.step` is the `weft.Step`. In zero3 the model's parameters are sharded after the first step: use
    `with trainer.step.gathered() as model:` on all ranks to read them, as evaluation and saving here do.

    What differs from the Trainer: gradients are never in `parameter.grad`; `on_pre_optimizer_step` is called when the
    update is done; a step's losses are added up at its last micro-batch; `save_model` must be called on all ranks;
    dropout draws as after `manual_seed(seed + rank)`.
    """

    def __init__(self, *args: Any, weft: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.weft_options = dict(weft or {})
        for name in TAKEN.keys() & self.weft_options.keys():
            raise ValueError(f"weft={{{name!r}: ...}}: this is the Trainer's to say, by {TAKEN[name]}")
        self.step: Any = None
        self._micro_batches: list[Any] = []
        super().__init__(*args, **kwargs)
        self._refuse_what_cannot_be()

    def _refuse_what_cannot_be(self) -> None:
        args = self.args
        refused = {
            "fp16=True": (args.fp16, "fp16 needs loss scaling, which weft does not have: use bf16=True"),
            "deepspeed": (args.deepspeed, "it shards the model itself: leave it out, and use weft={'mode': 'zero3'}"),
            "fsdp": (args.fsdp, "it shards the model itself: leave it out, and use weft={'mode': 'zero3'}"),
            "torch_compile=True": (args.torch_compile, "the step is compiled already: leave it out"),
            "auto_find_batch_size=True": (
                args.auto_find_batch_size,
                "a step that ran out of memory cannot be repeated: set per_device_train_batch_size",
            ),
            "several GPUs in one process": (args.n_gpu > 1, "start one process a GPU with torchrun"),
        }
        for what, (given, advice) in refused.items():
            if given:
                raise ValueError(f"WeftTrainer cannot run with {what}: {advice}")

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Evaluation mode: placed and under autocast as ever, but not wrapped in DistributedDataParallel.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    # ---- the step ----

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        plain = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        if self.step is None or self.step.model is not self.model or self.step.optimizer is not plain:
            self.step = self._compile(plain)
        return optimizer

    def _compile(self, optimizer: torch.optim.Optimizer) -> weft.Step:
        trainer = self

        # A plain function: weft watches the attributes of a bound method's object, and a Trainer's change all the time.
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            inputs, num_items_in_batch, scale = batch
            with trainer.compute_loss_context_manager():
                value = trainer.compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch)
            assert isinstance(value, torch.Tensor)
            return value * scale.to(value.dtype)

        options = {"timeout": self.args.ddp_timeout, **self.weft_options}
        assert self.model is not None
        return weft.compile(
            self.model,
            optimizer,
            loss,
            accumulate=self.args.gradient_accumulation_steps,
            # Without clipping the norm is measured all the same: the Trainer logs it.
            clip_norm=self.args.max_grad_norm or float("inf"),
            **options,
        )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._micro_batches.clear()  # a callback may have ended the epoch in the middle of a step
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep a micro-batch; at the last one of the step, run the step. Returns what its losses add up to."""
        count = self.current_gradient_accumulation_steps
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = scaled or self.compute_loss_func is not None
        # weft takes the mean over micro-batches; losses that are divided by the whole step's items want the sum.
        scale = torch.tensor(float(count if scaled else 1), device=self.args.device)
        self._micro_batches.append((dict(self._prepare_inputs(inputs)), num_items_in_batch, scale))
        if len(self._micro_batches) < count:
            return torch.zeros((), device=self.args.device)
        micro_batches, self._micro_batches = self._micro_batches, []
        model.train()
        batch = micro_batches if self.args.gradient_accumulation_steps > 1 else micro_batches[0]
        return self.step(batch, micro_batches=count)

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self.step.grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        return self.step.grad_norm

    # ---- what reads or writes the whole model ----

    def _whole(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.step is None else self.step.gathered()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        with self._whole():
            super().save_model(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._whole():
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with self._whole():
            super()._load_best_model()

    # ---- checkpoints: the optimizer as the Trainer stores it, so that either can go on from the other's ----

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.step.state_dict()  # on all ranks
        os.makedirs(output_dir, exist_ok=True)
        torch.save(state["random"], self._random_file(output_dir))
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(_as_torch_stores_it(state["optimizer"]), Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._random_file(checkpoint).exists():
            self.step._set_random_state(torch.load(self._random_file(checkpoint), weights_only=True))

    def _random_file(self, folder: str) -> Path:
        """Where a rank's dropout goes on; not there in a checkpoint of another world size or of the plain Trainer."""
        return Path(folder, f"weft_random_{self.args.process_index}_of_{self.args.world_size}.pth")


def _as_torch_stores_it(optimizer: dict[str, Any]) -> dict[str, Any]:
    """`step.state_dict()["optimizer"]` in the format of `torch.optim.Optimizer.state_dict()`: numbers for names."""
    names = [name for group in optimizer["groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    return {
        "state": {number[name]: state for name, state in optimizer["state"].items()},
        "param_groups": [{**group, "params": [number[n] for n in group["params"]]} for group in optimizer["groups"]],
    }
