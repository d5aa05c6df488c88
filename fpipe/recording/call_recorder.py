"""Record the calls of a net's modules, and the gradients of their outputs, by hooks.

y = net.blocks[0](x); ..; loss.backward()
    --> {"module": "blocks.0", "parent": 3, "args": x, "output": y, "grads": [dy], "rng": [before, after]}
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.meaning.purity.sharded import is_sharded
from fpipe.recording.record_files import TensorWriter, as_spec
from fpipe.torch_private.dispatch import is_in_backward


class CallRecorder:
    """Hooks on modules, which record each call between `start` and `finish`.

    Attributes:
        calls: the calls of the microbatch so far, a parent before its children.
    """

    def __init__(self, modules: Mapping[str, nn.Module], writer: TensorWriter) -> None:
        self.writer = writer
        self.calls: list[dict[str, Any]] | None = None
        self._open_calls = list[int]()
        self._clock = 0
        # Where each output tensor was returned: its gradient cannot be divided between two calls that return it.
        self._returned = dict[int, tuple[Any, dict[str, Any]]]()
        self._handles = list[Any]()
        for name, module in modules.items():
            # The pre-hook is the last of the module's, and the hook too: it sees what the module takes and returns.
            self._handles += [
                module.register_forward_pre_hook(self._pre_hook(name), with_kwargs=True),
                module.register_forward_hook(self._hook, with_kwargs=True),
            ]

    def start(self) -> None:
        """Record calls from here on."""
        self.calls, self._open_calls, self._clock, self._returned = [], [], 0, {}

    def finish(self) -> list[dict[str, Any]]:
        """Return the calls since `start`, and record no more."""
        calls, self.calls = self.calls or [], None
        return calls

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def hash_of(self, tensor: Tensor) -> str:
        """Add a tensor to the record, whole if it is a DTensor, and return its hash."""
        # All ranks of its mesh are at the same call, so all of them take part in the collective.
        whole_tensor: Any = tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]
        return self.writer.add(whole_tensor)

    def _pre_hook(self, name: str) -> Any:
        def record_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
            # A checkpointed module is called again in the backward, which is no call of the step.
            if self.calls is None or is_in_backward():
                return
            param = next((x for x in module.parameters() if x.is_floating_point()), None)
            device = "cpu" if param is None else param.device.type
            autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            call = {
                "module": name,
                "parent": self._open_calls[-1] if self._open_calls else None,
                "args": as_spec(args, self.hash_of),
                "kwargs": as_spec(kwargs, self.hash_of),
                "device": device,
                # FSDP's mixed precision lends its module parameters of another dtype for the call.
                "param_dtype": None if param is None else str(param.dtype).removeprefix("torch."),
                "autocast": str(autocast).removeprefix("torch.") if autocast else None,
                "is_training": module.training,
                "rng": torch.get_rng_state(),
                "draws_on_device": _device_rng_state(device),
                "start": self._tick(),
                "is_shared": False,
            }
            self._open_calls.append(len(self.calls))
            self.calls.append(call)

        return record_inputs

    def _hook(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.calls is None or is_in_backward():
            return
        number = self._open_calls.pop()
        call = self.calls[number]
        gradients = call["grads"] = dict[str, str]()

        def hash_output(tensor: Tensor) -> str:
            index = str(len(gradients))
            gradients[index] = ""
            if tensor.requires_grad:
                self._note_return(tensor, call)
                # Called with the whole gradient of the tensor, once all of its readers have added theirs.
                tensor.register_hook(partial(self._record_grad, gradients, index))
            return self.hash_of(tensor)

        call["end"] = self._tick()
        call["output"] = as_spec(output, hash_output)
        device_before, device_after = call["draws_on_device"], _device_rng_state(call["device"])
        call["draws_on_device"] = device_before is not None and not torch.equal(device_before, device_after)
        first_state, last_state = call.pop("rng"), torch.get_rng_state()
        if not torch.equal(first_state, last_state):
            call["rng"] = [self.writer.add(first_state), self.writer.add(last_state)]

    def _record_grad(self, gradients: dict[str, str], index: str, gradient: Tensor) -> None:
        gradients[index] = self.hash_of(gradient)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _note_return(self, tensor: Tensor, call: dict[str, Any]) -> None:
        # By a weak reference, since torch may make the next tensor at the same place.
        reference, first_call = self._returned.get(id(tensor), (lambda: None, call))
        if reference() is tensor:
            first_call["is_shared"] = call["is_shared"] = True
        else:
            self._returned[id(tensor)] = weakref.ref(tensor), call


def _device_rng_state(device: str) -> Any:
    """Return the random state of an accelerator, which no other device can go on from; None of the CPU."""
    return None if device in ("cpu", "meta") else torch.get_device_module(device).get_rng_state()
