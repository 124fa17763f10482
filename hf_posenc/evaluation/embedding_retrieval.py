"""Planted-sentence retrieval for sentence encoders: can a pooled vector of a long text tell which fact is in it?

As the needle and passkey tests of LongEmbed (Zhu et al., 2024, arXiv 2404.12096): documents of one length that differ
in one planted sentence, and a query for each. A query counts as solved where its own document is the nearest one. The
chance level is 1 / documents.

What `FACTS` and `PASS_KEYS` do not show: their words are enough to tell the documents apart, and a bag of words can
solve them. They tell whether an encoder's vectors survive a length, not whether it still knows the order of words. Put
`ROLES` beside them, where a bag of words finds one in two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation import limits
from hf_posenc.evaluation.probes import FILLER, fill, place
from hf_posenc.evaluation.retrieval import _check
from hf_posenc.evaluation.scoring import device_of, evaluating, unwrap
from hf_posenc.evaluation.windows import check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTS = (
    ("The lighthouse keeper at Sandy Point collects antique clocks.", "What does the lighthouse keeper collect?"),
    ("Grandmother's plum cake is baked with cardamom and rye flour.", "Which spice goes into grandmother's plum cake?"),
    ("The football match in Porto was stopped because of thick fog.", "Why was the football match in Porto stopped?"),
    ("A young violinist from Oslo won the competition in Leipzig.", "Who won the music competition in Leipzig?"),
    ("Emperor penguins walk ninety kilometres to their nests.", "How far do emperor penguins walk to their nests?"),
    ("The night train to Vienna leaves from platform seven.", "From which platform does the train to Vienna leave?"),
    ("The dentist moved her practice to the old bakery on Mill Street.", "Where did the dentist move her practice?"),
    ("Three goats ate the mayor's roses on Sunday morning.", "What did the goats eat on Sunday?"),
    ("The volcano on the island last erupted in the spring of 1911.", "When did the volcano on the island last erupt?"),
    ("Her favourite film is a silent comedy about a tailor.", "What is her favourite film about?"),
    ("The bridge across the river was painted green by volunteers.", "Who painted the bridge across the river?"),
    ("Doctors advise eight hours of sleep after the vaccination.", "How much sleep is advised after the vaccination?"),
    ("The king gave the castle to his youngest daughter.", "To whom did the king give the castle?"),
    ("Coffee from the highlands of Peru tastes of cherries.", "What does coffee from the highlands of Peru taste of?"),
    ("The submarine was found by fishermen near the coast of Malta.", "Where was the submarine found?"),
    ("Wedding guests danced the tango until four in the morning.", "How long did the wedding guests dance?"),
    ("The beekeeper sells lavender honey at the market on Fridays.", "When is lavender honey sold at the market?"),
    ("A judge ordered the airline to pay for the lost luggage.", "Who has to pay for the lost luggage?"),
    ("The chess champion trains by swimming in a cold lake.", "How does the chess champion train?"),
    ("Snow leopards were photographed in the mountains of Bhutan.", "Where were snow leopards photographed?"),
    ("The painter mixed her blue from crushed glass and milk.", "What did the painter make her blue from?"),
    ("Rent in the harbour district has doubled within ten years.", "How much has rent risen in the harbour district?"),
    ("The astronaut carried a letter from her father to the moon.", "What did the astronaut carry to the moon?"),
    ("Bicycle thieves were caught with the help of a parrot.", "How were the bicycle thieves caught?"),
    ("The oldest oak in the forest was struck by lightning twice.", "What happened to the oldest oak in the forest?"),
    ("Knitting wool for the scarf comes from sheep in Iceland.", "Where does the wool for the scarf come from?"),
    ("The theatre's curtain caught fire during the second act.", "When did the curtain of the theatre catch fire?"),
    ("Farmers in the valley grow pumpkins instead of tobacco.", "What do farmers in the valley grow?"),
    ("The jeweller hid the diamonds in a loaf of bread.", "Where did the jeweller hide the diamonds?"),
    ("Children at the village school learn Portuguese from a sailor.", "Who teaches the children Portuguese?"),
)
"""Sentences about things that have nothing to do with each other, and a query for each: a needle in a haystack."""

NAMES = (
    "Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Irene", "Jonas", "Karen", "Liam", "Mona", "Noah",
    "Olga", "Peter", "Quinn", "Rosa", "Simon", "Tara", "Umar", "Vera", "Walter", "Xenia", "Yusuf", "Zoe",
)  # fmt: skip

PASS_KEYS = tuple(
    (f"The pass key of {name} is {10007 + 3571 * number}.", f"What is the pass key of {name}?")
    for number, name in enumerate(NAMES)
)
"""Sentences that differ in a name and a number only. Far harder: a few tokens have to show in the mean of all."""

ROLES = tuple(
    (f"The {first} {did} the {second}.", f"It was the {first} who {did} the {second}.")
    for one, did, other in (
        ("doctor", "thanked", "pilot"), ("wolf", "chased", "fox"), ("teacher", "painted", "sailor"),
        ("cook", "followed", "judge"), ("singer", "married", "baker"), ("thief", "betrayed", "guard"),
        ("horse", "kicked", "donkey"), ("nurse", "hired", "gardener"), ("mayor", "sued", "banker"),
        ("widow", "visited", "priest"),
    )
    for first, second in ((one, other), (other, one))
)  # fmt: skip
"""Pairs of sentences of the same words, of which only the order differs. A bag of words cannot tell a pair apart and
finds half of the queries' documents. Plant all (documents=20), or pairs are torn apart."""

