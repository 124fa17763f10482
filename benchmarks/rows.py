"""The rows of the table. A function yields one or more; its name is what `python -m benchmarks` takes."""

from __future__ import annotations

import importlib.util
import inspect
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

import hf_posenc
from benchmarks import measuring
from benchmarks.loss import Step, sliced_step
from benchmarks.measuring import Run
from benchmarks.parts import (
    BUILD,
    Attention,
    Size,
    forward,
    gpt2,
    llama,
    tokens,
    train_step,
    with_dense_bias,
)


@dataclass(frozen=True)
class Settings:
    """How large and how often."""

    size: Size = field(default_factory=Size)
    rounds: int = 7
    clock: str = "wall"
    tiny: bool = False
    """Everything as small as it can be: for the test that it runs."""

    def at(self, length: int, **changes: Any) -> Size:
        """A size of this length, or of the tiny one."""
        return replace(self.size, **({} if self.tiny else {"length": length, **changes}))


@dataclass(frozen=True)
class Row:
    """One line of the table. None where there is nothing to compare with."""

    name: str
    """Of the function that measured it."""
    what: str
    unit: str
    ours: float
    stock: float | None = None
    """Stock transformers with the encoding that the model came with."""
    otherwise: tuple[tuple[str, float], ...] = ()
    """What a user would do otherwise."""
    limit: float | None = None
    """The same without any position encoding."""
    ratio: float | None = None
    against: str = ""
    """What `ratio` is ours divided by."""
    target: tuple[str, float] | None = None
    """`at most` or `at least` so much."""

    @property
    def met(self) -> bool | None:
        if self.target is None or self.ratio is None:
            return None
        return self.ratio <= self.target[1] if self.target[0] == "at most" else self.ratio >= self.target[1]


ROWS: dict[str, Callable[[Settings], Iterator[Row]]] = {}


def rows(measure: Callable[[Settings], Iterator[Row]]) -> Callable[[Settings], Iterator[Row]]:
    ROWS[measure.__name__] = measure
    return measure


def compared(
    settings: Settings, name: str, what: str, variants: Mapping[str, Run], against: str, most: float | None
) -> Row:
    """A row of times. Variants are named ours, stock, limit, or say what a user would do otherwise."""
    taken = measuring.times(variants, settings.rounds, settings.clock)
    middle = {key: statistics.median(values) for key, values in taken.items()}
    return Row(
        name,
        what,
        "s",
        middle.pop("ours"),
        middle.pop("stock", None),
        tuple((key, value) for key, value in middle.items() if key != "limit"),
        middle.get("limit"),
        measuring.ratio(taken["ours"], taken[against]),
        against,
        None if most is None else ("at most", most),
    )


def _parts(ours: float, theirs: float) -> float:
    """A memory in parts of another, of which a tiny one may be nothing at all."""
    return ours / max(theirs, 1 / 16)


def patched(kind: str, size: Size, encoding: str, **options: Any) -> PreTrainedModel:
    return hf_posenc.patch(BUILD[kind](size), encoding, **options)


# ---------------------------------------------------------------------- score biases


def _bias_rows(
    settings: Settings, name: str, kind: str, encoding: str, step: Callable[..., Run], length: int, most: float | None
) -> Iterator[Row]:
    size = settings.at(length)
    ids = tokens(size)
    variants = {
        "ours": step(patched(kind, size, encoding), ids),
        "stock": step(BUILD[kind](size), ids),
        "bias as a tensor": step(with_dense_bias(kind, size, encoding), ids),
        "limit": step(patched(kind, size, "nope"), ids),
    }
    against = "bias as a tensor" if encoding in ("t5", "kerple", "fire") else "limit"
    doing = "forward" if step is forward else "forward + backward"
    yield compared(settings, name, f"{encoding} on {kind}, {doing}, {size.length} tokens", variants, against, most)


@rows
def alibi_forward(settings: Settings) -> Iterator[Row]:
    yield from _bias_rows(settings, "alibi_forward", "gpt2", "alibi", forward, 4096, 1.15)


@rows
def alibi_train(settings: Settings) -> Iterator[Row]:
    yield from _bias_rows(settings, "alibi_train", "gpt2", "alibi", train_step, 4096, 1.2)


