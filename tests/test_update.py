"""The optimizer in the program: a step returns the parameters of torch's own loop."""

import copy
import inspect
import weakref
from fnmatch import fnmatch
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.meaning.optimizers.rule_names import SETTINGS
from tests.processes import Processes
from tests.refusals import refusals
from tests.test_data_parallel import by_hand, meshed, started
from tests.test_distributed import MSE, local_part, rows
from tests.toys import Toy

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD with momentum": ("SGD", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "Adam": ("Adam", {"amsgrad": True}),
    "AdamW": ("AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "Adagrad": ("Adagrad", {"initial_accumulator_value": 0.1}),
    "RMSprop": ("RMSprop", {"centered": True, "momentum": 0.5}),
    "RAdam": ("RAdam", {}),
    "NAdam": ("NAdam", {}),
    "Adamax": ("Adamax", {}),
    "Adadelta": ("Adadelta", {}),
    "ASGD": ("ASGD", {}),
    "Rprop": ("Rprop", {}),
}
CLIPS = {"no clip": None, "clipped": 0.05, "below": 100.0}


def net_of(stages: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(stages)))


@cache
def cut_net(stages: int) -> tuple[fpipe.Model, Any, Any]:
    """Cut a net that no test writes, so that all share its traces."""
    return fpipe.from_sequential(net_of(), stages=stages, loss=MSE)


def updating_program(
    model: Any, schedule: Any, rule: str, clip: float | None = None, *transforms: Any, **settings: Any
) -> Any:
    update = fpipe.update(rule, clip=clip, **settings)
    return fpipe.chain(fpipe.split(4), schedule, fpipe.merge(outputs=False), *transforms, update)(fpipe.program(model))


def run_torch_loop(
    net: nn.Module, batch: Any, steps: int, rule: str, clip: float | None, lrs: Any, **settings: Any
) -> tuple[list[Tensor], list[Tensor], torch.optim.Optimizer]:
    """Train the net with torch alone; return losses, norms and the optimizer."""
    optimizer = getattr(torch.optim, rule)(net.parameters(), lr=1.0, foreach=False, **settings)
    losses, norms = [], []
    for step_index in range(steps):
        optimizer.param_groups[0]["lr"] = lrs[step_index]
        optimizer.zero_grad()
        loss, _ = assign_grads_by_hand(net, batch)
        losses.append(loss)
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), float("inf") if clip is None else clip, foreach=False))
        optimizer.step()
    return losses, norms, optimizer


