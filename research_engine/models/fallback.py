"""Decoders without a definition here: transformers' own modules, with their attention over the paged cache.

transformers calls attention through a table of functions by name. A function of ours in that table stores a layer's
keys and values in the paged cache and attends to them there; the step's ragged batch passes through the modules as one
sequence with positions given. The output projection, and whatever a model does to its logits, is the module's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from research_engine import kernels
from research_engine.models.attention_metadata import AttentionMetadata
from research_engine.models.config import ModelConfig
from research_engine.models.errors import ConfigError
from research_engine.models.reading import ids

ATTENTION = "research_engine_paged"  # our name in transformers' table


class FallbackWarning(UserWarning):
    """A model runs through transformers' modules: right, but without this project's fused operations."""


def is_known_to_transformers(architecture: str) -> bool:
    """Whether transformers has a decoder of that name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def config_from_transformers(
    hf_config: Any, architecture: str, generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """What the engine needs to know of a configuration object of transformers: sizes of cache and vocabulary.

    Raises:
        ConfigError: it does not say.
    """
    hidden_size, num_heads = _number(hf_config, "hidden_size"), _number(hf_config, "num_attention_heads")
    eos = (generation_config or {}).get("eos_token_id") or getattr(hf_config, "eos_token_id", None)
    inner = next((getattr(hf_config, key, None) for key in ("intermediate_size", "ffn_dim", "n_inner")), None)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_number(hf_config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=inner if isinstance(inner, int) else 4 * hidden_size,
        num_layers=_number(hf_config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=getattr(hf_config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(hf_config, "head_dim", None) or max(1, hidden_size // max(1, num_heads)),
        norm_eps=1e-6,
        max_position_embeddings=_number(hf_config, "max_position_embeddings"),
        bos_token_id=getattr(hf_config, "bos_token_id", None),
        eos_token_ids=ids(eos),
    )


def _number(hf_config: Any, key: str) -> int:
    value = getattr(hf_config, key, None)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{type(hf_config).__name__} gives no integer {key!r}, got {value!r}")
    return value


class TransformersDecoder:
    """A causal language model of transformers behind the interface of `Decoder`.

    Args:
        module: with its weights, made with ``attn_implementation=ATTENTION`` (see `register`).
        config: sizes of cache and vocabulary; held against what the module's attention does.

    Raises:
        ConfigError: the module's attention cannot run over a paged cache, and why.
    """

    capturable = False  # transformers' modules look at values, of positions for one

    def __init__(self, module: Any, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.kv_scales: torch.Tensor | None = None
        self._module = module.eval()
        self._step: _Recorder | _PagedStep | None = None
        for part in module.modules():
            if isinstance(getattr(part, "layer_idx", None), int):
                part.research_engine_decoder = self
        self._body: Any = getattr(module, module.base_model_prefix, None)
        if self._body is None or self._body is module:
            raise ConfigError(f"{type(module).__name__} does not separate its layers from its output projection")
        self._check()

    def _check(self) -> None:
        """Run two tokens through the module with a recorder for attention."""
        name, recorder = type(self._module).__name__, _Recorder()
        token_ids, positions = (torch.arange(2, device=self.device) for _ in range(2))
        self._step = recorder
        try:
            with torch.inference_mode():
                whole = self._module(
                    input_ids=token_ids[None], position_ids=positions[None], use_cache=False
                ).logits.float()[0]
                recorder.seen.clear()
                hidden = self._run(token_ids, positions)
                setattr(self._module, self._module.base_model_prefix, _Given())
                apart = self.compute_logits(hidden)
        except ConfigError:
            raise
        except Exception as error:  # whatever a module of transformers raises when it is called as it does not expect
            raise ConfigError(f"{name} cannot be run over a paged cache: {type(error).__name__}: {error}") from error
        finally:
            self._step = None
        if whole.shape != apart.shape or not torch.allclose(whole, apart, rtol=1e-2, atol=1e-2):
            raise ConfigError(f"{name} does not separate its layers from its output projection")
        if sorted(recorder.seen) != list(range(self.config.num_layers)):
            raise ConfigError(
                f"{name} does not attend once in each of its {self.config.num_layers} layers through transformers' "
                f"attention interface (it does in {sorted(recorder.seen) or 'none'}): no paged attention for it"
            )
        for layer, (keys, values) in recorder.seen.items():
            cached = (self.config.num_kv_heads, self.config.head_dim)
            if keys != cached or values != cached:
                raise ConfigError(
                    f"{name} has keys of {keys} and values of {values} (heads, size) in layer {layer}; the cache needs "
                    f"{cached} for both"
                )

    def prepare(self) -> None:
        """Nothing: transformers' modules stay as they are."""

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionMetadata) -> torch.Tensor:
        """One step over a ragged batch: int64 ``[T]`` -> hidden states ``[T, H]``. Mutates the cache."""
        self._step = _PagedStep(attention)
        try:
            return self._run(token_ids, positions)
        finally:
            self._step = None

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = out[0][0]
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Logits of the rows given: ``[S, H]`` -> float32 ``[S, V]``."""
        if not len(hidden_SH):
            return hidden_SH.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        body = getattr(self._module, self._module.base_model_prefix)
        body.hidden = hidden_SH[None]
        try:
            placeholder = torch.zeros((1, len(hidden_SH)), dtype=torch.int64, device=self.device)
            logits = self._module(input_ids=placeholder, use_cache=False).logits[0]
        finally:
            body.hidden = None
        return logits.float() if logits.dtype != torch.float32 else logits.clone()


class _Given(nn.Module):
    """Stands where the layers were: gives out hidden states that are there already."""

    hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Outputs(self.hidden)


class _Outputs:
    """The output of a model's layers, of which only the hidden states are there."""

    def __init__(self, hidden: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Recorder:
    """Notes the (heads, size) of each layer's keys and values, and answers with zeros."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        if layer in self.seen:
            raise ConfigError(f"attention runs twice in layer {layer}: the cache has room for one")
        self.seen[layer] = ((k.shape[1], k.shape[2]), (v.shape[1], v.shape[2]))
        return q.new_zeros(*q.shape[:2], v.shape[2])


class _PagedStep:
    """Stores and attends to one step's keys and values."""

    def __init__(self, attention: AttentionMetadata) -> None:
        self._attention = attention

    def attend(
        self,
        layer: int,
        q_THqD: torch.Tensor,
        k_THkvD: torch.Tensor,
        v_THkvD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        step, cache = self._attention, self._attention.kv_cache[layer]
        key_scale, value_scale = step.scales(layer)
        kernels.reshape_and_cache(
            k_THkvD,
            v_THkvD,
            cache[0],
            cache[1],
            step.slot_mapping,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        return kernels.paged_attention(
            q_THqD,
            cache[0],
            cache[1],
            step.block_tables,
            step.query_start_loc,
            step.seq_lens,
            scale=scale,
            sliding_window=window,
            softcap=softcap,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=value_scale,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
        )


def register() -> None:
    """Puts the paged attention into transformers' table, where a configuration finds it as `ATTENTION`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query ``[1, Hq, T, D]``, key and value ``[1, Hkv, T, D]`` -> ``[1, T, Hq, D]``."""
    decoder = getattr(module, "research_engine_decoder", None)
    if decoder is None or decoder._step is None:
        raise ConfigError(f"{type(module).__name__} attends outside of a step, or does not know its layer")
    if attention_mask is not None or is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"{type(module).__name__} masks its attention in a way of its own")
    out = decoder._step.attend(
        module.layer_idx,
        *(x[0].transpose(0, 1).contiguous() for x in (query, key, value)),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out[None], None
