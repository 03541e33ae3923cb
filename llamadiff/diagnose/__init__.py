"""Why a tap is wrong: known bugs, replayed on what the candidate recorded."""
