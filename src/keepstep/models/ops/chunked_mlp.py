"""A feed-forward over chunks of tokens: the inner tensors of one chunk at a time, in both passes.

Autograd keeps the input and the weights. The backward pass computes each chunk again, and adds up the gradients of the
weights in fp32 in the order of the chunks. So results repeat bit by bit, and differ from those of the whole row by
rounding only; in fp8 also by its scales, which are then those of a chunk.

A compiled block calls one operator for each pass. Operators take tensors and plain values, no modules: they compute
with the module that has been shared under a name, holding the tensors that they are given.

Shape legend: b rows, t tokens, m = b·t, d hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

_shared: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True)
class MlpChunks:
    """How the blocks of a model, whose feed-forwards are alike, chunk them."""

    tokens: int
    name: str
    """Where operators find a module to compute with. One for all blocks: else each would be compiled on its own."""


def share_mlp(mlp: nn.Module, tokens: int) -> MlpChunks:
    """Let every feed-forward with the structure of this one be computed in chunks."""
    name = f"mlp{next(_numbers)}"
    _shared[name] = mlp
    return MlpChunks(tokens, name)


def chunked_mlp(mlp: nn.Module, x_btd: Tensor, chunks: MlpChunks) -> Tensor:
    """`mlp.compute(x)`, a chunk at a time."""
    x_md, tensors = x_btd.flatten(0, -2), _tensors(mlp)
    # Separate from the output, so that recomputation of a block stops before it computes the feed-forward once more.
    placeholder_md = _ChunkGradients.apply(chunks.name, chunks.tokens, x_md, *tensors)  # type: ignore[no-untyped-call]
    kept = [tensor.detach() for tensor in (x_md, *tensors)]
    output_md: Tensor = _ChunkOutputs.apply(placeholder_md, chunks.name, chunks.tokens, *kept)  # type: ignore[no-untyped-call]
    return output_md.view_as(x_btd)


def _names(mlp: nn.Module) -> list[str]:
    """Of its parameters and buffers."""
    held = ((place, {**part._parameters, **part._buffers}) for place, part in mlp.named_modules())
    return [f"{place}.{name}" for place, tensors in held for name, each in tensors.items() if each is not None]


def _tensors(mlp: nn.Module) -> list[Tensor]:
    """Its parameters, or this process's parts of them, and buffers, in the order of `_names`."""
    found: list[Tensor | None] = []
    for part in mlp.modules():
        read: Callable[[], dict[str, Tensor]] | None = getattr(part, "local_parameters", None)
        found += [*(part._parameters if read is None else read()).values(), *part._buffers.values()]
    return [tensor for tensor in found if tensor is not None]


class _ChunkGradients(torch.autograd.Function):
    """Computes all gradients. Its output stands for that of the feed-forward and holds no data."""

    @staticmethod
    def forward(ctx: Any, name: str, tokens: int, x_md: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(x_md, *tensors)
        ctx.name, ctx.tokens = name, tokens
        # Adapters may have dropout. Compiled blocks may not.
        ctx.random = None if torch.compiler.is_compiling() else (torch.get_rng_state(), *get_device_states(x_md))
        return x_md.new_empty(()).expand(x_md.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_md, *tensors = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[2:])
        arguments = gradients[0], x_md, tensors, needed, ctx.name, ctx.tokens
        if torch.compiler.is_compiling():
            computed = list(torch.ops.keepstep.mlp_chunks_backward(*arguments))
        else:
            with _same_noise(ctx.random):
                computed = mlp_chunks_backward(*arguments)
        return None, None, *[computed.pop(0) if each else None for each in needed]


@contextmanager
def _same_noise(random: Any) -> Iterator[None]:
    state, devices, device_states = random
    with torch.random.fork_rng(devices):
        torch.set_rng_state(state)
        set_device_states(devices, device_states)
        yield


class _ChunkOutputs(torch.autograd.Function):
    """Passes its gradient to the placeholder."""

    @staticmethod
    def forward(ctx: Any, placeholder_md: Tensor, name: str, tokens: int, x_md: Tensor, *tensors: Tensor) -> Tensor:  # noqa: ARG004
        ctx.inputs = 3 + len(tensors)
        output_md: Tensor = mlp_chunks_forward(x_md, tensors, name, tokens)
        return output_md

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], *[None] * ctx.inputs


