"""The step loop: who runs this step, the pass, and what each slot keeps of it."""
