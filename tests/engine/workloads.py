"""Random days of a scheduler: who asks for what and when, and how tight the pool is."""

import dataclasses
from random import Random

from pagedjax.scheduler_config import SchedulerConfig

NO_WINDOW = 2**30
NUM_TOKENS = 2  # of the vocabulary, so that continuations meet by chance


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a simulated day.

    Attributes:
      root: "shared", "private" or None, see `Sequence.root`.
      sets_slot_up: the device has to be told of it when it gets a slot.
      abort_step, abort_sample_step: when it, or one of its sequences, is aborted.
    """

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    width: int = 1
    is_beam_search: bool = False
    priority: int = 0
    root: str | None = "shared"
    wants_prompt_logprobs: bool = False
    sets_slot_up: bool = False
    abort_step: int | None = None
    abort_sample_step: int | None = None


@dataclasses.dataclass(frozen=True)
class Workload:
    """A day.

    Attributes:
      swap: "always", "never" or "random".
      update_steps: when the weights change. reset_steps: when the prefix cache is emptied.
      num_in_flight: steps that are dispatched before the results of the one before are taken.
    """

    config: SchedulerConfig
    num_blocks: int
    num_host_blocks: int
    arrivals: list[Arrival]
    swap: str = "never"
    seed: int = 0
    update_steps: frozenset[int] = frozenset()
    reset_steps: frozenset[int] = frozenset()
    num_in_flight: int = 0


def random_workload(random: Random) -> Workload:
    """Small pools and prompts that begin alike, so that everything happens within a few steps."""
    max_num_seqs = random.choice([1, 2, 4, 6, 8])
    windows = [NO_WINDOW] * (random.random() < 0.85)
    windows += [random.choice([1, 2, 3, 6, 12]) for _ in range(random.randint(0, 2))]
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + random.choice([0, 0, 1, 3, 10, 30]),
        max_model_len=random.choice([9, 20, 32, 32]),
        block_size=random.choice([1, 1, 2, 3, 4, 5]),
        windows=tuple(windows) or (3,),
        offload_evicted=random.random() < 0.5,
        num_decode_steps=random.choice([1, 1, 2, 3, 8]),
    )
    is_crowd = random.random() < 0.7  # everybody comes at once and stays long
    widths = random.choice([[1], [1, 2], [2], [1, 3], [1, 2, 3, 4]])
    arrivals = [
        _random_arrival(random, config, random.choice(widths), is_crowd)
        for _ in range(random.randint(2, 14))
    ]
    arrivals.sort(key=lambda arrival: arrival.step)
    # Room for the largest and little more: nearly every step has to make some.
    need = max(worst_case(config, len(a.prompt), a.max_tokens, a.width) for a in arrivals)
    rare = random.random() < 0.2
    return Workload(
        config,
        num_blocks=max(2, need + random.choice([0, 1, 1, 1, 2, 3, need // 2, need])),
        num_host_blocks=random.choice([1, 3, 6, 12, 30, 100]),
        arrivals=arrivals,
        swap=random.choice(["always", "never", "random"]),
        seed=random.randrange(2**32),
        update_steps=frozenset([random.randint(0, 40)] * rare),
        reset_steps=frozenset([random.randint(0, 40)] * rare),
        num_in_flight=random.choice([0, 1, 1, 2]),
    )


def _random_arrival(random: Random, config: SchedulerConfig, width: int, is_crowd: bool) -> Arrival:
    longest = config.max_model_len - 1
    common = random.choice([[0], [1, 0]]) * longest
    prompt = common[: random.randint(0, random.choice([5, longest]))]
    prompt += [random.randrange(NUM_TOKENS) for _ in range(random.randint(0, 6))]
    aborts = [random.choice([None] * 5 + [random.randint(0, 60)]) for _ in range(2)]
    return Arrival(
        step=random.choice([0, 0, 1, 2] if is_crowd else [0, 1, 3, 6, 15]),
        prompt=tuple(prompt[:longest]) or (0,),
        max_tokens=24 if is_crowd else random.randint(1, 24),
        width=width,
        is_beam_search=random.random() < 0.5,
        priority=random.choice([0, 0, 0, 0, 1, -1]),
        root=random.choice(["shared"] * 4 + ["private", "private" if width > 1 else None]),
        wants_prompt_logprobs=random.random() < 0.2,
        sets_slot_up=random.random() < 0.3,
        abort_step=aborts[0],
        abort_sample_step=aborts[1],
    )


def worst_case(config: SchedulerConfig, prompt_len: int, max_tokens: int, width: int) -> int:
    """Blocks of a request whose sequences all run to the end, by listing them.

    The last token is never stored. Where several sequences run, they share the full blocks of the
    prompt; what no token sees any more is given back.
    """
    size = config.block_size
    stored = range(min(prompt_len + max_tokens, config.max_model_len) - 1)
    shared = {i for i in range(prompt_len // size) if width > 1}
    owned = {
        (i if i in shared else (sequence, i))
        for sequence in range(width)
        for i in {position // size for position in stored}
    }
    need = 0
    for window in config.windows:
        seen = [{p // size for p in range(max(0, q - window + 1), q + 1)} for q in stored]
        need += min(len(owned), width * max(map(len, seen), default=0))
    return need
