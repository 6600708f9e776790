"""What serving costs: from tokens a second to dollars."""

from dataclasses import dataclass

from quire.core.errors import BadRequest

_DAY = 86400


@dataclass(frozen=True, slots=True)
class Cost:
    """What tokens cost on `num_devices` that together compute so many a second."""

    price: float  # an hour of one device
    num_devices: int
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    output_weight: float = 4.0  # an output token counts as this many prompt tokens when the price is divided

    def __post_init__(self) -> None:
        if self.price < 0:
            raise BadRequest(f"price is {self.price}", "it must be at least 0", param="price")

    @property
    def per_hour(self) -> float:
        return self.price * self.num_devices

    @property
    def per_day(self) -> float:
        return 24 * self.per_hour

    @property
    def per_million_prompt(self) -> float:
        weighted = self.prompt_tokens_per_second + self.output_weight * self.output_tokens_per_second
        return self.per_day / (weighted * _DAY) * 1e6 if weighted else 0.0

    @property
    def per_million_output(self) -> float:
        return self.output_weight * self.per_million_prompt
