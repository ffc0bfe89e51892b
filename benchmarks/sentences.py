"""How many tests fail if one word of a sentence changes: the sentences stand in one golden file, so
it should be the test of that file alone.

    python benchmarks/sentences.py
    python benchmarks/sentences.py --asserts

Twenty sentences are drawn from the texts of the source and of the help, always the same ones for a
seed and a source; `--sentences FILE:WORD` names others. The fast suite, or the tests of `--tests`,
run once with all of them changed. Then each is changed alone, and the tests that failed run again.
Appends a dated table to benchmarks/results/sentences.txt.

`--asserts` lists the asserts and patterns of tests that have three words in a row of a text of the
source, outside tests/texts. Some ask for what is no sentence: a command, an error of torch.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = Path("src") / "surefoot"
RESULTS = ROOT / "benchmarks" / "results" / "sentences.txt"
FAST = "not slow and not campaign and not gpu and not timing"
_WORDS = 6  # of a text that is a sentence
_OTHER_WORD = "altogether"


@dataclass(frozen=True)
class Sentence:
    """A text in the source, and the word of it that changes."""

    file: Path  # relative to the repository
    line: int
    end_line: int
    word: str
    text: str

    def change(self, root: Path) -> None:
        """Replace the word in the copy of the repository at `root`."""
        path = root / self.file
        lines = path.read_text().splitlines(keepends=True)
        for index in range(self.line - 1, self.end_line):
            changed = re.sub(rf"\b{self.word}\b", _OTHER_WORD, lines[index], count=1)
            if changed != lines[index]:
                lines[index] = changed
                break
        path.write_text("".join(lines))


def sentences(*, help_texts: bool) -> Iterator[Sentence]:
    """The sentences of messages, or those of the help: texts below the fields of options."""
    for path in sorted((ROOT / SOURCE).rglob("*.py")):
        module = ast.parse(path.read_text())
        bare = {
            id(node.value)
            for node in ast.walk(module)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        heads = {
            id(node.body[0].value)
            for node in ast.walk(module)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        is_of_options = path.parent.name == "cli" or "settings" in path.name
        for node in ast.walk(module):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            is_help = is_of_options and id(node) in bare and id(node) not in heads
            if help_texts != is_help or (id(node) in bare and not is_help):
                continue
            words = re.findall(r"\b[a-z]{5,}\b", node.value)
            if len(node.value.split()) < _WORDS or not words:
                continue
            file = path.relative_to(ROOT)
            last = node.end_lineno or node.lineno
            yield Sentence(file, node.lineno, last, max(words, key=len), node.value)


def asserts_on_sentences() -> Iterator[str]:
    """The asserts of tests that share three words in a row with a text of the source."""
    known = {
        triple
        for path in (ROOT / SOURCE).rglob("*.py")
        for text in _texts(ast.parse(path.read_text()))
        for triple in _triples(text)
    }
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "texts" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            asked: list[ast.AST] = []
            if isinstance(node, ast.Assert):
                asked = [node.test]
            elif isinstance(node, ast.Call):
                asked = [keyword.value for keyword in node.keywords if keyword.arg == "match"]
            triples = [
                triple for each in asked for text in _texts(each) for triple in _triples(text)
            ]
            shared = [" ".join(triple) for triple in triples if triple in known]
            if shared and isinstance(node, ast.Assert | ast.Call):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {shared[0]}"


def _texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a tree, without those that stand alone, such as docstrings."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def _triples(text: str) -> Iterator[tuple[str, str, str]]:
    words = [word.strip(".,;:!?()[]'\"`") for word in text.replace("\\", "").split()]
    for triple in zip(words, words[1:], words[2:], strict=False):
        if all(re.fullmatch(r"[A-Za-z]+(-[a-z]+)?('s)?", word) for word in triple):
            yield triple


def named(text: str) -> Sentence:
    """The first sentence of a file whose changed word is this one."""
    file, _, word = text.partition(":")
    for help_texts in (False, True):
        for sentence in sentences(help_texts=help_texts):
            if str(sentence.file) == file and sentence.word == word:
                return sentence
    sys.exit(f"{file} has no sentence of which {word!r} changes")


def copy_repository(place: Path) -> Path:
    """Copy the files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    root = place / "repository"
    for name in listed.stdout.split("\0"):
        if name:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    return root


def failed_tests(root: Path, tests: Sequence[str], *, workers: int) -> set[str]:
    """The names of the tests that fail."""
    environment = os.environ | {
        "PYTHONPATH": str(root / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-m", FAST]
    command += ["-n", str(workers), "--dist", "loadfile", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, check=False, text=True
    )
    if ended.returncode not in (0, 1):
        sys.exit(ended.stdout[-2000:] + ended.stderr[-2000:])
    return set(re.findall(r"(?m)^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - .*)?$", ended.stdout))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=17, help="draws other sentences")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest")
    parser.add_argument(
        "--sentences", nargs="+", default=[], help="FILE:WORD instead of drawn ones"
    )
    parser.add_argument("--tests", nargs="+", default=[], help="files or folders of tests to run")
    parser.add_argument("--list", action="store_true", help="print the sentences and end")
    parser.add_argument(
        "--asserts", action="store_true", help="list the asserts of tests on sentences and end"
    )
    arguments = parser.parse_args()
    if arguments.asserts:
        print("\n".join(asserts_on_sentences()))
        return
    if arguments.sentences:
        drawn = [named(text) for text in arguments.sentences]
        which = "named ones"
    else:
        chance = random.Random(arguments.seed)
        drawn = chance.sample([*sentences(help_texts=False)], 16)
        drawn += chance.sample([*sentences(help_texts=True)], 4)
        which = f"seed {arguments.seed}"
    if arguments.list:
        for sentence in drawn:
            print(f"{sentence.file}:{sentence.line}: {sentence.word!r} in {sentence.text!r}")
        return
    with tempfile.TemporaryDirectory() as place:
        root = copy_repository(Path(place))
        for sentence in drawn:
            sentence.change(root)
        failed = failed_tests(root, arguments.tests, workers=arguments.workers)
        for sentence in drawn:
            shutil.copy2(ROOT / sentence.file, root / sentence.file)
        of_none = failed_tests(root, sorted(failed), workers=arguments.workers) if failed else set()
        suspects = sorted(failed - of_none)
        lines = []
        for sentence in drawn:
            sentence.change(root)
            failed = failed_tests(root, suspects, workers=arguments.workers) if suspects else set()
            shutil.copy2(ROOT / sentence.file, root / sentence.file)
            lines.append(f"{len(failed):>5}  {sentence.file}  {sentence.word}")
            lines += [f"       {test}" for test in sorted(failed)]
            print("\n".join(lines[-1 - len(failed) :]), flush=True)
    of_tests = f" (of {' '.join(arguments.tests)})" if arguments.tests else ""
    head = f"# {time.strftime('%Y-%m-%d')}, {which}: tests that fail for one changed word{of_tests}"
    with RESULTS.open("a") as file:
        file.write("\n".join([head, *lines]) + "\n\n")


if __name__ == "__main__":
    main()