def assign_grads_by_hand(net: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of four microbatches, and store the gradients in the net."""
    loss, grads = by_hand(net, [batch], 4)
    for name, leaf in net.named_parameters():
        leaf.grad = grads[name]
    return loss, grads


def join_stages(per_stage: Any) -> dict[str, Any]:
    return {name: leaf for stage in per_stage if stage is not None for name, leaf in stage.items()}


def differences(net: nn.Module, optimizer: Any, result: fpipe.Result) -> list[str]:
    """Name the parameters and optimizer buffers that differ in a bit."""
    params, opt = join_stages(result.params), join_stages(result.opt)
    differing = list[str]()
    for name, leaf in net.named_parameters():
        if name in params:
            differing += [name] * (not torch.equal(params[name], leaf))
            buffers = {
                name_of_buffer: buffer
                for name_of_buffer, buffer in optimizer.state[leaf].items()
                if isinstance(buffer, Tensor)
            }
            differing += [
                f"{name}: {name_of_buffer}"
                for name_of_buffer, buffer in buffers.items()
                if not torch.equal(opt[name][name_of_buffer], buffer)
            ]
    return differing + ["nothing"] * (not params)


@pytest.mark.crossed
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("rule", RULES)
def test_steps_have_the_bits_of_torchs_own_loop(rule: str, clip: str):
    (name, settings), lrs = RULES[rule], [0.02, 0.01, 0.003]
    (model, params, _), net, batch = NET_IN_FOUR, net_of(), rows(8)
    program = updating_program(model, fpipe.schedules.interleaved(2), name, CLIPS[clip], **settings)
    opt = fpipe.optimizer_state(program, params)
    step = fpipe.build(program, model)
    losses, norms, optimizer = run_torch_loop(net, batch, 3, name, CLIPS[clip], lrs, **settings)
    for lr, loss, norm in zip(lrs, losses, norms, strict=True):
        result = step(params, batch, opt=opt, lr=lr)
        assert torch.equal(result.loss, loss)
        assert CLIPS[clip] is None or torch.equal(result.norm, norm)
        params, opt = result.params, result.opt
    assert differences(net, optimizer, result) == []


def tied() -> Toy:
    layers = {"embed": nn.Embedding(7, 8), "mid": nn.Linear(8, 8), "head": nn.Linear(8, 7, bias=False)}
    net = Toy(lambda module, x: module.head(module.mid(module.embed(x)).tanh()), **layers)
    net.head.weight = net.embed.weight
    return net


def test_a_tied_leaf_is_updated_and_counted_once():
    torch.manual_seed(0)
    net, ids = tied(), torch.randint(0, 7, (8,))
    pipeline_net = copy.deepcopy(net)
    model, params, _ = fpipe.from_module(pipeline_net, 2, loss=nn.functional.cross_entropy, batch=(ids, ids))
    program = updating_program(model, fpipe.schedules.one_f_one_b(2), "AdamW", 0.1)
    result = fpipe.build(program, model)(params, (ids, ids), opt=fpipe.optimizer_state(program, params), lr=0.1)
    # The gradient of a tied leaf: over the microbatches of each use, and then over the uses.
    reference = fpipe.reference(model, params, (ids, ids), microbatches=4)
    fpipe.assign_grads(net, reference.grads)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    optimizer.step()
    assert torch.equal(result.norm, norm)
    assert differences(net, optimizer, result) == []


TWO_RULES = [
    (lambda name, leaf: leaf.ndim == 2, {"rule": torch.optim.Muon, "weight_decay": 0.1}),
    ("*bias", {"weight_decay": 0.0}),
]


@pytest.mark.parametrize("options", [{}, {"trace": False}, {"donate": True}], ids=str)
def test_two_rules_in_one_program_have_the_bits_of_two_optimizers(options: dict[str, Any]):
    """Muon of matrices and AdamW of the rest, as language models are trained."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)))
    batch, lrs = rows(8), [0.02, 0.01]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    update = fpipe.update("AdamW", clip=0.5, groups=TWO_RULES, params=params, weight_decay=0.2)
    program = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2), fpipe.merge(), update)(fpipe.program(model))
    assert fpipe.Program.parse(str(program)) == program
    assert fpipe.verify(program, model, params, batch, opt=fpipe.optimizer_state(program, params), lr=0.01).bitwise
    step, opt = fpipe.build(program, model, **options), fpipe.optimizer_state(program, params)

    matrices = [leaf for leaf in net.parameters() if leaf.ndim == 2]
    scales, biases = ([leaf for name, leaf in net.named_parameters() if leaf.ndim == 1 and end in name] for end in WB)
    groups = [{"params": scales, "weight_decay": 0.2}, {"params": biases, "weight_decay": 0.0}]
    muon, adam = torch.optim.Muon(matrices, weight_decay=0.1), torch.optim.AdamW(groups, foreach=False)
    for lr in lrs:
        result = step(params, batch, opt=opt, lr=lr)
        params, opt = result.params, result.opt
        assign_grads_by_hand(net, batch)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=False)
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
    assert all(torch.equal(join_stages(params)[name], leaf) for name, leaf in net.named_parameters())
    assert {*join_stages(opt)["0.0.weight"]} == {"step", "momentum_buffer"}


WB = ("weight", "bias")


def test_a_group_with_a_rule_of_its_own_is_checked():
    with pytest.raises(ValueError, match="'Moun' is no optimizer rule"):
        fpipe.update("AdamW", groups={"*@2d": {"rule": "Moun"}})
    with pytest.raises(ValueError, match="Muon takes no betas="):
        fpipe.update("AdamW", groups={"*@2d": {"rule": "Muon", "betas": (0.9, 0.95)}})
    with pytest.raises(ValueError, match="a function of groups= fits none of params="):
        fpipe.update("AdamW", groups=TWO_RULES)
    with pytest.raises(ValueError, match="fits only one 'w' of several"):
        fpipe.update("AdamW", groups=TWO_RULES, params=({"w": torch.ones(2, 2)}, {"w": torch.ones(2)}))
    model, _, _ = cut_net(2)
    program = fpipe.chain(
        fpipe.split(2), fpipe.merge(), fpipe.shard(), fpipe.update("SGD", groups={"*": {"rule": "Muon"}})
    )
    with pytest.raises(ValueError, match="Muon looks at whole matrices, of which replicas have shards"):
        fpipe.build(program(fpipe.program(model)), model)


