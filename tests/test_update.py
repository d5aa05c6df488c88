"""The optimizer as a part of the program: what a step returns is what torch's own loop makes of the parameters."""

from __future__ import annotations

import copy
import inspect
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.meaning.optimizers.rule_names import SETTINGS
from tests.processes import Processes
from tests.refusals import refusals
from tests.test_data_parallel import by_hand, meshed, started
from tests.test_distributed import MSE, own, rows
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


def updating(model: Any, schedule: Any, rule: str, clip: float | None = None, *more: Any, **settings: Any) -> Any:
    update = fpipe.update(rule, clip=clip, **settings)
    return fpipe.chain(fpipe.split(4), schedule, fpipe.merge(outputs=False), *more, update)(fpipe.program(model))


def torchs_loop(
    net: nn.Module, batch: Any, steps: int, rule: str, clip: float | None, lrs: Any, **settings: Any
) -> tuple[list[Tensor], list[Tensor], torch.optim.Optimizer]:
    """Losses, norms and the optimizer of some steps with torch alone, which train the net."""
    optimizer = getattr(torch.optim, rule)(net.parameters(), lr=1.0, foreach=False, **settings)
    losses, norms = [], []
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = lrs[number]
        optimizer.zero_grad()
        loss, _ = by_hand_into(net, batch)
        losses.append(loss)
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), float("inf") if clip is None else clip, foreach=False))
        optimizer.step()
    return losses, norms, optimizer


