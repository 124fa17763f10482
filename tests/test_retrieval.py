"""Retrieval probes: prompts of the length asked for, facts where they should lie, marks that mean what they say."""

from __future__ import annotations

import collections
import itertools
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_reports import letters
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import hf_posenc
from hf_posenc.evaluation import needle, passkey, planted_sentence, ruler, score_answer
from hf_posenc.evaluation.answers import answer_span
from hf_posenc.evaluation.embedding_retrieval import (
    FACTS,
    PASS_KEYS,
    ROLES,
    TIE,
    RankedQuery,
    _compare,
    _edges,
    _encode,
    _pieces,
    accuracy_curve,
    mean_pool,
)
from hf_posenc.evaluation.probes import FILLER, Reply, fit, place
from hf_posenc.evaluation.ruler_tasks import TASKS
from models import tiny_bert, tiny_gpt2, tiny_llama


class Reader(nn.Module):
    """A stub that reads its prompt: `reply(prompt)` is what it says, token by token."""

    def __init__(self, tokenizer: Any, reply: Any) -> None:
        super().__init__()
        self.tokenizer, self.reply = tokenizer, reply
        self.prompts: list[str] = []

    def forward(self, input_ids: Tensor) -> Any:
        text = self.tokenizer.decode(input_ids[0])
        if not self.prompts or not text.startswith(self.prompts[-1]):
            self.prompts.append(text)
        prompt = self.prompts[-1]
        said = text[len(prompt) :]
        full = self.reply(prompt) + " " * 50
        logits = torch.zeros(1, input_ids.shape[1], 97)
        logits[0, -1, self.tokenizer(full[len(said)]).input_ids[0]] = 9.0
        return SimpleNamespace(logits=logits)


def knows(prompt: str) -> str:
    return " " + re.findall(r"The pass key is (\d+)\.", prompt)[0]


def test_passkey_prompts_are_as_asked() -> None:
    tokenizer = letters()
    model = Reader(tokenizer, knows)
    result = passkey(model, tokenizer, [600, 901], [0.0, 0.5, 1.0], trials=2, seed=3)
    assert result.accuracy == {600: {0.0: 1.0, 0.5: 1.0, 1.0: 1.0}, 901: {0.0: 1.0, 0.5: 1.0, 1.0: 1.0}}
    assert result.lenient == result.accuracy
    assert len(result.replies) == len(model.prompts) == 12
    for reply, prompt in zip(result.replies, model.prompts, strict=True):
        assert abs(reply.tokens - reply.length) <= reply.length / 100
        assert reply.tokens == len(tokenizer(prompt).input_ids)
        body = prompt[prompt.index("there. ") : prompt.index(" What is the pass key?")]
        where = body.index("The pass key is") / len(body)
        assert abs(where - reply.depth) < 0.25
        assert prompt.endswith("The pass key is")
    keys = {reply.answers for reply in result.replies}
    assert len(keys) == 12
    again = passkey(Reader(tokenizer, knows), tokenizer, [600, 901], [0.0, 0.5, 1.0], trials=2, seed=3)
    assert again.replies == result.replies
    other = passkey(Reader(tokenizer, knows), tokenizer, [600], [0.0], trials=2, seed=4)
    assert {reply.answers for reply in other.replies}.isdisjoint(keys)


def test_wrong_and_hidden_answers_are_told_apart() -> None:
    tokenizer = letters()
    wrong = passkey(Reader(tokenizer, lambda prompt: " 1"), tokenizer, [600], [0.5], trials=2)
    assert wrong.accuracy == {600: {0.5: 0.0}} == wrong.lenient
    late = passkey(
        Reader(tokenizer, lambda prompt: " surely" + knows(prompt)),
        tokenizer,
        [600],
        [0.5],
        trials=2,
        max_new_tokens=20,
    )
    assert late.accuracy == {600: {0.5: 0.0}}
    assert late.lenient == {600: {0.5: 1.0}}


