"""Patching: the only file that changes a model.

`patch` works out and checks everything first, then makes its changes one by one, pushing the inverse of each onto a
journal before it is made; `unpatch` runs the journal backwards, and so does a change that fails. The journal is data
kept on the model, so copies and pickles of a patched model can be unpatched too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc import checkpoint, positions, sites
from hf_posenc.architecture import Architecture, ArchitectureError, architecture_of
from hf_posenc.attention import check_backend, stock_name
from hf_posenc.encoding import Encoding, EncodingError, ModelShape, Weights, as_encoding
from hf_posenc.positions import CALL, Plan
from hf_posenc.sites import PositionWeights, RotaryTable, SilentTable

M = TypeVar("M", bound=nn.Module)
JOURNAL = "_hf_posenc_journal"
"""Attribute of the base model that holds the journal of its patch."""


class PatchError(ValueError):
    """A model that cannot be patched, or unpatched, as asked."""


# ---------------------------------------------------------------------- public


def patch(
    model: M,
    encoding: Encoding | str | dict[str, Any],
    *,
    context_length: int | None = None,
    keep_native: bool = False,
) -> M:
    """Swap the position encoding of a pretrained model, in place.

    Only this instance changes. An earlier patch is replaced. The call either succeeds whole or raises and leaves the
    model as it was.

    Args:
        model: a transformers model of a registered architecture, or a wrapper of one (PEFT, DDP, `torch.compile`).
        encoding: a value (`YaRN(factor=4)`), text (`"yarn:factor=4"`), or dict (`{"name": "yarn", "factor": 4}`).
        context_length: tokens that the model shall take. A scaling works out its factor from it, a table its rows. A
            score bias, `sinusoidal` and `nope` have no last position and take any. So does a rotation that is new to
            the model, which has yet to be trained; the one that it was pretrained with reaches no further than that.
        keep_native: add the encoding beside the native one instead of replacing it (see `set_native_weight`).

    Returns:
        The model.

    Raises:
        EncodingError: an encoding that does not exist, that this model cannot take, that does not reach
            `context_length`, or whose weights find no memory.
        ArchitectureError: a model type that is not registered.
        PatchError: a model in a state that cannot be changed.
        ValueError: an attention implementation that could not apply the encoding.
    """
    top, base = transformers_model(model)
    architecture = architecture_of(base.config)
    _check_outermost(top, base, "patched")
    if not isinstance(keep_native, bool):
        raise PatchError(f"keep_native={keep_native!r} is not allowed; it must be True or False.")
    asked = as_encoding(encoding)
    earlier = _plan_of(base)
    shape = earlier.shape if earlier else _shape_of(base, architecture)
    native = earlier.native if earlier else checkpoint.native_encoding(base.config, architecture)
    if context_length is not None:
        if hasattr(context_length, "item"):  # numpy's numbers become Python's
            context_length = context_length.item()
        if not isinstance(context_length, int) or isinstance(context_length, bool) or context_length < 1:
            raise EncodingError(
                f"context_length={context_length!r} is not allowed; it must be a whole number of tokens above 0."
            )
        asked = asked.for_length(context_length, shape)
    plan = _make_plan(base, architecture, shape, native, asked, keep_native)
    if asked.site == "score":
        check_backend(stock_name(base.config._attn_implementation), str(asked))
    with _whole_table(base, architecture):
        asked_weights, owner = _new_weights(base, plan)
        _replace(model, top, base, owner, asked_weights)
    return model


def unpatch(model: M) -> M:
    """Take a patch back, bit-exactly: weights, buffers, config, outputs, state-dict keys. Without one, do nothing.

    Raises:
        PatchError: the model was wrapped (FSDP) since it was patched; unwrap it first.
    """
    top, base = transformers_model(model)
    journal: Journal | None = base.__dict__.get(JOURNAL)
    if journal is not None:
        _check_outermost(top, base, "unpatched")
        journal.unwind(model, top, base)
    return model


def encoding_of(model: nn.Module) -> Encoding:
    """The encoding in force: as it was asked for where the model is patched, the native one where it is not."""
    _, base = transformers_model(model)
    plan = _plan_of(base)
    return plan.encoding if plan else checkpoint.native_encoding(base.config, architecture_of(base.config))


def position_parameters(model: nn.Module) -> list[str]:
    """Names, as in `model.named_parameters()`, of the trainable weights that the patch brought; maybe none."""
    _, base = transformers_model(model)
    inside = {id(p) for p in getattr(base, CALL).parameters() if p.requires_grad} if _plan_of(base) else set()
    table = _table_brought(base)
    if table is not None:
        inside |= {id(p) for p in base.get_submodule(table).parameters() if p.requires_grad}
    return [name for name, parameter in model.named_parameters() if id(parameter) in inside]


def position_modules(model: nn.Module) -> list[str]:
    """Names of the modules that hold those weights, as PEFT's `modules_to_save` wants them."""
    _, base = transformers_model(model)
    names = [CALL] if _plan_of(base) and any(p.requires_grad for p in getattr(base, CALL).parameters()) else []
    table = _table_brought(base)
    if table is not None:
        names.append(table.rpartition(".")[2])
    return names


