"""Ask a model BFCL's questions, batch by batch, and append each verdict to a file: a killed run continues from it."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from keepstep.core.errors import DataError, UsageError
from keepstep.data.chat.rows import BadRow, Message
from keepstep.evaluate.ast_check import MalformedCall
from keepstep.evaluate.bfcl.benchmark import MULTI_TURN, Benchmark, Question
from keepstep.evaluate.bfcl.decode import Mode, decode_calls, expressions
from keepstep.evaluate.bfcl.sandbox import ApiSession, SandboxEnded, check_sandbox
from keepstep.evaluate.bfcl.verdict import TOO_LONG, decoded_steps, multi_turn_error, single_turn_error
from keepstep.evaluate.chat_model import ChatModel, Prompt, Sampling
from keepstep.evaluate.remote_model import AnyModel

_PROBE = "probed_function"
_SHOW_EVERY_S = 10.0


@dataclass(frozen=True)
class BenchmarkRun:
    """A model and how it is asked."""

    model: AnyModel
    benchmark: Benchmark
    mode: Mode
    batch: int
    max_new_tokens: int
    progress: Callable[[str], None] = lambda _: None

    def identity(self) -> dict[str, Any]:
        """What answers depend on: a file with answers of another model or mode must not be continued."""
        return {**self.model.identity(), "mode": self.mode, "max_new_tokens": self.max_new_tokens}

    def ask(self, questions: Sequence[Question], path: Path) -> list[dict[str, Any]]:
        """A line for each question: those in the file, and new ones, which are appended to it."""
        with _opened_alone(path) as file:
            done = _open_lines(path, self.identity())
            for category, group in groupby(questions, key=lambda question: question.category):
                asked = list(group)
                answers = _Answers(file, done, asked, self.progress)
                if category in MULTI_TURN:
                    self._conversations(asked, answers)
                else:
                    self._single_turns(asked, answers)
        return [done[question.id] for question in questions]

    def _single_turns(self, questions: Sequence[Question], answers: _Answers) -> None:
        """Group by group. A group has the same questions after a resume, so that answers round alike."""
        for asked in self._groups(questions):
            if all(question.id in answers.done for question in asked):
                continue
            prompts = [self._first_prompt(question) for question in asked]
            texts = self.model.answers_that_fit(prompts, self._sampling, self.batch, self._shown_at_times(asked))
            errors = [
                TOO_LONG if text is None else single_turn_error(question, text, self.mode)
                for question, text in zip(asked, texts, strict=True)
            ]
            answers.write([_line(*each) for each in zip(asked, texts, errors, strict=True)])

    def _conversations(self, questions: Sequence[Question], answers: _Answers) -> None:
        """Each is written when it ends, and not held again: it may have taken minutes."""
        check_sandbox(self.benchmark, questions[0])
        for asked in self._groups([question for question in questions if question.id not in answers.done]):
            conversations = [_Conversation(self, question) for question in asked]
            try:
                self._hold(conversations, answers)
            finally:
                for conversation in conversations:
                    conversation.session.close()

    def _hold(self, conversations: Sequence[_Conversation], answers: _Answers) -> None:
        prompts = [conversation.prompt() for conversation in conversations]

        def reply(number: int, text: str | None) -> Prompt | None:
            conversation = conversations[number]
            following = conversation.take(text)
            if following is None:
                answers.write([self._conversation_line(conversation)])
            return following

        self.model.converse(prompts, reply, self._sampling, self.batch)

    def _groups(self, questions: Sequence[Question]) -> Iterator[Sequence[Question]]:
        """Questions that are asked together: enough that rows are seldom free.

        Those of a group are about equally long, because the longest one says how much memory each row needs.
        """
        size = 4 * self.batch
        ordered = sorted(questions, key=lambda question: len(json.dumps([question.turns, question.functions])))
        return (ordered[start : start + size] for start in range(0, len(ordered), size))

    def _shown_at_times(self, asked: Sequence[Question]) -> Callable[[int], None]:
        """Shows how many of a group are answered, every few seconds: all of them may take an hour."""
        last = time.monotonic()

        def show(count: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _SHOW_EVERY_S:
                last = time.monotonic()
                self.progress(f"{asked[0].category}: {count} of the next {len(asked)}, not yet on disk")

        return show

    def _conversation_line(self, conversation: _Conversation) -> dict[str, Any]:
        turns = [decoded_steps(texts, self.mode) for texts in conversation.answers]
        question = conversation.question
        return _line(question, conversation.answers, multi_turn_error(self.benchmark, question, turns))

    def _first_prompt(self, question: Question) -> Prompt:
        if self.mode == "native":
            return Prompt(question.turns[0], question.tools())
        return Prompt(self.benchmark.prompted(question))

    @property
    def _sampling(self) -> Sampling:
        return Sampling(max_new_tokens=self.max_new_tokens)


class _Answers:
    """The answers to a category's questions, on disk. A server's conversations end in several threads."""

    def __init__(
        self, file: TextIO, done: dict[str, Any], asked: Sequence[Question], progress: Callable[[str], None]
    ) -> None:
        self.done = done
        self._file, self._asked, self._progress = file, asked, progress
        self._lock, self._shown_at = threading.Lock(), time.monotonic()

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append those that are not there yet."""
        with self._lock:
            new = [line for line in lines if line["id"] not in self.done]
            self._file.write("".join(json.dumps(line) + "\n" for line in new))
            self._file.flush()
            os.fsync(self._file.fileno())
            self.done |= {line["id"]: line for line in new}
            answered = sum(question.id in self.done for question in self._asked)
            last = answered == len(self._asked)
            if last or len(lines) > 1 or time.monotonic() - self._shown_at >= _SHOW_EVERY_S:
                self._shown_at = time.monotonic()
                self._progress(f"{self._asked[0].category}: answered {answered} of {len(self._asked)}")


