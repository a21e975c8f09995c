"""An iteration stays on the device: the host waits for it twice, however long the rollout is.

Two proofs. On torch's "meta" device nothing has a value, so any read by the host raises by itself. On a CPU a dispatch
mode counts the operations that would make the host wait for a CUDA device.
"""

from collections import Counter

import pytest
import torch
from helpers.toy_envs_runner import RESETS, small_tree
from torch.utils._python_dispatch import TorchDispatchMode

import rl_stagger as rs
from rl_stagger.config import build_config
from rl_stagger.rollout import Health

TASKS = {
    "skill_chain": {"num_stages": 4, "reset_noise": 0.5, "gating": 0.5, "phase_in_obs": True},
    "stage_gridworld": {"num_rooms": 2, "room_size": 2, "reset_noise": 0.5},
    "cartpole_swingup": {"success_steps": 3, "track_half_m": 0.12},
    "pendulum": {},
    "point_reach": {"terminate_on_success": True, "goal_radius_m": 0.5},
    "legged_bench": {"termination_probability": 0.1, "critic_obs": True},
}
COSTLY = {
    "plain": {},
    "all options": {
        "model": {"normalize_value": True},
        "algorithm": {
            "value_loss": "clipped", "kl_measure": "epoch", "kl_stop": 0.5, "grad_clip": "separate",
            "normalize_advantage": "minibatch", "entropy_coef": 0.01,
        },
    },
}  # fmt: skip
every_task = pytest.mark.parametrize("task", sorted(TASKS))
every_reset = pytest.mark.parametrize("reset", sorted(RESETS))


def test_no_native_task_is_left_out():
    from rl_stagger.envs.registry import native_task_names

    assert sorted(TASKS) == native_task_names()


def runner_on(device, task, reset, rollout_steps=4, run_dir=None, horizon_steps=12, **settings):
    task_settings = {**TASKS[task], "horizon_steps": horizon_steps}
    tree = small_tree(
        run_dir, reset, {"name": task, "settings": task_settings}, rollout_steps=rollout_steps, **settings
    )
    config = build_config(tree)
    env = rs.make_env(task, config.num_envs, device, 0, **config.task.settings)
    return rs.Runner(env, config)


# -- meta: any read raises ------------------------------------------------------------------------------------------
def check_shapes(metrics):
    """Stands for the transfer of the metrics."""
    assert all(value.device.type == "meta" for value in metrics.values())
    assert {"critic/loss", "policy/kl", "episode/return_mean", "batch/coverage", "optim/lr"} <= metrics.keys()
    return {name: tuple(value.shape) for name, value in metrics.items()}


@every_task
@every_reset
def test_nothing_is_read_on_the_meta_device(task, reset):
    runner = runner_on("meta", task, reset, algorithm={"epochs": 1})
    rows = runner.env.num_envs * runner.config.rollout_steps
    runner.read_health = lambda rollout: Health(rows, {})
    runner.read_metrics = check_shapes
    for _ in range(2):
        shapes = runner.iterate()
    assert shapes["batch/phase_histogram"] == (3,), "H / K bins"
    for name, value in runner.model.state_dict().items():
        assert value.device.type == "meta", name


def test_nothing_is_read_on_the_meta_device_with_every_option():
    runner = runner_on("meta", "legged_bench", "staggered_block", **COSTLY["all options"])
    runner.read_health, runner.read_metrics = (lambda rollout: Health(3, {})), check_shapes
    runner.iterate()
    runner.iterate()


def test_the_two_reads_are_reads():
    """Without their stand-ins the meta device does complain, so its silence above means something."""
    runner = runner_on("meta", "pendulum", "staggered")
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        runner.iterate()
    runner.read_health = lambda rollout: Health(0, {})
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        runner.iterate()


@pytest.mark.parametrize(
    "read", [lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x.nonzero(), lambda x: x[x > 0]]
)
def test_a_read_in_the_environment_is_seen_on_the_meta_device(read):
    runner = runner_on("meta", "pendulum", "staggered")
    runner.read_health, runner.read_metrics = (lambda rollout: Health(0, {})), check_shapes
    step = runner.env.env.step

    def reading(action):
        read(action)
        return step(action)

    runner.env.env.step = reading
    with pytest.raises((NotImplementedError, RuntimeError)):
        runner.iterate()