def _table_brought(base: PreTrainedModel) -> str | None:
    """Path of the table that a patch put in the native one's place, also where it was saved and stock opened it."""
    plan = _plan_of(base)
    if plan is not None:
        return plan.architecture.table if plan.expressed else None
    record = getattr(base.config, checkpoint.RECORD, None)
    if not isinstance(record, dict) or checkpoint.check_record(record)["site"] != "embedding":
        return None
    return architecture_of(base.config).table


def set_native_weight(model: M, weight: float) -> M:
    """Fade the native encoding of a model patched with `keep_native=True`.

    The rule: vectors of a native table are multiplied by `weight`; angles of a native rotation are multiplied by it
    (so scores keep depending on distances only). At 1 the native encoding is stock's, at 0 it is gone.

    Args:
        weight: from 0 to 1.

    Raises:
        PatchError: the model is not patched with `keep_native=True`.
        ValueError: a weight outside 0 to 1.
    """
    _, base = transformers_model(model)
    plan = _plan_of(base)
    if plan is None or not plan.keep_native:
        raise PatchError(
            "set_native_weight needs a model patched with keep_native=True: there is no native encoding to fade."
        )
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0.0 <= weight <= 1.0:
        raise ValueError(f"weight={weight!r} is not allowed; it must be a number from 0 to 1.")
    for module in getattr(base, CALL).modules():  # an adapter has a copy of it
        if isinstance(module, PositionWeights):
            module.native_weight = float(weight)
    _apply_native_weight(base, plan, float(weight))
    getattr(base.config, checkpoint.RECORD)["native_weight"] = float(weight)
    return model


def drop_silent_native(model: M) -> M:
    """Make a model whose native encoding has faded to nothing as if that had never been kept; the new weights stay.

    It computes the same, and is saved in stock's form where there is one. Where a native encoding acts, or none was
    kept, nothing is done.

    Raises:
        PatchError: the model's weights are sharded (FSDP).
    """
    top, base = transformers_model(model)
    kept = _plan_of(base)
    owner: PositionWeights | None = getattr(base, CALL, None)
    if kept is None or owner is None or not kept.keep_native or owner.native_weight:
        return model
    plan = _make_plan(base, kept.architecture, kept.shape, kept.native, kept.encoding, False, kept.resolved)
    weights = {name: weight.detach() for name, weight in owner.named_parameters()}
    alone = PositionWeights(plan, weights, owner.frozen)
    _replace(model, top, base, alone.train(base.training), weights)
    return model


# ---------------------------------------------------------------------- finding one's way in a model