class Adds(nn.Module):
    """Add a parameter times a factor; under the mean, this factor is its gradient."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor, self.weight = factor, nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * self.factor


@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}], ids=str)
def test_a_norm_is_stacked_in_the_order_of_the_net_and_not_of_its_stages(options: dict[str, Any]):
    """Two small numbers are lost next to 1.5 unless they come first. Norms used to be stacked by stage, one bit off
    `clip_grad_norm_`."""
    small = 0.000345
    layers = {"tied": Adds(small / 2), "second": Adds(small), "first": Adds(1.5)}
    net = Toy(lambda module, x: module.tied(module.second(module.tied(module.first(x)))), **layers)
    batch = rows(4)
    loss = lambda y, target: y.mean()  # noqa: E731
    model, params, _ = fpipe.from_module(copy.deepcopy(net), loss=loss, batch=batch, cuts=["first"])
    program = updating_program(model, fpipe.schedules.one_f_one_b(2), "SGD", 0.1, grads=True)
    result = fpipe.build(program, model, **options)(params, batch, opt=fpipe.optimizer_state(program, params), lr=0.1)
    loss(net(batch[0]), batch[1]).backward()
    backwards = nn.utils.get_total_norm([leaf.grad for leaf in reversed([*net.parameters()])])
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert norm != backwards == 1.5
    reference = fpipe.reference(model, params, batch, microbatches=4, rule="SGD", clip=0.1, lr=0.1)
    assert result.norm == reference.norm == fpipe.global_norm(result.grads, model=model) == norm
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert all(torch.equal(join_stages(result.params)[name], leaf) for name, leaf in net.named_parameters())


GROUPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "by name": ("AdamW", {"weight_decay": 0.3}, {"*bias": {"weight_decay": 0.0}, "3.*": {"lr_scale": 0.5}}),
    # Settings of the first group were taken over where others said nothing.
    "a first one alone": ("SGD", {}, {"*weight": {"weight_decay": 0.3}}),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_first_group_that_fits_a_name_gives_its_settings(case: str):
    (rule, settings, groups), (model, params, _), net, batch = GROUPS[case], NET_IN_FOUR, net_of(), rows(8)
    program = updating_program(model, fpipe.schedules.gpipe(2), rule, None, groups=groups, **settings)
    result = fpipe.build(program, model)(params, batch, opt=fpipe.optimizer_state(program, params), lr=0.01)
    assign_grads_by_hand(net, batch)
    param_groups = list[dict[str, Any]]()
    for name, leaf in net.named_parameters():
        group = next((dict(group) for pattern, group in groups.items() if fnmatch(name, pattern)), {})
        param_groups.append({"params": [leaf], "lr": 0.01 * group.pop("lr_scale", 1.0)} | settings | group)
    optimizer = getattr(torch.optim, rule)(param_groups, lr=0.01, foreach=False)
    optimizer.step()
    assert differences(net, optimizer, result) == []


@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}], ids=str)
def test_settings_that_the_program_leaves_open_are_inputs_of_a_step(options: dict[str, Any]):
    (model, params, _), net, batch, decays = NET, net_of(), rows(8), [0.3, 0.2, None]
    groups = {"*bias": {"weight_decay": 0.0}}
    program = fpipe.steps(3)(updating_program(model, fpipe.schedules.one_f_one_b(2), "AdamW", None, groups=groups))
    rates = [0.01 if decay is None else {"lr": 0.01, "weight_decay": decay} for decay in decays]
    opt = fpipe.optimizer_state(program, params)
    result = fpipe.build(program, model, **options)(params, [batch] * 3, opt=opt, lr=rates)
    weights, biases = ([leaf for leaf in net.parameters() if leaf.ndim == ndim] for ndim in (2, 1))
    group_of_biases = {"params": biases, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": weights}, group_of_biases], lr=0.01, foreach=False)
    for decay in decays:
        optimizer.param_groups[0]["weight_decay"] = 0.01 if decay is None else decay
        assign_grads_by_hand(net, batch)
        optimizer.step()
    assert differences(net, optimizer, result) == []
    fpipe.verify(program, model, params, [batch] * 3, lr=rates)


def test_a_parameter_without_a_gradient_stays_as_torch_leaves_it():
    model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).pow(2).mean())
    params = ({"w": torch.tensor(2.0), "unused": torch.tensor(5.0), "count": torch.tensor(3)},)
    program = updating_program(model, fpipe.schedules.gpipe(1), "AdamW", None, weight_decay=0.3)
    opt = fpipe.optimizer_state(program, params)
    for trace in (True, False):
        step = fpipe.build(program, model, trace=trace)
        result = step(params, (torch.ones(4), torch.zeros(4)), opt=opt, lr=0.1)
        assert result.params[0]["unused"].item() == 5.0
        assert result.params[0]["count"].item() == 3
        assert result.params[0]["w"].item() != 2.0
        assert result.opt[0]["unused"]["step"].item() == 0


def test_a_rate_is_a_number_a_tensor_or_a_setting():
    model, params = NET[:2]
    programs = (updating_program(model, fpipe.schedules.gpipe(2), "SGD", **options) for options in ({}, {"lr": 0.2}))
    step, fixed = (fpipe.build(program, model) for program in programs)
    opt = fpipe.optimizer_state(updating_program(model, fpipe.schedules.gpipe(2), "SGD"), params)
    rates = *({"lr": lr} for lr in (0.2, torch.tensor(0.2), 0.1)), {}
    *equal_params, different_params, fixed_params = (
        (step if options else fixed)(params, rows(8), opt=opt, **options).params for options in rates
    )
    assert all(map(torch.equal, join_stages(equal_params[0]).values(), join_stages(equal_params[1]).values()))
    assert all(map(torch.equal, join_stages(equal_params[0]).values(), join_stages(fixed_params).values()))
    assert not torch.equal(join_stages(equal_params[0])["0.0.bias"], join_stages(different_params)["0.0.bias"])


def test_the_order_of_transforms_does_not_matter():
    base = fpipe.split(4)(fpipe.program(4))
    parts = (fpipe.schedules.interleaved(2), fpipe.split_backward(), fpipe.checkpoint())
    update = fpipe.chain(fpipe.merge(), fpipe.data_parallel(), fpipe.update("AdamW", clip=1.0))
    program = fpipe.chain(*parts, update)(base)
    assert program == fpipe.chain(update, *parts)(base) == fpipe.Program.parse(str(program))
    assert fpipe.chain(parts[0], update, *parts[1:])(base) == program
    for transform in (fpipe.communicate(), fpipe.free()):
        fpipe.check(transform(program))
    plain = fpipe.chain(*parts, fpipe.merge(), fpipe.data_parallel())(base)
    assert fpipe.forward_only()(program) == fpipe.forward_only()(plain)


def chain_after_split(*transforms: Any) -> object:
    return fpipe.chain(fpipe.split(4), *transforms)(fpipe.program(4))


MODEL = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).sum())
PARAMS, BATCH = ({"w": torch.tensor(3.0)},), (torch.ones(2), torch.ones(2))
NET, NET_IN_FOUR = cut_net(2), cut_net(4)
SQUARE, _, _ = fpipe.from_sequential(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))), 4, loss=MSE)


def program_of(rule: str, **settings: Any) -> fpipe.Program:
    return fpipe.update(rule, **settings)(fpipe.program(MODEL))


def step_once(opt: Any = None, lr: Any = None, rule: str = "SGD", **settings: Any) -> fpipe.Result:
    program = program_of(rule, **settings)
    if isinstance(opt, str):
        opt = fpipe.optimizer_state(program if opt == "own" else program_of(opt), PARAMS)
    params = copy.deepcopy(PARAMS)  # a rule may write in place: it is refused when it has
    return fpipe.build(program, MODEL)(params, BATCH, opt=opt, lr=lr)


def step_by_own_rule(rule: Any, **settings: Any) -> Any:
    """Return the parameter after one step by a custom rule."""
    fpipe.register_update("Own", rule)
    try:
        return step_once("own", lr=0.5, rule="Own", **settings).params[0]["w"]
    finally:
        fpipe.meaning.optimizers.rules.RULES.pop("Own")


def test_a_custom_rule_may_look_at_its_numbers():
    """Custom rules run outside of a trace, as torch's own do."""
    moved = step_by_own_rule(lambda p, g, s, lr: (p - lr * g if g.item() > 0 else p + 1, s))
    assert moved.item() == 3.0 - 0.5 * 2.0


