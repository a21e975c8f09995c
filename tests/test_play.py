"""Playing a trained policy: which episodes are shown, the film decoded again, and what cannot work."""

import builtins
import re
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from helpers.image_envs import SideOfLight
from helpers.toy_envs import TallyEnv
from helpers.toy_envs_runner import CounterEnv, PlainEnv, small_tree

import rl_stagger as rs
from rl_stagger.cli import main
from rl_stagger.config import build_config
from rl_stagger.envs.base import Capability, Step
from rl_stagger.play import Episode, Film, PlayConfig, parse, play, play_episodes
from rl_stagger.policy import load_run, trained_env

needs_ffmpeg = pytest.mark.skipif(find_spec("imageio_ffmpeg") is None, reason="pip install 'rl_stagger[video]'")


def still(obs):
    return torch.zeros(1, 1)


class Filmed(CounterEnv):
    """A CounterEnv whose picture says how many steps its episode is old; calls are counted."""

    def render(self, env_index=0):
        return int(self.state["count"][env_index])


class Dummy(Filmed):
    """As Gymnasium's NEXT_STEP: the step after a done one is a reset step and counts nothing."""

    capabilities = Filmed.capabilities

    def step(self, action):
        if getattr(self, "over", False):
            self.over = False
            obs = self.reset()
            no = torch.zeros(1, dtype=torch.bool)
            return Step(obs, torch.full((1,), 99.0), ~no, ~no, None, no)
        self.set_manual_reset(True)
        step = super().step(action)
        self.set_manual_reset = lambda manual: None  # type: ignore[method-assign]
        self.over = bool(step.done[0])
        return step


# -- episodes -------------------------------------------------------------------------------------------------------
def test_every_state_is_shown_once_the_last_included():
    # Episodes of 3 steps, rewards 1 + 2 + 3
    shown = []
    played = play_episodes(Filmed(1, lengths=[3]), still, 2, show=shown.append)
    assert played == [Episode(6.0, 3, None, True)] * 2
    assert shown == [0, 1, 2, 3, 0, 1, 2, 3]


def test_where_an_environment_cannot_wait_the_last_state_is_left_out():
    shown = []
    env = Filmed(1, lengths=[3], without=[Capability.MANUAL_RESET])
    env.set_manual_reset = lambda manual: None if not manual else pytest.fail("asked for what it cannot do")
    played = play_episodes(env, still, 2, show=shown.append)
    assert played == [Episode(6.0, 3, None, True)] * 2
    assert shown == [0, 1, 2, 0, 1, 2]


def test_steps_in_which_nothing_happens_count_nothing():
    env = Dummy(1, lengths=[3], without=[Capability.MANUAL_RESET])
    assert play_episodes(env, still, 2) == [Episode(6.0, 3, None, True)] * 2


def test_success_and_what_is_cut_off(capsys):
    assert play_episodes(TallyEnv(1, 10, lengths=[4]), still, 1) == [Episode(10.0, 4, True, True)]
    assert play_episodes(TallyEnv(1, 10), still, 3, steps=12) == [
        Episode(55.0, 10, True, True),
        Episode(3.0, 2, None, False),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "  episode 1: return 55.000, 10 steps, success",
        "  episode 2: return 3.000, 2 steps, unfinished",
    ]


def test_an_endless_task_asks_for_steps():
    with pytest.raises(rs.ConfigError, match=r"steps=null: this task has no time limit"):
        play_episodes(PlainEnv(1), still, 1)
    assert play_episodes(PlainEnv(1), still, 1, steps=4)[0].length_steps == 4


# -- a run ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "chain"
    tree = small_tree(folder, task={"name": "pendulum", "settings": {"horizon_steps": 20}})
    config = build_config({**tree, "phase_encoding": {"kind": "linear"}})
    env = rs.make_env("pendulum", config.num_envs, horizon_steps=20)
    rs.Runner(env, config).learn()
    return folder


