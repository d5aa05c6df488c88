"""Run a net as a function of its parameters, drawing the random numbers that its stages draw.

net(**inputs)        -->        loss of functional_call(net, params, inputs), seeded anew where a stage ends
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.meaning.purity.attributes import Attributes
from fpipe.models.tracing.boundary import next_stage, seeding
from fpipe.models.tracing.export_net import call_of, without_cache
from fpipe.models.tracing.module_calls import Call


class NetFunction:
    """The loss of a net as a function of its parameters by name, and a batch; nothing of the net changes. `ends` are
    the calls after which stages end."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Any], Any], ends: Sequence[Call]) -> None:
        self.net, self.loss, self.ends = net, loss, ends

    def __call__(self, params: Mapping[str, Tensor], batch: Any, key: int | None, microbatch: int) -> Any:
        """The result of the loss; the random numbers are those of a step's microbatch."""
        inputs, target = batch
        args, kwargs = call_of(inputs)
        buffers = {name: held.detach().clone() for name, held in self.net.named_buffers()}
        attributes = Attributes([*self.net.named_modules()], contents=True)
        try:
            with nullcontext() if key is None else seeding(key, microbatch), without_cache(self.net), self._ending():
                made = torch.func.functional_call(self.net, {**buffers, **params}, args, kwargs)
        finally:
            attributes.restore()
        return self.loss(made, target)

    @contextmanager
    def _ending(self) -> Generator[None]:
        """Meanwhile the next stage begins where the calls end."""
        calls = Counter[str]()
        wanted = {(call.path, call.number) for call in self.ends}

        def ended(path: str, *_: Any) -> None:
            if (path, calls[path]) in wanted:
                next_stage()
            calls[path] += 1

        with ExitStack() as hooks:
            for path in {call.path for call in self.ends}:
                hook = self.net.get_submodule(path).register_forward_hook(partial(ended, path))
                hooks.callback(hook.remove)
            yield
