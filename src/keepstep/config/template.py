"""The first run.yaml: what `keepstep new` writes and what the demo trains."""

from __future__ import annotations

from string import Template

_TEMPLATE = Template("""\
# $name: a small Llama that learns Python on a laptop in about two minutes.
#   keepstep train $path                      start, or go on where it stopped
#   keepstep train $path optimizer.lr=1e-3    change anything from the command line
#   keepstep config show $path                every setting and where it comes from
name: $name
max_duration: ${steps}ba       # steps; 2ep and 1e9tok work too, 30min with a constant schedule
global_batch: 16          # rows in one step over all processes
microbatch: 8             # rows in one forward pass of one process

model:                    # or one word: model: llama-1b (keepstep models lists them)
  preset: llama-1b
  layers: 3
  hidden: 128
  heads: 4
  kv_heads: 2
  ffn_hidden: 384
  vocab: 4096
  seq_len: 128

data: demo                # this machine's Python standard library; or a path that keepstep data build wrote
optimizer: {name: adamw, lr: 4e-3}
schedule: {name: cosine, warmup: 20ba}
evaluate: {interval: ${half}ba, batches: 12}
checkpoint: {interval: ${half}ba, keep: 2}
""")


def run_yaml(name: str, path: str, steps: int = 300) -> str:
    """A commented run.yaml that trains as it is."""
    return _TEMPLATE.substitute(name=name, path=path, steps=steps, half=steps // 2)