@rows
def alibi_grouped(settings: Settings) -> Iterator[Row]:
    """Grouped keys, as in LLaMA."""
    yield from _bias_rows(settings, "alibi_grouped", "llama", "alibi", forward, 4096, 1.15)


@rows
def alibi_bfloat16(settings: Settings) -> Iterator[Row]:
    size = settings.at(2048, layers=1)
    ids = tokens(size)
    models: dict[str, Any] = {
        "ours": patched("gpt2", size, "alibi"),
        "stock": gpt2(size),
        "limit": patched("gpt2", size, "nope"),
    }
    variants = {name: forward(model.to(torch.bfloat16), ids) for name, model in models.items()}
    what = f"alibi on gpt2 in bfloat16, forward, {size.length} tokens"
    yield compared(settings, "alibi_bfloat16", what, variants, "limit", 1.15)


@rows
def alibi_encoder(settings: Settings) -> Iterator[Row]:
    yield from _bias_rows(settings, "alibi_encoder", "bert", "alibi", forward, 4096, None)
    yield from _bias_rows(settings, "alibi_encoder", "bert", "alibi", train_step, 2048, None)


@rows
def alibi_padded(settings: Settings) -> Iterator[Row]:
    """A batch of two, one row of which is half padding."""
    size = settings.at(2048)
    ids = tokens(size, batch=2)
    mask = torch.ones_like(ids)
    mask[1, : size.length // 2] = 0
    for kind in ("gpt2", "bert"):
        variants = {
            "ours": forward(patched(kind, size, "alibi"), ids, attention_mask=mask),
            "stock": forward(BUILD[kind](size), ids, attention_mask=mask),
            "limit": forward(patched(kind, size, "nope"), ids, attention_mask=mask),
        }
        what = f"alibi on {kind}, forward, 2 x {size.length} tokens with padding"
        yield compared(settings, "alibi_padded", what, variants, "limit", 1.15)


@rows
def alibi_call(settings: Settings) -> Iterator[Row]:
    """One attention call alone, where the bias is the largest part that it can be."""
    size = settings.at(4096)
    call = Attention("alibi", size)
    variants: dict[str, Run] = {"ours": call.ours, "bias as a tensor": call.dense, "limit": call.plain}
    variants |= _flex(call, size) | _x_transformers(call, size)
    what = f"alibi, one attention call, {size.heads} heads, {size.length} tokens"
    yield compared(settings, "alibi_call", what, variants, "limit", None)


def _flex(call: Attention, size: Size) -> dict[str, Run]:
    """Flex attention, compiled, with ALiBi's score function, where this machine can compile it."""
    if size.length < 128:
        return {}
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = torch.tensor(call.owner.plan.resolved.head_slopes(size.heads))
    seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, size.length, size.length, device="cpu")
    attend: Any = torch.compile(flex_attention)

    def run() -> object:
        with torch.no_grad():
            bias = lambda score, b, h, i, j: score - slopes[h] * (i - j)  # noqa: E731
            return attend(call.query, call.key, call.value, score_mod=bias, block_mask=seen)

    try:
        run()
    except Exception as error:  # no C++ compiler, for one
        print(f"(flex attention left out: {type(error).__name__})")
        return {}
    return {"flex attention": run}


def _x_transformers(call: Attention, size: Size) -> dict[str, Run]:
    if importlib.util.find_spec("x_transformers") is None:
        return {}
    from x_transformers.attend import Attend
    from x_transformers.x_transformers import AlibiPositionalBias

    attend = Attend(causal=True, flash=True, heads=size.heads)
    bias = AlibiPositionalBias(size.heads)

    def run() -> object:
        with torch.no_grad():
            # It keeps the bias of the last length, so making it is not counted here.
            return attend(call.query, call.key, call.value, attn_bias=bias(size.length, size.length))

    return {"x-transformers": run}


@rows
def alibi_error(settings: Settings) -> Iterator[Row]:
    size = settings.at(4096)
    call = Attention("alibi", size)
    exact = call.exact()
    ours, dense = (float((way().double() - exact).abs().max()) for way in (call.ours, call.dense))
    what = f"alibi, largest error against float64, {size.length} tokens"
    otherwise = (("bias as a tensor", dense),)
    yield Row(
        "alibi_error", what, "", ours, otherwise=otherwise, ratio=ours / dense, against=otherwise[0][0],
        target=("at most", 2.0),
    )  # fmt: skip