def by_hand_into(net: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of four microbatches, and the gradients in the net."""
    loss, grads = by_hand(net, [batch], 4)
    for name, leaf in net.named_parameters():
        leaf.grad = grads[name]
    return loss, grads


def joined(per_stage: Any) -> dict[str, Any]:
    return {name: leaf for stage in per_stage if stage is not None for name, leaf in stage.items()}


def differences(net: nn.Module, optimizer: Any, result: fpipe.Result) -> list[str]:
    """The names of parameters, and of what is kept of them, that differ in a bit."""
    params, opt = joined(result.params), joined(result.opt)
    wrong = list[str]()
    for name, leaf in net.named_parameters():
        if name in params:
            wrong += [name] * (not torch.equal(params[name], leaf))
            kept = {word: one for word, one in optimizer.state[leaf].items() if isinstance(one, Tensor)}
            wrong += [f"{name}: {word}" for word, one in kept.items() if not torch.equal(opt[name][word], one)]
    return wrong + ["nothing"] * (not params)


@pytest.mark.crossed
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("rule", RULES)
def test_steps_have_the_bits_of_torchs_own_loop(rule: str, clip: str):
    (name, settings), lrs = RULES[rule], [0.02, 0.01, 0.003]
    net, batch = net_of(), rows(8)
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=4, loss=MSE)
    program = updating(model, fpipe.schedules.interleaved(2), name, CLIPS[clip], **settings)
    opt = fpipe.optimizer_state(program, params)
    step = fpipe.build(program, model)
    losses, norms, optimizer = torchs_loop(net, batch, 3, name, CLIPS[clip], lrs, **settings)
    for lr, loss, norm in zip(lrs, losses, norms, strict=True):
        result = step(params, batch, opt=opt, lr=lr)
        assert torch.equal(result.loss, loss)
        assert CLIPS[clip] is None or torch.equal(result.norm, norm)
        params, opt = result.params, result.opt
    assert differences(net, optimizer, result) == []


def tied() -> Toy:
    layers = {"embed": nn.Embedding(7, 8), "mid": nn.Linear(8, 8), "head": nn.Linear(8, 7, bias=False)}
    net = Toy(lambda own, x: own.head(own.mid(own.embed(x)).tanh()), **layers)
    net.head.weight = net.embed.weight
    return net


def test_a_tied_leaf_is_updated_and_counted_once():
    torch.manual_seed(0)
    net, ids = tied(), torch.randint(0, 7, (8,))
    mine = copy.deepcopy(net)
    model, params, _ = fpipe.from_module(mine, 2, loss=nn.functional.cross_entropy, example=(ids, ids))
    program = updating(model, fpipe.schedules.one_f_one_b(2), "AdamW", 0.1)
    result = fpipe.build(program, model)(params, (ids, ids), opt=fpipe.optimizer_state(program, params), lr=0.1)
    # The gradient of a tied leaf: over the microbatches of each use, and then over the uses.
    plain = fpipe.reference(model, params, (ids, ids), microbatches=4)
    fpipe.assign_grads(net, plain.grads)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    optimizer.step()
    assert torch.equal(result.norm, norm)
    assert differences(net, optimizer, result) == []


class Adds(nn.Module):
    """Adds a parameter times a factor, which is then its gradient under the mean."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor, self.weight = factor, nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * self.factor


@pytest.mark.parametrize("how", [{}, {"trace": False}, {"runtime": "threads"}], ids=str)
def test_a_norm_is_stacked_in_the_order_of_the_net_and_not_of_its_stages(how: dict[str, Any]):
    """Two numbers are lost next to 1.5, unless they come first. Leaves of a stage were stacked in the order of their
    use, and stages one after the other: the norm was one bit off that of `clip_grad_norm_`."""
    small = 0.000345
    layers = {"tied": Adds(small / 2), "second": Adds(small), "first": Adds(1.5)}
    net = Toy(lambda own, x: own.tied(own.second(own.tied(own.first(x)))), **layers)
    batch = rows(4)
    loss = lambda y, target: y.mean()  # noqa: E731
    model, params, _ = fpipe.from_module(copy.deepcopy(net), loss=loss, example=batch, cuts=["first"])
    program = updating(model, fpipe.schedules.one_f_one_b(2), "SGD", 0.1, grads=True)
    result = fpipe.build(program, model, **how)(params, batch, opt=fpipe.optimizer_state(program, params), lr=0.1)
    loss(net(batch[0]), batch[1]).backward()
    backwards = nn.utils.get_total_norm([leaf.grad for leaf in reversed([*net.parameters()])])
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert norm != backwards == 1.5
    plain = fpipe.reference(model, params, batch, microbatches=4, rule="SGD", clip=0.1, lr=0.1)
    assert result.norm == plain.norm == fpipe.global_norm(result.grads, model=model) == norm
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert all(torch.equal(joined(result.params)[name], leaf) for name, leaf in net.named_parameters())


GROUPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "by name": ("AdamW", {"weight_decay": 0.3}, {"*bias": {"weight_decay": 0.0}, "3.*": {"lr_scale": 0.5}}),
    # Settings of the first group were taken over where others said nothing.
    "a first one alone": ("SGD", {}, {"*weight": {"weight_decay": 0.3}}),
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups_have_settings_by_name_and_the_first_that_fits_counts(case: str):
    (rule, settings, groups), net, batch = GROUPS[case], net_of(), rows(8)
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=4, loss=MSE)
    program = updating(model, fpipe.schedules.gpipe(2), rule, None, groups=groups, **settings)
    result = fpipe.build(program, model)(params, batch, opt=fpipe.optimizer_state(program, params), lr=0.01)
    by_hand_into(net, batch)
    each = list[dict[str, Any]]()
    for name, leaf in net.named_parameters():
        said = next((dict(said) for pattern, said in groups.items() if fnmatch(name, pattern)), {})
        each.append({"params": [leaf], "lr": 0.01 * said.pop("lr_scale", 1.0)} | settings | said)
    optimizer = getattr(torch.optim, rule)(each, lr=0.01, foreach=False)
    optimizer.step()
    assert differences(net, optimizer, result) == []