# One operator outside of compiled blocks too: selective recomputation would save the outputs of matmuls inside.
@torch.library.custom_op("keepstep::mlp_chunks_forward", mutates_args=())
def mlp_chunks_forward(x_md: Tensor, tensors: Sequence[Tensor], name: str, tokens: int) -> Tensor:
    """The output of the feed-forward."""
    mlp, output_md = _SharedMlp(name, tensors), torch.empty_like(x_md)
    for rows in _chunks(x_md, tokens):
        output_md[rows] = mlp.compute(x_md[rows])
    return output_md


@mlp_chunks_forward.register_fake
def _(x_md: Tensor, tensors: Sequence[Tensor], name: str, tokens: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x_md)


def mlp_chunks_backward(
    d_out_md: Tensor, x_md: Tensor, tensors: Sequence[Tensor], needed: Sequence[bool], name: str, tokens: int
) -> list[Tensor]:
    """Gradients of the input and of the tensors, as far as they are needed."""
    by_x, *by_tensors = needed
    leaves = [tensor.detach().requires_grad_(each) for tensor, each in zip(tensors, by_tensors, strict=True)]
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    sums = [torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32)) for leaf in learned]
    mlp, d_x_md = _SharedMlp(name, leaves), torch.empty_like(x_md)
    for rows in _chunks(x_md, tokens):
        mlp.add_gradients(d_out_md[rows], x_md[rows].detach().requires_grad_(by_x), d_x_md[rows], (learned, sums))
    of_tensors = [total.to(leaf.dtype) for total, leaf in zip(sums, learned, strict=True)]
    return [d_x_md, *of_tensors] if by_x else of_tensors


# Not a `custom_op`: inside of one autograd is off, for good.
torch.library.define(
    "keepstep::mlp_chunks_backward",
    "(Tensor d_out_md, Tensor x_md, Tensor[] tensors, bool[] needed, str name, int tokens) -> Tensor[]",
)
torch.library.impl("keepstep::mlp_chunks_backward", "CompositeExplicitAutograd", mlp_chunks_backward)


@torch.library.register_fake("keepstep::mlp_chunks_backward")  # type: ignore[untyped-decorator]
def _(
    d_out_md: Tensor, x_md: Tensor, tensors: Sequence[Tensor], needed: Sequence[bool], name: str, tokens: int  # noqa: ARG001
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(tensor) for tensor, each in zip((x_md, *tensors), needed, strict=True) if each]


def _chunks(x_md: Tensor, tokens: int) -> list[slice]:
    return [slice(start, start + tokens) for start in range(0, len(x_md), tokens)]


class _SharedMlp:
    """The shared feed-forward with the weights of one block."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        mlp = _shared[name]
        self._call = _Compute(mlp)
        self._tensors = {f"mlp.{place}": tensor for place, tensor in zip(_names(mlp), tensors, strict=True)}

    def compute(self, x_cd: Tensor) -> Tensor:
        """The output of one chunk."""
        output_cd: Tensor = torch.func.functional_call(self._call, self._tensors, (x_cd[None],))[0]
        return output_cd

    def add_gradients(
        self, d_out_cd: Tensor, x_cd: Tensor, d_x_cd: Tensor, weights: tuple[list[Tensor], list[Tensor]]
    ) -> None:
        """Write one chunk's gradient of its input, where that needs one, and add those of the weights to their sums."""
        learned, sums = weights
        with torch.enable_grad():
            output_cd = self.compute(x_cd)
        inputs = [x_cd, *learned] if x_cd.requires_grad else learned
        gradients = list(torch.autograd.grad(output_cd, inputs, d_out_cd))
        if x_cd.requires_grad:
            d_x_cd.copy_(gradients.pop(0))
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient)


class _Compute(nn.Module):
    """`compute` of a feed-forward as a module: past its hooks, which gather and scatter whole rows."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x_btd: Tensor) -> Tensor:
        """The output."""
        output_btd: Tensor = self.mlp.compute(x_btd)  # type: ignore[operator]
        return output_btd