def test_settings_are_those_of_torch():
    """The settings are listed in fpipe, since programs are written without torch."""
    for rule, names in SETTINGS.items():
        assert {*inspect.signature(getattr(torch.optim, rule)).parameters} - {"params"} <= {*names.split()}


test_refusals = refusals(
    globals(),
    """
chain_after_split(fpipe.update("SGD"))
    ProgramError: put fpipe.merge() before
chain_after_split(fpipe.merge(), fpipe.update("SGD"), fpipe.update("SGD"))
    ProgramError: updates its parameters already
chain_after_split(fpipe.merge(), fpipe.update("SGD"), fpipe.data_parallel())
    ProgramError: put fpipe.data_parallel() before fpipe.update()
chain_after_split(fpipe.merge(), fpipe.update("SGD"), fpipe.shard())
    ProgramError: put fpipe.shard() before fpipe.update()
fpipe.chain(fpipe.update("SGD"), fpipe.split(2))(fpipe.program(2))
    ProgramError: put fpipe.split() before fpipe.update()
chain_after_split(fpipe.place("linear"), fpipe.merge(), fpipe.communicate(), fpipe.update("SGD"))
    ProgramError: put fpipe.update() before fpipe.communicate
fpipe.chain(fpipe.forward_only(), fpipe.update("SGD"))(fpipe.program(2))
    ProgramError: this program has no gradients
fpipe.update("LBFGS")
    ValueError: calls the loss again
fpipe.update(torch.optim.SGD([torch.zeros(1)]))
    TypeError: stays outside of a program
fpipe.build(program_of("SGD"), MODEL)(PARAMS, BATCH, lambda: 0.0, lr=0.1)
    TypeError: a step calls no closure: it computes loss, gradients and update itself; leave it out
fpipe.update(type("AdamW", (torch.optim.AdamW,), {"__module__": "mine"}))
    ValueError: mine.AdamW is another optimizer than torch.optim.AdamW: fpipe.register_update
fpipe.update("Adm")
    ValueError: 'Adm' is no optimizer rule; did you mean Adam? fpipe.register_update adds one.
fpipe.update("newton")
    ValueError: 'newton' is no optimizer rule; known: SGD, Adam,
fpipe.update("SGD", momentun=0.9)
    ValueError: SGD takes no momentun=; it takes lr, max
fpipe.update("AdamW", groups={"*bias": {"weight_decayy": 0.1}})
    ValueError: AdamW takes no weight_decayy=
fpipe.update("AdamW", betas=0.9)
    ValueError: torch.optim.AdamW refuses its settings (betas=0.9): 'float' object is not subscriptable
fpipe.update("AdamW", groups={"*bias": {"lr": -1}}, eps=1e-6)
    ValueError: torch.optim.AdamW refuses its settings (eps=1e-06, lr=-1): Invalid learning rate: -1
fpipe.update("SGD", groups={"*bias": {"lr_scale": -1}})
    ValueError: refuses its settings (lr_scale=-1): Invalid learning rate: -1
fpipe.update("SGD", momentum=torch.ones(1))
    ValueError: a number, a text or a tuple
fpipe.update("SGD", clip=0)
    ValueError: clip is a norm, a number above 0
fpipe.build(updating_program(NET[0], fpipe.schedules.gpipe(2), "SGD", groups={"*bia": {"lr": 0.1}}), NET[0])
    ValueError: no parameter has a name like '*bia' of groups=; there are 0.0.weight
step_once(lr=0.1)
    ValueError: hand it in as step(..., opt=fpipe.optimizer_state
step_once("own")
    ValueError: lr: hand it in as step(..., lr=3e-4
step_once("own", lr=float("nan"))
    ValueError: lr is a finite number from 0; found nan
step_once("own", lr=-0.1)
    ValueError: lr is a finite number from 0; found -0.1
step_once("own", lr=torch.tensor(torch.inf))
    ValueError: lr is a finite number from 0; found inf
step_once("own", lr="1")
    TypeError: lr is a number or a 0-d tensor
step_once("own", lr={"weight_decay": 0.1})
    ValueError: found ['weight_decay']
step_once("own", lr={"lr": 0.1, "momentum": 0.9})
    ValueError: which this program leaves to its steps; found ['lr', 'momentum']. update() says
step_once("own", rule="Adagrad", lr={"lr": 0.1, "initial_accumulator_value": 0.1})
    ValueError: a dict of lr, lr_decay, weight_decay, eps, which
step_once("own", rule="Adadelta", lr={"lr": 0.1, "rho": 2.0})
    ValueError: torch.optim.Adadelta refuses its settings (rho=2.0): Invalid rho value: 2.0
step_once("own", lr={"lr": 0.1, "dampening": 0.5}, momentum=0.9, nesterov=True)
    ValueError: Nesterov momentum requires a momentum and zero dampening
step_once("Adam", lr=0.1)
    ValueError: has step, exp_avg, exp_avg_sq of w, and SGD keeps nothing
step_once(({},), lr=0.1)
    ValueError: opt of stage 0 has other leaves
step_once(({"w": {"step": torch.ones(()), "momentum_buffer": torch.ones(3)}},), lr=0.1, momentum=0.9)
    ValueError: has momentum_buffer of w in shape [3], and is of shape []
step_once(({"w": {"step": torch.ones(()), "momentum_buffer": torch.ones((), device="meta")}},), lr=0.1, momentum=0.9)
    ValueError: is on meta
fpipe.build(fpipe.program(MODEL), MODEL)(PARAMS, BATCH, opt=())
    ValueError: without fpipe.update() a program takes no opt=
fpipe.build(fpipe.program(MODEL), MODEL, donate=True)
    ValueError: donate= needs a program with fpipe.update()
fpipe.optimizer_state(fpipe.program(MODEL), PARAMS)
    ValueError: updates no parameters
fpipe.optimizer_state(program_of("SGD"), ())
    ValueError: each of the 1 stages
fpipe.optimizer_state(updating_program(NET[0], fpipe.schedules.gpipe(2), "Muon"), NET[1])
    ValueError: Muon is of matrices alone, and there is a parameter of shape [8]
fpipe.build(chain_after_split(fpipe.merge(), fpipe.shard(), fpipe.update("Muon")), SQUARE)
    ValueError: Muon looks at whole matrices
fpipe.optimizer_state(program_of("AdamW", capturable=True), PARAMS)
    ValueError: capturable=True is of parameters on an accelerator; these are on the CPU. Leave it out.
step_by_own_rule(lambda p, g, s, lr: (p, s), decay=0.1)
    ValueError: Own takes no decay=; it takes lr
step_by_own_rule(lambda p, g, s, lr: (p.sub_(g), s))
    ValueError: 'Own' mutates what it is
step_by_own_rule(lambda p, g, s, lr: p)
    ValueError: gives (param, state) back
step_by_own_rule(lambda p, g, s, lr: (p, {"m": g}))
    ValueError: with nothing in the dict as its start has
step_by_own_rule(lambda p, g, s, lr: (p[None], s))
    ValueError: of shape [1] of one
""",
)


