"""What attention really computes, seen from outside while a model runs.

Nothing is recomputed from what the model claims: queries, keys and masks are those that reach torch's fused kernel, or
the softmax of an eager attention function. Attention that runs in a kernel of another kind is watched under eager
instead. The model is not changed; every hook set here is taken off again.

Shapes: query [batch, heads, queries, head_dim]; key [batch, key_heads, keys, head_dim].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_posenc.analysis.in_force import InForce
from hf_posenc.checkpoint import ATTENTION
from hf_posenc.patch import _modules_at


class NotSeenError(RuntimeError):
    """Attention of which nothing can be seen, under eager neither."""


@dataclass
class Kernel:
    """One call of the fused kernel."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float


@dataclass
class Layer:
    """What one self-attention module received in one forward pass."""

    index: int
    scaling: float
    """What q·k is multiplied with."""
    head_dim: int
    raw_query: Tensor | None = None
    """[batch, queries, heads, head_dim]: as its projection made it, before any rotation."""
    raw_key: Tensor | None = None
    """[batch, queries, key_heads, head_dim]: keys of this call's tokens, before any rotation."""
    kernels: list[Kernel] = field(default_factory=list)
    eager_inputs: tuple[Tensor, Tensor] | None = None
    eager_scores: Tensor | None = None

    @property
    def exact(self) -> bool:
        """True where `scores` are products of unrounded queries and keys: a fused kernel got them as they are."""
        return bool(self.kernels) and all(k.query.shape[-1] == self.head_dim for k in self.kernels)

    def scores(self) -> Tensor:
        """What the softmax is taken of, [batch, heads, queries, keys], float64; -inf where a key is hidden.

        Raises:
            NotSeenError: the attention implementation shows nothing.
        """
        if self.eager_scores is not None:
            lowest = torch.finfo(self.eager_scores.dtype).min / 2
            return self.eager_scores.double().masked_fill(self.eager_scores <= lowest, -torch.inf)
        if not self.kernels:
            raise NotSeenError(f"Nothing can be seen of the attention of layer {self.index}.")
        keys = max(kernel.key.shape[2] for kernel in self.kernels)
        blocks = [_kernel_scores(kernel) for kernel in self.kernels]
        return torch.cat(
            [functional.pad(block, (0, keys - block.shape[-1]), value=-torch.inf) for block in blocks], dim=2
        )

    def weights(self) -> Tensor:
        """Attention weights [batch, heads, queries, keys], float64; 0 in rows that see no key."""
        return torch.softmax(self.scores(), dim=-1).nan_to_num(0.0)

    def query(self) -> Tensor:
        """Queries as attention received them, rotated or not: [batch, heads, queries, head_dim], float64."""
        if self.eager_inputs is not None:
            return self.eager_inputs[0][..., -self.head_dim :].double()
        # The columns of a bias stand first (where nothing is padded). The kernel's scale may have been multiplied in.
        parts = [k.query[..., -self.head_dim :].double() * (k.scale / self.scaling) for k in self.kernels]
        if not parts:
            raise NotSeenError(f"Nothing can be seen of the attention of layer {self.index}.")
        return torch.cat(parts, dim=2)

    def key(self, key_heads: int) -> Tensor:
        """Keys as attention received them: [batch, key_heads, keys, head_dim], float64."""
        if self.eager_inputs is not None:
            key = self.eager_inputs[1].transpose(-1, -2)
        elif self.kernels:
            key = max((k.key for k in self.kernels), key=lambda k: k.shape[2])
        else:
            raise NotSeenError(f"Nothing can be seen of the attention of layer {self.index}.")
        return key[:, :: key.shape[1] // key_heads, :, -self.head_dim :].double()


def watch(now: InForce, **inputs: Any) -> tuple[list[Layer], Any]:
    """Run the base model once, and look at every self-attention module.

    Args:
        now: what `in_force` says of the model.
        inputs: keyword arguments of the base model's forward.

    Returns:
        (one `Layer` for each self-attention module, the model's output).
    """
    layers, output = _watched(now, inputs)
    if not all(layer.kernels or layer.eager_scores is not None for layer in layers):
        with attention_as(now, "eager"):
            layers, output = _watched(now, inputs)
    return layers, output


@contextlib.contextmanager
def attention_as(now: InForce, implementation: str) -> Iterator[None]:
    """Another attention implementation inside; afterwards the model's own again."""
    config: Any = now.base.config
    before = config.__dict__.get(ATTENTION)
    try:
        config._attn_implementation = implementation
        yield
    finally:
        config.__dict__[ATTENTION] = before


def _watched(now: InForce, inputs: dict[str, Any]) -> tuple[list[Layer], Any]:
    modules = list(_modules_at(now.base, now.architecture.attention))
    width = now.shape.head_dim
    # GPT-2 has no such attribute in early transformers 5.
    scales = [float(getattr(module, "scaling", width**-0.5)) for module in modules]  # type: ignore[arg-type]
    layers = [Layer(i, scale, width) for i, scale in enumerate(scales)]
    eyes = _Eyes()
    handles: list[Any] = []
    try:
        for module, layer in zip(modules, layers, strict=True):
            handles.append(module.register_forward_pre_hook(_open(eyes, layer)))
            handles.append(module.register_forward_hook(_close(eyes)))
            for name, parts in now.architecture.projections:
                # First in line, so that the projection is seen before a hook of the patch rotates it.
                handles.append(getattr(module, name).register_forward_hook(_raw(layer, parts, now), prepend=True))
        with eyes:
            output = now.base(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return layers, output


@contextlib.contextmanager
def undisturbed(now: InForce) -> Iterator[None]:
    """Evaluation mode inside; afterwards modes, hooks, random state and rotary buffers are as they were."""
    modules = list(now.top.modules())
    modes = [module.training for module in modules]
    hooks = [(table, set(table)) for module in modules for table in (module._forward_hooks, module._forward_pre_hooks)]
    flags = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
    # Stock's length-dependent rotations write what they were last used for into their module.
    rotary = None if now.architecture.rotary is None else now.base.get_submodule(now.architecture.rotary)
    state = {} if rotary is None else {k: v for k, v in rotary.__dict__.items() if k != "_buffers"}
    buffers = {} if rotary is None else {k: (v, None if v is None else v.clone()) for k, v in rotary._buffers.items()}
    devices = sorted({p.device.index or 0 for p in now.top.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            now.top.eval()
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for table, before in hooks:
            for key in [key for key in table if key not in before]:
                del table[key]
        for module in modules:
            live = set(module._forward_hooks) | set(module._forward_pre_hooks)
            for flag in flags:
                marks = getattr(module, flag)
                for key in [key for key in marks if key not in live]:
                    del marks[key]
        if rotary is not None:
            kept = rotary._buffers
            rotary.__dict__.clear()
            rotary.__dict__.update(state, _buffers=kept)
            kept.clear()
            for name, (buffer, values) in buffers.items():
                if buffer is not None and values is not None:
                    buffer.copy_(values)
                kept[name] = buffer


class _Eyes(TorchFunctionMode):
    """Sees every torch function that runs inside the self-attention module that is open."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Layer | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        layer = self.layer
        if layer is not None:
            if function is functional.scaled_dot_product_attention:
                layer.kernels.append(_kernel(*args, **kwargs))
            elif getattr(function, "__name__", "") == "softmax" and layer.eager_scores is None:
                layer.eager_scores = args[0]
            elif function in (torch.matmul, torch.Tensor.matmul) and layer.eager_inputs is None and args[0].ndim == 4:
                layer.eager_inputs = (args[0], args[1])
        return function(*args, **kwargs)


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Kernel:
    return Kernel(query, key, attn_mask, is_causal, query.shape[-1] ** -0.5 if scale is None else float(scale))


def _kernel_scores(kernel: Kernel) -> Tensor:
    query, key = kernel.query.double(), kernel.key.double()
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(-1, -2) * kernel.scale
    if kernel.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    mask = kernel.mask
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return (scores + mask.double()).masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)


def _open(eyes: _Eyes, layer: Layer) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        eyes.layer = layer

    return hook


def _close(eyes: _Eyes) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        eyes.layer = None

    return hook


def _raw(layer: Layer, parts: tuple[str, ...], now: InForce) -> Callable[..., None]:
    shape = now.shape
    count = {"query": shape.heads, "key": shape.key_heads, "value": shape.key_heads}

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        pieces = output.split([count[part] * shape.head_dim for part in parts], dim=-1)
        for part, piece in zip(parts, pieces, strict=True):
            heads = piece.unflatten(-1, (count[part], shape.head_dim))
            if part == "query":
                layer.raw_query = heads
            elif part == "key":
                layer.raw_key = heads

    return hook