def transformers_model(model: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The transformers model inside any wrapper, and its base model.

    Raises:
        ArchitectureError: there is none.
    """
    seen = model
    for _ in range(8):
        if isinstance(seen, PreTrainedModel):
            break
        for name in ("_orig_mod", "module"):  # torch.compile; DDP and DataParallel
            if isinstance(getattr(seen, name, None), nn.Module):
                seen = getattr(seen, name)
                break
        else:
            if not hasattr(seen, "get_base_model"):
                break
            seen = seen.get_base_model()  # PEFT
    if not isinstance(seen, PreTrainedModel):
        raise ArchitectureError(f"Expected a transformers model, or a wrapper of one; got {type(model).__name__}.")
    base = seen.base_model
    return seen, base if isinstance(base, PreTrainedModel) else seen


def _check_outermost(top: PreTrainedModel, base: PreTrainedModel, what: str) -> None:
    """Raise where a base model is a part of another transformers model, whose config would not follow.

    Raises:
        PatchError: naming the outer model.
    """
    outer = _outer_class(base) if top is base else None
    if outer is not None:
        raise PatchError(
            f"This {type(base).__name__} is part of a {outer}, whose config would know nothing of it: what that saves "
            f"would open as the unpatched model. The {outer} is what must be {what}."
        )


def _outer_class(base: nn.Module, record: dict[str, Any] | None = None) -> str | None:
    """Class of another transformers model that holds `base`, but not the same `record`; None where there is none."""

    def is_outer(thing: Any) -> bool:
        # By its class, not isinstance: that would wake lazy proxies of other libraries.
        if PreTrainedModel not in type(thing).__mro__ or thing is base or "_modules" not in thing.__dict__:
            return False
        # A record in a config inside that one is not enough: stock saves it as that of a plain model.
        if record is not None and getattr(getattr(thing, "config", None), checkpoint.RECORD, None) == record:
            return False
        return any(module is base for module in thing.modules())

    def search() -> str | None:
        return next((type(thing).__name__ for thing in gc.get_objects() if is_outer(thing)), None)

    if search() is None:
        return None
    gc.collect()  # it may be one that nobody holds any more
    return search()


def _check_head(base: nn.Module, prefix: str, keep_vars: bool) -> None:
    """State-dict pre-hook of a base model that was patched by itself.

    Raises:
        PatchError: it was put into a model whose config knows nothing of the patch.
    """
    outer = _outer_class(base, getattr(base.config, checkpoint.RECORD)) if prefix else None  # type: ignore[union-attr]
    if outer is not None:
        raise PatchError(
            f"This {type(base).__name__} was patched by itself and then put into a {outer}, whose config knows nothing "
            f"of it: what that saves would open as the unpatched model. Patch the {outer} in the same way, or save the "
            f"{type(base).__name__} by itself."
        )


def _plan_of(base: nn.Module) -> Plan | None:
    owner = getattr(base, CALL, None)
    return None if owner is None else owner.plan


def _modules_at(base: nn.Module, path: str) -> Iterator[nn.Module]:
    """Modules at a path in which `*` stands for every child."""
    head, star, tail = path.partition(".*.")
    if not star:
        yield base.get_submodule(path)
        return
    for child in base.get_submodule(head).children():
        yield from _modules_at(child, tail)


def _shape_of(base: PreTrainedModel, architecture: Architecture) -> ModelShape:
    config: Any = base.config
    heads = config.num_attention_heads
    causal = architecture.causal
    if isinstance(causal, str):
        causal = bool(getattr(config, causal))
    return ModelShape(
        hidden=config.hidden_size,
        heads=heads,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        layers=config.num_hidden_layers,
        trained_length=checkpoint.pretrained_length(config, architecture),
        causal=causal,
        theta=checkpoint.pretrained_theta(config, architecture),
    )


def _place(base: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    """Where and in which dtype new weights belong: beside the token embeddings, or where those are brought for use."""
    embeddings: Any = base.get_input_embeddings()
    device = embeddings.weight.device
    if _is_offloaded(embeddings):
        device = torch.device(embeddings._hf_hook.execution_device)
    return device, embeddings.weight.dtype


def _is_offloaded(module: Any) -> bool:
    """Whether accelerate keeps the module's weight elsewhere, and brings it in for each call."""
    return module.weight.is_meta and getattr(getattr(module, "_hf_hook", None), "execution_device", None) is not None


def _native_table(base: nn.Module, architecture: Architecture) -> Tensor | None:
    """The table that the model came with, patched or not."""
    if architecture.table is None:
        return None
    journal: Journal | None = base.__dict__.get(JOURNAL)
    for entry in journal.entries if journal else ():
        if isinstance(entry, Replaced) and entry.path == architecture.table:
            return _weight_before(base, entry).detach()
    table = base.get_submodule(architecture.table)
    if _is_offloaded(table):
        from accelerate.utils import align_module_device

        with align_module_device(table, "cpu"):
            return table.weight.detach().clone()  # type: ignore[union-attr,operator]
    return table.weight.detach()  # type: ignore[union-attr,return-value,operator]


def _weight_before(base: nn.Module, entry: Replaced) -> Tensor:
    now = base.get_submodule(entry.path)
    return now.weight if isinstance(now, SilentTable) else entry.module.weight  # type: ignore[return-value]


def _new_weights(base: PreTrainedModel, plan: Plan) -> tuple[Weights, PositionWeights]:
    """(as the encoding made them; as they will stand in the model).

    Raises:
        EncodingError: they find no memory.
    """
    device, dtype = _place(base)
    try:
        asked = plan.resolved.new_weights(plan.shape, _native_table(base, plan.architecture))
        made = {name: value.to(device=device, dtype=dtype) for name, value in asked.items()}
    except (MemoryError, RuntimeError) as error:  # torch's allocators raise the second
        raise EncodingError(
            f"{plan.resolved}: its new weights cannot be made: {str(error).partition(chr(10))[0] or 'no memory'}"
        ) from error
    return asked, PositionWeights(plan, made, plan.resolved.frozen_weights()).train(base.training)


def _grown_table(base: nn.Module, plan: Plan) -> Weights:
    """The weights of a patch that stock runs: they stand in the native table's place."""
    if plan.expressed and plan.architecture.table is not None:
        return {"table": base.get_submodule(plan.architecture.table).weight.detach()}  # type: ignore[dict-item,union-attr,operator]
    return {}


def _make_plan(
    base: PreTrainedModel,
    architecture: Architecture,
    shape: ModelShape,
    native: Encoding,
    asked: Encoding,
    keep_native: bool,
    resolved: Encoding | None = None,
) -> Plan:
    resolved = asked.resolve(shape) if resolved is None else resolved
    form = None if keep_native else checkpoint.native_form(resolved, shape, architecture)
    plan = Plan(
        encoding=asked,
        resolved=resolved,
        shape=shape,
        architecture=architecture,
        keep_native=keep_native,
        expressed=form is not None,
        native=native,
        arguments=tuple(inspect.signature(type(base).forward).parameters)[1:],
    )
    if keep_native and architecture.rotary is not None:
        if native.length_dependent:
            raise EncodingError(
                f"keep_native=True cannot fade {native.name!r}, which depends on the length. Patch without it."
            )
        if plan.rotates == "projections":
            raise EncodingError(
                f"{asked}: keep_native=True needs the pairing of the model's own rotation. Leave interleaved=False and "
                "rotary_fraction=1, or patch without keep_native."
            )
    return plan


# ---------------------------------------------------------------------- the journal


@dataclass
class Replaced:
    """A module that another one stands in for."""

    path: str
    module: nn.Module

    def undo(self, model: nn.Module, top: PreTrainedModel, base: PreTrainedModel) -> None:
        now = base.get_submodule(self.path)
        if isinstance(now, SilentTable):
            self.module.weight = now.weight  # it may have been loaded or replaced since
        elif not any(tensor.is_meta for tensor in self.module.buffers()):
            device = _place(base)[0]
            if device.type != "meta":
                self.module.to(device)
        else:
            # Built on the meta device and loaded: the stock module computes its buffers from the config.
            self.module = type(self.module)(config=base.config)  # type: ignore[call-arg]
        self.module.train(base.training)
        base.set_submodule(self.path, self.module)


@dataclass
class ReplacedBuffer:
    """A buffer that a longer one stands in for."""

    path: str
    buffer: Tensor

    def undo(self, model: nn.Module, top: PreTrainedModel, base: PreTrainedModel) -> None:
        owner, _, name = self.path.rpartition(".")
        now = base.get_submodule(owner)._buffers[name]
        base.get_submodule(owner)._buffers[name] = self.buffer if now is None else self.buffer.to(now.device)


@dataclass
class ReplacedConfig:
    """The config object that the patched copy stands in for."""

    config: PreTrainedConfig
    of_head: bool = False
    """Whether it is one that a model around the base model has for itself."""

    def undo(self, model: nn.Module, top: PreTrainedModel, base: PreTrainedModel) -> None:
        _swap_config(model, (top if self.of_head else base).config, self.config)


@dataclass
class ChangedClass:
    """The class of the model before it learned to plan lengths."""

    stock: type

    def undo(self, model: nn.Module, top: PreTrainedModel, base: PreTrainedModel) -> None:
        top.__class__ = self.stock


@dataclass
class Frozen:
    """A parameter of the native encoding that does not train while it is silent."""

    path: str

    def undo(self, model: nn.Module, top: PreTrainedModel, base: PreTrainedModel) -> None:
        base.get_parameter(self.path).requires_grad_(True)


@dataclass
class Added:
    """The submodule with the new weights, and the hooks."""

    def undo(self, model: nn.Module, top: PreTrainedModel, base: PreTrainedModel) -> None:
        if CALL in base._modules:
            delattr(base, CALL)
        for key in [key for key, hook in base._state_dict_pre_hooks.items() if hook is _check_head]:
            del base._state_dict_pre_hooks[key]
        ours = (sites.announce, sites.remember, sites.receive, sites.turn)
        for module in base.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if hook in ours]:
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_with_kwargs.pop(key, None)


