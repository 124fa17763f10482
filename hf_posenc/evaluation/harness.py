"""Patched models in lm-evaluation-harness: the model `hf-posenc`.

    python -m hf_posenc.evaluation.harness --model hf-posenc \
        --model_args pretrained=./model,encoding=yarn:factor=4 --tasks wikitext

It takes the arguments of the harness's own `hf` model that say how to evaluate (`batch_size`, `max_length`,
`add_bos_token`, ...; in `--model_args` they come before the command line's own), and:

- `pretrained`: what `load_model` takes, so a `.gguf` file and the folder of an adapter too.
- `dtype`, `device`, `tokenizer`: as the harness has them.
- `peft`: folder of an adapter to put on the model, under the encoding that the adapter was trained under.
- `encoding`: as `--encoding` of `hf-posenc evaluate` (default: what the model was saved with). In `--model_args` commas
  separate arguments, so write the fields of an encoding with semicolons: `encoding=yarn:factor=4;beta_fast=16`.
- `context_length`: tokens to make it for, and to give the harness as the model's `max_length`.

How else a model could be loaded (`revision`, `parallelize`, ...) is refused, as is a name that nobody knows.

The harness's rolling perplexity is what `perplexity(..., definition="disjoint", bos=...)` measures here.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from hf_posenc.evaluation import limits
from hf_posenc.evaluation.windows import check_int

NAME = "hf-posenc"
_LOADING = frozenset(
    {"revision", "subfolder", "trust_remote_code", "use_fast_tokenizer", "parallelize", "max_memory_per_gpu"}
    | {"max_cpu_memory", "offload_folder", "tp_plan", "delta", "autogptq", "gptqmodel", "gguf_file"}
)
"""Arguments of `hf` that it reads while it loads a model, and ignores where it is given one."""


def model_class() -> Any:
    """The harness's model class, made when the harness is there.

    Raises:
        ImportError: lm-evaluation-harness is not installed.
    """
    try:
        from lm_eval.models.huggingface import HFLM
        from lm_eval.utils import simple_parse_args_string
    except ImportError as error:
        raise ImportError(f"{error}. Install the harness: pip install 'lm_eval[hf]'", name=error.name) from error

    from hf_posenc.models import load_model
    from hf_posenc.patch import patch, unpatch

    theirs = inspect.signature(HFLM.__init__).parameters

    class PosencLM(HFLM):
        """transformers' model in the harness, under another position encoding.

        Raises:
            ValueError: an argument that is unknown, or that is not allowed, or that could not be honoured.
        """

        def __init__(
            self,
            pretrained: Any,
            encoding: str | None = None,
            context_length: int | str | None = None,
            dtype: Any = None,
            device: str | None = None,
            tokenizer: Any = None,
            peft: str | None = None,
            **options: Any,
        ) -> None:
            ours = inspect.signature(PosencLM.__init__).parameters
            _refuse(options, theirs, set(ours) - {"self", "options"})
            length = None if context_length is None else _tokens("context_length", context_length)
            if options.get("max_length") is not None:
                options["max_length"] = _tokens("max_length", options["max_length"])
            if isinstance(pretrained, str):
                pretrained, found = load_model(pretrained, dtype, device)
                tokenizer = tokenizer or found
            elif dtype is not None:
                raise ValueError(f"dtype={dtype!r} is not allowed with a model that is loaded already.")
            if peft is not None:
                pretrained = _with_adapter(pretrained, peft)
            if encoding == "native":
                unpatch(pretrained)
            elif encoding is not None:
                patch(pretrained, str(encoding).replace(";", ","), context_length=length)
            for name, value in (("context_length", length), ("max_length", options.get("max_length"))):
                if value is not None:
                    limits.check_length(pretrained, name, value)
            if length is not None:
                options.setdefault("max_length", length)
            super().__init__(pretrained, tokenizer=tokenizer, device=device, **options)

        @classmethod
        def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
            """From --model_args; what they say comes before the command line's own, which always has a batch size."""
            given = {name: value for name, value in (additional_config or {}).items() if value is not None}
            return cls(**(given | arg_dict))

        @classmethod
        def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
            """The same from "name=value,name=value"."""
            return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    return PosencLM


def _refuse(options: dict[str, Any], theirs: Mapping[str, inspect.Parameter], ours: set[str]) -> None:
    """Raise for an option that the harness would ignore."""
    known = ours | (set(theirs) - {"self", "kwargs"} - _LOADING)
    for name, value in options.items():
        if name in _LOADING and (name not in theirs or value != theirs[name].default):
            raise ValueError(
                f"{name}={value!r} is not allowed: {NAME} loads models by itself and could not honour it. Load the"
                " model as you need it, save it to a folder, and give that as pretrained."
            )
        if name not in known | _LOADING:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{name}={value!r} is not an argument of {NAME}.{hint} Available: {', '.join(sorted(known))}."
            )


def _tokens(name: str, value: Any) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    return check_int(name, value, low=2, why="it is a number of tokens")


def _with_adapter(model: Any, adapter: str) -> Any:
    if hasattr(model, "peft_config"):
        raise ValueError(f"peft={adapter!r} is not allowed with a model that has an adapter already; merge that first.")
    try:
        from hf_posenc.adapters import load_adapter
    except ImportError as error:
        raise ValueError(f"peft={adapter!r} is an adapter; install peft to load it.") from error
    return load_adapter(model, adapter).eval()


def register() -> Any:
    """Make the harness know the model `hf-posenc`; return its class. Does nothing the second time."""
    made = model_class()
    from lm_eval.api import registry

    if NAME in registry.model_registry:
        return registry.get_model(NAME)
    return registry.register_model(NAME)(made)


def main() -> None:
    """The harness's own command line, with the model registered."""
    register()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
