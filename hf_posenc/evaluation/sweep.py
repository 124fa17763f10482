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
import operator
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation import limits
from hf_posenc.evaluation.cost import measure_cost
from hf_posenc.evaluation.files import output_folder, plain, refuse_others_report, write_json
from hf_posenc.evaluation.likelihood import PerplexityResult, perplexity
from hf_posenc.evaluation.processes import Processes
from hf_posenc.evaluation.pseudo import pseudo_perplexity
from hf_posenc.evaluation.retrieval import passkey, passkey_probes
from hf_posenc.evaluation.text import Text, read_text
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
REPLY = 16
"""Tokens that the reply to a passkey prompt may take, at most."""
_VERSION = 3  # part of every part's key: raise it when numbers come out differently


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
    cost: bool = False,
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
    in one pass for each length, over the beginnings of the same blocks, so that the same targets are scored. With a
    `stride` every encoding has a pass for each length L, in windows of L tokens that slide over the documents. The
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
        stride: tokens between sliding windows, which have as many tokens as the row's length; where that is shorter
            than the stride, they do not overlap (default: blocks of `max(lengths)` tokens without overlap, which need
            one pass for all lengths).
        bos: put the tokenizer's BOS before each window (default: where the tokenizer itself puts one before a text).
        batch_size: windows run together (default: what the device runs fastest).
        cost: also time one pass at each of `lengths`, over the beginning of the longest document.
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
    one = isinstance(encodings, (str, dict)) or not hasattr(encodings, "__iter__")
    wanted = list(dict.fromkeys(map(_wanted, [encodings] if one else encodings)))
    if not wanted:
        raise ValueError('encodings is empty; name at least one, such as "native".')
    lengths = _lengths("lengths", lengths)
    if not lengths:
        raise ValueError("lengths is empty; give context lengths in tokens, such as [2048, 8192].")
    if definition not in (*DEFINITIONS, PSEUDO):
        raise ValueError(f"definition={definition!r} is not known; choose one of {', '.join((*DEFINITIONS, PSEUDO))}.")
    if definition == PSEUDO and (stride is not None or passkey_trials or cost):
        raise ValueError(
            'definition="pseudo" is for encoders, which have no sliding windows and write no answers; leave stride,'
            " cost and passkey_trials out."
        )
    if definition == "disjoint" and stride is not None:
        raise ValueError(f'stride={stride} is not allowed with definition="disjoint", whose windows do not overlap.')
    if stride is not None:
        check_int("stride", stride, low=1, why="it is the number of tokens between windows")
        if stride > max(lengths):
            raise ValueError(
                f"stride={stride} is not allowed; it may be at most the longest length ({max(lengths)}), or tokens"
                " would be skipped."
            )
    check_int("passkey_trials", passkey_trials, low=0, why="it is the number of passkeys for each length and depth")
    passkey_lengths = _lengths("passkey_lengths", passkey_lengths or lengths) if passkey_trials else []
    try:
        depths = sorted({float(depth) for depth in passkey_depths})
    except (TypeError, ValueError):
        raise ValueError(f"passkey_depths={passkey_depths!r} is not allowed; give numbers from 0 to 1.") from None
    if not depths or not 0 <= depths[0] <= depths[-1] <= 1:
        raise ValueError(f"passkey_depths={depths} is not allowed; give numbers from 0 (the start of the text) to 1.")
    if bos is not None and not isinstance(bos, bool):
        raise ValueError(f"bos={bos!r} is not allowed; it is True, False, or None (as the tokenizer itself does).")
    folder = output_folder(output)
    processes = Processes.find()

    source = _Source(model, tokenizer, dtype, device, "masked" if definition == PSEUDO else "causal")
    if definition == PSEUDO and source.tokenizer.mask_token_id is None:
        raise ValueError('definition="pseudo" needs a tokenizer with a mask token; this one has none.')
    refuse_others_report(folder, [(source.fingerprint, source.place)])
    bos = False if definition == PSEUDO else bos
    text = read_text(source.tokenizer, texts, documents, concatenate, max_tokens, max(lengths), bos)
    key = {"version": _VERSION, "task": "model", "model": source.fingerprint, "dtype": source.dtype_name}
    with _part(folder, key, fresh, processes) as part:
        if not part:
            part |= source.facts()
    trained = source.facts(part)["trained_length"]
    reported = _reported(lengths, trained)
    todo = sorted(wanted, key=lambda item: item != SAVED)  # before the model is patched with others
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
        "bytes": text.num_bytes,  # other text may have the same tokens
    }
    task = {"task": "passkey", "depths": depths, "trials": passkey_trials, "seed": seed}
    task |= {name: common[name] for name in ("version", "model", "dtype")}
    task |= {"tokenizer": _hash_tokenizer(source.tokenizer), "made_for": max(lengths)}
    parts: dict[Any, dict[str, Any]] = {}
    costs: dict[Any, dict[str, Any]] = {}
    retrieval: dict[Any, dict[int, dict[str, Any]]] = {}
    if passkey_lengths:  # a prompt may be too short for its question
        passkey_probes(source.tokenizer, passkey_lengths[:1], depths, 1, seed)
    short = [length for length in reported if trained and length <= trained]
    keys: dict[Any, dict[str, Any]] = {}
    for item in todo:
        upto = short if item is _SHORT_NATIVE else reported
        keys[item] = common | {"task": "perplexity", "encoding": _key(item), "lengths": upto, "made_for": max(lengths)}
        finished = _part_file(folder, keys[item])
        if fresh or finished is None or not finished.is_file():
            source.check(item, max(lengths), max(upto))
    try:
        for item in todo:
            upto = keys[item]["lengths"]
            with _part(folder, keys[item], fresh, processes) as part:
                if not part:
                    live = source.patched(item, max(lengths))
                    part |= {"device": source.device_name, "versions": _versions()}
                    part |= _describe(live, item, max(lengths))
                    logger.info("Measuring %s", part["label"])
                    if definition == PSEUDO:
                        part |= _measure_pseudo(live, source.tokenizer, text, upto, max(lengths), batch_size, progress)
                    else:
                        separate = part["length_dependent"] or stride is not None
                        options = {"definition": definition, "batch_size": batch_size, "progress": progress}
                        part |= _measure(live, text, upto, max(lengths), stride, separate, **options)
            parts[item] = part
            if cost and item is not _SHORT_NATIVE:
                key = common | {"task": "cost", "encoding": _key(item), "lengths": lengths, "made_for": max(lengths)}
                with _part(folder, key, fresh, processes) as part:
                    if not part:
                        began = time.time()
                        longest = max(text.documents, key=len)
                        part |= {"rows": measure_cost(source.patched(item, max(lengths)), longest, lengths)}
                        part |= {"seconds": time.time() - began, "device": source.device_name, "versions": _versions()}
                costs[item] = part
            for size in passkey_lengths if item is not _SHORT_NATIVE else []:
                with _part(folder, task | {"encoding": _key(item), "length": size}, fresh, processes) as part:
                    if not part:
                        live = source.patched(item, max(lengths))
                        logger.info("Hiding passkeys under %s in %d tokens", parts[item]["label"], size)
                        part |= _measure_passkeys(live, source.tokenizer, size, depths, passkey_trials, seed, progress)
                        part |= {"device": source.device_name, "versions": _versions()}
                retrieval.setdefault(item, {})[size] = part
    finally:
        source.restore()

    rows = []
    native = next((parts[item] for item in (NATIVE, _SHORT_NATIVE) if item in parts), None)
    for item in wanted:
        entry = dict(parts[item])
        # A model saved with its encoding in its own config has no other to go back to: nothing is compared.
        entry["is_native"] = item == SAVED and native is not None and entry["encoding"] == native["encoding"]
        twin = None if entry["is_native"] else native
        entry["rows"] = [against(row, twin) for row in entry["rows"]]
        entry["cost"] = costs[item]["rows"] if item in costs else None
        if item in retrieval:
            found = retrieval[item]
            entry["passkey"] = {
                "accuracy": {size: part["accuracy"] for size, part in found.items()},
                "lenient": {size: part["lenient"] for size, part in found.items()},
                "depths": depths,
                "trials": passkey_trials,
                "seed": seed,
                "seconds": sum(part["seconds"] for part in found.values()),
            }
        if isinstance(item, str):
            entry["label"] = item if item == NATIVE else f"{item} ({entry['label']})"
        rows.append(entry)
    measured = [part for item in todo for part in (parts[item], *retrieval.get(item, {}).values())] + [*costs.values()]
    results = plain(
        {
            "title": title or f"{source.name} by context length",
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(command if command is not None else sys.argv),
            "versions": _all_versions([_versions(), *(part["versions"] for part in measured)]),
            "device": "; ".join(dict.fromkeys(part["device"] for part in measured)),
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
            "seconds": sum(part["seconds"] for part in measured),
            "native": native,
            "compared_with": NATIVE,
            "encodings": rows,
        }
    )
    if folder is not None and processes.is_first:
        from hf_posenc.evaluation.report import write_report

        write_report(results, folder)
    processes.wait()
    return results


