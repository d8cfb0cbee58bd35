"""One call: plan, train, evaluate, write a run folder."""