@pytest.mark.parametrize(
    ("answers", "text", "exact", "lenient"),
    [
        (("12345",), " 12345. Remember it", True, 1.0),
        (("12345",), "12345", True, 1.0),
        (("12345",), " 123456", False, 1.0),
        (("12345",), " 1234", False, 0.0),
        (("12345",), " is 12345", False, 1.0),
        (("11", "22"), " 22 and 11.", True, 1.0),
        (("11", "22"), " 22 and 111.", False, 1.0),
        (("11", "22"), " 22 only", False, 0.5),
        (("vora",), " Vora", False, 1.0),
        (("12345",), "", False, 0.0),
    ],
)
def test_marks(answers: tuple[str, ...], text: str, exact: bool, lenient: float) -> None:
    reply = Reply(100, 0.5, 100, answers, text)
    assert reply.exact is exact
    assert reply.lenient == lenient


def test_needles_with_distractors_and_several_values() -> None:
    tokenizer = letters()

    def all_of_the_city(prompt: str) -> str:
        city = re.findall(r"magic numbers? for (\w+) mentioned", prompt)[0]
        return " " + ", ".join(re.findall(rf"for {city} is: (\d+)\.", prompt))

    model = Reader(tokenizer, all_of_the_city)
    result = needle(
        model, tokenizer, [1500], [0.0, 1.0], trials=2, keys=4, values=2, haystack="One word. Two more words."
    )
    assert result.by_length() == {1500: 1.0}
    for prompt in model.prompts:
        assert len(re.findall(r"is: \d{7}\.", prompt)) == 5
    for reply in result.replies:
        assert abs(reply.tokens - 1500) <= 15
    first = Reader(tokenizer, lambda prompt: " " + re.findall(r"is: (\d+)\.", prompt)[0])
    assert needle(first, tokenizer, [1500], [1.0], trials=4, keys=4).by_length()[1500] < 1.0


def test_facts_go_between_sentences() -> None:
    words = ["A", "b", "c.", "D", "e", "f.", "G", "h", "i."]
    assert place(words, [(0.0, "X.")]) == "X. A b c. D e f. G h i."
    assert place(words, [(0.4, "X.")]) == "A b c. X. D e f. G h i."
    assert place(words, [(1.0, "X."), (0.7, "Y.")]) == "A b c. D e f. Y. G h i. X."
    assert place([], [(0.5, "X.")]) == "X."


