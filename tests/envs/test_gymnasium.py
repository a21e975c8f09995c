"""Gymnasium's environments under our contract: what we build, and anybody's VectorEnv in each autoreset mode."""

import importlib
import sys

import pytest
import torch

import rl_stagger as rs
from rl_stagger.envs.base import Box, Capability, Discrete
from rl_stagger.envs.check import check_env
from rl_stagger.envs.gymnasium import GymnasiumEnv, VectorEnvAdapter
from rl_stagger.errors import CapabilityError, ConfigError

gym = pytest.importorskip("gymnasium")
gym_envs = importlib.import_module("helpers.gym_envs")  # they import Gymnasium
Counter, counter_fns = gym_envs.Counter, gym_envs.counter_fns

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # AsyncVectorEnv, Python 3.12

N, H = 6, 10
MODES = ["NextStep", "SameStep", "Disabled"]
CLASSICS = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"]
EXACT = {Capability.SET_STATE, Capability.EXACT_RESUME}
QUIET = ["logging.curves=false", "logging.tensorboard=false", "logging.console=off"]
gym_envs.register()


def vector_env(mode="Disabled", lengths=(), kind="sync", horizon_steps=H, **settings):
    make = gym.vector.SyncVectorEnv if kind == "sync" else gym.vector.AsyncVectorEnv
    return make(counter_fns(N, horizon_steps, lengths), autoreset_mode=mode, **settings)


def adapted(mode="Disabled", lengths=(), **settings):
    return VectorEnvAdapter(vector_env(mode, lengths, **settings))


def zeros(env):
    is_box = isinstance(env.spec.action, Box)
    return torch.zeros(env.num_envs, env.spec.action.size) if is_box else torch.zeros(env.num_envs, dtype=torch.int64)


def rows(*on):
    mask = torch.zeros(N, dtype=torch.bool)
    mask[list(on)] = True
    return mask


def assert_clean(report, *but):
    found = [f for f in (*report.errors, *report.warnings) if f.check not in but]
    assert not found, str(report)


