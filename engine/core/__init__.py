"""The step loop: which slots run in a step, the pass over them, and what each slot keeps of it."""
