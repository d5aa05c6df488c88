"""Families of transformers as tiny nets with random weights, their inputs, and the ends of four stages."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, ROWS, LENGTH = 64, 32, 4, 12
IMAGE = 63
"""The token id that Blip2 replaces by image features."""


class Rounding(NamedTuple):
    """The gradients that differ in the last bits: the prefix of their names, and the reason."""

    path: str
    reason: str


class Family(NamedTuple):
    """A net in training, its inputs with labels among them, and the calls of modules after which four stages end.

    Attributes:
        rounds: the gradients that equal the net's but for rounding, besides those of tied parameters.
        target, loss: for a net that computes no loss itself.
    """

    make: Callable[[Any], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    ends: tuple[str, ...]
    rounds: Rounding | None = None
    target: Callable[[], Tensor | None] = lambda: None
    loss: Callable[[Any, Tensor], Tensor] | None = None

    def batch(self) -> tuple[dict[str, Tensor], Tensor | None]:
        return self.inputs(), self.target()


def token_ids(length: int = LENGTH) -> Tensor:
    return torch.randint(3, IMAGE, (ROWS, length))


def text() -> dict[str, Tensor]:
    """Return token ids, labels and a mask that pads the ends of rows in both microbatches.

    Without padding a live net of transformers leaves the mask out, which an exported one cannot: its attention would
    use another kernel.
    """
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, -3:] = mask[-1, -5:] = 0
    ids = token_ids()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def two_texts() -> dict[str, Tensor]:
    return {**text(), "labels": token_ids(LENGTH - 2)}


def plain_text() -> dict[str, Tensor]:
    ids = token_ids()
    return {"input_ids": ids, "labels": ids}


def images(size: int = 32) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(0, 5, (ROWS,))}


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(ROWS, 8, 32), "labels": token_ids(LENGTH - 2)}


def captions() -> dict[str, Tensor]:
    """Return images, and texts whose first four tokens stand for image features."""
    text_inputs = text()
    ids, labels = text_inputs["input_ids"], text_inputs["labels"]
    ids[:, :4], labels[:, :4] = IMAGE, -100
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16), **text_inputs}


def pairs() -> dict[str, Tensor]:
    """Return images, and texts that end in the end-of-sequence token."""
    ids = torch.cat([token_ids(LENGTH - 1), torch.full((ROWS, 1), SPECIAL["eos_token_id"])], 1)
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16), "input_ids": ids}


def contrastive_loss(output: Any, _: Tensor) -> Tensor:
    """Return CLIP's loss, which matches each text with the image of its row.

    The loss in transformers reads the number of rows, which an export would fix.
    """
    scores = output.logits_per_text
    row_indices = torch.arange(scores.shape[0])
    return (F.cross_entropy(scores, row_indices) + F.cross_entropy(scores.T, row_indices)) / 2


def sounds() -> dict[str, Tensor]:
    return {"input_values": torch.randn(ROWS, 128), "labels": torch.randint(0, 5, (ROWS,))}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(0, 5, (ROWS, 32, 32))}


def points() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "input_points": 32 * torch.rand(ROWS, 1, 2, 2)}


def masks() -> Tensor:
    return torch.randint(0, 2, (ROWS, 1, 3, 16, 16)).float()


def mask_loss(output: Any, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output.pred_masks, target) + output.iou_scores.square().mean()


def net_maker(model: str, config: str, **options: Any) -> Callable[[Any], nn.Module]:
    """Return a function that makes a model of transformers from its configuration's keywords."""
    return lambda hf: getattr(hf, model)(getattr(hf, config)(**options)).train()


def paths(path: str, *numbers: Any) -> tuple[str, ...]:
    return tuple(path.format(number) for number in numbers)