def subwords() -> PreTrainedTokenizerFast:
    """A tokenizer that merges, trained on the filler: words are few tokens, and " 4" is one."""
    inner = Tokenizer(models.BPE(unk_token=None))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<e>"],
        show_progress=False,
    )
    inner.train_from_iterator([FILLER * 5 + " 4 4 4 4 4 4 2+2= 4"] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>")


@pytest.mark.parametrize("length", [100, 257, 1000])
def test_prompts_fit_with_a_tokenizer_that_merges(length: int) -> None:
    ids = fit(subwords(), length, FILLER, lambda words: f"Start. {' '.join(words)} End?")
    assert length - 1 <= len(ids) <= length or length - len(ids) <= length / 100


def test_an_answer_is_tokenised_with_its_context() -> None:
    tokenizer = subwords()
    assert len(tokenizer(" 4").input_ids) == 1  # the merge that a boundary would cut
    ids, first = answer_span(tokenizer, "2+2=", " 4")
    assert tokenizer.decode(ids[first:]) == " 4"
    assert len(ids) - first == 1
    spaced, first_spaced = answer_span(tokenizer, "2+2= ", "4")
    assert torch.equal(ids, spaced) and first == first_spaced
    torch.manual_seed(0)
    model = tiny_llama(vocab_size=400, max_position_embeddings=64)
    one = score_answer(model, tokenizer, "2+2=", " 4")
    two = score_answer(model, tokenizer, "2+2= ", "4")
    assert one == two
    logits = model(ids[None]).logits[0].log_softmax(-1)
    assert one.nll == pytest.approx(-float(logits[first - 1, ids[first]].detach()), abs=1e-5)
    assert one.tokens == 1
    best = tokenizer.decode([int(logits[first - 1].argmax())])
    assert one.greedy == (best == " 4")
    with pytest.raises(ValueError, match="blank"):
        score_answer(model, tokenizer, "2+2=", " ")


def test_ruler_tasks_can_be_solved_by_reading() -> None:
    tokenizer = letters()

    def solve(prompt: str) -> str:
        if "VAR" in prompt:
            value = re.findall(r"assigned the value (\d+)", prompt)[0]
            held: list[str] = []
            for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", prompt):
                if source == value or source in held:
                    held.append(name)
            return " " + ", ".join(held)
        if "frequent" in prompt:
            words = prompt.split("\n")[1].split()
            return " " + ", ".join(sorted(set(words), key=words.count, reverse=True)[:3])
        if "numbered list" in prompt:
            words = prompt.split("\n")[1].split()[1::2]
            return " " + ", ".join(sorted(set(words), key=words.count, reverse=True)[:3])
        city = re.findall(r"magic numbers? for (\w+) mentioned", prompt)[0]
        return " " + ", ".join(re.findall(rf"for {city} is: (\d+)\.", prompt))

    results = ruler(Reader(tokenizer, solve), tokenizer, [2500], trials=2)
    assert set(results) == set(TASKS)
    for task, result in results.items():
        assert result.by_length() == {2500: 1.0}, (task, result.replies[0])
        assert all(abs(reply.tokens - 2500) <= 25 for reply in result.replies)
    silent = ruler(Reader(tokenizer, lambda prompt: " nothing"), tokenizer, [2500], trials=1)
    assert all(result.by_length() == {2500: 0.0} for result in silent.values())


def test_a_real_model_is_decoded_greedily_and_batches_do_not_matter() -> None:
    tokenizer = letters()
    tokenizer.pad_token = "<e>"
    model = tiny_llama(max_position_embeddings=512)
    model.generation_config.do_sample = True
    model.generation_config.repetition_penalty = 5.0
    options: dict[str, Any] = {"lengths": [300, 330], "depths": [0.0, 1.0], "trials": 1, "max_new_tokens": 6}
    one = passkey(model, tokenizer, **options)
    assert passkey(model, tokenizer, batch_size=3, **options).replies == one.replies
    first = one.replies[0]
    probe = fit_again(tokenizer, first)
    for _ in range(6):
        probe = torch.cat([probe, model(probe[None]).logits[0, -1:].argmax(-1)])
    assert first.text == tokenizer.decode(probe[-6:], skip_special_tokens=True)


@pytest.mark.parametrize("task", ["common_words", "frequent_words"])
@pytest.mark.parametrize("length", [512, 700])
def test_answers_are_true_of_the_words_shown(task: str, length: int) -> None:
    """Not of the whole stream, of which a prompt shows the beginning; and no other words would do as well."""
    tokenizer = letters()
    model = Reader(tokenizer, lambda prompt: " nothing")
    replies = ruler(model, tokenizer, [length], [task], trials=20)[task].replies
    assert len(replies) == len(model.prompts) == 20
    for reply, prompt in zip(replies, model.prompts, strict=True):
        words = prompt.split("\n")[1].split()
        counts = collections.Counter(words[1::2] if task == "common_words" else words)
        least = min(counts[answer] for answer in reply.answers)
        assert len(set(reply.answers)) == 3
        assert all(count < least for word, count in counts.items() if word not in reply.answers)


def test_a_prompt_too_short_for_a_clear_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="lengths: 300 is too short for the task 'common_words'"):
        ruler(Reader(letters(), lambda prompt: " nothing"), letters(), [300], ["common_words"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_of_nan_is_named_not_marked_wrong(value: float) -> None:
    tokenizer = letters()
    tokenizer.pad_token = "<e>"
    model = tiny_llama(max_position_embeddings=512)
    with torch.no_grad():
        model.lm_head.weight[5] = value
    for batch_size in (1, 2):
        with pytest.raises(FloatingPointError, match=r"a prompt of 300 tokens \(depth 0\.5\)"):
            passkey(model, tokenizer, [300], [0.5, 1.0], trials=1, batch_size=batch_size)
    with pytest.raises(FloatingPointError, match="the answer 'b'"):
        score_answer(model, tokenizer, "a", "b")

    class Plain(nn.Module):
        def forward(self, input_ids: Tensor) -> Any:
            return SimpleNamespace(logits=torch.full((*input_ids.shape, 97), value))

    with pytest.raises(FloatingPointError, match="a prompt of 300 tokens"):
        passkey(Plain(), tokenizer, [300], [0.5], trials=1)


def test_numbers_of_any_type_hide_the_same_keys() -> None:
    tokenizer = letters()
    asked: list[Any] = [([600], [0.0, 1.0]), ([600], [0, 1]), (np.array([600]), np.array([0.0, 1.0]))]
    for probe in (passkey, needle):
        replies = [probe(Reader(tokenizer, knows_not), tokenizer, n, d, trials=1).replies for n, d in asked]
        assert replies[0] == replies[1] == replies[2]
        assert type(replies[2][0].length) is int and type(replies[1][0].depth) is float


def knows_not(prompt: str) -> str:
    return " nothing"


def fit_again(tokenizer: Any, reply: Reply) -> Tensor:
    fact = f"The pass key is {reply.answers[0]}. Remember it. {reply.answers[0]} is the pass key."
    return fit(
        tokenizer,
        reply.length,
        FILLER,
        lambda words: (
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz"
            f" you about the important information there. {place(words, [(reply.depth, fact)])} What is the pass"
            " key? The pass key is"
        ),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [20]}, "the question alone takes"),
        ({"depths": [1.5]}, "1.5"),
        ({"depths": []}, "depths is empty"),
        ({"trials": 0}, "trials=0"),
        ({"digits": 0}, "digits=0"),
        ({"haystack": "  "}, "haystack"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"lengths": [400]}, r"^tokens of prompt and reply=\d+ is longer .*32 rows"),
        ({"lengths": 200}, "lengths=200"),
        ({"lengths": "200"}, "lengths='200'"),
        ({"depths": 0.5}, "depths=0.5"),
        ({"depths": [True]}, "depths: True"),
        ({"tokenizer": None}, "tokenizer=None"),
        ({"model": "llama"}, "model='llama'"),
        ({"haystack": 3}, "haystack"),
        ({"max_new_tokens": "8"}, "max_new_tokens='8'"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"lengths": [600], "depths": [0.5], "trials": 1}
    arguments |= {"model": tiny_gpt2(), "tokenizer": letters()}
    with pytest.raises(ValueError, match=message):
        passkey(**(arguments | changes))
    with pytest.raises(ValueError, match="tasks=3"):
        ruler(tiny_gpt2(), letters(), [600], 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="context=None"):
        score_answer(tiny_gpt2(), letters(), None, "b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sorting"):
        ruler(tiny_gpt2(), letters(), [600], ["sorting"])


