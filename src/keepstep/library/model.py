"""`keepstep.load`: a model and its tokenizer, ready to generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepstep.config.schema import RunConfig
from keepstep.core.errors import DataError, UsageError
from keepstep.core.step_folders import parse_folder_name
from keepstep.evaluate.chat_model import ChatModel, Prompt, Sampling, cached_forward, open_chat_model
from keepstep.evaluate.generate import chooser, stream
from keepstep.interop.run_source import find_tokenizer
from keepstep.library.overrides import hints_in_traceback
from keepstep.models.transformer import Transformer


class LoadedModel:
    """A model in memory with its tokenizer."""

    def __init__(self, chat_model: ChatModel) -> None:
        self._chat_model = chat_model
        self.model: Transformer = chat_model.model
        """The torch module: token ids [batch, tokens] in, logits out."""
        self.tokenizer: Any = chat_model.tokenizer
        """A tokenizer of the tokenizers library."""
        self.config: RunConfig = chat_model.config
        """The settings of the run; for an export, those that its shape gives."""
        self.step: int = chat_model.step
        """The step of the weights; 0 for an export."""

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Continue a text, and return only what is new. Temperature 0 takes the likeliest token each time."""
        with hints_in_traceback():
            ids: list[int] = self.tokenizer.encode(prompt, add_special_tokens=False).ids
            room = self._chat_model.context_length - len(ids)
            if not ids or room < 1:
                raise UsageError(
                    f"the prompt has {len(ids)} tokens", f"give 1 to {self._chat_model.context_length - 1} tokens"
                )
            most = min(room, max_new_tokens)
            forward = cached_forward(self.model, len(ids) + most)
            written: list[int] = []
            for token in stream(forward, ids, chooser(temperature, top_p, seed), max_new_tokens=most):
                if token in self._chat_model.stop_tokens:
                    break
                written.append(token)
            # Decoded together with the prompt: the first new token may need the space before it.
            before, whole = self._chat_model.decode(ids), self._chat_model.decode([*ids, *written])
            return whole[len(before) :] if whole.startswith(before) else self._chat_model.decode(written)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Answer messages such as `{"role": "user", "content": "Hello"}` with the model's chat template."""
        sampling = Sampling(temperature, top_p, seed, max_new_tokens)
        with hints_in_traceback():
            return "".join(self._chat_model.stream(Prompt(messages, tools), sampling))


def load(path: str | Path, *, device: str = "auto", tokenizer: str | Path | None = None) -> LoadedModel:
    """Open a run's folder, one of its checkpoints, or an exported or downloaded Hugging Face folder.

    A run gives its best weights if it keeps them, else its newest. `device` is auto, cpu, cuda or cuda:NUMBER.
    `tokenizer` is a tokenizer.json, for a model whose folder has none.
    """
    with hints_in_traceback():
        if not Path(path).exists():
            raise UsageError(f"there is no {path}", "give a run's folder, a checkpoint or an exported folder")
        where, only = _place(Path(path))
        found = Path(tokenizer) if tokenizer else find_tokenizer(where)
        if found is None:
            raise DataError(f"{where} has no tokenizer.json", 'name one: keepstep.load(path, tokenizer="…")')
        return LoadedModel(open_chat_model(where, device, found, only=only))


def _place(path: Path) -> tuple[Path, str]:
    """The run's folder and the hash that names one of its steps; an empty hash for the newest."""
    if parse_folder_name(path.name) is None:
        return path, ""
    from keepstep.checkpoint.inspect import choose_step

    _, step = choose_step(str(path))
    run = path.resolve().parent.parent
    if not (run / "config.yaml").is_file():
        hint = "move it back, or export it with keepstep export and load that folder"
        raise UsageError(f"{path} is a checkpoint outside of its run's folder, so its settings are unknown", hint)
    return run, step.marker.manifest_hash
