"""What every native task must honour, task by task."""

import inspect
from pathlib import Path

import pytest
import torch
import yaml

from rl_stagger.envs.base import Box, Capability, Discrete
from rl_stagger.envs.registry import make_env

H = 8
N = 5

CALM = {  # nothing ends an episode before H, nothing is drawn in `step`
    "skill_chain": {"num_stages": 2},
    "stage_gridworld": {"num_rooms": 2, "room_size": 2, "layout_seed": 0},
    "cartpole_swingup": {"success_steps": 3},
    "pendulum": {},
    "point_reach": {},
    "legged_bench": {"termination_probability": 0.0, "critic_obs": True},
}
WILD = {  # every source of chance that the task has
    "skill_chain": {"num_stages": 3, "gating": 0.5, "reset_noise": 0.5, "phase_in_obs": True},
    "stage_gridworld": {"num_rooms": 2, "room_size": 2, "reset_noise": 0.5},
    "cartpole_swingup": {"success_steps": 3, "track_half_m": 0.12},
    "pendulum": {},
    "point_reach": {"terminate_on_success": True, "goal_radius_m": 0.5},
    "legged_bench": {"termination_probability": 0.2},
}

every_task = pytest.mark.parametrize("task", sorted(CALM))


def build(task, settings, num_envs=N, seed=0, **more):
    return make_env(task, num_envs=num_envs, seed=seed, **{"horizon_steps": H, **settings[task], **more})


def actions_for(env, steps, seed=7):
    """A list of [N, A] or [N] actions, the same for the same arguments."""
    draw = torch.Generator().manual_seed(seed)
    if isinstance(env.spec.action, Discrete):
        return list(torch.randint(env.spec.action.n, (steps, env.num_envs), generator=draw))
    return list(torch.randn(steps, env.num_envs, env.spec.action.size, generator=draw))


def tensors_of(step):
    parts = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated, "valid": step.valid}
    parts.update({f"obs/{k}": v for k, v in step.obs.items()})
    parts.update({f"final/{k}": v for k, v in step.final_obs.items()})
    parts.update({f"log/{k}": v for k, v in step.info.get("log", {}).items()})
    if "success" in step.info:
        parts["success"] = step.info["success"]
    return parts


def play(env, actions):
    return [tensors_of(env.step(action)) for action in actions]


def assert_same(one, two):
    assert len(one) == len(two)
    for t, (a, b) in enumerate(zip(one, two)):
        assert set(a) == set(b)
        for name in a:
            assert torch.equal(a[name], b[name]), f"step {t}: {name}"


def differ(one, two):
    return any(not torch.equal(a[name], b[name]) for a, b in zip(one, two) for name in a)


def rows(*true_rows, num_envs=N):
    mask = torch.zeros(num_envs, dtype=torch.bool)
    mask[list(true_rows)] = True
    return mask


@every_task
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("settings", [CALM, WILD], ids=["calm", "wild"])
def test_shapes_and_dtypes(task, settings, num_envs):
    env = build(task, settings, num_envs)
    obs = env.reset()
    assert {name: tuple(value.shape[1:]) for name, value in obs.items()} == dict(env.spec.obs_shapes)
    for action in actions_for(env, 2 * H + 1):
        step = env.step(action)
        for group, shape in env.spec.obs_shapes.items():
            for value in (step.obs[group], step.final_obs[group]):
                assert value.shape == (num_envs, *shape)
                assert value.dtype == torch.float32
                assert torch.isfinite(value).all()
        assert step.reward.shape == (num_envs,)
        assert step.reward.dtype == torch.float32
        for mask in (step.terminated, step.truncated, step.valid, step.info.get("success", step.valid)):
            assert mask.shape == (num_envs,)
            assert mask.dtype == torch.bool
        assert step.valid.all()
        assert not (step.terminated & step.truncated).any()
        for value in step.info.get("log", {}).values():
            assert value.shape in ((), (num_envs,))
            assert value.is_floating_point()
        assert env.elapsed_steps.dtype == torch.int64
        assert (env.elapsed_steps[step.done] == 0).all()
        assert (env.elapsed_steps < H).all()