# -- the contract -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task_id", CLASSICS)
def test_classic_control_keeps_the_contract_in_every_way(task_id):
    env = rs.make_env(f"gym/{task_id}", 4)
    assert env.capabilities == set(Capability) - {Capability.RENDER}
    report = check_env(env, steps=60)
    assert_clean(report)
    assert {f.check for f in report.skipped} <= {"time_limit", "dummy_steps"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_every_autoreset_mode_keeps_the_contract(mode, kind):
    env = adapted(mode, lengths=(0, 3, 0, 7, 0, 10), kind=kind)
    try:
        # Counters draw nothing and do not look at actions: the checker wonders at both.
        assert_clean(check_env(env), "dummy_steps")
    finally:
        env.close()


def test_a_tasks_own_batched_form_keeps_the_contract():
    env = GymnasiumEnv(4, task_id="CartPole-v1", vectorization="vector_entry_point", horizon_steps=30)
    assert env.spec.horizon_steps == 30
    assert env.capabilities == {Capability.FINAL_OBS}  # nothing in it can be reset, written or read by rows
    assert_clean(check_env(env))
    with pytest.raises(CapabilityError):
        env.reset(torch.tensor([True, False, False, False]))


def test_dicts_with_images_keep_the_contract():
    report = check_env(GymnasiumEnv(4, task_id=gym_envs.ID, critic_keys=["mass"]))
    assert_clean(report)


# -- what each mode does ----------------------------------------------------------------------------------------------
def test_same_step_resets():
    for mode in ("SameStep", "Disabled"):
        env = adapted(mode, lengths=(3,) + (0,) * (N - 1))  # 0 fails at its step 3; the others are cut off at 10
        env.reset()
        for t in range(1, 13):
            step = env.step(zeros(env))
            assert step.valid.all()
            assert step.reward.tolist() == [(t - 1) % 3 + 1] + [(t - 1) % H + 1] * (N - 1)
            assert step.terminated.tolist() == [t % 3 == 0] + [False] * (N - 1)
            assert step.truncated.tolist() == [False] + [t == H] * (N - 1)
            assert step.obs["policy"][:, 0].tolist() == [t % 3] + [t % H] * (N - 1)
            assert step.final_obs["policy"][:, 0].tolist()[0] == (t - 1) % 3 + 1
            assert env.elapsed_steps.tolist() == [t % 3] + [t % H] * (N - 1)


def test_next_steps_dummies_are_invalid():
    env = adapted("NextStep", lengths=(3,) + (0,) * (N - 1))
    env.reset()
    for t in range(1, 9):
        step = env.step(zeros(env))
        dummy = t % 4 == 0  # three real steps, then the reset step
        assert step.valid.tolist() == [not dummy] + [True] * (N - 1)
        assert step.reward[0] == (0 if dummy else t % 4)
        assert step.terminated[0] == (t % 4 == 3)
        assert step.final_obs["policy"][0, 0] == t % 4
        assert env.elapsed_steps[0] == t % 4 % 3


@pytest.mark.parametrize("mode", MODES)
def test_a_written_clock_moves_the_end_of_the_episode(mode):
    env = adapted(mode)
    env.reset()
    for _ in range(4):
        env.step(zeros(env))
    env.set_elapsed_steps(torch.tensor([8, 0, 5, 5, 5, 5]), rows(0, 1))
    lengths = torch.zeros(N, dtype=torch.int64)
    for t in range(1, 11):
        step = env.step(zeros(env))
        lengths[step.truncated & (lengths == 0)] = t
    assert lengths.tolist() == [2, 10, 6, 6, 6, 6]


def test_a_time_limit_can_be_kept_here():
    fns = [lambda i=i: Counter(i) for i in range(N)]
    env = VectorEnvAdapter(gym.vector.SyncVectorEnv(fns, autoreset_mode="Disabled"), horizon_steps=4)
    assert env.spec.horizon_steps == 4
    env.reset()
    env.set_elapsed_steps(torch.full((N,), 3), rows(2))
    assert env.step(zeros(env)).truncated.tolist() == rows(2).tolist()
    assert_clean(check_env(env), "dummy_steps")
    with pytest.raises(ConfigError, match="horizon_steps=4: the environment has no time limit"):
        VectorEnvAdapter(gym.vector.SyncVectorEnv(fns), horizon_steps=4)
    with pytest.raises(ConfigError, match="horizon_steps=4: the environment says its own, 10"):
        VectorEnvAdapter(vector_env(), horizon_steps=4)


@pytest.mark.parametrize("mode", MODES)
def test_a_partial_reset_of_rows_that_are_done_is_no_dummy(mode):
    env = adapted(mode, lengths=(2, 2, 0, 0, 0, 0))
    env.reset()
    env.step(zeros(env))
    env.step(zeros(env))
    obs = env.reset(rows(0, 4))
    waits = mode == "NextStep"
    assert obs["policy"][:, 0].tolist() == [0, 2 if waits else 0, 2, 2, 0, 2]
    step = env.step(zeros(env))
    assert step.valid.tolist() == [True, not waits, True, True, True, True]
    assert env.elapsed_steps.tolist() == [1, 0 if waits else 1, 3, 3, 1, 3]


def test_manual_resets_wait_and_are_where_they_ended():
    env = adapted(lengths=(2, 0, 0, 0, 0, 0))
    env.reset()
    env.set_manual_reset(True)
    for t in range(1, 6):
        step = env.step(zeros(env))
        assert step.obs["policy"][:, 0].tolist() == [min(t, 2)] + [t] * (N - 1)
        assert step.valid.tolist() == [t <= 2] + [True] * (N - 1)
        assert step.terminated.tolist() == [t == 2] + [False] * (N - 1)
    assert env.elapsed_steps.tolist() == [2, 5, 5, 5, 5, 5]
    assert env.reset(rows(0))["policy"][:, 0].tolist() == [0, 5, 5, 5, 5, 5]
    assert env.step(zeros(env)).valid.all()
    env.step(zeros(env))
    env.set_manual_reset(False)  # what still waits begins anew
    assert env.elapsed_steps.tolist() == [0, 7, 7, 7, 7, 7]
    with pytest.raises(CapabilityError):
        adapted("SameStep").set_manual_reset(True)


def test_a_waiting_rows_state_is_the_one_in_which_it_ended():
    env = GymnasiumEnv(2, task_id="CartPole-v1")
    env.reset()
    env.set_manual_reset(True)
    while not env.step(torch.ones(2, dtype=torch.int64)).done.any():
        pass
    state = env.get_state()
    ended = env._waiting.clone()
    shown = env.step(torch.ones(2, dtype=torch.int64)).obs["policy"][ended]
    assert torch.equal(state["physics"][ended].float(), shown)
    assert torch.equal(env.get_state()["physics"][ended], state["physics"][ended])
    resumed = GymnasiumEnv(2, task_id="CartPole-v1", seed=5)
    resumed.set_manual_reset(True)
    saved = env.state_dict()
    resumed.load_state_dict(saved)
    for _ in range(30):  # the environments behind waiting rows draw as well
        for each in (env, resumed):
            each.step(torch.zeros(2, dtype=torch.int64))
    assert torch.equal(
        env.reset(torch.tensor([True, True]))["policy"], resumed.reset(torch.tensor([True, True]))["policy"]
    )


# -- seeds, states, memory --------------------------------------------------------------------------------------------
def test_neighbouring_seeds_share_no_episode():
    starts = torch.cat([GymnasiumEnv(8, seed=seed, task_id="Pendulum-v1").reset()["policy"] for seed in range(4)])
    assert len(starts.unique(dim=0)) == 32


def test_seeds_last_over_partial_resets():
    a, b = (GymnasiumEnv(4, seed=seed, task_id="Pendulum-v1") for seed in (1, 2))
    for env in (a, b):
        env.reset()
        env.seed(3)
    some = torch.tensor([True, False, True, False])
    first = a.reset(some)["policy"][some], a.reset(~some)["policy"][~some]
    second = b.reset(some)["policy"][some], b.reset(~some)["policy"][~some]
    assert all(torch.equal(x, y) for x, y in zip(first, second))


@pytest.mark.parametrize(
    "settings",
    [
        {"task_id": gym_envs.ID},
        {"task_id": "CartPole-v1", "vectorization": "async"},
        {"task_id": "CartPole-v1", "wrappers": ["gymnasium.wrappers:FrameStackObservation(stack_size=2)"]},
    ],
)
def test_states_that_cannot_be_read_whole_are_not_claimed(settings):
    env = GymnasiumEnv(2, **settings)
    assert not EXACT & env.capabilities
    env.reset()
    assert env.state_dict() == {}
    with pytest.raises(CapabilityError):
        env.get_state()
    env.close()


def test_an_async_environment_without_a_time_limit_stays_alive():
    fns = [lambda i=i: Counter(i) for i in range(2)]
    env = VectorEnvAdapter(gym.vector.AsyncVectorEnv(fns, autoreset_mode="SameStep"))
    assert env.spec.horizon_steps is None
    assert env.reset()["policy"].tolist() == [[0, 0], [0, 1]]
    env.close()


def test_without_shared_memory_next_step_knows_no_partial_resets():
    env = adapted("NextStep", kind="async", shared_memory=False)
    assert Capability.PARTIAL_RESET not in env.capabilities
    env.close()


def test_groups_images_infos_and_actions_of_a_dict_task():
    env = GymnasiumEnv(2, task_id=gym_envs.ID, critic_keys=["mass"], env_kwargs={"gain": 2.0})
    assert env.spec.obs_shapes == {"policy": (3, 4, 6), "policy/joints": (2,), "critic": (1,)}
    assert env.spec.obs_dtypes == {"policy": torch.uint8}
    assert (env.spec.action, env.spec.horizon_steps) == (Discrete(3), 9)
    heavy = (env.reset()["critic"] >= 0.5).flatten()
    for t in range(1, 6):
        step = env.step(torch.tensor([0, 2]))
        assert step.reward.tolist() == [5.0, 7.0]  # choices begin at 5
        assert step.final_obs["policy"][:, :, 0, t % 6].tolist() == [[t, 20, 30]] * 2
        assert step.info["log"]["speed"].tolist() == [2.0 * t] * 2
        assert torch.equal(step.info["success"], heavy)
    assert torch.equal(step.terminated, ~heavy)
    assert step.final_obs["policy/joints"].eq(5).all()
    assert step.obs["policy/joints"][~heavy].eq(0).all()
    assert step.obs["policy/joints"][heavy].eq(5).all()


@pytest.mark.parametrize("mode", MODES)
def test_infos_are_of_the_step_and_not_of_the_reset_after_it(mode):
    fns = [lambda: gym.wrappers.TimeLimit(gym_envs.Camera(reuse=False), 9)] * 4
    env = VectorEnvAdapter(gym.vector.SyncVectorEnv(fns, autoreset_mode=mode), critic_keys=["mass"], seed=1)
    heavy = (env.reset()["critic"] >= 0.5).flatten()
    assert len(heavy.unique()) == 2
    for t in range(1, 6):
        step = env.step(torch.ones(4, dtype=torch.int64))
        assert torch.equal(step.info["success"], heavy)
        assert step.info["log"]["speed"].tolist() == [float(t)] * 4
    assert torch.equal(step.terminated, ~heavy)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_final_observations_of_dicts_come_row_by_row(mode):
    fns = [lambda: gym.wrappers.TimeLimit(gym_envs.Camera(reuse=False), 5)] * 3
    env = VectorEnvAdapter(gym.vector.SyncVectorEnv(fns, autoreset_mode=mode))
    env.reset()
    env.reset(torch.tensor([True, True, False]))
    env.set_elapsed_steps(torch.tensor([1, 0, 0]))
    for _ in range(4):
        step = env.step(torch.ones(3, dtype=torch.int64))
    assert step.truncated.tolist() == [True, False, False]
    assert step.final_obs["policy/joints"].eq(4).all()
    assert step.final_obs["policy"][:, 0, 0, 4].eq(4).all()
    assert step.obs["policy/joints"][:, 0].tolist() == [0 if mode == "SameStep" else 4, 4, 4]


def test_wrappers_come_in_order_with_their_arguments():
    wrappers = ["gymnasium.wrappers:FrameStackObservation(stack_size=3)", "gymnasium.wrappers:FlattenObservation"]
    env = GymnasiumEnv(2, task_id="CartPole-v1", wrappers=wrappers)
    assert env.spec.obs_shapes == {"policy": (12,)}
    obs = env.reset()["policy"].reshape(2, 3, 4)
    assert torch.equal(obs[:, 0], obs[:, 2])
    assert_clean(check_env(env, steps=60))


def test_actions_are_clipped_to_the_bounds_and_may_be_rescaled():
    plain, scaled = (GymnasiumEnv(2, task_id="Pendulum-v1", rescale_actions=rescale) for rescale in (False, True))
    assert (plain.spec.action, scaled.spec.action) == (Box(1, -2.0, 2.0), Box(1, -1.0, 1.0))
    for env in (plain, scaled):
        env.reset()
    a, b = plain.step(torch.tensor([[9.0], [-1.0]])), scaled.step(torch.tensor([[1.0], [-0.5]]))
    assert torch.equal(a.obs["policy"], b.obs["policy"])
    assert torch.equal(a.reward, b.reward)


# -- pictures ---------------------------------------------------------------------------------------------------------
def test_rendering_is_one_environments_picture():
    env = GymnasiumEnv(3, task_id=gym_envs.ID, render_mode="rgb_array")
    env.reset()
    env.step(torch.zeros(3, dtype=torch.int64))
    env.reset(torch.tensor([False, True, False]))
    assert env.render(0).shape == (8, 10, 3)
    assert [int(env.render(i)[0, 0, 0]) for i in range(3)] == [1, 0, 1]
    env.set_manual_reset(True)
    env.set_elapsed_steps(torch.tensor([8, 0, 0]))
    env.step(torch.zeros(3, dtype=torch.int64))
    env.step(torch.zeros(3, dtype=torch.int64))
    assert [int(env.render(i)[0, 0, 0]) for i in range(3)] == [2, 2, 3]  # 0 waits where it ended
    env.reset(torch.tensor([True, False, False]))
    assert [int(env.render(i)[0, 0, 0]) for i in range(3)] == [0, 2, 3]
    with pytest.raises(CapabilityError):
        GymnasiumEnv(3, task_id=gym_envs.ID).render()


def test_what_rendering_lacks_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    env = GymnasiumEnv(2, task_id="CartPole-v1", render_mode="rgb_array")
    env.reset()
    with pytest.raises(ConfigError, match="pygame"):
        env.render()


# -- building ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task_id": "CartPol-v1"}, "did you mean 'CartPole-v1'"),
        ({"task_id": "CartPole-v9"}, "CartPole-v1"),
        ({"env_kwargs": {"gravitty": 1.0}}, "gravitty"),
        ({"vectorization": "asinc"}, "did you mean 'async'"),
        ({"horizon_steps": 0}, "horizon_steps=0"),
        ({"num_envs": 0}, "num_envs=0"),
        ({"wrappers": ["gymnasium.wrappers.FlattenObservation"]}, "module:Class"),
        ({"wrappers": ["gymnasium.wrappers:FrameStackObservation(2)"]}, "module:Class"),
        ({"wrappers": ["gymnasium.wrappers:FrameStackObservation(stack_size=n)"]}, "module:Class"),
        ({"wrappers": ["gymnasium.wrappers:FrameStackObservation(stack_sice=2)"]}, "stack_sice"),
        ({"wrappers": ["gymnasium.wrappers:FlatenObservation"]}, "did you mean 'FlattenObservation'"),
        ({"wrappers": ["no_such_module:Wrapper"]}, "no module 'no_such_module'"),
        ({"wrappers": ["gymnasium.wrappers:FlattenObservation"], "vectorization": "vector_entry_point"}, "wrappers"),
        ({"task_id": "Pendulum-v1", "vectorization": "vector_entry_point"}, "vector entry point"),
    ],
)
def test_what_cannot_be_built_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        GymnasiumEnv(**{"num_envs": 2, "task_id": "CartPole-v1", **settings})


