"""`profile_model`: the parameters, operations, bytes and memory of every layer of a model, without torch.

It reads the dimensions from `config.json`; the rest is arithmetic on `Component`s.
"""

from __future__ import annotations

from isthmus.core.model import Model
from isthmus.plan.profile.attention import attention_component
from isthmus.plan.profile.component import Component, SavedTensor, Weight
from isthmus.plan.profile.decoder_layer import feed_forward_component, norms_component
from isthmus.plan.profile.families.layer_dimensions import (
    config_size,
    config_with_defaults,
    layer_shape,
    position_width,
)
from isthmus.plan.profile.families.model_families import Config, ModelFamily, model_family
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile
from isthmus.plan.profile.layer_shapes import AttentionKernel, LayerShape
from isthmus.plan.profile.norms import norm_parameters, norm_saved_tensors


def profile_model(model: Model, *, kernel: AttentionKernel | None = None) -> ModelProfile:
    """Return the profile of `model`, from its `config.json` alone.

    `kernel` is the attention kernel: `fused` (scaled_dot_product_attention, flash attention) or `eager`
    (scores in memory); the default is that of transformers (eager for Gemma 2 and GPT-OSS, else fused).
    Raises `ModelError` for an unknown architecture or a missing or invalid dimension.
    """
    family = model_family(model.architecture)
    config = config_with_defaults(family, model.config)
    shapes = tuple(layer_shape(family, config, index, kernel) for index in range(model.num_layers))
    known: dict[LayerShape, LayerProfile] = {}
    for shape in shapes:
        if shape not in known:
            known[shape] = LayerProfile(
                hidden_size=model.hidden_size,
                attention=attention_component(shape.attention),
                attention_shape=shape.attention,
                feed_forward=feed_forward_component(shape.feed_forward),
                norms=norms_component(shape),
            )
    tied = bool(config.get("tie_word_embeddings", False))
    return ModelProfile(
        architecture=model.architecture,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        embedding=_embedding(family, model, config),
        layers=tuple(known[shape] for shape in shapes),
        final_norm=_final_norm(family, model.hidden_size),
        head=_head(family, model, config),
        tied_embeddings=tied,
        position_width=position_width(family, config),
    )


def _embedding(family: ModelFamily, model: Model, config: Config) -> Component:
    """Return the embedding: the table of tokens; learned positions and a norm of their sum, if the family has them."""
    hidden = model.hidden_size
    weights = [Weight(name="embedding", vector_elements=model.vocab_size * hidden, max_pieces=model.vocab_size)]
    saved = [SavedTensor(name="token_ids", width=1, element_bytes=8, cut="none")]
    if family.learned_positions:
        weights.append(Weight(name="positions", vector_elements=config_size(config, "num_positions") * hidden))
    if family.embedding_norm:
        weights.append(Weight(name="embedding_norm", vector_elements=norm_parameters(family.norm, hidden)))
        saved += norm_saved_tensors("embedding_norm", family.norm, hidden)
    return Component(name="embedding", kind="embedding", weights=tuple(weights), saved=tuple(saved))


def _final_norm(family: ModelFamily, hidden: int) -> Component:
    gain = Weight(name="final_norm", vector_elements=norm_parameters(family.norm, hidden))
    return Component(
        name="final_norm",
        kind="norm",
        weights=(gain,),
        saved=norm_saved_tensors("final_norm", family.norm, hidden),
        backward_steps=((SavedTensor(name="final_norm.gradients", width=6 * hidden, element_bytes=4),),),
    )


def _head(family: ModelFamily, model: Model, config: Config) -> Component:
    hidden, vocab = model.hidden_size, model.vocab_size
    copies = 0 if config.get("tie_word_embeddings") else 1
    weights = [Weight(name="head", matrix_elements=vocab * hidden, copies=copies, max_pieces=vocab)]
    if family.head_bias:
        weights.append(Weight(name="head_bias", vector_elements=vocab, max_pieces=vocab))
    saved = [
        SavedTensor(name="head.input", width=hidden),
        SavedTensor(name="log_probabilities", width=vocab, element_bytes=4, cut="tp"),
        SavedTensor(name="labels", width=1, element_bytes=8, cut="none"),
    ]
    if config.get("final_logit_softcapping") is not None:
        saved.append(SavedTensor(name="logits.capped", width=vocab, cut="tp"))
    return Component(name="head", kind="head", weights=tuple(weights), saved=tuple(saved))