TIE = 1e-6
"""Cosines that are nearer to each other than this are equal: float32 sums differ by less, whatever the batch."""


@dataclass(frozen=True)
class RankedQuery:
    """Where one query's own document came."""

    length: int
    """Tokens of the documents."""
    trial: int
    """Which set of documents."""
    depth: float
    """Where the sentence was planted: 0 at the start of the text, 1 at its end."""
    above: int
    """Documents nearer to the query than its own."""
    level: int
    """Other documents exactly as near."""

    @property
    def found(self) -> float:
        """1 where its own document came first, 0 where another did; in a tie, what drawing lots would give."""
        return 0.0 if self.above else 1 / (1 + self.level)

    @property
    def reciprocal_rank(self) -> float:
        """1 / rank; in a tie, the mean of the ranks that drawing lots would give."""
        ranks = range(self.above + 1, self.above + self.level + 2)
        return sum(1 / rank for rank in ranks) / len(ranks)


@dataclass(frozen=True)
class EmbeddingRetrievalResult:
    """Fractions of queries whose own document came first."""

    queries: tuple[RankedQuery, ...] = field(repr=False)
    """Every query, for a closer look."""
    chance: float
    """What guessing gives."""

    @property
    def accuracy(self) -> dict[int, float]:
        """{length: fraction of queries whose own document came first}."""
        return {length: _mean([query.found for query in rows]) for length, rows in self._by_length().items()}

    @property
    def ranks(self) -> dict[int, float]:
        """{length: mean reciprocal rank}."""
        return {length: _mean([query.reciprocal_rank for query in rows]) for length, rows in self._by_length().items()}

    @property
    def intervals(self) -> dict[int, tuple[float, float]]:
        """{length: (low, high)} of the accuracy, 95 % (Wilson's score interval, as if queries were independent).

        Queries of one trial share their documents. Whether that matters is seen in how much trials differ.
        """
        return {length: _wilson(self.accuracy[length], len(rows)) for length, rows in self._by_length().items()}

    def by_depth(self, parts: int = 4) -> dict[int, list[float]]:
        """{length: accuracy of the sentences in each of `parts` equal parts of the document, first to last}."""
        check_int("parts", parts, low=1, why="it is the number of parts of a document")
        return {
            length: [_mean([q.found for q in rows if int(q.depth * parts) == part]) for part in range(parts)]
            for length, rows in self._by_length().items()
        }

    def _by_length(self) -> dict[int, list[RankedQuery]]:
        rows: dict[int, list[RankedQuery]] = {}
        for query in self.queries:
            rows.setdefault(query.length, []).append(query)
        return rows


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean of the real tokens' vectors: [batch, length, hidden] and [batch, length] to [batch, hidden], float32.

    Float32 whatever the model's dtype: one sentence moves the mean of a long text by less than bfloat16 can tell.
    """
    weight = mask.unsqueeze(-1).float()
    return (hidden.float() * weight).sum(1) / weight.sum(1).clamp(min=1)


def first_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """The first token's vector ([CLS])."""
    return hidden[:, 0]


