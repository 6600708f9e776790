"""When speculative decoding pays: the tokens that a step is expected to give, over what the step costs."""


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens of one verification step if each draft token is accepted with probability `acceptance`, the bonus token
    included: (1 - a^(k+1)) / (1 - a)."""
    if acceptance >= 1:
        return num_drafts + 1.0
    return float((1 - acceptance ** (num_drafts + 1)) / (1 - acceptance))


def speedup(acceptance: float, num_drafts: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Against plain decoding. `draft_cost`: seconds of one draft token, `verify_cost`: of a step that verifies, both as
    shares of a plain step."""
    return expected_tokens(acceptance, num_drafts) / (verify_cost + num_drafts * draft_cost)


def best_num_drafts(acceptance: float, draft_cost: float, most: int = 16) -> tuple[int, float]:
    """-> how many draft tokens pay best, and the speedup; (0, 1.0) where none does."""
    gains = [(speedup(acceptance, k, draft_cost), k) for k in range(1, most + 1)]
    gain, k = max(gains)
    return (k, gain) if gain > 1 else (0, 1.0)