@pytest.mark.parametrize("how", [{}, {"trace": False}, {"runtime": "threads"}], ids=str)
def test_other_numbers_of_a_rule_are_inputs_of_a_step_where_the_program_does_not_say_them(how: dict[str, Any]):
    net, batch, decays = net_of(), rows(8), [0.3, 0.2, None]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    groups = {"*bias": {"weight_decay": 0.0}}
    program = fpipe.steps(3)(updating(model, fpipe.schedules.one_f_one_b(2), "AdamW", None, groups=groups))
    rates = [0.01 if decay is None else {"lr": 0.01, "weight_decay": decay} for decay in decays]
    opt = fpipe.optimizer_state(program, params)
    result = fpipe.build(program, model, **how)(params, [batch] * 3, opt=opt, lr=rates)
    weights, biases = ([leaf for leaf in net.parameters() if leaf.ndim == ndim] for ndim in (2, 1))
    plain = {"params": biases, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": weights}, plain], lr=0.01, foreach=False)
    for decay in decays:
        optimizer.param_groups[0]["weight_decay"] = 0.01 if decay is None else decay
        by_hand_into(net, batch)
        optimizer.step()
    assert differences(net, optimizer, result) == []
    fpipe.verify(program, model, params, [batch] * 3, lr=rates)


def test_a_parameter_without_a_gradient_stays_as_torch_leaves_it():
    model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).pow(2).mean())
    params = ({"w": torch.tensor(2.0), "unused": torch.tensor(5.0), "count": torch.tensor(3)},)
    program = updating(model, fpipe.schedules.gpipe(1), "AdamW", None, weight_decay=0.3)
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
    programs = (updating(model, fpipe.schedules.gpipe(2), "SGD", **how) for how in ({}, {"lr": 0.2}))
    step, fixed = (fpipe.build(program, model) for program in programs)
    opt = fpipe.optimizer_state(updating(model, fpipe.schedules.gpipe(2), "SGD"), params)
    given = *({"lr": lr} for lr in (0.2, torch.tensor(0.2), 0.1)), {}
    *same, other, said = ((step if how else fixed)(params, rows(8), opt=opt, **how).params for how in given)
    assert all(map(torch.equal, joined(same[0]).values(), joined(same[1]).values()))
    assert all(map(torch.equal, joined(same[0]).values(), joined(said).values()))
    assert not torch.equal(joined(same[0])["0.0.bias"], joined(other)["0.0.bias"])


def test_the_order_of_transforms_does_not_matter():
    base = fpipe.split(4)(fpipe.program(4))
    parts = (fpipe.schedules.interleaved(2), fpipe.split_backward(), fpipe.checkpoint())
    update = fpipe.chain(fpipe.merge(), fpipe.data_parallel(), fpipe.update("AdamW", clip=1.0))
    first = fpipe.chain(*parts, update)(base)
    assert first == fpipe.chain(update, *parts)(base) == fpipe.Program.parse(str(first))
    assert fpipe.chain(parts[0], update, *parts[1:])(base) == first
    for more in (fpipe.communicate(), fpipe.free()):
        fpipe.check(more(first))
    plain = fpipe.chain(*parts, fpipe.merge(), fpipe.data_parallel())(base)
    assert fpipe.forward_only()(first) == fpipe.forward_only()(plain)


def after(*transforms: Any) -> object:
    return fpipe.chain(fpipe.split(4), *transforms)(fpipe.program(4))


MODEL = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).sum())
PARAMS, BATCH = ({"w": torch.tensor(3.0)},), (torch.ones(2), torch.ones(2))
NET = fpipe.from_sequential(net_of(), stages=2, loss=MSE)
SQUARE, _, _ = fpipe.from_sequential(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))), 4, loss=MSE)


def program_of(rule: str, **settings: Any) -> fpipe.Program:
    return fpipe.update(rule, **settings)(fpipe.program(MODEL))


