"""Measure the prose of README.md and other pages, help texts, docstrings and messages: sentence
length, and turns of phrase to avoid.

    python docs/prose.py                        a row per area, and the count of each turn
    python docs/prose.py --worst 40             the longest sentences, and those with most turns
    python docs/prose.py --worst 40 --in diagnose      only of paths that contain "diagnose"
    python docs/prose.py --draw 100 --seed 1    sentences drawn at random, for a human reader

Code, tables, headings and decision notes are left out. No test holds the numbers.
"""

import argparse
import ast
import random
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
AREAS = ("README", "docs", "help", "docstrings", "messages")
MAX_WORDS = 35
_ISE = "normal|optim|synchron|initial|regular|general|organ|recogn|summar|serial|quant|penal|minim|maxim|util|equal"
_ISE += "|memor|token|parallel|custom|final|local|visual|factor|vector|real|special|categor|standard|central"
_UNITS = "tokens|images|samples|steps|targets|pairs|words|bytes|batches|records|times|FLOPs|FLOP|GB|GiB|MiB"
TURNS = {
    "fronted 'Of a ..., '": r"^Of (?!course\b)",
    "'what ...' or 'who ...' as a subject": r"(^|[;:] )([Ww]hat|[Ww]ho)(ever)? (?!if\b)(?!.*\?$)",
    "'who' without a person before it": r"\b(for|to|by|of|with|from) who\b",
    "'is none', 'is no', 'are none'": r"\b(is|are|was|were) (none|no)\b(?! (longer|more|later|less))",
    "'nothing of'": r"\bnothing of\b",
    "'so many', 'so-manieth'": r"\bso[- ]man(y|ieth)\b",
    "'a second' for 'per second'": rf"(?i)\b({_UNITS}) a (second|step|minute|hour|day)\b",
    "a fraction in words": r"\ba (third|quarter|fifth|sixth|eighth|tenth|twelfth|sixteenth|twentieth|hundredth) of\b",
    "'go on' for 'continue' or 'resume'": r"\b(go|goes|going|went) on\b",
    "'make again' for 'repeat'": r"\b(made|make|makes|making)( \w+){0,3} again\b|\bmade (by|of) it\b",
    "'told of', 'tell of', 'cannot be told'": r"\b(told|tells?) of\b|cannot be told",
    "'that of', 'those of' without its noun": r"(^|[,:;] |\b(is|are|by|for|as) )(that|those) of\b",
    "'of it', 'of them' at the end": r"\bof (it|them)[.:;]?$",
    "British spelling": rf"(?i)colour|neighbour|behaviour|favour|honour|\bgrey|\bcentred?\b|(label|cancel|model)l(ed|ing)\b"
    rf"|(?:{_ISE})is(e|es|ed|er|ers|ing|ation|ations)\b|\banalys(e|ed|ing)\b|artefact|whilst",
}
_TURNS = {name: re.compile(pattern) for name, pattern in TURNS.items()}


class Sentence(NamedTuple):
    """A sentence, the area that it is counted in, and the file (with the line of its docstring)
    where it stands.
    """

    area: str
    where: str
    text: str

    @property
    def words(self) -> int:
        return len(self.text.split())

    @property
    def turns(self) -> list[str]:
        """Names of the turns in the sentence; text in backticks does not count."""
        text = re.sub(r"`[^`]*`", "`x`", self.text)
        return [name for name, pattern in _TURNS.items() if pattern.search(text)]