def frames_of(path):
    """(frames [T, height, width, 3], frames per second), decoded by ffmpeg."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    decoded = subprocess.run(command, capture_output=True, check=True)
    said = re.search(r"Video: .* (\d+)x(\d+).* ([\d.]+) fps", decoded.stderr.decode())
    width, height, fps = (int(number) for number in said.groups())
    frames = torch.frombuffer(bytearray(decoded.stdout), dtype=torch.uint8)
    return frames.view(-1, height, width, 3).float(), fps


@needs_ffmpeg
def test_a_film_shows_what_was_rendered(run, tmp_path, capsys):
    path = tmp_path / "made" / "out.mp4"
    assert play([f"run={run}", f"video={path}", "episodes=2", "fps=10"]) == 0
    frames, fps = frames_of(path)
    assert (len(frames), fps) == (2 * 21, 10)
    env, model = trained_env(load_run(run), 1, "cpu", PlayConfig.seed)
    env.set_manual_reset(True)
    obs, wanted = env.reset(), []
    for _ in range(20):
        wanted.append(env.render(0))
        obs = env.step(model.act_mode(obs)).obs
    for t, want in enumerate(wanted):
        off, moved = (frames[t] - want).abs(), (want.float() - wanted[0]).abs() > 100
        assert off.mean() < 3.0, f"frame {t}"
        assert t < 5 or off[moved].mean() < 40.0, "what is drawn elsewhere than at first is seen there"
    out = capsys.readouterr().out
    assert "pendulum, iteration 2" in out
    assert "episode 2: return -" in out
    assert f"written to {path}: 42 frames, 4.2 s at 10 a second" in out


def test_the_same_seed_plays_the_same_and_sampling_does_not(run, capsys):
    def lines(*arguments):
        assert play([f"run={run}", *arguments]) == 0
        return capsys.readouterr().out.splitlines()[1:]

    assert lines() == lines("deterministic=true") == lines("seed=10000", "device=cpu")
    assert lines() != lines("seed=3")
    assert lines("deterministic=false") == lines("deterministic=false") != lines()


def test_the_policy_is_played_as_it_was_trained(run):
    env, model = trained_env(load_run(run), 1, "cpu", 0)
    assert env.spec.phase_columns == {"policy": 1}
    assert not isinstance(env, rs.StaggeredResets)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    before = {name: x.clone() for name, x in model.state_dict().items()}
    play_episodes(env, model.act_mode, 1)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


told = []


class Curriculum(CounterEnv):
    """A task whose saved state holds a level."""

    def state_dict(self):
        return {**super().state_dict(), "level": 5}

    def load_state_dict(self, state):
        super().load_state_dict({name: value for name, value in state.items() if name != "level"})

    def load_curriculum(self, state):
        told.append(state["level"])

    def set_evaluation(self, evaluating):
        told.append(evaluating)


def test_a_curriculum_is_at_the_training_s_level_and_frozen(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "some_tasks", SimpleNamespace(Curriculum=Curriculum))
    config = build_config(small_tree(tmp_path / "a", task="some_tasks:Curriculum"))
    rs.Runner(rs.make_env("some_tasks:Curriculum", 6), config).learn()
    told.clear()
    assert play([f"run={tmp_path / 'a'}"]) == 0
    assert told == [5, True]


def test_settings_of_the_task(run, capsys):
    assert play([f"run={run}", "task.settings.horizon_steps=7"]) == 0
    assert "7 steps" in capsys.readouterr().out
    config, settings = parse([str(run), "task.settings.horizon_steps=7", "task.settings.gravity_m_s2=9.5"])
    assert (config.run, settings) == (str(run), {"horizon_steps": 7, "gravity_m_s2": 9.5})


def test_paths_are_taken_as_they_are_written():
    config, _ = parse(["run=runs/a=b,c {d}", "video=x [1].mp4", "steps=5"])
    assert config == PlayConfig("runs/a=b,c {d}", "x [1].mp4", steps=5)
    assert parse(["run=a", "video=null", "steps=null", "device=cpu"])[0] == PlayConfig("a", device="cpu")


@pytest.mark.parametrize(
    "arguments, match",
    [
        ([], "which run"),
        (["runs/nothing_here"], "run=runs/nothing_here: no such file or folder"),
        (["run=latest"], "run=latest: there is no checkpoint under runs"),
        (["RUN", "vide=out.mp4"], r"vide=out.mp4: there is no such setting; did you mean 'video'\?"),
        (["RUN", "episodes"], "'episodes': settings are given as key=value"),
        (["RUN", "episodes=0"], "episodes=0: at least 1"),
        (["RUN", "steps=0"], "steps=0: at least 1"),
        (["RUN", "fps=many"], "fps='many': expected a whole number"),
        (["RUN", "seed=-1"], "seed=-1: between 0"),
        (["RUN", "video=out.gif"], "video=out.gif: a file name that ends in one of .mp4"),
        (["RUN", "device=cuda:99"], "device=cuda:99"),
        (["RUN", "task.settings.horizon_step=5"], "did you mean 'horizon_steps'"),
        (["RUN", "task.settings.gravity_m_s2=-1"], "task pendulum with settings .*gravity_m_s2=-1"),
    ],
)
def test_what_cannot_work(run, arguments, match, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = [f"run={run}" if argument == "RUN" else argument for argument in arguments]
    assert main(["play", *given]) == 2
    assert re.search(match, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_film(run, tmp_path):
    (tmp_path / "a.mp4").mkdir()
    with pytest.raises(rs.ConfigError, match="this is a folder"):
        play([f"run={run}", f"video={tmp_path / 'a.mp4'}"])


def test_another_observation_than_in_training_is_named(tmp_path):
    config = build_config(small_tree(tmp_path / "a", task={"name": "legged_bench"}))
    rs.Runner(rs.make_env("legged_bench", 6), config).learn()
    with pytest.raises(rs.ConfigError, match=r"the task now has obs_shapes .*'critic': \[60\].* trained with .*\[48\]"):
        play([f"run={tmp_path / 'a'}", "task.settings.critic_obs=true"])
    with pytest.raises(rs.CapabilityError, match="LeggedBench cannot do 'render'"):
        play([f"run={tmp_path / 'a'}", f"video={tmp_path / 'x.mp4'}"])
    assert not (tmp_path / "x.mp4").exists()


# -- the film -------------------------------------------------------------------------------------------------------
def test_without_imageio_the_line_to_type_is_named(run, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("imageio"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(rs.ConfigError, match=r"pip install 'rl_stagger\[video\]'"):
        play([f"run={run}", f"video={tmp_path / 'x.mp4'}"])
    assert play([f"run={run}"]) == 0, "the figures need no film"


@needs_ffmpeg
def test_odd_edges_get_a_line(tmp_path):
    with Film(tmp_path / "a.mp4", 5) as film:
        for shade in (0, 200):
            film.add(torch.full((31, 45, 3), shade, dtype=torch.uint8))
    frames, _ = frames_of(tmp_path / "a.mp4")
    assert tuple(frames.shape) == (2, 32, 46, 3)
    assert frames[0].mean() < 20
    assert frames[1, :31, :45].mean() > 190
    assert frames[1, 31].mean() < 60, "the line below is black"
    assert frames[1, :31, 45].mean() < 60


@needs_ffmpeg
@pytest.mark.parametrize("picture", [torch.zeros(8, 8, 3), torch.zeros(8, 8, dtype=torch.uint8)])
def test_what_is_no_picture_is_named(tmp_path, picture):
    with Film(tmp_path / "a.mp4", 5) as film, pytest.raises(
        rs.ContractError, match=r"expected \[height, width, 3\] uint8"
    ):
        film.add(picture)
    with Film(tmp_path / "b.mp4", 5) as film:
        film.add(torch.zeros(32, 32, 3, dtype=torch.uint8))
        with pytest.raises(rs.ContractError, match=r"\[34, 32, 3\] after pictures of \[32, 32, 3\]"):
            film.add(torch.zeros(34, 32, 3, dtype=torch.uint8))


def test_a_policy_of_images_plays(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "image_tasks", SimpleNamespace(SideOfLight=SideOfLight))
    cnn = {"name": "cnn", "cnn": {"channels": [4], "kernels": [3], "strides": [1], "features": 8}}
    config = build_config(small_tree(tmp_path / "a", task="image_tasks:SideOfLight", model=cnn))
    rs.Runner(rs.make_env("image_tasks:SideOfLight", 6), config).learn()
    assert play([f"run={tmp_path / 'a'}"]) == 0


@needs_ffmpeg
def test_gymnasium_s_render_mode_is_set_for_a_film(tmp_path):
    gym = pytest.importorskip("gymnasium")
    from helpers.gym_envs import Camera

    class Flat(Camera):
        metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

        def __init__(self, **settings):
            super().__init__(**settings)
            self.observation_space = gym.spaces.Box(-100, 100, (2,))

        def _look(self):
            return super()._look()["joints"].astype("float32")

    gym.register("rl_stagger_test/Flat-v0", Flat, max_episode_steps=9)
    quiet = ["logging.console=off", "logging.tensorboard=false", "logging.curves=false"]
    sizes = ["num_envs=4", "rollout_steps=3", "iterations=1", f"run_dir={tmp_path / 'run'}"]
    cfg = rs.load_config(["task=gym/rl_stagger_test/Flat-v0", *sizes, *quiet])
    rs.Runner(rs.make_env(cfg.task.name, 4, **cfg.task.settings), cfg).learn()
    assert play([f"run={tmp_path / 'run'}", f"video={tmp_path / 'out.mp4'}"]) == 0
    assert (tmp_path / "out.mp4").stat().st_size > 0
