"""Building a ManiSkill batch, and saying what is missing where it cannot be built."""

# pyright: reportMissingImports=false

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Mapping, Optional

import torch

from rl_stagger.errors import ConfigError, nearest

BACKENDS = ("auto", "physx_cpu", "physx_cuda")
REWARD_MODES = ("normalized_dense", "dense", "sparse", "none")
VULKAN = """ManiSkill needs a Vulkan driver, even for tasks that draw nothing, and this machine has no usable
one ({what}).
On a GPU: NVIDIA's driver with its Vulkan part (libnvidia-gl-<version>, and /usr/share/vulkan/icd.d/nvidia_icd.json).
On a CPU, Mesa's software driver, 23 or newer; as root, on Debian 12:
    echo "deb http://deb.debian.org/debian bookworm-backports main" > /etc/apt/sources.list.d/backports.list
    apt-get update && apt-get install -t bookworm-backports mesa-vulkan-drivers libvulkan1
On Debian 13 and Ubuntu 24.04: apt-get install mesa-vulkan-drivers libvulkan1. In a clone: scripts/ci/vulkan.sh."""


def check_settings(
    num_envs: int, num_workers: Optional[int], device: torch.device, settings: Mapping[str, Any]
) -> None:
    """Raise ConfigError for what cannot work, before a simulator is loaded."""
    for name, value, least in (("num_envs", num_envs, 1), ("num_workers", num_workers, 0)):
        if name == "num_workers" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r}: a whole number of at least {least}")
    horizon = settings["horizon_steps"]
    if horizon is not None and (not isinstance(horizon, int) or horizon < 1):
        raise ConfigError(f"horizon_steps={horizon!r}: a whole number of at least 1, or null")
    backend = settings["sim_backend"].partition(":")[0]
    if backend not in BACKENDS:
        raise ConfigError(f"sim_backend={backend!r}: {nearest(backend, BACKENDS)}")
    if backend == "physx_cuda" and device.type != "cuda":
        raise ConfigError(f"sim_backend=physx_cuda with device={device}: it needs a GPU, device=cuda:0")
    reward_mode = settings["reward_mode"]
    if reward_mode is not None and reward_mode not in REWARD_MODES:
        raise ConfigError(f"reward_mode={reward_mode!r}: {nearest(str(reward_mode), REWARD_MODES)}")
    if backend == "physx_cuda" and num_envs > 1 and settings["reconfiguration_freq"]:
        raise ConfigError(
            f"reconfiguration_freq={settings['reconfiguration_freq']} with num_envs={num_envs}: ManiSkill builds the "
            "scenes of all environments anew at once, and episodes here end one by one; use 0, or physx_cpu"
        )


def make_host(num_envs: int, settings: Mapping[str, Any]) -> Any:
    """`gymnasium.make` of the task. Raises ConfigError for an unknown task, missing assets, settings that it does not
    take, and a missing Vulkan driver."""
    task_id = settings["task_id"]
    try:
        import gymnasium as gym
        import mani_skill.envs  # noqa: F401  registers its tasks
        from mani_skill.utils.registration import REGISTERED_ENVS
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task maniskill/{task_id} needs ManiSkill3 ({error}): pip install 'rl_stagger[maniskill]', best "
            "into an environment of its own"
        ) from error
    if task_id not in REGISTERED_ENVS:
        raise ConfigError(f"task_id={task_id!r}: ManiSkill has no such task; {nearest(task_id, REGISTERED_ENVS)}")
    arguments: Dict[str, Any] = {
        "num_envs": num_envs,
        "obs_mode": settings["obs_mode"],
        "sim_backend": settings["sim_backend"],
        "render_backend": settings["render_backend"],
        **settings["env_kwargs"],
    }
    for name in ("control_mode", "reward_mode", "reconfiguration_freq"):
        if settings[name] is not None:
            arguments[name] = settings[name]
    if settings["horizon_steps"] is not None:
        arguments["max_episode_steps"] = settings["horizon_steps"]
    try:
        with torch.inference_mode(False), _no_questions(task_id):
            return gym.make(task_id, **arguments)
    except ConfigError:
        raise
    except (TypeError, NotImplementedError, AssertionError, KeyError, ValueError) as error:
        raise ConfigError(f"task_id={task_id!r} with {arguments}: {type(error).__name__}: {error}") from error
    except RuntimeError as error:
        if _about_vulkan(error):
            raise ConfigError(VULKAN.format(what=str(error).splitlines()[0])) from error
        raise


@contextmanager
def _no_questions(task_id: str) -> Iterator[None]:
    """Where the task's or the robot's files are missing, ManiSkill asks at the keyboard and exits; here it raises."""
    from mani_skill.utils import download_asset

    def refuse(question: str) -> bool:
        robot = re.match(r"Robot (\S+) ", question)
        wanted = robot.group(1) if robot else task_id
        raise ConfigError(
            f"task_id={task_id!r}: {question.partition('. Would you')[0]}. "
            f"Download them: python -m mani_skill.utils.download_asset {wanted}"
        )

    asked = download_asset.prompt_yes_no
    download_asset.prompt_yes_no = refuse
    try:
        yield
    finally:
        download_asset.prompt_yes_no = asked


def _about_vulkan(error: RuntimeError) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("vulkan", "rendering device", "render device", "vk::", "icd"))