# -- CPU: reads are counted -----------------------------------------------------------------------------------------
aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten.is_nonzero, aten.equal, aten.masked_select, aten.unique_dim,
    aten._unique, aten._unique2, aten.unique_consecutive, aten.argwhere, aten.bincount, aten.allclose, aten.histc,
    aten.nonzero_numpy,
}  # fmt: skip
"""What needs a value on the host: for Python, or for the shape of the result."""
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
READING_METHODS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class HostReads(TorchDispatchMode):
    """Counts by name, while entered, what would make the host wait for a device."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = Counter()
        self._inside = self._entered = False
        for name in READING_METHODS:
            monkeypatch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))

    def _counting(self, name, method):
        def counted(tensor, *args, **kwargs):
            if self._inside or not self._entered:
                return method(tensor, *args, **kwargs)
            self.count[name] += 1
            self._inside = True  # one read, however many operations it is made of
            try:
                return method(tensor, *args, **kwargs)
            finally:
                self._inside = False

        return counted

    def __enter__(self):
        self._entered = True
        return super().__enter__()

    def __exit__(self, *error):
        self._entered = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._inside:
            packet = func.overloadpacket
            if packet in WAITING:
                self.count[str(packet)] += 1
            elif packet in INDEXED and any(_is_mask(index) for index in args[1]):
                self.count[f"{packet} by a mask"] += 1
            elif packet is aten.repeat_interleave and func is aten.repeat_interleave.Tensor:
                self.count[str(packet)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self):
        return sum(self.count.values())


def _is_mask(index):
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@pytest.fixture
def reads(monkeypatch):
    return HostReads(monkeypatch)


def reads_of_an_iteration(reads, runner):
    runner.iterate()  # the bring-up and whatever is made once
    with reads:
        runner.iterate()
        once = Counter(reads.count)
        runner.iterate()
    assert reads.count == once + once, "every iteration reads alike"
    return once


@every_task
@every_reset
def test_an_iteration_is_read_twice(reads, task, reset):
    runner = runner_on("cpu", task, reset)
    assert reads_of_an_iteration(reads, runner) == {"tolist": 2}


@pytest.mark.parametrize("options", sorted(COSTLY))
@pytest.mark.parametrize("rollout_steps", [4, 32])
@pytest.mark.parametrize("reset", ["synchronous", "staggered", "staggered_block"])
def test_a_longer_rollout_is_not_read_more_often(reads, reset, rollout_steps, options):
    runner = runner_on("cpu", "legged_bench", reset, rollout_steps, horizon_steps=48, **COSTLY[options])
    assert reads_of_an_iteration(reads, runner) == {"tolist": 2}


def test_a_whole_run_reads_no_more_than_its_iterations(reads, tmp_path):
    """Reporting, statistics, signals and logging add nothing: 1 and 5 iterations differ by 4 x 2 reads."""

    def reads_of_run(iterations):
        runner = runner_on("cpu", "pendulum", "staggered", run_dir=tmp_path / str(iterations), iterations=iterations)
        reads.count.clear()
        with reads:
            runner.learn()
        return reads.total

    assert reads_of_run(5) - reads_of_run(1) == 4 * 2


@pytest.mark.parametrize(
    "plant, name",
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: float(x.sum()), "__float__"),
        (lambda x: bool((x > 0).any()), "__bool__"),
        (lambda x: 1 if (x > 0).any() else 0, "__bool__"),
        (lambda x: x[x > 0], "aten.index by a mask"),
        (lambda x: x.masked_select(x > 0), "aten.masked_select"),
        (lambda x: x.nonzero(), "aten.nonzero"),
        (lambda x: torch.equal(x, x), "aten.equal"),
        (lambda x: x.clone().index_put_((x > 0,), torch.zeros(())), "aten.index_put_ by a mask"),
        (lambda x: x.flatten().long().unique(), "aten._unique2"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.numpy(), "numpy"),
    ],
)
def test_the_counter_sees_a_planted_read(reads, plant, name):
    """Planted into the environment's step: K more reads an iteration."""
    runner = runner_on("cpu", "pendulum", "staggered")
    step = runner.env.env.step

    def reading(action):
        plant(action)
        return step(action)

    runner.env.env.step = reading
    assert reads_of_an_iteration(reads, runner) == {"tolist": 2, name: 4}
