"""Numbers as people read them."""


def counted(number: float, noun: str) -> str:
    """1 user, 1,000 users."""
    return f"{figure(number)} {noun}{'s' * (number != 1)}"


def figure(number: float, digits: int = 4) -> str:
    """With so many digits at least, and never as a power of ten."""
    return f"{number:,.0f}" if number >= 10 ** (digits - 1) else f"{number:.{digits}g}"
