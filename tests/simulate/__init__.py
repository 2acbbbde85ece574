"""The planner of drafts in virtual time: scripted machines and acceptance, real decisions. See README.md."""