@pytest.mark.parametrize(
    ("task_id", "module", "package"),
    [
        ("ALE/Pong-v5", "ale_py", "ale-py"),
        ("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid"),
        ("FetchReach-v4", "gymnasium_robotics", "gymnasium-robotics"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, task_id, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        rs.make_env(f"gym/{task_id}", 2)


def test_without_gymnasium_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"rl_stagger\[gym\]"):
        GymnasiumEnv(2)


@pytest.mark.parametrize(
    "wrapper", [gym.wrappers.vector.RecordEpisodeStatistics, gym.wrappers.vector.NormalizeObservation]
)
def test_wrappers_that_lose_masks_are_refused(wrapper):
    with pytest.raises(ConfigError, match=wrapper.__name__):
        VectorEnvAdapter(wrapper(vector_env("NextStep")))


def test_a_vector_env_that_does_not_say_how_it_resets_is_refused():
    env = vector_env()
    env.metadata = {}
    with pytest.raises(ConfigError, match="autoreset_mode"):
        VectorEnvAdapter(env)


# -- training ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "overrides",
    [
        ["task=gym/CartPole-v1", "reset=staggered"],
        ["task=gym/Pendulum-v1", "reset=staggered_block"],
        ["task=gym/Acrobot-v1", "reset=snapshot"],
        ["task=gym/CartPole-v1", "reset=random_clock", "task.settings.vectorization=async"],
        ["task=gym/rl_stagger_test/Camera-v0", "task.settings.critic_keys=[mass]", "model=cnn",
         "model.cnn.channels=[4]", "model.cnn.kernels=[3]", "model.cnn.strides=[1]"],
    ],
)  # fmt: skip
def test_a_training_runs(overrides, tmp_path):
    sizes = ["num_envs=4", "rollout_steps=8", "iterations=2", "task.settings.horizon_steps=20"]
    cfg = rs.load_config([*overrides, *sizes, *QUIET, f"run_dir={tmp_path / 'run'}"])
    env = rs.make_env(cfg.task.name, cfg.num_envs, seed=cfg.seed, **cfg.task.settings)
    assert rs.Runner(env, cfg).learn().summary["status"] == "finished"
    env.close()


def test_a_resumed_training_goes_on_bitwise(tmp_path):
    def run(name, *more):
        cfg = rs.load_config(["task=gym/CartPole-v1", "num_envs=4", "rollout_steps=8", *QUIET, *more,
                              f"run_dir={tmp_path / name}"])  # fmt: skip
        env = rs.make_env(cfg.task.name, cfg.num_envs, seed=cfg.seed, **cfg.task.settings)
        runner = rs.Runner(env, cfg)
        runner.learn()
        return runner.model.state_dict()

    whole = run("whole", "iterations=4")
    run("parts", "iterations=2")
    parts = run("parts", "iterations=4", "resume=latest")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize(("task_id", "solved"), [("CartPole-v1", 475.0), ("Pendulum-v1", -200.0)])
def test_the_task_files_settings_solve_it(task_id, solved, tmp_path):
    from rl_stagger.evaluate import first_episodes

    cfg = rs.load_config([f"task=gym/{task_id}", *QUIET, f"run_dir={tmp_path / 'run'}"])
    runner = rs.Runner(rs.make_env(cfg.task.name, cfg.num_envs, seed=cfg.seed, **cfg.task.settings), cfg)
    runner.learn()
    episodes = first_episodes(
        rs.make_env(f"gym/{task_id}", 100, seed=99, **{k: v for k, v in cfg.task.settings.items() if k != "task_id"}),
        runner.model.act_mode,
    )
    assert episodes.returns.mean() >= solved