@dataclass
class Journal:
    """Inverses of the changes made so far, in order."""

    entries: list[Any] = field(default_factory=list)

    def unwind(self, model: nn.Module, top: PreTrainedModel, base: PreTrainedModel) -> None:
        """Undo every change, last first.

        Raises:
            PatchError: before anything is undone, where the model has been sharded.
        """
        if any(type(p).__name__ == "DTensor" for p in base.parameters()):
            raise PatchError("The model's weights are sharded (FSDP). Gather them before it is patched or unpatched.")
        for entry in self.entries:
            now = base.get_submodule(entry.path) if isinstance(entry, Replaced) else None
            if isinstance(now, SilentTable) and _is_offloaded(now):
                raise PatchError(
                    f"{entry.path} was offloaded since the model was patched. Take the hooks off first: "
                    "accelerate.hooks.remove_hook_from_submodules(model)."
                )
        while self.entries:
            self.entries.pop().undo(model, top, base)
        base.__dict__.pop(JOURNAL, None)


# ---------------------------------------------------------------------- making the changes


def _replace(
    model: nn.Module, top: PreTrainedModel, base: PreTrainedModel, owner: PositionWeights, tables: Weights
) -> None:
    """Install a patch in place of an earlier one, if any, which is there again where that fails."""
    earlier = _plan_of(base)
    if earlier is None:
        _install(model, top, base, owner, tables)
        return
    kept: PositionWeights = getattr(base, CALL)
    kept_tables = _grown_table(base, earlier)
    unpatch(model)
    try:
        _install(model, top, base, owner, tables)
    except BaseException:
        _install(model, top, base, kept, kept_tables)
        raise


