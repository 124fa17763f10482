"""Text to training samples: every token counted, no document seen by another, and the same samples every time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_posenc.data import (
    Collator,
    Curriculum,
    Document,
    Masking,
    Preparation,
    TrainingBlocks,
    cut_blocks,
    load_documents,
    make_blocks,
    pack_blocks,
    packed_positions,
    random_positions,
    skip_positions,
    special_tokens,
    tokenize_chat,
    tokenize_documents,
)
from models import tiny_gpt2, tiny_llama, tokens

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "far", "from", "its", "home", "to", "see", "what"]
WORDS += ["was", "there", "by", "old", "river"]


def sentences(count: int, *, shortest: int = 5, longest: int = 40, seed: int = 0) -> list[str]:
    """Random texts of so many words each."""
    rng = numpy.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(shortest, longest, endpoint=True))) for _ in range(count)]


def tiny_tokenizer(*, encoder: bool = False) -> PreTrainedTokenizerFast:
    """A word tokenizer over `WORDS`, built offline; ids below 97."""
    special = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", "[MASK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=special))
    if encoder:
        ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_max_length=32,
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found in, or left in, the user's cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """A file of that name and content; its path."""

    def make(name: str, content: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return str(path)

    return make


# ---------------------------------------------------------------------- sources


def test_every_kind_of_source_gives_its_documents(write: Callable[[str, str], str], tmp_path: Path) -> None:
    import datasets

    text = write("one.txt", "the cat sat")
    rows = write("rows.jsonl", '{"id": "x", "text": "a dog"}\n\n{"text": "ran far"}\n{"text": "  "}\n')
    write("folder/a.md", "on a mat")
    write("folder/deep/b.py", "by the river")
    write("folder/c.bin", "not read")
    write("folder/empty.txt", "")
    table = datasets.Dataset.from_dict({"text": ["to see", "what was"]})
    table.to_parquet(tmp_path / "t.parquet")
    table.save_to_disk(tmp_path / "saved")
    sources = [text, rows, str(tmp_path / "folder"), str(tmp_path / "t.parquet"), str(tmp_path / "saved")]
    found = load_documents(sources)
    assert found["text"] == [
        "the cat sat", "a dog", "ran far", "on a mat", "by the river", "to see", "what was", "to see", "what was",
    ]  # fmt: skip
    assert found["id"][:5] == ["one.txt", "x", "rows.jsonl:3", "a.md", "deep/b.py"]
    assert len(set(found["id"])) == len(found)
    streamed = list(load_documents(sources, streaming=True))
    assert [row["text"] for row in streamed] == found["text"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing.txt", None, "does not exist"),
        ("empty.txt", "", "is empty"),
        ("blank.txt", "  \n ", "blank"),
        ("bad.jsonl", '{"text": "a"}\n{oops\n', "line 2, is not JSON"),
        ("field.jsonl", '{"body": "a"}\n', "no text field 'text'.*It has: body"),
        ("list.jsonl", "[1]\n", "is not an object"),
        ("broken.parquet", "no parquet", "not a readable parquet"),
    ],
)
def test_a_source_that_cannot_be_used_is_refused(
    write: Callable[[str, str], str], tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    path = write(name, content) if content is not None else str(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        load_documents(path)


def test_a_file_that_is_not_text_is_refused_alone_and_left_out_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "good.txt").write_text("the cat", encoding="utf-8")
    with pytest.raises(ValueError, match="not UTF-8 text: byte 3"):
        load_documents(str(folder / "latin.txt"))
    assert load_documents(str(folder))["text"] == ["the cat"]


def test_a_changed_file_is_read_again(write: Callable[[str, str], str]) -> None:
    path = write("a.txt", "the cat")
    assert load_documents(path)["text"] == ["the cat"]
    write("a.txt", "a dog ran")
    assert load_documents(path)["text"] == ["a dog ran"]


# ---------------------------------------------------------------------- tokens


def test_documents_end_with_the_end_token_and_short_ones_are_left_out(write: Callable[[str, str], str]) -> None:
    tokenizer = tiny_tokenizer()
    rows = write("rows.jsonl", '{"text": "the cat sat"}\n{"text": "a"}\n')
    found = tokenize_documents(load_documents(rows), tokenizer, min_tokens=3)
    cat = tokenizer("the cat sat")["input_ids"]
    assert found["input_ids"] == [[*cat, tokenizer.eos_token_id]]
    assert found["labels"] == found["input_ids"]


def test_tokens_are_made_once(write: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    rows = write("rows.jsonl", '{"text": "the cat sat"}\n')
    first = tokenize_documents(load_documents(rows), tokenizer)
    tokenizer(["the", "cat sat"], padding=True, truncation=True)  # changes what a pickle of it looks like
    monkeypatch.setattr("hf_posenc.data.tokens._encode", lambda *_: pytest.fail("tokenised again"))
    again = tokenize_documents(load_documents(rows), tokenizer)
    assert again["input_ids"] == first["input_ids"]


def test_special_tokens_of_a_tokenizer() -> None:
    encoder = tiny_tokenizer(encoder=True)
    cls, sep = encoder.convert_tokens_to_ids(["[CLS]", "[SEP]"])
    assert special_tokens(encoder) == ([cls], [sep])
    assert special_tokens(tiny_tokenizer()) == ([], [])


def test_only_answers_of_a_conversation_are_targets() -> None:
    tokenizer = tiny_tokenizer()
    chat = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat on"},
        {"role": "user", "content": "a dog"},
        {"role": "assistant", "content": "ran"},
    ]
    with pytest.raises(ValueError, match="no chat template"):
        tokenize_chat(chat, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}to {{ m.content }} from "
        "{% else %}{{ m.content }} by {% endif %}"
        "{% endfor %}"
    )
    ids, labels = tokenize_chat(chat, tokenizer)
    assert tokenizer.decode(ids) == "to the cat from sat on by to a dog from ran by"
    assert tokenizer.decode([label for label in labels if label != -100]) == "sat on by ran by"


# ---------------------------------------------------------------------- blocks


def _documents(lengths: list[int]) -> list[Document]:
    """Documents whose tokens are all different."""
    counter = iter(range(10_000))
    return [Document(f"d{i}", [next(counter) for _ in range(length)]) for i, length in enumerate(lengths)]


def test_packing_by_hand() -> None:
    blocks = list(pack_blocks(_documents([3, 1, 5]), 4))
    assert [block.input_ids for block in blocks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [block.labels for block in blocks] == [[-100, 1, 2, -100], [-100, 5, 6, 7], [-100]]
    assert [block.starts for block in blocks] == [[0, 3], [0], [0]]
    assert [block.documents for block in blocks] == [["d0", "d1"], ["d2"], ["d2"]]
    assert packed_positions([0, 3], 5).tolist() == [0, 1, 2, 0, 1]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(2, 16))
@settings(max_examples=100, deadline=None)
def test_packing_keeps_every_token_once_and_in_order(lengths: list[int], block_length: int) -> None:
    documents = _documents(lengths)
    blocks = list(pack_blocks(documents, block_length))
    assert [token for block in blocks for token in block.input_ids] == list(range(sum(lengths)))
    assert all(len(block.input_ids) == block_length for block in blocks[:-1])
    for block in blocks:
        positions = packed_positions(block.starts, len(block.input_ids)).tolist()
        assert [p for p in range(len(positions)) if positions[p] == 0] == block.starts
        for i, label in enumerate(block.labels):
            assert label == (-100 if i in block.starts else block.input_ids[i])


def test_cutting_by_hand() -> None:
    blocks = list(cut_blocks(_documents([7, 1, 3]), 4, overlap=1))
    assert [block.input_ids for block in blocks] == [[0, 1, 2, 3], [2, 3, 4, 5], [8, 9, 10]]
    assert [block.labels for block in blocks] == [[-100, 1, 2, 3], [-100, -100, 4, 5], [-100, 9, 10]]
    around = list(cut_blocks(_documents([5]), 5, min_length=1, prefix=[90], suffix=[91]))
    assert [block.input_ids for block in around] == [[90, 0, 1, 2, 91], [90, 2, 3, 4, 91]]
    assert [block.labels for block in around] == [[-100, 0, 1, 2, -100], [-100, -100, 3, 4, -100]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(4, 16), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_cutting_makes_every_token_a_target_once(lengths: list[int], block_length: int, overlap: int) -> None:
    documents = _documents(lengths)
    blocks = list(cut_blocks(documents, block_length, overlap=overlap, min_length=1))
    targets = [label for block in blocks for label in block.labels if label != -100]
    assert targets == [token for document in documents for token in document.input_ids[1:]]
    for block in blocks:
        assert len(block.input_ids) <= block_length
        assert len(set(block.documents)) == 1
        assert block.input_ids == list(range(block.input_ids[0], block.input_ids[0] + len(block.input_ids)))


@pytest.mark.parametrize(("length", "overlap"), [(1, 0), (4, 3), (4, -1)])
def test_blocks_without_room_are_refused(length: int, overlap: int) -> None:
    with pytest.raises(ValueError, match="block"):
        list(cut_blocks(_documents([5]), length, overlap=overlap))
    if length < 2:
        with pytest.raises(ValueError, match="at least 2"):
            list(pack_blocks(_documents([5]), length))


# ---------------------------------------------------------------------- positions


@given(st.integers(1, 64), st.integers(0, 200), st.integers(1, 8), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=200, deadline=None)
def test_skipped_positions(length: int, more: int, chunks: int, seed: int, random_start: bool) -> None:
    chunks = min(chunks, length)
    rng = numpy.random.default_rng(seed)
    positions = skip_positions(length, length + more, chunks, rng, random_start=random_start)
    steps = positions.diff()
    assert positions.shape == (length,) and positions.dtype == torch.long
    assert positions[-1] < length + more and positions[0] >= 0
    assert bool((steps >= 1).all()) and int((steps > 1).sum()) <= chunks - 1
    assert random_start or positions[0] == 0
    again = skip_positions(length, length + more, chunks, numpy.random.default_rng(seed), random_start=random_start)
    assert torch.equal(positions, again)


def test_skipping_reaches_the_whole_length() -> None:
    rng = numpy.random.default_rng(0)
    drawn = torch.stack([skip_positions(8, 64, 2, rng) for _ in range(2000)])
    gaps = drawn.diff().amax(1)
    assert int(drawn.max()) == 63
    assert int(gaps.max()) == 57  # 64 - 8 + 1: the second piece as far away as it can be
    # The offset of the second piece is uniform over 0 .. 56 (paper, section 3.2): mean 28, standard error 0.37.
    assert float(gaps.float().mean()) - 1 == pytest.approx(28, abs=1.5)
    # So is the boundary, over 1 .. 7.
    moved = drawn[gaps > 1]
    boundary = moved.diff().argmax(1) + 1
    assert set(boundary.tolist()) == set(range(1, 8))


def test_random_positions_rise_and_do_not_repeat() -> None:
    rng = numpy.random.default_rng(0)
    drawn = torch.stack([random_positions(8, 64, rng) for _ in range(500)])
    assert bool((drawn.diff() > 0).all()) and int(drawn.min()) == 0 and int(drawn.max()) == 63


@pytest.mark.parametrize(("length", "target", "chunks"), [(8, 7, 2), (0, 7, 1), (4, 8, 0), (4, 8, 5)])
def test_positions_that_do_not_fit_are_refused(length: int, target: int, chunks: int) -> None:
    with pytest.raises(ValueError, match=r"target_length|chunks"):
        skip_positions(length, target, chunks, numpy.random.default_rng(0))


# ---------------------------------------------------------------------- samples and batches


def _stored(write: Callable[[str, str], str], count: int = 12) -> str:
    lines = [json.dumps({"id": f"doc{i}", "text": text}) for i, text in enumerate(sentences(count))]
    return write("text.jsonl", "\n".join(lines))


@pytest.mark.parametrize("skipping", ["pose", "random"])
def test_samples_come_from_seed_epoch_and_number_alone(write: Callable[[str, str], str], skipping: str) -> None:
    blocks, _ = make_blocks([_stored(write)], tiny_tokenizer(), 8, packing="cut")
    rule = Preparation(seed=3, packing="cut", skipping=skipping, target_length=64)  # type: ignore[arg-type]
    first, second = TrainingBlocks(blocks, rule), TrainingBlocks(blocks, rule)
    forward = [first[i]["position_ids"].tolist() for i in range(6)]
    backward = [second[i]["position_ids"].tolist() for i in reversed(range(6))][::-1]
    assert forward == backward
    assert len({tuple(positions) for positions in forward}) > 1
    second.set_epoch(1)
    assert [second[i]["position_ids"].tolist() for i in range(6)] != forward


def test_a_curriculum_reaches_further_with_every_step() -> None:
    rule = Preparation(seed=1, packing="cut", skipping="pose", target_length=1000, chunks=2)
    curriculum = Curriculum(rule, start_length=100, steps=9)
    assert [curriculum.reach(step) for step in (0, 3, 9, 50)] == [100, 400, 1000, 1000]
    numbers, mask = torch.arange(200), torch.ones(200, 12, dtype=torch.long)
    mask[:, 10:] = 0
    for step in (0, 3, 9):
        positions = curriculum.positions(numbers, mask, step)
        assert 0.9 * curriculum.reach(step) < int(positions.max()) < curriculum.reach(step)
        assert positions[:, 10:].tolist() == [[0, 1]] * 200
        assert torch.equal(positions[7:9], curriculum.positions(numbers[7:9], mask[7:9], step))


def test_masked_words() -> None:
    masking = Masking(mask_id=4, vocabulary=97, special_ids=(0, 1, 2, 5, 6), fraction=0.15)
    ids = [5, *range(10, 90), 6]
    block = {"input_ids": ids, "labels": [-100, *ids[1:-1], -100], "starts": [0]}
    rule = Preparation(packing="cut", masking=masking)
    counts = torch.zeros(3)
    for number in range(300):
        sample = rule(block, number)
        chosen = sample["labels"] != -100
        assert int(chosen.sum()) == 12  # 15 % of 80
        assert torch.equal(sample["labels"][chosen], torch.tensor(ids)[chosen])
        assert torch.equal(sample["input_ids"][~chosen], torch.tensor(ids)[~chosen])
        assert not chosen[0] and not chosen[-1]
        shown = sample["input_ids"][chosen]
        counts += torch.tensor([(shown == 4).sum(), (shown == torch.tensor(ids)[chosen]).sum(), len(shown)])
    assert float(counts[0] / counts[2]) == pytest.approx(0.8, abs=0.03)  # 3,600 draws: standard error 0.007
    assert float(counts[1] / counts[2]) == pytest.approx(0.1 + 0.1 / 97, abs=0.02)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_packed_equals_separate(build: Callable, backend: str) -> None:  # type: ignore[type-arg]
    """Documents of 5, 1 and 6 tokens in a padded block: logits of each as if it were alone."""
    model = build(attn_implementation=backend)
    ids = tokens(12)[0].tolist()
    documents = [Document("a", ids[:5]), Document("b", ids[5:6]), Document("c", ids[6:])]
    (block,) = pack_blocks(documents, 16)
    sample = Preparation(packing="pack")(vars(block), 0)
    batch = Collator(pad_id=0, packing="pack", multiple_of=16)([sample])
    assert "attention_mask" not in batch
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        alone = [model(input_ids=torch.tensor([document.input_ids])).logits[0] for document in documents]
    torch.testing.assert_close(packed[:12], torch.cat(alone), atol=1e-4, rtol=0)


def test_skipped_positions_travel_with_a_mask() -> None:
    """Without it transformers takes the pieces for packed documents, and the first has no effect on the second."""
    model = tiny_llama()
    ids = tokens(8)[0].tolist()
    rule = Preparation(packing="cut", skipping="pose", target_length=32, chunks=2)
    block = {"input_ids": ids, "labels": ids, "starts": [0]}
    number = next(n for n in range(50) if int(rule(block, n)["position_ids"].diff().max()) > 4)
    batch = Collator(pad_id=0, packing="cut", multiple_of=10)([rule(block, number)])
    assert batch["attention_mask"].tolist() == [[1] * 8 + [0] * 2]
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 0] = (ids[0] + 1) % 90 + 3
    fields = ("input_ids", "attention_mask", "position_ids")
    with torch.no_grad():
        one, other = (model(**{name: b[name] for name in fields}).logits[0, 7] for b in (batch, changed))
    assert float((one - other).abs().max()) > 1e-2


def test_rules_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="packing='cut'"):
        Preparation(packing="pack", skipping="pose", target_length=64)
    with pytest.raises(ValueError, match="target_length"):
        Preparation(packing="cut", skipping="pose")


# ---------------------------------------------------------------------- all together


def test_counts_are_reported_and_add_up(write: Callable[[str, str], str]) -> None:
    tokenizer = tiny_tokenizer()
    texts = sentences(12)
    blocks, report = make_blocks([_stored(write)], tokenizer, 16, min_document_tokens=12)
    lengths = [len(text.split()) + 1 for text in texts]
    kept = [length for length in lengths if length >= 12]
    assert report is not None and 0 < report.short_documents == len(lengths) - len(kept)
    assert (report.documents, report.tokens) == (len(kept), sum(kept))
    assert report.block_tokens == report.tokens == sum(len(ids) for ids in blocks["input_ids"])
    assert report.targets == sum(label != -100 for labels in blocks["labels"] for label in labels)


def test_a_mixture_has_the_asked_shares(write: Callable[[str, str], str]) -> None:
    one = write("one.jsonl", "\n".join(json.dumps({"text": t}) for t in sentences(200, shortest=20)))
    two = write("two.jsonl", "\n".join(json.dumps({"text": t}) for t in sentences(200, shortest=20, seed=1)))
    blocks, _ = make_blocks([one, two], tiny_tokenizer(), 16, weights=[3, 1])
    from_one = sum(names[0].startswith("one") for names in blocks["documents"])
    assert from_one / len(blocks) == pytest.approx(0.75, abs=0.05)
    with pytest.raises(ValueError, match="one positive number for each"):
        make_blocks([one, two], tiny_tokenizer(), 16, weights=[1])


def test_streaming_gives_the_same_blocks(write: Callable[[str, str], str]) -> None:
    path = _stored(write)
    stored, _ = make_blocks([path], tiny_tokenizer(), 16)
    streamed, report = make_blocks([path], tiny_tokenizer(), 16, streaming=True)
    assert report is None
    assert sorted(row["input_ids"] for row in streamed) == sorted(stored["input_ids"])


def test_text_without_a_block_is_refused(write: Callable[[str, str], str]) -> None:
    with pytest.raises(ValueError, match=r"no block of text.*min_document_tokens=50"):
        make_blocks([_stored(write)], tiny_tokenizer(), 16, min_document_tokens=50)


def test_rows_are_those_of_the_file_whatever_its_time_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same relative name, size and time, in another folder and after a change in place."""
    for folder, text in (("one", "the cat"), ("two", "the dog")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "book.txt").write_text(text, encoding="utf-8")
        os.utime(tmp_path / folder / "book.txt", (0, 0))
        monkeypatch.chdir(tmp_path / folder)
        assert load_documents("book.txt")["text"][:] == [text]
    Path("book.txt").write_text("the cow", encoding="utf-8")
    os.utime("book.txt", (0, 0))
    assert load_documents("book.txt")["text"][:] == ["the cow"]


def test_files_in_other_codes_are_named_every_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="no file in it is UTF-8"):
        load_documents(tmp_path)
    (tmp_path / "good.txt").write_text("the cat", encoding="utf-8")
    for _ in range(2):
        caplog.clear()
        load_documents(tmp_path)
        assert "latin.txt is left out" in caplog.text