def _lengths(name: str, values: Any) -> list[int]:
    try:
        found = sorted({operator.index(value) for value in values})  # numpy's numbers too
    except TypeError:
        raise ValueError(
            f"{name}={values!r} is not allowed; give a list of lengths in tokens, such as [2048, 8192]."
        ) from None
    for length in found:
        check_int(name, length, low=4, why="a context length in tokens")
    return found


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
            self.fingerprint = _hash_weights(model)
            self.name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
            self.place = f"a loaded model ({self.name})"
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
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
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

    def check(self, item: Any, made_for: int, longest: int) -> None:
        """Try an encoding on a copy without weights, before anything is measured.

        Raises:
            ValueError: the model cannot take it, or cannot be fed `longest` tokens with it.
        """
        if any(hasattr(module, "_hf_hook") for module in self.model.modules()):
            return  # offloaded weights are held by hooks, and would be copied
        weights = [*self.model.parameters(), *self.model.buffers()]
        twin = copy.deepcopy(self.model, {id(weight): _weightless(weight) for weight in weights})
        _put(twin, item, made_for)
        limits.check_length(twin, "lengths", longest)

    def patched(self, item: Any, made_for: int) -> nn.Module:
        """The model with another encoding in force."""
        self.facts()  # of the model as it was loaded
        assert item != SAVED or self._state == SAVED  # which is measured before all others
        _put(self.model, item, made_for)
        self._state = item
        return self.model

    def restore(self) -> None:
        """Leave a model that was given unpatched, where it was patched here."""
        if self._where is None and self._state != SAVED and _is_patched(self.model):
            from hf_posenc.patch import unpatch

            unpatch(self.model)