class _Conversation:
    """One question of several turns while it is asked: a turn ends with an answer that calls nothing."""

    def __init__(self, run: BenchmarkRun, question: Question) -> None:
        self.question = question
        self.session = ApiSession(run.benchmark, question)
        self.answers: list[list[str]] = [[]]
        """Of each turn so far; fewer turns than the question has mean that the conversation was ended."""
        self._run = run
        first = run._first_prompt(question)
        self._messages: list[Message] = list(first.messages)
        self._tools = first.tools
        self.ended = False

    def prompt(self) -> Prompt:
        return Prompt(self._messages, self._tools)

    def take(self, text: str | None) -> Prompt | None:
        """What the model is asked after its answer; None at the end."""
        if text is None:
            self._force_end()
        else:
            self._continue(text)
        return None if self.ended else self.prompt()

    def _continue(self, text: str) -> None:
        """Run the answer's calls, and show their results to the model; without calls, the user's next turn follows."""
        self.answers[-1].append(text)
        try:
            calls = decode_calls(text, self._run.mode)
            written = expressions(calls)
        except MalformedCall:
            calls, written = [], []
        if not written:
            self._messages.append({"role": "assistant", "content": text})
            self._next_turn()
            return
        try:
            results = self.session.execute("model", written)
        except SandboxEnded:
            self._force_end()
            return
        if self._run.mode == "native":
            made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
            self._messages.append({"role": "assistant", "content": "", "tool_calls": made})
        else:
            self._messages.append({"role": "assistant", "content": text})
        names = [name for name, _ in calls] if self._run.mode == "native" else written
        self._messages += [
            {"role": "tool", "name": name, "content": result} for name, result in zip(names, results, strict=True)
        ]
        # In the last turn, such a conversation is still judged, as on the leaderboard.
        self.ended = len(self.answers[-1]) > self._run.benchmark.most_steps

    def _next_turn(self) -> None:
        if len(self.answers) == len(self.question.turns):
            self.ended = True
            return
        self._messages += self.question.turns[len(self.answers)]
        self.answers.append([])

    def _force_end(self) -> None:
        """A conversation that cannot reach its end is wrong: it has fewer turns than the question."""
        self.answers = self.answers[: len(self.question.turns) - 1]
        self.ended = True


def choose_mode(model: AnyModel) -> Mode:
    """`native` if the model's chat template shows tools to the model, otherwise `prompt`; a server gets tools."""
    if not isinstance(model, ChatModel):
        return "native"
    shown = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
    try:
        text = model.template.prompt([{"role": "user", "content": "?"}], [shown])
    except BadRow:
        return "prompt"
    return "native" if _PROBE in text else "prompt"


def _line(question: Question, answer: Any, error: str | None) -> dict[str, Any]:
    return {"id": question.id, "category": question.category, "answer": answer, "error": error}


@contextmanager
def _opened_alone(path: Path) -> Iterator[TextIO]:
    """The file to append to. Two evaluations into one file would ask every question twice."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}", "name another file with --answers") from None
    with file:
        try:
            # The lock ends with the process, also after SIGKILL.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for it, or name another file with --answers"
            raise UsageError(f"another evaluation is writing to {path}", hint) from None
        except OSError:
            pass  # a file system without locks
        yield file


def _open_lines(path: Path, identity: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The finished lines of a file by id; a new file gets the identity as its first line."""
    raw = path.read_bytes()
    # A kill can leave a line without its end: that question is asked again.
    complete = raw[: raw.rfind(b"\n") + 1]
    if len(complete) < len(raw):
        os.truncate(path, len(complete))
    if not complete:
        path.write_text(json.dumps(identity) + "\n", encoding="utf-8")
        return {}
    try:
        first, *lines = [json.loads(line) for line in complete.splitlines()]
        done = {line["id"]: line for line in lines}
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not a file of BFCL answers: {error}", "name another file with --answers") from None
    if first != identity:
        raise UsageError(
            f"{path} holds answers of {_difference(first, identity)}",
            "ask as before, delete the file, or name another one with --answers",
        )
    return done


def _difference(first: Any, identity: dict[str, Any]) -> str:
    """In what a file's first line is not this evaluation's."""
    stored = first if isinstance(first, dict) else {}
    keys = [key for key in identity if stored.get(key) != identity[key]]
    words = {"weights": "other weights", "template": "another chat template"}
    found = [words.get(key, f"{key} = {stored.get(key)}, not {identity[key]}") for key in keys]
    return " and ".join(found) or "another evaluation"
