"""Watching a trained policy: some episodes of one environment, and a film of them."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.config import from_tree
from rl_stagger.device import pick_device
from rl_stagger.envs.base import Capability, Obs, VecEnv
from rl_stagger.errors import ConfigError, ContractError, nearest
from rl_stagger.policy import load_run, trained_env
from rl_stagger.rng import make_generator, seed_everything

FORMATS = (".mp4", ".mkv", ".mov")
TASK_PREFIX = "task.settings."


@dataclass(frozen=True)
class PlayConfig:
    """Settings of `play`."""

    run: str
    """latest, a run directory, or one of its checkpoints."""
    video: Optional[str] = None
    """File to write, e.g. out.mp4; null: only the episodes' figures."""
    episodes: int = 1
    steps: Optional[int] = None
    """Stop after so many steps; needed where the task has no time limit."""
    deterministic: bool = True
    """false: actions are sampled, as in training."""
    seed: int = 10_000
    """Of the environment; other episodes than those of training."""
    device: Optional[str] = None
    """null: the run's."""
    fps: int = 30
    """Environment steps in a second of the film."""

    def check(self) -> None:
        """Raise ConfigError for what cannot work."""
        for name in ("episodes", "steps", "fps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: at least 1")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed}: between 0 and 2^32 - 1")
        if self.video is not None:
            suffix = Path(self.video).suffix.lower()
            if suffix not in FORMATS:
                raise ConfigError(f"video={self.video}: a file name that ends in one of {', '.join(FORMATS)}")
            if Path(self.video).is_dir():
                raise ConfigError(f"video={self.video}: this is a folder, not a file")

    @staticmethod
    def usage() -> str:
        return (
            "usage: rl-stagger play run=<latest, run directory or checkpoint> [video=out.mp4] [episodes=1] [steps=N]\n"
            "       [deterministic=true] [fps=30] [seed=10000] [device=cpu] [task.settings.<name>=<value> ...]\n"
        )


class Episode(NamedTuple):
    """One episode, or what was seen of it."""

    return_: float
    length_steps: int
    success: Optional[bool]
    """None where the task does not know."""
    finished: bool


def play(arguments: List[str]) -> int:
    """Play the policy that `arguments` (key=value) name; prints its episodes and returns the exit code 0.

    Raises ConfigError, CapabilityError and CheckpointError for what cannot work.
    """
    if any(a in ("-h", "--help") for a in arguments):
        print(PlayConfig.usage(), end="")
        return 0
    config, settings = parse(arguments)
    play_run(config, settings)
    return 0


def parse(arguments: List[str]) -> Tuple[PlayConfig, Dict[str, Any]]:
    """(settings of `play`, settings of the task that count over the run's)."""
    if arguments and "=" not in arguments[0]:
        arguments = [f"run={arguments[0]}", *arguments[1:]]
    own: Dict[str, str] = {}
    of_task: Dict[str, str] = {}
    valid = [field.name for field in dataclasses.fields(PlayConfig)]
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"'{argument}': settings are given as key=value, e.g. episodes=2")
        if key.startswith(TASK_PREFIX):
            of_task[key[len(TASK_PREFIX) :]] = value
        elif key in valid:
            own[key] = value
        else:
            raise ConfigError(f"{argument}: there is no such setting; {nearest(key, [*valid, TASK_PREFIX + '<name>'])}")
    if "run" not in own:
        raise ConfigError(f"which run?\n{PlayConfig.usage()}".rstrip())
    # Paths are taken as they are written: they may hold what the grammar of the others reads otherwise.
    texts = {key: own.pop(key) for key in ("run", "video") if key in own}
    tree = _values(own)
    tree.update({key: None if key == "video" and text in ("", "null") else text for key, text in texts.items()})
    config = from_tree(PlayConfig, tree, "")
    config.check()
    return config, _values(of_task)


