"""`slipstream plan` and `slipstream profile`: what a model would take, where the time goes."""