@every_task
def test_the_calm_settings_are_calm_and_the_wild_ones_vary(task):
    env = build(task, CALM)
    env.reset()
    assert not any(step["terminated"].any() for step in play(env, actions_for(env, H)[: H // 2]))
    wild = build(task, WILD)
    wild.reset()
    ended = [step["terminated"].any() for step in play(wild, actions_for(wild, 4 * H))]
    assert any(ended) == (task not in ("pendulum", "skill_chain"))


@every_task
def test_the_defaults_are_those_in_the_config_file(task):
    config = yaml.safe_load((Path(__file__).parents[3] / "configs" / "task" / f"{task}.yaml").read_text())["task"]
    assert config["name"] == task
    env = make_env(task, num_envs=2, **config["settings"])
    accepted = inspect.signature(type(env)).parameters
    defaults = {k: p.default for k, p in accepted.items() if k not in ("num_envs", "device", "seed")}
    assert config["settings"] == defaults
    assert env.spec.horizon_steps == config["settings"]["horizon_steps"]


@every_task
def test_a_step_before_the_first_reset_and_wrong_actions_are_refused(task):
    env = build(task, CALM)
    action = actions_for(env, 1)[0]
    with pytest.raises(RuntimeError, match="reset"):
        env.step(action)
    env.reset()
    with pytest.raises(ValueError, match="expected"):
        env.step(action[:2])
    with pytest.raises(ValueError, match="expected"):
        env.step(action.int())


@every_task
def test_a_partial_reset_changes_only_masked_rows(task):
    env = build(task, CALM)
    env.reset()
    moved = play(env, actions_for(env, 3))[-1]
    before = env.get_state()
    mask = rows(1, 3)
    obs = env.reset(mask)
    after = env.get_state()
    assert env.elapsed_steps.tolist() == [3, 0, 3, 0, 3]
    for name in before:
        assert torch.equal(before[name][~mask], after[name][~mask]), name
    for group, value in obs.items():
        assert torch.equal(value[~mask], moved[f"obs/{group}"][~mask])
    assert any(not torch.equal(before[name][mask], after[name][mask]) for name in before)


@every_task
def test_integer_and_misshapen_masks_are_refused(task):
    env = build(task, CALM)
    env.reset()
    indices = torch.tensor([0, 1, 0, 1, 0])
    for call in (
        lambda mask: env.reset(mask),
        lambda mask: env.set_elapsed_steps(torch.zeros(N, dtype=torch.int64), mask),
        lambda mask: env.get_state(mask),
        lambda mask: env.set_state(env.get_state(), mask),
    ):
        with pytest.raises(TypeError, match="bool"):
            call(indices)
        with pytest.raises(ValueError, match="shape"):
            call(torch.ones(N + 1, dtype=torch.bool))


def still(env, steps):
    """Actions under which every calm task moves and none ends early."""
    if hasattr(env, "right_actions"):
        return [env.right_actions[:1].expand(env.num_envs, -1)] * steps
    if isinstance(env.spec.action, Discrete):
        return [torch.full((env.num_envs,), 3, dtype=torch.int64)] * steps
    return actions_for(env, steps)


@every_task
def test_truncation_comes_at_exactly_h_with_the_old_episodes_observation(task):
    env, longer = build(task, CALM), build(task, CALM, horizon_steps=H + 2)
    env.reset(), longer.reset()
    short_steps, long_steps = play(env, still(env, H)), play(longer, still(longer, H))
    assert not any(s["terminated"].any() for s in short_steps)
    assert [s["truncated"].tolist() for s in short_steps] == [[False] * N] * (H - 1) + [[True] * N]
    last, reference = short_steps[-1], long_steps[-1]
    for group in env.spec.obs_shapes:
        assert torch.equal(last[f"final/{group}"], reference[f"obs/{group}"])
    assert torch.equal(last["reward"], reference["reward"])
    assert (env.elapsed_steps == 0).all()
    assert (longer.elapsed_steps == H).all()
    fresh = env.set_state(env.get_state())
    for group, value in fresh.items():
        assert torch.equal(last[f"obs/{group}"], value)
        assert not torch.equal(last[f"obs/{group}"], last[f"final/{group}"])


@every_task
def test_a_written_clock_truncates_exactly_that_row(task):
    env = build(task, CALM)
    env.reset()
    play(env, still(env, 1))
    state = env.get_state()
    env.set_elapsed_steps(torch.full((N,), H - 1), rows(2))
    assert env.elapsed_steps.tolist() == [1, 1, H - 1, 1, 1]
    for name, value in env.get_state().items():
        assert name == "elapsed_steps" or torch.equal(value, state[name]), "a clock write moved the state"
    step = env.step(still(env, 1)[0])
    assert step.truncated.tolist() == [False, False, True, False, False]
    assert env.elapsed_steps.tolist() == [2, 2, 0, 2, 2]


@every_task
def test_the_clock_is_a_clone(task):
    env = build(task, CALM)
    env.reset()
    env.elapsed_steps.fill_(3)
    assert (env.elapsed_steps == 0).all()


@every_task
def test_set_state_replays_bitwise(task):
    env = build(task, CALM)
    env.reset()
    play(env, still(env, 2))
    state = env.get_state()
    first = play(env, still(env, H - 3))
    env.set_state(state)
    assert_same(first, play(env, still(env, H - 3)))


@every_task
def test_set_state_writes_masked_rows_only_and_names_what_is_missing(task):
    env = build(task, CALM)
    env.reset()
    old = env.get_state()
    play(env, still(env, 3))
    now, mask = env.get_state(), rows(0, 4)
    env.set_state(old, mask)
    for name, value in env.get_state().items():
        assert torch.equal(value[mask], old[name][mask])
        assert torch.equal(value[~mask], now[name][~mask])
    with pytest.raises(ValueError, match="elapsed_steps"):
        env.set_state({"nonsense": torch.zeros(N)})


@every_task
def test_state_dict_continues_bitwise_in_a_fresh_instance(task):
    env = build(task, WILD)
    env.reset()
    play(env, actions_for(env, H + 3))
    saved = env.state_dict()
    actions = actions_for(env, 3 * H, seed=8)
    expected = play(env, actions)
    fresh = build(task, WILD, seed=99)
    fresh.load_state_dict(saved)
    assert_same(expected, play(fresh, actions))
    again = build(task, WILD, seed=98)
    again.load_state_dict(saved)
    assert_same(expected, play(again, actions))


@every_task
def test_manual_reset_freezes_waiting_rows_and_leaves_the_others_alone(task):
    env, twin = build(task, CALM), build(task, CALM)
    for each in (env, twin):
        each.set_manual_reset(True)
        each.reset()
    env.set_elapsed_steps(torch.full((N,), H - 1), rows(2))
    actions = still(env, 4)
    steps, twin_steps = play(env, actions), play(twin, actions)
    assert steps[0]["truncated"].tolist() == rows(2).tolist()
    assert steps[0]["valid"].all()
    others = ~rows(2)
    for t, (step, other) in enumerate(zip(steps, twin_steps)):
        for name in step:
            assert torch.equal(step[name][others], other[name][others]), f"step {t}: {name}"
    for step in steps[1:]:
        assert step["valid"].tolist() == others.tolist()
        assert not step["terminated"][2]
        assert not step["truncated"][2]
        assert step["reward"][2] == 0
        for group in env.spec.obs_shapes:
            assert torch.equal(step[f"obs/{group}"][2], steps[0][f"final/{group}"][2])
    assert env.elapsed_steps.tolist() == [4, 4, H, 4, 4]
    env.reset(rows(2))
    assert env.elapsed_steps.tolist() == [4, 4, 0, 4, 4]
    assert env.step(actions[0]).valid.all()


@every_task
def test_same_seed_same_trajectory_other_seed_another(task):
    def trajectory(seed, reseed=None):
        env = build(task, WILD, seed=seed)
        if reseed is not None:
            env.seed(reseed)
        return [dict(env.reset()), *play(env, actions_for(env, 3 * H))]

    reference = trajectory(0)
    assert_same(reference, trajectory(0))
    assert_same(reference, trajectory(5, reseed=0))
    assert differ(reference, trajectory(1))


@every_task
@pytest.mark.parametrize("manual", [False, True])
def test_returned_tensors_are_not_written_again(task, manual):
    env = build(task, WILD)
    env.set_manual_reset(manual)
    kept = [dict(env.reset()), *play(env, actions_for(env, 3))]
    state, saved = env.get_state(), env.state_dict()["state"]
    copies = [{name: value.clone() for name, value in part.items()} for part in [*kept, state, saved]]
    play(env, actions_for(env, 2 * H))
    env.reset()
    assert_same([*kept, state, saved], copies)


@every_task
def test_what_a_caller_does_to_the_returned_tensors_does_not_reach_the_task(task):
    env, twin = build(task, WILD), build(task, WILD)
    for each in (env, twin):
        each.reset()
    for value in env.set_state(env.get_state()).values():
        value.fill_(9.0)
    for action in actions_for(env, 2 * H):
        step, expected = tensors_of(env.step(action)), tensors_of(twin.step(action))
        assert_same([step], [expected])
        for value in step.values():
            value.fill_(1)


@every_task
@pytest.mark.parametrize("settings", [CALM, WILD], ids=["calm", "wild"])
@pytest.mark.parametrize("manual", [False, True])
def test_meta_device(task, settings, manual):
    """No step depends on data: the whole of it runs where there are no numbers."""
    env = build(task, settings, device="meta")
    env.set_manual_reset(manual)
    env.reset()
    for action in actions_for(env, 3):
        step = env.step(action.to("meta"))
        for name, value in tensors_of(step).items():
            assert value.device.type == "meta", name
        env.reset(step.done)
    env.set_state(env.get_state(), torch.ones(N, dtype=torch.bool, device="meta"))
    env.set_elapsed_steps(torch.zeros(N, dtype=torch.int64, device="meta"))


@every_task
def test_capabilities_and_bounds(task):
    env = build(task, CALM)
    for capability in Capability:
        expected = capability is not Capability.RENDER or task != "legged_bench"
        assert (capability in env.capabilities) == expected, capability
    if isinstance(env.spec.action, Box) and env.spec.action.bounded:
        twin = build(task, CALM)
        env.reset(), twin.reset()
        low, high = env.spec.action.bounds("cpu")
        action = 3 * actions_for(env, 1)[0]
        assert_same(play(env, [action]), play(twin, [action.clamp(low, high)]))


@every_task
def test_no_environments_are_refused(task):
    with pytest.raises(ValueError, match="num_envs=0"):
        make_env(task, num_envs=0)