def encoder_and_decoder(**options: Any) -> dict[str, Any]:
    """Repeat each option for the encoder and the decoder."""
    return {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in options.items()}


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
ATTENTION = {"attention_dropout": 0.1}
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **LAYERS, **SPECIAL}
ATTENTIVE = {**TEXT, **ATTENTION}
DECODER = {**ATTENTIVE, "num_key_value_heads": 2}
ENCODER_DECODER = {"vocab_size": VOCABULARY, "d_model": WIDTH, **SPECIAL}
TWO_BY_TWO = encoder_and_decoder(attention_heads=4, layers=2, ffn_dim=64)
GPT = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, **SPECIAL}
GPTJ = {**GPT, "rotary_dim": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 4, "n_head": 4, **SPECIAL, **ATTENTION}
OPT = {**ATTENTIVE, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}
T5 = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {**ENCODER_DECODER, **TWO_BY_TWO, **ATTENTION, "max_position_embeddings": 64, "decoder_start_token_id": 2}
WHISPER = {
    **TWO_BY_TWO,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
    "dropout": 0.1,
}
VIT = {**LAYERS, **DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 5}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": 5, "layer_type": "basic"}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {**DECODER, **LATENT, **EXPERTS, "num_key_value_heads": 4, "first_k_dense_replace": 1}
SPREAD = {"initializer_range": 0.02}
TWO_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
SAM = {
    "vision_config": {
        **TWO_LAYERS,
        **ATTENTION,
        "hidden_size": 16,
        "output_channels": 16,
        "image_size": 32,
        "patch_size": 8,
        "mlp_dim": 32,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 8,
        **SPREAD,
    },
    "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
    "mask_decoder_config": {**TWO_LAYERS, "hidden_size": 16, "mlp_dim": 32, "iou_head_hidden_dim": 16},
    "attn_implementation": "eager",  # the other one drops nothing out
}
BLIP2 = {
    "vision_config": {**LAYERS, **ATTENTION, **TWO_LAYERS, **SPREAD, "image_size": 16, "patch_size": 4},
    "qformer_config": {**LAYERS, **DROPOUT, **TWO_LAYERS, "vocab_size": VOCABULARY},
    "text_config": {"model_type": "opt", **OPT, **TWO_LAYERS},
    "num_query_tokens": 4,
    "image_token_index": IMAGE,
}
CLIP = {
    "text_config": {**ATTENTIVE, **TWO_LAYERS},
    "vision_config": {**LAYERS, **ATTENTION, **TWO_LAYERS, "image_size": 16, "patch_size": 4},
    "projection_dim": 16,
}
WAV2VEC2 = {
    **LAYERS,
    **ATTENTION,
    "hidden_dropout": 0.1,
    "conv_dim": [16, 16],
    "conv_kernel": [4, 4],
    "conv_stride": [2, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,  # draws from numpy's generator
    "layerdrop": 0.0,  # branches on a random number
}
SEGFORMER = {
    **DROPOUT,
    "num_encoder_blocks": 2,
    "depths": [2, 2],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
}
HYBRID = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "num_experts": 2,
    "mamba_d_state": 4,
    "mamba_d_conv": 2,
    "mamba_dt_rank": 4,
}
ALBERT = "albert.encoder.albert_layer_groups.0"
BLOCKS = paths("transformer.h.{}", 0, 1, 2)
DECODED = paths("model.layers.{}", 0, 1, 2)
CODED = ("model.encoder.layers.0", "model.encoder.layers.1", "model.decoder.layers.0")
READ_TWICE = Rounding("model.encoder.", "what is before the output of `model.encoder`, which two stages read")
MASKED = Rounding("", "all: exported, its attention adds a mask of ones to its bias (`aten.add`) before the softmax")


def causal(name: str, ends: tuple[str, ...] = DECODED, rounds: Rounding | None = None, **options: Any) -> Family:
    """Return a family of nets that predict the next token."""
    return Family(net_maker(f"{name}ForCausalLM", f"{name}Config", **options), text, ends, rounds)


