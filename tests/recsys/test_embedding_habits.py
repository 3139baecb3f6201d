"""Habits of training with torch: each works on tables as it does there, or the error names an alternative."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memhier.policies import LRU
from memhier.recsys import SGD, Adagrad, Adam, EmbeddingBag, EmbeddingBagCollection, EmbeddingBagConfig, RowWiseAdagrad

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIM = 30, 4
IDS = torch.tensor([[1, 2, 3], [3, 3, 29]])


def make(path: Path, **options: Any) -> EmbeddingBag:
    return EmbeddingBag(ROWS, DIM, mode="sum", dram="32MiB", path=path, **options)


def rows_of(bag: EmbeddingBag) -> Tensor:
    return bag.weights(np.arange(ROWS))


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_frozen_table_stays_as_it_is(tmp_path: Path, update: Any) -> None:
    with make(tmp_path, optimizer=SGD(lr=1.0), update=update) as bag:
        model = nn.Sequential(bag, nn.Linear(DIM, 1))
        before = rows_of(bag)
        for freeze in (model.requires_grad_, bag.requires_grad_):
            freeze(False)
            assert not bag(IDS).requires_grad
            model[1].requires_grad_(True)
            model(IDS).sum().backward()
            assert model[1].weight.grad is not None
            freeze(True)
        output = model(IDS)
        for parameter in bag.parameters():
            parameter.requires_grad_(False)  # between the two passes
        output.sum().backward()
        bag.optimizer.step()
        assert torch.equal(rows_of(bag), before)
        weights = torch.ones(IDS.shape, requires_grad=True)
        bag(IDS, None, weights).sum().backward()  # weights of samples have theirs all the same
        assert weights.grad is not None
        assert torch.allclose(weights.grad, before.sum(1)[IDS])
        bag.requires_grad_(True)
        model(IDS).sum().backward()
        bag.optimizer.step()
        assert not torch.equal(rows_of(bag), before)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_what_clips_or_unscales_all_gradients_is_told_about_rows(tmp_path: Path, update: Any) -> None:
    with make(tmp_path, update=update) as bag:
        model = nn.Sequential(bag, nn.Linear(DIM, 1))
        model(IDS).sum().backward()
        advice = r"scale_gradients\(\) and gradient_norm\(\)"
        kept = model[1].weight.grad.clone()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        for habit in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf"), foreach=True),
            lambda: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
            lambda: nn.utils.clip_grad_value_(bag.parameters(), 0.1),
            lambda: nn.utils.clip_grad_value_(bag.parameters(), 0.1, foreach=True),
            lambda: [p.grad.norm() for p in bag.parameters()],
            lambda: [p.grad.data.mul_(0.5) for p in bag.parameters()],
            lambda: scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1)),
            lambda: scaler.step(bag.optimizer),
        ):
            with pytest.raises(RuntimeError, match=advice):
                habit()
        assert torch.equal(model[1].weight.grad, kept)
        nn.utils.clip_grad_norm_(model[1].parameters(), 0.1)
        model.zero_grad()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # rows have none now


def test_a_scaled_loss_needs_gradients_that_wait(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with make(tmp_path / "a", optimizer=SGD(lr=1.0)) as bag:
        dense = nn.Linear(DIM, 1)
        optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
        before = rows_of(bag)
        loss = dense(bag(IDS)).sum()
        for losses in (loss, [dense.weight.sum(), loss], (loss,)):
            with pytest.raises(RuntimeError, match=r"scale\(\): .* open the tables with update='step'"):
                scaler.scale(losses)
        scaler.scale(dense(torch.ones(2, DIM)).sum()).backward()  # of the dense part alone
        scaler.step(optimizer)
        scaler.update()
        torch.amp.GradScaler("cpu", enabled=False).scale(loss)
        bag.requires_grad_(False)
        scaler.scale(dense(bag(IDS)).sum()).backward()
        assert torch.equal(rows_of(bag), before)
        bag.requires_grad_(True)
        dense(bag(IDS)).sum().backward()
        assert not torch.equal(rows_of(bag), before)


def test_gradients_of_a_scaled_loss_that_wait(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with make(tmp_path, optimizer=Adagrad(lr=0.5), update="step") as bag:
        theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=rows_of(bag), sparse=True)
        plain = torch.optim.Adagrad(theirs.parameters(), lr=0.5)
        for _ in range(3):
            scaler.scale(bag(IDS).sin().sum()).backward()
            bag.scale_gradients(1 / scaler.get_scale())
            bag.optimizer.step()
            plain.zero_grad()
            theirs(IDS).sin().sum().backward()
            plain.step()
        assert torch.equal(rows_of(bag), theirs.weight)


def test_scaling_what_was_applied_is_refused(tmp_path: Path) -> None:
    with make(tmp_path) as bag:
        bag(IDS).sum().backward()
        for call in (lambda: bag.scale_gradients(0.5), bag.gradient_norm):
            with pytest.raises(RuntimeError, match="update='backward'; open the tables with update='step'"):
                call()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_optimizers_of_all_parameters_train_the_dense_part(
    tmp_path: Path, kind: str, foreach: bool, set_to_none: bool
) -> None:
    found = []
    for everything in (False, True):
        torch.manual_seed(0)
        with make(tmp_path / str(everything), update="backward") as bag:
            model = nn.Sequential(bag, nn.Linear(DIM, 1))
            options = {"momentum": 0.9} if kind == "SGD" else {}
            parameters = model.parameters() if everything else model[1].parameters()
            optimizer = getattr(torch.optim, kind)(
                parameters, lr=0.1, weight_decay=0.01, maximize=kind != "RMSprop", foreach=foreach, **options
            )
            for _ in range(4):
                optimizer.zero_grad(set_to_none=set_to_none)
                model(IDS).square().sum().backward()
                optimizer.step()
            found.append((rows_of(bag), model[1].weight.detach()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_with_nothing_but_rows_is_refused(tmp_path: Path) -> None:
    with make(tmp_path) as bag:
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.5)
        bag(IDS).sum().backward()
        with pytest.raises(RuntimeError, match=r"updated by their module's own optimizer: .* module\.optimizer"):
            optimizer.step()


def test_micro_batches_need_gradients_that_wait(tmp_path: Path) -> None:
    with make(tmp_path) as bag:
        model = nn.Sequential(bag, nn.Linear(DIM, 1))
        for optimizer in (bag.optimizer, torch.optim.Adam(model.parameters())):
            model(IDS).sum().backward()
            optimizer.step()
            for _ in range(2):
                model(IDS).sum().backward()
            with pytest.raises(
                RuntimeError, match=r"2 updates since the last one, .* open the tables with update='step'"
            ):
                optimizer.step()
            model(IDS).sum().backward()
            optimizer.step()


ZEROING: list[Callable[[torch.optim.Optimizer, EmbeddingBag], None]] = [
    lambda optimizer, bag: optimizer.zero_grad(),
    lambda optimizer, bag: optimizer.zero_grad(set_to_none=False),
    lambda optimizer, bag: bag.optimizer.zero_grad(),
]


def told_of_left(is_told: bool) -> AbstractContextManager[Any]:
    """Expect the warning that rows keep updates whose gradients were zeroed, or none."""
    words = "the rows keep the updates of [12] backward passes .* use update='step'"
    return pytest.warns(UserWarning, match=words) if is_told else nullcontext()


class Left(torch.autograd.Function):
    """Leaves a backward pass amid."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["the loss", "the pass", "before the step", "the step"])
