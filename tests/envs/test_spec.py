"""Observation groups as the spec tells them: who reads which, and of what dtype they are."""

import pytest
import torch

from rl_stagger.envs.base import Box, EnvSpec, check_obs
from rl_stagger.errors import ContractError

CPU = torch.device("cpu")


def spec_of(shapes, dtypes=None):
    return EnvSpec(shapes, Box(1), None, obs_dtypes=dtypes or {})


@pytest.mark.parametrize(
    "groups, actor, critic",
    [
        (["policy"], ["policy"], ["policy"]),
        (["policy", "critic"], ["policy"], ["critic"]),
        (["policy/camera", "policy", "image"], ["policy/camera", "policy"], ["policy/camera", "policy"]),
        (["policy", "policy/camera", "critic/camera"], ["policy", "policy/camera"], ["critic/camera"]),
        (["critic/b", "policy", "critic", "critics", "policy_old"], ["policy"], ["critic/b", "critic"]),
    ],
)
def test_who_reads_what(groups, actor, critic):
    spec = spec_of(dict.fromkeys(groups, (1,)))
    assert (list(spec.actor_groups), list(spec.critic_groups)) == (actor, critic)


def test_groups_are_float32_unless_said_otherwise():
    spec = spec_of({"policy": (2,), "policy/camera": (3, 4, 4)}, {"policy/camera": torch.uint8})
    assert (spec.obs_dtype("policy"), spec.obs_dtype("policy/camera")) == (torch.float32, torch.uint8)


@pytest.mark.parametrize(
    "dtypes, match",
    [
        ({"polcy": torch.uint8}, r"obs_dtypes: there is no group 'polcy'; did you mean 'policy'\?"),
        ({"policy": torch.float64}, r"obs_dtypes\['policy'\]=torch.float64: torch.float32 or torch.uint8"),
        ({"policy": torch.int64}, r"obs_dtypes\['policy'\]=torch.int64"),
    ],
)
def test_dtypes_that_cannot_be(dtypes, match):
    with pytest.raises(ValueError, match=match):
        spec_of({"policy": (2,)}, dtypes)


def test_an_observation_of_the_other_dtype_is_named():
    spec = spec_of({"policy": (2,), "policy/camera": (1, 2, 2)}, {"policy/camera": torch.uint8})
    right = {"policy": torch.zeros(3, 2), "policy/camera": torch.zeros(3, 1, 2, 2, dtype=torch.uint8)}
    check_obs("obs", right, spec, 3, CPU)
    for name, expected in (("policy", "float"), ("policy/camera", "uint8")):
        other = torch.float32 if expected == "uint8" else torch.uint8
        with pytest.raises(ContractError, match=rf"obs\['{name}'\] is \[.*\] {other} .* {expected} on cpu"):
            check_obs("obs", {**right, name: right[name].to(other)}, spec, 3, CPU)
