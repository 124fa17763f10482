"""Patched models in lm-evaluation-harness: the model `hf-posenc`.

    python -m hf_posenc.evaluation.harness --model hf-posenc \
        --model_args pretrained=./model,encoding=yarn:factor=4 --tasks wikitext

It takes every argument of the harness's own `hf` model, a `.gguf` path as `pretrained`, and:

- `encoding`: as `--encoding` of `hf-posenc evaluate` (default: what the model was saved with). In `--model_args` commas
  separate arguments, so write the fields of an encoding with semicolons: `encoding=yarn:factor=4;beta_fast=16`.
- `context_length`: tokens to make it for, and to give the harness as the model's `max_length`.

The harness's rolling perplexity is what `perplexity(..., definition="disjoint", bos=...)` measures here.
"""

from __future__ import annotations

from typing import Any

NAME = "hf-posenc"


def model_class() -> Any:
    """The harness's model class, made when the harness is there.

    Raises:
        ImportError: lm-evaluation-harness is not installed.
    """
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError(f"{error}. Install the harness: pip install 'lm_eval[hf]'", name=error.name) from error

    from hf_posenc.models import load_model
    from hf_posenc.patch import patch, unpatch

    class PosencLM(HFLM):
        """transformers' model in the harness, under another position encoding."""

        def __init__(
            self,
            pretrained: Any,
            encoding: str | None = None,
            context_length: int | str | None = None,
            dtype: str | None = None,
            device: str | None = None,
            tokenizer: Any = None,
            **options: Any,
        ) -> None:
            if isinstance(pretrained, str):
                pretrained, found = load_model(pretrained, dtype, device)
                tokenizer = tokenizer or found
            length = None if context_length is None else int(context_length)
            if encoding == "native":
                unpatch(pretrained)
            elif encoding is not None:
                patch(pretrained, encoding.replace(";", ","), context_length=length)
            if length is not None:
                options.setdefault("max_length", length)
            super().__init__(pretrained, tokenizer=tokenizer, device=device, **options)

    return PosencLM


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