def stepped(opt: Any = None, lr: Any = None, rule: str = "SGD", **settings: Any) -> fpipe.Result:
    program = program_of(rule, **settings)
    if isinstance(opt, str):
        opt = fpipe.optimizer_state(program if opt == "own" else program_of(opt), PARAMS)
    params = copy.deepcopy(PARAMS)  # a rule may write in place: it is refused when it has
    return fpipe.build(program, MODEL)(params, BATCH, opt=opt, lr=lr)


def own_rule(apply: Any, **settings: Any) -> Any:
    """The parameter after one step by a rule of one's own."""
    fpipe.register_update("Own", apply)
    try:
        return stepped("own", lr=0.5, rule="Own", **settings).params[0]["w"]
    finally:
        fpipe.meaning.optimizers.rules.RULES.pop("Own")


def test_a_rule_of_ones_own_may_look_at_its_numbers():
    """It runs outside of a trace, as torch's own do."""
    moved = own_rule(lambda p, g, s, lr: (p - lr * g if g.item() > 0 else p + 1, s))
    assert moved.item() == 3.0 - 0.5 * 2.0


def test_settings_are_those_of_torch():
    """They are listed, since a program is written without torch."""
    for rule, words in SETTINGS.items():
        assert {*inspect.signature(getattr(torch.optim, rule)).parameters} - {"params"} <= {*words.split()}