def differences_on_rank(rank: int, schedule: str, stages: int, clip: float | None, donate: bool = False) -> list[str]:
    """Name this rank's tensors that differ from torch's loop after three steps, or moved although they were donated."""
    net, batch, lrs = net_of(), rows(8), [0.02, 0.01, 0.003]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=stages, loss=MSE)
    ranks = 1 if schedule == "roundpipe" else 2  # and the one that holds the weights
    program = updating_program(model, fpipe.schedules.get(schedule)(ranks), "AdamW", clip)
    local_params = local_part(program, rank, params)
    opt = fpipe.optimizer_state(program, local_params)
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch), donate=donate)
    losses, norms, optimizer = run_torch_loop(net, batch, 3, "AdamW", clip, lrs)
    initial_addresses = addresses((local_params, opt))
    for lr in lrs:
        rate = {"lr": lr, "weight_decay": 0.01} if schedule == "zb_h1" else lr
        result = step(local_params, batch, opt=opt, lr=rate)
        local_params, opt = result.params, result.opt
    differing = ["memory"] * (donate and addresses((local_params, opt)) != initial_addresses)
    differing += ["loss"] * (isinstance(result.loss, Tensor) and not torch.equal(result.loss, losses[-1]))
    differing += ["norm"] * (result.norm is not None and not torch.equal(result.norm, norms[-1]))
    return differing + differences(net, optimizer, result)


