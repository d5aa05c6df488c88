"""Check the update of a recorded step: after = rule(before, gradient, state), and name the mistake where it is not.

before, gradient, state --the rule as it was meant--> right        --the rule by each known mistake--> the nearest
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe.meaning.optimizers.rule_names import RULES, SETTINGS
from fpipe.meaning.optimizers.rules import RULES_WITHOUT_STEP, STEP, apply_rule, initial_state
from fpipe.oracle.recorded_step import RecordedStep
from fpipe.oracle.run_phases import add_fault, final_grads
from fpipe.oracle.run_report import Findings, distance, eps_of, noises, rounding_limit
from fpipe.recording.record_files import from_spec
from fpipe.verification.report import is_finite, list_names

# Settings that choose a kernel and not a result, and those that schedulers of the learning rate leave in a group.
_KERNEL_SETTINGS = frozenset(("foreach", "fused", "capturable", "differentiable", "initial_lr", "lr"))

# A mistake has to leave at most this share of the difference.
_LEFT_SHARE = 0.05


@dataclass(frozen=True)
class LeafUpdate:
    """The update of one parameter: rule, settings, learning rate, and the tensors that it reads."""

    rule: str
    settings: dict[str, Any]
    lr: float
    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]

    def run(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the next parameter and state."""
        settings = tuple(self.settings.items())
        state = initial_state(self.rule, settings, self.param) | {key: x.clone() for key, x in self.state.items()}
        # Torch counts no steps in some rules; here a count says whether the state has started.
        if self.rule in RULES_WITHOUT_STEP and self.state:
            state[STEP] = torch.ones(())
        params, states = apply_rule(
            self.rule, [settings], [self.param], [self.grad.to(self.param.dtype)], [state], {"lr": self.lr}, [False]
        )
        return params[0], states[0]

    def limit(self, right: Tensor) -> float:
        """Return how far rounding of the gradient and the parameter may take the next parameter."""
        eps = eps_of(self.param)
        moved = [replace(self, grad=noise(self.grad)).run()[0] for noise in noises(eps)]
        return rounding_limit(right, moved, eps)

    def limit_of_state(self, key: str, right: Tensor) -> float:
        """Return how far rounding may take the next state of a key."""
        # A count of steps is exact. A moment is a sum of two terms, which may nearly cancel: the larger one rounds.
        terms = (right, self.state[key]) if key in self.state else (right,)
        return 0.0 if key == STEP else 16 * eps_of(right) * max(float(term.double().norm()) for term in terms)


def judge_update(
    rank: RecordedStep,
    former: RecordedStep | None,
    findings: Findings,
    limit_of: Callable[[str, str, Tensor], float] | None = None,
) -> None:
    """Check parameters and optimizer state after the update of a rank.

    Args:
        rank, former: the step, and the one before if it is recorded.
        findings: where the faults go.
        limit_of: how far rounding may take a parameter, or its state of a key, from the right one; by default what
            rounding of its recorded gradient does.
    """
    updates = dict(_leaf_updates(rank, findings))
    new_params, new_states = rank.tensors("after"), rank.states("state_after")
    wrong = dict[str, Tensor]()
    for name, update in updates.items():
        right, right_state = update.run()
        label = f"step {rank.step}: {name} after the update, rank {rank.rank}"
        limit = partial(limit_of, name, "", right) if limit_of is not None else partial(update.limit, right)
        if not findings.agree(label, new_params[name], right, limit):
            wrong[name] = right
            continue
        for key, value in new_states.get(name, {}).items():
            expected = right_state.get(key)
            if expected is None:
                continue
            limit = (
                partial(limit_of, name, key, expected) if limit_of else partial(update.limit_of_state, key, expected)
            )
            if not findings.agree(f"{label}, {key}", value, expected, limit):
                add_fault(findings, name, "update", f"its {key} is not that of {update.rule}", rank.step)
    # Parameters that no group has, or without a gradient, stay where they are.
    untouched = [
        name for name in new_params.keys() - updates.keys() if not torch.equal(new_params[name], rank.before[name])
    ]
    if untouched and updates:
        add_fault(
            findings, min(untouched), "update", "it moves, although the optimizer has no gradient of it", rank.step
        )
    if wrong:
        add_fault(findings, next(iter(wrong)), "update", _explain(rank, former, updates, new_params, wrong), rank.step)


def _leaf_updates(rank: RecordedStep, findings: Findings) -> Iterator[tuple[str, LeafUpdate]]:
    """Yield the intended update of each parameter."""
    meant, grads, states = rank.header["meant"], rank.tensors("updated"), rank.states("state_before")
    meant_settings = from_spec(meant["settings"], rank.record.tensor)
    for group in rank.header["groups"] if grads else ():
        rule = meant["rule"] or group["rule"]
        if rule not in SETTINGS and rule not in RULES:
            findings.notes[f"The update is not judged: {rule} is no rule of torch.optim. Say step(rule=)."] = None
            return
        group_settings = from_spec(group["settings"], rank.record.tensor)
        lr = float(meant["lr"] if meant["lr"] is not None else group_settings["lr"])
        setting_names = SETTINGS[rule].split() if rule in SETTINGS else [*group_settings]
        # The settings that the loop says it means take the place of the optimizer's own.
        settings = {
            key: value for key, value in group_settings.items() if key in setting_names and key not in _KERNEL_SETTINGS
        } | meant_settings
        for recorded_name in group["names"]:
            name = rank.names.first_name.get(recorded_name, recorded_name)
            if name in grads and name in rank.before:
                yield name, LeafUpdate(rule, settings, lr, rank.before[name], grads[name], states.get(name, {}))