def _put(model: nn.Module, item: Any, made_for: int) -> None:
    """Put an encoding in force; `SAVED` is what is."""
    from hf_posenc.patch import patch, unpatch

    if item in (NATIVE, _SHORT_NATIVE):
        if _is_patched(model):
            unpatch(model)
    elif item != SAVED:
        patch(model, item, context_length=made_for if _open(item) else None)


def _weightless(weight: Tensor) -> Tensor:
    empty = weight.detach().to("meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(weight, nn.Parameter) else empty


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


def _describe(model: nn.Module, asked: Any, longest: int) -> dict[str, Any]:
    """What stands in the report about the encoding in force, which was asked for as `asked`, up to `longest` tokens."""
    from hf_posenc.patch import encoding_of

    try:
        encoding = encoding_of(model)
    except (AttributeError, ValueError):
        return {"label": NATIVE, "encoding": None, "length_dependent": False, "frequencies": None}
    frequencies = None
    if encoding.site == "rotary":
        with contextlib.suppress(Exception):  # a picture less is no reason to lose a measurement
            frequencies = _frequencies(model, encoding, longest)
    return {
        "label": _label(asked, encoding),
        "encoding": encoding.to_dict(),
        "length_dependent": encoding.length_dependent,
        "frequencies": frequencies,
    }


def _label(asked: Any, encoding: Any) -> str:
    """The encoding as it was asked for, with the factor or number of positions that was worked out for it."""
    if isinstance(asked, (str, _ShortNative)) or not _open(asked):
        return _shortened(str(encoding))
    worked_out = {}
    for name in ("factor", "num_positions"):
        value = getattr(encoding, name, None)
        if value is not None and getattr(asked, name) is None:
            worked_out[name] = int(value) if float(value).is_integer() else round(value, 4)
    return _shortened(str(asked.replace(**worked_out)))


def _shortened(label: str) -> str:
    """A label without long lists of numbers; what tells two of them apart stays."""

    def short(match: re.Match[str]) -> str:
        numbers = match[0]
        return f"[{numbers.count(',') + 1} numbers #{hashlib.sha256(numbers.encode()).hexdigest()[:4]}]"

    return re.sub(r"\[[^\]]{24,}\]", short, label)


def _frequencies(model: nn.Module, encoding: Any, length: int) -> list[float]:
    """Radians per token of each rotary pair, for sequences of `length` tokens where they depend on it."""
    from hf_posenc.positions import CALL, Plan

    plans = (getattr(getattr(module, CALL, None), "plan", None) for module in model.modules())
    plan = next((plan for plan in plans if isinstance(plan, Plan)), None)
    if plan is not None:
        resolved: Any = plan.resolved
        head_dim = plan.shape.head_dim
    else:
        config: Any = limits.text_config(model)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        resolved = encoding
    lengths = torch.tensor([length]) if encoding.length_dependent else None
    return resolved.frequencies(int(head_dim * resolved.rotary_fraction), lengths).reshape(-1).tolist()


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
        digest.update(weight.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy())
    for name, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "scaling"):  # which of its adapters act, and how much
            acts = (module.active_adapters, module.scaling, getattr(module, "disable_adapters", False))
            digest.update(f"{name} {acts}".encode())
    return digest.hexdigest()


