"""Images from the environment to the gradient: stored as bytes, learned from, and whole after a resume."""

import pytest
import torch
from helpers.image_envs import EDGE, SideOfLight
from helpers.toy_envs_runner import small_tree

import rl_stagger as rs
from rl_stagger.algorithms.ppo import PPO, Batch, PPOConfig, Table
from rl_stagger.checkpoint import load_checkpoint
from rl_stagger.config import build_config
from rl_stagger.evaluate import first_episodes
from rl_stagger.models.actor_critic import ActorCritic, ModelConfig
from rl_stagger.models.cnn import CNNConfig
from rl_stagger.policy import load_policy, spec_from_tree, spec_to_tree
from rl_stagger.rollout import Collector, Health, bad_rows, first_rows
from rl_stagger.stopwatch import Stopwatch

CNN = {"name": "cnn", "cnn": {"channels": [8], "kernels": [3], "strides": [1], "features": 32}}
LAYOUTS = ["image", "beside", "critic"]
CPU = torch.device("cpu")


def model_of(env, seed=0):
    torch.manual_seed(seed)
    return ActorCritic(env.spec, ModelConfig((8,), (8,), name="cnn", cnn=CNNConfig((4,), (3,), (1,), 6)))


def runner_of(run_dir=None, layout="beside", device="cpu", num_envs=6, env_settings=None, **top):
    top = {"model": {**CNN, "actor_hidden": [], "critic_hidden": []}, **top}
    env = SideOfLight(num_envs, device, layout=layout, **(env_settings or {}))
    encoding = top.pop("phase_encoding", {})
    tree = small_tree(run_dir, top.pop("reset", "staggered"), num_envs=num_envs, **top)
    return rs.Runner(env, build_config({**tree, "phase_encoding": encoding}))


# -- storage --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_stay_bytes_and_are_the_environments(layout):
    env, twin = (SideOfLight(4, layout=layout, horizon_steps=2) for _ in range(2))
    collector = Collector(env, model_of(env), 3, True, 1, Stopwatch(CPU))
    rollout = collector.collect()
    seen = [twin.reset()]
    steps = [twin.step(action) for action in rollout.action]
    seen += [step.obs for step in steps]
    for name in env.spec.obs_shapes:
        assert rollout.obs[name].dtype == env.spec.obs_dtype(name)
        assert torch.equal(rollout.obs[name], torch.stack([obs[name] for obs in seen])), name
    assert set(rollout.final_obs) == set(env.spec.critic_groups)
    for name, x in rollout.final_obs.items():
        assert x.dtype == env.spec.obs_dtype(name)
        assert torch.equal(x, torch.stack([step.final_obs[name] for step in steps])), name
    assert not any("camera" in name for name in bad_rows(rollout)), "bytes are always finite"
    part = rollout.first(2)
    assert {len(x) for x in part.final_obs.values()} == {2}
    assert {len(x) for x in part.obs.values()} == {3}


# -- learning -------------------------------------------------------------------------------------------------------
def test_values_piece_by_piece_are_the_values_at_once():
    """And each stands at its own row: stored observations first, then the final ones that are needed."""
    env = SideOfLight(5, layout="critic", horizon_steps=2)
    model = model_of(env)
    learner = PPO(model, PPOConfig(minibatches=4, normalize_advantage="none", gamma=1.0, lam=0.0), 1, 0)
    rollout = Collector(env, model, 3, True, 1, Stopwatch(CPU)).collect()
    assert rollout.needs_final.sum() == 5
    batch, estimates, _ = learner.make_batch(rollout, first_rows(rollout.needs_final, 5))
    with torch.no_grad():
        value = torch.stack([model.value({k: x[t] for k, x in rollout.obs.items()}) for t in range(4)])
        final = torch.stack([model.value({k: x[t] for k, x in rollout.final_obs.items()}) for t in range(3)])
    torch.testing.assert_close(estimates.value, value[:3])
    want = rollout.reward + torch.where(rollout.truncated, final, value[1:])
    torch.testing.assert_close(estimates.target, want)
    assert batch.obs["policy/camera"].dtype == torch.uint8
    assert batch.obs["policy/camera"].data_ptr() == rollout.obs["policy/camera"].data_ptr(), "no copy of all images"


