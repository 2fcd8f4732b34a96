"""Functions of each number by itself, to the same last bits wherever in a stack a number lies.

Torch computes most of an array by vector instructions, and by others what is left over at its end; for some functions
the last bits are not the same. On which party that falls would depend on how many parties there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_VECTOR_MULTIPLE = 64  # numbers: a multiple of what any processor takes at once
_VECTOR_DEPENDENT = {
    *(torch.sigmoid, Tensor.sigmoid, torch.celu, torch.selu, torch.erf, Tensor.erf, torch.expm1, torch.log1p),
    *(functional.sigmoid, functional.gelu, functional.elu, functional.celu, functional.selu, functional.silu),
    *(functional.mish, functional.softplus, functional.logsigmoid, functional.hardswish),
}


@dataclass(frozen=True)
class PaddedElementwise:
    """A function of each number by itself, given as many numbers as vector instructions take at once."""

    function: Callable[..., Tensor]

    def __call__(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        missing = -x.numel() % _VECTOR_MULTIPLE
        if not missing:
            return self.function(x, *arguments, **options)
        padded = functional.pad(x.flatten(), (0, missing))
        return self.function(padded, *arguments, **options)[:-missing].view(x.shape)


class ReproducibleElementwise(TorchFunctionMode):
    """Within it, such functions are evened, whoever calls them."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        unchanged = (
            function not in _VECTOR_DEPENDENT or options.get("inplace") or not args or not isinstance(args[0], Tensor)
        )
        return function(*args, **options) if unchanged else PaddedElementwise(function)(*args, **options)
