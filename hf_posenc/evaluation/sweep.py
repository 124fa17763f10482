"""One model, several encodings, several lengths: measured part by part, so that what is finished is never measured
again."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import hashlib
import json
import logging
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation import limits
from hf_posenc.evaluation.files import plain, write_json
from hf_posenc.evaluation.likelihood import PerplexityResult, perplexity
from hf_posenc.evaluation.processes import Processes
from hf_posenc.evaluation.pseudo import pseudo_perplexity
from hf_posenc.evaluation.windows import DEFINITIONS, DESCRIPTIONS, check_int

logger = logging.getLogger(__name__)

NATIVE = "native"
"""The name of the unpatched model among encodings."""
SAVED = "saved"
"""The name of the model exactly as it was loaded, with the encoding that it was saved with."""
SHORTEST = 128
"""Tokens below which no length is reported by itself: too few targets, and no context to speak of."""
DOCUMENTS_FOR_INTERVAL = 5
"""Blocks or documents below which no interval is reported: resampling so few says little."""
PSEUDO = "pseudo"
"""The definition for fill-in encoders."""
PSEUDO_TARGETS = 64
"""Tokens masked in each block under that definition: each costs a pass over its block."""
_VERSION = 2  # part of every part's key: raise it when numbers come out differently


def evaluate(
    model: str | Path | nn.Module,
    encodings: Sequence[Any] = (NATIVE,),
    texts: str | Path | Sequence[str | Path] = (),
    lengths: Sequence[int] = (),
    output: str | Path | None = None,
    *,
    documents: Sequence[str] | None = None,
    tokenizer: Any = None,
    concatenate: bool = False,
    max_tokens: int | None = None,
    definition: str = "strided",
    stride: int | None = None,
    bos: bool | None = None,
    batch_size: int | None = None,
    passkey_trials: int = 0,
    passkey_lengths: Sequence[int] | None = None,
    passkey_depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    seed: int = 0,
    dtype: Any = None,
    device: str | None = None,
    fresh: bool = False,
    progress: bool | None = None,
    title: str | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Measure a model's perplexity by context length under several encodings, and write a report one can send.

    Every encoding is patched into the model in turn. One whose numbers do not depend on the length of the sequence is
    measured at all lengths in one pass over blocks of `max(lengths)` tokens; one whose do (`dynamic_ntk`, `longrope`)
    in one pass for each length, over the beginnings of the same blocks, so that the same targets are scored. The
    model's trained length and shorter ones are always reported too, with the change against the native encoding: what
    a longer context costs at short ones.

    Args:
        model: a hub id, a folder, a `.gguf` file, or a loaded model (then `tokenizer` is needed, and it is left
            unpatched, as it was given).
        encodings: values, texts (`"yarn:factor=4"`) or dicts; `"native"` is the unpatched model, `"saved"` the model
            as it was loaded. An encoding without its factor (or number of positions) is made for `max(lengths)`. The
            native one is measured in any case, up to the trained length where it is not asked for.
        texts: files, folders, or names of data sets (`hf_posenc.data.load_documents`).
        lengths: context lengths to report, in tokens. The row of length L holds the targets with L/2 .. L-1 tokens
            before them.
        output: folder for `results.json`, `report.md`, `report.html` and the pictures, and for `parts/`, from which an
            interrupted run goes on. None writes nothing.
        documents: texts given directly, instead of `texts`.
        concatenate: join all documents into one stream, with the tokenizer's end-of-text token between them (default:
            no document is context for another).
        max_tokens: use at most so many tokens of text, long documents first (default: all).
        definition: what perplexity is to mean, one of `DEFINITIONS`; "pseudo" for a fill-in encoder, whose row of
            length L then holds windows of L tokens, in each of which 64 tokens are masked in turn.
        stride: tokens between sliding windows of `max(lengths)` tokens (default: blocks without overlap, which give
            every context length equally many targets).
        bos: put the tokenizer's BOS before each window (default: where the tokenizer itself puts one before a text).
        batch_size: windows run together (default: as many as make 4,096 tokens).
        passkey_trials: passkeys to hide for each length and depth (default: none).
        passkey_lengths, passkey_depths: where (default: `lengths`).
        seed: of the passkeys.
        dtype: to load the model in (default: the checkpoint's; float32 for GGUF).
        device: "cpu", "cuda", ... (default: the first accelerator there is).
        fresh: measure everything again, ignoring finished parts.
        progress: True shows bars, False none; None shows them on a terminal.
        title: of the report.
        command: the command line to print in the report (default: this process's).

    Returns:
        What `results.json` holds.

    Raises:
        ValueError: an argument that is not allowed, text shorter than the longest length, or an output folder that
            holds something else. Raised before the model runs.
    """
    wanted = [_wanted(item) for item in ([encodings] if isinstance(encodings, str) else encodings)]
    if not wanted:
        raise ValueError('encodings is empty; name at least one, such as "native".')
    lengths = sorted(set(lengths))
    if not lengths:
        raise ValueError("lengths is empty; give context lengths in tokens, such as [2048, 8192].")
    for length in lengths:
        check_int("lengths", length, low=4, why="a context length in tokens")
    if definition not in (*DEFINITIONS, PSEUDO):
        raise ValueError(f"definition={definition!r} is not known; choose one of {', '.join((*DEFINITIONS, PSEUDO))}.")
    if definition == PSEUDO and (stride is not None or passkey_trials):
        raise ValueError(
            'definition="pseudo" is for encoders, which have no sliding windows and write no answers; leave stride and'
            " passkey_trials out."
        )
    if stride is not None:
        check_int("stride", stride, low=1, why="it is the number of tokens between windows")
        if stride > max(lengths):
            raise ValueError(
                f"stride={stride} is not allowed; it may be at most the longest length ({max(lengths)}), or tokens"
                " would be skipped."
            )
    check_int("passkey_trials", passkey_trials, low=0, why="it is the number of passkeys for each length and depth")
    folder = _output_folder(output)
    processes = Processes.find()
    started = time.time()

    source = _Source(model, tokenizer, dtype, device, "masked" if definition == PSEUDO else "causal")
    if definition == PSEUDO and source.tokenizer.mask_token_id is None:
        raise ValueError('definition="pseudo" needs a tokenizer with a mask token; this one has none.')
    _refuse_anothers_report(folder, source)
    bos = False if definition == PSEUDO else bos
    text = _read(source.tokenizer, texts, documents, concatenate, max_tokens, max(lengths), bos)
    with _part(folder, {"version": _VERSION, "task": "model", "model": source.fingerprint}, fresh, processes) as part:
        if not part:
            part |= source.facts()
    trained = source.facts(part)["trained_length"]
    reported = _reported(lengths, trained)
    todo = list(dict.fromkeys(wanted))
    if NATIVE not in todo and trained is not None and reported[0] <= trained:
        todo.append(_SHORT_NATIVE)

    common = {
        "version": _VERSION,
        "model": source.fingerprint,
        "dtype": source.dtype_name,
        "text": text.digest,
        "definition": definition,
        "stride": stride,
        "bos": text.bos,
    }
    parts: dict[Any, dict[str, Any]] = {}
    for item in todo:
        upto = [length for length in reported if trained and length <= trained] if item is _SHORT_NATIVE else reported
        key = common | {"task": "perplexity", "encoding": _key(item), "lengths": upto, "made_for": max(lengths)}
        with _part(folder, key, fresh, processes) as part:
            if not part:
                live = source.patched(item, max(lengths))
                part |= _describe(live, item)
                logger.info("Measuring %s", part["label"])
                if definition == PSEUDO:
                    part |= _measure_pseudo(live, source.tokenizer, text, upto, max(lengths), batch_size, progress)
                else:
                    separate = part["length_dependent"]
                    options = {"definition": definition, "batch_size": batch_size, "progress": progress}
                    part |= _measure(live, text, upto, max(lengths), stride, separate, **options)
        parts[item] = part
    retrieval: dict[Any, dict[str, Any]] = {}
    for item in wanted if passkey_trials else []:
        task: dict[str, Any] = {
            "lengths": sorted(set(passkey_lengths or lengths)),
            "depths": [float(depth) for depth in passkey_depths],
            "trials": passkey_trials,
            "seed": seed,
        }
        key = {k: common[k] for k in ("version", "model", "dtype")}
        key |= {"tokenizer": _hash_tokenizer(source.tokenizer)}
        key |= {"task": "passkey", "encoding": _key(item), "made_for": max(lengths)} | task
        with _part(folder, key, fresh, processes) as part:
            if not part:
                from hf_posenc.evaluation.retrieval import passkey

                began = time.time()
                found = passkey(source.patched(item, max(lengths)), source.tokenizer, progress=progress, **task)
                part |= {"accuracy": found.accuracy, "lenient": found.lenient, **task, "seconds": time.time() - began}
        retrieval[item] = part
    source.restore()

    rows = []
    native = next((parts[item] for item in (NATIVE, _SHORT_NATIVE) if item in parts), None)
    for item in wanted:
        entry = dict(parts[item])
        # A model saved with its encoding in its own config has no other to go back to: nothing is compared.
        entry["is_native"] = item == SAVED and native is not None and entry["encoding"] == native["encoding"]
        against = None if entry["is_native"] else native
        entry["rows"] = [_against(row, against) for row in entry["rows"]]
        if item in retrieval:
            entry["passkey"] = retrieval[item]
        if isinstance(item, str):
            entry["label"] = item if item == NATIVE else f"{item} ({entry['label']})"
        rows.append(entry)
    results = plain(
        {
            "title": title or f"{source.name} by context length",
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(command if command is not None else sys.argv),
            "versions": _versions(),
            "device": source.device_name,
            "processes": processes.count,
            "model": source.facts(),
            "text": text.facts(),
            "settings": {
                "lengths": lengths,
                "reported": reported,
                "definition": definition,
                "definition_means": DESCRIPTIONS[definition],
                "window": max(lengths),
                "stride": stride,
                "bos": text.bos,
                "passkey_trials": passkey_trials,
                "seed": seed,
            },
            "seconds": time.time() - started,
            "native": native,
            "encodings": rows,
        }
    )
    if folder is not None and processes.is_first:
        from hf_posenc.evaluation.report import write_report

        write_report(results, folder)
    processes.wait()
    return results