@pytest.mark.parametrize(
    ("schedule", "stages", "clip", "donate"),
    [
        ("one_f_one_b", 2, None, True),
        ("interleaved", 4, 0.05, False),
        ("zb_h1", 2, 100.0, False),
        ("zbv", 4, 0.05, False),
        ("dualpipe", 2, 0.05, False),
        ("roundpipe", 4, 0.05, True),
    ],
)
def test_two_processes_have_the_bits_of_torchs_loop(
    pair: Processes, schedule: str, stages: int, clip: float | None, donate: bool
):
    computes_alone = ["nothing"] * (schedule == "roundpipe")  # all weights are at home on the other rank
    assert pair.run(differences_on_rank, schedule, stages, clip, donate) == [computes_alone, []]


def differences_on_shards(rank: int, gather: str, clip: float | None, steps: int) -> list[str]:
    """Name the joined shards that differ from torch's loop over all replicas' rows: in a bit, or by more than rounding
    if clipped, since norms are added in another order."""
    _, replica, _ = meshed()
    net, batches = net_of(), [tuple(half.chunk(2)[index] for half in rows(16)) for index in range(2)]
    net[1].append(
        Toy(lambda module, x: x * module.by, by=nn.Parameter(torch.tensor(1.5)))
    )  # which all replicas have whole
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=4, loss=MSE)
    transforms = [fpipe.shard(gather=gather)]  # type: ignore[arg-type]
    program = fpipe.steps(steps)(updating_program(model, fpipe.schedules.interleaved(2), "AdamW", clip, *transforms))
    batch = batches[replica] if steps == 1 else [batches[replica]] * steps
    step, shards = started(model, params, program, batch)
    opt = fpipe.optimizer_state(program, shards)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    norms = []
    for _ in range(2):
        result = step(shards, batch, opt=opt, lr=0.01)
        shards, opt = result.params, result.opt
        for _ in range(steps):
            _, grads = by_hand(net, batches, 4)
            for name, leaf in net.named_parameters():
                leaf.grad = grads[name]
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip or float("inf"), foreach=False))
            optimizer.step()
    are_close = torch.equal if clip is None else torch.allclose
    differing = list[str]()
    for name, leaf in net.named_parameters():
        if name in join_stages(shards):
            differing += [name] * (not are_close(join_stages(shards)[name].full_tensor(), leaf))
            square_shards = join_stages(opt)[name]["exp_avg_sq"]
            differing += [f"{name}: sq"] * (
                not are_close(square_shards.full_tensor(), optimizer.state[leaf]["exp_avg_sq"])
            )
    norms_of_result = result.norm if isinstance(result.norm, tuple) else (result.norm,)
    differing += ["norm"] * (norms_of_result[-1] is not None and not torch.allclose(norms_of_result[-1], norms[-1]))
    return differing + ["nothing"] * (not join_stages(shards))


