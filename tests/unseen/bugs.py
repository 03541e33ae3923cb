from dataclasses import dataclass, field
@dataclass(frozen=True)
class Bug:
    name: str
    causes: frozenset
    methods: dict
    decode: bool = False
    unlike: tuple = ()
BUGS=()
