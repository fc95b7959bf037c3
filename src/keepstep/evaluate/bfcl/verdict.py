"""The verdict on one answer, with the leaderboard's error names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing

from keepstep.evaluate.ast_check import MalformedCall
from keepstep.evaluate.bfcl.benchmark import Benchmark, Question
from keepstep.evaluate.bfcl.checker import check_calls
from keepstep.evaluate.bfcl.decode import Mode, decode_calls, decode_error, expressions
from keepstep.evaluate.bfcl.sandbox import ApiSession, SandboxEnded

TOO_LONG = "context_length"
"""The prompt does not fit into the model's context: wrong in every category."""


def single_turn_error(question: Question, text: str, mode: Mode) -> str | None:
    """The error of an answer; None if it is right."""
    relevance = question.category.endswith("relevance")
    try:
        calls = decode_calls(text, mode, question.language)
    except MalformedCall as malformed:
        calls = []
        if not relevance:
            return decode_error(malformed)
    if question.category.endswith("irrelevance"):
        return "irrelevance_error:decoder_success" if calls else None
    if relevance:
        return None if calls else "relevance_error:decoder_failed"
    return check_calls(question.functions, calls, question.expected, question.category, question.language)


def decoded_steps(texts: Sequence[str], mode: Mode) -> list[list[str]]:
    """The calls of each of a turn's answers as expressions; answers without calls are left out."""
    found = []
    for text in texts:
        try:
            calls = expressions(decode_calls(text, mode))
        except MalformedCall:
            continue
        if calls:
            found.append(calls)
    return found


def multi_turn_error(benchmark: Benchmark, question: Question, turns: Sequence[Sequence[Sequence[str]]]) -> str | None:
    """The error of a conversation: of each turn, the calls of each step. None if states and results are right."""
    if len(turns) != len(question.expected):
        return "multi_turn:force_terminated"
    seen: list[str] = []
    try:
        with closing(ApiSession(benchmark, question)) as session:
            for steps, expected in zip(turns, question.expected, strict=True):
                for calls in steps:
                    seen += session.execute("model", calls)
                wanted = session.execute("expected", expected)
                if not expected:
                    continue
                if not any(steps) and len(steps) < 2:
                    return "multi_turn:empty_turn_model_response"
                if session.differences():
                    return "multi_turn:instance_state_mismatch"
                # Every expected result, as often as expected, in any order.
                if not Counter(wanted) <= Counter(seen):
                    return "multi_turn:execution_response_mismatch"
    except SandboxEnded:
        return "multi_turn:sandbox_limit"
    return None
