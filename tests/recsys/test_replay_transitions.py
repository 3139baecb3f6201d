"""A transition buffer against a plain one that keeps everything in lists: the same batches, whatever the budget."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.errors import BudgetError, ClosedError, FormatError, LockedError
from memhier.recsys.replay.transitions import NStep, Prioritised, Slices, TransitionBuffer, Uniform

SCHEMA = {
    "observation": ("float32", (3, 2)),
    "action": "int16",
    "next": {"observation": ("float32", (3, 2)), "reward": "float32", "terminated": "bool", "truncated": "bool"},
}
WIDE = {"number": "int64", "pixels": ("uint8", 700), "reward": "float64", "done": "uint8"}


def transitions(first: int, count: int) -> dict[str, Any]:
    numbers = np.arange(first, first + count)
    observation = np.repeat(numbers.astype(np.float32), 6).reshape(count, 3, 2)
    return {
        "observation": observation,
        "action": (numbers % 7).astype(np.int16),
        "next": {
            "observation": observation + 1,
            "reward": np.sin(numbers).astype(np.float32),
            "terminated": numbers % 13 == 12,
            "truncated": numbers % 29 == 28,
        },
    }


def wide(first: int, count: int) -> dict[str, Any]:
    numbers = np.arange(first, first + count)
    return {
        "number": numbers,
        "pixels": (numbers.astype(np.uint8)[:, None] * np.uint8(7)) + np.arange(700).astype(np.uint8),
        "reward": np.cos(numbers.astype(np.float64)),
        "done": (numbers % 17 == 3).astype(np.uint8),
    }


def ends(number: int) -> bool:
    return number % 13 == 12 or number % 29 == 28


def same(one: Any, other: Any) -> bool:
    """Whether two batches have the same bits."""
    parts = ("numbers", "probabilities", "weights", "steps", "discounts", "mask")
    equal = all(np.array_equal(getattr(one, part), getattr(other, part)) for part in parts if getattr(one, part) is not
                None)  # fmt: skip
    return (
        equal
        and one.data.keys() == other.data.keys()
        and all(
            np.array_equal(values, other.data[name]) and values.dtype == other.data[name].dtype
            for name, values in one.data.items()
        )
    )


def play(buffer: TransitionBuffer, turns: int, seed: int = 0, made: Any = transitions) -> list[Any]:
    """Use a buffer as a learner does; the priorities are those of the batches."""
    found, rng = [], np.random.default_rng(seed)
    for _ in range(turns):
        buffer.add(made(buffer.added, int(rng.integers(1, 40))))
        for _ in range(int(rng.integers(1, 4))):
            batch = buffer.sample()
            if isinstance(draw_of(buffer), Prioritised):
                buffer.update_priorities(batch.numbers, np.abs(np.sin(batch.numbers * 1.7)) * 3)
            found.append(batch)
    return found


DRAWS: dict[TransitionBuffer, Any] = {}


def draw_of(buffer: TransitionBuffer) -> Any:
    return DRAWS[buffer]


def made(place: Path, **options: Any) -> TransitionBuffer:
    settings: dict[str, Any] = {"capacity": 500, "schema": SCHEMA, "dram": "4MiB", "batch": 8, "seed": 3}
    buffer = TransitionBuffer(place, **settings | options)
    DRAWS[buffer] = options.get("draw", Uniform())
    return buffer


OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "passes": {"draw": Uniform(replace=False)},
    "prioritised": {"draw": Prioritised()},
    "n-step": {"draw": Prioritised(alpha=0.9), "runs": NStep(4, 0.9)},
    "slices": {"runs": Slices(5)},
    "padded": {"runs": Slices(9, padded=True), "draw": Prioritised()},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_hold_what_was_added(tmp_path: Path, name: str) -> None:
    with made(tmp_path / "b", **OPTIONS[name]) as buffer:
        for batch in play(buffer, 60):
            runs: Any = OPTIONS[name].get("runs")
            flat, names = {}, {"observation", "action", "next.observation", "next.terminated", "next.truncated"}
            every = transitions(0, buffer.added)
            flat = {key: every[key] for key in ("observation", "action")} | {
                f"next.{key}": values for key, values in every["next"].items()
            }
            if isinstance(runs, Slices):
                numbers = batch.numbers[:, None] + np.arange(runs.length)
                for key, values in flat.items():
                    assert np.array_equal(batch[key][batch.mask], values[numbers[batch.mask]]), key
                    assert not batch[key][~batch.mask].any()
                continue
            for key in names:
                ahead = batch.steps - 1 if key.startswith("next") and runs is not None else 0
                assert np.array_equal(batch[key], flat[key][batch.numbers + ahead]), key
            if runs is None:
                assert np.array_equal(batch["next.reward"], flat["next.reward"][batch.numbers])


def test_results_do_not_depend_on_the_budget(tmp_path: Path) -> None:
    for name, options in OPTIONS.items():
        if "runs" in options and isinstance(options["runs"], NStep):
            options = options | {"runs": NStep(3, 0.5)}
        played = []
        for dram in ("1MiB", "64MiB"):
            place = tmp_path / f"{name}-{dram}"
            with made(place, schema=WIDE, capacity=2000, dram=dram, batch=8, **options) as buffer:
                buffer.add(wide(0, 1900))
                played.append(play(buffer, 10, made=wide))
                newest, stored = buffer.stats()["newest"], buffer.stats()["stored"]
                assert (newest == stored) is (dram == "64MiB"), (name, dram, newest, stored)
                assert (buffer.stats()["rows_read"] == 0) is (dram == "64MiB")
        assert len(played[0]) > 12
        for one, *others in zip(*played, strict=True):
            assert all(same(one, other) for other in others), name


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_batch_has_the_priorities_of_some_calls_before(tmp_path: Path, ahead: int) -> None:
    """Batch t is drawn in call t - ahead: a change of priorities shows after as many calls."""
    with made(tmp_path / "b", draw=Prioritised(alpha=1), ahead=ahead, batch=64) as buffer:
        buffer.add(transitions(0, 300))
        buffer.sample()
        buffer.update_priorities(np.arange(300), np.where(np.arange(300) == 77, 1e6, 0))
        for _ in range(ahead):
            assert len(set(buffer.sample().numbers.tolist())) > 20
        assert set(buffer.sample().numbers.tolist()) == {77}


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_draws_have_their_distribution_and_weights(tmp_path: Path, alpha: float) -> None:
    priorities = np.random.default_rng(1).random(400) ** 4
    with made(tmp_path / "b", draw=Prioritised(alpha, 0.7), ahead=0, batch=1000, capacity=400) as buffer:
        buffer.add(transitions(0, 650))
        assert buffer.update_priorities(np.arange(250, 650), priorities) == 400
        shares = (priorities + 1e-6) ** alpha
        shares /= shares.sum()
        counts = np.zeros(650)
        for _ in range(100):
            batch = buffer.sample(beta=0.5)
            counts += np.bincount(batch.numbers, minlength=650)
            assert np.allclose(batch.probabilities, shares[batch.numbers - 250], rtol=1e-5)
            assert np.allclose(batch.weights, (shares.min() / shares[batch.numbers - 250]) ** 0.5, rtol=1e-5)
    assert not counts[:250].any()
    expected = 100_000 * shares
    kept = expected > 5
    statistic = float(((counts[250:] - expected)[kept] ** 2 / expected[kept]).sum())
    assert abs(statistic - kept.sum()) < 5 * np.sqrt(2 * kept.sum())


def test_uniform_draws_are_uniform(tmp_path: Path) -> None:
    with made(tmp_path / "b", ahead=0, batch=1000, capacity=300) as buffer:
        buffer.add(transitions(0, 420))
        counts = np.sum([np.bincount(buffer.sample().numbers, minlength=420) for _ in range(60)], axis=0)
    assert not counts[:120].any()
    statistic = float(((counts[120:] - 200) ** 2 / 200).sum())
    assert abs(statistic - 299) < 5 * np.sqrt(2 * 299)


def test_a_pass_has_each_transition_once(tmp_path: Path) -> None:
    with made(tmp_path / "b", draw=Uniform(replace=False), batch=7) as buffer:
        buffer.add(transitions(0, 70))
        for _ in range(3):
            drawn = np.concatenate([buffer.sample().numbers for _ in range(10)])
            assert sorted(drawn.tolist()) == list(range(70))


def test_slices_are_uniform_over_all_that_are_whole(tmp_path: Path) -> None:
    with made(tmp_path / "b", runs=Slices(4), ahead=0, batch=1000, capacity=200) as buffer:
        buffer.add(transitions(0, 333))
        whole = [start for start in range(133, 330) if not any(ends(number) for number in range(start, start + 3))]
        counts = np.sum([np.bincount(buffer.sample().numbers, minlength=333) for _ in range(40)], axis=0)
    assert np.flatnonzero(counts).tolist() == whole
    expected = 40_000 / len(whole)
    statistic = float(((counts[whole] - expected) ** 2 / expected).sum())
    assert abs(statistic - len(whole)) < 5 * np.sqrt(2 * len(whole))


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_returns_end_with_the_trajectory(tmp_path: Path, steps: int) -> None:
    with made(tmp_path / "b", runs=NStep(steps, 0.9), ahead=0, batch=200) as buffer:
        buffer.add(transitions(0, 120))
        batch = buffer.sample()
    for at, number in enumerate(batch.numbers.tolist()):
        total, count = 0.0, 0
        for step in range(steps):
            if number + step >= 120:
                break
            total += 0.9**step * float(np.float32(np.sin(number + step)))
            count += 1
            if ends(number + step):
                break
        assert batch.steps[at] == count
        assert np.isclose(batch["next.reward"][at], total, rtol=1e-5, atol=1e-6)
        assert batch.discounts is not None
        assert np.isclose(batch.discounts[at], 0.9**count)
        assert batch["next.observation"][at, 0, 0] == number + count


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "float16", "float64"])
def test_returns_of_whole_rewards_are_no_whole_numbers(tmp_path: Path, dtype: str) -> None:
    schema = {"reward": (dtype, 2), "done": "bool"}
    with TransitionBuffer(tmp_path / "b", capacity=50, schema=schema, runs=NStep(3, 0.9), batch=9) as buffer:
        buffer.add({"reward": np.full((50, 2), 100, dtype), "done": np.zeros(50, np.bool_)})
        batch = buffer.sample()
    expected = 100 * (1 - 0.9**batch.steps) / (1 - 0.9)
    np.testing.assert_allclose(batch["reward"], np.stack([expected] * 2, 1), rtol=1e-3)
    assert batch["reward"].dtype == (dtype if dtype.startswith("float") else np.float32)


@pytest.mark.parametrize("alpha", [0, 0.6, 1, 10])
def test_the_largest_and_smallest_priorities_are_drawn_by(tmp_path: Path, alpha: float) -> None:
    with TransitionBuffer(
        tmp_path / "b", capacity=4, schema={"x": "bool"}, draw=Prioritised(alpha=alpha), batch=64, ahead=0
    ) as buffer:
        buffer.add({"x": np.zeros(4, np.bool_)})
        assert buffer.update_priorities([0, 1, 2, 3, 3], [1e308, 0, 1e-308, 1.0, 1e308]) == 5
        batch = buffer.sample(beta=1)
        buffer.add({"x": np.zeros(1, np.bool_)})
        buffer.sample()
    assert set(batch.numbers) <= ({0, 3} if alpha else {0, 1, 2, 3})
    assert np.isfinite(batch.weights).all()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_reopened_buffer_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    options = {"capacity": 300, "dram": "1MiB", "schema": WIDE, **OPTIONS[name]}
    with made(tmp_path / "whole", **options) as whole, made(tmp_path / "b", **options) as first:
        for buffer in (whole, first):
            play(buffer, 25, made=wide)
        first.checkpoint("step 25")
        expected = play(whole, 25, seed=1, made=wide)
        play(first, 3, seed=9, made=wide)  # lost: no checkpoint follows
    with TransitionBuffer.open(tmp_path / "b", dram="8MiB") as again:
        DRAWS[again] = options.get("draw", Uniform())
        assert again.value == "step 25"
        found = play(again, 25, seed=1, made=wide)
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))


def test_many_checkpoints_leave_few_parts(tmp_path: Path) -> None:
    with made(tmp_path / "b", capacity=2000, draw=Prioritised()) as buffer:
        for _ in range(80):
            buffer.add(transitions(buffer.added, 5))
            buffer.checkpoint()
        names = sorted(path.name for path in (tmp_path / "b" / "segments").iterdir())
        assert len(names) < 40
        batches = [buffer.sample() for _ in range(30)]
    for batch in batches:
        assert np.array_equal(batch["action"], (batch.numbers % 7).astype(np.int16))


def test_ssd_holds_the_capacity_twice_at_most(tmp_path: Path) -> None:
    with made(tmp_path / "b", capacity=4000, schema=WIDE, dram="1MiB") as buffer:
        most = 0
        for turn in range(60):
            buffer.add(wide(buffer.added, 500))
            buffer.sample()
            if turn == 30:
                buffer.checkpoint()
            most = max(most, sum(path.stat().st_size for path in (tmp_path / "b" / "segments").iterdir()))
    assert most < 2.3 * 4000 * 728


def test_priorities_of_replaced_transitions_are_left_out(tmp_path: Path) -> None:
    with made(tmp_path / "b", capacity=50, draw=Prioritised(alpha=1), ahead=0, batch=300) as buffer:
        buffer.add(transitions(0, 50))
        old = buffer.sample()
        buffer.add(transitions(50, 30))
        kept = old.numbers >= 30
        assert buffer.update_priorities(old.numbers, np.full(300, 1e9)) == int(kept.sum())
        batch = buffer.sample()
        assert not ((batch.numbers >= 50) & (batch.probabilities > 0.01)).any()


def test_tensors_have_all_that_a_learner_needs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for name, runs in (("discounts", NStep(3, 0.9)), ("mask", Slices(3))):
        with made(tmp_path / name, runs=runs) as buffer:
            buffer.add(transitions(0, 40))
            batch = buffer.sample()
            tensors = batch.tensors()
        own = {"numbers", "weights", "steps", name}
        assert tensors.keys() == batch.data.keys() | own
        assert all(torch.equal(tensors[each], torch.from_numpy(getattr(batch, each))) for each in own)


def test_trajectories_that_never_end_are_said_to(tmp_path: Path) -> None:
    with made(tmp_path / "b", schema={"reward": "float32"}, runs=NStep(3, 1.0), ends=()) as buffer:
        buffer.add({"reward": np.ones(40, np.float32)})
        assert set(buffer.sample().steps) <= {1, 2, 3}
    TransitionBuffer.open(tmp_path / "b").close()


def test_a_drawn_batch_outlives_its_transitions(tmp_path: Path) -> None:
    """A batch drawn ahead has the transitions of its draw, even if the ring has passed over them."""
    with made(tmp_path / "b", capacity=400, schema=WIDE, dram="1MiB", ahead=3) as buffer:
        buffer.add(wide(0, 400))
        buffer.sample()
        buffer.add(wide(400, 5000))
        for _ in range(3):
            batch = buffer.sample()
            assert (batch.numbers < 400).all()
            assert np.array_equal(batch["number"], batch.numbers)
        assert (buffer.sample().numbers >= 5000).all()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"capacity": 0}, ValueError, "capacity=0"),
        ({"dram": "200KiB"}, BudgetError, "would be enough"),
        ({"schema": {}}, ValueError, "schema"),
        ({"schema": {"x": "O"}}, ValueError, "plain bytes"),
        ({"schema": {"next": "int8", "next.x": "int8"}}, ValueError, "one place"),
        ({"draw": "uniform"}, TypeError, "expected Uniform"),
        ({"runs": 3}, TypeError, "expected NStep"),
        ({"runs": Slices(501)}, ValueError, "capacity=500"),
        ({"runs": Slices(5), "draw": Uniform(replace=False)}, ValueError, "slices overlap"),
        ({"runs": NStep(3, reward="r")}, ValueError, "reward='r'"),
        ({"runs": NStep(3, last=["r"])}, ValueError, r"last: \['r'\]"),
        ({"ends": ["over"]}, ValueError, r"ends: \['over'\]"),
        ({"runs": NStep(3), "schema": {"reward": "float32", "over": "bool"}}, ValueError, "is named 'terminated'"),
        ({"runs": Slices(3), "schema": {"reward": "float32", "over": "bool"}}, ValueError, "is named 'terminated'"),
        ({"batch": 0}, ValueError, "batch=0"),
        ({"ahead": -1}, ValueError, "ahead=-1"),
        ({"seed": -1}, ValueError, "seed=-1"),
    ],
)
def test_unfit_arguments_make_nothing(tmp_path: Path, options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        made(tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


def test_a_budget_that_is_said_to_be_enough_is(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as refused:
        made(tmp_path / "b", dram="300KiB", schema=WIDE, capacity=5000, runs=Slices(7))
    enough = int(str(refused.value).split("dram=")[-1].split()[0])
    made(tmp_path / "b", dram=enough, schema=WIDE, capacity=5000, runs=Slices(7)).close()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"action": None}, ValueError, "expected the fields"),
        ({"more": np.zeros(4)}, ValueError, "expected the fields"),
        ({"next.reward": np.zeros(4, np.float32)}, ValueError, "each field once"),
        ({"action": np.zeros(4)}, TypeError, "expected an array of int16"),
        ({"action": np.zeros(3, np.int16)}, ValueError, "expected 4 transitions"),
        ({"action": np.zeros((4, 1), np.int16)}, ValueError, r"expected shape \[n\]"),
    ],
)
def test_unfit_transitions_change_nothing(tmp_path: Path, change: Any, error: Any, said: str) -> None:
    with made(tmp_path / "b") as buffer:
        batch = transitions(0, 4) | change
        with pytest.raises(error, match=said):
            buffer.add({name: values for name, values in batch.items() if values is not None})
        assert buffer.added == 0
        assert len(buffer.add({name: value[:0] for name, value in _flat(transitions(0, 4)).items()})) == 0
        with pytest.raises(ValueError, match="nothing is stored"):
            buffer.sample()


def _flat(batch: dict[str, Any]) -> dict[str, Any]:
    return {"observation": batch["observation"], "action": batch["action"]} | {
        f"next.{name}": values for name, values in batch["next"].items()
    }


def test_unfit_priorities_change_nothing(tmp_path: Path) -> None:
    with made(tmp_path / "b", draw=Prioritised()) as buffer:
        buffer.add(transitions(0, 20))
        for numbers, priorities, said in (
            ([20], [1.0], "expected 0 to 19"), ([-1], [1.0], "expected 0 to 19"), ([3], [-1.0], r"priorities\[0\]"),
            ([3, 4], [1.0, np.nan], r"priorities\[1\]=nan"), ([3], [1.0, 2.0], "expected one for each"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=said):
                buffer.update_priorities(numbers, priorities)
        assert np.allclose(buffer.sample().probabilities, 1 / 20)
        with pytest.raises(ValueError, match="beta"):
            buffer.sample(beta=-1)
    with made(tmp_path / "c") as buffer, pytest.raises(TypeError, match="draw=Prioritised"):
        buffer.update_priorities([0], [1.0])


def test_a_slice_has_to_be_whole(tmp_path: Path) -> None:
    with made(tmp_path / "b", runs=Slices(5)) as buffer:
        buffer.add(transitions(0, 4))
        with pytest.raises(ValueError, match="no slice"):
            buffer.sample()
        buffer.add(transitions(4, 1))
        assert set(buffer.sample().numbers.tolist()) == {0}


def test_a_second_buffer_waits_and_a_closed_one_refuses(tmp_path: Path) -> None:
    buffer = made(tmp_path / "b")
    with pytest.raises(LockedError):
        TransitionBuffer.open(tmp_path / "b")
    buffer.close()
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.add(transitions(0, 1))
    with pytest.raises(FormatError, match="holds the fields"):
        TransitionBuffer.open(tmp_path / "b", schema=WIDE)
    TransitionBuffer.open(tmp_path / "b", schema=SCHEMA).close()


def test_memory_is_held_to(tmp_path: Path) -> None:
    for dram in (2**20, 2**22):
        with made(
            tmp_path / str(dram), schema=WIDE, capacity=20_000, dram=dram, draw=Prioritised(), batch=16
        ) as buffer:
            for _ in range(30):
                buffer.add(wide(buffer.added, 300))
                buffer.sample()
                assert buffer.memory_bytes <= dram


class Learner:
    """Q-learning by a linear function on a ring of places, from prioritised replay; its states are wide."""

    PLACES, ACTIONS = 6, 2

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        self.states = rng.normal(size=(self.PLACES, 500)).astype(np.float32)
        self.weights = np.zeros((self.ACTIONS, 500), np.float32)
        self.place = 0
        self.rng = np.random.default_rng(5)

    def act(self, count: int) -> dict[str, Any]:
        """Take steps: 1 goes on, 0 goes back; the last place pays, and ends an episode."""
        came: dict[str, list[Any]] = {name: [] for name in ("state", "action", "reward", "done", "next")}
        for _ in range(count):
            action = int(self.rng.integers(2))
            if self.rng.random() > 0.6:
                action = int((self.weights @ self.states[self.place]).argmax())
            following = max(0, self.place + 2 * action - 1)
            done = following == self.PLACES - 1
            for name, value in (("state", self.states[self.place]), ("action", action), ("reward", float(done)),
                                ("done", done), ("next", self.states[following])):  # fmt: skip
                came[name].append(value)
            self.place = 0 if done else following
        return {
            "state": np.array(came["state"]), "action": np.array(came["action"]), "next_state": np.array(came["next"]),
            "reward": np.array(came["reward"], np.float32), "done": np.array(came["done"]),
        }  # fmt: skip

    def learn(self, buffer: TransitionBuffer) -> None:
        batch = buffer.sample()
        assert batch.discounts is not None
        following = (batch["next_state"] @ self.weights.T).max(axis=1) * batch.discounts * ~batch["done"]
        error = batch["reward"] + following - (batch["state"] @ self.weights.T)[np.arange(len(batch)), batch["action"]]
        np.add.at(self.weights, batch["action"], 3e-4 * (batch.weights * error)[:, None] * batch["state"])
        buffer.update_priorities(batch.numbers, np.abs(error))


def test_q_learning_with_ten_times_the_memory_is_that_in_memory(tmp_path: Path) -> None:
    """The weights, bit for bit, though nine in ten transitions are on SSD; and they solve the task."""
    schema = {"state": ("float32", 500), "action": "int64", "next_state": ("float32", 500), "reward": "float32",
              "done": "bool"}  # fmt: skip
    found, shares = [], []
    for dram in ("1200KiB", "64MiB"):
        learner = Learner()
        with TransitionBuffer(
            tmp_path / dram, capacity=3500, schema=schema, dram=dram, draw=Prioritised(), runs=NStep(3, 0.9), batch=8
        ) as buffer:
            for _ in range(180):
                buffer.add(learner.act(20))
                for _ in range(4):
                    learner.learn(buffer)
            figures = buffer.stats()
            shares.append(figures["newest"] / figures["stored"])
        found.append(learner)
    assert shares[0] < 0.1
    assert shares[1] == 1
    assert np.array_equal(found[0].weights, found[1].weights)
    values = found[0].weights @ found[0].states.T
    assert (values.argmax(axis=0)[: Learner.PLACES - 1] == 1).all()
