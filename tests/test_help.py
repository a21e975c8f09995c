"""`rl-stagger train --help` shows every setting, as it is in force, and where it comes from."""

import re

import pytest

from rl_stagger.errors import ConfigError
from rl_stagger.help import as_text, train_help
from rl_stagger.overrides import _walk, compose


def section(text, name):
    """The lines of a group, or of config.yaml with name ""."""
    body = text.partition("Settings with")[2]
    return body if not name else re.search(rf"^{name}:\n((?:  .*\n)+)", body, re.MULTILINE).group(1)


def line(text, group, key):
    return re.search(rf"^ *{key}:.*$", section(text, group), re.MULTILINE).group(0).strip()


def test_usage_and_choices():
    text = train_help()
    for part in ("rl-stagger train [key=value", "train -m ", "resume=latest", "--hydra-help", "[256,256]'"):
        assert part in text
    assert re.search(r"task= +cartpole_swingup .*skill_chain\* .*module:Class\n  reset=", text, re.DOTALL)
    assert re.search(r"reset= +adaptive  density  mixed  random_clock  snapshot  staggered\*  .*upkept\n", text)
    assert "custom" not in text
    assert "hydra:" not in text
    assert "defaults:" not in text
    assert "@package" not in text


@pytest.mark.parametrize("task", ["skill_chain", "pendulum", "stage_gridworld", "legged_bench", "mjlab/go1_flat"])
def test_every_setting_is_there_with_the_value_in_force(task):
    text = train_help([f"task={task}", "reset=synchronous"])
    tree = compose([f"task={task}", "reset=synchronous"])
    for path, value in _walk(tree):
        if isinstance(value, dict) and value:
            continue
        group = path.partition(".")[0] if "." in path else ""
        shown = line(text, group, path.rpartition(".")[2]).partition("#")[0].partition(":")[2].strip().strip('"')
        same = shown == as_text(value) or float(shown) == value
        assert same, f"{path} is {value} and not {shown}"


def test_what_the_task_and_the_user_set_is_marked():
    text = train_help(["algorithm.gamma=0.9", "num_envs=8"])
    assert line(text, "algorithm", "gamma").endswith("[from your command line; default 0.99]")
    assert (
        line(text, "", "num_envs")
        == "num_envs: 8                   # N, parallel environments  [from your command line; default 512]"
    )
    assert "passes over the batch per iteration  [set by the task; default 5]" in line(text, "algorithm", "epochs")
    assert "[" not in line(text, "algorithm", "minibatches"), "the task sets what is the default anyway"
    assert line(text, "algorithm", "learning_rate_min").startswith("learning_rate_min: 0.00001 ")


def test_a_rule_that_builds_upon_another_shows_all_settings_and_its_own():
    text = train_help(["reset=synchronous", "reset.gate=block"])
    assert "set by reset=synchronous; default warmup]" in line(text, "reset", "bring_up")
    assert "from your command line; default immediate]" in line(text, "reset", "gate")
    assert "[" not in line(text, "reset", "upkeep_coverage")
    assert "defaults:" not in text


def test_a_task_of_ones_own_and_its_settings():
    text = train_help(["task=my.module:Robot", "task.settings.mass_kg=3"])
    assert "module:Class*" in text
    assert line(text, "task", "name").startswith("name: my.module:Robot ")
    assert "{mass_kg: 3}" in line(text, "task", "settings")
    assert "name: module:Class" in train_help(["task=custom"])
    assert line(train_help(["task.settings.new=3"]), "task", "new").startswith("new: 3 ")


def test_of_a_sweep_the_first_values():
    text = train_help(["seed=3,4", "task=pendulum,skill_chain", "reset=choice(synchronous,staggered)"])
    assert "Settings with task=pendulum reset=synchronous " in text
    assert line(text, "", "seed").startswith("seed: 3 ")


def test_what_is_unknown_is_named():
    with pytest.raises(ConfigError, match="did you mean 'skill_chain'"):
        train_help(["task=skil_chain"])


def test_a_task_that_brings_its_reset_rule():
    assert "Settings with task=isaacgym/Ant reset=random_clock" in train_help(["task=isaacgym/Ant"])
    assert "reset=synchronous algorithm" in train_help(["task=isaacgym/Ant", "reset=synchronous"])
