"""Small preference data, and a small model that learns from it."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from keepstep.data.chat.tokenizer import VOCAB, prepare_tokenizer

TOOL = {
    "name": "weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def pairs(count: int = 24) -> list[dict[str, Any]]:
    """Rows of all formats: texts, lists of messages with tools, and whole conversations."""
    chance = random.Random(5)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        city = chance.choice(["Rome", "Oslo", "Lima", "Quito"])
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": city}}}]}
        refusal = {"role": "assistant", "content": f"I do not know {number}."}
        asked = {"role": "user", "content": f"Weather in {city}, question {number}?"}
        match number % 3:
            case 0:
                rows.append({"prompt": asked["content"], "chosen": f"It is warm in {city}.", "rejected": "No."})
            case 1:
                rows.append({"prompt": [asked], "chosen": [call], "rejected": [refusal], "tools": [TOOL]})
            case _:
                rows.append({"chosen": [asked, call], "rejected": [asked, refusal], "tools": [TOOL]})
    return rows


def labelled(count: int = 24) -> list[dict[str, Any]]:
    """Rows for KTO."""
    return [
        {"prompt": f"Question {number}?", "completion": f"Answer {number % 5}.", "label": number % 3 > 0}
        for number in range(count)
    ]


def words(folder: Path, rows: Iterable[dict[str, Any]]) -> list[str]:
    """Write rows, and return the overrides of a small run that learns from them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = prepare_tokenizer(folder / "cache", 1)
    return [
        f"data.path={folder}/rows.jsonl", f"data.tokenizer={tokenizer}", f"model.vocab={VOCAB}", "model.seq_len=384",
        "global_batch=4", "microbatch=2", "data.valid_share=0.2", "optimizer.lr=1e-3",
    ]  # fmt: skip


def questions(count: int = 16) -> list[dict[str, Any]]:
    """Conversations whose prompts are answered by the model itself."""
    rows = []
    for number in range(count):
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]}
        rows.append({"messages": [{"role": "user", "content": f"Weather {number}?"}, call], "tools": [TOOL]})
    return rows


def letter_share(messages: Any, answer: str, expected: Any) -> float:
    """A reward that every model can raise: the share of the letter e."""
    assert messages[-1]["role"] == "user"
    assert expected[0]["name"] == "weather"
    return answer.count("e") / max(1, len(answer))


def rl_words(folder: Path, method: str = "grpo") -> list[str]:
    """The overrides of a small run that answers questions."""
    return [
        *words(folder, questions()), "global_batch=8", "microbatch=4", f"rl.method={method}", "rl.num_generations=4",
        "rl.max_new_tokens=12", "rl.rewards={tests.train.preference_rows:letter_share: 1.0, format: 0.5}",
    ]  # fmt: skip


def deadly_reward(messages: Any, answer: str, expected: Any) -> float:
    """The same reward, which kills its process at the answers that the environment names, each once."""
    folder = Path(os.environ["REWARD_FOLDER"])
    with (folder / "asked.txt").open("a") as file:
        file.write(messages[-1]["content"] + "\n")
    asked = len((folder / "asked.txt").read_text().splitlines())
    if str(asked) in os.environ["DEADLY_ANSWERS"].split():
        os.kill(os.getpid(), signal.SIGKILL)
    return letter_share(messages, answer, expected)