# ---------------------------------------------------------------------- encoders


class Bag(nn.Module):
    """A stub encoder: each token's vector is its own direction, as in a bag of words."""

    def __init__(self, blind: bool = False) -> None:
        super().__init__()
        self.blind = blind
        self.rows: list[list[int]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        self.rows += [ids[mask > 0].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        ids = torch.zeros_like(input_ids) if self.blind else input_ids
        return (torch.nn.functional.one_hot(ids, 4000).float(),)


def whole_words(special: bool = False) -> PreTrainedTokenizerFast:
    """A token for each word; `special`: between [CLS] and [SEP], as BERT's."""
    inner = Tokenizer(models.WordLevel({"<u>": 0}, unk_token="<u>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    text = " ".join([FILLER, *itertools.chain(*FACTS, *PASS_KEYS, *ROLES)])
    trainer = trainers.WordLevelTrainer(special_tokens=["<u>", "[CLS]", "[SEP]"], show_progress=False)
    inner.train_from_iterator([text], trainer)
    if special:
        pairs = [("[CLS]", inner.token_to_id("[CLS]")), ("[SEP]", inner.token_to_id("[SEP]"))]
        inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=pairs)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<u>", pad_token="<u>", cls_token="[CLS]", sep_token="[SEP]"
    )


def test_planted_sentences_are_found_by_their_words() -> None:
    tokenizer = whole_words()
    result = planted_sentence(Bag(), tokenizer, [64, 128], documents=10, trials=2, facts=PASS_KEYS)
    assert result.accuracy == {64: 1.0, 128: 1.0} == result.ranks
    assert result.chance == 0.1
    assert len(result.queries) == 40
    low, high = result.intervals[64]
    assert 0.83 < low < 0.85 and high == 1.0  # Wilson: 20 of 20
    again = planted_sentence(Bag(), tokenizer, [64, 128], documents=10, trials=2, facts=PASS_KEYS, batch_size=3)
    assert again == result
    with pytest.raises(ValueError, match="32 rows"):
        planted_sentence(tiny_bert().bert, tokenizer, [64])
    for changes, message in (
        ({"documents": 99}, "documents=99"),
        ({"trials": 0}, "trials=0"),
        ({"haystack": " "}, "haystack"),
        ({"lengths": [5]}, "alone takes"),
        ({"truncate": 32, "windows": 32}, "exclude each other"),
        ({"windows": 0}, "windows=0"),
    ):
        with pytest.raises(ValueError, match=message):
            planted_sentence(Bag(), tokenizer, **({"lengths": [64]} | changes))  # type: ignore[arg-type]


def test_documents_that_all_look_alike_are_found_by_chance() -> None:
    blind = planted_sentence(Bag(blind=True), whole_words(), [64], documents=10, trials=1)
    assert blind.accuracy == {64: pytest.approx(0.1)}
    assert blind.ranks[64] == pytest.approx(sum(1 / rank for rank in range(1, 11)) / 10)
    assert [(query.above, query.level) for query in blind.queries] == [(0, 9)] * 10


def test_roles_cannot_be_told_apart_by_their_words() -> None:
    """A bag of words finds one of two, exactly; so does an encoder without positions."""
    tokenizer = whole_words(special=True)
    result = planted_sentence(Bag(), tokenizer, [64], documents=20, trials=1, facts=ROLES)
    assert result.accuracy == {64: 0.5} and result.ranks == {64: 0.75}
    model = hf_posenc.patch(tiny_bert(vocab_size=600, max_position_embeddings=64).bert.eval(), "nope")
    blind = planted_sentence(model, tokenizer, [64], documents=20, trials=1, facts=ROLES)
    assert all(query.level >= 1 for query in blind.queries)
    hf_posenc.unpatch(model)
    assert any(query.level == 0 for query in planted_sentence(model, tokenizer, [64], 20, 1, facts=ROLES).queries)


def test_a_query_is_ranked_among_the_documents() -> None:
    documents = torch.eye(3, dtype=torch.float64)
    queries = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0 - 1e-9]], dtype=torch.float64)
    above, level = _compare(queries, documents)
    assert (above, level) == ([0, 1, 0], [0, 0, 2])
    second = RankedQuery(64, 0, 0.5, 1, 0)
    assert (second.found, second.reciprocal_rank) == (0.0, 0.5)
    level_with_one = RankedQuery(64, 0, 0.5, 0, 1)
    assert (level_with_one.found, level_with_one.reciprocal_rank) == (0.5, 0.75)