@contextlib.contextmanager
def _whole_table(base: nn.Module, architecture: Architecture) -> Iterator[None]:
    """The native table whole, where DeepSpeed's ZeRO-3 loaded the model in parts."""
    table = base.get_submodule(architecture.table) if architecture.table is not None else nn.Module()
    parts = [weight for weight in table.parameters() if hasattr(weight, "ds_id")]
    if not parts:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parts):
        yield


def _install(
    model: nn.Module, top: PreTrainedModel, base: PreTrainedModel, owner: PositionWeights, tables: Weights
) -> None:
    """Make every change of a patch, or none."""
    if any(type(p).__name__ == "DTensor" for p in base.parameters()):
        raise PatchError("The model's weights are sharded (FSDP). Patch it before it is wrapped.")
    journal = Journal()
    base.__dict__[JOURNAL] = journal
    try:
        _change(model, top, base, owner, tables, journal)
    except BaseException:
        journal.unwind(model, top, base)
        raise


def _change(
    model: nn.Module,
    top: PreTrainedModel,
    base: PreTrainedModel,
    owner: PositionWeights,
    tables: Weights,
    journal: Journal,
) -> None:
    plan = owner.plan
    architecture = plan.architecture
    record = checkpoint.make_record(plan.encoding, plan.resolved, plan.shape, plan.keep_native, owner.native_weight)
    old, new = base.config, _patched_config(base.config, plan, record)
    journal.entries.append(ReplacedConfig(old))
    _swap_config(model, old, new)
    if top.config is not new and type(top.config) is type(old):  # the head was given another base model than its own
        journal.entries.append(ReplacedConfig(top.config, of_head=True))
        _swap_config(model, top.config, _patched_config(top.config, plan, record))

    if architecture.table is not None:
        table = base.get_submodule(architecture.table)
        if _is_offloaded(table) and (plan.expressed or owner.native_weight):
            raise PatchError(
                f"{plan.encoding}: the native table {architecture.table} is offloaded, and what takes its place would "
                "not be brought in. Patch the model before it is offloaded."
            )
        journal.entries.append(Replaced(architecture.table, table))
        if plan.expressed:
            base.set_submodule(architecture.table, _longer_table(table, tables["table"]))
            owner.names, owner._parameters = (), {}
            _lengthen_buffers(base, architecture, tables["table"].shape[0], journal)
        else:
            if table.weight.requires_grad and not owner.native_weight:  # type: ignore[union-attr]
                journal.entries.append(Frozen(f"{architecture.table}.weight"))
            silent = SilentTable(table.weight, owner.native_weight)  # type: ignore[arg-type]
            base.set_submodule(architecture.table, silent.train(table.training))
    if architecture.rotary is not None:
        stock = base.get_submodule(architecture.rotary)
        journal.entries.append(Replaced(architecture.rotary, stock))
        base.set_submodule(architecture.rotary, _rotary_table(stock, plan, new, owner.native_weight))
    if architecture.table is not None and not plan.expressed:
        _apply_native_weight(base, plan, owner.native_weight)

    journal.entries.append(Added())
    base.add_module(CALL, owner)
    base.register_forward_pre_hook(sites.announce, with_kwargs=True)
    base.register_forward_hook(sites.remember, with_kwargs=True)
    if top is base:
        base.register_state_dict_pre_hook(_check_head)
    for attention in _modules_at(base, architecture.attention):
        attention.register_forward_pre_hook(sites.receive, with_kwargs=True)
        for name, _ in architecture.projections if plan.rotates == "projections" else ():
            # `receive` does the same for projections that are wrapped later, but not inside a compiled graph.
            attention.get_submodule(name).register_forward_hook(sites.turn)

    if plan.resolved.length_dependent and hasattr(top, "generate"):
        journal.entries.append(ChangedClass(type(top)))
        top.__class__ = planning_class(type(top))  # type: ignore[arg-type]


