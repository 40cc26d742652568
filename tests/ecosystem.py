"""Unmodified models of `transformers`, tiny, as they are trained: one of every kind that people use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.models import REGISTRY, Case

VOCABULARY = 97
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP = {"intermediate_size": 48}
EXPERTS = {"experts_implementation": "batched_mm"}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
}
Batch = dict[str, Any]


def text(generator: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def padded_text(generator: torch.Generator) -> Batch:
    batch = text(generator)
    batch["attention_mask"][0, 8:] = 0
    batch["labels"][0, 8:] = -100
    return batch


def without_mask(generator: torch.Generator) -> Batch:
    batch = text(generator)
    del batch["attention_mask"]
    return batch


def pairs(generator: torch.Generator) -> Batch:
    return {**padded_text(generator), "labels": torch.randint(3, VOCABULARY, (2, 9), generator=generator)}


def images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(3, 3, 32, 32, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (3,), generator=generator)}


def captions(generator: torch.Generator) -> Batch:
    batch = {**images(generator), "input_ids": torch.randint(3, VOCABULARY, (3, 9), generator=generator)}
    del batch["labels"]
    return {**batch, "return_loss": True}


def sound(generator: torch.Generator) -> Batch:
    features = torch.randn(2, 8, 32, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": torch.randint(3, VOCABULARY, (2, 7), generator=generator)}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # The eps keeps gradients that are zero but for rounding (an attention's key bias) from being scaled up.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def of(kind: str, batch: Callable[[torch.Generator], Batch], checkpointed: bool = False, **config: Any) -> Case:
    """A case of the model class `kind`, its configuration class found from it."""

    def build() -> nn.Module:
        import transformers

        model_class = getattr(transformers, kind)
        model = model_class(model_class.config_class(**config))
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with torch.no_grad():
            for parameter in model.parameters():  # nothing starts at zero, where relative errors mean little
                parameter.add_(0.02 * torch.randn_like(parameter))
        return model.train()

    return Case(build, batch, adamw)


ECOSYSTEM = {
    "llama": of("LlamaForCausalLM", padded_text, **SIZES, **MLP, num_key_value_heads=2),
    "llama_checkpointed": of("LlamaForCausalLM", text, checkpointed=True, **SIZES, **MLP, attention_dropout=0.1),
    "gpt2": of("GPT2LMHeadModel", text, vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "qwen3": of("Qwen3ForCausalLM", text, **SIZES, **MLP, num_key_value_heads=2, head_dim=8),
    "gemma2": of("Gemma2ForCausalLM", text, **SIZES, **MLP, num_key_value_heads=2, head_dim=8, pad_token_id=0),
    "mixtral": of("MixtralForCausalLM", text, **SIZES, **MLP, **EXPERTS, num_key_value_heads=2, num_local_experts=4),
    "mamba": of(
        "MambaForCausalLM",
        without_mask,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
    ),
    "rwkv": of(
        "RwkvForCausalLM",
        without_mask,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        attention_hidden_size=32,
        context_length=32,
        **MLP,
    ),
    "bert": of("BertForMaskedLM", padded_text, **SIZES, **MLP, attn_implementation="eager"),
    "deberta": of(
        "DebertaV2ForMaskedLM",
        padded_text,
        **SIZES,
        **MLP,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    "t5": of(
        "T5ForConditionalGeneration",
        pairs,
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "bart": of("BartForConditionalGeneration", pairs, **SEQ2SEQ, max_position_embeddings=64),
    "whisper": of(
        "WhisperForConditionalGeneration",
        sound,
        **SEQ2SEQ,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "vit": of(
        "ViTForImageClassification",
        images,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        **MLP,
        image_size=32,
        patch_size=8,
        num_labels=3,
        hidden_dropout_prob=0.1,
    ),
    "swin": of(
        "SwinForImageClassification",
        images,
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=3,
    ),
    "resnet": of(
        "ResNetForImageClassification",
        images,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        layer_type="basic",
        num_labels=3,
    ),
    "clip": of(
        "CLIPModel",
        captions,
        text_config={**SIZES, **MLP, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1},
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            **MLP,
            "image_size": 32,
            "patch_size": 8,
        },
        projection_dim=16,
    ),
}
REGISTRY.update(ECOSYSTEM)
