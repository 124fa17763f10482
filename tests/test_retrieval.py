"""Retrieval probes: prompts of the length asked for, facts where they should lie, marks that mean what they say."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_reports import letters
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from hf_posenc.evaluation import needle, passkey, planted_sentence, ruler, score_answer
from hf_posenc.evaluation.answers import answer_span
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
        ({"lengths": [400]}, "32 rows"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"lengths": [600], "depths": [0.5], "trials": 1}
    with pytest.raises(ValueError, match=message):
        passkey(tiny_gpt2(), letters(), **(arguments | changes))
    with pytest.raises(ValueError, match="sorting"):
        ruler(tiny_gpt2(), letters(), [600], ["sorting"])


# ---------------------------------------------------------------------- encoders


class Bag(nn.Module):
    """A stub encoder: each token's vector is its own direction, as in a bag of words."""

    def __init__(self, blind: bool = False) -> None:
        super().__init__()
        self.blind = blind

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        ids = torch.zeros_like(input_ids) if self.blind else input_ids
        return (torch.nn.functional.one_hot(ids, 4000).float(),)


def whole_words() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({"<u>": 0}, unk_token="<u>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    from hf_posenc.evaluation.embedding_retrieval import NAMES

    text = f"{FILLER} The pass key of What is the pass key of is . ? {' '.join(NAMES)}"
    inner.train_from_iterator([text], trainers.WordLevelTrainer(special_tokens=["<u>"], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<u>", pad_token="<u>")


def test_planted_sentences_are_found_by_their_names() -> None:
    tokenizer = whole_words()
    result = planted_sentence(Bag(), tokenizer, [64, 128], documents=10)
    assert result.accuracy == {64: 1.0, 128: 1.0}
    assert result.chance == 0.1
    assert planted_sentence(Bag(), tokenizer, [64, 128], documents=10, batch_size=3) == result
    blind = planted_sentence(Bag(blind=True), tokenizer, [64], documents=10)
    assert blind.accuracy == {64: 0.0}  # documents that all look alike are not found
    assert math.isclose(blind.ranks[64], 0.1)
    with pytest.raises(ValueError, match="32 rows"):
        planted_sentence(tiny_bert().bert, tokenizer, [64])
    with pytest.raises(ValueError, match="documents=99"):
        planted_sentence(Bag(), tokenizer, [64], documents=99)