def _patched_config(old: PreTrainedConfig, plan: Plan, record: dict[str, Any]) -> PreTrainedConfig:
    new = copy.deepcopy(old)
    if plan.expressed:
        for key, value in (checkpoint.native_form(plan.resolved, plan.shape, plan.architecture) or {}).items():
            setattr(new, key, value)
    else:
        new.__class__ = checkpoint.needing_class(checkpoint.stock_config_class(old))  # type: ignore[arg-type]
    setattr(new, checkpoint.RECORD, record)
    return new


def _swap_config(model: nn.Module, old: PreTrainedConfig, new: PreTrainedConfig) -> None:
    """Every module that holds the one config gets the other. Other models that share it keep theirs."""
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if value is old:
                module.__dict__[name] = new


def _longer_table(table: nn.Module, rows: Tensor) -> nn.Embedding:
    weight: Tensor = table.weight  # type: ignore[assignment]
    longer = nn.Embedding(rows.shape[0], rows.shape[1], device="meta")
    longer.weight = nn.Parameter(rows.to(device=weight.device, dtype=weight.dtype).clone())
    return longer.train(table.training)


def _lengthen_buffers(base: nn.Module, architecture: Architecture, length: int, journal: Journal) -> None:
    for path in architecture.table_buffers:
        owner, _, name = path.rpartition(".")
        module = base.get_submodule(owner)
        buffer = module._buffers[name]
        assert buffer is not None
        journal.entries.append(ReplacedBuffer(path, buffer))
        counts = torch.arange(length, dtype=buffer.dtype, device=buffer.device).unsqueeze(0)
        module._buffers[name] = counts if name == "position_ids" else torch.zeros_like(counts)


def _rotary_table(stock: nn.Module, plan: Plan, config: PreTrainedConfig, native_weight: float) -> RotaryTable:
    """What answers (cos, sin) now. Where stock's numbers are right they are taken from stock."""
    numbers = None
    if plan.expressed and not plan.resolved.length_dependent:
        with torch.device("cpu"):
            twin = type(stock)(config=config)  # type: ignore[call-arg]
        numbers = (twin.inv_freq.detach().clone(), float(twin.attention_scaling))  # type: ignore[union-attr,operator,arg-type]
    native = plan.native.resolve(plan.shape)
    table = RotaryTable(
        plan,
        native_frequencies=native.frequencies(plan.shape.head_dim) if plan.keep_native else None,
        native_amplitude=native.amplitude() if plan.keep_native else 1.0,
        stock=numbers,
        speaks=plan.rotates == "table",
    )
    table.amount = native_weight
    return table.train(stock.training)