def planted_sentence(
    model: nn.Module,
    tokenizer: Any,
    lengths: Sequence[int] = (512, 1024, 2048),
    documents: int = 20,
    trials: int = 3,
    seed: int = 0,
    *,
    facts: Sequence[tuple[str, str]] = FACTS,
    haystack: str = FILLER,
    truncate: int | None = None,
    windows: int | None = None,
    pool: Callable[[Tensor, Tensor], Tensor] = mean_pool,
    batch_size: int = 4,
    progress: bool | None = None,
) -> EmbeddingRetrievalResult:
    """Measure retrieval by a pooled encoder at several document lengths.

    All documents of a trial hold the same text, from a sentence of the haystack that is drawn for the trial, and differ
    in the sentence planted in them and in where it lies: evenly spread depths, dealt out to the sentences by lot. The
    draws are the same for every model and every length.

    Args:
        model: an encoder whose first output is the hidden states [batch, length, hidden], such as `AutoModel` loads.
        tokenizer: its tokenizer.
        lengths: tokens of a document, special ones included; each document is within 1 % of it.
        documents: documents, and queries, in a trial (at most as many as there are facts).
        trials: sets of documents at each length. Their product with `documents` is the number of queries; about 100 are
            needed to tell accuracies apart that differ by 0.15.
        seed: of everything that is drawn.
        facts: (sentence, query) pairs to draw from: `FACTS` (default), `PASS_KEYS`, `ROLES`, or one's own.
        haystack: text around the planted sentences, repeated where it is too short: real text, or (default) repeated
            filler.
        truncate: show the encoder only the first so many tokens of a document, special ones included. What is done with
            an encoder that is left as it is.
        windows: cut documents into windows of so many tokens, special ones included, encode each by itself, and take
            the mean of their vectors, weighted by tokens. The other thing that is done.
        pool: hidden states and mask to vectors (default: `mean_pool`).
        batch_size: documents encoded together. No effect on the result.
        progress: as for `perplexity`.

    Raises:
        ValueError: a length that the model cannot be fed, one that is too short for the sentence, too many documents,
            or both `truncate` and `windows`.
    """
    from hf_posenc.evaluation.processes import Processes

    model = unwrap(model)
    _check(lengths, [0.5], trials)
    check_int("documents", documents, low=2, why="there must be something to confuse a document with")
    check_int("batch_size", batch_size, low=1, why="it is the number of documents encoded together")
    if documents > len(facts):
        raise ValueError(f"documents={documents} is not allowed; there are {len(facts)} facts to plant.")
    shown, edges = _shown(tokenizer, truncate, windows), _edges(tokenizer)
    limits.check_length(model, "lengths", max(lengths) if shown is None else min(shown, max(lengths)))
    queries = []
    tokens = trials * documents * sum(lengths)
    with evaluating(model), torch.no_grad(), Processes().progress(tokens, "planted sentence", progress) as bar:
        for length in lengths:
            for trial in range(trials):
                draw = random.Random(f"{seed} {trial}")
                chosen = draw.sample(list(facts), documents)
                depths = [(number + 0.5) / documents for number in range(documents)]
                draw.shuffle(depths)
                text = _from_a_sentence(haystack, draw)
                rows, asked = [], []
                for (sentence, query), depth in zip(chosen, depths, strict=True):
                    pieces = _pieces(_document(tokenizer, length, text, depth, sentence), shown, edges)
                    rows.append(pieces[:1] if truncate is not None else pieces)
                    asked.append([tokenizer(query, truncation=False, verbose=False)["input_ids"]])
                above, level = _compare(
                    _encode(model, tokenizer, asked, pool, batch_size),
                    _encode(model, tokenizer, rows, pool, batch_size, bar),
                )
                queries += [
                    RankedQuery(length, trial, depth, int(a), int(same))
                    for depth, a, same in zip(depths, above, level, strict=True)
                ]
    return EmbeddingRetrievalResult(tuple(queries), 1 / documents)