@pytest.mark.parametrize("zero", ZEROING)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_step_that_was_left_and_zeroed_leaves_nothing(tmp_path: Path, update: Any, zero: Any, place: str) -> None:
    with make(tmp_path, optimizer=SGD(lr=1.0), update=update) as bag:
        model = nn.Sequential(bag, nn.Linear(DIM, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        def step() -> None:
            bag.optimizer.step()
            optimizer.step()
            optimizer.zero_grad()

        def leave() -> None:
            output = model(IDS)
            if place == "the loss":
                fail()
            early = Left.apply(torch.ones(2, 1, requires_grad=True)) if place == "the pass" else 0
            (output + early).sum().backward()
            if place == "the step":
                bag.optimizer.step()
                optimizer.step()
            fail()

        for _ in range(2):  # the second one is left before any step
            hook = optimizer.register_step_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                leave()
            hook.remove()
            zero(optimizer, bag)
            bag.checkpoint()
        before = rows_of(bag)
        model(IDS).sum().backward()
        with told_of_left(update == "backward" and place == "before the step"):
            step()
        times = torch.bincount(IDS.reshape(-1), minlength=ROWS)[:, None]
        assert torch.allclose(rows_of(bag), before - times * model[1].weight, atol=1e-5)


@pytest.mark.parametrize("zero", ZEROING)
@pytest.mark.parametrize("habit", ["an attack", "a generator"])
def test_gradients_zeroed_before_each_step_need_to_wait(tmp_path: Path, zero: Any, habit: str) -> None:
    """The rows of ``update="backward"`` would take the gradients that torch drops."""
    with make(tmp_path, optimizer=SGD(lr=1.0)) as bag:
        model, generator = nn.Sequential(bag, nn.Linear(DIM, 1)), nn.Linear(DIM, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        others = torch.optim.SGD(generator.parameters(), lr=0.0)

        def train() -> None:
            for _ in range(3):
                if habit == "an attack":  # moves inputs along their gradient, and trains on these
                    model(IDS).sum().backward()
                    zero(optimizer, bag)
                model(IDS).sum().backward()
                bag.optimizer.step()
                optimizer.step()
                if habit == "a generator":
                    generator(bag(IDS)).sum().backward()
                    others.step()
                zero(optimizer, bag)

        with told_of_left(True), pytest.raises(RuntimeError, match="update='step'"):
            train()


@pytest.mark.parametrize("zero", ZEROING)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_probe_of_gradients_now_and_then_is_told(tmp_path: Path, update: Any, zero: Any) -> None:
    with make(tmp_path, optimizer=SGD(lr=1.0), update=update) as bag:
        model = nn.Sequential(bag, nn.Linear(DIM, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(6):
            if step % 3 == 2:
                before = rows_of(bag)
                model(IDS).sum().backward()
                zero(optimizer, bag)
                assert torch.equal(rows_of(bag), before) == (update == "step")
            model(IDS).sum().backward()
            with told_of_left(update == "backward" and step % 3 == 2):
                bag.optimizer.step()
            optimizer.step()
            zero(optimizer, bag)


def test_a_checkpoint_leaves_gradients_for_the_optimizer_to_refuse(tmp_path: Path) -> None:
    with make(tmp_path, update="step") as bag:
        model = nn.Sequential(bag, nn.Linear(DIM, 1))
        model(IDS).sum().backward()
        with pytest.raises(RuntimeError, match="1 backward passes wait"):
            bag.checkpoint()
        model.zero_grad()
        bag.checkpoint()
        assert bag.look_ups.waiting == 0
        with pytest.raises(RuntimeError, match="take this step first"):
            bag.optimizer.step()


def test_micro_batches_that_were_left_and_zeroed_keep_no_rows(tmp_path: Path) -> None:
    with EmbeddingBag(10_000, DIM, dram="32MiB", path=tmp_path, update="step", policy=LRU(100)) as bag:
        model = nn.Sequential(bag, nn.Linear(DIM, 1))
        for start in range(0, 400, 80):
            model(torch.arange(start, start + 80)[:, None]).sum().backward()
            model.zero_grad()


def test_the_models_zero_grad_drops_gradients_that_wait(tmp_path: Path) -> None:
    with make(tmp_path, optimizer=SGD(lr=1.0), update="step") as bag:
        model = nn.Sequential(bag, nn.Identity())
        theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=rows_of(bag), sparse=True)
        plain = torch.optim.SGD(theirs.parameters(), lr=1.0)
        for one, optimizer in ((model, bag.optimizer), (theirs, plain)):
            one(IDS).square().sum().backward()
            one.zero_grad()  # that loss was no number, perhaps
            for _ in range(2):
                one(IDS).sum().backward()
            optimizer.step()
            one.zero_grad()
        assert torch.equal(rows_of(bag), theirs.weight)
        model(IDS).sum().backward()
        assert bag.gradient_norm() > 0
        model.zero_grad()
        assert bag.gradient_norm() == 0
        with pytest.raises(RuntimeError, match="take this step first"):
            bag.optimizer.step()
        bag.optimizer.zero_grad()
        bag.optimizer.step()
        assert torch.equal(rows_of(bag), theirs.weight)


@pytest.mark.parametrize(
    "habit",
    [
        lambda model: model.half(),
        lambda model: model.bfloat16(),
        lambda model: model.double(),
        lambda model: model.to(torch.float16),
        lambda model: model.to(torch.zeros(1, dtype=torch.float64)),
        lambda model: model.to("meta"),
        lambda model: model.to_empty(device="meta"),
    ],
)
def test_rows_are_neither_converted_nor_moved(tmp_path: Path, habit: Any) -> None:
    with make(tmp_path) as bag:
        with pytest.raises((TypeError, ValueError), match=r"EmbeddingBag: its rows .*the dense part alone"):
            habit(nn.Sequential(bag, nn.Linear(DIM, 1)))
        model = nn.Sequential(bag, nn.Linear(DIM, 1))
        before = rows_of(bag)
        for same in (model.float, model.cpu, lambda: model.to("cpu", torch.float32), lambda: model.to("cpu")):
            same()
        with torch.autocast("cpu", torch.bfloat16):
            model(IDS).float().sum().backward()
        assert not torch.equal(rows_of(bag), before)


def test_gradients_of_outputs_in_evaluation(tmp_path: Path) -> None:
    with make(tmp_path) as bag:
        model = nn.Sequential(bag, nn.Linear(DIM, 1)).eval()
        before, output = rows_of(bag), bag(IDS)
        (gradient,) = torch.autograd.grad(model[1](output).sum(), output)
        assert torch.equal(gradient, model[1].weight.expand(2, -1))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"made in eval\(\).* train\(\) .* requires_grad_\(False\)"):
                model(IDS).sum().backward()
        bag.requires_grad_(False)
        model(IDS).sum().backward()
        assert torch.equal(rows_of(bag), before)
        kept = [bag(torch.arange(ROWS)[:, None]) for _ in range(3)]  # holds no rows in DRAM
        assert len(kept) == 3


def test_gradients_of_gradients(tmp_path: Path) -> None:
    with make(tmp_path, optimizer=SGD(lr=1.0)) as bag:
        theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=rows_of(bag), sparse=True)
        plain = torch.optim.SGD(theirs.parameters(), lr=1.0)
        for one in (bag, theirs):
            output = one(IDS)
            (slope,) = torch.autograd.grad(output.tanh().sum(), output, create_graph=True)
            slope.square().sum().backward()
        plain.step()
        assert torch.equal(rows_of(bag), theirs.weight)
        loss = bag(IDS).tanh().sum()
        with pytest.raises(RuntimeError, match=r"create_graph=True\) through a look-up"):
            loss.backward(create_graph=True)
        loss = bag(IDS).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward runs only once through a look-up"):
            loss.backward()


def test_another_rate_beside_a_resume_is_refused(tmp_path: Path) -> None:
    with make(tmp_path, optimizer=Adam(lr=0.1)) as bag:
        schedule = torch.optim.lr_scheduler.StepLR(bag.optimizer, 1, 0.5)
        bag(IDS).sum().backward()
        bag.optimizer.step()
        schedule.step()
        bag.checkpoint()
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"lr=0.2 beside resume=True, but the training began with lr=0.1 and is at"
        ):
            make(tmp_path, optimizer=Adam(lr=0.2), resume=True)
        with make(tmp_path, optimizer=Adam(lr=0.1), resume=True) as bag:
            assert bag.optimizer.param_groups[0]["lr"] == 0.05
            bag.checkpoint()


@pytest.mark.parametrize("place", ["nothing", "empty", "no checkpoint"])
def test_a_resume_where_nothing_is_says_so(tmp_path: Path, place: str) -> None:
    path = tmp_path / "table"
    if place == "empty":
        path.mkdir()
    if place == "no checkpoint":
        make(path).close()
    with pytest.raises(FileNotFoundError, match="no checkpoint is there to go on from; resume=False begins anew"):
        make(path, resume=True)
    assert path.exists() == (place != "nothing")
    assert place != "empty" or not os.listdir(path)
    make(path).close()


def test_schedules_of_the_rate_have_the_bits_of_torch(tmp_path: Path) -> None:
    with make(tmp_path, optimizer=Adagrad(lr=0.5)) as bag:
        theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=rows_of(bag), sparse=True)
        for one, optimizer in ((bag, bag.optimizer), (theirs, torch.optim.Adagrad(theirs.parameters(), lr=0.5))):
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
            for _ in range(6):
                optimizer.zero_grad()
                one(IDS).sin().sum().backward()
                optimizer.step()
                schedule.step()
        assert torch.equal(rows_of(bag), theirs.weight)


