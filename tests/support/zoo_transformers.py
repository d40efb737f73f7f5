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
| whisper | two towers, convolutions in front, a tied head, frozen positions |
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


def spectra(step: int, rank: int) -> dict[str, torch.Tensor]:
    seed = 1000 * step + 10 * rank
    features = random(seed, 2, 8, 12, dtype=torch.float64)
    return {"input_features": features, "labels": ids(seed, 2, 5)}


def sizes(dropouts: str = "", /, **others: Any) -> dict[str, Any]:
    """Settings of a model that is tiny, draws nothing at random and keeps nothing between calls."""
    off = dict.fromkeys(dropouts.split(), 0.0)
    return {"vocab_size": VOCABULARY, "use_cache": False, **off, **others}


DECODER = sizes(
    **{"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16},
)
MIXTRAL = DECODER | {"intermediate_size": 8, "num_local_experts": 12, "output_router_logits": True}
MIXTRAL["experts_implementation"] = "eager"
GROUPED = MIXTRAL | {"experts_implementation": "grouped_mm"}  # torch has it for float32 and below
BERT = sizes("hidden_dropout_prob attention_probs_dropout_prob", **DECODER)
GPT2 = sizes(
    "resid_pdrop embd_pdrop attn_pdrop",
    **{"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 16},
    **{"bos_token_id": 0, "eos_token_id": 0},
)
T5 = sizes(
    **{"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    **{"relative_attention_num_buckets": 8, "dropout_rate": 0.0, "decoder_start_token_id": 0},
)
WHISPER = sizes(
    "dropout",
    **{
        f"{end}_{what}": 2
        for end in ("encoder", "decoder")
        for what in ("layers", "attention_heads")
    },
    **{"d_model": WIDTH, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8},
    **{"max_source_positions": 6, "max_target_positions": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
)


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
    "whisper": Tiny(transformers.WhisperForConditionalGeneration, WHISPER, spectra, error=FLOAT64),
}


def cases() -> Iterator[tuple[str, Case]]:
    for name, (model, settings, batch, dtype, error) in MODELS.items():
        for recomputes in (False, True):
            make = partial(made, model, settings, recomputes)
            case = Case(make, batch, None, dtype, error, changes=batch is same_text)
            yield name + "-recomputing" * recomputes, case


CASES = dict(cases())
