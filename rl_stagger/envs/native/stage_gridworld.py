"""stage_gridworld: rooms in a row behind locked doors, so that late rooms are seen only late in an episode."""

from __future__ import annotations

import math
from typing import Any, Dict, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability, Discrete, EnvSpec, Obs
from rl_stagger.envs.native.base import NativeEnv, State

UP, DOWN, LEFT, RIGHT = range(4)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""(rows, columns) that each action moves; row 0 is at the top."""

PIXELS_PER_CELL = 16
COLOURS = {
    "wall": (45, 45, 55),
    "floor": (225, 225, 220),
    "locked_door": (190, 50, 40),
    "open_door": (150, 210, 150),
    "key": (245, 190, 30),
    "goal": (40, 160, 70),
    "agent": (40, 90, 220),
}


class StageGridworld(NativeEnv):
    """Action [N] int64: 0 up, 1 down, 2 left, 3 right; a move into a wall or a locked door leaves the agent in place.

    `num_rooms` rooms of `room_size` x `room_size` cells stand side by side. Every room but the last has a key, taken by
    stepping on it, and a door in its right wall: with the key, `right` from the cell before the door leads into the
    next room and the door falls shut behind. The last room has the goal, which ends the episode (terminated, success).
    Reward `key_reward` on taking a key, `door_reward` on passing a door, `goal_reward` at the goal, else 0. H = 200.
    Observation "policy" [N, 2 * room_size + num_rooms + 5]: one-hot row, one-hot column, one-hot room, key and exit
    (row, column) of this room in [0, 1] (key -1, -1 in the last room; its exit is the goal), 1 where the key is held.
    Log "room" is the room after the step, from 0.
    """

    capabilities = NativeEnv.capabilities | {Capability.RENDER}

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        horizon_steps: int = 200,
        num_rooms: int = 4,
        room_size: int = 5,
        key_reward: float = 0.1,
        door_reward: float = 0.2,
        goal_reward: float = 1.0,
        reset_noise: float = 0.0,
        layout_seed: int = 0,
    ) -> None:
        """`reset_noise`: probability that an episode begins at the entrance of a random room instead of the first.
        `layout_seed` fixes where keys, doors and goal are, whatever `seed` is."""
        for name, value, least in (("num_rooms", num_rooms, 1), ("room_size", room_size, 2)):
            if value < least:
                raise ValueError(f"{name}={value}: at least {least}")
        for name, value in (("key_reward", key_reward), ("door_reward", door_reward), ("goal_reward", goal_reward)):
            if not math.isfinite(value):
                raise ValueError(f"{name}={value}: a finite number")
        if not 0.0 <= reset_noise <= 1.0:
            raise ValueError(f"reset_noise={reset_noise}: a share between 0 and 1")
        self.num_rooms, self.room_size = num_rooms, room_size
        self.key_reward, self.door_reward, self.goal_reward = key_reward, door_reward, goal_reward
        self.reset_noise = reset_noise
        entrances, keys, exits = draw_layout(num_rooms, room_size, layout_seed)
        self.shortest_steps = shortest_solution_steps(entrances, keys, exits)
        if horizon_steps < self.shortest_steps:
            raise ValueError(f"horizon_steps={horizon_steps}: at least {self.shortest_steps}, the shortest solution")
        obs_size = 2 * room_size + num_rooms + 5
        super().__init__(EnvSpec({"policy": (obs_size,)}, Discrete(len(MOVES)), horizon_steps), num_envs, device, seed)
        self.entrances, self.keys, self.exits = (t.to(self.device) for t in (entrances, keys, exits))
        self.moves = torch.tensor(MOVES, device=self.device)
        self.one_hot_cell = torch.eye(room_size, device=self.device)
        scaled = torch.cat([keys, exits], dim=1).float() / (room_size - 1)
        scaled[-1, :2] = -1.0
        self.room_features = torch.cat([torch.eye(num_rooms), scaled], dim=1).to(self.device)

    def _start(self) -> State:
        random_room = (self._rand() * self.num_rooms).long().clamp(max=self.num_rooms - 1)
        room = torch.where(self._rand() < self.reset_noise, random_room, 0)
        return {"room": room, "cell": self.entrances[room], "has_key": torch.zeros_like(room, dtype=torch.bool)}

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        room, cell, has_key = state["room"], state["cell"], state["has_key"]
        last_room = room == self.num_rooms - 1
        passed = has_key & (action == RIGHT) & (cell == self.exits[room]).all(dim=1) & ~last_room
        next_room = room + passed
        inside = (cell + self.moves[action]).clamp(0, self.room_size - 1)
        next_cell = torch.where(passed.unsqueeze(1), self.entrances[next_room], inside)
        took_key = ~has_key & (next_cell == self.keys[room]).all(dim=1)
        at_goal = last_room & (next_cell == self.exits[room]).all(dim=1)
        reward = self.key_reward * took_key.float() + self.door_reward * passed + self.goal_reward * at_goal
        after = {"room": next_room, "cell": next_cell, "has_key": (has_key | took_key) & ~passed}
        return after, reward, at_goal, {"success": at_goal.clone(), "log": {"room": next_room.float()}}

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        cell = state["cell"]
        parts = [
            self.one_hot_cell[cell[:, 0]],
            self.one_hot_cell[cell[:, 1]],
            self.room_features[state["room"]],
            state["has_key"].float().unsqueeze(1),
        ]
        return {"policy": torch.cat(parts, dim=1)}

    def render(self, env_index: int = 0) -> Tensor:
        """All rooms of environment `env_index` from above, [16 * (s + 2), 16 * (num_rooms * (s + 1) + 1), 3] uint8,
        s = room_size. Colours are those of `COLOURS`; keys that were taken are gone."""
        size, rooms = self.room_size, self.num_rooms
        room, (row, column) = int(self.state["room"][env_index]), self.state["cell"][env_index].tolist()
        has_key = bool(self.state["has_key"][env_index])
        keys, exits = self.keys.tolist(), self.exits.tolist()
        picture = torch.empty(size + 2, rooms * (size + 1) + 1, 3, dtype=torch.uint8)
        picture[:] = _colour("wall")
        for r in range(rooms):
            left = r * (size + 1) + 1
            picture[1 : size + 1, left : left + size] = _colour("floor")
            if r == rooms - 1:
                picture[exits[r][0] + 1, left + exits[r][1]] = _colour("goal")
                continue
            opened = r < room or (r == room and has_key)
            picture[exits[r][0] + 1, left + size] = _colour("open_door" if opened else "locked_door")
            if not opened:
                picture[keys[r][0] + 1, left + keys[r][1]] = _colour("key")
        picture[row + 1, room * (size + 1) + 1 + column] = _colour("agent")
        return picture.repeat_interleave(PIXELS_PER_CELL, dim=0).repeat_interleave(PIXELS_PER_CELL, dim=1)


def draw_layout(num_rooms: int, room_size: int, layout_seed: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(entrances, keys, exits), each [num_rooms, 2] int64 (row, column), drawn from `layout_seed` on the CPU.

    An exit is the cell before the door; the next room's entrance is the same row's first cell. The last room's exit is
    the goal and its key is at (-1, -1), where no agent comes. Neither key nor goal is at an entrance.
    """
    layout = torch.Generator().manual_seed(layout_seed)
    door_rows = torch.randint(room_size, (num_rooms + 1,), generator=layout)
    entrances = torch.stack([door_rows[:-1], torch.zeros_like(door_rows[:-1])], dim=1)
    exits = torch.stack([door_rows[1:], torch.full_like(door_rows[1:], room_size - 1)], dim=1)
    # Cell numbers counted from the entrance, 1 to s^2 - 1 and round the corner, miss the entrance itself.
    steps_on = torch.randint(1, room_size**2, (num_rooms,), generator=layout)
    cells = (entrances[:, 0] * room_size + steps_on) % room_size**2
    keys = torch.stack([torch.div(cells, room_size, rounding_mode="floor"), cells % room_size], dim=1)
    exits[-1], keys[-1] = keys[-1].clone(), -1
    return entrances, keys, exits


def shortest_solution_steps(entrances: Tensor, keys: Tensor, exits: Tensor) -> int:
    """Steps from the first entrance over all keys and doors to the goal; arguments as `draw_layout` returns them."""
    to_key = (keys - entrances)[:-1].abs().sum()
    key_to_exit = (exits - keys)[:-1].abs().sum()
    to_goal = (exits - entrances)[-1].abs().sum()
    return int(to_key + key_to_exit + to_goal) + len(keys) - 1


def _colour(name: str) -> Tensor:
    return torch.tensor(COLOURS[name], dtype=torch.uint8)