def accuracy_curve(
    results: Mapping[str, EmbeddingRetrievalResult],
    *,
    baselines: int = 0,
    trained_length: int | None = None,
    title: str = "Sentences found in a document, by its length",
) -> Figure:
    """Accuracy against length, a line for each label, with 95 % intervals as thin bars and the chance level.

    Args:
        results: {label: result}, of the same lengths. There is a panel for every four.
        baselines: how many of them, the first ones, are drawn in each panel instead (fewer than eight).
        trained_length: marked where given, in tokens.
        title: what and on which text.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from hf_posenc.evaluation.plots import _style

    labels = list(results)
    others = labels[baselines:]
    panels = [labels[:baselines] + others[i : i + 4] for i in range(0, max(1, len(others)), 4)]
    styles = {label: _style(index) for index, label in enumerate(labels[:baselines])}
    # The baselines' styles are not used again: there are eight.
    styles |= {label: _style(baselines + index % (8 - baselines)) for index, label in enumerate(others)}
    figure = Figure(figsize=(1 + 4.4 * len(panels), 5.2), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state of pyplot
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        _draw(axes, {label: results[label] for label in panel}, styles, trained_length)
        axes.set_ylabel("" if panel is not panels[0] else "queries whose document came first (fraction)")
    return figure


def _draw(
    axes: Any,
    results: Mapping[str, EmbeddingRetrievalResult],
    styles: Mapping[str, dict[str, Any]],
    trained_length: int | None,
) -> None:
    from hf_posenc.evaluation import plots

    for index, (label, result) in enumerate(results.items()):
        # A little apart, so that bars at one length do not hide each other.
        aside = 2 ** (0.03 * (index - (len(results) - 1) / 2))
        xs = [length * aside for length in result.accuracy]
        axes.plot(xs, list(result.accuracy.values()), **styles[label], label=label, zorder=3)
        for x, interval in zip(xs, result.intervals.values(), strict=True):
            axes.plot([x, x], interval, color=styles[label]["color"], linewidth=0.8, alpha=0.6, zorder=2)
    axes.axhline(next(iter(results.values())).chance, color="#555555", linewidth=0.8, zorder=1, label="guessing")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_ylim(-0.02, 1.02)
    plots._lengths_axis(axes, [length for result in results.values() for length in result.accuracy])
    axes.set_xlabel("length of the document (tokens, log scale)")
    plots._mark_length(axes, trained_length)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False, handlelength=3.2)


# ---------------------------------------------------------------------- documents


def _from_a_sentence(haystack: str, draw: random.Random) -> str:
    """The haystack turned round so that it starts with one of its sentences."""
    words = haystack.split()
    starts = [0, *(i + 1 for i, word in enumerate(words[:-1]) if word.endswith((".", "!", "?")))]
    start = draw.choice(starts)
    return " ".join([*words[start:], *words[:start]])


def _document(tokenizer: Any, length: int, haystack: str, depth: float, fact: str) -> list[int]:
    """Token ids, special ones included, of a text of at most `length` tokens with the fact at its depth, within 1 %."""

    def encode(words: list[str]) -> list[int]:
        return tokenizer(place(words, [(depth, fact)]), truncation=False, verbose=False)["input_ids"]

    if len(encode([])) > length:
        raise ValueError(
            f"lengths: {length} is not allowed; the planted sentence alone takes {len(encode([]))} tokens."
        )
    return fill(encode, haystack, length)


def _edges(tokenizer: Any) -> tuple[int, int]:
    """How many special tokens the tokenizer puts before a text and after it."""
    special = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return special.index(0), special[::-1].index(0)


def _shown(tokenizer: Any, truncate: int | None, windows: int | None) -> int | None:
    """Tokens that the encoder is shown at once; None for all."""
    if truncate is not None and windows is not None:
        raise ValueError(f"truncate={truncate} and windows={windows} exclude each other. Give one.")
    shown = truncate if windows is None else windows
    if shown is not None:
        special = sum(_edges(tokenizer))
        why = f"this tokenizer adds {special} special tokens, and there must be room for another"
        check_int("windows" if truncate is None else "truncate", shown, low=special + 1, why=why)
    return shown


def _pieces(row: list[int], shown: int | None, edges: tuple[int, int]) -> list[list[int]]:
    """The document in pieces of at most `shown` tokens, each between the special tokens that the whole lies between."""
    if shown is None or len(row) <= shown:
        return [row]
    before, after = edges
    last = len(row) - after
    step = shown - before - after
    return [row[:before] + row[i : min(i + step, last)] + row[last:] for i in range(before, last, step)]


# ---------------------------------------------------------------------- vectors


def _encode(
    model: nn.Module, tokenizer: Any, texts: list[list[list[int]]], pool: Any, batch_size: int, bar: Any = None
) -> Tensor:
    """A vector [texts, hidden] of each text: the mean of those of its pieces, weighted by tokens."""
    device, vectors = device_of(model), []
    pad = tokenizer.pad_token_id or 0
    rows = [row for pieces in texts for row in pieces]
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        longest = max(map(len, batch))
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in batch], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch], device=device)
        vectors.append(pool(model(input_ids=ids, attention_mask=mask)[0], mask).double().cpu())
        if bar is not None:
            bar.update(sum(map(len, batch)))
    weight = torch.tensor([len(row) for row in rows], dtype=torch.float64).unsqueeze(1)
    counts = [len(pieces) for pieces in texts]
    parts = zip((torch.cat(vectors) * weight).split(counts), weight.split(counts), strict=True)
    return torch.stack([vector.sum(0) / tokens.sum() for vector, tokens in parts])


def _compare(queries: Tensor, documents: Tensor) -> tuple[list[int], list[int]]:
    """For each query, how many documents are nearer than its own by cosine, and how many others are as near."""
    similarity = nn.functional.normalize(queries, dim=-1) @ nn.functional.normalize(documents, dim=-1).T
    ahead = similarity - similarity.diagonal().unsqueeze(1)
    return (ahead > TIE).sum(1).tolist(), ((ahead.abs() <= TIE).sum(1) - 1).tolist()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _wilson(fraction: float, count: int) -> tuple[float, float]:
    z = 1.959964  # of 95 %
    centre = (fraction + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (fraction * (1 - fraction) / count + z * z / (4 * count * count)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)
