"""The training that another pipeline was meant to do, and its last step as a record that the phases can judge.

model, params, batches, rule        --plain autograd, torch.optim-->        parameters, gradients, optimizer state
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.optimizers.optimizer_state import UpdateSettings, names_of_leaves
from fpipe.meaning.optimizers.rules import RULES_WITHOUT_STEP, STEP, rule_of, with_numbers
from fpipe.meaning.single_device.microbatch_sums import sum_over_microbatches
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.single_device.training_loop import training_loop
from fpipe.model import Model
from fpipe.oracle.named_leaves import leaves_by_name, numbered_leaves, strip_wrapper_names
from fpipe.oracle.recorded_step import RecordedStep, ReferenceNames
from fpipe.oracle.run_report import distance
from fpipe.recording.record_files import RankRecord, TensorWriter, as_spec
from fpipe.verification.report import to_double

# The rounding noise on a gradient, in machine epsilons of its size, and how much further rounding may take a result.
_NOISE_EPSILONS, _SPREADS = 4.0, 100.0
_SEEDS = (1, 101, 201)


@dataclass(frozen=True)
class Training:
    """The training that was meant, by plain autograd and torch.optim: its settings, steps, and values at the start."""

    model: Model
    update: UpdateSettings
    steps: Sequence[Any]
    rates: Sequence[dict[str, float | None]]
    keys: Sequence[int | None]
    params: Sequence[Any]
    opt: Sequence[Any]
    state: Sequence[Any] | None

    def run(self, seed: int | None = None) -> Result:
        """Train all steps, with noise of the size of rounding on the gradients if there is a seed."""

        def gradients(params: Sequence[Any], step: Any, state: Any, key: int | None, scale: Any) -> Result:
            index, parts = step
            result = sum_over_microbatches(self.model, params, parts, state=state, key=key)
            return result if seed is None else replace(result, grads=_with_noise(result.grads, seed + index))

        return training_loop(
            self.model,
            self.params,
            [*enumerate(self.steps)],
            gradients,
            self.update,
            rates=self.rates,
            keys=self.keys,
            opt=self.opt,
            state=self.state,
            delay=lambda step, stage: 0,
        )

    @cached_property
    def all_steps(self) -> Result:
        """The result of all steps."""
        return self.run()

    @cached_property
    def start(self) -> Result:
        """The result of all steps but the last, with the values at the start if there is one step."""
        return replace(self, steps=self.steps[:-1], rates=self.rates[:-1], keys=self.keys[:-1]).run()

    @cached_property
    def leaf_numbers(self) -> dict[str, int]:
        """The number of each parameter's leaf by name; a tied one has several names."""
        return leaves_by_name(numbered_leaves(self.model, self.params)[1])

    def by_name(self, stages: Any) -> dict[str, Any]:
        """Return parameters, gradients or states of all stages by the first name of each parameter, None left out."""
        by_stage: Any = tuple(stages)
        leaves: list[Any] = tree.flatten(tuple(self.params))[1].flatten_up_to(by_stage)
        by_name = {name: leaves[self.leaf_numbers[name]] for name in self.reference_names.params}
        return {name: leaf for name, leaf in by_name.items() if leaf is not None}

    @cached_property
    def reference_names(self) -> ReferenceNames:
        """The names of the parameters, each with its shape and its uses."""
        # Views, since two parameters that are not tied may be one tensor.
        views = [leaf.detach() for leaf in tree.leaves(tuple(self.params))]
        return ReferenceNames((name, views[number]) for name, number in self.leaf_numbers.items())

    @cached_property
    def _ends(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        results = self.all_steps, *(self.run(seed) for seed in _SEEDS)
        return [(self.by_name(result.params), self.by_name(result.opt)) for result in results]

    def limit_of(self, name: str, key: str, right: Tensor) -> float:
        """Return how far rounding of gradients may take a parameter, or its optimizer state `key`."""
        ends = [states.get(name, {}).get(key) if key else params[name] for params, states in self._ends]
        if key == STEP or any(end is None for end in ends):
            return 0.0
        # Three directions, since a net may amplify one kind of noise and not another.
        spread = max(distance(end, ends[0]) for end in ends[1:])
        return _SPREADS * spread + 4 * torch.finfo(ends[0].dtype).eps * float(to_double(right).norm())

    def settings_by_name(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return the rule and the settings of each parameter in the last step."""
        leaves, _ = tree.flatten(tuple(self.params))
        names = [name for stage in self.params for name in names_of_leaves(tree.flatten(stage)[1])]
        pairs = [rule_of(self.update.rule, settings) for settings in self.update.of(names, leaves)]
        by_leaf = [(rule, with_numbers(settings, self.rates[-1])) for rule, settings in pairs]
        return {name: by_leaf[self.leaf_numbers[name]] for name in self.reference_names.params}


def _with_noise(grads: Sequence[Any], seed: int) -> Any:
    """Move gradients as another order of additions may."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [_size(grad) for grad in tree.leaves(tuple(grads)) if grad is not None and grad.numel()]
    max_size = max(sizes, default=0.0)

    def move(grad: Any) -> Any:
        if grad is None or not grad.numel():
            return grad
        numbers, size, eps = to_double(grad), _size(grad), torch.finfo(grad.dtype).eps
        # Below the rounding error of the largest gradient, a gradient is nothing but rounding, of any sign: the bias of
        # an attention's keys. An optimizer that divides by the size of gradients then moves it the other way.
        if 0 < size < eps * max_size:
            signs = torch.where(numbers == 0, torch.ones_like(numbers), -numbers.sgn())
            return (eps * max_size * signs).to(grad.dtype)
        noise = torch.randn(grad.shape, generator=generator, dtype=torch.float64).to(grad.device)
        return (numbers + noise * size * eps * _NOISE_EPSILONS).to(grad.dtype)

    return tree.tree_map(move, tuple(grads))


def _size(grad: Tensor) -> float:
    """Return the root mean square of a gradient."""
    return float(to_double(grad).norm()) / grad.numel() ** 0.5


def record_step(
    training: Training,
    new_params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    norm: float | Tensor | None,
    opt_after: Mapping[str, Mapping[str, Any]],
) -> RecordedStep:
    """Return the last step as a record, with the reference's gradients where none are handed in."""
    start, right, step = training.start, training.all_steps, len(training.steps) - 1
    writer, settings = TensorWriter(Path(), 0), training.settings_by_name()

    def hash_all(tensors: Mapping[str, Any]) -> dict[str, str]:
        return {name: writer.add(torch.as_tensor(tensor)) for name, tensor in tensors.items()}

    # A step of one rank whose gradients are reduced already: batch, forward and accumulation have no record.
    reduced = dict(grads) or training.by_name(right.grads[-1])
    states = training.by_name(start.opt)
    header: dict[str, Any] = {"microbatches": [], "digest": False, "fused": {}, "events": ["reduced", "update"]}
    if norm is not None:
        header["norm"] = float(norm)
    clip = training.update.clip
    total_norm = torch.nn.utils.get_total_norm([*reduced.values()], foreach=False) if norm is None else norm
    # As torch clips: min(1, clip / (norm + 1e-6)).
    factor = 1.0 if clip is None else torch.clamp(clip / (torch.as_tensor(total_norm) + 1e-6), max=1.0)
    header |= {
        "meant": {"rule": None, "clip": clip, "lr": None, "settings": {"dict": {}}},
        "before": hash_all(training.by_name(start.params)),
        "reduced": hash_all(reduced),
        "updated": hash_all({name: grad * factor for name, grad in reduced.items()}),
        "after": hash_all(new_params),
        "state_before": {},
        "state_after": {},
        "groups": [],
    }
    # By the names of the reference, so that states of a wrapped net are found.
    known_names = training.reference_names.first_name
    for name, new_state in strip_wrapper_names(opt_after, known_names).items():
        unknown = next((key for key in new_state if name not in known_names or key not in states[name]), None)
        if unknown is not None:
            raise ValueError(f"there is nothing to compare {unknown} of {name} with.")
        header["state_after"][name] = hash_all(new_state)
    for name, (rule, leaf_settings) in settings.items():
        header["groups"].append({"rule": rule, "settings": as_spec(leaf_settings, writer.add), "names": [name]})
        # Rules without a count in torch have one in fpipe's state. At step 0 torch has no state at all.
        if states.get(name) and float(states[name].get(STEP, 1)) > 0:
            is_counted = rule not in RULES_WITHOUT_STEP
            kept_state = {key: x for key, x in states[name].items() if is_counted or key != STEP}
            header["state_before"][name] = hash_all(kept_state)
    tensors = writer.new_tensors
    record = RankRecord(0, {step: header}, dict.fromkeys(tensors, tensors.__getitem__))
    return RecordedStep(record, step, training.reference_names)