test_refusals = refusals(
    globals(),
    """
after(fpipe.update("SGD"))
    ProgramError: put fpipe.merge() before
after(fpipe.merge(), fpipe.update("SGD"), fpipe.update("SGD"))
    ProgramError: updates its parameters already
after(fpipe.merge(), fpipe.update("SGD"), fpipe.data_parallel())
    ProgramError: put fpipe.data_parallel() before fpipe.update()
after(fpipe.merge(), fpipe.update("SGD"), fpipe.shard())
    ProgramError: put fpipe.shard() before fpipe.update()
fpipe.chain(fpipe.update("SGD"), fpipe.split(2))(fpipe.program(2))
    ProgramError: put fpipe.split() before fpipe.update()
after(fpipe.place("linear"), fpipe.merge(), fpipe.communicate(), fpipe.update("SGD"))
    ProgramError: put fpipe.update() before fpipe.communicate
fpipe.chain(fpipe.forward_only(), fpipe.update("SGD"))(fpipe.program(2))
    ProgramError: no gradients to update by
fpipe.update("LBFGS")
    ValueError: calls the loss again
fpipe.update(torch.optim.SGD([torch.zeros(1)]))
    TypeError: stays outside of a program
fpipe.build(program_of("SGD"), MODEL)(PARAMS, BATCH, lambda: 0.0, lr=0.1)
    TypeError: a step calls no closure: it computes loss, gradients and update itself; leave it out
fpipe.update(type("AdamW", (torch.optim.AdamW,), {"__module__": "mine"}))
    ValueError: mine.AdamW is another optimizer than torch.optim.AdamW: fpipe.register_update
fpipe.update(lambda p, g, s, lr: (p, s))
    TypeError: found function. fpipe.register_update
fpipe.update("Adm")
    ValueError: 'Adm' is no rule of an optimizer; known: SGD, Adam,
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
    ValueError: a number, a word or a tuple
fpipe.update("SGD", clip=0)
    ValueError: clip is a norm, a number above 0
fpipe.update("SGD", groups="*bias")
    ValueError: groups is {pattern: settings}
fpipe.build(updating(NET[0], fpipe.schedules.gpipe(2), "SGD", groups={"*bia": {"lr": 0.1}}), NET[0])
    ValueError: no parameter has a name like '*bia' of groups=; there are 0.0.weight
stepped(lr=0.1)
    ValueError: hand it in as step(..., opt=fpipe.optimizer_state
stepped("own")
    ValueError: lr: hand it in as step(..., lr=3e-4
stepped("own", lr=float("nan"))
    ValueError: lr is a finite number from 0, such as 3e-4; found nan
stepped("own", lr=-0.1)
    ValueError: lr is a finite number from 0, such as 3e-4; found -0.1
stepped("own", lr=torch.tensor(torch.inf))
    ValueError: lr is a finite number from 0, such as 3e-4; found inf
stepped("own", lr="1")
    TypeError: lr is a number or a 0-d tensor
stepped("own", lr={"weight_decay": 0.1})
    ValueError: found ['weight_decay']
stepped("own", lr={"lr": 0.1, "momentum": 0.9})
    ValueError: which this program leaves to its steps; found ['lr', 'momentum']. update() says
stepped("own", rule="Adagrad", lr={"lr": 0.1, "initial_accumulator_value": 0.1})
    ValueError: a dict of lr, lr_decay, weight_decay, eps, which
stepped("own", rule="Adadelta", lr={"lr": 0.1, "rho": 2.0})
    ValueError: torch.optim.Adadelta refuses its settings (rho=2.0): Invalid rho value: 2.0
stepped("own", lr={"lr": 0.1, "dampening": 0.5}, momentum=0.9, nesterov=True)
    ValueError: Nesterov momentum requires a momentum and zero dampening
stepped("Adam", lr=0.1)
    ValueError: has step, exp_avg, exp_avg_sq of w, and SGD keeps nothing
stepped(({},), lr=0.1)
    ValueError: opt of stage 0 has other leaves
stepped(({"w": {"step": torch.ones(()), "momentum_buffer": torch.ones(3)}},), lr=0.1, momentum=0.9)
    ValueError: has momentum_buffer of w in shape [3], and is of shape []
stepped(({"w": {"step": torch.ones(()), "momentum_buffer": torch.ones((), device="meta")}},), lr=0.1, momentum=0.9)
    ValueError: is on meta
fpipe.build(fpipe.program(MODEL), MODEL)(PARAMS, BATCH, opt=())
    ValueError: updates no parameters, and takes no opt=
fpipe.build(fpipe.program(MODEL), MODEL, donate=True)
    ValueError: put fpipe.update() into it
fpipe.optimizer_state(fpipe.program(MODEL), PARAMS)
    ValueError: updates no parameters
fpipe.optimizer_state(program_of("SGD"), ())
    ValueError: each of the 1 stages
fpipe.optimizer_state(updating(NET[0], fpipe.schedules.gpipe(2), "Muon"), NET[1])
    ValueError: Muon is of matrices alone, and there is a parameter of shape [8]
fpipe.build(after(fpipe.merge(), fpipe.shard(), fpipe.update("Muon")), SQUARE)
    ValueError: Muon looks at whole matrices
fpipe.build(program_of("AdamW", capturable=True), MODEL)
    ValueError: takes no step with
own_rule(lambda p, g, s, lr: (p, s), decay=0.1)
    ValueError: Own takes no decay=; it takes lr
own_rule(lambda p, g, s, lr: (p.sub_(g), s))
    ValueError: 'Own' mutates what it is
own_rule(lambda p, g, s, lr: p)
    ValueError: gives (param, state) back
own_rule(lambda p, g, s, lr: (p, {"m": g}))
    ValueError: with nothing in the dict as its start has
own_rule(lambda p, g, s, lr: (p[None], s))
    ValueError: of shape [1] of one
""",
)


def on_two(rank: int, schedule: str, stages: int, clip: float | None, donate: bool = False) -> list[str]:
    """The names of this rank's parameters and state that differ from torch's loop after three steps, or that are
    elsewhere although they were donated."""
    net, batch, lrs = net_of(), rows(8), [0.02, 0.01, 0.003]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=stages, loss=MSE)
    ranks = 1 if schedule == "roundpipe" else 2  # and the one that holds the weights
    program = updating(model, fpipe.schedules.get(schedule)(ranks), "AdamW", clip)
    mine = own(program, rank, params)
    opt = fpipe.optimizer_state(program, mine)
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch), donate=donate)
    losses, norms, optimizer = torchs_loop(net, batch, 3, "AdamW", clip, lrs)
    before = addresses((mine, opt))
    for lr in lrs:
        rate = {"lr": lr, "weight_decay": 0.01} if schedule == "zb_h1" else lr
        result = step(mine, batch, opt=opt, lr=rate)
        mine, opt = result.params, result.opt
    wrong = ["memory"] * (donate and addresses((mine, opt)) != before)
    wrong += ["loss"] * (isinstance(result.loss, Tensor) and not torch.equal(result.loss, losses[-1]))
    wrong += ["norm"] * (result.norm is not None and not torch.equal(result.norm, norms[-1]))
    return wrong + differences(net, optimizer, result)


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
    assert pair.each(on_two, schedule, stages, clip, donate) == [computes_alone, []]


