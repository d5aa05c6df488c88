"""A Trainer of transformers trains a pipeline with the bits of its own, on one process and on several."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fpipe
from tests.processes import Processes, free_port, processes

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from fpipe.integrations.transformers import Pipeline, PipelineTrainer, from_pretrained_by_stage  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*pin_memory")
pair = processes(2)


def make_net(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": dropout}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, **heads))


def dataset() -> list[dict[str, torch.Tensor]]:
    """Return rows of unlike lengths, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(32):
        ids = torch.randint(0, 64, (10,), generator=generator)
        labels = torch.where(torch.arange(10) < 5 + index % 5, ids, -100)
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()})
    return rows


def arguments(folder: Path, rows: int, accumulation: int = 1, **options: Any) -> Any:
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    rates = {"learning_rate": 1e-2, "max_steps": 3, "max_grad_norm": 0.5, "seed": 3, "optim": "adamw_torch"}
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    return transformers.TrainingArguments(str(folder), **{**quiet, **rates, **sizes, **options})


def logged(trainer: Any) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


def join_process(rank: int, size: int) -> None:
    """Set what torchrun would, for accelerate."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost"}
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train by transformers alone, microbatches as accumulated batches."""
    options = arguments(tmp_path_factory.mktemp("plain"), 2, accumulation=4)
    trainer = transformers.Trainer(make_net(), options, train_dataset=dataset())
    trainer.train()
    return trainer


def test_a_pipeline_in_one_process_has_the_bits_of_the_trainer(plain: Any, tmp_path: Path):
    pipeline_net = make_net()
    options = {"train_dataset": dataset(), "eval_dataset": dataset()[:4]}
    pipeline = Pipeline("zb_h1", stages=2, microbatches=4)
    trainer = PipelineTrainer(pipeline_net, arguments(tmp_path / "pipeline", 8), **options, pipeline=pipeline)
    trainer.train()
    assert logged(trainer) == logged(plain)
    assert all(map(torch.equal, pipeline_net.parameters(), plain.model.parameters()))
    expected = plain.evaluate(dataset()[:4])["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    # A last batch of fewer rows than microbatches, and one of rows that microbatches share out unequally.
    for rows in (11, 14):
        expected = plain.evaluate(dataset()[:rows])["eval_loss"]
        assert trainer.evaluate(dataset()[:rows])["eval_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.deep
def test_accumulated_batches_are_added(plain: Any, tmp_path: Path):
    """They add up pairs of microbatches first, and so in another order."""
    options = arguments(tmp_path, 4, accumulation=2)
    pipeline = Pipeline(stages=2, microbatches=2)
    trainer = PipelineTrainer(make_net(), options, train_dataset=dataset(), pipeline=pipeline)
    trainer.train()
    torch.testing.assert_close(torch.tensor(logged(trainer)), torch.tensor(logged(plain)), rtol=1e-5, atol=0)


def example() -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in dataset()[:8]]) for name in dataset()[0]}


def test_a_rank_loads_its_stages_alone(tmp_path: Path):
    net = make_net()
    net.save_pretrained(tmp_path)
    loaded = from_pretrained_by_stage(tmp_path, Pipeline(ranks=2), batch=example(), rank=1)
    parameters = dict(net.named_parameters())
    local = {name: leaf for name, leaf in loaded.named_parameters() if not leaf.is_meta}
    assert len(local) == 11
    assert "lm_head.weight" in local
    assert all(torch.equal(leaf, parameters[name]) for name, leaf in local.items())
    assert torch.equal(loaded.model.rotary_emb.inv_freq, net.model.rotary_emb.inv_freq)


def train_stages(rank: int, folder: Path, by_stage: bool, stopped: bool) -> tuple[list[Any], float]:
    """Train two stages of two processes, from a checkpoint if `stopped`; return losses, norms and a held-out loss."""
    join_process(rank, 2)
    pipeline = Pipeline(ranks=2, microbatches=4)
    net = from_pretrained_by_stage(folder / "start", pipeline, batch=example()) if by_stage else make_net()
    options = arguments(folder / "run", 8, save_strategy="steps", save_steps=2)
    trainer = PipelineTrainer(net, options, train_dataset=dataset(), pipeline=pipeline)
    trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2") if stopped else None)
    trainer.save_model(str(folder / "end"))
    assert len([leaf for leaf in net.parameters() if not leaf.is_meta and leaf.isfinite().all()]) == 10 + rank
    with pytest.raises(ValueError, match="logits and metrics need one process"):
        trainer.predict(dataset()[:8])
    return logged(trainer), trainer.evaluate(dataset()[:8])["eval_loss"]


