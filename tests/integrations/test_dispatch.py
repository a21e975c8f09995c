"""Finding the host, refusing what cannot be, and what all staggered environments share; no foreign library needed."""

import subprocess
import sys

import pytest
import torch
from helpers.toy_envs_runner import CounterEnv

import rl_stagger as rs
from rl_stagger.envs.base import Box, Capability, EnvSpec, Step
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.integrations import stagger
from rl_stagger.integrations.base import HostEnv, HostView, Rule

N, K, H = 6, 4, 12


class View(HostView):
    """A host's environment of no particular type."""

    def __init__(self, env, host=None):
        self.bind(env, host)


class StubHost(HostEnv):
    """A host's environment that shows nothing but zeros and ends at step H."""

    def __init__(self, capabilities=frozenset()):
        super().__init__(None, N, "cpu", EnvSpec({"policy": (1,)}, Box(1), H), capabilities)

    def _reset_all(self):
        return {"policy": torch.zeros(N, 1)}

    def _reset_rows(self, env_mask):
        return self._reset_all()

    def _step(self, action):
        nobody, everybody = torch.zeros(N, dtype=torch.bool), torch.ones(N, dtype=torch.bool)
        return Step(self._reset_all(), torch.zeros(N), nobody, self.clock + 1 >= H, None, everybody)


def steps(view, count):
    return [view.view_step(torch.zeros(N, 1)) for _ in range(count)]


def test_an_unknown_environment_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"builtins\.object: not an environment.*rsl_rl's VecEnv.*gymnasium's VectorEnv"
    ):
        stagger(object(), rollout_steps=K)


def test_one_of_our_own_is_told_how_to_become_one():
    with pytest.raises(ConfigError, match="as_rsl_rl"):
        stagger(CounterEnv(N), rollout_steps=K)


def test_the_most_particular_host_counts(monkeypatch):
    """ManiSkillVectorEnv is a Gymnasium VectorEnv, and Isaac Lab's wrapper an rsl_rl VecEnv."""
    asked = []
    monkeypatch.setattr("importlib.import_module", lambda name: asked.append(name) or sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "stagger_host", lambda env, rule: rule, raising=False)

    def instance(*classes):
        made = object
        for module, name in classes:
            made = type(name, (made,), {"__module__": module})
        return made()

    rsl_rl, gymnasium = ("rsl_rl.env.vec_env", "VecEnv"), ("gymnasium.vector.vector_env", "VectorEnv")
    stagger(instance(rsl_rl), K)
    stagger(instance(rsl_rl, ("isaaclab_rl.rsl_rl.vecenv_wrapper", "RslRlVecEnvWrapper")), K)
    stagger(instance(gymnasium, ("mani_skill.vector.wrappers.gymnasium", "ManiSkillVectorEnv")), K)
    stagger(instance(gymnasium, ("my.envs", "MyVectorEnv")), K)
    rule = stagger(instance(("stable_baselines3.common.vec_env.base_vec_env", "VecEnv")), K, seed=3, horizon_steps=9)
    assert [name.rsplit(".", 1)[1] for name in asked] == [
        "rsl_rl_env", "isaaclab_env", "maniskill_env", "gymnasium_env", "sb3_env",
    ]  # fmt: skip
    assert rule == Rule(K, 9, None, {"seed": 3})


def test_importing_it_imports_no_host(tmp_path):
    code = """if True:
        import sys
        from rl_stagger.integrations import stagger
        hosts = "rsl_rl rl_games skrl stable_baselines3 gymnasium mani_skill isaaclab_rl tensordict".split()
        assert not [name for name in hosts if name in sys.modules]
    """
    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr


def test_an_unknown_setting_is_named():
    with pytest.raises(ConfigError, match=r"bringup.*did you mean 'bring_up'"):
        stagger(View(CounterEnv(N, horizon_steps=H)), K, bringup="clock")


def test_a_view_of_ours_is_staggered_in_place():
    env = stagger(View(CounterEnv(N, horizon_steps=H)), K)
    assert isinstance(env, View)
    assert isinstance(env.stagger, rs.StaggeredResets)
    with pytest.raises(ConfigError, match="staggered already"):
        stagger(env, K)
    with pytest.raises(ConfigError, match="horizon_steps=9: the environment says its own, 12"):
        stagger(View(CounterEnv(N, horizon_steps=H)), K, horizon_steps=9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"gate": "block"}, "frozen steps"), ({"allocation": "adaptive"}, "follows advantages"),
     ({"num_groups_by_return": ((0.0, 3),)}, "only our own trainer tells returns")],
)  # fmt: skip
def test_what_needs_our_own_trainer_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        stagger(View(CounterEnv(N, horizon_steps=H)), K, **settings)