def on_four(rank: int, gather: str, clip: float | None, steps: int) -> list[str]:
    """The names of shards, put together, that differ from torch's loop over the rows of all replicas: in a bit, or
    where they are clipped by more than rounding, since norms are added in another order."""
    _, replica, _ = meshed()
    net, batches = net_of(), [tuple(half.chunk(2)[one] for half in rows(16)) for one in range(2)]
    net[1].append(Toy(lambda own, x: x * own.by, by=nn.Parameter(torch.tensor(1.5))))  # which all replicas have whole
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=4, loss=MSE)
    more = [fpipe.shard(gather=gather)]  # type: ignore[arg-type]
    program = fpipe.steps(steps)(updating(model, fpipe.schedules.interleaved(2), "AdamW", clip, *more))
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
    same = torch.equal if clip is None else torch.allclose
    wrong = list[str]()
    for name, leaf in net.named_parameters():
        if name in joined(shards):
            wrong += [name] * (not same(joined(shards)[name].full_tensor(), leaf))
            kept = joined(opt)[name]["exp_avg_sq"]
            wrong += [f"{name}: sq"] * (not same(kept.full_tensor(), optimizer.state[leaf]["exp_avg_sq"]))
    found = result.norm if isinstance(result.norm, tuple) else (result.norm,)
    wrong += ["norm"] * (found[-1] is not None and not torch.allclose(found[-1], norms[-1]))
    return wrong + ["nothing"] * (not joined(shards))


@pytest.mark.parametrize(
    ("gather", "clip", "steps"),
    [("step", None, 1), ("use", None, 1), ("use", 0.05, 1), ("step", 0.05, 2), ("use", None, 2)],
)
def test_shards_are_updated_as_the_whole_is(four: Processes, gather: str, clip: float | None, steps: int):
    assert four.each(on_four, gather, clip, steps) == [[]] * 4


def addresses(per_stage: Any) -> list[int]:
    return [leaf.data_ptr() for leaf in fpipe.tree.leaves(per_stage) if leaf is not None]