def split(text: str) -> Iterator[str]:
    """Sentences of plain prose, of three words or more; a colon ends one if a capital, a digit or
    code follows it.
    """
    for paragraph in re.split(r"\n\s*\n", text):
        line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`\"0-9(*])", line):
            if len(sentence.split()) > 2:
                yield sentence


def in_markdown(path: Path) -> Iterator[Sentence]:
    """Sentences of a page, without code, tables, headings and images; an item of a list is a
    paragraph.
    """
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = [
        line
        for line in text.splitlines()
        if not line.strip() or not re.match(r"\s*(\||#|<|!\[|    )", line)
    ]
    items = [re.sub(r"^\s*([*\-]|\d+\.)\s+", "\n\n", line) for line in prose]
    area = "README" if path.name == "README.md" else "docs"
    for sentence in split("\n".join(items)):
        yield Sentence(area, str(path.relative_to(ROOT)), sentence)


def docstrings(body: list[ast.stmt]) -> Iterator[tuple[int, bool, str]]:
    """Docstrings of classes and functions, and texts below fields: line, whether it is of a
    function, text.
    """
    for node, after in zip(body, [*body[1:], None], strict=True):
        match node, after:
            case ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                yield after.lineno, False, cleandoc(text)
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef(), _:
                if text := ast.get_docstring(node):
                    yield node.lineno, not isinstance(node, ast.ClassDef), text
        for block in ("body", "orelse", "finalbody"):
            if (
                isinstance(inner := getattr(node, block, None), list)
                and inner
                and isinstance(inner[0], ast.stmt)
            ):
                yield from docstrings(inner)


def messages(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts of five words or more that a program prints or raises, a line at a time; an inserted
    value is `x`.
    """
    prose = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    prose |= {
        id(part)
        for node in ast.walk(module)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(module):
        if id(node) in prose or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "`x`"
            for part in parts
        )
        if len(re.findall(r"[A-Za-z]{2,}", text)) > 4 and not re.search(r"[{}<>]|_\w+\(", text):
            yield from ((node.lineno, line.strip()) for line in text.split("\n"))


def in_python(path: Path) -> Iterator[Sentence]:
    """Sentences of a file's docstrings, without examples; those that a `--help` prints are of the
    area "help".
    """
    module = ast.parse(path.read_text(encoding="utf-8"))
    package, place = (
        path.relative_to(ROOT / "src" / "surefoot").parts[0],
        str(path.relative_to(ROOT)),
    )
    texts = [(1, True, ast.get_docstring(module) or ""), *docstrings(module.body)]
    for line, is_function, text in texts:
        is_help = not is_function and package in ("cli", "config", "recipes")
        prose = re.sub(r"^\s*(>>>|\.\.\.).*(\n(?!\s*\n).*)*", "", text, flags=re.MULTILINE)
        prose = re.sub(r"^ {4,}\S.*$", "", prose, flags=re.MULTILINE)
        prose = re.sub(r"^(\w+(, \w+)*): ", r"\n\n\1: ", prose, flags=re.MULTILINE)  # arguments
        for sentence in split(prose):
            yield Sentence("help" if is_help else "docstrings", f"{place}:{line}", sentence)
    for line, text in messages(module):
        for sentence in split(text):
            yield Sentence("messages", f"{place}:{line}", sentence)


def sentences() -> list[Sentence]:
    """All sentences, in the order of their files."""
    pages = [
        ROOT / "README.md",
        *sorted({*(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs" / "decisions").iterdir()}),
    ]
    pages = [page for page in pages if page.parent.name != "api"]  # these repeat docstrings
    pages += sorted({*ROOT.glob("*.md")} - {*pages})
    read = [sentence for page in pages for sentence in in_markdown(page)]
    return read + [
        sentence for path in sorted((ROOT / "src").rglob("*.py")) for sentence in in_python(path)
    ]


def measures(all_sentences: list[Sentence]) -> dict[str, tuple[int, float, int, int]]:
    """For each area: sentences, their mean length in words, those above `MAX_WORDS`, and those with
    a turn to avoid.
    """
    rows = {}
    for area in AREAS:
        here = [sentence for sentence in all_sentences if sentence.area == area]
        mean = sum(sentence.words for sentence in here) / max(1, len(here))
        too_long = sum(sentence.words > MAX_WORDS for sentence in here)
        rows[area] = (
            len(here),
            round(mean, 1),
            too_long,
            sum(bool(sentence.turns) for sentence in here),
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--worst", type=int, default=0, help="number of sentences to list, the worst first"
    )
    parser.add_argument("--draw", type=int, default=0, help="number of sentences to draw at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument(
        "--in", dest="part", default="", help="only sentences of paths that contain this text"
    )
    options = parser.parse_args()
    selected = [sentence for sentence in sentences() if options.part in sentence.where]
    if options.draw:
        drawn = random.Random(options.seed).sample(selected, min(options.draw, len(selected)))
        print("\n".join(f"{sentence.where}: {sentence.text}" for sentence in drawn))
        return
    print(
        f"{'area':12}{'sentences':>10}{'mean words':>12}{f'over {MAX_WORDS}':>9}{'with a turn':>13}"
    )
    for area, (count, mean, too_long, turned) in measures(selected).items():
        print(f"{area:12}{count:10,}{mean:12}{too_long:9}{turned:13}")
    turns = [name for sentence in selected for name in sentence.turns]
    print("\n" + "\n".join(f"{turns.count(name):5}  {name}" for name in TURNS))
    bad = [sentence for sentence in selected if sentence.turns or sentence.words > MAX_WORDS]
    bad.sort(key=lambda sentence: -max(0, sentence.words - MAX_WORDS) - 20 * len(sentence.turns))
    for sentence in bad[: options.worst]:
        print(
            f"\n{sentence.where} ({sentence.words} words; {'; '.join(sentence.turns) or 'too long'})\n  {sentence.text}"
        )


if __name__ == "__main__":
    main()