# ---------------------------------------------------------------------- the parts


def _part_file(folder: Path | None, key: dict[str, Any]) -> Path | None:
    digest = hashlib.sha256(json.dumps(plain(key), sort_keys=True).encode()).hexdigest()
    return None if folder is None else folder / "parts" / f"{digest[:32]}.json"


@contextlib.contextmanager
def _part(folder: Path | None, key: dict[str, Any], fresh: bool, processes: Processes) -> Iterator[dict[str, Any]]:
    """The finished part with this key, or an empty dict to fill, which is then written whole."""
    path = _part_file(folder, key)
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
            part[name] = {float(depth): float(value) for depth, value in part[name].items()}


def _reported(lengths: Sequence[int], trained: int | None) -> list[int]:
    """The lengths asked for, the trained one, and its halves: the short side."""
    longest = max(lengths)
    start = min(trained or longest, longest)
    halves = {start >> k for k in range(8) if start >> k >= SHORTEST}
    return sorted({*lengths, *halves})


def _measure(
    model: nn.Module,
    text: Text,
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
        separate: give each length a pass of its own. With a stride it must: but for the beginnings of documents, a
            window scores only targets with nearly all of it before them.
        options: of `perplexity`.
    """
    began = time.time()
    longest = max(lengths)
    cut = stride is None and options["definition"] != "disjoint"  # whose windows cut documents by themselves
    blocks = text.blocks(block_length) if cut else text.documents
    results: dict[int, PerplexityResult] = {}
    seconds: dict[int, float] = {}
    for length in lengths if separate else [longest]:
        start = time.time()
        pieces = blocks
        if length < block_length and cut:
            room = length - (text.bos is not None)
            pieces = [block[:room] for block in blocks]
        pieces = [piece for piece in pieces if len(piece) > 1]
        step = None if stride is None else min(stride, length)
        results[length] = perplexity(model, pieces, length, step, bos=text.bos, **options)
        seconds[length] = time.time() - start
    whole = results[longest]
    counted_again = options["definition"] == "full_windows" and stride is not None
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
        "bits_per_byte": None if counted_again else dataclasses.replace(whole, num_bytes=text.num_bytes).bits_per_byte,
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
    text: Text,
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


def _measure_passkeys(
    model: nn.Module,
    tokenizer: Any,
    length: int,
    depths: list[float],
    trials: int,
    seed: int,
    progress: bool | None,
) -> dict[str, Any]:
    """Passkeys found in prompts of one length by depth; NaN where a table has no rows left for the reply."""
    began = time.time()
    limit = limits.hard_limit(model)
    if limit is not None and length <= limit[0] < length + REPLY:
        exact = lenient = dict.fromkeys(depths, float("nan"))
    else:
        found = passkey(model, tokenizer, [length], depths, trials, seed, progress=progress)
        exact, lenient = found.accuracy[length], found.lenient[length]
    return {"accuracy": exact, "lenient": lenient, "seconds": time.time() - began}


def _interval(result: PerplexityResult) -> tuple[float, float] | None:
    enough = len(torch.unique(result.document_of)) >= DOCUMENTS_FOR_INTERVAL
    return result.confidence_interval() if enough else None


def against(row: dict[str, Any], native: dict[str, Any] | None) -> dict[str, Any]:
    """The row with its change against the native encoding at the same length, as a fraction."""
    twin = next((r for r in native["rows"] if r["length"] == row["length"]), None) if native else None
    change = float(row["perplexity"]) / float(twin["perplexity"]) - 1 if twin else None
    return {**row, "change_against_native": change}


def _all_versions(found: list[dict[str, str]]) -> dict[str, str]:
    """By package; several where finished parts were measured with another one."""
    names = dict.fromkeys(name for versions in found for name in versions)
    return {name: "; ".join(dict.fromkeys(v[name] for v in found if name in v)) for name in names}


def _versions() -> dict[str, str]:
    import importlib.metadata

    found = {"python": platform.python_version()}
    for name in ("hf-posenc", "torch", "transformers", "tokenizers", "accelerate", "peft", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