def test_planted_documents_are_as_asked() -> None:
    """One text in a trial, one sentence that differs, depths evenly spread, and the same for every length and model."""
    tokenizer, encoder = whole_words(special=True), Bag()
    arguments: dict[str, Any] = {"documents": 8, "trials": 2, "facts": PASS_KEYS, "batch_size": 8}
    result = planted_sentence(encoder, tokenizer, [100, 400], **arguments)
    texts = [tokenizer.decode(row[1:-1]) for row in encoder.rows]
    questions = []
    for number, (length, trial) in enumerate(itertools.product((100, 400), range(2))):
        asked, documents = texts[16 * number : 16 * number + 8], texts[16 * number + 8 : 16 * number + 16]
        questions.append(asked)
        assert all(length * 0.99 <= len(text.split()) + 2 <= length for text in documents)
        sentence = r"The pass key of (\w+) is \d+ \. ?"
        names = [re.findall(r"pass key of (\w+) \?", question) for question in asked]
        assert [re.findall(sentence, text) for text in documents] == names
        assert len({tuple(re.sub(sentence, "", text).split()[: length - 20]) for text in documents}) == 1
        queries = [query for query in result.queries if (query.length, query.trial) == (length, trial)]
        assert sorted(query.depth for query in queries) == [(place + 0.5) / 8 for place in range(8)]
        for query, text in zip(queries, documents, strict=True):
            assert abs(text.index("The pass") / len(text) - query.depth) < 0.12
    assert questions[0] == questions[2] and questions[1] == questions[3] and set(questions[0]) != set(questions[1])
    depths = [[query.depth for query in result.queries if query.length == length] for length in (100, 400)]
    assert depths[0] == depths[1]
    again = Bag()
    assert planted_sentence(again, tokenizer, [100, 400], **arguments) == result
    assert again.rows == encoder.rows