@rows
def alibi_memory(settings: Settings) -> Iterator[Row]:
    """What one attention call holds beyond its inputs: twice as much for twice the length."""
    size = settings.at(4096)
    half = replace(size, length=size.length // 2)
    for backward in ("forward", "backward"):
        shorter, longer = (
            measuring.in_own_process("attention", ("ours", "dense", "plain"), "alibi", at.length, at.heads, backward)
            for at in (half, size)
        )
        yield Row(
            "alibi_memory", f"alibi, one attention call, {backward}, {size.length} tokens: peak beyond its inputs",
            "MiB", longer["ours"], otherwise=(("bias as a tensor", longer["dense"]),), limit=longer["plain"],
            ratio=_parts(longer["ours"], shorter["ours"]), against=f"that at {half.length} tokens",
            target=("at most", 2.2),
        )  # fmt: skip


@rows
def sandwich(settings: Settings) -> Iterator[Row]:
    yield from _bias_rows(settings, "sandwich", "gpt2", "sandwich", forward, 4096, 1.15)
    yield from _bias_rows(settings, "sandwich", "gpt2", "sandwich", train_step, 2048, 1.2)


@rows
def t5(settings: Settings) -> Iterator[Row]:
    yield from _bias_rows(settings, "t5", "gpt2", "t5", forward, 4096, 1.5)
    yield from _bias_rows(settings, "t5", "gpt2", "t5", train_step, 2048, 1.5)


@rows
def kerple(settings: Settings) -> Iterator[Row]:
    yield from _bias_rows(settings, "kerple", "gpt2", "kerple", forward, 4096, 1.5)
    yield from _bias_rows(settings, "kerple", "gpt2", "kerple", train_step, 2048, 1.5)


@rows
def fire(settings: Settings) -> Iterator[Row]:
    yield from _bias_rows(settings, "fire", "gpt2", "fire", forward, 4096, 1.5)
    yield from _bias_rows(settings, "fire", "gpt2", "fire", train_step, 2048, 1.5)


@rows
def bias_16k(settings: Settings) -> Iterator[Row]:
    """One attention call at 16,384 tokens, where a bias as a tensor would take 12 GiB for 12 heads."""
    size = settings.at(16384)
    dense = size.heads * size.length**2 * 4 / 2**20
    for encoding in ("alibi", "t5", "kerple", "fire"):
        for backward in ("forward", "backward"):
            peaks = measuring.in_own_process(
                "attention", ("ours", "plain"), encoding, size.length, size.heads, backward
            )
            ours, limit = peaks["ours"], peaks["plain"]
            yield Row(
                "bias_16k", f"{encoding}, one attention call, {backward}, {size.length} tokens: peak beyond its inputs",
                "MiB", ours, otherwise=(("the bias as a tensor alone", dense),), limit=limit, ratio=_parts(ours, dense),
                against="the bias as a tensor alone",
            )  # fmt: skip


@rows
def growth(settings: Settings) -> Iterator[Row]:
    """How one attention call grows with the length, forward: what growth.png shows."""
    lengths = (16, 32) if settings.tiny else (1024, 2048, 4096, 8192, 16384)
    for length in lengths:
        size = replace(settings.size, length=length)
        few = replace(settings, rounds=max(1, min(settings.rounds, 3 if length < 8192 else 1)))
        for encoding in ("alibi", "t5", "fire"):
            call = Attention(encoding, size)
            variants: dict[str, Run] = {"ours": call.ours, "limit": call.plain}
            if length <= 4096:
                variants["bias as a tensor"] = call.dense
            yield compared(few, "growth", f"{encoding}, one attention call, {length} tokens", variants, "limit", None)
            ways = [way for way in ("ours", "plain", "dense") if way != "dense" or length <= 4096]
            peaks = measuring.in_own_process("attention", ways, encoding, length, size.heads, "forward")
            dense = peaks.get("dense")
            yield Row(
                "growth", f"{encoding}, one attention call, {length} tokens: peak beyond its inputs", "MiB",
                peaks["ours"], otherwise=() if dense is None else (("bias as a tensor", dense),),
                limit=peaks["plain"], ratio=_parts(peaks["ours"], peaks["plain"]), against="limit",
            )  # fmt: skip


# ---------------------------------------------------------------------- rotation


@rows
def rotary_scalings(settings: Settings) -> Iterator[Row]:
    size = settings.at(1024)
    ids = tokens(size)
    scalings = ("linear", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope")
    for name in ("yarn",) if settings.tiny else scalings:
        encoding: Any = {"name": name, "factor": 4.0}
        if name == "longrope":
            pairs = size.hidden // size.heads // 2
            encoding |= {"short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs}
        # The dearest case: within the trained length, so that the work of both is the same.
        variants = {
            "ours": train_step(hf_posenc.patch(llama(size), encoding), ids),
            "stock": train_step(llama(size), ids),
            "limit": train_step(patched("llama", size, "nope"), ids),
        }
        what = f"{name} on llama, forward + backward, {size.length} tokens"
        yield compared(settings, "rotary_scalings", what, variants, "stock", 1.02)


@rows
def rotation_by_hooks(settings: Settings) -> Iterator[Row]:
    size = settings.at(1024)
    ids = tokens(size)
    for kind in ("gpt2", "bert"):
        variants = {
            "ours": train_step(patched(kind, size, "rope"), ids),
            "stock": train_step(BUILD[kind](size), ids),
            "limit": train_step(patched(kind, size, "nope"), ids),
        }
        what = f"rope on {kind}, forward + backward, {size.length} tokens"
        yield compared(settings, "rotation_by_hooks", what, variants, "stock", 1.10)


@rows
def rotation_alone(settings: Settings) -> Iterator[Row]:
    """Queries and keys turned, without anything else; ours includes working out the angles."""
    from hf_posenc.sites import rotate, rotation

    size = settings.at(4096)
    model = patched("gpt2", replace(size, length=8, layers=1), "rope:interleaved=true")
    plan: Any = model.base_model.get_submodule("hf_posenc").plan
    width = size.hidden // size.heads
    query, key = torch.randn(2, 1, size.length, size.heads, width)
    positions = torch.arange(size.length)[None]

    def ours() -> object:
        cos, sin = (part.unsqueeze(2) for part in rotation(plan, positions, None, query.dtype))
        return rotate(query, cos, sin, True), rotate(key, cos, sin, True)

    variants: dict[str, Run] = {"ours": ours}
    other = "rotary-embedding-torch"
    if importlib.util.find_spec("rotary_embedding_torch") is not None:
        from rotary_embedding_torch import RotaryEmbedding

        theirs = RotaryEmbedding(dim=width, cache_if_possible=False)
        first, second = query.transpose(1, 2), key.transpose(1, 2)

        def turn() -> object:
            with torch.no_grad():
                return theirs.rotate_queries_or_keys(first), theirs.rotate_queries_or_keys(second)

        variants[other] = turn
    against = other if other in variants else "ours"
    what = f"queries and keys of {size.heads} heads rotated, {size.length} tokens"
    yield compared(settings, "rotation_alone", what, variants, against, None)


# ---------------------------------------------------------------------- decoding


@rows
def decoding(settings: Settings) -> Iterator[Row]:
    """One token at a time behind a cache of 2,048, per token."""
    size = settings.at(2048, layers=6)
    steps = 2 if settings.tiny else 8
    ids = tokens(size)
    cases = [("gpt2", name) for name in ("alibi", "t5", "kerple", "fire", "sandwich", "rope", "sinusoidal")]
    cases += [("llama", name) for name in ("yarn:factor=4", "dynamic_ntk:factor=4", "alibi", "t5")]
    for kind, name in cases[:1] if settings.tiny else cases:
        models = {
            "ours": hf_posenc.patch(BUILD[kind](size, positions=2 * size.length), name),
            "stock": BUILD[kind](size, positions=2 * size.length),
            "limit": hf_posenc.patch(BUILD[kind](size, positions=2 * size.length), "nope"),
        }
        variants = {key: _decoder(model.eval(), ids, steps) for key, model in models.items()}
        what = f"{name} on {kind}, {steps} tokens one by one behind {size.length}"
        yield compared(settings, "decoding", what, variants, "stock", 1.10)


def _decoder(model: PreTrainedModel, ids: Tensor, steps: int) -> Run:
    name = _cache_name(model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{name: cache})

    def run() -> object:
        with torch.no_grad():
            for _ in range(steps):
                model(input_ids=ids[:, :1], use_cache=True, **{name: cache})
        cache.crop(-steps)
        return None

    return run


def _cache_name(model: PreTrainedModel) -> str:
    """What this release of transformers calls the argument."""
    names = inspect.signature(model.base_model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


# ---------------------------------------------------------------------- patching


@rows
def patching(settings: Settings) -> Iterator[Row]:
    """A billion parameters on the meta device."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=64 if settings.tiny else 2048,
        intermediate_size=8192,
        num_hidden_layers=2 if settings.tiny else 16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(weight.numel() for weight in model.parameters())
    for name in ("yarn:factor=4", "alibi", "t5"):
        variants: dict[str, Run] = {"ours": lambda name=name: hf_posenc.patch(model, name)}  # type: ignore[misc]
        taken = measuring.times(variants, settings.rounds, settings.clock)["ours"]
        hf_posenc.unpatch(model)
        seconds = statistics.median(taken)
        what = f"patch a model of {count / 1e9:.2f} billion parameters with {name}"
        yield Row("patching", what, "s", seconds, ratio=seconds, against="1 second", target=("at most", 1.0))


# ---------------------------------------------------------------------- perplexity


def _smollm2(settings: Settings, length: int) -> Size:
    """The shape of SmolLM2-135M: what the output layer costs depends on how much model there is below it."""
    size = settings.at(length, hidden=576, heads=9, layers=30)
    return replace(size, vocabulary=97 if settings.tiny else 49152)


@rows
def perplexity(settings: Settings) -> Iterator[Row]:
    """The shapes of GPT-2 and of SmolLM2-135M: the smaller the model below its output layer, the more is gained."""
    small = settings.at(512, layers=12)
    small = replace(small, vocabulary=97 if settings.tiny else 50257)
    yield from _perplexity(settings, "GPT-2", gpt2(small), small)
    size = _smollm2(settings, 512)
    yield from _perplexity(settings, "SmolLM2-135M", llama(size), size)


def _perplexity(settings: Settings, name: str, model: PreTrainedModel, size: Size) -> Iterator[Row]:
    from hf_posenc.evaluation import perplexity as ours
    from hf_posenc.evaluation.windows import windows

    model.eval()
    window = size.length
    stride = window // 4
    ids = tokens(replace(size, length=4 * window))[0]
    found: dict[str, float] = {}

    def measure() -> None:
        found["ours"] = ours(model, ids, window=window, stride=stride).nll

    @torch.no_grad()
    def recipe() -> None:
        """The strided recipe of transformers' documentation; its labels are shifted inside the model."""
        total, done = 0.0, 0
        for begin in range(0, len(ids), stride):
            end = min(begin + window, len(ids))
            part = ids[None, begin:end]
            labels = part.clone()
            labels[:, : -(end - done)] = -100
            scored = int((labels[:, 1:] != -100).sum())
            total += float(model(part, labels=labels).loss) * scored
            done = end
            if end == len(ids):
                break
        found["recipe"] = total

    @torch.no_grad()
    def passes_alone() -> None:
        for begin, end, _ in windows(len(ids), window, stride):
            model.base_model(input_ids=ids[None, begin:end], use_cache=False)

    variants = {"ours": measure, "the documentation's recipe": recipe, "limit": passes_alone}
    taken = measuring.times(variants, min(settings.rounds, 3), settings.clock)
    # The recipe scores a window's first target from the token before it: one target less where windows meet.
    if abs(found["ours"] / found["recipe"] - 1) > 0.02:
        raise AssertionError(f"Two perplexities that should agree: {found}")
    middle = {key: statistics.median(values) for key, values in taken.items()}
    what = f"perplexity in the shape of {name}, {len(ids)} tokens, window {window}, stride {stride}"
    recipe_name = "the documentation's recipe"
    for against, ratio, target in (
        (f"{recipe_name} / ours", measuring.ratio(taken[recipe_name], taken["ours"]), ("at least", 1.25)),
        ("limit (the passes of the base model)", measuring.ratio(taken["ours"], taken["limit"]), ("at most", 1.1)),
    ):
        yield Row(
            "perplexity", what, "s", middle["ours"], otherwise=((recipe_name, middle[recipe_name]),),
            limit=middle["limit"], ratio=ratio, against=against, target=target,
        )  # fmt: skip


@rows
def rolling(settings: Settings) -> Iterator[Row]:
    """Windows side by side, as lm-evaluation-harness has it: logits of every token, log-softmax, then the targets."""
    from hf_posenc.evaluation import perplexity as ours
    from hf_posenc.evaluation.windows import windows

    size = _smollm2(settings, 512)
    model = llama(size).eval()
    ids = tokens(replace(size, length=4 * size.length))[0]
    first = 0  # the token before the document, of which the harness makes the first prediction
    found: dict[str, float] = {}

    def measure() -> None:
        found["ours"] = ours(model, ids, window=size.length, definition="disjoint", bos=first).nll

    @torch.no_grad()
    def rolling_log_likelihood() -> None:
        total = 0.0
        whole = torch.cat([torch.tensor([first]), ids])
        for begin, end, target in windows(len(whole), size.length, definition="disjoint"):
            logits = model(whole[None, begin : end - 1]).logits
            scores = torch.log_softmax(logits, dim=-1, dtype=torch.float32)[0, target - 1 - begin :]
            total -= float(scores.gather(-1, whole[target:end, None]).sum())
        found["rolling"] = total

    variants = {"ours": measure, "rolling log-likelihood": rolling_log_likelihood}
    harness = _harness(model, size, ids)
    if harness is not None:
        variants["lm-evaluation-harness"] = lambda: found.update(harness=harness())
    against = list(variants)[-1]
    what = f"perplexity of {len(ids)} tokens in windows of {size.length} side by side, vocabulary {size.vocabulary}"
    few = replace(settings, rounds=min(settings.rounds, 3))
    row = compared(few, "rolling", what, variants, against, None)
    if max(found.values()) / min(found.values()) - 1 > 1e-4:
        raise AssertionError(f"Sums that should agree: {found}")
    yield row


def _harness(model: PreTrainedModel, size: Size, ids: Tensor) -> Callable[[], float] | None:
    """The harness's own rolling log-likelihood, where it is installed, on a text with a word for each token."""
    if importlib.util.find_spec("lm_eval") is None:
        return None
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", *(f"t{i}" for i in range(1, size.vocabulary))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", pad_token="<s>")
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=size.length, batch_size=1, device="cpu")
    text = " ".join(names[i] for i in ids.tolist())
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    return lambda: -float(theirs.loglikelihood_rolling([request], disable_tqdm=True)[0])


# ---------------------------------------------------------------------- training


@rows
def loss_in_slices(settings: Settings) -> Iterator[Row]:
    length, hidden, vocabulary = (64, 16, 97) if settings.tiny else (4096, 576, 49152)
    whole = "whole logits"
    few = replace(settings, rounds=max(1, min(settings.rounds, 3)))
    size = settings.at(length, hidden=hidden, heads=9, layers=10, vocabulary=vocabulary)
    for dtype in (torch.float32, torch.bfloat16):
        step = Step(length, hidden, vocabulary, dtype)
        kind = str(dtype).removeprefix("torch.")
        what = f"output layer, loss and gradient alone, {length} tokens, vocabulary {vocabulary}, {kind}"
        yield compared(few, "loss_in_slices", what, {"ours": step.sliced, whole: step.whole}, whole, None)
        peaks = measuring.in_own_process("loss", ("sliced", "whole"), length, hidden, vocabulary, kind)
        ours, theirs = peaks["sliced"], peaks["whole"]
        yield Row(
            "loss_in_slices", f"{what}: peak beyond its inputs", "MiB", ours, otherwise=((whole, theirs),),
            ratio=_parts(ours, theirs), against=whole, target=("at most", 0.4),
        )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        model, ids, kind = llama(size).to(dtype), tokens(size), str(dtype).removeprefix("torch.")
        steps = {"ours": sliced_step(model, ids), whole: train_step(model, ids)}
        what = f"training step, {size.layers} of SmolLM2's 30 layers, {size.length} tokens, {kind}"
        yield compared(few, "loss_in_slices", what, steps, whole, 1.05)
    step = Step(length, hidden, vocabulary, torch.float32)
    exact = Step(length, hidden, vocabulary, torch.float32)
    difference = abs(float(step.sliced()) - float(exact.whole())) / abs(float(exact.whole()))
    yield Row(
        "loss_in_slices", f"loss of {length} tokens in slices, relative difference, float32", "", difference,
        ratio=difference, against=whole, target=("at most", 1e-6),
    )  # fmt: skip
