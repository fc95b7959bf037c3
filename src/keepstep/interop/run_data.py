"""The rows that a run trains on. A fine-tuning run uses the tokenizer of the model it starts from, which may be in a
Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from keepstep.config.check import check_conversations
from keepstep.config.schema import RunConfig
from keepstep.core.errors import DataError
from keepstep.core.plugins import is_plugin
from keepstep.core.units import Pace
from keepstep.data.chat.loader import ChatSource, build_chat_loaders, is_chat, refuse_mixed_conversations
from keepstep.data.chat.preference import check_preference_data
from keepstep.data.datasets import RowOptions
from keepstep.data.loader import Loaders, build_loaders
from keepstep.data.plugins.stream import build_stream_loaders
from keepstep.interop.run_source import find_tokenizer


def open_run_data(config: RunConfig) -> Loaders:
    """The run's rows: a stream of tokens, or conversations with a loss on what the assistant says."""
    data, cache_dir = config.data, Path(config.runs_dir) / ".data"
    if not data.blend and is_plugin("data", data.path):
        options = RowOptions(data, config.model.seq_len, config.model.vocab, config.seed)
        stream = build_stream_loaders(options, cache_dir)
        return stream or build_loaders(data, config.model.seq_len, config.model.vocab, config.seed, cache_dir)
    preference = config.preference.method
    if preference != "none":
        check_preference_data(data)
    elif not is_chat(data, config.chat):
        if config.rl.method != "none":
            raise DataError(
                f"reinforcement learning needs conversations, and data.path {data.path} holds none",
                "give conversations with tools, or data.path=toolcalls to generate some",
            )
        refuse_mixed_conversations(data)
        return build_loaders(data, config.model.seq_len, config.model.vocab, config.seed, cache_dir)
    check_conversations(config)
    start = config.finetune.start_from
    reading = Pace(config.global_batch, config.model.seq_len, 0).steps(config.chat.read_first) or 0
    source = ChatSource(
        data=data,
        chat=config.chat,
        seq_len=config.model.seq_len,
        vocab=config.model.vocab,
        seed=config.seed,
        tokenizer=find_tokenizer(Path(start)) if start else None,
        full_loss_samples=reading * config.global_batch,
        preference=preference,
        rl=config.rl,
    )
    return build_chat_loaders(source, cache_dir)
