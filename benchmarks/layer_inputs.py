"""The layer inputs that a bfloat16 forward pass went through, and the float32 oracle led through the same ones.

A forward pass in bfloat16 ends at another point than one in float32, and the gradient there is another: that part of
an error says nothing of the backward pass. Led through the same layer inputs, the oracle differentiates the function
at the point where the other one did, and what is left is the error of that pass itself.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from engine.layer_forward import LayerForward
from engine.scores import split_head


@contextlib.contextmanager
def of_walk() -> Iterator[list[Tensor]]:
    """Collects the inputs [T, D] of all layers, first layer first, of the walk that runs inside."""
    inputs: list[Tensor] = []
    forward = LayerForward.forward

    def recording(self: LayerForward, hidden_TD: Tensor, *rest: Any) -> Tensor:
        inputs.append(hidden_TD.clone())  # the walk writes a layer's output over its input
        return forward(self, hidden_TD, *rest)

    with mock.patch.object(LayerForward, "forward", recording):
        yield inputs


@contextlib.contextmanager
def of_modules(model: Any) -> Iterator[list[Tensor]]:
    """Collects the same of a forward pass by transformers on one row."""
    inputs: list[Tensor] = []

    def record(_module: Any, positional: tuple[Tensor, ...]) -> None:
        inputs.append(positional[0].detach()[0].clone())

    decoder: Any = split_head(model)[0]
    with contextlib.ExitStack() as hooks:  # a hook's handle removes it
        for layer in decoder.layers:
            hooks.enter_context(layer.register_forward_pre_hook(record))
        yield inputs


@contextlib.contextmanager
def led_through(model: Any, inputs: list[Tensor]) -> Iterator[None]:
    """Inside, every layer of transformers' own forward pass starts from `inputs`; gradients flow as if it had not."""

    def lead(input_TD: Tensor) -> Any:
        def hook(_module: Any, positional: tuple[Tensor, ...]) -> tuple[Any, ...]:
            hidden_1TD = positional[0]
            return hidden_1TD + (input_TD.to(hidden_1TD.dtype) - hidden_1TD).detach(), *positional[1:]

        return hook

    decoder: Any = split_head(model)[0]
    with contextlib.ExitStack() as hooks:
        for layer, input_TD in zip(decoder.layers, inputs, strict=True):
            hooks.enter_context(layer.register_forward_pre_hook(lead(input_TD)))
        yield
