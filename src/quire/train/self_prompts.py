"""Prompts without a file: a user's message is begun with a few words, and the model itself goes on with it."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.api.llm import LLM
from quire.core.params import SamplingParams

MESSAGE_TOKENS = 40
OPENINGS = (
    "What is", "How do I", "Why does", "Can you explain", "Write a short story about", "Explain how", "Tell me about",
    "Give me a list of", "Write a poem about", "What are the main causes of", "How can I improve", "Describe",
    "Write a Python function that", "Summarize the following text:", "What is the difference between",
    "I need help with", "Who was", "Write an email to", "Compare", "Suggest", "What happened", "How many", "Where is",
    "Create a plan for", "Is it true that", "What should I", "Help me understand", "Write a recipe for", "When did",
    "Rewrite this sentence:", "Give an example of", "What are some", "My", "The", "Please", "Imagine", "Do you know",
    "Translate", "Write a JSON object with", "Solve:",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SelfPrompts:
    """Prompts that the model writes itself: the same seed gives the same ones."""

    llm: LLM
    seed: int
    max_length: int

    def prompts(self, first: int, count: int) -> list[list[int]]:
        """Prompts number `first` .. `first + count`, less those that are too long or empty."""
        openings = [OPENINGS[number % len(OPENINGS)] for number in range(first, first + count)]
        params = [
            SamplingParams(temperature=1.0, top_p=0.95, max_tokens=MESSAGE_TOKENS, stop=["\n"], seed=self.seed + number)
            for number in range(first, first + count)
        ]
        made = self._chat(openings, params) if self.llm.tokenizer.chat_template else self._plain(openings, params)
        return [prompt for prompt in made if len(prompt) <= self.max_length]

    def _plain(self, openings: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        outputs = self.llm.generate(list(openings), params, use_tqdm=False)
        ends = self.llm.tokenizer.eos_ids
        return [
            [*output.prompt_token_ids, *(token for token in output.outputs[0].token_ids if token not in ends)]
            for output in outputs
        ]

    def _chat(self, openings: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        begun = [[{"role": "user", "content": opening}] for opening in openings]
        outputs = self.llm.chat(
            begun, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
        )  # fmt: skip
        texts = [opening + output.outputs[0].text for opening, output in zip(openings, outputs, strict=True)]
        return [self._rendered(text.rstrip()) for text in texts]

    def _rendered(self, text: str) -> list[int]:
        message = {"role": "user", "content": text}
        ids = self.llm.tokenizer.apply_chat_template([message], add_generation_prompt=True)
        assert isinstance(ids, list)
        return ids