def _apply_native_weight(base: PreTrainedModel, plan: Plan, weight: float) -> None:
    architecture = plan.architecture
    if architecture.rotary is not None:
        base.get_submodule(architecture.rotary).amount = weight  # type: ignore[assignment]
    if architecture.table is not None:
        table = base.get_submodule(architecture.table)
        table.amount = weight  # type: ignore[assignment]
        journal: Journal = base.__dict__[JOURNAL]
        path = f"{architecture.table}.weight"
        trained = any(isinstance(entry, Frozen) and entry.path == path for entry in journal.entries)
        if weight == 0.0 and table.weight.requires_grad:  # type: ignore[union-attr]
            # A parameter that gets no gradient would stop DDP.
            journal.entries.append(Frozen(path))
            table.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
        elif weight > 0.0 and trained:
            table.weight.requires_grad_(True)  # type: ignore[union-attr,operator]


# ---------------------------------------------------------------------- classes made on the fly


@functools.cache
def planning_class(stock: Any) -> type:
    """`stock` with a `generate` that tells length-dependent encodings how long the sequences will become."""

    def generate(self: Any, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        length = _asked_length(self, inputs, generation_config, kwargs)
        if length is None or positions.is_planned():  # whoever planned outside knows more, such as the next questions
            return stock.generate(self, inputs, generation_config, *args, **kwargs)  # type: ignore[attr-defined]
        with positions.sequence_length(length):
            return stock.generate(self, inputs, generation_config, *args, **kwargs)  # type: ignore[attr-defined]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _rebuild, (stock,), self.__dict__

    functools.update_wrapper(generate, stock.generate)  # type: ignore[attr-defined]
    body = {
        "generate": generate,
        "__reduce_ex__": __reduce_ex__,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    return type(stock.__name__, (stock,), body)


def _rebuild(stock: type) -> Any:
    return object.__new__(planning_class(stock))


def _asked_length(model: Any, inputs: Any, generation_config: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Real tokens of each row plus the new ones asked for, [batch]."""
    prompt = next((kwargs[n] for n in ("input_ids", "inputs_embeds") if kwargs.get(n) is not None), inputs)
    settings = generation_config or model.generation_config
    new = kwargs.get("max_new_tokens", getattr(settings, "max_new_tokens", None))
    longest = kwargs.get("max_length", getattr(settings, "max_length", None))
    if not isinstance(prompt, Tensor):
        return None
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        real = mask.ne(0).sum(-1)
    else:
        real = torch.full((prompt.shape[0],), prompt.shape[1], device=prompt.device)
    if new is None:
        new = (20 if longest is None else longest) - prompt.shape[1]
    return real + max(int(new), 0)


@functools.cache
def loading_class(stock: Any) -> type:
    """`stock` whose new instances are patched as their config says: what the Auto classes load weights into."""

    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        stock.__init__(self, config, *args, **kwargs)  # type: ignore[misc]
        self.__class__ = stock
        _patch_from_record(self)

    body = {"__init__": __init__, "__module__": stock.__module__, "__qualname__": stock.__qualname__}
    return type(stock.__name__, (stock,), body)


def _patch_from_record(model: PreTrainedModel) -> None:
    top, base = transformers_model(model)
    if _plan_of(base) is not None:  # a base model inside, built by its own Auto class
        return
    architecture = architecture_of(base.config)
    record = checkpoint.check_record(getattr(base.config, checkpoint.RECORD))
    shape = _shape_of(base, architecture)
    plain = _without_record(base.config)
    native = checkpoint.native_encoding(plain, architecture)
    plan = _make_plan(
        base,
        architecture,
        shape,
        native,
        Encoding.from_dict(record["encoding"]),
        record["keep_native"],
        Encoding.from_dict(record["resolved"]),
    )
    _swap_config(model, base.config, plain)
    weights, owner = _new_weights(base, plan)
    owner.native_weight = float(record["native_weight"])
    _install(model, top, base, owner, weights)


def _without_record(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config that an unpatched model of this kind would have."""
    plain = copy.deepcopy(config)
    plain.__class__ = checkpoint.stock_config_class(config)
    delattr(plain, checkpoint.RECORD)
    return plain
