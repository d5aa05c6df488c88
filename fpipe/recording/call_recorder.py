"""Record the calls of a net's modules, and the gradients of their outputs, by hooks.

y = net.blocks[0](x); ..; loss.backward()
    --> {"module": "blocks.0", "parent": 3, "args": x, "output": y, "grads": [dy], "rng": [before, after]}

Under tensor parallelism hooks of the module turn a rank's part into a DTensor, and back. What the module itself takes
and returns is then kept as `inner`, beside what its parent sees.
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
        modules: the recorded modules by name.
        calls: the calls of the microbatch so far, a parent before its children.
        choices: what each top-k of the microbatch took, with the number of its call.
    """

    def __init__(self, modules: Mapping[str, nn.Module], writer: TensorWriter) -> None:
        self.modules, self.writer = modules, writer
        self.calls: list[dict[str, Any]] | None = None
        self.choices = list[dict[str, Any]]()
        self._open_calls = list[int]()
        # The inputs that parents hand to the open calls, and the outputs that their modules return.
        self._open_values = list[Any]()
        self._clock = 0
        # Where each output tensor was returned: its gradient cannot be divided between two calls that return it.
        self._returned = dict[int, tuple[Any, dict[str, Any]]]()
        self._handles = list[Any]()
        for name, module in modules.items():
            # Two on each side: the outermost see what the parent sees, the innermost what the module takes and returns.
            self._handles += [
                module.register_forward_pre_hook(self._pre_hook(name), prepend=True, with_kwargs=True),
                module.register_forward_pre_hook(self._inner_pre_hook, with_kwargs=True),
                module.register_forward_hook(self._inner_hook, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._hook, with_kwargs=True),
            ]

    def start(self) -> None:
        """Record calls from here on."""
        self.calls, self._open_calls, self._clock, self._returned = [], [], 0, {}
        self.choices, self._open_values = [], []

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

    def record_choice(self, scores: Tensor, indices: Tensor, dim: int) -> Tensor:
        """Record the indices of a top-k in an open call, and return them."""
        if self._open_calls and not is_in_backward():
            self.choices.append({"call": self._open_calls[-1], "indices": self.hash_of(indices)})
        return indices

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
            self._open_values.append((args, kwargs))
            self.calls.append(call)

        return record_inputs

    def _inner_pre_hook(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.calls is None or is_in_backward():
            return
        call, outer_values = self.calls[self._open_calls[-1]], self._open_values[-1]
        if not _are_same_tensors(outer_values, (args, kwargs)):
            call["inner"] = {"args": as_spec(args, self.hash_of), "kwargs": as_spec(kwargs, self.hash_of)}

    def _inner_hook(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.calls is not None and not is_in_backward():
            self._open_values[-1] = output

    def _hook(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.calls is None or is_in_backward():
            return
        call, inner_output = self.calls[self._open_calls.pop()], self._open_values.pop()
        call["end"] = self._tick()
        call["output"], call["grads"] = self._record_output(output, call)
        if "inner" in call or not _are_same_tensors(output, inner_output):
            inner_call = call["inner"] = {"args": call["args"], "kwargs": call["kwargs"]} | call.get("inner", {})
            inner_call["output"], inner_call["grads"] = self._record_output(inner_output, call)
        device_before, device_after = call["draws_on_device"], _device_rng_state(call["device"])
        call["draws_on_device"] = device_before is not None and not torch.equal(device_before, device_after)
        first_state, last_state = call.pop("rng"), torch.get_rng_state()
        if not torch.equal(first_state, last_state):
            call["rng"] = [self.writer.add(first_state), self.writer.add(last_state)]

    def _record_output(self, output: Any, call: dict[str, Any]) -> tuple[Any, dict[str, str]]:
        """Return the spec of an output, and the hashes of its gradients, which the backward fills in."""
        gradients = dict[str, str]()

        def hash_output(tensor: Tensor) -> str:
            index = str(len(gradients))
            gradients[index] = ""
            if tensor.requires_grad:
                self._note_return(tensor, call)
                # Called with the whole gradient of the tensor, once all of its readers have added theirs.
                tensor.register_hook(partial(self._record_grad, gradients, index))
            return self.hash_of(tensor)

        return as_spec(output, hash_output), gradients

    def _record_grad(self, gradients: dict[str, str], index: str, gradient: Tensor) -> None:
        gradients[index] = self.hash_of(gradient)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _note_return(self, tensor: Tensor, call: dict[str, Any]) -> None:
        # By a weak reference, since torch may make the next tensor at the same place.
        reference, first_call = self._returned.get(id(tensor), (lambda: None, call))
        if reference() is tensor and first_call is not call:
            first_call["is_shared"] = call["is_shared"] = True
        else:
            self._returned[id(tensor)] = weakref.ref(tensor), call


def _are_same_tensors(values: Any, other_values: Any) -> bool:
    """Whether two values hold the same tensors, by identity."""
    ids = [list[int](), list[int]()]
    for numbers, value in zip(ids, (values, other_values), strict=True):
        as_spec(value, lambda tensor, numbers=numbers: numbers.append(id(tensor)) or "")
    return ids[0] == ids[1]


def _device_rng_state(device: str) -> Any:
    """Return the random state of an accelerator, which no other device can go on from; None of the CPU."""
    return None if device in ("cpu", "meta") else torch.get_device_module(device).get_rng_state()
