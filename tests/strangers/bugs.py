from strangers.engine import Bug
BUGS: dict[str, Bug] = {}
