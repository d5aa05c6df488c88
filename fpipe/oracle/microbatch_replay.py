"""Judge the recorded calls of one microbatch, from the last to the first, each by its replay.

x --call, replayed--> y, inputs of its children         compared with the record: forward
dy --its backward--> dx, gradients of its children      compared with the record: backward
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fpipe.oracle.call_replay import CallReplay, OtherCalls
from fpipe.oracle.call_result import CallResult
from fpipe.oracle.explain_call import explain_gradient, explain_output, find_mistake
from fpipe.oracle.recorded_calls import input_hashes, module_call
from fpipe.oracle.recorded_step import RecordedStep
from fpipe.oracle.run_report import PHASES, Fault, Findings, noises, rounding_limit, rounding_shift
from fpipe.recording.record_files import hashes_of


class MicrobatchReplay(CallReplay):
    """The replay of one microbatch on one rank.

    Attributes:
        param_grads: the reference's gradient of each parameter for this microbatch, after `run`.
        limits: how far rounding may take each of them.
        later_grads, later_limits: without the first of several forwards, which may be a pipeline's trial of shapes.
    """

    def __init__(self, net: nn.Module, rank: RecordedStep, microbatch: int) -> None:
        super().__init__(net, rank, microbatch)
        self.param_grads, self.limits = dict[str, Tensor](), dict[str, float]()
        self.later_grads, self.later_limits = dict[str, Tensor](), dict[str, float]()

    def run(self, findings: Findings) -> None:
        """Replay all calls and add the faults of forward and backward to the findings."""
        for number in reversed(range(len(self._calls))):
            call = self._calls[number]
            if not self._calls.is_judged[number]:
                is_partial = call["module"] in self._calls.partial_modules
                reason = "a rank has some of its parts" if is_partial else "it takes or draws what no file keeps"
                # The rest of a pipeline is judged on other ranks.
                if call["module"] in self._modules and not (is_partial and call["parent"] is None):
                    findings.notes[f"{call['module'] or 'The net'} is not judged: {reason}."] = None
                continue
            try:
                result = self._results[number] = self.replay(number)
            except OtherCalls as error:
                findings.faults.append(self._fault(call["module"], "forward", str(error), call["start"]))
                self.is_whole = False
                continue
            self._judge_call(number, result, findings)
            # A call without a stub is repeated by the judged call around it, with all that is inside: it counts there.
            if all(self._calls.has_stub[i] for i in self._calls.judged_around(number)[:-1]):
                self._add_param_grads(number, result)

    def _judge_call(self, number: int, result: CallResult, findings: Findings) -> None:
        """Compare the tensors of a replayed call with the recorded ones."""
        call, limits = self._calls[number], _Limits(self, number, result)
        label = f"step {self._moment[0]}: {call['module'] or 'the net'}"
        for i in range(len(result.choices)):
            self._judge_choice(number, i, limits, findings)
        # 1. Forward: the call's outputs, and what it hands to its children.
        recorded = [self._record.tensor(name) for name in hashes_of(module_call(call)["output"])]
        if len(recorded) != len(result.outputs):
            sentence = f"it returns {len(recorded)} tensors, and the reference {len(result.outputs)}"
            findings.faults.append(self._fault(call["module"], "forward", sentence, call["end"]))
        for i, (actual, expected) in enumerate(zip(recorded, result.outputs, strict=False)):
            if not findings.agree(f"{label}, output {i}", actual, expected, limits.limit_of(f"output {i}")):
                mistake = explain_output(
                    self.module_of(number),
                    lambda change, i=i: self.replay(number, change=change).outputs[i],
                    actual,
                    expected,
                )
                findings.faults.append(self._fault(call["module"], "forward", mistake, call["end"]))
                break
        for child, inputs in result.child_inputs.items():
            name, start = self._calls[child]["module"], self._calls[child]["start"]
            recorded_inputs = [self._record.tensor(name) for name in input_hashes(self._calls[child])]
            for i, (actual, expected) in enumerate(zip(recorded_inputs, inputs, strict=False)):
                if not findings.agree(
                    f"{label}, input {i} of {name}", actual, expected, limits.limit_of(f"handed {child} {i}")
                ):
                    mistake = find_mistake(
                        self.module_of(number),
                        lambda change, child=child, i=i: self.replay(number, change=change).child_inputs[child][i],
                        actual,
                        expected,
                    )
                    mistake = mistake or f"{name} is handed another input: {explain_gradient(actual, expected)}"
                    findings.faults.append(self._fault(call["module"], "forward", mistake, start))
                    break
        # 2. Backward: the gradient of each child's outputs.
        for child, grads in result.child_grads.items():
            # Two calls that return one tensor cannot divide its gradient between them.
            if self._calls[child]["is_shared"] or call["is_shared"]:
                continue
            for i, (actual, expected) in enumerate(zip(self._recorded_grads(self._calls[child]), grads, strict=False)):
                self._judge_child_grad(number, child, i, actual, expected, limits, findings)

    def _judge_choice(self, number: int, index: int, limits: _Limits, findings: Findings) -> None:
        """Check that a top-k took the largest scores, or scores that rounding makes the largest."""
        call, choice = self._calls[number], limits.result.choices[index]
        differing = choice.differing_rows()
        if not differing:
            return
        shortfalls, rows = choice.shortfalls(), choice.recorded.numel() // choice.recorded.shape[choice.dim]
        subject = call["module"] or "The net"
        if float(shortfalls.max()) <= limits.largest_shift(f"scores {index}"):
            findings.notes[f"{subject}: in {differing} of {rows} rows its top-k differs, within rounding."] = None
            return
        mistake = f"in {differing} of {rows} rows its top-k does not take the largest scores"
        findings.faults.append(self._fault(call["module"], "forward", mistake, call["start"]))

    def _judge_child_grad(
        self,
        number: int,
        child: int,
        index: int,
        actual: Tensor | None,
        expected: Tensor | None,
        limits: _Limits,
        findings: Findings,
    ) -> None:
        """Compare the gradient of an output of a child, as the call and its later children hand it back."""
        name = self._calls[child]["module"]
        flow = self._results[child].flows.get(index) if child in self._results else None
        if flow is not None:
            expected = flow if expected is None else expected + flow
        if actual is None and expected is None:
            return
        template = expected if expected is not None else actual
        assert template is not None
        actual_grad = torch.zeros_like(template) if actual is None else actual
        expected_grad = torch.zeros_like(template) if expected is None else expected
        label = f"step {self._moment[0]}: gradient of output {index} of {name}"
        if findings.agree(label, actual_grad, expected_grad, limits.limit_of(f"child {child} {index}")):
            return
        # The only child that reads the output hands this gradient back; where several do, it is the call's matter.
        readers = self.replay(number, finds_readers=True).readers.get(child, [])
        subject = self._calls[readers[0] if len(readers) == 1 and readers[0] >= 0 else number]["module"]
        mistake = f"the gradient that it hands to {name} is {explain_gradient(actual_grad, expected_grad)}"
        # Later calls come earlier in the backward.
        findings.faults.append(self._fault(subject, "backward", mistake, -self._calls[child]["end"]))

    def _add_param_grads(self, number: int, result: CallResult) -> None:
        limits = _Limits(self, number, result)
        # Two sums, and not a difference: torch runs the trial on uninitialized memory, whose gradients may be NaN.
        sums = [(self.param_grads, self.limits)]
        if self._calls.roots > 1 and self._calls.calls_around(number)[-1] != 0:
            sums.append((self.later_grads, self.later_limits))
        # A module that is called several times adds up the gradients of its calls.
        for name, grad in result.param_grads.items():
            limit = limits.limit_of(f"param {name}")()
            for total_by_name, limit_by_name in sums:
                total_by_name[name] = total_by_name[name] + grad if name in total_by_name else grad
                limit_by_name[name] = limit_by_name.get(name, 0.0) + limit

    def _fault(self, module: str, phase: str, mistake: str, moment: int) -> Fault:
        step, microbatch = self._moment
        return Fault(module or "the net", phase, mistake, (step, PHASES.index(phase), microbatch, moment))


class _Limits:
    """How far rounding may take each tensor of a call: computed at the first question, by three replays with noise."""

    def __init__(self, replay: MicrobatchReplay, number: int, result: CallResult) -> None:
        self._replay, self._number, self.result = replay, number, result
        self._moved: list[dict[str, Tensor]] | None = None

    def limit_of(self, name: str) -> Callable[[], float]:
        """Return a function that computes the limit of a tensor, by its name in `named_tensors`."""

        def limit() -> float:
            expected, moved = self._moved_tensors(name)
            return 0.0 if expected is None else rounding_limit(expected, moved, self.result.eps)

        return limit

    def largest_shift(self, name: str) -> float:
        """Return how far rounding may take a number of a tensor."""
        expected, moved = self._moved_tensors(name)
        return 0.0 if expected is None else rounding_shift(expected, moved, self.result.eps)

    def _moved_tensors(self, name: str) -> tuple[Tensor | None, list[Tensor]]:
        """Return a tensor of the result, and the same tensor under three noises."""
        if self._moved is None:
            moved = (self._replay.replay(self._number, noise) for noise in noises(self.result.eps))
            self._moved = [result.named_tensors() for result in moved]
        return self.result.named_tensors().get(name), [x[name] for x in self._moved if name in x]
