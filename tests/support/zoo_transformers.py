"""Models of the transformers library, tiny and from random weights: nothing is downloaded.

Each is there twice, plain and with gradient checkpointing. What each is for:

| case | what is special |
|---|---|
| llama | grouped queries, rotary embeddings, a gated MLP |
| gpt2 | tied head, packed projections with transposed weights |
| bert | tied head, and a bias under two names |
| t5 | one embedding in four places, relative positions shared between layers |
| mixtral | a router; experts in stacked weights, of which some get no token, one after the other |
| mixtral-grouped | the same in one kernel |
| mamba | a scan in Python, a convolution, a tied head, parameters that are no matrices |
| vit | a class token, positions, a convolution over patches |
| whisper | two towers, convolutions in front, a tied head, frozen positions |
| wav2vec2 | weight norm on a convolution, group norm, a CTC loss |
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from cases import random
from torch import nn
from zoo import FLOAT32, FLOAT64, Case

transformers: Any = importlib.import_module("transformers")  # an optional dependency

VOCABULARY, WIDTH = 50, 16


def made(model_class: Any, settings: dict[str, Any], recomputes: bool) -> nn.Module:
    model = model_class(model_class.config_class(**settings))
    if recomputes:
        renamed = getattr(model, "activation_checkpointing_enable", None)  # in 5.23 or before
        (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


def ids(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=generator)  # the first are special


def text(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Inputs that are their own labels, of different lengths: the mask hides the rest."""
    inputs = ids(1000 * step + 10 * rank, 2, 8)
    mask = torch.ones_like(inputs)
    mask[1, 6:] = 0
    return {
        "input_ids": inputs,
        "attention_mask": mask,
        "labels": inputs.masked_fill(mask == 0, -100),
    }


def same_text(step: int, rank: int) -> dict[str, torch.Tensor]:
    """For a model that chooses weights by its data: ranks must choose alike."""
    return text(step, 0)


def pairs(step: int, rank: int) -> dict[str, torch.Tensor]:
    return text(step, rank) | {"labels": ids(1000 * step + 10 * rank + 1, 2, 5)}


def images(step: int, rank: int) -> dict[str, torch.Tensor]:
    seed = 1000 * step + 10 * rank
    pixels = random(seed, 2, 3, 8, 8, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": ids(seed, 2) % 4}


def spectra(step: int, rank: int) -> dict[str, torch.Tensor]:
    seed = 1000 * step + 10 * rank
    features = random(seed, 2, 8, 12, dtype=torch.float64)
    return {"input_features": features, "labels": ids(seed, 2, 5)}


def waves(step: int, rank: int) -> dict[str, torch.Tensor]:
    seed = 1000 * step + 10 * rank
    return {"input_values": random(seed, 2, 80, dtype=torch.float64), "labels": ids(seed, 2, 4)}


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
}
ENCODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MIXTRAL = DECODER | {
    "intermediate_size": 8,
    "num_local_experts": 12,
    "output_router_logits": True,
    "experts_implementation": "eager",
}
GROUPED = MIXTRAL | {"experts_implementation": "grouped_mm"}  # torch has it for float32 and below
BERT = ENCODER | {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
VIT = ENCODER | {"image_size": 8, "patch_size": 4, "num_labels": 4}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "state_size": 4,
    "num_hidden_layers": 2,
    "use_cache": False,
}
WHISPER = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 6,
    "max_target_positions": 8,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
WAV2VEC2 = ENCODER | {
    "vocab_size": VOCABULARY,
    "conv_dim": (8, 8),
    "conv_stride": (3, 2),
    "conv_kernel": (4, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
}


class Tiny(NamedTuple):
    """One row of the table above."""

    model: Any
    settings: dict[str, Any]
    batch: Callable[[int, int], dict[str, torch.Tensor]]
    dtype: torch.dtype = torch.float64
    error: float = FLOAT32  # norms, softmax or losses of most compute in float32 at any dtype


MODELS = {  # the classes are imported here: ranks that fork later have them
    "llama": Tiny(transformers.LlamaForCausalLM, DECODER, text),
    "gpt2": Tiny(transformers.GPT2LMHeadModel, GPT2, text),
    "bert": Tiny(transformers.BertForMaskedLM, BERT, text, error=FLOAT64),
    "t5": Tiny(transformers.T5ForConditionalGeneration, T5, pairs),
    "mixtral": Tiny(transformers.MixtralForCausalLM, MIXTRAL, same_text),
    "mixtral-grouped": Tiny(transformers.MixtralForCausalLM, GROUPED, text, torch.float32),
    "mamba": Tiny(transformers.MambaForCausalLM, MAMBA, text),
    "vit": Tiny(transformers.ViTForImageClassification, VIT, images, error=FLOAT64),
    "whisper": Tiny(transformers.WhisperForConditionalGeneration, WHISPER, spectra, error=FLOAT64),
    "wav2vec2": Tiny(transformers.Wav2Vec2ForCTC, WAV2VEC2, waves),
}


def cases() -> Iterator[tuple[str, Case]]:
    for name, (model, settings, batch, dtype, error) in MODELS.items():
        for recomputes in (False, True):
            make = partial(made, model, settings, recomputes)
            case = Case(make, batch, None, dtype, error, changes=batch is same_text)
            yield name + "-recomputing" * recomputes, case


CASES = dict(cases())
