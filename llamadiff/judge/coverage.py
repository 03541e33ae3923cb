"""How many of a prompt's tokens are looked at in which way. Nothing is imported for it."""

LEAST = 33  # tokens whose products are verified by sketch: fewer are multiplied as soon as combined
COUNT = 16  # combinations of a span's rows, and of all channels, that a product is verified by
SPAN = 1024  # rows that are combined at most: a single wrong value stands out the more, the fewer they are
SEED = 1
BEGINNING = 8  # tokens of a long prompt that the free run covers


def free_tokens(n: int) -> int:
    """Over how many of a prompt's tokens the engine runs free, beside the replay of all."""
    return n if n < LEAST else BEGINNING
