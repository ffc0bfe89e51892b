"""The page "what files may look like": each form on it is read, and each refusal is one; 5 s."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import surefoot as sf
from refused import refused
from surefoot.recipes.readers.text.token_files import find_token_files

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
pytest.importorskip("pyarrow")
import write_forms
from write_forms import FileForm, Refusal

FORMS = [*write_forms.forms()]
REFUSALS = [*write_forms.refusals()]


def samples(recipe: str, path: Path) -> int:
    """The number of samples that a recipe reads from a path."""
    if recipe == "gpt" and (path / "train.bin").is_file():
        tokens = find_token_files(path, "gpt2")
        assert tokens is not None
        return len(tokens.training)
    if recipe == "gpt":
        return len(sf.data.load_documents(path))
    if recipe == "finetune":
        from surefoot.recipes.finetune.conversations import read_conversations

        return len(read_conversations(str(path), setting="data.path").rows)
    if recipe == "translation":
        pairs = sf.data.load_pairs(path, val_fraction=0.1)
        return len(pairs.train) + len(pairs.val)
    if recipe == "images":
        images = sf.data.load_images(path, val_fraction=0.2)
        return len(images.train) + len(images.val)
    return len(sf.data.Table(path))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.recipe}: {form.name}")
def test_each_form_is_read(form: FileForm, tmp_path: Path) -> None:
    write_forms.write(form.files, tmp_path)
    expected = {"gpt": {1, 40}, "finetune": {2}, "translation": {200}, "images": {10}}
    assert samples(form.recipe, tmp_path) in expected.get(form.recipe, {2})
    assert form.lines


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: f"{one.recipe}: {one.what}")
def test_each_refusal_has_its_code(refusal: Refusal, tmp_path: Path) -> None:
    write_forms.write(refusal.files, tmp_path)
    is_file = refusal.recipe in ("gpt", "finetune")
    path = tmp_path / next(iter(refusal.files)) if is_file else tmp_path
    with refused(refusal.code, sf.DataError):
        samples(refusal.recipe, path)


def test_the_page_is_made_of_these_lists() -> None:
    """`python docs/write_forms.py` writes it."""
    assert write_forms.PAGE.read_text(encoding="utf-8") == write_forms.page()
