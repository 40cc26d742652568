"""Train a small causal language model with the `transformers.Trainer`, its steps compiled by weft.

    torchrun --nproc-per-node 2 examples/trainer.py --mode zero3

The two lines with `weft` in them are what differs from a script for the plain Trainer.
"""

from __future__ import annotations

import argparse

import torch
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, TrainingArguments

from weft.integrations.transformers import WeftTrainer


def counting(samples: int, seed: int, vocabulary: int = 64, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up by a step of their own, so that nothing has to be downloaded."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, vocabulary, (samples, 1), generator=generator)
    stride = torch.randint(1, 5, (samples, 1), generator=generator)
    rows = (start + stride * torch.arange(length)) % vocabulary
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="out/trainer")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    trainer = WeftTrainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            args.out,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            max_steps=args.steps,
            logging_steps=20,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            save_total_limit=1,
            load_best_model_at_end=True,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=counting(2000, seed=0),
        eval_dataset=counting(64, seed=1),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        weft={"mode": args.mode},
    )
    trainer.train()
    trainer.save_model()
    with trainer.step.gathered() as model, torch.no_grad():  # the whole model, on every rank
        prompt = torch.tensor([[3, 6, 9, 12, 15, 18]], device=trainer.args.device)
        counted = model.eval().generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    if trainer.is_world_process_zero():
        print(f"3, 6, 9, ... goes on as {counted[0, 6:].tolist()}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
