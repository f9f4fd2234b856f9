"""Evaluation of a model, in a run or by the command `eval`: bits per byte, CORE, chat tasks, samples."""