FAMILIES = {
    "GPT2": Family(net_maker("GPT2LMHeadModel", "GPT2Config", **GPT, loss_type="ForCausalLM"), text, BLOCKS),
    "GPT-J": causal("GPTJ", BLOCKS, **GPTJ),
    "Bloom": causal("Bloom", BLOCKS, **BLOOM, hidden_dropout=0.1),
    "Falcon": causal("Falcon", BLOCKS, **ATTENTIVE, hidden_dropout=0.1),
    "Llama": causal("Llama", **DECODER),
    "Mistral": causal("Mistral", **DECODER, sliding_window=4),
    "Qwen2": causal("Qwen2", **DECODER, tie_word_embeddings=True),
    "GLM": causal("Glm", **DECODER, head_dim=8),
    "Cohere": causal("Cohere", **DECODER),
    "DeepSeek-V2": causal("DeepseekV2", **DEEPSEEK),
    "DeepSeek-V3": causal("DeepseekV3", **DEEPSEEK, n_group=2, topk_group=1),
    "Mixtral": causal("Mixtral", **DECODER, num_local_experts=4, output_router_logits=True),
    "OPT": causal("OPT", paths("model.decoder.layers.{}", 0, 1, 2), **OPT),
    "Mamba": Family(
        net_maker("MambaForCausalLM", "MambaConfig", **MAMBA), plain_text, paths("backbone.layers.{}", 0, 1, 2)
    ),
    "Jamba": causal("Jamba", **DECODER, **HYBRID),
    "Bert": Family(net_maker("BertForMaskedLM", "BertConfig", **TEXT), text, paths("bert.encoder.layer.{}", 0, 1, 2)),
    "ALBERT": Family(
        net_maker("AlbertForMaskedLM", "AlbertConfig", **TEXT, **DROPOUT, embedding_size=16),
        text,
        (ALBERT, ALBERT, ALBERT),
    ),
    "T5": Family(
        net_maker("T5ForConditionalGeneration", "T5Config", **ENCODER_DECODER, **T5),
        two_texts,
        ("encoder.block.0", "encoder.block.1", "decoder.block.0"),
    ),
    "BART": Family(net_maker("BartForConditionalGeneration", "BartConfig", **BART), two_texts, CODED, READ_TWICE),
    "Marian": Family(
        net_maker("MarianMTModel", "MarianConfig", **BART, forced_eos_token_id=2), two_texts, CODED, READ_TWICE
    ),
    "Whisper": Family(
        net_maker("WhisperForConditionalGeneration", "WhisperConfig", **ENCODER_DECODER, **WHISPER), speech, CODED
    ),
    "Wav2Vec2": Family(
        net_maker("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **WAV2VEC2, num_labels=5),
        sounds,
        paths("wav2vec2.encoder.layers.{}", 0, 1, 2),
    ),
    "CLIP": Family(
        net_maker("CLIPModel", "CLIPConfig", **CLIP),
        pairs,
        ("vision_model.encoder.layers.0", "vision_model.encoder.layers.1", "text_model.encoder.layers.0"),
        target=lambda: torch.zeros(ROWS),
        loss=contrastive_loss,
    ),
    "Blip2": Family(
        net_maker("Blip2ForConditionalGeneration", "Blip2Config", **BLIP2),
        captions,
        ("vision_model.encoder.layers.0", "vision_model.encoder.layers.1", "language_model.model.decoder.layers.0"),
    ),
    "SAM": Family(
        net_maker("SamModel", "SamConfig", **SAM),
        points,
        ("vision_encoder.layers.0", "vision_encoder.layers.1", "mask_decoder.transformer.layers.0"),
        target=masks,
        loss=mask_loss,
    ),
    "ViT": Family(
        net_maker("ViTForImageClassification", "ViTConfig", **VIT), images(16), paths("vit.layers.{}", 0, 1, 2)
    ),
    "BEiT": Family(
        net_maker(
            "BeitForImageClassification", "BeitConfig", **VIT, use_relative_position_bias=True, drop_path_rate=0.1
        ),
        images(16),
        paths("beit.layers.{}", 0, 1, 2),
        MASKED,
    ),
    "Segformer": Family(
        net_maker("SegformerForSemanticSegmentation", "SegformerConfig", **SEGFORMER, num_labels=5, drop_path_rate=0.1),
        pixels,
        ("segformer.stages.0", "segformer.stages.1", "decode_head.linear_projections.0"),
    ),
    "Swin": Family(
        net_maker("SwinForImageClassification", "SwinConfig", **SWIN, num_labels=5, drop_path_rate=0.1),
        images(),
        ("swin.encoder.layers.0.blocks.0", "swin.encoder.layers.0.blocks.1", "swin.encoder.layers.1.blocks.0"),
    ),
    "ResNet": Family(
        net_maker("ResNetForImageClassification", "ResNetConfig", **RESNET),
        images(),
        paths("resnet.encoder.stages.{}", "0.layers.0", "0.layers.1", "1.layers.0"),
    ),
}