def test_real_text_starts_at_a_sentence_of_its_own_in_each_trial() -> None:
    text = " ".join(f"Line {number} ends here." for number in range(200))
    tokenizer, encoder = letters(), Bag()
    planted_sentence(encoder, tokenizer, [600], documents=2, trials=3, haystack=text, batch_size=4)
    documents = [tokenizer.decode(row) for row in encoder.rows if len(row) > 500]
    starts = [re.findall(r"Line (\d+)", document)[0] for document in documents]
    assert starts[0] == starts[1] and len(set(starts)) == 3
    assert all(document.startswith(("Line", *(sentence for sentence, _ in FACTS))) for document in documents)


def test_truncated_documents_are_found_by_what_is_left() -> None:
    tokenizer, encoder = whole_words(special=True), Bag()
    result = planted_sentence(
        encoder, tokenizer, [128], documents=8, trials=2, facts=PASS_KEYS, truncate=64, batch_size=1
    )
    rows = [row for row in encoder.rows if len(row) > 20]
    assert {len(row) for row in rows} == {64}
    assert {(tokenizer.decode(row[:1]), tokenizer.decode(row[-1:])) for row in rows} == {("[CLS]", "[SEP]")}
    for query in result.queries:  # the sentences of the second half were not seen; they leave four documents alike
        if query.depth < 0.4:
            assert (query.above, query.level) == (0, 0)
        elif query.depth > 0.6:
            assert query.level >= 2 and query.found <= 1 / 3
    quarters = result.by_depth(4)[128]
    assert quarters[0] == 1.0 and quarters[3] < 0.4
    assert sum(quarters) / 4 == pytest.approx(result.accuracy[128])
    with pytest.raises(ValueError, match="32 rows"):
        planted_sentence(tiny_bert().bert, tokenizer, [128], truncate=64)
    bert = tiny_bert(vocab_size=600).bert
    assert set(planted_sentence(bert, tokenizer, [128], documents=2, trials=1, truncate=32).accuracy) == {128}


