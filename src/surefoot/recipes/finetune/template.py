"""Chat templates: which is used, and which parts of a conversation's text are answers. Imports no
torch.
"""

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.paths import local_path
from surefoot.data.text_files import decode_utf8
from surefoot.errors import Setting
from surefoot.recipes.finetune.conversations import apply_template, render
from surefoot.recipes.finetune.forms import Conversation, Message

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant: {{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_COMMENTS = re.compile(r"\{#.*?#\}", re.DOTALL)
_OPENED = re.compile(r"<(\w*think\w*)>\s*\Z")  # what a model thinks, at the end of a prompt
_THOUGHTS = re.compile(r"\s*<(\w*think\w*)>.*?</\1>", re.DOTALL)
_REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message
_SHOWN = 40  # characters of a text in a message
_PROBES = 8  # words that are looked at behind a blank
_FILE = Setting("data.template", "FILE")


def rendered(
    tokenizer: Any,
    row: Conversation,
    *,
    train_on: str,
    ends: tuple[str, ...] | None = None,
    is_checked: bool = True,
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation by the tokenizer's chat template, and the start and end of
    each trained answer in it.

    An answer is what the model must write after the template's prompt for it, with the template's
    end of a message. `ends` are the texts of `end_texts`. Raises `DataError` if the template fails,
    if the text has no such part, if no end token follows it, or if a system message is left out;
    the last two and headers are looked for if `is_checked`.
    """
    text = render(tokenizer, row.messages, row.where, tools=row.tools)
    ends = end_texts(tokenizer) if ends is None else ends
    if is_checked:
        refuse_without_system(row, text)
    spans = list[tuple[int, int]]()
    for index in row.trained_answers(train_on):
        before, until = _prompt_and_end(tokenizer, row, index, text, ends)
        if not _is_part(text, before, until):
            raise _rewritten(tokenizer, row, index, text, before, train_on, ends)
        if is_checked:
            _refuse_header(row, index, before, until)
            _refuse_without_end(row, index, until, ends)
        spans.append((len(before), len(until)))
    return text, spans


def has_marks(tokenizer: Any) -> bool:
    """Return True if the chat template marks answers itself, by `{% generation %}`."""
    return _MARKS.search(_COMMENTS.sub("", str(tokenizer.chat_template))) is not None


def marked(tokenizer: Any, row: Conversation, *, train_on: str) -> list[bool]:
    """Return for each token of a conversation whether it is of a trained answer, by the marks
    `{% generation %}` of the chat template, as in transformers.
    """
    encoded = apply_template(
        tokenizer,
        row.messages,
        row.where,
        tools=row.tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    mask = [bool(entry) for entry in encoded["assistant_masks"]]
    if not any(mask):
        raise sf.DataError(
            "template-marks-nothing",
            problem=f"{row.where}: the chat template marks no part of this row with"
            " {% generation %}",
            reason="so none of its answers would be trained",
            remedy=[("a template that marks each answer:", _FILE), "remove the row"],
            where=row.where,
        )
    trained = row.trained_answers(train_on)
    if trained == row.answers:
        return mask
    # where each marked part begins
    starts = []
    before = False
    for place, is_marked in enumerate(mask):
        if is_marked and not before:
            starts.append(place)
        before = is_marked
    if len(starts) != len(row.answers):
        raise sf.DataError(
            "template-marks-unclear",
            problem=f"{row.where}: the chat template marks {len(starts)} parts with"
            f" {{% generation %}}, and the conversation has {len(row.answers)} answers",
            reason="only some of the answers are trained, and it is not clear which parts they are",
            remedy=[Setting("data.train_on", "answers"), Setting("data.template", "FILE")],
            where=row.where,
        )
    stops = [*starts[1:], len(mask)]
    for index, start, stop in zip(row.answers, starts, stops, strict=True):
        if index not in trained:
            mask[start:stop] = [False] * (stop - start)
    return mask


def end_texts(tokenizer: Any) -> tuple[str, ...]:
    """Return the tokens that may end an answer, as texts: the special ones, and added ones."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return tuple({*added, *tokenizer.all_special_tokens})


class PromptEnds:
    """The text of a prompt without the blanks at its end that the tokenizer joins with the first
    word of an answer. A model that was trained on whole tokens writes these blanks itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.joined = dict[str, int]()  # by blanks at the end: how many of them are joined

    def __call__(self, prompt: str) -> str:
        blanks = prompt[len(prompt.rstrip()) :]
        if blanks not in self.joined:
            shorter = prompt
            while shorter[-1:].isspace() and self._joins(shorter):
                shorter = shorter[:-1]
            self.joined[blanks] = len(prompt) - len(shorter)
        return prompt[: len(prompt) - self.joined[blanks]]

    def _joins(self, prompt: str) -> bool:
        """Return True if a word behind a prompt that ends with a blank changes the prompt's tokens,
        of the first words that the vocabulary has with this blank.
        """
        alone = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        blank = self.tokenizer.convert_ids_to_tokens(alone[-1])
        numbers = self.tokenizer.get_vocab()
        with_blank = [token for token in numbers if token.startswith(blank)]
        texts = []
        for token in sorted(with_blank, key=numbers.__getitem__):
            word = token[len(blank) :]
            if word.isalpha() and token.isprintable():
                texts.append(prompt + word)
                if len(texts) == _PROBES:
                    break
        if not texts:
            return False
        followed = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return any(tokens[: len(alone)] != alone for tokens in followed)


def _prompt_and_end(
    tokenizer: Any, row: Conversation, index: int, text: str, ends: Sequence[str]
) -> tuple[str, str]:
    """Return the text of a conversation up to an answer, and up to its end."""
    earlier = row.messages[:index]
    before = render(tokenizer, earlier, row.where, tools=row.tools, prompts_answer=True)
    if index + 1 == len(row.messages):
        return before, text
    until = render(tokenizer, row.messages[: index + 1], row.where, tools=row.tools)
    if not text.startswith(until):
        until = _shared_end(row.messages[index], text, before, until, ends) or until
    return before, until


def _shared_end(
    message: Message, text: str, before: str, until: str, ends: Sequence[str]
) -> str | None:
    """Return a text up to the end token behind a message, if only what follows this token is
    written otherwise within the conversation: Phi-3's template ends a text once more.
    """
    content = str(message.get("content") or "").strip()
    same = takewhile(lambda pair: pair[0] == pair[1], zip(text, until, strict=False))
    shared = text[: sum(1 for _ in same)]
    start = shared.find(content, len(before)) if content else -1
    if start < 0:
        return None
    behind = start + len(content)
    places = [shared.rfind(end, behind) + len(end) for end in ends if end in shared[behind:]]
    if not places:
        return None
    return shared[: max(places)]


def _is_part(text: str, before: str, until: str) -> bool:
    return text.startswith(before) and text.startswith(until) and len(before) < len(until)


def _rewritten(
    tokenizer: Any,
    row: Conversation,
    index: int,
    text: str,
    before: str,
    train_on: str,
    ends: Sequence[str],
) -> sf.DataError:
    opened = _OPENED.search(before)
    last = row.answers[-1]
    if train_on == "answers" and index != last:
        of_last = _prompt_and_end(tokenizer, row, last, text, ends)
        if _is_part(text, *of_last):
            return sf.DataError(
                "template-rewrites-answers",
                problem=f"{row.where}: the chat template writes message {index + 1} otherwise"
                " within the conversation than at its end",
                reason="so the text has no part that is the answer as the model would write it",
                remedy=Setting("data.train_on", "last"),
                where=row.where,
                message=index + 1,
            )
    if opened is not None:
        tag = opened.group(0).strip()
        return sf.DataError(
            "template-opens-thought",
            problem=f"{row.where}: the chat template's prompt ends with {tag}, and it writes"
            f" message {index + 1} without",
            reason="after its prompt, the model would have to write what the text does not have",
            remedy=[
                (f"a copy of the template without {tag} in its prompt:", _FILE),
                f"a template that writes {tag} before the answer too",
            ],
            where=row.where,
            message=index + 1,
        )
    return sf.DataError(
        "template-prompt-not-in-text",
        problem=f"{row.where}: the chat template writes another text before message {index + 1}"
        " than its prompt for an answer",
        reason="so the text has no part that is the answer as the model would write it",
        remedy=_FILE,
        where=row.where,
        message=index + 1,
    )


def _refuse_header(row: Conversation, index: int, before: str, until: str) -> None:
    """Refuse a text between the prompt and the answer: the model would have to write it."""
    rest = until[len(before) :]
    beginnings = tuple(text[:_SHOWN] for text in _beginnings(row.messages[index]))
    # what the model thought stands before its answer, and the prompt may open it
    opened = _OPENED.search(before)
    with_thoughts = rest if opened is None else opened.group(0) + rest
    thoughts = _THOUGHTS.match(with_thoughts)
    rest = rest.lstrip()
    answer = rest if thoughts is None else with_thoughts[thoughts.end() :].lstrip()
    if answer.startswith(beginnings) or rest.startswith(beginnings):
        return
    places = [answer.find(text) for text in beginnings if text in answer]
    if not places:  # the template writes the answer in another form
        return
    header = answer[: min(places)]
    raise sf.DataError(
        "template-header-not-in-prompt",
        problem=f"{row.where}: the chat template writes {header[:_SHOWN]!r} between its prompt"
        f" and message {index + 1}",
        reason="add_generation_prompt must give all that stands before an answer, as `predict` and"
        " transformers' generate use it",
        remedy=(
            f"a template that ends with {{% if add_generation_prompt %}}{header}{{% endif %}}:",
            _FILE,
        ),
        where=row.where,
        message=index + 1,
        header=header,
    )


def _beginnings(message: Message) -> list[str]:
    """Return the texts with which an answer may begin."""
    beginnings = list[str]()
    for key in ("content", *_REASONING):
        text = message.get(key)
        if not isinstance(text, str):
            continue
        thoughts = _THOUGHTS.match(text)
        without_thoughts = text if thoughts is None else text[thoughts.end() :]
        without_tag = re.sub(r"\A\s*<\w*think\w*>", "", text)
        for form in (text, without_thoughts, without_tag):
            beginning = form.strip()
            if beginning and beginning not in beginnings:
                beginnings.append(beginning)
    return beginnings


def _refuse_without_end(row: Conversation, index: int, until: str, ends: Sequence[str]) -> None:
    if until.rstrip().endswith(tuple(ends)):
        return
    raise sf.DataError(
        "template-without-end",
        problem=f"{row.where}: the chat template writes no end token after message {index + 1}",
        reason="the model would not learn to end an answer",
        remedy=("a template that writes {{ eos_token }} after each answer:", _FILE),
        where=row.where,
        message=index + 1,
    )


def refuse_without_system(row: Conversation, text: str) -> None:
    """Raise `DataError` if the text of a conversation lacks a system message."""
    for nth, message in enumerate(row.messages, start=1):
        content = message.get("content")
        is_system = message["role"] in ("system", "developer")
        if is_system and isinstance(content, str) and content.strip() not in text:
            raise sf.DataError(
                "template-without-system",
                problem=f"{row.where}: the chat template leaves out message {nth}, of the"
                f" {message['role']}",
                reason="the model would learn answers without it",
                remedy=["remove such messages", ("a template that writes them:", _FILE)],
                where=row.where,
                message=nth,
            )


def roles_left_out(row: Conversation, text: str) -> list[str]:
    """Return the role of each message of which the text of a conversation has nothing. Templates may
    leave out what a model thought, and write a content as JSON.
    """
    roles = []
    for message in row.messages:
        beginnings = _beginnings(message)
        as_json = [json.dumps(form, ensure_ascii=False)[1:-1] for form in beginnings]
        forms = beginnings + as_json
        if forms and not any(form in text for form in forms):
            roles.append(message["role"])
    return roles


def template_of(tokenizer: Any, file: str | None) -> str:
    """Return the chat template of a file, or else of the tokenizer, or else `DEFAULT_TEMPLATE`."""
    if file is not None:
        path = local_path(file, setting="data.template")
        try:
            return decode_utf8(Path(path).read_bytes(), file)
        except OSError as problem:
            raise sf.ConfigError(
                "template-unreadable",
                problem=f"data.template = {file!r} cannot be read: {problem.strerror}",
                reason="it is a file with a chat template in Jinja; without it, the tokenizer's"
                " own is used",
                remedy=Setting("data.template", None),
                setting="data.template",
                value=file,
            ) from problem
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    if template is not None:
        return str(template)
    if tokenizer.eos_token is None:
        raise sf.ConfigError(
            "tokenizer-without-template",
            problem="the tokenizer has neither a chat template nor an end token (eos_token)",
            reason="so no answer would have an end",
            remedy=[
                'add "eos_token" to its tokenizer_config.json',
                Setting("data.template", "FILE"),
            ],
            setting="data.template",
        )
    return DEFAULT_TEMPLATE
