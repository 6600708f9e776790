"""What the scheduler is told of speculative decoding: the methods that propose drafts, and what is fixed by options."""

from dataclasses import dataclass

ANY_METHOD = "draft"
CPU_TOKEN_COST = 0.4  # of one more token, as a fraction of a step of one token, until steps have been measured
MAX_IDLE = 8  # steps in a row whose drafts did not pay, after which they are looked for less often
IDLE_INTERVAL = 4  # steps from one time to the next: to look takes the host time
GPU_TOKEN_COST = 0.006  # an H200: 3.8 ms for one token of Llama-3.1-8B's shape, 9.6 for 256


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """One method: how many drafts it proposes, and what is believed of it until it is measured."""

    name: str = ANY_METHOD
    max_tokens: int = 5  # draft tokens of one sequence in one step
    acceptance: float = 0.5  # of a draft token
    cost: float = 0.0  # seconds of one draft token, as a fraction of a step of one token; 0: it is free
    tree_nodes: int = 0  # draft tokens of a tree, which a quota of more than `max_tokens` asks for; 0: chains only
    tree_steps: tuple[int, ...] = ()  # what its own steps compute for one tree, in tokens
    reads_along: bool = False  # it reads hidden states, which are there only while the target computes

    @property
    def is_free(self) -> bool:
        """Whether it proposes as much as it likes: one that is not free is asked."""
        return self.cost == 0.0


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    methods: tuple[DraftMethod, ...] = (DraftMethod(),)
    token_cost: float = CPU_TOKEN_COST
    per_batch_size: tuple[tuple[int, int, int], ...] = ()  # (from, to, draft tokens) sequences of a step: no choice
    synthetic: bool = False  # drafts are accepted by chance: only those that were verified teach anything
    step_seconds: tuple[tuple[int, float], ...] = ()  # sizes of steps and their seconds, where they were measured

    def fixed_length(self, batch_size: int) -> int | None:
        """The number of draft tokens that options demand; None: it is chosen."""
        if not self.per_batch_size:
            return None
        return next((count for low, high, count in self.per_batch_size if low <= batch_size <= high), 0)
