"""What the engine does next, as a pure function: ``schedule(state, events, now) -> Decision``.

No clock, no device, no I/O: the state is a frozen dataclass, the same state and events give the same plan.
``commit`` folds a step's output back into the state. Rules, in the order they are applied:

1. events: submissions queue up, aborts and failures end groups, pause and resume set the mode;
2. groups past their deadline end with what they have (``timeout``); while the engine sleeps no deadline comes
   nearer;
3. a pending swap happens once no live group is pinned and nobody holds the version; at its deadline it is
   dropped;
4. groups enter in order (pinned ones first while a swap waits for them), whole groups if they fit at all;
5. running slots decode, unless the engine is paused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_sync.inference.config import EngineConfig, bucket_of
from jaxrl_sync.inference.plan import FULL, RUNNING, STOPPED, Prefill, StepOutput, StepPlan
from jaxrl_sync.inference.prefill import Admission, build_prefills
from jaxrl_sync.inference.request import FinishReason, PauseMode, Request
from jaxrl_sync.transfer.version import Version

FREE = -1


@dataclasses.dataclass(frozen=True)
class Group:
    """A submitted request under the engine's own number ``uid``; ``deadline_s`` on the engine's clock."""

    uid: int
    request: Request
    deadline_s: float


@dataclasses.dataclass(frozen=True)
class Waiting:
    """The samples ``first, first + 1, ...`` of a group that have no slot yet."""

    group: Group
    first: int = 0


@dataclasses.dataclass(frozen=True)
class Submit:
    group: Group


@dataclasses.dataclass(frozen=True)
class End:
    """End these groups with what they have."""

    uids: frozenset[int]
    reason: FinishReason


@dataclasses.dataclass(frozen=True)
class EndAll:
    """End every group."""

    reason: FinishReason


@dataclasses.dataclass(frozen=True)
class Pause:
    mode: PauseMode


@dataclasses.dataclass(frozen=True)
class Resume:
    pass


@dataclasses.dataclass(frozen=True)
class Swap:
    """A version whose weights every rank has at hand; replaces one that still waits."""

    version: Version
    deadline_s: float


Event = Submit | End | EndAll | Pause | Resume | Swap


@dataclasses.dataclass(frozen=True)
class Finish:
    """Sample ``sample`` of group ``uid`` ended; ``slot`` is FREE when it never had one."""

    uid: int
    sample: int
    slot: int
    reason: FinishReason


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """The scheduler's memory. Arrays are ``[slots]`` and never written after construction.

    uid, sample: who has the slot (FREE: nobody). length: its tokens, prompt included. steps: decode steps
    so far. held_until_s: until then no swap happens (a client holds the version for a series of requests).
    asleep: nothing is admitted or decoded before the next swap; cold: nor is there a cache until then;
    slept_from_s: since then deadlines of groups stand still.
    """

    uid: np.ndarray
    sample: np.ndarray
    length: np.ndarray
    groups: Mapping[int, Group] = dataclasses.field(default_factory=dict)
    waiting: tuple[Waiting, ...] = ()
    paused: PauseMode | None = None
    swap: Swap | None = None
    held_until_s: float = -np.inf
    asleep: bool = False
    cold: bool = False
    slept_from_s: float = np.inf
    version: Version | None = None
    dispatches: int = 0
    steps: int = 0

    @property
    def running(self) -> int:
        """Slots in use."""
        return int(np.count_nonzero(self.uid != FREE))

    @property
    def pinned(self) -> bool:
        """Whether a group that is not over may only be served by the version of this moment."""
        return any(g.request.version is not None for g in self.groups.values())

    @property
    def standing(self) -> bool:
        """Whether a pause has taken effect, or the engine sleeps: nothing decodes."""
        return self.asleep or (self.paused is not None and (self.paused != "wait" or self.running == 0))

    @property
    def next_deadline_s(self) -> float:
        """The earliest deadline of any group or swap; infinity without one."""
        ends = [g.deadline_s for g in self.groups.values()]
        return min([*ends, self.swap.deadline_s if self.swap else np.inf], default=np.inf)


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """The next state, the plan, samples that ended without the device, and a swap that ran out of time.

    recompute: slots whose cache must be computed again after the plan's swap (``kv_policy = recompute``);
    their tokens are not the scheduler's, so the engine adds those prefills to the plan.
    """

    state: State
    plan: StepPlan
    finished: tuple[Finish, ...]
    admitted: tuple[int, ...]
    expired_swap: Swap | None
    recompute: tuple[int, ...]


def initial_state(config: EngineConfig) -> State:
    """All slots free, no version."""
    free = np.full(config.slots, FREE, np.int64)
    zero = np.zeros(config.slots, np.int64)
    return State(uid=free, sample=zero, length=zero)


def asleep(state: State, *, lost_cache: bool, since_s: float = np.inf) -> State:
    """The weights are gone until the next swap, and with ``lost_cache`` every slot's cache.

    From ``since_s`` on the time doesn't count for the deadlines of groups.
    """
    return dataclasses.replace(
        state,
        asleep=True,
        cold=state.cold or lost_cache,
        slept_from_s=min(state.slept_from_s, since_s),
    )


def _awake(state: State, now: float) -> State:
    """The engine has weights again: deadlines are later by as long as their groups have slept."""
    groups = {uid: _later(group, state.slept_from_s, now) for uid, group in state.groups.items()}
    return dataclasses.replace(state, asleep=False, cold=False, slept_from_s=np.inf, groups=groups)


def _later(group: Group, slept_from_s: float, now: float) -> Group:
    timeout_s = group.request.timeout_s
    if timeout_s is None or slept_from_s > now:
        return group
    since_s = max(slept_from_s, group.deadline_s - timeout_s)  # it may have come while the engine slept
    return dataclasses.replace(group, deadline_s=group.deadline_s + now - since_s)


def schedule(state: State, events: Sequence[Event], now: float, config: EngineConfig) -> Decision:
    """Decide one step; ``now`` in seconds on the clock of the deadlines."""
    finished: list[Finish] = []
    for event in events:
        state = _apply(state, event, finished)
    until = min(now, state.slept_from_s)
    late = frozenset(uid for uid, g in state.groups.items() if g.deadline_s <= until)
    state = _end(state, late, "timeout", finished) if late else state
    state, swap, expired = _decide_swap(state, now)
    recompute: tuple[int, ...] = ()
    if swap and (config.kv_policy == "recompute" or state.cold):
        recompute = tuple(np.flatnonzero(state.uid != FREE).tolist())
    if swap:
        state = _awake(state, now)
    admits = state.paused is None and not state.asleep
    state, admissions = _admit(state, config) if admits else (state, ())
    plan = _plan(state, build_prefills(admissions, config), swap, config)
    entered = tuple(a.uid for a in admissions if a.first_sample == 0)
    return Decision(state, plan, tuple(finished), entered, expired, recompute)


def commit(
    state: State, plan: StepPlan, output: StepOutput, version: Version | None
) -> tuple[State, tuple[Finish, ...]]:
    """Fold what the devices did into the state; ``version`` is what serves now."""
    drawn = np.count_nonzero(output.tokens >= 0, axis=0)
    ended = plan.active & (output.status != RUNNING) if plan.steps else np.zeros_like(plan.active)
    reasons: dict[int, FinishReason] = {STOPPED: "stop", FULL: "length"}
    finished = tuple(
        Finish(int(state.uid[s]), int(state.sample[s]), s, reasons[int(output.status[s])])
        for s in np.flatnonzero(ended).tolist()
    )
    uid = np.where(ended, FREE, state.uid)
    state = dataclasses.replace(
        state,
        uid=uid,
        length=state.length + drawn,
        version=version,
        dispatches=state.dispatches + 1,
        steps=state.steps + output.steps,
    )
    return _forget(state) if finished else state, finished


def _apply(state: State, event: Event, finished: list[Finish]) -> State:
    match event:
        case Submit(group):
            groups = {**state.groups, group.uid: group}
            return dataclasses.replace(state, groups=groups, waiting=(*state.waiting, Waiting(group)))
        case End(uids, reason):
            return _end(state, uids, reason, finished)
        case EndAll(reason):
            return _end(state, frozenset(state.groups), reason, finished)
        case Pause(mode):
            if mode == "abort":
                state = _end(state, frozenset(state.groups), "abort", finished)
            return dataclasses.replace(state, paused=mode)
        case Resume():
            return dataclasses.replace(state, paused=None)
        case Swap():
            return dataclasses.replace(state, swap=event)


def _end(state: State, uids: frozenset[int], reason: FinishReason, finished: list[Finish]) -> State:
    """Free the slots of these groups and forget them."""
    mine = np.isin(state.uid, np.fromiter(uids, np.int64, len(uids)))
    for s in np.flatnonzero(mine).tolist():
        finished.append(Finish(int(state.uid[s]), int(state.sample[s]), s, reason))
    for w in state.waiting:
        if w.group.uid in uids:
            rest = range(w.first, w.group.request.n)
            finished.extend(Finish(w.group.uid, i, FREE, reason) for i in rest)
    waiting = tuple(w for w in state.waiting if w.group.uid not in uids)
    return _forget(dataclasses.replace(state, uid=np.where(mine, FREE, state.uid), waiting=waiting))


def _forget(state: State) -> State:
    """Drop groups that have neither a slot nor a waiting sample."""
    live = set(state.uid.tolist()) | {w.group.uid for w in state.waiting}
    groups = {uid: g for uid, g in state.groups.items() if uid in live}
    return dataclasses.replace(state, groups=groups)


def _decide_swap(state: State, now: float) -> tuple[State, Version | None, Swap | None]:
    """The version to swap to in this step, and a swap that was dropped at its deadline."""
    swap = state.swap
    if swap is None:
        return state, None, None
    if swap.deadline_s <= now:
        return dataclasses.replace(state, swap=None), None, swap
    if now < state.held_until_s or state.pinned:
        return state, None, None
    return dataclasses.replace(state, swap=None), swap.version, None


def _admit(state: State, config: EngineConfig) -> tuple[State, tuple[Admission, ...]]:
    """Give slots to waiting groups in order. A group enters whole when it can ever fit whole."""
    free = np.flatnonzero(state.uid == FREE).tolist()
    queue = list(state.waiting)
    if state.swap is not None:
        queue.sort(key=lambda w: w.group.request.version is None)
    admissions: list[Admission] = []
    rest: list[Waiting] = []
    for place, w in enumerate(queue):
        wanted = w.group.request.n - w.first
        take = min(wanted, len(free))
        if take == 0 or (take < wanted and w.group.request.n <= config.slots):
            rest = queue[place:]
            break
        slots, free = free[:take], free[take:]
        admissions.append(Admission(w.group.uid, w.group.request, tuple(slots), w.first))
        if take < wanted:
            rest = [Waiting(w.group, w.first + take), *queue[place + 1 :]]
            break
    if not admissions:
        return state, ()
    uid, sample, length = state.uid.copy(), state.sample.copy(), state.length.copy()
    for a in admissions:
        at = list(a.slots)
        uid[at] = a.uid
        sample[at] = np.arange(a.first_sample, a.first_sample + len(at))
        length[at] = len(a.request.prompt)
    state = dataclasses.replace(state, uid=uid, sample=sample, length=length, waiting=tuple(rest))
    return state, tuple(admissions)


def _plan(
    state: State, prefills: tuple[Prefill, ...], swap: Version | None, config: EngineConfig
) -> StepPlan:
    active = state.uid != FREE
    steps = 0 if state.standing or not active.any() else config.decode_steps_per_dispatch
    longest = int(state.length[active].max()) + steps if steps else 1
    attend = bucket_of(min(longest, config.max_len), config.attend_buckets)
    return StepPlan(state.dispatches, active, steps, attend, prefills, swap)