@pytest.mark.parametrize("by_stage", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_two_processes_have_the_bits_of_the_trainer(pair: Processes, plain: Any, tmp_path: Path, by_stage: bool):
    make_net().save_pretrained(tmp_path / "start")
    for stopped in (False, True) if by_stage else (False,):
        for logs, loss in pair.run(train_stages, tmp_path, by_stage, stopped):
            assert logs == logged(plain)
            assert loss == pytest.approx(plain.evaluate(dataset()[:8])["eval_loss"], rel=1e-6)
        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "end")
        assert all(map(torch.equal, saved.parameters(), plain.model.parameters()))


def train_adapters(rank: int, folder: Path) -> list[Any]:
    join_process(rank, 2)
    trainer = PipelineTrainer(
        with_adapters(), arguments(folder, 8), train_dataset=dataset(), pipeline=Pipeline(ranks=2, microbatches=4)
    )
    trainer.train()
    trainer.save_model(str(folder / "end"))
    return logged(trainer)


def with_adapters() -> Any:
    import peft

    net = make_net()
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(net, config)


def test_adapters_over_a_frozen_base_are_trained_and_saved_as_peft_does(pair: Processes, tmp_path: Path):
    peft = pytest.importorskip("peft")
    net = with_adapters()
    plain_adapters = transformers.Trainer(net, arguments(tmp_path / "plain", 2, 4), train_dataset=dataset())
    plain_adapters.train()
    assert pair.run(train_adapters, tmp_path) == [logged(plain_adapters)] * 2
    saved = peft.PeftModel.from_pretrained(make_net(), tmp_path / "end")
    assert all(map(torch.equal, saved.parameters(), net.parameters()))


def train_replicas(rank: int, folder: Path) -> list[Any]:
    join_process(rank, 2)
    pipeline = Pipeline(ranks=1, stages=2, microbatches=2)
    trainer = PipelineTrainer(make_net(), arguments(folder, 4), train_dataset=dataset(), pipeline=pipeline)
    trainer.train()
    return logged(trainer)


@pytest.mark.deep
def test_replicas_train_on_rows_of_their_own(pair: Processes, plain: Any, tmp_path: Path):
    """Their gradients are added in another order."""
    for logs in pair.run(train_replicas, tmp_path):
        torch.testing.assert_close(torch.tensor(logs), torch.tensor(logged(plain)), rtol=1e-5, atol=0)


def test_options_that_a_pipeline_lacks_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="PipelineTrainer has no compute_loss_func"):
        PipelineTrainer(make_net(), arguments(tmp_path, 4), compute_loss_func=lambda *_: 0, train_dataset=dataset())
    with pytest.raises(ValueError, match="PipelineTrainer has no torch_compile"):
        PipelineTrainer(make_net(), arguments(tmp_path, 4, torch_compile=True), train_dataset=dataset())


class NormalizedRegression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layers(x), labels)}


def test_module_state_is_refused(tmp_path: Path):
    """The running statistics of a batch norm were dropped after each step, without a word."""
    rows = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(8)]
    pipeline = Pipeline(cuts=["layers.1"])
    trainer = PipelineTrainer(NormalizedRegression(), arguments(tmp_path, 8), train_dataset=rows, pipeline=pipeline)
    with pytest.raises(ValueError, match=r"keeps no module state, and the net has layers\.1\.num_batches_tracked"):
        trainer.train()


def test_gradients_of_several_steps_are_added_to_those_of_a_net():
    """A second call of assign_grads in one accumulation used to keep the last gradients alone."""
    net = torch.nn.Linear(2, 1)
    grads = ({"weight": torch.ones(1, 2), "bias": torch.ones(1)},)
    fpipe.assign_grads(net, grads, add=True)
    fpipe.assign_grads(net, ({"weight": torch.ones(1, 2), "bias": None},), add=True)
    assert net.weight.grad.tolist() == [[2, 2]]
    assert net.bias.grad.tolist() == [1]
    fpipe.assign_grads(net, grads)
    assert net.weight.grad.tolist() == [[1, 1]]
