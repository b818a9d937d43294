"""`RowModel`: a causal transformers model that computes tiles of rows over a paged cache."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from isthmus.core.errors import InputError
from isthmus.core.model_parts.routing_shape import RoutingShape
from isthmus.serve.paged.page_cache import PageCache
from isthmus.serve.paged.paged_attention import PAGED_ATTENTION
from isthmus.serve.paged.row_tile import RowTile

_ROPES_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that differ with the length of the sequence: a cached key would be of another length."""

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

_FREE_KEYS = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Keys of a configuration that do not change what a model computes from its weights."""


class RowModel:
    """The model that `config` describes. Weights are those of the last `use`; without any, `forward` fails.

    With `records_routing` the cache keeps which experts each row chose. Raises `InputError` for a model whose keys
    cannot be cached row by row, and for one without experts whose routing is to be recorded.
    """

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, max_tokens: int,
        records_routing: bool = False,
    ) -> None:  # fmt: skip
        self.config = copy.deepcopy(config)
        self.dtype, self.device = dtype, device
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in _ROPES_BY_LENGTH:
            raise InputError(f"the model has rotary embeddings of type {rope}", hint="decode it by another engine")
        with torch.device("meta"):
            self._model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        self._model.config._attn_implementation = PAGED_ATTENTION
        # A product for each pair of token and expert: its shape does not follow from the routing of other rows.
        self._model.config._experts_implementation = "batched_mm"
        self._model.eval().requires_grad_(False)
        self._shapes = {name: one.shape for name, one in self._model.state_dict().items()}
        self._cosines, self._sines = self._rotations(max_tokens)
        self._chosen: list[torch.Tensor] = []
        self._routing = self._record_routing() if records_routing else None

    @property
    def num_tokens(self) -> int:
        """Return the size of the vocabulary."""
        return int(self.config.vocab_size)

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """Return layers, KV heads and head size: the shape of a row's keys, and of its values."""
        heads = self.config.num_attention_heads
        return (
            self.config.num_hidden_layers,
            getattr(self.config, "num_key_value_heads", None) or heads,
            getattr(self.config, "head_dim", None) or self.config.hidden_size // heads,
        )

    def make_cache(self, num_pages: int, page_tokens: int) -> PageCache:
        """Return an empty cache for this model."""
        layers, kv_heads, head_size = self.row_shape
        return PageCache(
            num_layers=layers, num_pages=num_pages, page_tokens=page_tokens, kv_heads=kv_heads, head_size=head_size,
            dtype=self.dtype, device=self.device, routing=self._routing,
        )  # fmt: skip

    def stage(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a copy of `weights`, of the shapes of `state_dict`, for `use`; raises `InputError` for others.

        What the model decodes with is not touched. Where head and embedding are tied, one of them is enough.
        """
        given = dict(weights)
        if self.config.tie_word_embeddings and _HEAD not in given and _EMBEDDING in given:
            given[_HEAD] = given[_EMBEDDING]
        missing, unknown = self._shapes.keys() - given.keys(), given.keys() - self._shapes.keys()
        if missing or unknown:
            raise InputError(
                f"weights of another model: {len(missing)} tensors are missing, {len(unknown)} are unknown: "
                f"{', '.join(sorted(missing | unknown)[:3])}",
                hint="pass the state_dict of the same configuration",
            )
        for name, shape in self._shapes.items():
            if given[name].shape != shape:
                raise InputError(
                    f"'{name}' has shape {list(given[name].shape)}, the model {list(shape)}",
                    hint="pass the state_dict of the same configuration",
                )
        return {name: one.detach().to(device=self.device, dtype=self.dtype, copy=True) for name, one in given.items()}

    def use(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Compute with these weights, of the shapes of `state_dict`, from the next tile on."""
        self._model.load_state_dict(staged, strict=True, assign=True)

    def forward(self, tile: RowTile, cache: PageCache) -> torch.Tensor:
        """Compute a tile of R rows, store their keys and values, and return the last hidden states [R, H]."""
        self._chosen.clear()
        with torch.inference_mode():
            base = self._model.model
            hidden = base.embed_tokens(tile.tokens[:, None])
            rotation = self._cosines[tile.positions][:, None], self._sines[tile.positions][:, None]
            for layer in base.layers:
                hidden = layer(
                    hidden, attention_mask=None, position_ids=tile.positions[:, None], position_embeddings=rotation,
                    use_cache=False, tile=tile, cache=cache,
                )  # fmt: skip
                hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            if cache.experts is not None:
                chosen = torch.stack(self._chosen, dim=1).to(cache.experts.dtype)
                cache.experts[tile.write_pages, tile.write_slots] = chosen
            normed: torch.Tensor = base.norm(hidden)[:, 0]
            return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, V] of hidden states [R, H] as float32 in host memory."""
        with torch.inference_mode():
            found: torch.Tensor = self._model.lm_head(hidden)
            return found.float().cpu()

    def describe(self) -> str:
        """Return what determines the result beside weights and rows: the configuration, as JSON with sorted keys."""
        values = {key: one for key, one in self.config.to_dict().items() if key not in _FREE_KEYS}
        return json.dumps(values, sort_keys=True, default=str)

    def _record_routing(self) -> RoutingShape:
        """Let `forward` note what each router chooses [R, experts of a token], and return the shape of it."""
        routers = [layer.mlp.gate for layer in self._model.model.layers if hasattr(layer.mlp, "experts")]
        if not routers:
            raise InputError("the model has no experts whose routing could be recorded", hint="decode it without")
        for router in routers:
            router.register_forward_hook(lambda _, __, output: self._chosen.append(output[2]))
        return RoutingShape(len(routers), int(routers[0].top_k), int(routers[0].num_experts))

    def _rotations(self, max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, each [positions, head size], computed once and so alike in every tile."""
        rotary: nn.Module = type(self._model.model.rotary_emb)(config=self.config)
        positions = torch.arange(max_tokens)[None]
        cosines, sines = rotary(torch.zeros(1, dtype=self.dtype), position_ids=positions)
        return cosines[0].to(self.device), sines[0].to(self.device)