@pytest.mark.parametrize(
    ("gather", "clip", "steps"),
    [("step", None, 1), ("use", None, 1), ("use", 0.05, 1), ("step", 0.05, 2), ("use", None, 2)],
)
def test_shards_are_updated_as_whole_parameters_are(four: Processes, gather: str, clip: float | None, steps: int):
    assert four.run(differences_on_shards, gather, clip, steps) == [[]] * 4


def addresses(per_stage: Any) -> list[int]:
    return [leaf.data_ptr() for leaf in fpipe.tree.leaves(per_stage) if leaf is not None]


@pytest.mark.crossed
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1", "interleaved", "roundpipe", "dualpipe"])
@pytest.mark.parametrize("runtime", ["local", "threads"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_donated_tensors_are_overwritten_with_the_same_bits(schedule: str, runtime: Any, clip: float | None):
    net, batch, lrs = net_of(), rows(8), [0.02, 0.01, 0.003]
    stages = 2 if schedule in ("one_f_one_b", "dualpipe") else 4
    pipeline_net = copy.deepcopy(net)
    model, params, _ = fpipe.from_sequential(pipeline_net, stages=stages, loss=MSE)
    program = updating_program(model, fpipe.schedules.get(schedule)(2), "AdamW", clip)
    step = fpipe.build(program, model, runtime=runtime, donate=True)
    opt = fpipe.optimizer_state(program, params)
    _, _, optimizer = run_torch_loop(net, batch, 3, "AdamW", clip, lrs)
    for lr in lrs:
        result = step(params, batch, opt=opt, lr=lr)
        if schedule != "dualpipe" or runtime == "local":  # under DualPipe each of two ranks is handed back its own
            assert addresses((result.params, result.opt)) == addresses((params, opt))
        params, opt = result.params, result.opt
    assert differences(net, optimizer, result) == []
    if schedule == "interleaved":  # parameters are the net's own
        assert all(
            torch.equal(leaf, dict(net.named_parameters())[name]) for name, leaf in pipeline_net.named_parameters()
        )


def test_a_donated_version_that_is_read_later_is_kept():
    net = net_of()
    model, params, _ = fpipe.from_sequential(net, stages=4, loss=MSE)
    torch.manual_seed(1)
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(4)]
    parts = fpipe.split(4), fpipe.merge(outputs=False), fpipe.update("AdamW", clip=0.05)
    program = fpipe.chain(*parts, fpipe.schedules.pipedream_2bw(4, steps=4))(fpipe.program(model))
    pure = fpipe.build(program, model)(params, batches, opt=fpipe.optimizer_state(program, params), lr=0.1)
    step = fpipe.build(program, model, donate=True)
    result = step(params, batches, opt=fpipe.optimizer_state(program, params), lr=0.1)
    assert all(map(torch.equal, fpipe.tree.leaves(result.params), fpipe.tree.leaves(pure.params)))


def test_a_failed_step_says_that_donated_tensors_are_gone():
    calls = []

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return (y - t).pow(2).mean()

    def failing_rule(param: Tensor, grad: Tensor, state: Any, lr: float) -> Any:
        calls.append(lr)
        if lr > 1:
            raise ArithmeticError("no such rate")
        return param - lr * grad, state

    fpipe.register_update("Boom", failing_rule)
    try:
        model = fpipe.from_functions([lambda p, x: x * p["w"]] * 2, loss)
        params = ({"w": torch.tensor(3.0)}, {"w": torch.tensor(2.0)})
        program = updating_program(model, fpipe.schedules.gpipe(2), "Boom")
        step = fpipe.build(program, model, donate=True)
        opt = fpipe.optimizer_state(program, params)
        step(params, (torch.ones(4), torch.ones(4)), opt=opt, lr=0.1)
        with pytest.raises(ArithmeticError) as error_info:
            step(params, (torch.ones(4), torch.ones(4)), opt=opt, lr=2.0)
        assert any("were donated to this step" in note for note in error_info.value.__notes__)
    finally:
        fpipe.meaning.optimizers.rules.RULES.pop("Boom")


def test_sizes_count_the_memory_of_an_update():
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    batch, weight_bytes = (torch.randn(4, 64), torch.randn(4, 64)), 64 * 64 * 4
    program = updating_program(model, fpipe.schedules.gpipe(2), "AdamW")
    pure, donated = (fpipe.sizes(program, model, params, batch, donate=donate) for donate in (False, True))
    grads = fpipe.sizes(updating_program(model, fpipe.schedules.gpipe(2), "SGD"), model, params, batch, donate=True)
    for rank in range(2):
        assert pure.peak[rank] >= 4 * weight_bytes  # the gradient, and parameters and two moments once more
        assert donated.peak[rank] < 2 * weight_bytes
        assert donated.peak[rank] == grads.peak[rank]


def test_an_update_is_profiled_and_timed():
    model, params, _ = NET
    costs = fpipe.profile(updating_program(model, fpipe.schedules.gpipe(2), "AdamW"), model, params, rows(8))
    assert all(seconds > 0 for seconds in costs.update)  # type: ignore[union-attr]


def test_matrices_are_updated_by_muon_as_torch_does():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    program = updating_program(model, fpipe.schedules.gpipe(2), "Muon")
    opt, step = fpipe.optimizer_state(program, params), fpipe.build(program, model)
    optimizer = torch.optim.Muon(net.parameters(), lr=0.01)
    for _ in range(2):
        result = step(params, rows(8), opt=opt, lr=0.01)
        params, opt = result.params, result.opt
        assign_grads_by_hand(net, rows(8))
        optimizer.step()
    assert differences(net, optimizer, result) == []
    assert fpipe.verify(program, model, params, rows(8), opt=opt, lr=0.01).bitwise


def test_updates_keep_no_tensor_of_a_step():
    """The optimizer of the thread kept the last parameters, and their memory, until its next step."""
    model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=nn.functional.mse_loss)
    program = fpipe.chain(fpipe.merge(), fpipe.update("AdamW"))(fpipe.program(model))
    params, batch = ({"w": torch.ones(4)},), (torch.ones(2, 4), torch.zeros(2, 4))
    step, opt = fpipe.build(program, model), fpipe.optimizer_state(program, params)
    result = step(params, batch, opt=opt, lr=torch.tensor(0.1))
    references = [weakref.ref(leaf) for leaf in fpipe.tree.leaves((result.params, result.opt))]
    del result
    assert not any(reference() is not None for reference in references)
