"""Element-wise functions whose last bits do not depend on a number's position in a stack.

Torch computes most of an array by vector instructions and the rest at its end by scalar ones; for some functions the
last bits differ. The affected party would depend on the number of parties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_VECTOR_MULTIPLE = 64  # numbers: a multiple of the vector width of any processor
_VECTOR_DEPENDENT = {
    *(torch.sigmoid, Tensor.sigmoid, torch.celu, torch.selu, torch.erf, Tensor.erf, torch.expm1, torch.log1p),
    *(functional.sigmoid, functional.gelu, functional.elu, functional.celu, functional.selu, functional.silu),
    *(functional.mish, functional.softplus, functional.logsigmoid, functional.hardswish),
}


@dataclass(frozen=True)
class PaddedElementwise:
    """An element-wise function whose input is padded to whole vectors."""

    function: Callable[..., Tensor]

    def __call__(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        missing = -x.numel() % _VECTOR_MULTIPLE
        if not missing:
            return self.function(x, *arguments, **options)
        padded = functional.pad(x.flatten(), (0, missing))
        return self.function(padded, *arguments, **options)[:-missing].view(x.shape)


class ReproducibleElementwise(TorchFunctionMode):
    """A context in which affected element-wise functions get padded inputs."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        unchanged = (
            function not in _VECTOR_DEPENDENT or options.get("inplace") or not args or not isinstance(args[0], Tensor)
        )
        return function(*args, **options) if unchanged else PaddedElementwise(function)(*args, **options)
