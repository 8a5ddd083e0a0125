"""The network as trained against transformers' own, in float32."""

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from training.chat import encode_chat
from training.export import model_config
from training.network import Network, NetworkConfig, window_plan
from training.sample import Turn
from training.train import TOKENIZER


def test_it_equals_transformers_on_two_pictures_with_partial_windows() -> None:
    torch.manual_seed(1)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    config = NetworkConfig(vocab_size=tokenizer.get_vocab_size(), vision_depth=3, fullatt_block_indexes=(1,))
    network = Network(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    layout = model_config(config, tokenizer) | {"torch_dtype": "float32"}
    twin = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**layout)).eval()
    names = {
        name: name.replace("visual.", "model.visual.") if name.startswith("visual.") else f"model.language_{name}"
        for name in network.state_dict()
    }
    missing, unexpected = twin.load_state_dict(
        {names[name]: tensor for name, tensor in network.state_dict().items()}, strict=False
    )
    assert missing == ["lm_head.weight"]
    assert not unexpected

    pictures = [
        np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
        for seed, shape in enumerate(((140, 196, 3), (252, 112, 3)))
    ]
    grids = [(5, 7), (9, 4)]
    processor = Qwen2VLImageProcessorPil(min_pixels=112 * 112, max_pixels=448 * 448)
    vision = processor(images=pictures, return_tensors="pt")
    turn = Turn(question="What is this?", answer="It is red.", expected=("red",), category="colour")
    chat = encode_chat(tokenizer, [turn, turn], grids)
    token_ids = torch.from_numpy(chat.token_ids)[None]
    is_image = token_ids == tokenizer.token_to_id("<|image_pad|>")
    with torch.no_grad():
        expected_positions, _ = twin.model.get_rope_index(
            token_ids, mm_token_type_ids=is_image.long(), image_grid_thw=vision["image_grid_thw"]
        )
        expected = twin(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            mm_token_type_ids=is_image.long(),
            **vision,
        ).logits
        hidden = network(
            [torch.from_numpy(picture)[None] for picture in pictures],
            token_ids,
            torch.from_numpy(chat.positions)[:, None],
            is_image[0].nonzero()[:, 0],
        )
    assert torch.equal(expected_positions[:, 0], torch.from_numpy(chat.positions))
    torch.testing.assert_close(network.logits(hidden), expected, atol=1e-5, rtol=1e-4)


def test_window_plan_holds_every_unit_once() -> None:
    plan = window_plan(9, 6, 4, 64, torch.device("cpu"))
    assert sorted(plan.unit_order.tolist()) == list(range(54))
    assert plan.groups == ((2, 64), (2, 32), (1, 16), (1, 8))
    assert torch.equal(plan.unit_order[plan.place_of_unit], torch.arange(54))
