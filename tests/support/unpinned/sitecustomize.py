"""On the path of a test's server: pinned host memory becomes plain host memory, in every process of it.

SGLang's LoRA code pins small index tensors whatever the device is, and without a GPU driver torch refuses to pin. Where
memory lies changes no value, so everything else is SGLang's own.
"""

from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = ("tensor", "zeros", "ones", "empty", "arange", "full")


def unpinned(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


if not torch.cuda.is_available():
    for name in _FACTORIES:
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]
