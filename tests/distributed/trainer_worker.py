"""What test_integrations.py runs under torchrun: the plain Trainer and WeftTrainer over the same data, side by side.

Writes what both logged and where both ended to a file, for the tests to compare.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from weft.integrations.transformers import WeftTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    vocabulary = {"[PAD]": 0, **{f"t{index}": index for index in range(1, 64)}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary)), pad_token="[PAD]")


def bert(dropout: float = 0.0) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0, max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config).double()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    )


def sentences(count: int, *, causal: bool, seed: int) -> list[dict[str, Any]]:
    """Sequences of several lengths; a causal model's labels leave some tokens out, so that batches count unlike."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        length = 8 if causal else int(torch.randint(4, 12, (), generator=generator))
        ids = torch.randint(1, 64, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < 0.3, -100, ids).tolist() if causal else index % 3
        found.append({"input_ids": ids.tolist(), "attention_mask": [1] * length, "labels": labels})
    return found


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train(kind: type[Trainer], folder: Path, *, mode: str = "", resume: Path | None = None, **changes: Any) -> Any:
    causal, early, pad = changes.pop("causal", False), changes.pop("early", False), changes.pop("pad", None)
    dropout, others = changes.pop("dropout", 0.0), changes.pop("others", {})
    arguments = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "save_total_limit": 2,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "seed": 5,
        **changes,
    }
    trainer = kind(
        model=llama() if causal else bert(dropout),
        args=TrainingArguments(str(folder), **arguments),
        train_dataset=sentences(43, causal=causal, seed=1),
        eval_dataset=sentences(11, causal=causal, seed=2),
        data_collator=None if causal else DataCollatorWithPadding(tokenizer(), pad_to_multiple_of=pad),
        compute_metrics=None if causal else accuracy,
        callbacks=[EarlyStoppingCallback(1, early_stopping_threshold=10.0)] if early else None,
        **({"weft": {"mode": mode}} if mode else {}),
        **others,
    )
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    predicted = trainer.predict(sentences(7, causal=causal, seed=3)).predictions
    if mode:
        with trainer.step.gathered() as model:
            parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    else:
        parameters = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return {
        "logs": [{k: v for k, v in log.items() if "runtime" not in k and "second" not in k and "time" not in k}
                 for log in trainer.state.log_history],
        "parameters": parameters,
        "predicted": torch.as_tensor(predicted),
        "checkpoints": sorted(path.name for path in folder.glob("checkpoint-*")),
    }  # fmt: skip


def main() -> None:
    out, modes = Path(sys.argv[1]), sys.argv[2].split(",")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    found["plain"] = train(Trainer, out / "plain", **best)
    # SGD: Adam makes whole steps of gradients that are nothing but rounding.
    causal = {"causal": True, "gradient_accumulation_steps": 3, "optim": "sgd", "learning_rate": 0.1}
    found["causal plain"] = train(Trainer, out / "causal", **causal)
    # One shape of batch, for speed: what varies is tried above.
    found["early plain"] = train(Trainer, out / "early", early=True, pad=16, **best)
    for mode in modes:
        found[mode] = train(WeftTrainer, out / mode, mode=mode, **best)
        found[f"causal {mode}"] = train(WeftTrainer, out / f"causal-{mode}", mode=mode, **causal)
    mode = modes[-1]
    found["early"] = train(WeftTrainer, out / "early-weft", mode=mode, early=True, pad=16, **best)
    # Without the best model at the end, so that where a run ends is where its last step left it.
    found["whole"] = train(WeftTrainer, out / "whole", mode=mode, pad=16, save_total_limit=None)
    checkpoint = out / "whole" / "checkpoint-2"
    found["resumed"] = train(WeftTrainer, out / "resumed", mode=mode, pad=16, resume=checkpoint)
    found["resumed plain"] = train(Trainer, out / "resumed-plain", pad=16, resume=checkpoint)
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(found, out / "found.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
