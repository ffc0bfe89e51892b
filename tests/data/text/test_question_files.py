"""Files of questions: each kind against its own reading, HellaSwag against build-nanogpt's scoring,
what is refused. 4 seconds.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import surefoot as sf
from data_sets import DATA, needs
from in_one import in_one
from refused import refused
from surefoot.errors import DataError
from surefoot.metrics.multiple_choice import multiple_choice_accuracy
from surefoot.recipes.readers.text.multiple_choice import MultipleChoice
from surefoot.recipes.readers.text.question_files import load_questions
from surefoot.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer
from surefoot.train.evaluate import evaluate

HELLASWAG = {
    "ctx": "A man sits. he",
    "endings": ["runs.", "is off.", "holds it.", "starts."],
    "label": 3,
}
ARC = {"query": "Question: why?\n", "choices": ["so", "thus"], "gold": 1}
WINOGRANDE = {"context_options": ["so Sarah", "so Maria"], "continuation": "did it.", "gold": 0}
LAMBADA = {"context": "I don't care about", "continuation": "signs"}


def write(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def decode_all(texts):
    return [ByteTokenizer().decode(text) for text in texts]


@pytest.mark.parametrize(
    ("record", "contexts", "endings", "label"),
    [
        pytest.param(
            HELLASWAG | {"ind": 4, "ctx_a": "A", "source_id": "x"},
            ["A man sits. he"] * 4,
            [" runs.", " is off.", " holds it.", " starts."],
            3,
            id="hellaswag",
        ),
        pytest.param(
            HELLASWAG | {"label": "3"},
            ["A man sits. he"] * 4,
            [" runs.", " is off.", " holds it.", " starts."],
            3,
            id="label as text",
        ),
        pytest.param(
            ARC, ["Question: why?\n"] * 2, ["so", "thus"], 1, id="query: no blank after a line end"
        ),
        pytest.param(
            ARC | {"query": "Question: why?"},
            ["Question: why?"] * 2,
            [" so", " thus"],
            1,
            id="query without line end",
        ),
        pytest.param(
            ARC | {"query": "Why?", "choices": [" so", "\nthus"]},
            ["Why?"] * 2,
            [" so", "\nthus"],
            1,
            id="blank in the ending: no second one",
        ),
        pytest.param(
            WINOGRANDE, ["so Sarah", "so Maria"], [" did it.", " did it."], 0, id="winogrande"
        ),
        pytest.param(LAMBADA, ["I don't care about"], [" signs"], 0, id="lambada"),
    ],
)
def test_a_record_of_each_kind_is_known_by_its_keys(record, contexts, endings, label, tmp_path):
    (question,) = load_questions(write(tmp_path / "a.jsonl", [record]), ByteTokenizer())

    assert decode_all(question.contexts) == contexts
    assert decode_all(question.endings) == endings
    assert question.label == label
    assert question.source == f"{tmp_path / 'a.jsonl'}, line 1"


def test_gzipped_files_blank_lines_and_a_byte_order_mark_are_read(tmp_path):
    record = json.dumps(ARC).encode()
    data = b"\xef\xbb\xbf" + record + b"\r\n\n" + record
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))

    first, second = load_questions(tmp_path / "a.jsonl.gz", ByteTokenizer())

    assert first.source.endswith(", line 1")
    assert second.source.endswith(", line 3")


def test_chosen_questions_are_the_same_for_a_seed_and_others_for_another(tmp_path):
    def choose(seed):
        questions = load_questions(path, ByteTokenizer(), number=10, seed=seed)
        return [question.source for question in questions]

    path = write(tmp_path / "a.jsonl", [ARC | {"query": f"{place}"} for place in range(50)])

    assert len(set(choose(0))) == 10
    assert choose(0) == choose(0)
    assert choose(0) != choose(1)


def test_all_questions_are_taken_where_more_are_asked_for(tmp_path):
    path = write(tmp_path / "a.jsonl", [ARC] * 5)

    assert len(load_questions(path, ByteTokenizer(), number=6)) == 5


@in_one
@pytest.mark.parametrize(
    ("records", "code", "fields"),
    [
        (
            [HELLASWAG, {"ctx": "a", "label": 0}],
            "question-keys-missing",
            {"missing": ["endings"]},
        ),
        ([{"text": "a"}], "question-keys-unknown", {"keys": ["text"]}),
        ([HELLASWAG | {"label": 4}], "question-answer-invalid", {"key": "label", "value": 4}),
        ([HELLASWAG | {"label": True}], "question-answer-invalid", {"value": True}),
        ([HELLASWAG | {"label": ""}], "question-answer-invalid", {"value": ""}),
        ([HELLASWAG | {"endings": ["a", ""]}], "question-text-empty", {"key": "endings"}),
        ([HELLASWAG | {"endings": []}], "question-text-empty", {"key": "endings"}),
        ([HELLASWAG | {"ctx": 3}], "question-text-empty", {"key": "ctx"}),
        (
            [ARC, ARC | {"choices": ["a", "b", "c"]}],
            "question-choices-differ",
            {"endings": 3, "expected": 2},
        ),
        ([ARC, LAMBADA], "question-keys-missing", {"missing": ["query", "choices", "gold"]}),
        ([ARC | {"choices": ["a"]}], "question-of-one-ending", {}),
        (
            [ARC | {"query": ["a", "b"], "choices": ["x", "y", "z"]}],
            "question-texts-unpaired",
            {"contexts": 2, "endings": 3},
        ),
        ([LAMBADA | {"context": ["a", "b"]}], "question-without-answer-key", {}),
        ([[1]], "row-not-an-object", {}),
        ([], "questions-missing", {}),
    ],
)
def test_a_file_that_is_none_is_refused_naming_the_line(records, code, fields, tmp_path):
    path = write(tmp_path / "a.jsonl", records)
    where = f"{path}, line {len(records)}" if records else str(path)

    with refused(code, DataError, where=where, **fields):
        load_questions(path, ByteTokenizer())


@pytest.mark.parametrize(
    ("data", "code", "fields"),
    [
        (json.dumps(ARC).encode() + b"\n{", "line-not-json", {}),
        (b'{"query": "\xff"}', "text-not-utf-8", {"line": 1, "byte": 12}),
        (gzip.compress(b"x" * 999, mtime=0)[:-9], "file-truncated", {}),
    ],
)
def test_bytes_that_cannot_be_read_are_told_with_their_line(data, code, fields, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(data)
    with refused(code, DataError, **fields):
        load_questions(tmp_path / "a.jsonl", ByteTokenizer())


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with refused("path-missing", DataError, path=tmp_path / "a.jsonl"):
        load_questions(tmp_path / "a.jsonl", ByteTokenizer())


def test_no_questions_of_a_file_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [ARC])

    with refused("setting-out-of-range", setting="number", value=0):
        load_questions(path, ByteTokenizer(), number=0)


def test_a_character_that_the_tokenizer_does_not_know_is_told_with_its_line(tmp_path):
    path = write(tmp_path / "a.jsonl", [ARC, ARC | {"query": "Qué"}])
    tokenizer = CharacterTokenizer.from_text(json.dumps(ARC) + "\n")
    with refused("character-unknown", DataError, character="é") as caught:
        load_questions(path, tokenizer)
    assert caught.value.places == (f"{path}, line 2",)


# --- real files -----------------------------------------------------------------------------------


@needs("hellaswag", "multiple-choice")
@pytest.mark.parametrize(
    ("name", "number", "choices"),
    [
        ("hellaswag/hellaswag_val", 10_042, 4),
        ("multiple-choice/arc_easy", 2_376, 4),
        ("multiple-choice/arc_challenge", 1_172, 4),
        ("multiple-choice/piqa", 1_838, 2),
        ("multiple-choice/openbook_qa", 500, 4),
        ("multiple-choice/copa", 100, 2),
        ("multiple-choice/winogrande", 1_267, 2),
        ("multiple-choice/lambada_openai", 5_153, 1),
    ],
)
def test_the_public_files_are_read_whole(name, number, choices):
    questions = load_questions(DATA / f"{name}.jsonl.gz", ByteTokenizer())

    assert len(questions) == number
    assert {len(question.endings) for question in questions} == {choices}
    if name.endswith("hellaswag_val"):
        labels = Counter(question.label for question in questions)
        assert labels == {0: 2515, 1: 2485, 2: 2584, 3: 2458}


@pytest.mark.slow
@needs("gpt2-bpe", "hellaswag")
def test_hellaswag_is_scored_as_build_nanogpt_does():
    """`render_example` and `get_most_likely_row` of karpathy/build-nanogpt, hellaswag.py, written
    out, question by question.
    """
    tokenizer = sf.tokenizers.load(DATA / "gpt2-bpe")
    torch.manual_seed(0)
    shape = sf.models.GPTConfig(
        layers=2,
        heads=2,
        width=16,
        context=256,
        vocab_size=tokenizer.vocab_size,
        family="gpt2",
        tie_embeddings=True,
    )
    model = sf.models.GPT(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    path = DATA / "hellaswag" / "hellaswag_val.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        examples = [json.loads(line) for line in file]
    questions = load_questions(path, tokenizer, number=12)
    right_by_sum = 0
    right_by_mean = 0
    for question in questions:
        example = examples[int(question.source.rpartition(" ")[2]) - 1]
        prefix = tokenizer.encode(example["ctx"]).tolist()
        rows = [prefix + tokenizer.encode(" " + ending).tolist() for ending in example["endings"]]
        longest = max(map(len, rows))
        tokens = torch.zeros(4, longest, dtype=torch.long)
        mask = torch.zeros(4, longest)
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = torch.tensor(row)
            mask[place, len(prefix) : len(row)] = 1
        with torch.no_grad():
            logits = model.eval()(tokens)
        losses = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        ).view(4, -1)
        sums = (losses * mask[:, 1:]).sum(dim=1)
        means = sums / mask[:, 1:].sum(dim=1)
        right_by_sum += int(sums.argmin()) == example["label"]
        right_by_mean += int(means.argmin()) == example["label"]
    dataset = MultipleChoice(questions, context=256, byte_counts=tokenizer.byte_counts)
    split = sf.Split(dataset, metrics=multiple_choice_accuracy, loss=False, batch_size=3)

    scores = evaluate(model, split)

    assert scores["acc"] == right_by_sum / 12
    assert scores["acc_norm"] == right_by_mean / 12
    assert right_by_sum != right_by_mean
