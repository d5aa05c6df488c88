"""Models of images and text: `from_module` cuts the decoder, and the vision tower, which looks at data, is one op."""

import inspect
from typing import Any

import pytest
import torch

import fpipe
from property_tests.bits import is_same_gradient

hf = pytest.importorskip("transformers")

WIDTH, PATCH, IMAGE, START, END, VIDEO = 32, 4, 190, 191, 192, 193
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "rope_parameters": ROPE,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VISION: dict[str, Any] = {"depth": 2, "hidden_size": WIDTH, "num_heads": 2, "patch_size": PATCH, "in_channels": 3}
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": ({}, {"embed_dim": WIDTH, "mlp_ratio": 2}),
    "Qwen2_5_VL": ({}, {"intermediate_size": 64, "out_hidden_size": WIDTH, "window_size": 16}),
    "Qwen3VL": (
        {"head_dim": 16},
        {"intermediate_size": 64, "out_hidden_size": WIDTH, "num_position_embeddings": 16}
        | {"deepstack_visual_indexes": [0]},
    ),
}


def make_net(family: str) -> Any:
    text_options, tower_options = TOWERS[family]
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    configs = {"text_config": TEXT | text_options, "vision_config": VISION | tower_options}
    return getattr(hf, f"{family}ForConditionalGeneration")(
        getattr(hf, f"{family}Config")(**configs, **tokens, vision_end_token_id=END)
    )


def make_microbatch(net: Any) -> dict[str, Any]:
    """Return two rows of text, each with an image of 4 x 4 patches, which are 4 tokens."""
    ids = torch.randint(2, 180, (2, 12))
    ids[:, 2], ids[:, 3:7], ids[:, 7] = START, IMAGE, END
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int()}
    image_sizes = torch.tensor([[1, 4, 4]] * 2)
    position_args = text | {"image_grid_thw": image_sizes}
    known = inspect.signature(net.model.get_rope_index).parameters
    positions = net.model.get_rope_index(**{name: x for name, x in position_args.items() if name in known})[0]
    pixels = torch.randn(2 * 16, 3 * 2 * PATCH * PATCH)
    # Without position_ids the model's own forward would look at data, and all of it would be one op.
    batch = position_args | {"pixel_values": pixels, "position_ids": positions, "labels": ids.clone()}
    return {name: x for name, x in batch.items() if name in inspect.signature(net.forward).parameters}


@pytest.mark.filterwarnings(
    "ignore:The Python of 'model.visual' looks at data",
    "ignore:the net fixes the 2 rows",
    "ignore:a stage runs under autograd",
    "ignore:.* holds -100",
)
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.deep] * (family != "Qwen2_5_VL")) for family in TOWERS]
)
def test_a_vision_language_model_is_cut_in_its_decoder(family: str) -> None:
    """Used to end in an error, since the decoder appends to a list that the vision tower had returned."""
    torch.manual_seed(0)
    net = make_net(family)
    microbatches = [make_microbatch(net) for _ in range(2)]
    model, params, _ = fpipe.from_module(net, 2, batch=microbatches[0])
    assert "model.language_model.layers.1" in model.stages[1].name
    program = fpipe.chain(fpipe.split(2, presplit=True), fpipe.split_backward(), fpipe.merge(outputs=False))
    step = fpipe.build(program(fpipe.program(model)), model)
    results = [step(params, [(microbatch, None) for microbatch in microbatches]) for _ in range(2)]
    for microbatch in microbatches:
        (net(**microbatch).loss / 2).backward()
    for grads in (fpipe.join_params(model, result.grads) for result in results):
        assert all(is_same_gradient(grads.get(name), param.grad) for name, param in net.named_parameters())
