"""How a patched model is written down, and found again.

What stock transformers can express on an architecture is written as stock would write it, and opens anywhere. Anything
else is saved under a model type of its own (`hf_posenc_llama` for a LLaMA), which stock does not know and therefore
refuses; after `import hf_posenc` the Auto classes open it, through transformers' own registries.

`config.hf_posenc` is the record of a patch: plain data with a version.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import auto_factory, configuration_auto, modeling_auto

from hf_posenc.architecture import Architecture, architectures
from hf_posenc.encoding import Encoding, ModelShape, encodings

RECORD = "hf_posenc"
"""Entry of the config that holds the record of a patch."""
VERSION = 1
PREFIX = "hf_posenc_"
"""What stands before the stock model type of a saved model that needs this package."""
NOTE = " (patched by hf_posenc: `import hf_posenc`, then open it with an Auto class such as AutoModelForCausalLM)"
"""What follows a value of the saved config that stock looks up by name, so that stock stops and says this."""
ATTENTION = "_attn_implementation_internal"


class CheckpointError(ValueError):
    """A saved record that this version cannot read."""


# ---------------------------------------------------------------------- what stock calls it


def native_form(resolved: Encoding, shape: ModelShape, architecture: Architecture) -> dict[str, Any] | None:
    """The config entries with which stock transformers runs this encoding on this architecture; None where none can."""
    at_its_site = architecture.rotary if resolved.site == "rotary" else architecture.table
    return None if at_its_site is None else resolved.stock_form(shape)


def native_encoding(config: Any, architecture: Architecture) -> Encoding:
    """The encoding that a config describes to stock transformers.

    Raises:
        CheckpointError: a rotary type that no encoding stands for.
    """
    record = getattr(config, RECORD, None)
    if isinstance(record, dict):
        return Encoding.from_dict(check_record(record)["encoding"])
    known = encodings()
    entries = {"max_position_embeddings": config.max_position_embeddings}
    if architecture.rotary is None:
        return known["learned"].from_stock_form(entries)
    entries["rope_parameters"] = config.rope_parameters or {}
    kind = entries["rope_parameters"].get("rope_type", "default")
    for encoding in known.values():
        if encoding.rope_type == kind:
            return encoding.from_stock_form(entries)
    kinds = sorted(str(encoding.rope_type) for encoding in known.values() if encoding.rope_type)
    raise CheckpointError(
        f"rope_type={kind!r} in config.rope_parameters is not supported. Supported: {', '.join(kinds)}."
    )


def pretrained_length(config: Any, architecture: Architecture) -> int:
    """Tokens that a model was pretrained with, before any scaling that its config declares."""
    record = getattr(config, RECORD, None)
    if isinstance(record, dict):
        return int(check_record(record)["trained_length"])
    parameters = getattr(config, "rope_parameters", None) or {}
    if architecture.rotary is not None and parameters.get("original_max_position_embeddings"):
        return int(parameters["original_max_position_embeddings"])
    return int(config.max_position_embeddings)


def pretrained_theta(config: Any, architecture: Architecture) -> float | None:
    """The rotary base that a model was pretrained with; None where it has no rotation."""
    record = getattr(config, RECORD, None)
    if isinstance(record, dict):
        return check_record(record)["theta"]
    if architecture.rotary is None:
        return None
    theta: Any = (config.rope_parameters or {}).get("rope_theta")
    return float(theta or getattr(config, "default_theta", 10000.0))


# ---------------------------------------------------------------------- the record


def make_record(
    encoding: Encoding, resolved: Encoding, shape: ModelShape, keep_native: bool, native_weight: float
) -> dict[str, Any]:
    """The entry `config.hf_posenc`."""
    return {
        "version": VERSION,
        "encoding": encoding.to_dict(),
        "resolved": resolved.to_dict(),
        "site": encoding.site,
        "trained_length": shape.trained_length,
        "theta": shape.theta,
        "keep_native": keep_native,
        "native_weight": native_weight,
    }


def check_record(record: dict[str, Any]) -> dict[str, Any]:
    """The record itself, if this version can read it.

    Raises:
        CheckpointError: written by a newer version, or damaged.
    """
    version = record.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"config.{RECORD} has version {version!r}; this hf_posenc reads versions up to {VERSION}. "
            "Install a newer hf_posenc."
        )
    if not isinstance(record.get("encoding"), dict) or not isinstance(record.get("resolved"), dict):
        raise CheckpointError(f"config.{RECORD} is damaged: it names no encoding. It holds {record!r}.")
    return record


# ---------------------------------------------------------------------- configs that say what they need


class NeedsPackage:
    """What a config becomes when stock transformers could not run the model that it describes.

    In life it is the stock config, of the stock model type. On disk it has a model type that stock's Auto classes do
    not know, and one entry that makes stock's own classes stop, which would only warn of the type. And it refuses
    attention implementations that would drop the bias of the encoding in force.
    """

    model_type: str

    def to_diff_dict(self) -> dict[str, Any]:
        values = super().to_diff_dict()  # type: ignore[misc]
        entry = architectures()[self.model_type].checked
        return {**values, "model_type": PREFIX + self.model_type, entry: f"{getattr(self, entry)}{NOTE}"}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        entry = architectures()[cls.model_type].checked
        values = {**config_dict, "model_type": cls.model_type}
        if isinstance(values.get(entry), str):
            values[entry] = values[entry].removesuffix(NOTE)
        return super().from_dict(values, **kwargs)  # type: ignore[misc]

    @property
    def _attn_implementation_internal(self) -> str | None:
        from hf_posenc.attention import PREFIX as BIASED

        asked = self.__dict__.get(ATTENTION)
        record = self.__dict__.get(RECORD)
        if asked is None or record is None or record["site"] != "score":
            return asked
        return BIASED + asked

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, value: str | None) -> None:
        from hf_posenc.attention import check_backend, stock_name

        record = self.__dict__.get(RECORD)
        if value is not None and record is not None and record["site"] == "score":
            check_backend(value, str(Encoding.from_dict(check_record(record)["encoding"])))
        self.__dict__[ATTENTION] = stock_name(value)


def stock_config_class(config: PreTrainedConfig) -> type[PreTrainedConfig]:
    """The stock class of a config, patched or not."""
    return type(config).__mro__[2] if isinstance(config, NeedsPackage) else type(config)


@functools.cache
def needing_class(stock: Any) -> type[PreTrainedConfig]:
    """The class of configs of `stock` that need this package, registered with transformers' Auto classes.

    It has stock's name, because transformers finds tokenizers and processors by it.
    """
    body = {
        "__module__": __name__,
        "__qualname__": stock.__qualname__,
        "__init__": _same_init(stock),
        "__annotations__": {},
    }
    made = type(stock.__name__, (NeedsPackage, stock), body)
    setattr(sys.modules[__name__], stock.__name__, made)  # where pickle looks for it
    _register_models(made)
    return made


def __getattr__(name: str) -> Any:
    """Pickle of another process asks for a class by name before anything has made it here."""
    for model_type in architectures() if name.endswith("Config") else ():
        if configuration_auto.CONFIG_MAPPING_NAMES[model_type] == name:
            return _config_class(model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _same_init(stock: type[PreTrainedConfig]) -> Any:
    @functools.wraps(stock.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock.__init__(self, *args, **kwargs)
        # The implementation asked for is set before the record: look at it again now that both are known.
        setattr(self, ATTENTION, self.__dict__.get(ATTENTION))

    return __init__


# ---------------------------------------------------------------------- Auto classes


class Door:
    """Stands in transformers' registries for a class that is made when it is first used."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.__name__ = name  # pipelines list the classes of a registry by it
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._make(), name)


def register() -> None:
    """Teach the Auto classes of transformers to open saved models of every registered architecture."""
    for model_type in architectures():
        door = Door(configuration_auto.CONFIG_MAPPING_NAMES[model_type], functools.partial(_config_class, model_type))
        configuration_auto.CONFIG_MAPPING.register(PREFIX + model_type, door, exist_ok=True)  # type: ignore[arg-type]


def _config_class(model_type: str) -> type[PreTrainedConfig]:
    return needing_class(configuration_auto.CONFIG_MAPPING[model_type])  # type: ignore[arg-type]


def _register_models(made: type[PreTrainedConfig]) -> None:
    for mapping in vars(modeling_auto).values():
        if isinstance(mapping, auto_factory._LazyAutoMapping) and made.model_type in mapping._model_mapping:
            names = mapping._model_mapping[made.model_type]
            name = names if isinstance(names, str) else names[0]
            door = Door(name, functools.partial(_model_class, name))
            mapping.register(made, door, exist_ok=True)  # type: ignore[arg-type]


def _model_class(name: str) -> Any:
    from hf_posenc.patch import loading_class

    return loading_class(getattr(transformers, name))