def test_hyperparameters_that_rows_have_no_room_for(tmp_path: Path) -> None:
    with make(tmp_path) as bag:
        before = rows_of(bag)
        torch.optim.lr_scheduler.OneCycleLR(bag.optimizer, max_lr=0.1, total_steps=10)
        with pytest.raises(ValueError, match=r"momentum.* cycle_momentum=False"):
            bag(IDS).sum().backward()
        bag.optimizer.param_groups[0]["momentum"] = 0
        assert torch.equal(rows_of(bag), before)
        bag(IDS).sum().backward()
        with pytest.raises(ValueError, match="the optimizer of tables has one"):
            bag.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        state = bag.optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.25
        bag.optimizer.load_state_dict(state)
        assert bag.optimizer.param_groups[0]["lr"] == 0.25
        with pytest.raises(ValueError, match="lies with the rows"):
            bag.optimizer.load_state_dict(state | {"state": {0: {"sum": torch.zeros(2)}}})
    with make(tmp_path / "b", optimizer=RowWiseAdagrad()) as bag:
        bag.optimizer.param_groups[0]["weight_decay"] = 0.1
        with pytest.raises(ValueError, match="RowWiseAdagrad of tables has none"):
            bag(IDS).sum().backward()


def test_a_pass_that_fails_amid_is_none(tmp_path: Path) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise OverflowError("amid")

    with make(tmp_path, optimizer=SGD(lr=1.0)) as bag:
        before = rows_of(bag)
        early = Fails.apply(torch.ones(2, DIM, requires_grad=True))
        loss = (bag(IDS) + early).sum()
        with pytest.raises(OverflowError, match="amid"):
            loss.backward()
        assert torch.equal(rows_of(bag), before)
        bag(IDS).sum().backward()
        assert torch.equal(rows_of(bag)[29], before[29] - 1)


def test_tables_inside_of_a_model_under_ddp(tmp_path: Path, one_rank: None) -> None:
    configs = [EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM)]
    with EmbeddingBagCollection(configs, dram="32MiB", path=tmp_path / "t") as tables:

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tables, self.dense = tables, nn.Linear(DIM, 1)

            def forward(self, ids: Tensor) -> Tensor:
                found: Tensor = self.dense(self.tables(ids).values())
                return found

        model = DistributedDataParallel(Model())
        optimizer = torch.optim.Adam(model.parameters())
        before = tables.weights(np.arange(ROWS))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([[1], [2]])).sum().backward()
            optimizer.step()
        changed = (tables.weights(np.arange(ROWS)) != before).any(1)
        assert changed.nonzero().flatten().tolist() == [1, 2]
        assert tables.steps == 3