def _explain(
    rank: RecordedStep,
    former: RecordedStep | None,
    updates: Mapping[str, LeafUpdate],
    new_params: Mapping[str, Tensor],
    wrong: Mapping[str, Tensor],
) -> str:
    """Return the mistake that gives all wrong parameters, or say how many differ."""
    not_finite = [name for name in wrong if not is_finite(new_params[name])]
    if not_finite:
        return f"NaN or infinite numbers in {list_names(not_finite)}"
    errors = {name: distance(new_params[name], right) for name, right in wrong.items()}
    for sentence, changed in _mistakes(rank, former, updates, list(wrong)):
        results = ((name, changed[name].run()[0]) for name in wrong if name in changed)
        # The limit of a mistake is measured as that of the right update.
        if changed.keys() >= wrong.keys() and all(
            distance(new_params[name], value) <= max(_LEFT_SHARE * errors[name], 0.0) for name, value in results
        ):
            return sentence
    if all(torch.equal(new_params[name], rank.before[name]) for name in wrong):
        return f"no update reaches {list_names([*wrong])}"
    return f"{len(wrong)} of {len(updates)} parameters are not those of {next(iter(updates.values())).rule}"


def _mistakes(
    rank: RecordedStep, former: RecordedStep | None, updates: Mapping[str, LeafUpdate], names: list[str]
) -> Iterator[tuple[str, dict[str, LeafUpdate]]]:
    """Yield known mistakes with the updates that they make of the wrong parameters, likely ones first."""

    def changed(**fields: Any) -> dict[str, LeafUpdate]:
        return {name: replace(updates[name], **fields) for name in names}

    def with_settings(**settings: Any) -> dict[str, LeafUpdate]:
        return {name: replace(updates[name], settings=updates[name].settings | settings) for name in names}

    def with_grads(grads: Mapping[str, Tensor]) -> dict[str, LeafUpdate]:
        return {name: replace(updates[name], grad=grads[name]) for name in names if name in grads}

    def counted(difference: int) -> dict[str, LeafUpdate]:
        return {
            name: replace(update, state=update.state | {STEP: update.state[STEP] + difference})
            for name, update in ((name, updates[name]) for name in names)
            if STEP in update.state and float(update.state[STEP]) + difference >= 0
        }

    # All parameters of one optimizer share a rule; their settings may differ by group.
    update = updates[names[0]]
    decay = update.settings.get("weight_decay", 0)
    if decay:
        yield "there is no weight decay", with_settings(weight_decay=0)
        yield "the weight decay is not scaled by the learning rate", with_settings(weight_decay=decay / update.lr)
    groups = [from_spec(group["settings"], rank.record.tensor) for group in rank.header["groups"]]
    for settings in groups:
        for key in ("weight_decay", "eps", "betas", "momentum"):
            if key in settings and settings[key] != update.settings.get(key):
                yield f"{key} is {settings[key]}, not {update.settings.get(key)}", with_settings(**{key: settings[key]})
        if float(settings["lr"]) != update.lr:
            yield (
                f"the learning rate is {float(settings['lr']):g}, not {update.lr:g}",
                changed(lr=float(settings["lr"])),
            )
    if not decay and "weight_decay" in SETTINGS.get(update.rule, "").split():
        for other_decay in (0.1, 0.01, 0.05, 1e-4):
            yield f"weight decay {other_decay:g} is not meant", with_settings(weight_decay=other_decay)
    yield "gradients before the clip are used", with_grads(final_grads(rank))
    if rank.header["microbatches"]:
        yield "gradients before the reduction are used", with_grads(rank.microbatch_grads()[-1])
    if former is not None and former.step == rank.step - 1:
        yield "gradients of the step before are used", with_grads(former.tensors("updated"))
        yield (
            "it starts from the parameters before the step before",
            {name: replace(updates[name], param=former.before[name]) for name in names if name in former.before},
        )
    for difference in (-1, 1):
        yield f"the count of steps is off by {difference}", counted(difference)
    yield "the optimizer state is that of a first step", changed(state={})
    yield "the sign of the update is turned", {name: replace(updates[name], grad=-updates[name].grad) for name in names}
    for other_rule in ("Adam", "AdamW", "SGD"):
        if other_rule != update.rule and (other_rule == "SGD") == (update.rule == "SGD"):
            yield f"it is {other_rule}, not {update.rule}", changed(rule=other_rule)
    for eps in (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10):
        if eps != update.settings.get("eps", eps):
            yield f"eps is {eps:g}, not {update.settings['eps']:g}", with_settings(eps=eps)
