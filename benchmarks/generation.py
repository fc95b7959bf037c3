"""Tokens per second of our batched generation, next to Hugging Face Transformers' `generate` in the same run.

Both sides have a model of the shape of SmolLM2-135M with random weights in bf16, the same prompts, greedy decoding and
the same number of new tokens. They take turns, and medians count. A second part measures continuous batching: answers
of uneven lengths, against the same answers in batches that wait for their longest.

    PYTHONPATH=src python benchmarks/generation.py            # one GPU; needs torch and transformers, nothing else
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from keepstep.config.load import load_config
from keepstep.config.schema import ModelConfig
from keepstep.evaluate.continuous_batching import Generated, Request, generate_batch
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer


def to_device(model: Any, device: torch.device) -> Any:
    # A CPU without bf16 instructions would measure its emulation.
    return model.eval().to(device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)


def our_model(config: ModelConfig, device: torch.device) -> Transformer:
    model = Transformer(config)
    init_weights(model, 1)
    placed: Transformer = to_device(model, device)
    return placed


def their_model(config: ModelConfig, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.padded_vocab, hidden_size=config.hidden, intermediate_size=config.ffn_size,
            num_hidden_layers=config.layers, num_attention_heads=config.heads,
            num_key_value_heads=config.key_value_heads, max_position_embeddings=config.seq_len,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    return to_device(made, device)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def in_turns(works: Sequence[Callable[[], Any]], repeats: int, device: torch.device) -> list[float]:
    """The median time of each, after one call of each that does not count."""
    for work in works:
        work()
    times = [[seconds(work, device) for work in works] for _ in range(repeats)]
    return [statistics.median(each) for each in zip(*times, strict=True)]


def against_transformers(
    config: ModelConfig, rows: int, prompt_tokens: int, new_tokens: int, repeats: int, device: torch.device
) -> dict[str, float]:
    prompts = torch.randint(0, config.vocab, (rows, prompt_tokens), generator=torch.Generator().manual_seed(2))
    model, other = our_model(config, device), their_model(config, device)
    requests = [Request(prompt, new_tokens) for prompt in prompts.tolist()]

    def ours() -> list[Generated]:
        return generate_batch(model, requests, rows=rows)

    def theirs() -> Any:
        inputs = prompts.to(device)
        return other.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )

    assert all(len(one.tokens) == new_tokens for one in ours())
    assert theirs().shape == (rows, prompt_tokens + new_tokens)
    ours_s, theirs_s = in_turns([ours, theirs], repeats, device)
    tokens = rows * new_tokens
    return {
        "keepstep_tokens_per_s": tokens / ours_s,
        "transformers_tokens_per_s": tokens / theirs_s,
        "generate_ratio_hf": theirs_s / ours_s,
    }


def against_waiting(config: ModelConfig, rows: int, longest: int, repeats: int, device: torch.device) -> float:
    """How much faster answers of uneven lengths are than in batches that wait for their longest."""
    chance = random.Random(3)
    model = our_model(config, device)
    # Most are short and a few are long, as answers are.
    lengths = [max(1, round(longest ** chance.random())) for _ in range(4 * rows)]
    requests = [Request([chance.randrange(config.vocab) for _ in range(16)], length) for length in lengths]

    def waiting() -> None:
        for start in range(0, len(requests), rows):
            batch = requests[start : start + rows]
            most = max(request.max_new_tokens for request in batch)
            generate_batch(model, [replace(request, max_new_tokens=most) for request in batch], rows=rows)

    continuous_s, waiting_s = in_turns([lambda: generate_batch(model, requests, rows=rows), waiting], repeats, device)
    return waiting_s / continuous_s


def write(results: dict[str, Any], output: Path | None) -> None:
    """After each part: a machine that is lent may be gone before the last one."""
    text = json.dumps(results, indent=1)
    print(text, flush=True)
    if output:
        output.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="prompts at a time (256)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0, help="fewer blocks, for a try without a GPU")
    parser.add_argument("--vocab", type=int, default=0)
    parser.add_argument("--only-waiting", action="store_true", help="leave Transformers out")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    config = load_config(None, ["model=smollm-135m"]).config.model
    config = replace(config, layers=options.layers or config.layers, vocab=options.vocab or config.vocab)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "rows": options.rows,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
        "layers": config.layers,
    }
    if not options.only_waiting:
        results["transformers"] = __import__("transformers").__version__
        print("against Transformers", file=sys.stderr, flush=True)
        results |= against_transformers(
            config, options.rows, options.prompt_tokens, options.new_tokens, options.repeats, device
        )
        write(results, options.output)
    print("against batches that wait for their longest", file=sys.stderr, flush=True)
    results["continuous_ratio"] = against_waiting(config, options.rows, options.new_tokens, options.repeats, device)
    write(results, options.output)


if __name__ == "__main__":
    main()