# ---------------------------------------------------------------------- the model


class _ShortNative:
    """The native encoding up to the trained length: what the short side is compared with."""


_SHORT_NATIVE = _ShortNative()


class _Source:
    """A model that is loaded only if something has to be measured, and patched with one encoding after another."""

    def __init__(
        self, model: str | Path | nn.Module, tokenizer: Any, dtype: Any, device: str | None, task: str
    ) -> None:
        from hf_posenc import models

        self._where: str | Path | None = None
        self._model: nn.Module | None = None
        self._given_dtype = dtype
        self._device = device
        self._task = task
        self._state: Any = SAVED
        if isinstance(model, nn.Module):
            if tokenizer is None:
                raise ValueError("tokenizer is needed with a loaded model; load_model(source) returns both.")
            if dtype is not None or device is not None:
                raise ValueError("dtype and device belong to loading; the model is loaded already. Use model.to(...).")
            # A patched one may hold trained weights that unpatching would drop.
            self._model = copy.deepcopy(model) if _is_patched(model) else model
            self.tokenizer = tokenizer
            self.place = "a loaded model"
            self.fingerprint = _hash_weights(model)
            self.name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
        else:
            self._where = model
            self.place = str(model)
            self.fingerprint = models.fingerprint(model)
            self.tokenizer = tokenizer if tokenizer is not None else models.load_tokenizer(model)
            self.name = Path(model).name if Path(model).exists() else str(model)
        self._facts: dict[str, Any] | None = None

    @property
    def model(self) -> nn.Module:
        if self._model is None:
            from hf_posenc.models import load_model

            assert self._where is not None
            self._model, _ = load_model(
                self._where, self._given_dtype, self._device or _first_device(), task=self._task
            )
            if self._task == "causal":
                limits.check_causal(self._model)
        return self._model

    @property
    def dtype_name(self) -> str:
        if self._where is None:
            return str(next((p.dtype for p in self.model.parameters()), None))
        return str(self._given_dtype)

    @property
    def device_name(self) -> str:
        if self._model is None:
            return "none: every part was finished before"
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        if device.type == "cuda":
            return f"{device} ({torch.cuda.get_device_name(device)})"
        return f"{device} ({platform.processor() or platform.machine()}, {torch.get_num_threads()} threads)"

    def facts(self, known: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the report says of the model as it was loaded; `known` from an earlier run spares loading it."""
        if self._facts is None and known:
            self._facts = {**known, "source": self.place, "name": self.name}
        if self._facts is None:
            config = getattr(self.model, "config", None)
            self._facts = {
                "name": self.name,
                "source": self.place,
                "fingerprint": self.fingerprint,
                "class": type(self.model).__name__,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "dtype": str(next((p.dtype for p in self.model.parameters()), None)),
                "trained_length": limits.trained_length(self.model),
                "config": config.to_dict() if config is not None and hasattr(config, "to_dict") else None,
            }
        return self._facts

    def patched(self, item: Any, made_for: int) -> nn.Module:
        """The model with another encoding in force."""
        from hf_posenc.patch import patch, unpatch

        self.facts()  # of the model as it was loaded
        if item == SAVED:
            if self._state != SAVED:
                if self._where is None:
                    raise ValueError(
                        f'encodings: "{SAVED}" must stand before the others for a model that is loaded already.'
                    )
                self._model = None
                self._state = SAVED
            return self.model
        if item in (NATIVE, _SHORT_NATIVE):
            if _is_patched(self.model):
                unpatch(self.model)
        else:
            patch(self.model, item, context_length=made_for if _open(item) else None)
        self._state = item
        return self.model

    def restore(self) -> None:
        """Leave a model that was given unpatched, where it was patched here."""
        if self._where is None and self._state != SAVED and _is_patched(self.model):
            from hf_posenc.patch import unpatch

            unpatch(self.model)


def _is_patched(model: nn.Module) -> bool:
    from hf_posenc.patch import JOURNAL

    return any(JOURNAL in module.__dict__ for module in model.modules())


def _open(encoding: Any) -> bool:
    """True where the encoding leaves open how long a context it is for."""
    return any(getattr(encoding, name, 0) is None for name in ("factor", "num_positions"))


def _wanted(item: Any) -> Any:
    from hf_posenc.encoding import as_encoding

    return item if isinstance(item, str) and item in (NATIVE, SAVED) else as_encoding(item)


def _key(item: Any) -> Any:
    if isinstance(item, _ShortNative):
        return NATIVE
    return item if isinstance(item, str) else item.to_dict()


def _describe(model: nn.Module, asked: Any) -> dict[str, Any]:
    """What stands in the report about the encoding in force, and was asked for as `asked`."""
    from hf_posenc.patch import encoding_of

    try:
        encoding = encoding_of(model)
    except (AttributeError, ValueError):
        return {"label": NATIVE, "encoding": None, "length_dependent": False, "frequencies": None}
    frequencies = None
    if encoding.site == "rotary":
        with contextlib.suppress(Exception):  # a picture less is no reason to lose a measurement
            frequencies = _frequencies(model, encoding)
    return {
        "label": _label(asked, encoding),
        "encoding": encoding.to_dict(),
        "length_dependent": encoding.length_dependent,
        "frequencies": frequencies,
    }


def _label(asked: Any, encoding: Any) -> str:
    """The encoding as it was asked for, with the factor or number of positions that was worked out for it."""
    if isinstance(asked, (str, _ShortNative)) or not _open(asked):
        return str(encoding)
    worked_out = {}
    for name in ("factor", "num_positions"):
        value = getattr(encoding, name, None)
        if value is not None and getattr(asked, name) is None:
            worked_out[name] = int(value) if float(value).is_integer() else round(value, 4)
    return str(asked.replace(**worked_out))


def _frequencies(model: nn.Module, encoding: Any) -> list[float]:
    """Radians per token of each rotary pair, for sequences of the trained length where they depend on it."""
    from hf_posenc.positions import CALL, Plan

    plans = (getattr(getattr(module, CALL, None), "plan", None) for module in model.modules())
    plan = next((plan for plan in plans if isinstance(plan, Plan)), None)
    trained = limits.trained_length(model) or 0
    if plan is not None:
        resolved: Any = plan.resolved
        head_dim = plan.shape.head_dim
    else:
        config: Any = limits.text_config(model)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        resolved = encoding
    length = torch.tensor([trained]) if encoding.length_dependent else None
    return resolved.frequencies(int(head_dim * resolved.rotary_fraction), length).reshape(-1).tolist()


def _first_device() -> str | None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from accelerate import PartialState

        return str(PartialState().device)
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        return None if found is None else found.type
    return None


def _hash_tokenizer(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(rules.encode()).hexdigest()


def _hash_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    config = getattr(model, "config", None)
    digest.update(
        json.dumps(plain(config.to_dict()), sort_keys=True).encode()
        if config is not None and hasattr(config, "to_dict")
        else b""
    )
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().reshape(-1)
        if flat.numel() > 1 << 20:  # sampled: two checkpoints of one model differ everywhere
            flat = flat[:: flat.numel() >> 18]
        digest.update(flat.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------- the text


@dataclass(frozen=True)
class _Text:
    """Documents as token ids."""

    sources: list[str]
    documents: list[Tensor]
    num_bytes: int
    bos: int | None
    concatenated: bool

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{len(document)} ".encode() + document.numpy().tobytes())
        return digest.hexdigest()

    def blocks(self, length: int) -> list[Tensor]:
        """Documents cut into blocks of `length` tokens that share one token with the next, so that no target is
        lost."""
        room = length - (self.bos is not None)
        blocks = []
        for document in self.documents:
            for begin in range(0, len(document) - 1, room - 1):
                blocks.append(document[begin : begin + room])
        return blocks

    def facts(self) -> dict[str, Any]:
        return {
            "sources": self.sources,
            "documents": len(self.documents),
            "longest": max(len(document) for document in self.documents),
            "tokens": sum(len(document) for document in self.documents),
            "bytes": self.num_bytes,
            "sha256": self.digest,
            "concatenated": self.concatenated,
        }


def _read(
    tokenizer: Any,
    texts: str | Path | Sequence[str | Path],
    documents: Sequence[str] | None,
    concatenate: bool,
    max_tokens: int | None,
    longest: int,
    bos: bool | None,
) -> _Text:
    if max_tokens is not None:
        check_int("max_tokens", max_tokens, low=longest, why="it must hold at least one block of the longest length")
    sources = [str(texts)] if isinstance(texts, (str, Path)) else [str(item) for item in texts]
    if documents is None:
        if not sources or not all(source.strip() for source in sources):
            raise ValueError("texts is empty, or one of them is ''; name a text file, a folder of them, or a data set.")
        documents = _load_texts(sources, tokenizer)
    elif sources:
        raise ValueError("texts and documents are both given; give one of them.")
    else:
        sources = ["given directly"]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError(f"There is no text in {', '.join(sources)}: every document in it is blank.")
    bos_id = _bos(tokenizer, bos)
    budget = None if max_tokens is None or concatenate else max_tokens
    tokens: list[Tensor] = []
    sizes: list[int] = []
    for document in documents:
        ids = tokenize(tokenizer, document)
        if len(ids) > 1:
            tokens.append(ids)
            sizes.append(len(document.encode("utf-8")))
        if concatenate and max_tokens is not None and sum(map(len, tokens)) >= max_tokens:
            break
        # Documents that hold a whole block come first, so the budget may be full before the last one is read.
        if budget is not None and sum(len(ids) for ids in tokens if len(ids) >= longest) >= budget:
            break
    special = set(tokenizer.all_special_ids)
    if all(token in special for ids in tokens for token in ids.tolist()):
        raise ValueError(f"There is nothing to predict in {', '.join(sources)}: it holds only special tokens.")
    if concatenate:
        end = tokenizer.eos_token_id
        separator = torch.tensor([] if end is None else [end], dtype=torch.int64)
        joined = torch.cat([piece for ids in tokens for piece in (ids, separator)])
        tokens, sizes = [joined[: len(joined) - len(separator)]], [sum(sizes)]
    found = max(len(ids) for ids in tokens)
    if found < longest:
        more = "" if concatenate else " Or join the documents: concatenate=True."
        raise ValueError(
            f"The longest document has {found} tokens, which is less than the longest length asked for ({longest})."
            f" Give longer text, or lengths up to {found}.{more}"
        )
    if max_tokens is not None:
        tokens, sizes = _within_budget(tokenizer, tokens, sizes, max_tokens, longest)
    return _Text(sources, tokens, sum(sizes), bos_id, concatenate)


def _within_budget(
    tokenizer: Any, tokens: list[Tensor], sizes: list[int], max_tokens: int, longest: int
) -> tuple[list[Tensor], list[int]]:
    """Documents that hold a block of the longest length first, in their order; the last one is cut."""
    kept: list[Tensor] = []
    bytes_kept: list[int] = []
    for i in sorted(range(len(tokens)), key=lambda i: len(tokens[i]) < longest):
        left = max_tokens - sum(map(len, kept))
        if left < 2:
            break
        ids = tokens[i][:left]
        kept.append(ids)
        whole = len(ids) == len(tokens[i])
        bytes_kept.append(sizes[i] if whole else len(tokenizer.decode(ids.tolist()).encode("utf-8")))
    return kept, bytes_kept


def _load_texts(sources: list[str], tokenizer: Any) -> list[str]:
    from hf_posenc.data import load_documents

    documents = []
    for row in load_documents(sources):
        text = row["text"]
        if not text and row.get("messages"):
            if not getattr(tokenizer, "chat_template", None):
                raise ValueError(
                    f"Document {row['id']!r} is a conversation, and the tokenizer has no chat template to write it"
                    " with."
                )
            text = tokenizer.apply_chat_template(json.loads(row["messages"]), tokenize=False)
        documents.append(text)
    return documents


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """The whole text as token ids [length], without special tokens.

    Raises:
        ValueError: the tokenizer cut the text off, whatever it was told.
    """
    offsets = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=offsets)
    if offsets and encoded["offset_mapping"]:
        end = encoded["offset_mapping"][-1][1]
        if len(text[end:].strip()) > 64:  # a few characters may be normalised away
            raise ValueError(
                f"The tokenizer ({type(tokenizer).__name__}, model_max_length={tokenizer.model_max_length}) cut a"
                " text of"
                f" {len(text)} characters off after {end}, although it was told not to. Load it without truncation."
            )
    return torch.tensor(encoded["input_ids"], dtype=torch.int64)


def _bos(tokenizer: Any, wanted: bool | None) -> int | None:
    token = getattr(tokenizer, "bos_token_id", None)
    if wanted is False:
        return None
    if wanted is True:
        if token is None:
            raise ValueError("bos=True, but the tokenizer has no BOS token. Leave it out, or give the tokenizer one.")
        return token
    ids = tokenizer("a")["input_ids"]
    return token if token is not None and ids and ids[0] == token else None


# ---------------------------------------------------------------------- the parts


def _output_folder(output: str | Path | None) -> Path | None:
    """The folder to write into.

    Raises:
        ValueError: it is a file, or holds something that is not an evaluation.
    """
    if output is None:
        return None
    folder = Path(output)
    if folder.exists():
        if not folder.is_dir():
            raise ValueError(f"output={str(output)!r} is a file; name a folder.")
        names = {item.name for item in folder.iterdir()}
        if names and not names & {"results.json", "parts"}:
            raise ValueError(
                f"output={str(output)!r} holds something else ({', '.join(sorted(names)[:3])}). Name a new folder,"
                " or one that"
                " an earlier evaluation wrote."
            )
    return folder


def _refuse_anothers_report(folder: Path | None, source: _Source) -> None:
    """Raise a ValueError where the report in `folder` is of another model, which this one's would replace.

    The same place with other weights is a model trained again: its report may be replaced.
    """
    if folder is None or not (folder / "results.json").is_file():
        return
    try:
        theirs = json.loads((folder / "results.json").read_text(encoding="utf-8"))["model"]
        fingerprint, place = theirs["fingerprint"], theirs["source"]
    except (ValueError, KeyError, TypeError):
        return  # no report that could be lost
    if fingerprint != source.fingerprint and place != source.place:
        raise ValueError(
            f"output={str(folder)!r} holds the report on another model ({place}). Name another folder, or remove that"
            " one first."
        )


@contextlib.contextmanager
def _part(folder: Path | None, key: dict[str, Any], fresh: bool, processes: Processes) -> Iterator[dict[str, Any]]:
    """The finished part with this key, or an empty dict to fill, which is then written whole."""
    digest = hashlib.sha256(json.dumps(plain(key), sort_keys=True).encode()).hexdigest()
    path = None if folder is None else folder / "parts" / f"{digest[:32]}.json"
    part: dict[str, Any] = {}
    if path is not None and not fresh and path.is_file():
        with contextlib.suppress(ValueError):  # a damaged one is measured again
            part = json.loads(path.read_text(encoding="utf-8"))["part"]
    part = processes.first_says(part)
    finished = bool(part)
    yield part
    if path is not None and not finished and processes.is_first:
        write_json(path, {"key": key, "part": part})
    for name in ("accuracy", "lenient"):  # JSON has no numbers for keys
        if name in part:
            part[name] = {int(n): {float(d): v for d, v in row.items()} for n, row in part[name].items()}


def _reported(lengths: Sequence[int], trained: int | None) -> list[int]:
    """The lengths asked for, the trained one, and its halves: the short side."""
    longest = max(lengths)
    start = min(trained or longest, longest)
    halves = {start >> k for k in range(8) if start >> k >= SHORTEST}
    return sorted({*lengths, *halves})


def _measure(
    model: nn.Module,
    text: _Text,
    lengths: list[int],
    block_length: int,
    stride: int | None,
    separate: bool,
    **options: Any,
) -> dict[str, Any]:
    """Perplexity under the encoding in force at each of `lengths`.

    Args:
        block_length: what the text is cut into, the same for every encoding, so that all are scored on the same
        targets.
        separate: give each length a pass of its own.
        options: of `perplexity`.
    """
    began = time.time()
    longest = max(lengths)
    blocks = text.blocks(block_length) if stride is None else text.documents
    results: dict[int, PerplexityResult] = {}
    seconds: dict[int, float] = {}
    for length in lengths if separate else [longest]:
        start = time.time()
        pieces = blocks
        if length < block_length and stride is None:
            room = length - (text.bos is not None)
            pieces = [block[:room] for block in blocks]
        pieces = [piece for piece in pieces if len(piece) > 1]
        step = None if stride is None else min(stride, length)
        results[length] = perplexity(model, pieces, length, step, bos=text.bos, **options)
        seconds[length] = time.time() - start
    whole = results[longest]
    rows = []
    for length in lengths:
        part = results.get(length, whole).within(length // 2, length)
        rows.append(
            {
                "length": length,
                "low": length // 2,
                "high": length,
                "tokens": part.tokens,
                "perplexity": part.perplexity if part.tokens else float("nan"),
                "nll": part.nll,
                "interval": _interval(part),
            }
        )
    return {
        "tokens": whole.tokens,
        "nll": whole.nll,
        "perplexity": whole.perplexity,
        "bits_per_byte": dataclasses.replace(whole, num_bytes=text.num_bytes).bits_per_byte,
        "interval": _interval(whole),
        "windows": whole.windows,
        "passes": len(results),
        "rows": rows,
        "positions": whole.by_position(),
        "seconds": time.time() - began,
        "seconds_by_length": seconds if separate else None,
    }


def _measure_pseudo(
    model: nn.Module,
    tokenizer: Any,
    text: _Text,
    lengths: list[int],
    block_length: int,
    batch_size: int | None,
    progress: bool | None,
) -> dict[str, Any]:
    """Pseudo-perplexity under the encoding in force in windows of each of `lengths`: an encoder has no one-pass
    curve."""
    began = time.time()
    prefix, suffix = tokenizer.cls_token_id, tokenizer.sep_token_id
    extra = (prefix is not None) + (suffix is not None)
    rows, seconds = [], {}
    whole: PerplexityResult | None = None
    for length in lengths:
        start = time.time()
        room = length - extra
        pieces = [block[:room] for document in text.documents for block in document.split(block_length - extra)]
        pieces = [piece for piece in pieces if len(piece) == room]  # whole windows only: the context is the window
        whole = pseudo_perplexity(
            model,
            pieces,
            tokenizer.mask_token_id,
            length,
            prefix=prefix,
            suffix=suffix,
            max_targets=PSEUDO_TARGETS,
            batch_size=batch_size,
            progress=progress,
        )
        row: dict[str, Any] = {
            "length": length,
            "low": length,
            "high": length,
            "tokens": whole.tokens,
            "perplexity": whole.perplexity,
        }
        rows.append(row | {"nll": whole.nll, "interval": _interval(whole)})
        seconds[length] = time.time() - start
    assert whole is not None
    return {
        "tokens": whole.tokens,
        "nll": whole.nll,
        "perplexity": whole.perplexity,
        "bits_per_byte": None,
        "interval": _interval(whole),
        "windows": whole.windows,
        "passes": len(lengths),
        "rows": rows,
        "positions": [],
        "seconds": time.time() - began,
        "seconds_by_length": seconds,
    }


def _interval(result: PerplexityResult) -> tuple[float, float] | None:
    enough = len(torch.unique(result.document_of)) >= DOCUMENTS_FOR_INTERVAL
    return result.confidence_interval() if enough else None


def _against(row: dict[str, Any], native: dict[str, Any] | None) -> dict[str, Any]:
    """The row with its change against the native encoding at the same length, as a fraction."""
    twin = next((r for r in native["rows"] if r["length"] == row["length"]), None) if native else None
    change = float(row["perplexity"]) / float(twin["perplexity"]) - 1 if twin else None
    return {**row, "change_against_native": change}


def _versions() -> dict[str, str]:
    import importlib.metadata

    found = {"python": platform.python_version()}
    for name in ("hf-posenc", "torch", "transformers", "tokenizers", "accelerate", "peft", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
