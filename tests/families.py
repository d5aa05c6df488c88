"""Families of transformers as tiny nets with random weights: what each takes, and where four stages end."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WORDS, WIDTH, ROWS, LENGTH = 64, 32, 4, 12


class Family(NamedTuple):
    """A net in training, its inputs with labels among them, the calls of modules after which four stages end, and
    whether several stages read one value that has a gradient, such as the output of an encoder."""

    make: Callable[[Any], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    ends: tuple[str, ...]
    skips: bool = False


def words(length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (ROWS, length))


def text() -> dict[str, Tensor]:
    """Rows of both microbatches are padded at their end, where no label counts. Without padding a live net of
    transformers leaves the mask out, which an exported one cannot: the attention's kernel is another one then."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, -3:] = mask[-1, -5:] = 0
    ids = words()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def two_texts() -> dict[str, Tensor]:
    return {**text(), "labels": words(LENGTH - 2)}


def plain_text() -> dict[str, Tensor]:
    ids = words()
    return {"input_ids": ids, "labels": ids}


def images(size: int = 32) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(0, 5, (ROWS,))}


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(ROWS, 8, 32), "labels": words(LENGTH - 2)}


def net(model: str, config: str, **said: Any) -> Callable[[Any], nn.Module]:
    """A model of transformers from its configuration's keywords."""
    return lambda hf: getattr(hf, model)(getattr(hf, config)(**said)).train()


def each(path: str, *numbers: Any) -> tuple[str, ...]:
    return tuple(path.format(number) for number in numbers)


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 64, **LAYERS, **SPECIAL}
BOTH = {"vocab_size": WORDS, "d_model": WIDTH, **SPECIAL}
GPT2 = {"vocab_size": WORDS, "n_positions": 32, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "loss_type": "ForCausalLM"}
T5 = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
WHISPER = {
    **{f"{half}_{what}": 4 for half in ("encoder", "decoder") for what in ("attention_heads",)},
    **{f"{half}_layers": 2 for half in ("encoder", "decoder")},
    **{f"{half}_ffn_dim": 64 for half in ("encoder", "decoder")},
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
    "dropout": 0.1,
}
VIT = {**LAYERS, **DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 5}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": 5, "layer_type": "basic"}
KEYS = {"num_key_value_heads": 2}
MAMBA = {"vocab_size": WORDS, "hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": 4}
ALBERT = "albert.encoder.albert_layer_groups.0"

FAMILIES = {
    "GPT2": Family(net("GPT2LMHeadModel", "GPT2Config", **GPT2, **SPECIAL), text, each("transformer.h.{}", 0, 1, 2)),
    "Llama": Family(net("LlamaForCausalLM", "LlamaConfig", **TEXT, **KEYS), text, each("model.layers.{}", 0, 1, 2)),
    "Bert": Family(net("BertForMaskedLM", "BertConfig", **TEXT), text, each("bert.encoder.layer.{}", 0, 1, 2)),
    "T5": Family(
        net("T5ForConditionalGeneration", "T5Config", **BOTH, **T5),
        two_texts,
        ("encoder.block.0", "encoder.block.1", "decoder.block.0"),
        skips=True,
    ),
    "ViT": Family(net("ViTForImageClassification", "ViTConfig", **VIT), images(16), each("vit.layers.{}", 0, 1, 2)),
    "Whisper": Family(
        net("WhisperForConditionalGeneration", "WhisperConfig", **BOTH, **WHISPER),
        speech,
        ("model.encoder.layers.0", "model.encoder.layers.1", "model.decoder.layers.0"),
        skips=True,
    ),
    "Mixtral": Family(
        net("MixtralForCausalLM", "MixtralConfig", **TEXT, **KEYS, num_local_experts=4),
        text,
        each("model.layers.{}", 0, 1, 2),
    ),
    "Mamba": Family(net("MambaForCausalLM", "MambaConfig", **MAMBA), plain_text, each("backbone.layers.{}", 0, 1, 2)),
    "ALBERT": Family(
        net("AlbertForMaskedLM", "AlbertConfig", **TEXT, **DROPOUT, embedding_size=16), text, (ALBERT, ALBERT, ALBERT)
    ),
    "Swin": Family(
        net("SwinForImageClassification", "SwinConfig", **SWIN, num_labels=5, drop_path_rate=0.1),
        images(),
        ("swin.encoder.layers.0.blocks.0", "swin.encoder.layers.0.blocks.1", "swin.encoder.layers.1.blocks.0"),
    ),
    "ResNet": Family(
        net("ResNetForImageClassification", "ResNetConfig", **RESNET),
        images(),
        each("resnet.encoder.stages.{}", "0.layers.0", "0.layers.1", "1.layers.0"),
    ),
}