def test_measures_of_a_staggered_and_a_synchronous_view():
    """N_B = 3 groups at 0, 4, 8 of H = 12: every batch of K = 4 holds all three bins, two environments in each. The
    warm-up rolls 8 steps of 6 environments."""
    env = stagger(View(CounterEnv(N, horizon_steps=H)), K)
    assert env.measures()["batch/coverage"] is None
    steps(env, 8)
    measures = env.measures()
    assert measures["batch/coverage"] == pytest.approx(1.0)
    assert measures["batch/tv_distance"] == pytest.approx(0.0, abs=1e-6)
    assert measures["batch/phase_histogram"] == pytest.approx([1 / 3] * 3)
    assert measures["resets/per_step_max"] == 2  # one group at a time
    assert measures["resets/per_step_mean"] == 0.5  # 2 in 4 steps
    assert measures["steps/warmup"] == 48

    env = stagger(View(CounterEnv(N, horizon_steps=H)), K, bring_up="none")
    steps(env, 8)
    measures = env.measures()
    assert (measures["batch/coverage"], measures["batch/tv_distance"]) == (0.0, 1.0)
    assert measures["batch/phase_histogram"] == [0.0, 1.0, 0.0]


def test_measures_need_a_rule():
    with pytest.raises(ConfigError, match="no reset rule"):
        View(CounterEnv(N, horizon_steps=H)).measures()


def test_full_episodes_are_those_seen_from_their_first_step():
    """Groups at 0, 4, 8 (environments i mod 3): after 4 steps those at 8 end, begun in the warm-up; after 8 those at 4;
    after 12 those at 0, whole. After 16 those of the first group end, whole by now."""
    env = stagger(View(CounterEnv(N, horizon_steps=H)), K)
    ended = steps(env, 16)
    full = {t + 1: step.info["full"].tolist() for t, step in enumerate(ended) if step.done.any()}
    assert full[4] == full[8] == [False] * N
    assert full[12] == [True, False, False] * 2
    assert full[16] == [False, False, True] * 2


def test_a_cut_episode_is_not_full():
    class Cutting(CounterEnv):
        def step(self, action):
            step = super().step(action)
            step.truncated = step.truncated | torch.ones(N, dtype=torch.bool)
            step.info["cut"] = torch.arange(N) < 2
            return step

    step = steps(View(Cutting(N, horizon_steps=H)), 1)[0]
    assert step.info["full"].tolist() == [False] * 2 + [True] * 4


def test_schedules_go_by_rollouts():
    env = stagger(View(CounterEnv(N, horizon_steps=H)), K, num_groups_schedule=((0, 3), (2, 1)))
    steps(env, 7)
    assert env.stagger.num_groups == 3
    steps(env, 1)
    assert env.stagger.num_groups == 1


def test_a_host_without_partial_resets_is_refused_with_what_it_can_do():
    with pytest.raises(CapabilityError, match=r"bring_up='warmup'.*partial_reset.*possible here.*none"):
        Rule(K).around(StubHost())
    with pytest.raises(CapabilityError, match="partial_reset"):
        StubHost().reset(torch.ones(N, dtype=torch.bool))


def test_a_hosts_clock_is_counted_here():
    host = StubHost(frozenset({Capability.PARTIAL_RESET}))
    host.reset()
    for _ in range(5):
        host.step(None)
    assert host.elapsed_steps.tolist() == [5] * N
    host.reset(torch.arange(N) < 2)
    for _ in range(7):
        step = host.step(None)
    assert step.truncated.tolist() == [False] * 2 + [True] * 4
    assert host.elapsed_steps.tolist() == [7] * 2 + [0] * 4


def test_nothing_is_left_of_inference_mode():
    """rsl_rl collects under inference_mode; a tensor made there cannot be written outside."""
    env = stagger(View(CounterEnv(N, horizon_steps=H)), K)
    with torch.inference_mode():
        step = steps(env, 1)[0]
    assert not step.reward.is_inference()
    assert not env.stagger.phase_steps.is_inference()


def test_the_actor_gives_the_warm_ups_actions():
    seen = []

    class Recording(CounterEnv):
        def step(self, action):
            seen.append(action.clone())
            return super().step(action)

    env = stagger(View(Recording(N, horizon_steps=H)), K, actor=lambda obs: torch.full((N, 1), 0.25))
    env.view_obs()
    assert len(seen) == 8
    assert all((action == 0.25).all() for action in seen)


def test_a_step_reads_nothing_from_the_device():
    """The meta device has no values: a read would raise."""
    env = stagger(View(CounterEnv(N, device="meta", horizon_steps=H)), K, bring_up="none")
    for _ in range(2 * K + 1):
        step = env.view_step(torch.zeros(N, 1, device="meta"))
    assert step.info["full"].shape == (N,)