@pytest.mark.crossed
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1", "interleaved", "roundpipe", "dualpipe"])
@pytest.mark.parametrize("runtime", ["local", "threads"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_what_is_donated_is_overwritten_and_has_the_same_bits(schedule: str, runtime: Any, clip: float | None):
    net, batch, lrs = net_of(), rows(8), [0.02, 0.01, 0.003]
    stages = 2 if schedule in ("one_f_one_b", "dualpipe") else 4
    mine = copy.deepcopy(net)
    model, params, _ = fpipe.from_sequential(mine, stages=stages, loss=MSE)
    program = updating(model, fpipe.schedules.get(schedule)(2), "AdamW", clip)
    step = fpipe.build(program, model, runtime=runtime, donate=True)
    opt = fpipe.optimizer_state(program, params)
    _, _, optimizer = torchs_loop(net, batch, 3, "AdamW", clip, lrs)
    for lr in lrs:
        result = step(params, batch, opt=opt, lr=lr)
        if schedule != "dualpipe" or runtime == "local":  # under DualPipe each of two ranks is handed back its own
            assert addresses((result.params, result.opt)) == addresses((params, opt))
        params, opt = result.params, result.opt
    assert differences(net, optimizer, result) == []
    if schedule == "interleaved":  # parameters are the net's own
        assert all(torch.equal(leaf, dict(net.named_parameters())[name]) for name, leaf in mine.named_parameters())


def test_a_donated_version_that_is_read_later_is_kept():
    net = net_of()
    model, params, _ = fpipe.from_sequential(net, stages=4, loss=MSE)
    torch.manual_seed(1)
    each = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(4)]
    parts = fpipe.split(4), fpipe.merge(outputs=False), fpipe.update("AdamW", clip=0.05)
    program = fpipe.chain(*parts, fpipe.schedules.pipedream_2bw(4, steps=4))(fpipe.program(model))
    pure = fpipe.build(program, model)(params, each, opt=fpipe.optimizer_state(program, params), lr=0.1)
    step = fpipe.build(program, model, donate=True)
    found = step(params, each, opt=fpipe.optimizer_state(program, params), lr=0.1)
    assert all(map(torch.equal, fpipe.tree.leaves(found.params), fpipe.tree.leaves(pure.params)))


def test_a_step_that_fails_says_that_what_was_donated_is_gone():
    calls = []

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return (y - t).pow(2).mean()

    def boom(param: Tensor, grad: Tensor, state: Any, lr: float) -> Any:
        calls.append(lr)
        if lr > 1:
            raise ArithmeticError("no such rate")
        return param - lr * grad, state

    fpipe.register_update("Boom", boom)
    try:
        model = fpipe.from_functions([lambda p, x: x * p["w"]] * 2, loss)
        params = ({"w": torch.tensor(3.0)}, {"w": torch.tensor(2.0)})
        program = updating(model, fpipe.schedules.gpipe(2), "Boom")
        step = fpipe.build(program, model, donate=True)
        opt = fpipe.optimizer_state(program, params)
        step(params, (torch.ones(4), torch.ones(4)), opt=opt, lr=0.1)
        with pytest.raises(ArithmeticError) as failed:
            step(params, (torch.ones(4), torch.ones(4)), opt=opt, lr=2.0)
        assert any("were donated to this step" in note for note in failed.value.__notes__)
    finally:
        fpipe.meaning.optimizers.rules.RULES.pop("Boom")


def test_sizes_count_what_an_update_holds():
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    batch, one = (torch.randn(4, 64), torch.randn(4, 64)), 64 * 64 * 4
    program = updating(model, fpipe.schedules.gpipe(2), "AdamW")
    pure, donated = (fpipe.sizes(program, model, params, batch, donate=donate) for donate in (False, True))
    grads = fpipe.sizes(updating(model, fpipe.schedules.gpipe(2), "SGD"), model, params, batch, donate=True)
    for rank in range(2):
        assert pure.peak[rank] >= 4 * one  # the gradient, and parameters and two moments once more
        assert donated.peak[rank] < 2 * one
        assert donated.peak[rank] == grads.peak[rank]


def test_an_update_is_profiled_and_timed():
    model, params, _ = fpipe.from_sequential(net_of(), stages=2, loss=MSE)
    costs = fpipe.profile(updating(model, fpipe.schedules.gpipe(2), "AdamW"), model, params, rows(8))
    assert all(seconds > 0 for seconds in costs.update)  # type: ignore[union-attr]


def test_matrices_are_updated_by_muon_as_torch_does():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    program = updating(model, fpipe.schedules.gpipe(2), "Muon")
    opt, step = fpipe.optimizer_state(program, params), fpipe.build(program, model)
    optimizer = torch.optim.Muon(net.parameters(), lr=0.01)
    for _ in range(2):
        result = step(params, rows(8), opt=opt, lr=0.01)
        params, opt = result.params, result.opt
        by_hand_into(net, rows(8))
        optimizer.step()
    assert differences(net, optimizer, result) == []
    assert fpipe.verify(program, model, params, rows(8), opt=opt, lr=0.01).bitwise