def test_minibatches_keep_image_and_row_together():
    rows = torch.arange(13)
    obs = {"policy": rows.float().unsqueeze(1), "image": rows.to(torch.uint8).view(13, 1, 1, 1)}
    batch = Batch(obs, *(rows.clone() for _ in range(7)))
    table, seen = Table(batch, ("image",)), []
    for index in torch.randperm(13).tensor_split(4):
        part = table.gather(index)
        assert part.obs["image"].flatten().tolist() == part.obs["policy"].flatten().tolist() == part.action.tolist()
        seen += part.action.tolist()
    assert sorted(seen) == list(range(13))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_learns_what_only_the_image_tells(layout):
    # By chance .5. Three seeds of each layout reached .81 to .88 after 25 iterations
    algorithm = {"epochs": 4, "minibatches": 4, "learning_rate": 3e-3, "schedule": "fixed", "gamma": 0.0}
    runner = runner_of(layout=layout, num_envs=128, reset="synchronous", algorithm=algorithm)
    for _ in range(25):
        runner.iterate()

    def right_share(act):
        episodes = first_episodes(SideOfLight(256, seed=77, layout=layout), act)
        return float(episodes.returns.sum() / episodes.lengths.sum())

    assert right_share(runner.model.act_mode) > 0.75
    blind = right_share(lambda obs: runner.model.act_mode(darkened(obs)))
    assert 0.4 < blind < 0.6, "the picture is what it goes by"


def darkened(obs):
    return {name: torch.zeros_like(x) if x.dtype == torch.uint8 else x for name, x in obs.items()}


# -- the whole run --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reset", ["staggered", "staggered_block", "snapshot"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_bitwise_the_same(tmp_path, layout, reset):
    options = {
        "layout": layout,
        "reset": reset,
        "phase_encoding": {"kind": "linear"},
        "env_settings": {"horizon_steps": 12},
    }
    runner_of(tmp_path / "a", iterations=4, **options).learn()
    runner_of(tmp_path / "b", iterations=2, **options).learn()
    runner_of(tmp_path / "b", iterations=4, resume=str(tmp_path / "b"), **options).learn()
    a, b = (load_checkpoint(tmp_path / x / "checkpoints" / "iter_0000004.pt")["model"] for x in "ab")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_policy_of_images_is_loaded(tmp_path):
    runner = runner_of(tmp_path / "a")
    runner.learn()
    obs = SideOfLight(5, seed=3, layout="beside").reset()
    policy = load_policy(tmp_path / "a")
    assert torch.equal(policy.act_mode(obs), runner.model.act_mode(obs))
    assert policy.images == ("policy/camera",)
    spec = runner.env.spec
    assert spec_from_tree(spec_to_tree(spec)) == spec
    older = {key: value for key, value in spec_to_tree(spec).items() if key != "uint8"}
    assert spec_from_tree(older).obs_dtypes == {}, "a checkpoint from before knows no bytes"


def test_the_wrong_model_is_named_before_the_first_step():
    with pytest.raises(rs.ConfigError, match=r"model=mlp: .* 'policy/camera' is an image \[1, 8, 8\]; use model=cnn"):
        runner_of(model={})
    with pytest.raises(rs.ConfigError, match=rf"image 'policy/camera' \[1, {EDGE}, {EDGE}\] .* is too small"):
        runner_of(model={"name": "cnn", "cnn": {}})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reset", ["synchronous", "staggered_block"])
def test_nothing_is_read_on_the_meta_device(layout, reset):
    options = {"reset": reset, "phase_encoding": {"kind": "fourier", "critic_l2": 0.1}, "algorithm": {"epochs": 1}}
    runner = runner_of(layout=layout, device="meta", env_settings={"horizon_steps": 12}, **options)
    rows = runner.env.num_envs * runner.config.rollout_steps
    runner.read_health, runner.read_metrics = (lambda rollout: Health(rows, {})), lambda metrics: metrics
    for _ in range(2):
        metrics = runner.iterate()
    assert all(value.device.type == "meta" for value in metrics.values())


def test_the_helpers_pictures_are_right():
    env = SideOfLight(64)
    picture, right = env.reset()["policy"], env.state["right"]
    assert (picture.amax(dim=(1, 2, 3)) == 255).all()
    assert torch.equal((picture == 255)[:, 0, :, EDGE // 2 :].flatten(1).any(1), right)