def _values(texts: Dict[str, str]) -> Dict[str, Any]:
    """What the texts mean as YAML."""
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={value}" for key, value in texts.items()]))
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def play_run(config: PlayConfig, settings: Dict[str, Any]) -> List[Episode]:
    """Rebuild the run's task with one environment and let its policy act; the reset rule of the training is not used.
    Returns the episodes, the last of them perhaps unfinished."""
    trained = load_run(config.run, key="run")
    seed_everything(config.seed)
    torch.set_num_threads(trained.config.threads)
    device = pick_device(config.device or trained.config.device)
    with ExitStack() as stack:
        if config.video is not None and "render_mode" in trained.config.task.settings:  # Gymnasium's
            settings = {"render_mode": "rgb_array", **settings}
        env, model = trained_env(trained, 1, device, config.seed, settings)
        stack.callback(env.close)
        generator = make_generator(env.device, config.seed)

        def act(obs: Obs) -> Tensor:
            return model.act_mode(obs) if config.deterministic else model.act(obs, generator).env_action

        film = None
        if config.video is not None:
            if Capability.RENDER not in env.capabilities:
                raise env.lacks(Capability.RENDER)
            film = stack.enter_context(Film(Path(config.video), config.fps))
        task = trained.config.task.label or trained.config.task.name
        print(f"{task}, iteration {trained.state['iteration']} ({trained.checkpoint})")
        show = None if film is None else film.add
        episodes = play_episodes(env, act, config.episodes, config.steps, show)
    if film is not None:
        print(
            f"written to {film.path}: {film.frames} frames, {film.frames / config.fps:.1f} s at {config.fps} a second"
        )
    return episodes


@torch.no_grad()
def play_episodes(
    env: VecEnv,
    act: Callable[[Obs], Tensor],
    episodes: int,
    steps: Optional[int] = None,
    show: Optional[Callable[[Any], None]] = None,
) -> List[Episode]:
    """Play `env` (N = 1) until `episodes` are over or `steps` are done. `show` gets a picture of every state.

    An episode's last state is shown only where the environment can wait in it (Capability.MANUAL_RESET).
    """
    horizon = env.spec.horizon_steps
    if steps is None and horizon is None:
        raise ConfigError("steps=null: this task has no time limit; give one, e.g. steps=1000")
    limit = steps or episodes * (horizon or 0) + episodes  # one more each: a step in which nothing but a reset happens
    waits = Capability.MANUAL_RESET in env.capabilities
    env.set_manual_reset(waits)

    def picture() -> None:
        if show is not None:
            show(env.render(0))

    played: List[Episode] = []
    total, length, success = 0.0, 0, None
    obs = env.reset()
    picture()
    for _ in range(limit):
        step = env.step(act(obs))
        obs = step.obs
        if bool(step.valid[0]):
            total, length = total + float(step.reward[0]), length + 1
        ended = bool((step.done & step.valid)[0])
        if ended:
            success = bool(step.info["success"][0]) if "success" in step.info else None
            played.append(Episode(total, length, success, True))
            _print(len(played), played[-1])
            total, length = 0.0, 0
        more = len(played) < episodes
        if waits or not ended or more:
            picture()
        if not more:
            break
        if ended and waits:
            obs = env.reset()
            picture()
    if length:
        played.append(Episode(total, length, None, False))
        _print(len(played), played[-1])
    return played


def _print(number: int, episode: Episode) -> None:
    end = "unfinished" if not episode.finished else {None: "", True: "success", False: "no success"}[episode.success]
    print(f"  episode {number}: return {episode.return_:.3f}, {episode.length_steps} steps{end and ', ' + end}")


class Film:
    """A video file, one picture after the other; H.264."""

    def __init__(self, path: Path, fps: int) -> None:
        self.path, self.fps, self.frames = path, fps, 0
        self._writer: Any = None
        self._shape: Tuple[int, ...] = ()
        try:
            import imageio.v2 as imageio
            import imageio_ffmpeg  # noqa: F401  (what imageio writes H.264 with)
        except ImportError as error:
            raise ConfigError(f"video={path}: needs imageio with ffmpeg: pip install 'rl_stagger[video]'") from error
        self._open = imageio.get_writer

    def __enter__(self) -> Film:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, picture: Any) -> None:
        """Append one picture [height, width, 3] uint8; odd edges get a black line more, which H.264 asks for."""
        import numpy as np

        frame = np.asarray(picture)
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise ContractError(f"render() gave {list(frame.shape)} {frame.dtype}, expected [height, width, 3] uint8")
        if self._writer is None:
            self._shape = frame.shape
            self._writer = self._open(str(self.path), fps=self.fps, codec="libx264", quality=8, macro_block_size=1)
        if frame.shape != self._shape:
            raise ContractError(f"render() gave {list(frame.shape)} after pictures of {list(self._shape)}")
        height, width = frame.shape[:2]
        self._writer.append_data(np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0))))
        self.frames += 1
