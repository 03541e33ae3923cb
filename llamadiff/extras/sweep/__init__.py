"""Many cases: models, prompts, candidates and settings, each judged once, whatever is killed meanwhile."""