def test_windows_are_averaged_by_their_tokens() -> None:
    tokenizer, encoder = whole_words(special=True), Bag()
    arguments: dict[str, Any] = {"documents": 8, "trials": 1, "facts": PASS_KEYS, "batch_size": 5}
    assert planted_sentence(encoder, tokenizer, [128], windows=64, **arguments).accuracy == {128: 1.0}
    assert {len(row) for row in encoder.rows if len(row) > 20} == {64}
    whole = [*range(10, 135), tokenizer.unk_token_id]
    row = [tokenizer.cls_token_id, *whole, tokenizer.sep_token_id]
    pieces = _pieces(row, 64, _edges(tokenizer))
    assert [len(piece) for piece in pieces] == [64, 64, 4]
    assert {(piece[0], piece[-1]) for piece in pieces} == {(row[0], row[-1])}
    assert [token for piece in pieces for token in piece[1:-1]] == whole
    assert _pieces(row, 128, _edges(tokenizer)) == [row]
    assert _edges(whole_words()) == (0, 0)
    vector = _encode(Bag(), tokenizer, [pieces, [row]], mean_pool, 2)
    assert torch.allclose(vector[0, whole] / vector[0, whole].sum(), vector[1, whole] / vector[1, whole].sum())


def test_no_vector_depends_on_its_batch() -> None:
    """Padding is seen by neither the encoder's attention nor the mean."""
    tokenizer = whole_words(special=True)
    model = tiny_bert(vocab_size=600, max_position_embeddings=64).bert.eval()
    rows = [[[5, 6, 7]], [list(range(8, 60))], [list(range(3, 23)), [9]]]
    with torch.no_grad():
        alone, together = (_encode(model, tokenizer, rows, mean_pool, size) for size in (1, 4))
    assert float((alone - together).abs().max()) < TIE


def test_the_mean_of_a_long_text_keeps_its_digits() -> None:
    """A bfloat16 mean of 2,048 vectors would lose what one of them brings."""
    hidden = torch.ones(1, 2048, 1, dtype=torch.bfloat16)
    hidden[0, 7] = 3.0
    pooled = mean_pool(hidden, torch.ones(1, 2048, dtype=torch.int64))
    assert pooled.dtype == torch.float32
    assert float(pooled) == pytest.approx(1 + 2 / 2048, abs=1e-6)


def test_accuracy_is_drawn() -> None:
    result = planted_sentence(Bag(), whole_words(), [64, 128], 4, 1, facts=PASS_KEYS)
    figure = accuracy_curve({name: result for name in "abcdef"}, baselines=1, trained_length=64)
    first, second = figure.axes
    assert "first" in first.get_ylabel() and "tokens" in first.get_xlabel()
    names = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (first, second)]
    assert names == [["a", "b", "c", "d", "e", "guessing"], ["a", "f", "guessing"]]
    assert list(first.lines[0].get_ydata()) == [1.0, 1.0]
    assert len(accuracy_curve({"a": result}, baselines=1).axes) == 1


def test_example_compares_encodings_of_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_bert(vocab_size=600).bert.save_pretrained(tmp_path / "bert")
    whole_words(special=True).save_pretrained(tmp_path / "bert")
    main = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "encoder_retrieval.py"))["main"]
    options = ("--lengths", "32,64", "--documents", "3", "--trials", "1", "--picture", str(tmp_path / "found.png"))
    main(str(tmp_path / "bert"), *options, "alibi", "learned:init=repeat")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["truncated", "windows", "alibi", "learned:init=repeat"]
    assert all(0 <= float(cell.strip("()")) <= 1 for line in lines[3:-1] for cell in line.split()[1:])
    short = {line.split()[0]: line.split()[-6:-4] for line in lines[1:-1]}
    assert short["truncated"] == short["windows"] == short["learned:init=repeat"]  # at the trained length, one model
    assert "guessing gives 0.33" in lines[-1]
    assert (tmp_path / "found.png").stat().st_size > 0
